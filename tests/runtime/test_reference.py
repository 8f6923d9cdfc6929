"""The code of the reference systems' documentation runs as it stands there, and the limits that they admit are gone.

What is quoted is between the lines of dashes, with what the documentation leaves out (`...`, models, losses) given
around it.
"""

import pytest
import torch
import torch.nn.functional as F

import firstloss as cstorch

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def linear_model():
    return torch.nn.Linear(4, 2)


def test_a_model_on_the_device(tmp_path):
    Model = linear_model
    # ----
    backend = cstorch.backend("CSX", artifact_dir=tmp_path)

    with backend.device:
        model = Model()

    # compile the model the same way as before
    compiled_model = cstorch.compile(model, backend)
    # ----
    predict = cstorch.trace(lambda x: compiled_model(x))
    torch.testing.assert_close(predict(X).detach().clone(), model(X).detach())


class Model(torch.nn.Module):
    # ----
    def __init__(self):
        super().__init__()

        self.w1 = torch.nn.Parameter(torch.empty(2, 2))
        self.w2 = torch.nn.Parameter(torch.empty(2, 2))

        self.reset_parameters()

    def reset_parameters(self):
        self.w1.data.uniform_(-1, 1)
        self.w2.data.normal_()

    # ----


@pytest.mark.parametrize("lazy", [True, False])
def test_initialising_twice_keeps_the_order_of_draws(backend, lazy):
    torch.manual_seed(0)
    # ----
    backend.device.config.lazy_initialization = lazy

    with backend.device:
        model = Model()

    def init_weights(model):
        torch.nn.init.kaiming_uniform_(model.w1)
        torch.nn.init.kaiming_normal_(model.w2)

    model.apply(init_weights)
    # ----
    after = torch.rand(3)
    torch.manual_seed(0)
    cpu_model = Model()
    cpu_model.apply(init_weights)
    assert torch.equal(cpu_model.w1, model.w1.to("cpu")) and torch.equal(cpu_model.w2, model.w2.to("cpu"))
    assert torch.equal(after, torch.rand(3))


def test_the_assert_that_will_fail_holds(backend):
    torch.manual_seed(0)
    # ----
    cpu_model = Model()
    cpu_model.reset_parameters()
    # ----
    torch.manual_seed(0)  # both from the same seed; eager PyTorch would need it as well
    # ----
    with backend.device:
        model = Model()
        model.reset_parameters()

    # This assert will fail!
    assert torch.allclose(cpu_model.w1, model.w1.to("cpu"))
    # ----
    assert torch.equal(cpu_model.w2, model.w2.to("cpu"))


def test_explicit_aliases_of_weights_compile_and_train(backend):
    # ----
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = torch.nn.Linear(4, 2)

        def forward(self, x):
            return x @ self.fc1.weight.T + self.fc1.bias

    with backend.device:
        model = Model()
    # ----
    losses = trained(model, backend)
    reference = Model()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.copy_(losses.begun[ours])
    assert losses == pytest.approx(eager(reference), rel=1e-6)  # float32, in another order


class Losses(list):
    """The losses of some steps, and the weights before them."""

    begun: dict


def trained(model, backend, make=lambda p: torch.optim.SGD(p, lr=0.1), steps=4):
    losses = Losses()
    losses.begun = {p: p.detach().clone() for p in model.parameters()}
    compiled, optimizer = cstorch.compile(model, backend), make(model.parameters())

    @cstorch.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses += [step(X).item() for _ in range(steps)]
    return losses


