"""PyTorch's own convolutions, products and attention in compiled steps on a CPU."""

import itertools
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import firstloss as fl
from firstloss.lower import aten as kernels
from firstloss.lower.convolution import convolution
from firstloss.lower.matmul import mm
from firstloss.lower.norms import native_batch_norm, native_layer_norm
from firstloss.lower.program import forget_functions
from tests import compiled_steps, forked

from .harness import assert_rule, assert_same, to_array, to_tensor
from .xla_header import assert_declared

aten = torch.ops.aten
SOURCE = Path(kernels.__file__).with_name("_aten.c")
# The fields of each structure that the handlers use, and their names in XLA's header; for the others see
# test_unwritten.py.
FIELDS = [
    ("struct buffer", "dtype", "XLA_FFI_Buffer", "dtype"),
    ("struct buffer", "data", "XLA_FFI_Buffer", "data"),
    ("struct buffer", "rank", "XLA_FFI_Buffer", "rank"),
    ("struct buffer", "dims", "XLA_FFI_Buffer", "dims"),
    ("struct array", "size", "XLA_FFI_Array", "size"),
    ("struct array", "data", "XLA_FFI_Array", "data"),
    ("struct operands", "count", "XLA_FFI_Args", "size"),
    ("struct operands", "buffers", "XLA_FFI_Args", "args"),
    ("struct operands", "buffers", "XLA_FFI_Rets", "rets"),
    ("struct attributes", "values", "XLA_FFI_Attrs", "attrs"),
    ("struct error_arguments", "message", "XLA_FFI_Error_Create_Args", "message"),
    ("struct error_arguments", "code", "XLA_FFI_Error_Create_Args", "errc"),
    ("struct schedule_arguments", "context", "XLA_FFI_ThreadPool_Schedule_Args", "ctx"),
    ("struct schedule_arguments", "task", "XLA_FFI_ThreadPool_Schedule_Args", "task"),
    ("struct schedule_arguments", "data", "XLA_FFI_ThreadPool_Schedule_Args", "data"),
    ("struct count_arguments", "context", "XLA_FFI_ThreadPool_NumThreads_Args", "ctx"),
    ("struct count_arguments", "count", "XLA_FFI_ThreadPool_NumThreads_Args", "num_threads"),
    ("struct create_future_arguments", "future", "XLA_FFI_Future_Create_Args", "future"),
    ("struct complete_future_arguments", "future", "XLA_FFI_Future_SetAvailable_Args", "future"),
    ("struct complete_future_arguments", "error", "XLA_FFI_Future_SetError_Args", "error"),
    ("struct api", "create_future", "XLA_FFI_Api", "XLA_FFI_Future_Create"),
    ("struct api", "complete_future", "XLA_FFI_Api", "XLA_FFI_Future_SetAvailable"),
    ("struct api", "fail_future", "XLA_FFI_Api", "XLA_FFI_Future_SetError"),
    ("struct call_frame", "future", "XLA_FFI_CallFrame", "future"),
    ("struct api", "create_error", "XLA_FFI_Api", "XLA_FFI_Error_Create"),
    ("struct api", "schedule", "XLA_FFI_Api", "XLA_FFI_ThreadPool_Schedule"),
    ("struct api", "count_threads", "XLA_FFI_Api", "XLA_FFI_ThreadPool_NumThreads"),
    ("struct call_frame", "api", "XLA_FFI_CallFrame", "api"),
    ("struct call_frame", "context", "XLA_FFI_CallFrame", "ctx"),
    ("struct call_frame", "arguments", "XLA_FFI_CallFrame", "args"),
    ("struct call_frame", "results", "XLA_FFI_CallFrame", "rets"),
    ("struct call_frame", "attributes", "XLA_FFI_CallFrame", "attrs"),
]
NUMBERS = {
    "F32": "XLA_FFI_DataType_F32",
    "F64": "XLA_FFI_DataType_F64",
    "BF16": "XLA_FFI_DataType_BF16",
    "INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
}

