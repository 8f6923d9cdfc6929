"""One of some processes that join: python joining.py PORT COUNT RANK WHAT, where the environment is torchrun's."""

import os
import sys

port, count, rank, what = sys.argv[1:5]
os.environ.update(RANK=rank, WORLD_SIZE=count, MASTER_ADDR="localhost", MASTER_PORT=port)

import firstloss as fl  # noqa: E402

if what == "other version" and rank == "1":
    from firstloss.runtime.mesh import join

    join.versions = lambda version: "firstloss 9, jax 9"
print("joined", fl.distributed.initialize(timeout=3 if what == "late" else 120, heartbeat=2), flush=True)
if what == "dies":
    import time

    if rank == "1":
        os._exit(3)
    time.sleep(120)
