"""Results of sweeps: docs/operations.jsonl, one line per operation.

Sweeping an operation again replaces only its own line.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from firstloss.files import atomic_write

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "docs" / "operations.jsonl"


def read_outcomes() -> dict[str, dict[str, Any]]:
    """The last outcome of each operation.

    `dtypes`: by dtype, the number of samples with each verdict; `why`: by verdict, the most frequent reason;
    `overloads`: the Core ATen overloads that capture met, of all samples; `limit`: the maximum number of samples per
    dtype (0: not recorded); `cut`: by dtype, the total number of samples if that is larger; `torch` and `jax`: their
    versions.
    """
    if not OUTCOMES.exists():
        return {}
    return {row["op"]: row for row in map(json.loads, OUTCOMES.read_text().splitlines())}


def keep_outcome(outcome: dict[str, Any]) -> None:
    """Replace the outcome of its operation by `outcome`."""
    outcome |= {"torch": torch.__version__.partition("+")[0], "jax": version("jax")}
    outcomes = read_outcomes() | {outcome["op"]: outcome}
    with atomic_write(OUTCOMES, "w") as file:
        for op in sorted(outcomes):
            file.write(json.dumps(outcomes[op], separators=(",", ":")) + "\n")


def short(reason: str) -> str:
    """A reason without the source locations of this sweep."""
    reason = re.sub(r"/\S+:\d+: ", "", reason)
    asks = re.search(r"asks for (.*?) \((\S+)\)", reason)
    if asks:
        reason = f"{reason.partition(':')[0]}: {asks[2]} asks for {asks[1]}"
    return reason[:160]
