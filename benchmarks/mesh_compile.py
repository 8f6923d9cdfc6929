"""Compile and run a deep Llama's training step on a mesh of eight virtual devices.

It is compared with one device, with the same step compiled as a whole, and with hand-written JAX and Flax NNX
versions that `scan` over layers. JAX is imported beforehand on all sides. Only the Flax side needs Flax: pip install
--no-deps -r requirements/bench.txt. If it is not installed, that side is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "the step of a Llama (hidden 64) with AdamW on 8 virtual devices of one CPU"
GOAL = (
    "compiling and first loss: 1.5 times one device's; 96 layers: 2 times 24; compiling no slower than JAX; "
    "0.95 of the steps per second of JAX and of the step compiled as a whole; losses within 1e-5 of one device's"
)
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
_FSDP, _TENSOR = {"fsdp": 8}, {"fsdp": 4, "tp": 2}
_SPECS = {
    "*.[qkv]_proj.weight": ("tp", "fsdp"),
    "*.o_proj.weight": ("fsdp", "tp"),
    "*.gate_proj.weight": ("tp", "fsdp"),
    "*.up_proj.weight": ("tp", "fsdp"),
    "*.down_proj.weight": ("fsdp", "tp"),
}
# name: layers, mesh, whether the step is compiled whole
SIDES = {
    "one device": (24, None, False),
    "fsdp 8": (24, _FSDP, False),
    "fsdp 8, 96 layers": (96, _FSDP, False),
    "fsdp 8, whole": (24, _FSDP, True),
    "fsdp 4 x tp 2": (24, _TENSOR, False),
    "fsdp 4 x tp 2, whole": (24, _TENSOR, True),
    "dp 2 x fsdp 4": (24, {"dp": 2, "fsdp": 4}, False),
}
_BY_HAND = {"JAX by hand": "jax_llama", "Flax NNX": "flax_scan"}  # the side and its module
_STEPS = 20


def child(side, args):
    if side in _BY_HAND:
        return _by_hand(_BY_HAND[side], args)
    import jax
    import torch

    import firstloss as fl
    from firstloss import timeline
    from firstloss.lower import segments

    layers, mesh, whole = SIDES[side]
    if whole:
        segments._SAVED = 1 << 62
    torch.manual_seed(0)
    batch = torch.randint(256, (8, 32))
    models.import_llama()
    jax.devices()
    fields = {**models.LLAMA_24_LAYERS, "num_hidden_layers": layers // (12 if args.tiny else 1)}
    clock = timeline.current()
    with tempfile.TemporaryDirectory() as artifacts:
        begin = time.perf_counter()
        backend = fl.backend("XLA", artifact_dir=artifacts, mesh=mesh)
        with backend.device:
            model = models.llama(**fields)
        if mesh is _TENSOR:
            fl.shard(model, _SPECS, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = models.training_step(model, optimizer, backend)
        losses = [step(batch).item()]
        first = time.perf_counter() - begin
        model.lm_head.weight[0, 0].item()  # waits for the whole first step
        spans = [span for span in clock.spans if span.name in ("trace", "lower", "compile")]
        losses += [step(batch).item() for _ in range(_STEPS - 1)]
        rate = _rate(lambda: step(batch), lambda loss: loss.item())
    phases = {n: sum(span.seconds for span in spans if span.name == n) for n in ("trace", "lower", "compile")}
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return {"seconds": seconds, "first": first, **phases, "losses": losses, "rate": rate}


def _by_hand(module, args):
    import jax
    import numpy as np

    written = importlib.import_module(f"benchmarks.{module}")

    fields = {**models.LLAMA_24_LAYERS, "num_hidden_layers": 24 // (12 if args.tiny else 1)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    step, state, rows = written.training_step(fields, mesh)
    batch = jax.device_put(np.random.default_rng(0).integers(0, 256, (8, 32)), rows)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    seconds = time.perf_counter() - begin
    holder = [state]
    del state

    def one():
        holder[0], loss = compiled(holder[0], batch)
        return loss

    losses = [float(one()) for _ in range(_STEPS)]
    return {"seconds": seconds, "losses": losses, "rate": _rate(one, float)}


def _rate(step, wait):
    """Steps per second: the median of some stretches."""
    rates = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(8):
            result = step()
        wait(result)
        rates.append(8 / (time.perf_counter() - begin))
    return sorted(rates)[2]


def measure(args):
    by_hand = [side for side in _BY_HAND if side != "Flax NNX" or importlib.util.find_spec("flax")]
    sides = (*SIDES, *by_hand)
    runs = harness.interleaved(sides, args.rounds, lambda side: harness.in_child("mesh_compile", side, args, DEVICES))

    def ratio(a, b, key):
        return harness.ratio(runs[a], runs[b], key)

    def difference(side):
        pairs = zip(runs[side][0]["losses"], runs["one device"][0]["losses"], strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    rows = []
    for side in sides:
        found = {key: harness.middle(runs[side], key) for key in runs[side][0] if key != "losses"}
        words = f"{found['seconds']:.2f} s"
        if "first" in found:
            words += f" (trace {found['trace']:.2f}, lower {found['lower']:.2f}, compile {found['compile']:.2f})"
            words += f", first loss {found['first']:.2f} s"
        rows.append((side, f"{words}, {found['rate']:.1f} steps/s"))
    checks = {
        "compile, mesh against one device": (ratio("fsdp 8", "one device", "seconds"), "<=", 1.5),
        "first loss, mesh against one device": (ratio("fsdp 8", "one device", "first"), "<=", 1.5),
        "compile, 96 layers against 24": (ratio("fsdp 8, 96 layers", "fsdp 8", "seconds"), "<=", 2.0),
        **{f"compile, against {side}": (ratio("fsdp 8", side, "seconds"), "<=", 1.0) for side in by_hand},
        **{f"steps per second, against {side}": (ratio("fsdp 8", side, "rate"), ">=", 0.95) for side in by_hand},
        "steps a second, against whole": (ratio("fsdp 8", "fsdp 8, whole", "rate"), ">=", 0.95),
        "the same, fsdp 4 x tp 2": (ratio("fsdp 4 x tp 2", "fsdp 4 x tp 2, whole", "rate"), ">=", 0.95),
    }
    good = {what: value <= most if how == "<=" else value >= most for what, (value, how, most) in checks.items()}
    rows += [(what, f"{value:.2f} times" + ("" if good[what] else " (missed)")) for what, (value, *_) in checks.items()]
    for side in ("fsdp 8", "fsdp 4 x tp 2", "dp 2 x fsdp 4"):
        good[side] = difference(side) <= 1e-5
        rows.append((f"relative difference of {_STEPS} losses, {side}", f"{difference(side):.1e}"))
    return harness.Figure(NAME, GOAL, rows, all(good.values()), {"runs": runs, "met": good})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
