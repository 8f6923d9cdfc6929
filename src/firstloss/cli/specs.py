"""Partition specs of a model's weights: from `--cut`, else from the model's own tensor-parallel plan."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..errors import PlanError
from . import mesh

if TYPE_CHECKING:
    import torch


def specs_of(model: torch.nn.Module, axes: mesh.Axes, cuts: list[str]) -> dict[str, tuple]:
    """Specs for `fl.shard`: as --cut says, else as the model's own plan of tensor parallelism does, with the data axes
    on another dimension. Weights that neither names are cut by the default policy."""
    from ..init.shardings import DATA_AXES

    shapes = {name: tuple(p.shape) for name, p in (*model.named_parameters(), *model.named_buffers())}
    specs: dict[str, tuple] = {}
    for pattern, said in mesh.parse_cuts(cuts, axes).items():
        matching = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"--cut {pattern!r} matches no weight; they have names like {next(iter(shapes), 'none')}")
        for name in matching:
            _check_cut(name, shapes[name], said, axes, f"--cut {pattern!r}")
        specs[pattern] = said
    tensor = tuple(axis for axis in axes if axis in mesh.TENSOR and axes[axis] > 1)
    data = tuple(axis for axis in axes if axis in DATA_AXES)
    plan = mesh.plan_of(model)
    others = [axis for axis in axes if axis not in (*tensor, *data)]
    used = {axis for spec in specs.values() for entry in spec for axis in entry}
    unknown = [axis for axis in others if axis not in used and axes[axis] > 1]
    if unknown and data:
        raise PlanError(
            f"--mesh: nothing is cut over {unknown[0]!r}. Axes for data are {', '.join(sorted(DATA_AXES))}, for "
            f"tensor parallelism {', '.join(sorted(mesh.TENSOR))}; weights are cut over any axis with --cut"
        )
    if tensor and not plan and not set(tensor) & used:
        raise PlanError(
            f"--mesh: {type(model).__name__} has no plan of its own for tensor parallelism (tp_plan), so that nothing "
            f"is cut over {tensor[0]!r}. Say what is: --cut '*.up.weight={tensor[0]},-'"
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
        _check_cut(name, shape, tuple(spec), axes, "the model's own plan")
        ways = math.prod(axes[axis] for axis in data)
        room = [d for d in range(len(shape)) if d != dim and shape[d] % ways == 0]
        if data and room:
            spec[max(room, key=lambda d: shape[d])] = data
        elif data and shape[dim] % (ways * math.prod(axes[axis] for axis in tensor)) == 0:
            spec[dim] = (*tensor, *data)
        specs[name] = tuple(spec)
    return specs


def _check_cut(name: str, shape: tuple[int, ...], spec: mesh.Spec, axes: mesh.Axes, whose: str) -> None:
    if len(spec) > len(shape):
        raise PlanError(f"{whose} has {len(spec)} dimensions, and {name} has {len(shape)}")
    for dim, entry in enumerate(spec):
        ways = math.prod(axes[axis] for axis in entry)
        if shape[dim] % ways:
            fits = max(size for size in range(1, ways + 1) if shape[dim] % size == 0)
            raise PlanError(
                f"{whose} cuts dimension {dim} of {name}, of shape {'x'.join(map(str, shape))}, over "
                f"{' x '.join(f'{axis}={axes[axis]}' for axis in entry)}: {ways} does not divide {shape[dim]}. "
                f"Write a mesh on which that is {fits}, or cut it otherwise with --cut '{name}=...'"
            )
