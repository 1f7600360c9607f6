"""The result of a query for a client: an answer, or the error that replaces it."""

import numpy as np

from clipper.errors import BadOutput, Cancelled, ClipperError, Overloaded
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import Answer, AnswerPart, Answers, PartsFuture


def answer_of(future: Future, resolved: ResolvedApplication) -> Answer:
    """Return the answer of a finished future.

    If no model answered and the application has no default, raises the error: Overloaded,
    DeadlineExceeded, NoReplica, ReplicaLost, ModelFailed, BadOutput or ShuttingDown.
    """
    answer: Answer = future.result(0)
    if answer.is_default and resolved.default is None and not answer.models:
        raise _error([future.error(i) for i in range(len(future))], answer.reason)
    return answer


def answers_of(future: Future, resolved: ResolvedApplication) -> Answers:
    """Return the answers to an array of queries.

    If a row has no answer and the application has no default, raises that row's error for all.
    """
    answers: Answers = future.result(0)
    if resolved.default is None and answers.is_default.any():
        row, n = int(np.argmax(answers.is_default)), len(answers)
        raise _error(
            [future.error(row + n * i) for i in range(len(future) // n)], "; ".join(answers.reasons)
        )
    return answers


def check_begun(future: PartsFuture, resolved: ResolvedApplication) -> None:
    """Raise the error of an answer in parts that has ended without a part, if the application has
    no default: one of those of `answer_of`. It is begun or has ended."""
    if future.done():
        whole_of(future, resolved)


def whole_of(future: PartsFuture, resolved: ResolvedApplication) -> AnswerPart:
    """Return the whole of an answer in parts that has ended. Raises what check_begun raises."""
    whole = future.result(0)
    if whole.is_default and resolved.default is None:
        raise _error([future.error()], whole.reason or "")
    return whole


def _error(errors: list[Exception | None], reason: str) -> ClipperError:
    """Return the error that the client can act on. Its message is the answer's reason: one line,
    no paths."""
    found: list[object] = [error for error in errors if error is not None]
    error = next((e for e in found if isinstance(e, Overloaded)), found[0] if found else None)
    message = reason or "no prediction arrived"
    if not message.endswith("."):  # the words of a model may be a sentence
        message += "."
    if isinstance(error, Overloaded):
        return Overloaded(message, retry_after_s=error.retry_after_s)
    if isinstance(error, ClipperError):
        return type(error)(message)
    return BadOutput(message) if error is None else Cancelled(message)
