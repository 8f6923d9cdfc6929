"""Run one script as several ranks on this machine (gloo), and measure their wall time, CPU seconds and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Taken:
    """Resources used by all ranks together, without imports. Memory is the sum of proportional set sizes (PSS)."""

    wall: float
    cpu: float
    peak: int  # bytes, interpreters and libraries included
    base: int  # bytes of these alone, before the work began
    said: list[dict[str, Any]]  # the ranks' results

    @property
    def net(self) -> int:
        return self.peak - self.base


# The code that a rank runs around its work.
_RANK = """
import json, os, resource, sys, time
import torch
import torch.distributed as dist
name, argument, folder = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
module, function = name.split(":")
work = getattr(__import__(module, fromlist=[function]), function)
prepared = work(rank, world, argument)
dist.barrier()
open(f"{folder}/ready-{rank}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
check = prepared()
dist.barrier()
wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
open(f"{folder}/done-{rank}", "w").close()
while not os.path.exists(f"{folder}/measured"):
    time.sleep(0.02)
with open(f"{folder}/said-{rank}.json", "w") as file:
    json.dump({"wall": wall, "cpu": cpu, "found": check()}, file)
dist.barrier()
dist.destroy_process_group()
"""


def run(work: str, argument: str, world: int, threads: int = 1) -> Taken:
    """Run `work`, as "package.module:function", on `world` ranks with the given number of threads each.

    The function is called with rank, world and `argument`; its result is called on the clock, and the result of that
    off the clock.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": str(threads)}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, work, argument, folder],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        try:
            _wait(ranks, folder, "ready", lambda: None)
            base = peak = sum(_pss(rank.pid) for rank in ranks)

            def look() -> None:
                nonlocal peak
                peak = max(peak, sum(_pss(rank.pid) for rank in ranks))

            open(os.path.join(folder, "go"), "w").close()
            _wait(ranks, folder, "done", look)
            look()
            open(os.path.join(folder, "measured"), "w").close()
            failed = [rank.returncode for rank in ranks if rank.wait()]
            assert not failed, failed
        finally:
            for rank in ranks:
                rank.kill()  # those that wait for one that has ended
        said = []
        for rank in range(world):
            with open(os.path.join(folder, f"said-{rank}.json"), encoding="utf-8") as file:
                said.append(json.load(file))
    wall, cpu = max(s["wall"] for s in said), sum(s["cpu"] for s in said)
    return Taken(wall, cpu, peak, base, [s["found"] for s in said])


def _wait(ranks: list[subprocess.Popen], folder: str, mark: str, meanwhile: Any) -> None:
    while not all(os.path.exists(os.path.join(folder, f"{mark}-{n}")) for n in range(len(ranks))):
        assert all(rank.poll() is None for rank in ranks), "a rank has ended too early"
        meanwhile()
        time.sleep(0.2)


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
