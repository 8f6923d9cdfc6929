"""The package as a whole: its names, and a program for `cerebras.pytorch` with only its import changed."""

import importlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
import firstloss.cstorch as cstorch
from firstloss.cstorch import submodules
from firstloss.errors import NoEffectWarning


def test_its_names_are_those_of_firstloss_and_cerebras():
    """Apart from modules and names of Cerebras' own, they are the same objects."""
    own = {*cstorch._MODULES, *cstorch._NAMES}
    assert set(cstorch.__all__) == {*fl.__all__, *own} - {"cstorch", "lower"} and set(cstorch.__all__) <= set(
        dir(cstorch)
    )
    for name in cstorch.__all__:
        assert (getattr(cstorch, name) is getattr(fl, name, None)) == (name not in own), name
    for module in ("amp", "distributed", "nn", "optim", "profiler", "utils"):
        for name in getattr(cstorch, module).__all__:
            assert getattr(getattr(cstorch, module), name) is not None
    with pytest.raises(AttributeError, match="cstorch-names.md"):
        _ = cstorch.no_such_name
    with pytest.raises(AttributeError, match="cstorch-names.md"):
        _ = cstorch.utils.benchmark


@pytest.mark.parametrize("name", [*submodules.SUBMODULES, *submodules.UNSUPPORTED])
def test_submodules_can_be_imported(name):
    module = importlib.import_module(f"firstloss.cstorch.{name}")
    for source in submodules.SUBMODULES.get(name, ()):
        importlib.import_module(source)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_names_in_submodules_are_the_same_objects():
    from firstloss.cstorch.backend import current_backend_impl, use_cs
    from firstloss.cstorch.core.device import device
    from firstloss.cstorch.metrics.accuracy import AccuracyMetric
    from firstloss.cstorch.nn.modules.DiceLoss import DiceLoss
    from firstloss.cstorch.optim.SGD import SGD
    from firstloss.cstorch.utils.data.data_executor import DataExecutor
    from firstloss.cstorch.utils.step_closures import step_closure

    from firstloss.cstorch.optim.lr_scheduler import LinearLR
    from firstloss.cstorch.utils.nest import visit_torch_tensors

    assert (use_cs, device, step_closure) == (cstorch.use_cs, cstorch.device, cstorch.step_closure)
    assert (AccuracyMetric, SGD) == (cstorch.metrics.AccuracyMetric, cstorch.optim.SGD)
    assert (LinearLR, DataExecutor) == (cstorch.optim.lr_scheduler.LinearLR, cstorch.utils.data.DataExecutor)
    assert DiceLoss is cstorch.nn.DiceLoss and visit_torch_tensors is cstorch.utils.nest.visit_torch_tensors
    backend = cstorch.backend("CPU")
    assert current_backend_impl() is backend is cstorch.current_backend()


INSTALLED = """
import firstloss.cstorch
firstloss.cstorch.install()
firstloss.cstorch.install()
import cerebras.pytorch as cstorch
import cerebras.pytorch.utils.data.sampler, cerebras.pytorch.nn.modules.DiceLoss
from cerebras.pytorch.optim.lr_scheduler import CosineDecayLR
from cerebras.pytorch.sparse import configure
assert cstorch is firstloss.cstorch and cstorch.__name__ == cstorch.__spec__.name == "firstloss.cstorch"
assert CosineDecayLR is firstloss.optim.lr_scheduler.CosineDecayLR
try:
    import cerebras.pytorch.no_such_module
except ModuleNotFoundError as error:
    assert "cerebras.pytorch.no_such_module" in str(error)
else:
    raise AssertionError
print("fine")
"""


def test_cerebras_pytorch_can_mean_this_package():
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


def test_installing_after_the_real_package_is_an_error():
    code = "import sys, types; sys.modules['cerebras.pytorch'] = types.ModuleType('it')\n"
    code += "import firstloss.cstorch; firstloss.cstorch.install()"
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "BackendError: cerebras.pytorch has been imported before" in error


