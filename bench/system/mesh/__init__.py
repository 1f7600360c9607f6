"""Benchmarks of the mesh and its registry, in real nodes and on virtual time."""
