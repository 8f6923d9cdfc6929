"""torch.cond, torch.while_loop and scan in a step, with gradients, against eager PyTorch."""

import re

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import firstloss as fl
from tests.compiled_steps import check_runs_eagerly
from tests.small_training import training_step


@pytest.fixture(autouse=True)
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)


X = torch.linspace(-1, 1, 12).reshape(3, 4)
WEIGHT = torch.linspace(-0.5, 0.7, 16).reshape(4, 4)


def assert_same(result, expected):
    """Within PyTorch's tolerance between two float32 kernels."""
    assert len(result) == len(expected)
    for actual, eager in zip(result, expected, strict=True):
        torch.testing.assert_close(actual.clone(), eager.detach(), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_matches_eager(sign):
    def branches(x, w, cond):
        y = cond(x.sum() * sign > 1, lambda a: (a @ w).sin(), lambda a: a * w[0] * 2, (x + 0.5,))
        return y

    def step(x, w, cond):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = branches(x, w, cond)
        y.square().sum().backward()
        return y.detach(), x.grad, w.grad

    result = fl.trace(lambda x, w: step(x, w, torch.cond))(X, WEIGHT)
    eager = step(X, WEIGHT, lambda p, t, f, operands: t(*operands) if p else f(*operands))
    assert_same(result, eager)


def test_cond_takes_either_branch_at_each_step():
    @fl.trace
    def step(x):
        return torch.cond(x.sum() > 0, lambda a: (a + 1, a.argmax()), lambda a: (a - 1, a.argmin()), (x,))

    assert_same(step(X + 1), (X + 2, (X + 1).argmax()))
    assert_same(step(X - 1), (X - 2, (X - 1).argmin()))


def test_cond_with_modules_trains_both_branches(backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x):
            if torch.compiler.is_compiling():
                return torch.cond(x.mean() > 0, self.left, self.right, (x,))
            return self.left(x) if x.mean() > 0 else self.right(x)

    torch.manual_seed(0)
    eager = Model()
    torch.manual_seed(0)
    with backend.device:
        model = Model()
    actual, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    step = training_step(fl.compile(model, backend), actual)
    for x in (X + 1, X - 1, X + 2):
        loss = eager(x).square().mean()
        loss.backward()
        expected.step()
        expected.zero_grad()
        assert_same([step(x)], [loss])
    assert_same([p.detach().clone() for p in model.parameters()], [p.detach() for p in eager.parameters()])


def differ_in_shape(x):
    return torch.cond(x.sum() > 0, lambda a: a, lambda a: a[0], (x,))


def write_outside(x):
    y = x.clone()
    return torch.cond(x.sum() > 0, lambda a: y.add_(a), lambda a: y - a, (x,))


@pytest.mark.parametrize(
    "step, text", [(differ_in_shape, r"float32\[3, 4\].*float32\[4\]"), (write_outside, "Return the new value")]
)
def test_branches_that_pytorch_rejects_end_in_its_error_with_a_note_of_their_line(step, text):
    with pytest.raises(RuntimeError) as traced:
        fl.trace(step)(X)
    assert any(re.search(f"{__file__}:.*{text}", note) for note in traced.value.__notes__)
    with pytest.raises(RuntimeError) as eager:
        step(X)
    assert type(traced.value) is type(eager.value)
    with pytest.raises(fl.errors.TraceError, match=text):
        fl.trace(step, reads="refuse")(X)


def test_while_loop_matches_eager():
    def halve(x, w, loop):
        def go_on(n, y):
            return (y.abs().max() > 0.1) & (n < 20)

        return loop(go_on, lambda n, y: (n + 1, (y @ w) * 0.5), (torch.tensor(0), x))

    def eager_loop(go_on, body, carried):
        while go_on(*carried):
            carried = body(*carried)
        return carried

    result = fl.trace(lambda x, w: halve(x, w, while_loop))(X, WEIGHT)
    assert_same(result, halve(X, WEIGHT, eager_loop))


def test_a_gradient_through_a_while_loop_matches_eager():
    def run(backend, trace):
        @trace
        def step(x):
            x = x.clone().requires_grad_()
            (y,) = while_loop(lambda y: y.sum() < 100, lambda y: (y * 2,), (x + 2,))
            y.sum().backward()
            return x.grad

        return step(X)

    check_runs_eagerly(run, f"{__file__}:.*Use scan")


def eager_scan(body, init, xs, reverse=False):
    ys = []
    for x in xs.flip(0) if reverse else xs:
        init, y = body(init, x)
        ys.append(y)
    ys = torch.stack(ys)
    return init, ys.flip(0) if reverse else ys


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_matches_eager_with_gradients(reverse):
    def recurrent(scan, x, w, h):
        def body(h, x):
            h = torch.tanh(x @ w + h * 0.5)
            return h, h * 2

        return scan(body, h, x, reverse=reverse)

    def step(scan, x, w, h):
        x, w, h = (t.clone().requires_grad_() for t in (x, w, h))
        last, ys = recurrent(scan, x, w, h)
        (last.sum() + ys.square().sum()).backward()
        return last.detach(), ys.detach(), x.grad, w.grad, h.grad

    xs, h = torch.linspace(-1, 1, 40).reshape(5, 2, 4), torch.ones(2, 4)
    result = fl.trace(lambda x, w, h: step(scan, x, w, h))(xs, WEIGHT, h)
    assert_same(result, step(eager_scan, xs, WEIGHT, h))


def test_scan_carries_structures_and_integers():
    def step(scan, xs):
        xs = xs.clone().requires_grad_()

        def body(carry, x):
            n, total = carry
            return (n + 1, total + x * n), (x * total, n * 2)

        (n, total), (ys, twice) = scan(body, (torch.tensor(0), torch.zeros(4)), xs)
        (total.sum() + ys.sum()).backward()
        return n, total.detach(), ys.detach(), twice, xs.grad

    def eager(body, init, xs):
        outs = []
        for x in xs:
            init, y = body(init, x)
            outs.append(y)
        return init, tuple(torch.stack(y) for y in zip(*outs, strict=True))

    assert_same(fl.trace(lambda x: step(scan, x))(X), step(eager, X))


def test_scan_draws_new_numbers_in_each_iteration():
    @fl.trace
    def step(x):
        x = x.clone().requires_grad_()
        last, ys = scan(lambda c, x: (c + x.sum(), nn.functional.dropout(x)), torch.zeros(()), x)
        ys.sum().backward()
        return ys.detach(), x.grad

    ones = torch.ones(6, 64)
    ys, grad = (t.clone() for t in step(ones))
    again, _ = step(ones)
    assert torch.equal(ys, grad)  # 2 for kept elements, 0 for the others, in both
    assert len({tuple(row.tolist()) for row in ys}) == 6
    assert not torch.equal(ys, again.clone())
    assert 0.3 < ys.count_nonzero() / ys.numel() < 0.7
