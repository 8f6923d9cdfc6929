"""Optional dependencies: an error that says what to install, in the place of Python's own."""

from __future__ import annotations

import importlib

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
        f"{what} needs JAX, which cannot be imported here ({error}). Install it with: pip install 'firstloss[xla]'. "
        'Without it there are deferred constructors, checkpoints and the backends "CPU" and "GPU".'
    )


def is_jax(error: ImportError) -> bool:
    """Whether it is JAX that could not be imported."""
    return (error.name or "").partition(".")[0] in ("jax", "jaxlib")
