"""Partition specs of a model's weights: from `--shard`, or else from the model's own tensor parallel plan."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from . import mesh

if TYPE_CHECKING:
    import torch


def specs_of(model: torch.nn.Module, axes: mesh.Axes, given: list[str]) -> dict[str, tuple[Any, ...]]:
    """Specs for `fl.shard`: from --shard, or else from the model's own tensor parallel plan, with the data axes on
    another dimension. Weights with neither are sharded by the default policy."""
    from ..init.shardings import DATA_AXES

    shapes = {name: tuple(p.shape) for name, p in (*model.named_parameters(), *model.named_buffers())}
    specs: dict[str, tuple[Any, ...]] = {}
    for pattern, spec_given in mesh.parse_specs(given, axes).items():
        matching = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"--shard {pattern!r} matches no weight; names look like {next(iter(shapes), 'none')}")
        for name in matching:
            _check_spec(name, shapes[name], spec_given, axes, f"--shard {pattern!r}")
        specs[pattern] = spec_given
    tensor = tuple(axis for axis in axes if axis in mesh.TENSOR and axes[axis] > 1)
    data = tuple(axis for axis in axes if axis in DATA_AXES)
    plan = mesh.plan_of(model)
    others = [axis for axis in axes if axis not in (*tensor, *data)]
    used = {axis for spec in specs.values() for entry in spec for axis in entry}
    unknown = [axis for axis in others if axis not in used and axes[axis] > 1]
    if unknown and data:
        raise PlanError(
            f"--mesh: nothing is sharded over {unknown[0]!r}. Data axes are {', '.join(sorted(DATA_AXES))}, tensor "
            f"parallel axes {', '.join(sorted(mesh.TENSOR))}; use --shard to shard weights over another axis"
        )
    if tensor and not plan and not set(tensor) & used:
        raise PlanError(
            f"--mesh: {type(model).__name__} has no tensor parallel plan of its own (tp_plan), so nothing is sharded "
            f"over {tensor[0]!r}. Use --shard, for example --shard '*.up.weight={tensor[0]},-'"
        )
    if not tensor:
        return specs
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        dim = mesh.dimension(name, len(shape), plan)
        if dim is None or any(fnmatchcase(name, pattern) for pattern in specs):
            continue
        spec: list[tuple[str, ...]] = [()] * len(shape)
        spec[dim] = tensor
        _check_spec(name, shape, tuple(spec), axes, "the model's own plan")
        shards = math.prod(axes[axis] for axis in data)
        divisible = [d for d in range(len(shape)) if d != dim and shape[d] % shards == 0]
        if data and divisible:
            spec[max(divisible, key=lambda d: shape[d])] = data
        elif data and shape[dim] % (shards * math.prod(axes[axis] for axis in tensor)) == 0:
            spec[dim] = (*tensor, *data)
        specs[name] = tuple(spec)
    return specs


def _check_spec(name: str, shape: tuple[int, ...], spec: mesh.Spec, axes: mesh.Axes, source: str) -> None:
    if len(spec) > len(shape):
        raise PlanError(f"{source} has {len(spec)} dimensions, but {name} has {len(shape)}")
    for dim, entry in enumerate(spec):
        shards = math.prod(axes[axis] for axis in entry)
        if shape[dim] % shards:
            fits = max(size for size in range(1, shards + 1) if shape[dim] % size == 0)
            raise PlanError(
                f"{source} shards dimension {dim} of {name}, of shape {'x'.join(map(str, shape))}, over "
                f"{' x '.join(f'{axis}={axes[axis]}' for axis in entry)}: {shards} does not divide {shape[dim]}. "
                f"Use a mesh on which that is {fits}, or shard it otherwise with --shard '{name}=...'"
            )
