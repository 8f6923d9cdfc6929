"""PyTorch's own samples (OpInfo), captured like a step, lowered, compiled and run, against eager PyTorch.

The comparison is of what users get: the operation's outputs and, if it has them, its gradients, with the tolerance that
PyTorch's own tests allow the operation.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import firstloss.runtime.step.closures  # noqa: F401  (says what a step does with assertions)
from firstloss.capture import recorder
from firstloss.capture.recorder import DeferredTensor
from firstloss.capture.step import StepTrace
from firstloss.errors import CaptureError, LoweringError, ValueReadError
from firstloss.lower import program as lowering
from firstloss.lower.registry import functional
from firstloss.program.graph import Ref, Value
from firstloss.program.program import Program
from tests.op_db import op_db

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
VARIANTS = 6  # samples of the in-place and of the out variant

# The verdicts on a sample. "as exact": outside the tolerance, but as close to the float64 result as eager; "fails": an
# error that is not one of Firstloss's.
PASSES, AS_EXACT, DRAWN, DYNAMIC, REFUSED, ABSENT, FAILS, DIFFERS, LEFT_OUT = (
    "passes", "as exact", "drawn", "dynamic", "refused", "absent", "fails", "differs", "left out",
)  # fmt: skip
GOOD = (PASSES, AS_EXACT, DRAWN)

# Operations whose result PyTorch does not determine: compared after OpInfo's own postprocessing.
GAUGE = {"svd", "linalg.svd", "linalg.eig", "linalg.eigh", "pca_lowrank", "svd_lowrank", "symeig"}


@dataclass
class Sample:
    """One sample of an operation, in one variant: eager's result, the captured Program, and the verdict."""

    expected: list[torch.Tensor]
    exact: Callable[[], list[torch.Tensor]]
    program: Program | None = None
    values: list[Value] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    overloads: set[str] = field(default_factory=set)  # the functional overloads that capture met
    drawn: bool = False
    verdict: str = PASSES
    why: str = ""

    def settle(self, verdict: str, why: Any = "") -> None:
        self.verdict, self.why = verdict, " ".join(str(why).split())[:300]


def tested() -> list:
    """PyTorch's operations with samples, except those for sparse tensors, which XLA lacks."""
    return [op for op in op_db if not op.name.startswith("sparse.")]


