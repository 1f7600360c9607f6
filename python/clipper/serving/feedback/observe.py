"""The life of feedback: joined with the predictions it is about, written down, learned from,
acknowledged."""

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from clipper.errors import (
    ClipperError,
    DeadlineExceeded,
    DoesNotFit,
    InvalidInput,
    UnknownPrediction,
)
from clipper.selection import Observation, Prediction, Truth
from clipper.selection.learning.batch_learning import Column, ObservationRows, column_of
from clipper.serving.feedback.forwarding import ForwardedFeedback, Reply, by_node, refusal
from clipper.serving.feedback.ground_truth import (
    fitted_column,
    fitted_label,
    label_column,
    length_of,
    user_of,
)
from clipper.serving.feedback.journal_records import written, written_rows
from clipper.serving.feedback.states import Learner, Seen
from clipper.serving.feedback.window import FeedbackWindow, JoinedRows, received_of, seen_of
from clipper.serving.query.named_outputs import outputs_of
from clipper.serving.query.processor import ResolvedApplication, plan_for, side_of
from clipper.serving.query.qualifiers import prediction_of
from clipper.types import Answer, Answers, UserValue, VersionedModel
from clipper_core.engine.model import predict_all
from clipper_core.learning.answer_window import Joined
from clipper_core.learning.label_feedback import alike, learn_label, learn_labels
from clipper_core.runtime.status import Status

Item = tuple[Learner, str, Seen, bytes]
_log = logging.getLogger(__name__)
FEW = 8  # answers of one context that are not worth columns of their own


class Counted(msgspec.Struct, frozen=True):
    """Outcome of feedback about many predictions: learned from; counted before; about predictions
    that are no longer remembered.
    """

    counted: int
    duplicates: int
    unknown: int


def observe(
    resolved: ResolvedApplication,
    prediction: str | Answer | None,
    input: object,
    user: str | None,
    truth: Truth,
    weight: float,
    context: object = None,
) -> bool:
    """Learn one feedback, by prediction or by input. Return True when it counts, False when it was
    counted before. Returns once it is in the journal, of the server that answered. Raises
    InvalidInput, UnknownPrediction, Overloaded (the journal is full), StoreError.
    """
    window = _window_of(resolved)
    if (prediction is None) == (input is None):
        raise InvalidInput(
            "feedback names a prediction (an Answer or its id) or gives the input again: one of the"
            " two."
        )
    user = user_of(user)
    if input is None and truth.score is None and weight == 1.0:
        counts = learn_label_of(resolved, prediction, truth.label)
        if counts is not None:
            return counts
    if prediction is None:
        resolved = side_of(resolved, user)
        seen = _query_again(resolved, input, user, truth, weight, context)
        learner, whose = resolved.learner, user or ""
        learner.states.commit(
            learner.states.observe_one(learner, whose, seen, written(learner, whose, seen))
        )
        _notify_watcher(learner, seen)
        resolved.feedback.online_learning.send(
            resolved.cores,
            input,
            resolved.feedback.online_learning.session(resolved.models, user, 0),
            seen,
        )
        return True
    id = prediction.id if type(prediction) is Answer else _id_of(prediction)
    try:
        joined = window.take(id, resolved.name)
    except UnknownPrediction:
        if window.forwarding is None or not (node := window.forwarding.node_of(id)):
            raise
        feedback = ForwardedFeedback(
            resolved.name, [id], [truth.label], truth.score, weight, alone=True
        )
        try:
            return window.forwarding.send(node, feedback).counted == 1
        except UnknownPrediction:  # that server has ended
            if resolved.feedback.records is None:
                raise
            joined = resolved.feedback.records.take(id, resolved.name)
    if joined is None:
        return False
    learner, user = joined.learner, joined.user
    try:
        if joined.is_written:
            _fitted(truth, joined)  # a label that does not fit claims nothing
            if not all(_claimed(resolved, [(id, joined)])):
                return False
        seen = seen_of(joined, _fitted(truth, joined), weight)
        number = learner.states.observe_one(learner, user, seen, written(learner, user, seen))
    except BaseException:
        joined.has_feedback = False  # what the journal refuses may be sent again
        raise
    learner.states.commit(number)
    _notify_watcher(learner, seen)
    if resolved.feedback.online_learning.active:
        resolved.feedback.online_learning.send_for(resolved.all_cores, id, seen)
    return True


