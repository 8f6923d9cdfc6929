"""`python -m tests.fuzz steps --seeds 0:1000 --jobs 2`: run generated programs and report their outcomes."""

from __future__ import annotations

import argparse
import collections
import importlib
import re
import sys
import threading
import time
from pathlib import Path

from .outcome import REFUSED, Outcome
from .pool import Worker, check_all

KINDS = ("steps", "constructors", "checkpoints", "files", "faults")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", choices=(*KINDS, "run", "show"))
    parser.add_argument("file", nargs="?", help="run: a program's file; show: the kind, with --seeds")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END, or one seed, or several with commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--shrink", type=int, default=10, help="shrink and print so many failures, of as many classes")
    parser.add_argument("--out", type=Path, help="a folder for the failing programs, whole and shrunk")
    parser.add_argument("--check-kind", default="steps", help="run: what kind of program the file is")
    parser.add_argument("--discarded", action="store_true", help="report what was discarded, too")
    parser.add_argument("--traceback", action="store_true", help="run: print where errors come from")
    parser.add_argument("--quiet", action="store_true", help="no line for each failure as it is found")
    options = parser.parse_args()
    if options.kind == "run":
        outcome = importlib.import_module(f".{options.check_kind}", __package__).check(
            Path(options.file).read_text(), **({"traceback": True} if options.traceback else {})
        )
        print(outcome.kind, outcome.what, outcome.where)
        return int(outcome.failed)
    if options.kind == "show":
        module = importlib.import_module(f".{options.file or 'steps'}", __package__)
        print("\n".join(module.generate(seed) for seed in _seeds(options.seeds)), end="")
        return 0
    return _campaign(options)


def _campaign(options: argparse.Namespace) -> int:
    start = time.time()
    outcomes: list[tuple[int, str, Outcome]] = []
    for seed, source, outcome in check_all(options.kind, _seeds(options.seeds), options.jobs):
        outcomes.append((seed, source, outcome))
        if outcome.failed and not options.quiet:
            print(f"seed {seed}: {outcome.kind}: {outcome.what} {outcome.where}", flush=True)
        if len(outcomes) % 100 == 0:
            counts = collections.Counter(o.kind for _, _, o in outcomes)
            print(f"... {len(outcomes)} programs in {time.time() - start:.0f} s: {dict(counts)}", file=sys.stderr)
    counts = collections.Counter(outcome.kind for _, _, outcome in outcomes)
    compared = max(1, len(outcomes) - counts["discarded"])
    print(f"{len(outcomes)} programs in {time.time() - start:.0f} s")
    for kind, count in counts.most_common():
        of = f" ({100 * count / compared:.1f}% of those compared)" if kind != "discarded" else ""
        print(f"  {kind:10} {count:6}{of}")
    titles = {"refused": lambda o: o.kind == REFUSED, "failed": lambda o: o.failed}
    if options.discarded:
        titles["discarded"] = lambda o: o.kind == "discarded"
    for title, is_in_group in titles.items():
        classes: dict[str, list[tuple[int, Outcome]]] = collections.defaultdict(list)
        for seed, _, outcome in outcomes:
            if is_in_group(outcome):
                classes[_class(outcome)].append((seed, outcome))
        if classes:
            print(f"{title}, by class:")
        for name, members in sorted(classes.items(), key=lambda item: -len(item[1])):
            print(f"  {len(members):5}  {name}  (seeds {', '.join(str(s) for s, _ in members[:6])})")
            if title == "refused":
                lineless = [seed for seed, outcome in members if not outcome.where]
                if lineless:
                    print(f"         {len(lineless)} of them name no line (seeds {', '.join(map(str, lineless[:6]))})")
                else:
                    print(f"         {members[0][1].where}")
    _by_part(outcomes)
    failures = sorted([item for item in outcomes if item[2].failed], key=lambda item: item[0])
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for seed, source, _ in failures:
            (options.out / f"{options.kind}_{seed}.py").write_text(source)
    _shrink(options, failures)
    return int(bool(failures))


def _by_part(outcomes: list[tuple[int, str, Outcome]]) -> None:
    """For each part named in the programs' first lines, how many programs with it failed or were refused."""
    parts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for _, source, outcome in outcomes:
        if (title := re.match(r'"""[^:\n]*: (.*)\."""', source)) and outcome.kind != "discarded":
            for part in set(title[1].split(", ")):
                parts[part].update(["all", outcome.kind, "failed" if outcome.failed else ""])
    if parts:
        print("failed and refused, of how many, by what is in the program:")
    for part, counts in sorted(parts.items(), key=lambda item: -item[1]["failed"] / item[1]["all"]):
        print(f"  {counts['failed']:5} {counts['refused']:5} {counts['all']:6}  {part}")


def _shrink(options: argparse.Namespace, failures: list[tuple[int, str, Outcome]]) -> None:
    """Shrink one failure of each class, at most as many as requested, in parallel."""
    from .shrink import shrink

    chosen: dict[str, tuple[int, str, Outcome]] = {}
    for failure in failures:
        chosen.setdefault(_class(failure[2]), failure)
    todo = list(chosen.values())[: options.shrink]

    def work() -> None:
        worker = Worker(options.kind)
        while True:
            try:
                seed, source, outcome = todo.pop(0)
            except IndexError:
                break
            last = outcome

            def fails(candidate: str, outcome: Outcome = outcome) -> bool:
                nonlocal last
                shrunk = worker.check(candidate)
                if shrunk.like(outcome):
                    last = shrunk
                    return True
                return False

            small = shrink(source, fails)
            text = f"{small.rstrip()}\n# seed {seed}: {last.kind}: {last.what} {last.where}".rstrip() + "\n"
            print(f"\n# ---- seed {seed}, shrunk " + "-" * 60 + "\n" + text, flush=True)
            if options.out is not None:
                (options.out / f"{options.kind}_{seed}_shrunk.py").write_text(text)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _class(outcome: Outcome) -> str:
    """A class of similar failures: numbers, names and values are removed."""
    what = outcome.what
    if outcome.kind == "differs":
        path, _, how = what.partition(": ")
        path = re.sub(r"\d+", "N", path)
        how = re.sub(r"\[.*?\]|[-+\d.e]+\b", "..", how)
        return f"differs: {path}: {how[:60]}"
    what = re.sub(r"\S*\.py(:\d+)?", "FILE", what)
    what = re.sub(r"\d+", "N", what)
    return f"{outcome.kind}: {what[:140]}"


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, colon, end = part.partition(":")
        seeds.extend(range(int(first or 0), int(end)) if colon else [int(first)])
    return seeds


if __name__ == "__main__":
    raise SystemExit(main())
