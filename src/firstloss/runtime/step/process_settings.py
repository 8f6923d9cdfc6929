"""Process settings on which a step depends, such as grad mode and autocast, and those that it changes."""

from __future__ import annotations

import decimal
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ... import interpreter
from ...amp.precision import current as precision
from ...compat.patches import unreplaced
from ...compat.torch_names import (
    dispatch_modes_count,
    get_current_dispatch_mode_stack,
    get_current_function_mode_stack,
    global_device_context,
    saved_tensor_hooks,
    set_grad_enabled,
    settings_of_torch,
)
from ...errors import NotTraceableError
from ...program.source import here


def _default_device() -> torch.device | None:
    """The argument of `torch.set_default_device`; `torch.get_default_device` does not distinguish None from the CPU."""
    context = getattr(global_device_context, "device_context", None)  # thread-local
    return None if context is None else context.device


# How each mode is read and set. Inference mode and PyTorch's function modes, such as `torch.device`, are not included:
# they are set only by contexts, which end.
_MODES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (lambda: precision.half, lambda half: setattr(precision, "half", half)),
    (lambda: precision.mixed, lambda mixed: setattr(precision, "mixed", mixed)),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.is_grad_enabled, set_grad_enabled),
)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been deleted
        return None


def _numpy_errors() -> tuple[Any, ...]:
    call = np.geterrcall()
    if call is not None and unreplaced(call) is not call:  # `print`, set in a trace
        np.seterrcall(call := unreplaced(call))
    return *np.geterr().items(), ("call", call)


def _set_numpy_errors(errors: tuple[Any, ...]) -> None:
    now = dict(errors)
    np.seterrcall(now.pop("call"))
    np.seterr(**now)


def _decimals() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax, *context.traps.values()


def _set_decimals(values: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    context.prec, context.rounding, context.Emin, context.Emax, *traps = values
    for signal, trapped in zip(context.traps, traps, strict=True):
        context.traps[signal] = trapped


def _leave(_: Any) -> None:
    """Nothing to set: a context restores it."""


# How other settings are read and set: they do not affect tensors by themselves, but may be read by the step's Python
# code, or by PyTorch, NumPy and Python on its behalf.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    *settings_of_torch(),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (interpreter.switch_interval.get, interpreter.switch_interval.set),
    (interpreter.is_collecting, interpreter.set_collecting),
    (interpreter.gc_thresholds.get, interpreter.gc_thresholds.set),
    (gc.get_debug, gc.set_debug),
    (_folder, os.chdir),
    (_numpy_errors, _set_numpy_errors),
    (_decimals, _set_decimals),
    (interpreter.is_handling, _leave),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
)


def settings() -> tuple[Any, ...]:
    """The current settings, other than modes, that a step's Python code may read."""
    try:
        return tuple([read() for read, _ in _SETTINGS])
    except RuntimeError:  # PyTorch raises if precisions are set through both its APIs
        return tuple([_tried(read) for read, _ in _SETTINGS])


def _tried(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def modes() -> tuple[Any, ...]:
    """The current modes, which are part of a compiled step's key."""
    regions = tuple([getattr(mode, "device", type(mode)) for mode in get_current_function_mode_stack()])
    return (*[read() for read, _ in _MODES], torch.is_inference_mode_enabled(), regions)


def refuse_watchers(name: str) -> None:
    """Check that nothing observes the operations of the step `name` from outside.

    Raises:
        NotTraceableError: if a mode or hooks are active that would see the step's operations in eager PyTorch, but
            cannot when it is compiled.
    """
    if dispatch_modes_count():
        kinds = [type(mode) for mode in get_current_dispatch_mode_stack()]
        foreign = [kind for kind in kinds if not kind.__module__.startswith("firstloss.")]
        if foreign:
            raise NotTraceableError(
                f"{here()}: a {foreign[-1].__name__} is active around the traced step {name}. It would see none of the "
                "step's operations, which are compiled. Use it inside the step, or around a call on backend 'CPU'."
            )
    hooks = saved_tensor_hooks(True)
    if hooks is not None and not getattr(hooks[0], "__qualname__", "").startswith("save_on_cpu."):  # changes no values
        raise NotTraceableError(
            f"{here()}: saved_tensors_hooks are active around the traced step {name}. They would see none of the "
            "tensors that it saves for its backward pass. Use them inside the step."
        )


class ModesLeft:
    """The settings that a traced step has changed and not restored, which later calls set."""

    def __init__(self) -> None:
        """To be created before the step is traced."""
        self._before = _all()
        self._left: list[tuple[Callable[[Any], Any], Any]] = []

    def traced(self) -> None:
        """Record the settings after the trace."""
        settings = zip(_ALL, self._before, _all(), strict=True)
        self._left = [(write, after) for (_, write), before, after in settings if after != before]

    def undo(self) -> None:
        """Restore the settings before the trace."""
        for (_, write), before, now in zip(_ALL, self._before, _all(), strict=True):
            if now != before:
                write(before)

    def leave(self) -> None:
        """Set the modes, after a call, that the step's Python code would leave."""
        for write, after in self._left:
            write(after)


_ALL = (*_MODES, *_SETTINGS)


def _all() -> tuple[Any, ...]:
    return (*modes()[: len(_MODES)], *settings())
