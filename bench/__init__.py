"""Benchmarks: costs of clipper beside anchors. `python -m bench` lists them."""
