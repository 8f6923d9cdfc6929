"""Coverage of the lowering: every sample of PyTorch's operator tests, captured, compiled and compared.

    python -m tests.lower.coverage                       # operations not swept yet, or with fewer samples
    python -m tests.lower.coverage --only '^linalg'      # only these operations, again
    python -m tests.lower.coverage --table               # regenerate the page from stored outcomes

Outcomes are stored in docs/operations.jsonl (`outcomes.py`), one line per operation: an interrupted sweep resumes, and
sweeping an operation again changes only its row in docs/operations.md and the totals. All operations take an hour or
two. They are swept by child processes, a few each, since thousands of compiled programs use up a process's memory maps.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import torch

from .core_samples import DIRECT
from .outcomes import ROOT, keep_outcome, read_outcomes, short
from .promised_operations import CORE, is_listed
from .samples import ABSENT, DIFFERS, DTYPES, DYNAMIC, FAILS, GOOD, LEFT_OUT, REFUSED, tested
from .verdicts import examine

CORE_OVERLOADS = {str(overload) for overload in CORE}
AT_ONCE = 25  # operations per child process
MOST = 5000  # samples that are counted
SLOW = re.compile("pool|linear_cross|interpolate|attention|conv|pad|logspace")  # swept after the others
SECONDS = 3600  # time limit of a child process


def outcome_of(op: Any, limit: int) -> dict[str, Any]:
    """The outcome of an operation's samples."""
    dtypes: dict[str, dict[str, int]] = {}
    whys: dict[str, collections.Counter[str]] = {}
    overloads: dict[str, list[int]] = {}
    cut: dict[str, int] = {}
    began = time.process_time()
    for dtype in (d for d in DTYPES if op.supports_dtype(d, "cpu")):
        samples = examine(op, dtype, limit, quickly=True)
        name = str(dtype).removeprefix("torch.")
        every = sum(1 for _ in itertools.islice(op.sample_inputs("cpu", dtype), MOST)) if len(samples) >= limit else 0
        if every > limit:
            cut[name] = every
        dtypes[name] = dict(collections.Counter(s.verdict for s in samples))
        for sample in samples:
            if sample.verdict not in GOOD and sample.verdict != LEFT_OUT:
                whys.setdefault(sample.verdict, collections.Counter())[f"{name}: {sample.why}"] += 1
            for overload in sample.overloads & CORE_OVERLOADS if sample.verdict != LEFT_OUT else ():
                counts = overloads.setdefault(overload, [0, 0])
                counts[0] += sample.verdict in GOOD
                counts[1] += 1
        jax.clear_caches()
    return {
        "op": op.full_name,
        "dtypes": dtypes,
        "why": {verdict: short(why.most_common(1)[0][0]) for verdict, why in whys.items()},
        "overloads": overloads,
        "limit": limit,
        "cut": cut,  # by dtype: how many samples there are, of which `limit` were run
        "seconds": round(time.process_time() - began, 1),
    }


def sweep(only: str, limit: int, again: bool) -> None:
    """Sweep the operations whose names match, in child processes; if `again`, also those that have an outcome."""
    known = set() if again else {op for op, outcome in read_outcomes().items() if is_enough(outcome, limit)}
    ops = sorted((*DIRECT, *tested()), key=lambda op: (not is_listed(op), bool(SLOW.search(op.full_name))))
    todo = [op.full_name for op in ops if re.search(only, op.full_name) and op.full_name not in known]
    for i in range(0, len(todo), AT_ONCE):
        part = todo[i : i + AT_ONCE]
        while part:
            done, how = run_child(part, limit)
            left = [name for name in part if name not in done]
            if len(left) == len(part):  # the child process ended or was killed without reporting
                keep_outcome(
                    {"op": left[0], "dtypes": {"float32": {FAILS: 1}}, "why": {FAILS: how}, "overloads": {}}
                    | {"limit": limit, "cut": {}}
                )
                left = left[1:]
            part = left
        print(f"{min(i + AT_ONCE, len(todo))} of {len(todo)} operations", flush=True)


def is_enough(outcome: dict[str, Any], limit: int) -> bool:
    """Whether an outcome covers what a sweep of at most `limit` samples would."""
    return outcome["limit"] > 0 and (outcome["limit"] >= limit or not outcome["cut"])


def run_child(names: list[str], limit: int) -> tuple[set[str], str]:
    """The operations of `names` that a child process has swept, and how it ended."""
    command = [sys.executable, "-m", "tests.lower.coverage", "--child", "--limit", str(limit), *names]
    done = set()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if not line.startswith(" "):
                done.add(line.split()[0])
        late = not timer.is_alive()
        timer.cancel()
    return done, f"not swept in {SECONDS} s" if late else "the process ended"


def child(names: list[str], limit: int) -> None:
    by_name = {op.full_name: op for op in (*DIRECT, *tested())}
    for name in names:
        outcome = outcome_of(by_name[name], limit)
        keep_outcome(outcome)
        print(name, outcome["dtypes"], f"{outcome['seconds']} s", flush=True)
        for verdict in (DIFFERS, FAILS, ABSENT, REFUSED, DYNAMIC):
            if verdict in outcome["why"]:
                print(f"    {verdict}: {outcome['why'][verdict]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=250, help="samples of an operation in one dtype at most")
    parser.add_argument("--only", help="a regular expression: sweep these again")
    parser.add_argument("--table", action="store_true", help="write the page from outcomes found before")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        child(options.names, options.limit)
        return
    if not options.table:
        sweep(options.only or "", options.limit, again=options.only is not None)
    from .coverage_page import write_page

    write_page(read_outcomes(), ROOT / "docs" / "operations.md")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
