"""Find the state that an optimizer creates in its first step, by rehearsing that step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.ops import aten

from ..program.graph import Node, Ref, Value, slice_for
from ..program.node_kinds import is_unwritten
from . import recorder
from .recorder import DeferredTensor, new_index
from .step import StepTrace, is_traced


class FirstStepDiffers(Exception):
    """An optimizer initializes its state from values that only its first step has."""


class CannotRehearse(FirstStepDiffers):
    """A step cannot be rehearsed: it reads values, or computes gradients, which would use up the graph of the loss."""


class _Rehearsal(StepTrace):
    """The trace of a first step whose effects are discarded."""

    def run(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        """Rehearse `step`."""
        active, self._begin = self.active(), new_index()
        with active, active:
            step()
            held = [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
            for _, entries in _of_weights(optimizer):
                held += _parts(entries)
            self._results = [t._storage.value for t in held if type(t) is DeferredTensor]

    def nodes(self) -> list[Node]:
        """In order, the operations on which the weights, their gradients and the optimizer's state depend."""
        return [node for node in slice_for(self._results) if node.index > self._begin and not is_unwritten(node)]

    def begin_backward(self) -> None:
        raise CannotRehearse

    def refuse_read(self, op: Any) -> NoReturn:
        raise CannotRehearse


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is PyTorch's or Firstloss's."""
    return type(optimizer).__module__.startswith(("torch.optim", "firstloss."))


def find_new_state(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], may_differ: bool = False
) -> dict[tuple[torch.Tensor, str], DeferredTensor]:
    """Create the state tensors that `optimizer` creates in its first step, with their initial values.

    `step` is traced once as a rehearsal: its effects on weights and state are discarded, but the tensors that it adds
    to `optimizer.state` remain there, with their initial values.

    Args:
        may_differ: whether the first step may compute something else than the second, which is traced, too, then.

    Raises:
        FirstStepDiffers: if the state is initialized from a weight or a gradient, or with a list of tensors, an object
            or a number that the step changes, or if the first step computes something else than the second;
            `optimizer.state` is restored.
        CannotRehearse: if `step` cannot be rehearsed; likewise.
    """
    old_state = {p: dict(entries) for p, entries in optimizer.state.items() if isinstance(entries, dict)}
    others = {key: held for key, held in optimizer.state.items() if key not in old_state}  # not of a weight
    numbers = _python_state(optimizer)
    rehearsal = _Rehearsal()
    try:
        rehearsal.run(optimizer, step)
        if any(not isinstance(held, dict) and key not in others for key, held in optimizer.state.items()):
            raise FirstStepDiffers
        new_numbers = _python_state(optimizer)
        counts = _changes(optimizer, numbers, new_numbers)
        new_state = _new_state(optimizer, old_state, rehearsal)
        for entry in new_state.values():
            entry._storage.trace = None
        may_differ = may_differ and bool(new_state)
        if not counts and (may_differ or new_numbers.keys() - numbers.keys()):
            again = _Rehearsal()
            again.run(optimizer, step)
            counts = _changes(optimizer, new_numbers, _python_state(optimizer))  # constant, if it does not change them
            _restore_state(optimizer, new_state)
            if may_differ and not _computes_the_same(rehearsal, again, new_state.values()):
                raise FirstStepDiffers
        if counts and len(new_numbers) > len(numbers):
            raise FirstStepDiffers  # the initial count is unknown
        for parameter, key in numbers:
            optimizer.state[parameter][key] = old_state[parameter][key]
    except BaseException:
        for parameter, entries in list(optimizer.state.items()):
            if parameter in old_state:
                entries.clear()
                entries.update(old_state[parameter])
            elif parameter not in others:
                del optimizer.state[parameter]
        raise
    finally:
        optimizer.state.update(others)
    return new_state


def _new_state(
    optimizer: torch.optim.Optimizer, old_state: dict[torch.Tensor, dict[str, Any]], rehearsal: StepTrace
) -> dict[tuple[torch.Tensor, str], DeferredTensor]:
    new_state: dict[tuple[torch.Tensor, str], DeferredTensor] = {}
    for parameter, entries in _of_weights(optimizer):
        before = old_state.get(parameter, {})
        for key, entry in list(entries.items()):
            if key in before:
                entries[key] = before[key]  # the rehearsal may have replaced it
                continue
            if any(is_traced(part, rehearsal) for part in _parts(entry) if part is not entry):
                raise FirstStepDiffers  # a list of tensors, for example
            if not is_traced(entry, rehearsal):
                # A gradient or a weight itself, or an object, which may hold tensors of the rehearsal.
                if not isinstance(entry, (*PLAIN, list, tuple, dict)):
                    raise FirstStepDiffers
                continue
            storage = entry._storage
            if not _is_of_this_step(storage.first, rehearsal):
                storage.value = storage.first
            elif _linear_from_zeros(optimizer):
                storage.value = _zeros(storage.value)
            else:
                raise FirstStepDiffers
            new_state[parameter, key] = entry
    return new_state


def _computes_the_same(first: _Rehearsal, second: _Rehearsal, new_state: Iterable[DeferredTensor]) -> bool:
    """Whether the first step of an optimizer does what its second does, apart from creating state."""
    creation = set(slice_for([entry._storage.first for entry in new_state]))
    before = [_description(node) for node in first.nodes() if node not in creation]
    return before == [_description(node) for node in second.nodes() if node not in creation]


def _description(node: Node) -> tuple[Any, ...]:
    """An operation, with the shapes and dtypes of its tensors."""
    args = [part for arg in (*node.args, *node.kwargs.values()) for part in (arg if type(arg) is list else [arg])]
    return node.op, [(tuple(arg.size), arg.dtype) if isinstance(arg, Ref) else arg for arg in args]


def _of_weights(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """The state of each weight; an optimizer may also keep state of its own, under other keys."""
    return [(p, entries) for p, entries in optimizer.state.items() if isinstance(entries, dict)]


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
    for parameter, entries in _of_weights(optimizer):
        for key, entry in entries.items():
            plain = [part for part in _parts(entry) if not isinstance(part, torch.Tensor)]
            if plain:
                leaves[parameter, key] = plain
    return leaves


def _changes(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> bool:
    """Whether a step has changed what is in its optimizer's state besides tensors."""
    changed = False
    for (parameter, key), now in after.items():
        old = before.get((parameter, key))
        if old is not None and (
            len(old) != len(now) or any(type(a) is not type(b) or a != b for a, b in zip(old, now, strict=True))
        ):
            changed = True
    return changed


# Types of Python state that a step may change.
PLAIN = (int, float, bool, str, type(None))


def _restore_state(optimizer: torch.optim.Optimizer, new_state: dict[tuple[torch.Tensor, str], DeferredTensor]) -> None:
    """Restore the state that the first rehearsal found, after another one."""
    for (parameter, key), entry in new_state.items():
        optimizer.state[parameter][key] = entry


def _is_of_this_step(value: Value, trace: StepTrace) -> bool:
    """Whether it is computed from inputs of the step, or drawn in it."""
    nodes = slice_for([value])
    drawn = any(node.draw is not None for node in nodes)
    return drawn or value in trace.inputs or any(v in trace.inputs for node in nodes for v in node.reads())


def _linear_from_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state that starts as a copy of the first gradient can start from zeros instead: SGD's momentum."""
    return isinstance(optimizer, torch.optim.SGD) and not any(g.get("dampening") for g in optimizer.param_groups)


def _zeros(like: Value) -> Value:
    zeros = recorder.dispatch(
        aten.empty_strided.default, (like.shape, like.stride), {"dtype": like.dtype, "device": like.device}
    )
    recorder.dispatch(aten.zero_.default, (zeros,), {})
    return zeros._storage.value
