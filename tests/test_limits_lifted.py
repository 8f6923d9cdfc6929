"""What earlier systems that trace PyTorch or initialize it lazily could not do: one test for each lifted limit.

These are the limits stated in the two documents whose samples `runtime/test_reference_samples.py` runs. Each is shown
here in its smallest form; the details are tested with the code.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from tests import forked

torch.manual_seed(0)
X, Y = torch.randn(6, 8), torch.randn(6, 8)
CLOSE = {"rel": 1e-5}  # a few steps in float32, summed in another order. Measured: 4e-6, mostly 4e-7


class Odd(nn.Module):
    """Initialized in ways that no map from modules to initializers describes: in place, through views, from computed
    numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.slopes = nn.Parameter(torch.linspace(1, 2, 16).sqrt())
        nn.init.orthogonal_(self.first.weight)
        with torch.no_grad():
            self.second.weight[:4].mul_(0.5).add_(torch.eye(4, 16))
        self.alias = self.second.weight.T

    def forward(self, x):
        return (self.first(x).relu() * self.slopes) @ self.alias + self.second.bias


@pytest.fixture
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)


def build(backend=None, make=Odd):
    torch.manual_seed(5)
    if backend is None:
        return make()
    with backend.device:
        return make()


def losses(model, backend=None, optimizer=torch.optim.SGD, schedule=None, steps=4, between=lambda model: None):
    """The losses of some steps; eager if `backend` is None."""
    compiled = model if backend is None else fl.compile(model, backend)
    optimizer = optimizer(model.parameters(), lr=0.1)
    schedule = None if schedule is None else schedule(optimizer)

    def step(x, y):
        loss = F.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = step if backend is None else fl.trace(step)
    values = []
    for _ in range(steps):
        values.append(step(X, Y).item())
        between(model)
        if schedule is not None:
            schedule.step()
    return values


def test_lazy_initialization_keeps_the_order_of_random_draws(backend):
    """Others: lazy initialization changes the order of the draws, and with it the values."""
    eager, after = build(), torch.rand(3)
    lazy, drawn = build(backend), torch.rand(3)
    fl.compile(lazy, backend)
    for name, weight in eager.state_dict().items():
        assert torch.equal(lazy.state_dict()[name].cpu(), weight), name
    assert torch.equal(after, drawn)


def test_aliases_of_weights_compile_and_are_kept(backend):
    """Others: an explicit alias of a weight (`weight.T`) breaks the compile."""
    model = build(backend)
    assert losses(model, backend) == pytest.approx(losses(build()), **CLOSE)
    assert torch.equal(model.alias.cpu(), model.second.weight.T.cpu())


ON_MESHES = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import torch, firstloss as fl
from tests.test_limits_lifted import build
eager = build().state_dict()
program = fl.init_program(fl.deferred_init(build))
found = []
for mesh in (None, {"fsdp": 4}, {"fsdp": 8}, {"fsdp": 2, "tp": 4}):
    weights = program.run(mesh=mesh)
    ours = {name: torch.from_numpy(jax.device_get(array)) for name, array in weights.items()}
    devices = max(len(array.sharding.device_set) for array in weights.values())
    found.append([devices, max((ours[n] - eager[n]).abs().max().item() for n in eager)])
