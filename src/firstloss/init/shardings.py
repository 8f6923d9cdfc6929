"""Shardings: which shard of each weight is on which device of a mesh.

A spec has an entry for each dimension of a weight with the mesh axes that shard it: None, an axis name, or a tuple of
names, as in JAX's `PartitionSpec` and torch_xla's `mark_sharding`. Does not import JAX.
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

Axes = dict[str, int]  # a mesh: the sizes of its axes by name, in major-to-minor order
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that shard it, in major-to-minor order
M = TypeVar("M", bound=torch.nn.Module)

_ATTRIBUTE = "_firstloss_sharding"
# Axes whose devices hold whole weights by default, and with them those over which weights are sharded, as FSDP does.
# The batch is sharded over all of them.
REPLICA_AXES = frozenset({"dp_replicate", "replicate", "replica", "ddp"})
DATA_AXES = frozenset({"data", "dp", "fsdp", "dp_shard", "batch"}) | REPLICA_AXES


class ShardingMark(NamedTuple):
    """The annotation of a tensor by `mark_sharding`. A mesh of None is the one that the weight comes to be on."""

    mesh: Any
    spec: tuple[Any, ...]
    source: Source
    name: str = "a weight"

    @property
    def named_axes(self) -> set[str]:
        """The axes in its spec."""
        return {axis for entry in self.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}


class WeightSharding(NamedTuple):
    """The sharding of one weight.

    spec: for each dimension the axes that shard it. They divide it, since the shards of a `jax.Array` are equal.
    moved: a description of axes that do not divide the requested dimension, and what was done instead.
    """

    spec: Spec
    moved: str = ""


def mark_sharding(tensor: torch.Tensor, mesh: Any, spec: Sequence[Any]) -> torch.Tensor:
    """Annotate a weight, deferred or not, with a sharding. Like `torch_xla.distributed.spmd.mark_sharding`.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> fl.mark_sharding(model.weight, {"tp": 1}, ("tp", None)) is model.weight
        True

    Args:
        tensor: the weight.
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`, a `torch` DeviceMesh, or `{axis: size}`. None: the backend's, or
            the one that is passed to the methods of `InitProgram`; then the axes' names are checked there.
        spec: for each dimension None, an axis, or a tuple of axes; omitted trailing dimensions are not sharded.

    Returns:
        `tensor`.

    Raises:
        ShardingError: if the spec has more dimensions than the tensor, or names an unknown axis or an axis twice.
    """
    source = here()
    if not isinstance(tensor, torch.Tensor):
        raise ShardingError(f"{_at(source)}{tensor!r:.80} is not a tensor. Pass a weight, such as model.head.weight")
    name = f"a weight of shape {list(tensor.shape)}"
    checked(name, tuple(tensor.shape), spec, None if mesh is None else axes_of(mesh), source)
    setattr(tensor, _ATTRIBUTE, ShardingMark(mesh, tuple(spec), source, name))
    return tensor


def copy_sharding_mark(tensor: torch.Tensor, mark: ShardingMark) -> None:
    """Have `tensor`, of the shape of the weight that bears `mark`, sharded as that is."""
    setattr(tensor, _ATTRIBUTE, mark)


def shard(module: M, specs: Mapping[str, Sequence[Any]], mesh: Any = None) -> M:
    """Annotate the weights of `module` with shardings, by name pattern.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> _ = fl.shard(model, {"weight": ("tp", None)})
        >>> text = fl.init_program(model).to_stablehlo({"tp": 2})  # on two devices, `run` makes these shards
        >>> 'out_shardings=[<@mesh, [{}]>, <@mesh, [{"tp"}, {}]>]' in text  # of bias and weight
        True

    Args:
        module: a Module, deferred or not.
        specs: shell patterns of qualified names (`"*.q_proj.weight"`), each with its spec; the first match applies. A
            tied weight may be matched by any of its names.
        mesh: as for `mark_sharding`.

    Returns:
        `module`.

    Raises:
        ShardingError: as `mark_sharding`, or if a pattern matches nothing. No weight is annotated then.
    """
    source, axes = here(), None if mesh is None else axes_of(mesh)
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"{_at(source)}{module!r:.80} is not a Module. For a tensor use fl.mark_sharding")
    tensors = {name: tensor for name, tensor, kind in named_tensors(module) if kind != "attribute"}
    matched = match(tensors, specs, source)
    for name, spec in matched.items():
        checked(name, tuple(tensors[name].shape), spec, axes, source)
    for name in reversed(matched):  # of tied names the first one's spec applies
        setattr(tensors[name], _ATTRIBUTE, ShardingMark(mesh, tuple(matched[name]), source, name))
    return module


def mark_of(tensor: torch.Tensor) -> ShardingMark | None:
    """The annotation of a tensor by `mark_sharding` or `shard`."""
    return getattr(tensor, _ATTRIBUTE, None)


def match(names: Mapping[str, Any], specs: Mapping[str, Sequence[Any]], source: Source) -> dict[str, Sequence[Any]]:
    """The spec of the first pattern that matches, for each of `names` that has one."""
    if not isinstance(specs, Mapping) or not all(isinstance(pattern, str) for pattern in specs):
        raise ShardingError(
            f"{_at(source)}the shardings {specs!r:.120} are not a mapping of name patterns. Use a dict, such as "
            "{'*.weight': ('fsdp', None)}"
        )
    # Patterns without a wildcard are looked up: there may be one for each weight.
    wild = [pattern for pattern in specs if any(sign in pattern for sign in "*?[")]
    plain = specs.keys() - wild
    for pattern in specs:
        if pattern not in names if pattern in plain else not any(fnmatchcase(name, pattern) for name in names):
            examples = ", ".join(list(names)[:3])
            raise ShardingError(
                f"{_at(source)}the pattern {pattern!r} matches no weight. Weights have names like {examples}; "
                "a pattern must match the whole name, as '*.weight' does"
            )
    order = {pattern: index for index, pattern in enumerate(specs)}
    specs_by_name = {}
    for name in names:
        fitting = [pattern for pattern in wild if fnmatchcase(name, pattern)][:1]
        fitting += [name] if name in plain else []
        if fitting:
            specs_by_name[name] = specs[min(fitting, key=order.__getitem__)]
    return specs_by_name


def axes_of(mesh: Any) -> Axes:
    """The names and sizes of a mesh's axes.

    Raises:
        ShardingError: if `mesh` is not a mesh.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if names is not None and sizes is not None:
        sizes = dict(zip(names, sizes, strict=True))
    if isinstance(sizes, Mapping) and all(_is_axis(name, size) for name, size in sizes.items()):
        return {name: int(size) for name, size in sizes.items()}
    raise ShardingError(
        f"{_at(here())}{mesh!r} is not a mesh. Use a jax.sharding.Mesh, a torch DeviceMesh with mesh_dim_names, or the "
        "sizes of its axes by name, such as {'fsdp': 8}"
    )


def checked(name: str, shape: tuple[int, ...], spec: Any, axes: Axes | None, source: Source = UNKNOWN) -> Spec:
    """Validate and normalize `spec`, with an entry for each dimension. `axes`: None where the mesh is not known yet.

    Raises:
        ShardingError: with the weight, the spec and the source line.
    """
    where = f"{_at(source)}{name}: the spec {_shown(spec)}"
    if type(spec).__module__.startswith("jax") and hasattr(spec, "__iter__"):  # a PartitionSpec is not a Sequence
        spec = tuple(spec)
    if isinstance(spec, (str, bytes)) or not isinstance(spec, Sequence):
        raise ShardingError(f"{where} is not a tuple. Use one entry for each dimension, as in ('fsdp', None)")
    if len(spec) > len(shape):
        raise ShardingError(
            f"{where} has {len(spec)} dimensions, but the weight, of shape {list(shape)}, has {len(shape)}. Remove the "
            f"last {len(spec) - len(shape)}"
        )
    out: list[tuple[str, ...]] = []
    for entry in spec:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, Sequence) or not all(isinstance(axis, str) for axis in names):
            raise ShardingError(f"{where} contains {entry!r}. Use None, an axis name, or a tuple of names")
        out.append(tuple(names))
    flat = [axis for entry in out for axis in entry]
    for axis in flat:
        if axes is not None and axis not in axes:
            raise ShardingError(f"{where} names an axis {axis!r}. The mesh has {', '.join(map(repr, axes))}")
        if flat.count(axis) > 1:
            raise ShardingError(f"{where} names {axis!r} twice. An axis shards only one dimension of a weight")
    return (*out, *[()] * (len(shape) - len(out)))


def divided(shape: tuple[int, ...], spec: Spec, axes: Axes) -> WeightSharding:
    """Adapt `spec` so that it divides `shape`.

    An axis that does not divide its dimension is moved to the largest other one that it divides, so that shards are as
    small as requested; if there is none, the weight is replicated along it.
    """
    out: list[list[str]] = []
    indivisible: list[tuple[int, str]] = []  # dimensions, and axes that do not divide them
    for dim, entry in enumerate(spec):
        count = 0
        while count < len(entry) and shape[dim] % _parts(entry[: count + 1], axes) == 0:
            count += 1
        out.append(list(entry[:count]))
        indivisible += [(dim, axis) for axis in entry[count:]]
    moved = []
    for dim, axis in indivisible:
        candidates = [
            d
            for d in range(len(shape))
            if shape[d] and not spec[d] and shape[d] % (_parts(out[d], axes) * axes[axis]) == 0
        ]
        to = max(candidates, key=lambda d: shape[d] // _parts(out[d], axes), default=None)
        if to is not None:
            out[to].append(axis)
        action = "the weight is replicated along it" if to is None else f"it shards dimension {to} instead"
        moved.append(f"axis {axis!r} of size {axes[axis]} does not divide dimension {dim} of {shape[dim]}: {action}")
    return WeightSharding(tuple(tuple(entry) for entry in out), "; ".join(moved))


def sharding_axes(axes: Axes) -> list[str]:
    """The axes over which weights are sharded by default."""
    data = [axis for axis in axes if axis in DATA_AXES] or list(axes)
    return [axis for axis in data if axis not in REPLICA_AXES]


def by_default(shape: tuple[int, ...], axes: Axes) -> Spec:
    """The default, like FSDP: shard the largest dimension that is divisible by all data axes, or by most of them.

    Data axes are those in `DATA_AXES` without replicas; if the mesh has no data axes, all axes.
    """
    data = sharding_axes(axes)
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
    """The offset of the shard of the device with index `where[axis]` along each axis; ints may be traced."""
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
    """Whether they are a valid axis name and size; StableHLO's text cannot quote all names."""
    printable = isinstance(name, str) and name.isprintable() and not set(name) & set('"\\') and name != ""
    return printable and not isinstance(size, bool) and hasattr(size, "__index__") and int(size) > 0


def _at(source: Source) -> str:
    return "" if source == UNKNOWN else f"{source}: "


def _shown(spec: Any) -> str:
    return repr(tuple(spec)) if isinstance(spec, Sequence) and not isinstance(spec, str) else repr(spec)
