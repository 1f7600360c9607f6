"""Records from one Redis Stream scored to another, and feedback from a third. See docs/streams.md.

Delivery is at least once, and each record has exactly one answer: see consumer_group.py. The reader
thread submits each record at once; the other thread waits for the answers in order, and writes
those that are ready together. Other queries never wait for a stream.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from typing import Final

import msgspec

from clipper.component import Health
from clipper.errors import ClipperError, InvalidInput, UnknownPrediction
from clipper.frontend.streams.consumer import StreamConsumer
from clipper.frontend.streams.consumer_group import (
    ConsumerGroup,
    EntryOutcome,
    StreamEntry,
    StreamNames,
    check_names,
)
from clipper.frontend.streams.records import (
    StreamFeedback,
    StreamRecord,
    answer_fields,
    feedback_of,
    record_of,
)
from clipper.metrics.samples import Stats
from clipper.schema import Tensors
from clipper.serving.models.intake import Intake, late, untried
from clipper.serving.query.application import ApplicationHandle
from clipper.serving.query.future_watcher import Future
from clipper.settings.streams import StreamSettings
from clipper.store.redis.store import RedisClient
from clipper.types import Answer, UserValue

_AGAIN_S: Final = 0.05
_PREDICTIONS_MAX: Final = 65_536
_FEEDBACK_MAX: Final = 1024


class PendingRecord(msgspec.Struct, eq=False):
    """A record in progress. tensors: as which its input was read; None while their names are not
    known. future: of an Answer, or None while the application is unavailable (`trouble`)."""

    record: StreamRecord
    tensors: Tensors | None
    future: Future | None
    until_s: float
    trouble: str = ""
    sent_s: float = 0.0


class RecentPredictions:
    """The ids of the last predictions by the ids of their records. Threads: any."""

    def __init__(self) -> None:
        self._predictions: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, id: str, prediction: str) -> None:
        """Add a prediction."""
        with self._lock:
            self._predictions[id] = prediction
            if len(self._predictions) > _PREDICTIONS_MAX:
                self._predictions.popitem(last=False)

    def get(self, id: str) -> str:
        """Return a prediction's id, or ""."""
        with self._lock:
            return self._predictions.get(id, "")


class RecordScorer:
    """Answers the records of a stream."""

    def __init__(
        self,
        app: ApplicationHandle,
        settings: StreamSettings,
        answered: RecentPredictions | None,
    ) -> None:
        self._app = app
        self._patience_s = settings.patience_s
        self._intake = Intake(settings.in_flight_max)
        self._answered = answered

    @property
    def room(self) -> int:
        """The number of records in progress that keeps answers within their SLO."""
        return self._intake.size

    def accept(self, entry: StreamEntry) -> PendingRecord:
        """Submit a record. Raises InvalidInput."""
        tensors = self._app.tensors
        record = record_of(entry.fields, tensors)
        pending = PendingRecord(record, tensors, None, time.monotonic() + self._patience_s)
        self._query(pending)
        return pending

    def _query_again(self, entry: StreamEntry, pending: PendingRecord) -> None:
        """Submit the record again, as it is read now: names of tensors may have become known.
        Raises InvalidInput."""
        if (tensors := self._app.tensors) is not pending.tensors:
            pending.record, pending.tensors = record_of(entry.fields, tensors), tensors
        self._query(pending)

    def _query(self, pending: PendingRecord) -> None:
        """Submit the record. Raises InvalidInput; other errors are noted as the application's
        trouble."""
        record, pending.sent_s = pending.record, time.monotonic()
        try:
            pending.future = self._app.predict(
                record.input, record.user, record.slo_ms, context=record.context, id=record.id
            )
        except ClipperError as error:
            if isinstance(error, InvalidInput) and self._app.tensors is pending.tensors:
                raise
            pending.future, pending.trouble = None, str(error)

    def is_ready(self, item: PendingRecord) -> bool:
        """Return whether the answer of a record is there."""
        return item.future is not None and item.future.done()

    def outcome(
        self,
        entry: StreamEntry,
        item: PendingRecord,
        consumer: StreamConsumer[PendingRecord],
    ) -> EntryOutcome | None:
        """Wait for the answer. A record that no model could take is submitted again."""
        while True:
            if item.future is None:
                consumer.report(item.trouble)
            else:
                answer = self._result(item.future, consumer)
                if answer is None:
                    return None
                self._intake.record(late(item.future, answer))
                if not untried(item.future, answer) or (
                    time.monotonic() >= item.until_s and not consumer.is_stopping
                ):
                    return self._answer(entry, item.record, answer)
            if consumer.is_stopping and (consumer.is_over or item.future is None):
                return None
            # no pause if the last attempt is long ago
            consumer.pause(max(0.0, item.sent_s + _AGAIN_S - time.monotonic()))
            self._query_again(entry, item)

    def _result(self, future: Future, consumer: StreamConsumer[PendingRecord]) -> Answer | None:
        """Return the answer, or None if there is no time left."""
        while not future.wait(_AGAIN_S):
            if consumer.is_over:
                return None
        answer: Answer = future.result()
        return answer

    def _answer(self, entry: StreamEntry, record: StreamRecord, answer: Answer) -> EntryOutcome:
        if self._answered is not None:
            self._answered.add(record.id or entry.id, answer.id)
        return EntryOutcome(entry.id, "answer", answer_fields(answer, record, entry.id), record.id)


