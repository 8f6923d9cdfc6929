"""A Llama of 1.1B parameters on eight CPU devices, cut eight ways: each device's own shards, against the other ways.

The other ways: construct it in eager PyTorch and `jax.device_put` each weight with the same shardings; the same with
`fl.materialize_module` in the place of the eager constructor; and Flax NNX's jitted initialisation with sharding
constraints, of an equivalent model, where Flax is installed (it need not be: `pip install flax`).
"""

from __future__ import annotations

import importlib.util
import sys
import time

from benchmarks import harness, models

NAME = "Llama of 1.1B parameters on 8 devices, each with an eighth of it"
GOAL = "faster than making it on the host and sending it; 4 times as fast as Flax NNX, compiling included"
DEVICES = 8


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
    harness.warm_memory(10 << 30, args)
    torch.manual_seed(0)
    before, began, spent = harness.resident(), time.perf_counter(), time.process_time()
    if side == "eager":
        module = models.llama(**fields)
    else:
        module = fl.deferred_init(models.llama, **fields)
    if side == "own":
        arrays = list(fl.init_program(module).run(mesh).values())
    else:
        if side == "host":
            fl.materialize_module(module)
        arrays = _sent(module, mesh)
    jax.block_until_ready(arrays)
    return _found(arrays, began, spent, before)


def _sent(module, mesh):
    """Each weight sent with the sharding that the default policy gives it."""
    import jax

    from firstloss.init import shardings
    from firstloss.lower.program import constant

    axes = shardings.axes_of(mesh)
    arrays = []
    for tensor in [*module.parameters(), *module.buffers()]:
        spec = shardings.by_default(tuple(tensor.shape), axes)
        entries = [entry[0] if entry else None for entry in spec]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))
        arrays.append(jax.device_put(constant(tensor), sharding))
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
    }


def measure(args):
    sides = ["own", "host", "eager"] + (["flax"] if importlib.util.find_spec("flax") else [])
    runs = harness.interleaved(sides, args.rounds, lambda side: harness.in_child("sharded_init", side, args))
    own = runs["own"]
    eighth = own[0]["bytes"] / DEVICES
    floor = own[0]["bytes"] / harness.write_bandwidth()["touched"]
    rows = [(f"{side}", f"{harness.middle(runs[side], 'seconds'):.2f} s") for side in sides]
    for side in sides[1:]:
        rows.append((f"{side}, of our time", f"{harness.ratio(runs[side], own, 'seconds'):.1f} times"))
        ratio = harness.ratio(runs[side], own, "processor_seconds")
        rows.append((f"{side}, of our processor's time", f"{ratio:.1f} times"))
    rows += [
        ("the floor: writing that many bytes", f"{floor:.2f} s"),
        ("bytes of a device, of an eighth", f"{own[0]['bytes_per_device'] / eighth:.3f}"),
    ]
    if "flax" not in runs:
        rows.append(("flax", "not installed"))
    met = all(harness.ratio(runs[side], own, "seconds") > 1 for side in ("host", "eager"))
    met = met and own[0]["bytes_per_device"] < 1.1 * eighth + (1 << 20)
    if "flax" in runs:
        met = met and harness.ratio(runs["flax"], own, "seconds") >= 4
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs, "floor": floor})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
