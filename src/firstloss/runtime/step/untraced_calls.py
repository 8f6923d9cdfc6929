"""When a step that cannot stay compiled runs its Python without being traced first.

`TraceCounts` counts what has come of its traces; `UntracedCalls` decides at which of the calls that no compiled step
fits it is not traced, and `NewKinds` at which of those of a kind that has not been met before.
"""

from __future__ import annotations

from collections.abc import Hashable

# How many steps are compiled in a row, none of which a later call fits, before the next calls run untraced; fewer if
# they differ in what they have read, as the steps of an adaptive solver do, or if there are so many for all kinds of
# calls.
_MAX_UNUSED = 3
_MAX_FEW_UNUSED = 1
_MAX_UNUSED_OF_ALL_KINDS = 8

# For calls of all kinds, before a step is compiled at its second call only: one more, as the first of a kind is not
# counted.
_MAX_UNUSED_AT_ONCE = 4

# How many kinds of calls there may be whose steps no call has fitted, before those that are new run untraced; one time
# more for each so many. A resumed run compiles the first anew, so that it has an uninterrupted one's bits if it needs
# no more.
_MAX_UNUSED_KINDS = 4
_UNUSED_FOR_ONE_MORE = 8

# How many kinds of calls are remembered that have run untraced.
_MAX_MET = 1024

# How many compiled steps there may be whose outcomes differ.
_MAX_OUTCOMES = 8

# How many steps that differ in their outcomes are compiled at first (one, if they have many outcomes, as an adaptive
# solver's do), and after how many calls that fit one of them one more is.
_OUTCOMES_AT_FIRST = 4
_MANY_OUTCOMES = 16
_CALLS_FOR_ONE_MORE = 8

# At how many calls in a row it is traced, for whatever reasons, before the next calls run untraced.
_MAX_IN_A_ROW = 8


class NewKinds:
    """The kinds of calls, such as shapes of batches, that were new when too many steps had been compiled in vain.

    A step whose batches have other shapes each time (graphs, boxes, sentences) would be compiled at each call. So then
    it runs its Python for one that is new, and is compiled if that comes again.

    Attributes:
        in_vain: the number of steps compiled in a row, for calls of any kind, that no call has fitted.
    """

    def __init__(self) -> None:
        self.in_vain: int = 0
        self._unused: set[Hashable] = set()  # kinds for which a step was compiled that no call has fitted
        self._met: dict[Hashable, int] = {}  # how many calls of a kind have run untraced
        self._newest = 0

    def are_in_vain(self) -> bool:
        """Whether too many were compiled in vain."""
        return self.in_vain > _MAX_UNUSED_AT_ONCE

    def note_newest(self, newest: int) -> None:
        """Note the number of the newest model; if that is new, what was in vain was so for others."""
        if newest > self._newest:
            self._newest, self.in_vain = newest, 0
            self._unused.clear()

    def fits(self, kind: Hashable) -> None:
        """Note a call that a step fits, which was compiled for this kind."""
        if self._unused:
            self._unused.discard(kind)

    def run_untraced(self, kind: Hashable) -> bool:
        """Whether a call of a kind that no step was compiled for runs the step's Python."""
        unused, met = len(self._unused), self._met.pop(kind, 0)
        if unused <= _MAX_UNUSED_KINDS or met >= max(1, unused // _UNUSED_FOR_ONE_MORE):
            self._unused.add(kind)
            return False
        self._met[kind] = met + 1
        if len(self._met) > _MAX_MET:
            del self._met[next(iter(self._met))]
        return True


class TraceCounts:
    """What has come of a step's traces, for one kind of call."""

    def __init__(self, new_kinds: NewKinds) -> None:
        self._new_kinds = new_kinds
        self._in_vain = 0  # the number of steps compiled in a row that no call has fitted
        self._in_a_row = 0  # the number of calls in a row at which it was traced
        self._for_outcomes = 0  # the number of steps compiled that have outcomes
        self.fitted: int = 0  # the number of calls that one fitted

    def fits(self) -> None:
        """Count a call that a compiled step fits."""
        self._in_vain = self._new_kinds.in_vain = self._in_a_row = 0
        self.fitted += 1

    def compiled(self, outcomes: int, is_new: bool) -> None:
        """Count a step that was compiled, or has the executable of an earlier one."""
        self._in_vain = self._in_vain + 1 if is_new else 0
        self._new_kinds.in_vain = self._new_kinds.in_vain + 1 if is_new else 0
        self._for_outcomes += is_new and outcomes > 0

    def traced(self) -> None:
        """Count a call at which it was traced."""
        self._in_a_row += 1

    def begin_anew(self, of_all_kinds: bool = False, is_traced: bool = False) -> None:
        """Forget what was in vain, for calls of this kind or of all; if `is_traced`, also at how many calls in a row it
        was traced."""
        self._in_vain = 0
        if of_all_kinds:
            self._new_kinds.in_vain = 0
        if is_traced:
            self._in_a_row = 0

    def is_in_vain(self, outcomes: int) -> bool:
        """Whether too many steps in a row, of which the last has so many outcomes, were compiled in vain."""
        few = outcomes or self._new_kinds.in_vain > _MAX_UNUSED_OF_ALL_KINDS
        return self._in_vain > (_MAX_FEW_UNUSED if few else _MAX_UNUSED)

    def are_in_vain(self) -> bool:
        """Whether too many steps in a row were compiled in vain for calls of all kinds."""
        return self._new_kinds.are_in_vain()

    def is_traced_each_time(self) -> bool:
        """Whether it was traced at too many calls in a row."""
        return self._in_a_row > _MAX_IN_A_ROW

    def may_have_other_outcomes(self, entries: int) -> bool:
        """Whether one more may be compiled for other outcomes, where there are so many."""
        return self._in_vain <= _MAX_FEW_UNUSED and entries < _MAX_OUTCOMES

    def outcomes_vary(self, outcomes: int) -> bool:
        """Whether too few calls have fitted the steps compiled so far, which differ in so many outcomes, to compile one
        more."""
        most = 1 if outcomes > _MANY_OUTCOMES else _OUTCOMES_AT_FIRST
        return self._for_outcomes >= most + self.fitted // _CALLS_FOR_ONE_MORE


class UntracedCalls:
    """The calls, of those that no compiled step fits, at which the step's Python runs untraced.

    There are some from when a step has read values, could not be traced, would have to be traced at each call, or was
    compiled in vain. It may do so no more, so it is traced again at the second and third such call, at three from the
    16th on, since the first shows what varies, at three from the 256th on, and so on: a trace, computed value by value,
    takes three to eight times as long as the step.
    """

    def __init__(self) -> None:
        self._calls = 0

    def __bool__(self) -> bool:
        """Whether there are some."""
        return self._calls > 0

    def begin(self) -> None:
        """Let there be some: after the second and third call, which are traced."""
        self._calls = max(self._calls, 1)

    def begin_at_once(self) -> None:
        """Let there be some, beginning with the next call."""
        self._calls = max(self._calls, 4)

    def begin_late(self) -> None:
        """Let there be some, beginning with this call; the 256th is the next that is traced."""
        self._calls = max(self._calls, 18)

    def is_next(self) -> bool:
        """Whether the call that begins is one of them."""
        if self._calls:
            self._calls += 1
        power = 1 << (self._calls.bit_length() - 1) // 4 * 4 if self._calls else 0  # of 16
        return self._calls > 3 and self._calls >= power + 3
