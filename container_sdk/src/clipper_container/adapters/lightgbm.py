"""LightGBM boosters from their text format, which holds no code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipper_container.adapters.classes import labelled
from clipper_container.adapters.errors import LoadError
from clipper_container.model import Model


class LightgbmModel(Model):
    """Predicts like the estimator the booster was taken from; a plain Booster like Booster.predict.

    labels: of a classifier: outputs are then labels, with the largest probability as confidence.
    """

    def __init__(
        self, booster: Any, labels: Sequence[Any] | None = None, confidence: bool = True
    ) -> None:
        self._booster, self._labels, self._confidence = booster, labels, confidence
        self._threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        self.input = f"f64[{booster.num_feature()}]"

    def predict_batch(self, inputs: Any) -> Any:
        """Predict with the booster."""
        found = self._booster.predict(np.asarray(inputs), num_threads=self._threads)
        return found if self._labels is None else labelled(found, self._labels, self._confidence)


def load(content: bytes, labels: Sequence[Any] | None = None) -> LightgbmModel:
    """Load a booster. Raises: LoadError."""
    import lightgbm

    try:
        return LightgbmModel(lightgbm.Booster(model_str=content.decode()), labels)
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise LoadError(f"LightGBM cannot load this model: {str(error)[:500]}") from None
