"""Calls of models: a model asks for the predictions of another one, or for the answers of an
application, while it evaluates a batch (docs/async.md).

One thread reads the calls of all engines, schedules them as queries of this process, and sends the
answers of those that are done. Nothing waits there: each row is a query of its own. So no call
waits for another, and a caller that waits holds only its own container.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import msgspec

from clipper.catalog.view import View
from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import (
    CallsExceeded,
    CircularCall,
    ClipperError,
    InvalidInput,
    UnknownModel,
    UnlistedCall,
)
from clipper.types import Answer, Model, UserValue, VersionedModel
from clipper_container.wire.call_values import pack_call, unpack_call
from clipper_container.wire.frames import BadFrame
from clipper_core.engine.engine import Engine
from clipper_core.results.future import Future, MailboxReader
from clipper_core.scheduling.scheduler import EngineEvent

_log = logging.getLogger(__name__)
CALL_ROWS_MAX: Final = 4096  # of one call
TARGET_CHARS_MAX: Final = 300
_KINDS: Final = ("app", "model")


class CallRequest(msgspec.Struct, frozen=True):
    """The payload of a CALL (docs/wire.md). rows: an input, or with `many` a list or an array of
    inputs."""

    to: str
    rows: object = None
    many: bool = False
    left_us: int = 0
    user: str = ""


def parse_target(text: str) -> tuple[str, str]:
    """Return kind and name of `app:NAME`, `model:NAME` or `model:NAME:VERSION`. Raises
    InvalidInput."""
    kind, _, name = text.partition(":")
    if kind not in _KINDS or not name or len(text) > TARGET_CHARS_MAX:
        raise InvalidInput(
            f"{text[:100]!r} cannot be called.", hint="Write app:NAME, model:NAME or NAME:VERSION."
        )
    return kind, name


class CallGraph:
    """Which models and applications call which, by the `calls` of the catalog. Threads: one.

    depth_max: of a chain of calls.
    """

    def __init__(self, depth_max: int) -> None:
        self._depth_max = depth_max
        self._view: View | None = None
        self._depths: dict[tuple[str, str], int] = {}

    def check(self, view: View, caller: Model, target: str) -> None:
        """Raise UnlistedCall if the caller does not list a target, CircularCall if that would call
        the caller, in the end, and CallsExceeded if the chain is too long."""
        if target not in caller.calls:
            listed = ", ".join(caller.calls) or "nothing"
            raise UnlistedCall(
                f"model '{caller.id}' may not call {target}: its calls are {listed}.",
                hint=f'Deploy it with calls=["{target}"].',
            )
        if view is not self._view:
            self._view = view
            self._depths.clear()
        known = self._depths.get((caller.name, target))
        depth = self._depth(view, target, (caller.name,), {}) if known is None else known
        self._depths[caller.name, target] = depth
        if depth > self._depth_max:
            raise CallsExceeded(
                f"a call of {target} by '{caller.id}' is one of a chain of {depth}; the limit is"
                f" limits.call_depth_max = {self._depth_max}."
            )

    def _depth(self, view: View, target: str, chain: tuple[str, ...], known: dict[str, int]) -> int:
        """Return the length of the longest chain of calls that begins with this one.

        chain: the models before it. known: the lengths that were found before; a circle through
        one of these would have been found with it.
        """
        if target in known:
            return known[target]
        deepest = 0
        for name in _models_of(view, target):
            if name in chain:
                ring = " -> ".join((*chain[chain.index(name) :], name))
                raise CircularCall(
                    f"{target} cannot be called: the calls go in a circle, {ring}.",
                    hint="Remove one of them from the calls of its model.",
                )
            if len(chain) > self._depth_max:
                break  # deep enough to be refused
            for model in view.versions.get(name, ()):
                for each in () if model.retired_us else model.calls:
                    deepest = max(deepest, self._depth(view, each, (*chain, name), known))
        known[target] = deepest + 1
        return deepest + 1


def _models_of(view: View, target: str) -> list[str]:
    """Return the names of the models that a call of a target may query."""
    kind, name = parse_target(target)
    if kind == "model":
        return [name.partition(":")[0]]
    record = view.applications.get(name)
    return [] if record is None else [link.name for link in record.models]


@dataclass(slots=True)
class _OpenCall:
    """A call whose queries are under way. left: how many of them."""

    engine: Engine
    conn: int
    id: int
    is_app: bool
    many: bool
    futures: list[Future]
    left: int


class ModelCalls:
    """Schedules the calls of models, and sends their answers. Threads: any.

    view: returns the catalog's present view. caller_of: returns the model of a connection, None if
    it has gone. model, app: return the handle of one by its name.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        depth_max: int,
        view: Callable[[], View],
        caller_of: Callable[[Engine, int], VersionedModel | None],
        model: Callable[[str], UserValue],
        app: Callable[[str], UserValue],
    ) -> None:
        self._engines = tuple(engines)
        self._graph = CallGraph(depth_max)
        self._view = view
        self._caller_of = caller_of
        self._model = model
        self._app = app
        self._open: dict[tuple[Engine, int, int], _OpenCall] = {}
        # of the calls that are open
        self._guard = threading.Lock()
        # with several engines, only the future itself knows whose it is
        self._mailbox: MailboxReader | None = None
        if len(self._engines) == 1:
            self._mailbox = MailboxReader(self._engines[0].completion)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopping = False
        self._worker = Worker("clipper-calls", self._run, again=Backoff(0.01, 1.0), vital=True)

    def start(self) -> None:
        """Start the thread. Raises NotStarted."""
        self._worker.start()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._worker.request_stop()
        os.eventfd_write(self._wake, 1)
        if self._worker.end():
            os.close(self._wake)

    def _run(self, stop: Stop) -> None:
        poll = select.poll()
        for engine in self._engines:
            poll.register(engine.calls_fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        if self._mailbox is not None:
            poll.register(self._mailbox.fd, select.POLLIN)
        while not self._stopping:
            poll.poll()
            if self._mailbox is not None:
                for _, call in self._mailbox.drain():
                    self._ended(call)
            for engine in self._engines:
                for kind, conn, id, payload in engine.calls():
                    self._handle(engine, kind, conn, id, payload)

    def _handle(
        self, engine: Engine, kind: EngineEvent, conn: int, id: int, payload: bytes
    ) -> None:
        if kind is EngineEvent.CALL_RECEIVED:
            try:
                self._begin(engine, conn, id, payload)
            except (ClipperError, BadFrame, msgspec.ValidationError) as error:
                self._refuse(engine, conn, id, error)
            except Exception as error:  # of one call, which must not stop the others
                _log.exception("a call of connection %d could not be scheduled", conn)
                self._refuse(engine, conn, id, error)
            return
        with self._guard:
            gone = [
                call
                for at, call in self._open.items()
                if at[:2] == (engine, conn) and (kind is EngineEvent.DISCONNECTED or at[2] == id)
            ]
        for call in gone:
            for future in call.futures:
                future.cancel()

    def _begin(self, engine: Engine, conn: int, id: int, payload: bytes) -> None:
        call = msgspec.convert(unpack_call(payload), CallRequest)
        kind, name = parse_target(call.to)
        who, view = self._caller_of(engine, conn), self._view()
        caller = None if who is None else view.record(who)
        if caller is None:
            raise UnknownModel("the model of this container has gone.")
        self._graph.check(view, caller, call.to)
        rows = _rows_of(call)
        slo_ms = max(0.001, call.left_us / 1000)
        futures = []
        if kind == "app":
            app = self._app(name)
            for row in rows:
                futures.append(app.predict(row, user=call.user or None, slo_ms=slo_ms))
        else:
            model = self._model(name)
            for row in rows:
                futures.append(model.predict(row, slo_ms=slo_ms))
        one = _OpenCall(engine, conn, id, kind == "app", call.many, futures, len(futures))
        with self._guard:
            self._open[engine, conn, id] = one
        for future in futures:
            self._watch(future, one)
        if not futures:
            self._answer(one)

    def _watch(self, future: Future, call: _OpenCall) -> None:
        """Have a query of a call counted when it is done, which it may be."""
        if self._mailbox is None:
            future.add_done_callback(partial(self._ended, call))
        elif not self._mailbox.add(future, call):
            self._ended(call)

    def _ended(self, call: _OpenCall, _: Future | None = None) -> None:
        """Count a query that is done; the last one sends the answer."""
        with self._guard:
            call.left -= 1
            is_last = call.left == 0
        if is_last:
            self._answer(call)

    def _answer(self, call: _OpenCall) -> None:
        with self._guard:
            self._open.pop((call.engine, call.conn, call.id), None)
        try:
            found = [future.result(0) for future in call.futures]
            outputs = [_app_answer(each) for each in found] if call.is_app else found
            fields = {
                "outputs": outputs if call.many else outputs[0],
                "app": call.is_app,
                "many": call.many,
            }
            self._send(call.engine, call.conn, call.id, pack_call(fields))
        except Exception as error:
            self._refuse(call.engine, call.conn, call.id, error)

    def _refuse(self, engine: Engine, conn: int, id: int, error: Exception) -> None:
        code = error.slug if isinstance(error, ClipperError) else "invalid-input"
        self._send(engine, conn, id, pack_call({"error": str(error)[:4096], "code": code}))

    def _send(self, engine: Engine, conn: int, id: int, payload: bytes) -> None:
        try:
            engine.send_answer(conn, id, payload)
        except Exception:
            _log.exception("the answer to a call could not be sent")
            # its model must not wait forever
            engine.disconnect(conn)


def _rows_of(call: CallRequest) -> Sequence[UserValue]:
    """Return the inputs of a call. Raises InvalidInput, CallsExceeded."""
    if not call.many:
        return (call.rows,)
    if not hasattr(call.rows, "__len__") or isinstance(call.rows, str | bytes | dict):
        raise InvalidInput("predict_many takes a list or an array of inputs.")
    rows = cast(Sequence[UserValue], call.rows)
    if len(rows) > CALL_ROWS_MAX:
        raise CallsExceeded(f"a call of {len(rows)} rows; at most {CALL_ROWS_MAX} are taken.")
    return rows


def _app_answer(answer: Answer) -> dict[str, object]:
    return {
        "output": answer.output,
        "confidence": answer.confidence,
        "is_default": answer.is_default,
        "reason": answer.reason,
        "id": answer.id,
    }