def rehearse(resolved: ResolvedApplication, id: str, truth: Truth) -> bool | None:
    """Check one feedback by the id of its prediction, and learn nothing.

    Returns whether it would count; None if another server answered, which alone knows. Raises
    InvalidInput, UnknownPrediction.
    """
    window = _window_of(resolved)
    try:
        joined = window.look(id, resolved.name)
    except UnknownPrediction:
        if window.forwarding is None or not window.forwarding.node_of(id):
            raise
        return None
    _fitted(truth, joined)
    return not joined.has_feedback


def learn_label_of(resolved: ResolvedApplication, prediction: object, label: object) -> bool | None:
    """Learn a label of weight 1 in the core. None, and nothing has changed, if it cannot."""
    feedback = resolved.feedback
    if feedback.window is None or feedback.online_learning.active:
        return None
    return learn_label(feedback.window.table, prediction, resolved.name, label)


def observe_many(
    resolved: ResolvedApplication,
    predictions: Sequence[str | Answer] | Answers,
    labels: Sequence[object],
    rows: ArrayLike | None = None,
) -> Counted:
    """Learn the labels of many predictions together, with one wait for the journal. Unknown
    predictions are counted, not raised. Raises InvalidInput before anything is learned, Overloaded,
    StoreError."""
    window = _window_of(resolved)
    if isinstance(predictions, Answers):
        return _observe_array(resolved, window, predictions, labels, rows)
    if rows is not None:
        raise InvalidInput("rows= chooses among the rows of an array of answers; this is a list.")
    _same_length(length_of("predictions", predictions), labels)
    if not resolved.feedback.online_learning.active:
        listed = labels.tolist() if isinstance(labels, np.ndarray) else list(labels)
        counted = learn_labels(window.table, list(predictions), resolved.name, listed)
        if counted is not None:
            return Counted(counted, len(listed) - counted, 0)
    column = label_column(labels)
    ids = [
        prediction.id if type(prediction) is Answer else _id_of(prediction)
        for prediction in predictions
    ]
    places, found, missing = window.take_many(ids, resolved.name)
    counts = _claimed(resolved, [(ids[i], one) for i, one in zip(places, found, strict=True)])
    if not all(counts):  # another server learned about some of them
        places = [i for i, one in zip(places, counts, strict=True) if one]
        found = [joined for joined, one in zip(found, counts, strict=True) if one]
    listed = column.tolist() if isinstance(column, np.ndarray) else column
    feedback = [listed[i] for i in places] if len(places) < len(ids) else listed
    feedback = _learn_joined(found, feedback)
    for i, joined, label in (
        zip(places, found, feedback, strict=True)
        if resolved.feedback.online_learning.active
        else ()
    ):
        resolved.feedback.online_learning.send_for(
            resolved.all_cores, ids[i], seen_of(joined, Truth(label))
        )
    away = (
        _send_to_owners(resolved, window, ids, listed, missing)
        if missing and window.forwarding
        else Reply()
    )
    elsewhere = away.counted + away.duplicates
    duplicates = len(ids) - len(found) - len(missing) + away.duplicates
    return Counted(len(found) + away.counted, duplicates, len(missing) - elsewhere)


def _claimed(resolved: ResolvedApplication, found: Sequence[tuple[str, Joined]]) -> list[bool]:
    """Claim answers in the store, if they are there; return which of them count."""
    records = resolved.feedback.records
    return [True] * len(found) if records is None else records.claim(found)


def _send_to_owners(
    resolved: ResolvedApplication,
    window: FeedbackWindow,
    ids: Sequence[str],
    labels: Sequence[object],
    missing: list[int],
) -> Reply:
    """Forward feedback to the servers that gave the answers at these places. Return how many count,
    and how many had feedback before."""
    total = Reply()
    assert window.forwarding is not None
    for node, places in by_node(window.forwarding, ids, missing).items():
        try:
            reply = window.forwarding.send(
                node,
                ForwardedFeedback(
                    resolved.name, [ids[i] for i in places], [labels[i] for i in places]
                ),
            )
        except UnknownPrediction:  # that server has ended
            reply = _learn_left(resolved, [ids[i] for i in places], [labels[i] for i in places])
        total.counted += reply.counted
        total.duplicates += reply.duplicates
    return total


