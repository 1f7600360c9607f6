"""The fast path: the core reads and writes HTTP, in threads that never take the GIL.

These requests are answered there: `POST /api/APP/predict` (and the original's `POST
/APP/predict`) with the body `{"input": [...]}`, also with a user, an SLO and a salt, and infer
requests whose rows are queries of their own, as JSON or binary.
A label of one answer, `POST /api/APP/feedback` with an id and a label, is read there, and learned
by a worker thread with the others that came in the same turn.
Which applications are eligible, frontend/fast_routes.py says. Answers given here wait for
feedback in a table of the core. Where queries need keys, the request has a valid one. The responses
are equal byte by byte to those of the Python path, and the fast path adds to the same counters
(serving/tally, metrics).

Queries to other applications whose models take the same rows of numbers are read there as well. The
event loop's thread schedules them, all that have come at once, and gives back what is to be sent
(`HttpServer.take`, `respond`).

Over TLS nothing differs: the core decrypts and encrypts (clipper_core.tls).

Any other request is handed over, with its connection, to frontend/http/connection.py. The
connection comes back after a few requests in a row that the fast path can answer. A query whose
result is not a plain prediction gets its response here, from its future, like any other query.
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from clipper.component import Health, Stop, Tasks, Worker
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.fast_routes import FastRoute, FastRoutes, FormOfRoute, FormsOfRoutes
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.exchange import Exchange
from clipper.frontend.http.http2 import CallReplies, MovedStream
from clipper.frontend.http.messages import (
    HttpError,
    HttpRequest,
    HttpResponse,
    WorkerTask,
    answer_json,
    to_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.tls import SecuredBy, tell_to_speak_tls
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import trace_of
from clipper.metrics import HttpCounts
from clipper.serving.feedback.ground_truth import truth_of
from clipper.serving.feedback.observe import learn_label_of, observe
from clipper.serving.query.processor import (
    ResolvedApplication,
    finish,
    predict,
)
from clipper.settings.http import HttpSettings, bodies_bytes
from clipper.types import UserValue
from clipper_core.engine.engine import Engine
from clipper_core.http.http_route import HotTable
from clipper_core.http.http_server import (
    Ending,
    Feedback,
    Gone,
    Handed,
    HttpServer,
    Late,
    Read,
    WithoutTls,
)
from clipper_core.results.future import Future
from clipper_core.runtime.histogram import Counter, LatencyHistogram

_log = logging.getLogger(__name__)
_FOREIGN = (
    b"transfer-encoding",
    b"content-encoding",
    b"expect",
    b"tracestate",
    b"origin",
)
_FEEDBACK = "/api/{}/feedback"
_INFER = "/v2/models/{}/infer"
_INFER_VERSION = "/v2/models/{}/versions/{}/infer"
_AGAIN_S = 0.02
_TOLD_MAX = 64  # feedback that a worker thread learns at once
_NOTHING = HttpResponse(204, b"")
_FORMS = FormsOfRoutes(
    (
        FormOfRoute("predict", "/api/{}/predict"),
        FormOfRoute("old_predict", "/{}/predict"),
        FormOfRoute("infer", _INFER),
        FormOfRoute("feedback", _FEEDBACK),
    ),
    (FormOfRoute("infer", _INFER_VERSION),),
    (FormOfRoute("infer", _INFER),),
)


def _predict(read: Read, row: UserValue) -> Future:
    """Schedule a row that the core has read."""
    subject: FastRoute = read.route.subject
    id = (read.id or read.tag[1:-1]).decode("ascii")
    user = read.user or None
    return predict(subject.resolved, row, user, read.slo_us, 0, None, id, (), read.band)


def _is_call(ending: Ending | Read) -> bool:
    """Return whether a query is that of a call of gRPC."""
    subject: FastRoute = ending.route.subject
    return subject.form == "call"


class _FastPathConnection:
    """The connection of one exchange, whose socket the compiled server has. give: sends a response,
    and says whether it is the last."""

    gone = False
    client = ""  # it is not known here

    def __init__(
        self, service: HttpService, request: HttpRequest, give: Callable[[bytes, bool], None]
    ) -> None:
        self.service, self._give = service, give
        self.exchange = Exchange(cast("HttpConnection", self), request, False)

    def flush(self) -> None:
        """Send the response, which is made."""
        self._give(self.exchange.data or b"", self.exchange.close)


def _learned_at_once(told: Feedback) -> bool | None:
    """Learn a label; return whether it counts. None, and nothing has changed: that may need an
    answer of another server, or of the store."""
    resolved: ResolvedApplication = told.route.subject.resolved
    counts = learn_label_of(resolved, told.answer, told.label)
    is_own = resolved.feedback.records is None and told.answer.startswith(f"{resolved.node}-")
    return _learned(told) if counts is None and is_own else counts


def _learned(told: Feedback) -> bool:
    """Learn a label as Python learns all; return whether it counts."""
    truth = truth_of(told.label, None, None)
    return observe(told.route.subject.resolved, told.answer, None, None, truth, 1.0)


class _FeedbackTurn:
    """Feedback that the core has read in a turn of the loop, and that a worker thread learns; it
    takes the place of an exchange. answer: called with whether one counts, or the error; None: it
    is to be learned as Python learns all."""

    def __init__(
        self,
        server: HttpServer,
        told: Sequence[Feedback],
        answer: Callable[[Feedback, bool | Exception | None], None],
    ) -> None:
        self._server = server
        self._told = told
        self._answer = answer
        self._rest: list[tuple[Feedback, bool | Exception | None]] = []

    def run(self) -> HttpResponse:
        """Learn what needs no wait for others, and answer it. Called on the worker thread."""
        for one in self._told:
            outcome: bool | Exception | None
            try:
                outcome = _learned_at_once(one)
            except Exception as error:
                outcome = error
            if not (isinstance(outcome, bool) and self._is_sent(one, outcome)):
                self._rest.append((one, outcome))
        return _NOTHING

    def _is_sent(self, one: Feedback, counts: bool) -> bool:
        try:
            self._server.respond_feedback(one, counts)
        except MemoryError:
            return False
        return True

    def settle(self, _: HttpResponse) -> None:
        """Answer the rest."""
        for one, outcome in self._rest:
            self._answer(one, outcome)

    def fail(self, error: Exception) -> None:
        """Answer all by an error: the threads have ended."""
        for one in self._told:
            self._answer(one, error)


class FastPath:
    """The fast path of one listener, and its threads: a RouteDoor.

    http: the settings of its connections. routes: of its requests; None: it has calls of gRPC
    alone. keys: of which every query needs one; None: none is needed. secured: the certificate of
    all connections; None: they are without TLS. Threads: open, check and drain on the event loop;
    stop from one.
    """

    forms = _FORMS

    def __init__(
        self,
        node: ServerInterface,
        http: HttpSettings,
        routes: HttpRouter | None,
        counts: HttpCounts,
        engines: Sequence[Engine],
        keys: ApiKeys | None = None,
        secured: SecuredBy | None = None,
    ) -> None:
        self._secured = secured
        self._keys = keys
        self._node, self._routes, self.counts = node, routes, counts
        self.core_server = HttpServer(
            engines,
            http.workers,
            secrets.token_hex(6).encode(),
            header_s=http.header_s,
            idle_s=http.idle_s,
            connections_max=http.connections_max,
            header_bytes_max=http.header_bytes_max,
            body_bytes_max=http.body_bytes_max,
            pipeline_max=http.pipeline_max,
            unsent_bytes_max=http.unsent_bytes_max,
            finish=finish,
            encode=to_json,
            bodies_bytes_max=bodies_bytes(http),
            tls=None if secured is None else secured.context,
            handshakes=() if secured is None else secured.counters,
        )
        # a wait for the disk is shared by threads that wait at the same time
        self._told_at_once = 1 if node.config.feedback.journal == "fsync" else _TOLD_MAX
        self._workers = [self._worker(i) for i in range(http.workers)]
        self._fast: FastRoutes | None = None
        self._adopting = Tasks("the fast path")
        # by ticket: queries that the core has read
        self._scheduled: dict[int, tuple[Ending | Read, list[Future]]] = {}
        self._calls: CallReplies | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: HttpService
        self._listener: socket.socket

    def open(
        self, loop: asyncio.AbstractEventLoop, service: HttpService, listener: socket.socket
    ) -> None:
        """Start listening. `service` handles the requests that are not eligible."""
        self._loop, self._service, self._listener = loop, service, listener
        service.core_server, service.is_plain = self.core_server, self._is_plain
        service.bodies.core_server = self.core_server
        self.counts.held = lambda: self.core_server.connections
        if self._routes is not None:
            self._fast = FastRoutes(self._node, self, self._keys, service.access_log)
            self._fast.open()
        if service.calls is not None:
            self._calls = service.calls.serve_in(self.core_server)
        loop.add_reader(self.core_server.fd, self._take)
        self.core_server.listen(os.dup(listener.fileno()))
        for worker in self._workers:
            worker.start()

    def _worker(self, number: int) -> Worker:
        def run(stop: Stop) -> None:
            self.core_server.run(number)

        return Worker("clipper-http-core", run, vital=True)

    def health(self) -> list[Health]:
        """Return the state of the threads of the core."""
        return [worker.health() for worker in self._workers]

    # -- the table

    def takes(self, route: FastRoute) -> bool:
        """Return whether requests for this route get here."""
        return self._leads_to(route.path) == route.pattern

    def counts_of(self, route: FastRoute) -> tuple[Counter, LatencyHistogram]:
        """Return what counts its requests that are answered, and their durations."""
        row = self.counts.row("POST", route.pattern)
        return row.ok, row.durations

    def refusals_of(self, route: FastRoute) -> tuple[Counter | None, Counter | None]:
        """Return what counts its requests that their key does not allow."""
        row = self.counts.row("POST", route.pattern)
        return row.forbidden, row.limited

    def set_table(self, table: HotTable) -> None:
        """Answer requests by these routes from now on. Raises MemoryError."""
        self.core_server.set_table(table)

    def _leads_to(self, path: bytes) -> str:
        assert self._routes is not None
        request = HttpRequest("POST", path, b"", {}, b"")
        with contextlib.suppress(HttpError):
            self._routes.find(request)
        return request.route

    def _is_plain(self, request: HttpRequest) -> bool:
        return (
            self._fast is not None
            and request.method == "POST"
            and request.path in self._fast.table
            and not request.query
            and not any(name in request.headers for name in _FOREIGN)
            and not (self._fast.logs and request.trace is not None and request.trace.sampled)
        )

    def check(self) -> None:
        """Free former tables, and take what has changed. Called at regular intervals."""
        self.core_server.sweep()
        if self._secured is not None and self._secured.refresh():
            self.core_server.set_tls(self._secured.context)
        if self._fast is not None:
            self._fast.check()

    # -- what comes out

    def _take(self) -> None:
        told = []
        for item in self.core_server.take():
            if isinstance(item, Handed):
                self._note_moved(item)
                self._adopt(item)
            elif isinstance(item, WithoutTls):
                self._adopting.spawn(self._refuse(socket.socket(fileno=item.fd)))
            elif isinstance(item, Read):
                self._schedule(item)
            elif isinstance(item, Feedback):
                told.append(item)
            elif isinstance(item, Gone):
                self._cancel(item.ticket)
            elif isinstance(item, Late):
                self._send_late(item)
            else:
                self._await(item, item.futures)
        for first in range(0, len(told), self._told_at_once):
            self._learn(told[first : first + self._told_at_once])

    def _learn(self, told: Sequence[Feedback]) -> None:
        """Have a worker thread learn feedback."""
        turn = _FeedbackTurn(self.core_server, told, self._answer_feedback)
        self._service.run(WorkerTask(turn.run), turn)

    def _answer_feedback(self, told: Feedback, outcome: bool | Exception | None) -> None:
        """Answer feedback by whether it counts, or by an error. None: learn it first, as Python
        learns all."""
        exchange = self._exchange(told)
        if outcome is None:
            learn = functools.partial(_learned, told)
            exchange.settle(WorkerTask(lambda: answer_json({"counted": learn()})))
        elif isinstance(outcome, Exception):
            exchange.fail(outcome)
        else:
            exchange.answer(answer_json({"counted": outcome}))

    def _adopt(self, handed: Handed) -> None:
        line = socket.socket(fileno=handed.fd)
        self._adopting.spawn(self._connect(handed, line))

    async def _connect(self, handed: Handed, line: socket.socket) -> None:
        make = functools.partial(HttpConnection, self._service, handed)
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.connect_accepted_socket(make, line)
            connection.pause_again()
        except OSError as error:  # the connection was lost during the handover
            _log.debug("a connection was lost: %s", error)
            line.close()
            self._drop_calls(handed)

    def _drop_calls(self, handed: Handed) -> None:
        """Cancel the calls of a connection that was lost on its way."""
        if handed.http2 is not None and self._service.calls is not None:
            self._service.calls.drop(handed.http2)
        for ticket, _ in handed.queries:
            if (moved := self._service.moved.get(ticket)) is not None:
                moved.lose()

    async def _refuse(self, line: socket.socket) -> None:
        """Tell a client to speak TLS."""
        with line, contextlib.suppress(OSError):
            await tell_to_speak_tls(line, self._service)

    def _schedule(self, read: Read) -> None:
        """Answer a query that the core has read, once its models have."""
        try:
            if read.error is not None:
                raise read.error
            futures = [
                _predict(read, row) if future is None else future
                for future, row in zip(read.futures, read.rows, strict=True)
            ]
        except Exception as error:
            self._end(read, (), error)
            return
        self._await(read, futures)

    def _await(self, read: Ending | Read, futures: list[Future]) -> None:
        """Answer a query once its futures are done."""
        self._scheduled[read.ticket] = read, futures
        self._wait(read, iter(futures))

    def _wait(self, read: Ending | Read, rest: Iterator[Future], _: Future | None = None) -> None:
        """Wait for one future of a query after another: when one is done, those done meanwhile need
        no wait."""
        again = functools.partial(self._wait, read, rest)
        if not any(self._service.watcher.on_done(future, again) for future in rest):
            self._done(read)

    def _done(self, read: Ending | Read) -> None:
        """Answer a query whose futures are done, unless its client is gone."""
        _, futures = self._scheduled.pop(read.ticket, (read, None))
        if futures is None:
            return
        if isinstance(read, Ending) or not self.core_server.respond(read, futures):
            self._end(read, futures)

    def _cancel(self, ticket: int) -> None:
        """Cancel a query for which nobody waits. Nothing happens if it is answered."""
        read, futures = self._scheduled.pop(ticket, (None, []))
        for future in futures:
            future.cancel()
        if read is not None and _is_call(read) and self._calls is not None:
            self._calls.note_cancelled(read)

    def _end(
        self, ending: Ending | Read, futures: Sequence[Future], error: Exception | None = None
    ) -> None:
        """Answer a query whose futures are done, or by an error."""
        if _is_call(ending):
            assert self._calls is not None
            self._reply(ending, *self._calls.reply_of(ending, futures, error))
            return
        subject: FastRoute = ending.route.subject
        exchange = self._exchange(ending)
        try:
            if error is not None:
                raise error
            response = subject.respond(ending, futures)
        except Exception as failure:
            exchange.fail(failure)
        else:
            exchange.answer(response)

    def _reply(
        self,
        call: Ending | Read,
        message: bytes | None,
        trailers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Send the reply to a call; try again in a moment when the core has no memory."""
        try:
            self.core_server.reply(call.worker, call.ticket, message, trailers)
        except MemoryError:
            loop = asyncio.get_running_loop()
            loop.call_later(_AGAIN_S, self._reply, call, message, trailers)

    # -- queries whose connection has come here before their answers

    def _note_moved(self, handed: Handed) -> None:
        """Let the queries of a connection be answered on its streams: the core returns what comes
        for them by their tickets."""
        for ticket, _ in handed.queries:
            read, _ = self._scheduled.get(ticket, (None, []))
            calls = self._calls if read is not None and _is_call(read) else None
            if calls is not None:
                calls.note_moved(1)
            ended = functools.partial(self._end_moved, ticket, calls)
            self._service.moved[ticket] = MovedStream(ended)

    def _end_moved(self, ticket: int, calls: CallReplies | None) -> None:
        """Forget a query whose stream has ended. calls: its call was counted there."""
        del self._service.moved[ticket]
        if calls is not None:
            calls.note_moved(-1)
        self._cancel(ticket)

    def _send_late(self, late: Late) -> None:
        """Send a reply that has missed its connection in the core."""
        if (moved := self._service.moved.get(late.ticket)) is not None:
            moved.send(late)

    def _exchange(self, ending: Ending | Read | Feedback) -> Exchange:
        """Return the exchange of a request that the core has read."""
        subject: FastRoute = ending.route.subject
        headers = {b"x-request-id": ending.id} if ending.id else {}
        request = HttpRequest("POST", subject.path, b"", headers, b"")
        request.route, request.began_ns = subject.pattern, ending.began_ns
        request.trace = trace_of(ending.trace) if ending.trace else None
        give = functools.partial(self._give, ending)
        return _FastPathConnection(self._service, request, give).exchange

    def _give(self, ending: Ending | Read | Feedback, response: bytes, close: bool) -> None:
        """Give it to the compiled server; try again in a moment when that has no memory."""
        try:
            self.core_server.answer(ending.worker, ending.ticket, response, close)
        except MemoryError:
            loop = asyncio.get_running_loop()
            loop.call_later(_AGAIN_S, self._give, ending, response, close)

    # -- the end

    @property
    def is_busy(self) -> bool:
        """True while connections are open or being handed over."""
        core_server = self.core_server
        return (
            core_server.connections > 0
            or core_server.relays > 0
            or core_server.handing > 0  # after the others: a connection goes there from them
            or bool(self._adopting)
        )

    def drain(self) -> None:
        """Accept no new connections, and close each one after its responses."""
        self._listener.close()
        self.core_server.drain()

    def close(self) -> None:
        """Stop receiving events of the core. Called on the event loop when it ends."""
        if self._fast is not None:
            self._fast.close()
        if self._loop is not None:
            self._loop.remove_reader(self.core_server.fd)

    def stop(self) -> None:
        """Join the threads and close the remaining connections. The event loop has ended."""
        self.core_server.stop()
        for worker in self._workers:
            worker.end()
        for item in self.core_server.take():
            if isinstance(item, Handed):
                self._drop_calls(item)
            if isinstance(item, Handed | WithoutTls):
                os.close(item.fd)
