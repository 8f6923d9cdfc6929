"""The part of test_stablehlo.py that needs eight devices: `python -m tests.init.stablehlo_devices`."""

from __future__ import annotations

import json
import sys
import warnings

import jax
import numpy as np
import torch

import firstloss as fl
from firstloss.lower.dtypes import constant
from tests.init.normals import as_near_as_possible
from tests.init.varied_model import Odd, OddOnDevices

MESHES = {
    "one": (None, None),
    "fsdp": ({"fsdp": 8}, None),
    "rows and columns": (
        {"data": 2, "tp": 4},
        {"linear.weight": ("data", "tp"), "after": (None, "data", "tp"), "scale": (), "*": ("tp",)},
    ),
    "columns": ({"tp": 8}, {"linear.weight": (None, "tp"), "after": (None, "tp"), "embed*": (None, "tp"), "*": ()}),
}
FLOAT32_ULPS = 8  # of values that are computed by a decomposition


def program_of(kind, rng="eager"):
    torch.manual_seed(3)
    torch.randn(7)
    torch.rand(5)  # the generator is within a block, with a normal cached
    with fl.deferred(rng=rng):
        module = kind()
    return module, fl.init_program(module)


def expected_of(kind, rng="eager"):
    module, _ = program_of(kind, rng)
    fl.materialize_module(module)
    return {name: constant(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}


def same(arrays, expected, exactly=True, by_xla=True):
    """Names of the weights that differ on any device."""
    assert arrays.keys() == expected.keys()
    assert all(arrays["head.weight"] is arrays["embedding.weight"] for _ in "1")
    wrong = []
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            actual, want = np.asarray(shard.data), np.array(expected[name][shard.index])
            assert actual.dtype == want.dtype and actual.shape == want.shape, name
            close = as_near_as_possible(actual, want) if by_xla else actual.tobytes() == want.tobytes()
            if not exactly and not close and name in INEXACT:
                close = np.allclose(actual.astype(float), want.astype(float), rtol=0, atol=INEXACT[name])
            if not close:
                wrong.append(name)
    return sorted(set(wrong))


# Allowed absolute differences if the device's math functions are not PyTorch's: a few ulp of the largest value.
INEXACT = {"orthogonal": FLOAT32_ULPS * 2.0**-23}


def main():
    mesh, shardings = MESHES[sys.argv[1]]
    report = {}
    warnings.simplefilter("ignore")
    expected = expected_of(Odd)
    _, program = program_of(Odd)
    report["torch"] = same(program.run(mesh, shardings), expected, by_xla=False)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        report["xla"] = same(program.run(mesh, shardings, engine="xla"), expected, exactly=False)
    report["said"] = [str(w.message) for w in record if "on the host" in str(w.message)]
    _, counted = program_of(OddOnDevices, "counter")
    report["counter"] = same(counted.run(mesh, shardings), expected_of(OddOnDevices, "counter"))
    _, on_devices = program_of(OddOnDevices)
    path = sys.argv[2]
    with open(path, "w") as file:
        file.write(on_devices.to_stablehlo(mesh, shardings))
    expected = expected_of(OddOnDevices)
    arrays = fl.run_stablehlo(path)
    arrays["head.weight"] = arrays["embedding.weight"]
    report["module"] = same(arrays, expected)
    print(json.dumps(report))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
