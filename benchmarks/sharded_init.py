"""Initialize a Llama of 1.1B parameters sharded over eight CPU devices, against the alternatives.

The alternatives initialize it on the host, in eager PyTorch or with `fl.materialize_module`, and `jax.device_put` each
weight with the same shardings. Devices that share the host's memory can use blocks of rows of the module's own memory
without a copy ("lent"): such arrays change with the module, and a step to which they are donated copies them. So "sent"
and "eager" send a copy of each weight, which is necessary if the module lives on; "lent", a whole module in ordinary
memory that only counts as sharded, is printed for comparison and is not part of the goal. If Flax is installed (it does
not have to be: `pip install flax`), its jitted initialization with sharding constraints of an equivalent model is
measured too.
"""

from __future__ import annotations

import importlib.util
import sys
import time

from benchmarks import harness, models

NAME = "Llama of 1.1B parameters on 8 devices, each with an eighth of it"
GOAL = "faster than initializing on the host and sending; 4 times as fast as Flax NNX, compilation included"
DEVICES = 8
CONSTANT = 4 << 20  # bytes per device besides its shards: executables, a block of rows, the tables of jumps


def child(side, args):
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    import numpy as np
    import torch

    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_1B
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    if side == "flax":
        from benchmarks import flax_llama

        flax_llama.initialise(models.LLAMA_TINY, mesh)  # its imports
        harness.warm_memory(10 << 30, args)
        before, began, spent = harness.resident(), time.perf_counter(), time.process_time()
        arrays = flax_llama.initialise(fields, mesh)
        jax.block_until_ready(arrays)
        return _found(arrays, began, spent, before)

    import firstloss as fl

    models.import_llama()
    fl.init_program(fl.deferred_init(models.llama, **models.LLAMA_TINY)).run(mesh)
    if side == "analysis":
        program = fl.init_program(fl.deferred_init(models.llama, **fields))
        return program.peak_bytes(mesh)
    way, peak = side.removesuffix("-peak"), side.endswith("-peak")
    if not peak:
        harness.warm_memory(10 << 30, args)
    torch.manual_seed(0)
    before, began, spent = harness.resident(), time.perf_counter(), time.process_time()
    module = models.llama(**fields) if way == "eager" else fl.deferred_init(models.llama, **fields)
    if way == "own":
        arrays = list(fl.init_program(module).run(mesh).values())
    else:
        if way != "eager":
            fl.materialize_module(module)
        arrays = _put(module, mesh, lent=way == "lent")
    jax.block_until_ready(arrays)
    return _found(arrays, began, spent, before)


def _put(module, mesh, lent):
    """Each weight, put with its sharding by the default policy."""
    import jax

    from firstloss.init import shardings

    axes = shardings.axes_of(mesh)
    arrays = []
    for tensor in [*module.parameters(), *module.buffers()]:
        spec = shardings.by_default(tuple(tensor.shape), axes)
        entries = [entry[0] if entry else None for entry in spec]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))
        host = tensor.detach().numpy()
        arrays.append(jax.device_put(host if lent else host.copy(), sharding))
    return arrays


def _found(arrays, began, spent, before):
    import jax

    held = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - spent,
        "bytes": sum(array.nbytes for array in arrays),
        "bytes_per_device": max(held.values()),
        "devices": len(jax.devices()),
        "peak": harness.peak() - before,
    }


def measure(args):
    sides = ["own", "sent", "lent", "eager"] + (["flax"] if importlib.util.find_spec("flax") else [])
    runs = harness.interleaved(sides, args.rounds, lambda side: harness.in_child("sharded_init", side, args))
    peaks = {side: harness.in_child("sharded_init", f"{side}-peak", args)["peak"] for side in sides[:3]}
    analysis = harness.in_child("sharded_init", "analysis", args)
    own = runs["own"]
    eighth = own[0]["bytes"] / DEVICES
    floor = own[0]["bytes"] / harness.write_bandwidth()["touched"]
    rows = [(f"{side}", f"{harness.middle(runs[side], 'seconds'):.2f} s") for side in sides]
    for side in sides[1:]:
        rows.append((f"{side}, of our time", f"{harness.ratio(runs[side], own, 'seconds'):.2f} times"))
        ratio = harness.ratio(runs[side], own, "processor_seconds")
        rows.append((f"{side}, CPU time relative to ours", f"{ratio:.2f} times"))
    rows.append(("floor: writing that many bytes", f"{floor:.2f} s"))
    rows.append(("bytes that a device holds, relative to an eighth", f"{own[0]['bytes_per_device'] / eighth:.3f}"))
    for side, peak in peaks.items():
        rows.append((f"{side}: peak memory per device, relative to an eighth", f"{peak / DEVICES / eighth:.3f}"))
    rows.append(("in StableHLO, by the compiler's analysis: bytes of weights per device", f"{analysis['weights']:,}"))
    rows.append(("temporary memory in addition", f"{analysis['temporary']:,}"))
    if "flax" not in runs:
        rows.append(("flax", "not installed"))
    met = all(harness.ratio(runs[side], own, "seconds") > 1 for side in ("sent", "eager"))
    for used in (own[0]["bytes_per_device"], peaks["own"] / DEVICES, sum(analysis.values())):
        met = met and used < 1.1 * eighth + CONSTANT
    if "flax" in runs:
        met = met and harness.ratio(runs["flax"], own, "seconds") >= 4
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs, "peaks": peaks, "analysis": analysis, "floor": floor})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
