"""Checked values of feedback: its label, score, weight and user."""

from collections.abc import Iterable, Sequence, Sized
from typing import Final

import numpy as np

from clipper.errors import DoesNotFit, InvalidInput
from clipper.selection import Truth
from clipper.selection.learning.batch_learning import Column, column_of
from clipper.serving.feedback.states import check_user
from clipper.store.journal import RECORD_BYTES_MAX
from clipper.types import UserValue
from clipper_core.learning.label_feedback import is_plain

LABEL_BYTES_MAX: Final = (
    RECORD_BYTES_MAX // 2
)  # of one label: its record in the journal holds more than the label
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1  # what the journal can hold
_PLAIN = frozenset((int, str, bytes, bool))


def truth_of(label: object, correct: bool | None, score: float | None) -> Truth:
    """Return the truth from exactly one of the three. Raises InvalidInput otherwise, and for a
    value that can be no label."""
    if correct is None and score is None and is_plain(label):
        return Truth(label)
    given = [
        name
        for name, value in (("label", label), ("correct", correct), ("score", score))
        if value is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise InvalidInput(f"feedback takes one of label, correct and score; this has {found}.")
    if label is not None:
        return Truth(plain_label(label))
    if correct is not None:
        if not isinstance(correct, bool | np.bool_):
            raise InvalidInput(
                f"correct={_shown(correct)}: it is True or False.",
                hint="A degree is score=, 0 to 1.",
            )
        return Truth(score=float(correct))
    if (
        isinstance(score, bool)
        or not isinstance(score, int | float | np.integer | np.floating)
        or not 0 <= score <= 1
    ):
        raise InvalidInput(f"score={_shown(score)}: it must lie between 0 and 1.")
    return Truth(score=float(score))


def plain_label(label: object) -> UserValue:
    """Return a label as the models give it: a Python scalar, str, bytes, or a finite array. Raises
    InvalidInput."""
    if isinstance(label, np.generic):
        label = label.item()
    if isinstance(label, list | tuple):
        try:
            label = np.asarray(label)
        except ValueError:
            raise InvalidInput(
                "a label that is a list holds numbers, all rows of one length."
            ) from None
    if isinstance(label, np.ndarray):
        if label.dtype.kind not in "biuf" or not np.isfinite(label).all():
            raise InvalidInput(
                f"a label of dtype {label.dtype}: an array label holds finite numbers."
            )
        _check_size(label.nbytes)
    elif isinstance(label, float) and not np.isfinite(label):
        raise InvalidInput(f"label={label!r}: it must be finite.")
    elif isinstance(label, int) and not _INT_MIN <= label <= _INT_MAX:
        raise InvalidInput("a label that is a whole number lies between -2**63 and 2**64 - 1.")
    elif isinstance(label, str):
        _check_size(len(_encoded("a label", label)))
    elif isinstance(label, bytes):
        _check_size(len(label))
    elif not isinstance(label, bool | int | float):
        raise InvalidInput(
            f"a label is a number, str, bytes or an array, not {type(label).__name__}."
        )
    return label


def _check_size(nbytes: int) -> None:
    if nbytes > LABEL_BYTES_MAX:
        raise InvalidInput(f"a label of {nbytes} bytes: at most {LABEL_BYTES_MAX} are possible.")


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        hint = "Give text that UTF-8 can carry."
        raise InvalidInput(
            f"{what} holds half of a surrogate pair: {_shown(text)}.", hint=hint
        ) from None


def _shown(value: object) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 1 << 128
        else "(a very large number)"
    )
    return text if len(text) <= 60 else text[:60] + "..."