class FeedbackLearner:
    """Records the feedback of a stream: by a record's id, a prediction's id, or with the input."""

    def __init__(
        self,
        app: ApplicationHandle,
        group: ConsumerGroup,
        records: StreamNames,
        answered: RecentPredictions,
    ) -> None:
        self._app, self._group = app, group
        self._records = records
        self._answered = answered

    @property
    def room(self) -> int:
        """The number of feedback entries in progress."""
        return _FEEDBACK_MAX

    def is_ready(self, item: None) -> bool:
        """Return False: learning may wait for the store."""
        return False

    def accept(self, entry: StreamEntry) -> None:
        """Do nothing: the entry is read when it is its turn."""

    def outcome(
        self, entry: StreamEntry, item: None, consumer: StreamConsumer[None]
    ) -> EntryOutcome | None:
        """Learn from the feedback, with retries while the journal, the store or Redis fail."""
        while True:
            tensors = self._app.tensors
            try:
                feedback = feedback_of(entry.fields, tensors)
                self._learn(feedback)
                return EntryOutcome(entry.id, "drop", id=feedback.id)
            except (
                ClipperError,
                ConnectionError,
            ) as error:
                # journal full, store or Redis unreachable: retry
                is_final = isinstance(error, InvalidInput) and self._app.tensors is tensors
                if is_final or isinstance(error, UnknownPrediction):
                    raise
                if consumer.is_stopping:
                    return None
                consumer.report(str(error))
                consumer.pause(10 * _AGAIN_S)

    def _learn(self, feedback: StreamFeedback) -> None:
        """Record one feedback.

        Raises InvalidInput and UnknownPrediction, which are final; ClipperError and ConnectionError
        for failures that a retry may overcome.
        """
        if feedback.id and self._is_known(feedback.id):
            return
        truth: dict[str, UserValue] = {
            "label": feedback.label,
            "correct": feedback.correct,
            "score": feedback.score,
            "weight": feedback.weight,
        }
        if feedback.input is not None:
            self._app.feedback(
                input=feedback.input, user=feedback.user, context=feedback.context, **truth
            )
            return
        prediction = feedback.prediction or self._answered.get(feedback.id)
        if prediction:
            with contextlib.suppress(UnknownPrediction):
                # a prediction of another server, or too old
                self._app.feedback(prediction, **truth)
                return
        record = self._record(feedback.id) if feedback.id else None
        if record is None:
            hint = "Give the `input` with the feedback."
            raise UnknownPrediction(
                f"no record {feedback.id or feedback.prediction!r} is known any more.", hint=hint
            )
        context = record.context if feedback.context is None else feedback.context
        self._app.feedback(
            input=record.input, user=feedback.user or record.user, context=context, **truth
        )

    def _is_known(self, id: str) -> bool:
        """Return whether feedback on this record was recorded before. Raises ConnectionError."""
        found = self._group.call(lambda redis: (redis.zscore(self._group.names.ids, id),))
        if found is None:
            raise ConnectionError(self._group.trouble)
        return found[0] is not None

    def _record(self, id: str) -> StreamRecord | None:
        """Return the record with this id from its stream, so that any server of the group can learn
        from it.

        Raises ConnectionError while Redis is unreachable.
        """
        found = self._group.call(lambda redis: self._found(redis, id))
        if found is None:
            raise ConnectionError(self._group.trouble)
        with contextlib.suppress(InvalidInput):
            return record_of(found, self._app.tensors) if found else None
        return None

    def _found(self, redis: RedisClient, id: str) -> dict[bytes, bytes]:
        score = redis.zscore(self._records.ids, id)
        if score is not None:
            ms = str(int(score))
            entries = redis.xrange(self._records.source, ms, ms, count=10_000)
            return next(
                (
                    fields
                    for _, fields in entries
                    if fields.get(b"id", b"").decode("utf-8", "replace") == id
                ),
                {},
            )
        if not all(part.isdecimal() for part in id.split("-")):
            return {}
        entries = redis.xrange(self._records.source, id, id, count=1)
        return entries[0][1] if entries else {}


