"""Time to first loss of a Llama of 1.1B parameters with momentum, for each way to get weights onto the device, twice.

Peak memory is measured in separate processes, from construction until the weights are on the device, relative to the
process's memory before, both in total and for host memory in addition to the device's arrays, which are on this CPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time

from benchmarks import harness, models

NAME = "time to first loss, Llama of 1.1B parameters, SGD with momentum, batch 1 x 128, import left out"
GOAL = "60% less time than eager construction and move; 80% less at a second start"
WAYS = {
    "eager": "constructed eagerly, then moved",
    "at-once": "lazy_initialization = False: each weight moved when constructed",
    "lazy": "Firstloss, first start",
    "lazy-again": "Firstloss, second start (compiled steps cached)",
}
PLACED = ("eager", "at-once", "lazy")
TOKENS = 128
_ARTIFACTS = "FIRSTLOSS_BENCHMARK_ARTIFACTS"


def child(side, args):
    import jax  # noqa: F401  (the import is left out, on all sides)
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import firstloss as fl
    from firstloss import timeline

    way, _, memory = side.partition(" ")
    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_1B
    if way == "floors":
        harness.warm_memory(6 << 30, args)
        return floors(fields)
    if memory:
        return placed(way, fields)
    batch = torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    harness.warm_memory(12 << 30, args)
    clock = timeline.current()
    clock.add("import", start=0.0)
    began = clock.now()
    backend = fl.backend("XLA", artifact_dir=os.environ[_ARTIFACTS])
    torch.manual_seed(0)
    model = construct(way, fields, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = models.training_step(model, optimizer, backend)
    loss = step(batch).item()
    seconds = clock.now() - began
    phases = {row.name: row.seconds for row in clock.table() if row.name != "import"}
    next(model.parameters())[0, 0].item()  # waits for the rest of the first step
    whole = clock.now() - began
    return {"seconds": seconds, "whole": whole, "loss": loss, "phases": phases}


def construct(way, fields, backend):
    from firstloss import timeline

    backend.device.config.lazy_initialization = way.startswith("lazy")
    if way == "eager":
        with timeline.span("construct"):
            return models.llama(**fields)
    with backend.device:
        return models.llama(**fields)


def placed(way, fields):
    """Peak memory until the weights are on the device: of the process, and the part that was not the device's."""
    import jax
    import torch

    import firstloss as fl

    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts)
        # objects created once: imports, caches, threads
        fl.compile(construct(way, models.LLAMA_TINY, backend), backend)
        backend.models.clear()
        before = harness.settled()
        harness.reset_peak()
        done, host = threading.Event(), [0]

        def watch():
            while not done.wait(0.002):
                device = sum(array.nbytes for array in jax.live_arrays())
                host[0] = max(host[0], harness.resident() - before - device)

        watcher = threading.Thread(target=watch)
        watcher.start()
        torch.manual_seed(0)
        model = construct(way, fields, backend)
        fl.compile(model, backend)
        for parameter in model.parameters():
            parameter._storage.resident.array()
        done.set()
        watcher.join()
        peak = harness.peak() - before
        weights = sum(p.numel() * p.itemsize for p in model.parameters())
        largest = max(p.numel() * p.itemsize for p in model.parameters())
    return {"peak": peak, "host": max(host[0], peak - weights), "weights": weights, "largest": largest}


def floors(fields):
    """Lower bounds of the time to first loss: bytes written per second, operations per second of a matrix product by
    PyTorch and by XLA, and the seconds that all cores need for the weights."""
    import jax
    import torch

    import firstloss as fl

    x = torch.randn(TOKENS, 2048)
    weights = [torch.randn(5632, 2048) for _ in range(8)]  # more than a cache holds

    def speed(multiply, x, weights):
        def once(weight):
            began = time.perf_counter()
            done = multiply(x, weight)
            getattr(done, "block_until_ready", lambda: None)()
            return 2 * TOKENS * 2048 * 5632 / (time.perf_counter() - began)

        return harness.median([once(weight) for _ in range(4) for weight in weights][len(weights) :])

    found = {"bandwidth": harness.write_bandwidth(), "PyTorch's": speed(lambda x, w: torch.mm(x, w.t()), x, weights)}
    product = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    found["XLA's"] = speed(product, jax.numpy.asarray(x), [jax.numpy.asarray(weight) for weight in weights])
    torch.manual_seed(0)
    model = fl.deferred_init(models.llama, **fields)
    began = time.perf_counter()
    fl.materialize_module(model)
    return {**found, "made": time.perf_counter() - began}


