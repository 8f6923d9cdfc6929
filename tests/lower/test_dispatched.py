"""Operations that PyTorch's dispatcher computes in steps on a CPU device: the bits of eager PyTorch."""

import itertools
import re

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

import firstloss as fl
from firstloss.lower import aten as kernels
from firstloss.lower import dispatched
from firstloss.lower.program import forget_functions
from firstloss.lower.rules import RULES

from .harness import to_array, to_tensor

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    not kernels.registered_with_xla(),
    reason="the handlers are not built (python setup.py build_ext --inplace), or not here",
)


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-20, 100, shape, generator=generator).to(dtype)


def positions(below, *shape):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def matrices(*shape):
    return numbers(*shape) + 4 * torch.eye(shape[-1])


# Shapes that are cut along the first, the second and no dimension, by the dimension of the operation.
LAID_OUT = [((160, 200), 1), ((160, 200), 0), ((160, 200), -1), ((1, 90, 400), 2), ((6, 80, 70), 1), ((40000,), 0)]
SCANS = (aten.logcumsumexp, aten.cumsum, aten.cumprod, aten.cummax, aten.cummin)
SORTS = {
    aten.sort.default: [(), (True,)],
    aten.topk.default: None,
    aten.kthvalue.default: None,
    aten.median.dim: [(), (True,)],
    aten.nanmedian.dim: [(), (True,)],
    aten.mode.default: [(), (True,)],
    aten.max.dim: [(), (True,)],
    aten.min.dim: [(), (True,)],
}
ELEMENTWISE = ("sin", "cos", "tan", "asin", "acos", "atan", "exp2", "erfinv", "lgamma")


def cases():
    """An overload, its arguments and its keyword arguments."""
    for scan, (shape, dim) in itertools.product(SCANS, LAID_OUT):
        yield scan.default, (numbers(*shape), dim), {}
    yield aten.cumsum.default, (numbers(80, 90, dtype=torch.int64), 1), {}
    yield aten.cumsum.default, (numbers(80, 90, dtype=torch.float64), 1), {}
    yield aten.cumsum.default, (numbers(80, 90, dtype=torch.int32), -1), {}
    yield aten.cumsum.default, (numbers(80, 90) > 0, 0), {}
    for op, (shape, dim) in itertools.product(SORTS, LAID_OUT):
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.uint8):
            x = numbers(*shape, dtype=dtype)
            if SORTS[op] is None:
                yield op, (x, 7, dim), {}
            elif dtype is torch.float32 or op is aten.sort.default:
                yield from ((op, (x, dim, *flags), {}) for flags in SORTS[op])
    for flags in itertools.product((False, True), repeat=2):
        yield aten.topk.default, (numbers(60, 90), 5, 1, *flags), {}
    for stable in (None, False, True):
        yield aten.sort.stable, (numbers(60, 90, dtype=torch.int8),), {"stable": stable, "dim": 0, "descending": True}
    for op in (aten.median, aten.nanmedian):
        yield op.default, (numbers(70, 80).masked_fill(numbers(70, 80, seed=1) > 2, torch.nan),), {}
    for dim in (0, 1):
        x, index = numbers(110, 90), positions(90, 110, 90)
        yield aten.scatter_add.default, (x, dim, index, numbers(110, 90, seed=2)), {}
        yield aten.scatter_add.default, (x, dim, index[:50], numbers(110, 90, seed=2)), {}  # is not cut
        yield aten.scatter.src, (numbers(140, 130), dim, numbers(140, 130).argsort(dim), numbers(140, 130, seed=2)), {}
    image, grid = numbers(3, 4, 20, 30), numbers(3, 40, 20, 2).clamp(-1.2, 1.2)
    for how in itertools.product((0, 1), (0, 1, 2), (False, True)):
        yield aten.grid_sampler_2d.default, (image, grid, *how), {}
        arguments = numbers(3, 60, 40, 20), numbers(3, 60, 20, 30), grid, *how, [True, True]
        yield aten.grid_sampler_2d_backward.default, arguments, {}
    for kind in ("reflection", "replication"):
        backward = getattr(aten, f"{kind}_pad1d_backward").default
        yield backward, (numbers(8, 9, 103), numbers(8, 9, 100), [1, 2]), {}
        backward = getattr(aten, f"{kind}_pad2d_backward").default
        yield backward, (numbers(8, 9, 13, 15), numbers(8, 9, 10, 10), [2, 3, 1, 2]), {}
    for shape in ((70, 70), (20, 16, 16), (3, 3), (2, 2, 1, 1)):
        yield aten.linalg_inv_ex.default, (matrices(*shape),), {}
        yield aten.linalg_lu_solve.default, (*torch.linalg.lu_factor(matrices(*shape)), numbers(*shape)), {}
        yield aten.linalg_lu_factor_ex.default, (matrices(*shape),), {}
        yield aten._linalg_slogdet.default, (matrices(*shape),), {}
        yield aten._linalg_solve_ex.default, (matrices(*shape), numbers(*shape[:-1], 3)), {}
        yield aten._linalg_solve_ex.default, (matrices(*shape), numbers(*shape[:-1])), {"left": True}
    for shape, dims in (((70, 64), [1]), ((70, 64), [0]), ((6, 30, 40), [1, 2]), ((6, 30, 40), [0, 2]), ((5000,), [0])):
        x, z = numbers(*shape), torch.complex(numbers(*shape), numbers(*shape, seed=1))
        for normalization, flag in itertools.product((0, 1, 2), (False, True)):
            yield aten._fft_r2c.default, (x, dims, normalization, flag), {}
            yield aten._fft_c2c.default, (z, dims, normalization, flag), {}
            yield aten._fft_c2r.default, (z, dims, normalization, 2 * shape[dims[-1]] - 2 + flag), {}
    z = torch.complex(numbers(130, 140), numbers(130, 140, seed=1))
    yield from ((op.default, (z, dim), {}) for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp) for dim in (0, 1))
    yield from ((op.default, (z,), {}) for op in (aten.sin, aten.cos, aten.tan, aten.asin, aten.acos, aten.atan))
    z = torch.complex(matrices(20, 16, 16), numbers(20, 16, 16, seed=1))
    yield from ((op.default, (z,), {}) for op in (aten.linalg_inv_ex, aten.linalg_lu_factor_ex, aten._linalg_slogdet))
    for name in ELEMENTWISE:
        yield getattr(aten, name).default, (torch.tanh(numbers(130, 140)),), {}
    yield aten.sin.default, (numbers(130, 140, dtype=torch.int64),), {}
    yield aten.sin.default, (numbers(130, 140, dtype=torch.bfloat16),), {}
    yield aten.igamma.default, (numbers(130, 140).abs(), numbers(130, 140, seed=1).abs()), {}
    yield aten.fmod.Tensor, (numbers(130, 140), numbers(130, 140, seed=1)), {}
    yield aten.fmod.Tensor, (numbers(130, 140), numbers(140, seed=1)), {}  # broadcast
    yield aten.fmod.Tensor, (numbers(130, 140), numbers(130, 140, dtype=torch.int32)), {}


