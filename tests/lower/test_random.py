"""Random operations in a step: PyTorch's distributions, new numbers at each step, reproducible from the seed."""

import pytest
import torch

import firstloss as fl

N = 40_000
# Standard errors: of a mean of N draws, the deviation over 200; six of them are exceeded once in 10^9 tests, and seeds
# are fixed.
SIX = 6 / N**0.5


@pytest.fixture(autouse=True)
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)


# The draw, and the mean and standard deviation of its elements.
DRAWS = {
    "rand": (lambda x: torch.rand(N), 0.5, 12**-0.5),
    "randn": (lambda x: torch.randn(N), 0.0, 1.0),
    "normal": (lambda x: torch.normal(x * 3, 2.0), 3.0, 2.0),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21**0.5),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.25), 1.0, (0.25 / 0.75) ** 0.5),
    "exponential": (lambda x: x.clone().exponential_(2.0), 0.5, 0.5),
    "geometric": (lambda x: x.clone().geometric_(0.4), 2.5, 0.6**0.5 / 0.4),
    "log_normal": (lambda x: x.clone().log_normal_(0.5, 0.25).log(), 0.5, 0.25),
    "cauchy": (lambda x: (x.clone().cauchy_(1.0, 2.0) > 1).float(), 0.5, 0.5),
    "poisson": (lambda x: torch.poisson(x * 4), 4.0, 2.0),
    "randint": (lambda x: torch.randint(3, 9, (N,)).float(), 5.5, (35 / 12) ** 0.5),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([0.0, 1.0, 3.0]), N, True).float(), 1.75, 0.1875**0.5),
    "rrelu": (lambda x: torch.nn.functional.rrelu(-x, 0.2, 0.4, training=True), -0.3, 0.2 / 12**0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_samples_have_their_distribution(name):
    draw, mean, deviation = DRAWS[name]
    step = fl.trace(lambda x: draw(x))
    torch.manual_seed(3)
    first, second = (step(torch.ones(N)).clone().double() for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(first.mean() - mean) < SIX * deviation
    # of the deviation, whose own error depends on the kurtosis: 9 for the exponential
    assert abs(first.std() / deviation - 1) < SIX * 3


def test_sampling_without_replacement_draws_no_index_twice():
    step = fl.trace(lambda p: torch.multinomial(p, 4))
    drawn = step(torch.tensor([[0.5, 0.1, 0.0, 0.2, 0.2], [0.0, 1.0, 1.0, 1.0, 1.0]])).clone()
    assert sorted(drawn[0].tolist()) == [0, 1, 3, 4] and sorted(drawn[1].tolist()) == [1, 2, 3, 4]


def test_the_same_seed_gives_the_same_steps():
    def run():
        torch.manual_seed(7)
        step = fl.trace(lambda x: torch.nn.functional.dropout(x))
        return [step(torch.ones(64)).clone() for _ in range(3)]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
