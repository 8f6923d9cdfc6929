"""The guards' C part: dictionary versions, and notes of what is read. Where there was no compiler, None."""

from __future__ import annotations

from typing import Any

native: Any
try:
    from . import _guards as native  # type: ignore[attr-defined,no-redef]
except ImportError:
    native = None
