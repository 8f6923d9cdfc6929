"""Which of its weights a segment gathers, also if the batch is split over the mesh."""

import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.lower.gathers import gathers_of
from firstloss.lower.segments import cut
from firstloss.lower.sharding import ArraySharding, propagate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(96, 64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, tokens):
        x = self.up(self.embed(tokens)).bfloat16()
        return F.dropout(F.linear(x, self.down.weight.bfloat16()), 0.5).float()


def training(tmp_path):
    """The only segment of a step, and the shardings of its inputs: the rows of each matrix split over four devices."""
    torch.manual_seed(0)
    backend = fl.backend("XLA", validate_only=True, artifact_dir=tmp_path)
    with backend.device:
        model = Net()
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @fl.trace
    def step(tokens):
        loss = compiled(tokens).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step(torch.zeros(8, 4, dtype=torch.int64))
    (segment,) = cut(step.program()).segments
    inputs = [value for value in segment.inputs if not isinstance(value, int)]
    shardings = {
        v: ArraySharding((("fsdp",), ()) if len(v.shape) == 2 else ((),) * len(v.shape), v.dtype == torch.int64)
        for v in inputs
    }
    return segment, propagate([segment], shardings, {}, {"fsdp": 4})


def test_only_weights_of_products_are_gathered(tmp_path):
    segment, placed = training(tmp_path)
    gathers = gathers_of(segment, placed, {"fsdp": 4})
    gathered = {(tuple(one.value.shape), one.value.dtype, one.dim, one.axes) for one in gathers.gathers}
    assert gathered == {((128, 64), torch.float32, 0, ("fsdp",)), ((64, 128), torch.bfloat16, 0, ("fsdp",))}
    assert len(gathers.gathers) == 2  # the forward and the backward pass share one
    gathered_values = {one.value for one in gathers.gathers}
    readers = [(call, values) for call, values in gathers.after if values]
    assert all(values <= gathered_values & set(call.inputs) for call, values in readers)
    assert not any("foreach" in str(call.node.op) for call, _ in readers)


def test_gathers_have_no_later_dependencies(tmp_path):
    """A dropout mask and what is computed from it do not depend on the batch; both wait for the random number."""
    segment, placed = training(tmp_path)
    gathers = gathers_of(segment, placed, {"fsdp": 4})
    later = [call for call, _ in gathers.after]
    assert sorted(map(id, (*gathers.before, *later))) == sorted(map(id, segment.calls))
    made_later = {value for call in later for value in call.outputs}
    assert any(call.draw is not None for call in later) and len(gathers.before) > 2
    assert all(made_later.isdisjoint(call.inputs) for call in gathers.before)
    assert made_later.isdisjoint(one.value for one in gathers.gathers)
