"""First use of a deferred tensor outside of a capture: its module is materialized, with a warning.

A forward pass, a collective, an optimizer's step or saving a state dict needs values. Then the whole module that the
tensor belongs to is materialized, once, instead of what each operation happens to need. Operations that only initialize
(fills, copies, arithmetic among deferred tensors) are recorded as in a capture, and reading a value (`item()`, `print`,
`numpy()`) computes only that one.

Autograd saves its tensors before an operation reaches the dispatcher, and would send gradients to the deferred ones, so
they have to become real earlier. Between a capture and its materialization, and longer where there are other threads,
PyTorch's functions run through `_first_use_mode`: it calls a function again if it turns out to need values, and lets no
other thread use deferred tensors meanwhile. If an operation arrives in another way (from C++), the tensors are
*computed*: their values are computed, but they remain deferred until an operation without gradients, such as an
optimizer's step, can make them real.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..compat.torch_names import (
    MODULE_TABLES,
    DisableTorchFunctionSubclass,
    base_of,
    buffers_of,
    current_graph_task_id,
    is_parameter,
    parameters_of,
)
from ..errors import NotMaterializedWarning
from ..program.source import here, script_line, warn
from . import distributed, session
from .direct_memory_access import is_unallocated
from .evaluation import call_with_content, run_now, state_of
from .op_call import OpCall
from .tensor import DeferredStorage, DeferredTensor, Hooks, becoming_real, is_in_file, is_pending

_COLLECTIVES = distributed.COLLECTIVES


def needs_values(call: OpCall) -> bool:
    """Whether a call outside of a capture is more than initialization."""
    if not call.deferred or call.traits.view or call.on_meta or all(map(is_in_file, call.deferred)):
        return False
    if any(t._storage.is_computed for t in call.deferred) or call.traits.opaque or call.op.namespace in _COLLECTIVES:
        return True
    written = call.written()
    if any(type(t) is not DeferredTensor for t in written):
        return True
    if call.traits.fill:  # such as loading a weight
        return False
    if _in_backward():
        return True
    return any(t.dim() > 0 and not t.is_meta for t in call.real)


def _in_backward() -> bool:
    return current_graph_task_id() != -1


def _is_tracked(call: OpCall) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in call.deferred)


def run(call: OpCall) -> Any:
    """Materialize the modules that the call's tensors belong to, and run it."""
    if getattr(_this_thread, "in_torch_function", False):
        raise _NeedsValues([t._storage for t in call.deferred], str(call.op))
    in_autograd = _is_tracked(call) or _in_backward()
    storages = _materialize_modules([t._storage for t in call.deferred], str(call.op), keep=in_autograd)
    if in_autograd:
        Hooks.compute(storages)
        return run_now(call) if call.written() else call_with_content(call)
    for tensor in call.deferred:
        Hooks.materialize(tensor)
    return call_with_content(call)


def materialize(tensor: Any) -> torch.Tensor:
    """Materialize `tensor` and its module, because its memory is accessed."""
    with becoming_real:
        if is_pending(tensor) and not is_in_file(tensor):
            _materialize_modules([tensor._storage], "its memory", keep=False)
        return Hooks.materialize(tensor)


class _NeedsValues(Exception):
    """A function called by `_first_use_mode` needs the content of `storages`."""

    def __init__(self, storages: list[DeferredStorage], reader: str) -> None:
        super().__init__(reader)
        self.storages = storages
        self.reader = reader


# `in_torch_function`: whether `_first_use_mode` is active; `in_step`: whether a step runs that is not compiled
_this_thread = threading.local()


