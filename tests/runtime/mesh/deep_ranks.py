"""One of several processes that train a deep model, save it, and resume from a checkpoint of any number of processes:
python deep_ranks.py FOLDER PORT RANK COUNT DEVICES FROM BEGIN SAVE_AT; with port 0 the reference, one process with all
devices.

Each prints its results as a line of JSON.
"""

import json
import sys

import jax

folder, port, rank, count, devices, source, begin, save_at = (
    int(word) if word.lstrip("-").isdecimal() else word for word in sys.argv[1:9]
)
jax.config.update("jax_num_cpu_devices", devices)
if port:
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=rank)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402
from firstloss.lower import segments  # noqa: E402
from tests import compiled_steps  # noqa: E402

segments._SAVED = 100  # also split models with so few layers
STEPS = 6
compiled_here = []
compile_one = jax.stages.Lowered.compile


def compile_counted(lowered, *args, **options):
    if "@jit_step" in lowered.as_text():
        compiled_here.append(lowered)
    return compile_one(lowered, *args, **options)


jax.stages.Lowered.compile = compile_counted


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Run:
    def __init__(self, mesh):
        torch.manual_seed(0)
        self.backend = fl.backend("XLA", mesh=mesh, artifact_dir=f"{folder}/artifacts")
        with self.backend.device:
            self.model = nn.Sequential(nn.Embedding(128, 64), *(Block() for _ in range(4)), nn.Linear(64, 128))
        compiled = fl.compile(self.model, self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

        @fl.trace
        def step(tokens):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss, norm

        self.step = step

    def train(self, begin, end):
        generator = torch.Generator().manual_seed(7)
        batches = [torch.randint(0, 128, (16, 8), generator=generator) for _ in range(end)][begin:]
        return [[number.item() for number in self.step(tokens)] for tokens in batches]

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "backend": self.backend}

    def save(self, name):
        fl.save({name: part.state_dict() for name, part in self.parts().items()}, f"{folder}/{name}")

    def load(self, name):
        for part, state in fl.load(f"{folder}/{name}").items():
            self.parts()[part].load_state_dict(state)
        return self


if port:
    run = Run({"fsdp": count * devices})
    if source != "new":
        run.load(source)
    results = {"losses": run.train(begin, save_at)}
    run.save(f"by {count} at {save_at}")
    results["losses"] += run.train(save_at, STEPS)
    calls = compiled_steps.segment_calls(compiled_steps.latest(run.step))
    results.update(calls=len(calls), functions=len({call.function for call in calls}), compiled=len(compiled_here))
else:
    results = {"one": Run(None).train(0, STEPS)}
    eight = Run({"fsdp": 8})
    results["eight"] = eight.train(0, 3)
    eight.save("by eight devices")
    results["eight"] += eight.train(3, STEPS)
    for axes in (4, 16):
        results[f"8 to {axes}"] = Run({"fsdp": axes}).load("by eight devices").train(3, STEPS)
    results[f"{count} processes to 16 devices"] = Run({"fsdp": 16}).load(source).train(save_at, STEPS)
print(json.dumps(results))
