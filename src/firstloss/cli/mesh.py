"""A mesh of ranks for `inspect`: the shard of each weight on a rank, by PyTorch's conventions.

FSDP2 cuts the first dimension of every parameter in parts of equal size, the last ones smaller or empty, and leaves
buffers whole. Tensor parallelism cuts before it: as the model's own plan says, where it has one (`model.tp_plan`, as
transformers' models do).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..errors import TargetError

Axes = dict[str, int]
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that cut it, the outer ones first

# Axes along which weights are replicated, and those along which the model's own plan cuts. All others are FSDP's.
REPLICAS = frozenset({"dp_replicate", "replicate", "replica", "ddp"})
TENSOR = frozenset({"tp", "tensor", "model"})


@dataclass(frozen=True)
class RankShard:
    """What one rank holds of a weight, at most."""

    spec: Spec
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        cuts = ", ".join(f"{'+'.join(entry)} cuts {dim}" for dim, entry in enumerate(self.spec) if entry)
        return cuts or "whole"


def parse(text: str) -> Axes:
    """`fsdp=64,tp=8` as {"fsdp": 64, "tp": 8}.

    Raises:
        TargetError: if it is not that.
    """
    axes: Axes = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (equals and name.isidentifier() and size.isdecimal() and int(size) > 0) or name in axes:
            raise TargetError(f"--mesh {text!r}: {part!r} is not AXIS=SIZE; write for instance --mesh fsdp=64,tp=8")
        axes[name] = int(size)
    return axes


def parse_cuts(texts: Iterable[str], axes: Axes) -> dict[str, Spec]:
    """`*.q_proj.weight=tp+fsdp,-` as {"*.q_proj.weight": (("tp", "fsdp"), ())}.

    Raises:
        TargetError: if it is not that, or names an axis that the mesh does not have.
    """
    found = {}
    for text in texts:
        pattern, equals, cuts = text.rpartition("=")
        if not (equals and pattern):
            raise TargetError(f"--cut {text!r} is not PATTERN=CUTS; write for instance --cut '*.q_proj.weight=tp,-'")
        spec = tuple(() if entry.strip() in ("", "-") else tuple(entry.strip().split("+")) for entry in cuts.split(","))
        for axis in (axis for entry in spec for axis in entry):
            if axis not in axes:
                raise TargetError(f"--cut {text!r} names an axis {axis!r}; the mesh has {', '.join(axes)}")
        found[pattern] = spec
    return found


def part_of(
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    axes: Axes,
    is_parameter: bool,
    plan: Mapping[str, str],
    cuts: Mapping[str, Spec],
) -> RankShard:
    """What a rank holds of the weight `name`.

    Args:
        plan: styles of tensor parallelism by patterns of module or parameter names, as transformers has them.
        cuts: specs by patterns of weight names, which come first; FSDP cuts none of these.

    Raises:
        TargetError: if a cut has more dimensions than the weight.
    """
    spec: list[list[str]] = [[] for _ in shape]
    for pattern, wanted in cuts.items():
        if fnmatchcase(name, pattern):
            if len(wanted) > len(shape):
                raise TargetError(f"--cut {pattern!r} has {len(wanted)} dimensions, and {name} has {len(shape)}")
            spec = [list(entry) for entry in (*wanted, *[()] * (len(shape) - len(wanted)))]
            break
    else:
        if is_parameter and shape:
            dim = dimension(name, len(shape), plan)
            if dim is not None:
                spec[dim] += [axis for axis in axes if axis in TENSOR]
            spec[0] += [axis for axis in axes if axis not in TENSOR and axis not in REPLICAS]
    local = tuple(_largest(size, [axes[axis] for axis in entry]) for size, entry in zip(shape, spec, strict=True))
    return RankShard(tuple(map(tuple, spec)), local, math.prod(local) * itemsize)


def plan_of(model: Any) -> dict[str, str]:
    """The model's own plan of tensor parallelism; empty if it has none."""
    plan = getattr(model, "tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def dimension(name: str, dims: int, plan: Mapping[str, str]) -> int | None:
    """The dimension that the plan cuts a weight along."""
    module, _, last = name.rpartition(".")
    style = next((s for pattern, s in plan.items() if fnmatchcase(module, pattern) or fnmatchcase(name, pattern)), "")
    if style.startswith("embedding_"):
        return 0 if "rowwise" in style else dims - 1
    if "colwise" in style:
        return max(dims - 2, 0)
    if "rowwise" in style:
        return None if last == "bias" or dims == 1 else dims - 1
    return None


def _largest(size: int, parts: Sequence[int]) -> int:
    """The largest of the parts, cut as `torch.chunk` cuts."""
    for count in parts:
        size = -(-size // count)
    return size
