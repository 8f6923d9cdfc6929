"""Compiled functions of steps in the artifact folder: a second start neither lowers nor compiles them.

JAX's own cache is keyed by the lowered module, so a function must be lowered before it is found there. Here the key is
what it is lowered from: the signature by which alike segments share a function (`lower/segments.py`), the order of its
arguments and results, and all that lowering and compiling depend on besides. The signature comes from the step's
Python, which runs at each start: only the very same Program finds an entry.

What cannot be written down in full has no key and is lowered: an operation with a lowering or a decomposition that is
not Firstloss's own, an argument of an unknown type. What calls a library other than PyTorch, such as LAPACK, is lowered
as well, since JAX prepares that when it lowers. An entry that cannot be read is ignored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import torch
from jax.experimental import serialize_executable

from ...compat.torch_names import OpOverload, schema_of
from ...files import placed
from ...lower import aten
from ...lower.functional_overloads import functional
from ...lower.registry import OF_USERS
from ...lower.rules import RULES
from ..jax_support import compile_options, on_cpu
from . import lowering_markers

_SOURCES = Path(__file__).parents[2]
_DIGEST_BYTES = 32


class _ThisThread(threading.local):
    misses = 0  # of JAX's cache: functions compiled


_this_thread = _ThisThread()


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _this_thread.misses += 1


jax.monitoring.register_event_listener(_note)


class Unknown(Exception):
    """Something that has no key."""


class Entry:
    """A compiled function in the folder, by its key.

    Attributes:
        path: of its file.
        found: whether there is one.
    """

    def __init__(self, folder: Path, key: str, devices: Sequence[jax.Device] | None = None) -> None:
        """`devices`: those of a mesh, in its order."""
        self.path = folder / f"{key}.executable"
        self.found = self.path.exists()
        self._devices = devices

    def load(self) -> Any:
        """The compiled function; None if the file is not what was written."""
        try:
            with open(self.path, "rb") as file:
                if not _is_ours(os.fstat(file.fileno())):
                    raise OSError
                digest, content = file.read(_DIGEST_BYTES), file.read()
            if hashlib.sha256(content).digest() == digest:
                unloaded, takes, gives = pickle.loads(content)
                return serialize_executable.deserialize_and_load(
                    unloaded, takes, gives, execution_devices=self._devices
                )
        except Exception:  # of another build of XLA, say: compiled again, and written over
            pass
        self.found = False
        return None

    def compile(self, lowered: Any, options: dict[str, Any]) -> Any:
        """`lowered.compile(options)`, which is kept if XLA has compiled it there and then: what it has loaded from
        JAX's cache it would write without complaint, and not find its kernels when that is run. Nor is one kept that
        calls a library: JAX prepares LAPACK, say, when a call of it is lowered."""
        misses = _this_thread.misses
        compiled = lowered.compile(options)
        if _this_thread.misses > misses and _custom_calls(lowered) <= set(aten.TARGETS):
            with contextlib.suppress(Exception):  # what cannot be kept will be compiled again
                self._store(compiled)
        return compiled

    def _store(self, compiled: Any) -> None:
        """Write the file. It has a digest, so that nobody need wait until it is on disk."""
        content = pickle.dumps(serialize_executable.serialize(compiled))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with placed(self.path) as aside, open(aside, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(hashlib.sha256(content).digest())
            file.write(content)


def _custom_calls(lowered: Any) -> set[str]:
    """What a lowered function calls by name."""
    return set(re.findall(r"custom_call\s*@\"?([^\s(\"]+)", lowered.as_text()))


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user can have written a file: what it holds is run."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def entry_of(
    name: str, signature: Any, order: tuple, mesh: jax.sharding.Mesh | None = None, shardings: tuple = ()
) -> Entry | None:
    """The entry of a function; None where it can have none.

    Args:
        name: of the function.
        signature: what it computes from its inputs.
        order: of its arguments and results, and how many of them are donated.
        mesh: of devices of this process alone.
        shardings: on the mesh, of all that goes in and comes out, and what else it is partitioned by.
    """
    folder, settings = lowering_markers.folder(), _settings()
    if folder is None or settings is None or not on_cpu():
        return None
    with aten.within():
        by_pytorch = aten.usable()
    found = hashlib.sha256(_environment())
    options = compile_options(on_mesh=mesh is not None)
    found.update(repr((settings, by_pytorch, sorted(options.items()))).encode())
    devices = None if mesh is None else list(mesh.devices.flat)
    if mesh is not None and devices is not None:
        kinds = [(device.id, device.process_index, device.device_kind) for device in devices]
        types = [str(kind) for kind in mesh.axis_types]
        found.update(repr((mesh.axis_names, mesh.devices.shape, types, kinds, jax.device_count())).encode())
    try:
        for text in _text((name, signature, order, shardings)):
            found.update(text.encode())
            found.update(b"\0")
    except Unknown:
        return None
    return Entry(folder, found.hexdigest(), devices)


def _text(part: Any) -> Iterator[str]:
    """A signature in words, no two of which are the same for different ones.

    Raises:
        Unknown: for what is not known to be told by its words.
    """
    kind = type(part)
    if kind is int or kind is bool or part is None or kind is str or kind is complex or kind is bytes:
        yield f"{kind.__name__} {part!r}"
    elif kind is float:
        yield f"float {part.hex()} {np.float64(part).tobytes().hex()}"  # zeros and NaNs have signs, and NaNs bits
    elif kind in (torch.dtype, torch.layout, torch.memory_format, torch.device):
        yield f"{kind.__name__} {part}"
    elif kind is type:
        if part not in (float, bool, int):
            raise Unknown
        yield f"type {part.__name__}"
    elif isinstance(part, OpOverload):
        rules = {op for op in (part, functional(part)) if op in RULES}
        if not rules or not rules.isdisjoint(OF_USERS):
            raise Unknown
        yield f"op {part} {schema_of(part)}"
    elif isinstance(part, tuple) and (kind in (tuple, torch.Size) or kind.__module__.startswith("firstloss.lower.")):
        yield f"{kind.__name__} {len(part)}"
        for inner in part:
            yield from _text(inner)
    else:
        raise Unknown


@functools.cache
def _environment() -> bytes:
    """All else that a compiled function depends on: versions, sources, settings, the processor."""
    found = hashlib.sha256()
    versions = (torch.__version__, torch.version.git_version, jax.__version__, jaxlib.__version__, np.__version__)
    found.update(repr((versions, platform.python_version(), _processor())).encode())
    for folder in ("lower", "runtime/mesh", "runtime/step", "runtime"):
        for path in sorted((_SOURCES / folder).iterdir()):
            if path.suffix in (".py", ".so", ".c", ".h", ".txt"):
                found.update(path.name.encode())
                found.update(path.read_bytes())
    return found.digest()


def _settings() -> list[tuple[str, str]] | None:
    """JAX's; None of a JAX that does not tell."""
    config = getattr(jax.config, "values", None)
    if not isinstance(config, Mapping):
        return None
    named = [(name, repr(value)) for name, value in config.items() if "cache" not in name]
    return sorted(named) + sorted((k, v) for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_")))


def _processor() -> tuple:
    """What XLA generates code for, and how many threads it divides work among."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().partition("\n\n")[0]
        lines = [
            line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))
        ]
    except OSError:
        lines = [platform.processor()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return platform.machine(), cores, os.cpu_count(), *lines
