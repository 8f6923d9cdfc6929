"""Run functions in several processes, connected by gloo over loopback, or by NCCL with a GPU each."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests import forked

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_TICK = 0.25
DEVICE = os.environ.get("FIRSTLOSS_RANKS_ON", "cpu")  # the device of a rank's tensors


def on_ranks(world: int, *calls: str, seconds: float = 400, device: str = "cpu", fresh: bool = False) -> None:
    """Run `calls` ("module:function" or "module:function:argument") one after another on `world` processes.

    Fails with the output of the first process that fails. `seconds` counts only while this process itself runs: time
    during which all processes are suspended does not count. `device` is "cpu" or "cuda", and becomes DEVICE in the
    ranks. `fresh` processes have imported nothing that `calls` do not import.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.join(ROOT, "src"), ROOT]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "FIRSTLOSS_RANKS_ON": device,
    }
    start: Any = (lambda command, **how: subprocess.Popen([sys.executable, *command], **how)) if fresh else forked.start
    with tempfile.TemporaryDirectory() as folder:
        outputs = [open(os.path.join(folder, str(rank)), "w+") for rank in range(world)]
        ranks = [
            start(
                ["-m", "tests.init.distributed", *calls],
                env={**environment, "RANK": str(rank)},
                cwd=ROOT,
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]
        try:
            problem = _wait(ranks, seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
            output.close()
    if problem is not None:
        number, what = problem
        raise AssertionError(f"rank {number} of {world} {what}\n{texts[number]}")


def _wait(ranks: list[Any], seconds: float) -> tuple[int, str] | None:
    """Wait for all; returns the first that fails, and how."""
    for _ in range(int(seconds / _TICK)):
        statuses = [rank.poll() for rank in ranks]
        for number, status in enumerate(statuses):
            if status:
                return number, f"ended with status {status}"
        if None not in statuses:
            return None
        time.sleep(_TICK)
    return statuses.index(None), f"was not done after {seconds} seconds"


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if os.environ["FIRSTLOSS_RANKS_ON"] == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    for call in sys.argv[1:]:
        print(call, flush=True)
        module, function, *argument = call.split(":", 2)
        getattr(importlib.import_module(module), function)(*argument)
    dist.barrier()  # a rank that ends while another still uses the group may end it, too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # like forked ranks: gloo's threads now and then abort an interpreter that ends
