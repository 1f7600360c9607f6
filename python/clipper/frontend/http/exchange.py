"""A request and its response, on one connection."""

import logging
from typing import TYPE_CHECKING

from clipper.errors import ClipperError
from clipper.frontend.http.messages import (
    JSON,
    PROBLEM,
    DeferredResponse,
    HandlerResult,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    WorkerTask,
    head_of,
    problem,
)
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.frontend.tracing.spans import finished_request
from clipper.serving.query.future_watcher import Future

if TYPE_CHECKING:
    from clipper.frontend.http.connection import HttpConnection

_log = logging.getLogger(__name__)


class Exchange:
    """One request and the place of its response in the connection's order. Threads: the event
    loop's.

    The response is complete at once, when the request's futures are done, or is streamed.
    held_bytes: of the request's body, taken from the connection's memory for bodies; given back
    when there is a response, or nobody waits for one.
    """

    __slots__ = (
        "body",
        "close",
        "connection",
        "data",
        "head_only",
        "held_bytes",
        "is_working",
        "later",
        "ready",
        "request",
        "streamed",
        "waits_for",
    )

    def __init__(
        self,
        connection: "HttpConnection",
        request: HttpRequest,
        close: bool,
        held_bytes: int = 0,
    ) -> None:
        self.connection, self.request, self.close = connection, request, close
        self.held_bytes = held_bytes
        self.is_working = False  # a worker thread has the request
        self.head_only = request.method == "HEAD"
        self.data: bytes | None = None
        self.later: DeferredResponse | None = None
        self.streamed: StreamedResponse | None = None
        self.body: StreamedBody | None = None
        self.waits_for = 0
        self.ready = False  # its futures are done, and its response is not made yet

    def settle(self, outcome: HandlerResult) -> None:
        """Process what the handler returned."""
        self.is_working = False
        self._count_inflated()
        if type(outcome) is HttpResponse:
            self.answer(outcome)
        elif type(outcome) is DeferredResponse:
            self.later = outcome
            if not self.connection.gone:
                self._wait()
            else:
                self.cancel()
        elif type(outcome) is StreamedResponse:
            self.answer(outcome)
        else:
            assert type(outcome) is WorkerTask
            self.is_working = True
            self.connection.service.run(outcome, self)

    def _count_inflated(self) -> None:
        """Count the body as it is now: a worker may have inflated it."""
        if self.held_bytes and self.data is None:
            size = len(self.request.body)
            self.connection.service.bodies.grow(size - self.held_bytes)
            self.held_bytes = size

    def _give_back(self) -> None:
        """Give back the memory of the body, which is not needed any more."""
        if self.held_bytes:
            self.connection.service.bodies.give_back(self.held_bytes)
            self.held_bytes = 0
            self.request.body = b""

    def _wait(self, _: Future | None = None) -> None:
        """Wait until the last of the futures is done. They are waited for one after another: when
        one is done, those done meanwhile need no wait."""
        later = self.later
        assert later is not None
        while self.waits_for < len(later.futures):
            future = later.futures[self.waits_for]
            self.waits_for += 1
            if self.connection.service.watcher.on_done(future, self._wait):
                return
        self.ready = True
        self.connection.flush()

    def make(self) -> None:
        """Make the response of futures that are done. Called by the connection when it is this
        one's turn, so that a client that does not read has no made responses waiting."""
        assert self.later is not None
        self.ready = False
        try:
            self._encode(self.later.make())
        except Exception as error:
            self._encode(self._failure(error))

    def cancel(self) -> None:
        """Cancel the futures or the stream, because the client has disconnected."""
        if not self.is_working:
            self._give_back()
        if self.later is not None:
            self.later.cancel()
        if self.body is not None:
            self.body.lose()

    def fail(self, error: Exception) -> None:
        """Respond with an error. Logs errors that are not ClipperError."""
        self.is_working = False
        self.answer(self._failure(error))

    def _failure(self, error: Exception) -> HttpResponse:
        if not isinstance(error, ClipperError):
            self._log_failure(error)
        content_type = JSON if self.request.path.startswith(b"/v2") else PROBLEM
        return problem(error, self.request.id, content_type)

    def _log_failure(self, error: Exception) -> None:
        request = self.request
        about = {
            "request_id": request.id.decode(),
            **(request.trace.about() if request.trace else {}),
        }
        _log.exception(
            "request %s: %s %r",
            request.id.decode(),
            request.method,
            request.path,
            exc_info=error,
            extra=about,
        )

    def answer(self, response: HttpResponse | StreamedResponse) -> None:
        """Encode the response, count and trace it, and let the connection send it."""
        if self.connection.gone:
            self._give_back()
        else:
            self._encode(response)
            self.connection.flush()

    def _encode(self, response: HttpResponse | StreamedResponse) -> None:
        self._give_back()
        connection, request = self.connection, self.request
        service = connection.service
        if service.draining:
            self.close = True
        id = request.given_id or response.id or request.id
        trace = request.trace
        own = trace.headers if trace else b""
        if isinstance(response, StreamedResponse):
            self._answer_streamed(response, id, own)
        else:
            head = head_of(response, id, service.date, self.close, own)
            self.data = head if self.head_only or response.status == 204 else head + response.body
        service.counts.count(request.method, request.route, response.status, request.began_ns)
        if trace is not None or service.access_log.logs_all:
            service.access_log.request(request, response, id, connection.client)
        if trace is not None and trace.sampled and service.exporter is not None:
            service.exporter.put(finished_request(trace, request, response, id))

    def _answer_streamed(self, response: StreamedResponse, id: bytes, trace: bytes) -> None:
        """Answer with a stream, whose body begins after the earlier responses."""
        connection = self.connection
        chunked = connection.is_chunking
        self.close = self.close or not chunked
        self.data = head_of(
            response, id, connection.service.date, self.close, trace, chunked=chunked
        )
        if not self.head_only:
            self.streamed = response
            self.body = StreamedBody(connection, connection.service.watcher, chunked)

    def start_body(self) -> None:
        """Send the headers of a streamed response and start its body. It is this exchange's
        turn."""
        assert self.streamed is not None
        assert self.body is not None
        assert self.data is not None
        self.connection.write_body(self.data)
        self.data = b""
        self.body.start(self.streamed.start)
        if self.streamed.endless and self.connection.service.draining:
            self.body.end()
