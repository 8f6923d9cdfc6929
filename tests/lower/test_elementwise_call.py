"""The custom call of elementwise operations: the bits of its operations one by one."""

import ctypes
import ctypes.util
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from firstloss.lower import aten, elementwise_call

pytestmark = pytest.mark.skipif(
    not aten.registered_with_xla(),
    reason="the handlers are not built (python setup.py build_ext --inplace), or not here",
)

UNARY = {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "square": np.square}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum}
PRIMITIVES = {name: getattr(lax, name) for name in (*UNARY, "add", "sub", "mul", "div", "max", "min")}


@st.composite
def programs(draw):
    """The numbers of arrays and elements, operations on values or numbers, results, and what these overwrite."""
    arrays = draw(st.integers(1, 4))
    operations = []
    for i in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from([*UNARY, *BINARY]))
        values = st.integers(0, arrays + i - 1)
        operands = [draw(values)]
        if name in BINARY:
            operands.insert(draw(st.integers(0, 1)), draw(st.one_of(values, st.sampled_from([0.5, -3.0, 0.0]))))
        operations.append((name, operands))
    computed = st.integers(arrays, arrays + len(operations) - 1)
    results = draw(st.lists(computed, min_size=1, max_size=3, unique=True))
    overwritten = draw(st.lists(st.integers(0, arrays - 1), max_size=len(results), unique=True))
    lengths = st.integers(1, 5000) | st.integers(30000, 70000)  # those of more than 64 blocks by several threads
    return arrays, draw(lengths), operations, results, overwritten


def run_operations(arrays, operations, results, functions):
    values = list(arrays)
    for name, operands in operations:
        values.append(functions[name](*(values[x] if type(x) is int else np.float32(x) for x in operands)))
    return [values[i] for i in results]


def flushed(values):
    """With zeros in the place of subnormal numbers."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def flushing(function):
    """A function as XLA's threads compute it, which take subnormal numbers for zeros."""
    return lambda *operands: flushed(function(*map(flushed, operands)))


def have_same_bits(a, b):
    """Whatever the bits of a NaN."""
    return (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)


@given(programs(), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_programs_give_the_bits_of_their_operations_one_by_one(program, seed):
    count, length, operations, results, overwritten = program
    numbers = np.random.default_rng(seed)
    arrays = [numbers.normal(size=length).astype(np.float32) for _ in range(count)]
    for array in arrays:
        array[numbers.integers(0, length, 3)] = [np.nan, np.inf, -0.0]
    with np.errstate(all="ignore"):
        exact = run_operations(arrays, operations, results, UNARY | BINARY)
        functions = {name: flushing(function) for name, function in (UNARY | BINARY).items()}
        on_xlas_threads = run_operations(arrays, operations, results, functions)
    like = [jax.ShapeDtypeStruct((length,), np.float32)] * count
    closed = jax.make_jaxpr(lambda *x: run_operations(x, operations, results, PRIMITIVES))(*like)

    def fused(*operands):
        program = elementwise_call.ElementwiseProgram()
        blocks = [program.argument(x) for x in operands]
        made = program.add_jaxpr(closed.jaxpr, closed.consts, blocks)
        taken = {k: blocks[i] for k, i in enumerate(overwritten)}
        return program.call(made, [(length,)] * len(results), taken)

    try:
        run = jax.jit(fused, donate_argnums=tuple(overwritten)).lower(*like).compile()
    except elementwise_call.Untranslatable:
        assert len(operations) > elementwise_call._MOST_SCRATCH  # more values at once than it has room for
        return
    for actual, *expected in zip(run(*map(jax.numpy.array, arrays)), exact, on_xlas_threads, strict=True):
        equal = [(actual == e) | np.isnan(actual) & np.isnan(e) for e in expected]  # zeros of both signs are equal
        assert np.all(equal[0] | equal[1])


FLOATS = st.sampled_from([np.float32, np.float64])
NUMBER_UNARY = {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
COMPARISONS["ge"] = np.greater_equal
LOGICAL = {"and": np.logical_and, "or": np.logical_or}
TO_LAX = {"and": lax.bitwise_and, "or": lax.bitwise_or, "not": lax.bitwise_not, "select": lax.select}
TO_NUMPY = NUMBER_UNARY | BINARY | COMPARISONS | LOGICAL | {"not": np.logical_not}
POW = ctypes.CDLL(ctypes.util.find_library("m")).pow  # as Python's; NumPy's may differ in the last bit
POW.restype, POW.argtypes = ctypes.c_double, [ctypes.c_double] * 2
TO_NUMPY["pow"] = lambda x, y: np.float64(POW(x, y))
TO_NUMPY["select"] = lambda which, x, y: x if which else y
HARD_NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 0.9, 0.999, 1e-8, 3.0, -2.5, 1e30, 1e-44, np.inf, np.nan])


