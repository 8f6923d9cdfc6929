"""A constructor as one StableHLO module: its outputs are the weights, each device computing its own shards.

Equal recipes are one private function, called with each weight's own place in the random stream and with where the
device's shard begins. The module holds all it needs: the state that the stream starts from, and a table of jumps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ...errors import LoweringError
from ...lower.mt19937_jump import bits_for, rewind, table
from ...rng.counter_stream import CounterStream
from ...rng.stream import Stream
from ..recipes import Recipes
from ..shardings import Axes, starts
from .evaluate import name_of, part
from .fill import WordSource
from .plan import ShardingPlan, Weight, plan

# Words that a lane of a device other than a CPU draws: a jump costs what some hundred thousand words do.
LANE_WORDS = 1 << 16


class Functions:
    """The functions that make shards, one for each key; jitted, so that equal ones are traced and lowered once.

    Each is called with (origins, table, positions, starts): tuples of arrays, and the starts of dimensions that are
    cut alone.
    """

    def __init__(self, lane_words: int = 0) -> None:
        self._made: dict[Any, Callable] = {}
        self._names: dict[str, int] = {}
        self._lane_words = lane_words

    def __len__(self) -> int:
        return len(self._made)

    def of(self, weight: Weight) -> Callable:
        """The function of a weight."""
        found = self._made.get(weight.key)
        if found is None:
            found = self._made[weight.key] = self._make(weight)
        return found

    def _make(self, weight: Weight) -> Callable:
        sketch, local = weight.sketch, weight.local
        assert sketch is not None
        counted = [isinstance(place.stream, CounterStream) for place in sketch.places]
        cut = [d for d, entry in enumerate(weight.placed.spec) if entry]
        lanes = self._lane_words

        def make(origins: tuple, jumps: Any, positions: tuple, begin: tuple) -> Any:
            where: list[Any] = [np.int64(0)] * len(local)
            for d, start in zip(cut, begin, strict=True):
                where[d] = start
            draws = [
                (origin if by_counter else WordSource(origin, jumps, lanes), position)
                for origin, by_counter, position in zip(origins, counted, positions, strict=True)
            ]
            return part(sketch, local, draws, where)

        name = name_of(sketch, local)
        number = self._names[name] = self._names.get(name, 0) + 1
        make.__name__ = make.__qualname__ = name if number == 1 else f"{name}_{number}"
        return jax.jit(make)


class Streams:
    """Where the streams of a plan begin, and the table that reaches their furthest position."""

    def __init__(self, weights: ShardingPlan) -> None:
        self._origins: dict[Stream, Any] = {}
        furthest = 1
        for weight in weights.weights:
            for place in weight.sketch.places if weight.sketch is not None else ():
                if place.stream not in self._origins:
                    self._origins[place.stream] = _origin(place.stream)
                if not isinstance(place.stream, CounterStream):
                    furthest = max(furthest, place.position + 4 * weight.recipe.numel + 64)
        self.table = table(bits_for(furthest))
        # A lane's step has to be in the table as well.
        self.jumps = any(not isinstance(stream, CounterStream) for stream in self._origins)

    def of(self, weight: Weight) -> tuple[Any, ...]:
        """The origins of a weight's draws."""
        assert weight.sketch is not None
        return tuple(self._origins[place.stream] for place in weight.sketch.places)

    @staticmethod
    def positions(weight: Weight) -> tuple[Any, ...]:
        """The positions of a weight's draws."""
        assert weight.sketch is not None
        return tuple(np.int64(place.position) for place in weight.sketch.places)


def _origin(stream: Stream) -> Any:
    """What positions count from: a window, or a seed."""
    if isinstance(stream, CounterStream):
        return np.uint64(stream.seed)
    return rewind(*stream.origin_block())


def to_stablehlo(program: Recipes, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> str:
    """See `InitProgram.to_stablehlo`."""
    made = plan(program, mesh, shardings)
    for weight in made.weights:
        if weight.sketch is None:
            raise LoweringError(
                f"{weight.name}: {weight.why}. A module cannot hold it; program.run() makes it on the host. Or fill it "
                "with uniform_ or normal_ of 16 elements and more, or leave it out"
            )
    with jax.enable_x64(True):
        return _text(made, abstract(made.axes))


def abstract(axes: Axes) -> AbstractMesh | None:
    """A mesh of no devices in particular."""
    return AbstractMesh(tuple(axes.values()), tuple(axes)) if axes else None


def partition_spec(weight: Weight) -> PartitionSpec:
    """As JAX has it."""
    return PartitionSpec(*[entry if len(entry) > 1 else entry[0] if entry else None for entry in weight.placed.spec])


def shard_maker(made: ShardingPlan, streams: Streams, functions: Functions, jumps: Any) -> Callable[[], dict[str, Any]]:
    """A function that makes one device's shard of every weight, to be called in a manual computation over the mesh."""

    def make() -> dict[str, Any]:
        where = {axis: lax.convert_element_type(lax.axis_index(axis), np.int64) for axis in made.axes}
        known: dict[Any, tuple[Any, ...]] = {}  # weights alike share their arithmetic
        out = {}
        for weight in made.weights:
            geometry = weight.recipe.shape, weight.placed.spec
            if geometry not in known:
                begin = starts(*geometry, made.axes, where)
                known[geometry] = tuple(b for b, entry in zip(begin, weight.placed.spec, strict=True) if entry)
            cut = known[geometry]
            make_one = functions.of(weight)
            out[weight.name] = make_one(streams.of(weight), jumps, streams.positions(weight), cut)
        return out

    return make


def _text(made: ShardingPlan, mesh: AbstractMesh | Mesh | None) -> str:
    streams = Streams(made)
    functions = Functions()

    def constructor() -> dict[str, Any]:
        return shard_maker(made, streams, functions, streams.table if streams.jumps else None)()

    specs = {weight.name: partition_spec(weight) for weight in made.weights}
    if mesh is not None:
        constructor = jax.shard_map(constructor, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False)
    lowered = jax.jit(constructor).trace().lower(lowering_platforms=("cpu",))
    return _named(lowered, made)


def _named(lowered: Any, made: ShardingPlan) -> str:
    """The module's text; its outputs are named as the weights are, and it says for how many devices it is."""
    from ...compat.jax_names import ir

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), made.devices)
        module.operation.attributes["mhlo.num_partitions"] = count
        module.operation.attributes["sym_name"] = ir.StringAttr.get("constructor")
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        results = ir.ArrayAttr(main.attributes["res_attrs"]) if "res_attrs" in main.attributes else []
        names = sorted(weight.name for weight in made.weights)  # as jax orders the leaves of a dict
        attributes = []
        for name, old in zip(names, results, strict=True):
            fields = {entry.name: entry.attr for entry in ir.DictAttr(old)}
            fields["jax.result_info"] = ir.StringAttr.get(name)
            attributes.append(ir.DictAttr.get(fields))
        main.attributes["res_attrs"] = ir.ArrayAttr.get(attributes)
        module.operation.verify()
        return str(module)
