"""What became of each model of `model_steps`: a row a model in docs/model-steps.jsonl, and the page of the rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
ROWS = DOCS / "model-steps.jsonl"
PAGE = DOCS / "model-steps.md"
VERDICTS = ("same", "differs", "refused", "late", "left out")
HEADS = ("model", "outcome", "weights", "gradients", "loss", "worst", "distance", "allowed", "seconds", "run", "remark")
PREFACE = """
One step (forward, backward, AdamW) of small configurations (of torchvision's and timm's models: without layers that
are like the one before) on batches of two (eight images), constructed deferred, traced and compiled by
`fl.backend("XLA")`, `fl.compile` and `fl.trace`, against eager PyTorch from the same seed, in float32. Dropout is 0,
for eager's masks are other masks. Compared are the loss, every gradient and every buffer (a batch norm's running
statistics): the *distance* is the norm of the difference over the norm of eager's, and *worst* is the tensor that
comes nearest to what is *allowed*. That is 1e-4; or, where eager's own result is less certain than that, four times
the distance by which it moves if the step is taken in float64, or from weights that differ by an ulp (a ReLU whose
input is zero but for rounding; a batch norm over a handful of values). Where that is more than 1e-2, or gradients
alone (not the loss, not a buffer) are farther off, by less than 1e-2, the step is compiled in float64 too, where it
has to be within 1e-4 of eager's: the remark says how near it is. New weights are compared, element by element and to
what AdamW's own roundings explain, with those that eager's AdamW makes of the same gradients. Seconds are those of
tracing, lowering and compiling on shared cores. *Late* is what had no outcome within its time, *left out* what eager
PyTorch does not train as it is configured here.
"""

Row = dict[str, Any]


def read_rows() -> dict[tuple[str, str], Row]:
    """By zoo and name."""
    rows = map(json.loads, ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {(row["zoo"], row["name"]): row for row in rows}


def keep(outcome: Row) -> None:
    """Put a model's row in place of its last one. A run that was cut short replaces no outcome."""
    rows = read_rows()
    key = outcome["zoo"], outcome["name"]
    if outcome["verdict"] == "late" and rows.get(key, outcome)["verdict"] != "late":
        return
    rows[key] = as_row(outcome)
    scratch = ROWS.with_suffix(".part")
    scratch.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
    os.replace(scratch, ROWS)


def as_row(outcome: Row) -> Row:
    """What is kept of an outcome: figures to two digits, no folders of this machine, the versions and when (UTC)."""
    row: Row = {
        key: outcome[key] for key in ("zoo", "name", "verdict", "weights", "tensors", "worst") if key in outcome
    }
    if "worst" in outcome:
        row["loss"] = abs(outcome["loss"] - outcome["eager loss"]) / max(abs(outcome["eager loss"]), 1e-30)
        row |= {key: outcome[key] for key in ("distance", "allowed")}
        row |= {key: float(f"{row[key]:.1e}") for key in ("loss", "distance", "allowed")}
        row["seconds"] = round(sum(outcome["seconds"].values()))
    row["why"] = re.sub(r"/\S*/(site-packages|zoo|src)/", "", outcome["why"])[:400]
    row["versions"] = {package: importlib.metadata.version(package) for package in ("torch", "jax", outcome["zoo"])}
    return {**row, "run": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}"}


def write_page() -> None:
    rows = read_rows()
    zoos = sorted({zoo for zoo, _ in rows})
    lines = ["# Training steps of model zoos", "", "<!-- Written by `python -m tests.lower.model_steps`. -->", ""]
    lines += [*PREFACE.strip().splitlines(), "", f"| zoo | {' | '.join(VERDICTS)} |", "| --- |" + " ---: |" * 5]
    for zoo in zoos:
        found = [row for row in rows.values() if row["zoo"] == zoo]
        counts = [str(sum(row["verdict"] == verdict for row in found)) for verdict in VERDICTS]
        versions = ", ".join(sorted({row["versions"][zoo] for row in found}))
        lines.append(f"| {zoo} {versions} | {' | '.join(counts)} |")
    for zoo in zoos:
        lines += ["", f"## {zoo}", "", f"| {' | '.join(HEADS)} |"]
        lines += ["| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- | --- |"]
        lines += [_line(row) for (of, _), row in sorted(rows.items()) if of == zoo and row["verdict"] != "left out"]
    PAGE.write_text("\n".join([*lines, ""]))


def _line(row: Row) -> str:
    cells = [
        row["name"],
        row["verdict"],
        f"{row['weights']:,}" if "weights" in row else "",
        str(row.get("tensors", "")),
    ]
    if "worst" in row:
        far = [f"{row[key]:.0e}" for key in ("loss", "distance", "allowed")]
        cells += [far[0], f"`{row['worst']}`", *far[1:], str(row["seconds"])]
    else:
        cells += [""] * 5
    remark = row["why"].replace("|", "\\|")
    return f"| {' | '.join(cells)} | {row['run']} | {remark if len(remark) < 200 else remark[:200] + '...'} |"
