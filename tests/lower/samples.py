"""PyTorch's own samples (OpInfo), captured as a step is, lowered, compiled and run, against eager PyTorch.

What is compared is what a user gets: the operation's outputs and, where it has them, its gradients, with the tolerance
that PyTorch's own tests allow the operation.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from firstloss.capture.program import Program, Ref, Value
from firstloss.capture.recorder import DeferredTensor
from firstloss.capture.step import StepTrace
from firstloss.errors import CaptureError, LoweringError, ValueReadError
from firstloss.lower import program as lowering
from firstloss.lower.functional import functional

from .harness import to_array, to_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
CHUNK = 48  # samples compiled as one program: fewer programs compile faster, up to a size

# What became of a sample. "as exact": outside the tolerance, but as near to the float64 result as eager is.
PASSES, AS_EXACT, DRAWN, DYNAMIC, REFUSED, ABSENT, DIFFERS, LEFT_OUT = (
    "passes", "as exact", "drawn", "dynamic", "refused", "absent", "differs", "left out",
)  # fmt: skip
GOOD = (PASSES, AS_EXACT, DRAWN)

# Operations whose result PyTorch itself does not fix, and what of it can be compared.
GAUGE = {"svd", "linalg.svd", "linalg.eig", "linalg.eigh", "pca_lowrank", "svd_lowrank", "symeig"}
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Of equal values an unstable or partial sort takes any: the places are compared by the values that they name.
PLACES = {"sort": 1, "msort": None, "topk": 1, "kthvalue": 1, "mode": 1, "median": 1, "nanmedian": 1, "argsort": 0}


@dataclass
class Sample:
    """One sample of an operation, in one variant: what eager gave, the captured Program, and what came of it."""

    expected: list[torch.Tensor]
    exact: Callable[[], list[torch.Tensor]]
    program: Program | None = None
    values: list[Value] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    drawn: bool = False
    verdict: str = PASSES
    why: str = ""

    def settle(self, verdict: str, why: Any = "") -> None:
        self.verdict, self.why = verdict, " ".join(str(why).split())[:300]


def tested() -> list:
    """PyTorch's operations with samples, those for sparse tensors left out: XLA has none."""
    return [op for op in op_db if not op.name.startswith("sparse.")]


