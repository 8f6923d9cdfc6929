"""The state that an optimizer creates in its first step, found by running that step on copies."""

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
    """An optimizer makes its state from values that only its first step has."""


def find_new_state(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any]
) -> dict[tuple[torch.Tensor, str], DeferredTensor]:
    """The state tensors that `optimizer` makes in its first step, at their initial values.

    `step` is run once as a rehearsal: what it does to weights and state is forgotten, the tensors that it puts into
    `optimizer.state` stay there, each as it was when it was made.

    Raises:
        FirstStepDiffers: if the state starts from a weight's or a gradient's value, or with a number that the step
            changes; `optimizer.state` is as before.
    """
    had = {p: dict(entries) for p, entries in optimizer.state.items()}
    numbers = _python_state(optimizer)
    rehearsal = StepTrace()
    try:
        with rehearsal.active():
            step()
        made = _python_state(optimizer)
        counts = _changes(optimizer, numbers, made)
        found = _new_state(optimizer, had, rehearsal)
        for entry in found.values():
            entry._storage.trace = None
        if not counts and made.keys() - numbers.keys():  # constants, if another step leaves them as they are
            with StepTrace().active():
                step()
            counts = _changes(optimizer, made, _python_state(optimizer))
            _restore_state(optimizer, found)
        if counts and len(made) > len(numbers):
            raise FirstStepDiffers  # nobody knows where it began to count
        for parameter, key in numbers:
            optimizer.state[parameter][key] = had[parameter][key]
    except BaseException:
        for parameter, entries in list(optimizer.state.items()):
            entries.clear()
            entries.update(had.get(parameter, {}))
            if parameter not in had:
                del optimizer.state[parameter]
        raise
    return found


def _new_state(
    optimizer: torch.optim.Optimizer, had: dict[torch.Tensor, dict[str, Any]], rehearsal: StepTrace
) -> dict[tuple[torch.Tensor, str], DeferredTensor]:
    found: dict[tuple[torch.Tensor, str], DeferredTensor] = {}
    for parameter, entries in optimizer.state.items():
        before = had.get(parameter, {})
        for key, entry in list(entries.items()):
            if any(is_traced(part, rehearsal) for part in _parts(entry) if part is not entry):
                raise TraceError(
                    f"{here()}: {type(optimizer).__name__} makes tensors in its first step() and keeps them in "
                    f"state[{key!r}], a {type(entry).__name__}. Keep each under a key of its own: "
                    f"state['{key}_0'] = torch.zeros(...)."
                )
            if key in before:
                entries[key] = before[key]  # which the rehearsal may have bound to another tensor
                continue
            if not is_traced(entry, rehearsal):
                if isinstance(entry, torch.Tensor):  # a gradient or a weight itself, which there is in the step alone
                    raise FirstStepDiffers
                continue
            storage = entry._storage
            if not _reads_inputs(storage.first, rehearsal):
                storage.value = storage.first
            elif _linear_from_zeros(optimizer):
                storage.value = _zeros(storage.value)
            else:
                raise FirstStepDiffers
            found[parameter, key] = entry
    return found


def _parts(entry: Any) -> Iterator[Any]:
    """What an entry of an optimizer's state holds, through lists, tuples and dicts."""
    if isinstance(entry, (list, tuple)):
        for part in entry:
            yield from _parts(part)
    elif isinstance(entry, dict):
        for part in entry.values():
            yield from _parts(part)
    else:
        yield entry


def _python_state(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, Any], list[Any]]:
    """What an optimizer's state holds that is no tensor, by weight and key."""
    found = {}
    for parameter, entries in optimizer.state.items():
        for key, entry in entries.items():
            plain = [part for part in _parts(entry) if not isinstance(part, torch.Tensor)]
            if plain:
                found[parameter, key] = plain
    return found


def _changes(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> bool:
    """Whether a step has changed Python numbers in its optimizer's state.

    Raises:
        TraceError: if it has changed something in a list or a dict there.
    """
    changed = False
    for (parameter, key), now in after.items():
        was = before.get((parameter, key))
        if was is not None and (
            len(was) != len(now) or any(type(a) is not type(b) or a != b for a, b in zip(was, now, strict=True))
        ):
            entry = optimizer.state[parameter][key]
            if not isinstance(entry, PLAIN):
                raise TraceError(
                    f"{here()}: {type(optimizer).__name__} keeps a {type(entry).__name__} in state[{key!r}] and "
                    f"changes what is in it in step(). Keep tensors there, each under a key of its own: "
                    f"state['{key}_0'] = torch.zeros(...)."
                )
            changed = True
    return changed


# What an optimizer may count in.
PLAIN = (int, float, bool, str, type(None))


def _restore_state(optimizer: torch.optim.Optimizer, found: dict[tuple[torch.Tensor, str], DeferredTensor]) -> None:
    """After another rehearsal: the state is what the first has found."""
    for (parameter, key), entry in found.items():
        optimizer.state[parameter][key] = entry


def _reads_inputs(value: Value, trace: StepTrace) -> bool:
    from ..program.graph import slice_for

    return any(v in trace.inputs for node in slice_for([value]) for v in node.reads()) or value in trace.inputs


def _linear_from_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state that starts as a copy of the first gradient may as well start from zeros: SGD's momentum."""
    return isinstance(optimizer, torch.optim.SGD) and not any(g.get("dampening") for g in optimizer.param_groups)


def _zeros(like: Value) -> Value:
    made = recorder.dispatch(
        aten.empty_strided.default, (like.shape, like.stride), {"dtype": like.dtype, "device": like.device}
    )
    recorder.dispatch(aten.zero_.default, (made,), {})
    return made._storage.value
