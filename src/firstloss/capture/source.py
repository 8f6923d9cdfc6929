"""Moved to `program/source.py`: here until nobody asks for it by this name."""

from ..program.source import *  # noqa: F403
