"""A constructor as one StableHLO module: its outputs are the weights, each device computing its own shards.

Equal recipes share one private function, which is called with each weight's stream positions and the offset of the
device's shard. The module is self-contained: it has the stream's initial state and a table for jump-ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ...errors import LoweringError
from ...lower.mt19937_jump import bits_for, rewind, table
from ...rng.counter_stream import CounterStream
from ...rng.stream import Stream
from ..recipes import Recipes
from ..shardings import Axes, starts
from .checksum import with_checksum
from .evaluate import name_of, part
from .fill import WordSource
from .plan import ShardingPlan, Weight, plan

# Custom calls of JAX's that are there on a CPU only, and only in a process that has lowered one.
_LAPACK = re.compile(r"custom_call @(lapack_\w+)")
# Words per lane on a device other than a CPU; a jump costs as much as some hundred thousand words.
LANE_WORDS = 1 << 16


class Functions:
    """The jitted functions that compute shards, one for each `Weight.key`.

    Each is called with (origins, table, positions, starts): tuples of arrays, with starts of sharded dimensions only.
    """

    def __init__(self, lane_words: int = 0) -> None:
        self._made: dict[Any, Callable[..., Any]] = {}
        self._names: dict[str, int] = {}
        self._lane_words = lane_words

    def __len__(self) -> int:
        return len(self._made)

    def function_of(self, weight: Weight) -> Callable[..., Any]:
        """The function for a weight."""
        function = self._made.get(weight.key)
        if function is None:
            function = self._made[weight.key] = self._make(weight)
        return function

    def _make(self, weight: Weight) -> Callable[..., Any]:
        sketch, local = weight.sketch, weight.local
        assert sketch is not None
        counter_policy = [isinstance(origin.stream, CounterStream) for origin in sketch.origins]
        sharded = [d for d, entry in enumerate(weight.sharding.spec) if entry]
        lanes = self._lane_words

        def make(origins: tuple[Any, ...], jumps: Any, positions: tuple[Any, ...], begin: tuple[Any, ...]) -> Any:
            offsets: list[Any] = [np.int64(0)] * len(local)
            for d, start in zip(sharded, begin, strict=True):
                offsets[d] = start
            draws = [
                (origin if by_counter else WordSource(origin, jumps, lanes), position)
                for origin, by_counter, position in zip(origins, counter_policy, positions, strict=True)
            ]
            return part(sketch, local, draws, offsets)

        name = name_of(sketch, local)
        number = self._names[name] = self._names.get(name, 0) + 1
        make.__name__ = make.__qualname__ = name if number == 1 else f"{name}_{number}"
        return jax.jit(make)


class Streams:
    """The origins of a plan's streams, and a jump table that reaches their furthest position."""

    def __init__(self, weights: ShardingPlan) -> None:
        self._origins: dict[Stream, Any] = {}
        furthest = 1
        for weight in weights.weights:
            for origin in weight.sketch.origins if weight.sketch is not None else ():
                if origin.stream not in self._origins:
                    self._origins[origin.stream] = _origin(origin.stream)
                if not isinstance(origin.stream, CounterStream):
                    furthest = max(furthest, origin.position + 4 * weight.recipe.numel + 64)
        self.table = table(bits_for(furthest))
        self.jumps: bool = any(not isinstance(stream, CounterStream) for stream in self._origins)

    def origins(self, weight: Weight) -> tuple[Any, ...]:
        """The origins of the streams of a weight's draws."""
        assert weight.sketch is not None
        return tuple(self._origins[origin.stream] for origin in weight.sketch.origins)

    @staticmethod
    def positions(weight: Weight) -> tuple[Any, ...]:
        """The positions of a weight's draws."""
        assert weight.sketch is not None
        return tuple(np.int64(origin.position) for origin in weight.sketch.origins)


def _origin(stream: Stream) -> Any:
    """The origin of a stream: a window, or under the counter policy a seed."""
    if isinstance(stream, CounterStream):
        return np.uint64(stream.seed)
    return rewind(*stream.origin_block())


