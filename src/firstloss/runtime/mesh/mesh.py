"""A backend's mesh: the sharding of each weight, of its optimizer state and of the batch.

Shardings say where arrays are, not what is computed: the step is traced as for one device, and XLA's partitioner
divides it. So any sharding gives the same losses, up to the order of summation.

Nothing here imports JAX until devices or JAX's own shardings are needed: the first loss needs neither.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...errors import BackendError, ShardingError
from ...init import shardings
from ...program.graph import Ref, is_contiguous
from ...program.source import UNKNOWN, Source, here
from ..lazy_jax import process_count

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

# Smaller weights are replicated unless marked otherwise: gathering them would cost more than it saves.
SMALL = 4096  # elements


class MeshSharding:
    """A sharding on a mesh, made by the mesh once for each spec."""

    def __init__(self, mesh: Mesh, spec: shardings.Spec) -> None:
        self._mesh = mesh
        self._spec = spec

    @functools.cached_property
    def named(self) -> NamedSharding:
        """The same as a NamedSharding."""
        from jax.sharding import NamedSharding, PartitionSpec

        entries = (entry if entry else None for entry in self._spec)
        return NamedSharding(self._mesh.devices, PartitionSpec(*entries))


def named(sharding: MeshSharding | NamedSharding) -> NamedSharding:
    """A sharding as a NamedSharding."""
    return sharding.named if isinstance(sharding, MeshSharding) else sharding


def axes_of_dims(entries: Iterable[Any]) -> shardings.Spec:
    """The entries of a PartitionSpec, each as a tuple of axes."""
    return tuple(() if not e else (e,) if isinstance(e, str) else tuple(e) for e in entries)


class Mesh:
    """Devices with named axes, and the shardings of arrays on them.

    Attributes:
        axes: sizes of its axes by name.
        data: the axes over which the batch is sharded.
        whole: the sharding of replicated arrays.
        same_run: the number of logical shards of each step (`lower/logical_shards.py`); None: XLA partitions it.
    """

    def __init__(self, mesh: Any, put_off: bool = False, same_run: int | None = None) -> None:
        """
        Args:
            put_off: do not ask JAX for the devices yet. `mesh` must be sizes of axes.

        Raises:
            BackendError: if JAX has too few devices, or their number does not divide `same_run`.
            ShardingError: if `mesh` is not a mesh.
        """
        self._shardings: dict[shardings.Spec, MeshSharding] = {}
        self.axes: dict[str, int] = shardings.axes_of(mesh)
        self._mesh = dict(self.axes) if isinstance(mesh, Mapping) else mesh
        self._source = here()
        if not put_off:
            self.devices  # noqa: B018 - raises where there are none
        count = math.prod(self.axes.values())
        if same_run is not None and same_run % count:
            raise BackendError(
                f"{self._source}: the {count} devices of the mesh {self.axes} do not divide the {same_run} logical "
                f"shards of same_run={same_run}. Use {_divisors(same_run)} devices."
            )
        self.same_run: int | None = same_run
        is_data = (lambda axis: True) if same_run is not None else shardings.DATA_AXES.__contains__
        self.data: tuple[str, ...] = tuple(filter(is_data, self.axes))
        self.whole: MeshSharding = self._sharding(())
        self._ways = same_run or math.prod(self.axes[axis] for axis in self.data)
        self._warned: set[tuple[int, ...]] = set()

    @functools.cached_property
    def devices(self) -> Any:
        """The `jax.sharding.Mesh`; for a plan, an `AbstractMesh` of devices that need not exist."""
        return _jax_mesh(self._mesh, self._source)

    @property
    def scatters(self) -> bool:
        """Whether XLA uses reduce-scatters on it: not on CPUs; assumed for an abstract mesh."""
        return not self.is_there or self.devices.devices.flat[0].platform != "cpu"

    @property
    def is_there(self) -> bool:
        """Whether it has devices, rather than being abstract."""
        if isinstance(self._mesh, Mapping):
            return True
        import jax

        return not isinstance(self.devices, jax.sharding.AbstractMesh)

    # -- shardings --

    def storage_sharding(self, storage: DeferredStorage) -> MeshSharding:
        """The sharding of a weight or of optimizer state: as marked under one of its names, or by the default policy.

        Raises:
            ShardingError: for a mark that does not fit the tensor or this mesh.
        """
        value = storage.value
        for tensor in storage.alive():
            mark = shardings.mark_of(tensor)
            if mark is None:
                continue
            self._check_axes(mark)
            spec_marked = shardings.checked(mark.name, tuple(tensor.shape), mark.spec, self.axes, mark.source)
            spec = _spec_of_memory(tensor._ref(), spec_marked)
            if spec is None:
                warnings.warn(
                    f"{_at(mark)}the weight of shape {list(tensor.shape)} is a view of memory of shape "
                    f"{list(value.shape)}, which cannot be sharded as {mark.spec}, so it is sharded by the default "
                    "policy. "
                    "Make the weight in its own shape, or from a .clone().",
                    stacklevel=2,
                )
                break
            placed = shardings.divided(tuple(value.shape), spec, self.axes)
            if placed.moved:
                warnings.warn(f"{_at(mark)}a weight of shape {list(value.shape)}: {placed.moved}.", stacklevel=2)
            return self._sharding(placed.spec)
        if value.numel < SMALL:
            return self.whole
        return self._sharding(shardings.by_default(tuple(value.shape), self.axes))

    def batch_sharding(self, shape: tuple[int, ...]) -> MeshSharding:
        """The sharding of a tensor of the batch: its first dimension over the data axes, if divisible."""
        if not shape or self._ways == 1:
            return self.whole
        if shape[0] % self._ways:
            if shape[0] > 1 and shape not in self._warned:
                self._warned.add(shape)
                how = "sharded over {} devices" if self.same_run is None else "cut into {} logical shards"
                warnings.warn(
                    f"a batch of shape {list(shape)} cannot be {how.format(self._ways)}, so each device computes all "
                    f"of it. Make its first dimension a multiple of {self._ways} (drop_last=True for a loader's last).",
                    stacklevel=2,
                )
            return self.whole
        return self._sharding((self.data,))

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
                    shardings.copy_sharding_mark(tensor, mark)

    def _check_axes(self, mark: shardings.ShardingMark) -> None:
        if mark.mesh is None:
            return
        marked = shardings.axes_of(mark.mesh)
        for axis in mark.named_axes:
            if marked.get(axis) != self.axes.get(axis):
                raise ShardingError(
                    f"{_at(mark)}{mark.name}: the spec {mark.spec!r} is for a mesh of {marked}, but the backend's is "
                    f"{self.axes}. Leave out the mesh: fl.shard(model, specs)."
                )

    def _sharding(self, spec: shardings.Spec) -> MeshSharding:
        return self._shardings.setdefault(spec, MeshSharding(self, spec))

    def of_half_the_processes(self) -> Mesh | None:
        """The mesh of the first half of the processes, with the first axis that it halves; None if that is no mesh of
        several."""
        import jax

        devices = self.devices.devices
        processes = sorted({device.process_index for device in devices.flat})
        half = processes[: len(processes) // 2]
        for axis, size in enumerate(devices.shape):
            fewer = devices.take(range(size // 2), axis)
            if len(half) > 1 and {device.process_index for device in fewer.flat} == set(half):
                return Mesh(jax.sharding.Mesh(fewer, self.devices.axis_names), same_run=self.same_run)
        return None

    def like(self, sharding: MeshSharding | NamedSharding) -> MeshSharding:
        """The sharding with the same spec on this mesh."""
        return self._sharding(axes_of_dims(named(sharding).spec))

    def result_sharding(self) -> MeshSharding | None:
        """The sharding of results: with several processes replicated, so that each can read them; None: as computed."""
        return self.whole if process_count() > 1 else None


def _spec_of_memory(ref: Ref, spec: shardings.Spec) -> shardings.Spec | None:
    """The spec of a storage's Value by which `ref`, a view of all of it, has `spec`; None if there is none."""
    value = ref.value
    if not ref.covers:
        return None
    if len(ref.size) == len(value.shape):  # maybe transposed
        left = list(zip(ref.size, ref.stride, spec, strict=True))
        out = []
        for size, stride in zip(value.shape, value.stride, strict=True):
            match = next((dim for dim in left if dim[0] == size and (size == 1 or dim[1] == stride)), None)
            if match is None:
                return None
            left.remove(match)
            out.append(match[2])
        return tuple(out)
    if len(value.shape) == 1 and is_contiguous(ref.size, ref.stride) and not any(spec[1:]):
        return spec[:1]
    return None