print(json.dumps(found))
"""


def test_weights_are_the_same_on_any_mesh():
    """Others: every rank draws different values, so 8 devices, 4 and 1 start from different weights."""
    done = forked.run(["-c", ON_MESHES], capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [devices for devices, _ in result] == [1, 4, 8, 8]
    assert len({difference for _, difference in result}) == 1
    assert result[0][1] < 1e-6  # the orthogonal weight's factorization is the device's own


def test_the_constructor_itself_is_the_specification():
    """Others: values are stand-ins from randn, or a map says which initializer each module has."""
    eager, lazy = build(), fl.deferred_init(build)
    assert fl.is_deferred(lazy)
    fl.materialize_module(lazy)
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), lazy.parameters(), strict=True))


def test_a_branch_on_a_value_is_taken_by_the_value(backend):
    """Others: an obscure `_local_scalar_dense` error."""

    @fl.trace
    def step(x):
        return x if x.max() < 0 else -x

    assert [step(sign * abs(X)).tolist() for sign in (1, -1, 1, 1, -1)] == [(-abs(X)).tolist()] * 5
    assert step._cache.compilations() == 2


def test_a_branch_on_a_python_value_is_not_frozen(backend):
    """Others: the branch taken when the step was traced is taken ever after."""
    counter = 0

    @fl.trace
    def step(x):
        nonlocal counter
        counter += 1
        return x if counter < 3 else -x

    with pytest.warns(fl.errors.GraphChangeWarning, match="the variable counter"):
        actual = [torch.equal(step(X).cpu(), X) for _ in range(4)]
    assert actual == [True, True, False, False]


def test_a_traced_tensor_as_a_scalar_argument_is_read_at_each_step(backend):
    """Others: a random value is used instead."""
    lr = torch.tensor(0.5)

    @fl.trace
    def step(x, y):
        lr.mul_(0.5)
        return torch.addcdiv(x, y, y + 20, value=lr)

    for n in range(1, 4):
        torch.testing.assert_close(step(X, Y).cpu(), torch.addcdiv(X, Y, Y + 20, value=0.5 / 2**n))


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop"])
def test_optimizer_state_created_inside_a_step_is_kept(name, backend):
    """Others: state created in `step()` restarts at zero at each step."""
    kind = getattr(torch.optim, name)
    assert losses(build(backend), backend, kind) == pytest.approx(losses(build(), None, kind), **CLOSE)


@pytest.mark.parametrize("way", ["ordinary", "of the step"])
def test_pytorchs_schedulers_and_functions_of_the_step_work(way, backend):
    """Others: no scheduler of `torch.optim.lr_scheduler` works."""

    def ordinary(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)

    def of_the_step(optimizer):
        return fl.optim.lr_scheduler.StepLR(optimizer, 0.1, 2, 0.1)

    schedule = ordinary if way == "ordinary" else of_the_step
    assert losses(build(backend), backend, schedule=schedule, steps=5) == pytest.approx(
        losses(build(), schedule=ordinary, steps=5), **CLOSE
    )


def test_validation_before_training_after_it_and_again(backend):
    """Others: the first compile locks the cluster, so that one has to train before one validates."""
    traced, eager = build(backend), build()
    fl.compile(traced, backend)
    validate = fl.trace(lambda x, y: F.mse_loss(traced(x), y))
    for _ in range(2):
        assert validate(X, Y).item() == pytest.approx(F.mse_loss(eager(X), Y).item(), **CLOSE)
        assert losses(traced, backend, steps=2) == pytest.approx(losses(eager, steps=2), **CLOSE)
    assert validate(X, Y).item() == pytest.approx(F.mse_loss(eager(X), Y).item(), **CLOSE)


def test_weights_are_edited_at_any_time_without_a_checkpoint(backend):
    """Others: weights may be edited between runs only after a checkpoint."""

    def edit(model):
        with torch.no_grad():
            model.second.bias.add_(1)
            model.first.weight[0] = 0

    assert losses(build(backend), backend, between=edit) == pytest.approx(losses(build(), between=edit), **CLOSE)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_training_works_in_float32_and_mixed_precision(dtype, backend):
    """Others: only mixed precision can be trained."""
    model, eager = build(backend), build()
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out = compiled.first(x)
        out.float().mean().backward()
        return out

    out = step(X)
    assert out.dtype == (dtype or torch.float32) and model.first.weight.grad.dtype == torch.float32
    rounding = 1e-6 if dtype is None else 2**-6  # for sums of eight products of factors of up to two
    torch.testing.assert_close(out.cpu().float(), eager.first(X), rtol=rounding, atol=rounding)
