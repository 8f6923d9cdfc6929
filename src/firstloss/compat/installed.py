"""Which files belong to installed packages, and which to the user."""

from __future__ import annotations

import functools
import os
import sys


@functools.cache
def is_installed_file(file: str) -> bool:
    """Whether a file lies in a folder that packages are installed into."""
    folder = os.path.dirname(os.path.realpath(file))
    return any(map(_holds_packages, _with_parents(folder)))


def _with_parents(folder: str) -> list[str]:
    parent = os.path.dirname(folder)
    return [folder] if parent == folder else [folder, *_with_parents(parent)]


@functools.cache
def _holds_packages(folder: str) -> bool:
    """Whether packages are installed into a folder: an environment's, a user's, or one of `pip install --target`."""
    if folder in _site_folders():
        return True
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and folder == os.path.dirname(os.path.realpath(script)):
        return False
    if folder not in map(os.path.realpath, sys.path):
        return False
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


@functools.cache
def _site_folders() -> set[str]:
    import sysconfig  # a capture does without it: 3 ms

    return {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
