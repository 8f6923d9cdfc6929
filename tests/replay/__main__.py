"""Check whether a code change affects Firstloss's results for models: Programs, recipes, weights, StableHLO.

    python -m tests.replay                          # the working tree against main, a few minutes
    python -m tests.replay --against HEAD~3         # ... against another revision, or a recorded file
    python -m tests.replay --write before.json.gz   # only record the working tree
    python -m tests.replay --size all               # every model of the zoos, an hour

Prints each difference with its first differing lines; then the exit status is 1. A refactoring must not cause any.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHOWN = 8  # lines of a difference


def record(source: Path, out: Path, arguments: list[str]) -> dict[str, str]:
    """The texts for the package in `source`, recorded in a separate process."""
    paths = [str(source), str(ROOT)]
    command = [sys.executable, "-m", "tests.replay.record", str(out), *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return read(out)


def read(path: Path) -> dict[str, str]:
    """Texts by name, as recorded."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def check_out(revision: str, folder: Path) -> Path:
    """The `src` of a revision, with its compiled extensions: without them, steps are lowered differently."""
    archive = subprocess.run(["git", "archive", revision], check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=True, cwd=folder)
    return folder / "src"


def compare(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """The differences, in words."""
    differences = [f"{name}: only before" for name in sorted(old.keys() - new.keys())]
    differences += [f"{name}: only now" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            lines = difflib.unified_diff(old[name].splitlines(), new[name].splitlines(), "before", "now", "", "", 0, "")
            first_lines = [line[:200] for _, line in zip(range(_SHOWN), lines, strict=False)]
            differences.append("\n    ".join([f"{name} differs", *first_lines[2:]]))
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="main", metavar="REVISION|FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write down what the working tree makes, and end")
    parser.add_argument("--size", choices=("tiny", "some", "all"), default="some")
    parser.add_argument("--only", metavar="REGEX", help="those alone whose names match")
    args = parser.parse_args()
    arguments = ["--size", args.size, *(["--only", args.only] if args.only else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        now = args.write or folder / "now.json.gz"
        new = record(ROOT / "src", now, arguments)
        if args.write:
            print(f"{len(new)} texts in {args.write}")
            return 0
        if os.path.isfile(args.against):
            old = {name: text for name, text in read(Path(args.against)).items() if re.search(args.only or "", name)}
        else:
            old = record(check_out(args.against, folder), folder / "old.json.gz", arguments)
    different = compare(old, new)
    print(*different, f"{len(different)} of {len(old.keys() | new.keys())} texts differ", sep="\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
