"""Optional dependencies: JAX's import, and errors that say what to install."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlparse

from .errors import MissingDependencyError


def import_jax() -> types.ModuleType:
    """Import JAX, and leave NumPy's global generator as it was: JAX draws from it while it is imported (the waits
    between the retries of its Kubernetes client), in the background of the user's training."""
    if "jax" in sys.modules:
        return importlib.import_module("jax")
    with _own_numpy_draws():
        return importlib.import_module("jax")


@contextlib.contextmanager
def _own_numpy_draws() -> Iterator[None]:
    """Context in which the functions of `numpy.random` draw from a generator of this thread's own; in other threads,
    they draw from the global one."""
    import numpy as np

    shared, own, thread = np.random.rand.__self__, np.random.RandomState(0), threading.get_ident()
    namespace = vars(np.random)
    originals = {name: f for name, f in namespace.items() if getattr(f, "__self__", None) is shared}

    def drawing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            function = getattr(own, name, original) if threading.get_ident() == thread else original
            return function(*args, **kwargs)

        return draw

    replacements = {name: drawing(name, original) for name, original in originals.items()}
    namespace.update(replacements)
    try:
        yield
    finally:
        for name, replacement in replacements.items():
            if namespace.get(name) is replacement:
                namespace[name] = originals[name]


def require_jax(feature: str) -> None:
    """Raise a MissingDependencyError if JAX, which `feature` needs, cannot be imported."""
    try:
        import_jax()
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
