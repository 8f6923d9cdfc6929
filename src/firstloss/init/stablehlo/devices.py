"""A program's weights as `jax.Array`s, each shard computed on its device.

On CPU devices PyTorch's kernels write shards directly into the devices' memory (`host_shards.py`), which is as fast,
and bit-identical to eager PyTorch. On other devices each distinct recipe is compiled once, in parallel, and its weights
are computed as soon as it is compiled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ... import timeline
from ...errors import BackendError, ShardingError
from ...interpreter import cores
from ...program.source import here
from ...workers import Workers
from ..recipes import Recipes
from ..shardings import starts
from .host_shards import materialize_on_host
from .module import LANE_WORDS, Functions, Streams, jitted, module_plan, partition_spec
from .plan import ShardingPlan, Weight, plan


def run(
    program: Recipes, mesh: Any = None, shardings: Mapping[str, Any] | None = None, engine: str | None = None
) -> dict[str, jax.Array]:
    """See `InitProgram.run`."""
    sharding_plan = plan(program, mesh, shardings)
    devices = concrete(mesh, sharding_plan)
    platform = (devices.devices.flat[0] if devices is not None else jax.devices()[0]).platform
    chosen = engine or ("torch" if platform == "cpu" else "xla")
    if chosen not in ("torch", "xla") or (chosen == "torch" and platform != "cpu"):
        raise BackendError(
            f"engine={engine!r} is not supported on {platform}. Use 'xla', or on a CPU 'torch', or omit it for the "
            "faster one"
        )
    with timeline.span("materialize"), jax.enable_x64(True):
        if chosen == "torch":
            arrays = materialize_on_host(
                {w.name: (w.recipe.ref, sharding_of(w, devices)) for w in sharding_plan.weights}
            )
        else:
            arrays = _on_devices(sharding_plan, devices)
    return {name: arrays[recipe.name] for name, recipe in program.recipes.items()}


def concrete(mesh: Any, sharding_plan: ShardingPlan) -> Mesh | None:
    """The mesh with devices; None for one device.

    Raises:
        ShardingError: if there are too few devices.
    """
    if not sharding_plan.axes:
        return None
    if isinstance(mesh, Mesh):
        return mesh
    meshes = (w.recipe.mark.mesh for w in sharding_plan.weights if w.recipe.mark is not None)
    if mesh is None and isinstance(marked := next((m for m in meshes if m is not None), None), Mesh):
        return marked
    devices = jax.devices()
    if sharding_plan.devices > len(devices):
        sizes = ", ".join(f"{name}={size}" for name, size in sharding_plan.axes.items())
        sharded = next((w for w in sharding_plan.weights if any(w.sharding.spec)), sharding_plan.weights[0])
        raise ShardingError(
            f"{here()}: {sharded.name}: the spec {partition_spec(sharded)} is for a mesh of {sharding_plan.devices} "
            f"devices ({sizes}), but there are {len(devices)} ({devices[0].platform}). Use a smaller mesh; on a CPU, "
            f"call jax.config.update('jax_num_cpu_devices', {sharding_plan.devices}) before JAX is first used. "
            "to_stablehlo and plan accept a mesh of any size"
        )
    return Mesh(
        np.array(devices[: sharding_plan.devices]).reshape(tuple(sharding_plan.axes.values())),
        tuple(sharding_plan.axes),
    )


def sharding_of(weight: Weight, mesh: Mesh | None) -> Sharding:
    """The sharding of a weight's array."""
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, partition_spec(weight))


