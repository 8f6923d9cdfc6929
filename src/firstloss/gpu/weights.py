"""Initialize weights on a GPU: one kernel launch per random stream, for all recipes that are slices of fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import Value
from ..rng.counter_stream import CounterStream
from ..rng.stream import PhiloxStream
from . import cpu_stream, cuda_stream, probe
from .fill_slices import FillRecipe, recipe_of
from .kernels import CudaLauncher, Launcher


def _empty(device: torch.device, value: Value) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)


def materialize(
    values: Iterable[Value],
    device: torch.device,
    launcher: Launcher | None = None,
    cpu_bits: Callable[[int, str, torch.dtype], bool] = probe.cpu_bits,
    cuda_layout_of: Callable[[int, str, torch.dtype], str | None] = probe.cuda_layout_of,
    geometry: Callable[[int], Any] = probe.geometry,
    allocate: Callable[[Value], torch.Tensor] | None = None,
) -> dict[Value, torch.Tensor]:
    """Initialize on `device` those of `values` for which there is a kernel that gives PyTorch's bits.

    The arguments from `launcher` to `geometry` are for tests, which have no GPU.

    Args:
        allocate: allocates a Value's memory; by default with PyTorch's allocator.

    Returns:
        A new tensor for each of these Values, with its layout.
    """
    index = device.index or 0
    allocate = allocate or partial(_empty, device)
    of_cpu: list[cpu_stream.CpuPiece] = []
    of_cuda: dict[str, list[cuda_stream.CudaPiece]] = {}
    buffers: dict[Value, tuple[torch.Tensor, FillRecipe]] = {}
    with torch.no_grad(), DisableTorchDispatch():
        for value in values:
            recipe = recipe_of(value)
            if recipe is None or value.nbytes == 0:
                continue
            name, numel, dtype, draw = recipe.fill.name, recipe.numel, recipe.dtype, recipe.draw
            if draw is None:
                out = allocate(value)
                buffers[value] = out.fill_(recipe.fill.value), recipe
            elif isinstance(draw.stream, PhiloxStream):
                same = recipe.device.type == device.type and recipe.device.index in (None, index)
                layout = (
                    cuda_layout_of(index, name, dtype) if same and cuda_stream.can_make(name, numel, dtype) else None
                )
                if layout is not None:
                    out = allocate(value)
                    given = draw.stream.seed, draw.position.words, name, numel, dtype, recipe.fill.pair, recipe.wanted
                    of_cuda.setdefault(layout, []).append(cuda_stream.CudaPiece(*given, out.data_ptr()))
                    buffers[value] = out, recipe
            elif not isinstance(draw.stream, CounterStream):
                if not cpu_stream.can_make(name, numel, dtype) or not cpu_bits(index, name, dtype):
                    continue
                stream, position = draw.stream.absolute(draw.position)
                out = allocate(value)
                of_cpu.append(
                    cpu_stream.CpuPiece(
                        stream, position.words, name, numel, dtype, recipe.fill.pair, recipe.wanted,
                        out.data_ptr(), probe.uniform_bits(dtype),
                    )
                )  # fmt: skip
                buffers[value] = out, recipe
        if of_cpu or of_cuda:
            launcher = launcher or CudaLauncher(index)
            cpu_stream.fill(of_cpu, launcher)
            for layout, pieces in of_cuda.items():
                cuda_stream.fill(pieces, launcher, geometry(index), layout == "by lane")
        for out, recipe in buffers.values():
            for op, args, kwargs in recipe.edits:
                op(out, *args, **kwargs)
    return {value: out for value, (out, _) in buffers.items()}
