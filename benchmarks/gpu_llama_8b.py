"""Initialize a Llama of 8B parameters in place on a GPU, against eager construction on that GPU and on the CPU.

Weights are bfloat16.

Firstloss's time includes capture, compilation and drawing on the GPU, under both random policies. Under "eager" the
weights are those that eager PyTorch makes on the CPU, except for the last place of values that pass through a
logarithm; eager construction on the GPU draws different ones. The floor is the time to write as many bytes to the
GPU's memory.

Without a GPU it prints one line and exits with status 77. `--tiny` also runs on a CPU.
"""

from __future__ import annotations

import sys
import time

from benchmarks import harness, models

NAME = "Llama of 8B parameters, bfloat16, made on a GPU"
GOAL = "print both ratios and the floor; weights of the eager policy match the CPU's to one unit in the last place"
WEIGHTS = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
FIRST = 2000  # elements of each that are compared
PLACE = 2.0**-7  # one unit in the last place of bfloat16, relative, at most


def child(side, args):
    import jax

    device = jax.devices()[0]
    if side == "look":
        return {"platform": device.platform, "device": device.device_kind}
    import torch

    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_8B
    torch.set_default_dtype(torch.bfloat16)
    models.import_llama()
    if side in ("eager", "counter"):
        return _ours(side, fields, device, 1 << 24 if args.tiny else 1 << 30)
    gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if side == "on the GPU" and gpu.type == "cpu" and not args.tiny:
        return {}  # a PyTorch without CUDA
    if side == "on the CPU":
        harness.warm_memory(18 << 30, args)
    torch.ones(1, device=gpu) + 1  # CUDA is initialized
    torch.manual_seed(0)
    began = time.perf_counter()
    with gpu if side == "on the GPU" else torch.device("cpu"):
        model = models.llama(**fields)
    _wait(gpu)
    found = {"seconds": time.perf_counter() - began}
    if side == "on the CPU":
        found["first"] = {name: model.state_dict()[name].flatten()[:FIRST].tolist() for name in WEIGHTS}
        model.to(gpu)
        _wait(gpu)
        found["moved"] = time.perf_counter() - began
    return found


def _ours(policy, fields, device, written):
    import jax
    import jax.numpy as jnp
    import torch

    import firstloss as fl

    def capture(**fields):
        torch.manual_seed(0)
        with fl.deferred(rng=policy):
            return fl.init_program(models.llama(**fields))

    jax.block_until_ready(capture(**models.LLAMA_TINY).run(engine="xla"))  # imports, and the GPU is initialized
    began = time.perf_counter()
    program = capture(**fields)
    captured = time.perf_counter() - began
    arrays = program.run(engine="xla")
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "capture": captured,
        "bytes": sum(array.nbytes for name, array in arrays.items() if program.recipes[name].name == name),
        "on": device.platform,
        "first": {name: arrays[name].reshape(-1)[:FIRST].astype(jnp.float32).tolist() for name in WEIGHTS},
        "bandwidth": _bandwidth(written),
    }


def _wait(device):
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _bandwidth(size):
    """Bytes per second that the device writes, in arrays of `size`."""
    import jax
    import jax.numpy as jnp

    write = jax.jit(lambda value: jnp.full(size // 4, value, jnp.float32))
    seconds = []
    for value in range(6):  # the first call compiles
        began = time.perf_counter()
        write(float(value)).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return size / harness.median(seconds[1:])


def measure(args):
    found = harness.in_child("gpu_llama_8b", "look", args)
    if found["platform"] != "gpu" and not args.tiny:
        why = f"JAX finds no GPU here, only {found['device']} ({found['platform']})"
        return harness.Figure(NAME, GOAL, [("not measured", why)], None, found)
    sides = ("eager", "counter", "on the GPU", "on the CPU")
    runs = harness.interleaved(sides, args.rounds, lambda side: harness.in_child("gpu_llama_8b", side, args))
    rows = [("device", found["device"])]
    for policy in ("eager", "counter"):
        ours = runs[policy]
        rows.append((f"rng={policy!r}: capture, compile and draw", f"{harness.middle(ours, 'seconds'):.2f} s"))
        for side in sides[2:]:
            if all(run for run in runs[side]):
                times = harness.ratio(runs[side], ours, "seconds")
                rows.append((f"rng={policy!r}: faster than eager construction {side}", f"{times:.2f} times"))
    for side in sides[2:]:
        some = all(run for run in runs[side])
        seconds = f"{harness.middle(runs[side], 'seconds'):.2f} s" if some else "this PyTorch has no CUDA"
        rows.append((f"eager construction {side}", seconds))
    rows.append(("and moved to the device", f"{harness.middle(runs['on the CPU'], 'moved'):.2f} s"))
    floor = runs["eager"][0]["bytes"] / harness.middle(runs["eager"], "bandwidth")
    rows.append(("floor: writing that many bytes on the device", f"{floor * 1e3:.3g} ms"))
    same = max(_difference(a["first"], b["first"]) for a, b in zip(runs["eager"], runs["on the CPU"], strict=True))
    rows.append(("rng='eager': largest relative difference from eager on the CPU", f"{same:.2g}"))
    return harness.Figure(NAME, GOAL, rows, same <= PLACE, {"runs": _without_values(runs), "floor": floor})


def _difference(ours, theirs):
    pairs = [pair for name in WEIGHTS for pair in zip(ours[name], theirs[name], strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def _without_values(runs):
    return {side: [{k: v for k, v in run.items() if k != "first"} for run in found] for side, found in runs.items()}


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
