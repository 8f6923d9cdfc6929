"""The functional overload of a recorded operation, under which its rule is registered.

Capture records the operations that user code calls, including in-place ones; rules are registered only for the
functional overload. It follows from the names that torchgen generates: `add_.Tensor` is `add.Tensor`.
"""

from __future__ import annotations

import functools

import torch

from ..compat.torch_names import OpOverload, overload_name, schema_of

aten = torch.ops.aten

# Exceptions to torchgen's naming pattern.
_IRREGULAR = {
    aten.normal_.default: aten.normal_functional.default,
    aten.normal.float_float_out: aten.normal.float_float,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._unsafe_view.default: aten.view.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.polygamma_.default: aten.polygamma_.default,  # has its arguments in another order, and its own rule
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.__ilshift__.Scalar: aten.__lshift__.Scalar,
    aten.__ilshift__.Tensor: aten.__lshift__.Tensor,
    aten.__irshift__.Scalar: aten.__rshift__.Scalar,
    aten.__irshift__.Tensor: aten.__rshift__.Tensor,
}


@functools.cache
def functional(op: OpOverload) -> OpOverload:
    """The overload that returns what `op` returns or mutates, and mutates nothing; `op` itself if it is functional."""
    if op in _IRREGULAR:
        return _IRREGULAR[op]
    if not schema_of(op).is_mutable:
        return op
    namespace, name = schema_of(op).name.split("::")
    packets = getattr(torch.ops, namespace)
    for candidate in (name.removesuffix("_"), f"{name.removesuffix('_')}_functional"):
        packet = getattr(packets, candidate, None)
        if packet is None:
            continue
        found = getattr(packet, overload_name(op), None)
        if found is not None and not schema_of(found).is_mutable:
            return found
    # `add.out(self, other, out)`: the overload with the same arguments except `out`
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments if a.alias_info is None]
    packet = getattr(packets, name)
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if not schema_of(found).is_mutable and [(a.name, str(a.type)) for a in schema_of(found).arguments] == wanted:
            return found
    return op
