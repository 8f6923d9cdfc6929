"""What can be known about JAX without importing it.

Importing JAX takes half a second, which the first loss need not wait for: PyTorch's kernels draw the weights and
compute it. Code that needs JAX imports it locally (mostly from `jax_support.py`); this module is for code that must do
without.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from ..compat.python_names import is_initializing
from ..dependencies import install
from ..interpreter import Undo
from .device import pages

if TYPE_CHECKING:
    import jax

# Packages that provide JAX with devices other than the CPU.
_PLUGINS = ("jax_plugins", "libtpu")

# Device files of accelerators, and the extra with JAX's plug-in for them.
_ACCELERATORS = (("/dev/nvidia[0-9]*", "an NVIDIA GPU", "cuda"), ("/dev/accel[0-9]*", "a TPU", "tpu"))

_compile_dir: list[str | None] = []


def is_imported() -> bool:
    """Whether JAX has been imported. False while another thread is still importing it: its exit handlers are then not
    registered yet, and ours must be registered after them, so that it runs first (`dispatch.finish_at_exit`)."""
    module = sys.modules.get("jax")
    return module is not None and not is_initializing(module.__spec__)


def is_array(obj: Any) -> TypeGuard[jax.Array]:
    """Whether `found` is a JAX array."""
    # While another thread is importing JAX, the name may not exist yet, but neither do arrays.
    kind = getattr(sys.modules.get("jax"), "Array", None)
    return kind is not None and isinstance(obj, kind)


def use_x64(undo: Undo) -> None:
    """Like `jax_support.x64`, until `undo` runs, for blocks that may be interrupted; nothing if JAX is not imported."""
    if is_imported():
        import jax

        state = jax.enable_x64
        undo(state.set_local, state.get_local())
        state.set_local(True)


def is_installed() -> bool:
    """Whether JAX is installed, without importing it."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "jaxlib"))


def can_defer_import(mesh: Any = None) -> bool:
    """Whether the import of JAX can be deferred: it is installed, and its device, or the devices of a mesh given as
    sizes of axes, are known without it."""
    if is_imported() or not is_installed() or not is_cpu_only() or not pages.ARE_AVAILABLE:
        return False
    if mesh is None:
        return True
    if not isinstance(mesh, Mapping) or any(type(size) is not int for size in mesh.values()):
        return False
    return math.prod(mesh.values()) <= cpu_devices()


def cpu_devices() -> int:
    """The number of CPU devices that JAX will create, by the environment; 0 if unknown."""
    if (number := os.environ.get("JAX_NUM_CPU_DEVICES", "")) and not number.startswith("-"):
        return int(number) if number.isdecimal() else 0
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip().startswith("--"):  # the name of a file with flags
        return 0
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(counts[-1]) if counts else 1


def process_count() -> int:
    """The number of processes that JAX has been initialized with."""
    if not is_imported():
        return 1
    import jax

    return jax.process_count()


@functools.cache
def on_cpu() -> bool:
    """Whether JAX's default device is this machine's CPU, so that torch can share memory with it."""
    if not is_imported() and is_cpu_only():
        return True
    import jax

    return jax.default_backend() == "cpu"


@functools.cache
def is_cpu_only() -> bool:
    """Whether JAX has only CPU devices, as far as can be known without importing it."""
    asked_for = os.environ.get("JAX_PLATFORMS", "").lower()
    if asked_for:
        return asked_for == "cpu"
    if any(importlib.util.find_spec(name) is not None for name in _PLUGINS) or os.environ.get("TPU_LIBRARY_PATH"):
        return False
    return not importlib.metadata.entry_points(group="jax_plugins")


def unused_accelerator() -> str | None:
    """An accelerator of this machine for which JAX was installed without its plug-in, and what to install."""
    if os.environ.get("JAX_PLATFORMS") or not is_cpu_only():
        return None
    for pattern, what, extra in _ACCELERATORS:
        if glob.glob(pattern):
            return (
                f"this machine has {what}, and JAX was installed for CPUs alone, where compiled steps run: "
                f"{install(extra)}. JAX_PLATFORMS=cpu says that this is meant."
            )
    return None


def set_compilation_cache(directory: str | None) -> None:
    """Cache compiled executables in `directory`, once JAX is imported; None: do not cache them."""
    jaxlib: Any = sys.modules.get(f"{__package__}.jax_support")
    if hasattr(jaxlib, "use_compilation_cache"):
        jaxlib.use_compilation_cache(directory)
    else:  # jax_support reads it when it is imported
        _compile_dir[:] = [directory]


def pending_cache_directory() -> str | None:
    """The directory passed to `set_compilation_cache` before JAX was imported."""
    return _compile_dir.pop() if _compile_dir else None
