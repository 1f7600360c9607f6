"""Benchmarks of the parameter server: tables in memory, on the wire, on disk and in training."""
