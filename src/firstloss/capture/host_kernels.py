"""Calls of a single kernel on weights whose memory is this host's.

Where a step's Python runs at each call, by PyTorch's kernels, most calls are of this kind: the updates of an optimizer,
and the operations of which autograd makes its graph. `recorder.dispatch` handles any call, at twice the cost.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch

from ..compat.torch_names import DisableTorchDispatch, OpOverload, schema_of
from .distributed import COLLECTIVES
from .op_call import is_composite, traits_of
from .op_overrides import HANDLERS
from .session import this_thread
from .tensor import DeferredTensor

Tensor = torch.Tensor


class _Kernel(NamedTuple):
    """What has to be known of an operation to call it on weights whose memory is this host's: see `run`.

    Attributes:
        writes: the positions of the arguments that it writes to.
        returned: the position of the argument that it returns; None if it returns what it computes.
    """

    writes: frozenset[int]
    returned: int | None


@functools.cache
def _kernel(op: OpOverload) -> _Kernel | None:
    """None if the operation is more than a kernel on tensors: a view, a draw, one on lists, or one with a handler."""
    traits = traits_of(op)
    special = traits.view or traits.replacement or traits.random or traits.opaque or traits.is_foreach or traits.out
    if special or op.name() in HANDLERS or is_composite(op) or op.namespace in COLLECTIVES:
        return None
    types = [str(argument.type) for argument in schema_of(op).arguments]
    if "device" in traits.arguments or any("List" in kind and "Tensor" in kind for kind in types):
        return None
    positions = [position for position in (*traits.writes, *traits.returns) if position is not None]
    if any(isinstance(position, str) for position in positions) or len(traits.returns) != 1:
        return None
    returned = traits.returns[0]
    assert returned is None or isinstance(returned, int)
    return _Kernel(frozenset(p for p in traits.writes if isinstance(p, int)), returned)


def run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `op` on the memory of its arguments, if it is such a call.

    Returns:
        The result; NotImplemented if the call is another one.
    """
    known = _kernel(op)
    if known is None:
        return NotImplemented
    real: list[Any] = []
    used = this_thread.used
    for position, arg in enumerate(args):
        if type(arg) is DeferredTensor:
            storage = arg._storage
            resident = storage.resident
            if resident is None or storage.mirrors is not None:
                return NotImplemented
            if position in known.writes and not resident.is_exported:
                return NotImplemented
            if used is not None:
                used.add(weakref.ref(storage))
            memory = resident.host()
            same = arg.shape == memory.shape and arg.stride() == memory.stride() and arg.dtype is memory.dtype
            arg = memory if same and not arg.storage_offset() else arg._ref().view(memory)
        real.append(arg)
    for arg in kwargs.values():
        if isinstance(arg, Tensor):
            return NotImplemented
    with DisableTorchDispatch():
        result = op(*real, **kwargs)
    return result if known.returned is None else args[known.returned]
