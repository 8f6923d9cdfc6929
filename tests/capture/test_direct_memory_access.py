"""C functions that access a tensor's memory directly, in a deferred constructor."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import CaptureError

ORIGINAL = torch._sobol_engine_initialize_state_  # as in a library that imported it by name


def drawn(scramble, seed, forward):
    engine = torch.quasirandom.SobolEngine(3, scramble=scramble, seed=seed)
    if forward:
        engine.fast_forward(forward)
    module = nn.Linear(2, 2)
    module.register_buffer("points", engine.draw(5, dtype=torch.float64))
    engine.reset()
    module.register_buffer("first", engine.draw(2))
    return module


@pytest.mark.parametrize("forward", [0, 4])
@pytest.mark.parametrize("scramble, seed", [(False, None), (True, 3), (True, None)])
def test_quasirandom_numbers_match_eager(scramble, seed, forward):
    torch.manual_seed(1)
    expected = drawn(scramble, seed, forward)
    torch.manual_seed(1)
    actual = fl.materialize_module(fl.deferred_init(drawn, scramble, seed, forward))
    for (name, a), b in zip(expected.state_dict().items(), actual.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_other_functions_are_an_error_at_the_users_line():
    def construct():
        return ORIGINAL(torch.zeros(3, 30, dtype=torch.long), 3)

    with pytest.raises(CaptureError, match=r"test_direct_memory_access.py:\d+: .* memory of a tensor"):
        fl.deferred_init(construct)
