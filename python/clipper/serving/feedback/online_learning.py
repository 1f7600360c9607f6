"""Feedback for models that learn themselves: containers whose model has `correct()`. It is sent
after the acknowledgement.

Feedback is sent to every connected replica of each model whose prediction arrived (to one of them,
in turn, where they learn into tables that all of them read), at most once: the journal is for the
policies, and is not sent to models after a crash; what a container has not taken when it dies, or
what does not fit the bounds, is gone, and counted. Predictions come first everywhere: here feedback
waits for a thread that has time, on the link for a moment without batches, in the container for one
without queries.

A model may also take sessions: then whose query it is travels with the row, as a number, and is
part of the key of the cache.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from clipper.errors import ClipperError
from clipper.selection import Observation
from clipper.types import UserValue, VersionedModel
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model as CoreModel
from clipper_core.runtime.histogram import Gauge
from clipper_core.wire.codec import encode_feedback

_log = logging.getLogger(__name__)
FRAME_ROWS_MAX = 64  # of one call of correct(), while which the container predicts nothing
_FRAME_BYTES = 1 << 20
_ENTRY_BYTES = 200  # what keeping an input costs beside its bytes

FeedbackUpdate = tuple[UserValue, UserValue, int]  # input, label, session


class HelloCapabilities(Protocol):
    """Facts that a container reports in its HELLO: serving.models.containers.Hello."""

    @property
    def corrects(self) -> bool:
        """Return whether the model has `correct()`."""

    @property
    def sessions(self) -> bool:
        """Return whether the model takes sessions."""

    @property
    def tables(self) -> bool:
        """Return whether the model learns in tables of parameter shards."""

    @property
    def id(self) -> VersionedModel:
        """Return the version that the container serves."""


class OnlineLearning:
    """Threads: any; came, went and flush: one. `wake_fd` is readable when flush() has something to
    do.

    rows_max: feedback that waits, of each model.  bytes_max: inputs kept for feedback by a
    prediction's id.  frame_bytes_max: of one frame.
    """

    def __init__(
        self, rows_max: int = 4096, bytes_max: int = 64 << 20, frame_bytes_max: int = 64 << 20
    ) -> None:
        # not 0 while there is a container that learns, or takes sessions
        self.is_teaching = Gauge()
        self.wake_fd = -1
        self._rows_max, self._bytes_max, self._frame_bytes_max = (
            rows_max,
            bytes_max,
            frame_bytes_max,
        )
        self._lines: dict[VersionedModel, list[tuple[Engine, int]]] = {}
        self._together: dict[
            VersionedModel, itertools.count[int]
        ] = {}  # those that learn into tables which all replicas read
        self._sessions: dict[tuple[Engine, int], VersionedModel] = {}
        self._session_models: frozenset[VersionedModel] = frozenset()
        self._guard = threading.Lock()
        self._stored: OrderedDict[int, tuple[UserValue, int, int]] = (
            OrderedDict()
        )  # by the future's id: input, session, bytes
        self._stored_bytes = 0
        self._waiting: dict[VersionedModel, tuple[CoreModel, deque[FeedbackUpdate]]] = {}
        self._pending: dict[VersionedModel, int] = {}

    def open(self) -> None:
        """Open the event descriptor `wake_fd`."""
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Close the event descriptor. Idempotent."""
        with self._guard:
            if self.wake_fd >= 0:
                os.close(self.wake_fd)
            self.wake_fd = -1

    # -- containers that come and go

    def came(self, engine: Engine, conn: int, hello: HelloCapabilities) -> None:
        """Add a container that has connected."""
        if hello.corrects:
            self._lines[hello.id] = [*self._lines.get(hello.id, ()), (engine, conn)]
            if hello.tables:
                self._together.setdefault(hello.id, itertools.count())
        if hello.sessions:
            self._sessions[engine, conn] = hello.id
        self._check()

    def went(self, engine: Engine, conn: int, model: VersionedModel) -> None:
        """Remove a container that has disconnected."""
        left = [line for line in self._lines.get(model, ()) if line != (engine, conn)]
        if left:
            self._lines[model] = left
        else:
            self._lines.pop(model, None)
            self._together.pop(model, None)
        self._sessions.pop((engine, conn), None)
        self._check()

    @property
    def active(self) -> bool:
        """Return whether there is a container that learns, or takes sessions."""
        return bool(self.is_teaching.value)

    def _check(self) -> None:
        self._session_models = frozenset(self._sessions.values())
        self.is_teaching.value = int(bool(self._lines or self._sessions))

    # -- queries

    def teaches(self, models: Sequence[VersionedModel]) -> bool:
        """Return whether a container of one of these models learns from feedback itself."""
        return not self._lines.keys().isdisjoint(models)

    def session(self, models: Sequence[VersionedModel], user: str | None, salt: int) -> int:
        """Return the salt of a query: the user's session where one of the models takes sessions,
        else as it was."""
        if not user or self._session_models.isdisjoint(models):
            return salt
        return session_of(f"{user}\0{salt}" if salt else user)

    def keep(self, models: Sequence[VersionedModel], id: int, x: object, session: int) -> None:
        """Remember the input of a query for feedback by its id, if a model of these learns."""
        if not self.teaches(models):
            return
        stored, size = _copied(x)
        size += _ENTRY_BYTES
        with self._guard:
            self._stored[id] = stored, session, size
            self._stored_bytes += size
            while self._stored_bytes > self._bytes_max:
                _, (_, _, size) = self._stored.popitem(last=False)
                self._stored_bytes -= size

    # -- feedback

    def send_for(
        self, cores: Mapping[VersionedModel, CoreModel], id: str, seen: Observation
    ) -> None:
        """Send feedback about the prediction of that id; nothing when its input is kept no more."""
        with self._guard:
            stored = self._stored.pop(int(id.rpartition("-")[2], 16), None)
            self._stored_bytes -= stored[2] if stored else 0
        if stored:
            self.send(cores, stored[0], stored[1], seen)

    def send(
        self,
        cores: Mapping[VersionedModel, CoreModel],
        input: object,
        session: int,
        seen: Observation,
    ) -> None:
        """Queue feedback about an input for every model that predicted it and learns. Only feedback
        that names the right output."""
        label = (
            seen.truth.label
            if seen.truth.label is not None
            else seen.answer
            if seen.truth.score == 1
            else None
        )
        pupils = [model for model in seen.predictions if model in self._lines]
        if label is None or not pupils:
            return
        with self._guard:
            for model in pupils:
                _, waiting = self._waiting.setdefault(model, (cores[model], deque()))
                if len(waiting) >= self._rows_max:
                    self._count_pending(model, 1)
                else:
                    waiting.append((input, label, session))
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def _count_pending(self, model: VersionedModel, rows: int) -> None:
        self._pending[model] = self._pending.get(model, 0) + rows

    def pending(self, model: VersionedModel) -> int:
        """Return how many rows of feedback were dropped here."""
        return self._pending.get(model, 0)

    def flush(self) -> None:
        """Hand all feedback that waits to the engines, in frames."""
        with self._guard:
            if self.wake_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wake_fd)
            feedback, self._waiting = self._waiting, {}
        for model, (core, updates) in feedback.items():
            for frame in _frames(core, updates, self._frame_bytes_max):
                self._send(model, core, frame)

    def _send(
        self, model: VersionedModel, core: CoreModel, updates: Sequence[FeedbackUpdate]
    ) -> None:
        try:
            inputs, labels, sessions = zip(*updates, strict=True)
            payload = encode_feedback(_inputs(core, inputs), _labels(labels), sessions)
            if len(payload) > self._frame_bytes_max:
                raise ValueError(
                    f"they are {len(payload)} bytes; a frame has at most {self._frame_bytes_max}"
                )
            lines = self._lines.get(model, ())
            if lines and (turn := self._together.get(model)):
                lines = [lines[next(turn) % len(lines)]]
            for engine, conn in lines:
                engine.send_feedback(conn, payload, len(updates))
        except (ClipperError, ValueError, TypeError, OverflowError) as error:
            with self._guard:
                self._count_pending(model, len(updates))
            _log.warning(
                "%d rows of feedback cannot be sent to model %s: %s", len(updates), model, error
            )


