"""One of several processes that join and train, in torchrun's environment: python initialize_ranks.py PORT COUNT RANK
WHAT FOLDER."""

import os
import sys
import time

port, count, rank, what, folder = sys.argv[1:6]
os.environ.update(RANK=rank, WORLD_SIZE=count, MASTER_ADDR="localhost", MASTER_PORT=port)

import firstloss as fl  # noqa: E402

if what == "other version" and rank == "1":
    from firstloss.runtime.mesh import initialize

    initialize.versions = lambda version: "firstloss 9, jax 9"
print("joined", fl.distributed.initialize(timeout=3 if what == "late" else 120, heartbeat=2), flush=True)
if what == "dies":
    if rank == "1":
        os._exit(3)
    time.sleep(120)
if what in ("dies in training", "hangs in training", "other shapes", "other numbers", "other step", "is late"):
    import torch

    from firstloss.runtime.mesh import peers

    peers._PATIENCE = 1
    odd = rank == "1"
    backend = fl.backend("XLA", mesh={"fsdp": int(count)}, artifact_dir=folder)
    with backend.device:
        model = torch.nn.Linear(64, 64)
    compiled = fl.compile(model, backend)
    scale = 2.0 if odd and what == "other numbers" else 1.0

    @fl.trace
    def training(x):
        loss = (compiled(x) * scale).square().mean()
        loss.backward()
        return loss

    @fl.trace
    def evaluation(x):
        return compiled(x).square().mean()

    step = evaluation if odd and what == "other step" else training
    if odd and what == "is late":
        time.sleep(4)
    for number in range(1000):
        print(f"loss {number}", step(torch.ones(8 if odd and what == "other shapes" else 4, 64)).item(), flush=True)
        if number == 2 and what == "is late":
            break
        if number == 2 and odd and what == "dies in training":
            os._exit(3)
        if number == 2 and odd and what == "hangs in training":
            os.kill(os.getpid(), 19)  # SIGSTOP
