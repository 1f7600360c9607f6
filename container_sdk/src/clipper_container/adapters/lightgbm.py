"""LightGBM boosters from their text format, which holds no code."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.classes import (
    are_plain,
    dtype_of,
    label_array,
    labelled,
    labels_of,
)
from clipper_container.adapters.columns import NUMBER, as_table, in_order, record_type, type_of
from clipper_container.loading.errors import LoadError
from clipper_container.model import Model, UserValue

if TYPE_CHECKING:
    import lightgbm

_PROBABILITIES = ("binary", "multiclass", "multiclassova", "cross_entropy")
_CATEGORICAL = re.compile(r"^\[categorical_feature: ([0-9,]+)\]$", re.MULTILINE)
_EARLY_STOP = ("pred_early_stop", "pred_early_stop_freq", "pred_early_stop_margin")


def facts_of(estimator: UserValue) -> dict[str, UserValue]:
    """Return what the predict() of an estimator uses beside its booster, as JSON has it."""
    given = estimator.get_params()
    facts: dict[str, UserValue] = {name: given[name] for name in _EARLY_STOP if name in given}
    if (dtype := dtype_of(estimator)) and predicted_labels(estimator) is not None:
        facts["labels_dtype"] = dtype
    return facts


def predicted_labels(estimator: UserValue) -> list[object] | None:
    """Return the labels that the predict() of an estimator returns. None for a regressor, and for
    a classifier with an objective of its own: its predict() returns what the booster does.
    """
    return None if callable(estimator.objective_) else labels_of(estimator)


class LightgbmModel(Model):
    """Predicts like the estimator the booster was taken from; a plain Booster like Booster.predict.

    labels: of a classifier: outputs are then labels, with their probability as confidence if the
    objective has one. estimator: see `facts_of`.

    A booster that was trained on a DataFrame with categories takes records.
    """

    def __init__(
        self,
        booster: lightgbm.Booster,
        labels: Sequence[object] | None = None,
        confidence: bool = True,
        estimator: Mapping[str, UserValue] = {},
    ) -> None:
        self._booster = booster
        self._labels = label_array(labels, str(estimator.get("labels_dtype", "")))
        objective = str(booster.dump_model(num_iteration=1).get("objective") or "").split(" ")[0]
        self._confidence = confidence and objective in _PROBABILITIES
        self._settings = {name: estimator[name] for name in _EARLY_STOP if name in estimator}
        self._settings["num_threads"] = int(os.environ.get("OMP_NUM_THREADS", "1"))
        names = booster.feature_name()
        is_named = names != [f"Column_{i}" for i in range(len(names))]
        self._names = names if is_named else None
        self.input = f"f64[{booster.num_feature()}]"
        columns = _columns_of(booster)
        self._categories = [name for name, (is_category, _) in columns.items() if is_category]
        if columns:
            self.input = record_type({name: type_ for name, (_, type_) in columns.items()})

    def predict_batch(self, inputs: object) -> UserValue:
        """Predict with the booster."""
        rows = (
            as_table(in_order(inputs, self._names), self._categories)
            if isinstance(inputs, dict)
            else np.asarray(inputs)
        )
        found = self._booster.predict(rows, **self._settings)
        return found if self._labels is None else labelled(found, self._labels, self._confidence)


def _columns_of(booster: lightgbm.Booster) -> dict[str, tuple[bool, str]]:
    """Return for each column of a booster with categories whether it has them, and its type.

    Returns an empty dict for a booster without. Raises: LoadError if the file does not tell which
    columns have categories.
    """
    categories = getattr(booster, "pandas_categorical", None) or []
    if not categories:
        return {}
    names = booster.feature_name()
    # not booster.params: before LightGBM 4.7 it is empty after a load
    found = _CATEGORICAL.search(booster.model_to_string(num_iteration=1))
    at = [int(index) for index in found[1].split(",")] if found else []
    if len(at) == len(categories):
        with_values = [names[i] for i in sorted(at)]
    else:  # a file without its parameters: a column of one value cannot be seen in it
        feature_infos = booster.dump_model(num_iteration=1)["feature_infos"]
        with_values = [name for name in names if feature_infos.get(name, {}).get("values")]
    if len(with_values) != len(categories):
        raise LoadError(
            f"this model of LightGBM was trained on {len(categories)} columns with categories, and"
            f" its file shows which they are for {len(with_values)} only. Leave out columns of one"
            " value, or deploy the fitted estimator in a function, with inputs={...}"
        )
    types = dict(zip(with_values, map(type_of, categories), strict=True))
    return {name: (name in types, types.get(name, NUMBER)) for name in names}


def load(
    content: bytes,
    labels: Sequence[object] | None = None,
    estimator: Mapping[str, UserValue] = {},
    confidence: bool = True,
) -> LightgbmModel:
    """Load a booster. estimator: see `facts_of`. Raises: LoadError."""
    import lightgbm

    try:
        booster = lightgbm.Booster(model_str=content.decode())
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise LoadError(f"LightGBM cannot load this model: {str(error)[:500]}") from None
    return LightgbmModel(booster, labels, confidence, estimator)


def text_of(booster: UserValue) -> bytes:
    """Return a booster in LightGBM's text format, with the trees that its predict() uses."""
    return bytes(booster.model_to_string(num_iteration=booster.best_iteration).encode())


def adapted(estimator: UserValue, confidence: bool = True) -> LightgbmModel | None:
    """Return the model of an estimator that was loaded with its Python object; None if JSON cannot
    hold its labels.
    """
    labels = predicted_labels(estimator)
    if not are_plain(labels):
        return None
    return load(text_of(estimator.booster_), labels, facts_of(estimator), confidence)


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> LightgbmModel:
    """Load a file. about: `labels` of classes, and what else the `estimator` had beside the file.
    Raises: LoadError."""
    return load(content, about.get("labels"), about.get("estimator") or {})
