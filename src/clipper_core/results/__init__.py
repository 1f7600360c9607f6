"""Futures, and how a finished prediction reaches the code that waits for it."""
