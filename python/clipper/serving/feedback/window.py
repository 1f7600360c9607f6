"""Feedback: the truth about a query, joined with what its models predicted.

An answer is remembered for a while by its id (the join window), with the plan that chose its
models: feedback may come long after the state has moved on, and must be weighed by the
probabilities of then. Feedback by id counts once, however often it is sent. Feedback with the input
itself needs no window: the models are queried again, and the cache has most of it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.errors import UnknownPrediction
from clipper.selection import Observation, Plan, Prediction, Truth
from clipper.selection.learning.batch_learning import Column, ObservationRows
from clipper.serving.feedback.forwarding import Forwarding
from clipper.serving.feedback.journal_records import written
from clipper.serving.feedback.states import Learner
from clipper.serving.query.qualifiers import prediction_of
from clipper.types import Answer, VersionedModel
from clipper_core.learning.answer_window import AnswerOwner, AnswerWindow, Joined
from clipper_core.learning.label_feedback import take_listed
from clipper_core.results.answer import NUMBER_OF
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status


def received_of(joined: Joined) -> dict[VersionedModel, Prediction]:
    """Return the predictions that arrived, including late ones that have arrived since."""
    if not joined.late:
        return joined.arrived  # type: ignore[no-any-return]
    arrived = dict(joined.arrived)
    for model, future in joined.late:
        if future.done() and future.status() is Status.OK:
            arrived[model] = prediction_of(future, 0)
    return arrived


def seen_of(joined: Joined, truth: Truth, weight: float = 1.0) -> Observation:
    """Return an answer with its feedback."""
    return Observation(joined.plan, received_of(joined), truth, joined.answer, weight)


class JoinedRows:
    """An array of answers that feedback may still come for, row by row. future: of its tasks, model
    after model. answers: the outputs, a row each."""

    __slots__ = (
        "_future",
        "_rows",
        "answers",
        "arrived",
        "has_feedback",
        "learner",
        "plan",
        "until_s",
        "user",
    )

    def __init__(
        self, learner: Learner, user: str, plan: Plan, future: Future, answers: Column
    ) -> None:
        self.learner, self.user, self.plan, self._future, self.answers = (
            learner,
            user,
            plan,
            future,
            answers,
        )
        by_model = future.statuses().reshape(len(plan.models), -1) == Status.OK
        self.arrived: NDArray[np.bool_] = by_model.any(
            axis=0
        )  # rows that anything can be learned from
        self.has_feedback = np.zeros(len(self.arrived), np.bool_)
        self.until_s = 0.0
        self._rows: ObservationRows | None = None

    def __len__(self) -> int:
        return len(self.has_feedback)

    @property
    def as_one(self) -> bool:
        """Return whether all of the learner's models were queried, or only one, as columns
        require.
        """
        selected, place = set(self.plan.models), self.learner.place
        return (len(selected) == 1 or selected == place.keys()) and all(
            model in place for model in selected
        )

    def columns(self, places: NDArray[np.intp], labels: Column) -> ObservationRows:
        """Return these rows, with their labels."""
        if self._rows is None:
            self._rows = self._read()
        rows = self._rows if len(places) == len(self) else self._rows.take(places)
        return msgspec.structs.replace(rows, labels=labels)

    def outputs_of(self, places: NDArray[np.intp]) -> list[Column]:
        """Return the outputs of the queried models for these rows, a column a model."""
        n = len(self)
        columns = [self._future.outputs(0, j * n, n) for j in range(len(self.plan.models))]
        return [
            column[places] if isinstance(column, np.ndarray) else [column[i] for i in places]
            for column in columns
        ]

    def _read(self) -> ObservationRows:
        n, future, models = len(self), self._future, self.learner.models
        outputs: list[Column] = [np.zeros(n, np.int64)] * len(models)
        arrived: list[NDArray[np.bool_] | None] = [np.zeros(n, np.bool_)] * len(models)
        confidence: list[NDArray[np.float64] | None] = [None] * len(models)
        statuses = future.statuses().reshape(-1, n)
        for j, model in enumerate(self.plan.models):
            at = self.learner.place[model]
            ok = statuses[j] == Status.OK
            outputs[at], arrived[at] = future.outputs(0, j * n, n), None if ok.all() else ok
            own = future.confidences(j * n, n)
            confidence[at] = None if np.isnan(own).all() else own
        if len(self.plan.models) == 1:
            at, p = (
                self.learner.place[self.plan.models[0]],
                self.plan.probability(self.plan.models[0]),
            )
            like = outputs[at].dtype if isinstance(outputs[at], np.ndarray) else None
            outputs = [
                c if i == at or like is None else np.zeros(n, like) for i, c in enumerate(outputs)
            ]
        else:
            at, p = -1, 1.0
        unlabelled = np.zeros(n, np.bool_)
        return ObservationRows(
            models,
            tuple(outputs),
            tuple(arrived),
            tuple(confidence),
            unlabelled,
            np.array([at], np.int32),
            np.array([p]),
        )

    def observation(self, i: int, label: object) -> Observation:
        """Return row i as an object, also where columns cannot hold it."""
        n, future = len(self), self._future
        arrived = {
            model: Prediction(future.output(j * n + i), future.confidence(j * n + i))
            for j, model in enumerate(self.plan.models)
            if future.status(j * n + i) is Status.OK
        }
        return Observation(self.plan, arrived, Truth(label), self.answers[i])


class FeedbackWindow:
    """Answers by id, the last `size_max` of them, each for `window_s` seconds; arrays too, the last
    so many rows of them, and the last array whatever its size. Threads: any.

    bytes_max: of what is kept, estimated; beyond it the oldest answers are forgotten.  forwarding:
    to the servers that gave other answers; None when no other server shares the store.  keep:
    called with each answer of a policy that learns, and its id.  node: ids of this server are
    `node-number`.
    """

    def __init__(
        self,
        size_max: int,
        window_s: float,
        bytes_max: int = 256 << 20,
        clock: Callable[[], float] | None = None,
        forwarding: Forwarding | None = None,
        keep: Callable[[str, Joined], None] | None = None,
        node: str = "",
    ) -> None:
        self.forwarding = forwarding
        self._keep, self._node = keep, node
        self._size_max, self._window_s, self._clock = size_max, window_s, clock or time.monotonic
        self.table = AnswerWindow(
            size_max, window_s, bytes_max, Answer, Prediction, Plan, clock, node, NUMBER_OF
        )
        self._arrays: OrderedDict[str, JoinedRows] = OrderedDict()
        self._row_count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, estimated."""
        return self.table.nbytes

    def add(
        self,
        number: int,
        learner: Learner,
        user: str,
        plan: Plan,
        arrived: dict[VersionedModel, Prediction],
        answer: object,
        late: tuple[tuple[VersionedModel, Future], ...] = (),
    ) -> None:
        """Remember a query until its feedback comes. number: that in the id of its answer."""
        self.table.add(number, learner, user, plan, arrived, answer, late)
        if self.keeps(learner):
            self.keep(number)

    def keeps(self, learner: Learner) -> bool:
        """Return whether answers of this learner go to the store."""
        return self._keep is not None and learner.learns

    def keep(self, number: int) -> None:
        """Have an answer that is remembered go to the store, by the number in its id."""
        id = f"{self._node}-{number:x}"
        joined = self.table.get(id)
        if joined is not None and self._keep is not None:
            self._keep(id, joined)

    def owner(self, learner: Learner, models: tuple[VersionedModel, ...]) -> AnswerOwner:
        """Return the owner of the answers that the HTTP threads of the core give."""
        with self._lock:
            return self.table.pinned_owner(learner, models)

    def records(self, node: str) -> Iterator[tuple[int, bytes]]:
        """Yield the answers of this node that feedback may still come for, by the number in their
        id: as records of the journal; those whose feedback has come as empty ones. Those that are
        written already are left out."""
        for id, joined in reversed(self.table.items()):
            of, _, digits = id.rpartition("-")
            if joined.is_written or of != node or self._is_over(joined):
                continue
            seen = seen_of(joined, Truth())
            record = b"" if joined.has_feedback else written(joined.learner, joined.user, seen)
            yield int(digits, 16), record

    def close(self) -> None:
        """Forget all answers, and those to come."""
        self.table.close()
        with self._lock:
            self._arrays.clear()
            self._row_count = 0

    def add_rows(self, id: str, joined: JoinedRows) -> None:
        """Remember an array until its feedback comes."""
        joined.until_s = self._clock() + self._window_s
        with self._lock:
            self._arrays[id] = joined
            self._row_count += len(joined)
            while len(self._arrays) > 1:
                oldest = next(iter(self._arrays.values()))
                if self._row_count <= self._size_max and not self._is_over(oldest):
                    break
                self._arrays.popitem(last=False)
                self._row_count -= len(oldest)

    def _is_over(self, joined: Joined | JoinedRows) -> bool:
        return joined.until_s < self._clock()

    def take(self, id: str, application: str) -> Joined | None:
        """Return the query of that id, once; None when it has feedback already. Raises
        UnknownPrediction if it is not here."""
        joined = self.look(id, application)
        return joined if joined.claim() else None

    def look(self, id: str, application: str) -> Joined:
        """Return the query of that id, which feedback may still come for, or has come. Raises
        UnknownPrediction if it is not here."""
        joined = self.table.get(id)
        if joined is None:
            raise self._unknown(id)
        whose = joined.learner.application
        if whose != application:
            raise _foreign(id, whose, application)
        return joined

    def take_many(
        self, ids: Sequence[str], application: str
    ) -> tuple[list[int], list[Joined], list[int]]:
        """Take the queries whose feedback has not come yet, each once.

        Returns their positions in the ids, the queries, and the positions of unknown ids.
        """
        return take_listed(list(ids), self.table, application)

    def rows_of(self, id: str, application: str) -> JoinedRows:
        """Return the array of that id. Raises UnknownPrediction if it is not here."""
        joined = self._arrays.get(id)
        if joined is None or self._is_over(joined):
            raise self._unknown(id)
        if joined.learner.application != application:
            raise _foreign(id, joined.learner.application, application)
        return joined

    def take_rows(
        self, joined: JoinedRows, places: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], int]:
        """Return the positions in `places` of rows whose feedback has not come yet, each once, and
        the number of the others that have no prediction.
        """
        with self._lock:
            arrived = joined.arrived[places]
            fresh = arrived & ~joined.has_feedback[places]
            first = np.zeros(len(places), np.bool_)
            first[np.unique(places, return_index=True)[1]] = True
            fresh &= first
            joined.has_feedback[places[fresh]] = True
        return np.flatnonzero(fresh), int(np.count_nonzero(~arrived))

    def _unknown(self, id: str) -> UnknownPrediction:
        hint = (
            f"The server that answered remembers its last {self._size_max} answers, for"
            f" {self._window_s:g} s."
        )
        return UnknownPrediction(f"no prediction {id[:64]!r} is waiting for feedback.", hint=hint)


def _foreign(id: str, whose: str, application: str) -> UnknownPrediction:
    return UnknownPrediction(
        f"prediction {id!r} is one of application {whose!r}, not of {application!r}."
    )
