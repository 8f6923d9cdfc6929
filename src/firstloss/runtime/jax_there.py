"""What can be said of JAX before it is imported.

Its import takes half a second, which the first loss need not wait for: weights are drawn, and multiplied, by PyTorch's
kernels. What needs JAX imports it where it does (`jaxlib.py`, mostly); this is for those who must know without.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from ..compat.python_names import is_initializing
from .device import pages

if TYPE_CHECKING:
    import jax

# Packages that bring JAX another device than the CPU.
_PLUGINS = ("jax_plugins", "libtpu")

_compile_dir: list[str] = []


def is_there() -> bool:
    """Whether JAX has been imported. Not while another thread still imports it: what it does at exit is not registered
    yet then, and ours has to be registered later, to come sooner (`dispatch.finish_at_exit`)."""
    module = sys.modules.get("jax")
    return module is not None and not is_initializing(module.__spec__)


def is_array(found: Any) -> TypeGuard[jax.Array]:
    """Whether it is an array of JAX's."""
    # Where another thread is importing it there may be no such name yet, and then there are no arrays.
    kind = getattr(sys.modules.get("jax"), "Array", None)
    return kind is not None and isinstance(found, kind)


def is_installed() -> bool:
    """Whether JAX can be found; nothing is imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "jaxlib"))


def may_wait(mesh: Any = None) -> bool:
    """Whether the import of JAX can be put off: it is installed, and its device is known without it, or those of a mesh
    that is given as sizes of axes."""
    if is_there() or not is_installed() or not certainly_cpu() or not pages.are_there():
        return False
    if mesh is None:
        return True
    if not isinstance(mesh, Mapping) or any(type(size) is not int for size in mesh.values()):
        return False
    return math.prod(mesh.values()) <= cpu_devices()


def cpu_devices() -> int:
    """How many devices JAX will make of this machine's CPU, by the environment; 0 if that cannot be told."""
    if (number := os.environ.get("JAX_NUM_CPU_DEVICES", "")) and not number.startswith("-"):
        return int(number) if number.isdecimal() else 0
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip().startswith("--"):  # the name of a file
        return 0
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(found[-1]) if found else 1


def process_count() -> int:
    """How many processes JAX has been told of."""
    if not is_there():
        return 1
    import jax

    return jax.process_count()


@functools.cache
def on_cpu() -> bool:
    """Whether JAX's default device is this machine's CPU, so that torch and the device can share memory."""
    if not is_there() and certainly_cpu():
        return True
    import jax

    return jax.default_backend() == "cpu"


@functools.cache
def certainly_cpu() -> bool:
    """Whether JAX has no other device, as far as can be told without importing it."""
    asked_for = os.environ.get("JAX_PLATFORMS", "").lower()
    if asked_for:
        return asked_for == "cpu"
    if any(importlib.util.find_spec(name) is not None for name in _PLUGINS) or os.environ.get("TPU_LIBRARY_PATH"):
        return False
    return not importlib.metadata.entry_points(group="jax_plugins")


def compile_in(directory: str) -> None:
    """Keep compiled executables in `directory`, once there is JAX."""
    jaxlib: Any = sys.modules.get(f"{__package__}.jaxlib")
    if hasattr(jaxlib, "use_compilation_cache"):
        jaxlib.use_compilation_cache(directory)
    else:  # it asks for it
        _compile_dir[:] = [directory]


def directory_to_compile_in() -> str | None:
    """What `compile_in` was given last, before there was JAX."""
    return _compile_dir.pop() if _compile_dir else None
