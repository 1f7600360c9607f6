"""Models of scikit-learn's digits data: 1797 images of 8x8 pixels, half for training, half held
out.

Three models are good and two are not, so that policies have something to learn. A model returns
wrong labels while a file with its name exists; `spoil` and `mend` create and remove it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipper.errors import ClipperError
from clipper_container import Model, Scored
from clipper_container.adapters.sklearn import EstimatorModel
from clipper_container.model import UserValue

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

REPLICAS = {"forest": 2, "logreg": 1, "svm": 1, "bayes": 1, "tree": 1}  # by name
GOOD = ("forest", "logreg", "svm")


class DemoNeedsSklearn(ClipperError):
    """scikit-learn is not installed."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows of 64 gray levels (f64), and their digits."""

    train_x: NDArray[np.float64]
    train_y: NDArray[np.int64]
    held_x: NDArray[np.float64]
    held_y: NDArray[np.int64]


def load(seed: int = 0) -> Digits:
    """Load the data, shuffled by the seed. Raises: DemoNeedsSklearn if scikit-learn is missing."""
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


def train(name: str, digits: Digits) -> "BaseEstimator":
    """Return a trained estimator: `logreg` (about 0.5 ms per batch), `forest` (3 ms), `svm` (0.1
    ms plus a time per row), or the weaker `bayes` and `tree`.
    """
    return _MAKERS[name]().fit(digits.train_x, digits.train_y)


def _logreg() -> "BaseEstimator":
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped,unused-ignore]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped,unused-ignore]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped,unused-ignore]

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, tol=1e-2))


def _forest() -> "BaseEstimator":
    from sklearn.ensemble import RandomForestClassifier  # type: ignore[import-untyped,unused-ignore]

    return RandomForestClassifier(100, random_state=0)


def _svm() -> "BaseEstimator":
    from sklearn.svm import SVC  # type: ignore[import-untyped,unused-ignore]

    return SVC(gamma=0.001, C=10)


def _bayes() -> "BaseEstimator":
    from sklearn.naive_bayes import GaussianNB  # type: ignore[import-untyped,unused-ignore]

    return GaussianNB()


def _tree() -> "BaseEstimator":
    from sklearn.tree import DecisionTreeClassifier  # type: ignore[import-untyped,unused-ignore]

    return DecisionTreeClassifier(max_depth=5, random_state=0)


_MAKERS: "dict[str, Callable[[], BaseEstimator]]" = {
    "logreg": _logreg,
    "forest": _forest,
    "svm": _svm,
    "bayes": _bayes,
    "tree": _tree,
}


# -- wrong labels


def spoilable(estimator: object, flag: Path) -> Model:
    """Wrap the estimator so that it returns the next digit while the file `flag` exists."""
    place = str(flag)

    # a local class is packed by value: its container imports nothing of the server
    class Spoilable(Model):
        input = "f64[64]"

        def load(self) -> None:
            self.inner = EstimatorModel(estimator)

        def predict_batch(self, inputs: UserValue) -> UserValue:
            outputs = self.inner.predict_batch(inputs)
            if not os.path.exists(place):
                return outputs
            return (
                Scored((outputs.outputs + 1) % 10, outputs.confidence)
                if isinstance(outputs, Scored)
                else (outputs + 1) % 10
            )

    return Spoilable()


class Spoiler:
    """Makes models return wrong labels. folder: holds their flag files. Threads: one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for model in REPLICAS:
            self.mend(model)

    def flag(self, model: str) -> Path:
        """Return the path of a model's flag file."""
        return self._folder / f"{model}.wrong"

    def is_spoiled(self, model: str) -> bool:
        """Return True if the model returns wrong labels."""
        return self.flag(model).exists()

    def spoil(self, model: str) -> None:
        """Make the model return wrong labels."""
        self.flag(model).touch()

    def mend(self, model: str) -> None:
        """Make the model return right labels again."""
        self.flag(model).unlink(missing_ok=True)
