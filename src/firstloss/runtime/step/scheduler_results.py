"""What a traced step reads of a scheduler that it has stepped: numbers, which each call computes before it runs.

The scheduler itself steps in Python once the compiled step has run (`schedulers.py`). Its Python depends on nothing
that the step computes, so that the same step of a copy gives the numbers beforehand. That needs code without side
effects, since it runs twice: PyTorch's own schedulers, and what is passed to them if its bytecode shows none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...capture.input_numbers import Expression, InputNumbers, Source, is_input_number, is_plain_number, plain
from ...errors import TraceError
from ...program.source import here
from ..guards.access import MISSING
from ..guards.equality import same
from ..guards.places import can_vary
from ..guards.side_effects import has_side_effects, method_has_side_effects

Entry = tuple[int, Any]  # the id of a dict, and a key of it
_Read = Callable[[Sequence[Any]], Any]
_BASE = torch.optim.lr_scheduler.LRScheduler
_NOT_CALLED = ("__init__", "state_dict", "load_state_dict", "get_last_lr")  # by `step()`


class STEPPED:
    """Among the classes of a step's inputs (`tracing.trace_step`): the numbers that it reads of schedulers that it has
    stepped."""


class STEPPED_NOW:
    """Likewise, but as they are at this call: in a trace that is only to be compared with another."""


class ReadsSchedulerError(TraceError):
    """A step reads numbers of a scheduler that it has stepped: it can be traced with these as inputs."""


class SchedulerRun(NamedTuple):
    """A call of a scheduler's `step()`, which can be made for its results alone."""

    step: Callable[..., Any]  # of the scheduler's class
    scheduler: Any
    args: tuple[Any, ...]

    def after(self, before: Mapping[Entry, Any], args: Iterable[Any]) -> dict[Entry, Any]:
        """The numbers in a scheduler's attributes, in those of schedulers in it, and in its parameter groups, after
        this call; the scheduler itself is as it was.

        Args:
            before: those that differ, when it is called, from what is there.
            args: its arguments at this call.
        """
        tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.step(_copy(self.scheduler, before, {}, tables), *args)
        return {
            (id(old), key): value
            for old, new in tables
            for key, value in new.items()
            if can_vary(value) or is_number_list(value)
        }


def run_of(
    step: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], numbers: InputNumbers
) -> SchedulerRun | None:
    """A call of `step` that can be made for its results; None if it can be made once only."""
    takes_numbers = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, torch.optim.lr_scheduler.ReduceLROnPlateau
    if args and not isinstance(scheduler, takes_numbers):  # others warn
        return None
    if not all(is_plain_number(plain(arg)) for arg in args):
        return None
    given = [arg.node.expression for arg in args if is_input_number(arg)]
    if any(expression.is_read for expression in given) or given and numbers.draws is not None:
        return None
    return SchedulerRun(step, scheduler, args) if all(map(_can_run_twice, schedulers_in(scheduler))) else None


