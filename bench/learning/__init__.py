"""Benchmarks of selection policies on streams of queries with feedback."""
