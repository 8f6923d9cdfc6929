"""Capture and materialize a Llama of 1.1B parameters, against its eager construction."""

from __future__ import annotations

import hashlib
import sys
import time

from benchmarks import harness, models

NAME = "materialize a Llama of 1.1B parameters, float32"
GOAL = "5 times faster than eager construction, bit-identical"


def child(side, args):
    import torch

    import firstloss as fl

    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_1B
    models.import_llama()
    found = {}
    if side == "deferred":
        found["bandwidth"] = harness.write_bandwidth(1 << 24 if args.tiny else 1 << 30)
    harness.warm_memory(6 << 30, args)
    torch.manual_seed(0)
    began = time.perf_counter()
    if side == "eager":
        model = models.llama(**fields)
    else:
        model = fl.deferred_init(models.llama, **fields)
        found["capture"] = time.perf_counter() - began
        fl.materialize_module(model)
    found["seconds"] = time.perf_counter() - began

    digest = hashlib.sha256(torch.get_rng_state().numpy())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    found["bytes"] = sum(tensor.nbytes for tensor in model.parameters())
    found["parameters"] = sum(tensor.numel() for tensor in model.parameters())
    found["digest"] = digest.hexdigest()
    return found


def measure(args):
    runs = harness.interleaved(
        ("eager", "deferred"), args.rounds, lambda side: harness.in_child("materialize_llama_1b", side, args)
    )
    eager, deferred = runs["eager"], runs["deferred"]
    faster = harness.ratio(eager, deferred, "seconds")
    identical = len({run["digest"] for run in eager + deferred}) == 1
    size = deferred[0]["bytes"]
    floors = {kind: size / harness.median(run["bandwidth"][kind] for run in deferred) for kind in ("touched", "fresh")}
    rows = [
        ("memory", "as the system hands it out" if args.fresh else "written before"),
        ("parameters", f"{deferred[0]['parameters']:,}"),
        ("eager construction", f"{harness.middle(eager, 'seconds'):.2f} s"),
        ("deferred: capture", f"{harness.middle(deferred, 'capture'):.2f} s"),
        ("deferred: capture and materialize", f"{harness.middle(deferred, 'seconds'):.2f} s"),
        ("floor: bytes over write bandwidth, touched memory", f"{floors['touched']:.2f} s"),
        ("floor: bytes over write bandwidth, fresh memory", f"{floors['fresh']:.2f} s"),
        ("faster", f"{faster:.2f} times"),
        ("bit-identical, generator too", "yes" if identical else "NO"),
    ]
    return harness.Figure(
        NAME, GOAL, rows, identical and faster >= 5, {"runs": runs, "ratio": faster, "floors": floors}
    )


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
