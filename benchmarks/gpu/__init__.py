"""The parts of `make gpu`: benchmarks on a GPU, and their tiny form on a CPU. See docs/gpu.md."""