def label_column(labels: Sequence[object] | np.ndarray) -> Column:
    """Return labels of many rows, each as `plain_label` has it, as an array where they are numbers
    of one kind."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        if labels.dtype.kind == "f" and not np.isfinite(labels).all():
            raise InvalidInput(f"label={labels[~np.isfinite(labels)][0]}: it must be finite.")
        if labels.dtype.kind in "bif":
            return labels.astype(
                {"b": np.bool_, "i": np.int64, "f": np.float64}[labels.dtype.kind], copy=False
            )
        labels = labels.tolist()
    column = column_of(list(labels), plain_label)
    if isinstance(column, np.ndarray):
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            raise InvalidInput(f"label={column[~np.isfinite(column)][0]}: it must be finite.")
        return column
    return [plain_label(label) for label in column]


def length_of(what: str, values: object) -> int:
    """Return how many there are. Raises InvalidInput for what is no sequence."""
    try:
        if isinstance(values, Sized):
            return len(values)
    except TypeError:  # an array of no dimensions
        pass
    raise InvalidInput(f"{what} are a list or an array, not {type(values).__name__}.")


def weight_of(weight: float) -> float:
    """Return how many feedbacks this one counts as. Raises InvalidInput."""
    if type(weight) is float and weight == 1.0:
        return weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1000:
        raise InvalidInput(f"weight={_shown(weight)}: it must lie above 0 and at most at 1000.")
    return float(weight)


def user_of(user: str | None) -> str | None:
    """Return whose query or feedback it is; None for nobody's. Raises InvalidInput for what can be
    no name."""
    if user is not None:
        check_user(user)
    return user


# -- labels and outputs of different kinds


def fitted_label(label: UserValue, outputs: Iterable[UserValue]) -> UserValue:
    """Return a label in the type of the outputs, so that equal values are equal: 3.0 becomes 3 if
    they are whole numbers, 3 becomes 3.0 if they are floats, and True and 1 stand for each other.
    Raises DoesNotFit for what can be no label of theirs: text where they are numbers, or 3.5
    where they are whole.
    """
    kinds: set[str] = set()
    whole = floats = False
    reported = None
    for reported in outputs:
        kinds.add(_kind_of(reported))
        whole = whole or isinstance(reported, int | np.integer)
        floats = floats or isinstance(reported, float | np.floating)
    if isinstance(label, bool | np.bool_) and "a number" in kinds and "a truth value" not in kinds:
        label = int(label)
    kind = _kind_of(label)
    if kind == "a number" and kinds == {"a truth value"} and label in (0, 1):
        return bool(label)
    if kind in kinds and (kind != "a number" or floats + whole == 2):
        return label
    if kind in kinds and isinstance(label, int):
        return label if whole else float(label)
    if kind in kinds and isinstance(label, float) and (floats or label.is_integer()):
        return label if floats else int(label)
    if not kinds:
        return label
    raise DoesNotFit(
        f"label={_shown(label)}: the models give {type(reported).__name__}, which it can never be.",
        hint="Give the label in the type of the outputs.",
    )


def _kind_of(value: UserValue) -> str:
    """Return the kind of a value; only values of one kind can be equal."""
    if isinstance(value, bool | np.bool_):
        return "a truth value"
    if isinstance(value, int | float | np.integer | np.floating):
        return "a number"
    return "an array" if isinstance(value, np.ndarray) else type(value).__name__


def fitted_column(labels: Column, outputs: Sequence[Column]) -> Column:
    """Return the labels of many rows as `fitted_label` has them. outputs: of each model, a
    column."""
    if isinstance(labels, np.ndarray) and all(
        isinstance(reported, np.ndarray) and reported.ndim == 1 for reported in outputs
    ):
        kinds = {reported.dtype.kind for reported in outputs}
        if labels.dtype.kind == "b" and kinds and kinds <= set("iuf"):
            return labels.astype(np.float64 if kinds == {"f"} else np.int64)
        if kinds == {"b"} and labels.dtype.kind in "iuf":
            if (wrong := ~np.isin(labels, (0, 1))).any():
                return fitted_label(labels[wrong][0].item(), [True])  # raises
            return labels.astype(bool)
        if len(labels) and kinds and (labels.dtype.kind == "b") != ("b" in kinds):
            return fitted_label(labels[0].item(), [reported[0].item() for reported in outputs])
        if labels.dtype.kind == "f" and kinds <= set("iu") and kinds:
            if (wrong := labels != np.floor(labels)).any():
                return fitted_label(float(labels[wrong][0]), [0])  # raises
            return labels.astype(np.int64)
        if labels.dtype.kind == "i":
            return labels.astype(np.float64) if kinds == {"f"} else labels
        return labels
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    return column_of(
        [
            fitted_label(label, [reported[i] for reported in outputs])
            for i, label in enumerate(values)
        ]
    )
