"""The package as a whole: its names, and a program for `cerebras.pytorch` with only its import changed."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
import firstloss.cstorch as cstorch


def test_its_names_are_those_of_firstloss():
    """Apart from three modules, the names are the same objects."""
    own = {"amp", "optim", "utils"}
    assert set(cstorch.__all__) == set(fl.__all__) - {"cstorch"} and set(cstorch.__all__) <= set(dir(cstorch))
    for name in cstorch.__all__:
        assert (getattr(cstorch, name) is getattr(fl, name)) == (name not in own), name
    for module in own:
        for name in getattr(cstorch, module).__all__:
            assert getattr(getattr(cstorch, module), name) is not None
    with pytest.raises(AttributeError, match="cstorch-names.md"):
        _ = cstorch.sparse
    with pytest.raises(AttributeError, match="cstorch-names.md"):
        _ = cstorch.utils.benchmark


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
