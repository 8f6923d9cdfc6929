"""What the lowering covers: every sample of every operation that PyTorch tests, captured, compiled and compared.

    python -m tests.lower.coverage                       # all of it, half an hour; writes docs/operations.md
    python -m tests.lower.coverage --only '^linalg'      # some operations again; the rest as they were
    python -m tests.lower.coverage --table               # the page again, from outcomes found before

Outcomes are kept in build/coverage.jsonl, so that a sweep that was stopped goes on where it was. Operations are swept
by child processes, a few each, since thousands of compiled programs use up a process's memory maps.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import torch

from .core_samples import DIRECT
from .listed import is_listed
from .samples import ABSENT, DIFFERS, DTYPES, DYNAMIC, FAILS, GOOD, LEFT_OUT, REFUSED, tested
from .verdicts import examine

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "build" / "coverage.jsonl"
AT_ONCE = 50  # operations a child
MOST = 5000  # samples that are counted
SLOW = re.compile("pool|linear_cross|interpolate|attention|conv|pad|logspace")  # what matters most comes first
SECONDS = 1800  # that a child may take


def outcome_of(op: Any, limit: int) -> dict[str, Any]:
    """What became of the samples of one operation."""
    dtypes: dict[str, dict[str, int]] = {}
    whys: dict[str, dict[str, int]] = {}
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
                why = whys.setdefault(sample.verdict, {})
                text = f"{name}: {sample.why}"
                why[text] = why.get(text, 0) + 1
            for overload in sample.overloads if sample.verdict != LEFT_OUT else ():
                found = overloads.setdefault(overload, [0, 0])
                found[0] += sample.verdict in GOOD
                found[1] += 1
        jax.clear_caches()
    return {
        "op": op.full_name,
        "dtypes": dtypes,
        "why": whys,
        "overloads": overloads,
        "limit": limit,
        "cut": cut,  # by dtype: how many samples there are, of which `limit` were taken
        "seconds": round(time.process_time() - began, 1),
    }


def read_outcomes() -> dict[str, dict[str, Any]]:
    """By operation, the outcome found last."""
    if not OUTCOMES.exists():
        return {}
    lines = OUTCOMES.read_text().splitlines()
    return {found["op"]: found for found in map(json.loads, lines)}


def sweep(only: str, limit: int, again: bool) -> None:
    """Sweep the operations whose names match, in children; those that have an outcome only if `again`."""
    known = (
        set() if again else {op for op, found in read_outcomes().items() if found["limit"] >= limit or not found["cut"]}
    )
    ops = sorted((*DIRECT, *tested()), key=lambda op: (not is_listed(op), bool(SLOW.search(op.full_name))))
    todo = [op.full_name for op in ops if re.search(only, op.full_name) and op.full_name not in known]
    OUTCOMES.parent.mkdir(exist_ok=True)
    for i in range(0, len(todo), AT_ONCE):
        part = todo[i : i + AT_ONCE]
        while part:
            run_child(part, limit)
            done = set(finished)
            left = [name for name in part if name not in done]
            if len(left) == len(part):
                note_crash(left[:1])
                left = left[1:]
            part = left
        print(f"{min(i + AT_ONCE, len(todo))} of {len(todo)} operations", flush=True)


finished: list[str] = []  # what children have reported in this run


def run_child(names: list[str], limit: int) -> None:
    before = len(OUTCOMES.read_text().splitlines()) if OUTCOMES.exists() else 0
    command = [sys.executable, "-m", "tests.lower.coverage", "--child", "--limit", str(limit), *names]
    try:
        subprocess.run(command, cwd=ROOT, timeout=SECONDS, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        print(f"the child of {names[0]} took more than {SECONDS} s", flush=True)
    if OUTCOMES.exists():
        finished.extend(json.loads(line)["op"] for line in OUTCOMES.read_text().splitlines()[before:])


def note_crash(names: list[str]) -> None:
    """An operation whose child ended without a word."""
    for name in names:
        add_outcome(
            {"op": name, "dtypes": {}, "why": {FAILS: {"the process ended": 1}}, "overloads": {}, "limit": 0, "cut": {}}
        )


def add_outcome(outcome: dict[str, Any]) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps(outcome) + "\n")


def child(names: list[str], limit: int) -> None:
    by_name = {op.full_name: op for op in (*DIRECT, *tested())}
    for name in names:
        outcome = outcome_of(by_name[name], limit)
        add_outcome(outcome)
        print(name, outcome["dtypes"], f"{outcome['seconds']} s", flush=True)
        for verdict in (DIFFERS, FAILS, ABSENT, REFUSED, DYNAMIC):
            for text, count in list(outcome["why"].get(verdict, {}).items())[:2]:
                print(f"    {verdict} {count}x {text[:220]}", flush=True)


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
