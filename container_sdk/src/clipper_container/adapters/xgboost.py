"""XGBoost boosters from their own file format, which holds no code."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.classes import label_array, labelled, labels_of
from clipper_container.adapters.columns import NUMBER, TEXT, as_table, in_order, record_type
from clipper_container.loading.errors import LoadError
from clipper_container.model import Model, UserValue
from clipper_container.schema import Array

if TYPE_CHECKING:
    import xgboost


_NUMBERS = {"int": "i64", "i": "bool", "float": NUMBER, "q": NUMBER, "c": "i64"}
_PROBABILITIES = ("binary:logistic", "reg:logistic", "multi:softprob")
_PLACE = re.compile(r"^\[[0-9:]+\] \S+?:\d+: ")  # the time and the line of XGBoost's source


def facts_of(estimator: UserValue) -> dict[str, UserValue]:
    """Return what the predict() of an estimator uses beside its booster, as JSON has it."""
    facts: dict[str, UserValue] = {"type": estimator._get_type()}
    missing = estimator.missing
    if missing is not None and not np.isnan(missing):
        facts["missing"] = float(missing)
    return facts


class XgboostModel(Model):
    """Predicts like the estimator that saved the booster; a plain Booster like Booster.predict:
    with all its trees, also after early stopping.

    For a classifier outputs are labels, with their probability as confidence if the objective has
    one. labels: of a classifier whose classes are not 0, 1, .... estimator: see `facts_of`; without
    it, the file says which kind of estimator saved it.

    A booster that was trained on a DataFrame with categories takes records.
    """

    def __init__(
        self,
        booster: xgboost.Booster,
        labels: Sequence[object] | None = None,
        confidence: bool = True,
        estimator: Mapping[str, UserValue] = {},
    ) -> None:
        learner = json.loads(booster.save_config())["learner"]
        self._objective = str(learner["objective"]["name"])
        self._classes = max(int(learner["learner_model_param"]["num_class"]), 2)
        kind = learner["gradient_booster"]["name"]
        is_linear = kind == "gblinear"
        booster.set_param({"nthread": int(os.environ.get("OMP_NUM_THREADS", "1"))})
        saved_by = json.loads(booster.attr("scikit_learn") or "{}").get("_estimator_type")
        type_ = estimator.get("type") or saved_by
        self._classifies = labels is not None or type_ == "classifier"
        best = booster.attr("best_iteration")
        is_plain = not self._classifies and not type_
        # inplace_predict, as estimators call it, adds up the trees of dart in another order
        self._in_place = not is_linear and not (is_plain and kind == "dart")
        heeds_best = not is_plain and best is not None and not is_linear
        self._rounds = (0, int(best) + 1) if heeds_best else (0, 0)
        self._missing = float(estimator.get("missing", np.nan))
        numbers = labels is None or [*labels] == [*range(len(labels))]
        self._labels = None if numbers else label_array(labels)
        self._booster, self._confidence = booster, confidence
        self.input = f"f64[{booster.num_features()}]"
        columns = _columns_of(booster)
        self._categories = [name for name, (is_category, _) in columns.items() if is_category]
        if columns:
            self.input = record_type({name: type_ for name, (_, type_) in columns.items()})

    def predict_batch(self, inputs: object) -> UserValue:
        """Predict with the booster."""
        import xgboost

        try:
            found = self._scores(self._table(inputs))
        except xgboost.core.XGBoostError as error:
            raise ValueError(f"XGBoost: {_first_line(error)}") from None
        return self._labelled(found) if self._classifies else found

    def _table(self, inputs: object) -> UserValue:
        if not isinstance(inputs, dict):
            return np.asarray(inputs)
        return as_table(in_order(inputs, self._booster.feature_names), self._categories)

    def _scores(self, rows: object) -> UserValue:
        if self._in_place:
            return self._booster.inplace_predict(
                rows, iteration_range=self._rounds, missing=self._missing
            )
        import xgboost

        is_array = isinstance(rows, np.ndarray)
        table = xgboost.DMatrix(
            rows,
            missing=self._missing,
            feature_names=self._booster.feature_names if is_array else None,
            feature_types=self._booster.feature_types if is_array else None,
            enable_categorical=True,
        )
        return self._booster.predict(table)

    def _labelled(self, found: Array) -> UserValue:
        """Return what XGBClassifier.predict makes of what the booster returns."""
        if found.ndim > 1 and self._classes == 2 and found.shape[1] != 1:  # several labels at once
            return (found > 0.5).astype(np.float64)
        if self._objective in _PROBABILITIES:
            return labelled(found, self._labels, self._confidence)
        if self._objective == "multi:softmax":
            best = found.astype(np.int32)
            return best if self._labels is None else np.take(self._labels, best)
        return labelled(found, self._labels, confidence=False)


def _columns_of(booster: xgboost.Booster) -> dict[str, tuple[bool, str]]:
    """Return for each column of a booster with categories whether it has them, and its type.

    Returns an empty dict for a booster without, and for one of a version of XGBoost that did not
    store the categories (before 3.1). Source: XGBoost's JSON model, `cats`.
    """
    types, names = booster.feature_types or [], booster.feature_names or []
    if "c" not in types or len(names) != len(types):
        return {}
    model = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    stored = model.get("cats", {}).get("enc", [])
    if len(stored) != len(types):
        return {}
    return {
        name: (kind == "c", TEXT if "offsets" in categories and kind == "c" else _NUMBERS[kind])
        for name, kind, categories in zip(names, types, stored, strict=True)
    }


def load(
    content: bytes,
    labels: Sequence[object] | None = None,
    estimator: Mapping[str, UserValue] = {},
) -> XgboostModel:
    """Load a booster. estimator: see `facts_of`. Raises: LoadError."""
    import xgboost

    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(content))
    except xgboost.core.XGBoostError as error:
        raise LoadError(
            "XGBoost cannot load this model:"
            f" {str(error).partition('Stack trace')[0].strip()[:500]}"
        ) from None
    return XgboostModel(booster, labels, estimator=estimator)


def adapted(estimator: UserValue, confidence: bool = True) -> XgboostModel:
    """Return the model of an estimator that was loaded with its Python object."""
    return XgboostModel(
        estimator.get_booster(), labels_of(estimator), confidence, facts_of(estimator)
    )


def _first_line(error: Exception) -> str:
    text = str(error).partition("Stack trace")[0].strip()
    return _PLACE.sub("", text).partition("\n")[0][:500] or type(error).__name__


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> XgboostModel:
    """Load a file. about: `labels` of classes, and what else the `estimator` had beside the file.
    Raises: LoadError."""
    return load(content, about.get("labels"), about.get("estimator") or {})