def _learn_left(
    resolved: ResolvedApplication, ids: Sequence[str], labels: Sequence[object]
) -> Reply:
    """Learn about answers that a server has left in the store."""
    if resolved.feedback.records is None:
        return Reply()
    each = resolved.feedback.records.take_many(ids, resolved.name)
    found = [one for one in each if isinstance(one, Joined)]
    feedback = [label for one, label in zip(each, labels, strict=True) if isinstance(one, Joined)]
    _learn_joined(found, feedback)
    return Reply(len(found), sum(one is None for one in each))


def observe_for_others(
    application_of: Callable[[str], ResolvedApplication], forwarded: ForwardedFeedback
) -> Reply:
    """Learn feedback that another server received about answers of this one. Raises nothing."""
    try:
        resolved = application_of(forwarded.application)
        if forwarded.alone:
            counts = observe(
                resolved,
                forwarded.ids[0],
                None,
                None,
                Truth(forwarded.labels[0], forwarded.score),
                forwarded.weight,
            )
            return Reply(counted=1) if counts else Reply(duplicates=1)
        counted = observe_many(resolved, forwarded.ids, forwarded.labels)
        return Reply(counted.counted, counted.duplicates, counted.unknown)
    except ClipperError as error:
        return refusal(error)
    except Exception as error:
        _log.exception("feedback that another server took could not be learned from")
        return Reply(
            error="StoreError",
            message=f"the server that answered could not learn from it: {type(error).__name__}.",
        )


def _same_length(n: int, labels: Sequence[object]) -> None:
    if (count := length_of("labels", labels)) != n:
        raise InvalidInput(f"{n} predictions and {count} labels.")


def _fitted(truth: Truth, joined: Joined) -> Truth:
    """Return the label in the type of the models' outputs."""
    if not truth.known or (not joined.late and alike(truth.label, joined.arrived)):
        return truth
    label = fitted_label(
        truth.label, [reported.output for reported in received_of(joined).values()]
    )
    return truth if label is truth.label else Truth(label)


def _window_of(resolved: ResolvedApplication) -> FeedbackWindow:
    if resolved.feedback.window is None:
        names = ", ".join(map(str, resolved.models))
        hint = "Link the model to one: server.app(NAME, models=[...])."
        raise DoesNotFit(
            f"feedback is for applications; this query is for {names} directly.", hint=hint
        )
    outputs = None if resolved.output_name else outputs_of(resolved.cores.values())
    if outputs is not None:
        raise InvalidInput(
            f"application {resolved.name!r} answers with the outputs {outputs}; feedback is about"
            " one of them.",
            hint=f"Name it: server.app({resolved.name!r}, output={next(iter(outputs.by_name))!r}).",
        )
    return resolved.feedback.window


def _id_of(prediction: str | Answer) -> str:
    if isinstance(prediction, Answer):
        return prediction.id
    if not isinstance(prediction, str):
        raise InvalidInput(
            f"a prediction is named by an Answer or its id, not by a {type(prediction).__name__}."
        )
    return prediction


# -- lists of answers


def _learn_joined(found: list[Joined], labels: Sequence[object]) -> Sequence[UserValue]:
    """Learn labels by context, in the order of each; return them as they were learned. What is
    refused may be sent again."""
    if not found:
        return labels
    groups: dict[tuple[Learner, str], list[int]] = {}
    for i, joined in enumerate(found):
        groups.setdefault((joined.learner, joined.user), []).append(i)
    items: list[Item] = []
    feedback: list[tuple[Learner, list[Joined], Sequence[UserValue], ObservationRows | None]] = []
    try:
        labels = [
            (
                label
                if not joined.late and alike(label, joined.arrived)
                else _fitted(Truth(label), joined).label
            )
            for label, joined in zip(labels, found, strict=True)
        ]
        for (learner, user), places in groups.items():
            whole = len(places) == len(found)
            mine, truths = (
                (found, labels)
                if whole
                else ([found[i] for i in places], [labels[i] for i in places])
            )
            rows = (
                _columns(learner, mine, truths)
                if len(mine) >= FEW and learner.native_update is not None
                else None
            )
            items += _items(learner, user, mine, truths, rows)
            feedback.append((learner, mine, truths, rows))
        number = found[0].learner.states.observe_many(items)
    except BaseException:
        for joined in found:
            joined.has_feedback = False
        raise
    found[0].learner.states.commit(number)
    for each in feedback:
        _notify_watcher_of_list(*each)
    return labels


