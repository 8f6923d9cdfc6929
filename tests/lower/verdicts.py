"""The outcome of a sample: compiled, run, and compared with eager PyTorch.

Compilation dominates, so a sweep compiles many samples as one program, and without XLA's optimizations: it tests the
lowering. A few samples of each operation, and every sample that fails at first, are compiled as a user's step is.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_device_type import toleranceOverride

from firstloss.lower import program as lowering

from .samples import AS_EXACT, DIFFERS, DRAWN, FAILS, GAUGE, PASSES, REFUSED, WIDE, Sample, plain, prepare

CHUNK = 48  # samples compiled as one program: fewer programs compile faster, up to a size
# A quarter to a fifteenth of the time: no LLVM optimization, and XLA's older code generator, one kernel per module.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),  # removed in newer versions
    "xla_cpu_parallel_codegen_split_count": 1,
}
AS_USERS = {torch.float32: 1, torch.bfloat16: 1}  # samples of an operation that are compiled as a user's step is

UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Saved statistics are float32 in PyTorch's meta kernels and on a GPU, bfloat16 in its CPU kernels.
STATISTICS = {"native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
# Among equal values an unstable or partial sort may take any: indices are compared by the values at them.
PLACES = {"sort": 1, "msort": None, "topk": 1, "kthvalue": 1, "mode": 1, "median": 1, "nanmedian": 1, "argsort": 0}


def tolerance_of(op: Any, dtype: torch.dtype) -> tuple[float, float]:
    """The tolerance of PyTorch's tests of `op`: the dtype's, or the widest of the operation's own on a CPU."""
    rtol, atol = default_tolerances(dtype)
    for decorator in op.decorators:
        if getattr(decorator, "device_type", None) not in (None, "cpu"):
            continue
        for inner in getattr(decorator, "decorators", [decorator]):
            if isinstance(inner, toleranceOverride) and dtype in inner.d:
                atol, rtol = max(atol, inner.d[dtype].atol), max(rtol, inner.d[dtype].rtol)
    return rtol, atol


def execute(samples: list[Sample], options: dict[str, Any] | None = None) -> list[list[Any]]:
    """The outputs of each sample, all compiled together with `options`; separately if that fails, to find out which."""

    def lowered(sample: Sample, arrays: Any) -> list[Any]:
        assert sample.program is not None
        try:
            key = jax.random.key(0) if sample.drawn else None
            return list(lowering.lower(sample.program, dict(zip(sample.values, arrays, strict=True)), key).values())
        except NotImplementedError as error:
            sample.settle(REFUSED, error)
        except Exception as error:
            sample.settle(FAILS, f"lowering: {type(error).__name__}: {error}")
        return []

    def together(every: list) -> list:
        return [lowered(s, a) for s, a in zip(samples, every, strict=True)]

    try:
        return jax.jit(together, compiler_options=options)([s.arrays for s in samples])
    except Exception:
        results = []
        for sample in samples:
            try:
                alone = jax.jit(lambda arrays, sample=sample: lowered(sample, arrays), compiler_options=options)
                results.append(alone(sample.arrays))
            except Exception as error:
                sample.settle(FAILS, f"XLA: {type(error).__name__}: {error}")
                results.append([])
        return results


def _tensor(x: Any) -> torch.Tensor:
    x = np.array(x)
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(x)
    )


def judge(op: Any, dtype: torch.dtype, sample: Sample, outputs: list[Any]) -> None:
    """Compare the executable's results with eager's."""
    try:
        assert len(outputs) == len(sample.expected), f"{len(outputs)} results for {len(sample.expected)}"
        captured = [ref.dtype for ref in sample.program.outputs.values()] if sample.program is not None else []
        assert op.name in STATISTICS or captured == [y.dtype for y in sample.expected], f"dtypes {captured}"
        actual = [_tensor(x).to(y.dtype) for x, y in zip(outputs, sample.expected, strict=True)]
        pairs = zip(actual, sample.expected, strict=True)
        for x, y in pairs:
            assert x.shape == y.shape, f"shape {tuple(x.shape)} for {tuple(y.shape)}"
        if sample.drawn:
            return sample.settle(DRAWN)
        if op.name in UNWRITTEN:
            return
        truth: list[torch.Tensor] | None = None
        for i, (x, y) in enumerate(zip(actual, sample.expected, strict=True)):
            is_gradient = i > (op.name != "msort")
            if x.shape != y.shape or is_gradient and op.name in PLACES and dtype == torch.bfloat16:  # indices
                continue
            if op.name in PLACES and y.dtype == torch.int64 and dtype != torch.int64 or PLACES.get(op.name, -1) == i:
                continue
            rtol, atol = tolerance_of(op, dtype) if y.dtype == dtype else default_tolerances(y.dtype)
            try:
                torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                if y.dtype not in WIDE:
                    raise
                truth = sample.exact() if truth is None else truth
                if op.name in GAUGE:  # gradients divide by differences of eigenvalues or singular values
                    rtol = max(rtol, 1e-5)
                if len(truth) != len(actual) or not _is_as_exact(x, y, truth[i], rtol, atol):
                    raise AssertionError(f"result {i}: {error}") from None
                sample.settle(AS_EXACT, error)
    except (AssertionError, ValueError, TypeError) as error:
        sample.settle(DIFFERS, error)


def _is_as_exact(actual: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, rtol: float, atol: float) -> bool:
    """Whether the result is as close to the float64 result as eager's.

    Either within the tolerance relative to the largest element (a sum of terms of both signs is only as exact as the
    terms), or no more than four times (two bits) as far as eager, which rounds as often. Where eager overflows although
    the exact result is representable, the representable result is accepted.
    """
    truth = plain(truth)
    if truth.shape != actual.shape:
        return False
    largest = torch.finfo(actual.dtype).max
    overflows = torch.isfinite(actual) & ~torch.isfinite(eager)
    if (torch.isfinite(eager) & ~torch.isfinite(actual)).any() or (overflows & ~(truth.abs() <= largest)).any():
        return False
    finite = torch.isfinite(truth) & torch.isfinite(actual)
    wide = truth.dtype
    errors, eager_errors = (actual.to(wide) - truth)[finite].abs(), (eager.to(wide) - truth)[finite & ~overflows].abs()
    if not errors.numel():
        return True
    within = errors.max() <= atol + rtol * truth[finite].abs().max()
    return bool(within) or eager_errors.numel() == errors.numel() and bool(errors.max() <= 4 * eager_errors.max())


def examine(op: Any, dtype: torch.dtype, limit: int = 2000, quickly: bool = False) -> list[Sample]:
    """Every sample of `op` in `dtype`, with its verdict."""
    with jax.enable_x64(True):
        samples = prepare(op, dtype, limit)
        ready = [s for s in samples if s.verdict == PASSES and s.program is not None]
        if quickly:
            first = AS_USERS.get(dtype, 0)
            _settle(op, dtype, ready[first:], QUICKLY)
            ready = ready[:first] + [s for s in ready[first:] if s.verdict not in (PASSES, DRAWN, REFUSED)]
        _settle(op, dtype, ready, None)
    return samples


def _settle(op: Any, dtype: torch.dtype, samples: list[Sample], options: dict[str, Any] | None) -> None:
    for i in range(0, len(samples), CHUNK):
        part = samples[i : i + CHUNK]
        for sample in part:
            sample.settle(PASSES)
        for sample, outputs in zip(part, execute(part, options), strict=True):
            if sample.verdict == PASSES:
                judge(op, dtype, sample, outputs)
