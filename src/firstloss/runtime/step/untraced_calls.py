"""`UntracedCalls`: at which calls a step that cannot stay compiled runs its Python without being traced first."""

from __future__ import annotations


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
