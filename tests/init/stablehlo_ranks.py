"""One process of test_stablehlo.py: computes its own shards, and compares them with eager values."""

from __future__ import annotations

import os
import sys

import jax
import torch

import firstloss as fl
from tests.init.stablehlo_devices import expected_of, program_of, same
from tests.init.varied_model import Layers


def main(engine: str, path: str) -> None:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    jax.config.update("jax_num_cpu_devices", 4 // world)
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", world, rank)
    assert jax.device_count() == 4 and jax.local_device_count() == 4 // world
    torch.set_num_threads(1)
    expected = expected_of(Layers)
    _, program = program_of(Layers)
    if engine == "module":
        arrays = fl.run_stablehlo(path)
        arrays["head.weight"] = arrays["embedding.weight"]
    else:
        arrays = program.run({"fsdp": 4}, engine=engine)
    cut = arrays["embedding.weight"]
    assert len(cut.addressable_shards) == 4 // world and cut.addressable_shards[0].data.shape == (24, 32)
    wrong = same(arrays, expected)
    assert not wrong, wrong
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
