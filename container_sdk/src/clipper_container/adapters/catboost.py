"""CatBoost models from their own binary format, which holds no code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.classes import probabilities_of
from clipper_container.adapters.columns import NUMBER, TEXT, as_table, in_order, record_type
from clipper_container.loading.errors import LoadError, first_line
from clipper_container.model import Model, Scored, UserValue

if TYPE_CHECKING:
    import catboost

_CLASSES = ("CatBoostClassifier", "CatBoostRegressor", "CatBoostRanker", "CatBoost")
_WITHOUT_PROBABILITIES = ("MultiLogloss", "MultiCrossEntropy")
# what predict() of a regressor returns by its loss; CatBoost forgets it when it loads a file
_REGRESSED = {
    "Poisson": "Exponent",
    "Tweedie": "Exponent",
    "RMSEWithUncertainty": "RMSEWithUncertainty",
}


def facts_of(model: object) -> dict[str, UserValue]:
    """Return what predict() of a model depends on beside its file, as JSON has it."""
    return {"type": type(model).__name__}


class CatboostModel(Model):
    """Predicts like the estimator the file was saved from.

    model: one of CatBoost's classes, with its trees. confidence: a classifier sends the probability
    of each row's label. A model with categories or texts takes records, in which these are str.
    """

    def __init__(self, model: catboost.CatBoost, confidence: bool = True) -> None:
        self._model = model
        self._settings: dict[str, UserValue] = {
            "thread_count": int(os.environ.get("OMP_NUM_THREADS", "1"))
        }
        self._names = [str(name) for name in model.feature_names_]
        self._classes = np.asarray(model.classes_)
        loss = str(model.get_all_params().get("loss_function", "")).partition(":")[0]
        kind = type(model).__name__
        has_chances = kind == "CatBoostClassifier" and loss not in _WITHOUT_PROBABILITIES
        self._confidence = confidence and has_chances
        self._type = (
            {"prediction_type": _REGRESSED[loss]}
            if (kind == "CatBoostRegressor" and loss in _REGRESSED)
            else {}
        )
        if model.get_embedding_feature_indices():
            raise LoadError(
                "this model of CatBoost has features that are embeddings; deploy it in a function,"
                " with inputs={...}"
            )
        texts = {*model.get_cat_feature_indices(), *model.get_text_feature_indices()}
        self.input = f"f64[{len(self._names)}]"
        if texts:
            self.input = record_type(
                {name: TEXT if i in texts else NUMBER for i, name in enumerate(self._names)}
            )

    def predict_batch(self, inputs: object) -> UserValue:
        """Predict with the model."""
        rows = (
            as_table(in_order(inputs, self._names))
            if isinstance(inputs, dict)
            else np.asarray(inputs)
        )
        found = np.asarray(self._model.predict(rows, **self._settings, **self._type))
        if found.ndim == 2 and found.shape[1] == 1:
            found = found[:, 0]
        outputs: UserValue = found.astype(str) if found.dtype.kind in "OU" else found
        if not self._confidence:
            return outputs
        chances = self._model.predict_proba(rows, **self._settings)
        sure = probabilities_of(found, chances, self._classes)
        return outputs if sure is None else Scored(outputs, sure)


def bytes_of(model: UserValue) -> bytes:
    """Return a model in CatBoost's binary format. Raises: LoadError for one without trees."""
    import catboost

    with tempfile.NamedTemporaryFile(prefix="clipper-catboost-", suffix=".cbm") as file:
        try:
            model.save_model(file.name, format="cbm")
        except catboost.CatBoostError as error:
            raise LoadError(f"CatBoost cannot save this model: {first_line(error)}") from None
        with open(file.name, "rb") as saved:
            return saved.read()


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> CatboostModel:
    """Load a file. about: facts_of() the `estimator` that was saved; without them a file with
    classes is a classifier's, and any other a regressor's. Raises: LoadError."""
    import catboost

    name = str((about.get("estimator") or {}).get("type", ""))
    if name not in ("", *_CLASSES):
        raise LoadError(f"type {name!r} of CatBoost is unknown: {', '.join(_CLASSES)}")
    try:
        plain = catboost.CatBoost().load_model(blob=content)
        name = name or ("CatBoostClassifier" if len(plain.classes_) else "CatBoostRegressor")
        model = getattr(catboost, name)().load_model(blob=content)
    except catboost.CatBoostError as error:
        raise LoadError(f"CatBoost cannot load this model: {first_line(error)}") from None
    return CatboostModel(model)
