"""Benchmarks of what a user gets from a running system, a package for each part of it."""
