"""Plan sharded initialization: the sketch and sharding of every weight, and their cost. Computes nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...engine.replay import compute
from ...errors import LoweringError, ShardingError
from ...lower.dtypes import constant
from ...lower.mt19937_fills import kernel
from ...program.source import Source as Line
from ...program.source import here
from ..recipes import Recipe, Recipes
from ..shardings import Axes, ShardingMark, WeightSharding, axes_of, by_default, checked, divided, local_shape, match
from .build_sketch import Unsketchable, known, sketch
from .fill import ShardGeometry, words_drawn
from .sketch import Apply, Masked, RandomFill, Sketch, Truncated, WholeSketch

# Weights of up to this many elements are computed here and become constants, unless they are plain fills.
_SMALL = 1 << 12


class Weight(NamedTuple):
    """One weight of a plan. If a device cannot compute it, `sketch` is None and `why` gives the reason."""

    name: str
    recipe: Recipe
    sharding: WeightSharding
    local: tuple[int, ...]
    sketch: Sketch | None
    why: str = ""

    @property
    def key(self) -> Any:
        """A key that is equal for weights that share a compiled function."""
        assert self.sketch is not None
        return self.sketch.tree, self.sketch.shape, self.sketch.order, self.sharding.spec


class ShardingPlan:
    """The shardings of a program's weights, and the work of each device.

    Attributes:
        axes: the mesh's; empty without one.
        weights: each weight; tied ones once.
        aliases: other names of tied weights, each with the name that it is listed under.
    """

    def __init__(self, axes: Axes, weights: list[Weight], aliases: dict[str, str]) -> None:
        self.axes = axes
        self.weights = weights
        self.aliases = aliases

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.axes.values())

    @property
    def bytes(self) -> int:
        """The bytes of the shards of each device."""
        return sum(math.prod(w.local) * w.recipe.dtype.itemsize for w in self.weights)

    @property
    def draws(self) -> int:
        """The 32-bit words that each device draws, including those of weights that cannot be computed by shard."""
        return sum(0 if w.sketch is None else _words(w.sketch, w.local) for w in self.weights)

    @property
    def compile_units(self) -> int:
        """The number of distinct functions to compile."""
        return len({w.key for w in self.weights if w.sketch is not None})

    @property
    def jumps(self) -> int:
        """The number of draws that each device has to jump to."""
        return sum(len(w.sketch.origins) for w in self.weights if w.sketch is not None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as a JSON-serializable dict."""
        return {
            "mesh": self.axes,
            "devices": self.devices,
            "weights": len(self.weights),
            "bytes": sum(w.recipe.nbytes for w in self.weights),
            "bytes_per_device": self.bytes,
            "words_per_device": self.draws,
            "jumps_per_device": self.jumps,
            "compile_units": self.compile_units,
            "made_whole": [w.name for w in self.weights if w.sketch is not None and w.sketch.whole],
            "on_the_host": {w.name: w.why for w in self.weights if w.sketch is None},
            "moved": {w.name: w.sharding.moved for w in self.weights if w.sharding.moved},
        }

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.axes.items()) or "one device"
        return (
            f"{len(self.weights)} weights on {self.devices} devices ({mesh}): each holds {self.bytes:,} bytes, draws "
            f"{self.draws:,} words from {self.jumps} positions, and runs {self.compile_units} compiled functions"
        )


