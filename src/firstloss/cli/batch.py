"""Parse `--batch`: the shapes and dtypes of a batch."""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PlanError
from . import mesh

if TYPE_CHECKING:
    import torch

_SHAPE = re.compile(r"(?:(?P<name>\w+)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


class TensorSpec(NamedTuple):
    """A tensor of the batch; its name and dtype may be "", which says nothing."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def parse_tensor(text: str) -> TensorSpec:
    """One tensor of the batch.

    Raises:
        PlanError: if `text` is not [NAME=]SHAPE[:DTYPE].
    """
    found = _SHAPE.fullmatch(text)
    if found is None or "0" in found["shape"].split("x"):
        raise PlanError(f"--batch {text}: write a shape, as 512x8192, or with name and dtype, as x=512x64:bfloat16")
    return TensorSpec(found["name"] or "", tuple(map(int, found["shape"].split("x"))), found["dtype"] or "")


def tensors_of(model: torch.nn.Module, batch: list[TensorSpec], axes: mesh.Axes) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments, by position and by name."""
    import torch

    from ..init.shardings import DATA_AXES

    takes = inspect.signature(model.forward).parameters
    ways = {axis: axes[axis] for axis in axes if axis in DATA_AXES}
    count = math.prod(ways.values())
    inputs: list[Any] = []
    named: dict[str, Any] = {}
    for name, shape, dtype in batch:
        if name and name not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise PlanError(f"--batch {name}=...: the model's forward takes {', '.join(takes)}")
        if shape[0] % count:
            more = -(-shape[0] // count) * count
            better = "x".join(map(str, (more, *shape[1:])))
            raise PlanError(
                f"--batch {'x'.join(map(str, shape))}: its {shape[0]} rows cannot be shared by the {count} devices of "
                f"{' x '.join(f'{axis}={size}' for axis, size in ways.items())}. Write {better}, or a smaller mesh"
            )
        tokens = not dtype and (name == "input_ids" or not name and "input_ids" in takes)
        kind = getattr(torch, dtype or ("int64" if tokens else "float32"), None)
        if not isinstance(kind, torch.dtype):
            raise PlanError(f"--batch: torch has no dtype {dtype!r}. Write for instance float32 or bfloat16")
        tensor = torch.zeros(shape, dtype=kind)
        if tokens:
            named["input_ids"] = tensor
            if "labels" in takes and not any(other == "labels" for other, _, _ in batch):
                named["labels"] = torch.zeros(shape, dtype=kind)
        elif name:
            named[name] = tensor
        else:
            inputs.append(tensor)
    return tuple(inputs), named