def _items(
    learner: Learner,
    user: str,
    found: Sequence[Joined],
    labels: Sequence[object],
    rows: ObservationRows | None,
) -> list[Item]:
    if rows is not None:
        return [(learner, user, part, record) for part, record in written_rows(learner, user, rows)]
    items: list[Item] = []
    for joined, label in zip(found, labels, strict=True):
        seen = seen_of(joined, Truth(label))
        items.append((learner, user, seen, written(learner, user, seen)))
    return items


def _columns(
    learner: Learner, found: list[Joined], labels: Sequence[object]
) -> ObservationRows | None:
    """Return the rows as columns; None for plans that columns cannot hold."""
    if any(joined.plan.features for joined in found):
        return None
    place, right = learner.place, column_of(labels)
    selected, p = [-1] * len(found), [1.0] * len(found)
    for i, joined in enumerate(found):
        models = joined.plan.models
        if len(models) == 1 and models[0] in place:
            selected[i] = place[models[0]]
            p[i] = joined.plan.probabilities[0] if joined.plan.probabilities else 1.0
        elif models != learner.models:
            return None
    arrived = [received_of(joined) for joined in found]
    if any(prediction.qualifiers for one in arrived for prediction in one.values()):
        return None
    outputs_by, arrived_by, own_of = [], [], []
    for model in learner.models:
        reported = [one.get(model) for one in arrived]
        absent = None in reported
        filler = (
            0
            if not absent
            else next((prediction.output for prediction in reported if prediction is not None), 0)
        )
        outputs_by.append(
            column_of(
                [filler if prediction is None else prediction.output for prediction in reported]
            )
        )
        arrived_by.append(
            np.array([prediction is not None for prediction in reported]) if absent else None
        )
        own = [None if prediction is None else prediction.confidence for prediction in reported]
        own_of.append(
            None if own.count(None) == len(own) else np.array([_sound(one) for one in own])
        )
    return ObservationRows(
        learner.models,
        tuple(outputs_by),
        tuple(arrived_by),
        tuple(own_of),
        right,
        np.array(selected, np.int32),
        np.array(p),
    )


def _sound(confidence: float | None) -> float:
    """Return a confidence as a float: NaN for None, and 0 for a model's own NaN."""
    return np.nan if confidence is None else 0.0 if confidence != confidence else confidence


# -- arrays of answers


def _observe_array(
    resolved: ResolvedApplication,
    window: FeedbackWindow,
    answers: Answers,
    labels: Sequence[object],
    rows: ArrayLike | None,
) -> Counted:
    places = np.arange(len(answers)) if rows is None else _places(rows, len(answers))
    _same_length(len(places), labels)
    column = label_column(labels)
    try:
        joined = window.rows_of(answers.id, resolved.name)
    except UnknownPrediction:
        return Counted(0, 0, len(places))
    fresh, missing = window.take_rows(joined, places)
    if len(fresh) < len(places):
        column = (
            column[fresh] if isinstance(column, np.ndarray) else [column[i] for i in fresh.tolist()]
        )
        places = places[fresh]
    if len(fresh):
        _learn_rows(joined, places, column)
    return Counted(len(fresh), len(labels) - len(fresh) - missing, missing)


def _places(rows: ArrayLike, n: int) -> NDArray[np.intp]:
    try:
        places = np.asarray(rows)
    except ValueError:
        places = np.zeros((1, 1))
    whole = places.ndim == 1 and (places.dtype.kind in "iu" or not places.size)
    if not whole or (places.size and not 0 <= places.min() <= places.max() < n):
        raise InvalidInput(f"rows= are places of the array, whole numbers from 0 to {n - 1}.")
    return places.astype(np.intp)


