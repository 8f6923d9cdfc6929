"""Draws of Python's and NumPy's generators in a step: those of eager, at each call, compiled once."""

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, GraphChangeWarning
from tests import compiled_steps
from tests.compiled_steps import check_runs_eagerly

X = torch.arange(12.0).reshape(6, 2)

pytestmark = pytest.mark.usefixtures("backend")


def _mixup(x):
    lam = np.random.beta(0.4, 0.4)
    order = torch.from_numpy(np.random.permutation(len(x)))
    return lam * x + (1 - lam) * x[order]


def _mixup_of_samples(x):
    lam = torch.as_tensor(np.random.beta(0.4, 0.4, size=len(x)), dtype=torch.float32).unsqueeze(1)
    return lam * x + (1 - lam) * x.flip(0)


def _noise(x):
    return x + torch.tensor(np.random.randn(6, 2).astype(np.float32) * 0.1)


def _mask(x):
    return x * torch.from_numpy((np.random.rand(6, 1) - 0.5).astype(np.float32))


def _scaled(x):
    return x * torch.tensor(random.uniform(0.5, 1.5)) + x.new_tensor(random.gauss(0, 1))


def _numpy_number(x):
    return x * np.random.normal(0, 1)


def _two_generators(x):
    return x * random.random() + np.random.uniform(-1, 1) * random.random()


def _arithmetic(x):
    width = max(0.1, min(0.9, random.random() * 2 - 0.5))
    return x * width


def _integers(x):
    return x * random.randint(1, 1000) + np.random.randint(0, 1000)


# Compiled once, or twice with the first call.
REPEATED = [
    _mixup, _mixup_of_samples, _noise, _mask, _scaled, _two_generators, _numpy_number, _integers,
]  # fmt: skip


def _branch(x):
    return x.flip(0) if random.random() < 0.5 else x


def _index(x):
    return x[random.randrange(6)]


def _chosen(x):
    return x * random.choice((1.0, 2.0, 3.0))


def _crop(x):
    start = np.random.randint(0, 3)
    return x[start : start + 3].sum()


def _shuffled(x):
    order = [0, 1, 2, 3, 4, 5]
    random.shuffle(order)
    return x[order]


def _sampled(x):
    return x[random.sample(range(6), 2)]


def _reads_array(x):
    order = np.random.permutation(6)
    return x[int(order[0])] * float(order.max())


def _array_as_index(x):
    return x[np.random.permutation(6)]


def _array_in_place(x):
    noise = np.random.rand(6, 2).astype(np.float32)
    noise[0] = 0
    return x + torch.from_numpy(noise)


def _list_of_draws(x):
    return x * torch.tensor([random.random(), random.random()])


def _drawn_in_a_branch(x):
    return x * random.random() if random.random() < 0.5 else x


def _of_a_list(x):
    return x * np.random.choice([0.5, 1.0, 2.0])


def _of_an_own_generator(x):
    return x * random.Random(7).random() + np.random.default_rng(3).random()


def _state_read(x):
    before = random.getstate()
    value = random.random()
    random.setstate(before)
    return x * value


def _typed(x):
    return x * 2 if type(random.random()) is float else x


OTHERS = [
    _arithmetic, _branch, _index, _chosen, _crop, _shuffled, _sampled, _reads_array, _array_as_index, _array_in_place,
    _list_of_draws, _drawn_in_a_branch, _of_a_list, _of_an_own_generator, _state_read, _typed,
]  # fmt: skip


def _run(step, calls):
    random.seed(5)
    np.random.seed(5)
    results = [step(X).tolist() for _ in range(calls)]
    return results, random.random(), np.random.rand()


@pytest.mark.parametrize("draw", [*REPEATED, *OTHERS], ids=lambda f: f.__name__)
def test_draws_are_those_of_eager(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphChangeWarning)
        (traced, *after), (eager, *expected_after) = _run(fl.trace(draw), 9), _run(draw, 9)
    for one, other in zip(traced, eager, strict=True):
        # Compiled products and sums may be fused: one rounding less.
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-6)
    assert after == expected_after


@pytest.mark.parametrize("draw", REPEATED, ids=lambda f: f.__name__)
def test_repeated_draws_cost_no_trace(draw, traced):
    step = fl.trace(draw, check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphChangeWarning)
        warnings.simplefilter("error", EagerStepWarning)
        for _ in range(3):
            step(X)
        count = len(traced)
        for _ in range(5):
            step(X)
    assert len(traced) == count
    assert compiled_steps.compilations(step) <= 2


def test_a_branch_is_compiled_once_for_each_outcome():
    step = fl.trace(_branch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphChangeWarning)
        _run(step, 20)
    assert compiled_steps.compilations(step) <= 3


def test_training_with_mixup_is_as_eager(backend):
    def train(model, compiled, traced):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            loss = (compiled(_mixup(x)) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = fl.trace(step) if traced else step
        np.random.seed(3)
        return torch.stack([step(X / 10, torch.ones(6, 1)).detach().clone() for _ in range(6)])

    torch.manual_seed(0)
    eager = nn.Linear(2, 1)
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(2, 1)
    expected = train(eager, eager, False)
    # Sums of a few products are added in another order by the compiled step.
    torch.testing.assert_close(train(model, fl.compile(model, backend), True), expected, rtol=1e-5, atol=1e-6)


def test_other_threads_draw_what_they_would(backend):
    """While a step is traced in one thread, functions of `random` in another one are the originals."""
    other = random.Random(11)
    expected = [other.random() for _ in range(1000)]
    drawn: list[float] = []
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            drawn.append(type(random.random()) is float)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        step = fl.trace(lambda x: x * np.random.rand())
        for _ in range(4):
            step(X)
    finally:
        stop.set()
        thread.join()
    assert drawn and all(drawn) and len(expected) == 1000


def test_a_step_may_construct_deferred_modules_between_its_draws(backend):
    """With generators saved and restored around it, as code does that must not draw."""

    @fl.trace
    def step(x):
        with torch.random.fork_rng(devices=[]):
            norm = fl.materialize_module(fl.deferred_init(torch.nn.BatchNorm1d, 3))
        return x * norm.weight.sum() + torch.rand(3)

    torch.manual_seed(0)
    first, second = (step(torch.ones(3)).clone() for _ in range(2))
    assert not torch.equal(first, second) and ((first >= 3) & (first < 4)).all()


def test_weights_drawn_in_a_step_can_be_initialized_in_it():
    def run(backend, trace):
        @trace
        def step(x):
            return fl.materialize_module(fl.deferred_init(torch.nn.Linear, 3, 3))(x)

        torch.manual_seed(1)
        return [step(torch.ones(3)).detach() for _ in range(2)]

    check_runs_eagerly(run, r"test_python_draws.py:\d+: .* materialize modules before the step")
