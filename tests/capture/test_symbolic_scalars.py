"""A traced tensor used as a number gives the correct result or an error at that line."""

import math
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import firstloss as fl
from tests import compiled_steps
from tests.compiled_steps import check_runs_eagerly

X, M = torch.tensor([1.0, 2.0, 3.0]), torch.arange(4.0).reshape(2, 2)


def lists(function):
    """An operation on lists that may write to the first list."""

    def call(t):
        x = [X.clone(), X * 2]
        return list(function(x, t) or x)

    return call


PLACES = {
    "add": lambda t: torch.add(X, X, alpha=t),
    "add, in place": lambda t: X.clone().add_(X, alpha=-t),
    "add, whole numbers": lambda t: torch.add(X.int(), X.int(), alpha=(t * 10).int()),
    "sub": lambda t: torch.sub(X, X * 2, alpha=t),
    "rsub": lambda t: torch.rsub(X, X * 2, alpha=t),
    "addcdiv": lambda t: X.addcdiv(X, X + 1, value=t),
    "addcmul": lambda t: X.clone().addcmul_(X, X + 1, value=1 - t),
    "addmm": lambda t: torch.addmm(M, M, M, beta=t, alpha=2 * t),
    "baddbmm": lambda t: torch.baddbmm(M[None], M[None], M[None], beta=t, alpha=t / 3),
    "index_add": lambda t: X.index_add(0, torch.tensor([0, 0]), X[:2], alpha=t),
    "full_like": lambda t: torch.full_like(X, t),
    "full": lambda t: torch.full((2,), t),
    "masked_fill": lambda t: X.masked_fill(X > 1, t),
    "threshold": lambda t: F.threshold(X, t * 2, 20.0),
    "elu": lambda t: F.elu(-X, t),
    "softplus": lambda t: F.softplus(X, t),
    "_foreach_add, alpha": lists(lambda x, t: torch._foreach_add(x, x, alpha=t)),
    "_foreach_mul": lists(lambda x, t: torch._foreach_mul_(x, t)),
    "_foreach_lerp": lists(lambda x, t: torch._foreach_lerp_(x, [X, X], t)),
    "_foreach_pow, base": lists(lambda x, t: torch._foreach_pow(t, x)),
    "_foreach_pow, exponent": lists(lambda x, t: torch._foreach_pow(x, t)),
    "_foreach_maximum": lists(lambda x, t: torch._foreach_maximum(x, t)),
}


def test_results_match_eager_at_every_step(backend):
    """Includes the reference's case, a schedule of the traced step as `value` of `addcdiv`."""
    count = torch.tensor(1000)

    @fl.trace
    def step():
        count.add_(1)
        t = torch.where(count > 1001, count.float() * 0.0001, 0.2)
        return {name: place(t) for name, place in PLACES.items()}

    for n in (1001, 1002, 1003):
        result = step()
        t = torch.where(torch.tensor(n) > 1001, torch.tensor(n).float() * 0.0001, 0.2)
        for name, place in PLACES.items():
            want = place(t)
            pairs = zip(result[name], want, strict=True) if isinstance(want, list) else [(result[name], want)]
            for actual, expected in pairs:
                assert actual.dtype == expected.dtype, name
                # float32 rounding in another order
                torch.testing.assert_close(
                    actual.clone(), expected, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
    assert compiled_steps.kinds(step) == 1


REFUSED = {
    "a size": lambda t: torch.zeros(t.long()),
    "a slice": lambda t: X[: t.long()],
    "an epsilon": lambda t: F.layer_norm(X, (3,), eps=t),
    "item": lambda t: X * t.item(),
    "a gradient's alpha": lambda t: torch.autograd.grad(
        torch.add(X, y := X.clone().requires_grad_(), alpha=t).square().sum(), y
    ),
    "math": lambda t: math.sqrt(t),
    "a format": lambda t: f"{t.sum():.3f}",
    "a sorted list": lambda t: sorted([t, 0.5])[0] * X,
}
EXTREMA = {
    "min": lambda t: min(t, 0.5) * X,
    "max": lambda t: max(0.5, t) * X,
    "of a list": lambda t: max([t, t * 2, 0.1]) * X,
    "of an iterator": lambda t: min(v * t for v in (2, 3)) * X,
    "of equal numbers": lambda t: max(t, t + 0) * X,
    "of ints": lambda t: max(t.long(), 1) * X,
    "of plain numbers": lambda t: max(1, 2) * X * t,
    "of a NaN": lambda t: max(t * float("nan"), 1.0) * X,
}


@pytest.mark.parametrize("extremum", EXTREMA)
def test_pythons_max_and_min_are_computed_on_the_device(extremum, backend):
    step = fl.trace(lambda t: EXTREMA[extremum](t))
    for number in (0.3, 0.7, 3.0):
        actual, expected = step(torch.tensor(number)).clone(), EXTREMA[extremum](torch.tensor(number))
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-6, atol=0)  # one rounding
    assert compiled_steps.kinds(step) == 1


