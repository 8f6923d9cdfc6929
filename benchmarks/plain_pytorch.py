"""Time to first loss as a user sees it: `python train.py` in plain PyTorch, with torch.compile, and with Firstloss.

Each side is a separate script in a fresh process. Seconds count from the start of the process until the loss is
printed, imports included, on untouched memory (`--warm`: on memory that has been touched before).

- "floor": the same imports, all weights drawn (`fl.deferred_init`, `fl.materialize_module`), and the forward pass in
  PyTorch: the time that a first loss takes without a step being traced or compiled.
- "second start": Firstloss with the artifact folder of an earlier start.
- "compiled": Firstloss with `first_loss="compiled"`.
- the whole first step: a separate process, which reads a weight after its first step.
- break-even: the first step whose loss comes sooner than plain PyTorch's loss of the same step.

`torch.compile` takes minutes: it is measured once, if it is listed in FIRSTLOSS_BENCHMARK_SIDES="plain compile floor
firstloss second compiled"; FIRSTLOSS_BENCHMARK_SIZES="100M" skips the other size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import harness, models
from firstloss import malloc_settings

NAME = "time to first loss as a user has it, Llama, SGD, import counted, fresh processes"
GOAL = (
    "at most 0.9 of plain PyTorch's time at 100M parameters, 0.35 at 1.1B; there also 0.1 of torch.compile's and 1.25 "
    "times the floor; a second start at most 1.1 times the floor"
)
SIDES = {
    "plain": "plain PyTorch",
    "compile": "torch.compile",
    "floor": "floor",
    "firstloss": "Firstloss",
    "second": "Firstloss, second start",
    "compiled": 'Firstloss, first_loss="compiled"',
}
STEPS = {"tiny": 3, "100M": 24, "1.1B": 6}

SCRIPT = """
import json, os, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
side, fields, tokens, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
if "FIRSTLOSS_BENCHMARK_WARM" in os.environ:
    began = time.time()
    torch.empty(int(os.environ["FIRSTLOSS_BENCHMARK_WARM"]), dtype=torch.uint8).fill_(1)
    print("LEFT OUT", time.time() - began, flush=True)
batch = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
if side == "floor":
    import firstloss as fl
    model = fl.materialize_module(fl.deferred_init(LlamaForCausalLM, LlamaConfig(**fields)))
    def step(batch):
        with torch.no_grad():
            return model(input_ids=batch, labels=batch).loss
    steps = 1
elif side in ("plain", "compile"):
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
for i in range(steps or 1):
    print("LOSS", time.time(), step(batch).item(), time.time(), flush=True)
if not steps:  # the whole first step: the last weight to be updated is read
    [weight.detach().sum().item() for weight in model.parameters()]
    print("STEP", time.time(), flush=True)
"""


def _start(side, fields, steps, folder, args):
    """The lines that a script has printed, by their first words, and the time when its process started."""
    environment = dict(os.environ)
    if args.warm:
        environment = {
            **environment,
            **malloc_settings.environment(malloc_settings.HUGE_PAGES, malloc_settings.KEPT, malloc_settings.ONE_HEAP),
        }
        environment["FIRSTLOSS_BENCHMARK_WARM"] = str(1 << 24 if args.tiny else 14 << 30)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # otherwise it would reuse earlier runs' work
    environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    command = [sys.executable, "-c", SCRIPT, side, json.dumps(fields), "128", folder, str(steps)]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{side}: status {done.returncode}: {done.stderr[-2000:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    began += sum(float(line[2]) for line in lines if line[0] == "LEFT")
    return {word: [line for line in lines if line[0] == word] for word in ("LOSS", "STEP")}, began


def _run(side, fields, steps, kept, args):
    with tempfile.TemporaryDirectory() as own:
        folder = kept if side == "second" else own
        lines, began = _start(side, fields, steps, folder, args)
        at = [float(line[3]) - began for line in lines["LOSS"]]
        found = {
            "seconds": at[0],
            "second": at[min(1, len(at) - 1)],
            "at": at,
            "losses": [float(line[2]) for line in lines["LOSS"]],
        }
    if side in ("plain", "firstloss", "second"):
        with tempfile.TemporaryDirectory() as own:
            lines, began = _start(side, fields, 0, kept if side == "second" else own, args)
            found["step"] = float(lines["STEP"][0][1]) - began
    return found


def _later(at):
    """Seconds per step, in the second half of the steps."""
    half = len(at) // 2
    return (at[-1] - at[half]) / (len(at) - 1 - half) if len(at) > 2 else float("nan")


def _break_even(plain, ours):
    """The first step whose loss is earlier than plain PyTorch's loss of the same step."""
    pairs = zip(plain["at"], ours["at"], strict=True)
    return next((n + 1 for n, (a, b) in enumerate(pairs) if n and b <= a), None)


