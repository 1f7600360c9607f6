"""Estimators: any object with predict(), such as scikit-learn's. Does not import scikit-learn."""

from __future__ import annotations

import numpy as np

from clipper_container.adapters.columns import as_array, as_table, columns_of, record_type
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
    """Calls predict(). With predict_proba() and classes_ the largest probability is the
    confidence.

    An estimator that was fitted on a DataFrame with text takes records, and gets DataFrames.
    """

    def __init__(self, estimator: UserValue, confidence: bool = True) -> None:
        self.estimator = estimator
        features = getattr(estimator, "n_features_in_", None)
        columns = columns_of(estimator)
        self.input = "any" if features is None else f"f64[{features}]"
        if columns is not None:
            self.input = record_type(columns)
        self._named = getattr(estimator, "feature_names_in_", None) is not None
        self._scored = confidence and knows_probabilities(estimator)
        self._argmax = self._scored and _predict_is_argmax(estimator)

    def predict_batch(self, inputs: UserValue) -> UserValue:
        """Call predict(), and predict_proba() for the confidence."""
        if isinstance(inputs, dict):
            inputs = as_table(inputs) if self._named else as_array(inputs)
        if not self._scored:
            return self.estimator.predict(inputs)
        probabilities = self.estimator.predict_proba(inputs)
        if self._argmax:
            outputs = np.take(self.estimator.classes_, np.argmax(probabilities, axis=1))
        else:
            outputs = self.estimator.predict(inputs)
        return Scored(outputs, np.max(probabilities, axis=1))


def knows_probabilities(estimator: object) -> bool:
    """Return True if the estimator has predict_proba() and one list of classes."""
    return hasattr(estimator, "predict_proba") and isinstance(
        getattr(estimator, "classes_", None), np.ndarray
    )


def _predict_is_argmax(estimator: object) -> bool:
    steps = getattr(estimator, "steps", None)
    last = steps[-1][1] if steps else estimator
    return (
        type(last).__module__.startswith("sklearn.") and type(last).__name__ in _PREDICT_IS_ARGMAX
    )
