"""Shardings: which part of each weight is on which device of a mesh, in words and as arithmetic.

A spec says for each of a weight's dimensions over which axes of the mesh it is cut: a tuple of None, an axis' name, or
several names, as JAX's `PartitionSpec` and torch_xla's `mark_sharding` have it. Nothing here imports JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch

from ..capture.deferred import named_tensors
from ..errors import ShardingError
from ..program.source import UNKNOWN, Source, here

Axes = dict[str, int]  # a mesh: sizes of its axes by name, the slowest first
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that cut it, the slowest first
M = TypeVar("M", bound=torch.nn.Module)

_ATTRIBUTE = "_firstloss_sharding"
# Axes over which data is split: those that a weight is cut over by default, where a mesh has some of them.
DATA_AXES = frozenset({"data", "dp", "fsdp", "dp_shard", "dp_replicate", "replica", "batch"})


class ShardingMark(NamedTuple):
    """What `mark_sharding` leaves on a tensor."""

    mesh: Any
    spec: tuple
    source: Source
    name: str = "a weight"


class WeightSharding(NamedTuple):
    """The sharding of one weight.

    spec: for each dimension the axes that cut it. Every one divides: `jax.Array`s have equal shards only.
    moved: axes that did not divide the dimension that was asked for, and what became of them, in words.
    """

    spec: Spec
    moved: str = ""


def mark_sharding(tensor: torch.Tensor, mesh: Any, spec: Sequence[Any]) -> torch.Tensor:
    """Say how one weight, deferred or not, is to be cut; returns it. As `torch_xla.distributed.spmd.mark_sharding`.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> fl.mark_sharding(model.weight, {"tp": 1}, ("tp", None)) is model.weight
        True

    Args:
        tensor: the weight.
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`, a `torch` DeviceMesh, or `{axis: size}`.
        spec: for each dimension None, an axis, or a tuple of axes; dimensions left out at the end are not cut.

    Returns:
        `tensor`.

    Raises:
        ShardingError: if the spec has more dimensions than the tensor, or names an axis that the mesh does not have or
            names one twice.
    """
    source = here()
    if not isinstance(tensor, torch.Tensor):
        raise ShardingError(f"{_at(source)}{tensor!r:.80} is no tensor. Give the weight itself, as model.head.weight")
    name = f"a weight of shape {list(tensor.shape)}"
    checked(name, tuple(tensor.shape), spec, axes_of(mesh), source)
    setattr(tensor, _ATTRIBUTE, ShardingMark(mesh, tuple(spec), source, name))
    return tensor


def copy_sharding_mark(tensor: torch.Tensor, mark: ShardingMark) -> None:
    """Have `tensor`, of the shape of the weight that bears `mark`, sharded as that is."""
    setattr(tensor, _ATTRIBUTE, mark)


def shard(module: M, specs: Mapping[str, Sequence[Any]], mesh: Any) -> M:
    """Say by name pattern how the weights of `module` are to be cut; returns it.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> _ = fl.shard(model, {"weight": ("tp", None)}, {"tp": 2})
        >>> text = fl.init_program(model).to_stablehlo()  # on two devices, `run()` makes these shards
        >>> 'out_shardings=[<@mesh, [{}]>, <@mesh, [{"tp"}, {}]>]' in text  # of bias and weight
        True

    Args:
        module: a Module, deferred or not.
        specs: shell patterns of qualified names (`"*.q_proj.weight"`), each with its spec; the first that matches a
            name holds for it. A pattern may match some weights only through their further names, if they are tied.
        mesh: as for `mark_sharding`.

    Returns:
        `module`.

    Raises:
        ShardingError: as `mark_sharding`, or if a pattern matches nothing. No weight is marked then.
    """
    source, axes = here(), axes_of(mesh)
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"{_at(source)}{module!r:.80} is no Module. For a tensor there is fl.mark_sharding")
    tensors = {name: tensor for name, tensor, kind in named_tensors(module) if kind != "attribute"}
    matched = match(tensors, specs, source)
    for name, spec in matched.items():
        checked(name, tuple(tensors[name].shape), spec, axes, source)
    for name in reversed(matched):  # of tied names the first one's spec holds
        setattr(tensors[name], _ATTRIBUTE, ShardingMark(mesh, tuple(matched[name]), source, name))
    return module


def mark_of(tensor: torch.Tensor) -> ShardingMark | None:
    """What `mark_sharding` or `shard` said of a tensor."""
    return getattr(tensor, _ATTRIBUTE, None)


def match(names: Mapping[str, Any], specs: Mapping[str, Sequence[Any]], source: Source) -> dict[str, Sequence[Any]]:
    """For each of `names` that a pattern matches, the spec of the first one that does."""
    if not isinstance(specs, Mapping) or not all(isinstance(pattern, str) for pattern in specs):
        raise ShardingError(
            f"{_at(source)}the shardings {specs!r:.120} are no mapping of name patterns. Write a dict, as "
            "{'*.weight': ('fsdp', None)}"
        )
    # A plan's patterns are the names of all weights: what has no wildcard is looked up.
    wild = [pattern for pattern in specs if any(sign in pattern for sign in "*?[")]
    plain = specs.keys() - wild
    for pattern in specs:
        if pattern not in names if pattern in plain else not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(list(names)[:3])
            raise ShardingError(
                f"{_at(source)}the pattern {pattern!r} matches no weight. Weights have names like {near}; "
                "a pattern has to match all of a name, as '*.weight' does"
            )
    order = {pattern: place for place, pattern in enumerate(specs)}
    found = {}
    for name in names:
        fitting = [pattern for pattern in wild if fnmatchcase(name, pattern)][:1]
        fitting += [name] if name in plain else []
        if fitting:
            found[name] = specs[min(fitting, key=order.__getitem__)]
    return found


def axes_of(mesh: Any) -> Axes:
    """Names and sizes of a mesh's axes.

    Raises:
        ShardingError: if `mesh` is none.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if names is not None and sizes is not None:
        sizes = dict(zip(names, sizes, strict=True))
    if isinstance(sizes, Mapping) and all(_is_axis(name, size) for name, size in sizes.items()):
        return {name: int(size) for name, size in sizes.items()}
    raise ShardingError(
        f"{_at(here())}{mesh!r} is no mesh. Give a jax.sharding.Mesh, a torch DeviceMesh with mesh_dim_names, or the "
        "sizes of its axes by name, as {'fsdp': 8}"
    )


def checked(name: str, shape: tuple[int, ...], spec: Any, axes: Axes, source: Source = UNKNOWN) -> Spec:
    """`spec` written out, with an entry for each dimension.

    Raises:
        ShardingError: naming the weight, the spec and the line.
    """
    where = f"{_at(source)}{name}: the spec {_shown(spec)}"
    if type(spec).__module__.startswith("jax") and hasattr(spec, "__iter__"):  # a PartitionSpec, which is no Sequence
        spec = tuple(spec)
    if isinstance(spec, (str, bytes)) or not isinstance(spec, Sequence):
        raise ShardingError(f"{where} is no tuple. Write one entry for each dimension, as ('fsdp', None)")
    if len(spec) > len(shape):
        raise ShardingError(
            f"{where} has {len(spec)} dimensions, and the weight, of shape {list(shape)}, has {len(shape)}. Leave "
            f"out the last {len(spec) - len(shape)}"
        )
    out: list[tuple[str, ...]] = []
    for entry in spec:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, Sequence) or not all(isinstance(axis, str) for axis in names):
            raise ShardingError(f"{where} has {entry!r} in it. Write None, an axis' name, or a tuple of names")
        out.append(tuple(names))
    flat = [axis for entry in out for axis in entry]
    for axis in flat:
        if axis not in axes:
            raise ShardingError(f"{where} names an axis {axis!r}. The mesh has {', '.join(map(repr, axes))}")
        if flat.count(axis) > 1:
            raise ShardingError(f"{where} names {axis!r} twice. An axis cuts one dimension of a weight")
    return (*out, *[()] * (len(shape) - len(out)))


def divided(shape: tuple[int, ...], spec: Spec, axes: Axes) -> WeightSharding:
    """`spec` made to divide `shape`.

    Axes that do not divide their dimension go to the largest other one that they divide, so that shards are as small
    as was asked for; where there is none, the weight is whole along them.
    """
    out: list[list[str]] = []
    left: list[tuple[int, str]] = []  # dimensions, and axes that do not divide them
    for dim, entry in enumerate(spec):
        kept = 0
        while kept < len(entry) and shape[dim] % _parts(entry[: kept + 1], axes) == 0:
            kept += 1
        out.append(list(entry[:kept]))
        left += [(dim, axis) for axis in entry[kept:]]
    moved = []
    for dim, axis in left:
        room = [
            d
            for d in range(len(shape))
            if shape[d] and not spec[d] and shape[d] % (_parts(out[d], axes) * axes[axis]) == 0
        ]
        to = max(room, key=lambda d: shape[d] // _parts(out[d], axes), default=None)
        if to is not None:
            out[to].append(axis)
        what = "the weight is whole along it" if to is None else f"it cuts dimension {to} instead"
        moved.append(f"axis {axis!r} of size {axes[axis]} does not divide dimension {dim} of {shape[dim]}: {what}")
    return WeightSharding(tuple(tuple(entry) for entry in out), "; ".join(moved))


def by_default(shape: tuple[int, ...], axes: Axes) -> Spec:
    """As FSDP: the largest dimension that the data axes divide is cut over all of them; else over as many as can be.

    Data axes are those named in `DATA_AXES`; in a mesh that has none of them, all axes.
    """
    data = [axis for axis in axes if axis in DATA_AXES] or list(axes)
    best: tuple[int, int, int, tuple[str, ...]] = (1, 0, 0, ())
    for chosen in range(1, 1 << len(data)):
        names = tuple(axis for i, axis in enumerate(data) if chosen >> i & 1)
        parts = _parts(names, axes)
        for dim, size in enumerate(shape):
            if size and size % parts == 0:
                best = max(best, (parts, size, -dim, names), key=lambda b: b[:3])
    parts, _, dim, names = best
    return tuple(names if d == -dim and parts > 1 else () for d in range(len(shape)))


def local_shape(shape: tuple[int, ...], spec: Spec, axes: Axes) -> tuple[int, ...]:
    """The shape of one shard."""
    return tuple(size // _parts(entry, axes) for size, entry in zip(shape, spec, strict=True))


def starts(shape: tuple[int, ...], spec: Spec, axes: Axes, where: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where the shard begins of the device that is number `where[axis]` along each axis: ints, or traced ones."""
    out = []
    for size, entry in zip(shape, spec, strict=True):
        index: Any = 0
        for axis in entry:
            index = index * axes[axis] + where[axis]
        out.append(index * (size // _parts(entry, axes)))
    return tuple(out)


def _parts(names: Sequence[str], axes: Axes) -> int:
    return math.prod(axes[axis] for axis in names)


def _is_axis(name: Any, size: Any) -> bool:
    """Whether they are an axis' name and size. A quotation mark would end the name in a module's text."""
    written = isinstance(name, str) and name.isprintable() and not set(name) & set('"\\') and name != ""
    return written and not isinstance(size, bool) and hasattr(size, "__index__") and int(size) > 0


def _at(source: Source) -> str:
    return "" if source == UNKNOWN else f"{source}: "


def _shown(spec: Any) -> str:
    return repr(tuple(spec)) if isinstance(spec, Sequence) and not isinstance(spec, str) else repr(spec)
