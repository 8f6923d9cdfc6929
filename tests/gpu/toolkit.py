"""NVIDIA's CUDA compiler, if it is installed: it needs no GPU."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from firstloss.gpu import nvrtc


def nvcc():
    return shutil.which("nvcc")


class Compiled(NamedTuple):
    """The compiler's output, and the assembler's report on each kernel: {name: (registers, bytes spilled, bytes of
    shared memory)}."""

    code: bytes
    kernels: dict[str, tuple[int, int, int]]


def compile(source, name, architecture, options=(), ptx=False):
    """Like `nvrtc.compile`, with nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        source_path, output = Path(folder) / f"{name}.cu", Path(folder) / name
        source_path.write_text(source)
        how = ["--ptx"] if ptx else ["--cubin", "-Xptxas", "-v,-warn-spills"]
        command = [nvcc(), *how, f"--gpu-architecture={architecture}", *options, "-o", output, source_path]
        done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(done.stderr)
        return Compiled(output.read_bytes(), _kernels(done.stderr))


def _kernels(log):
    kernels = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part[: part.index("'")]
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        kernels[name] = registers, spilled, int(shared[1]) if shared else 0
    return kernels


def has_nvrtc():
    try:
        nvrtc.library()
    except Exception:
        return False
    return True
