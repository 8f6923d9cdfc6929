"""What a retraced step reports: warnings and errors that name what has changed, and where the Programs differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...capture.data_dependent import ValueRequest
from ...errors import EagerStepWarning, GraphChangedError, GraphChangeWarning
from ...program.compare import Difference
from ...program.source import Source, here, warn
from ..guards.external_state import ExternalCall
from ..guards.guard_set import GuardSet
from ..guards.guards import Change

ADVICE = (
    "A compiled step has one graph: keep what changes in a tensor, and choose with torch.where(condition, a, b) "
    "instead of `if condition:`; count in a tensor (step = torch.zeros(()), then step += 1), not in a Python number; "
    "pass a batch as an argument."
)


class Reports:
    """The warnings and errors of a step, for one kind of call.

    Attributes:
        name: the step's name.
    """

    def __init__(self, name: str, refuse: bool) -> None:
        """`refuse`: whether a change of the step is an error."""
        self.name = name
        self._refuse = refuse
        self._reported: set[str] = set()
        self._reads_reported: set[Source] = set()

    def report_difference(self, why: list[str], difference: Difference | None) -> None:
        """Report that the step behaves differently now, with the reasons."""
        text = (
            f"{self.name} does something else now than when it was traced: {difference}. "
            f"What has changed: {_some(why)}."
        )
        if self._refuse:
            raise GraphChangedError(f"{text} {ADVICE}")
        _warn(f"{text} It is recompiled. {ADVICE}")

    def report_own_writes(self, guards: GuardSet, changes: list[Change], seconds: float | None) -> None:
        """Report what the step both changes and reads, so that it has to be traced at each call.

        Args:
            seconds: see `report_each_time`.
        """
        if all(change.description in self._reported for change in changes):
            return
        self._reported.update(change.description for change in changes)
        text = f"{self.name} changes what it reads itself: {_some(reasons(guards, changes))}. A compiled step runs no"
        if seconds is None:
            self._warn_runs(f"{text} Python, so this one is not compiled")
        else:
            _warn(
                f"{text} Python, so this one is traced at each call ({seconds:.2f} s) to see whether it still does the "
                f"same. {ADVICE}"
            )

    def report_reads(self, reads: Iterable[ValueRequest], seconds: float) -> None:
        """Report that the step runs eagerly, since it has read values.

        Args:
            seconds: what this call has taken.
        """
        for read in reads:
            text = f"`{read.text}`" if read.text else "this line"
            instead = "compute with the tensor (torch.where(condition, a, b)), return it, or read it in fl.step_closure"
            if read.text.startswith("float("):
                instead = "write x.item() in place of float(x)"
            elif read.text.endswith(".item()"):
                instead = (
                    "print it at once, `print(f'{x.item():.3f}')`, leave it a number, or read it in fl.step_closure"
                )
            what = "reads a value that the step has computed"
            if read.kind == "generator":
                what, instead = "draws from a generator of its own", "draw before the step, or omit `generator`"
            if read.source not in self._reads_reported:
                self._reads_reported.add(read.source)
                warn(
                    EagerStepWarning(
                        f"{read.source}: {text} {what}, so {self.name} is not compiled: its Python runs at each call, "
                        f"by PyTorch's kernels (in {seconds:.2g} s, with a trace this time). To have it compiled, "
                        f'{instead}; fl.trace(reads="refuse") makes it an error.'
                    )
                )

    def report_compiled_reads(self, reads: Iterable[ValueRequest], seconds: float) -> None:
        """Report that the step is traced at each call, by all processes, since it has read values.

        Args:
            seconds: what a trace takes.
        """
        for read in reads:
            if read.source not in self._reads_reported:
                self._reads_reported.add(read.source)
                text = f"`{read.text}`" if read.text else "this line"
                _warn(
                    f"{text} at {read.source} reads a value that the step has computed, and makes something else of it "
                    f"than numbers and decisions. So {self.name} is traced at each call ({seconds:.2f} s), and "
                    "compiled again where shapes change. Compute with the tensor (torch.where(condition, a, b)), "
                    "return it, or read it in fl.step_closure."
                )

    def report_eager(self, why: str) -> None:
        """Report that the step runs eagerly, since it reads values in a way that cannot be traced."""
        if why not in self._reported:
            self._reported.add(why)
            warn(EagerStepWarning(f"{why} So {self.name} runs eagerly: its Python runs at each call."))

    def report_written_twice(self, calls: Iterable[ExternalCall]) -> None:
        """Report that the step's Python has run twice at this call, and what it has done twice."""
        what = _some([f"{call.function}() at {call.line}" for call in calls])
        warn(
            EagerStepWarning(
                f"{self.name} has run up to where it cannot be traced, and then again without a trace. What these "
                f"calls write cannot be undone, so it may be there twice: {what}. From now on it runs once a call."
            )
        )

    def report_in_vain(self, why: list[str]) -> None:
        """Report that the step runs eagerly, since each call would have to be compiled."""
        if "in vain" not in self._reported:
            self._reported.add("in vain")
            changes = _some(why) if why else "what it reads"
            self._warn_runs(
                f"{self.name} is another computation at each call, since this changes: {changes}. So it is not compiled"
            )

    def report_each_time(self, why: str, seconds: float | None) -> None:
        """Report why the step is traced at each call.

        Args:
            seconds: what a trace takes; None if the step's Python runs instead.
        """
        if why in self._reported:
            return
        self._reported.add(why)
        if seconds is None:
            self._warn_runs(f"{self.name} would have to be traced at each call, since {why}. So it is not compiled")
        else:
            _warn(f"{self.name} is traced at each call ({seconds:.2f} s): {why}. {ADVICE}")

    @staticmethod
    def _warn_runs(why: str) -> None:
        warn(EagerStepWarning(f"{here()}: {why}: its Python runs at each call, by PyTorch's kernels. {ADVICE}"))


def reasons(guards: GuardSet, changes: list[Change]) -> list[str]:
    """What has changed, and where it is read and written."""
    texts = []
    for change in changes:
        if change.name == "training":
            continue
        reason = f"{change.description} {_change(change.old, change.new)}"
        read, written = guards.lines.where_read(change.name), guards.lines.where_written(change.name)
        places = [f"read at {read}"] * (read is not None) + [f"written at {written}"] * (written is not None)
        texts.append(reason + (f" ({', '.join(places)})" if places else ""))
    return texts


def _change(old: Any, new: Any) -> str:
    texts = [t if isinstance(v, (int, float, str, bool)) and len(t := repr(v)) <= 40 else None for v in (old, new)]
    return f"({texts[0]}, now {texts[1]})" if None not in texts else "is another"


def _some(texts: list[str]) -> str:
    text = "; ".join(texts[:3])
    return text if len(texts) <= 3 else f"{text}; and {len(texts) - 3} more"


def _warn(text: str) -> None:
    warn(GraphChangeWarning(f"{here()}: {text}"))
