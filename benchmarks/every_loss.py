"""Each loss of a training run as a user sees it: plain PyTorch, which reads each loss as soon as it is there, against
Firstloss, from the start of the process, imports included, in fresh processes and interleaved.

The k-th row is the time of the k-th loss, of Firstloss divided by plain PyTorch's of the same round. The whole first
step is a separate process, which reads the weights after its first step.

FIRSTLOSS_BENCHMARK_SIDES="plain firstloss second" chooses the sides; FIRSTLOSS_BENCHMARK_SIZES="100M" the sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "every loss, Llama, import counted, fresh processes, memory as the system hands it out"
GOAL = "at most 1.02 of plain PyTorch's time at every loss; 0.9 at the first and from the twentieth on (100M)"

# Of each size: the model, the optimizer, and the number of steps.
SIZES = {
    "tiny": (models.LLAMA_TINY, "AdamW", 4),
    "100M": (models.LLAMA_100M, "AdamW", 50),
    "500M": ({**models.LLAMA_1B, "num_hidden_layers": 9}, "AdamW", 20),
    "1.1B": (models.LLAMA_1B, "SGD", 8),
}
NAMES = {"firstloss": "Firstloss", "second": "Firstloss, second start"}

SCRIPT = """
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
side, fields, optim, steps = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
batches = [torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(n)) for n in range(steps)]
torch.manual_seed(0)
def show(loss):
    print("LOSS", loss.item(), time.time(), flush=True)
if side == "plain":
    model = LlamaForCausalLM(LlamaConfig(**fields))
    optimizer = getattr(torch.optim, optim)(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        if len(sys.argv) < 7:
            show(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    import firstloss as fl
    backend = fl.backend("XLA", artifact_dir=sys.argv[5])
    with backend.device:
        model = LlamaForCausalLM(LlamaConfig(**fields))
    optimizer = getattr(torch.optim, optim)(model.parameters(), lr=1e-3)
    compiled = fl.compile(model, backend)
    @fl.trace
    def step(batch):
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    for batch in batches:
        loss = step(batch)
        if len(sys.argv) < 7:
            show(loss)
if len(sys.argv) == 7:
    [weight.detach().sum().item() for weight in model.parameters()]
print("END", time.time(), flush=True)
"""


def _times(side, size, folder, steps=None):
    """When each loss was printed, when the process was done, in seconds after its start, and the losses."""
    fields, optimizer, all_steps = SIZES[size]
    command = [sys.executable, "-c", SCRIPT, side, json.dumps(fields), optimizer, str(steps or all_steps), folder]
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.time()
    done = subprocess.run(
        command + (["whole"] if steps else []), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{side}: status {done.returncode}: {done.stderr[-2000:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    return {
        "at": [float(line[2]) - began for line in lines if line[0] == "LOSS"],
        "end": float(lines[-1][1]) - began,
        "losses": [float(line[1]) for line in lines if line[0] == "LOSS"],
    }


def _run(side, size, kept):
    with tempfile.TemporaryDirectory() as own:
        found = _times(side, size, kept if side == "second" else own)
    with tempfile.TemporaryDirectory() as own:
        return {**found, "step": _times(side, size, kept if side == "second" else own, steps=1)["end"]}


def measure(args):
    chosen = os.environ.get("FIRSTLOSS_BENCHMARK_SIZES", "100M 500M 1.1B").split()
    sides = os.environ.get("FIRSTLOSS_BENCHMARK_SIDES", "plain firstloss second").split()
    rows, data, met = [], {}, True
    for size in ["tiny"] if args.tiny else chosen:
        with tempfile.TemporaryDirectory() as kept:
            if "second" in sides:
                _times("firstloss", size, kept)
            runs = harness.interleaved(sides, args.rounds, lambda side, size=size, kept=kept: _run(side, size, kept))
        data[size] = runs
        plain = [harness.median(run["at"][k] for run in runs["plain"]) for k in range(SIZES[size][2])]
        rows.append((f"{size}, plain PyTorch: losses at", ", ".join(f"{at:.2f}" for at in plain) + " s"))
        for side in [side for side in sides if side != "plain"]:
            pairs = list(zip(runs["plain"], runs[side], strict=True))
            ratios = [harness.median(b["at"][k] / a["at"][k] for a, b in pairs) for k in range(SIZES[size][2])]
            at = [harness.median(run["at"][k] for run in runs[side]) for k in range(SIZES[size][2])]
            step = harness.median(b["step"] / a["step"] for a, b in pairs)
            worst = max(range(len(ratios)), key=ratios.__getitem__)
            rows += [
                (f"{size}, {NAMES[side]}: losses at", ", ".join(f"{each:.2f}" for each in at) + " s"),
                ("  of plain PyTorch's time", ", ".join(f"{each:.2f}" for each in ratios)),
                ("  at worst", f"{ratios[worst]:.2f}, at loss {worst + 1}"),
                ("  the whole first step", f"{step:.2f}"),
            ]
            met = met and ratios[worst] <= 1.02
            if size == "100M":
                met = met and max(ratios[0], *ratios[19:]) <= 0.9
    return harness.Figure(NAME, GOAL, rows, met, data)


if __name__ == "__main__":
    harness.main(sys.modules[__name__])