def schedulers_in(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it holds."""
    found = [scheduler]
    for held in found:
        for value in vars(held).values():
            parts = value if type(value) in (list, tuple) else (value,)
            found += [s for s in parts if isinstance(s, _BASE) and not any(s is other for other in found)]
    return found


def _can_run_twice(scheduler: Any) -> bool:
    optimizer = vars(scheduler).get("optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    for group in optimizer.param_groups:
        for key, value in group.items():
            parts = value if type(value) in (list, tuple) else (value,)
            if key != "params" and any(isinstance(part, (torch.Tensor, torch.SymFloat)) for part in map(plain, parts)):
                return False
    functions = [
        part
        for value in vars(scheduler).values()
        for part in (value if type(value) in (list, tuple) else (value,))
        if callable(part) and not isinstance(part, _BASE)
    ]
    own = [name for name in vars(_BASE) if name not in _NOT_CALLED and _is_own(scheduler, name)]
    return not any(map(has_side_effects, functions)) and not any(
        method_has_side_effects(type(scheduler), name) for name in own
    )


def _is_own(scheduler: Any, name: str) -> bool:
    method = getattr(type(scheduler), name, None)
    method = getattr(method, "__wrapped__", method)  # of `step`, which is recorded
    return callable(method) and not str(method.__module__).startswith("torch.")


def _copy(
    obj: Any,
    before: Mapping[Entry, Any],
    copies: dict[int, Any],
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]],
) -> Any:
    """A copy of a scheduler or its optimizer, with copies of the lists, schedulers and groups that a step changes.

    Args:
        copies: those made so far, by the id of the original.
        tables: the dicts that hold numbers, each with its copy, to which it is added.
    """

    def fill(new: dict[Any, Any], of: dict[Any, Any]) -> dict[Any, Any]:
        for key, value in of.items():
            new[key] = value if key == "params" else part(before.get((id(of), key), value))
        tables.append((of, new))
        return new

    def part(value: Any) -> Any:
        if isinstance(value, (_BASE, torch.optim.Optimizer)):
            return _copy(value, before, copies, tables)
        return type(value)(map(part, value)) if type(value) in (list, tuple) else plain(value)

    if id(obj) not in copies:
        copies[id(obj)] = new = object.__new__(type(obj))
        if isinstance(obj, torch.optim.Optimizer):
            groups = [fill({}, group) for group in obj.param_groups]
            vars(new).update(vars(obj), _opt_called=True, param_groups=groups)
        else:
            fill(vars(new), vars(obj))
    return copies[id(obj)]


def is_number_list(value: Any) -> bool:
    """Whether it is a list of numbers."""
    return type(value) is list and bool(value) and all(map(is_plain_number, value))


class Results:
    """The input numbers that stand for what schedulers have left while a step is traced."""

    def __init__(self, numbers: InputNumbers, are_inputs: bool) -> None:
        """`are_inputs`: else they are shown as they are at this call."""
        self._numbers = numbers
        self._are_inputs = are_inputs
        self._runs: list[SchedulerRun] = []
        self._made: list[Expression] = []  # of the numbers

    def run(self, run: SchedulerRun) -> Iterator[tuple[Any, dict[Any, Any], Any, Any]]:
        """Run a scheduler on copies; for each of its results, yields the scheduler whose attribute it is, or None, the
        dict and its key that hold it, and its input number, or a list or tuple of such."""
        after = run.after({}, map(plain, run.args))
        self._runs.append(run)
        name = type(run.scheduler).__name__
        for scheduler in schedulers_in(run.scheduler):
            keys = ("lr", "momentum", "betas") if hasattr(scheduler, "cycle_momentum") else ("lr",)
            for table in (vars(scheduler), *vars(scheduler)["optimizer"].param_groups):
                owner = scheduler if table is vars(scheduler) else None
                for key, before in list(table.items()):
                    value = after.get((id(table), key), MISSING)
                    if value is not MISSING and (owner is not None or key in keys or not same(plain(before), value)):
                        where = f"a {type(scheduler).__name__}" if owner is not None else "a parameter group"
                        result = functools.partial(_after, tuple(self._runs), (id(table), key))
                        text = f"{key!r} of {where} after {name}.step()"
                        yield owner, table, key, self._of(value, result, text, str(key))

    def items(self, scheduler: Any, key: str, value: list[Any]) -> Any:
        """The input numbers for those in a list that is an attribute of a scheduler when the step begins."""
        table = vars(scheduler)
        text = f"{key!r} of a {type(scheduler).__name__}"
        return self._of(value, lambda arguments: table.get(key, MISSING), text, key)

    def _of(self, value: Any, result: _Read, description: str, name: str) -> Any:
        """The input number for what `result` reads at each call, or for each number in a list or tuple."""
        if type(value) not in (list, tuple):
            return self._number(value, result, description, name)
        items = [functools.partial(_item, result, i) for i in range(len(value))]
        return type(value)(self._number(v, item, description, name) for v, item in zip(value, items, strict=True))

    def _number(self, value: Any, read: _Read, description: str, name: str) -> Any:
        if not self._are_inputs:
            return value * 1.0 if type(value) is float else value  # another object, which the step did not find there
        number = self._numbers.number(value, Source(read, type(value), description, name))
        self._made.append(number.node.expression)
        return number

    def traced(self, others: Iterable[Expression], arguments: Sequence[Any]) -> None:
        """End the trace: what the step has not used is not computed at its calls.

        Args:
            others: what it leaves, besides what it has computed with.
            arguments: the leaves of the arguments of this call.

        Raises:
            TraceError: if a scheduler's result would not be what it was in the trace.
        """
        used = self._numbers.used(others)
        for expression in self._made:
            source = expression.source
            assert source is not None
            if expression not in used:
                self._numbers.sources.remove(expression)
            elif not same(expression.example, source.read(arguments)):
                raise TraceError(
                    f"{here()}: the traced step reads {source.description} when it has changed what that depends on. "
                    "Read it before, or outside of the traced step."
                )
        self._made.clear()


def _after(runs: Iterable[SchedulerRun], entry: Entry, arguments: Sequence[Any]) -> Any:
    """A result of the last of these runs at a call with these `arguments`; MISSING if there is none."""
    after: dict[Entry, Any] = {}
    for run in runs:
        args = [a.node.expression.value(arguments, {}) if is_input_number(a) else a for a in run.args]
        after = {**after, **run.after(after, args)}
    return after.get(entry, MISSING)


def _item(read: _Read, position: int, arguments: Sequence[Any]) -> Any:
    """An item of what `read` reads; MISSING if there is none."""
    value = read(arguments)
    return value[position] if type(value) in (list, tuple) and position < len(value) else MISSING
