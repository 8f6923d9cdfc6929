"""NVIDIA GPUs: weights made on them by kernels of our own, and steps replayed on them as CUDA graphs."""
