"""Materialize one rank of 64 of a Llama of 1.1B parameters under fully_shard, against materializing all of it.

The process group is PyTorch's fake one: this process is rank 17 of 64, without any others. Both sides use the same
number of threads.
"""

from __future__ import annotations

import sys
import time

from benchmarks import harness, models

NAME = "one rank of 64 of a Llama of 1.1B parameters, Shard(0)"
GOAL = "capture and one rank take at most 3 times as long as capture and 1/64 of materializing the whole"
WORLD, RANK = 64, 17


def child(side, args):
    import torch

    import firstloss as fl

    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_1B
    models.import_llama()
    if side == "rank":
        shard = prepare()
    harness.warm_memory(6 << 30 if side == "whole" else 256 << 20, args)
    torch.manual_seed(0)
    began = time.perf_counter()
    model = fl.deferred_init(models.llama, **fields)
    found = {"capture": time.perf_counter() - began}
    if side == "rank":
        began = time.perf_counter()
        shard(model)
        found["fully_shard"] = time.perf_counter() - began
    with jumps() as jumped:
        began = time.perf_counter()
        fl.materialize_module(model)
        found["seconds"] = time.perf_counter() - began
    found["jumps"], found["jumping"] = len(jumped), sum(jumped)
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in model.parameters()]
    found["bytes"] = sum(tensor.nbytes for tensor in local)
    return found


def prepare():
    """Become rank 17 of 64; returns a function that shards a model."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import firstloss as fl

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)

    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)

    shard(fl.deferred_init(models.llama, **models.LLAMA_TINY))  # its imports
    return shard


class jumps:
    """Collects the seconds of each lookup of a generator state, over all threads."""

    def __enter__(self):
        from firstloss.rng import stream

        self.real, found = stream.Stream.state_at, []

        def timed(own, position):
            began = time.perf_counter()
            state = self.real(own, position)
            found.append(time.perf_counter() - began)
            return state

        stream.Stream.state_at = timed
        return found

    def __exit__(self, *exc):
        from firstloss.rng import stream

        stream.Stream.state_at = self.real


def measure(args):
    runs = harness.interleaved(
        ("whole", "rank"), args.rounds, lambda side: harness.in_child("one_rank_of_64", side, args)
    )
    whole, rank = runs["whole"], runs["rank"]
    share = harness.middle(whole, "seconds") / WORLD
    seconds = harness.middle(rank, "seconds")
    capture = harness.middle(rank, "capture")
    rows = [
        ("capture", f"{capture * 1e3:.0f} ms"),
        ("the whole, materialized", f"{harness.middle(whole, 'seconds') * 1e3:.0f} ms"),
        ("a 64th of that", f"{share * 1e3:.0f} ms"),
        ("fully_shard", f"{harness.middle(rank, 'fully_shard') * 1e3:.0f} ms"),
        ("one rank of 64, materialized", f"{seconds * 1e3:.0f} ms"),
        ("relative to 1/64 of the whole", f"{seconds / share:.2f} times"),
        ("capture and one rank, relative to capture and 1/64", f"{(capture + seconds) / (capture + share):.2f} times"),
        ("jumps", f"{rank[0]['jumps']}, {harness.middle(rank, 'jumping') / rank[0]['jumps'] * 1e3:.2f} ms each"),
        ("bytes of one rank", f"{rank[0]['bytes']:,}"),
        ("bytes of the whole", f"{whole[0]['bytes']:,}"),
    ]
    met = capture + seconds <= 3 * (capture + share)
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs, "share": share})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
