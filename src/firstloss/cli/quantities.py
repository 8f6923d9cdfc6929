"""Parsing of quantities: bytes, rates and bandwidths of links."""

from __future__ import annotations

import re

from ..errors import PlanError
from . import mesh

_UNITS = {
    "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:[eE]\d+)?)\s*(?P<unit>[kMGTP]?i?)(?:B|FLOPS?|FLOP)?(?:/s)?")


def quantity(option: str, text: str) -> float:
    """Parse a quantity such as 80GiB or 50GB/s; `option` is named in the error."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match["unit"] not in _UNITS or float(match["number"]) == 0:
        example = {"--memory": "80GiB", "--flops": "989T", "--hbm": "3.35TB/s"}.get(option, "50GB/s")
        raise PlanError(f"{option} {text!r} is not a quantity. Write for example {option} {example}")
    return float(match["number"]) * _UNITS[match["unit"]]


def link_rates(text: str, axes: mesh.Axes) -> dict[str, float]:
    """Parse `--link` to bytes per second by axis; the key "" stands for all other axes."""
    rates: dict[str, float] = {}
    for part in text.split(","):
        axis, equals, rate = part.strip().rpartition("=")
        if equals and axis not in axes:
            raise PlanError(f"--link {text!r} names an axis {axis!r}; the mesh has {', '.join(axes)}")
        rates[axis] = quantity("--link", rate)
    if "" not in rates and (left := [axis for axis in axes if axis not in rates and axes[axis] > 1]):
        raise PlanError(
            f"--link {text!r} has no rate for {left[0]!r}. Write for example {left[0]}=50GB/s, or one rate for all"
        )
    return rates
