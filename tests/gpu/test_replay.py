"""Steps on the "GPU" backend, replayed with PyTorch's kernels: on the CPU, where all but the CUDA graph is the same."""

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.gpu import replay
from firstloss.runtime.backend import Backend
from firstloss.runtime.step.trace import TracedStep
from tests import forked


@pytest.fixture(params=["on the CPU", pytest.param("on a GPU", marks=pytest.mark.gpu)])
def replaying(request, monkeypatch, tmp_path):
    """A backend that behaves like "GPU", on the CPU; and the real one."""
    if request.param == "on a GPU":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU on this machine")
        with torch.device("cpu"):
            yield fl.backend("GPU", artifact_dir=tmp_path)
        fl.backend("CPU", artifact_dir=tmp_path)
        return
    monkeypatch.setattr(Backend, "replays", property(lambda self: True))
    yield fl.backend("CPU", artifact_dir=tmp_path)


def replays(traced):
    """Whether the last call was replayed: as a graph, where there are graphs."""
    return traced.how() == ("graph" if torch.cuda.is_available() and fl.current_backend().is_gpu else "replay")


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48, bias=False)  # the gradient of the keys' bias is noise around 0
        self.out = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        q, k, v = (part.unsqueeze(1) for part in self.attention(x).chunk(3, -1))  # one head
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)))
        self.seen += 1
        return self.head(F.gelu(x))


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def net(dropout=0.0):
    return Net(dropout).to(fl.current_backend().torch_device)


OPTIMIZERS = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-1),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


ON_THE_CPU = ("AdamW", "Adam, amsgrad", "RMSprop", "Adagrad")


def trained(model, make, steps, replayed, step_of=None, batches=None):
    optimizer = make(model.parameters())
    compiled = fl.compile(model) if replayed else model

    def step(tokens):
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = step_of(model, compiled, optimizer) if step_of else step
    traced = fl.trace(step) if replayed else step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for n in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (n + 1)
        size = batches[n] if batches else 4
        tokens = torch.randint(50, (size, 7), generator=generator).to(model.head.weight.device)
        losses.append(traced(tokens).item())
    return losses, optimizer, traced


# Capturable and foreach optimizers, and gradients by atomic additions, round differently than eager's. Measured on a
# CPU, where only the optimizers differ: 7e-8 of a loss.
CLOSE = 1e-5


def assert_alike(expected, replayed, tolerance):
    for (name, a), (_, b) in zip(expected.state_dict().items(), replayed.state_dict().items(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_weights_match_eager(replaying, name):
    """The forward and backward passes and fused optimizers use eager's kernels; other optimizers are traced as
    capturable and foreach, which round differently: 1e-5 after six steps."""
    if replaying.is_gpu and name in ON_THE_CPU:
        pytest.skip("it counts its steps on the CPU, and is run eagerly")
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    losses, _, _ = trained(expected, OPTIMIZERS[name], 6, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.errors.EagerStepWarning)
        actual, _, traced = trained(replayed, OPTIMIZERS[name], 6, True)
    assert replays(traced)
    assert actual[:2] == losses[:2]  # only one eager step in between
    assert actual == pytest.approx(losses, rel=CLOSE)
    assert_alike(expected, replayed, 1e-5)
    if name == "AdamW, fused" and not replaying.is_gpu:
        assert actual == losses  # the same kernel
    assert replayed.seen == 6 and all(type(p) is nn.Parameter for p in replayed.parameters())


def rng_state():
    return torch.cuda.get_rng_state() if fl.current_backend().is_gpu else torch.get_rng_state()


def test_dropout_matches_eager(replaying):
    torch.manual_seed(0)
    expected = net(0.3)
    replayed = copy.deepcopy(expected)
    torch.manual_seed(7)
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 5, False)
    state = rng_state()
    torch.manual_seed(7)
    actual, _, traced = trained(replayed, OPTIMIZERS["SGD"], 5, True)
    assert replays(traced)
    assert actual == pytest.approx(losses, rel=CLOSE) and torch.equal(rng_state(), state)


def test_another_shape_gets_another_plan(replaying):
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    batches = [4, 4, 3, 4, 3, 3, 4]
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 7, False, batches=batches)
    actual, _, traced = trained(replayed, OPTIMIZERS["SGD"], 7, True, batches=batches)
    assert replays(traced) and actual == pytest.approx(losses, rel=CLOSE)


