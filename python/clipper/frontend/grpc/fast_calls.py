"""Calls of ModelInfer that the core answers (clipper_core.http.hot_calls).

They are the calls for what the fast path of HTTP answers without Python (fast_routes.py), and are
counted with the others. A query that ends in anything but a plain prediction gets its answer
here, from its futures.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.fast_routes import FastRoute, FastRoutes, FormOfRoute, FormsOfRoutes
from clipper.frontend.grpc.call_stream import Fields, fields_of, trailers_of
from clipper.frontend.grpc.calls import code_name, ending_of
from clipper.frontend.grpc.inference import SERVICE
from clipper.frontend.http.http2 import Http2Connection
from clipper.frontend.inference import protobuf_codec
from clipper.frontend.inference.operations import InferenceTarget, PendingInference
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import trace_of
from clipper.metrics import GrpcCounts
from clipper.serving.query.future_watcher import Future, FutureWatcher
from clipper.serving.query.processor import finish, predict
from clipper.types import UserValue
from clipper_core.engine.engine import Engine
from clipper_core.http.hot_calls import HotCalls, HotEnding, HotRead
from clipper_core.http.http2_protocol import Http2Protocol
from clipper_core.http.http_route import HotTable
from clipper_core.http.http_server import Ending, HttpServer, Read
from clipper_core.runtime.histogram import Counter, LatencyHistogram

_CHECK_S = 0.5
_OK = ((b"grpc-status", b"0"),)
_CALL = FormOfRoute("call", "{}")
_FORMS = FormsOfRoutes((_CALL,), (FormOfRoute("call", "{}/{}"),), (_CALL,))


class FastCalls:
    """The calls that the core answers: a RouteDoor. Threads: the event loop's; what a RouteDoor has
    is for any.

    engines: of the models. counts: of all calls. keys: of which every call needs one; None: none is
    needed. watcher: of queries that Python schedules.
    """

    forms = _FORMS

    def __init__(
        self,
        node: ServerInterface,
        engines: Sequence[Engine],
        counts: GrpcCounts,
        keys: ApiKeys | None,
        access_log: AccessLog,
        watcher: FutureWatcher,
    ) -> None:
        config = node.config
        self._watcher = watcher
        self._counts = counts
        self._method = counts.method(SERVICE, "ModelInfer", False)
        self._calls = HotCalls(
            engines,
            calls_max=config.grpc.calls_max,
            message_bytes_max=config.grpc.message_bytes_max,
            way_back_us=round(config.grpc.way_back_ms * 1000),
            slo_us_max=round(config.limits.slo_ms_max * 1000),
            finish=finish,
            cancelled=self._method.cancelled,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = threading.Lock()
        self._core_server: HttpServer | None = None
        self._ping_us_min = round(config.grpc.ping_s_min * 1e6)
        self._routes = FastRoutes(node, self, keys, access_log)
        counts.add_core(self._calls)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer calls on the event loop."""
        self._loop = loop
        self._routes.open()
        self._check()
        for fd in self._calls.fds:
            loop.add_reader(fd, self._tell_news)

    def close(self) -> None:
        """Wait for no query any more. The connections are closed. Idempotent."""
        self._routes.close()
        if self._loop is not None:
            for fd in self._calls.fds:
                self._loop.remove_reader(fd)
            self._loop = None

    def _check(self) -> None:
        """Take what has changed of the models, again and again."""
        if self._loop is not None:
            self._loop.call_later(_CHECK_S, self._check)
            self._calls.sweep()
            self._routes.check()

    # -- routes: by the name of a model, or its name and version with a slash between them

    def takes(self, route: FastRoute) -> bool:
        """Return whether calls for this route get here."""
        return True

    def counts_of(self, route: FastRoute) -> tuple[Counter, LatencyHistogram]:
        """Return what counts calls that are answered, and their durations."""
        return self._method.ok, self._method.durations

    def refusals_of(self, route: FastRoute) -> tuple[Counter | None, Counter | None]:
        """Return what counts calls that their key does not allow: Python has them, and counts."""
        return None, None

    def set_table(self, table: HotTable) -> None:
        """Answer calls by these routes from now on."""
        with self._guard:
            self._calls.set_table(table)
            if self._core_server is not None:
                self._core_server.set_calls_table(table)

    # -- calls

    def take(self, connection: Http2Connection) -> bool:
        """Answer calls among the events that have come. Return whether there were any."""
        if not self._calls.take(connection.protocol, connection):
            return False
        if self._calls.has_news:
            self._tell_news()
        return True

    def lose(self, connection: Http2Connection) -> None:
        """Give up the calls of a connection that is gone."""
        self._calls.lose(connection.protocol)

    def give(self, connection: Http2Connection) -> None:
        """Let the calls go with their connection."""
        self._calls.give(connection.protocol)

    def adopt(self, connection: Http2Connection) -> None:
        """Take the calls that have come with their connection."""
        self._calls.adopt(connection.protocol, connection)
        if self._calls.has_news:
            self._tell_news()

    def drop(self, protocol: Http2Protocol) -> None:
        """Cancel the calls of a connection that was lost before they were adopted."""
        self._calls.drop(protocol)

    def serve_in(self, core_server: HttpServer) -> "FastCalls":
        """Let a server of the core answer calls on its own connections. Return this, which answers
        those that it gives to Python (CallReplies)."""
        core_server.serve_calls(self._calls, self._ping_us_min)
        with self._guard:
            self._core_server = core_server
            core_server.set_calls_table(self._routes.table)
        return self

    def reply_of(
        self, call: Ending | Read, futures: Sequence[Future], error: Exception | None
    ) -> tuple[bytes | None, Fields]:
        """Return the message of a reply, or None, and the fields that end the call, and count it.
        futures: of the query, done. error: why one could not be scheduled."""
        subject: FastRoute = call.route.subject
        if error is not None:
            return self._end(call, _raising(error))
        request_id = call.tag.decode("ascii")
        return self._end(call, functools.partial(_encoded, subject.target, futures, request_id))

    def note_cancelled(self, call: Ending | Read) -> None:
        """Count a call that its client has given up."""
        self._method.count("CANCELLED", call.began_ns)

    def note_moved(self, more: int) -> None:
        """Count calls that have left the core with their connection, or have ended since."""
        self._counts.under_way += more

    def _tell_news(self) -> None:
        """Send what queries have answered."""
        connections, left = self._calls.news()
        for one in left:
            if isinstance(one, HotRead):
                self._schedule(one)
            else:
                self._answer(one)
        for connection in connections:
            connection.settle()

    def _answer(self, ending: HotEnding) -> None:
        """Answer a call whose query has no plain prediction."""
        target: InferenceTarget = ending.subject.target
        self._reply(ending, functools.partial(_encoded, target, ending.futures, ending.request_id))

    def _reply(self, call: HotEnding | HotRead, make: Callable[[], bytes]) -> None:
        """Answer a call by what `make` returns, or by the error that it raises."""
        call.owner.protocol.reply(call.stream, *self._end(call, make))

    def _end(
        self, call: HotEnding | HotRead | Ending | Read, make: Callable[[], bytes]
    ) -> tuple[bytes | None, Fields]:
        """Return the reply that `make` returns, or None for an error that it raises, and the fields
        that end the call. Count it."""
        trace = trace_of(call.trace) if call.trace else None
        trailing = () if trace is None else (("traceparent", trace.header.decode()),)
        reply: bytes | None = None
        trailers: Fields = (*_OK, *fields_of(trailing))
        code = "OK"
        try:
            reply = make()
        except Exception as error:
            code = code_name(error)
            number, text, metadata = ending_of(error, trailing)
            trailers = trailers_of(number, text, fields_of(metadata))
        self._method.count(code, call.began_ns)
        return reply, trailers

    # -- queries to several models

    def _schedule(self, read: HotRead) -> None:
        """Schedule what was not, and answer the call once its models have."""
        call = _ReadCall(self, read)
        self._counts.under_way += 1
        read.owner.add(read.stream, call)
        call.start()

    def wait(self, futures: Iterator[Future], call: "_ReadCall") -> bool:
        """Have a call told when the next of its futures is done. Return False if all are."""
        return any(self._watcher.on_done(future, call.go_on) for future in futures)

    def end_read(self, read: HotRead, futures: Sequence[Future] | None) -> None:
        """End a call whose futures are done, or whose client has given it up: None."""
        self._counts.under_way -= 1
        if futures is None:
            self._method.count("CANCELLED", read.began_ns)
        elif read.error is not None or not self._calls.respond(read, list(futures)):
            self._answer_read(read, futures)

    def _answer_read(self, read: HotRead, futures: Sequence[Future]) -> None:
        subject: FastRoute = read.route.subject
        whole = HotEnding(
            read.owner,
            read.stream,
            subject,
            futures,
            read.request_id,
            read.began_ns,
            read.trace,
        )
        self._answer(whole) if read.error is None else self._reply(read, _raising(read.error))


