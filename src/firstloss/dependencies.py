"""Optional dependencies: JAX's import, and errors that say what to install."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlparse

from .errors import MissingDependencyError


class _JaxFinder(importlib.abc.MetaPathFinder):
    """Has JAX imported, by whatever module, with NumPy's global generator left as it was: JAX draws from it (the waits
    between the retries of its Kubernetes client), in the background of the user's training."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "jax":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _JaxLoader(spec.loader)
        return spec


class _JaxLoader(importlib.abc.Loader):
    """Takes the place of a loader until the module is executed."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with _own_numpy_draws():
            self._loader.exec_module(module)


def watch_import_of_jax() -> None:
    """Let `_JaxFinder` find JAX."""
    if not any(isinstance(finder, _JaxFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _JaxFinder())


@contextlib.contextmanager
def _own_numpy_draws() -> Iterator[None]:
    """Context in which the functions of `numpy.random` draw from a generator of this thread's own; in other threads,
    they draw from the global one."""
    import numpy as np

    own, namespace = np.random.RandomState(0), vars(np.random)
    thread: int | None = threading.get_ident()
    # Whatever they are now: while a step is traced, they are replaced (capture/python_draws.py).
    originals = {name: f for name, f in namespace.items() if callable(getattr(own, name, None))}

    def drawing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            function = getattr(own, name) if threading.get_ident() == thread else original
            return function(*args, **kwargs)

        return draw

    replacements = {name: drawing(name, original) for name, original in originals.items()}
    namespace.update(replacements)
    try:
        yield
    finally:
        thread = None  # a trace that has begun meanwhile puts the replacements back when it ends
        for name, replacement in replacements.items():
            if namespace.get(name) is replacement:
                namespace[name] = originals[name]


def require_jax(feature: str) -> None:
    """Raise a MissingDependencyError if JAX, which `feature` needs, cannot be imported."""
    try:
        importlib.import_module("jax")
        importlib.import_module("jaxlib")
    except ImportError as error:
        raise without_jax(feature, error) from error


def without_jax(feature: str, error: ImportError) -> MissingDependencyError:
    """The error for a `feature` that needs JAX, whose import failed with `error`."""
    return MissingDependencyError(
        f"{feature} needs JAX, which cannot be imported ({error}). Install it with: {install('xla')}. Without it, "
        'deferred constructors, checkpoints and the backends "CPU" and "GPU" are available.'
    )


def require_extra(extra: str, feature: str, *modules: str) -> None:
    """Raise a MissingDependencyError if modules of an extra that `feature` needs are missing; imports nothing."""
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            spec = None
        if spec is None:
            raise MissingDependencyError(f"{feature} needs {name}, which is not installed: {install(extra)}.")


def is_jax(error: ImportError) -> bool:
    """Whether it is JAX that could not be imported."""
    return (error.name or "").partition(".")[0] in ("jax", "jaxlib")


def install(extra: str) -> str:
    """The pip command that installs an extra from the source of this package: a checkout, a repository, an index."""
    place = _place()
    if place.startswith("git+"):
        return f"pip install {shlex.quote(f'firstloss[{extra}] @ {place}')}"
    return f"pip install {shlex.quote(f'{place}[{extra}]')}"


def _place() -> str:
    """The requirement for pip in place of the package's name."""
    try:
        text = importlib.metadata.distribution("firstloss").read_text("direct_url.json")
        came = json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        return root if os.path.exists(os.path.join(root, "pyproject.toml")) else "firstloss"
    url = came.get("url", "")
    if "vcs_info" in came:  # https://packaging.python.org/en/latest/specifications/direct-url/
        about = came["vcs_info"]
        return f"{about.get('vcs', 'git')}+{url}@{about.get('commit_id', about.get('requested_revision', 'HEAD'))}"
    folder = unquote(urlparse(url).path) if url.startswith("file:") else ""
    return folder if os.path.isdir(folder) else "firstloss"