def eager(model, make=lambda p: torch.optim.SGD(p, lr=0.1), steps=4):
    optimizer, losses = make(model.parameters()), []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class CustomOptimizer(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        state = self.state
        # ----
        for param_group in self.param_groups:
            for p in param_group["params"]:
                if len(self.state[p]) == 0:
                    state[p]["momentum"] = torch.zeros_like(p.grad)
                state[p]["momentum"].add_(p.grad * 0.001)
                # ----
                p.sub_(state[p]["momentum"])  # fmt: skip


def test_state_that_step_makes_under_a_condition_is_carried(backend):
    model = linear_model()
    reference = linear_model()
    reference.load_state_dict(model.state_dict())
    assert trained(model, backend, CustomOptimizer) == pytest.approx(eager(reference, CustomOptimizer), rel=1e-6)


def test_a_value_read_in_a_branch_is_an_error_at_its_line(backend):
    # ----
    def bad_function(input1: torch.Tensor, input2: torch.Tensor):
        if input1.max() < 0:
            raise ValueError("input1 must have positive elements!")
        return input1 + input2

    # ----
    with pytest.raises(RuntimeError, match=r"test_reference.py:\d+.*torch.where"):
        cstorch.trace(bad_function)(X, X)


@pytest.mark.parametrize("kind", ["a scalar", "a tensor from outside", "a traced tensor"])
def test_tensors_as_scalars(backend, kind):
    tensor1, tensor2 = X + 1, X * 2

    def scaled(input, step):
        if kind == "a scalar":
            # ----
            output = input.addcdiv(tensor1, tensor2, value=3.14)
            # ----
        elif kind == "a tensor from outside":
            pi = torch.tensor(3.14, dtype=torch.float16)
            output = input.addcdiv(tensor1, tensor2, value=pi)
        else:
            # ----
            lrs = torch.where(step > 1000, step.float() * 0.0001, 0.0002)
            output = input.addcdiv(tensor1, tensor2, value=lrs)
            # ----
        return output

    traced = cstorch.trace(scaled)
    for number in (0, 2000):
        step = torch.tensor(number)
        # one multiplication and one addition, which XLA may do in one rounding
        torch.testing.assert_close(traced(X, step).clone(), scaled(X, step), rtol=1e-6, atol=1e-7)


def test_several_executions_and_weights_edited_between_them(backend):
    class TwoLayers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.fc1(x)

    with backend.device:
        model = TwoLayers()
    compiled, seen = cstorch.compile(model, backend), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @cstorch.step_closure
    def note(name, value):
        seen.append((name, value.item()))

    @cstorch.trace
    def training_step(inputs, targets):
        loss = F.mse_loss(compiled(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note("train", loss)

    @cstorch.trace
    def validation_step(inputs, targets):
        note("validate", F.mse_loss(compiled(inputs), targets))

    cstorch.utils.data.DataLoader(lambda: [(X, torch.zeros(3, 2))])
    # ----
    train_executor = cstorch.utils.data.DataExecutor(
        num_steps=10, checkpoint_steps=5
    )  # fmt: skip
    for inputs, targets in train_executor:
        training_step(inputs, targets)

    model.fc1.weight.data.mul_(0.9)  # This is allowed

    train_executor = cstorch.utils.data.DataExecutor(
        num_steps=10, checkpoint_steps=0
    )  # fmt: skip
    for inputs, targets in train_executor:
        training_step(inputs, targets)
    # ----
    before = model.fc1.weight.clone()
    # ----
    model.fc1.weight.data.mul_(0.9)  # This is *not* allowed

    validation_executor = cstorch.utils.data.DataExecutor(...)
    for step, (inputs, targets) in enumerate(validation_executor):
        # ----
        assert step == 0
        validation_step(inputs, targets)
    assert torch.equal(model.fc1.weight.clone(), before * 0.9)
    expected = F.mse_loss(F.linear(X, before * 0.9, model.fc1.bias.clone()), torch.zeros(3, 2)).item()
    assert [name for name, _ in seen] == ["train"] * 20 + ["validate"]
    assert seen[-1][1] == pytest.approx(expected, rel=1e-6)
    losses = [value for name, value in seen if name == "train"]
    assert all(part == sorted(part, reverse=True) for part in (losses[:10], losses[10:]))
