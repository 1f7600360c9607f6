"""Loads pickles, plain or joblib's. Loading runs their code, so only a model's own process does
it.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
from collections.abc import Mapping

from clipper_container.loading.errors import LoadError
from clipper_container.model import UserValue


def load(content: bytes) -> object:
    """Unpickle a model. Raises: LoadError for bytes that are not a pickle."""
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
            f"this file is not a pickle, or damaged: {type(error).__name__}:"
            f" {str(error)[:200]}{more}"
        ) from error


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> object:
    """Unpickle a model. Raises: LoadError for bytes that are not a pickle."""
    return load(content)