def samples_of(op: Any, dtype: torch.dtype, limit: int, grad: bool) -> list:
    """At most `limit` samples, spread evenly over those that OpInfo has."""
    torch.manual_seed(0)
    every = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 2000))
    count = min(limit, len(every))
    return [every[i * len(every) // count] for i in range(count)]


def tolerance_of(op: Any, dtype: torch.dtype) -> tuple[float, float]:
    """What PyTorch's tests allow `op`: the dtype's tolerance, or the widest of the operation's own on a CPU."""
    rtol, atol = default_tolerances(dtype)
    for decorator in op.decorators:
        if getattr(decorator, "device_type", None) not in (None, "cpu"):
            continue
        for inner in getattr(decorator, "decorators", [decorator]):
            if isinstance(inner, toleranceOverride) and dtype in inner.d:
                atol, rtol = max(atol, inner.d[dtype].atol), max(rtol, inner.d[dtype].rtol)
    return rtol, atol


# -- from a sample to a Program --


def results_of(call: Callable, sample: Any, tree: Any, grad: bool, gauge: bool) -> list[Any]:
    """The outputs of one call and, with `grad`, the gradients of its inputs."""
    input, args, kwargs = tree
    output = call(input, *args, **kwargs)
    compared = sample.output_process_fn_grad(output)
    results = tree_leaves(compared if gauge else output)
    if grad:
        outputs = [x for x in tree_leaves(compared) if isinstance(x, torch.Tensor) and x.requires_grad]
        inputs = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
        if outputs and inputs:
            weights = [torch.linspace(0.5, 1.5, x.numel()).to(x.dtype).reshape(x.shape) for x in outputs]
            results += torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [x for x in results if x is not None]


def is_strided(tree: Any) -> bool:
    tensors = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    return all(x.layout == torch.strided and not x.is_quantized for x in tensors)


def plain(x: Any) -> Any:
    """A tensor without lazy bits or memory shared with others."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def fresh(tree: Any) -> Any:
    return tree_map(lambda x: plain(x).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x, tree)


_WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}


def widened(tree: Any) -> Any:
    def wide(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return _WIDE.get(x, x)
        if not isinstance(x, torch.Tensor):
            return x
        return plain(x).to(_WIDE.get(x.dtype, x.dtype)).requires_grad_(x.requires_grad)

    return tree_map(wide, tree)


def capture(sample: Sample, tree: Any, run: Callable[[Any], list[Any]]) -> None:
    """Trace `run` on inputs shaped as those of `tree`; leaves Program, inputs and constants in `sample`."""
    tracing = StepTrace()
    flat, spec = tree_flatten(tree)
    real = {i: to_array(leaf) for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)}
    arrays: dict[Value, Any] = {}
    outputs: dict[str, Ref] = {}
    try:
        # OpInfo seeds before each random operation, which a step may not
        with tracing.active(), mock.patch.object(torch, "manual_seed", lambda seed: None):
            leaves = []
            for i, leaf in enumerate(flat):
                if isinstance(leaf, torch.Tensor):
                    made = tracing.new_input(leaf, f"in{len(arrays)}")
                    arrays[made._store.value] = real[i]
                    leaf = made.requires_grad_(leaf.requires_grad)
                leaves.append(leaf)
            results = run(spec.unflatten(leaves))
            results = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in results]
            for i, x in enumerate(results):
                x = x if type(x) is DeferredTensor else torch.ops.aten.alias(x)
                outputs[f"out{i}"] = x._ref() if type(x) is DeferredTensor else _constant(x)
    except ValueReadError as error:
        return sample.settle(DYNAMIC, error)
    except (CaptureError, LoweringError) as error:
        return sample.settle(REFUSED, error)
    except Exception as error:
        return sample.settle(DIFFERS, f"capture: {type(error).__name__}: {error}")
    for value, home in tracing.inputs.items():
        if value not in arrays:
            arrays[value] = to_array(plain(home))
    sample.program = Program({v.label or "in": v for v in arrays}, outputs)
    sample.values, sample.arrays = list(arrays), list(arrays.values())
    sample.drawn = tracing.draws > 0
    missing = lowering.unsupported(sample.program)
    if missing:
        sample.settle(ABSENT, ", ".join(missing))


def _constant(tensor: torch.Tensor) -> Ref:
    value = Value(tuple(tensor.shape), tuple(tensor.contiguous().stride()), tensor.dtype, tensor.device)
    value.real = plain(tensor)
    return Ref(value, value.shape, value.stride, 0, value.dtype)


# -- from Programs to verdicts --


def execute(samples: list[Sample]) -> list[list[Any]]:
    """The outputs of each sample, all compiled together; apart where that fails, to find out which."""

    def lowered(sample: Sample, arrays: Any) -> list[Any]:
        assert sample.program is not None
        try:
            key = jax.random.key(0) if sample.drawn else None
            return list(lowering.lower(sample.program, dict(zip(sample.values, arrays, strict=True)), key).values())
        except NotImplementedError as error:
            sample.settle(REFUSED, error)
        except Exception as error:
            sample.settle(DIFFERS, f"lowering: {type(error).__name__}: {error}")
        return []

    def together(every: list) -> list:
        return [lowered(s, a) for s, a in zip(samples, every, strict=True)]

    try:
        return jax.jit(together)([s.arrays for s in samples])
    except Exception:
        found = []
        for sample in samples:
            try:
                found.append(jax.jit(lambda arrays, sample=sample: lowered(sample, arrays))(sample.arrays))
            except Exception as error:
                sample.settle(DIFFERS, f"XLA: {type(error).__name__}: {error}")
                found.append([])
        return found


def judge(op: Any, dtype: torch.dtype, sample: Sample, outputs: list[Any], sorted_along: Any = None) -> None:
    """Compare what the executable gave with what eager gave."""
    try:
        assert len(outputs) == len(sample.expected), f"{len(outputs)} results for {len(sample.expected)}"
        ours = [to_tensor(x, y.dtype) for x, y in zip(outputs, sample.expected, strict=True)]
        pairs = zip(ours, sample.expected, strict=True)
        if "batch_norm" in op.name:  # what evaluation does not save is empty for PyTorch's kernel, unread in any case
            pairs = ((x, y) for x, y in pairs if y.shape != (0,))
        for x, y in pairs:
            assert x.shape == y.shape, f"shape {tuple(x.shape)} for {tuple(y.shape)}"
        if sample.drawn:
            return sample.settle(DRAWN)
        if op.name in UNWRITTEN:
            return
        truth: list[torch.Tensor] | None = None
        for i, (x, y) in enumerate(zip(ours, sample.expected, strict=True)):
            if x.shape != y.shape or i > 1 and op.name in PLACES and dtype == torch.bfloat16:  # gradients go by places
                continue
            if op.name in PLACES and y.dtype == torch.int64 and dtype != torch.int64 or PLACES.get(op.name, -1) == i:
                continue
            rtol, atol = tolerance_of(op, dtype) if y.dtype == dtype else default_tolerances(y.dtype)
            try:
                torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                if y.dtype not in _WIDE:
                    raise
                truth = sample.exact() if truth is None else truth
                if len(truth) != len(ours) or not _is_as_exact(x, y, truth[i], rtol, atol):
                    raise AssertionError(f"result {i}: {error}") from None
                sample.settle(AS_EXACT, error)
    except (AssertionError, ValueError, TypeError) as error:
        sample.settle(DIFFERS, error)


def _is_as_exact(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, rtol: float, atol: float) -> bool:
    """Whether ours stands to the float64 result as eager does.

    Either within the tolerance, measured against the largest element (a sum of terms of both signs is only as exact as
    the terms); or no more than twice as far as eager, whose own roundings are as many.
    """
    truth = plain(truth)
    if truth.shape != ours.shape:
        return False
    # where the result is too large for the dtype, eager says what it is
    if not torch.equal(torch.isfinite(ours), torch.isfinite(eager)):
        return False
    finite = torch.isfinite(truth) & torch.isfinite(eager)
    wide = truth.dtype
    us, them = (ours.to(wide) - truth)[finite].abs(), (eager.to(wide) - truth)[finite].abs()
    if not us.numel():
        return True
    return bool(us.max() <= atol + rtol * truth[finite].abs().max()) or bool(us.max() <= 2 * them.max())


# -- one operation --


def variants_of(op: Any, dtype: torch.dtype) -> Iterator[tuple[str, Callable, int | None, bool]]:
    """The operation itself, and its in-place and out variants: name, function, samples at most, with gradients."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    yield "function", op, None, grad
    if dtype in (torch.float32, torch.int64):
        if op.inplace_variant is not None:
            yield "in place", op.inplace_variant, 3, False
        if op.supports_out:
            yield "out", op, 3, False


def prepare(op: Any, dtype: torch.dtype, limit: int) -> list[Sample]:
    """The samples of one operation, run eagerly and captured."""
    prepared: list[Sample] = []
    for variant, call, most, grad in variants_of(op, dtype):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = samples_of(op, dtype, min(limit, most or limit), grad)
            except Exception as error:
                prepared.append(Sample([], list, verdict=LEFT_OUT, why=f"no samples: {error}"[:200]))
                continue
            for sample in samples:
                found = prepare_one(op, dtype, variant, call, sample, grad)
                if found is not None and (variant == "function" or found.verdict != LEFT_OUT):
                    prepared.append(found)
    return prepared


def prepare_one(op: Any, dtype: torch.dtype, variant: str, call: Callable, sample: Any, grad: bool) -> Sample | None:
    tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
    if not is_strided(tree):
        return None
    gauge = op.name in GAUGE

    def run(tree: Any) -> list[Any]:
        return results_of(call, sample, tree, grad, gauge)

    if variant == "out":
        run = _into_out(op, sample, tree)
    try:
        expected = [plain(x) if isinstance(x, torch.Tensor) else torch.tensor(x) for x in run(fresh(tree))]
        if not is_strided(expected):
            return None
    except Exception as error:
        return Sample([], list, verdict=LEFT_OUT, why=f"eager: {type(error).__name__} {error}"[:200])

    prepared = Sample(expected, lambda: run(widened(tree)) if variant != "out" else [])
    try:
        capture(prepared, fresh(tree), run)
    except TypeError as error:  # a dtype that XLA has not
        prepared.settle(REFUSED, error)
    return prepared


def _into_out(op: Any, sample: Any, tree: Any) -> Callable[[Any], list[Any]]:
    """A call that writes into fresh outputs, shaped as eager's are."""
    input, args, kwargs = tree
    shapes = tree_map(
        lambda x: (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, op(input, *args, **kwargs)
    )

    def run(tree: Any) -> list[Any]:
        input, args, kwargs = tree

        def empty(shape: Any) -> Any:
            return torch.zeros(shape[0], dtype=shape[1])

        is_one = len(shapes) == 2 and isinstance(shapes[1], torch.dtype)
        out = empty(shapes) if is_one else tuple(empty(s) for s in shapes)
        with torch.no_grad():
            op(input, *args, **kwargs, out=out)
        return [out] if is_one else list(out)

    return run


def examine(op: Any, dtype: torch.dtype, limit: int = 2000) -> list[Sample]:
    """Every sample of `op` in `dtype`, with its verdict."""
    with jax.enable_x64(True):
        samples = prepare(op, dtype, limit)
        ready = [s for s in samples if s.verdict == PASSES and s.program is not None]
        for i in range(0, len(ready), CHUNK):
            part = ready[i : i + CHUNK]
            for sample, outputs in zip(part, execute(part), strict=True):
                if sample.verdict == PASSES:
                    judge(op, dtype, sample, outputs)
    return samples


def overloads_of(sample: Sample) -> set[str]:
    """The functional overloads that a sample's Program has."""
    return {str(functional(node.op)) for node in sample.program.nodes} if sample.program is not None else set()