def left_gradients(model, compiled, optimizer):
    def step(tokens):
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def accumulated(model, compiled, optimizer):
    def step(tokens):
        for part in tokens.chunk(2):
            loss = F.cross_entropy(compiled(part).flatten(0, 1), part.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


@pytest.mark.parametrize("step_of", [left_gradients, accumulated])
def test_gradients_match_eager(replaying, step_of):
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 6, False, step_of)
    actual, _, traced = trained(replayed, OPTIMIZERS["SGD"], 6, True, step_of)
    assert replays(traced)
    assert actual == pytest.approx(losses, rel=CLOSE)
    for a, b in zip(expected.parameters(), replayed.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)  # after six steps


def test_weights_assigned_between_steps_are_used(replaying):
    torch.manual_seed(0)
    expected = net()
    actual = copy.deepcopy(expected)
    results = []
    for model, replayed in ((expected, False), (actual, True)):
        compiled = fl.compile(model) if replayed else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens, model=model, compiled=compiled, optimizer=optimizer):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        traced = fl.trace(step) if replayed else step
        tokens = torch.arange(14, device=model.head.weight.device).view(2, 7)
        losses = [traced(tokens) for _ in range(3)]
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        losses.append(traced(tokens))
        model.out.weight.data = torch.full((16, 16), 0.01, device=model.out.weight.device)
        losses.append(traced(tokens))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        losses += [traced(tokens), traced(tokens)]
        results.append([loss.item() for loss in losses])
    assert results[1] == pytest.approx(results[0], rel=CLOSE)


def reads_a_number(model, compiled, optimizer):
    def step(tokens):
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        if loss.item() > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def counts(model, compiled, optimizer):
    count = [0]

    def step(tokens):
        count[0] += 1
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()) * count[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def own_error(model, compiled, optimizer):
    calls = []

    def step(tokens):
        calls.append(1)
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if tokens.shape[0] == 5:
            raise KeyError("mine")
        return loss.detach()

    return step


@pytest.mark.parametrize("step_of", [reads_a_number, counts])
def test_steps_that_cannot_be_replayed_run_eagerly_with_a_warning(replaying, step_of):
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 6, False, step_of)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        actual, _, traced = trained(replayed, OPTIMIZERS["SGD"], 6, True, step_of)
    assert actual == pytest.approx(losses, rel=CLOSE)


def test_a_users_error_matches_eager(replaying):
    torch.manual_seed(0)
    model = net()
    with pytest.raises(KeyError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model, OPTIMIZERS["SGD"], 3, True, own_error, batches=[4, 5, 5])


def test_it_needs_no_jax(tmp_path):
    code = """
import sys
class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise ImportError(name)
sys.meta_path.insert(0, NoJax())
import torch, firstloss as fl
from firstloss.runtime.backend import Backend
Backend.replays = property(lambda self: True)
fl.backend("CPU")
model = fl.compile(torch.nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
@fl.trace
def step(x):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
losses = [float(step(torch.ones(2, 3))) for _ in range(4)]
assert losses == sorted(losses, reverse=True), losses
print(step.how())
"""
    done = forked.run(["-c", code], capture_output=True, cwd=tmp_path, env=ENVIRONMENT, jax=False)
    assert done.stdout.strip() == "replay", done.stdout + done.stderr


def test_a_step_called_in_a_step_is_part_of_it(replaying):
    inner = fl.trace(lambda x: x * 2)
    outer = fl.trace(lambda x: inner(x) + 1)
    assert [outer(torch.tensor(3.0)).item() for _ in range(3)] == [7.0] * 3
    assert isinstance(inner, TracedStep)


def test_the_trial_run_is_compared_with_the_eager_step(replaying, monkeypatch):
    """A kernel whose result differs from eager PyTorch's is detected before a step relies on it."""
    kernels = replay._InPlaceReplay
    run_one = kernels._run_one

    def wrong(self, node):
        run_one(self, node)
        if node.op is torch.ops.aten.gelu.default:
            self.buffers[node.outputs[0]].mul_(1.5)

    monkeypatch.setattr(kernels, "_run_one", wrong)
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 5, False)
    with pytest.warns(fl.errors.EagerStepWarning, match="differs from eager PyTorch's"):
        actual, _, traced = trained(replayed, OPTIMIZERS["SGD"], 5, True)
    assert actual == losses and traced.how().startswith("eager: ")


