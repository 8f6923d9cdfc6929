"""Stream arithmetic: how many words a random operation draws, at which position, and how to start there. NumPy only."""

from firstloss.rng.stream import Position, Stream

__all__ = ["Position", "Stream"]
