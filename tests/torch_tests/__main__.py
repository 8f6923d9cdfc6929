"""`python -m tests.torch_tests FOLDER`: run PyTorch's own tests on the backend.

FOLDER is a checkout of PyTorch at the tag of the installed torch:
`git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch`. It is not built; a few files of its folder
`test` are run. The outcome of each test is stored in docs/torch-tests.jsonl, from which docs/torch-tests.md is
generated.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests import forked

from .page import BAD, FILES, keep, write_page
from .ways import WAYS

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_tests", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of PyTorch")
    parser.add_argument("--file", action="append", choices=FILES, help="this file of it, and no other")
    parser.add_argument("--way", action="append", choices=WAYS, help="in this way, and no other")
    parser.add_argument("-k", dest="pattern", default="", help="tests whose names match this regular expression")
    parser.add_argument("--seconds", type=float, default=300, help="for a test")
    parser.add_argument("--write", action="store_true", help="keep the outcomes in docs/torch-tests.jsonl")
    parser.add_argument("--verbose", action="store_true", help="print where errors come from")
    options = parser.parse_args()
    of = version(options.folder)
    bad = 0
    for file in options.file or FILES:
        left_out: set[str] = set()
        with tempfile.TemporaryDirectory() as scratch:
            for way in WAYS:
                if way not in (options.way or WAYS) and way != "eager" or way not in FILES[file]:
                    continue
                path = options.folder / "test" / file
                begin = time.time()
                rows: dict[str, dict[str, Any]] = {}
                for outcome in outcomes(
                    path, way, options.pattern, scratch, options.seconds, left_out, options.verbose
                ):
                    rows[outcome["test"]] = outcome
                    if outcome["verdict"] not in ("passed", "skipped"):
                        print(f"{way}: {outcome['test']}: {outcome['verdict']}: {outcome.get('why', '')}", flush=True)
                    if way == "eager" and outcome["verdict"] != "passed":
                        left_out.add(outcome["test"])
                    bad += way != "eager" and outcome["verdict"] in BAD
                    if options.write and way != "eager" and len(rows) % 10 == 0:
                        keep(file, way, rows, of)
                counts = collections.Counter(row["verdict"] for row in rows.values())
                print(f"{file}, {way}: {dict(counts)} in {time.time() - begin:.0f} s", flush=True)
                if options.write:
                    keep(file, way, rows, of)
    if options.write:
        write_page()
    return int(bad > 0)


def version(folder: Path) -> str:
    """The version of a checkout of PyTorch."""
    return (folder / "version.txt").read_text().strip()


def outcomes(
    file: Path, way: str, pattern: str, scratch: str, seconds: float, left_out: set[str], verbose: bool = False
) -> Any:
    """Outcomes of the tests of `file` with matching names, except those `left_out`, in processes that may crash or
    hang."""
    done = set(left_out)
    while True:
        started, ended = None, True
        for row in _worker(file, way, pattern, scratch, seconds, done, verbose):
            if row["verdict"] == "begun":
                started = row["test"]
                continue
            if row["verdict"] == "end":
                ended = row["why"] == "0"
                continue
            done.add(row["test"])
            started = None
            yield row
        if started is None and ended:
            return
        if started is None:
            raise SystemExit(f"the tests of {file} could not be run {way}")
        done.add(started)
        verdict, why = ("late", f"no end within {seconds:g} s") if ended else ("ended", "the process ended")
        yield {"test": started, "verdict": verdict, "why": why}


def _worker(file: Path, way: str, pattern: str, scratch: str, seconds: float, done: set[str], verbose: bool) -> Any:
    artifacts = os.environ.get("FIRSTLOSS_CLIENTS_ARTIFACTS", f"{scratch}/artifacts")
    trails = Path(scratch) / "trails"
    trails.mkdir(exist_ok=True)
    environment = {**os.environ, "FIRSTLOSS_CLIENTS_DONE": " ".join(done)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"  # hundreds of steps are compiled
    environment |= {"XLA_FLAGS": flags.strip(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if verbose:
        environment["FIRSTLOSS_CLIENTS_VERBOSE"] = "1"
    command = ["-m", "tests.torch_tests.worker", str(file), way, artifacts, str(trails), pattern]
    errors = None if verbose else subprocess.DEVNULL
    process = forked.start(command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=scratch)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=seconds + 60)
        except queue.Empty:
            process.kill()
            process.wait()
            return
        if not line:
            yield {"test": "", "verdict": "end", "why": str(process.wait())}
            return
        yield json.loads(line)


if __name__ == "__main__":
    raise SystemExit(main())
