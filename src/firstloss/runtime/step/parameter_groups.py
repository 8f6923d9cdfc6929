"""The parameter groups of optimizers in a traced step, whose numbers are inputs or constants of the step."""

from __future__ import annotations

import operator
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from ...capture.input_numbers import is_input_number, is_plain_number, plain
from ...capture.new_optimizer_state import is_known
from ...capture.recorder import DeferredTensor
from ...capture.step import StepTrace
from ...capture.symbolic_scalars import Hyperparameter
from ...compat.torch_names import DisableTorchDispatch
from ...optim.schedule import schedules_of
from ..guards.access import MISSING
from ..guards.effects import Effects, always, setting
from ..guards.equality import same
from ..guards.guards import Change, with_article
from ..guards.places import Varying, place_of
from ..guards.reconstruct import computed
from ..guards.snapshot import Snapshot

# For each optimizer, the numbers in its groups that have been seen to change: (group, key).
_varying: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[tuple[int, str]]] = weakref.WeakKeyDictionary()


class GroupEntry(NamedTuple):
    """A number in a parameter group that a step reads at each call; `position` is for tuples such as betas."""

    group: dict[str, Any]
    key: str
    position: int | None

    def read(self, arguments: Any = (), known: Any = None) -> float:
        """The current number, at any call."""
        value = self.group[self.key]
        return float(plain(value if self.position is None else value[self.position]))

    def premise(self) -> Any:
        """What the trace assumes about it: that it is a number, or a tuple of a certain length, and (except for a
        learning rate) its sign, on which optimizers branch."""
        value = self.group.get(self.key)
        if self.position is None:
            fits = _is_double(value)
        else:
            fits = isinstance(value, tuple) and self.position < len(value) and all(map(_is_double, value))
        if not fits:
            return None
        return len(value) if isinstance(value, tuple) else 0, None if self.key == "lr" else _sign(self.read())


class _Set(NamedTuple):
    """A value that the step's Python code has set in a group, or MISSING if it has deleted it."""

    group: dict[str, Any]
    key: str
    value: Any
    before: Any

    def put(self, value: Any) -> None:
        """Set a value in its place; MISSING deletes it."""
        if value is not MISSING:
            self.group[self.key] = value
        else:
            self.group.pop(self.key, None)

    def apply(self) -> None:
        """Set it, at a call."""
        self.put(self.value)

    def undo(self) -> None:
        """Restore it, after the trace."""
        self.put(self.before)

    @property
    def is_constant(self) -> bool:
        """Whether it is the same at each call, and not an object that the step may have made."""
        return _is_constant(self.value)


def _differences(group: dict[str, Any], before: dict[str, Any]) -> list[_Set]:
    """What is another in a group: numbers, texts and objects, but not tensors and what stands for them in a trace."""
    changes = []
    for key in {**group, **before}:
        now, old = group.get(key, MISSING), before.get(key, MISSING)
        of_device = isinstance(now, (torch.Tensor, torch.SymFloat, torch.SymInt)) and not is_input_number(now)
        compared = _is_constant(now) or is_input_number(now)
        if key != "params" and not of_device and (not same(old, now) if compared else old is not now):
            changes.append(_Set(group, key, now, old))
    return changes


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    if is_input_number(value):  # of NumPy's float64, it is one to isinstance
        return False
    return type(value) in _PLAIN or is_plain_number(value) or value is MISSING


def _is_number_lost(before: Any, now: Any) -> bool:
    """Whether a number that only the device knows has replaced one."""
    return is_number(before) and isinstance(now, torch.SymFloat) and not is_input_number(now)


def _is_new_tensor(now: Any, before: Any) -> bool:
    """Whether the step has put a tensor into a group."""
    return isinstance(now, torch.Tensor) and now is not before


