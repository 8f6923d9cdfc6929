"""From a `TracedProgram` to what computes it: lowered, cut where it repeats, compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...capture.recorder import DeferredStorage
from ...errors import BackendError
from ...lower.names import all_have_rules
from ..backend import Backend
from ..device import on_gpu
from ..mesh.processes import processes
from .first_loss import FirstLoss
from .inputs import Inputs
from .put_off import PutOffStep
from .traced import TracedProgram

if TYPE_CHECKING:
    from .segmented import SegmentedStep


def compile_step(traced: TracedProgram, inputs: Inputs, backend: Backend) -> SegmentedStep | PutOffStep:
    """What is called with the state that the step changes, the rest of its inputs and a seed, and returns new state,
    what the step leaves, and results. The state is donated, so that its memory is updated in place.

    Raises:
        BackendError: for a mesh that is not there.
        LoweringError: for operations that have no lowering.
    """
    if backend.mesh is not None and not backend.mesh.is_there:
        raise BackendError(
            f"{traced.name} cannot be compiled for an AbstractMesh, whose devices are not there: only planned, as "
            f"{traced.name}.plan(batch). Give the backend sizes of axes, as mesh={backend.mesh.axes}."
        )
    first_loss = _first_loss(traced, traced.results, backend)
    if first_loss is None or not all_have_rules(traced.program):
        from .parts import refuse_unsupported

        refuse_unsupported(traced)

    def make() -> SegmentedStep:
        from .parts import segmented  # here, because it brings JAX

        return segmented(traced, inputs, backend, behind=first_loss is not None and not first_loss.failed)

    if first_loss is None:
        return make()
    return PutOffStep(make, first_loss, traced.groups)


def _first_loss(traced: TracedProgram, names: Sequence[str], backend: Backend) -> FirstLoss | None:
    """What computes the results of the first step without a compiler: that of new weights, not of those which a
    checkpoint had, so that a run that goes on has the losses of one that was never interrupted."""
    if backend.first_loss != "eager" or backend.stepped or traced.raised is not None:
        return None
    if backend.compile_only or backend.validate_only or processes().count > 1:  # each process has some of the parts
        return None
    where = on_gpu.device()
    if where is not None and backend.mesh is not None:  # no GPU has all of each weight
        return None
    found = FirstLoss(traced.program, names, where)
    owners = [traced.owners.inputs[value] for value in found.inputs]
    weights = [owner for owner in owners if isinstance(owner, DeferredStorage)]
    fresh = all(owner.resident is None or owner.resident.fresh for owner in weights)
    return found if weights and fresh and found.possible else None
