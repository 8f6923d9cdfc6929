"""State of the process that steps read and change: the environment, and the warning filters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

from ...compat.python_names import environment_of
from .kind import State


class Environment(State):
    """The variables in `os.environ`."""

    __slots__ = ()
    order = 2

    def __init__(self) -> None:
        super().__init__(os.environ, environment())

    def compare(self, effects: Any) -> None:
        now = environment()
        changed = environment_changes(self.before, now)
        if changed:
            effects.replaced(os.environ, set_environment, environment_changes(now, self.before), changed)


class Filters(State):
    """The warning filters."""

    __slots__ = ()
    order = 2

    def __init__(self) -> None:
        super().__init__(warnings, filters())

    def compare(self, effects: Any) -> None:
        if effects.reads is not None and effects.reads.sets_filters and self.before != (now := filters()):
            effects.replaced(warnings, set_filters, self.before, now)


def environment() -> tuple[Any, ...]:
    """The variables in `os.environ`."""
    return tuple(environment_of(os.environ).items())


def restore_environment(before: tuple[Any, ...]) -> None:
    """Restore what `environment` returned."""
    set_environment(environment_changes(environment(), before))


def filters() -> tuple[Any, ...]:
    """The warning filters."""
    return tuple(warnings.filters)


def raising(among: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The filters in `among` that turn warnings into errors; the others only affect what is printed."""
    return tuple([entry for entry in among if entry[0] == "error"])


def set_filters(filters: tuple[Any, ...]) -> None:
    """Restore what `filters` returned."""
    warnings.resetwarnings()  # also invalidates the record of warnings that were shown already
    warnings.filters[:] = filters  # type: ignore[index]  # a list at run time


def environment_changes(before: tuple[Any, ...], after: tuple[Any, ...]) -> dict[str, str | None]:
    """The variables that differ `after`; None for those that were deleted."""
    old, new = dict(before), dict(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {os.fsdecode(name): os.fsdecode(new[name]) if name in new else None for name in names}


def set_environment(values: dict[str, str | None]) -> None:
    """Set these variables, and delete those that are None."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
