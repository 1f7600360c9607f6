"""LightGBM boosters from their text format, which holds no code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.classes import labelled
from clipper_container.adapters.columns import NUMBER, as_table, record_type, type_of
from clipper_container.loading.errors import LoadError
from clipper_container.model import Model, UserValue

if TYPE_CHECKING:
    import lightgbm


class LightgbmModel(Model):
    """Predicts like the estimator the booster was taken from; a plain Booster like Booster.predict.

    labels: of a classifier: outputs are then labels, with the largest probability as confidence.

    A booster that was trained on a DataFrame with categories takes records.
    """

    def __init__(
        self,
        booster: lightgbm.Booster,
        labels: Sequence[object] | None = None,
        confidence: bool = True,
    ) -> None:
        self._booster, self._labels, self._confidence = booster, labels, confidence
        self._threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        self.input = f"f64[{booster.num_feature()}]"
        columns = _columns_of(booster)
        self._categories = [name for name, (is_category, _) in columns.items() if is_category]
        if columns:
            self.input = record_type({name: type_ for name, (_, type_) in columns.items()})

    def predict_batch(self, inputs: object) -> UserValue:
        """Predict with the booster."""
        rows = (
            as_table(inputs, self._categories) if isinstance(inputs, dict) else np.asarray(inputs)
        )
        found = self._booster.predict(rows, num_threads=self._threads)
        return found if self._labels is None else labelled(found, self._labels, self._confidence)


def _columns_of(booster: lightgbm.Booster) -> dict[str, tuple[bool, str]]:
    """Return for each column of a booster with categories whether it has them, and its type.

    Returns an empty dict for a booster without, and where the file does not tell which columns they
    are: LightGBM leaves out a column of one value.
    """
    categories = getattr(booster, "pandas_categorical", None) or []
    if not categories:
        return {}
    feature_infos = booster.dump_model(num_iteration=1)["feature_infos"]
    names = booster.feature_name()
    with_values = [name for name in names if feature_infos.get(name, {}).get("values")]
    if len(with_values) != len(categories):
        return {}
    types = dict(zip(with_values, map(type_of, categories), strict=True))
    return {name: (name in types, types.get(name, NUMBER)) for name in names}


def load(content: bytes, labels: Sequence[object] | None = None) -> LightgbmModel:
    """Load a booster. Raises: LoadError."""
    import lightgbm

    try:
        return LightgbmModel(lightgbm.Booster(model_str=content.decode()), labels)
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise LoadError(f"LightGBM cannot load this model: {str(error)[:500]}") from None
