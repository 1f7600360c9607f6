"""Named columns of tabular models: their types, and the tables that models predict from.

A record is a row of named scalars, such as {"age": 31, "city": "Bern"}. A model that takes records
receives a batch of them as columns: an array, or a list of str, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from clipper_container.model import UserValue

Columns = Mapping[str, UserValue]  # an array, or a list of values, by name
TEXT = "str"
NUMBER = "f64"
_TYPES = {"b": "bool", "i": "i64", "u": "i64", "f": NUMBER, "O": TEXT, "U": TEXT, "T": TEXT}
_FITTED = ("categories_", "statistics_")  # values of each column, in its own type


def columns_of(estimator: object) -> dict[str, str] | None:
    """Return the columns of an estimator that was fitted on a DataFrame with text: type by name.

    scikit-learn records the columns' names but not their types, which are found in the steps that
    the columns go to: encoders know the categories, vectorizers take text, and all others numbers.
    Returns None for an estimator without names, and for one whose columns are all numbers: an array
    is its input. Does not import scikit-learn.
    """
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return None
    known = list(map(str, names))
    columns = dict.fromkeys(known, NUMBER)
    dropped: set[str] = set()
    for name, type_ in _types(estimator, known):
        if type_ is None:
            dropped.add(name)
        elif columns.get(name) == NUMBER:
            columns[name] = type_
    used = {name: type_ for name, type_ in columns.items() if name not in dropped}
    return used if any(type_ == TEXT for type_ in used.values()) else None


def array_type(estimator: object) -> str | None:
    """Return the type of one row of an estimator that takes arrays; None if it does not say."""
    features = getattr(estimator, "n_features_in_", None)
    if not isinstance(features, int | np.integer) or features <= 0:
        return None
    steps = getattr(estimator, "steps", None)
    centers = getattr(steps[-1][1] if steps else estimator, "cluster_centers_", None)
    # KMeans refuses rows of another type than its centers have
    is_single = getattr(centers, "dtype", None) == np.float32
    return f"{'f32' if is_single else NUMBER}[{features}]"


def names_of(estimator: object) -> tuple[str, ...]:
    """Return the names of the columns of an estimator that was fitted on a DataFrame and takes
    arrays of them: of numbers only. Empty for any other.
    """
    names = getattr(estimator, "feature_names_in_", None)
    if names is None or columns_of(estimator) is not None:
        return ()
    known = tuple(map(str, names))
    # LightGBM has names of its own for columns of an array
    return known if known != tuple(f"Column_{i}" for i in range(len(known))) else ()


def _types(step: object, names: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the type of each column that a fitted step tells: None for one that it drops."""
    if steps := getattr(step, "steps", None):  # a pipeline: its first step that tells
        yield from next(filter(None, (list(_types(inner, names)) for _, inner in steps)), ())
        return
    # HistGradientBoosting's own, if it chose columns by their type
    if (inner := getattr(step, "_preprocessor", None)) is not None:
        yield from _types(inner, names)
        return
    if parts := getattr(step, "transformers_", None):  # of a ColumnTransformer
        unused = dict.fromkeys(names)
        for _, inner, wanted in parts:
            chosen = _chosen(wanted, names)
            if inner == "drop":
                continue
            for name in chosen:
                unused.pop(name, None)
            yield from _types(inner, chosen)
        yield from unused.items()
        return
    if hasattr(step, "build_analyzer"):  # a vectorizer of texts
        for name in names:
            yield name, TEXT
        return
    for attribute in _FITTED:
        values = getattr(step, attribute, ())
        if len(values) == len(names):
            yield from zip(names, map(type_of, values), strict=True)
            return


def type_of(values: object) -> str:
    """Return the type of a column by its categories, or by what replaces a missing value."""
    array = np.asarray(values)
    if array.dtype.kind == "O" and array.size:
        present = [value for value in array.ravel() if value is not None and value == value]
        if present and not any(isinstance(value, str) for value in present):
            array = np.asarray(present)
    return _TYPES.get(array.dtype.kind, NUMBER)


def _chosen(wanted: object, names: Sequence[str]) -> list[str]:
    """Return the names of a ColumnTransformer's columns: names, positions, a slice or a mask."""
    if isinstance(wanted, str):
        return [wanted]
    if isinstance(wanted, slice):
        if isinstance(wanted.start, str) or isinstance(wanted.stop, str):
            start = 0 if wanted.start is None else names.index(wanted.start)
            stop = len(names) if wanted.stop is None else names.index(wanted.stop) + 1
            return list(names[start : stop : wanted.step])
        return list(names[wanted])
    array = np.asarray(wanted)
    if array.dtype.kind == "b":
        return [name for name, taken in zip(names, array, strict=True) if taken]
    if array.dtype.kind in "iu":
        return [names[int(i)] for i in array.ravel()]
    return [str(name) for name in array.ravel()]


def as_table(columns: Columns, categories: Sequence[str] = ()) -> UserValue:
    """Return a batch of records as a pandas.DataFrame; without pandas as an array (n, columns).

    columns: an array or a list by name. categories: columns that become pandas' categories.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        return as_array(columns)
    table = pandas.DataFrame(dict(columns))
    return table.astype(dict.fromkeys(categories, "category")) if categories else table


def in_order(columns: Columns, names: Sequence[str] | None) -> Columns:
    """Return the columns in the order of those that a model was trained on.

    names: in that order; None if the model knows none: then the order is the caller's. Raises:
    ValueError if these are other columns.
    """
    if names is None or [*columns] == [*names]:
        return columns
    if columns.keys() != {*names}:
        raise ValueError(
            f"the model was trained on the columns {', '.join(names)}, and is given"
            f" {', '.join(columns)}; deploy it with these as its inputs"
        )
    return {name: columns[name] for name in names}


def named_table(rows: UserValue, names: Sequence[str]) -> UserValue:
    """Return rows (n, columns) as a pandas.DataFrame with these names; without pandas as they
    are.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        return rows
    return pandas.DataFrame(np.asarray(rows), columns=list(names))


def as_array(columns: Columns) -> UserValue:
    """Return a batch of records as an array (n, columns), in the order of the columns: of numbers,
    or of objects when a column is text.
    """
    parts = [np.asarray(column) for column in columns.values()]
    if any(part.dtype.kind in "OUST" for part in parts):
        parts = [np.asarray(part, object) for part in parts]
    return np.column_stack(parts)


def record_type(columns: Mapping[str, str]) -> str:
    """Return the input type of records with these columns."""
    return json.dumps(columns, ensure_ascii=False)
