"""The parameter groups of the optimizers that step in a trace.

They are dicts like others: what they held when the step began is guarded, and each call sets what the step's Python has
set in them. Only while one of PyTorch's optimizers steps do inputs of the Program stand in its groups, for the learning
rate and for other numbers that vary: its code treats all numbers alike, so that nothing needs to be proved, and the
first executable serves any rate.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...capture.input_numbers import is_input_number, is_plain_number, plain
from ...capture.new_optimizer_state import is_known
from ...capture.recorder import DeferredTensor
from ...capture.step import StepTrace
from ...capture.symbolic_scalars import Hyperparameter
from ...compat.torch_names import DisableTorchDispatch
from ...errors import TraceError
from ...interpreter import Undo
from ...optim.schedule import schedules_of
from ...program.source import here
from ..guards.equality import Anything, same
from ..guards.places import Place, Varying, any_number, can_vary, inputs_at
from ..guards.snapshot import Snapshot
from ..guards.states import Table

Group = dict[str, Any]

# By optimizer, the numbers in its groups at its latest trace, by the group's index and key; and which have varied.
_latest: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, str], Any]] = weakref.WeakKeyDictionary()
_varying: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[tuple[int, str]]] = weakref.WeakKeyDictionary()


class _Replacement(NamedTuple):
    """What stands in a group while its optimizer steps, and what it stands for."""

    group: Group
    key: str
    before: Any
    during: Any


class ParameterGroups:
    """The parameter groups of the optimizers that step in a trace.

    Attributes:
        expected: for guards: by its id, each group with what it is expected to hold when the step begins.
    """

    def __init__(self, trace: StepTrace, snapshot: Snapshot) -> None:
        """`snapshot` was taken before the trace."""
        self._trace = trace
        self._snapshot: Snapshot | None = snapshot  # only during the trace, as it keeps everything alive
        self._varying: Varying | None = None
        self._marks: dict[tuple[int, str], Any] = {}
        self._replaced: dict[tuple[int, str], list[_Replacement]] = defaultdict(list)  # by place
        self._inputs: dict[tuple[int, str], tuple[Any, Any]] = {}  # by place: a value, and the inputs in its place
        self._signs: list[tuple[Place, int]] = []  # of tensors in groups, on which optimizers have branched
        self.expected: dict[int, tuple[Group, Group]] = {}

    def begin(self, undo: Undo, varying: Varying) -> None:
        """Begin to notice what the step sets in groups: copies of their numbers, which are other objects, take their
        places until `undo` runs.

        Args:
            varying: the numbers that are inputs of the step, in groups and elsewhere.
        """
        assert self._snapshot is not None
        self._varying = varying
        undo(self._unmark)
        for group, before in self._groups_before():
            for key, value in before.items():
                if varying.number_for(group, key) is None and (mark := _copy(value)) is not value:
                    self._marks[id(group), key] = mark
                    group[key] = mark

    def _unmark(self) -> None:
        assert self._snapshot is not None
        for group, before in self._groups_before():
            for key, value in before.items():
                if not self._is_untouched(group, key):
                    if group.get(key) is value:  # the step has set the same object: a change, to be repeated
                        group[key] = _copy(value)
                elif self._marks.pop((id(group), key), None) is not None:
                    group[key] = value

    def _groups_before(self) -> list[tuple[Group, Group]]:
        """The groups, with what was in them before the step."""
        assert self._snapshot is not None
        groups = {id(group): group for groups in self._snapshot.groups.values() for group in groups}
        return [(group, self._snapshot.states[Table][id(group)].before) for group in groups.values()]

    def _is_untouched(self, group: Group, key: str) -> bool:
        """Whether the step has set nothing in a place."""
        assert self._snapshot is not None and self._varying is not None
        now, place = group.get(key), (id(group), key)
        for replacement in reversed(self._replaced.get(place, ())):
            if replacement.during is now:
                now = replacement.before
        if place in self._marks:
            return now is self._marks[place]
        if (number := self._varying.number_for(group, key)) is not None:
            return now is number
        state = self._snapshot.table(group)
        return state is not None and now is state.before.get(key)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer's groups held when the step began, before it first steps."""
        assert self._snapshot is not None
        if any(self._snapshot.table(group) is None for group in optimizer.param_groups):
            self._snapshot.keep_groups(optimizer, plain)  # which was not reached before: what it holds now, it held
        numbers = [number for schedule in schedules_of(optimizer) for number in schedule.numbers()]
        for group in optimizer.param_groups:
            before = self._snapshot.states[Table][id(group)].before
            for key, value in group.items():
                parts = value if isinstance(value, tuple) else (value,)
                if any(part is number for part in parts for number in numbers):  # which a schedule leaves there
                    self._marks.pop((id(group), key), None)
                    before[key] = value
            expected = {k: value if self._is_untouched(group, k) else Anything() for k, value in before.items()}
            self.expected.setdefault(id(group), (group, expected))

    def replace(self, group: Group, key: str, value: Any) -> None:
        """Let something stand in a group while its optimizer steps."""
        self._replaced[id(group), key].append(_Replacement(group, key, group[key], value))
        group[key] = value

    def make_symbolic(self, optimizer: torch.optim.Optimizer, group: Group, key: str, value: Any) -> None:
        """Let a symbolic number stand for a number in a group that is a tensor, a schedule's or the user's."""
        schedules = [value for schedule in schedules_of(optimizer) for value in schedule.numbers()]

        def symbolic(part: Any, position: int | None = None) -> Any:
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
                self._signs.append((Place(group, key, "", key, position), sign))
            with torch.no_grad():
                return _symbolic(part.detach().reshape(()).double(), sign)

        new = tuple(map(symbolic, value, itertools.count())) if isinstance(value, tuple) else symbolic(value)
        if new is not value and (not isinstance(value, tuple) or not all(map(operator.is_, new, value))):
            self.replace(group, key, new)

    def make_inputs(self, optimizer: torch.optim.Optimizer) -> None:
        """Let inputs stand for the learning rate, and for other numbers that vary.

        Those of custom optimizers remain Python numbers, with which they may do anything. If they change, they become
        input numbers, as all others do.
        """
        if not is_known(optimizer):
            return
        latest, varied = _latest.setdefault(optimizer, {}), _varying.setdefault(optimizer, set())
        for index, group in enumerate(optimizer.param_groups):
            for key, value in list(group.items()):
                if key == "lr" and _is_double(plain(value)):
                    node = self._input(group, key, value).node
                    self.replace(group, key, self._trace.input_of(node, torch.float64, label=key))
                elif can_vary(value) and not is_input_number(value):
                    cycles = "max_momentum" in group and key in ("momentum", "betas")  # by OneCycleLR and CyclicLR
                    others = (value[1:] if isinstance(value, tuple) else ()) if cycles else value
                    if not same(latest.setdefault((index, key), others), others):
                        varied.add((index, key))
                    latest[index, key] = others
                    if cycles or (index, key) in varied:
                        self.replace(
                            group, key, self._input(group, key, value, 1 if (index, key) not in varied else None)
                        )

    def _input(self, group: Group, key: str, value: Any, count: int | None = None) -> Any:
        """The input number for a number in a group, which is read there at each call unless the step has set it; for a
        tuple, those for its first `count` items."""
        place, numbers = (id(group), key), self._trace.numbers
        if is_input_number(value):
            return value
        if place in self._inputs and self._inputs[place][0] is value:
            return self._inputs[place][1]
        rest = () if count is None or not isinstance(value, tuple) else value[count:]
        if self._is_untouched(group, key):
            where = Place(group, key, f"{key!r} in a parameter group", key)
            made = inputs_at(where, value, numbers, trusted=True, count=count)
            expected = any_number(value)
            self.expected[id(group)][1][key] = (*expected[:count], *rest) if rest else expected
        elif isinstance(value, tuple):
            made = (*map(numbers.constant, value[:count]), *rest)
        else:
            made = numbers.constant(value)
        self._inputs[place] = value, made
        return made

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step, put back what its groups held before: the step's own code reads plain numbers."""
        for group, key, before, during in reversed(self._replacements(optimizer.param_groups)):
            if group.get(key) is during and not _is_written(during):
                group[key] = before

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Before another step of the optimizer, undo `show`."""
        for group, key, before, during in self._replacements(optimizer.param_groups):
            if group.get(key) is before:
                group[key] = during
        self.make_inputs(optimizer)

    def _replacements(self, groups: Iterable[Group]) -> list[_Replacement]:
        places = [(id(group), key) for group in groups for key in group]
        return [replacement for place in places for replacement in self._replaced.get(place, ())]

    def restore(self) -> None:
        """End the trace: what stands in the groups is taken out of them."""
        for group, key, before, during in reversed([*itertools.chain(*self._replaced.values())]):
            if group.get(key) is during:
                group[key] = before

    def check(self) -> None:
        """
        Raises:
            TraceError: if a tensor of the step has replaced a number in a group of PyTorch's optimizers, in whose place
                there was a tensor while it stepped.
        """
        assert self._snapshot is not None
        for group, key, before, during in itertools.chain(*self._replaced.values()):
            lost = isinstance(group.get(key), (torch.Tensor, torch.SymFloat)) and not is_input_number(group[key])
            if key == "lr" and is_plain_number(plain(before)) and lost or _is_written(during):
                raise TraceError(
                    f"{here()}: the step sets {key!r} in a parameter group from a value that only the device has, so "
                    "it would be a different computation at each step. Set it to a number outside of the traced step, "
                    "or use a schedule from firstloss.optim.lr_scheduler, which is a function of a step tensor."
                )

    def sets(self, group: Group, key: str) -> bool:
        """Whether the step's Python has set an entry of a group to something else."""
        assert self._snapshot is not None
        state = self._snapshot.table(group)
        return state is not None and not same(state.before.get(key), group.get(key))

    def end_trace(self) -> None:
        """Release what existed before the trace."""
        self._snapshot = self._varying = None
        for kept in (self._marks, self._replaced, self._inputs, self.expected):
            kept.clear()

    def outdated(self) -> bool:
        """Whether a tensor in a group has another sign than that on which its optimizer has branched."""
        return any(_sign(float(place.read(()))) != sign for place, sign in self._signs)


def _copy(value: Any) -> Any:
    """Another object that equals a float or a tuple; anything else itself."""
    if type(value) is float:
        return value * 1.0
    if isinstance(value, np.floating):
        return type(value)(value)
    return (*value,) if type(value) is tuple else value


def _is_double(value: Any) -> bool:
    """Whether it is a number that Python's floats compute with as the device's float64 does."""
    return isinstance(value, (int, float, np.integer)) and not isinstance(value, bool)


def _is_written(value: Any) -> bool:
    """Whether the step has written to the tensor that stands for a number in a group."""
    return type(value) is DeferredTensor and value._storage.value is not value._storage.first


def _symbolic(number: torch.Tensor, sign: int | None = None) -> torch.SymFloat:
    return torch.SymFloat(Hyperparameter(number, sign))


def sign_unknown(number: Any) -> bool:
    """Whether it is symbolic, with a sign that only the device knows."""
    return type(number) is torch.SymFloat and type(number.node) is Hyperparameter and number.node.sign is None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
