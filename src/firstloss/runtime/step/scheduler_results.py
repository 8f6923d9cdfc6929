"""What a traced step reads of a scheduler that it has stepped: numbers, which each call computes before it runs.

The scheduler itself steps in Python once the compiled step has run (`schedulers.py`). Its Python depends on nothing
that the step computes, so that the same step of a copy gives the numbers beforehand. That needs code without side
effects, since it runs twice: PyTorch's own schedulers, and what is passed to them if its bytecode shows none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...capture.input_numbers import Expression, InputNumbers, Source, is_input_number, is_plain_number, plain
from ...errors import GraphChangedError, TraceError
from ...program.nested import mapped
from ...program.source import here
from ..guards.access import MISSING
from ..guards.equality import same
from ..guards.places import can_vary
from ..guards.side_effects import has_side_effects, method_has_side_effects

if TYPE_CHECKING:
    from ..guards.effects import Bind
    from ..guards.reconstruct import CallFrame

Entry = tuple[int, Any]  # the id of a dict, and a key of it
Result = tuple[Any, dict[Any, Any], Any, Any]  # see `Results.run`
_BASE = torch.optim.lr_scheduler.LRScheduler
_NOT_CALLED = ("__init__", "state_dict", "load_state_dict", "get_last_lr")  # by `step()`


class STEPPED:
    """Among the classes of a step's inputs (`tracing.trace_step`): the numbers that it reads of schedulers that it has
    stepped."""


class STEPPED_NOW:
    """Likewise, but as they are at this call: in a trace that is only to be compared with another."""


class ReadsSchedulerError(TraceError):
    """A step reads numbers of a scheduler that it has stepped: it can be traced with these as inputs."""


class ChangesMoreError(Exception):
    """A scheduler's step changes more than numbers."""


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

        Raises:
            ChangesMoreError: if it changes something that is not a number.
        """
        tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        copies: dict[int, Any] = {}
        self.step(_copy(self.scheduler, before, copies, tables), *args)
        for scheduler in schedulers_in(self.scheduler):
            if any(not _is_unchanged(scheduler, key, new, copies) for key, new in vars(copies[id(scheduler)]).items()):
                raise ChangesMoreError
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
    args = () if args == (None,) else args  # `step(epoch=None)`
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
            found += [s for s in _parts(value) if isinstance(s, _BASE) and not any(s is other for other in found)]
    return found


def optimizer_of(scheduler: Any) -> torch.optim.Optimizer | None:
    """The optimizer that a scheduler is of; None if it has none, as one that chains others."""
    optimizer: torch.optim.Optimizer | None = object.__getattribute__(scheduler, "__dict__").get("optimizer")
    return optimizer


def _parts(value: Any) -> Iterable[Any]:
    """The items of a list or tuple; of another value, it alone."""
    return value if type(value) in (list, tuple) else (value,)


def _can_run_twice(scheduler: Any) -> bool:
    optimizer = optimizer_of(scheduler)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    for group in optimizer.param_groups:
        for key, value in group.items():
            parts = map(plain, _parts(value))
            if key != "params" and any(isinstance(part, (torch.Tensor, torch.SymFloat)) for part in parts):
                return False
    functions = [
        part
        for value in vars(scheduler).values()
        for part in _parts(value)
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


def _is_unchanged(scheduler: Any, key: str, new: Any, copies: dict[int, Any]) -> bool:
    """Whether an attribute of a scheduler's copy is what the scheduler's is, or a number."""
    return _is_the_same(vars(scheduler).get(key, getattr(type(scheduler), key, MISSING)), new, copies)


def _is_the_same(old: Any, new: Any, copies: dict[int, Any]) -> bool:
    if can_vary(new) or is_number_list(new) or new is copies.get(id(old)):
        return True
    if type(new) in (list, tuple):
        same_type = type(old) is type(new) and len(old) == len(new)
        return same_type and all(_is_the_same(*pair, copies) for pair in zip(old, new, strict=True))
    return same(old, new)


def _copy(
    obj: Any,
    before: Mapping[Entry, Any],
    copies: dict[int, Any],
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]],
) -> Any:
    """A copy of a scheduler or its optimizer, with copies of the lists, schedulers and groups that a step changes; of
    an input number, the number; of other objects, themselves.

    Args:
        copies: those made so far, by the id of the original.
        tables: the dicts that hold numbers, each with its copy, to which it is added.
    """
    if not isinstance(obj, (_BASE, torch.optim.Optimizer)):
        return plain(obj)
    copied = functools.partial(_copy, before=before, copies=copies, tables=tables)

    def fill(new: dict[Any, Any], of: dict[Any, Any]) -> dict[Any, Any]:
        for key, value in of.items():
            new[key] = value if key == "params" else mapped(copied, before.get((id(of), key), value))
        tables.append((of, new))
        return new

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
        self._read: list[tuple[Expression, Any]] = []  # what calls read, with what it is in the trace
        # Where schedulers leave their results, with the expression of a list of such, and the position in it.
        self._left: dict[Entry, tuple[dict[Any, Any], Expression, int]] = {}

    def run(self, run: SchedulerRun) -> Iterator[Result]:
        """Run a scheduler on copies; for each of its results, yields the scheduler whose attribute it is, or None, the
        dict and its key that hold it, and its input number, or a list or tuple of such."""
        after = run.after({}, map(plain, run.args))
        self._runs.append(run)
        shown: dict[Entry, tuple[Any, dict[Any, Any]]] = {}
        for scheduler in schedulers_in(run.scheduler):
            keys = ("lr", "momentum", "betas") if hasattr(scheduler, "cycle_momentum") else ("lr",)
            optimizer = optimizer_of(scheduler)
            assert optimizer is not None  # else it cannot run twice
            for table in (vars(scheduler), *optimizer.param_groups):
                owner = scheduler if table is vars(scheduler) else None
                for key, before in table.items():
                    value = after.get((id(table), key), MISSING)
                    if value is not MISSING and (owner is not None or key in keys or not same(plain(before), value)):
                        shown[id(table), key] = owner, table
        read = functools.partial(_after, tuple(self._runs), tuple(shown))
        values = [after[entry] for entry in shown]
        numbers = self._of(values, read, f"what {type(run.scheduler).__name__}.step() sets", "step")
        for i, ((entry, (owner, table)), number) in enumerate(zip(shown.items(), numbers, strict=True)):
            if self._are_inputs:
                self._left[entry] = table, self._read[-1][0], i
            yield owner, table, entry[1], number

    def of_list(self, scheduler: Any, key: str, value: list[Any]) -> Any:
        """The input numbers for those in a list that is an attribute of a scheduler when the step begins."""
        read = functools.partial(_attribute, vars(scheduler), key)
        return self._of(value, read, f"the attribute {key} of a {type(scheduler).__name__}", key)

    def _of(self, values: list[Any], read: Callable[[Sequence[Any]], Any], description: str, name: str) -> list[Any]:
        """The input numbers for `values`, numbers or lists and tuples of numbers, which `read` returns at each call."""
        if not self._are_inputs:
            return [_other(value) for value in values]
        expression = self._numbers.read(Source(read, list, description, name))
        self._read.append((expression, values))
        self._numbers.guard(Expression(_kinds, (expression,)), _kinds(values))
        return self._part(values, expression)

    def _part(self, part: Any, expression: Expression, *position: int) -> Any:
        """The input numbers for `part`, which is at a position in the lists and tuples that are an expression's."""
        if type(part) in (list, tuple):
            return type(part)(self._part(item, expression, *position, i) for i, item in enumerate(part))
        item = functools.partial(functools.reduce, operator.getitem, position)
        return self._numbers.of(Expression(item, (expression,), None, part))

    def check(self, arguments: Sequence[Any]) -> None:
        """
        Args:
            arguments: the leaves of the arguments of this call.

        Raises:
            TraceError: if the results would not be what they were in the trace, whose effects have been undone.
        """
        for expression, values in self._read:
            source = expression.source
            assert source is not None
            if not same(_tuples(values), _tuples(source.read(arguments))):
                raise TraceError(
                    f"{here()}: the traced step reads {source.description} when it has changed what that depends on. "
                    "Read it before, or outside of the traced step."
                )
        self._read.clear()

    def checking(self, name: str) -> Callable[[CallFrame], Bind] | None:
        """What checks, once the schedulers have stepped at a call, that they have left what the step has read; None if
        there is nothing.

        Args:
            name: of the step.
        """
        left = [(table, key, expression, i) for (_, key), (table, expression, i) in self._left.items()]

        def check(env: CallFrame) -> None:
            for table, key, expression, i in left:
                read = expression.value(env.arguments, env.known)[i]
                if not same(_tuples(read), _tuples(table.get(key, MISSING))):
                    raise GraphChangedError(
                        f"{here()}: {name} has read {read!r} as what a scheduler's step() sets as {key!r}, which is "
                        f"{table.get(key)!r}: it depends on what the step changes. Read it outside of the traced step."
                    )

        return (lambda env: functools.partial(check, env)) if left else None


def _after(runs: Iterable[SchedulerRun], entries: Iterable[Entry], arguments: Sequence[Any]) -> list[Any]:
    """Results of the last of these runs at a call with these `arguments`; MISSING for one that there is not."""
    after: dict[Entry, Any] = {}
    for run in runs:
        args = [a.node.expression.value(arguments, {}) if is_input_number(a) else a for a in run.args]
        try:
            after = {**after, **run.after(after, args)}
        except Exception:  # such as that it has stepped too often: it is raised when the step is traced again
            return [MISSING for _ in entries]
    return [after.get(entry, MISSING) for entry in entries]


def _attribute(table: dict[Any, Any], key: str, arguments: Sequence[Any]) -> Any:
    return table.get(key, MISSING)


def _tuples(value: Any) -> Any:
    """Tuples for lists and tuples."""
    return mapped(lambda part: part, value, tuple)


def _kinds(value: Any) -> Any:
    """The types of numbers, in tuples as they are in lists and tuples."""
    return mapped(type, value, tuple)


def _other(value: Any) -> Any:
    """Another object, which the step did not find there."""
    return mapped(lambda part: part * 1.0 if type(part) is float else part, value)
