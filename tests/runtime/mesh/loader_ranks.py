"""One of several processes with a device each, whose loaders read their own rows, or with port 0 the reference: python
loader_ranks.py FOLDER PORT RANK COUNT.

Each prints its results as a line of JSON.
"""

import json
import sys

import jax

folder, port, rank, count = sys.argv[1], *map(int, sys.argv[2:5])
jax.config.update("jax_num_cpu_devices", 1)
if port:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=rank)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402

MESH = {"fsdp": count} if port else None
ROWS = 32  # rows of a batch: for each process as many as there are devices, or more
DATA = torch.randn(5 * ROWS, 64, generator=torch.Generator().manual_seed(3))


class Rows(torch.utils.data.Sampler):
    """All rows, reshuffled in each epoch by PyTorch's generator; of each batch this process's rows."""

    def __len__(self):
        return len(DATA) // ROWS

    def __iter__(self):
        own_rows = ROWS // count if port else ROWS
        for batch in torch.randperm(len(DATA)).split(ROWS):
            yield batch[own_rows * rank : own_rows * (rank + 1)].tolist()


def own_rows():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA), batch_sampler=Rows())


class WholeBatches:
    """The same as whole batches: they are transferred to the devices while the previous step runs."""

    def __init__(self):
        self.loader = own_rows()

    def __iter__(self):
        for (x,) in self.loader:
            yield [fl.distributed.global_batch(x) if MESH else x]


class Run:
    def __init__(self, loader):
        torch.manual_seed(0)
        self.backend = fl.backend("XLA", mesh=MESH, artifact_dir=f"{folder}/artifacts{rank}")
        with self.backend.device:
            self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64))
        compiled = fl.compile(self.model, self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        @fl.trace
        def step(x):
            loss = (compiled(x) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss, x.sum()

        self.step = step
        self.loader = fl.utils.data.DataLoader(loader)

    def train(self, steps, save_at=None):
        losses = []
        for number, (x,) in enumerate(fl.utils.data.DataExecutor(self.loader, num_steps=steps), 1):
            if MESH and x.shape[0] < ROWS:
                x = fl.distributed.global_batch(x)
            assert x.shape == (ROWS, 64)
            loss, total = self.step(x)
            losses.append([loss, total])
            if number == save_at:
                fl.save({name: part.state_dict() for name, part in self.parts().items()}, f"{folder}/it")
                torch.save(self.loader.state_dict(), f"{folder}/loader{rank}")
        return [[loss.item(), total.item()] for loss, total in losses]

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "backend": self.backend}


torch.manual_seed(0)
results = {"losses": Run(own_rows).train(12, save_at=7 if port else None)}
if port:
    again = Run(own_rows)
    torch.manual_seed(99)  # elsewhere than before
    for name, state in fl.load(f"{folder}/it").items():
        again.parts()[name].load_state_dict(state)
    again.loader.load_state_dict(torch.load(f"{folder}/loader{rank}"))
    results["resumed"] = again.train(5)
    results["whole"] = Run(WholeBatches).train(12)
print(json.dumps(results))
