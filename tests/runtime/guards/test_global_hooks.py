"""Global hooks of modules and optimizers, registered and removed in a step and between steps, match eager PyTorch."""

import itertools
import warnings

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import firstloss as fl

pytestmark = pytest.mark.usefixtures("by_kernels")

KINDS = {
    "forward pre": (modules.register_module_forward_pre_hook, lambda mod, args: tuple(a * 1.5 for a in args)),
    "forward": (modules.register_module_forward_hook, lambda mod, args, out: out * 0.5),
    "forward, always": (
        lambda hook: modules.register_module_forward_hook(hook, always_call=True),
        lambda mod, args, out: out * 0.75,
    ),
    "backward": (
        modules.register_module_backward_hook,
        lambda mod, i, o: tuple(g if g is None else g * 1.2 for g in i),
    ),
    "full backward": (
        modules.register_module_full_backward_hook,
        lambda mod, i, o: tuple(g if g is None else g * 1.3 for g in i),
    ),
    "full backward pre": (
        modules.register_module_full_backward_pre_hook,
        lambda mod, o: tuple(g if g is None else g * 1.3 for g in o),
    ),
    "step pre": (optimizers.register_optimizer_step_pre_hook, lambda opt, args, kwargs: halve(opt)),
    "step post": (optimizers.register_optimizer_step_post_hook, lambda opt, args, kwargs: shrink(opt)),
}


def halve(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def shrink(optimizer):
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)


def tables():
    return [
        (vars(where), name, table)
        for where in (modules, optimizers)
        for name, table in vars(where).items()
        if name.startswith("_global_") and isinstance(table, dict)
    ]


@pytest.fixture(autouse=True)
def _none_left():
    before = [(where, name, table, dict(table)) for where, name, table in tables()]
    yield
    for where, name, table, items in before:
        table.clear()
        table.update(items)
        where[name] = table
    modules._global_is_full_backward_hook = None


def replace_all():
    """As PyTorch's own tests do: replace the dicts that hold the hooks."""
    for where, name, table in tables():
        where[name] = type(table)()
    modules._global_is_full_backward_hook = None


def remove(handles):
    handles.pop().remove()


# What is done within each step, and between which steps.
IN_STEP = {
    "added each time": lambda add, handles, i: add(kept=False),
    "added and removed": lambda add, handles, i: (add(), remove(handles)),
    "added by one step, removed by the next": lambda add, handles, i: remove(handles) if handles else add(),
}
BETWEEN = {
    "added": lambda add, handles, i: add() if i == 2 else None,
    "added twice": lambda add, handles, i: add() if i in (1, 3) else None,
    "added, then removed": lambda add, handles, i: add() if i == 1 else remove(handles) if i == 3 else None,
    "added, then all dicts replaced": lambda add, handles, i: add() if i == 1 else replace_all() if i == 3 else None,
}


def train(kind, in_step, between, backend):
    """Losses, weights and the number of hooks, after each of five steps."""
    register, hook = KINDS[kind]
    handles = []

    def add(kept=True):
        handle = register(hook)
        if kept:
            handles.append(handle)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3, dtype=torch.float64)

    @fl.trace
    def step(x):
        if in_step is not None:
            in_step(add, handles, 0)
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    results = []
    for i in range(5):
        if between is not None:
            between(add, handles, i)
        results.append(step(x).item())
        results += [p.detach().sum().item() for p in model.parameters()]
        results.append(sum(len(table) for _, _, table in tables()))
    replace_all()
    return results


BETWEEN_KINDS = ("forward", "full backward", "step pre")


@pytest.mark.parametrize("kind, when", [*itertools.product(KINDS, IN_STEP), *itertools.product(BETWEEN_KINDS, BETWEEN)])
def test_hooks_run_in_the_same_steps_as_in_eager(kind, when, tmp_path):
    case = kind, IN_STEP.get(when), BETWEEN.get(when)
    eager = train(*case, fl.backend("CPU"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.errors.GraphChangeWarning)
        traced = train(*case, fl.backend("XLA", artifact_dir=tmp_path))
    # Sums of a few numbers in another order, in float64, over five steps; hooks that are added at each step multiply
    # their argument, and its rounding error, repeatedly.
    assert traced == pytest.approx(eager, rel=1e-11)


@pytest.mark.parametrize("kind", ["forward", "step post"])
def test_hooks_run_without_checks_too(kind, tmp_path, monkeypatch):
    """Only the guard detects this, not the verification at the second call."""
    plain = fl.trace
    monkeypatch.setattr(fl, "trace", lambda step: plain(step, check=False))
    test_hooks_run_in_the_same_steps_as_in_eager(kind, "added each time", tmp_path)


class Fails(torch.nn.Module):
    def forward(self, x):
        raise ValueError("in forward")


@pytest.mark.parametrize("of_all", [True, False], ids=["of all modules", "of one"])
@pytest.mark.parametrize("caught", [True, False], ids=["caught in the step", "raised by it"])
@pytest.mark.parametrize("hook_fails", [True, False], ids=["hook fails", "hook"])
def test_always_call_hooks_run_after_an_error(of_all, caught, hook_fails, tmp_path):
    """`always_call=True`: also if `forward` raises."""

    def train(backend):
        seen = []

        def hook(mod, args, out):
            seen.append((type(mod).__name__, out is None))
            if hook_fails:
                raise RuntimeError("in the hook")

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), Fails())
        compiled = fl.compile(model, backend)
        if of_all:
            modules.register_module_forward_hook(hook, always_call=True)
        else:
            model[1].register_forward_hook(hook, always_call=True)

        @fl.trace
        def step(x):
            if not caught:
                return compiled(x)
            try:
                return compiled(x)
            except (ValueError, RuntimeError):
                return x * 2

        losses = []
        for _ in range(3):
            try:
                losses.append(step(torch.ones(2, 3)).tolist())
            except (ValueError, RuntimeError) as error:
                losses.append(str(error))
        replace_all()
        return losses, seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about the hook's error, and ours, about another graph
        eager = train(fl.backend("CPU"))
        assert train(fl.backend("XLA", artifact_dir=tmp_path)) == eager
    assert eager[1]