CASES = list(cases())


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else [r for r in results if r is not None]


def bits(x):
    x = x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() else x  # which NaN it is
    return bytes(x.clone(memory_format=torch.contiguous_format).untyped_storage())


@pytest.fixture
def calls(monkeypatch):
    """How many operations have been lowered to a call."""
    count = []
    ffi_call = jax.ffi.ffi_call

    def counted(target, *args, **kwargs):
        count.extend({target} & {"firstloss_dispatch"})
        return ffi_call(target, *args, **kwargs)

    monkeypatch.setattr(jax.ffi, "ffi_call", counted)
    forget_functions()
    return count


def run(op, args, kwargs, expected):
    """The results of an operation in a step on a CPU device; None if it is left to XLA."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kinds = [(tuple(r.shape), r.dtype) for r in expected]
    left = []

    def function(*arrays):
        rest = iter(arrays)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        filled_args, filled_kwargs = spec.unflatten(filled)
        found = dispatched.call(op, filled_args, filled_kwargs, kinds)
        left.append(found is None)
        return found

    with jax.enable_x64(True), kernels.within():
        found = jax.jit(function)(*map(to_array, tensors))
    return None if left[0] else [to_tensor(x, r.dtype) for x, r in zip(found, expected, strict=True)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: f"{CASES[case][0]} {case}")
def test_the_bits_are_eager_pytorchs(case):
    op, args, kwargs = CASES[case]
    expected = flat(op(*args, **kwargs))
    found = run(op, args, kwargs, expected)
    assert found is not None
    assert list(map(bits, found)) == list(map(bits, expected))


def test_every_row_of_the_table_has_a_case_and_a_rule():
    assert {op for op, _, _ in CASES} == {*dispatched.TABLE} <= {*RULES}


LEFT_TO_XLA = {
    "few elements": (aten.cumsum.default, (numbers(8, 8), 1), {}),
    "no elements": (aten.cumsum.default, (numbers(1 << 14, 0), 0), {}),
    "another dtype": (aten.sort.default, (numbers(90, 90).abs().to(torch.uint16), 1), {}),
    "a dtype as an argument": (aten.cumsum.default, (numbers(90, 90), 1), {"dtype": torch.float64}),
    "more dimensions than a call takes": (aten.cumsum.default, (numbers(*[3] * 8, 1), 1), {}),
    "no row": (aten.exp.default, (numbers(200, 200),), {}),
    "not all results": (
        aten.grid_sampler_2d_backward.default,
        (numbers(3, 9, 20, 30), numbers(3, 9, 40, 30), numbers(3, 20, 30, 2), 0, 0, False, [False, True]),
        {},
    ),
}


@pytest.mark.parametrize("case", LEFT_TO_XLA)
def test_the_rest_is_left_to_xla(case):
    op, args, kwargs = LEFT_TO_XLA[case]
    expected = [r for r in flat(op(*args, **kwargs)) if r is not None]
    assert run(op, args, kwargs, expected) is None


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
HARD = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), 1e-45, -1e-45, 3e38, 1.0, -1.0]


@st.composite
def tensors_with_ties(draw):
    """Few different values, among them those that are hard to order, and a dimension."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    if dtype.is_floating_point:
        chosen = torch.tensor(HARD, dtype=torch.float64)[torch.randint(len(HARD), shape, generator=generator)].to(dtype)
    elif dtype == torch.bool:
        chosen = torch.randint(2, shape, generator=generator).bool()
    else:
        low, high = (0, 255) if dtype == torch.uint8 else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        chosen = torch.tensor([low, high, 0, 1, 7], dtype=dtype)[torch.randint(5, shape, generator=generator)]
    return chosen, draw(st.integers(-len(shape), len(shape) - 1))


