"""Three models of scikit-learn's bundled digits: 1797 scans of 8x8 pixels, half to train on, half held out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipper.errors import ClipperError

REPLICAS = {"forest": 2, "logreg": 1, "svm": 1}  # by name, as a server that finds them in its state has them


class DemoNeedsSklearn(ClipperError):
    """scikit-learn is not installed."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Scans as rows of 64 gray levels (f64), and the digits they show."""

    train_x: NDArray[np.float64]
    train_y: NDArray[np.int64]
    held_x: NDArray[np.float64]
    held_y: NDArray[np.int64]


def load(seed: int = 0) -> Digits:
    """The scans in an order that depends on the seed only. DemoNeedsSklearn when scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise DemoNeedsSklearn(
            "the demo serves scikit-learn models, and scikit-learn is not installed.",
            hint='Run: pip install "clipper-serving[demo]"',
        ) from None
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order], y[order]
    half = len(x) // 2
    return Digits(x[:half], y[:half], x[half:], y[half:])


def train(name: str, digits: Digits) -> Any:
    """A trained estimator: `logreg` (about 0.5 ms a batch), `forest` (3 ms), or `svm` (0.1 ms, and more with each row)."""
    return _MAKERS[name]().fit(digits.train_x, digits.train_y)


def _logreg() -> Any:
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped,unused-ignore]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped,unused-ignore]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped,unused-ignore]

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, tol=1e-2))


def _forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier  # type: ignore[import-untyped,unused-ignore]

    return RandomForestClassifier(100, random_state=0)


def _svm() -> Any:
    from sklearn.svm import SVC  # type: ignore[import-untyped,unused-ignore]

    return SVC(gamma=0.001, C=10)


_MAKERS: dict[str, Callable[[], Any]] = {"logreg": _logreg, "forest": _forest, "svm": _svm}