def _learn_rows(joined: JoinedRows, places: NDArray[np.intp], labels: Column) -> None:
    """Learn rows in parts, so that the lock is never held for long. What the journal refuses may be
    sent again."""
    learner, user, states = joined.learner, joined.user, joined.learner.states
    done = number = 0
    seen: list[Seen] = []
    try:
        labels = fitted_column(labels, joined.outputs_of(places))
        for part, record in _parts(joined, places, labels):
            number = states.observe_one(learner, user, part, record)
            done += len(part) if isinstance(part, ObservationRows) else 1
            seen.append(part)
    except BaseException:
        joined.has_feedback[places[done:]] = False
        raise
    states.commit(number)
    _notify_watcher_of_rows(joined, places, seen)


def _parts(
    joined: JoinedRows, places: NDArray[np.intp], labels: Column
) -> Iterator[tuple[Seen, bytes]]:
    learner, user = joined.learner, joined.user
    if joined.as_one:
        yield from written_rows(learner, user, joined.columns(places, labels))
        return
    for i, label in zip(
        places.tolist(), labels.tolist() if isinstance(labels, np.ndarray) else labels, strict=True
    ):
        seen = joined.observation(i, label)
        yield seen, written(learner, user, seen)


# -- observers of feedback


def _notify_watcher(learner: Learner, seen: Observation) -> None:
    if learner.watcher is not None:
        learner.watcher.on_feedback(seen)


def _notify_watcher_of_list(
    learner: Learner,
    found: Sequence[Joined],
    labels: Sequence[object],
    rows: ObservationRows | None,
) -> None:
    if learner.watcher is None:
        return
    if rows is not None:
        learner.watcher.on_feedback_rows(rows, column_of([joined.answer for joined in found]))
        return
    for joined, label in zip(found, labels, strict=True):
        if not learner.watcher.on_feedback(seen_of(joined, Truth(label))):
            return


def _notify_watcher_of_rows(
    joined: JoinedRows, places: NDArray[np.intp], seen: Sequence[Seen]
) -> None:
    watcher, at = joined.learner.watcher, 0
    if watcher is None:
        return
    for part in seen:
        if isinstance(part, ObservationRows):
            mine = places[at : at + len(part)]
            answers = joined.answers
            watcher.on_feedback_rows(
                part,
                (
                    answers[mine]
                    if isinstance(answers, np.ndarray)
                    else [answers[i] for i in mine.tolist()]
                ),
            )
            at += len(part)
        elif not watcher.on_feedback(part):
            return


# -- feedback with the input


def _query_again(
    resolved: ResolvedApplication,
    input: object,
    user: str | None,
    truth: Truth,
    weight: float,
    context: object,
) -> Observation:
    """Return the predictions for an input: from the cache, else evaluated now, by the application's
    SLO."""
    state, plan = plan_for(resolved, user, resolved.context_of(user, context))
    selected = (*plan.models, *(model for model in plan.observers if model not in plan.models))
    salt = resolved.feedback.online_learning.session(resolved.models, user, 0)
    future = predict_all(
        tuple(resolved.cores[model] for model in selected),
        input,
        resolved.slo_us,
        salt,
        None,
        resolved,
    )
    future.wait()
    arrived = {
        model: prediction_of(future, i)
        for i, model in enumerate(selected)
        if future.status(i) is Status.OK
    }
    if not arrived:
        names = ", ".join(map(str, selected))
        raise DeadlineExceeded(
            f"{names} did not predict the input within {resolved.slo_us / 1000:g} ms; nothing was"
            " learned."
        )
    answered: dict[VersionedModel, Prediction] = {
        model: arrived[model] for model in plan.models if model in arrived
    }
    missing = [model for model in plan.models if model not in arrived]
    answer = resolved.policy.combine(state, answered, missing).output
    if truth.known:
        truth = Truth(fitted_label(truth.label, [reported.output for reported in arrived.values()]))
    return Observation(plan, arrived, truth, answer, weight)
