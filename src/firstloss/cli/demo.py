"""`firstloss demo`: train on real data with Firstloss and with plain PyTorch, and compare the times to first loss."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..dependencies import require_extra
from ..errors import FirstlossError
from ..timeline import FIRST_LOSS, REST, Timeline
from . import output

if TYPE_CHECKING:
    from rich.console import Console

NAME = "demo"
HELP = "train a Llama of 500M parameters on the source of Python's standard library, and draw when its losses come"
EXAMPLE = "firstloss demo --out demo"

TITLES = {"firstloss": "Firstloss", "pytorch": "plain PyTorch"}
TOLERANCE = 1e-4
"""The allowed relative difference from plain PyTorch's losses: XLA sums in a different order than PyTorch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder for timeline.png and timeline.json")
    parser.add_argument("--steps", type=_positive, default=8, metavar="N", help="how many steps to train (default 8)")
    parser.add_argument("--size", choices=("500m", "100m", "tiny"), default="500m", help="the model (default 500m)")


def run(args: argparse.Namespace) -> int:
    require_extra("xla", "firstloss demo", "jax", "jaxlib")
    require_extra("demo", "firstloss demo", "transformers")
    out = _Folder(args.out)
    console = output.console(args.json)
    with out, tempfile.TemporaryDirectory(prefix="firstloss-demo-") as scratch:
        losses, timelines = _run_all(args, console, scratch)
        deferred, plain = timelines["firstloss"], timelines["pytorch"]
        files = [os.path.join(args.out, name) for name in ("timeline.png", "timeline.json")]
        deferred.to_png(files[0], other=plain, other_name=TITLES["pytorch"])
        deferred.to_perfetto(files[1], other=plain, other_name=TITLES["pytorch"])
        out.keep()
    difference = _difference(losses["firstloss"], losses["pytorch"])
    if args.json:
        output.print_json(_result(losses, timelines, difference, files))
    else:
        _print_tables(console, losses, timelines, difference, files)
    if difference > TOLERANCE:
        raise FirstlossError(
            f"the losses of {TITLES['firstloss']} and {TITLES['pytorch']} differ by {difference:.1e}, "
            f"more than {TOLERANCE:.0e}"
        )
    return 0


def _run_all(args: argparse.Namespace, console: Console, scratch: str) -> tuple[dict[str, list[float]], dict[Any, Any]]:
    losses: dict[str, list[float]] = {}
    timelines: dict[str, Timeline] = {}
    with output.progress(console) as progress:
        task = progress.add_task("reading the libraries from disk, so that neither run has to", total=None)
        list(_job("warm", args, scratch))
        progress.remove_task(task)
        for job, title in TITLES.items():
            task = progress.add_task(title, total=args.steps)
            console.print(f"[bold]{title}[/bold]")
            losses[job] = []
            for message in _job(job, args, scratch):
                if "loss" in message:
                    losses[job].append(message["loss"])
                    progress.advance(task)
                    if job == "firstloss":  # plain PyTorch should have the same losses
                        console.print(f"  step {len(losses[job]):>3}/{args.steps}  loss {message['loss']:.4f}")
                else:
                    timelines[job] = Timeline.from_dict(message["timeline"])
            progress.remove_task(task)
            if job != "firstloss":
                console.print(f"  {args.steps} steps, loss {losses[job][0]:.4f} to {losses[job][-1]:.4f}")
    return losses, timelines


def _job(job: str, args: argparse.Namespace, scratch: str) -> Iterator[dict[str, Any]]:
    """Run a job in a fresh process and yield its messages; the process ends with the generator."""
    command = [sys.executable, "-m", "firstloss.cli.demo_job", job, "--size", args.size, "--steps", str(args.steps)]
    command += ["--artifacts", os.path.join(scratch, job)]  # its own: no compilation cache is shared
    with open(os.path.join(scratch, f"{job}.log"), "w+", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, encoding="utf-8")
        try:
            assert child.stdout is not None
            for line in child.stdout:
                yield json.loads(line)
            if child.wait() != 0:
                log.seek(0)
                last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "no output")
                raise FirstlossError(f"the job {job!r} ended with status {child.returncode}: {last}")
        finally:
            child.kill()
            child.wait()