@pytest.mark.parametrize("place", REFUSED)
def test_needing_the_value_is_an_error_at_the_users_line(place, backend):
    step = fl.trace(lambda t: REFUSED[place](t * 2), reads="refuse")
    with pytest.raises(fl.errors.ValueReadError, match=f"{__file__}:"):
        step(torch.tensor(1.0))


@pytest.mark.parametrize("place", REFUSED)
@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
def test_the_value_is_read_where_it_is_needed(place, backend):
    def step(t):
        return REFUSED[place](t * 2)

    traced = fl.trace(step)
    for value in (1.0, 2.0, 1.5):
        results = traced(torch.tensor(value)), step(torch.tensor(value))
        actual, expected = (pytree.tree_map_only(torch.Tensor, lambda t: t.tolist(), result) for result in results)
        assert actual == expected


def test_a_number_that_decides_the_computation_matches_eager():
    def run(backend, trace):
        step = trace(lambda t: torch.linalg.vector_norm(X, t * 2))
        return [step(torch.tensor(1.0 + i)) for i in range(3)]

    check_runs_eagerly(run, rf"{__file__}:\d+.*vector_norm.*Python number")


READS = {
    "as a number": lambda x, t: torch.add(x, x, alpha=t),
    "item": lambda x, t: x * t.item(),
    "float": lambda x, t: x * float(t),
    "tolist": lambda x, t: x * t.tolist(),
    "numpy": lambda x, t: x * float(t.numpy()),
    "asarray": lambda x, t: x * float(np.asarray(t)),
    "DLPack": lambda x, t: x * float(np.from_dlpack(t)),
    "if": lambda x, t: x * 2 if t > 0.4 else x,
    "equal": lambda x, t: x * 2 if torch.equal(t, torch.tensor(0.5)) else x,
}


@pytest.mark.parametrize("way", READS)
def test_an_outside_tensor_is_read_at_each_call(way, backend):
    """The tensor is edited between two calls: its value is not a constant of the compiled step."""
    number = torch.tensor(0.5)
    step = fl.trace(lambda x: READS[way](x, number))
    for value in (0.5, 0.25, 0.25, 0.5):
        number.fill_(value)
        actual = step(X)
        assert torch.equal(actual.clone(), READS[way](X, number))


def test_a_number_edited_by_the_step_is_read_after_the_edit(backend):
    number = torch.tensor(0.5)

    @fl.trace
    def step(x):
        number.mul_(0.5)
        return torch.add(x, x, alpha=number)

    for n in range(1, 4):
        assert torch.equal(step(X).clone(), X * (1 + 0.5 / 2**n))


def test_reads_by_other_threads_are_not_part_of_the_trace(backend):
    """Weights are materialized while their step is traced, which reads generator states as numbers."""
    others = torch.tensor([0.5])

    @fl.trace
    def step(x):
        thread = threading.Thread(target=lambda: (others.tolist(), others.numpy()))
        thread.start()
        thread.join()
        return x * 2

    first = step(X)
    executable = compiled_steps.latest(step)
    others.fill_(0.25)
    assert not executable.outdated() and torch.equal(first.clone(), X * 2)
