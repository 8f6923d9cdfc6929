"""A backend's mesh: which device holds which part of each weight, of its optimizer's state and of the batch.

Shardings say where arrays are and nothing about what is computed: the step is traced as for one device, and XLA's
partitioner cuts it. So any sharding gives the same losses, up to the order in which sums are taken.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...errors import BackendError, ShardingError
from ...init import shardings
from ...lower.program import constant
from ...program.graph import Ref, is_contiguous
from ...program.source import UNKNOWN, here
from ..jaxlib import x64

# Smaller weights are whole on each device, unless their sharding is said: to gather them costs more than they take.
SMALL = 4096  # elements


class Mesh:
    """Devices with named axes, and how arrays are cut over them.

    Attributes:
        devices: the `jax.sharding.Mesh`; for a plan, an `AbstractMesh` of devices that need not exist.
        axes: sizes of its axes by name.
        data: the axes that the batch is cut over.
    """

    def __init__(self, mesh: Any) -> None:
        self.devices = _jax_mesh(mesh)
        self.axes = shardings.axes_of(self.devices)
        self.data = tuple(axis for axis in self.axes if axis in shardings.DATA_AXES)
        self.whole = NamedSharding(self.devices, PartitionSpec())
        self._ways = math.prod(self.axes[axis] for axis in self.data)
        self._warned: set[tuple[int, ...]] = set()

    @property
    def scatters(self) -> bool:
        """Whether XLA has reduce-scatters there: not on a CPU. A mesh that is not there is taken for one that has."""
        return not self.is_there or self.devices.devices.flat[0].platform != "cpu"

    @property
    def is_there(self) -> bool:
        """Whether it has devices."""
        return not isinstance(self.devices, jax.sharding.AbstractMesh)

    # -- shardings --

    def of_store(self, store: DeferredStorage) -> NamedSharding:
        """The sharding of a weight or of state: as one of its names was marked, else by the default policy.

        Raises:
            ShardingError: for a mark that does not fit the tensor or this mesh.
        """
        value = store.value
        for tensor in store.alive():
            mark = shardings.mark_of(tensor)
            if mark is None:
                continue
            self._check_axes(mark)
            said = shardings.checked(mark.name, tuple(tensor.shape), mark.spec, self.axes, mark.source)
            spec = _spec_of_memory(tensor._ref(), said)
            if spec is None:
                warnings.warn(
                    f"{_at(mark)}the weight of shape {list(tensor.shape)} is a view of memory of shape "
                    f"{list(value.shape)}, which cannot be cut as {mark.spec}: it is cut by the default policy. Make "
                    "the weight in its own shape, or of a .clone().",
                    stacklevel=2,
                )
                break
            placed = shardings.divided(tuple(value.shape), spec, self.axes)
            if placed.moved:
                warnings.warn(f"{_at(mark)}a weight of shape {list(value.shape)}: {placed.moved}.", stacklevel=2)
            return self._named(placed.spec)
        if value.numel < SMALL:
            return self.whole
        return self._named(shardings.by_default(tuple(value.shape), self.axes))

    def of_batch(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of a tensor of the batch: its first dimension over the data axes, if they divide it."""
        if not shape or self._ways == 1:
            return self.whole
        if shape[0] % self._ways:
            if shape[0] > 1 and shape not in self._warned:
                self._warned.add(shape)
                warnings.warn(
                    f"a batch of shape {list(shape)} cannot be cut for {self._ways} devices, so each computes all of "
                    f"it. Make its first dimension a multiple of {self._ways} (drop_last=True for a loader's last).",
                    stacklevel=2,
                )
            return self.whole
        return NamedSharding(self.devices, PartitionSpec(self.data))

    def follow(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give gradients and optimizer state the shardings of their parameters, if these are marked."""
        optimizers = list(optimizers)
        for parameter in parameters:
            mark = shardings.mark_of(parameter)
            if mark is None:
                continue
            followers = [parameter.grad, *(e for o in optimizers for e in o.state.get(parameter, {}).values())]
            for tensor in followers:
                if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                    continue
                if type(tensor) is not DeferredTensor or tensor._ref().whole:  # a gradient may be a view
                    shardings.mark_alike(tensor, mark)

    def _check_axes(self, mark: shardings.Mark) -> None:
        theirs = shardings.axes_of(mark.mesh)
        for axis in {a for entry in mark.spec if entry for a in ((entry,) if isinstance(entry, str) else entry)}:
            if theirs.get(axis) != self.axes.get(axis):
                raise ShardingError(
                    f"{_at(mark)}{mark.name}: the spec {mark.spec!r} is for a mesh of {theirs}, and the backend's is "
                    f"{self.axes}. Give fl.shard the backend's mesh."
                )

    def _named(self, spec: shardings.Spec) -> NamedSharding:
        return NamedSharding(self.devices, PartitionSpec(*(entry if entry else None for entry in spec)))

    def of_results(self) -> NamedSharding | None:
        """The sharding of results: None is as they come; of several processes each has all of them, to read."""
        return self.whole if jax.process_count() > 1 else None


def _spec_of_memory(ref: Ref, spec: shardings.Spec) -> shardings.Spec | None:
    """The spec of a storage's Value by which `ref`, a view of all of it, is cut as `spec` says; None if none does."""
    value = ref.value
    if not ref.covers:
        return None
    if len(ref.size) == len(value.shape):  # maybe transposed
        left = list(zip(ref.size, ref.stride, spec, strict=True))
        out = []
        for size, stride in zip(value.shape, value.stride, strict=True):
            found = next((dim for dim in left if dim[0] == size and (size == 1 or dim[1] == stride)), None)
            if found is None:
                return None
            left.remove(found)
            out.append(found[2])
        return tuple(out)
    if len(value.shape) == 1 and is_contiguous(ref.size, ref.stride) and not any(spec[1:]):
        return spec[:1]
    return None


def fit(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """`array` where `sharding` wants it; itself if it is there."""
    return array if array.sharding == sharding else jax.device_put(array, sharding)


def put(tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
    """A copy of `tensor`, which every process has, cut over the devices."""
    values = constant(tensor)
    with x64():
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def put_parts(tensor: torch.Tensor, mesh: Mesh) -> jax.Array:
    """A batch of which this process has the rows in `tensor`, and each other process as many."""
    rows, processes = tensor.shape[0], jax.process_count()
    shape = (rows * processes, *tensor.shape[1:])
    sharding = mesh.of_batch(shape)
    if processes > 1 and sharding.is_fully_replicated:
        raise ShardingError(
            f"{processes} processes with {rows} rows each have no batch that can be cut over the mesh {mesh.axes}. "
            "Give each of them a multiple of its share of the data axes."
        )
    with x64():
        return jax.make_array_from_process_local_data(sharding, constant(tensor), shape)


def readable(array: jax.Array) -> jax.Array:
    """An array with the values of `array` that this process can read.

    Raises:
        ShardingError: if parts of it are in other processes.
    """
    if array.is_fully_replicated:
        return array.addressable_data(0)
    if not array.is_fully_addressable:
        raise ShardingError(
            f"parts of this tensor of shape {list(array.shape)} are in other processes, so its values cannot be read "
            "in this one alone. Call firstloss.distributed.gather(tensor) in all of them, or save it with fl.save."
        )
    return array


def gather(array: jax.Array) -> jax.Array:
    """`array`, all of it on each device. All processes have to call this."""
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec())
    with x64():
        return jax.jit(lambda x: x, out_shardings=sharding)(array)


def _jax_mesh(mesh: Any) -> Any:
    """`mesh`, whose axes XLA's partitioner deals with, whatever type they had."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh
    if isinstance(mesh, jax.sharding.Mesh):
        devices, names = mesh.devices, mesh.axis_names
    else:
        axes = shardings.axes_of(mesh)
        count, own = math.prod(axes.values()), jax.devices()
        if count > len(own) or jax.process_count() > 1 and count != len(own):
            raise BackendError(
                f"{here()}: a mesh of {axes} takes {count} devices, and JAX finds {len(own)} ({own[0].platform})."
                + (_HOW.format(count) if own[0].platform == "cpu" else "")
            )
        if isinstance(mesh, Mapping):
            devices, names = np.array(own[:count]).reshape(tuple(axes.values())), tuple(axes)
        else:
            raise BackendError(
                f"{here()}: {mesh!r}: the XLA backend takes a jax.sharding.Mesh, or sizes of axes as {axes}."
            )
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


_HOW = ' Several on one CPU: jax.config.update("jax_num_cpu_devices", {}) before the backend is made.'


def _at(mark: shardings.Mark) -> str:
    return "" if mark.source == UNKNOWN else f"{mark.source}: "
