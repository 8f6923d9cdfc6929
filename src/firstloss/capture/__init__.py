"""Capture: run Python once and record its tensor operations without computing them."""