def to_stablehlo(program: Recipes, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> str:
    """See `InitProgram.to_stablehlo`."""
    sharding_plan = module_plan(program, mesh, shardings)
    with jax.enable_x64(True):
        return with_checksum(_text(sharding_plan, abstract(sharding_plan.axes)))


def module_plan(program: Recipes, mesh: Any, shardings: Mapping[str, Any] | None) -> ShardingPlan:
    """The plan, of which devices can compute each weight."""
    sharding_plan = plan(program, mesh, shardings)
    for weight in sharding_plan.weights:
        if weight.sketch is None:
            raise LoweringError(
                f"{weight.name}: {weight.why}, so it cannot be part of a module. program.run() computes it on the "
                "host; or initialize it with uniform_ or normal_ of at least 16 elements, or remove it"
            )
    return sharding_plan


def abstract(axes: Axes) -> AbstractMesh | None:
    """A mesh without devices."""
    # Auto is JAX 0.10's default; of JAX 0.11's, Explicit, a function is lowered in a mesh context only.
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)) if axes else None


def partition_spec(weight: Weight) -> PartitionSpec:
    """The sharding of a weight as a PartitionSpec."""
    return PartitionSpec(*[entry if len(entry) > 1 else entry[0] if entry else None for entry in weight.sharding.spec])


def shard_maker(
    sharding_plan: ShardingPlan, streams: Streams, functions: Functions, jumps: Any
) -> Callable[[], dict[str, Any]]:
    """A function that computes one device's shard of every weight, to be called inside shard_map."""

    def make() -> dict[str, Any]:
        where = {axis: lax.convert_element_type(lax.axis_index(axis), np.int64) for axis in sharding_plan.axes}
        offsets: dict[Any, tuple[Any, ...]] = {}  # shared by weights with the same geometry
        out = {}
        for weight in sharding_plan.weights:
            geometry = weight.recipe.shape, weight.sharding.spec
            if geometry not in offsets:
                begin = starts(*geometry, sharding_plan.axes, where)
                offsets[geometry] = tuple(b for b, entry in zip(begin, weight.sharding.spec, strict=True) if entry)
            function = functions.function_of(weight)
            out[weight.name] = function(streams.origins(weight), jumps, streams.positions(weight), offsets[geometry])
        return out

    return make


def jitted(sharding_plan: ShardingPlan, mesh: AbstractMesh | Mesh | None) -> Any:
    """The function of no arguments that returns the weights."""
    streams = Streams(sharding_plan)
    functions = Functions()

    def constructor() -> dict[str, Any]:
        return shard_maker(sharding_plan, streams, functions, streams.table if streams.jumps else None)()

    specs = {weight.name: partition_spec(weight) for weight in sharding_plan.weights}
    if mesh is not None:
        constructor = jax.shard_map(constructor, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False)
    return jax.jit(constructor)


def _text(sharding_plan: ShardingPlan, mesh: AbstractMesh | Mesh | None) -> str:
    lowered = jitted(sharding_plan, mesh).trace().lower(lowering_platforms=("cpu",))
    text = _named(lowered, sharding_plan)
    foreign = sorted(set(_LAPACK.findall(text)))
    if foreign:
        raise LoweringError(
            f"the constructor needs {', '.join(foreign)}, which only this machine's JAX has, so it cannot be a module "
            "for others. program.run() computes it here; or factorize the weight after the module has run"
        )
    return text


def _named(lowered: Any, sharding_plan: ShardingPlan) -> str:
    """The module's text, with the names of the weights and the number of devices."""
    from ...compat.jax_names import ir

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), sharding_plan.devices)
        module.operation.attributes["mhlo.num_partitions"] = count
        module.operation.attributes["sym_name"] = ir.StringAttr.get("constructor")
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        results = ir.ArrayAttr(main.attributes["res_attrs"]) if "res_attrs" in main.attributes else []
        names = sorted(weight.name for weight in sharding_plan.weights)  # as jax orders the leaves of a dict
        attributes = []
        for name, old in zip(names, results, strict=True):
            fields = {entry.name: entry.attr for entry in ir.DictAttr(old)}
            fields["jax.result_info"] = ir.StringAttr.get(name)
            attributes.append(ir.DictAttr.get(fields))
        main.attributes["res_attrs"] = ir.ArrayAttr.get(attributes)
        module.operation.verify()
        return str(module)
