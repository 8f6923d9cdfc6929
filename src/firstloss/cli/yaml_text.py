"""YAML that anybody may have written: bounded in time and memory.

A few lines in which aliases refer to lists of aliases describe billions of values, which a reader of the file would
visit one by one.
"""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader

from ..errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_VALUES = 10_000
_MAX_DEPTH = 100
_TOO_DEEP = "not valid YAML: it is nested too deeply."


def load(text: str) -> Any:
    """The content of YAML text.

    Raises:
        ConfigError: if it is not valid, too large, or contains itself.
    """
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"has {len(text):,} characters; the largest run file has {_MAX_BYTES:,}.")
    try:
        _check_depth(text)
        content = get_loader("yaml")(text)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if _count(content, {}, _MAX_DEPTH) > _MAX_VALUES:
        raise ConfigError(f"describes more than {_MAX_VALUES:,} values, by aliases (*name) of aliases. Write them out.")
    return content


def _check_depth(text: str) -> None:
    """
    Raises:
        ConfigError: for text so deeply nested that libyaml, which composes it recursively, might overflow the C stack.
    """
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(_TOO_DEEP)


def _count(part: Any, counts: dict[int, int | None], depth: int) -> int:
    """The number of values in a part, each as often as it is referred to.

    Args:
        counts: those of lists and mappings, by id; None for one that is being counted.
        depth: how many levels it may have.
    """
    if not isinstance(part, (dict, list)):
        return 1
    if not depth:
        raise ConfigError(_TOO_DEEP)
    if id(part) not in counts:
        counts[id(part)] = None
        parts = [*part, *part.values()] if isinstance(part, dict) else part
        counts[id(part)] = 1 + sum(_count(inner, counts, depth - 1) for inner in parts)
    count = counts[id(part)]
    if count is None:
        raise ConfigError("not valid YAML: an alias (*name) refers to what it is a part of.")
    return count