def run(side, args, artifacts):
    os.environ[_ARTIFACTS] = os.path.join(artifacts, side.removesuffix("-again"))
    if side != "lazy-again":
        shutil.rmtree(os.environ[_ARTIFACTS], ignore_errors=True)
    return harness.in_child("first_loss_ways", side, args)


def measure(args):
    bounds = harness.in_child("first_loss_ways", "floors", args)
    memory = {way: harness.in_child("first_loss_ways", f"{way} memory", args, harness.EXACT) for way in PLACED}
    with tempfile.TemporaryDirectory() as artifacts:
        runs = harness.interleaved(tuple(WAYS), args.rounds, lambda side: run(side, args, artifacts))
    less = {side: 1 - 1 / harness.ratio(runs["eager"], runs[side], "seconds") for side in WAYS if side != "eager"}
    weights = memory["lazy"]["weights"]
    rows = [("memory", "as the system hands it out" if args.fresh else "written before")]
    for side, words in WAYS.items():
        rows.append((words, f"{harness.middle(runs[side], 'seconds'):.2f} s"))
        if side in less:
            rows.append(("  less than the eager way", f"{100 * less[side]:.0f}%"))
        rows += [(f"  {name}", f"{seconds:.2f} s") for name, seconds in runs[side][-1]["phases"].items()]
        rows.append(("  the whole first step done", f"{harness.middle(runs[side], 'whole'):.2f} s"))
        if side in memory:
            rows.append(("  peak memory until the weights are there", gigabytes(memory[side]["peak"])))
            rows.append(("  of it on the host", gigabytes(memory[side]["host"])))
    losses = {run["loss"] for side in WAYS for run in runs[side]}
    difference = (max(losses) - min(losses)) / max(losses)
    written = {kind: weights / rate for kind, rate in bounds["bandwidth"].items()}
    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_1B
    multiplied = weights / 4 - fields["vocab_size"] * fields["hidden_size"]  # the embedding is a lookup
    forward = {whose: 2 * multiplied * TOKENS / bounds[whose] for whose in ("PyTorch's", "XLA's")}
    least = bounds["made"] + forward["XLA's"]
    rows += [
        ("the weights", f"{gigabytes(weights)}, the largest {gigabytes(memory['lazy']['largest'])}"),
        ("floor: the weights over write bandwidth, touched memory", f"{written['touched']:.2f} s"),
        ("floor: the weights over write bandwidth, fresh memory", f"{written['fresh']:.2f} s"),
        *(
            (f"floor: the forward pass's matrix products at the speed of {whose}", f"{forward[whose]:.2f} s")
            for whose in forward
        ),
        ("floor: the weights drawn on all cores, without anything else", f"{bounds['made']:.2f} s"),
        (
            "lower bound of any start: the last two; relative to eager construction",
            f"{least:.2f} s; {100 * (1 - least / harness.middle(runs['eager'], 'seconds')):.0f}%",
        ),
        ("relative difference of the first losses", f"{difference:.1e}"),
    ]
    met = less["lazy"] >= 0.6 and less["lazy-again"] >= 0.8 and difference < 1e-4
    data = {
        "runs": runs,
        "less": less,
        "memory": memory,
        "floors": {**bounds, "written": written, "forward": forward, "least": least},
    }
    return harness.Figure(NAME, GOAL, rows, met, data)


def gigabytes(count):
    return f"{count / 1e9:.2f} GB"


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
