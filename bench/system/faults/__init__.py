"""Benchmarks whose servers are killed and frozen, with checks of what clients saw."""