@given(tensors_with_ties(), st.booleans(), st.data())
def test_equal_elements_and_those_close_to_zero_are_ordered_as_in_eager(case, descending, data):
    x, dim = case
    k = data.draw(st.integers(1, x.shape[dim]))
    ops = [(aten.sort.default, (dim, descending), {})]
    ops.append((aten.sort.stable, (), {"stable": True, "dim": dim, "descending": descending}))
    if x.dtype != torch.bool:
        ops.append((aten.topk.default, (k, dim, descending), {}))
    for op, args, kwargs in ops:
        expected = list(op(x, *args, **kwargs))
        found = run(op, (x, *args), kwargs, expected)
        assert found is not None and list(map(bits, found)) == list(map(bits, expected))


def used(backend, x):
    with backend.device:
        layer = torch.nn.Linear(64, 64)
    model = fl.compile(layer, backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @fl.trace
    def step(x):
        values, places = model(x).topk(9, dim=1)
        loss = values.logcumsumexp(0).square().mean() + model(x).sin().sort(dim=0).values[3].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, places

    return [step(x + n) for n in range(3)], layer.weight.detach().clone()


@pytest.mark.parametrize("mesh", [None, {"dp": 1}])
def test_a_step_calls_it_on_one_device_and_never_on_a_mesh(mesh, calls, tmp_path):
    x = numbers(256, 64)
    torch.manual_seed(0)
    expected = used(fl.backend("CPU"), x)
    torch.manual_seed(0)
    found = used(fl.backend("XLA", mesh=mesh, artifact_dir=str(tmp_path)), x)
    assert (len(calls) > 0) == (mesh is None)
    for (loss, places), (loss_of_eager, places_of_eager) in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(loss.detach(), loss_of_eager.detach())  # XLA sums in another order
        assert torch.equal(places, places_of_eager)
    torch.testing.assert_close(found[1], expected[1])


INDEX = positions(256, 256, 64)
WRITING = {
    "in place": lambda x: torch.zeros_like(x).scatter_add_(0, INDEX, x),
    "in place, elementwise": lambda x: (x * 1).repeat(4, 1).sin_(),
    "to a part": lambda x: x.clone()[:, 3:].cumsum_(1),
    "from a part, by columns": lambda x: x.t().contiguous().t()[10:].logcumsumexp(0),
    "to given tensors": lambda x: torch.sort(x, 0, out=(torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)))[
        1
    ],
}


@pytest.mark.parametrize("how", WRITING)
def test_what_writes_to_its_operand_is_dispatched_too(how, calls, tmp_path):
    fl.backend("XLA", artifact_dir=str(tmp_path))
    x = numbers(256, 64)
    found = fl.trace(lambda x: WRITING[how](x))(x)
    assert calls and torch.equal(found, WRITING[how](x))


def test_a_call_that_pytorch_refuses_is_an_error(capfd):
    x, index = numbers(90, 90), positions(90, 90, 90) + 90
    with pytest.raises(jax.errors.JaxRuntimeError, match="operation of PyTorch's failed"):
        run(aten.scatter_add.default, (x, 0, index, x), {}, [x])
    assert re.search(r"index \d+ is out of bounds for dimension 0 with size 90", capfd.readouterr().err)
