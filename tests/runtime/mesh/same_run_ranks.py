"""One of COUNT processes that train with `same_run`.

    python same_run_ranks.py FOLDER PORT RANK COUNT DEVICES BEGIN END

It goes on from the checkpoint of step BEGIN in FOLDER, unless BEGIN is 0, and saves one at END. The order of batches is
the run's, whatever the number of processes. It prints its losses and a digest of all its state as a line of JSON.
"""

import hashlib
import json
import sys

import jax

folder, port, rank, count, devices, begin, end = sys.argv[1], *map(int, sys.argv[2:8])
jax.config.update("jax_num_cpu_devices", devices)
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=rank)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.up = nn.Linear(64, 128)
        self.norm = nn.BatchNorm1d(128)
        self.down = nn.Linear(128, 64)

    def forward(self, tokens):
        x = self.up(self.embed(tokens)).transpose(1, 2)
        x = nn.functional.dropout(self.norm(x).relu(), 0.2, self.training)
        return self.down(x.transpose(1, 2))


torch.manual_seed(0)
backend = fl.backend("XLA", mesh={"fsdp": count * devices}, same_run=8, artifact_dir=f"{folder}/artifacts{rank}")
with backend.device:
    model = Net()
compiled = fl.compile(model, backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "backend": backend}
if begin:
    for name, state in fl.load(f"{folder}/{begin}").items():
        parts[name].load_state_dict(state)


@fl.trace
def step(tokens):
    optimizer.zero_grad()
    loss = compiled(tokens).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss


generator = torch.Generator().manual_seed(7)
batches = [torch.randint(0, 500, (16, 4), generator=generator) for _ in range(end)][begin:]
losses = []
for batch in batches:
    rows = len(batch) // count
    if count > 1:  # each process reads its own rows
        batch = fl.distributed.global_batch(batch[rank * rows : (rank + 1) * rows])
    losses.append(step(batch).item().hex())
state = {name: part.state_dict() for name, part in parts.items()}
fl.save(state, f"{folder}/{end}")
digest = hashlib.sha256()
for weight in model.state_dict().values():
    whole = fl.distributed.gather(weight)
    digest.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
print(json.dumps({"losses": losses, "digest": digest.hexdigest()}))