def _predict(subject: FastRoute, read: HotRead, row: UserValue) -> Future:
    """Schedule a row that the core has read."""
    user = read.user or None
    return predict(subject.resolved, row, user, read.slo_us, 0, None, read.id, (), read.band)


class _ReadCall:
    """A call whose query has several models, or was scheduled in Python (StreamAnswer). Threads:
    the event loop's."""

    def __init__(self, calls: FastCalls, read: HotRead) -> None:
        self.is_full = False
        self._calls = calls
        self._read = read
        self._futures: list[Future] = []
        self._rest: Iterator[Future] = iter(())
        self._is_over = False

    def start(self) -> None:
        """Schedule what was not, and wait."""
        read = self._read
        try:
            if read.error is not None:
                raise read.error
            subject: FastRoute = read.route.subject
            for future, row in zip(read.futures, read.rows, strict=True):
                self._futures.append(_predict(subject, read, row) if future is None else future)
        except Exception as error:
            self._end(read._replace(error=error))
            return
        self._rest = iter(self._futures)
        self._advance()

    def go_on(self, _: Future) -> None:
        """Wait for the others: a future is done."""
        if not self._is_over:
            self._advance()
            self._read.owner.settle_soon()

    def _advance(self) -> None:
        if not self._calls.wait(self._rest, self):
            self._end(self._read)

    def _end(self, read: HotRead) -> None:
        self._is_over = True
        self._calls.end_read(read, self._futures)

    # -- the stream

    def lose(self) -> None:
        """Cancel the query, if it is not answered."""
        if not self._is_over:
            self._is_over = True
            for future in self._futures:
                future.cancel()
            self._calls.end_read(self._read, None)

    def receive(self, text: bytes, credit: int) -> None:
        """Do nothing: the request is complete."""

    def receive_end(self) -> None:
        """Do nothing: the request is complete."""

    def hold(self, is_full: bool) -> None:
        """Do nothing: there is one message."""
        self.is_full = is_full

    def lose_client(self) -> None:
        """Do nothing: the call is answered. A client that is gone resets the connection."""

    def check(self, now_s: float) -> None:
        """Do nothing: the query ends before the call's deadline."""

    def drain(self) -> None:
        """Do nothing: the query ends by itself."""


def _encoded(target: InferenceTarget, futures: Sequence[Future], request_id: str) -> bytes:
    """Return the reply to a query, whose futures are done. Raises what went wrong."""
    found = PendingInference(futures, target.resolved, False).inferred()
    return protobuf_codec.encode(
        target.name, target.answered_version, request_id, found.outputs, found.parameters
    )


def _raising(error: Exception) -> Callable[[], bytes]:
    def make() -> bytes:
        raise error

    return make
