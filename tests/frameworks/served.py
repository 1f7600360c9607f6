"""Serves models as a container does: packed, loaded, and asked in batches of random sizes. Their
answers are compared with those of the framework's own predict() for the same rows."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.deploy import pack
from clipper.errors import ClipperError
from clipper_container import Model, Scored
from clipper_container.adapters.columns import record_type
from clipper_container.loading.targets import LoadError, load_target
from clipper_container.model import as_model
from clipper_container.schema import Tensors, TensorSpec
from clipper_container.wire.frames import DType, Rows
from clipper_container.worker.outputs import InvalidOutput, to_rows
from tests.sizes import sized

ROWS = sized(60, 1000)
BATCH_MAX = 64


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """Return the mark of a test that takes a seed: `few` of them, or `many` at full size."""
    return pytest.mark.parametrize("seed", range(sized(few, many)))


@dataclass
class Case:
    """A fitted model. about: what it is, for messages. thing: what is deployed. rows: to predict,
    an array or a DataFrame. own: predicts rows as the framework does. chances: of the classes, (n,
    k), by the framework; with `classes`. refused: a pattern of the error with which the model may
    be refused. inputs: the types of its columns, if they are declared."""

    about: str
    thing: Any
    rows: Any
    own: Callable[[Any], Any]
    chances: Callable[[Any], Any] | None = None
    classes: Any = None
    refused: str = ""
    inputs: dict[str, str] = field(default_factory=dict)


def check(case: Case, folder: Path, rng: np.random.Generator) -> str:
    """Check every batch of a case. Return "served", or the error by which it was refused."""
    try:
        model = loaded(case.thing, folder)
        n = compare(case, model, rng)
    except (ClipperError, LoadError, InvalidOutput, TypeError, ValueError) as error:
        if case.refused:
            assert_matches(case, error)
            return str(error)
        raise
    assert n == len(case.rows)
    return "served"


def assert_matches(case: Case, error: Exception) -> None:
    """Check that an error names what cannot be kept."""
    assert re.search(case.refused, str(error)), f"{case.about}: refused by {error!r}"


def loaded(thing: Any, folder: Path) -> Model:
    """Return the model that a container would load."""
    package = pack(thing, "m", 1, folder / "models")
    model = as_model(load_target(package.target, package.sha256))
    model.load()
    return model


def compare(case: Case, model: Model, rng: np.random.Generator) -> int:
    """Compare the answers of all batches; return the number of rows."""
    start, type_ = 0, record_type(case.inputs) if case.inputs else model.input
    while start < len(case.rows):
        size = 1 if model.batch_max == 1 else int(rng.choice([1, 2, 3, rng.integers(1, BATCH_MAX)]))
        part = case.rows[start : start + size]
        start += len(part)
        wanted = np.asarray(dense(case.own(part)))
        found = model.predict_batch(given(part, type_))
        if isinstance(model.output, dict):  # one output with a name
            ((name, text),) = model.output.items()
            found = TensorSpec.parse(name, text).array(found, batch=True)
            assert found.tolist() == wanted.tolist(), f"{case.about}: {found!r:.300}"
            continue
        rows = to_rows(found, len(part), "m")
        assert_equal(case, opened(rows), wanted, type_)
        if isinstance(found, Scored) and case.chances is not None:
            chances = np.asarray(case.chances(part))
            at = [list(case.classes).index(label) for label in wanted.tolist()]
            sure = chances[np.arange(len(part)), at]
            assert np.allclose(rows.confidence, sure, atol=1e-6), f"{case.about}: confidence"
    return start


def dense(found: Any) -> Any:
    """Return a matrix of scipy as an array; anything else as it is."""
    return found.toarray() if hasattr(found, "toarray") else found


def given(part: Any, type_: Any) -> Any:
    """Return rows as the worker passes them to a model of this input type: read-only."""
    if isinstance(type_, dict) or type_.startswith("{"):
        tensors = Tensors.parse(type_)
        return {spec.name: column(part[spec.name], spec.dtype) for spec in tensors.specs}
    if type_ == "str":
        return [str(text) for text in np.asarray(part).reshape(len(part))]
    dtypes = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "i64": np.int64}
    dtype = dtypes.get(type_.partition("[")[0])
    rows = np.array(part, dtype) if dtype else np.array(part)
    rows.setflags(write=False)
    return rows


def column(values: Any, dtype: str) -> Any:
    """Return a column of a DataFrame as a record's tensor."""
    if dtype == "str":
        return [str(value) for value in values]
    array = np.asarray(values, {"f64": np.float64, "i64": np.int64, "bool": np.bool_}[dtype])
    array = array.copy()
    array.setflags(write=False)
    return array


def opened(rows: Rows) -> Any:
    """Return what a client gets: an array of numbers, or a list of strings or bytes."""
    if rows.dtype not in (DType.STR, DType.BYTES):
        return np.asarray(rows.data)
    ends = np.cumsum(rows.lengths)
    data = bytes(np.asarray(rows.data, np.uint8))
    parts = [data[end - size : end] for end, size in zip(ends, rows.lengths, strict=True)]
    return [part.decode() for part in parts] if rows.dtype == DType.STR else parts


def assert_equal(case: Case, found: Any, wanted: Any, type_: Any) -> None:
    """Compare dtype and values."""
    if isinstance(found, list):
        same = found == wanted.tolist()
    elif wanted.dtype.kind == "O":  # Python's own values have no type of numpy
        same = found.tolist() == wanted.tolist()
    else:
        assert found.dtype == wanted.dtype, (
            f"{case.about}: {found.dtype} for {wanted.dtype}, input {type_}"
        )
        equal_nan = wanted.dtype.kind == "f"
        same = np.array_equal(found, wanted, equal_nan=equal_nan)
    assert same, f"{case.about} (input {type_}): {found!r:.300} for {wanted!r:.300}"
