"""Run by test_cuda_random_ops.py in a separate process: capture for a GPU of which only the properties are known."""

import sys

import torch
from torch import nn

import firstloss as fl
from firstloss.capture import cuda_random_ops
from firstloss.rng.cuda_layout import GpuProperties, advance


class Generator:
    """The attributes of a CUDA generator that capture uses."""

    device = torch.device("cuda:0")

    def __init__(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


H100 = GpuProperties(132, 2048)
own = Generator(5)
torch.cuda._lazy_init = lambda: None
torch.cuda.current_device = lambda: 0
torch.cuda.default_generators = (Generator(3),)
cuda_random_ops.gpu = lambda index: H100
cuda_random_ops.layout_is_supported = lambda index: True

with fl.deferred(), torch.device("cuda"):
    module = nn.Sequential(nn.Embedding(5000, 700), nn.Linear(700, 300), nn.LayerNorm(300))
    nn.init.normal_(module[0].weight, std=0.02)
    half = torch.empty(1001, dtype=torch.bfloat16).uniform_()

sizes = [5000 * 700, 300 * 700, 300, 5000 * 700]
offsets = [0]
for size in sizes:
    offsets.append(advance(size, H100, offsets[-1]))
offsets.append(advance(1001, H100, offsets[-1], "bfloat16"))
assert torch.cuda.default_generators[0].offset == offsets[-1], (torch.cuda.default_generators[0].offset, offsets)
rows = {row.weight: row for row in fl.init_program(module).report().rows}
assert rows["0.weight"].position == offsets[3] and rows["0.weight"].dead_fills == 1, rows["0.weight"]
assert [rows[name].position for name in ("1.weight", "1.bias", "2.weight")] == [offsets[1], offsets[2], None]
assert module[1].weight.device.type == "cuda" and fl.is_deferred(module)
draw = half._storage.value.node.draw
assert draw.stream.seed == 3 and draw.position.words == offsets[4]
state = draw.stream.state_at(draw.position)
assert state.view("<i8").tolist() == [3, offsets[4]]
sys.exit(0)
