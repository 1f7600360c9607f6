"""Records scored from a Redis Stream to another, and feedback learned from a third. docs/streams.md
is for users.

At least once in, exactly one answer out: see group.py. The reader submits a record as soon as it
has it; the settler waits for the answers in the order of the records, and writes those that are
there together. Predictions of others are never behind these: what a stream waits for, its own two
threads wait for.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from typing import Any, Final

import msgspec

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
from clipper.serving.models.intake import Intake, late, untried
from clipper.serving.query.application import ApplicationHandle
from clipper.settings.streams import StreamSettings
from clipper.types import Answer

_AGAIN_S: Final = 0.05
_PREDICTIONS_MAX: Final = 65_536


class PendingRecord(msgspec.Struct, eq=False):
    """A record in flight. future: of an Answer; None while the application cannot be asked,
    `trouble` says why."""

    record: StreamRecord
    future: Any
    until_s: float
    trouble: str = ""
    asked_s: float = 0.0


class RecentPredictions:
    """The last predictions by their records' ids. Threads: any."""

    def __init__(self) -> None:
        self._predictions: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, id: str, prediction: str) -> None:
        with self._lock:
            self._predictions[id] = prediction
            if len(self._predictions) > _PREDICTIONS_MAX:
                self._predictions.popitem(last=False)

    def get(self, id: str) -> str:
        with self._lock:
            return self._predictions.get(id, "")


class ScoringConsumer(StreamConsumer[PendingRecord]):
    """Records in, answers out."""

    def __init__(
        self,
        app: ApplicationHandle,
        settings: StreamSettings,
        group: ConsumerGroup,
        answered: RecentPredictions | None,
    ) -> None:
        super().__init__(
            f"stream-{app.name}", group, settings.in_flight_max, settings.deliveries_max
        )
        self._app = app
        self._patience_s = settings.patience_s
        self._intake = Intake(settings.in_flight_max)
        self._answered = answered

    def _room(self) -> int:
        return self._intake.size

    def _accept(self, entry: StreamEntry) -> PendingRecord:
        asked = PendingRecord(record_of(entry.fields), None, time.monotonic() + self._patience_s)
        self._ask(asked)
        return asked

    def _ask(self, asked: PendingRecord) -> None:
        """Raises: InvalidInput when the record is at fault; what else the application says is its
        own trouble."""
        record, asked.asked_s = asked.record, time.monotonic()
        try:
            asked.future = self._app.predict(
                record.input, record.user, record.slo_ms, context=record.context, id=record.id
            )
        except InvalidInput:
            raise
        except ClipperError as error:
            asked.future, asked.trouble = None, str(error)

    def _is_ready(self, item: PendingRecord) -> bool:
        return item.future is not None and item.future.done()

    def _outcome(self, entry: StreamEntry, item: PendingRecord) -> EntryOutcome | None:
        while True:
            if item.future is None:
                self._say(item.trouble)
            else:
                answer = self._result(item.future)
                if answer is None:
                    return None
                self._intake.record(late(item.future, answer))
                if not untried(item.future, answer) or (
                    time.monotonic() >= item.until_s and not self._stopping
                ):
                    return self._answer(entry, item.record, answer)
            if self._stopping and (self._is_over or item.future is None):
                return None
            self._pause(
                max(0.0, item.asked_s + _AGAIN_S - time.monotonic())
            )  # who was asked about long ago need not wait
            self._ask(item)

    def _result(self, future: Any) -> Answer | None:
        """None when there is no time left for it."""
        while not future.wait(_AGAIN_S):
            if self._is_over:
                return None
        answer: Answer = future.result()
        return answer

    def _answer(self, entry: StreamEntry, record: StreamRecord, answer: Answer) -> EntryOutcome:
        if self._answered is not None:
            self._answered.add(record.id or entry.id, answer.id)
        return EntryOutcome(entry.id, "answer", answer_fields(answer, record, entry.id), record.id)


