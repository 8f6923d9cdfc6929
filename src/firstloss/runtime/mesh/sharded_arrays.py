"""Transfer of arrays to and from a mesh."""

from __future__ import annotations

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import ShardingError
from ...lower.dtypes import constant
from ..jax_support import x64
from .mesh import Mesh, MeshSharding, named


def fit(array: jax.Array, sharding: MeshSharding | NamedSharding) -> jax.Array:
    """Reshard `array` to `sharding` if necessary."""
    sharding = named(sharding)
    return array if array.sharding == sharding else jax.device_put(array, sharding)


def put(tensor: torch.Tensor, sharding: MeshSharding | NamedSharding) -> jax.Array:
    """Shard a copy of `tensor`, which every process has, over the devices."""
    values = constant(tensor)
    with x64():
        return jax.make_array_from_callback(values.shape, named(sharding), lambda index: values[index])


def put_shards(tensor: torch.Tensor, mesh: Mesh) -> jax.Array:
    """A global batch of which this process has the rows in `tensor`, and each other process as many."""
    rows, processes = tensor.shape[0], jax.process_count()
    shape = (rows * processes, *tensor.shape[1:])
    sharding = mesh.batch_sharding(shape).named
    if processes > 1 and sharding.is_fully_replicated:
        raise ShardingError(
            f"{processes} processes with {rows} rows each do not form a batch that can be sharded over the mesh "
            f"{mesh.axes}. Pass each of them a multiple of its share of the data axes."
        )
    with x64():
        return jax.make_array_from_process_local_data(sharding, constant(tensor), shape)


def readable(array: jax.Array) -> jax.Array:
    """An array with the values of `array` that this process can read.

    Raises:
        ShardingError: if other processes hold parts of it.
    """
    if array.is_fully_replicated:
        return array.addressable_data(0)
    if not array.is_fully_addressable:
        raise ShardingError(
            f"other processes hold parts of this tensor of shape {list(array.shape)}, so this process alone cannot "
            "read its values. Call firstloss.distributed.gather(tensor) in all of them, or save it with fl.save."
        )
    return array


def gather(array: jax.Array) -> jax.Array:
    """Replicate `array` on all devices; a collective call of all processes."""
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec())
    with x64():
        return jax.jit(lambda x: x, out_shardings=sharding)(array)
