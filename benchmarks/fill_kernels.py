"""Random fills on one core: PyTorch's kernels, on whole tensors and in pieces, and the native ones.

Measured in thread CPU time rather than wall time, so that other load affects all sides about equally.
"""

from __future__ import annotations

import hashlib
import sys
import time

from benchmarks import harness

NAME = "random float32 fills on one core"
GOAL = "native kernels twice as fast as PyTorch's in pieces, bit-identical; the counter policy no slower than PyTorch"
KINDS = ("normal", "uniform")
PIECE = 1 << 16  # 256 KiB: fits into the second-level cache


def child(side, args):
    import torch

    from firstloss.engine.sampler import trusted
    from firstloss.rng import counter, native

    torch.set_num_threads(1)
    count = 1 << 20 if args.tiny else 1 << 26
    found = {"native": trusted(), "lanes": native.lanes(), **harness.write_bandwidth(4 * count)}
    whole = torch.ones(count)  # touched
    for kind in KINDS:
        first, second = (0.0, 0.02) if kind == "normal" else (-0.1, 0.1)
        generator = torch.Generator().manual_seed(0)
        began = time.thread_time()
        if side == "whole":
            getattr(whole, f"{kind}_")(first, second, generator=generator)
        elif side == "pieces":
            for piece in whole.split(PIECE):
                getattr(piece, f"{kind}_")(first, second, generator=generator)
        elif side == "counter":
            fill = counter.normal if kind == "normal" else counter.uniform
            fill(0, 0, 0, count, first, second, out=whole.numpy())
        elif found["native"]:
            cursor = native.Cursor(generator.get_state().numpy())
            fill = getattr(cursor, kind)
            if side == "native":
                fill(whole.data_ptr(), count, first, second)
            else:  # always the same piece: the kernel's speed without the cost of memory
                for _ in range(0, count, PIECE):
                    fill(whole.data_ptr(), PIECE, first, second)
        found[kind] = count / max(time.thread_time() - began, 1e-9)
        found["counter"] = counter.has_kernels()
        found[f"{kind} digest"] = hashlib.sha256(whole.numpy()).hexdigest() if side != "in cache" else None
    return found


def measure(args):
    runs = harness.interleaved(
        ("whole", "pieces", "native", "in cache", "counter"),
        args.rounds,
        lambda side: harness.in_child("fill_kernels", side, args),
    )
    there = runs["native"][0]["native"]
    rows = [("native kernels", f"{runs['native'][0]['lanes']} numbers at a time" if there else "none on this machine")]
    identical, faster, counted = True, {}, {}
    for kind in KINDS:
        for side, words in (
            ("whole", "PyTorch, whole tensor"),
            ("pieces", "PyTorch, in pieces"),
            ("native", "native, whole tensor"),
            ("in cache", "native, within the cache"),
            ("counter", "the counter policy, whole tensor"),
        ):
            if there or side in ("whole", "pieces", "counter"):
                rows.append((f"{kind}: {words}", f"{harness.middle(runs[side], kind) / 1e6:,.0f} M/s"))
        faster[kind] = harness.ratio(runs["native"], runs["pieces"], kind)
        rows.append((f"{kind}: native against PyTorch in pieces", f"{faster[kind]:.2f} times" if there else "-"))
        counted[kind] = harness.ratio(runs["counter"], runs["whole"], kind)
        rows.append((f"{kind}: the counter policy against PyTorch, whole tensors", f"{counted[kind]:.2f} times"))
        if there:
            identical &= len({run[f"{kind} digest"] for side in ("whole", "native") for run in runs[side]}) == 1
    # Each value takes one word of the stream, so these are also words per second. Memory bandwidth limits the speed:
    # all cores together write no more values than this.
    for how in ("touched", "fresh"):
        floor = harness.middle(runs["native"], how) / 4e6
        rows.append((f"all cores writing {how} memory", f"{floor:,.0f} M/s"))
    rows.append(("bit-identical", "yes" if identical else "NO"))
    met = bool(there) and identical and min(faster.values()) >= 2 and min(counted.values()) >= 1
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs, "faster": faster, "counter": counted})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
