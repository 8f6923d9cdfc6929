"""The C part of the guards: version tags of dicts, and recording of reads; None if it was not compiled."""

from __future__ import annotations

from typing import Any

from ...c_library import GUARDS, warn_missing

native: Any
try:
    from . import _guards as native  # type: ignore[attr-defined,no-redef]
except ImportError as error:
    native = None
    warn_missing(GUARDS, str(error))
