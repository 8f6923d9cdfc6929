"""JAX's private names that Firstloss uses, each with the reason. Deferred init needs none of them."""

from __future__ import annotations

import ctypes
from typing import Any

from .names import Name, resolve

# The versions of JAX on which the tests have been run.
TESTED = ("0.10.2",)

NAMES = {
    "ir": Name("jax._src.lib.mlir.ir", "Names a module's outputs", "writing and running StableHLO files"),
    "compiler": Name("jax._src.compiler", "Compiles a module's text", "running StableHLO files"),
    "mlir": Name("jax._src.interpreters.mlir", "Parses a module's text", "running StableHLO files"),
    "sdy": Name(
        "jax._src.lib.mlir.dialects.sdy", "Reads the shardings of a module's outputs", "running StableHLO files"
    ),
    "global_state": Name(
        "jax._src.distributed.global_state",
        "Joining processes exchange their versions; when one is lost, the others end without waiting for it",
        "nothing; processes of different versions are not detected when they join",
        otherwise=object,
    ),
    "xla_client": Name("jax._src.lib.xla_client", "Lists devices for the compiler", "running StableHLO files"),
}


def executable_of(compiled: Any) -> Any:
    """The loaded executable of a `jax.stages.Compiled`; None if this JAX has none."""
    return getattr(compiled, "_executable", None)


def make_cpp_call(compiled: Any, executable: Any) -> Any:
    """JAX's C++ fast path for calling a compiled function; None if this JAX has none."""
    if not hasattr(compiled, "_call") or not hasattr(compiled, "_params"):
        return None
    if compiled._call is None:
        compiled._call = executable.create_cpp_call(compiled._params)
    return compiled._call


def distributed_client() -> Any:
    """The client of JAX's distributed service; None if there is none."""
    return getattr(__getattr__("global_state"), "client", None)


def forget_distributed_service() -> None:
    """Let the process exit without JAX's barrier, in which all processes would wait for one that is lost.

    The service's destructor would wait for other processes, too: it is never called.
    """
    if distributed_client() is None:
        return
    state = __getattr__("global_state")
    for kept in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve(row)
    return value
