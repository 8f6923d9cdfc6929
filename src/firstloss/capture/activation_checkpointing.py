"""`torch.utils.checkpoint` in a step: recomputed activations stay recomputed, in the backward pass.

The recomputation arrives as operations like any others. A compiler that sees one computation twice keeps the first
result, and one that finds its inputs ready at the beginning may run it there: either takes just the memory that the
checkpoint was to save. So the recomputation starts from its inputs behind a *barrier* (`lax.optimization_barrier`), an
operation that does nothing, that the compiler does not look through, and that waits for what was computed last: the
gradient that has come down to the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.patches import replaces
from ..compat.torch_names import pytree
from ..program.graph import Value
from ..program.operations import barrier
from . import session
from .tensor import DeferredStorage, DeferredTensor


def after_barrier(tree: Any) -> Any:
    """The same, with the tensors behind a barrier, if a step is being traced."""
    trace = session.trace
    if trace is None or trace.latest is None:
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        made = iter(barrier([x.detach() for x in tensors], _tensor_of(trace.latest, trace)))
    out = [next(made).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
    return pytree.tree_unflatten(out, spec)


def _tensor_of(value: Value, trace: Any) -> DeferredTensor:
    """A tensor of the step that holds `value`."""
    storage = DeferredStorage(value)
    storage.trace = trace
    return DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype)


@replaces("torch.utils.checkpoint._CheckpointFrame.__init__")
def init_frame(original: Any, self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
    """As that of torch's record of one checkpointed call (use_reentrant=False)."""
    original(self, lambda *inputs: recompute_fn(*after_barrier(inputs)), *args, **kwargs)


@replaces("torch.utils.checkpoint.detach_variable")
def detach_variable(original: Any, inputs: tuple) -> tuple:
    """As torch's, which is what the other kind of checkpoint (use_reentrant=True) recomputes from."""
    return original(after_barrier(inputs))
