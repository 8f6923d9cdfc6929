"""Parsing of `--batch`, the shapes and dtypes of a batch."""

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
    """A tensor of the batch; an empty name or dtype is unspecified."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def parse_tensor(text: str) -> TensorSpec:
    """Parse the text of one tensor.

    Raises:
        PlanError: if `text` is not [NAME=]SHAPE[:DTYPE].
    """
    match = _SHAPE.fullmatch(text)
    if match is None or "0" in match["shape"].split("x"):
        raise PlanError(f"--batch {text}: write a shape such as 512x8192, or with name and dtype x=512x64:bfloat16")
    return TensorSpec(match["name"] or "", tuple(map(int, match["shape"].split("x"))), match["dtype"] or "")


def tensors_of(
    model: torch.nn.Module, batch: list[TensorSpec], axes: mesh.Axes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's positional and keyword arguments, as tensors of zeros."""
    import torch

    from ..init.shardings import DATA_AXES

    parameters = inspect.signature(model.forward).parameters
    data_axes = {axis: axes[axis] for axis in axes if axis in DATA_AXES}
    count = math.prod(data_axes.values())
    inputs: list[Any] = []
    named: dict[str, Any] = {}
    for name, shape, dtype in batch:
        if name and name not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise PlanError(f"--batch {name}=...: the model's forward takes {', '.join(parameters)}")
        if shape[0] % count:
            more = -(-shape[0] // count) * count
            better = "x".join(map(str, (more, *shape[1:])))
            raise PlanError(
                f"--batch {'x'.join(map(str, shape))}: its {shape[0]} rows cannot be split evenly over the {count} "
                f"devices of {' x '.join(f'{axis}={size}' for axis, size in data_axes.items())}. Write {better}, or "
                "use a smaller mesh"
            )
        tokens = not dtype and (name == "input_ids" or not name and "input_ids" in parameters)
        kind = getattr(torch, dtype or ("int64" if tokens else "float32"), None)
        if not isinstance(kind, torch.dtype):
            raise PlanError(f"--batch: torch has no dtype {dtype!r}. Write for example float32 or bfloat16")
        tensor = torch.zeros(shape, dtype=kind)
        if tokens:
            named["input_ids"] = tensor
            if "labels" in parameters and not any(other == "labels" for other, _, _ in batch):
                named["labels"] = torch.zeros(shape, dtype=kind)
        elif name:
            named[name] = tensor
        else:
            inputs.append(tensor)
    return tuple(inputs), named
