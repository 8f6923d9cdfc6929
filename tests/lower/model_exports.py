"""The steps of the models of `model_steps`, exported, and run in a process without PyTorch: the bits are the same.

    python -m tests.lower.model_exports                         # all that have no outcome; an hour
    python -m tests.lower.model_exports transformers --only bert

Two steps of each: `lowered.compile()` runs them in this process, and `fl.load_step` in one that has neither PyTorch nor
the model's code. Results and state (weights, AdamW's moments, buffers) must have the same bytes. Each outcome replaces
its row in docs/model-exports.jsonl, a column of docs/model-steps.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import firstloss as fl
from benchmarks.sweep_constructors import prepare

from .. import forked
from .model_cases import ZOOS, Case, loss_of, silence
from .model_page import EXPORTS, write_page
from .model_rounding import BETAS, RATE
from .model_steps import argument_parser, in_child

STEPS = 2
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import hashlib, json
import numpy as np
import firstloss as fl
file, leaves, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
step = fl.load_step(file)
batch = [np.load(f"{file}.{n}.npy") for n in range(leaves)]
for _ in range(steps):
    arrays = [*step(*batch), *step.state.values()]
    print(json.dumps([hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for array in arrays]))
"""


def lowered_step(case: Case, artifacts: str) -> tuple[Any, list[torch.Tensor]]:
    """The model's training step, lowered for its batch; and the batch's tensors."""
    backend = fl.backend("XLA", artifact_dir=artifacts)
    torch.manual_seed(0)
    with backend.device:
        model = silence(case.build()).train()
    torch.manual_seed(1)
    batch = case.batch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = loss_of(compiled(**batch))
        loss.backward()
        optimizer.step()
        return loss

    return step.lower(batch), [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def digests(arrays: Iterable[Any]) -> list[str]:
    """A digest of the bytes of each array."""
    return [hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for array in arrays]


def examine(zoo: str, name: str, folder: str) -> dict[str, Any]:
    """The outcome of one model's exported step."""
    out: dict[str, Any] = {"zoo": zoo, "name": name, "verdict": "same", "why": ""}
    file = Path(folder) / "step.safetensors"
    try:
        lowered, batch = lowered_step(ZOOS[zoo][1](name), folder)
        began = time.perf_counter()
        lowered.save(file)
        out |= {"export": round(time.perf_counter() - began, 1), "bytes": file.stat().st_size}
    except Exception as error:
        return {**out, "verdict": "refused", "why": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    for n, leaf in enumerate(batch):
        np.save(f"{file}.{n}.npy", leaf.numpy())
    out["arrays"] = len(lowered.state)
    other = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, str(file), str(len(batch)), str(STEPS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=forked.ROOT,
    )
    compiled = lowered.compile()
    state, inputs = lowered.arrays()
    here = []
    for number in range(STEPS):
        state, results = compiled(state, inputs, np.array([0, number], np.uint32))
        here.append(digests([*results, *state]))
    printed, errors = other.communicate()
    if other.returncode:
        return {**out, "verdict": "fails", "why": errors.strip().splitlines()[-1][:500]}
    there = [json.loads(line) for line in printed.splitlines()]
    names = [array.name for array in (*lowered.results, *lowered.state)]
    wrong = [
        f"{array} after step {number}"
        for number, pair in enumerate(zip(here, there, strict=True))
        for array, a, b in zip(names, *pair, strict=True)
        if a != b
    ]
    if wrong:
        out |= {"verdict": "differs", "why": f"{len(wrong)} arrays: {', '.join(wrong[:4])}"}
    return out


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    prepare()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import jax  # noqa: F401  # imported, and no more: its threads would not survive the fork

    import firstloss.runtime.step.compiled_step  # noqa: F401

    rows = (
        {(row["zoo"], row["name"]): row for row in map(json.loads, EXPORTS.read_text().splitlines())}
        if EXPORTS.exists()
        else {}
    )
    for zoo in options.zoos or ZOOS:
        for name in ZOOS[zoo][0]:
            if (zoo, name) in rows if options.only is None else not re.search(options.only, name):
                continue
            began = time.perf_counter()
            out = in_child(examine, zoo, name, options.limit)
            print(
                f"{zoo:12} {name:30} {out['verdict']:8} {time.perf_counter() - began:4.0f} s {out['why'][:250]}",
                flush=True,
            )
            rows[zoo, name] = out
            scratch = EXPORTS.with_suffix(".part")
            scratch.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
            os.replace(scratch, EXPORTS)
            write_page()


if __name__ == "__main__":
    main()
