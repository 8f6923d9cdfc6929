"""Steps that draw from generators of their own, directly or by a loader that they take their batch from, run as in
eager PyTorch: the same numbers, and the generators move on."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import firstloss as fl
from firstloss.errors import EagerStepWarning

X = torch.arange(256.0).reshape(64, 4).sin()
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def _backend(tmp_path):
    fl.backend("XLA", artifact_dir=tmp_path)


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


class Drawn(IterableDataset):
    def __iter__(self):
        generator = seeded()
        while True:
            x = torch.randn(4, generator=generator)
            yield x, x.sum(0, keepdim=True)


def drawn_batches():
    generator = seeded()
    while True:
        x = torch.randn(8, 4, generator=generator)
        yield x, x.sum(1, keepdim=True)


LOADERS = {
    "shuffled": lambda: iter(DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=seeded())),
    "in order": lambda: iter(DataLoader(TensorDataset(X, Y), 8)),
    "iterable": lambda: iter(DataLoader(Drawn(), 8)),
    "a generator": drawn_batches,
}


def train(loader, traced):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    call = fl.compile(model, fl.current_backend()) if traced else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batches):
        x, y = next(batches)
        loss = (call(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step, batches = fl.trace(step) if traced else step, LOADERS[loader]()
    return [step(batches).item() for _ in range(6)]


@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("loader", LOADERS)
def test_a_step_takes_its_batch_from_a_loader(loader):
    # The first call is computed from a trace, by the same kernels but for the optimizer's numbers.
    assert train(loader, traced=True) == pytest.approx(train(loader, traced=False), rel=1e-5)


DRAWS = {
    "randn": lambda x, g: x + torch.randn(3, 4, generator=g),
    "rand_like": lambda x, g: x * torch.rand(x.shape, generator=g, dtype=torch.float64),
    "randint": lambda x, g: x + torch.randint(5, x.shape, generator=g),
    "normal_": lambda x, g: x + torch.empty_like(x).normal_(generator=g),
    "of an argument": lambda x, g: (x * 2).uniform_(-1, 1, generator=g) + x,
    "normal": lambda x, g: torch.normal(x, 1.0, generator=g),
    "bernoulli": lambda x, g: x.sigmoid().bernoulli(generator=g) * x,
    "bernoulli_": lambda x, g: x * torch.zeros_like(x).bernoulli_(0.5, generator=g),
    "multinomial": lambda x, g: x[:, torch.multinomial(x[0].softmax(0), 2, generator=g)],
    "poisson": lambda x, g: torch.poisson(x.exp(), generator=g),
    "randperm": lambda x, g: x[torch.randperm(3, generator=g)],
    "part": lambda x, g: (y := x.clone(), y[:, 1:3].exponential_(generator=g))[0],
    "sizes": lambda x, g: x[: int(torch.randint(1, 3, (), generator=g))],
    "a branch": lambda x, g: x * 2 if torch.rand((), generator=g) > 0.5 else x,
}
BATCHES = [torch.randn(3, 4, generator=seeded(n)) for n in range(5)]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_step_draws_from_a_generator_of_its_own(draw):
    generators = seeded(), seeded()
    steps = [lambda x, g=g: DRAWS[draw](x, g) * 3 for g in generators]
    traced = fl.trace(steps[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in BATCHES:
            torch.testing.assert_close(traced(x).clone(), steps[1](x), rtol=1e-6, atol=1e-6)  # XLA's multiplication
            assert torch.equal(generators[0].get_state(), generators[1].get_state())
    texts = [str(warning.message) for warning in caught if warning.category is EagerStepWarning]
    assert texts and all(__file__ in text for text in texts)


def test_it_is_refused_where_values_must_not_be_read():
    generator = seeded()
    state = generator.get_state()
    with pytest.raises(fl.errors.TraceError, match="draws from a generator of its own"):
        fl.trace(lambda x: x + torch.rand(4, generator=generator), reads="refuse")(BATCHES[0])
    assert torch.equal(generator.get_state(), state)


def test_a_step_that_fails_has_drawn_once():
    """An error of its own is raised after its draws, as in eager PyTorch."""
    generators = seeded(), seeded()

    def step(x, generator):
        if torch.rand((), generator=generator) < 2:
            raise LookupError("mine")
        return x

    for run, generator in zip((fl.trace(step), step), generators, strict=True):
        for _ in range(3):
            with pytest.raises(LookupError, match="mine"):
                run(BATCHES[0], generator)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
