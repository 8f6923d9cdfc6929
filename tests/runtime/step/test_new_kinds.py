"""Steps whose batches are of other kinds at each call: what comes again is compiled, PyTorch's kernels run the rest."""

import random
import warnings

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, GraphChangeWarning
from firstloss.runtime.step import untraced_calls
from tests import small_training
from tests.compiled_steps import compilations, kinds

STEPS = 40


def rows(i, n):
    return torch.randn(n, 4)


def ragged(i, n):
    return [torch.randn(3, 4) for _ in range(n)]


def boxes(i, n):
    """Python numbers, which the step uses as sizes."""
    return torch.randn(8, 4), [(0.37 * i) % 1 for _ in range(n % 3 + 1)]


def flagged(i, n):
    return torch.randn(5, 4), f"image {i}.png", n % 5


def loss_of_rows(model, x):
    return model(x).square().mean()


def loss_of_ragged(model, xs):
    return sum(model(x).square().mean() for x in xs) / len(xs)


def loss_of_boxes(model, x):
    x, numbers = x
    return sum(model(x[: 1 + int(7 * number)]).square().mean() * number for number in numbers)


def loss_of_flagged(model, x):
    x, name, flag = x
    return model(x[:flag] if flag else -x).square().mean() + len(name)


CASES = {
    "shape": (rows, loss_of_rows),
    "list": (ragged, loss_of_ragged),
    "numbers": (boxes, loss_of_boxes),
    "flag": (flagged, loss_of_flagged),
}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def dropout():
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def train(backend, batches, loss, optimizer=momentum, model=small_training.layers, reads=False):
    """The losses, the weights after them, and the step."""
    torch.manual_seed(0)
    module, optimizer, compiled = small_training.build(backend, model, optimizer)
    kept = []

    @fl.trace
    def step(batch):
        optimizer.zero_grad()
        value = loss(compiled, batch)
        value.backward()
        optimizer.step()
        if reads:
            kept.append(value.item())
        return value

    losses = [step(batch).item() for batch in batches]
    return losses + kept, module.state_dict(), step


def batches_of(make, sizes):
    torch.manual_seed(1)
    return [make(i, n) for i, n in enumerate(sizes)]


def assert_close(actual, expected):
    # float32, summed in another order by XLA, over some 40 updates
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads"])
@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("case", CASES)
def test_batches_of_another_kind_each_time_are_computed_as_in_eager(case, optimizer, reads):
    make, loss = CASES[case]
    sizes = random.Random(2).choices(range(1, 12), k=STEPS)
    expected = train(fl.backend("CPU"), batches_of(make, sizes), loss, optimizer, reads=reads)
    actual = train(fl.backend("XLA"), batches_of(make, sizes), loss, optimizer, reads=reads)
    assert_close(actual, expected)


def test_a_step_of_a_new_shape_each_time_is_hardly_compiled():
    sizes = random.Random(3).sample(range(1, 200), STEPS)
    expected = train(fl.backend("CPU"), batches_of(rows, sizes), loss_of_rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = train(fl.backend("XLA"), batches_of(rows, sizes), loss_of_rows)
    assert_close(actual, expected)
    assert compilations(actual[2]) == 5
    said = [w.category for w in caught if issubclass(w.category, (EagerStepWarning, GraphChangeWarning))]
    assert said == [*[GraphChangeWarning] * 4, EagerStepWarning]  # of the second to fifth shape, and once of the sixth


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
def test_shapes_that_come_again_are_compiled():
    sizes = random.Random(4).choices([2, 3, 5, 8, 13, 21], k=STEPS)
    *_, step = train(fl.backend("XLA"), batches_of(rows, sizes), loss_of_rows)
    assert kinds(step) == compilations(step) == 6


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
def test_new_shapes_among_many_of_one_shape_are_hardly_compiled():
    """As of sentences that are cut off at a length that most of them have."""
    sizes = [size for i in range(1, STEPS // 2) for size in (50, i)]
    expected = train(fl.backend("CPU"), batches_of(rows, sizes), loss_of_rows)
    actual = train(fl.backend("XLA"), batches_of(rows, sizes), loss_of_rows)
    assert_close(actual, expected)
    assert compilations(actual[2]) == 6


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
def test_shapes_that_rarely_come_again_are_compiled_ever_later():
    sizes = [*range(1, 15), *range(1, 15), *range(1, 15), *range(1, 15)]
    *_, step = train(fl.backend("XLA"), batches_of(rows, sizes), loss_of_rows)
    assert kinds(step) == compilations(step) == 14
    assert not step._cache._new_kinds._unused


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_a_batch_that_is_smaller_at_the_end_of_an_epoch_is_compiled_at_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerStepWarning)
        *_, step = train(fl.backend("XLA"), batches_of(rows, [6, 6, 6, 2]), loss_of_rows)
    assert compilations(step) == 2


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
def test_what_kernels_run_once_is_what_the_compiled_step_computes(monkeypatch):
    """Also the numbers that it draws, and then the step is compiled if it is needed again."""
    sizes = [2, 5, 2, 2, 5, 5]

    def run():
        return train(fl.backend("XLA"), batches_of(rows, sizes), loss_of_rows, adam, model=dropout)

    compiled = run()
    monkeypatch.setattr(untraced_calls.TraceCounts, "are_in_vain", lambda self: True)
    by_kernels = run()
    assert_close(by_kernels, compiled)
    assert compilations(by_kernels[2]) == compilations(compiled[2]) == 2
    assert all(step.executable.ran for step in by_kernels[2]._cache.steps())

    never_again = train(fl.backend("XLA"), batches_of(rows, [2, 5]), loss_of_rows, adam, model=dropout)
    assert compilations(never_again[2]) == 0


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
def test_kinds_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(untraced_calls, "_MAX_MET", 8)
    *_, step = train(fl.backend("XLA"), batches_of(rows, range(1, 41)), loss_of_rows)
    assert kinds(step) == 5 and len(step._cache._new_kinds._met) == 8
