"""Rollouts: what the next step is, and the thread that takes it."""
