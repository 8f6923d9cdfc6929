"""Results of sweeps: docs/operations.jsonl, one line per operation.

An operation that is swept again has its own line replaced, and no other.
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
    """By operation, the outcome found last.

    `dtypes`: by dtype, how many samples came to which verdict; `why`: by verdict, the reason given most often;
    `overloads`: of Core ATen's that capture met, good samples and all; `limit`: samples of a dtype at most (0: not
    recorded); `cut`: by dtype, how many samples there are where there are more; `torch` and `jax`: their versions.
    """
    if not OUTCOMES.exists():
        return {}
    return {found["op"]: found for found in map(json.loads, OUTCOMES.read_text().splitlines())}


def keep_outcome(outcome: dict[str, Any]) -> None:
    """Put `outcome` in place of what was known of its operation."""
    outcome |= {"torch": torch.__version__.partition("+")[0], "jax": version("jax")}
    found = read_outcomes() | {outcome["op"]: outcome}
    with atomic_write(OUTCOMES, "w") as file:
        for op in sorted(found):
            file.write(json.dumps(found[op], separators=(",", ":")) + "\n")


def short(reason: str) -> str:
    """A reason without the places in files of this sweep."""
    reason = re.sub(r"/\S+:\d+: ", "", reason)
    asks = re.search(r"asks for (.*?) \((\S+)\)", reason)
    if asks:
        reason = f"{reason.partition(':')[0]}: {asks[2]} asks for {asks[1]}"
    return reason[:160]