class ParameterGroups:
    """The parameter groups of the optimizers that step in a trace.

    Numbers that the step's Python code sets before the optimizer steps are set at the beginning of each call, those
    that it sets later at the end.

    Attributes:
        inputs: the inputs of the step that are numbers in the groups.
    """

    def __init__(self, trace: StepTrace, seen: list[torch.optim.Optimizer], snapshot: Snapshot) -> None:
        """
        Args:
            seen: the optimizers, as they step.
            snapshot: taken before the trace.
        """
        self._trace = trace
        self._seen = seen
        self._snapshot: Snapshot | None = snapshot  # only during the trace, as it keeps everything alive
        self._custom_groups: set[int] = set()  # the ids of custom optimizers' groups, which they set themselves
        self.varying: Varying | None = None  # the numbers that are inputs, in groups and elsewhere
        self._varying_ids: frozenset[tuple[int, Any]] = frozenset()
        self._first: list[_Set] = []
        self._computed: list[_Set] = []  # input numbers that the step has set before the optimizers stepped
        self._later: list[_Set] = []
        self._tensors: list[_Set] = []  # that the step has put there
        self.inputs: dict[Any, GroupEntry] = {}
        self._restore: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._baked: dict[Any, Any] = {}
        self._signs: list[
            tuple[torch.Tensor, int]
        ] = []  # signs of tensors in groups, on which optimizers have branched
        self._weights: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the optimizer's groups before its first step; they are restored after the trace."""
        for group, before in zip(optimizer.param_groups, self._before(optimizer), strict=False):
            # An optimizer that wraps this one has replaced some.
            hidden = {(id(g), key): before for g, key, before, traced in self._restore if g.get(key) is traced}
            now = {key: hidden.get((id(group), key), value) for key, value in group.items()}
            for change in _differences(now, before):
                if change.value is not self._own_input(group, change.key):
                    change = change._replace(group=group)
                    (self._first if change.is_constant else self._computed).append(change)
            for key, value in group.items():
                unchanged = _is_constant(value) and same(before.get(key, MISSING), value)
                if unchanged and self._own_input(group, key) is not None:
                    self._first.append(_Set(group, key, value, value))  # in place of the value at this call
            self._saved.append((group, now))
            if not is_known(optimizer):
                self._custom_groups.add(id(group))

    def _own_input(self, group: dict[str, Any], key: str) -> Any:
        """The input number that was put in place of a number in a group; or None."""
        return None if self.varying is None else self.varying.number_for(group, key)

    def _before(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The groups before the trace; the current ones of an optimizer that did not exist then."""
        groups = {} if self._snapshot is None else self._snapshot.groups
        return groups.get(id(optimizer), optimizer.param_groups)

    def bake(self) -> None:
        """Record the constants in the traced step."""
        self._varying_ids = frozenset(() if self.varying is None else self.varying.expected())
        self.varying = None
        self._baked = self._constants()

    def end_trace(self) -> None:
        """Note at the end of the trace that the current groups are those that the step works on."""
        self._weights = [(group, list(group["params"])) for o in self._seen for group in o.param_groups]

    def make_symbolic(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], key: str, value: Any) -> None:
        """Put a symbolic number in place of a number in a group: a schedule's or the user's tensor."""
        schedules = [value for schedule in schedules_of(optimizer) for value in schedule.numbers()]

        def symbolic(part: Any) -> Any:
            if not isinstance(part, torch.Tensor) or part.numel() != 1 or part.dtype.is_complex:
                return part
            if any(part is value for value in schedules):
                return _symbolic(part)
            if not is_known(optimizer) or key not in optimizer.defaults:
                return part  # the optimizer's own code accepts the tensor
            sign = None
            if type(part) is not DeferredTensor and self._trace.unwritten(part):
                with DisableTorchDispatch():
                    sign = _sign(float(part))
                self._signs.append((part, sign))
            with torch.no_grad():
                return _symbolic(part.detach().reshape(()).double(), sign)

        new = tuple(map(symbolic, value)) if isinstance(value, tuple) else symbolic(value)
        if new is not value and (not isinstance(value, tuple) or not all(map(operator.is_, new, value))):
            self.set(group, key, new)

    def make_input(self, optimizer: torch.optim.Optimizer, index: int, key: str) -> None:
        """Make the learning rate, and other numbers that change, inputs that are read at each call.

        Those of custom optimizers remain Python numbers, with which they may do anything; so do NumPy's numbers of
        lower precision, in which `1 - lr * weight_decay` is computed. If they change, they become input numbers, as all
        others do.
        """
        if not is_known(optimizer):
            return
        group = optimizer.param_groups[index]
        value = group[key]
        if is_input_number(value):
            if key == "lr" and _is_double(plain(value)):
                self.set(group, key, self._trace.input_of((value * 1.0).node))
        elif key == "lr" and _is_double(value):
            self.set(group, key, self._input(group, key))
        elif (index, key) in _varying.get(optimizer, ()):
            if _is_double(value):
                self.set(group, key, _symbolic(self._input(group, key), _sign(value)))
            elif isinstance(value, tuple) and all(map(_is_double, value)):
                elements = [_symbolic(self._input(group, key, i), _sign(v)) for i, v in enumerate(value)]
                self.set(group, key, tuple(elements))
        elif "max_momentum" in group and _may_vary(optimizer, value):  # set by OneCycleLR and CyclicLR
            if key == "momentum":
                self.set(group, key, _symbolic(self._input(group, key), _sign(value)))
            elif key == "betas":
                self.set(group, key, (_symbolic(self._input(group, key, 0), _sign(value[0])), *value[1:]))

    def _input(self, group: dict[str, Any], key: str, index: int | None = None) -> DeferredTensor:
        label = f"{key}{len(self.inputs)}"
        entry = GroupEntry(group, key, index)
        with DisableTorchDispatch():
            example = torch.full((), entry.read(), dtype=torch.float64)
        tensor = self._trace.new_input(example, label)
        self.inputs[tensor._storage.value] = entry
        return tensor

    def set(self, group: dict[str, Any], key: str, value: Any) -> None:
        self._restore.append((group, key, group[key], value))
        group[key] = value

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step, put back what its groups held before: the step's own code reads plain numbers."""
        ids = {id(group) for group in optimizer.param_groups}
        for group, key, before, traced in reversed(self._restore):
            if id(group) in ids and group.get(key) is traced and not _written(traced):
                group[key] = before

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Before another step of the optimizer, undo `show`."""
        ids = {id(group) for group in optimizer.param_groups}
        for group, key, before, traced in list(self._restore):
            if id(group) not in ids:
                continue
            now = group.get(key)
            if now is before:
                group[key] = traced
            elif key == "lr" and now is not None and is_input_number(now) and _is_double(plain(now)):
                self.set(group, key, self._trace.input_of((now * 1.0).node))

    def restore(self) -> list[str]:
        """Restore the groups to their state before the step; returns what later calls could not set in the same way."""
        refused: list[str] = []
        for optimizer in () if self._snapshot is None else self._snapshot.optimizers:
            if not any(seen is optimizer for seen in self._seen):
                for group, before in zip(optimizer.param_groups, self._before(optimizer), strict=False):
                    self._saved.append((group, before | self._left_inputs(group)))
        for group, key, before, traced in reversed(self._restore):
            now = group.get(key, traced)
            if now is not traced and now is not before and (_is_constant(now) or is_input_number(now)):
                self._later.append(_Set(group, key, now, before))
            elif now is not traced and now is not before or _written(traced):
                refused.append(key)
            group[key] = before
        for group, before in self._saved:
            differences = _differences(group, before)
            self._later += differences
            for change in differences:
                change.undo()
            custom = id(group) in self._custom_groups
            new = [
                _Set(group, k, v, before.get(k, MISSING)) for k, v in group.items() if _is_new_tensor(v, before.get(k))
            ]
            lost = [c.key for c in new if not custom and is_number(c.before)]
            lost += [key for key, value in group.items() if _is_number_lost(before.get(key), value)]
            group.update({key: before[key] for key in lost})
            refused += lost
            self._tensors += [change for change in new if change.key not in lost]
            for change in new:
                change.undo()
        for change in reversed([*self._first, *self._computed]):
            change.undo()
        for change in (*self._first, *self._computed, *self._later):
            if (number := self._own_input(change.group, change.key)) is not None:
                change.group[change.key] = number  # which stands for any: each call sets it
        self._later = [*self._computed, *self._later]
        self._saved.clear()
        self._restore.clear()
        self._snapshot = None
        return refused

    def _left_inputs(self, group: dict[str, Any]) -> dict[str, Any]:
        """The input numbers that the step has left in their places in a group, where `Varying` takes them out."""
        return {k: v for k, v in group.items() if is_input_number(v) and v is self._own_input(group, k)}

    def begin(self) -> None:
        """At the start of a call, set what the step sets before its optimizers step."""
        for change in self._first:
            change.apply()

    def sets(self, group: dict[str, Any], key: str) -> bool:
        """Whether the step's Python has set a number in a group, as far as that has changed it."""
        return any(change.group is group and change.key == key for change in (*self._first, *self._later))

    def undo_begin(self) -> None:
        """Undo `begin`, at a call whose Python runs after all."""
        for change in reversed(self._first):
            change.undo()

    def traced(self, effects: Effects) -> None:
        """Record what the step sets later, as side effects."""
        for change in (*self._tensors, *self._later):
            if change.is_constant:
                repeat = always(change.apply)
            elif is_input_number(change.value):
                repeat = setting(change.put, computed(change.value.node.expression))
            else:
                repeat = effects.putting(change.put, change.value)
            effects.add(lambda: None, repeat)
        self._tensors.clear()

    def _constants(self) -> dict[Any, Any]:
        """Everything in the groups that is baked into the trace: all but weights and inputs, and the assumptions about
        inputs. Tensors that the step reads are compared by identity; those that it sets itself are not compared."""
        inputs: dict[Any, list[int | None]] = {}
        for h in self.inputs.values():
            inputs.setdefault((id(h.group), h.key), []).append(h.position)
        constants: dict[Any, Any] = {i: h.premise() for i, h in enumerate(self.inputs.values())}
        for number, optimizer in enumerate(self._seen):
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    indices = inputs.get((id(group), key))
                    if key == "params" or indices == [None] or _is_dead(value) or (id(group), key) in self._varying_ids:
                        continue
                    if indices is not None and isinstance(value, tuple):  # some elements are inputs
                        value = tuple(v for i, v in enumerate(value) if i not in indices)
                    comparable = type(value) in _PLAIN or is_plain_number(value)
                    constants[number, i, key] = value if comparable else _frozen(value)
        return constants

    def outdated(self) -> bool:
        """Whether a baked-in number or the groups have changed. A number that has changed once may change again, so it
        will be an input of the next trace."""
        if self._regrouped():
            return True
        if any(_sign(float(tensor)) != sign for tensor, sign in self._signs):
            return True
        now = self._constants()
        differs = now != self._baked
        for number, optimizer in enumerate(self._seen):
            varying = _varying.get(optimizer, set())
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    entry = number, i, key
                    if entry not in self._baked or not _may_vary(optimizer, value):
                        continue
                    if self._baked[entry] != now[entry]:
                        if not varying:
                            varying = _varying.setdefault(optimizer, varying)
                        varying.add((i, key))
                    differs |= (i, key) in varying  # an input of a later step, which works for this value too
        return differs

    def changes(self) -> list[Change]:
        """What has changed in the groups; those of numbers have a place."""
        now = self._constants()
        changes = []
        for number, optimizer in enumerate(self._seen):
            for i, group in enumerate(optimizer.param_groups):
                for key in group:
                    entry = number, i, key
                    if entry in self._baked and entry in now and self._baked[entry] != now[entry]:
                        text = f"{key!r} in a parameter group of {with_article(type(optimizer).__qualname__)}"
                        values = self._baked[entry], now[entry]
                        changes.append(Change(text, key, *values, id(group), place_of(group, key, text, key, *values)))
        return changes

    def _regrouped(self) -> bool:
        """Whether the groups, or the weights in them, have changed or been reordered."""
        groups = [group for optimizer in self._seen for group in optimizer.param_groups]
        if len(groups) != len(self._weights):
            return True
        for group, (before, weights) in zip(groups, self._weights, strict=True):
            now = group["params"]
            if group is not before or len(now) != len(weights) or not all(map(operator.is_, now, weights)):
                return True
        return False


def _symbolic(number: torch.Tensor, sign: int | None = None) -> torch.SymFloat:
    return torch.SymFloat(Hyperparameter(number, sign))


def sign_unknown(number: Any) -> bool:
    """Whether it is symbolic, with a sign that only the device knows."""
    return type(number) is torch.SymFloat and type(number.node) is Hyperparameter and number.node.sign is None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


_PLAIN = (float, bool, int, str, type(None))


class _ById:
    """Wraps an object to compare it by identity."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: Any) -> bool:
        return type(other) is _ById and other._held is self._held

    __hash__ = None  # type: ignore[assignment]


def _frozen(value: Any) -> Any:
    """`value` in a form that can be compared later: tensors by identity, lists by their current items."""
    if isinstance(value, torch.Tensor):
        return _ById(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_frozen, value)
    if isinstance(value, dict):
        return "dict", *((key, _frozen(entry)) for key, entry in value.items())
    return value if isinstance(value, _HASHABLE) else _ById(value)


_HASHABLE = (*_PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size, frozenset)


def is_number(value: Any) -> bool:
    """Whether it is a number of Python's or NumPy's, but not a bool."""
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)


def _is_double(value: Any) -> bool:
    """Whether it is a number that Python's floats compute with as the device's float64 does."""
    return isinstance(value, (int, float, np.integer)) and not isinstance(value, bool)


def _may_vary(optimizer: torch.optim.Optimizer, value: Any) -> bool:
    """Whether a number in a group can be an input. PyTorch's optimizers branch on numbers only to skip a term that is
    zero; custom optimizers may do anything, and are retraced."""
    if not is_known(optimizer):
        return False
    return type(value) is float or isinstance(value, tuple) and bool(value) and all(map(_is_double, value))


def _written(value: Any) -> bool:
    """Whether the step has written to the tensor that replaced a number in a group."""
    return type(value) is DeferredTensor and value._storage.value.node is not None


def _is_dead(value: Any) -> bool:
    return type(value) is DeferredTensor and value._storage.trace is not None and value._storage.resident is None
