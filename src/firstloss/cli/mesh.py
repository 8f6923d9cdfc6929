"""The options `--mesh` and `--shard`, and the shard of each weight on a rank, by PyTorch's conventions.

FSDP2 shards the first dimension of every parameter in chunks of equal size, of which the last ones may be smaller or
empty, and replicates buffers. Tensor parallelism shards before it, by the model's own plan if it has one
(`model.tp_plan`, as transformers' models do).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..errors import TargetError

Axes = dict[str, int]
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that shard it, outermost first

# Axes that the model's own plan shards along. All others are FSDP's, except those of replicas.
TENSOR = frozenset({"tp", "tensor", "model"})


@dataclass(frozen=True)
class RankShard:
    """The largest shard of a weight on any rank."""

    spec: Spec
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        parts = ", ".join(f"{'+'.join(entry)} cuts {dim}" for dim, entry in enumerate(self.spec) if entry)
        return parts or "whole"


def parse(text: str) -> Axes:
    """Parse `fsdp=64,tp=8` to {"fsdp": 64, "tp": 8}.

    Raises:
        TargetError: for any other syntax.
    """
    axes: Axes = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (equals and name.isidentifier() and size.isdecimal() and int(size) > 0):
            raise TargetError(f"--mesh {text!r}: {part!r} is not AXIS=SIZE; write for example --mesh fsdp=64,tp=8")
        if name in axes:
            raise TargetError(f"--mesh {text!r}: {name!r} is given twice")
        axes[name] = int(size)
    return axes


def add_shard_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """The option `--shard`, which may be repeated.

    Args:
        parser: the command's.
        default: what happens to weights that it does not name.
    """
    parser.add_argument(
        "--shard",
        metavar="PATTERN=SPEC",
        action="append",
        default=[],
        help="shard the weights of these names: for each dimension an axis, axes joined by +, or -, as "
        f"'*.q_proj.weight=tp+fsdp,-'; {default}",
    )


def parse_specs(texts: Iterable[str], axes: Axes | None) -> dict[str, Spec]:
    """Parse `*.q_proj.weight=tp+fsdp,-` to {"*.q_proj.weight": (("tp", "fsdp"), ())}.

    Raises:
        TargetError: for any other syntax, a pattern that is given twice, or an axis that the mesh does not have.
    """
    found: dict[str, Spec] = {}
    for text in texts:
        pattern, equals, entries = text.rpartition("=")
        if not (equals and pattern):
            raise TargetError(f"--shard {text!r} is not PATTERN=SPEC; write for example --shard '*.q_proj.weight=tp,-'")
        if axes is None:
            raise TargetError("--shard shards weights over a mesh: pass the mesh as well, such as --mesh fsdp=64,tp=8")
        if pattern in found:
            raise TargetError(f"--shard: {pattern!r} is given twice")
        split = [entry.strip() for entry in entries.split(",")]
        spec = tuple(() if entry in ("", "-") else tuple(entry.split("+")) for entry in split)
        for axis in (axis for entry in spec for axis in entry):
            if axis not in axes:
                raise TargetError(f"--shard {text!r} names an axis {axis!r}; the mesh has {', '.join(axes)}")
        found[pattern] = spec
    return found


def shard_of(
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    axes: Axes,
    is_parameter: bool,
    plan: Mapping[str, str],
    given: Mapping[str, Spec],
) -> RankShard:
    """The shard of the weight `name` on a rank.

    Args:
        plan: tensor parallel styles by patterns of module or parameter names, as in transformers.
        given: specs by patterns of weight names; they take precedence, and FSDP does not shard these weights.

    Raises:
        TargetError: if a spec has more dimensions than the weight.
    """
    from ..init.shardings import REPLICA_AXES

    spec: list[list[str]] = [[] for _ in shape]
    for pattern, wanted in given.items():
        if fnmatchcase(name, pattern):
            if len(wanted) > len(shape):
                raise TargetError(f"--shard {pattern!r} has {len(wanted)} dimensions, but {name} has {len(shape)}")
            spec = [list(entry) for entry in (*wanted, *[()] * (len(shape) - len(wanted)))]
            break
    else:
        if is_parameter and shape:
            dim = dimension(name, len(shape), plan)
            if dim is not None:
                spec[dim] += [axis for axis in axes if axis in TENSOR]
            spec[0] += [axis for axis in axes if axis not in TENSOR and axis not in REPLICA_AXES]
    local = tuple(_largest(size, [axes[axis] for axis in entry]) for size, entry in zip(shape, spec, strict=True))
    return RankShard(tuple(map(tuple, spec)), local, math.prod(local) * itemsize)


def plan_of(model: Any) -> dict[str, str]:
    """The model's own tensor parallel plan; empty if it has none."""
    plan = getattr(model, "tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def dimension(name: str, dims: int, plan: Mapping[str, str]) -> int | None:
    """The dimension along which the plan shards a weight."""
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
    """The largest chunk, split as `torch.chunk` does."""
    for count in parts:
        size = -(-size // count)
    return size
