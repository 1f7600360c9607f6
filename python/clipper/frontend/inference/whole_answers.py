"""Whole answers for clients of the Open Inference Protocol, which has outputs alone: a request
with `parameters.answers` gets the rest, too. The query client (docs/client.md) asks for it.

It is one parameter of the response, a string of JSON. Up to 32 rows have an object each, with the
members of a response to predict; an array has its numbers packed in base64, one for each row.
"""

import base64
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clipper.errors import InvalidInput
from clipper.frontend.http.messages import to_json
from clipper.frontend.inference import codec
from clipper.types import Answer, Answers, UserValue

PARAMETER: Final = "answers"


def asks_for_answers(request: codec.InferRequest) -> bool:
    """Return whether a request asks for whole answers. Raises InvalidInput."""
    asked = request.parameters.get(PARAMETER, False)
    if not isinstance(asked, bool):
        raise InvalidInput(f"parameters.{PARAMETER} = {str(asked)[:40]!r}: it is true or false.")
    return asked


def of_rows(answers: Sequence[Answer]) -> str:
    """Return the parameter for rows that were queries of their own."""
    named = bool(answers) and isinstance(answers[0].output, dict)
    return to_json({"named": named, "rows": [_members(answer) for answer in answers]}).decode()


def of_array(answers: Answers) -> str:
    """Return the parameter for an array."""
    count = len(answers)
    latency_us = np.zeros(count) if answers.latency_us is None else answers.latency_us
    return to_json(
        {
            "named": isinstance(answers.outputs, dict),
            "count": count,
            "models": [str(model) for model in answers.models],
            "missing": {str(model): n for model, n in answers.missing.items() if n},
            "reasons": answers.reasons,
            "confidence": _packed(answers.confidence, "<f8"),
            "default": _packed(answers.is_default, "?"),
            "latency_us": _packed(latency_us, "<u4"),
        }
    ).decode()


def _packed(values: NDArray[np.generic], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).data).decode("ascii")


def _members(answer: Answer) -> dict[str, UserValue]:
    members: dict[str, UserValue] = {
        "id": answer.id,
        "confidence": answer.confidence,
        "default": answer.is_default,
        "reason": answer.reason,
        "models": [str(model) for model in answer.models],
        "missing": [str(model) for model in answer.missing],
        "agreement": answer.agreement,
        "latency_us": answer.latency_us,
    }
    if answer.decided_by not in ("", "all"):
        members["decided_by"] = answer.decided_by
    if answer.set:
        members["set"] = answer.set
    if answer.qualifiers:
        members["qualifiers"] = {str(model): given for model, given in answer.qualifiers.items()}
    return members
