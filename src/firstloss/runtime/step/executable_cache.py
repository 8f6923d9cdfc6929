"""A cache of compiled functions in the artifact folder, with which a second start neither lowers nor compiles them.

JAX's own cache is keyed by the lowered module, so functions must be lowered to be found there. Here the key is what
they are lowered from: the signature by which equal segments share a function (`lower/segments.py`), the order of its
arguments and results, and everything else on which lowering and compiling depend. The signature comes from the step's
Python code, which runs at each start: only the very same Program finds an entry.

What cannot be written out completely has no key and is lowered: an operation with a lowering or decomposition that is
not Firstloss's own, or an argument of an unknown type. Code that calls libraries other than PyTorch, such as LAPACK, is
lowered as well, since JAX prepares them when it lowers. Unreadable entries are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import torch
from jax.experimental import serialize_executable

from ... import processor
from ...cache_folder import is_own
from ...compat.torch_names import OpOverload, schema_of
from ...files import replacing
from ...interpreter import cores
from ...lower import aten
from ...lower.registry import OF_USERS, functional
from ...lower.rules import RULES
from ..jax_support import compile_options, on_cpu
from . import lowering_markers

_SOURCES = Path(__file__).parents[2]
_DIGEST_BYTES = 32


class _ThisThread(threading.local):
    misses = 0  # misses of JAX's cache, that is, functions compiled


_this_thread = _ThisThread()


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _this_thread.misses += 1


jax.monitoring.register_event_listener(_note)


class Unknown(Exception):
    """Raised for something that has no key."""


class Entry:
    """A compiled function in the folder, by its key.

    Attributes:
        path: the file's path.
        found: whether the file exists.
    """

    def __init__(self, folder: Path, key: str, devices: Sequence[jax.Device] | None = None) -> None:
        """`devices`: on which it runs, in a mesh's order."""
        self.path: Path = folder / f"{key}.executable"
        self.found: bool = self.path.exists()
        self._devices = devices

    def load(self) -> Any:
        """Load the compiled function; None if the file is not valid."""
        try:
            with open(self.path, "rb") as file:
                if not is_own(os.fstat(file.fileno())):
                    raise OSError
                digest, content = file.read(_DIGEST_BYTES), file.read()
            if self._digest(content) == digest:
                unloaded, in_tree, out_tree = pickle.loads(content)
                return serialize_executable.deserialize_and_load(
                    unloaded, in_tree, out_tree, execution_devices=self._devices
                )
        except Exception:  # from another build of XLA, for example: recompile and overwrite
            pass
        self.found = False
        return None

    def compile(self, lowered: Any, options: dict[str, Any]) -> Any:
        """Compile, and store the result if XLA has just compiled it: an executable loaded from JAX's cache would
        serialize without an error, but lack its kernels when run. Executables that call a library are not stored
        either: JAX prepares LAPACK, for example, when a call of it is lowered."""
        misses = _this_thread.misses
        compiled = lowered.compile(options)
        if _this_thread.misses > misses and _custom_calls(lowered) <= set(aten.TARGETS):
            with contextlib.suppress(Exception):  # without an entry it is compiled again
                self._store(compiled)
        return compiled

    def _digest(self, content: bytes) -> bytes:
        """A digest of the content and of the key: a file that was renamed is not valid."""
        return hashlib.sha256(self.path.name.encode() + content).digest()

    def _store(self, compiled: Any) -> None:
        """Write the file. It contains a digest, so that it need not be synced."""
        content = pickle.dumps(serialize_executable.serialize(compiled))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as aside, open(aside, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(self._digest(content))
            file.write(content)


def _custom_calls(lowered: Any) -> set[str]:
    """The names of custom calls in a lowered function."""
    return set(re.findall(r"custom_call\s*@\"?([^\s(\"]+)", lowered.as_text()))


def entry_of(
    name: str,
    signature: Any,
    order: tuple[Any, ...],
    mesh: jax.sharding.Mesh | None = None,
    shardings: tuple[Any, ...] = (),
) -> Entry | None:
    """The entry of a function; None if it has no key.

    Args:
        name: the function's name.
        signature: its computation, as a function of its inputs.
        order: of its arguments and results, and how many arguments are donated.
        mesh: the mesh it is partitioned over, whose devices all belong to this process.
        shardings: on that mesh, of its inputs and outputs, and whatever else decides how it is partitioned.
    """
    folder, settings = lowering_markers.folder(), _settings()
    if folder is None or settings is None or not on_cpu():
        return None
    with aten.within():
        by_pytorch = aten.usable()
    digest = hashlib.sha256(_environment())
    options = compile_options(on_mesh=mesh is not None)
    digest.update(repr((settings, by_pytorch, sorted(options.items()))).encode())
    # Otherwise JAX would load it for all devices, where it has several.
    devices = [jax.config.jax_default_device or jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
    if mesh is not None:
        kinds = [(device.id, device.process_index, device.device_kind) for device in devices]
        types = [str(kind) for kind in mesh.axis_types]
        digest.update(repr((mesh.axis_names, mesh.devices.shape, types, kinds, jax.device_count())).encode())
    try:
        for text in _text((name, signature, order, shardings)):
            digest.update(text.encode())
            digest.update(b"\0")
    except Unknown:
        return None
    return Entry(folder, digest.hexdigest(), devices)


def digest_of(signatures: Iterable[Any]) -> str:
    """A digest for markers. It may be the same for steps that differ in objects without text, so that it does not
    identify executables."""
    digest = hashlib.sha256(f"{jax.__version__} {torch.__version__}".encode())
    for signature in signatures:
        for text in _text(signature, unknown=lambda part: f"a {type(part).__qualname__}"):
            digest.update(text.encode())
            digest.update(b"\0")
    return digest.hexdigest()


def _refuse(part: Any) -> str:
    raise Unknown


def _text(part: Any, unknown: Callable[[Any], str] = _refuse) -> Iterator[str]:
    """Serialize a signature to text, injectively.

    Args:
        unknown: the text of an object whose text may be ambiguous; by default it raises.

    Raises:
        Unknown: for such objects.
    """
    kind = type(part)
    if kind is int or kind is bool or part is None or kind is str or kind is complex or kind is bytes:
        yield f"{kind.__name__} {part!r}"
    elif kind is float:
        yield f"float {part.hex()} {np.float64(part).tobytes().hex()}"  # distinguishes signed zeros and NaNs
    elif kind in (torch.dtype, torch.layout, torch.memory_format, torch.device):
        yield f"{kind.__name__} {part}"
    elif kind is type:
        yield f"type {part.__name__}" if part in (float, bool, int) else unknown(part)
    elif isinstance(part, OpOverload):
        rules = {op for op in (part, functional(part)) if op in RULES}
        is_stable = rules and rules.isdisjoint(OF_USERS)
        yield f"op {part} {schema_of(part)}" if is_stable else f"{unknown(part)} {part}"
    elif isinstance(part, tuple) and (kind in (tuple, torch.Size) or kind.__module__.startswith("firstloss.lower.")):
        yield f"{kind.__name__} {len(part)}"
        for inner in part:
            yield from _text(inner, unknown)
    else:
        yield unknown(part)


@functools.cache
def _environment() -> bytes:
    """Everything else on which a compiled function depends: versions, sources, settings, the processor."""
    digest = hashlib.sha256()
    machine = platform.machine(), cores(), os.cpu_count(), processor.name(), processor.instructions()
    versions = (torch.__version__, torch.version.git_version, jax.__version__, jaxlib.__version__, np.__version__)
    digest.update(repr((versions, platform.python_version(), machine)).encode())
    for folder in ("lower", "runtime/mesh", "runtime/step", "runtime"):
        for path in sorted((_SOURCES / folder).iterdir()):
            if path.suffix in (".py", ".so", ".c", ".h", ".txt"):
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
    return digest.digest()


def _settings() -> list[tuple[str, str]] | None:
    """JAX's settings; None if this JAX does not list them."""
    config = getattr(jax.config, "values", None)
    if not isinstance(config, Mapping):
        return None
    jax_settings = [(name, repr(value)) for name, value in config.items() if "cache" not in name]
    return sorted(jax_settings) + sorted((k, v) for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_")))