pytestmark = pytest.mark.skipif(
    not kernels.registered_with_xla(),
    reason="the handlers are not built (python setup.py build_ext --inplace), or not here",
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_handler_structures_match_xlas_header(tmp_path):
    assert_declared(SOURCE, FIELDS, NUMBERS, tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """The names of the custom calls of PyTorch's kernels that have been lowered."""
    names = []
    ffi_call = jax.ffi.ffi_call

    def counted(name, *args, **kwargs):
        names.extend({name} & set(kernels.TARGETS))
        return ffi_call(name, *args, **kwargs)

    monkeypatch.setattr(jax.ffi, "ffi_call", counted)
    return names


def geometries():
    """Every way to split the work: batches of one and of more than there are threads, few and many channels, groups."""
    numbers = np.random.default_rng(0)
    for space, transposed, (batch, groups, each_in, each_out) in itertools.product(
        (1, 2, 3), (False, True), ((1, 1, 3, 5), (1, 1, 40, 48), (5, 1, 3, 33), (3, 4, 2, 3), (1, 6, 1, 2))
    ):
        kernel = [int(n) for n in numbers.integers(2, 4, space)]
        stride, dilation = ([int(n) for n in numbers.integers(1, 3, space)] for _ in range(2))
        padding = [int(n) for n in numbers.integers(0, 2, space)]
        lengths = [int(n) for n in numbers.integers(12, 15, space)]  # too many positions for a matrix product
        yield space, transposed, batch, groups, each_in, each_out, kernel, stride, dilation, padding, lengths
        yield space, transposed, batch, groups, each_in, each_out, [1] * space, stride, [1] * space, padding, lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("geometry", list(geometries()), ids=str)
def test_convolutions_of_every_geometry_match_eager(geometry, dtype, calls):
    space, transposed, batch, groups, each_in, each_out, kernel, stride, dilation, padding, lengths = geometry
    torch.manual_seed(0)
    x = torch.randn(batch, groups * each_in, *lengths).to(dtype)
    shape = (groups * each_in, each_out) if transposed else (groups * each_out, each_in)
    weight, bias = torch.randn(*shape, *kernel).to(dtype), torch.randn(groups * each_out).to(dtype)
    extra = [s - 1 for s in stride] if transposed else [0] * space
    how = (stride, padding, dilation, transposed, extra, groups)
    with kernels.within():
        taken = dtype == torch.float32 or (groups > 1 if dtype == torch.float64 else kernels.computes(jnp.bfloat16))
        for b in (None, bias):
            assert_rule(aten.convolution.default, (x, weight, b, *how), {}, aten.convolution(x, weight, b, *how))
        g = torch.randn_like(aten.convolution(x, weight, None, *how))
        for mask in ([True, True, True], [False, True, False], [True, False, False]):
            args = (g, x, weight, [bias.numel()], *how, mask)
            expected = [
                e if is_needed else None for e, is_needed in zip(aten.convolution_backward(*args), mask, strict=True)
            ]
            assert_rule(aten.convolution_backward.default, args, {}, expected)
    assert bool(calls) is taken, "it is not PyTorch's that was tested"


# Split by rows, by columns, not at all; by columns with the second matrix multiplied some rows at a time.
SIZES = [(128, 96, 130), (40, 1024, 65), (31, 1100, 31), (96, 700, 1024)]


@pytest.fixture(params=["avx512_bf16", "amx_bf16"])
def instructions(request, monkeypatch):
    """The instructions for bfloat16 that the processor is said to have; PyTorch computes without them, too."""
    monkeypatch.setattr(kernels, "_has", lambda capability: capability == request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_columns", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_of_row_and_column_major_matrices_match_eager(
    sizes, by_columns, dtype, instructions, calls, monkeypatch
):
    monkeypatch.setattr(kernels, "_mkl", kernels._sets_mkl_threads)  # independent of the CPU's vendor
    monkeypatch.setattr(kernels, "_LEAST_PRODUCT", 1)
    torch.manual_seed(0)
    m, k, n = sizes
    x, y = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    arguments = [to_array(a.t() if columns else a) for a, columns in zip((x, y), by_columns, strict=True)]

    def run(x, y):
        return mm(*(a.T if c else a for a, c in zip((x, y), by_columns, strict=True)), by_columns=by_columns)

    with kernels.within():
        transposed = [a.T if columns else a for a, columns in zip(arguments, by_columns, strict=True)]
        taken = kernels.multiplies(*transposed, by_columns)
        result = jax.jit(run)(*arguments)
    assert_same(to_tensor(result, dtype), x @ y)
    if dtype == torch.bfloat16:
        assert taken is (by_columns[0] or instructions == "amx_bf16")
    else:
        assert taken is kernels._sets_mkl_threads()
    assert ("firstloss_product" in calls) is taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_columns", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("batch", [1, 7])
def test_batches_of_products_match_eager(batch, by_columns, dtype, calls, monkeypatch):
    monkeypatch.setattr(kernels, "_mkl", kernels._sets_mkl_threads)  # independent of the CPU's vendor
    monkeypatch.setattr(kernels, "_has", lambda capability: True)
    monkeypatch.setattr(kernels, "_LEAST_PRODUCT", 1)
    torch.manual_seed(0)
    x, y = torch.randn(batch, 12, 33).to(dtype), torch.randn(batch, 33, 18).to(dtype)
    x, y = (a.mT.contiguous().mT if columns else a for a, columns in zip((x, y), by_columns, strict=True))
    with kernels.within():
        assert_rule(aten.bmm.default, (x, y), {"by_columns": by_columns}, torch.bmm(x, y))
        z = torch.randn(batch, 12, 18).to(dtype)
        options = {"beta": 0.5, "alpha": 2, "by_columns": (False, *by_columns)}
        assert_rule(aten.baddbmm.default, (z, x, y), options, torch.baddbmm(z, x, y, beta=0.5, alpha=2))
    assert ("firstloss_product" in calls) is (dtype == torch.bfloat16 or kernels._sets_mkl_threads())


def test_a_transposed_operand_is_passed_without_a_copy(monkeypatch, tmp_path):
    """The gradient of a layer's weight is a product of transposes, computed without a copy."""
    monkeypatch.setattr(kernels, "_mkl", kernels._sets_mkl_threads)
    monkeypatch.setattr(kernels, "_LEAST_PRODUCT", 1)
    seen = []
    product = kernels.product
    monkeypatch.setattr(kernels, "product", lambda *args: seen.append(tuple(args[2])) or product(*args))
    backend = fl.backend("XLA", artifact_dir=str(tmp_path), first_loss="compiled")
    forget_functions()
    with backend.device:
        model = torch.nn.Linear(128, 96, bias=False)
    compiled_model = fl.compile(model, backend)

    @fl.trace
    def step(x):
        loss = compiled_model(x).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(0)
    step(torch.randn(256, 128)).item()
    forget_functions()
    assert not kernels._sets_mkl_threads() or seen == [(False, True), (True, False)]


def test_a_compiled_product_follows_the_precision_that_is_set_when_it_runs(monkeypatch):
    """As in eager PyTorch: here float32 products in bfloat16, a thousand times as coarse."""
    monkeypatch.setattr(kernels, "_mkl", kernels._sets_mkl_threads)
    if not (kernels.registered_with_xla() and kernels._sets_mkl_threads()):
        pytest.skip("products are not PyTorch's here")
    torch.manual_seed(0)
    x, y = torch.randn(256, 512), torch.randn(512, 500)
    with kernels.within():
        run = jax.jit(lambda x, y: mm(x, y)).lower(to_array(x), to_array(y)).compile()
    before, result, eager = torch.get_float32_matmul_precision(), {}, {}
    try:
        for precision in ("highest", "medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            result[precision] = to_tensor(run(to_array(x), to_array(y)), torch.float32)
            # float32 sums of 512 products in another order
            eager[precision] = x @ y
            torch.testing.assert_close(result[precision], eager[precision], rtol=1e-5, atol=1e-4)
    finally:
        torch.set_float32_matmul_precision(before)
    # Whether it is coarser depends on the processor, and on PyTorch's libraries.
    is_coarser = [bool((results["medium"] - results["highest"]).abs().max() > 1e-2) for results in (result, eager)]
    assert is_coarser[0] == is_coarser[1]


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "mask of each"])
# batch, query and key heads, length and width: split by the batch, by heads, or not at all
@pytest.mark.parametrize("sizes", [(4, 8, 4, 16, 32), (1, 8, 4, 20, 16), (3, 4, 4, 9, 8), (1, 3, 1, 7, 5)], ids=str)
def test_attention_and_its_gradients_match_eager(sizes, how, dtype, instructions, calls, monkeypatch):
    monkeypatch.setattr(kernels, "_LEAST_ATTENTION", 1)
    torch.manual_seed(0)
    batch, heads, kv_heads, length, width = sizes
    query = torch.randn(batch, heads, length, width).to(dtype)
    key, value = (torch.randn(batch, kv_heads, length, width).to(dtype) for _ in range(2))
    of = {"mask": (1, 1), "mask of each": (batch, heads)}.get(how)
    options = {"attn_mask": None if of is None else torch.randn(*of, length, length).to(dtype), "scale": 0.3}
    args = (query, key, value, 0.0, how == "causal")
    out, logsumexp = ATTENTION(*args, **options)
    backward = (torch.randn_like(out), query, key, value, out, logsumexp, 0.0, how == "causal")
    with kernels.within():
        assert_rule(ATTENTION, args, options, (out, logsumexp))
        assert_rule(ATTENTION_BACKWARD, backward, options, ATTENTION_BACKWARD(*backward, **options))
    taken = dtype == torch.float32 or instructions == "amx_bf16"
    assert set(calls) == ({"firstloss_attention", "firstloss_attention_backward"} if taken else set())


def test_small_products_and_attention_are_left_to_xla(monkeypatch):
    """A call costs more than a small product."""
    monkeypatch.setattr(kernels, "_mkl", lambda: True)
    monkeypatch.setattr(kernels, "computes", lambda dtype: True)
    few, many = (jnp.ones((64, 64)), jnp.ones((64, 256))), (jnp.ones((512, 256)), jnp.ones((256, 256)))
    assert not kernels.multiplies(*few, (False, False)) and kernels.multiplies(*many, (False, False))
    small, large = jnp.ones((2, 4, 32, 16)), jnp.ones((4, 4, 128, 64))
    assert not kernels.attends(small, small, small, None) and kernels.attends(large, large, large, None)


HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


# Rows of less than a vector, of vectors and a rest; channels of one share, and of several.
NORMED = [(7, 5), (3, 4, 5), (2, 3, 4, 4), (5, 19, 37), (3, 2, 9, 11), (2, 96, 24, 24), (1, 3, 2, 5, 7)]


# Of the elements, and of weights and statistics: as under autocast, and of a model in bfloat16.
DTYPES = pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float32", "mixed", "bfloat16"],
)


