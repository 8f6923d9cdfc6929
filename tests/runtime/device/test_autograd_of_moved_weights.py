"""Weights used before they are moved to the backend: hooks, graphs and views continue as in eager PyTorch."""

import warnings

import pytest
import torch
from torch import nn

import firstloss as fl
from tests.small_training import on_both, training_step

SITUATIONS = {}


def situation(make):
    SITUATIONS[make.__name__] = make
    return make


# Each uses a model, moves it, continues, and returns the values to compare.


@situation
def loss_computed_before(m, move, x, log):
    loss = m(x).square().mean()
    move()
    loss.backward()


@situation
def loss_of_before_and_after(m, move, x, log):
    loss = m(x).square().mean()
    move()
    (loss + m(x).exp().mean()).backward()


@situation
def graph_kept_for_a_second_pass(m, move, x, log):
    loss = m(x).square().mean()
    loss.backward(retain_graph=True)
    move()
    loss.backward()
    m(x).sum().backward()


@situation
def hook(m, move, x, log):
    m.lin.weight.register_hook(lambda g: g * 2)
    move()
    m(x).mean().backward()


@situation
def hook_removed_after(m, move, x, log):
    handle = m.lin.weight.register_hook(lambda g: g * 2)
    move()
    m(x).mean().backward()
    handle.remove()
    m(x).mean().backward()


@situation
def hook_after_accumulation(m, move, x, log):
    m.lin.weight.register_post_accumulate_grad_hook(lambda p: log.append(p is m.lin.weight))
    move()
    m(x).mean().backward()


@situation
def hooks_and_a_loss_computed_before(m, move, x, log):
    m.lin.weight.register_hook(lambda g: log.append("grad") or g * 2)
    m.lin.weight.register_post_accumulate_grad_hook(lambda p: log.append(p is m.lin.weight))
    loss = m(x).mean()
    move()
    loss.backward()


@situation
def optimizer_in_the_backward_pass(m, move, x, log):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step(p):
        optimizer.step()
        optimizer.zero_grad()

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(step)
    move()
    m(x).mean().backward()


@situation
def view_kept_as_an_attribute(m, move, x, log):
    m.tied = m.lin.weight.t()
    move()
    (m(x) @ m.tied.t()).square().mean().backward()
    log.append(m.tied.is_leaf)


@situation
def view_kept_as_a_buffer_and_trained(m, move, x, log):
    m.register_buffer("tied", m.lin.weight[:2])
    move()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (m(x) + m.tied.sum()).square().mean().backward()
        optimizer.step()
    log.append(m.tied.detach().tolist())


@situation
def view_of_a_view(m, move, x, log):
    m.tied = m.lin.weight.t()[1:]
    move()
    m.tied.square().sum().backward()


@situation
def result_kept_as_an_attribute(m, move, x, log):
    m.scale = m.lin.weight.exp().sum()
    move()
    (m(x) * m.scale).mean().backward()
    log.append(m.scale.is_leaf)


@situation
def hook_of_a_result_kept(m, move, x, log):
    m.scale = m.lin.weight.exp().sum()
    m.scale.register_hook(lambda g: g * 3)
    move()
    (m(x) * m.scale).mean().backward()


@situation
def gradient_of_a_result(m, move, x, log):
    """Like a weight that an optimizer with `differentiable=True` steps."""
    m.fast = m.lin.weight.clone()
    m.fast.grad = torch.ones_like(m.fast)
    move()
    torch.optim.SGD([m.fast], lr=0.5, differentiable=True).step()
    m.fast.square().sum().backward()
    log.append(m.fast.tolist())


@situation
def gradient_there_before(m, move, x, log):
    m(x).mean().backward()
    move()
    m(x).mean().backward()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)

    def forward(self, x):
        return self.lin(x)


def run(what, backend, how):
    torch.manual_seed(0)
    m = Model().double()
    x, log = torch.randn(5, 3, dtype=torch.float64), []
    what(m, lambda: how(m, backend), x, log)
    gradients = [None if p.grad is None else p.grad.detach().tolist() for p in m.parameters()]
    return gradients, [p.detach().tolist() for p in m.parameters()], log


@pytest.mark.parametrize("what", SITUATIONS.values(), ids=SITUATIONS)
def test_autograd_continues_with_a_moved_weight(what, tmp_path):
    eager = run(what, None, lambda m, backend: None)
    moved = run(what, fl.backend("XLA", artifact_dir=tmp_path), fl.compile)
    assert moved == eager  # the host computes both, in the same order


KEPT = {
    "view": lambda m: setattr(m, "tied", m.lin.weight.t()),
    "view as buffer": lambda m: m.register_buffer("tied", m.lin.weight.t()),
    "view in a list": lambda m: setattr(m, "all", [m.lin.weight.t()]),
}


def losses(backend, prepare, loss):
    """Losses of four steps of a model prepared before it is moved to the backend."""
    torch.manual_seed(0)
    m = Model().double()
    prepare(m)
    compiled = fl.compile(m, backend)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    step = training_step(compiled, optimizer, lambda module, x: loss(m, module(x)))
    x = torch.randn(5, 3, dtype=torch.float64)
    return [step(x).item() for _ in range(4)]


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_a_view_of_a_weight_is_trained_with_it(kept, tmp_path):
    def loss(m, out):
        tied = m.all[0] if hasattr(m, "all") else m.tied
        return (out @ tied.t()).square().mean()

    eager, traced = on_both(lambda backend: losses(backend, kept, loss), tmp_path)
    # Sums of a few numbers in another order, in float64, over four steps.
    assert traced == pytest.approx(eager, rel=1e-12)


HOOKS = {
    "hook": lambda m: m.lin.weight.register_hook(lambda g: g * 2),
    "hook after accumulation": lambda m: m.lin.weight.register_post_accumulate_grad_hook(
        lambda p: [p.grad.mul_(2)] and None
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_from_before_the_move_runs_in_a_step(kind, tmp_path):
    run = lambda backend: losses(backend, HOOKS[kind], lambda m, out: out.square().mean())  # noqa: E731
    eager, traced = on_both(run, tmp_path)
    # As above.
    assert traced == pytest.approx(eager, rel=1e-12)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_sparse_weight_is_refused_by_name(layout, kind, tmp_path):
    m = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warning about a layout in beta
        sparse = torch.eye(3).to_sparse(layout=getattr(torch, layout))
    if kind == "parameter":
        m.table = nn.Parameter(sparse)
    else:
        m.register_buffer("table", sparse)
    with pytest.raises(fl.errors.BackendError, match=f"the {kind} table has the layout {layout}.*to_dense"):
        fl.compile(m, fl.backend("XLA", artifact_dir=tmp_path))
    assert type(m.lin.weight) is nn.Parameter  # nothing has moved
