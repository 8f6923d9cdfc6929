"""Run a rule and the eager operation that it implements."""

from __future__ import annotations

import inspect
import re

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from firstloss.lower.dtypes import cast, to_jax
from firstloss.lower.registry import functional
from firstloss.lower.rules import RULES

# Relative to the largest element of a result as well as to each element: a sum of terms of both signs is only as exact
# as the terms. XLA sums in another order than ATen's blocked loops and uses other polynomials (a few ulp). Both round
# half precision once per operation, so the last bit may differ (2^-8, 2^-11).
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-5,
    torch.complex64: 4e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
# The tolerance for zeros of torch.testing.assert_close, and so of OpInfo's own tests; for half precision, the last bit
# of operands around 1.
FLOOR = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def to_array(x):
    """A JAX array for a tensor; other values are returned unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    array = x.view(torch.int16).numpy().view(to_jax(x.dtype)) if x.dtype == torch.bfloat16 else x.numpy()
    return jax.device_put(array)  # `jnp.asarray` would compile a copy for each shape


def cast_as(results: list, expected: list) -> list:
    """A rule's results cast to eager's dtypes, as `lower/program.py` does."""
    casts = [cast(actual, to_jax(eager.dtype)) for actual, eager in zip(results, expected, strict=False)]
    return casts + results[len(casts) :]


def to_tensor(x, dtype: torch.dtype) -> torch.Tensor:
    """A rule's result as a tensor, cast as `lower/program.py` does."""
    x = np.array(cast(jnp.asarray(x), to_jax(dtype)))
    if dtype == torch.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(dtype)
    return torch.from_numpy(x)


def assert_rule(overload, args, kwargs, expected, *, tolerance: float | None = None) -> None:
    """Run the rule of `overload` on eager arguments and compare with the eager result."""
    with jax.enable_x64(True):
        # Under jit, tensors are tracers as in `lower/program.py`, and the call compiles once.
        flat, spec = tree_flatten((args, kwargs))
        arrays = [to_array(x) for x in flat if isinstance(x, torch.Tensor)]
        expected_leaves = [x for x in tree_leaves(expected) if isinstance(x, torch.Tensor)]

        def run(arrays):
            rest = iter(arrays)
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in flat]
            rule_args, rule_kwargs = spec.unflatten(filled)
            results = tree_leaves(RULES[overload](*rule_args, **rule_kwargs))
            return cast_as([x for x in results if x is not None], expected_leaves)

        result = jax.jit(run)(arrays)
    assert len(result) == len(expected_leaves), f"{overload}: {len(result)} results for {len(expected_leaves)}"
    for actual, eager in zip(result, expected_leaves, strict=True):
        assert_same(to_tensor(actual, eager.dtype), eager, tolerance)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    expected = expected.detach().resolve_conj().resolve_neg()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    explicit, tolerance = tolerance, TOLERANCE.get(expected.dtype, 0.0) if tolerance is None else tolerance
    finite = expected[torch.isfinite(expected)].abs() if expected.dtype in TOLERANCE else None
    scale = float(finite.double().max()) if finite is not None and finite.numel() else 0.0
    floor = max(FLOOR.get(expected.dtype, 1e-5), explicit or 0.0) if expected.dtype in TOLERANCE else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=max(tolerance * scale, floor), equal_nan=True)


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
            return overload(*args, **kwargs)  # depends on the memory behind a view, which copies lack
        before = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        result = overload(*args, **kwargs)
        after = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, result)
        self.calls.append((overload, *before, after))
        return result


def without_out(overload, kwargs):
    return {k: v for k, v in kwargs.items() if k not in {a.name for a in overload._schema.arguments if a.is_out}}


# Operations that compute nothing, draw random numbers (done outside the rules), or whose values no rule can know.
NOT_LOWERED = {
    "aten._local_scalar_dense.default",
    "aten.rand.default",
    "aten.randn.default",
    "aten.randint.low",
    "aten.randperm.default",
    "aten.native_dropout.default",
}
UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.empty_like")


def is_strided(tree) -> bool:
    return all(
        x.layout == torch.strided and not x.is_quantized for x in tree_leaves(tree) if isinstance(x, torch.Tensor)
    )


def is_checked(overload) -> bool:
    name = str(overload)
    return name.startswith("aten.") and name not in NOT_LOWERED and not name.startswith(UNWRITTEN)


