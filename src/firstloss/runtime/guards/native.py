"""The C part of the guards: dictionary versions, and a record of what is read; None where there was no compiler."""

from __future__ import annotations

from typing import Any

native: Any
try:
    from . import _guards as native  # type: ignore[attr-defined,no-redef]
except ImportError:
    native = None
