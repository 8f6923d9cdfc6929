"""Weights straight to disk: made piece by piece and written past the page cache, as safetensors."""
