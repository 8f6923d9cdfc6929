"""Each loss of a training run as a user sees it, from the start of the process, imports included, in fresh processes:
Firstloss divided by plain PyTorch, which reads each loss as soon as it is there.

The k-th number of a row is the median over the rounds of the time of the k-th loss, relative to plain PyTorch's in the
same round. The whole first step is a separate process, which reads the weights after its first step.

- "floor": the same imports, all weights drawn (`fl.deferred_init`, `fl.materialize_module`), and the forward pass in
  PyTorch: the time that a first loss takes without a step being traced or compiled.
- "second": Firstloss with the artifact folder of an earlier start.
- "compiled": Firstloss with `first_loss="compiled"`.
- "compile": `torch.compile`, with an empty cache, once, since it takes minutes.

FIRSTLOSS_BENCHMARK_SIDES="plain compile floor firstloss second compiled" chooses the sides (plain, floor, firstloss and
second by default); FIRSTLOSS_BENCHMARK_SIZES="100M" the sizes.
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
NAMES = {
    "compile": "torch.compile",
    "floor": "floor",
    "firstloss": "Firstloss",
    "second": "Firstloss, second start",
    "compiled": 'Firstloss, first_loss="compiled"',
}
ONCE = ("compile",)

SCRIPT = """
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
side, fields, optim, steps = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
batches = [torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(n)) for n in range(steps)]
torch.manual_seed(0)
def show(loss):
    print("LOSS", loss.item(), time.time(), flush=True)
if side == "floor":
    import firstloss as fl
    model = fl.materialize_module(fl.deferred_init(LlamaForCausalLM, LlamaConfig(**fields)))
    with torch.no_grad():
        show(model(input_ids=batches[0], labels=batches[0]).loss)
elif side in ("plain", "compile"):
    model = LlamaForCausalLM(LlamaConfig(**fields))
    optimizer = getattr(torch.optim, optim)(model.parameters(), lr=1e-3)
    run = torch.compile(model) if side == "compile" else model
    for batch in batches:
        loss = run(input_ids=batch, labels=batch).loss
        if len(sys.argv) < 7:
            show(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    import firstloss as fl
    way = "compiled" if side == "compiled" else "eager"
    backend = fl.backend("XLA", artifact_dir=sys.argv[5], first_loss=way)
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


def _times(side, size, folder, whole=False):
    """When each loss was printed, when the process was done, in seconds after its start, and the losses.

    Args:
        whole: whether only the first step is run, and waited for.
    """
    fields, optimizer, steps = SIZES[size]
    steps = 1 if whole else min(steps, 6) if side in ONCE else steps
    command = [sys.executable, "-c", SCRIPT, side, json.dumps(fields), optimizer, str(steps), folder]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.time()
    done = subprocess.run(
        command + (["whole"] if whole else []), capture_output=True, text=True, env=environment, check=False
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
    if side in ("floor", *ONCE):
        return found
    with tempfile.TemporaryDirectory() as own:
        return {**found, "step": _times(side, size, kept if side == "second" else own, whole=True)["end"]}


def _rows(size, side, runs):
    """The rows of a side, and its median ratios."""
    pairs = list(zip(runs["plain"], runs[side], strict=False))
    count = len(runs[side][0]["at"])
    at = [harness.median(run["at"][k] for run in runs[side]) for k in range(count)]
    rows = [(f"{size}, {NAMES.get(side, 'plain PyTorch')}: losses at", ", ".join(f"{each:.2f}" for each in at) + " s")]
    seconds = f"{harness.median(run['step'] for run in runs[side]):.2f} s" if "step" in runs[side][0] else ""
    if side == "plain":
        return [*rows, ("  the whole first step", seconds)], []
    ratios = [harness.median(b["at"][k] / a["at"][k] for a, b in pairs) for k in range(count)]
    worst = max(range(count), key=ratios.__getitem__)
    rows.append(("  of plain PyTorch's time", ", ".join(f"{each:.2f}" for each in ratios)))
    rows.append(("  at worst", f"{ratios[worst]:.2f}, at loss {worst + 1}"))
    if seconds:
        ratio = harness.median(b["step"] / a["step"] for a, b in pairs)
        rows.append(("  the whole first step", f"{seconds}, {ratio:.2f} of plain PyTorch's"))
    same = all(b["losses"][0] == a["losses"][0] for a, b in pairs)
    rows.append(("  the first loss is bit-identical", "yes" if same else "no"))
    return rows, ratios


def measure(args):
    chosen = os.environ.get("FIRSTLOSS_BENCHMARK_SIZES", "100M 500M 1.1B").split()
    sides = os.environ.get("FIRSTLOSS_BENCHMARK_SIDES", "plain floor firstloss second").split()
    rows, data, met = [], {}, True
    for size in ["tiny"] if args.tiny else chosen:
        with tempfile.TemporaryDirectory() as kept:
            if "second" in sides:
                _times("firstloss", size, kept)
            often = [side for side in sides if side not in ONCE]
            runs = harness.interleaved(often, args.rounds, lambda side, size=size, kept=kept: _run(side, size, kept))
            runs |= {side: [_run(side, size, kept)] for side in sides if side in ONCE}
        data[size] = runs
        for side in sides:
            of_side, ratios = _rows(size, side, runs)
            rows += of_side
            if side in ("firstloss", "second"):
                met = met and max(ratios) <= 1.02
                if size == "100M":
                    met = met and max(ratios[0], *ratios[19:]) <= 0.9
    return harness.Figure(NAME, GOAL, rows, met, data)


if __name__ == "__main__":
    harness.main(sys.modules[__name__])
