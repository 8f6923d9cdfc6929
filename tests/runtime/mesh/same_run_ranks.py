"""One of COUNT processes that train with `same_run`.

    python same_run_ranks.py FOLDER PORT RANK COUNT DEVICES BEGIN END

It goes on from the checkpoint of step BEGIN in FOLDER, unless BEGIN is 0, and saves one at each second step and at END.
The order of batches is the run's, whatever the number of processes. With a further argument KILLED, the last process is
killed in the middle of that step, once the steps for fewer have been compiled. It prints its losses, a digest of its
whole state, and how many functions it has compiled, as a line of JSON.
"""

import hashlib
import json
import os
import signal
import sys
import threading

import jax

folder, port, rank, count, devices, begin, end = sys.argv[1], *map(int, sys.argv[2:8])
killed = int(sys.argv[8]) if len(sys.argv) > 8 else None
jax.config.update("jax_num_cpu_devices", devices)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402

if count > 1:
    fl.distributed.initialize(f"localhost:{port}", count, rank, heartbeat=400)  # longer than a test

lower, compiled_here = jax.stages.Lowered.compile, []


def counting(lowered, *options):
    if "@jit_step" in lowered.as_text() and threading.current_thread().name != "firstloss-ahead":
        compiled_here.append(lowered)
    return lower(lowered, *options)


jax.stages.Lowered.compile = counting


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
backend = fl.backend("XLA", mesh={"fsdp": count * devices}, same_run=8, artifact_dir=f"{folder}/artifacts")
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
for number, batch in enumerate(batches, begin):
    rows = len(batch) // count
    if count > 1:  # each process reads its own rows
        batch = fl.distributed.global_batch(batch[rank * rows : (rank + 1) * rows])
    if number == killed:
        for thread in threading.enumerate():
            if thread.name == "firstloss-ahead":
                thread.join()
        if rank == count - 1:
            threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
    losses.append(step(batch).item().hex())
    if number == begin:
        steps_compiled = len(compiled_here)
    if (number + 1) % 2 == 0 or number + 1 == end:
        fl.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/{number + 1}")
digest = hashlib.sha256()
for weight in model.state_dict().values():
    whole = fl.distributed.gather(weight)
    digest.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
print(json.dumps({"losses": losses, "digest": digest.hexdigest(), "compiled": steps_compiled}))
