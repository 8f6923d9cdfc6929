"""Names that act on Cerebras' hardware or compiler alone. They are accepted and have no effect, which is said once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch

from ..errors import BackendError
from ..no_effect import say_no_effect
from ..program.source import here

F = TypeVar("F", bound=Callable[..., Any])
_DEBUG_NAME = "_debug_name"


def say(name: str) -> None:
    """Say, once for each name, that it has no effect here."""
    say_no_effect(f"cstorch.{name}")


def unsupported(name: str, instead: str) -> NoReturn:
    """
    Raises:
        BackendError: what `name` does would change the results, and is not supported.
    """
    raise BackendError(f"{here()}: cstorch.{name} is not supported: {instead}")


def pol(
    level: int | None = None, bwd_level: int | None = None, enable_fwd: bool = True, enable_bwd: bool = True
) -> Callable[[F], F]:
    """A decorator that asks for a precision level of Cerebras' kernels. No effect.

    Args:
        level, bwd_level: of the forward and the backward pass.
        enable_fwd, enable_bwd: for which of them.

    Returns:
        A decorator that returns its function.
    """
    say("pol")
    return lambda function: function


def current_pol() -> int | None:
    """The precision level of Cerebras' kernels that is in force.

    Returns:
        None.
    """
    return None


def device_annotation(device: str, enable_fwd: bool = True, enable_bwd: bool = True) -> Callable[[F], F]:
    """A decorator that places operations on parts of Cerebras' hardware. No effect.

    Args:
        device: the part.
        enable_fwd, enable_bwd: for the forward, and the backward pass.

    Returns:
        A decorator that returns its function.
    """
    say("device_annotation")
    return lambda function: function


@contextlib.contextmanager
def name_scope(name: str, raw: bool = False) -> Iterator[str]:
    """A block whose operations have a name in Cerebras' compiler. No effect: operations have the user's lines.

    Args:
        name: the name.
        raw: whether it is used as it is.

    Yields:
        The name.
    """
    yield name


def set_debug_scope(name: str | None) -> None:
    """As `name_scope`, until it is set again. No effect.

    Args:
        name: the name; None for none.
    """


def add_debug_name(module: torch.nn.Module, root_name: str | None = None) -> None:
    """Give a module and all in it the attribute `_debug_name`.

    Args:
        module: the module.
        root_name: what the names begin with.
    """
    for name, inner in module.named_modules():
        setattr(inner, _DEBUG_NAME, ".".join(filter(None, (root_name, name))))


def get_debug_name(module: torch.nn.Module) -> str:
    """The name that `add_debug_name` has given a module.

    Args:
        module: the module.

    Returns:
        The name; without one, that of the class.
    """
    return str(getattr(module, _DEBUG_NAME, type(module).__name__))


def make_constant(tensor: torch.Tensor) -> torch.Tensor:
    """A constant of the compiled step: here, what a step reads and does not change is one by itself.

    Args:
        tensor: the constant.

    Returns:
        The tensor.
    """
    return tensor


def register_decomposition(op: Any, device: str = "CSX") -> Callable[[F], F]:
    """A decorator that gives an operation a decomposition for Cerebras' compiler. No effect; see
    `firstloss.register_lowering`.

    Args:
        op: the operation.
        device: the kind of backend.

    Returns:
        A decorator that returns its function.
    """
    say("register_decomposition")
    return lambda function: function


def current_backend_impl(raise_exception: bool = True) -> Any:
    """As `current_backend`: there is one object for a backend here."""
    from ..runtime.backend import current_backend

    return current_backend(raise_exception=raise_exception)


class Flags:
    """Flags of Cerebras' compiler and cluster, as in `cstorch.backends.csx.precision.optimization_level = 1`.

    A flag keeps what is assigned to it, and has no effect. One that was not assigned is false.
    """

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        flags = Flags(f"{self._path}.{name}")
        object.__setattr__(self, name, flags)
        return flags

    def __setattr__(self, name: str, value: Any) -> None:
        say(f"{self._path}.{name}")
        object.__setattr__(self, name, value)

    def __bool__(self) -> bool:
        return False

    def reset(self) -> None:
        """Forget what was assigned."""
        for name in [name for name in vars(self) if name != "_path"]:
            object.__delattr__(self, name)


backends: Flags = Flags("backends")


class _Unsupported:
    """Base of classes that cannot be used here."""

    _instead = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unsupported(type(self).__qualname__, self._instead)


def unsupported_class(module: str, name: str, instead: str) -> type:
    """A class that cannot be constructed, in place of `cstorch.<module>.<name>`; `instead`: why, and what to do."""
    return type(
        name, (_Unsupported,), {"__qualname__": f"{module}.{name}", "__module__": __name__, "_instead": instead}
    )
