"""Benchmarks of several servers that work as one, on Redis and on Ray."""
