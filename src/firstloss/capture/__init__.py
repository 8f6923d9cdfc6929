"""Capture: run Python once, record tensor operations, compute nothing."""
