"""Stream arithmetic: what a random operation draws, where in the stream, and how to begin there. Numpy only."""

from firstloss.rng.stream import Position, Stream

__all__ = ["Position", "Stream"]
