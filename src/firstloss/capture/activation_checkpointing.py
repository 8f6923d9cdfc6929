"""`torch.utils.checkpoint` in a step: keep the compiler from undoing the recomputation of activations.

The recomputation is recorded like any other operations. A compiler would eliminate it as a common subexpression, or
schedule it early, since its inputs are available: both would use the memory that checkpointing saves. So its inputs
pass through an optimization barrier (`lax.optimization_barrier`) that depends on the last result before it: the
gradient that has reached the checkpoint.
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
    """Pass the tensors in a pytree through a barrier, if a step is being traced."""
    trace = session.trace
    if trace is None or trace.latest is None:
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        outputs = iter(barrier([x.detach() for x in tensors], _tensor_of(trace.latest, trace)))
    out = [next(outputs).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
    return pytree.tree_unflatten(out, spec)


def _tensor_of(value: Value, trace: Any) -> DeferredTensor:
    """A traced tensor with the content `value`."""
    storage = DeferredStorage(value)
    storage.trace = trace
    return DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype)


@replaces("torch.utils.checkpoint._CheckpointFrame.__init__")
def init_frame(original: Any, self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
    """As the original, for a checkpointed call with use_reentrant=False."""
    original(self, lambda *inputs: recompute_fn(*after_barrier(inputs)), *args, **kwargs)


@replaces("torch.utils.checkpoint.detach_variable")
def detach_variable(original: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """As the original, for a checkpointed call with use_reentrant=True."""
    return original(after_barrier(inputs))
