"""The life of feedback: joined with the predictions it is about, written down, learned from, acknowledged."""

from collections.abc import Sequence
from typing import Any

import msgspec

from clipper.errors import DeadlineExceeded, InvalidInput, UnknownPrediction
from clipper.selection import Observation, Prediction, Truth
from clipper.serving.feedback import Joined, Window, plain_label, truth_of, weight_of, written
from clipper.serving.processor import Question, plan_for
from clipper.serving.states import Learner
from clipper.types import Answer, VersionedModel
from clipper_core.model import predict_all
from clipper_core.status import Status

Item = tuple[Learner, str, Observation, bytes]


class Counted(msgspec.Struct, frozen=True):
    """What came of many feedbacks: learned from; already counted before; about predictions that nobody remembers."""

    counted: int
    duplicates: int
    unknown: int


def observe(
    question: Question, prediction: str | Answer | None, input: Any, user: str | None, truth: Truth, weight: float,
    context: Any = None,
) -> bool:  # fmt: skip
    """One feedback, by prediction or by input. True when it counts, False when it was counted before. Returns once it is in the
    journal. Raises InvalidInput, UnknownPrediction, Overloaded (the journal is full), StoreError."""
    window = _window_of(question)
    if (prediction is None) == (input is None):
        raise InvalidInput("feedback names a prediction (an Answer or its id) or gives the input again: one of the two.")
    if prediction is None:
        seen = _asked_again(question, input, user, truth, weight, context)
        _learn([_item(question.learner, user or "", seen)])
        question.teaching.tell(question.cores, input, question.teaching.session(question.models, user, 0), seen)
        return True
    joined = window.take(_id_of(prediction), question.name)
    if joined is None:
        return False
    _learn_joined([(joined, truth, weight)])
    if question.teaching.active:
        question.teaching.tell_of(question.cores, _id_of(prediction), joined.observation(truth, weight))
    return True


def observe_many(question: Question, predictions: Sequence[str | Answer], labels: Sequence[Any]) -> Counted:
    """Labels of many predictions at once: one write to the journal, one wait for it. What nobody remembers is counted, not
    raised. Raises InvalidInput before anything is learned, Overloaded, StoreError."""
    window = _window_of(question)
    if len(predictions) != len(labels):
        raise InvalidInput(f"{len(predictions)} predictions and {len(labels)} labels.")
    truths = [Truth(plain_label(label)) for label in labels]
    found: list[tuple[Joined, Truth, float]] = []
    ids: list[str] = []
    duplicates = unknown = 0
    for prediction, truth in zip(predictions, truths, strict=True):
        try:
            joined = window.take(_id_of(prediction), question.name)
        except UnknownPrediction:
            unknown += 1
            continue
        if joined is None:
            duplicates += 1
        else:
            found.append((joined, truth, 1.0))
            ids.append(_id_of(prediction))
    _learn_joined(found)
    for id, (joined, truth, weight) in zip(ids, found, strict=True) if question.teaching.active else ():
        question.teaching.tell_of(question.cores, id, joined.observation(truth, weight))
    return Counted(len(found), duplicates, unknown)


def _window_of(question: Question) -> Window:
    if question.window is None:
        hint = f"Choose one that does: server.app({question.name!r}, policy='stacking')."
        raise InvalidInput(f"policy {question.policy.name!r} of application {question.name!r} learns nothing.", hint=hint)
    return question.window


def _id_of(prediction: str | Answer) -> str:
    if isinstance(prediction, Answer):
        return prediction.id
    if not isinstance(prediction, str):
        raise InvalidInput(f"a prediction is named by an Answer or its id, not by a {type(prediction).__name__}.")
    return prediction


def _item(learner: Learner, user: str, seen: Observation) -> Item:
    return learner, user, seen, written(learner, user, seen)


def _learn_joined(found: Sequence[tuple[Joined, Truth, float]]) -> None:
    """What the journal refuses may be told again."""
    try:
        _learn([_item(joined.learner, joined.user, joined.observation(truth, weight)) for joined, truth, weight in found])
    except BaseException:
        for joined, _, _ in found:
            joined.told = False
        raise


def _learn(items: Sequence[Item]) -> None:
    if items:
        items[0][0].states.observe_many(items)
        for learner, _, seen, _ in items:
            if learner.told is not None:
                learner.told(seen)


def _asked_again(
    question: Question, input: Any, user: str | None, truth: Truth, weight: float, context: Any
) -> Observation:  # fmt: skip
    """The predictions for an input: from the cache, else evaluated now, by the application's SLO."""
    state, plan = plan_for(question, user, context)
    asked = (*plan.models, *(model for model in plan.observers if model not in plan.models))
    salt = question.teaching.session(question.models, user, 0)
    future = predict_all(tuple(question.cores[model] for model in asked), input, question.slo_us, salt)
    future.wait()
    heard = {
        model: Prediction(future.output(i), future.confidence(i))
        for i, model in enumerate(asked)
        if future.status(i) is Status.OK
    }
    if not heard:
        names = ", ".join(map(str, asked))
        raise DeadlineExceeded(f"{names} did not predict the input within {question.slo_us / 1000:g} ms; nothing was learned.")
    answered: dict[VersionedModel, Prediction] = {model: heard[model] for model in plan.models if model in heard}
    missing = [model for model in plan.models if model not in heard]
    answer = question.policy.combine(state, answered, missing).output
    return Observation(plan, heard, truth, answer, weight)


__all__ = ["Counted", "observe", "observe_many", "truth_of", "weight_of"]