def expected_of(run, *args):
    """Eager PyTorch's results; of arguments in bfloat16 the exact ones, since its kernels round in between, too.

    Args:
        run: takes arguments like `args`, of which it may write to tensors.
    """
    eager = run(*(tree_map_only(torch.Tensor, torch.clone, args)))
    if all(x.dtype == torch.float32 for x in args if isinstance(x, torch.Tensor)):
        return eager
    exact = run(*tree_map_only(torch.Tensor, torch.Tensor.double, args))
    return tuple(None if e is None else e.to(v.dtype) for e, v in zip(exact, eager, strict=True))


@DTYPES
@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_batch_norm_in_training_and_its_gradients_match_eager(shape, given, dtypes, calls):
    torch.manual_seed(0)
    channels = shape[1]
    x, g = (torch.randn(shape) * 3 + 50).to(dtypes[0]), torch.randn(shape, dtype=dtypes[0])
    weight, bias = (torch.randn(channels, dtype=dtypes[1]) if is_given else None for is_given in given[:2])
    running = [v(channels, dtype=dtypes[1]) for v in (torch.randn, torch.rand)] if given[2] else [None, None]
    with kernels.within():
        functional = aten._native_batch_norm_legit_functional.default
        how = (True, 0.3, 1e-5)
        if given[2]:
            args = x, weight, bias, *running, *how
            legit = aten._native_batch_norm_legit.default
            assert_rule(functional, args, {}, expected_of(lambda *args: (*legit(*args), *args[3:5]), *args))
        expected = expected_of(aten.native_batch_norm.default, x, weight, bias, None, None, *how)
        assert_rule(aten.native_batch_norm.default, (x, weight, bias, None, None, *how), {}, expected)
        backward = aten.native_batch_norm_backward.default
        for mask in itertools.product([True], (False, True), (False, True)):
            args = (g, x, weight, None, None, *expected[1:], True, 1e-5, mask)
            assert_rule(backward, args, {}, expected_of(backward, *args))
    assert {"firstloss_batch_norm", "firstloss_batch_norm_backward"} <= set(calls)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_batch_norm_is_as_exact_as_eager_where_the_mean_is_large(offset):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16) + offset
    how = (None, None, None, None, True, 0.1, 1e-5)
    exact = aten.native_batch_norm.default(x.double(), *how)
    with kernels.within():
        actual = jax.jit(lambda x: native_batch_norm(x, *how))(to_array(x))
    for a, e, reference in zip(actual, aten.native_batch_norm.default(x, *how), exact, strict=True):
        error, eager = ((v.double() - reference).abs().max() for v in (to_tensor(a, torch.float32), e))
        assert error <= 2 * eager + 1e-6 * reference.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_batch_norm_of_values_that_are_not_finite_matches_eager(value, dtype):
    x = torch.randn(4, 3, 5, 5, dtype=dtype)
    x[1, 2, 3, 4] = value
    args = (x, None, None, None, None, True, 0.1, 1e-5)
    with kernels.within():
        assert_rule(aten.native_batch_norm.default, args, {}, aten.native_batch_norm.default(*args))


