"""Tensors that a step makes of lists of numbers which change: one input, compiled once for the first values and once
for any, with the dtypes and bits of eager PyTorch."""

import numpy as np
import pytest
import torch

import firstloss as fl
from tests.compiled_steps import compilations

pytestmark = pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")


def discounted(rewards):
    """The returns of an episode."""
    returns, value = [], 0.0
    for reward in rewards[::-1]:
        value = reward + 0.9 * value
        returns.insert(0, value)
    return torch.tensor(returns)


FLOATS = {
    "list": torch.tensor,
    "nested": lambda v: torch.tensor([v, [2 * n for n in v]]),
    "tuples": lambda v: torch.tensor(tuple((n, 1, True) for n in v)),
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "float64": lambda v: torch.tensor(v, dtype=torch.float64),
    "bfloat16": lambda v: torch.tensor(v, dtype=torch.bfloat16),
    "int32": lambda v: torch.tensor([n * 10 for n in v], dtype=torch.int32),
    "new_tensor": lambda v: torch.ones(1, dtype=torch.float64).new_tensor(v),
    "requires_grad": lambda v: torch.tensor(v, requires_grad=True).detach(),
    "with constants": lambda v: torch.tensor([0.1, *v, float("nan")]),
    "arithmetic": lambda v: torch.tensor([n / 3 for n in v]),
    "discounted": discounted,
    "normalized": lambda v: (torch.tensor(v) - torch.tensor(v).mean()) / torch.tensor(v).std(),
    "numpy": lambda v: torch.tensor([np.float32(0.1), np.float64(0.2)]) + torch.tensor(v).sum(),
}
INTS = {
    "list": torch.tensor,
    "index": lambda v: torch.arange(64.0)[torch.tensor(v)],
    "one_hot": lambda v: torch.nn.functional.one_hot(torch.tensor(v), 64),
    "mixed": lambda v: torch.tensor([*v, 0.5]),
    "uint8": lambda v: torch.tensor(v, dtype=torch.uint8),
    "bool": lambda v: torch.tensor(v, dtype=torch.bool),
}


def run(backend, make, values):
    model = fl.compile(torch.nn.Linear(2, 2), backend)

    @fl.trace(check=False)
    def step(x, numbers):
        return make(numbers), model(x).sum()

    return [step(torch.ones(1, 2), numbers)[0] for numbers in values], step


@pytest.mark.parametrize(
    ("make", "first"),
    [(make, [0.1, 2.0, -3.5]) for make in FLOATS.values()] + [(make, [0, 3, 5]) for make in INTS.values()],
    ids=[*FLOATS, *(f"int {name}" for name in INTS)],
)
def test_a_list_of_changing_numbers_is_one_input(make, first, by_kernels, tmp_path):
    values = [[n + i * type(n)(3) for n in first] for i in range(6)]
    expected, _ = run(fl.backend("CPU"), make, values)
    results, step = run(fl.backend("XLA", artifact_dir=tmp_path), make, values)
    assert compilations(step) == 2
    for a, b in zip(results, expected, strict=True):
        a = torch.as_tensor(a)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_so_it_is_where_it_is_compiled(tmp_path):
    values = [[0.1 * i, 2.0, -3.5 + i] for i in range(5)]
    expected, _ = run(fl.backend("CPU"), discounted, values)
    results, step = run(fl.backend("XLA", artifact_dir=tmp_path), discounted, values)
    assert compilations(step) == 2
    assert all(map(torch.equal, results, expected))


def test_lists_of_unequal_lengths_are_pytorchs_error(tmp_path):
    with pytest.raises(ValueError, match="expected sequence of length"):
        run(fl.backend("XLA", artifact_dir=tmp_path), lambda v: torch.tensor([v, v[:1]]), [[0.1, 0.2], [0.3, 0.4]])
