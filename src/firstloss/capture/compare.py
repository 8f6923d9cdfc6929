"""Moved to `program/compare.py`: here until nobody asks for it by this name."""

from ..program.compare import *  # noqa: F403