def session_of(user: str) -> int:
    """Return the number by which a container knows a user: as clipper_container.session_of."""
    return (
        int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "little")
        if user
        else 0
    )


def _copied(x: object) -> tuple[UserValue, int]:
    """Return a copy of an input, which its owner may change later, and its bytes."""
    if isinstance(x, str):
        return x, len(x)
    if isinstance(x, Mapping):
        copies = {name: _copied(value) for name, value in x.items()}
        return {name: copy for name, (copy, _) in copies.items()}, sum(
            size for _, size in copies.values()
        )
    if isinstance(x, bytes | bytearray | memoryview):
        return bytes(x), len(x)
    array = np.array(x)
    return array, array.nbytes


def _frames(
    core: CoreModel, updates: Iterable[FeedbackUpdate], bytes_max: int
) -> Iterable[list[FeedbackUpdate]]:
    """Yield the updates in order, cut where the type of labels changes, and by rows and bytes."""
    for _, alike in itertools.groupby(updates, key=lambda update: _kind(update[1])):
        frame: list[FeedbackUpdate] = []
        size = 0
        for update in alike:
            nbytes = _copied(update[0])[1] + np.asarray(update[1]).nbytes
            if frame and (
                len(frame) == FRAME_ROWS_MAX or size + nbytes > min(_FRAME_BYTES, bytes_max // 2)
            ):
                yield frame
                frame, size = [], 0
            frame.append(update)
            size += nbytes
        yield frame


def _kind(label: object) -> UserValue:
    if isinstance(label, np.ndarray):
        return label.dtype, label.shape
    return "number" if isinstance(label, bool | int | float) else type(label)


def _inputs(core: CoreModel, inputs: Sequence[UserValue]) -> UserValue:
    """Return the rows in the form that the model takes."""
    if core.tensors is not None:
        records = core.tensors.pack_many(inputs)
        return records if core.tensors.is_fixed else [*map(bytes, records)]
    if core.dtype is None:
        return [x if isinstance(x, str) else bytes(x) for x in inputs]
    if core.shape == (-1,):
        return [np.asarray(x, core.dtype) for x in inputs]
    return np.stack([np.asarray(x, core.dtype) for x in inputs])


def _labels(labels: Sequence[object]) -> UserValue:
    if isinstance(labels[0], str | bytes):
        return list(labels)
    found = np.asarray(labels)
    if found.dtype == object:
        raise ValueError(f"labels such as {labels[0]!r} do not travel")
    return found
