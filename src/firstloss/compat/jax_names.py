"""The private names of JAX that Firstloss uses, each with the reason. The deferred-init half needs none of them."""

from __future__ import annotations

from typing import Any

from .names import Name, resolve

# The versions of JAX that the suite has been run on.
TESTED = ("0.10.2",)

NAMES = {
    "ExecuteReplicated": Name(
        "jax._src.interpreters.pxla.ExecuteReplicated",
        "A compiled function's first call is made in a thread of its own, where no Ctrl-C interrupts it",
        "nothing; Ctrl-C within the first call of a step may then lose its state",
        otherwise=object,
    ),
    "ir": Name("jax._src.lib.mlir.ir", "Names a module's outputs", "writing and running StableHLO files"),
    "compiler": Name("jax._src.compiler", "Compiles a module's text", "running StableHLO files"),
    "mlir": Name("jax._src.interpreters.mlir", "Parses a module's text", "running StableHLO files"),
    "sdy": Name("jax._src.lib.mlir.dialects.sdy", "Reads how a module's outputs are cut", "running StableHLO files"),
    "global_state": Name(
        "jax._src.distributed.global_state",
        "Processes that join tell each other their versions",
        "nothing; processes of other versions are not distinguished when they join",
        otherwise=object,
    ),
    "xla_client": Name("jax._src.lib.xla_client", "Lists devices for the compiler", "running StableHLO files"),
}


def executable_of(compiled: Any) -> Any:
    """The loaded executable of a `jax.stages.Compiled`; None of a JAX that has no such thing."""
    return getattr(compiled, "_executable", None)


def make_cpp_call(compiled: Any, executable: Any) -> Any:
    """What calls a compiled function from C++, with no Python of JAX's in between; None of a JAX that has no such
    thing."""
    if not hasattr(compiled, "_call") or not hasattr(compiled, "_params"):
        return None
    if compiled._call is None:
        compiled._call = executable.create_cpp_call(compiled._params)
    return compiled._call


def distributed_client() -> Any:
    """What this process talks to the others by; None of a JAX that has no such thing."""
    return getattr(__getattr__("global_state"), "client", None)


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve(row)
    return found