def _difference(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two runs' losses; infinite if one is NaN."""
    differences = [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    return max(math.inf if math.isnan(difference) else difference for difference in differences)


def _without_import(timeline: Timeline) -> float:
    assert timeline.first_loss is not None
    return timeline.first_loss - timeline.seconds("import")


def _moments(timeline: Timeline) -> dict[str, float]:
    """When the first loss came, when the weights had been updated the first time, and when the last loss came."""
    first, last = timeline.losses[0], timeline.losses[-1]
    update = max((span.end for span in timeline.spans if span.name == REST), default=last.at)
    return {FIRST_LOSS: first.at, "first update": update, last.name: last.at}


def _result(losses: dict[Any, Any], timelines: dict[Any, Any], difference: float, files: list[str]) -> dict[str, Any]:
    deferred, plain = timelines["firstloss"], timelines["pytorch"]
    return {
        "time_to_first_loss": {job: timelines[job].first_loss for job in TITLES},
        "without_import": {job: _without_import(timelines[job]) for job in TITLES},
        "ratio": plain.first_loss / deferred.first_loss,
        "ratio_without_import": _without_import(plain) / _without_import(deferred),
        "moments": {job: _moments(timelines[job]) for job in TITLES},
        "first_loss_is_the_same": losses["firstloss"][0] == losses["pytorch"][0],
        "phases": {job: {row.name: row.seconds for row in timelines[job].table()} for job in TITLES},
        "losses": losses,
        "max_relative_difference": difference,
        "files": files,
    }


def _print_tables(
    console: Console, losses: dict[Any, Any], timelines: dict[Any, Any], difference: float, files: list[str]
) -> None:
    from rich.table import Table

    deferred, plain = timelines["firstloss"], timelines["pytorch"]
    rows = {job: {row.name: row for row in timelines[job].table()} for job in TITLES}
    both = Timeline()
    for timeline in (deferred, plain):
        for span in timeline.spans:
            both.add(span.name, span.start, span.end)

    table = Table(title="Where the time went (seconds)", title_justify="left")
    table.add_column("phase")
    for job in TITLES:
        table.add_column(f"{TITLES[job]}\nfrom", justify="right", style="dim")
        table.add_column("\ntook", justify="right")
    for phase in (row.name for row in both.table()):
        cells = []
        for job in TITLES:
            row = rows[job].get(phase)
            cells += [f"{row.begin:.2f}", f"{row.seconds:.2f}"] if row else ["", ""]
        table.add_row(phase, *cells)
    table.add_section()
    moments, ratios = [_moments(timeline) for timeline in (deferred, plain)], []
    for name, at in moments[0].items():
        seconds = [at, moments[1][name]]
        ratios.append(f"{seconds[1] / seconds[0]:.2f} times as long to its {_ordinal(name)}")
        table.add_row(f"time to {_ordinal(name)}", "", f"{seconds[0]:.2f}", "", f"{seconds[1]:.2f}", style="bold")
    console.print(table)

    same = "bit-identical" if losses["firstloss"][0] == losses["pytorch"][0] else "not the same"
    console.print(
        f"The first loss is {same}; all losses differ by at most {difference:.1e} relatively.", soft_wrap=True
    )
    console.print(f"Plain PyTorch takes {', '.join(ratios)}, imports included.", soft_wrap=True)
    console.print(f"Wrote {' and '.join(files)} (open the latter at ui.perfetto.dev)", soft_wrap=True)


def _ordinal(moment: str) -> str:
    """`loss 8` as `8th loss`; other names as they are."""
    name, _, number = moment.partition(" ")
    if name != "loss":
        return moment
    ending = {1: "st", 2: "nd", 3: "rd"}.get(int(number) % 10, "th") if int(number) // 10 % 10 != 1 else "th"
    return f"{number}{ending} loss"


class _Folder:
    """A folder for results, created if it does not exist, and removed again if it stays empty."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.made: list[str] = []

    def __enter__(self) -> _Folder:
        missing = self.path
        while not os.path.exists(missing):
            self.made.append(missing)
            missing = os.path.dirname(missing)
        os.makedirs(self.path, exist_ok=True)
        return self

    def keep(self) -> None:
        self.made = []

    def __exit__(self, *exception: object) -> None:
        for folder in self.made:
            try:
                os.rmdir(folder)
            except OSError:  # not empty
                return


def _positive(text: str) -> int:
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
