"""XGBoost boosters from their own file format, which holds no code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipper_container.adapters.classes import labelled
from clipper_container.adapters.errors import LoadError
from clipper_container.model import Model


class XgboostModel(Model):
    """Predicts like the estimator that saved the booster; a plain Booster like Booster.predict.

    For a classifier outputs are labels, with the largest probability as confidence. labels: of a
    classifier whose classes are not 0, 1, ....
    """

    def __init__(
        self, booster: Any, labels: Sequence[Any] | None = None, confidence: bool = True
    ) -> None:
        learner = json.loads(booster.save_config())["learner"]
        self._objective = str(learner["objective"]["name"])
        self._is_linear = learner["gradient_booster"]["name"] == "gblinear"
        booster.set_param({"nthread": int(os.environ.get("OMP_NUM_THREADS", "1"))})
        said = json.loads(booster.attr("scikit_learn") or "{}").get("_estimator_type")
        self._classifies = labels is not None or said == "classifier"
        best = booster.attr("best_iteration")
        self._rounds = (0, int(best) + 1) if best is not None else (0, 0)
        self._booster, self._labels, self._confidence = booster, labels, confidence
        self.input = f"f64[{booster.num_features()}]"

    def predict_batch(self, inputs: Any) -> Any:
        """Predict with the booster."""
        found = self._scores(np.asarray(inputs))
        if not self._classifies:
            return found
        if self._objective == "binary:logistic" and found.ndim == 2:  # several labels at once
            return (found > 0.5).astype(np.int64)
        if self._objective in ("binary:logistic", "multi:softprob"):
            return labelled(found, self._labels, self._confidence)
        best = (found > 0 if self._objective == "binary:logitraw" else found).astype(np.intp)
        return best if self._labels is None else np.take(np.asarray(self._labels), best)

    def _scores(self, rows: Any) -> Any:
        if not self._is_linear:
            return self._booster.inplace_predict(rows, iteration_range=self._rounds)
        import xgboost

        return self._booster.predict(xgboost.DMatrix(rows))


def load(content: bytes, labels: Sequence[Any] | None = None) -> XgboostModel:
    """Load a booster. Raises: LoadError."""
    import xgboost

    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(content))
    except xgboost.core.XGBoostError as error:
        raise LoadError(
            "XGBoost cannot load this model:"
            f" {str(error).partition('Stack trace')[0].strip()[:500]}"
        ) from None
    return XgboostModel(booster, labels)