def plan(program: Recipes, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> ShardingPlan:
    """Decide the sharding of each weight of `program`.

    Args:
        mesh: see `shardings.mark_sharding`; None for the mesh of the annotations, or one device.
        shardings: specs by name pattern; None for the module's annotations, or without any, the default policy.

    Raises:
        ShardingError: if a spec does not fit its weight or the mesh.
        LoweringError: if a weight cannot be an array, for example because it is sparse.
    """
    line = here()
    for name, kind in program.without.items():
        raise LoweringError(
            f"{line}: {name}: this tensor ({kind}) cannot be a jax.Array. Replace it by a dense one, such as its "
            ".to_dense(), or remove it"
        )
    own = {name: recipe for name, recipe in program.recipes.items() if recipe.name == name}
    marks = {name: recipe.mark for name, recipe in own.items() if recipe.mark is not None}
    if mesh is None and shardings is None and marks:
        mesh = _mesh_of(marks)
    axes = {} if mesh is None else axes_of(mesh)
    requested = _requested_specs(program, shardings, marks, axes, line)
    weights = []
    for name, recipe in own.items():
        shape = recipe.shape
        if name in requested:
            spec, where = requested[name]
            sharding = divided(shape, checked(name, shape, spec, axes, where), axes)
        elif requested or not axes:
            sharding = WeightSharding(tuple(() for _ in shape))
        else:
            sharding = WeightSharding(by_default(shape, axes))
        weight_sketch, why = _sketch_or_reason(recipe)
        weights.append(Weight(name, recipe, sharding, local_shape(shape, sharding.spec, axes), weight_sketch, why))
    moved = {w.sharding.moved: w.name for w in reversed(weights) if w.sharding.moved}
    for reason, name in moved.items():
        message = f"{name}: {reason}. The shards of a jax.Array are equal."
        warnings.warn_explicit(message, UserWarning, line.file, line.line)
    aliases = {name: recipe.name for name, recipe in program.recipes.items() if recipe.name != name}
    return ShardingPlan(axes, weights, aliases)


def _mesh_of(marks: Mapping[str, ShardingMark]) -> Any:
    """The mesh of the annotations, which must be the same for all that have one."""
    of_meshes = {name: mark for name, mark in marks.items() if mark.mesh is not None}
    if not of_meshes:
        name, mark = next(iter(marks.items()))
        raise ShardingError(
            f"{mark.source}: {name}: the spec {mark.spec!r} was given without a mesh. Pass it here, as in "
            "run(mesh={'fsdp': 8})"
        )
    first, one = next(iter(of_meshes.items()))
    for name, mark in of_meshes.items():
        if axes_of(mark.mesh) != axes_of(one.mesh):
            raise ShardingError(
                f"{mark.source}: {name}: the spec {mark.spec!r} is for a mesh of {axes_of(mark.mesh)}, but that of "
                f"{first}, at {one.source}, for one of {axes_of(one.mesh)}. Annotate all weights for one mesh, or pass "
                "the mesh"
            )
    return one.mesh


def _requested_specs(
    program: Recipes, shardings: Mapping[str, Any] | None, marks: Mapping[str, Any], axes: Axes, line: Line
) -> dict[str, tuple[Sequence[Any], Line]]:
    """The spec of each weight that has one, and its source line."""
    if shardings is None:
        return {name: (mark.spec, mark.source) for name, mark in marks.items()}
    if not axes:
        raise ShardingError(f"{line}: shardings have no meaning without a mesh. Pass the mesh, too")
    specs = match(program.recipes, shardings, line)
    # A tied weight may be matched by any of its names; the first match applies.
    out: dict[str, tuple[Sequence[Any], Line]] = {}
    for name, spec in specs.items():
        checked(name, program.recipes[name].shape, spec, axes, line)
        out.setdefault(program.recipes[name].name, (spec, line))
    return out


def _sketch_or_reason(recipe: Recipe) -> tuple[Sketch | None, str]:
    """The weight's sketch, or the reason why there is none."""
    try:
        result = sketch(recipe.ref)
        if result.pure or result.origins or recipe.numel > _SMALL:
            return result, ""
    except Unsketchable as error:
        if recipe.numel > _SMALL:
            return None, str(error)
    return known(constant(compute([recipe.ref])[0]), recipe.dtype), ""


def _words(weight_sketch: Sketch, local: tuple[int, ...]) -> int:
    order = weight_sketch.order
    box = ShardGeometry(weight_sketch.shape, tuple(local[d] for d in order))
    return sum(_words_in(tree, box) for tree in [weight_sketch.tree])


def _words_in(tree: Any, box: ShardGeometry) -> int:
    if type(tree) is Truncated:
        return _words_in(tree.fill, box)
    if type(tree) is RandomFill:
        if not tree.words:  # the counter policy draws only the shard
            return math.prod(box.local)
        fill_kernel = kernel(tree.name, tree.dtype, dict(tree.arguments))
        assert fill_kernel is not None
        return words_drawn(box, fill_kernel.words_each)
    if type(tree) is Masked:
        return _words_in(tree.new, box) + _words_in(tree.old, box)
    if type(tree) is Apply:
        return sum(_words_in(a, box) for a in tree.args)
    if type(tree) is WholeSketch:
        return sum(
            _words_in(step.fill, ShardGeometry(step.size, step.size)) for step in tree.steps if step.fill is not None
        )
    return 0
