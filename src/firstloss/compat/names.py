"""Rows of the tables of private names."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..errors import CompatibilityError


class Name(NamedTuple):
    """A private name.

    Attributes:
        target: the name's path, from its module on: "torch._C._DisableTorchDispatch". With `of`, an attribute's name.
        why: what Firstloss uses it for.
        breaks: what does not work without it.
        of: the owner of an attribute: "torch.Tensor". The name then resolves to a function that reads the attribute.
        sample: makes an object with the attribute, to check that it exists, if that takes no slow import.
        otherwise: a substitute if the name does not exist; without one, its use is an error.
    """

    target: str
    why: str
    breaks: str
    of: str = ""
    sample: Callable[[], Any] | None = None
    otherwise: Any = None

    @property
    def path(self) -> str:
        """The full name, as in the table."""
        return f"{self.of}.{self.target}" if self.of else self.target


class Missing:
    """Placeholder of a name that the installed version lacks; any use raises a CompatibilityError."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CompatibilityError(_message(self._name))

    __call__ = __getitem__ = __enter__ = __iter__ = __mro_entries__ = __instancecheck__ = __contains__ = _refuse
    __bool__ = __or__ = __ror__ = _refuse

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()


def lookup(path: str) -> Any:
    """Look up a dotted path that begins with a module.

    Raises:
        ImportError, AttributeError: if it does not exist.
    """
    ways = _ways(path)
    for module, attributes_of in ways:
        if module in sys.modules:  # avoids the import machinery, which is slow enough to matter in a capture
            try:
                return attributes_of(sys.modules[module])
            except AttributeError:  # may be a module that is not imported yet
                break
    for module, attributes_of in ways:
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if "." not in module or not module.startswith(str(error.name)):
                raise
            continue
        return attributes_of(value)
    raise AssertionError(path)


@functools.cache
def _ways(path: str) -> list[tuple[str, Callable[[Any], Any]]]:
    """Each module that `path` may begin with, the longest first, and a function that reads the rest from it."""
    parts = path.split(".")
    ways: list[tuple[str, Callable[[Any], Any]]] = [(path, lambda module: module)]
    for count in range(len(parts) - 1, 0, -1):
        ways.append((".".join(parts[:count]), operator.attrgetter(".".join(parts[count:]))))
    return ways


def resolve(name: Name) -> Any:
    """The object behind a row; for an attribute, a function that reads it."""
    try:
        if name.of:
            if name.sample is not None:
                getattr(name.sample(), name.target)
            return operator.attrgetter(name.target)
        return lookup(name.target)
    except (ImportError, AttributeError):
        return Missing(name) if name.otherwise is None else name.otherwise


def _message(name: Name) -> str:
    library = name.path.split(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return (
        f"{library} {version} has no {name.path}, which Firstloss needs: {name.breaks} does not work without it. "
        f"Use a version of {library} that Firstloss is tested with (docs/compatibility.md)."
    )