def _divisors(count: int) -> str:
    *others, last = (str(n) for n in range(1, count + 1) if count % n == 0)
    return f"{', '.join(others)} or {last}" if others else last


def _jax_mesh(mesh: Any, source: Source) -> Any:
    """A `jax.sharding.Mesh` of `mesh`, passed at `source`, with all axes of type Auto."""
    import jax
    import numpy as np

    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh
    if isinstance(mesh, jax.sharding.Mesh):
        devices, names = mesh.devices, mesh.axis_names
    else:
        axes = shardings.axes_of(mesh)
        count, own = math.prod(axes.values()), jax.devices()
        if count > len(own) or jax.process_count() > 1 and count != len(own):
            raise BackendError(
                f"{source}: a mesh of {axes} takes {count} devices, but JAX finds {len(own)} ({own[0].platform})."
                + (_HOW.format(count) if own[0].platform == "cpu" else "")
            )
        if isinstance(mesh, Mapping):
            devices, names = np.array(own[:count]).reshape(tuple(axes.values())), tuple(axes)
        else:
            raise BackendError(
                f"{source}: {mesh!r}: the XLA backend takes a jax.sharding.Mesh, or sizes of axes such as {axes}."
            )
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


_HOW = ' For several devices on one CPU: jax.config.update("jax_num_cpu_devices", {}) before creating the backend.'


def _at(mark: shardings.ShardingMark) -> str:
    return "" if mark.source == UNKNOWN else f"{mark.source}: "
