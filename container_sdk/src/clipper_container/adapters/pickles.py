"""Pickles that a user wrote: joblib's, or plain ones. Loading one runs what is in it, so only a
model's own process does."""

from __future__ import annotations

import importlib.util
import io
import pickle
from typing import Any

from clipper_container.adapters.errors import LoadError


def load(content: bytes) -> Any:
    """Raises: LoadError for bytes that are no pickle."""
    has_joblib = importlib.util.find_spec("joblib") is not None
    try:
        if not has_joblib:
            return pickle.loads(content)
        import joblib

        return joblib.load(io.BytesIO(content))
    except ModuleNotFoundError:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        ValueError,
        IndexError,
        UnicodeDecodeError,
    ) as error:
        more = "" if has_joblib else "; if joblib wrote it, pip install joblib"
        raise LoadError(
            f"this file is no pickle, or damaged: {type(error).__name__}: {str(error)[:200]}{more}"
        ) from error
