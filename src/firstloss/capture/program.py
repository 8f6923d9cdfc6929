"""Moved to `program/graph.py`: here until nobody asks for it by this name."""

from ..program.graph import *  # noqa: F403