def test_batch_norm_of_long_columns_and_of_other_dtypes_is_left_to_xla():
    channel = np.ones(2, np.float32)
    with kernels.within():
        assert not kernels.normalizes([np.ones((1 << 16, 2), np.float32)], 1, channel)
        assert not kernels.normalizes([np.ones((3, 2, 16), np.float16)], 16, channel)
        assert not kernels.normalizes([np.ones((3, 2, 16), d) for d in (np.float32, jnp.bfloat16)], 16, channel)
        assert not kernels.normalizes([np.ones((3, 2, 16), np.float32)], 16, channel.astype(np.float64))
        assert kernels.normalizes([np.ones((3, 2, 16), np.float32)], 16, channel, None)
    assert not kernels.normalizes([np.ones((3, 2, 16), np.float32)], 16, channel)


# Rows of one element, of less than a vector, of vectors and a rest, of more than are summed at a time; some in several
# shares, by rows or by columns.
IN_ROWS = [
    ((4, 5), 1),
    ((2, 3, 19), 1),
    ((70, 64), 1),
    ((5, 2, 3, 11), 2),
    ((3, 1037), 1),
    ((300, 200), 1),
]


@DTYPES
@pytest.mark.parametrize("mask", [[True] * 3, [True, False, False], [False, True, True], [False, False, True]], ids=str)
@pytest.mark.parametrize("given", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize(("shape", "dims"), IN_ROWS, ids=str)
def test_layer_norm_and_its_gradients_match_eager(shape, dims, given, mask, dtypes, calls):
    torch.manual_seed(0)
    x, g = (torch.randn(shape) * 3 + 50).to(dtypes[0]), torch.randn(shape, dtype=dtypes[0])
    normalized = list(shape[-dims:])
    weight, bias = (torch.randn(normalized, dtype=dtypes[1]) if is_given else None for is_given in given)
    mask = [wanted and is_given for wanted, is_given in zip(mask, (True, *given), strict=True)]
    args = (x, normalized, weight, bias, 1e-5)
    expected = expected_of(aten.native_layer_norm.default, *args)
    backward = (g, x, normalized, *expected[1:], weight, bias, mask)
    with kernels.within():
        assert_rule(aten.native_layer_norm.default, args, {}, expected)
        if any(mask):
            of = aten.native_layer_norm_backward.default
            assert_rule(of, backward, {}, expected_of(of, *backward))
    assert set(calls) == {"firstloss_row_norm", *(["firstloss_row_norm_backward"] if any(mask) else [])}


@DTYPES
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize(("shape", "dims"), IN_ROWS, ids=str)
def test_rms_norm_and_its_gradients_match_eager(shape, dims, has_weight, dtypes, calls):
    torch.manual_seed(0)
    x, g = (torch.randn(shape) * 3 + 5).to(dtypes[0]), torch.randn(shape, dtype=dtypes[0])
    normalized = list(shape[-dims:])
    weight = torch.randn(normalized, dtype=dtypes[1]) if has_weight else None
    args = (x, normalized, weight, 1e-5)
    expected = expected_of(aten._fused_rms_norm.default, *args)

    def backward_of(x, g, weight):  # PyTorch has no kernel of it on a CPU
        leaves = [v.requires_grad_() for v in (x, weight) if v is not None]
        y = torch.nn.functional.rms_norm(leaves[0], normalized, *leaves[1:], eps=1e-5)
        return (*torch.autograd.grad(y, leaves, g.to(y.dtype)), None)[:2]

    gradients = expected_of(backward_of, x, g, weight)
    backward = (g, x, normalized, expected[1], weight, [True, has_weight])
    with kernels.within():
        assert_rule(aten._fused_rms_norm.default, args, {}, expected)
        assert_rule(aten._fused_rms_norm_backward.default, backward, {}, gradients)
    assert set(calls) == {"firstloss_row_norm", "firstloss_row_norm_backward"}


# Groups of one channel and of several, channels of less than a vector and of more; in one share, and in several.
IN_GROUPS = [
    ((2, 4, 5), 2),
    ((3, 6, 3, 7), 6),
    ((1, 8, 19), 1),
    ((2, 6, 4, 5, 3), 3),
    ((3, 32, 40, 40), 4),
    ((4, 30), 3),
]


@DTYPES
@pytest.mark.parametrize("mask", [[True] * 3, [True, False, False], [False, True, True], [False, False, True]], ids=str)
@pytest.mark.parametrize("given", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize(("shape", "groups"), IN_GROUPS, ids=str)
def test_group_norm_and_its_gradients_match_eager(shape, groups, given, mask, dtypes, calls):
    torch.manual_seed(0)
    x, g = (torch.randn(shape) * 3 + 50).to(dtypes[0]), torch.randn(shape, dtype=dtypes[0])
    weight, bias = (torch.randn(shape[1], dtype=dtypes[1]) if is_given else None for is_given in given)
    mask = [wanted and is_given for wanted, is_given in zip(mask, (True, *given), strict=True)]
    sizes = (shape[0], shape[1], math.prod(shape[2:]), groups)
    args = (x, weight, bias, *sizes, 1e-5)
    expected = expected_of(aten.native_group_norm.default, *args)
    backward = (g, x, *expected[1:], weight, *sizes, mask)
    with kernels.within():
        assert_rule(aten.native_group_norm.default, args, {}, expected)
        if any(mask):
            of = aten.native_group_norm_backward.default
            assert_rule(of, backward, {}, expected_of(of, *backward))
    assert set(calls) == {"firstloss_row_norm", *(["firstloss_row_norm_backward"] if any(mask) else [])}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_layer_norm_of_values_that_are_not_finite_matches_eager(value):
    x = torch.randn(4, 30)
    x[1, 2] = value
    args = (x, [30], None, None, 1e-5)
    with kernels.within():
        y, _, rstd = jax.jit(lambda x: native_layer_norm(x, *args[1:]))(to_array(x))
    expected, _, expected_rstd = aten.native_layer_norm.default(*args)  # for inf, the means are inf and NaN
    assert_same(to_tensor(y, torch.float32), expected, 1e-5)  # sums are in another order
    assert_same(to_tensor(rstd, torch.float32), expected_rstd, 1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_layer_norm_is_as_exact_as_eager_where_the_mean_is_large(offset):
    torch.manual_seed(0)
    x = torch.randn(50, 300) + offset
    how = ([300], None, None, 1e-5)
    exact = aten.native_layer_norm.default(x.double(), *how)
    with kernels.within():
        actual = jax.jit(lambda x: native_layer_norm(x, *how))(to_array(x))
    for a, e, reference in zip(actual, aten.native_layer_norm.default(x, *how), exact, strict=True):
        error, eager = ((v.double() - reference).abs().max() for v in (to_tensor(a, torch.float32), e))
        assert error <= 2 * eager + 1e-6 * reference.abs().max()


def test_layer_norm_of_many_short_rows_and_of_other_dtypes_is_left_to_xla():
    weight = np.ones(4, np.float32)
    with kernels.within():
        assert not kernels.normalizes([np.ones((1 << 16, 4), np.float32)], 4, weight)
        assert not kernels.normalizes([np.ones((3, 4), np.float16)], 4, weight)
        assert not kernels.normalizes([np.ones((3, 4), dtype) for dtype in (np.float32, jnp.bfloat16)], 4, weight)
        assert not kernels.normalizes([np.ones((0, 4), np.float32)], 4, weight)
        assert kernels.normalizes([np.ones((3, 4), np.float32)], 4, weight, None)
    assert not kernels.normalizes([np.ones((3, 4), np.float32)], 4, weight)


def lowered(x, weight):
    with kernels.within():
        return jax.jit(lambda x, w: convolution(x, w, None, *HOW)).lower(x, weight)


def compiled(x, weight):
    return lowered(x, weight).compile()


def operands(batch=2, channels=32, length=24):
    torch.manual_seed(0)
    x, weight = torch.randn(batch, 32, length, length), torch.randn(channels, 32, 3, 3)
    return x, weight, jnp.asarray(x.numpy()), jnp.asarray(weight.numpy())


def test_the_bits_are_the_same_each_time():
    """Whichever threads compute which part."""
    for batch in (1, 2, 7):
        *_, x, weight = operands(batch)
        run = compiled(x, weight)
        first = np.asarray(run(x, weight))
        assert all(np.array_equal(first, run(x, weight)) for _ in range(30))


def test_modes_of_the_calling_thread_do_not_see_it():
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight, jax_x, jax_weight = operands()
    run = compiled(jax_x, jax_weight)
    with Seeing():
        actual = [np.asarray(run(jax_x, jax_weight)) for _ in range(20)]
    assert not seen
    expected = aten.convolution(x, weight, None, *HOW).numpy()
    assert all(np.allclose(f, expected, rtol=2e-5, atol=1e-4) for f in actual)  # sums of 288 products of about 1


def test_pytorchs_number_of_threads_is_unchanged():
    *_, x, weight = operands()
    before, run = torch.get_num_threads(), compiled(x, weight)
    for _ in range(20):
        np.asarray(run(x, weight))
    assert torch.get_num_threads() == before


def test_a_call_that_pytorch_refuses_is_an_error(capfd):
    x, weight = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 5, 3, 3))  # of 5 channels, not 3
    call = jax.jit(lambda x, w: kernels.convolution(x, w, None, (2, 4, 8, 8), *HOW))
    for _ in range(30):  # the last share is done by whichever thread, before or after the handler has returned
        with pytest.raises(Exception, match="PyTorch's convolution failed"):
            jax.block_until_ready(call(x, weight))
    assert "expected input[" in capfd.readouterr().err  # PyTorch's reason


@pytest.mark.parametrize("missing", ["function", "library"])
def test_xla_is_used_if_a_part_is_missing(missing, monkeypatch):
    if missing == "function":
        monkeypatch.setattr(kernels, "_FUNCTIONS", (*kernels._FUNCTIONS, "aoti_torch_that_is_not_there"))
    else:
        monkeypatch.setattr(kernels.c_library, "SUFFIX", ".nowhere")
    monkeypatch.setattr(kernels, "registered_with_xla", kernels.registered_with_xla.__wrapped__)
    *_, x, weight = operands()
    assert "stablehlo.convolution" in lowered(x, weight).as_text()


def test_xla_is_used_outside_of_a_step_for_one_device():
    *_, x, weight = operands()
    text = jax.jit(lambda x, w: convolution(x, w, None, *HOW)).lower(x, weight).as_text()
    assert "stablehlo.convolution" in text


STEP = """
import sys, torch, firstloss as fl
torch.manual_seed(0)
backend = fl.backend("XLA", artifact_dir=sys.argv[1])
with backend.device:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3))
compiled = fl.compile(model, backend)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@fl.trace
def step(x):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

batch = torch.randn(4, 3, 16, 16)
print([step(batch).item().hex() for _ in range(4)])
step(batch)  # under way when the process ends
"""


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    """And computes the same bits; a process exits cleanly while a step is running."""
    runs = [forked.run(["-c", STEP, str(tmp_path)], capture_output=True, timeout=240) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("mesh", [None, {"dp": 1}])
def test_a_step_calls_it_on_one_device_and_never_on_a_mesh(mesh, calls, tmp_path):
    backend = fl.backend("XLA", artifact_dir=str(tmp_path), mesh=mesh)

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 19, 3), torch.nn.ReLU(), torch.nn.Conv2d(19, 7, 3))

    eager = build()
    with backend.device:
        model = build()
    compiled_model = fl.compile(model, backend)

    def step_of(called, parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step(x):
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    actual, expected = fl.trace(step_of(compiled_model, model.parameters())), step_of(eager, eager.parameters())
    batch = torch.randn(2, 3, 13, 13)
    for _ in range(3):
        assert (
            abs(actual(batch).item() - expected(batch).item()) < 1e-5
        )  # losses of about 0.05, summed in another order
    assert bool(calls) is (mesh is None)


@pytest.mark.optimized
def test_a_table_of_sines_is_computed_once(tmp_path):
    """Not again by each operation that reads it: a rotary embedding's, for each head."""
    backend = fl.backend("XLA", artifact_dir=str(tmp_path), first_loss="compiled")
    with backend.device:
        model = torch.nn.Linear(16, 16)
    compiled_model = fl.compile(model, backend)

    @fl.trace
    def step(x, angles):
        y = compiled_model(x) * angles.sin()
        y = y + y.square().mean() * angles.sin()
        y.square().mean().backward()
        return y

    x, angles = torch.randn(32, 5, 16), torch.linspace(-3, 3, 80).reshape(5, 16)
    actual = step(x, angles).detach().clone()
    y = torch.nn.functional.linear(x, model.weight.detach().cpu(), model.bias.detach().cpu()) * angles.sin()
    # sums of 16 products of about 1 in another order, and another sine
    torch.testing.assert_close(actual, y + y.square().mean() * angles.sin(), rtol=1e-5, atol=1e-6)
    (executable,) = compiled_steps.segment_executables(compiled_steps.latest(step)).values()
    sines = [line for line in executable.as_text().splitlines() if " sine(" in line]
    assert len(sines) == 1
