"""The kinds of objects that a step's Python code can reach, by their classes."""

from __future__ import annotations

import ast
import datetime
import threading
import types
import zoneinfo

from ....compat.python_names import has_managed_dict, is_python_class
from ..kind import Kind, of
from ..packages import is_closed_class, is_harmless_module, is_runtime, module_of_class
from . import classes, containers, functions  # noqa: F401 - they register their kinds
from .contents import ITERATOR_OF_C, TOKENIZER, UNKNOWN_ITERATOR
from .instances import FIRSTLOSS_OBJECT, INSTANCE, LEAF, UNKNOWN, has_attributes


@of(object)
class Other(Kind):
    """Objects of classes without a kind of their own: iterators of C, and objects with attributes."""

    def of_class(self, cls: type) -> Kind:
        module = module_of_class(cls)
        package = module.partition(".")[0]
        if _is_iterator_of_c(cls):
            is_pickled = cls.__reduce__ is not object.__reduce__  # the position
            return ITERATOR_OF_C if is_pickled else UNKNOWN_ITERATOR
        if package == "tokenizers":
            return TOKENIZER
        if is_runtime(module):
            return FIRSTLOSS_OBJECT if module.startswith(_OF_USERS) and cls.__dictoffset__ else LEAF
        if issubclass(cls, threading.local):
            return INSTANCE
        if not all(_is_of_python(base) or _is_harmless(base) for base in cls.__mro__):
            return UNKNOWN_ITERATOR if hasattr(cls, "__next__") else UNKNOWN
        is_stateless = package in _STATELESS and is_closed_class(cls)
        return INSTANCE if has_attributes(cls) and not is_stateless else LEAF


# Rooms whose objects users hold.
_OF_USERS = ("firstloss.optim.", "firstloss.metrics.", "firstloss.amp.")
# Modules of the standard library whose objects refer to everything, and have no effect on what a step computes.
_STATELESS = {"typing", "importlib", "abc"}
# C classes with Python subclasses whose instances have no hidden state.
_PLAIN_BASES = {object, types.SimpleNamespace, datetime.tzinfo, zoneinfo.ZoneInfo}
_MODULES_OF_ITERATORS = ("builtins", "itertools", "_collections")


def _is_iterator_of_c(cls: type) -> bool:
    """Whether it is one of Python's builtin iterator classes."""
    # Not `hasattr`, which the metaclass of a Python class may override, as mocks do. (Some classes of ctypes have no
    # module.)
    return (
        getattr(cls, "__module__", None) in _MODULES_OF_ITERATORS
        and not is_python_class(cls)
        and hasattr(cls, "__next__")
    )


def _is_of_python(cls: type) -> bool:
    """Whether a class was defined in Python, so that it adds nothing but attributes to what its base has in it."""
    if has_managed_dict(cls) or "__slots__" in vars(cls):
        return True
    offset = cls.__dictoffset__
    return is_python_class(cls) and offset != 0 and cls.__base__ is not None and cls.__base__.__dictoffset__ == offset


def _is_harmless(base: type) -> bool:
    if base in _PLAIN_BASES or issubclass(base, (BaseException, threading.local, ast.AST)):
        return True
    return is_harmless_module(module_of_class(base))
