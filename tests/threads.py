"""Threads that tests start."""

import threading

LIMIT_S = 120.0  # less than tests/run.py gives a test: one that hangs fails, and those after it run


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread. Raises: AssertionError if it hangs."""
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"{thread.name} has not ended within {LIMIT_S:g} s"
