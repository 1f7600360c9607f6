"""Serving: running models, queries, feedback and rollouts."""
