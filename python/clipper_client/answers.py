"""Answers as a client gets them. `UserValue` is what models take and return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UserValue = Any  # numbers, strings, arrays or lists of these, and objects of them by name


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one query, with the members of `clipper.Answer`; models are named `svm:3`.

    is_default: no prediction arrived in time, or it was not sure enough, and `reason` says why.
    missing: models that did not answer. id: for feedback. latency_us: by the server's clock.
    """

    output: UserValue
    confidence: float = 1.0
    is_default: bool = False
    reason: str = ""
    models: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    latency_us: int = 0
    id: str = ""
    agreement: float = 1.0
    decided_by: str = "all"
    set: tuple[UserValue, ...] = ()
    request_id: str = ""
    qualifiers: Mapping[str, Mapping[str, UserValue]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Answers to n queries, row by row: arrays where numpy is installed, else lists.

    outputs: of shape (n, ...), a list of n strings, or a dict of these by output. confidence: n
    numbers. is_default: n truths; `reasons` counts why. missing: rows without an answer in time, by
    model. latency_us: n numbers, by the server's clock. ids: of each row, for feedback, where rows
    were queries of their own (up to 32 rows); else empty.
    """

    outputs: UserValue
    confidence: UserValue
    is_default: UserValue
    reasons: Mapping[str, int]
    models: tuple[str, ...]
    missing: Mapping[str, int]
    latency_us: UserValue
    ids: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.is_default)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer, or, as the last one, the whole, with the members of
    `clipper.AnswerPart`; models are named `svm:3`.

    output: of the part; of the whole its parts together. index: the number of the part, from 0; of
    the whole how many parts there were. confidence: None if the model gave none. complete: the
    model has given all parts; if not, `reason` says why. is_default: no part arrived, and the
    output is the application's default. latency_us: of the whole, by the server's clock. id: of the
    whole, for feedback.
    """

    output: UserValue
    index: int
    confidence: float | None = None
    is_last: bool = False
    complete: bool = True
    is_default: bool = False
    reason: str = ""
    models: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    latency_us: int = 0
    id: str = ""
    request_id: str = ""


class FeedbackCounts(NamedTuple):
    """The result of several feedbacks: how many counted, had come before, and are about predictions
    that are not known."""

    counted: int
    duplicates: int
    unknown: int
