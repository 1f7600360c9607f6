"""Estimators: any object with predict(), such as scikit-learn's. Does not import scikit-learn."""

from __future__ import annotations

import numpy as np

from clipper_container.adapters.classes import probabilities_of
from clipper_container.adapters.columns import (
    array_type,
    as_array,
    as_table,
    columns_of,
    in_order,
    named_table,
    record_type,
)
from clipper_container.model import Model, Scored, UserValue

# Their predict() is the argmax of predict_proba(), computed from it; so one call does for both. For
# others (SVC, say)
# the two may disagree, and predict() is what the user trained for.
_PREDICT_IS_ARGMAX = frozenset(
    {
        "RandomForestClassifier",
        "ExtraTreesClassifier",
        "DecisionTreeClassifier",
        "ExtraTreeClassifier",
    }
)


class EstimatorModel(Model):
    """Calls predict(). With predict_proba() and classes_ the probability of the label is the
    confidence.

    An estimator that was fitted on a DataFrame gets DataFrames. If a column was text, it takes
    records; else arrays, in the order of the columns. Several labels of text for each row are one
    named output, "labels".
    """

    def __init__(self, estimator: UserValue, confidence: bool = True) -> None:
        self.estimator = estimator
        columns = columns_of(estimator)
        self.input = array_type(estimator) or "any"
        if columns is not None:
            self.input = record_type(columns)
        names = getattr(estimator, "feature_names_in_", None)
        self._names = None if names is None else [*map(str, names)]
        if count := _text_labels(estimator):
            self.output = {"labels": f"str[{count}]"}
        self._scored = confidence and knows_probabilities(estimator)
        self._argmax = self._scored and _predict_is_argmax(estimator)

    def predict_batch(self, inputs: UserValue) -> UserValue:
        """Call predict(), and predict_proba() for the confidence."""
        rows = self._rows(inputs)
        if not self._scored:
            return self.estimator.predict(rows)
        probabilities = self.estimator.predict_proba(rows)
        if self._argmax:
            outputs = np.take(self.estimator.classes_, np.argmax(probabilities, axis=1))
            return Scored(outputs, np.max(probabilities, axis=1))
        outputs = self.estimator.predict(rows)
        sure = probabilities_of(outputs, probabilities, self.estimator.classes_)
        return outputs if sure is None else Scored(outputs, sure)

    def _rows(self, inputs: UserValue) -> UserValue:
        """Return a batch as the estimator was fitted: a table, or an array."""
        if not isinstance(inputs, dict):
            is_table = self._names is not None and np.shape(inputs)[1:] == (len(self._names),)
            return named_table(inputs, self._names or ()) if is_table else inputs
        if self._names is None:
            return as_array(inputs)
        # columns that no step uses may be left out: a ColumnTransformer finds the others by name
        is_whole = inputs.keys() == {*self._names}
        return as_table(in_order(inputs, self._names) if is_whole else inputs)


def _text_labels(estimator: object) -> int:
    """Return how many labels of text a row has; 0 if it has one label, or numbers."""
    found = getattr(estimator, "classes_", None)
    is_text = isinstance(found, list) and all(
        isinstance(label, str) for classes in found for label in classes
    )
    return len(found) if isinstance(found, list) and is_text else 0


def knows_probabilities(estimator: object) -> bool:
    """Return True if the estimator has predict_proba() and one list of classes."""
    return hasattr(estimator, "predict_proba") and isinstance(
        getattr(estimator, "classes_", None), np.ndarray
    )


def _predict_is_argmax(estimator: object) -> bool:
    steps = getattr(estimator, "steps", None)
    last = steps[-1][1] if steps else estimator
    return (
        type(estimator).__module__.startswith("sklearn.")
        and type(last).__module__.startswith("sklearn.")
        and type(last).__name__ in _PREDICT_IS_ARGMAX
    )
