"""Traced steps: trace, compile, run."""

from ..guards import kinds as _kinds  # noqa: F401 - they are registered
