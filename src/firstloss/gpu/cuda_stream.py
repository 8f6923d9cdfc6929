"""Slices of fills with the bits of PyTorch's CUDA generator: builds the tables for `philox.h`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from ..program.graph import dtype_name
from ..rng import cuda_layout
from .cpu_stream import numbers_of
from .fill_slices import Slice
from .kernels import DTYPES, KINDS, LAUNCH, Launcher

_TILE = 1024  # threads of PyTorch's launch per unit


class CudaPiece(NamedTuple):
    """A part of one fill, and the address to write it to."""

    seed: int
    offset: int
    name: str
    numel: int
    dtype: torch.dtype
    pair: tuple[float, float]
    wanted: Slice
    out: int


def can_make(name: str, numel: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a fill."""
    return dtype in DTYPES and name in ("uniform", "normal")


def table(
    pieces: Iterable[CudaPiece], device: cuda_layout.GpuProperties, by_lane: bool = False
) -> tuple[np.ndarray, int]:
    """The launches, as `struct launch`, and their total number of units."""
    rows = []
    units = 0
    for piece in pieces:
        low, high, row, column, width = piece.wanted
        dtype = dtype_name(piece.dtype)
        for launch in cuda_layout.launches(piece.numel, device, piece.offset, dtype, by_lane):
            first, last = max(low, launch.begin), min(high, launch.begin + launch.numel)
            if first >= last:
                continue
            made = np.zeros((), LAUNCH)
            per_block = launch.threads * launch.lanes
            made["seed"], made["offset"], made["begin"] = piece.seed % (1 << 64), launch.offset, launch.begin
            made["numel"], made["threads"], made["lanes"] = launch.numel, launch.threads, launch.lanes
            made["tiles"] = -(-launch.threads // _TILE)
            made["first_unit"], made["first_block"] = units, (first - launch.begin) // per_block
            made["slice"] = (piece.out, low, high, row, column, width)
            made["kind"], made["dtype"] = KINDS[piece.name], DTYPES[piece.dtype]
            made["a"], made["b"], made["range"] = numbers_of(piece.name, piece.dtype, piece.pair)
            blocks = (last - 1 - launch.begin) // per_block - int(made["first_block"]) + 1
            units += blocks * int(made["tiles"])
            rows.append(made[()])
    return np.array(rows, LAUNCH), units


def fill(
    pieces: Iterable[CudaPiece], launcher: Launcher, device: cuda_layout.GpuProperties, by_lane: bool = False
) -> None:
    """Make all pieces."""
    launches, units = table(pieces, device, by_lane)
    if units:
        launcher.philox(launcher.put(launches), len(launches), units)
