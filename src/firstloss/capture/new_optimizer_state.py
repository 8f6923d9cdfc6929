"""Find the state that an optimizer creates in its first step, by rehearsing that step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import TraceError
from ..program.graph import Value
from ..program.source import here
from . import recorder
from .recorder import DeferredTensor
from .step import StepTrace, is_traced

aten = torch.ops.aten


class FirstStepDiffers(Exception):
    """An optimizer initializes its state from values that only its first step has."""


def find_new_state(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any]
) -> dict[tuple[torch.Tensor, str], DeferredTensor]:
    """Create the state tensors that `optimizer` creates in its first step, with their initial values.

    `step` is traced once as a rehearsal: its effects on weights and state are discarded, but the tensors that it adds
    to `optimizer.state` remain there, with their initial values.

    Raises:
        FirstStepDiffers: if the state is initialized from a weight or a gradient, or with an object or a number that
            the step changes; `optimizer.state` is restored.
    """
    old_state = {p: dict(entries) for p, entries in optimizer.state.items()}
    numbers = _python_state(optimizer)
    rehearsal = StepTrace()
    try:
        with rehearsal.active():
            step()
        new_numbers = _python_state(optimizer)
        counts = _changes(optimizer, numbers, new_numbers)
        new_state = _new_state(optimizer, old_state, rehearsal)
        for entry in new_state.values():
            entry._storage.trace = None
        if not counts and new_numbers.keys() - numbers.keys():  # constant, if another step does not change them
            with StepTrace().active():
                step()
            counts = _changes(optimizer, new_numbers, _python_state(optimizer))
            _restore_state(optimizer, new_state)
        if counts and len(new_numbers) > len(numbers):
            raise FirstStepDiffers  # the initial count is unknown
        for parameter, key in numbers:
            optimizer.state[parameter][key] = old_state[parameter][key]
    except BaseException:
        for parameter, entries in list(optimizer.state.items()):
            entries.clear()
            entries.update(old_state.get(parameter, {}))
            if parameter not in old_state:
                del optimizer.state[parameter]
        raise
    return new_state


def _new_state(
    optimizer: torch.optim.Optimizer, old_state: dict[torch.Tensor, dict[str, Any]], rehearsal: StepTrace
) -> dict[tuple[torch.Tensor, str], DeferredTensor]:
    new_state: dict[tuple[torch.Tensor, str], DeferredTensor] = {}
    for parameter, entries in optimizer.state.items():
        before = old_state.get(parameter, {})
        for key, entry in list(entries.items()):
            if any(is_traced(part, rehearsal) for part in _parts(entry) if part is not entry):
                raise TraceError(
                    f"{here()}: {type(optimizer).__name__} creates tensors in its first step() and stores them in "
                    f"state[{key!r}], a {type(entry).__name__}. Store each under a key of its own: "
                    f"state['{key}_0'] = torch.zeros(...)."
                )
            if key in before:
                entries[key] = before[key]  # the rehearsal may have replaced it
                continue
            if not is_traced(entry, rehearsal):
                # A gradient or a weight itself, or an object, which may hold tensors of the rehearsal.
                if not isinstance(entry, (*PLAIN, list, tuple, dict)):
                    raise FirstStepDiffers
                continue
            storage = entry._storage
            if not _reads_inputs(storage.first, rehearsal):
                storage.value = storage.first
            elif _linear_from_zeros(optimizer):
                storage.value = _zeros(storage.value)
            else:
                raise FirstStepDiffers
            new_state[parameter, key] = entry
    return new_state


def _parts(entry: Any) -> Iterator[Any]:
    """The leaves of an entry of an optimizer's state, a nested list, tuple or dict."""
    if isinstance(entry, (list, tuple)):
        for part in entry:
            yield from _parts(part)
    elif isinstance(entry, dict):
        for part in entry.values():
            yield from _parts(part)
    else:
        yield entry


def _python_state(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, Any], list[Any]]:
    """The leaves of an optimizer's state that are not tensors, by weight and key."""
    leaves = {}
    for parameter, entries in optimizer.state.items():
        for key, entry in entries.items():
            plain = [part for part in _parts(entry) if not isinstance(part, torch.Tensor)]
            if plain:
                leaves[parameter, key] = plain
    return leaves


def _changes(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> bool:
    """Whether a step has changed Python numbers in its optimizer's state.

    Raises:
        TraceError: if it has changed a list or dict there.
    """
    changed = False
    for (parameter, key), now in after.items():
        old = before.get((parameter, key))
        if old is not None and (
            len(old) != len(now) or any(type(a) is not type(b) or a != b for a, b in zip(old, now, strict=True))
        ):
            entry = optimizer.state[parameter][key]
            if not isinstance(entry, PLAIN):
                raise TraceError(
                    f"{here()}: {type(optimizer).__name__} stores a {type(entry).__name__} in state[{key!r}] and "
                    f"modifies it in step(). Store tensors there, each under a key of its own: "
                    f"state['{key}_0'] = torch.zeros(...)."
                )
            changed = True
    return changed


# Types of Python state that a step may change.
PLAIN = (int, float, bool, str, type(None))


def _restore_state(optimizer: torch.optim.Optimizer, new_state: dict[tuple[torch.Tensor, str], DeferredTensor]) -> None:
    """Restore the state that the first rehearsal found, after another one."""
    for (parameter, key), entry in new_state.items():
        optimizer.state[parameter][key] = entry


def _reads_inputs(value: Value, trace: StepTrace) -> bool:
    from ..program.graph import slice_for

    return any(v in trace.inputs for node in slice_for([value]) for v in node.reads()) or value in trace.inputs


def _linear_from_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state that starts as a copy of the first gradient can start from zeros instead: SGD's momentum."""
    return isinstance(optimizer, torch.optim.SGD) and not any(g.get("dampening") for g in optimizer.param_groups)


def _zeros(like: Value) -> Value:
    zeros = recorder.dispatch(
        aten.empty_strided.default, (like.shape, like.stride), {"dtype": like.dtype, "device": like.device}
    )
    recorder.dispatch(aten.zero_.default, (zeros,), {})
    return zeros._storage.value
