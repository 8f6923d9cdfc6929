"""`fl.deferred(preserve_rng_state=True)` leaves generators where construction on meta leaves them."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import CaptureError

OWN = torch.Generator().manual_seed(5)


def reseeding():
    torch.nn.Linear(3, 3)
    torch.manual_seed(7)
    return nn.Linear(4, 4)


def reseeding_last():
    layer = nn.Linear(4, 4)
    torch.manual_seed(8)
    return layer


def forking():
    first = nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        second = nn.Linear(4, 4)
    return nn.Sequential(first, second, nn.Linear(5, 5))


def saving():
    state = torch.get_rng_state()
    first = nn.Linear(3, 3)
    torch.set_rng_state(state)
    return nn.Sequential(first, nn.Linear(3, 3))


def saving_amid():
    first = nn.Linear(3, 3)
    state = torch.get_rng_state()
    second = nn.Linear(3, 3)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, nn.Linear(3, 3))


def own_generator():
    layer = nn.Linear(300, 300)
    with torch.no_grad():
        layer.weight.normal_(generator=OWN)
    return layer


def truncated():
    layer = nn.Linear(30, 30)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    return nn.Sequential(layer, nn.Linear(4, 4))


def odd_draws():
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.exponential_()
        layer.bias.copy_(torch.randperm(3))
        torch.multinomial(torch.ones(9, device=layer.weight.device), 4)
    return nn.Sequential(layer, nn.Dropout(), nn.Linear(2, 2))


CONSTRUCTORS = {
    f.__name__: f
    for f in (reseeding, reseeding_last, forking, saving, saving_amid, own_generator, truncated, odd_draws)
}


def after(construct, build):
    torch.manual_seed(1)
    torch.randn(3)  # with half of a pair of normals cached
    OWN.manual_seed(5)
    with construct():
        model = build()
    return model, [torch.get_rng_state(), OWN.get_state()]


@pytest.mark.parametrize("build", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_generators_end_where_meta_leaves_them(build):
    _, expected = after(lambda: torch.device("meta"), build)
    _, moved = after(fl.deferred, build)
    model, states = after(lambda: fl.deferred(preserve_rng_state=True), build)
    for state, expected_state in zip(states, expected, strict=True):
        assert torch.equal(state, expected_state)
    assert build is reseeding_last or not all(map(torch.equal, moved, expected))  # otherwise this test checks nothing
    drawn, _ = after(lambda: torch.random.fork_rng(devices=[]), build)
    for weight, same in zip(fl.materialize_module(model).parameters(), drawn.parameters(), strict=True):
        assert torch.equal(weight, same)


def test_a_meta_device_script_draws_the_same_numbers():
    def script(construct):
        torch.manual_seed(0)
        with construct():
            model = nn.Sequential(nn.Linear(40, 40), nn.Embedding(30, 40))
        model.to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()
        return fl.materialize_module(model)

    result = script(lambda: fl.deferred(preserve_rng_state=True)).state_dict()
    for name, weight in script(lambda: torch.device("meta")).state_dict().items():
        assert torch.equal(result[name], weight)
    other = script(fl.deferred).state_dict()
    assert not torch.equal(other["0.weight"], result["0.weight"])


def test_it_works_with_the_counter_policy_and_nested():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with fl.deferred(rng="counter", preserve_rng_state=True):
        nn.Linear(3, 3)
        with fl.deferred(preserve_rng_state=True):
            nn.Linear(3, 3)
        with fl.deferred():
            nn.Linear(3, 3)
    assert torch.equal(torch.get_rng_state(), state)
    with fl.deferred():
        nn.Linear(3, 3)
    assert not torch.equal(torch.get_rng_state(), state)


def test_it_is_refused_inside_a_block_without_it():
    with fl.deferred(), pytest.raises(CaptureError, match=r"test_preserve_rng_state.py:\d+: preserve_rng_state=True"):
        fl.deferred(preserve_rng_state=True)
