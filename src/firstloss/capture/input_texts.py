"""Texts (`str`, `bytes`) that change from call to call of a traced step: paths and ids that come with a batch.

As for numbers (`input_numbers.py`), once a text has been seen to change, an *input text* takes its place while the step
is traced. A step that only hands it on, into a list or its result, is not traced again for another text. A step that
asks a question about it (`mode == "train"`, `path.endswith(".png")`, `len(path)`) is guarded on the answer, and a step
that uses it otherwise on the text itself.

An input text is no `str`: C code, which would read it unnoticed, raises a TypeError, and the step is then traced with
the texts themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from .input_numbers import Expression, InputNumbers, is_input_number, plain
from .printed_texts import pieces

TEXTS = (str, bytes)


def is_text(value: Any) -> bool:
    """Whether it is a text of Python's own types."""
    return type(value) in TEXTS


class InputText:
    """A text that is an input of a traced step. To Python code it is of the text's class."""

    __slots__ = ("_expression", "_numbers", "_text")

    def __init__(self, text: Any, expression: Expression, numbers: InputNumbers) -> None:
        self._text = text
        self._expression = expression
        self._numbers = numbers

    __class__ = property(lambda self: type(self._text))

    def __getattr__(self, name: str) -> Any:
        """A method of the text."""
        if not hasattr(self._text, name):
            raise AttributeError(f"{type(self._text).__name__!r} object has no attribute {name!r}")
        if name.startswith("is") or name in ("startswith", "endswith"):
            return lambda *args: _answer(self, _method, name, *args)
        return getattr(text_of(self), name)

    def __copy__(self) -> InputText:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> InputText:
        return self


def text_of(text: InputText) -> Any:
    """The text, on which the step depends from now on."""
    text._numbers.guard(text._expression, text._text)
    return text._text


def printed(text: Any, numbers: InputNumbers) -> Any:
    """A text in which marks stand for numbers, as an input text; any other value as it is."""
    parts: list[Any] = [numbers.printed[part] if type(part) is int else part for part in pieces(text)]
    if not parts:
        return text
    expression = numbers.computed(_joined, tuple(parts))
    expression.example = _joined(*[part.example if type(part) is Expression else part for part in parts])
    return InputText(expression.example, expression, numbers)


def _joined(*parts: str) -> str:
    return "".join(parts)


def input_of(value: Any) -> Expression | None:
    """How an input number or an input text is computed at a call; None for any other value."""
    if is_input_number(value):
        return value.node.expression
    return value._expression if type(value) is InputText else None


def is_input(value: Any) -> bool:
    """Whether it is an input number or an input text."""
    return is_input_number(value) or type(value) is InputText


def value_of(value: Any) -> Any:
    """The value of an input number or an input text in the trace."""
    return plain(value) if is_input_number(value) else value._text


def _method(text: Any, name: str, *args: Any) -> Any:
    return getattr(text, name)(*args)


def _answer(text: InputText, question: Callable[..., Any], *args: Any) -> Any:
    """The value of `question(text, *args)`, on which the step depends from now on."""
    values = [text_of(arg) if type(arg) is InputText else arg for arg in args]
    answer = question(text._text, *values)
    try:
        expression = text._numbers.computed(question, (text._expression, *values))
        text._numbers.guard(expression, answer)
    except Exception:  # arguments that cannot be told apart
        text_of(text)
    return answer


def _asks(question: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: _answer(self, question, *args)


def _uses(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(text_of(self), *[text_of(a) if type(a) is InputText else a for a in args])


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: getattr(operator, name)(other, text_of(self))


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "contains"):
    setattr(InputText, f"__{_name}__", _asks(getattr(operator, _name)))
for _name, _question in {"len": len, "bool": bool}.items():
    setattr(InputText, f"__{_name}__", _asks(_question))
_USES: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "mul", "mod", "getitem")},
    "iter": iter,
    "hash": hash,
    "str": str,
    "repr": repr,
    "format": format,
    "fspath": lambda text: text,
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes,
    "reduce_ex": lambda text, protocol: text.__reduce_ex__(protocol),
}
for _name, _question in _USES.items():
    setattr(InputText, f"__{_name}__", _uses(_question))
for _name in ("add", "mul", "mod"):
    setattr(InputText, f"__r{_name}__", _reflected(_name))