class FeedbackConsumer(StreamConsumer[StreamFeedback]):
    """Feedback in: about a record by its id, about a prediction by its id, or with the input."""

    def __init__(
        self,
        app: ApplicationHandle,
        group: ConsumerGroup,
        records: StreamNames,
        answered: RecentPredictions,
        deliveries_max: int,
    ) -> None:
        super().__init__(f"feedback-{app.name}", group, 1024, deliveries_max)
        self._app = app
        self._records = records
        self._answered = answered

    def _accept(self, entry: StreamEntry) -> StreamFeedback:
        return feedback_of(entry.fields)

    def _outcome(self, entry: StreamEntry, item: StreamFeedback) -> EntryOutcome | None:
        while True:
            try:
                self._learn(item)
                return EntryOutcome(entry.id, "drop", id=item.id)
            except (InvalidInput, UnknownPrediction):
                raise
            except (
                ClipperError,
                ConnectionError,
            ) as error:  # the journal is full, the store or Redis away: try again
                if self._stopping:
                    return None
                self._say(str(error))
                self._pause(10 * _AGAIN_S)

    def _learn(self, told: StreamFeedback) -> None:
        """Raises: InvalidInput, UnknownPrediction for what will never do; ClipperError,
        ConnectionError for what may, later."""
        if told.id and self._is_known(told.id):
            return
        truth: dict[str, Any] = {
            "label": told.label,
            "correct": told.correct,
            "score": told.score,
            "weight": told.weight,
        }
        if told.input is not None:
            self._app.feedback(input=told.input, user=told.user, context=told.context, **truth)
            return
        prediction = told.prediction or self._answered.get(told.id)
        if prediction:
            with contextlib.suppress(UnknownPrediction):  # another server's, or too old
                self._app.feedback(prediction, **truth)
                return
        record = self._record(told.id) if told.id else None
        if record is None:
            hint = "Give the `input` with the feedback."
            raise UnknownPrediction(
                f"no record {told.id or told.prediction!r} is known any more.", hint=hint
            )
        context = record.context if told.context is None else told.context
        self._app.feedback(
            input=record.input, user=told.user or record.user, context=context, **truth
        )

    def _is_known(self, id: str) -> bool:
        """Whether feedback about this record has been learned from before."""
        found = self._group.ask(lambda redis: (redis.zscore(self._group.names.ids, id),))
        if found is None:
            raise ConnectionError(self._group.trouble)
        return found[0] is not None

    def _record(self, id: str) -> StreamRecord | None:
        """The record of that id, from its stream: any server of the group can learn about it.
        ConnectionError: Redis is away."""
        found = self._group.ask(lambda redis: self._found(redis, id))
        if found is None:
            raise ConnectionError(self._group.trouble)
        with contextlib.suppress(InvalidInput):
            return record_of(found) if found else None
        return None

    def _found(self, redis: Any, id: str) -> dict[bytes, bytes]:
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
    """A running stream, as `server.stream()` gives it. Threads: any."""

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
        self._scoring = ScoringConsumer(app, settings, group, answered)
        self._learning: FeedbackConsumer | None = None
        if answered is not None:
            source = settings.feedback
            told = msgspec.structs.replace(
                names, source=source, answers=source + ".learned", refused=source + ".refused"
            )
            check_names(told)
            group = ConsumerGroup(settings.url, told, consumer, settings.claim_s)
            self._learning = FeedbackConsumer(app, group, names, answered, settings.deliveries_max)

    def start(self) -> "ScoringStream":
        self._scoring.start()
        if self._learning is not None:
            self._learning.start()
        return self

    def stats(self) -> dict[str, Any]:
        """What became of the records: `read`, `answered`, `refused`, `duplicates` (a second entry
        with the same `id`), `settled_elsewhere` (another server was first), `reclaimed` (from a
        server that fell silent), `trimmed` (lost before they were read: the source is kept too
        short), `in_flight`, `room`, `reconnects`, `trouble`; `feedback`: the same.
        """
        found = self._scoring.stats()
        return found if self._learning is None else {**found, "feedback": self._learning.stats()}

    def stop(self, drain_s: float = 5.0) -> None:
        """Read no more; what was read has `drain_s` seconds to be answered. What is left goes to
        the others of the group, or to the next start. Idempotent."""
        if self._learning is not None:
            self._learning.stop(drain_s)
        self._scoring.stop(drain_s)

    def __enter__(self) -> "ScoringStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        names = self.settings
        return f"<Stream {names.source} -> {self.name} -> {names.answers}, group {names.group}>"
