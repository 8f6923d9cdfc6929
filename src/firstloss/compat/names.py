"""A row of the tables of private names, and how it is looked up."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..errors import CompatibilityError


class Name(NamedTuple):
    """A private name.

    Attributes:
        target: where it is, from its module on: "torch._C._DisableTorchDispatch". With `of`, the name of an attribute.
        why: what Firstloss needs it for.
        breaks: what does not work without it.
        of: of an attribute, whose it is: "torch.Tensor". What is imported is then a function that reads it.
        sample: of an attribute, makes an object that has it, if that takes no slow import.
        otherwise: stands in for the name where there is none; else its use is an error.
    """

    target: str
    why: str
    breaks: str
    of: str = ""
    sample: Callable[[], Any] | None = None
    otherwise: Any = None

    @property
    def path(self) -> str:
        """The whole name, as the table shows it."""
        return f"{self.of}.{self.target}" if self.of else self.target


class Missing:
    """Stands for a name that the installed version does not have: whatever uses it is an error that says so."""

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


def resolve(name: Name) -> Any:
    """The object that `name` stands for; of an attribute, a function that reads it."""
    try:
        if name.of:
            if name.sample is not None:
                getattr(name.sample(), name.target)
            return operator.attrgetter(name.target)
        return lookup(name.target)
    except (ImportError, AttributeError):
        return Missing(name) if name.otherwise is None else name.otherwise


def lookup(path: str) -> Any:
    """What is at a dotted path that begins with a module.

    Raises:
        ImportError, AttributeError: if there is nothing.
    """
    parts = path.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    imported = next((module for module in prefixes if module in sys.modules), None)
    if imported is not None:  # asking the importer for each of a dozen names would take a good part of a trace
        try:
            return _walk(sys.modules[imported], path[len(imported) + 1 :])
        except AttributeError:  # or a module that nobody has imported yet
            pass
    for module in prefixes:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if module == parts[0] or not module.startswith(str(error.name)):
                raise
            continue
        return _walk(found, path[len(module) + 1 :])
    raise AssertionError(path)


def _walk(found: Any, attributes: str) -> Any:
    return operator.attrgetter(attributes)(found) if attributes else found


def _message(name: Name) -> str:
    library = name.path.split(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return (
        f"{library} {version} has no {name.path}, on which Firstloss depends: {name.breaks} does not work without it. "
        f"Use a version of {library} that Firstloss is tested with (docs/compatibility.md)."
    )