class Check:
    """A recorded call and the result of comparing it; `problem` is None if its rule agrees with eager."""

    def __init__(self, call):
        overload, self.args, self.kwargs, self.expected = call
        self.overload, self.kwargs = functional(overload), without_out(overload, self.kwargs)
        self.problem: str | None = None
        # Some have the tag although they are deterministic in some modes: attention without dropout, RReLU (whose key
        # is optional) in evaluation.
        rule = RULES.get(self.overload)
        key = rule and inspect.signature(rule).parameters.get("rng_key")
        draws = rule is None or key is not None and key.default is key.empty
        random = torch.Tag.nondeterministic_seeded in overload.tags and draws
        if self.overload is not overload and self.overload in RULES and not random:
            with torch.no_grad():
                self.expected = self.overload(*self.args, **self.kwargs)
        if random:
            self.problem = "random"
        elif self.overload not in RULES:
            self.problem = f"no rule: {overload}"
        elif not is_strided((self.args, self.kwargs)):
            self.problem = "not strided"
        self.leaves = [x for x in tree_leaves(self.expected) if isinstance(x, torch.Tensor)]
        self.flat, self.spec = tree_flatten((self.args, self.kwargs))
        try:
            self.arrays = [to_array(x) for x in self.flat if isinstance(x, torch.Tensor)] if not self.problem else []
        except (TypeError, NotImplementedError) as error:
            self.problem, self.arrays = f"{overload}: {error}", []

    def run(self, arrays):
        rest = iter(arrays)
        args, kwargs = self.spec.unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in self.flat])
        try:
            results = [x for x in tree_leaves(RULES[self.overload](*args, **kwargs)) if x is not None]
            return cast_as(results, self.leaves)
        except Exception as error:
            self.problem = f"{self.overload}: {type(error).__name__}: {str(error)[:300]}"
            return []

    def compare(self, results) -> None:
        try:
            assert len(results) == len(self.leaves), f"{len(results)} results for {len(self.leaves)}"
            for position, (actual, expected) in enumerate(zip(results, self.leaves, strict=True)):
                tolerance = tolerance_of(self.overload, position, expected)
                if tolerance == "any":
                    assert tuple(actual.shape) == tuple(expected.shape)
                else:
                    assert_same(to_tensor(actual, expected.dtype), expected, tolerance)
        except (AssertionError, ValueError, TypeError) as error:
            arguments = tree_map(
                lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else x, (self.args, self.kwargs)
            )
            self.problem = f"{self.overload} {arguments}: {re.sub(chr(10) + '+', ' ', str(error))[:400]}"


def check(calls: list) -> list[Check]:
    """Compare calls, all compiled as one program, since compilation dominates."""
    with jax.enable_x64(True):
        checks = [Check(call) for call in calls if is_checked(call[0])]
        ready = [c for c in checks if not c.problem]
        if ready:
            try:
                results = jax.jit(lambda arrays: [c.run(a) for c, a in zip(ready, arrays, strict=True)])(
                    [c.arrays for c in ready]
                )
            except Exception:  # XLA itself refuses an operation: find out which
                results = []
                for c in ready:
                    try:
                        results.append(jax.jit(c.run)(c.arrays))
                    except Exception as error:
                        c.problem = f"{c.overload}: {type(error).__name__}: {str(error)[:300]}"
                        results.append([])
            for c, result in zip(ready, results, strict=True):
                if not c.problem:
                    c.compare(result)
    return checks


# Results that cannot be compared elementwise with the common tolerance, and why.
LOOSER: dict = {
    # Vectors are unique up to a sign or phase, and up to a rotation for repeated values; see test_linalg.py.
    ("aten._linalg_svd.default", 0): "any",
    ("aten._linalg_svd.default", 2): "any",
    ("aten._linalg_eigh.default", 1): "any",
    ("aten.linalg_eig.default", 0): "any",
    ("aten.linalg_eig.default", 1): "any",
    ("aten._linalg_eigvals.default", 0): "any",
    # Among equal values, PyTorch's unstable and partial sorts may take any; see test_sorting.py.
    ("aten.sort.default", 1): "any",
    ("aten.topk.default", 1): "any",
    ("aten.kthvalue.default", 1): "any",
    # Kernels that do not need the sizes of bags leave them at 0.
    ("aten._embedding_bag.default", 2): "any",
    # Uninitialized memory, except for maxima, which test_families.py tests.
    ("aten._embedding_bag.default", 3): "any",
    # bfloat16 logarithms of sums: PyTorch's AVX2 exponentials have 14 correct bits, an error of 6e-5 (measured).
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", 1): 2e-4,
    # Multiplies values that should be 0 by the inverse deviation, up to 1 / sqrt(eps) = 316.
    "aten.native_layer_norm_backward.default": 5e-5,
}


def tolerance_of(overload, position: int, expected: torch.Tensor):
    """The tolerance of one result: None for the dtype's, "any" if PyTorch does not determine the values."""
    if expected.dtype not in (torch.float32, torch.complex64, torch.int64):
        return None  # already coarser
    return LOOSER.get((str(overload), position), LOOSER.get(str(overload)))


def check_step(calls: list) -> list[str]:
    """The problems of a step's operations, each distinct operation checked once."""

    def shown(x):
        return (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x

    distinct = {f"{functional(call[0])}{tree_map(shown, call[1:3])}": call for call in calls}
    return [c.problem for c in check(list(distinct.values())) if c.problem]
