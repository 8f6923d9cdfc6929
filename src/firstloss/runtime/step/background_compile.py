"""A step whose first results are computed by PyTorch's kernels while it is compiled in the background."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...interpreter import gc_thresholds
from ...program.graph import Value
from ..device.dispatch import finish_at_exit
from ..device.lazy_array import LazyArray
from ..device.placement import start_waiting_materializations
from .background_work import BackgroundWork
from .first_loss import FirstLoss
from .tracing import Groups

if TYPE_CHECKING:
    from .segmented import SegmentedRun, SegmentedStep


_LOOK_SECONDS = 0.05  # interval of checks for a thread that is lowering


class BackgroundCompiledStep:
    """Like a `SegmentedStep`, which it uses from its first run on."""

    def __init__(
        self,
        make: Callable[[], SegmentedStep],
        first_loss: FirstLoss,
        groups: Groups,
    ) -> None:
        """
        Args:
            make: creates the segmented step.
            first_loss: computes the last group of outputs.
            groups: its inputs and outputs.
        """
        self._make = make
        self._made: SegmentedStep | None = None
        self._lock = threading.Lock()
        self._lowered = threading.Event()
        self._later: BackgroundWork | None = None
        self.first_loss: FirstLoss | None = first_loss
        self.inputs = (*groups.state, *groups.read)
        self.counts = tuple(map(len, groups.outputs))

    @property
    def ran(self) -> bool:
        """Whether it has been run completely."""
        return self._made is not None and self._made.ran

    def made(self) -> SegmentedStep:
        """The segmented step, created at the first call."""
        with self._lock:
            if self._made is None:
                from .. import jax_support  # noqa: F401 - runs what was deferred until JAX is imported

                finish_at_exit()
                self._made = self._make()
            return self._made

    def lower_in_background(self, later: BackgroundWork) -> None:
        """Start `later`, which lowers the step and runs the rest of it."""
        self._later = later
        later.begin()

    def lower(self) -> SegmentedStep:
        """Lower the step and start compiling it; returns the segmented step."""
        try:
            with gc_thresholds.changed():  # no full collections
                made = self.made()
                start_waiting_materializations()
                made.lower()
                return made
        finally:
            self._lowered.set()

    def wait_until_lowered(self) -> None:
        """Wait while the first run lowers the step, which holds the GIL like a trace: tracing beside it would only
        delay the compiler, and thereby the second call of the step."""
        later = self._later
        while later is not None and not later.done() and not self._lowered.wait(_LOOK_SECONDS):
            pass

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> KernelsFirstRun | SegmentedRun:
        """An execution, started by its `advance`."""
        if self.first_loss is None or self._made is not None:
            return self.made().begin(state, rest, seed)
        return KernelsFirstRun(self, state, rest, seed)


class KernelsFirstRun:
    """The first execution, a `StepRun` (see `dispatch.py`): it returns the results before anything is compiled."""

    def __init__(self, step: BackgroundCompiledStep, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> None:
        self._step = step
        self._given = state, rest, seed
        self._results: list[LazyArray] | None = None
        self._instead: SegmentedRun | None = None  # runs the step if the kernels cannot
        self._later: BackgroundWork | None = None

    @property
    def later(self) -> BackgroundWork | None:
        """The rest of the step, in the background."""
        return self._later if self._instead is None else self._instead.later

    def advance(self) -> None:
        """Compute the results, and start the rest."""
        step = self._step
        if self._later is not None:
            return
        state, rest, seed = self._given
        if self._instead is None:
            given: Mapping[Value, Any] = dict(zip(step.inputs, (*state, *rest), strict=True))
            assert step.first_loss is not None
            self._results = step.first_loss.attempt(given, seed)
            if self._results is not None:
                later = BackgroundWork(functools.partial(_finish, step, state, rest, seed))
                self._given = (), (), None
                self._later = later
                step.lower_in_background(later)
                return
            step.first_loss = None
        from ..jax_support import x64

        with x64():
            if self._instead is None:
                self._instead = step.made().begin(state, rest, seed)
            self._instead.advance()

    def outputs(self) -> tuple:
        """The outputs, in groups."""
        if self._instead is not None:
            return self._instead.outputs()
        later, *counts = self._later, *self._step.counts[:-1]
        assert later is not None and self._results is not None
        groups = [
            tuple(LazyArray(functools.partial(later.of, (group, i))) for i in range(count))
            for group, count in enumerate(counts)
        ]
        return (*groups, tuple(self._results))

    def begun(self) -> bool:
        """After an interrupt: whether state has been donated; if not, it will not be."""
        if self._instead is not None:
            return self._instead.begun()
        if self._later is None:
            return False
        if not self._later.cancel():
            return True
        self._later = None
        return False


def _finish(
    step: BackgroundCompiledStep, state: Sequence[Any], rest: Sequence[Any], seed: Any
) -> dict[tuple[int, int], Any]:
    """Run the step after its first results; returns the outputs by group and index."""
    try:
        run = step.lower().begin(state, rest, seed)
        del state, rest
        outputs = run.all_at_once()
    except BaseException:
        step.first_loss = None  # from now on, run before returning the loss
        raise
    return {(group, i): array for group, arrays in enumerate(outputs) for i, array in enumerate(arrays)}
