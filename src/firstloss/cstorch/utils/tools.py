"""Small functions of `cerebras.pytorch.utils.utils` and `.call_once`."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def override_env_vars(**kwargs: str) -> Iterator[None]:
    """A block in which environment variables have other values."""
    before = {name: os.environ.get(name) for name in kwargs}
    os.environ.update(kwargs)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def get_dir_size(path: str | os.PathLike[str]) -> int:
    """The bytes of all files in a folder."""
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def make_param_filter(
    param_filter: str | list[str] | Callable[[str, torch.nn.Parameter], bool],
) -> Callable[[str, torch.nn.Parameter], bool]:
    """A function `(name, parameter) -> bool`: the given one, or whether the name matches one of the glob patterns."""
    if callable(param_filter):
        return param_filter
    patterns = [param_filter] if isinstance(param_filter, str) else list(param_filter)
    return lambda name, _: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def call_once(error_callable: Callable[[], Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function is called once, and later calls return the same; `error_callable` is called first."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        results: list[Any] = []
        lock = threading.Lock()

        @functools.wraps(function)
        def once(*args: Any, **kwargs: Any) -> Any:
            with lock:
                if not results:
                    results.append(function(*args, **kwargs))
                elif error_callable is not None:
                    error_callable()
            return results[0]

        return once

    return decorate
