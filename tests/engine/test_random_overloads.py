"""Random operations without a generator argument, run on several threads and concurrently with the user's own draws."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import firstloss as fl
from firstloss.program.node_kinds import with_generator

aten = torch.ops.aten
DRAWS = {
    "rand": lambda: torch.rand(5000),
    "randn": lambda: torch.randn(5000),
    "randint": lambda: torch.randint(1 << 40, (5000,)),
    "randint of an interval": lambda: torch.randint(-5, 1 << 40, (5000,)),
    "randint_like": lambda: torch.randint_like(torch.zeros(5000), 7),
    "randint_like of an interval": lambda: torch.randint_like(torch.zeros(5000), -3, 7),
    "rand_like": lambda: torch.rand_like(torch.zeros(5000, dtype=torch.float64)),
    "randperm": lambda: torch.randperm(5000),
    "dropout": lambda: F.dropout(torch.ones(5000)),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(5000)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_on_several_threads_leave_the_users_generator_alone(draw):
    def construct():
        module = nn.Module()
        for i in range(80):
            module.register_buffer(f"b{i}", DRAWS[draw]())
        return module

    for seed in range(3):
        torch.manual_seed(seed)
        expected = construct()
        drawn = [torch.rand(100) for _ in range(20)]
        torch.manual_seed(seed)
        actual = fl.deferred_init(construct)
        making = threading.Thread(target=fl.materialize_module, args=(actual,), kwargs={"num_threads": 4})
        making.start()
        # as a script does while weights are materialized in the background
        also_drawn = [torch.rand(100) for _ in range(20)]
        making.join()
        for (name, a), b in zip(expected.named_buffers(), actual.buffers(), strict=True):
            assert torch.equal(a, b), name
        for a, b in zip(drawn, also_drawn, strict=True):
            assert torch.equal(a, b)


def test_overloads_with_a_generator_take_the_same_arguments():
    assert with_generator(aten.randint.low) is aten.randint.low_generator
    assert with_generator(aten.randint_like.Tensor) is aten.randint_like.Tensor_generator
    assert with_generator(aten.normal_.default) is aten.normal_.default
    assert with_generator(aten.native_dropout.default) is None
