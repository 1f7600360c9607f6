"""Anchors, a model that costs nothing, and stores, which several groups use."""