def add_arguments(parser):
    parser.add_argument("--warm", action="store_true", help="use memory that has been touched before, on all sides")


def measure(args):
    tables, data, met = [], {}, True
    sizes = {"tiny": models.LLAMA_TINY} if args.tiny else {"100M": models.LLAMA_100M, "1.1B": models.LLAMA_1B}
    chosen = os.environ.get("FIRSTLOSS_BENCHMARK_SIZES", "").split()
    sides = os.environ.get("FIRSTLOSS_BENCHMARK_SIDES", "plain floor firstloss second").split()
    for size, fields in sizes.items():
        if chosen and size not in chosen and not args.tiny:
            continue
        steps = STEPS[size]
        with tempfile.TemporaryDirectory() as kept:
            if "second" in sides:
                _start("firstloss", fields, 2, kept, args)
            often = [side for side in sides if side != "compile"]
            runs = harness.interleaved(
                often,
                args.rounds,
                lambda side, fields=fields, kept=kept, steps=steps: _run(side, fields, steps, kept, args),
            )
            if "compile" in sides:
                runs["compile"] = [_run("compile", fields, min(steps, 6), kept, args)]
        data[size] = runs
        first = {side: harness.middle(runs[side], "seconds") for side in sides}
        for side in sides:
            parts = [f"{first[side]:.2f}"]
            if side != "floor":
                parts += [f"{harness.middle(runs[side], 'second'):.2f}"]
                later = harness.median(_later(run["at"]) for run in runs[side])
                parts += [f"then {later:.2f} a step"]
            if "step" in runs[side][0]:
                parts += [f"the whole first step after {harness.middle(runs[side], 'step'):.2f}"]
            share = f"{first[side] / first['plain']:.2f} of plain PyTorch's time"
            if "floor" in first:
                share += f", {first[side] / first['floor']:.2f} of the floor"
            tables.append((f"{size}, {SIDES[side]}: first and second loss", f"{', '.join(parts)} s ({share})"))
        for side in ("firstloss", "second"):
            if side in sides:
                even = [_break_even(a, b) for a, b in zip(runs["plain"], runs[side], strict=True)]
                words = [str(n) if n else f"later than {steps}" for n in even]
                tables.append((f"{size}, {SIDES[side]}: break-even at step, each round", ", ".join(words)))
        if "firstloss" in sides:
            met = met and first["firstloss"] / first["plain"] <= (0.35 if size == "1.1B" else 0.9)
            equal = all(run["losses"][0] == runs["plain"][0]["losses"][0] for run in runs["firstloss"])
            met = met and equal
            tables.append((f"{size}: the first loss is bit-identical to plain PyTorch's", "yes" if equal else "no"))
            if size == "1.1B" and "floor" in sides:
                met = met and first["firstloss"] <= 1.25 * first["floor"]
            if size == "1.1B" and "compile" in sides:
                met = met and first["firstloss"] <= 0.1 * first["compile"]
        if "second" in sides and "floor" in sides:
            met = met and first["second"] <= 1.1 * first["floor"]
    return harness.Figure(NAME, GOAL, tables, met, data)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
