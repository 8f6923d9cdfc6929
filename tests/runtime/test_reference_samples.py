"""The samples in the reference systems' documentation run unchanged, and the limits that it states are lifted.

| what they admit | shown by |
| --- | --- |
| lazy initialisation changes the order of draws | test_initializing_twice_keeps_the_order_of_draws |
| aliases of weights break the compile | test_aliases_of_weights_compile_and_train |
| every rank draws something else | mesh_cases.py: test_every_part_has_the_bits_of_the_whole |
| randn stand-ins, or a map of initialisers | test_the_constructor_is_the_specification |
| data-dependent branches: obscure, or frozen | test_a_value_read..., test_a_counter... |
| a traced tensor as a scalar is a random value | test_tensors_work_as_scalars |
| state made inside `step()` starts over each time | test_state_that_step_makes_under_a_condition_is_carried |
| no ordinary `lr_scheduler`, mixed precision only, train before eval | test_samples_that_need_changes_run |
| weights may be edited after a checkpoint only | test_weights_are_edited_between_executions |
"""

import math

import pytest
import torch
import torch.nn.functional as F

import firstloss as cstorch
from firstloss.errors import GraphChangeWarning, ValueReadError
from tests.runtime.reference_samples import (
    ALIAS,
    COUNTER,
    EDITED_BETWEEN_RUNS,
    LAZILY,
    NO_ALIAS,
    ON_THE_DEVICE,
    OPTIMIZER,
    SCALAR,
    SCALAR_FROM_OUTSIDE,
    THE_ASSERT_THAT_WILL_FAIL,
    TRACED_SCALAR,
    TWICE,
    VALUE_READ,
    WHERE,
    as_python,
)

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the samples' backends use the default artifact_dir


