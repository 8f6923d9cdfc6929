"""Check whether a code change affects what Firstloss makes of models: Programs, recipes, weights, StableHLO.

    python -m tests.replay                          # the working tree against main, in some minutes
    python -m tests.replay --against HEAD~3         # ... against another revision, or a file written before
    python -m tests.replay --write before.json.gz   # only write down what the working tree makes
    python -m tests.replay --size all               # every model of the zoos, an hour

What differs is listed, each with the first lines that do; then the exit status is 1. A refactor differs in nothing.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHOWN = 8  # lines of a difference


def record(source: Path, out: Path, arguments: list[str]) -> dict[str, str]:
    """What the package in `source` makes, recorded in a process of its own."""
    paths = [str(source), str(ROOT)]
    command = [sys.executable, "-m", "tests.replay.record", str(out), *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return read(out)


def read(path: Path) -> dict[str, str]:
    """Texts by name, as recorded."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def check_out(revision: str, folder: Path) -> Path:
    """The `src` of a revision, with the compiled parts of the working tree whose sources are the same."""
    archive = subprocess.run(["git", "archive", revision, "src"], check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive)
    for built in (ROOT / "src").rglob("*.so"):
        there = folder / built.parent.relative_to(ROOT)
        sources = [*built.parent.glob("*.c"), *built.parent.glob("*.h")]
        if sources and all((there / s.name).exists() and same_bytes(there / s.name, s) for s in sources):
            shutil.copy(built, there)
    return folder / "src"


def same_bytes(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def compare(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What differs, in words."""
    told = [f"{name}: only before" for name in sorted(old.keys() - new.keys())]
    told += [f"{name}: only now" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            lines = difflib.unified_diff(old[name].splitlines(), new[name].splitlines(), "before", "now", "", "", 0, "")
            shown = [line[:200] for _, line in zip(range(_SHOWN), lines, strict=False)]
            told.append("\n    ".join([f"{name} differs", *shown[2:]]))
    return told


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
