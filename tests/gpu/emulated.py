"""The GPU kernels on the CPU: the NVRTC source, compiled by this machine's C compiler."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from firstloss.gpu import kernels

HERE = Path(__file__).parent


def compiler():
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def vectorised():
    """Whether PyTorch's AVX2 kernel draws normals here; on other CPUs PyTorch uses a math library."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@functools.cache
def library():
    """The kernels as a C library. Without a -march with FMA each fma is a function call; -ffp-contract=off as in
    `setup.py`."""
    folder = Path(tempfile.mkdtemp())
    flags = ["-std=gnu11", "-O2", "-mfma", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
    flags += ["-Wall", "-Werror", "-Wno-unused-function"]
    flags += [f"-I{Path(kernels.__file__).parents[1] / room}" for room in ("rng", "gpu")]
    subprocess.run([compiler(), *flags, str(HERE / "emulated.c"), "-lm", "-o", str(folder / "k.so")], check=True)
    return ctypes.CDLL(str(folder / "k.so"))


def address(array):
    return ctypes.c_void_p(array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data)


class HostLauncher:
    """A `Launcher` whose device is the CPU."""

    device = torch.device("cpu")

    def __init__(self):
        self.launched = []

    def put(self, table):
        return torch.from_numpy(np.ascontiguousarray(table).view(np.uint8).reshape(-1).copy())

    def empty_windows(self, count):
        return torch.full((count, 624), -1, dtype=torch.int32)

    def jump_windows(self, windows, pairs, count, digits):
        self.launched.append(("jump_windows", count))
        library().jump_windows(address(windows), address(pairs), ctypes.c_uint32(count), address(digits))

    def fill(self, windows, chunks, count, segments):
        self.launched.append(("fill", count))
        library().fill(address(windows), address(chunks), address(segments), ctypes.c_uint32(count))

    def philox(self, launches, count, units):
        self.launched.append(("philox", units))
        library().philox_fill(address(launches), ctypes.c_uint32(count), ctypes.c_uint64(units))
