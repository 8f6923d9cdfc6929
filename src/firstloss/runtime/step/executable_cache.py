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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
_BY_REPR = {int, bool, str, complex, bytes, type(None)}


class _ThisThread(threading.local):
    misses = 0  # misses of JAX's cache, that is, functions compiled


_this_thread = _ThisThread()


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _this_thread.misses += 1


jax.monitoring.register_event_listener(_note)


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
    signature: Description,
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
    others = describe((name, order, shardings))
    if folder is None or settings is None or not on_cpu() or not (signature.is_key and others.is_key):
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
    digest.update(others.text + signature.text)
    return Entry(folder, digest.hexdigest(), devices)


def digest_of(descriptions: Iterable[Description]) -> str:
    """A digest for markers. It may be the same for steps that differ in objects without text, so that it does not
    identify executables."""
    digest = hashlib.sha256(f"{jax.__version__} {torch.__version__}".encode())
    for description in descriptions:
        digest.update(description.text)
    return digest.hexdigest()


class Description(NamedTuple):
    """A signature as text.

    Attributes:
        is_key: whether other signatures have other texts; not if an object has no text of its own.
    """

    text: bytes
    is_key: bool


def describe(signature: Any) -> Description:
    """Serialize a signature to text."""
    texts: list[str] = []
    is_key = _describe(signature, texts, {})
    return Description("\0".join(texts).encode() + b"\0", is_key)


def _describe(part: Any, texts: list[str], ops: dict[OpOverload, tuple[str, bool]]) -> bool:
    """Append the texts of a part of a signature; returns whether they identify it. `ops`: the texts of operations."""
    kind = type(part)
    if kind in _BY_REPR:
        texts.append(f"{kind.__name__} {part!r}")
    elif kind is float:
        texts.append(f"float {part.hex()} {np.float64(part).tobytes().hex()}")  # distinguishes signed zeros and NaNs
    elif kind in (torch.dtype, torch.layout, torch.memory_format, torch.device):
        texts.append(f"{kind.__name__} {part}")
    elif isinstance(part, tuple) and (kind in (tuple, torch.Size) or kind.__module__.startswith("firstloss.lower.")):
        texts.append(f"{kind.__name__} {len(part)}")
        have_texts = [_describe(inner, texts, ops) for inner in part]
        return all(have_texts)
    elif isinstance(part, OpOverload):
        if part not in ops:
            rules = {op for op in (part, functional(part)) if op in RULES}
            is_stable = bool(rules) and rules.isdisjoint(OF_USERS)
            ops[part] = f"op {part} {schema_of(part)}" if is_stable else f"a {kind.__qualname__} {part}", is_stable
        text, is_stable = ops[part]
        texts.append(text)
        return is_stable
    elif kind is type and part in (float, bool, int):
        texts.append(f"type {part.__name__}")
    else:
        texts.append(f"a {kind.__qualname__}")
        return False
    return True


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
