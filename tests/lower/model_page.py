"""The outcome of each model of `model_steps`: rows of docs/model-steps.jsonl, and the page generated from them."""

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
EXPORTS = DOCS / "model-exports.jsonl"
PAGE = DOCS / "model-steps.md"
VERDICTS = ("same", "differs", "refused", "late", "left out")
HEADS = (
    "model",
    "outcome",
    "weights",
    "gradients",
    "loss",
    "worst",
    "distance",
    "allowed",
    "seconds",
    "exported",
    "run",
    "remark",
)
PREFACE = """
One training step (forward, backward, AdamW) of small configurations (torchvision's and timm's models without layers
that repeat the previous one) on batches of two (eight images), constructed deferred, traced and compiled with
`fl.backend("XLA")`, `fl.compile` and `fl.trace`, against eager PyTorch from the same seed, in float32. Dropout is 0,
since eager PyTorch draws different masks. The loss, every gradient and every buffer (batch norm's running statistics)
are compared: the *distance* is the norm of the difference over the norm of eager's tensor, and *worst* is the tensor
that comes closest to the *allowed* distance. That is 1e-4 or, if eager's own result is less accurate than that, four
times the distance by which it changes if the step is computed in float64 or from weights that differ by an ulp (a ReLU
whose input is zero up to rounding; a batch norm over a handful of values). If that is more than 1e-2, or if only
gradients (not the loss or a buffer) are farther off, by less than 1e-2, the step is also compiled in float64, where it
has to be within 1e-4 of eager's; the remark gives the distance. New weights are compared, elementwise and up to
AdamW's rounding, with those that eager AdamW computes from the same gradients. Seconds are those of tracing, lowering
and compiling on shared cores. *Late* means no outcome within the time limit, *left out* that eager PyTorch does not
train the model as configured here. *Exported*: two such steps, run from a file of `step.lower(batch).save(path)` by a
process without PyTorch, have the same bits as `step.lower(batch).compile()` in loss, weights, buffers and AdamW's
moments (`python -m tests.lower.model_exports`).
"""

Row = dict[str, Any]


def read_rows() -> dict[tuple[str, str], Row]:
    """Rows by zoo and name."""
    rows = map(json.loads, ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {(row["zoo"], row["name"]): row for row in rows}


def keep(outcome: Row) -> None:
    """Replace a model's row. A run that was interrupted replaces no outcome."""
    rows = read_rows()
    key = outcome["zoo"], outcome["name"]
    if outcome["verdict"] == "late" and rows.get(key, outcome)["verdict"] != "late":
        return
    rows[key] = as_row(outcome)
    scratch = ROWS.with_suffix(".part")
    scratch.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
    os.replace(scratch, ROWS)


def as_row(outcome: Row) -> Row:
    """An outcome as stored: figures to two digits, without local paths, with versions and time (UTC)."""
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
    exports = {(row["zoo"], row["name"]): row["verdict"] for row in map(json.loads, EXPORTS.read_text().splitlines())}
    zoos = sorted({zoo for zoo, _ in rows})
    lines = ["# Training steps of model zoos", "", "<!-- Written by `python -m tests.lower.model_steps`. -->", ""]
    lines += [*PREFACE.strip().splitlines(), "", f"| zoo | {' | '.join(VERDICTS)} |", "| --- |" + " ---: |" * 5]
    for zoo in zoos:
        of_zoo = [row for row in rows.values() if row["zoo"] == zoo]
        counts = [str(sum(row["verdict"] == verdict for row in of_zoo)) for verdict in VERDICTS]
        versions = ", ".join(sorted({row["versions"][zoo] for row in of_zoo}))
        lines.append(f"| {zoo} {versions} | {' | '.join(counts)} |")
    for zoo in zoos:
        lines += ["", f"## {zoo}", "", f"| {' | '.join(HEADS)} |"]
        lines += ["| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- | --- | --- |"]
        for key, row in sorted(rows.items()):
            if key[0] == zoo and row["verdict"] != "left out":
                lines.append(_line(row, exports.get(key, "")))
    PAGE.write_text("\n".join([*lines, ""]))


def _line(row: Row, exported: str) -> str:
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
    return (
        f"| {' | '.join(cells)} | {exported} | {row['run']} | {remark if len(remark) < 200 else remark[:200] + '...'} |"
    )
