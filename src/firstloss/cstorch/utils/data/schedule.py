"""`Schedule`: the steps of a loop at which something is done, such as a checkpoint."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

from ....errors import ExecutorError


@dataclass
class Schedule:
    """Intervals of steps, counted from 0.

    Raises:
        ExecutorError: if they overlap or are not in order.
    """

    @dataclass
    class Range:
        """Every `step`-th step from `start` up to, but not including, `end`; and `end - 1` if `include_last`.

        Raises:
            ExecutorError: for an empty range.
        """

        start: int
        end: int
        step: int = 1
        include_last: bool = False

        def __post_init__(self) -> None:
            if not 0 <= self.start < self.end or self.step < 1:
                raise ExecutorError(f"{self} has no steps: 0 <= start < end, and step >= 1.")

        def range(self) -> builtins.range:
            """The steps, without the one that `include_last` adds."""
            return range(self.start, self.end, self.step)

        def __iter__(self) -> Iterator[int]:
            yield from self.range()
            if self.include_last and self.end - 1 not in self.range():
                yield self.end - 1

        def __len__(self) -> int:
            return sum(1 for _ in self)

        def match(self, index: int) -> bool:
            """Whether a step is one of them."""
            return index in self.range() or (self.include_last and index == self.end - 1)

        @property
        def final_step(self) -> int:
            """The last one."""
            return self.end - 1 if self.include_last else self.range()[-1]

        def next_immediate_step(self, target: int) -> int:
            """The first of them that is not before `target`.

            Raises:
                ValueError: if there is none.
            """
            for step in self:
                if step >= target:
                    return step
            raise ValueError(f"there is no step from {target} on: the last one is {self.final_step}")

    intervals: list[Range] = field(default_factory=list)

    def __post_init__(self) -> None:
        for before, after in zip(self.intervals, self.intervals[1:], strict=False):
            if after.start < before.end:
                raise ExecutorError(f"the intervals {before} and {after} of a Schedule overlap, or are not in order.")

    def __iter__(self) -> Iterator[int]:
        for interval in self.intervals:
            yield from interval

    def __len__(self) -> int:
        return sum(map(len, self.intervals))

    def range(self) -> list[builtins.range]:
        """Those of the intervals."""
        return [interval.range() for interval in self.intervals]

    def match(self, index: int) -> bool:
        """Whether a step is one of them."""
        return any(interval.match(index) for interval in self.intervals)

    @property
    def start(self) -> int | None:
        """The first step."""
        return self.intervals[0].start if self.intervals else None

    @property
    def final_step(self) -> int | None:
        """The last step."""
        return self.intervals[-1].final_step if self.intervals else None

    def next_immediate_step(self, target: int) -> int | None:
        """The first of them that is not before `target`; None if there are no intervals.

        Raises:
            ValueError: if they end before it.
        """
        if not self.intervals:
            return None
        for interval in self.intervals:
            if target <= interval.final_step:
                return interval.next_immediate_step(target)
        raise ValueError(f"there is no step from {target} on: the last one is {self.final_step}")
