"""One of two processes with two devices each, or with port 0 the reference: python mesh_ranks.py FOLDER PORT RANK.

Each prints its results as a line of JSON.
"""

import json
import sys

import jax

folder, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
if port:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402

MESH = {"fsdp": 2, "tp": 2} if port else None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, tokens):
        return self.down(nn.functional.dropout(self.up(self.embed(tokens)).relu(), 0.2, self.training))


class Run:
    def __init__(self):
        torch.manual_seed(0)
        self.backend = fl.backend("XLA", mesh=MESH, artifact_dir=f"{folder}/artifacts{rank}")
        with self.backend.device:
            self.model = Net()
        if MESH:
            fl.shard(self.model, {"up.weight": ("tp", "fsdp"), "down.weight": ("fsdp", "tp")}, MESH)
        compiled = fl.compile(self.model, self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        @fl.trace
        def step(tokens):
            self.optimizer.zero_grad()
            out = compiled(tokens)
            loss = out.square().mean()
            loss.backward()
            self.optimizer.step()
            return loss, out

        self.step = step

    def train(self, begin, end, own=False):
        generator = torch.Generator().manual_seed(7)
        batches = [torch.randint(0, 500, (8, 4), generator=generator) for _ in range(end)][begin:]
        if own and MESH:  # each process reads the rows of its devices
            batches = [fl.distributed.global_batch(batch[4 * rank : 4 * rank + 4]) for batch in batches]
        results = [self.step(batch) for batch in batches]
        assert all(out.shape == (8, 4, 64) and bool(out.isfinite().all()) for _, out in results)
        return [loss.item() for loss, _ in results]

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "backend": self.backend}


run = Run()
results = {"losses": run.train(0, 2) + run.train(2, 3, own=True)}
if MESH:
    fl.save({name: part.state_dict() for name, part in run.parts().items()}, f"{folder}/it")
    results["further"] = run.train(3, 5)
    other = Run()
    for name, state in fl.load(f"{folder}/it").items():
        other.parts()[name].load_state_dict(state)
    results["resumed"] = other.train(3, 5)
    array = run.model.up.weight._storage.resident.array()
    results["shards"] = [list(shard.data.shape) for shard in array.addressable_shards]
    try:
        run.model.up.weight.detach().clone()
    except fl.errors.ShardingError as error:
        results["error"] = str(error)
    results["gathered"] = fl.distributed.gather(run.model.up.weight).double().sum().item()
    fl.save({"again": run.model.state_dict()}, f"{folder}/it")  # in place
    results["again"] = sorted(fl.load(f"{folder}/it"))
else:
    results["losses"] += run.train(3, 5)
    results["sum"] = run.model.up.weight.detach().double().sum().item()
print(json.dumps(results))
