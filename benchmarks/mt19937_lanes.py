"""PyTorch's random stream computed by XLA in lanes on one core, against PyTorch's own kernels on one core."""

from __future__ import annotations

import os
import sys
import time

from benchmarks import harness

NAME = "MT19937 in StableHLO, one core"
GOAL = "as many words per second as PyTorch's uniform_"
COUNT = 1 << 24
FILLS = {
    "uniform": ({"low": 0.0, "high": 1.0}, lambda tensor: tensor.uniform_()),
    "normal": ({"mean": 0.0, "std": 0.02}, lambda tensor: tensor.normal_(0.0, 0.02)),
}


def child(side, args):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import jax
    import numpy as np
    import torch

    from firstloss.lower.mt19937 import draw
    from firstloss.lower.mt19937_fills import kernel
    from firstloss.rng.stream import Stream

    torch.set_num_threads(1)
    count = 1 << 18 if args.tiny else COUNT
    target = torch.empty(count)
    origin = Stream.from_state(torch.Generator().manual_seed(0).get_state().numpy())
    found = {}
    with jax.enable_x64(True):
        # A CPU needs only one lane, which computes 227 words at once.
        windows = jax.numpy.asarray(origin._block(0)[None])
        for name, (arguments, eager) in FILLS.items():
            made = kernel(name, torch.float32, arguments)
            lanes = jax.jit(lambda w, made=made: draw(w, count, made.emit, made.words_each, made.block)[0])
            lanes(windows).block_until_ready()
            times = {"xla": [], "torch": []}
            for _ in range(3 if args.tiny else 15):  # interleaved, so that other load affects both
                began = time.perf_counter()
                out = lanes(windows).block_until_ready()
                times["xla"].append(time.perf_counter() - began)
                began = time.perf_counter()
                eager(target)
                times["torch"].append(time.perf_counter() - began)
            for way, seconds in times.items():
                found[f"{name}_{way}"] = count / min(seconds)
        generator = torch.Generator().manual_seed(0)
        found["same"] = bool(np.array_equal(out[0], torch.empty(count).normal_(0.0, 0.02, generator=generator)))
    return found


def measure(args):
    runs = [harness.in_child("mt19937_lanes", "both", args) for _ in range(args.rounds)]
    rows, ratios = [], {}
    for name in FILLS:
        ratios[name] = sorted(run[f"{name}_xla"] / run[f"{name}_torch"] for run in runs)[len(runs) // 2]
        for way in ("xla", "torch"):
            rows.append((f"{name} by {way}", f"{harness.middle(runs, f'{name}_{way}') / 1e6:.0f} million a second"))
        rows.append((f"{name}, of PyTorch's", f"{ratios[name]:.2f} times"))
    rows.append(("normals are bit-identical to PyTorch's", str(all(run["same"] for run in runs))))
    return harness.Figure(NAME, GOAL, rows, ratios["uniform"] >= 1, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
