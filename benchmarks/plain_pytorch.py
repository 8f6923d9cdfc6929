"""Time to first loss as a user has it: `python train.py` in plain PyTorch, with torch.compile, and with Firstloss.

Each is a script of its own in a fresh process; seconds count from the start of the process until the loss is printed,
imports included, on memory as the system hands it out. The second loss is that of the second step. `torch.compile`
takes minutes: it is measured where FIRSTLOSS_BENCHMARK_SIDES="plain compile firstloss compiled" is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "time to first loss as a user has it, Llama, SGD, import counted, fresh processes"
GOAL = "at most 0.9 of plain PyTorch's at 100M parameters, 0.35 at 1.1B; the second loss no later than before"
SIDES = {
    "plain": "plain PyTorch",
    "compile": "torch.compile",
    "firstloss": "Firstloss",
    "compiled": 'Firstloss, first_loss="compiled"',
}

SCRIPT = """
import json, os, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
side, fields, tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
batch = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
if side in ("plain", "compile"):
    model = LlamaForCausalLM(LlamaConfig(**fields))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torch.compile(model) if side == "compile" else model
    def step(batch):
        loss = run(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
else:
    import firstloss as fl
    backend = fl.backend("XLA", artifact_dir=sys.argv[4], first_loss="compiled" if side == "compiled" else "eager")
    with backend.device:
        model = LlamaForCausalLM(LlamaConfig(**fields))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = fl.compile(model, backend)
    @fl.trace
    def step(batch):
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
for i in range(int(sys.argv[5])):
    print("LOSS", time.time(), step(batch).item(), time.time(), flush=True)
"""


def _run(side, fields, steps, args):
    with tempfile.TemporaryDirectory() as folder:
        tokens = 128
        command = [sys.executable, "-c", SCRIPT, side, json.dumps(fields), str(tokens), folder, str(steps)]
        began = time.time()
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
        if done.returncode:
            raise RuntimeError(f"{side}: {done.stderr[-2000:]}")
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("LOSS")]
        at = [float(line[3]) - began for line in lines]
        return {
            "seconds": at[0],
            "second": at[1],
            "last": at[-1],
            "loss": float(lines[0][2]),
            "losses": [float(line[2]) for line in lines],
        }


def measure(args):
    tables, data, met = [], {}, True
    sizes = {"tiny": models.LLAMA_TINY} if args.tiny else {"100M": models.LLAMA_100M, "1.1B": models.LLAMA_1B}
    sides = os.environ.get("FIRSTLOSS_BENCHMARK_SIDES", "plain firstloss compiled").split()
    for size, fields in sizes.items():
        runs = harness.interleaved(sides, args.rounds, lambda side, fields=fields: _run(side, fields, 6, args))
        data[size] = runs
        for side in sides:
            parts = [f"{harness.middle(runs[side], key):.2f}" for key in ("seconds", "second", "last")]
            share = harness.middle(runs[side], "seconds") / harness.middle(runs["plain"], "seconds")
            tables.append((f"{size}, {SIDES[side]}: first, second, sixth loss", f"{' / '.join(parts)} s ({share:.2f})"))
        share = harness.middle(runs["firstloss"], "seconds") / harness.middle(runs["plain"], "seconds")
        met = met and share <= (0.35 if size == "1.1B" else 0.9)
        equal = all(a["loss"] == runs["plain"][0]["loss"] for a in runs["firstloss"])
        tables.append((f"{size}: the first loss is plain PyTorch's, bit for bit", "yes" if equal else "no"))
    return harness.Figure(NAME, GOAL, tables, met, data)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