class ScoringStream:
    """A running stream, as returned by `server.stream()`. Threads: any."""

    def __init__(self, app: ApplicationHandle, settings: StreamSettings, consumer: str) -> None:
        self.name = app.name
        self.settings = settings
        refused = settings.refused or settings.source + ".refused"
        names = StreamNames(
            settings.source,
            settings.group,
            settings.answers,
            refused,
            settings.answers_max,
            settings.refused_max,
            settings.ids_max,
        )
        check_names(names)
        answered = RecentPredictions() if settings.feedback else None
        group = ConsumerGroup(settings.url, names, consumer, settings.claim_s)
        self._scoring = StreamConsumer(
            f"stream-{app.name}",
            group,
            RecordScorer(app, settings, answered),
            settings.deliveries_max,
        )
        self._learning: StreamConsumer[None] | None = None
        if answered is not None:
            source = settings.feedback
            settings_shown = msgspec.structs.replace(
                names, source=source, answers=source + ".learned", refused=source + ".refused"
            )
            check_names(settings_shown)
            group = ConsumerGroup(settings.url, settings_shown, consumer, settings.claim_s)
            learner = FeedbackLearner(app, group, names, answered)
            self._learning = StreamConsumer(
                f"feedback-{app.name}", group, learner, settings.deliveries_max
            )

    def start(self) -> "ScoringStream":
        """Start all threads, or none. Raises NotStarted."""
        self._scoring.start()
        try:
            if self._learning is not None:
                self._learning.start()
        except BaseException:
            self._scoring.stop(0.0)
            raise
        return self

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._scoring.is_stopping

    def health(self) -> list[Health]:
        """Return the states of its threads."""
        learning = [] if self._learning is None else self._learning.health()
        return [*self._scoring.health(), *learning]

    def stats(self) -> Stats:
        """Return counts of the records since the start.

        `read`, `answered`, `refused`, `duplicates` (a second entry with the same `id`),
        `settled_elsewhere` (another server was first), `reclaimed` (from a silent server),
        `trimmed` (lost before they were read: the source is too short), `in_flight`, `room`,
        `reconnects`, `trouble`; `feedback` has the same for the feedback.
        """
        found = self._scoring.stats()
        return found if self._learning is None else {**found, "feedback": self._learning.stats()}

    def stop(self, drain_s: float = 5.0) -> None:
        """Read no more records and stop.

        Records in progress have `drain_s` seconds; the rest are left to the other servers of the
        group, or to the next start. Idempotent.
        """
        try:
            if self._learning is not None:
                self._learning.stop(drain_s)
        finally:
            self._scoring.stop(drain_s)

    def __enter__(self) -> "ScoringStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        names = self.settings
        return f"<Stream {names.source} -> {self.name} -> {names.answers}, group {names.group}>"
