"""Imports without the array libraries that scikit-learn's packages bring along and skops never
uses.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

# skops lists the estimators of scikit-learn, which imports each of its packages, these too; where
# torch is installed, they import it: 2 s of CPU and 200 MB.
_ADAPTERS = tuple(f"sklearn.externals.array_api_compat.{one}" for one in ("cupy", "dask", "torch"))


@contextlib.contextmanager
def without_array_libraries() -> Iterator[None]:
    """Hide scikit-learn's adapters of CuPy, dask and torch from imports within. Those that were
    imported before stay, and the others can be imported afterwards.
    """
    hidden = [name for name in _ADAPTERS if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # its import fails, and is passed over
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