class Units:
    """The distinct functions of a plan, compiled in parallel: one for each key, for all devices of the mesh."""

    def __init__(self, sharding_plan: ShardingPlan, mesh: Mesh | None) -> None:
        self._made = sharding_plan
        self._mesh = mesh
        self._streams = Streams(sharding_plan)
        device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
        self._functions = Functions(0 if device.platform == "cpu" else LANE_WORDS)
        self._everywhere = SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._jumps = self._on_devices(self._streams.table) if self._streams.jumps else None
        self._origins: dict[int, Any] = {}

    def _on_devices(self, array: Any) -> jax.Array:
        return jax.make_array_from_callback(np.shape(array), self._everywhere, lambda index: np.asarray(array)[index])

    def arguments(self, weight: Weight) -> tuple[Any, Any, Any]:
        """The arguments of a weight's function: origins, table, positions."""
        origins = []
        for origin in self._streams.origins(weight):
            if id(origin) not in self._origins:
                self._origins[id(origin)] = self._on_devices(origin)
            origins.append(self._origins[id(origin)])
        positions = tuple(self._on_devices(position) for position in self._streams.positions(weight))
        return tuple(origins), self._jumps if origins else None, positions

    def compile(self, weight: Weight) -> Any:
        """The executable for all weights with the key of `weight`."""
        with jax.enable_x64(True):
            sharding_plan, mesh = self._made, self._mesh
            function = self._functions.function_of(weight)

            def shard(origins: Any, jumps: Any, positions: Any) -> Any:
                where = {axis: lax.convert_element_type(lax.axis_index(axis), np.int64) for axis in sharding_plan.axes}
                begin = starts(weight.recipe.shape, weight.sharding.spec, sharding_plan.axes, where)
                offsets = tuple(b for b, entry in zip(begin, weight.sharding.spec, strict=True) if entry)
                return function(origins, jumps, positions, offsets)

            make: Callable[..., Any] = shard
            if mesh is not None:
                spec = partition_spec(weight)
                make = jax.shard_map(shard, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False)
            return jax.jit(make).lower(*self.arguments(weight)).compile()

    def distinct(self) -> dict[Any, Weight]:
        """A weight for each function, in descending order of size."""
        weights_by_key: dict[Any, Weight] = {}
        for weight in sorted(self._made.weights, key=lambda w: -math.prod(w.local)):
            if weight.sketch is not None:
                weights_by_key.setdefault(weight.key, weight)
        return weights_by_key


def _on_devices(sharding_plan: ShardingPlan, mesh: Mesh | None) -> dict[str, jax.Array]:
    units = Units(sharding_plan, mesh)
    host = [weight for weight in sharding_plan.weights if weight.sketch is None]
    line = here()
    for weight in host:
        message = f"{weight.name}: {weight.why}: it is computed on the host and sent"
        warnings.warn_explicit(message, UserWarning, line.file, line.line)
    out: dict[str, jax.Array] = {}
    with Workers(max(cores(), 2), "firstloss-compile") as workers:
        compiled = {key: workers.submit(units.compile, w) for key, w in units.distinct().items()}
        out.update(materialize_on_host({w.name: (w.recipe.ref, sharding_of(w, mesh)) for w in host}))
        for key, task in compiled.items():  # in the same order in all processes
            executable = task.result()
            for weight in sharding_plan.weights:
                if weight.sketch is not None and weight.key == key:
                    out[weight.name] = executable(*units.arguments(weight))
    return out


def compile(program: Recipes, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """See `InitProgram.compile`."""
    sharding_plan = module_plan(program, mesh, shardings)
    with jax.enable_x64(True):
        return jitted(sharding_plan, concrete(mesh, sharding_plan)).lower().compile()


def peak_bytes(program: Recipes, mesh: Any, shardings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """See `InitProgram.peak_bytes`."""
    sharding_plan = plan(program, mesh, shardings)
    with jax.enable_x64(True):
        units = Units(sharding_plan, concrete(mesh, sharding_plan))
        analyses = {key: units.compile(weight).memory_analysis() for key, weight in units.distinct().items()}
    weights = sum(analyses[w.key].output_size_in_bytes for w in sharding_plan.weights if w.sketch is not None)
    return {
        "weights": weights,
        "temporary": max((analysis.temp_size_in_bytes for analysis in analyses.values()), default=0),
    }