def test_importing_it_imports_neither_torch_nor_jax():
    code = "import firstloss.cstorch, sys; print([m for m in ('torch', 'jax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)
        self.accuracy = cstorch.metrics.AccuracyMetric("accuracy")

    def forward(self, x, y):
        logits = self.fc2(F.gelu(self.fc1(x)))
        self.accuracy(labels=y, predictions=logits.argmax(-1))
        return F.cross_entropy(logits, y)


def program(name, folder, steps=8):
    """A loop as in the documentation of `cerebras.pytorch`: losses, logged steps, and the steps with checkpoints."""
    backend = cstorch.backend(name, artifact_dir=str(folder))
    torch.manual_seed(0)
    with backend.device:
        model = Model()
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = cstorch.optim.lr_scheduler.SequentialLR(
        optimizer,
        schedulers=[
            cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.0, 0.02, 3),
            cstorch.optim.lr_scheduler.CosineDecayLR(optimizer, 0.02, 0.0, 5),
        ],
        milestones=[3],
    )
    scaler = cstorch.amp.GradScaler(loss_scale="dynamic", init_scale=128.0)
    losses, checkpoints = [], []

    @cstorch.trace
    def training_step(batch):
        loss = compiled(*batch)
        cstorch.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=0.5)
        schedule.step()
        return loss

    @cstorch.step_closure
    def post_training_step(loss):
        losses.append((cstorch.current_executor().user_iteration, loss.item()))

    @cstorch.checkpoint_closure
    def save_checkpoint():
        step = cstorch.current_executor().user_iteration
        path = folder / f"checkpoint_{step}"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        cstorch.save(state, path)
        checkpoints.append(path)

    def input_fn(count):
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(-1)), batch_size=16)

    loader = cstorch.utils.data.DataLoader(input_fn, 64)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=steps, checkpoint_steps=4, activation_steps=2):
        loss = training_step(batch)
        post_training_step(loss)
        save_checkpoint()
    return losses, float(model.accuracy), cstorch.load(checkpoints[-1], map_location="cpu"), len(checkpoints)


def test_a_cerebras_program_runs_on_both_backends(tmp_path):
    """Both backends give the same losses, metrics and checkpoints."""
    actual, accuracy, saved, count = program("CSX", tmp_path / "csx")
    eager, expected, eager_saved, number = program("CPU", tmp_path / "cpu")
    assert [step for step, _ in actual] == [2, 4, 6, 8] and count == number == 2
    assert [loss for _, loss in actual] == pytest.approx([loss for _, loss in eager], rel=2e-6)
    assert accuracy == expected
    # 8 steps in float32, summed in another order, as the losses. Measured: 1e-7.
    for name, weight in eager_saved["model"].items():
        torch.testing.assert_close(saved["model"][name], weight, rtol=0, atol=1e-6)
    assert int(saved["schedule"]["last_epoch"]) == int(eager_saved["schedule"]["last_epoch"]) == 8


def test_arguments_have_cerebras_names(tmp_path):
    backend = cstorch.backend(backend_type="CPU", artifact_dir=tmp_path)
    assert cstorch.current_backend(raise_warning=False) is backend is cstorch.backend()
    with pytest.warns(NoEffectWarning, match="use_cs_grad_accum"):
        cstorch.backend("CPU", tmp_path, use_cs_grad_accum=True)
    with pytest.raises(TypeError, match="no_such_argument"):
        cstorch.backend("CPU", no_such_argument=True)


@pytest.mark.parametrize(
    "where", [None, "cpu", {"cpu": "cpu"}, {"cuda:0": "cpu"}, lambda storage, device: storage, lambda *args: None]
)
def test_a_checkpoint_is_loaded_with_the_arguments_of_torch_load(tmp_path, where):
    weight = torch.randn(3, 4)
    cstorch.save(state_dict={"weight": weight, "step": 3}, ckpt_path=tmp_path / "checkpoint")
    loaded = cstorch.load(ckpt_path=tmp_path / "checkpoint", map_location=where, weights_only=True)
    assert loaded["step"] == 3 and torch.equal(loaded["weight"], weight)
