"""YAML that anybody may have written: bounded in time and memory.

A few lines in which aliases refer to lists of aliases describe billions of values, which a reader of the file would
visit one by one.
"""

from __future__ import annotations

from typing import Any

from jsonargparse import get_loader

from ..errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_VALUES = 10_000


def load(text: str) -> Any:
    """The content of YAML text.

    Raises:
        ConfigError: if it is not valid, too large, or contains itself.
    """
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"has {len(text):,} characters; the largest run file has {_MAX_BYTES:,}.")
    try:
        content = get_loader("yaml")(text)
    except RecursionError as error:
        raise ConfigError("not valid YAML: it is nested too deeply.") from error
    except Exception as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if _count(content, {}) > _MAX_VALUES:
        raise ConfigError(f"describes more than {_MAX_VALUES:,} values, by aliases (*name) of aliases. Write them out.")
    return content


def _count(part: Any, counts: dict[int, int | None]) -> int:
    """The number of values in a part, each as often as it is referred to.

    Args:
        counts: those of lists and mappings, by id; None for one that is being counted.
    """
    if not isinstance(part, (dict, list)):
        return 1
    if id(part) not in counts:
        counts[id(part)] = None
        parts = [*part, *part.values()] if isinstance(part, dict) else part
        counts[id(part)] = 1 + sum(_count(inner, counts) for inner in parts)
    count = counts[id(part)]
    if count is None:
        raise ConfigError("not valid YAML: an alias (*name) refers to what it is a part of.")
    return count
