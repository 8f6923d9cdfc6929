"""Numbers that are inputs of a step promote like numbers, not like tensors, beside tensors of any dtype."""

import itertools

import pytest
import torch

import firstloss as fl
from tests.compiled_steps import compilations

pytestmark = pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
OPERATIONS = {
    "tensor * number": lambda tensor, number: tensor * number,
    "number * tensor": lambda tensor, number: number * tensor,
    "tensor - number": lambda tensor, number: tensor - number,
    "tensor / number": lambda tensor, number: tensor / number,
    "tensor > number": lambda tensor, number: tensor > number,
    "tensor + tensor * number": lambda tensor, number: tensor + tensor * number,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64]
STEPS = {"float": 0.1, "int": 3}  # by which the number changes at each call
CASES = list(itertools.product(DTYPES, [(), (3,)], STEPS))


def run(backend, operation, dtype, shape, step_size):
    model = fl.compile(torch.nn.Linear(2, 2), backend)
    state = {"number": STEPS[step_size]}
    tensor = torch.full(shape, 7, dtype=dtype) / 10 if dtype.is_floating_point else torch.full(shape, 7, dtype=dtype)

    @fl.trace(check=False)
    def step(x):
        state["number"] += STEPS[step_size]
        return OPERATIONS[operation](tensor, state["number"]), model(x).sum()

    return [torch.as_tensor(step(torch.ones(1, 2))[0]) for _ in range(6)], step


def compare(operation, cases, tmp_path):
    for case in cases:
        expected, _ = run(fl.backend("CPU"), operation, *case)
        results, step = run(fl.backend("XLA", artifact_dir=tmp_path), operation, *case)
        assert compilations(step) == 2, (case, "once for its first value, once for any")
        for a, b in zip(results, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), case


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_changing_number_has_no_dtype(operation, by_kernels, tmp_path):
    compare(operation, CASES, tmp_path)


@pytest.mark.parametrize("operation", ["tensor * number", "tensor - number"])
def test_nor_where_it_is_compiled(operation, tmp_path):
    compare(operation, CASES[::3], tmp_path)
