"""Losses of the demo over 20 steps, against eager PyTorch from the same seed, in float32."""

from __future__ import annotations

import json
import sys
import tempfile

from benchmarks import harness

NAME = "losses over 20 steps against eager PyTorch training, float32"
GOAL = "relative difference under 1e-4 at every step"


def measure(args):
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "firstloss", "demo", "--steps", "20", "--out", out, "--json"]
        demo = json.loads(harness.output_of(command + (["--size", "tiny"] if args.tiny else [])))
    losses = demo["losses"]
    pairs = list(zip(losses["firstloss"], losses["pytorch"], strict=True))
    differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    worst = max(range(len(differences)), key=differences.__getitem__)
    rows = [
        ("first loss: Firstloss, PyTorch", f"{pairs[0][0]:.6f}, {pairs[0][1]:.6f}"),
        ("last loss: Firstloss, PyTorch", f"{pairs[-1][0]:.6f}, {pairs[-1][1]:.6f}"),
        ("largest relative difference", f"{differences[worst]:.1e} at step {worst + 1}"),
    ]
    return harness.Figure(NAME, GOAL, rows, differences[worst] < 1e-4, {"losses": losses, "differences": differences})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