def samples_of(op: Any, dtype: torch.dtype, limit: int, grad: bool) -> list:
    """At most `limit` samples, spread evenly over OpInfo's."""
    torch.manual_seed(0)
    every = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 2000))
    count = min(limit, len(every))
    return [every[i * len(every) // count] for i in range(count)]


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
            weights = [((torch.arange(x.numel()) % 9 + 4) / 8).to(x.dtype).reshape(x.shape) for x in outputs]  # exact
            results += torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [x for x in results if x is not None]


def is_strided(tree: Any) -> bool:
    tensors = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    return all(x.layout == torch.strided and not x.is_quantized for x in tensors)


def plain(x: Any) -> Any:
    """A tensor without lazy bits and without memory shared with others."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def fresh(tree: Any) -> Any:
    return tree_map(lambda x: plain(x).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x, tree)


WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}


def widened(tree: Any) -> Any:
    def wide(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return WIDE.get(x, x)
        if not isinstance(x, torch.Tensor):
            return x
        return plain(x).to(WIDE.get(x.dtype, x.dtype)).requires_grad_(x.requires_grad)

    return tree_map(wide, tree)


def capture(sample: Sample, tree: Any, run: Callable[[Any], list[Any]]) -> None:
    """Trace `run` on inputs shaped like those of `tree`; stores Program, inputs and constants in `sample`."""
    tracing = StepTrace()
    flat, spec = tree_flatten(tree)
    real = {i: lowering.constant(leaf) for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)}
    arrays: dict[Value, Any] = {}
    outputs: dict[str, Ref] = {}
    try:
        # OpInfo seeds before each random operation, which a step must not do
        seeding = mock.patch.object(torch, "manual_seed", lambda seed: None)
        noting = mock.patch.object(recorder, "HANDLERS", _Noting(sample.overloads))
        with tracing.active(), seeding, noting:
            leaves = []
            for i, leaf in enumerate(flat):
                if isinstance(leaf, torch.Tensor):
                    traced_input = tracing.new_input(leaf, f"in{len(arrays)}")
                    arrays[traced_input._storage.value] = real[i]
                    leaf = traced_input.requires_grad_(leaf.requires_grad)
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
        return sample.settle(FAILS, f"capture: {type(error).__name__}: {error}")
    for value, home in tracing.inputs.items():
        if value not in arrays:
            arrays[value] = lowering.constant(plain(home))
    sample.program = Program({v.label or "in": v for v in arrays}, outputs)
    sample.values, sample.arrays = list(arrays), list(arrays.values())
    sample.drawn = tracing.draws > 0
    missing = lowering.unsupported(sample.program)
    if missing:
        sample.settle(ABSENT, ", ".join(missing))


class _Noting(dict):
    """The recorder's table of special operations, which it looks up first; notes what is looked up.

    A wrapper around the recorder would be on the stack, and be taken for the user's code.
    """

    def __init__(self, overloads: set[str]) -> None:
        super().__init__(recorder.HANDLERS)
        self.overloads = overloads

    def get(self, name: str, default: Any = None) -> Any:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        self.overloads.update((str(op), str(functional(op))))
        return super().get(name, default)


def _constant(tensor: torch.Tensor) -> Ref:
    value = Value(tuple(tensor.shape), tuple(tensor.contiguous().stride()), tensor.dtype, tensor.device)
    value.real = plain(tensor)
    return Ref(value, value.shape, value.stride, 0, value.dtype)


# -- one operation --


def variants_of(op: Any, dtype: torch.dtype) -> Iterator[tuple[str, Callable, int | None, bool]]:
    """The operation itself, and its in-place and out variants: name, function, maximum number of samples, with
    gradients."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    yield "function", op, None, grad
    if dtype in (torch.float32, torch.int64):
        if op.inplace_variant is not None:
            yield "in place", op.inplace_variant, VARIANTS, False
        if op.supports_out:
            yield "out", op, VARIANTS, False


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
                if variant == "in place" and sample.broadcasts_input:  # an error, except for a few kernels that resize
                    continue
                prepared_sample = prepare_one(op, dtype, variant, call, sample, grad)
                if prepared_sample is not None and (variant == "function" or prepared_sample.verdict != LEFT_OUT):
                    prepared.append(prepared_sample)
    return prepared


def prepare_one(op: Any, dtype: torch.dtype, variant: str, call: Callable, sample: Any, grad: bool) -> Sample | None:
    tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
    if not is_strided(tree):
        return None
    gauge = op.name in GAUGE
    call, op_call = _by_name(op, call), _by_name(op, op)

    def run(tree: Any) -> list[Any]:
        return results_of(call, sample, tree, grad, gauge)

    function = run
    if variant == "out":
        run = _into_out(op, op_call, sample, tree)
    try:
        expected = [plain(x) if isinstance(x, torch.Tensor) else torch.tensor(x) for x in run(fresh(tree))]
        if not is_strided(expected):
            return None
    except Exception as error:
        return Sample([], list, verdict=LEFT_OUT, why=f"eager: {type(error).__name__} {error}"[:200])

    prepared = Sample(expected, lambda: function(widened(tree)))
    try:
        capture(prepared, fresh(tree), run)
    except TypeError as error:  # a dtype that XLA lacks
        prepared.settle(REFUSED, error)
    if op.name.startswith("core."):  # may be composite, and decomposed before capture sees it
        prepared.overloads.add(op.name.removeprefix("core."))
    return prepared


def _by_name(op: Any, call: Callable) -> Callable:
    """`call` by its name in `torch`, as users write it: OpInfo holds the function, and a trace patches some names."""
    if call is not op or op.op is not _named(op.name):
        return call
    return lambda *args, **kwargs: _named(op.name)(*args, **kwargs)


def _named(name: str) -> Any:
    return functools.reduce(lambda scope, part: getattr(scope, part, None), name.split("."), torch)


def _into_out(op: Any, call: Callable, sample: Any, tree: Any) -> Callable[[Any], list[Any]]:
    """A call that writes into new outputs, shaped like eager's."""
    input, args, kwargs = tree
    shapes = tree_map(
        lambda x: (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, call(input, *args, **kwargs)
    )

    def run(tree: Any) -> list[Any]:
        input, args, kwargs = tree

        def empty(shape: Any) -> Any:
            return torch.zeros(shape[0], dtype=shape[1])

        is_one = len(shapes) == 2 and isinstance(shapes[1], torch.dtype)
        out = empty(shapes) if is_one else tuple(empty(s) for s in shapes)
        with torch.no_grad():
            call(input, *args, **kwargs, out=out)
        return tree_leaves(sample.output_process_fn_grad(out) if op.name in GAUGE else out)

    return run
