"""The first loss computed by PyTorch's own kernels, before anything is lowered; the step is compiled in the background.

A step's result is a slice of its Program, like each weight of its constructor's: mostly the forward pass. It needs the
weights but no compiler, so it is computed as soon as these are available; the step itself is lowered, compiled and run
afterwards. The first loss is then bit-identical to eager PyTorch's, and training follows the compiled step as always.

A step that may be called only once is run by the kernels as a whole, and compiled at its second call; see `NewKinds`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import FirstlossError
from ...program.graph import Value, slice_for
from ...program.program import Program
from ..device import on_gpu
from ..device.dispatch import finish_at_exit
from ..device.lazy_array import BackgroundWork, LazyArray, copied_later
from ..device.placement import start_waiting_materializations
from ..lazy_jax import is_array
from .step_replay import StepContents
from .traced_program import Groups

if TYPE_CHECKING:
    from .segmented import SegmentedRun, SegmentedStep


# A slice with more than this fraction of a Program's nodes is more than a forward pass: compiling is as fast.
_MOST_OF_A_STEP = 0.6


class FirstLoss:
    """Computes some outputs of a step's Program from its inputs, with PyTorch's kernels."""

    def __init__(self, program: Program, names: Sequence[str], device: torch.device | None = None) -> None:
        """
        Args:
            device: the GPU that has the inputs; None for the CPU, or devices that PyTorch does not know.
        """
        self._device = device
        self._refs = [program.outputs[name] for name in names]
        inputs = set(program.inputs.values())
        nodes = slice_for([ref.value for ref in self._refs], stop=inputs)
        read = {ref.value for node in nodes for ref in node.refs()} | {ref.value for ref in self._refs}
        self.inputs: set[Value] = read & inputs
        self.failed: bool = False  # an operation is supported only by the compiler
        self.possible: bool = bool(names) and len(nodes) <= _MOST_OF_A_STEP * len(program.nodes)

    def attempt(self, arrays: Mapping[Value, Any], seed: np.ndarray) -> list[LazyArray] | None:
        """Like `compute`; None if PyTorch's kernels do not support it."""
        try:
            return self.compute(arrays, seed)
        except FirstlossError:
            raise
        except (RuntimeError, IndexError, ValueError):  # an operation that only the compiler supports
            self.failed = True
            return None

    def compute(self, arrays: Mapping[Value, Any], seed: np.ndarray) -> list[LazyArray]:
        """Compute the outputs, in host memory.

        Args:
            arrays: the inputs, arrays or lazy arrays.
            seed: the two words from which the compiled step derives its random numbers.
        """
        results = _ArrayContents(arrays, lambda: seed, self._device).take(self._refs)
        if self._device is not None:
            results = [tensor.cpu() for tensor in results]
            on_gpu.wait(self._device)
        return [copied_later(tensor) for tensor in results]


class _ArrayContents(StepContents):
    """The content of a Program's Values, whose inputs are arrays."""

    def _input(self, value: Value) -> torch.Tensor:
        content = self._content(self._inputs[value]).reshape(value.shape)
        if self._device is not None:
            content = content.to(self._device)
        return content if content.stride() == value.stride else self.allocate(value).copy_(content)

    def _content(self, array: Any) -> torch.Tensor:
        if type(array) is LazyArray:
            borrowed = array.borrow()
            if borrowed is not None:
                return borrowed
            array = array.wait()
        if not is_array(array):
            return torch.from_numpy(np.asarray(array))
        if self._device is not None:
            return on_gpu.view(array)
        from ..jax_support import to_host

        return to_host(array)


_LOOK_SECONDS = 0.05  # interval of checks for a thread that is lowering