def run(sample, **names):
    """Run a sample; returns its globals. It is a file, so that errors can cite its lines."""
    with open("sample.py", "w") as file:
        file.write(sample)
    namespace = {"cstorch": cstorch, "torch": torch, "F": F, **names}
    exec(compile(sample, "sample.py", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("sample", [ON_THE_DEVICE, LAZILY])
def test_a_model_is_constructed_on_the_device(sample):
    scope = run(sample, Model=lambda: torch.nn.Linear(4, 2))
    model = scope["model"]
    assert cstorch.is_deferred(model) or sample is ON_THE_DEVICE
    compiled = scope.get("compiled_model") or cstorch.compile(model, scope["backend"])
    predict = cstorch.trace(lambda x: compiled(x))
    # float32 sums of four products, in another order. Measured: 3e-8.
    torch.testing.assert_close(predict(X).detach().clone(), model(X).detach(), rtol=1.3e-6, atol=3e-7)


def test_initializing_twice_keeps_the_order_of_draws():
    torch.manual_seed(0)
    scope = run(TWICE)
    model, after = scope["model"], torch.rand(3)
    torch.manual_seed(0)
    cpu_model = scope["Model"]()
    cpu_model.apply(scope["init_weights"])
    assert torch.equal(cpu_model.w1, model.w1.to("cpu")) and torch.equal(cpu_model.w2, model.w2.to("cpu"))
    assert torch.equal(after, torch.rand(3))


def test_the_assert_that_will_fail_holds():
    scope = run(TWICE)
    first, rest = THE_ASSERT_THAT_WILL_FAIL.split("with backend.device:")
    torch.manual_seed(0)
    scope = run(first, **scope)
    torch.manual_seed(0)  # both from the same seed, as eager PyTorch would need too
    scope = run("with backend.device:" + rest, **scope)
    assert torch.equal(scope["cpu_model"].w2, scope["model"].w2.to("cpu"))


def test_the_constructor_is_the_specification():
    """With randn stand-ins a language model's first loss would be ten times that of the constructor's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    scope = run(LAZILY, Model=lambda: LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)))
    compiled = cstorch.compile(scope["model"], scope["backend"])
    tokens = torch.arange(64).reshape(2, 32)
    loss = cstorch.trace(lambda batch: compiled(input_ids=batch, labels=batch).loss)(tokens).item()
    assert abs(loss - math.log(128)) < 0.1  # an untrained model; with randn about 20


def trained(model, backend=None, make=lambda p: torch.optim.SGD(p, lr=0.1), steps=4):
    """The losses of some steps; eager if `backend` is None."""
    compiled = model if backend is None else cstorch.compile(model, backend)
    optimizer = make(model.parameters())

    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = step if backend is None else cstorch.trace(step)
    return [step(X).item() for _ in range(steps)]


def copy_of(model, make):
    built = make()
    built.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return built


@pytest.mark.parametrize(
    "sample", [ALIAS, ALIAS.split("    def forward")[0] + NO_ALIAS + ALIAS.split("self.fc1.bias")[1]]
)
def test_aliases_of_weights_compile_and_train(sample):
    scope = run(sample)
    reference = copy_of(scope["model"], scope["Model"])
    losses = trained(scope["model"], scope["backend"])
    assert losses == pytest.approx(trained(reference), rel=1e-6)  # float32, in another order


def test_a_counter_in_a_branch_is_not_frozen():
    cstorch.backend("CSX")
    bad_function = run(as_python(COUNTER), step=0)["bad_function"]
    step = cstorch.trace(lambda x: bad_function(x, -x))
    with pytest.warns(GraphChangeWarning, match=r"global step.*sample.py:4.*torch.where"):
        actual = [step(X)[0, 0].item() for _ in range(12)]
    assert actual == [-1.0] * 9 + [1.0] * 3


def test_torch_where_works_in_place_of_a_branch():
    cstorch.backend("CSX")
    better_function, number = run(as_python(WHERE))["better_function"], torch.zeros((), dtype=torch.int64)
    step = cstorch.trace(lambda x: better_function(x, -x, number))
    assert [step(X)[0, 0].item() for _ in range(12)] == [-1.0] * 9 + [1.0] * 3


def test_a_value_read_in_a_branch_is_an_error_at_its_line():
    cstorch.backend("CSX")
    bad_function = run(as_python(VALUE_READ))["bad_function"]
    with pytest.raises(ValueReadError, match=r"^sample.py:3: `input1.max\(\) < 0`.*torch.where"):
        cstorch.trace(bad_function, reads="refuse")(X, X)
    assert issubclass(ValueReadError, RuntimeError)


@pytest.mark.parametrize("sample", [SCALAR, SCALAR_FROM_OUTSIDE, TRACED_SCALAR])
def test_tensors_work_as_scalars(sample):
    cstorch.backend("CSX")
    tensor1, tensor2 = X + 1, X * 2
    traced = cstorch.trace(lambda input, step: run(sample, input=input, step=step, **parts)["output"])
    parts = {"tensor1": tensor1, "tensor2": tensor2}
    for number in (0, 2000):
        value = 3.14 if sample is not TRACED_SCALAR else number * 0.0001 if number > 1000 else 0.0002
        if sample is SCALAR_FROM_OUTSIDE:
            value = torch.tensor(3.14, dtype=torch.float16).item()
        # one multiplication and one addition, which XLA may fuse
        expected = X.addcdiv(tensor1, tensor2, value=value)
        torch.testing.assert_close(traced(X, torch.tensor(number)).clone(), expected, rtol=1e-6, atol=1e-7)


def test_state_that_step_makes_under_a_condition_is_carried():
    state = {}
    CustomOptimizer = run(OPTIMIZER, state=state)["CustomOptimizer"]

    class Updating(CustomOptimizer):
        """With what the documentation omits: a constructor, which creates its state, and an update."""

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state.setdefault(p, self.state[p])
            super().step()
            for p in self.param_groups[0]["params"]:
                p.sub_(state[p]["momentum"])

    def make(parameters):
        state.clear()
        return Updating(parameters, {})

    model = torch.nn.Linear(4, 2)
    reference = copy_of(model, lambda: torch.nn.Linear(4, 2))
    backend = cstorch.backend("CSX")
    assert trained(model, backend, make) == pytest.approx(trained(reference, None, make), rel=1e-6)  # float32


def test_samples_that_need_changes_run():
    """Evaluation first, PyTorch's scheduler, and everything in float32."""

    def losses(backend):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        compiled = cstorch.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 6)
        evaluate = cstorch.trace(lambda x: compiled(x).abs().sum())

        @cstorch.trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        out = []
        for _ in range(4):
            out += [evaluate(X).item(), step(X).item()]
            schedule.step()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        return out

    assert losses(cstorch.backend("CSX")) == pytest.approx(losses(cstorch.backend("CPU")), rel=1e-5)  # float32


def test_weights_are_edited_between_executions():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.fc1(x)

    def weights(backend):
        torch.manual_seed(0)
        with backend.device:
            model = Model()
        compiled, losses = cstorch.compile(model, backend), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

        @cstorch.step_closure
        def note(loss):
            losses.append(loss.item())

        @cstorch.trace
        def train(inputs, targets):
            loss = F.mse_loss(compiled(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note(loss)

        @cstorch.trace
        def validate(inputs, targets):
            note(F.mse_loss(compiled(inputs), targets))

        cstorch.utils.data.DataLoader(lambda: [(X, torch.ones(3, 2))])
        sample = EDITED_BETWEEN_RUNS.replace("    ...\n", "    train(inputs, targets)\n", 2)
        sample = sample.replace("    ...\n", "    validate(inputs, targets)\n")
        run(sample, model=model, train=train, validate=validate)
        assert len(losses) == 2001
        return losses[::100], [p.detach().clone() for p in model.parameters()]

    actual, expected = weights(cstorch.backend("CSX")), weights(cstorch.backend("CPU"))
    torch.testing.assert_close(actual, expected, rtol=3e-5, atol=1e-6)  # float32, and 2,000 steps: 3e-6
