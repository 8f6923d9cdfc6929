"""Compile CUDA C++ at run time with NVRTC, which PyTorch's CUDA builds include. No GPU is needed."""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import BackendError

# PyTorch's compiler options; and the same without contracting multiplications and additions to FMAs.
AS_PYTORCH = ("--std=c++17", "--restrict")
UNFUSED = (*AS_PYTORCH, "--fmad=false")


@cache
def library() -> ctypes.CDLL:
    """Load NVRTC.

    Raises:
        BackendError: if it cannot be found.
    """
    tried = []
    for path in _candidates():
        try:
            loaded = ctypes.CDLL(path)
            loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
            return loaded
        except OSError as error:
            tried.append(f"{path}: {error}")
    raise BackendError(
        "NVRTC, which compiles the kernels for the GPU, was not found. It comes with PyTorch's builds for CUDA, in the "
        f"package nvidia-cuda-nvrtc. Tried: {'; '.join(tried)}."
    )


def _candidates() -> list[str]:
    packages = [Path(folder) / "nvidia" for folder in sys.path if folder]
    here = [path for root in packages for path in (root / "cu13" / "lib", root / "cuda_nvrtc" / "lib")]
    toolkit = [Path(os.environ.get(name, "")) / "lib64" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*here, *toolkit, Path("/usr/local/cuda/lib64")]
    # The newest, without the "alt" builds for other hosts.
    paths = [p for f in folders for p in sorted(glob.glob(str(f / "libnvrtc.so.*")), reverse=True) if ".alt." not in p]
    return [*paths, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


@cache
def version() -> tuple[int, int]:
    """The version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(status: int, log: str = "") -> None:
    if status:
        message = library().nvrtcGetErrorString(status).decode()
        raise BackendError(f"NVRTC failed to compile a Firstloss kernel: {message}. {log}")


def compile(source: str, name: str, architecture: str, options: tuple[str, ...] = (), ptx: bool = False) -> bytes:
    """Compile `source` to a cubin for an architecture such as "sm_90", or to PTX.

    Raises:
        BackendError: if it does not compile; with the compiler's log.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    create = nvrtc.nvrtcCreateProgram
    _check(create(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        flags = [f"--gpu-architecture={architecture}", *options]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
        log = (
            _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        _check(status, log)
        kind = "PTX" if ptx else "CUBIN"
        code = _read(getattr(nvrtc, f"nvrtcGet{kind}Size"), getattr(nvrtc, f"nvrtcGet{kind}"), program)
        return code.rstrip(b"\0") if ptx else code
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw[: size.value]
