"""Anchors of several benchmarks: plain Python, and the least that a call or a round trip costs."""