def test_a_failing_kernel_changes_nothing(replaying, monkeypatch):
    kernels = replay._InPlaceReplay
    run_one = kernels._run_one

    def failing(self, node):
        if "_scaled_dot_product" in str(node.op) and "backward" in str(node.op):
            raise RuntimeError("no kernel for it")
        run_one(self, node)

    monkeypatch.setattr(kernels, "_run_one", failing)
    torch.manual_seed(0)
    expected = net(0.2)
    replayed = copy.deepcopy(expected)
    torch.manual_seed(3)
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 5, False)
    torch.manual_seed(3)
    with pytest.warns(fl.errors.EagerStepWarning, match="no kernel for it"):
        actual, _, _ = trained(replayed, OPTIMIZERS["SGD"], 5, True)
    assert actual == losses and replayed.seen == 5
    assert_alike(expected, replayed, 0)


@pytest.mark.parametrize("nbytes", [1, 2000, 1 << 20])
def test_foreach_operations_in_parts_give_the_same_bits(replaying, monkeypatch, nbytes):
    if replaying.is_gpu:
        pytest.skip("its optimizer counts its steps on the CPU, and is run eagerly")
    counts = []
    real = replay.schedule

    def scheduled(nodes, frees, _):
        turns = real(nodes, frees, nbytes)
        counts.append((len(nodes), len(turns)))
        return turns

    torch.manual_seed(0)
    whole = net()
    parted = copy.deepcopy(whole)
    losses, _, _ = trained(whole, OPTIMIZERS["AdamW"], 5, True)
    monkeypatch.setattr(replay, "schedule", scheduled)
    actual, _, traced = trained(parted, OPTIMIZERS["AdamW"], 5, True)
    assert replays(traced) and actual == losses
    assert_alike(whole, parted, 0)
    assert all(turns > nodes for nodes, turns in counts) == (nbytes < 1 << 20)


class Recorder:
    """Replaces CUDA graphs on the CPU by one that cannot record."""

    def __init__(self, monkeypatch, fails):
        self.recorded = 0

        def graph(*_, **__):
            self.recorded += 1
            raise RuntimeError(fails)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_a_step_that_cannot_be_recorded_is_replayed(replaying, monkeypatch):
    """As on a GPU where recording fails: nothing runs twice, and recording is not retried."""
    if replaying.is_gpu:
        pytest.skip("this stands for a GPU")
    recorder = Recorder(monkeypatch, fails="operation not permitted when stream is capturing")
    monkeypatch.setattr(replay.ReplayedStep, "_is_gpu", property(lambda self: True))
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    losses, _, _ = trained(expected, OPTIMIZERS["SGD"], 6, False)
    actual, _, traced = trained(replayed, OPTIMIZERS["SGD"], 6, True)
    assert actual == pytest.approx(losses, rel=CLOSE)
    assert recorder.recorded == 1
    assert "not permitted when stream is capturing" in traced.how()


def takes_items(model, compiled, optimizer):
    gains = iter(range(1, 20))

    def step(tokens):
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()) * next(gains)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def takes_items_later(model, compiled, optimizer):
    """The first call shows nothing of it."""
    gains, calls = iter(range(1, 20)), [0]

    def step(tokens):
        calls[0] += 1
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        if calls[0] > 1:
            loss = loss * next(gains)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sets_its_rate(model, compiled, optimizer):
    def step(tokens):
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = max(group["lr"] * 0.9, 0.02)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def drops_its_state(model, compiled, optimizer):
    calls = [0]

    def step(tokens):
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def every(tokens, step=step):
        calls[0] += 1
        if calls[0] == 5:
            optimizer.state.clear()
        return step(tokens)

    return every


@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("name", ["SGD", "momentum"])
@pytest.mark.parametrize("step_of", [takes_items, takes_items_later, sets_its_rate, drops_its_state])
def test_a_steps_python_runs_once_at_each_call(replaying, step_of, name):
    torch.manual_seed(0)
    expected = net()
    replayed = copy.deepcopy(expected)
    losses, _, _ = trained(expected, OPTIMIZERS[name], 7, False, step_of)
    actual, _, _ = trained(replayed, OPTIMIZERS[name], 7, True, step_of)
    assert actual == pytest.approx(losses, rel=CLOSE)
    assert_alike(expected, replayed, CLOSE)
