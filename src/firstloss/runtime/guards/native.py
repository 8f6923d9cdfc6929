"""The C part of the guards: version tags of dicts, and recording of reads; None if it was not compiled."""

from __future__ import annotations

from typing import Any

native: Any
try:
    from . import _guards as native  # type: ignore[attr-defined,no-redef]
except ImportError:
    native = None
