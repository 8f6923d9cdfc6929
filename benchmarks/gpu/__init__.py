"""What `make gpu` runs: the figures on a GPU, and their tiny form on a CPU. See docs/how-to/gpu.md."""
