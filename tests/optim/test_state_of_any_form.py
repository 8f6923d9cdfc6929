"""Optimizers of users keep state and numbers in every form, as libraries write them, and train as in eager PyTorch."""

import math
import warnings

import pytest
import torch
from torch import nn

import firstloss as fl

OPTIMIZERS = {}


class Own(torch.optim.Optimizer):
    """An optimizer with a step of its own."""

    def __init__(self, parameters, lr=0.05, **numbers):
        super().__init__(parameters, {"lr": lr, **numbers})

    def __init_subclass__(cls):
        OPTIMIZERS[cls.__name__] = cls

    def weights(self):
        return [(group, p, self.state[p]) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss


class ListOfTensors(Own):
    def update(self):
        for group, p, state in self.weights():
            if not state:
                state["moments"] = [torch.zeros_like(p), p.clone()]
            for i, decay in enumerate((0.9, 0.5)):
                state["moments"][i].lerp_(p.grad, 1 - decay)
            p.sub_(sum(state["moments"]), alpha=group["lr"])


class ListOfNewTensors(Own):
    def update(self):
        for group, p, state in self.weights():
            if not state:
                state["moments"] = [torch.zeros_like(p)]
            state["moments"] = [moment * 0.9 + p.grad for moment in state["moments"]]
            p.sub_(state["moments"][0], alpha=group["lr"])


class DictOfTensors(Own):
    def update(self):
        for group, p, state in self.weights():
            if not state:
                state["by_decay"] = {decay: torch.zeros_like(p) for decay in (0.0, 0.9)}
            for decay, moment in state["by_decay"].items():
                moment.mul_(decay).add_(p.grad)
                p.sub_(moment, alpha=group["lr"] / 2)


class KeysThatAreNoWeights(Own):
    """As in MADGRAD's first implementation."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.state["steps"] = 0

    def update(self):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0.0])
        rate = 1 / (self.state["k"] + 1) + self.state["steps"] * 0.01
        for group, p, _state in self.weights():
            p.sub_(p.grad * rate, alpha=group["lr"])
        self.state["k"].add_(1)
        self.state["steps"] += 1


class ReadsItsState(Own):
    def update(self):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
        rate = math.pow(self.state["k"] + 1, -0.5)
        for group, p, _state in self.weights():
            p.sub_(p.grad, alpha=group["lr"] * rate)
        self.state["k"].add_(1)


class SecondDerivatives(Own):
    needs_graph = True

    def update(self):
        weights = [p for _, p, _ in self.weights()]
        with torch.enable_grad():
            products = torch.autograd.grad([p.grad for p in weights], weights, [torch.ones_like(p) for p in weights])
        for (group, p, state), product in zip(self.weights(), products, strict=True):
            average = state.setdefault("hessian", torch.zeros_like(p))
            average.lerp_(product.abs(), 0.1)
            p.sub_(p.grad / (average + 1), alpha=group["lr"])


class AugmentedRate(Own):
    def update(self):
        for group, p, _ in self.weights():
            rate = group["lr"]
            rate *= 0.5
            rate += 0.01
            p.sub_(p.grad, alpha=rate)


class NumbersFromTheRate(Own):
    """As schedule-free optimizers average their iterates."""

    def __init__(self, parameters):
        super().__init__(parameters, steps=0, largest=0.0, total=0.0)

    def update(self):
        for group in self.param_groups:
            group["steps"] += 1
            rate = group["lr"] * min(1.0, group["steps"] / 3)
            group["largest"] = max(rate, group["largest"])
            weight = group["largest"] ** 2
            group["total"] = group["total"] + weight
            for p in group["params"]:
                average = self.state[p].setdefault("average", p.clone())
                average.lerp_(p, weight / group["total"])
                p.sub_(p.grad + 0.01 * average, alpha=rate)


class OneListTwice(Own):
    def update(self):
        weights = [p for _, p, _ in self.weights()]
        squares = torch._foreach_mul([p.grad for p in weights], 1.0)
        torch._foreach_mul_(squares, squares)
        torch._foreach_sqrt_(squares)
        for (group, p, _), square in zip(self.weights(), squares, strict=True):
            p.sub_(square, alpha=group["lr"])


class PromotedTypes(Own):
    def update(self):
        for group, p, _ in self.weights():
            wide = torch.promote_types(p.dtype, torch.float64)
            p.sub_((p.grad.to(wide) * group["lr"]).to(p.dtype))


class NesterovAlone(Own):
    def __init__(self, parameters):
        super().__init__(parameters, nesterov=True, momentum=0.9)

    def update(self):
        for group, p, state in self.weights():
            moment = state.setdefault("moment", torch.zeros_like(p))
            moment.mul_(group["momentum"]).add_(p.grad)
            p.sub_(p.grad + group["momentum"] * moment, alpha=group["lr"])


class EvaluatesAgain(Own):
    """As sharpness-aware minimization: it calls the closure between two updates."""

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            for _, p, _ in self.weights():
                p.add_(p.grad, alpha=0.05)
        closure()
        with torch.no_grad():
            for group, p, state in self.weights():
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] + 0.05)
        return loss


class KnowsItsFirstStep(Own):
    def update(self):
        new = {p for _, p, state in self.weights() if not state}
        for group, p, state in self.weights():
            state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(p.grad if p in new else p.grad - state["average"], alpha=group["lr"])


class DrawsItsState(Own):
    def update(self):
        for group, p, state in self.weights():
            if "noise" not in state:
                state["noise"] = torch.empty_like(p).normal_()
            state["noise"].mul_(0.9)
            p.sub_(p.grad + 0 * state["noise"], alpha=group["lr"])


class TensorsInGroups(Own):
    """As D-Adaptation."""

    def update(self):
        group = self.param_groups[0]
        if "sum" not in group:
            group["sum"] = torch.tensor([0.0])
        for _, p, _ in self.weights():
            group["sum"].add_(p.grad.square().sum())
        group["largest"] = torch.maximum(group["sum"], group.get("largest", torch.zeros(1)))
        for group, p, _ in self.weights():
            p.sub_(p.grad / (1 + self.param_groups[0]["largest"]), alpha=group["lr"])


class DecidesByAProbability(Own):
    """As PSGD: what it counts is compared as a tensor."""

    def __init__(self, parameters):
        super().__init__(parameters, steps=0)

    def update(self):
        for group in self.param_groups:
            group["steps"] += 1
            if torch.tensor(1.0 / group["steps"]) > 0.3:
                for p in group["params"]:
                    p.grad.mul_(2)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class LooksUpItsRate(Own):
    rates = [0.01 * i for i in range(1, 20)]

    def __init__(self, parameters):
        super().__init__(parameters, steps=0)

    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=self.rates[group["steps"]] * group["lr"])
            group["steps"] += 1


def trained(cls, backend=None):
    """The losses, the weights and the groups' numbers of eight steps, and the traced step."""
    torch.manual_seed(0)

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    if backend is None:
        model = make()
    else:
        with backend.device:
            model = make()
        fl.compile(model, backend)
    optimizer = cls(model.parameters())

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward(create_graph=hasattr(cls, "needs_graph"))
            return loss

        if cls is EvaluatesAgain:
            return optimizer.step(closure).detach()
        loss = closure()
        optimizer.step()
        return loss.detach()

    step = step if backend is None else fl.trace(step)
    x = torch.randn(5, 3, dtype=torch.float64)
    losses = []
    for i in range(8):
        if i == 5:
            optimizer.param_groups[0]["lr"] = 0.02
        losses.append(step(x).clone())
    numbers = [v for group in optimizer.param_groups for v in group.values() if isinstance(v, (int, float))]
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.tensor(numbers).double()], step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_training_is_as_in_eager_pytorch(name, backend):
    expected, _ = trained(OPTIMIZERS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.errors.EagerStepWarning)
        warnings.simplefilter("ignore", fl.errors.GraphChangeWarning)
        actual, _ = trained(OPTIMIZERS[name], backend)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)  # XLA sums in another order