def _first_use_mode(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call `func`; if it needs values, materialize them before autograd sees the tensors, and call it again."""
    with DisableTorchFunctionSubclass():
        kwargs = kwargs or {}
        if session.depth or session.trace is not None or next(_deferred_in((args, kwargs)), None) is None:
            return _call(func, args, kwargs)
        with becoming_real:
            return _first_use(func, args, kwargs)


def _first_use(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `_first_use_mode`, for a tensor that may become real; no other thread uses one meanwhile."""
    plain = isinstance(func, _ATTRIBUTE) or not torch.is_grad_enabled()
    if plain or getattr(_this_thread, "in_torch_function", False):
        return _call(func, args, kwargs)
    tracked = [t for t in _deferred_in((args, kwargs)) if t.requires_grad]
    # Tensors computed from weights would lose their history by becoming real.
    if not tracked or any(not t.is_leaf and base_of(t) is None for t in tracked):
        return _call(func, args, kwargs)
    state = torch.default_generator.get_state()
    _this_thread.in_torch_function = True
    try:
        return _call(func, args, kwargs)
    except _NeedsValues as need:
        needed = need
    finally:
        _this_thread.in_torch_function = False
    torch.default_generator.set_state(state)  # the second call repeats its draws
    if not any(state_of(storage).pending for storage in needed.storages):
        return _call(func, args, kwargs)  # computed for an operation that autograd has seen: gradients flow to these
    _materialize_modules(needed.storages, needed.reader, keep=False)
    return _first_use(func, args, kwargs)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func`; if it accesses memory without the dispatcher, materialize its tensors and call it again."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        pending = list(_deferred_in((args, kwargs)))
        if session.depth or session.trace is not None or not pending or not is_unallocated(error):
            raise
    for tensor in pending:
        materialize(tensor)
    return func(*args, **kwargs)


_ATTRIBUTE = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined]


def _deferred_in(args: Any) -> Iterator[DeferredTensor]:
    for arg in args.values() if isinstance(args, dict) else args:
        if type(arg) is DeferredTensor:
            if is_pending(arg):
                yield arg
        elif isinstance(arg, (list, tuple, dict)):
            yield from _deferred_in(arg)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Run a step's Python, where weights are expected to be made by their first use: without a warning."""
    before = getattr(_this_thread, "in_step", False)
    _this_thread.in_step = True
    try:
        yield
    finally:
        _this_thread.in_step = before


def _materialize_modules(storages: list[DeferredStorage], reader: str, keep: bool) -> list[DeferredStorage]:
    """Materialize the modules that `storages` belong to, with a warning.

    Args:
        reader: what needs the values.
        keep: compute nothing yet, and leave the tensors deferred.

    Returns:
        All storages to be computed.
    """
    with becoming_real:  # another thread may have done so, or do so now
        return _materialize_pending([s for s in dict.fromkeys(storages) if state_of(s).pending], reader, keep)


def _materialize_pending(pending: list[DeferredStorage], reader: str, keep: bool) -> list[DeferredStorage]:
    requested = list(pending)
    for module in _modules_of(pending):
        tensors = list(_tensors_below(module))
        module_storages = list(dict.fromkeys(t._storage for t in tensors if is_pending(t)))
        requested.extend(module_storages)
        if getattr(_this_thread, "in_step", False):
            continue
        nbytes = sum(storage.value.nbytes for storage in module_storages)
        caller, line = here(), script_line()
        within = "" if caller == line else f" (in {caller})"
        warn(
            NotMaterializedWarning(
                f"{line}: {reader}{within} needs values of a {type(module).__name__} that is still deferred. All of "
                f"its {len(module_storages)} weights and buffers ({nbytes:,} bytes) are materialized now. Call "
                "firstloss.materialize_module(model), with the device that it is for, before the model is used."
            )
        )
    requested = list(dict.fromkeys(requested))
    if not keep:
        Hooks.materialize_storages(requested)
    return requested


def _tensors_below(module: torch.nn.Module) -> Iterator[DeferredTensor]:
    for sub in module.modules():
        for attribute in (*parameters_of(sub).values(), *buffers_of(sub).values(), *vars(sub).values()):
            if isinstance(attribute, torch.Tensor):
                for part in distributed.parts_of(attribute):
                    if type(part) is DeferredTensor:
                        yield part


_last_search: tuple[float, float] = (0.0, 0.0)  # when the last search without result ended, and its duration


def _modules_of(storages: list[DeferredStorage]) -> list[torch.nn.Module]:
    """The outermost modules that hold `storages`, or the Values that these are computed from."""
    global _last_search
    begin = time.monotonic()
    is_weight = any(is_parameter(t) for storage in storages for t in storage.alive())
    if not storages or not is_weight and begin < _last_search[0] + 10 * _last_search[1]:
        return []  # a search for each of many separate tensors would be slow
    modules = [holders for holders in gc.get_objects() if issubclass(type(holders), torch.nn.Module)]
    children = {id(child) for module in modules for child in _children(module)}
    values = sources(storages)
    roots = [module for module in modules if id(module) not in children and _is_initialized(module)]
    holders = [module for module in roots if any(t._storage.value in values for t in _tensors_below(module))]
    if not holders:
        _last_search = time.monotonic(), time.monotonic() - begin
    return holders


def _is_initialized(module: torch.nn.Module) -> bool:
    """Whether `Module.__init__` has run."""
    return all(name in module.__dict__ for name in MODULE_TABLES)


def _children(module: torch.nn.Module) -> Iterable[Any]:
    return [child for child in module.__dict__.get("_modules", {}).values() if child is not None]


def sources(storages: list[DeferredStorage]) -> set[Any]:
    """The Values of `storages`, and all that they are computed from."""
    visited, stack = set(), [storage.value for storage in storages]
    while stack:
        value = stack.pop()
        if value not in visited:
            visited.add(value)
            if value.node is not None:
                stack.extend(ref.value for ref in (*value.node.refs(), *value.node.writes))
    return visited


Hooks.register(first_use=_first_use_mode)
