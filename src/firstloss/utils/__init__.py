"""Beside training: `firstloss.utils.data`."""

from . import data as data

__all__ = ["data"]
