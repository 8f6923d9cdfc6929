"""The names that Python looks up in a class for operators and statements."""

from __future__ import annotations

import io
from typing import Any

OPERATORS = {
    *(name for kind in (object, type, int, float, list, dict, set, str, bytes, property, memoryview, io.StringIO)
      for name in dir(kind) if name.startswith("__") and callable(getattr(kind, name, None))),
    "__aenter__", "__aexit__", "__aiter__", "__anext__", "__array__", "__array_function__", "__array_ufunc__",
    "__await__", "__bool__", "__class_getitem__", "__complex__", "__copy__", "__deepcopy__", "__del__", "__delete__",
    "__float__",
    "__fspath__", "__getattr__", "__imatmul__", "__index__", "__instancecheck__", "__int__", "__length_hint__",
    "__match_args__", "__matmul__", "__missing__", "__mro_entries__", "__rmatmul__", "__set__", "__set_name__",
    "__subclasscheck__", "__torch_dispatch__", "__torch_function__",
} - {"__class__"}  # fmt: skip

_OTHERS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "__slots__",
           "__qualname__", "__dataclass_fields__", "__orig_bases__", "__parameters__", "__firstlineno__",
           "__static_attributes__"}  # fmt: skip


def is_operator(name: Any) -> bool:
    """Whether a name in a class may be an operator."""
    return isinstance(name, str) and name.startswith("__") and name.endswith("__") and name not in _OTHERS