class BackgroundCompiledStep:
    """Like a `SegmentedStep`, which it uses from its first run on."""

    def __init__(
        self,
        make: Callable[[], SegmentedStep],
        first_loss: FirstLoss,
        groups: Groups,
        early: Sequence[str],
        whole: bool = False,
    ) -> None:
        """
        Args:
            make: creates the segmented step.
            first_loss: computes the last group of outputs.
            groups: its inputs and outputs.
            early: names of outputs in the last group that are computed before any state changes.
            whole: whether `first_loss` computes all groups, and the step is created at its second run.
        """
        self.early: list[int] = [groups.outputs[-1].index(name) for name in early]
        self.whole: bool = whole
        self._make = make
        self._made: SegmentedStep | None = None
        self._lock = threading.Lock()
        self._lowered = threading.Event()
        self._later: BackgroundWork | None = None
        self.first_loss: FirstLoss | None = first_loss
        self.inputs: tuple[Value, ...] = (*groups.state, *groups.read)
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

    @property
    def is_made(self) -> bool:
        """Whether there is a segmented step."""
        return self._made is not None

    def lower_in_background(self, later: BackgroundWork) -> None:
        """Start `later`, which lowers the step and runs the rest of it."""
        self._later = later
        start_waiting_materializations()  # on the core that importing JAX leaves idle
        later.begin()

    def lower(self) -> SegmentedStep:
        """Lower the step and start compiling it; returns the segmented step."""
        try:
            step = self.made()
            step.lower()
            return step
        finally:
            self._lowered.set()

    def wait_until_lowered(self) -> None:
        """Wait while the first run lowers the step, which holds the GIL like a trace: tracing beside it would only
        delay the compiler, and thereby the second call of the step."""
        later = self._later
        while later is not None and not later.done() and not self._lowered.wait(_LOOK_SECONDS):
            pass

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> KernelsFirstRun | SegmentedRun:
        """An execution; see `dispatch.execute`."""
        if self.first_loss is None or self.is_made:
            return self.made().begin(state, rest, seed)
        return KernelsFirstRun(self, state, rest, seed)


class KernelsFirstRun:
    """The first execution, a `StepRun` (see `dispatch.py`): it returns the results before anything is compiled."""

    def __init__(self, step: BackgroundCompiledStep, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> None:
        self._step = step
        self._inputs = state, rest, seed
        self._before: list[LazyArray] = []  # the outputs before the last group, if they are computed, too
        self._results: list[LazyArray] | None = None
        self._instead: SegmentedRun | None = None  # runs the step if the kernels cannot
        self._later: BackgroundWork | None = None

    @property
    def later(self) -> BackgroundWork | None:
        """The rest of the step, in the background."""
        return self._later if self._instead is None else self._instead.later

    def prepare(self) -> None:
        """Compute the results."""
        step = self._step
        state, rest, seed = self._inputs
        arrays: Mapping[Value, Any] = dict(zip(step.inputs, (*state, *rest), strict=True))
        assert step.first_loss is not None
        results = step.first_loss.attempt(arrays, seed)
        if results is not None:
            start = len(results) - step.counts[-1]
            self._before, self._results = results[:start], results[start:]
        else:
            step.first_loss = None
            from ..jax_support import x64

            with x64():
                self._instead = step.made().begin(state, rest, seed)
                self._instead.prepare()

    def early(self) -> list[Any]:
        """The outputs that decide whether the run is to be finished."""
        if self._instead is not None:
            return self._instead.early()
        assert self._results is not None
        return [self._results[i] for i in self._step.early]

    def finish(self) -> None:
        """Start the rest."""
        if self._instead is not None:
            from ..jax_support import x64

            with x64():
                self._instead.finish()
            return
        if self._step.whole:
            self._step.first_loss = None
            return
        self._later = BackgroundWork(functools.partial(_finish, self._step, *self._inputs))
        self._inputs = (), (), None
        self._step.lower_in_background(self._later)

    def outputs(self) -> tuple[Any, ...]:
        """The outputs, in groups."""
        if self._instead is not None:
            return self._instead.outputs()
        later, *counts = self._later, *self._step.counts[:-1]
        assert self._results is not None
        if self._step.whole:
            before = iter(self._before)
            return (*(tuple(itertools.islice(before, count)) for count in counts), tuple(self._results))
        assert later is not None
        groups = [
            tuple(LazyArray(functools.partial(later.of, (group, i))) for i in range(count))
            for group, count in enumerate(counts)
        ]
        return (*groups, tuple(self._results))


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
