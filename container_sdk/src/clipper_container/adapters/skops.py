"""Estimators in skops' format: scikit-learn's objects without pickle. Only trusted types are
created.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence

from clipper_container.loading.errors import LoadError
from clipper_container.loading.unused_imports import without_array_libraries
from clipper_container.model import UserValue

UNPACKED_BYTES_MAX = 2 << 30

# Types of scikit-learn's own that its forests and neural networks hold and that skops does not
# list; they are data.
OF_SKLEARN = (
    "sklearn.tree._tree.Tree",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
)


def untrusted(content: bytes, trusted: Sequence[str] = ()) -> list[str]:
    """Return the types that the file needs and that are not trusted. Creates none of them.
    Raises: LoadError.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            size = sum(part.file_size for part in parts.infolist())
    except Exception as error:
        raise _no_skops_file(error) from None
    if size > UNPACKED_BYTES_MAX:
        raise LoadError(
            f"unpacked it would have {size} bytes; at most {UNPACKED_BYTES_MAX} are possible"
        )
    with without_array_libraries():
        import skops.io

    try:
        return sorted(set(skops.io.get_untrusted_types(data=content)) - {*OF_SKLEARN, *trusted})
    except Exception as error:
        raise _no_skops_file(error) from None


def _no_skops_file(error: Exception) -> LoadError:
    return LoadError(f"these bytes are no skops file: {str(error)[:500] or type(error).__name__}")


def load(content: bytes, trusted: Sequence[str] = ()) -> object:
    """Load the estimator. trusted: types beyond those that skops trusts. Raises: LoadError."""
    if unknown := untrusted(content, trusted):
        raise LoadError(f"the file needs types that are not trusted: {', '.join(unknown)}")
    import skops.io

    try:
        thing = skops.io.loads(
            content, trusted=sorted({*skops.io.get_untrusted_types(data=content)})
        )
    except Exception as error:
        raise LoadError(
            f"skops cannot load this file: {str(error)[:500] or type(error).__name__}"
        ) from None
    if not callable(getattr(thing, "predict", None)):
        raise LoadError(f"the file holds a {type(thing).__name__}, which has no predict()")
    return thing


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> object:
    """Load a file. about: further `trusted` types. Raises: LoadError."""
    return load(content, tuple(about.get("trusted", ())))
