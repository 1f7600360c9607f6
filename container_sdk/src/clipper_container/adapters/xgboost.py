"""XGBoost boosters from their own file format, which holds no code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.classes import labelled
from clipper_container.adapters.columns import NUMBER, TEXT, as_table, record_type
from clipper_container.loading.errors import LoadError
from clipper_container.model import Model, UserValue

if TYPE_CHECKING:
    import xgboost


_NUMBERS = {"int": "i64", "i": "bool", "float": NUMBER, "q": NUMBER, "c": "i64"}


class XgboostModel(Model):
    """Predicts like the estimator that saved the booster; a plain Booster like Booster.predict.

    For a classifier outputs are labels, with the largest probability as confidence. labels: of a
    classifier whose classes are not 0, 1, ....

    A booster that was trained on a DataFrame with categories takes records.
    """

    def __init__(
        self,
        booster: xgboost.Booster,
        labels: Sequence[object] | None = None,
        confidence: bool = True,
    ) -> None:
        learner = json.loads(booster.save_config())["learner"]
        self._objective = str(learner["objective"]["name"])
        self._is_linear = learner["gradient_booster"]["name"] == "gblinear"
        booster.set_param({"nthread": int(os.environ.get("OMP_NUM_THREADS", "1"))})
        estimator_type = json.loads(booster.attr("scikit_learn") or "{}").get("_estimator_type")
        self._classifies = labels is not None or estimator_type == "classifier"
        best = booster.attr("best_iteration")
        self._rounds = (0, int(best) + 1) if best is not None else (0, 0)
        self._booster, self._labels, self._confidence = booster, labels, confidence
        self.input = f"f64[{booster.num_features()}]"
        columns = _columns_of(booster)
        self._categories = [name for name, (is_category, _) in columns.items() if is_category]
        if columns:
            self.input = record_type({name: type_ for name, (_, type_) in columns.items()})

    def predict_batch(self, inputs: object) -> UserValue:
        """Predict with the booster."""
        found = self._scores(
            as_table(inputs, self._categories) if isinstance(inputs, dict) else np.asarray(inputs)
        )
        if not self._classifies:
            return found
        if self._objective == "binary:logistic" and found.ndim == 2:  # several labels at once
            return (found > 0.5).astype(np.int64)
        if self._objective in ("binary:logistic", "multi:softprob"):
            return labelled(found, self._labels, self._confidence)
        best = (found > 0 if self._objective == "binary:logitraw" else found).astype(np.intp)
        return best if self._labels is None else np.take(np.asarray(self._labels), best)

    def _scores(self, rows: object) -> UserValue:
        if not self._is_linear:
            return self._booster.inplace_predict(rows, iteration_range=self._rounds)
        import xgboost

        return self._booster.predict(xgboost.DMatrix(rows))


def _columns_of(booster: xgboost.Booster) -> dict[str, tuple[bool, str]]:
    """Return for each column of a booster with categories whether it has them, and its type.

    Returns an empty dict for a booster without, and for one of a version of XGBoost that did not
    store the categories (before 3.1). Source: XGBoost's JSON model, `cats`.
    """
    types = booster.feature_types or []
    if "c" not in types:
        return {}
    model = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    stored = model.get("cats", {}).get("enc", [])
    if len(stored) != len(types):
        return {}
    return {
        name: (kind == "c", TEXT if "offsets" in categories and kind == "c" else _NUMBERS[kind])
        for name, kind, categories in zip(booster.feature_names, types, stored, strict=True)
    }


def load(content: bytes, labels: Sequence[object] | None = None) -> XgboostModel:
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
