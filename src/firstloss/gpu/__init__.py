"""NVIDIA GPUs: kernels that initialize weights, and steps replayed as CUDA graphs."""
