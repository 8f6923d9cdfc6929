"""If eager PyTorch raises, a traced step raises too; if that depends on values, the result is NaN instead."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves

import firstloss as fl
from firstloss.capture.step import StepTrace
from tests.op_db import op_db

DTYPES = (torch.float64, torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.complex64)
HALVES = {torch.float16, torch.bfloat16}
# PyTorch's C++ functions, above the recorded operations, that check dtypes themselves.
LOOK_THEMSELVES = {
    "nn.functional.max_pool1d",  # integers, which the underlying operation accepts
    "nn.functional.conv_transpose1d",  # the bias's
    "nn.functional.linear_cross_entropy",  # computed in chunks: the first chunk's
    "nn.functional.ctc_loss",  # the lengths, which are numbers by then
    "index_put",  # the shape of a mask, which the lowering checks
}
# Private functions, whose public callers check the dtypes.
LOOK_BEFORE = {"torch._scaled_mm_v2", "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"}
# PyTorch's Python implementations, used instead of C++ in a trace, accept only boolean masks and real numbers.
STRICTER = {"_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "masked_fill", "torch._scaled_mm"}
# Zeros are refused for their values before the dtypes are checked.
REFUSE_ZEROS = {"_segment_reduce"}
# These take or seed a generator, or take a sparse tensor, and are refused for that.
REFUSED = (fl.errors.TraceError, fl.errors.CaptureError)


def kinds(result):
    return [(x.dtype, tuple(x.shape)) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def attempt(call):
    try:
        return call(), None
    except Exception as error:
        return None, error


def is_dense(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def eager_and_traced(op, leaves, spec):
    """Both results or errors of the operation on its flattened arguments."""

    def call(leaves):
        first, args, kwargs = spec.unflatten(leaves)
        return op.op(first, *args, **kwargs)

    torch.manual_seed(0)
    eager = attempt(lambda: kinds(call([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves])))
    trace = StepTrace()
    torch.manual_seed(0)

    def traced():
        with trace.active():
            return kinds(call([trace.new_input(x, "x") if is_dense(x) else x for x in leaves]))

    return eager, attempt(traced)


def differing(op, leaves, outcomes):
    """How the trace differs from eager PyTorch, if it does."""
    (expected, raised), (actual, refused) = outcomes
    dtypes = {x.dtype for x in leaves if isinstance(x, torch.Tensor)}
    if raised is None and refused is None:
        return f"{actual}, eager {expected}" if actual != expected else None
    if raised is not None and refused is None:
        excused = op.name in LOOK_THEMSELVES | LOOK_BEFORE | REFUSE_ZEROS or (len(dtypes) == 1 and dtypes <= HALVES)
        return None if excused else f"{actual}, eager raises {raised}"
    if raised is None and op.name not in STRICTER and not isinstance(refused, REFUSED):
        return f"raises {type(refused).__name__}: {refused}, eager gives {expected}"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_dtypes_that_eager_refuses_are_refused(part, monkeypatch):
    """Each operation with samples of one of its dtypes, and with one tensor of another dtype than the rest."""
    monkeypatch.setattr(fl.capture.tensor.Hooks, "assert_later", staticmethod(lambda *_: None), raising=False)
    wrong, raised = [], []
    others = itertools.cycle(DTYPES)
    for number, op in enumerate(op_db[part::8]):
        own = sorted(op.dtypes, key=str)
        for dtype in {own[number % len(own)], torch.float32} if own else ():
            if dtype not in op.dtypes:
                continue
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), 1):
                leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
                trials = [leaves]
                for place in [i for i, x in enumerate(leaves) if is_dense(x)][:3]:
                    other = next(others)
                    with torch.no_grad():
                        trials.append([x.to(other) if i == place else x for i, x in enumerate(leaves)])
                for trial in trials:
                    outcomes = eager_and_traced(op, trial, spec)
                    difference = differing(op, trial, outcomes)
                    if difference is not None:
                        wrong.append(f"{op.name}.{op.variant_test_name} {dtype}: {difference}")
                    raised.append(outcomes[0][1] is not None)
    assert not wrong, "\n".join(wrong)
    assert sum(raised) > 20 and len(raised) - sum(raised) > 100


# -- indices and values, for which a compiled step cannot raise --------------------------------------------------------

X = torch.arange(1.0, 9.0).reshape(2, 4)
TABLE = torch.arange(20.0).reshape(5, 4)
PLACES = {
    "embedding": lambda i: F.embedding(i, TABLE),
    "embedding_bag": lambda i: F.embedding_bag(i, TABLE, torch.tensor([0])),
    "cross_entropy": lambda i: F.cross_entropy(X, i),
    "nll_loss": lambda i: F.nll_loss(X, i),
    "gather": lambda i: torch.gather(X, 1, i[:, None]),
    "take": lambda i: torch.take(X, i),
    "index_select": lambda i: torch.index_select(X, 1, i),
    "index": lambda i: X[i],
    "columns": lambda i: X[:, i],
    "index_put": lambda i: X.index_put((i,), torch.ones(2, 4)),
    "added up": lambda i: X.index_put((i,), torch.ones(2, 4), accumulate=True),
    "set": lambda i: _set(X.clone(), i),
    "index_add": lambda i: X.index_add(0, i, X),
    "index_copy": lambda i: X.index_copy(0, i, X),
    "index_fill": lambda i: X.index_fill(0, i, 3.0),
    "put": lambda i: X.clone().put_(i, X[0, :2]),
    "scatter": lambda i: X.scatter(1, i[:, None], 2.0),
    "scatter_add": lambda i: X.scatter_add(1, i[:, None], X),
    "scatter_reduce": lambda i: X.scatter_reduce(1, i[:, None], X, "amax"),
    "integers": lambda i: X.long()[i],
    "integers set": lambda i: _set(X.long(), i),
    "quotient": lambda i: torch.tensor([4, 4]) // i,
    "remainder": lambda i: torch.tensor([4, 4]) % i,
    "truncated": lambda i: torch.div(torch.tensor([4, 4]), i, rounding_mode="trunc"),
}
VALUES = {
    "binary_cross_entropy": lambda p: F.binary_cross_entropy(p, torch.ones(2)),
    "its target": lambda p: F.binary_cross_entropy(torch.full((2,), 0.5), p),
    "bernoulli": lambda p: torch.bernoulli(p),
    "normal": lambda p: torch.normal(torch.zeros(2), p),
}


def _set(x, places):
    x[places] = 5
    return x


def stands_out(result):
    result = result.double()
    return bool((result.isnan() | (result.abs() >= 2.0**62)).any())


@pytest.fixture(scope="module")
def step_of(tmp_path_factory):
    """Traced steps on one backend, each compiled once."""
    fl.backend("XLA", artifact_dir=tmp_path_factory.mktemp("artifacts"))
    steps = {}

    def of(name):
        return steps.setdefault(name, fl.trace((PLACES | VALUES)[name]))

    return of


@pytest.mark.parametrize("name", PLACES)
def test_an_index_out_of_range_gives_nan_where_eager_raises(name, step_of):
    raised = 0
    for places in ([1, 0], [0, 1], [1, 7], [1, -1], [0, -9], [-2, 1]):
        places = torch.tensor(places)
        actual = step_of(name)(places)
        try:
            expected = PLACES[name](places)
        except (IndexError, RuntimeError, ZeroDivisionError):
            raised += 1
            assert stands_out(actual), places
        else:
            assert torch.allclose(actual, expected), places
    assert raised


@pytest.mark.parametrize("name", VALUES)
def test_a_value_out_of_range_gives_nan_where_eager_raises(name, step_of):
    assert stands_out(step_of(name)(torch.tensor([0.5, -1.0])))
    assert not stands_out(step_of(name)(torch.tensor([0.5, 1.0])))
    assert math.isfinite(step_of(name)(torch.tensor([0.25, 0.0])).sum())


def test_known_dtypes_depend_on_the_default_dtype():
    numbers = torch.arange(3)

    def dtype_in_trace():
        trace = StepTrace()
        with trace.active():
            return (trace.new_input(numbers, "x") * 0.5).dtype

    assert dtype_in_trace() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype_in_trace() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
