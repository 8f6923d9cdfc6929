"""The outcome of one generated program."""

from __future__ import annotations

from dataclasses import dataclass

SAME, DIFFERS, REFUSED, FOREIGN, DISCARDED = "same", "differs", "refused", "foreign", "discarded"
CRASHED, HUNG = "crashed", "hung"
FAILURES = (DIFFERS, FOREIGN, CRASHED, HUNG)


@dataclass(frozen=True)
class Outcome:
    """The verdict on a program.

    Attributes:
        kind: "same"; "differs" (silently another value than PyTorch's); "refused" (an error of Firstloss's own);
            "foreign" (any other error); "discarded" (PyTorch itself fails, or the program amplifies rounding errors, so
            that there is nothing to compare with); "crashed" and "hung" are the process's.
        what: the difference or the error, in one line.
        where: the line of the program that an error names, or the step that differs first.
    """

    kind: str
    what: str = ""
    where: str = ""

    @property
    def failed(self) -> bool:
        """Whether this is a fault of Firstloss; refusing a program is not."""
        return self.kind in FAILURES

    def like(self, other: Outcome) -> bool:
        """Whether both probably have the same cause: the criterion for shrinking."""
        return self.kind == other.kind and self._cause() == other._cause()

    def _cause(self) -> str:
        if self.kind != DIFFERS:
            return self.what.partition(":")[0]
        how = self.what.partition(": ")[2]
        signs = ("after each tensor", "object", "items", "keys", "attributes", "requires_grad", "torch.")
        return next((sign for sign in signs if sign in how), "values")
