"""Sizes of statistical tests: small in `make test`, full in `make test-full`."""

import os
from typing import TypeVar

T = TypeVar("T")


def sized(small: T, full: T) -> T:
    """Return `full` if CLIPPER_TESTS=full is set, else `small`, with which a broken implementation
    must fail too."""
    return full if os.environ.get("CLIPPER_TESTS") == "full" else small
