"""Memory owned by devices and written by kernels."""

import jax
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from firstloss.init.stablehlo import shard_memory as shard_memory
from firstloss.init.stablehlo.shard_memory import ArraySpec, rounds, tensor_at


def kinds():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    cut = NamedSharding(mesh, PartitionSpec("x"))
    return [
        ArraySpec((300, 7), np.dtype(np.float32), cut),
        ArraySpec((), np.dtype(np.int64), NamedSharding(mesh, PartitionSpec())),
        ArraySpec((300, 7), np.dtype(np.float32), cut),
        ArraySpec((0, 5), np.dtype(bool), cut),
        ArraySpec((64,), np.dtype(jax.numpy.bfloat16), cut),
        ArraySpec((3,), np.dtype(np.complex64), cut),
    ]


def test_writes_show_in_the_array():
    torch_dtypes = [torch.float32, torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.complex64]
    allocated = shard_memory.allocate(kinds())
    for number, (kind, dtype, (array, places)) in enumerate(zip(kinds(), torch_dtypes, allocated, strict=True)):
        assert (array.shape, array.dtype) == kind[:2]
        assert array.sharding.is_equivalent_to(kind.sharding, array.ndim)
        [address] = places.values()
        tensor_at(address, kind.shape, dtype, array).fill_(number)
    for number, (array, _) in enumerate(allocated):
        assert np.array_equal(np.asarray(array), np.full(array.shape, number, array.dtype))


def test_the_memory_can_be_donated():
    kind = ArraySpec((1 << 16,), np.dtype(np.float32), SingleDeviceSharding(jax.devices()[0]))
    [(array, places)] = shard_memory.allocate([kind])
    tensor_at(*places.values(), kind.shape, torch.float32, array).fill_(1)
    grown = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert grown.unsafe_buffer_pointer() in places.values() and np.all(np.asarray(grown) == 2)


# No time limit: two concurrent test runs took seconds to create an input.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 50), max_size=6))
def test_rounds_have_a_small_remainder(counts):
    def results(n):
        return sum(c // n for c in counts) ** 2 + sum(c % n for c in counts) ** 2

    assert results(rounds(counts)) <= results(1)


def test_identical_layers_are_made_in_rounds():
    assert rounds([44, 44, 22, 45, 2]) == 22
    assert rounds([]) == 1
