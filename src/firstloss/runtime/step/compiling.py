"""`compile_step`: compilation of a `TracedProgram` to an executable step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...capture.recorder import DeferredStorage
from ...errors import BackendError
from ...lower.registry import is_certain
from ..backend import Backend
from ..device import on_gpu
from ..lazy_jax import process_count
from .first_loss import BackgroundCompiledStep, FirstLoss
from .inputs import Inputs
from .traced_program import TracedProgram

if TYPE_CHECKING:
    from .segmented import SegmentedStep


def compile_step(
    traced: TracedProgram, inputs: Inputs, backend: Backend, once: bool = False
) -> SegmentedStep | BackgroundCompiledStep:
    """Compile a step. Called with the state that it changes, its other inputs and a seed, the executable returns the
    new state, effects and results. The state is donated and updated in place.

    Args:
        once: whether it may be called only once, so that PyTorch's kernels run its first call, and it is compiled at
            the second.

    Raises:
        BackendError: for an abstract mesh.
        LoweringError: for operations that have no lowering.
    """
    if backend.mesh is not None and not backend.mesh.is_there:
        raise BackendError(
            f"{traced.name} cannot be compiled for an AbstractMesh, which has no devices: only planned, as "
            f"{traced.name}.plan(batch). Pass the backend sizes of axes, as mesh={backend.mesh.axes}."
        )
    names = [name for group in traced.groups.outputs for name in group]
    first_loss = FirstLoss(traced.program, names) if once else _first_loss(traced, traced.results, backend)
    if first_loss is None or not all(map(is_certain, traced.program.nodes)):
        from .segmentation import refuse_unsupported

        refuse_unsupported(traced)

    def make() -> SegmentedStep:
        from .segmentation import segmented  # imported late, because it imports JAX

        return segmented(traced, inputs, backend, behind=first_loss is not None and not first_loss.failed)

    if first_loss is None:
        return make()
    return BackgroundCompiledStep(make, first_loss, traced.groups, traced.early, whole=once)


def _first_loss(traced: TracedProgram, names: Sequence[str], backend: Backend) -> FirstLoss | None:
    """The computation of the first step's results without a compiler; only for new weights, not for those of a
    checkpoint, so that a resumed run has the same losses as an uninterrupted one."""
    if backend.first_loss != "eager" or backend.stepped or traced.raised is not None:
        return None
    if backend.compile_only or backend.validate_only or process_count() > 1:  # each process has only some shards
        return None
    if backend.same_run is not None:  # PyTorch takes sums in another order
        return None
    device = on_gpu.device()
    if device is not None and backend.mesh is not None:  # no GPU has whole weights
        return None
    first_loss = FirstLoss(traced.program, names, device)
    owners = [traced.owners.inputs[value] for value in first_loss.inputs]
    weights = [owner for owner in owners if isinstance(owner, DeferredStorage)]
    fresh = all(owner.resident is None or owner.resident.fresh for owner in weights)
    return first_loss if weights and fresh and first_loss.possible else None
