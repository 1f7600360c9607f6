"""A plugin of pytest under failing.cpp: while the body of a test runs, one in FAILING_ONE_IN
allocations of the core fails.

FAILING_SEED says which. A test may fail; one that waits for what never comes is ended after
FAILING_TEST_S seconds. What must not be is that the process dies by a signal, or that a thread that
runs the core cannot be interrupted.
"""

import ctypes
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest

ALLOCATOR = ctypes.CDLL(None)
ALLOCATOR.failing_on.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
ALLOCATOR.failing_off.restype = ctypes.c_uint64
SEED, ONE_IN = int(os.environ["FAILING_SEED"]), int(os.environ["FAILING_ONE_IN"])
TEST_S = float(os.environ["FAILING_TEST_S"])
failed = [0]


def waited(_number: int, _frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"the test waited for {TEST_S} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Set the seed of one test from its name, so that the test can also be run alone."""
    signal.signal(signal.SIGALRM, waited)
    signal.setitimer(signal.ITIMER_REAL, TEST_S)
    ALLOCATOR.failing_on(SEED + zlib.crc32(item.nodeid.encode()), ONE_IN)
    try:
        yield
    finally:
        failed[0] += ALLOCATOR.failing_off()
        signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Return how many allocations have failed."""
    terminalreporter.write_line(f"allocations failed: {failed[0]}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process even if threads of failed tests still wait."""
    sys.stdout.flush()
    os._exit(0)
