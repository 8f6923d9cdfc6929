"""Optional dependencies: errors that say what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
from urllib.parse import unquote, urlparse

from .errors import MissingDependencyError


def require_jax(what: str) -> None:
    """An error if JAX, which `what` needs, cannot be imported."""
    for name in ("jax", "jaxlib"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise without_jax(what, error) from error


def without_jax(what: str, error: ImportError) -> MissingDependencyError:
    """The error to raise where `what` needs JAX, whose import ended in `error`."""
    return MissingDependencyError(
        f"{what} needs JAX, which cannot be imported here ({error}). Install it with: {install('xla')}. "
        'Without it there are deferred constructors, checkpoints and the backends "CPU" and "GPU".'
    )


def require_extra(extra: str, what: str, *modules: str) -> None:
    """An error if modules of an extra, which `what` needs, are not installed. Nothing is imported."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ImportError:
            found = None
        if found is None:
            raise MissingDependencyError(f"{what} needs {name}, which is not installed: {install(extra)}.")


def is_jax(error: ImportError) -> bool:
    """Whether it is JAX that could not be imported."""
    return (error.name or "").partition(".")[0] in ("jax", "jaxlib")


def install(extra: str) -> str:
    """The command that installs an extra from where this package came: a checkout, a repository, or an index."""
    place = _place()
    if place.startswith("git+"):
        return f"pip install {shlex.quote(f'firstloss[{extra}] @ {place}')}"
    return f"pip install {shlex.quote(f'{place}[{extra}]')}"


def _place() -> str:
    """What pip is to be given in place of the package's name."""
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
