"""Benchmarks: each measures Firstloss and the alternative side by side."""
