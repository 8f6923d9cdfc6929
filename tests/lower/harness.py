"""Run a rule beside the eager operation it stands for."""

from __future__ import annotations

import functools

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from firstloss.lower.dtypes import cast, to_jax
from firstloss.lower.rules import RULES

# Relative to the largest element of a result as well as to each element: a sum of n terms of both signs is only as
# exact as the terms. XLA adds in another order than ATen's blocked loops and uses other polynomials (a few ulp).
# The half precisions are rounded once per operation by both, so differ by the last bit (2^-8, 2^-11).
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-5,
    torch.complex64: 4e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
# What torch.testing.assert_close, and so OpInfo's own tests, allow a result that should be zero; for the half
# precisions, the last bit of operands around 1.
FLOOR = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def to_array(x):
    """A JAX array for a tensor; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype in (torch.bfloat16,):
        return jnp.asarray(x.view(torch.int16).numpy().view(to_jax(x.dtype)))
    return jnp.asarray(x.numpy())


def to_tensor(x, dtype: torch.dtype) -> torch.Tensor:
    """A tensor for what a rule gave, cast as the driver casts it."""
    x = np.array(cast(jnp.asarray(x), to_jax(dtype)))
    if dtype == torch.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(dtype)
    return torch.from_numpy(x)


def assert_rule(overload, args, kwargs, expected, *, tolerance: float | None = None) -> None:
    """Run the rule of `overload` on eager arguments and compare with the eager result."""
    with jax.enable_x64(True):
        # Under jit, tensors are tracers as they are in the driver, and one call compiles once.
        flat, spec = tree_flatten((args, kwargs))
        arrays = [to_array(x) for x in flat if isinstance(x, torch.Tensor)]
        expected_leaves = [x for x in tree_leaves(expected) if isinstance(x, torch.Tensor)]

        def run(arrays):
            rest = iter(arrays)
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in flat]
            rule_args, rule_kwargs = spec.unflatten(filled)
            return RULES[overload](*rule_args, **rule_kwargs)

        got = [x for x in tree_leaves(jax.jit(run)(arrays)) if x is not None]
    assert len(got) == len(expected_leaves), f"{overload}: {len(got)} results for {len(expected_leaves)}"
    for ours, theirs in zip(got, expected_leaves, strict=True):
        assert_same(to_tensor(ours, theirs.dtype), theirs, tolerance)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> None:
    theirs = theirs.detach().resolve_conj().resolve_neg()
    assert ours.shape == theirs.shape, f"shape {tuple(ours.shape)} for {tuple(theirs.shape)}"
    explicit, tolerance = tolerance, TOLERANCE.get(theirs.dtype, 0.0) if tolerance is None else tolerance
    finite = theirs[torch.isfinite(theirs)].abs() if theirs.dtype in TOLERANCE else None
    scale = float(finite.double().max()) if finite is not None and finite.numel() else 0.0
    floor = max(FLOOR.get(theirs.dtype, 1e-5), explicit or 0.0) if theirs.dtype in TOLERANCE else 0.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=max(tolerance * scale, floor), equal_nan=True)


def owns_memory(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes


class Recorder(TorchDispatchMode):
    """Records every operation with copies of its arguments and its result, before a later write changes them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if overload is torch.ops.aten.as_strided.default and not owns_memory(args[0]):
            return overload(*args, **kwargs)  # speaks of the memory behind a view, which no copy has
        before = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        result = overload(*args, **kwargs)
        after = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, result)
        self.calls.append((overload, *before, after))
        return result


aten = torch.ops.aten
FUNCTIONAL_BATCH_NORM = {
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
}


@functools.cache
def functional(overload):
    """The overload that returns what this one writes: of the same name and operands, but with no write.

    The overload names need not agree: `pow_.Scalar` is `pow.Tensor_Scalar`.
    """
    if not overload._schema.is_mutable or overload in FUNCTIONAL_BATCH_NORM:
        return FUNCTIONAL_BATCH_NORM.get(overload, overload)
    namespace, name = overload._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if name.endswith("__") or packet is None:
        return None
    wanted = [str(a.type) for a in overload._schema.arguments if not a.is_out]
    for candidate in (getattr(packet, o) for o in packet.overloads()):
        schema = candidate._schema
        if not schema.is_mutable and [str(a.type) for a in schema.arguments] == wanted:
            return candidate
    return None


def without_out(overload, kwargs):
    return {k: v for k, v in kwargs.items() if k not in {a.name for a in overload._schema.arguments if a.is_out}}


# Operations that compute nothing, draw random numbers (the driver's), or give values no rule could know.
NOT_LOWERED = {
    "aten._local_scalar_dense.default",
    "aten.rand.default",
    "aten.randn.default",
    "aten.randint.low",
    "aten.randperm.default",
    "aten.native_dropout.default",
}
UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.empty_like")


def check_calls(calls, *, tolerance: float | None = None) -> set[str]:
    """Compare the rule of every recorded call, each distinct one once; returns the overloads without a rule."""
    missing, seen = set(), set()
    for overload, args, kwargs, _ in calls:
        name = str(overload)
        if not name.startswith("aten.") or name in NOT_LOWERED or name.startswith(UNWRITTEN):
            continue
        target, kwargs = functional(overload), without_out(overload, kwargs)
        if target not in RULES:
            missing.add(name)
            continue
        key = (
            target,
            repr(tree_map(lambda x: (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x, (args, kwargs))),
        )
        if key in seen:
            continue
        seen.add(key)
        with torch.no_grad():
            expected = target(*args, **kwargs)
        try:
            assert_rule(target, args, kwargs, expected, tolerance=tolerance)
        except Exception as error:
            raise AssertionError(f"{target}{key[1]}: {error}") from error
    return missing
