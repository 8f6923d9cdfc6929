"""The GPU kernels: their source, their argument tables, and their launcher.

`Launcher` is a protocol because the tests run the same source on a CPU, compiled by a C compiler.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import BackendError
from ..rng.mt19937 import N
from . import nvrtc

_HERE = Path(__file__).parent

KINDS = {"uniform": 0, "normal": 1}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

_SLICE = [(name, "<u8") for name in ("out", "low", "high", "row", "column", "width")]
# `struct segment`, `struct chunk` and `struct launch`, with the compilers' layout.
SEGMENT = np.dtype(
    [
        *((name, "<u8") for name in ("begin", "words", "first")),
        ("slice", _SLICE),
        *((name, "<f8") for name in ("a", "b")),
        ("range", "<f4"),
        *((name, "<u4") for name in ("kind", "dtype", "bits")),
    ]
)
CHUNK = np.dtype([("begin", "<u8"), ("end", "<u8"), *((name, "<u4") for name in ("window", "from", "to", "unused"))])
LAUNCH = np.dtype(
    [
        *((name, "<u8") for name in ("seed", "offset", "begin", "numel", "threads", "first_unit", "first_block")),
        ("slice", _SLICE),
        *((name, "<f8") for name in ("a", "b")),
        ("range", "<f4"),
        *((name, "<u4") for name in ("kind", "dtype", "lanes", "tiles", "unused")),
    ]
)


class Launcher(Protocol):
    """Allocates tables on a device and launches kernels. Tables are NumPy arrays on the host, uint8 on the device."""

    device: torch.device

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        """Copy a table to the device."""
        ...

    def empty_windows(self, count: int) -> torch.Tensor:
        """Allocate windows: int32, shape (count, 624)."""
        ...

    def jump_windows(self, windows: torch.Tensor, pairs: torch.Tensor, count: int, digits: torch.Tensor) -> None:
        """Compute windows, each by a jump from another one; `pairs` are (from, to)."""
        ...

    def fill(self, windows: torch.Tensor, chunks: torch.Tensor, count: int, segments: torch.Tensor) -> None:
        """Draw the chunks."""
        ...

    def philox(self, launches: torch.Tensor, count: int, units: int) -> None:
        """Draw the units of a table of launches."""
        ...


def source(*names: str) -> str:
    """The source of the given headers, with those that they depend on."""
    shared = _HERE.parent / "rng" / "_arithmetic.h"
    return "\n".join(path.read_text() for path in (shared, *(_HERE / f"{name}.h" for name in ("elements", *names))))


# -- the driver -----------------------------------------------------------------------------------------------------


class _Driver:
    """Bindings of the CUDA driver; PyTorch has made the context current."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BackendError(f"the CUDA driver cannot be loaded on this machine: {error}.") from None

    def check(self, status: int, what: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise BackendError(f"CUDA: {what}: {(text.value or b'unknown error').decode()} ({status}).")

    def function(self, cubin: bytes, name: str) -> ctypes.c_void_p:
        """Load a module for the current device, and look up a kernel in it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self._library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading the module of {name}")
        status = self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self.check(status, f"looking up {name}")
        return function

    def launch(self, function: ctypes.c_void_p, grid: int, block: int, arguments: list[Any], name: str) -> None:
        """Launch a kernel on PyTorch's current stream."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._library.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, pointers, None)
        self.check(status, f"launching {name}")


@cache
def _driver() -> _Driver:
    return _Driver()


def architecture(device: torch.device) -> str:
    """The compiler's name of a device's architecture, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def _cubin(parts: tuple[str, ...], options: tuple[str, ...], target: str) -> bytes:
    return nvrtc.compile(source(*parts), parts[-1], target, options)


@cache
def _function(device: int, name: str) -> ctypes.c_void_p:
    part = ("philox",) if name == "philox_fill" else ("mt19937",)
    options = nvrtc.AS_PYTORCH if name == "philox_fill" else nvrtc.UNFUSED
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes PyTorch's context current
        return _driver().function(_cubin(part, options, architecture(torch.device("cuda", device))), name)


class CudaLauncher:
    """Launches the kernels on one GPU, on PyTorch's current stream."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        index = device if isinstance(device, int) else None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        flat = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
        return torch.from_numpy(flat).to(self.device)

    def empty_windows(self, count: int) -> torch.Tensor:
        return torch.empty((count, N), dtype=torch.int32, device=self.device)

    def _launch(self, name: str, grid: int, block: int, *arguments: Any) -> None:
        with torch.cuda.device(self.device):
            _driver().launch(_function(self.device.index, name), grid, block, [*arguments], name)

    def jump_windows(self, windows: torch.Tensor, pairs: torch.Tensor, count: int, digits: torch.Tensor) -> None:
        self._launch("jump_windows", count, 320, *map(_pointer, (windows, pairs, digits)))

    def fill(self, windows: torch.Tensor, chunks: torch.Tensor, count: int, segments: torch.Tensor) -> None:
        arguments = (*map(_pointer, (windows, chunks, segments)), ctypes.c_uint32(count))
        self._launch("fill", -(-count // 8), 256, *arguments)

    def philox(self, launches: torch.Tensor, count: int, units: int) -> None:
        grid = min(units, 64 * self._processors * 8)
        arguments = (_pointer(launches), ctypes.c_uint32(count), ctypes.c_uint64(units))
        self._launch("philox_fill", grid, 256, *arguments)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
