"""What a file says is checked before it is used: files may be damaged, or written by anyone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ...errors import CheckpointError
from ...files import is_of_the_system

_T = TypeVar("_T")

# What readers raise for damaged files. Not Exception, which would include what handlers of signals raise.
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)


@contextmanager
def damage_as_errors(path: str) -> Iterator[None]:
    """Turn what the content of a file may make its reader raise into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} is damaged, or not a checkpoint ({type(error).__name__}: {reason:.200})"
        ) from error


@contextmanager
def as_part_of(index: str, name: Any) -> Iterator[str]:
    """The path of a file that `index` names, which must be in the index's folder; errors in the block name the index.

    Raises:
        CheckpointError: for another name, and if the file is missing or cannot be read.
    """
    folder = os.path.dirname(index)
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", "..") or not name.isprintable():
        raise CheckpointError(f"{index} names {name!r:.80}, which is not a file in its folder")
    path = os.path.join(folder, name)
    try:
        yield path
    except FileNotFoundError:
        raise CheckpointError(f"{path}, which {index} refers to, is missing") from None
    except OSError as error:
        if not is_of_the_system(error):
            raise
        raise CheckpointError(f"{path}, which {index} refers to, cannot be read: {error.strerror or error}") from error


def parse(text: str | bytes) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: if it is not JSON, nested too deeply, or has a key twice in one object.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def of_type(kind: type[_T], value: Any) -> _T:
    """The value, if it is of this type.

    Raises:
        TypeError: for a value of another type.
    """
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


def sizes(numbers: Any) -> tuple[int, ...]:
    """A list of sizes or offsets.

    Raises:
        ValueError: for anything but a list of ints that PyTorch can have as sizes.
    """
    if type(numbers) is not list:
        raise ValueError(f"{numbers!r:.40} is no list of sizes")
    return tuple(map(size, numbers))


def size(number: Any) -> int:
    """A size or an offset.

    Raises:
        ValueError: for anything but an int that PyTorch can have as a size.
    """
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r:.40} is no size or offset")
    return number


def product(factors: tuple[int, ...]) -> int:
    """The product of sizes.

    Raises:
        ValueError: if it exceeds 64 bits on the way, also if a later size is 0.
    """
    result = 1
    for factor in factors:
        result *= factor
        if result >= 1 << 64:
            raise ValueError(f"a tensor of shape {list(factors[:-1])} is too large")
    return result


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a key occurs twice")
    return keys
