"""`save_initialized` of a Llama, against writing the same bytes sequentially, and its memory.

FIRSTLOSS_SAVE_GB is the number of gigabytes to write (default 4), FIRSTLOSS_SAVE_FOLDER the folder (default: the
current one). The files are removed at the end.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import threading
import time

from benchmarks import harness, models

NAME = "save a Llama, float32, straight to safetensors"
GOAL = "under 2 GB resident, at least 70% of the speed of sequential writing"
GIGABYTES = int(os.environ.get("FIRSTLOSS_SAVE_GB", "4"))
FOLDER = os.environ.get("FIRSTLOSS_SAVE_FOLDER")  # not the system's temporary folder, which may be in memory

# 0.81 GB per layer and 1.05 GB for the rest, in float32.
_WIDE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def child(side, args):
    import torch

    import firstloss as fl

    fields = models.LLAMA_TINY if args.tiny else {**_WIDE, "num_hidden_layers": max(1, round((GIGABYTES - 1) / 0.81))}
    models.import_llama()
    with tempfile.TemporaryDirectory(dir=FOLDER or os.getcwd(), prefix="save-benchmark-") as folder:
        torch.manual_seed(0)
        began = time.perf_counter()
        model = fl.deferred_init(models.llama, **fields)
        captured = time.perf_counter() - began
        size = sum(tensor.nbytes for tensor in model.state_dict().values())
        free = shutil.disk_usage(folder).free
        if size * 1.1 > free:
            sys.exit(f"the weights take {size:,} bytes, and {free:,} are free in {folder}")
        peak = _Peak()
        before = peak.highest
        began = time.perf_counter()
        if side == "save":
            fl.save_initialized(model, folder)
        else:
            write_plainly(os.path.join(folder, "plain"), size, direct=side == "direct")
        seconds = time.perf_counter() - began
        return {
            "bytes": size,
            "capture": captured,
            "seconds": seconds,
            "resident": peak.stop(),
            "resident before": before,
            "cpu": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
        }


class _Peak:
    """The peak memory of this process from now on."""

    def __init__(self):
        self.highest = harness.resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self):
        while not self._stop.wait(0.02):
            self.highest = max(self.highest, harness.resident())

    def stop(self):
        self._stop.set()
        self._thread.join()
        return self.highest


def write_plainly(path, size, direct):
    """Write `size` bytes front to back, until they are on disk.

    It repeats the same 2 MiB, which stay in the cache: bytes from memory are written some 10% slower.
    """
    from firstloss.init.disk.direct_file import BLOCK, DirectFile, aligned

    data = aligned(2 << 20).random_()
    out = DirectFile(path, direct=direct)
    for begin in range(0, size, len(data)):
        out.write(data[: -(-min(len(data), size - begin) // BLOCK) * BLOCK], begin)
    out.end_at(size)
    out.close()


def measure(args):
    runs = harness.interleaved(
        ("save", "direct", "plain"), args.rounds, lambda side: harness.in_child("save_initialized", side, args)
    )
    save, direct, plain = (runs[side] for side in ("save", "direct", "plain"))
    size = save[0]["bytes"]
    against_direct, against_plain = (harness.ratio(way, save, "seconds") for way in (direct, plain))
    resident = max(run["resident"] for run in save)

    def speed(side):
        return f"{size / harness.middle(side, 'seconds') / 1e9:.2f} GB/s"

    rows = [
        ("bytes", f"{size:,}"),
        ("capture", f"{harness.middle(save, 'capture'):.2f} s"),
        ("save_initialized, until it is on disk", f"{harness.middle(save, 'seconds'):.2f} s"),
        ("its speed", speed(save)),
        ("sequential writing through the page cache", speed(plain)),
        ("sequential writing with O_DIRECT", speed(direct)),
        ("relative to writing through the page cache", f"{against_plain:.0%}"),
        ("relative to writing with O_DIRECT", f"{against_direct:.0%}"),
        ("peak resident memory", f"{resident / 1e9:.2f} GB"),
        ("of that before the save", f"{harness.middle(save, 'resident before') / 1e9:.2f} GB"),
    ]
    # The faster way counts as the speed of plain writing.
    met = resident < 2e9 and min(against_direct, against_plain) >= 0.7
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs, "direct": against_direct, "plain": against_plain})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
