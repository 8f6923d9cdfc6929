"""Summaries written outside and inside traced steps, and read back."""

import pytest
import torch

import firstloss as fl
from firstloss.errors import SummaryError
from firstloss.utils import tensorboard


@pytest.mark.parametrize("name", ["CSX", "CPU"])
@pytest.mark.parametrize("base_step", [1, 10])
def test_summaries_are_written_from_a_step(name, base_step, tmp_path):
    fl.backend(name, artifact_dir=tmp_path / "artifacts")
    writer = tensorboard.SummaryWriter(str(tmp_path / "logs"), base_step=base_step)

    @fl.trace
    def step(x):
        tensorboard.summarize_scalar("group/sum", x.sum())
        tensorboard.summarize_tensor("twice", x * 2)
        writer.summarize_scalar("mean", x.mean())

    batches = list(torch.arange(12.0).reshape(4, 3))
    for batch in fl.utils.data.DataExecutor(batches, activation_steps=2):
        step(batch)
    writer.close()
    reader = tensorboard.SummaryReader(tmp_path)
    assert reader.scalar_names() == {"group/sum", "mean"} and reader.tensor_names() == {"twice"}
    steps = [base_step + 1, base_step + 3]
    events = reader.read_scalar("group/sum")
    assert [(event.step, event.value) for event in events] == list(zip(steps, [12.0, 30.0], strict=True))
    assert reader.read_scalar("mean", steps[1]).value == 10
    tensors = reader.read_tensor("twice")
    assert list(tensors) == steps and torch.equal(tensors[steps[0]], batches[1] * 2)
    assert torch.equal(reader.read_tensor("twice", steps[1]), batches[3] * 2)


def test_a_tensor_can_be_read_back(tmp_path):
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for value in (1.0, 2.0):
            writer.add_tensor("a/b", torch.tensor(value), 3)
    assert tensorboard.SummaryReader([tmp_path]).read_tensor("a/b", 3) == 2


WRONG = {
    "no scalar": lambda w: w.summarize_scalar("x", torch.ones(2)),
    "no tensor": lambda w: w.summarize_tensor("x", 3.0),
    "no loop": lambda w: w.summarize_scalar("x", 3.0),
    "no such scalar": lambda w: tensorboard.SummaryReader(w.log_dir).read_scalar("x"),
    "no such tensor": lambda w: tensorboard.SummaryReader(w.log_dir).read_tensor("x"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_summaries_are_refused(case, tmp_path):
    with tensorboard.SummaryWriter(str(tmp_path)) as writer, pytest.raises(SummaryError):
        WRONG[case](writer)


def test_summaries_without_a_writer_are_an_error(monkeypatch):
    monkeypatch.setattr(tensorboard, "_writer", None)
    with pytest.raises(SummaryError, match="no SummaryWriter"):
        tensorboard.summarize_scalar("x", 1.0)
