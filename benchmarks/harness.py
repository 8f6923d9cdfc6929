"""Shared by all benchmarks: fresh processes, warm memory, interleaved rounds, medians, output as a table and as JSON.

A benchmark is a module with `measure(args) -> Figure`, and `child(side, args) -> dict` for what runs in a separate
process, so that no side benefits from the memory, imports or caches of another. If it has options of its own, it
declares them in `add_arguments(parser)`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

# With these in the environment each array is a separate mapping, returned to the system when it is freed, so that
# resident memory is the memory in use.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

# The exit status of a benchmark that this machine cannot run: "skipped" in automake and meson.
NOT_MEASURED = 77

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Figure:
    """The result of one benchmark: `rows` of (label, formatted value), and whether the goal is met.

    `met` is None if this machine lacks what the goal compares with; if it lacks everything, the only row says so.
    """

    name: str
    goal: str
    rows: list[tuple[str, str]]
    met: bool | None
    data: dict[str, Any]


def main(module: Any) -> None:
    """The command line of one benchmark: `python -m benchmarks.NAME [--rounds N] [--tiny] [--json]`, and its own."""
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    parser.add_argument("--child", metavar="SIDE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = module.child(args.child, args)
        print(json.dumps(result))
        return
    figure = module.measure(args)
    if figure.met is None and len(figure.rows) == 1 and not args.json:
        print(f"{figure.name}: not measured: {figure.rows[0][1]}")
        sys.exit(NOT_MEASURED)
    report([figure], args.json)
    sys.exit(NOT_MEASURED if figure.met is None else 0 if figure.met or args.tiny else 1)


def with_defaults(module: Any, args: argparse.Namespace) -> argparse.Namespace:
    """`args`, with the defaults of the benchmark's own options."""
    parser = argparse.ArgumentParser()
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **vars(args)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each side (default 3)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to check that the benchmark works")
    parser.add_argument("--fresh", action="store_true", help="use untouched memory, on both sides")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def in_child(
    module: str, side: str, args: argparse.Namespace, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run one side of benchmark `module` in a fresh process and return its result.

    `environment` replaces the settings that keep written memory in the process.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", "--child", side]
    command += [f"--{flag}" for flag, value in vars(args).items() if value is True and flag != "json"]
    if environment is None and not args.fresh:
        # Here, so that users of the rest of this file (`make replay`) run on any version of the sources.
        from firstloss import malloc_settings as malloc

        environment = malloc.environment(malloc.HUGE_PAGES, malloc.KEPT, malloc.ONE_HEAP)
    return json.loads(output_of(command, environment or {}).splitlines()[-1])


def output_of(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """The stdout of a command, which must succeed; its stderr goes to this process's."""
    path = os.pathsep.join([os.path.join(ROOT, "src"), ROOT, os.environ.get("PYTHONPATH", "")])
    full = {**os.environ, **(environment or {}), "PYTHONPATH": path}
    full.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once, not at each start
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=full)
    if done.returncode != 0:
        sys.exit(f"benchmarks: {' '.join(command)} ended with status {done.returncode}")
    return done.stdout


def interleaved(sides: Sequence[str], rounds: int, run: Callable[[str], dict[str, Any]]) -> dict[str, list[dict]]:
    """Run the sides interleaved, a b a b, so that other load on the machine affects all of them."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            print(f"  round {number + 1}/{rounds}: {side}", file=sys.stderr, flush=True)
            found[side].append(run(side))
    return found


def middle(runs: Sequence[dict[str, Any]], key: str) -> float:
    """The median of one number over the runs."""
    return median(run[key] for run in runs)


def ratio(slow: Sequence[dict[str, Any]], fast: Sequence[dict[str, Any]], key: str) -> float:
    """The median over the rounds of slow / fast, each within one round, where the machine's load is about the same."""
    return median(a[key] / b[key] for a, b in zip(slow, fast, strict=True))


def warm_memory(count: int, args: argparse.Namespace) -> None:
    """Make malloc hold `count` bytes that have been touched.

    Memory that a machine has never handed out can be ten times slower to write (a virtual machine gets it from its host
    page by page, and returns it when a process frees it), and the difference changes from minute to minute. In a child
    of `in_child`, everything that allocates with malloc, such as torch and XLA, then gets warm memory.
    """
    import torch

    if not (args.fresh or args.tiny):
        torch.empty(count, dtype=torch.uint8).fill_(1)


def write_bandwidth(size: int = 1 << 30) -> dict[str, float]:
    """Bytes per second that all cores together write: into touched memory, and into fresh memory in huge pages.

    The first bounds the speed of anything that fills memory; the second is the speed of a process with newly allocated
    memory.
    """
    import torch

    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    chunks = tensor.chunk(len(os.sched_getaffinity(0)))

    def write() -> float:
        threads = [threading.Thread(target=chunk.fill_, args=(1.0,)) for chunk in chunks]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return size / (time.perf_counter() - began)

    fresh = write()
    return {"fresh": fresh, "touched": median(write() for _ in range(5))}


def resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def settled() -> int:
    """Resident bytes after freed memory has been returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def reset_peak() -> None:
    """Reset the peak of resident bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak() -> int:
    """The peak of resident bytes since `reset_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def report(figures: Sequence[Figure], as_json: bool) -> None:
    """Print all results as one table or one JSON list."""
    if as_json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Benchmarks", title_justify="left", show_lines=False)
    table.add_column("benchmark")
    table.add_column("result", justify="right")
    for figure in figures:
        table.add_section()
        verdict = "[green]met[/green]" if figure.met else "[red]not met[/red]"
        if figure.met is None:
            verdict = "[yellow]not measured[/yellow]"
        table.add_row(f"[bold]{figure.name}[/bold]", verdict)
        table.add_row(f"  goal: {figure.goal}", "", style="dim")
        for what, value in figure.rows:
            table.add_row(f"  {what}", value)
    Console(highlight=False).print(table)