@st.composite
def number_programs(draw):
    """The dtypes of given numbers, operations on numbers of one dtype or of bools, and which numbers are results."""
    dtypes = draw(st.lists(FLOATS, min_size=1, max_size=3))
    kinds = [np.dtype(dtype) for dtype in dtypes]
    operations = []
    for _ in range(draw(st.integers(1, 14))):
        floats = [i for i, kind in enumerate(kinds) if kind.kind == "f"]
        bools = [i for i, kind in enumerate(kinds) if kind.kind == "b"]
        first = draw(st.sampled_from(floats))
        alike = st.sampled_from([i for i in floats if kinds[i] == kinds[first]])
        names = [*NUMBER_UNARY, *BINARY, *COMPARISONS, "convert", *(["pow"] if kinds[first] == np.float64 else [])]
        name = draw(st.sampled_from(names + (["not", "and", "or", "select"] if bools else [])))
        if name in NUMBER_UNARY:
            operation, kind = (name, [first]), kinds[first]
        elif name == "convert":
            kind = np.dtype(draw(FLOATS))
            operation = name, [first, kind]
        elif name in ("not", "and", "or"):
            operation, kind = (name, [draw(st.sampled_from(bools)) for _ in range(2 - (name == "not"))]), np.dtype(bool)
        elif name == "select":
            operation, kind = (name, [draw(st.sampled_from(bools)), first, draw(alike)]), kinds[first]
        else:
            second = draw(alike | HARD_NUMBERS)
            operation, kind = (name, [first, second]), np.dtype(bool) if name in COMPARISONS else kinds[first]
        operations.append(operation)
        kinds.append(kind)
    computed = [i for i in range(len(dtypes), len(kinds)) if kinds[i].kind == "f"]
    results = draw(st.lists(st.sampled_from(computed), max_size=3, unique=True)) if computed else []
    return dtypes, operations, results, draw(st.sampled_from([i for i, k in enumerate(kinds) if k.kind == "f"]))


def run_numbers(given, operations, functions, convert):
    values = list(given)
    for name, operands in operations:
        if name == "convert":
            values.append(convert(values[operands[0]], operands[1]))
            continue
        read = [values[x] if type(x) is int else values[operands[0]].dtype.type(x) for x in operands]
        values.append(functions[name](*read))
    return values


@given(
    number_programs(), st.lists(HARD_NUMBERS | st.floats(width=32), min_size=3, max_size=3), st.sampled_from([3, 40000])
)
@settings(max_examples=200)
def test_numbers_have_the_bits_of_their_operations_one_by_one(program, values, length):
    dtypes, operations, results, factor = program
    given = [dtype(value) for dtype, value in zip(dtypes, values, strict=False)]
    array = np.linspace(-3, 3, length, dtype=np.float32)

    with np.errstate(all="ignore"):
        numbers = run_numbers(given, operations, TO_NUMPY, lambda x, to: np.dtype(to).type(x))
        single = np.float32(numbers[factor])
        products = array * single, flushed(flushed(array) * flushed(single))  # XLA's threads flush to zero
    lowered = {name: getattr(lax, name, None) for name in TO_NUMPY} | TO_LAX

    def jitted(given, array):
        numbers = run_numbers(given, operations, lowered, lax.convert_element_type)
        single = lax.convert_element_type(numbers[factor], np.float32)
        return [lax.mul(array, lax.broadcast(single, array.shape)), *(numbers[i] for i in results)]

    with jax.enable_x64(True):
        closed = jax.make_jaxpr(jitted)(given, array)

        def fused(given, array):
            program = elementwise_call.ElementwiseProgram(all_numbers=True)
            operands = [program.argument(x) for x in (*given, array)]
            made = program.add_jaxpr(closed.jaxpr, closed.consts, operands)
            return program.call(made, [(length,)] + [()] * len(results), {0: operands[-1]})

        actual = jax.jit(fused, donate_argnums=1)([jax.numpy.asarray(x) for x in given], jax.numpy.asarray(array))
    product, *computed = map(np.asarray, actual)
    assert product.dtype == np.float32
    assert np.all(have_same_bits(product, products[0]) | have_same_bits(product, products[1])), (product, products)
    for a, e in zip(computed, (numbers[i] for i in results), strict=True):
        assert a.dtype == e.dtype
        assert np.all(have_same_bits(a, e)), (a, e)


def test_words_of_an_instruction():
    """The struct in _pointwise.h: an opcode and three places of two 32-bit numbers."""
    assert elementwise_call._Place(2, 5).word == np.array([2, 5], np.int32).view(np.int64)[0]
    source = Path(elementwise_call.__file__).with_name("_pointwise.h").read_text()
    names = re.search(r"enum opcode \{ (.*?) \}", source).group(1).lower().split(", ")
    assert tuple(names) == elementwise_call._OPCODES
    names = re.search(r"enum number_opcode \{(.*?)\}", source, re.DOTALL).group(1).lower().replace("n_", "").split(",")
    assert tuple(name.strip() for name in names) == elementwise_call._NUMBER_OPCODES
    assert int(re.search(r"MOST_SCRATCH = (\d+)", source).group(1)) == elementwise_call._MOST_SCRATCH
    assert int(re.search(r"MOST_NUMBERS = (\d+)", source).group(1)) == elementwise_call._MOST_NUMBERS
    arrays = re.search(r"MOST_ARRAYS = (\d+)", Path(aten.__file__).with_name("_aten.c").read_text())
    assert int(arrays.group(1)) == elementwise_call._MOST_ARRAYS
