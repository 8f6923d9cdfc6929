"""Settings of Cerebras' hardware, which are accepted without effect."""

from __future__ import annotations

import warnings

from .errors import NoEffectWarning
from .program.source import here

_said: set[str] = set()


def say_no_effect(what: str) -> None:
    """Say, once for each setting, that it has no effect here."""
    if what not in _said:
        _said.add(what)
        line = here()
        message = f"{what} is for Cerebras' hardware and has no effect here"
        warnings.warn_explicit(message, NoEffectWarning, line.file, line.line)
