"""Weights on the backend are tensors: between steps they support all operations of eager ones."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from tests import compiled_steps

# In float64, so that results differ only by the order of sums, also after training steps.
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).sin()
Y = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(3, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x):
        self.steps += 1
        return self.head(torch.tanh(self.norm(self.hidden(x))))


class Run:
    """A model trained by a traced step or eagerly."""

    def __init__(self, backend=None, optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9), before=False, make=Net):
        torch.manual_seed(0)
        self.backend = backend
        if backend is None:
            self.model = make()
        else:
            with backend.device:
                self.model = make()
        if before:
            self.optimizer = optimizer(self.model.parameters())
        self.compiled = self.model if backend is None else fl.compile(self.model, backend)
        if not before:
            self.optimizer = optimizer(self.model.parameters())
        self.step = self._step if backend is None else fl.trace(self._step)

    def _step(self, x, y):
        loss = F.mse_loss(self.compiled(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, steps=2):
        return [self.step(X, Y).item() for _ in range(steps)]


def close(traced, eager):
    torch.testing.assert_close(traced, eager, rtol=2e-12, atol=1e-14)  # float64, about ten steps: 2e-13


def same(traced, eager):
    a, b = traced.model.state_dict(), eager.model.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        close(a[name].clone(), b[name].detach().clone())
    return True


@pytest.fixture(params=[False, True], ids=["optimizer after compile", "optimizer before compile"])
def runs(request, backend):
    """The same training, on the backend and eagerly, after two steps."""
    traced, eager = Run(backend, before=request.param), Run(before=request.param)
    close(traced.train(), eager.train())
    return traced, eager


# -- reading ----------------------------------------------------------------------------------------------------------

READ = {
    "tolist": lambda m: m.head.weight.tolist(),
    "item": lambda m: m.head.weight[0, 0].item(),
    "float": lambda m: float(m.head.bias[1]),
    "int": lambda m: int(m.steps),
    "bool": lambda m: bool(m.head.weight[0, 0] > 0),
    "numpy": lambda m: m.head.weight.detach().numpy().copy(),
    "np.asarray": lambda m: np.asarray(m.head.weight.detach()).copy(),
    "sum": lambda m: m.head.weight.sum().item(),
    "norm": lambda m: torch.linalg.vector_norm(m.head.weight).item(),
    "iteration": lambda m: [row.tolist() for row in m.head.weight],
    "slice": lambda m: m.head.weight[:, 1::2].tolist(),
    "transposed": lambda m: m.head.weight.T.contiguous().tolist(),
    "mask": lambda m: m.head.weight[m.head.weight > 0].tolist(),
    "cpu": lambda m: m.head.weight.to("cpu").tolist(),
    ".cpu()": lambda m: m.head.weight.cpu().detach().double().tolist(),
    "argmax": lambda m: m.head.weight.argmax().item(),
    "to another dtype": lambda m: m.head.weight.to(torch.float64).tolist(),
    "matmul": lambda m: (X @ m.head.weight.t()).tolist(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).tolist(),
    "cat": lambda m: torch.cat([m.head.weight, m.head.weight]).tolist(),
    "unique": lambda m: m.head.weight.unique().tolist(),
    "equal": lambda m: torch.equal(m.head.weight, m.head.weight.clone()),
    "eager forward": lambda m: m.eval()(X).tolist(),
}


def test_reads_match_eager(backend):
    traced, eager = Run(backend), Run()
    traced.train(1), eager.train(1)
    for kind, read in READ.items():
        actual, expected = read(traced.model), read(eager.model)
        torch.testing.assert_close(actual, expected, rtol=2e-13, atol=2e-15, msg=kind)  # as above, after one step


def test_printing_matches_eager(backend):
    traced, eager = Run(backend), Run()
    assert repr(traced.model.head.weight) == repr(eager.model.head.weight)
    assert str(traced.model.head.bias.data) == str(eager.model.head.bias.data)
    assert f"{traced.model.head.bias[0]:.3f}" == f"{eager.model.head.bias[0]:.3f}"
    traced.train(1)
    assert repr(traced.model.steps) == "tensor(1)"


# -- editing ----------------------------------------------------------------------------------------------------------


def _vector(m):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters())


@torch.no_grad()
def _swap(m):
    first = m.head.weight[0].clone()
    m.head.weight[0] = m.head.weight[1]
    m.head.weight[1] = first


def _clip(m):
    for p in m.parameters():
        p.data.clamp_(-0.1, 0.1)


def _init(m):
    torch.manual_seed(7)
    nn.init.xavier_normal_(m.head.weight)
    nn.init.orthogonal_(m.hidden.weight)
    nn.init.trunc_normal_(m.head.bias, std=0.1)


def _average(m):
    with torch.no_grad():
        for p in m.parameters():
            p.lerp_(torch.ones_like(p), 0.1)


EDIT = {
    "mul_": lambda m: m.head.weight.data.mul_(0.9),
    "fill": lambda m: m.head.bias.data.fill_(0.5),
    "one element": lambda m: m.head.weight.data.__setitem__((0, 1), 3.0),
    "a row through a view": lambda m: m.head.weight.detach()[1].add_(1),
    "transposed view": lambda m: m.head.weight.data.t()[2].zero_(),
    "data assigned": lambda m: setattr(m.head.weight, "data", torch.full((2, 4), 0.25, dtype=torch.float64)),
    "copy from numpy": lambda m: m.head.weight.data.copy_(torch.from_numpy(np.full((2, 4), 0.125, np.float32))),
    "init": _init,
    "swap rows": _swap,
    "clip all": _clip,
    "from a vector": _vector,
    "foreach": lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 0.5),
    "moving average": _average,
    "buffer": lambda m: m.steps.add_(40),
    "running statistics": lambda m: m.norm.reset_running_stats(),
    "reset": lambda m: (torch.manual_seed(3), m.hidden.reset_parameters()),
}
OTHER = {
    "another parameter": lambda m: setattr(m.head, "bias", nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))),
    "no bias": lambda m: setattr(m.head, "bias", None),
    "frozen": lambda m: m.hidden.requires_grad_(False),
    "a new layer": lambda m: setattr(m, "norm", nn.Identity()),
}


def test_edits_between_steps_match_eager(backend):
    traced, eager = Run(backend), Run()
    for edit in EDIT.values():
        for run in (traced, eager):
            edit(run.model)
        assert same(traced, eager)
        close(traced.train(1), eager.train(1))
    close(traced.train(), eager.train())
    assert compiled_steps.kinds(traced.step) == 1


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_weights_replaced_between_steps_match_eager(kind, backend):
    traced, eager = Run(backend), Run()
    close(traced.train(1), eager.train(1))
    for run in (traced, eager):
        OTHER[kind](run.model)
    close(traced.train(3), eager.train(3))
    assert same(traced, eager)


def test_data_of_another_shape_matches_eager(backend):
    model = nn.Linear(4, 2)
    compiled = fl.compile(model, backend)
    predict = fl.trace(lambda x: compiled(x))
    predict(X.float())
    model.weight.data, model.bias.data = torch.ones(3, 4), torch.zeros(3)
    expected = X.float().sum(1, keepdim=True).expand(3, 3)
    for _ in range(2):
        # four float32 numbers, perhaps summed in another order
        torch.testing.assert_close(predict(X.float()).detach().clone(), expected, rtol=1e-6, atol=1e-6)


def test_weights_can_be_edited_between_runs(backend):
    """The reference allows it only after a checkpoint on the last step."""
    traced, eager = Run(backend), Run()
    for checkpoint_steps in (2, 0):
        for x, y in fl.utils.data.DataExecutor([(X, Y)], num_steps=3, checkpoint_steps=checkpoint_steps):
            traced.step(x, y)
        eager.train(3)
        for run in (traced, eager):
            run.model.hidden.weight.data.mul_(0.9)
    close(traced.train(), eager.train())


def test_optimizer_state_can_be_read_and_edited(runs):
    theirs_sum = runs[1].optimizer.state[runs[1].model.head.weight]["momentum_buffer"].sum().item()
    for run in runs:
        state = run.optimizer.state[run.model.head.weight]
        close(state["momentum_buffer"].sum().item(), theirs_sum)
        state["momentum_buffer"].mul_(0.5)
        with torch.no_grad():
            state["momentum_buffer"][0] = 0.1
    traced, eager = runs
    close(traced.train(), eager.train())
    assert same(traced, eager)


# -- state_dict, copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_state_dicts_round_trip(backend, assign):
    traced, eager = Run(backend), Run()
    eager.train(3)
    traced.train(1)
    traced.model.load_state_dict(copy.deepcopy(eager.model.state_dict()), assign=assign)
    assert same(traced, eager)
    fresh = Net()
    fresh.load_state_dict(traced.model.state_dict())
    assert torch.equal(fresh.head.weight, traced.model.head.weight.clone())


def test_a_state_dict_is_live_and_its_copy_is_not(runs):
    traced, _ = runs
    live, kept = traced.model.state_dict(), copy.deepcopy(traced.model.state_dict())
    cloned = {name: value.clone() for name, value in live.items()}
    traced.train(1)
    assert torch.equal(live["head.weight"].clone(), traced.model.head.weight.clone())
    assert torch.equal(kept["head.weight"].clone(), cloned["head.weight"])
    assert not torch.equal(live["head.weight"].clone(), cloned["head.weight"])


def test_optimizer_state_dicts_round_trip(backend):
    traced, reference = Run(backend), Run()
    close(traced.train(), reference.train())
    saved = (copy.deepcopy(traced.model.state_dict()), copy.deepcopy(traced.optimizer.state_dict()))
    expected = traced.train(3)
    again = Run(backend)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert again.train(3) == expected
    eager = Run()
    eager.model.load_state_dict(saved[0])
    eager.optimizer.load_state_dict(saved[1])
    close(eager.train(3), expected)


def test_torch_save_round_trips(runs):
    traced, _ = runs
    file = io.BytesIO()
    torch.save(traced.model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    assert all(torch.equal(value, traced.model.state_dict()[name].clone()) for name, value in loaded.items())


def test_deep_copies_are_models_of_their_own(runs, backend):
    traced, eager = runs
    copies = [copy.deepcopy(run.model) for run in runs]
    close(traced.train(1), eager.train(1))
    close(copies[0].head.weight.detach().clone(), copies[1].head.weight.detach())
    assert not torch.equal(copies[0].head.weight.clone(), traced.model.head.weight.clone())
    compiled = fl.compile(copies[0], backend)
    predict = fl.trace(lambda x: compiled(x))
    close(predict(X).clone(), copies[1](X).detach())


def test_averaged_weights_match_eager(backend):
    traced, eager = Run(backend), Run()
    averages = []
    for run in (traced, eager):
        average = torch.optim.swa_utils.AveragedModel(run.model)
        for _ in range(3):
            run.train(1)
            average.update_parameters(run.model)
        averages.append(average.module.head.weight.detach().clone())
    close(*averages)


# -- eager work outside a step -----------------------------------------------------------------------------------------


def test_eager_and_traced_steps_can_alternate(runs):
    traced, eager = runs
    for run in runs:
        loss = F.mse_loss(run.model(X), Y)
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert same(traced, eager)
    close(traced.train(), eager.train())
    assert same(traced, eager)


def test_eager_gradients_accumulate_in_a_step(backend):
    traced, eager = Run(backend), Run()
    for run in (traced, eager):
        F.mse_loss(run.model(X), Y).backward()
    close(traced.train(2), eager.train(2))
    assert same(traced, eager)


@pytest.mark.parametrize("eager_backward", [False, True])
def test_an_update_uses_existing_gradients(eager_backward, backend):
    traced, eager = Run(backend), Run()
    for run in (traced, eager):

        def backward(x, run=run):
            loss = F.mse_loss(run.compiled(x), Y)
            loss.backward()
            return loss

        def update(run=run):
            run.optimizer.step()
            run.optimizer.zero_grad()

        if run is traced:
            backward, update = backward if eager_backward else fl.trace(backward), fl.trace(update)
        run.losses = []
        for n in range(4):
            run.losses.append(backward(X).item())
            for p in run.model.parameters():
                p.grad = p.grad * (n + 1)  # a different tensor from the step's
            update()
    close(traced.losses, eager.losses)
    assert same(traced, eager)


def test_gradients_of_any_layout_are_used(backend, traced):
    """The gradient of a Linear's weight is a transposed product, in any step: the update is not retraced.

    A replaced gradient may have another layout: `hidden.weight` is square, so the shape does not show it.
    """
    actual, eager = Run(backend), Run()
    updates = []

    def backward(run):
        F.mse_loss(run.compiled(X), Y).backward()

    @fl.trace(check=False)
    def accumulate():
        backward(actual)

    @fl.trace(check=False)
    def update():
        actual.optimizer.step()
        actual.optimizer.zero_grad()

    for n in range(6):
        accumulate(), backward(eager)
        for run in (actual, eager):
            if n == 4:
                for p in run.model.parameters():
                    p.grad = torch.tensor(p.grad.tolist(), dtype=p.dtype)
        before = len(traced)
        update()
        updates.append(len(traced) - before)
        eager.optimizer.step()
        eager.optimizer.zero_grad()
        assert same(actual, eager)
    assert updates[2:4] == [0, 0]  # momentum is created in the first step


# -- several models, several runs -------------------------------------------------------------------------------------


def test_validation_may_come_before_training(backend):
    traced, eager = Run(backend), Run()
    evaluate = fl.trace(lambda x: traced.compiled(x))
    for kind in "etteettte":
        traced.model.train(kind == "t"), eager.model.train(kind == "t")
        if kind == "t":
            close(traced.train(1), eager.train(1))
        else:
            close(evaluate(X).detach().clone(), eager.model(X).detach())
    assert compiled_steps.kinds(traced.step) == 1 and compiled_steps.kinds(evaluate) == 1
    assert same(traced, eager)


def test_several_models_can_be_trained_at_once(backend):
    pairs = [
        (Run(backend), Run()),
        (Run(backend, lambda p: torch.optim.SGD(p, 0.1, 0.9)), Run(None, lambda p: torch.optim.SGD(p, 0.1, 0.9))),
    ]
    for _ in range(3):
        for traced, eager in pairs:
            close(traced.train(1), eager.train(1))
    assert all(same(*pair) for pair in pairs)


def test_weights_assigned_in_the_step_match_eager(backend):
    def losses(on):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        if on:
            fl.compile(model, backend)

        def one(x):
            loss = model(x).square().mean()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                p.data = p.data - 0.1 * g
            return loss

        step = fl.trace(one) if on else one
        return [step(X).item() for _ in range(4)] + [model.weight.sum().item()]

    close(losses(True), losses(False))


def test_one_step_can_train_two_models(backend):
    """As in adversarial training."""

    def losses(on):
        torch.manual_seed(0)
        a, b = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        for m in (a, b):
            if on:
                fl.compile(m, backend)
        first, second = torch.optim.Adam(a.parameters(), 0.01), torch.optim.SGD(b.parameters(), 0.1)

        def one(x):
            loss = b(a(x).detach()).square().mean()
            loss.backward()
            second.step()
            second.zero_grad()
            other = -b(a(x)).square().mean()
            other.backward()
            first.step()
            first.zero_grad()
            b.zero_grad()
            return loss, other

        step = fl.trace(one) if on else one
        return [[value.item() for value in step(X)] for _ in range(4)]

    # float64 sums in another order. Measured: 4e-16.
    torch.testing.assert_close(losses(True), losses(False), rtol=1e-14, atol=0)