# How many are compiled: one more where the first step differs, or its state is drawn; and another for any rate.
COMPILED = {"AugmentedRate": 2, "NesterovAlone": 2, "KnowsItsFirstStep": 3, "DrawsItsState": 3}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_training_where_no_value_may_be_read_is_as_in_eager_pytorch(name, float64, tmp_path):
    """There the state is made before the first step, unless that computes something else."""
    expected, _ = trained(OPTIMIZERS[name])
    backend = fl.backend("XLA", mesh={"fsdp": 1}, same_run=1, artifact_dir=tmp_path)
    actual, step = trained(OPTIMIZERS[name], backend)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)  # XLA sums in another order
    assert step._cache.compilations() == COMPILED[name]


READ = {"ReadsItsState", "DecidesByAProbability"}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in READ])
@pytest.mark.filterwarnings("ignore:Using backward", "ignore::firstloss.errors.GraphChangeWarning")
def test_the_step_is_compiled(name, backend):
    """The optimizer's own state does not make its step one that runs untraced, or is compiled at each call."""
    _, step = trained(OPTIMIZERS[name], backend)
    if name == "ListOfNewTensors":  # its tensors cannot be seen: the step runs by its Python
        assert step._cache.compilations() == 0
    else:
        assert 1 <= step._cache.compilations() <= 4


def scaled(cls, name, tmp_path):
    """Losses and weights with a dynamic loss scale, two steps of which overflow."""
    backend = fl.backend(name, **({} if name == "CPU" else {"artifact_dir": tmp_path}))
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(3, 2)
    compiled = fl.compile(model, backend)
    optimizer = cls(model.parameters())
    scaler = fl.amp.GradScaler(loss_scale="dynamic", init_scale=128.0)

    @fl.trace
    def step(x):
        loss = compiled(x).square().mean()
        fl.amp.optimizer_step(loss, optimizer, scaler)
        return loss

    torch.manual_seed(1)
    sizes = (1.0, 1.0, float("inf"), 1.0, float("inf"), 1.0)
    losses = [step(torch.randn(4, 3) * size).clone() for size in sizes]
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("cls", [ListOfTensors, DictOfTensors, KnowsItsFirstStep, OneListTwice])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_a_step_that_overflows_leaves_state_of_any_form(cls, tmp_path):
    # float32, summed in another order
    torch.testing.assert_close(scaled(cls, "XLA", tmp_path), scaled(cls, "CPU", tmp_path), equal_nan=True)
