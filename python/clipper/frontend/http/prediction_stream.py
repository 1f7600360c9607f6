"""Streamed answers, as server-sent events: of several queries, one event for each in order of
completion; of one query that is answered in parts, an event for each part.

Of several queries, the events `answer` and `error` name their query by `index`; `done` is the last
event. Once the headers are sent, the status can no longer report a failure, so each query reports
its own, with the body that a response of its own would have. While a client does not read, finished
answers wait here, at most one event per query. A disconnected client cancels the unfinished
queries.

Of a query in parts, the headers are sent once a part has arrived, or the answer has ended. So one
that has no part can have the status of its error. While a client does not read, parts are not
taken; then the model is stopped by its credit (limits.parts_ahead_max). A disconnected client
cancels the query.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from clipper.errors import ClipperError
from clipper.frontend.http.json_body import PIECE_BYTES
from clipper.frontend.http.messages import (
    DeferredResponse,
    HandlerResult,
    StreamedResponse,
    problem,
)
from clipper.frontend.http.server_sent_events import (
    CONTENT_TYPE,
    HEADERS,
    HEARTBEAT,
    Heartbeat,
    encode_event,
)
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.frontend.inference.outcome import check_begun
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import AnswerPart, PartsFuture

_log = logging.getLogger(__name__)


class PredictionStream:
    """The response to one request with several queries. Threads: the event loop's.

    encode: encodes a finished future as a JSON object; it raises the query's error.
    """

    def __init__(
        self,
        futures: Sequence[Future],
        encode: Callable[[Future], bytes],
        request_id: bytes,
        heartbeat_s: float,
    ) -> None:
        self._futures = futures
        self._encode = encode
        self._request_id = request_id
        self._heartbeat = Heartbeat(heartbeat_s, self._beat)
        self._body: StreamedBody
        self._done: deque[int] = deque()  # finished, not yet written
        self._left = len(futures)
        self._errors = 0
        self._has_room = True

    def response(self) -> StreamedResponse:
        """Return the streamed response for the connection."""
        return StreamedResponse(self.start, CONTENT_TYPE, HEADERS, id=self._request_id)

    def start(self, body: StreamedBody) -> None:
        """Write to `body` from now on: what is done already first."""
        self._body = body
        body.listen(room=self._on_room, turn=self._write, gone=self._on_gone)
        for index, future in enumerate(self._futures):
            if not body.on_done(future, functools.partial(self._on_done, index)):
                self._done.append(index)
        self._heartbeat.start()
        self._write()

    def _on_done(self, index: int, _: Future) -> None:
        self._done.append(index)
        self._write()

    def _on_room(self) -> None:
        self._has_room = True
        self._write()

    def _on_gone(self) -> None:
        self._heartbeat.stop()
        for future in self._futures:
            future.cancel()

    def _write(self) -> None:
        body = self._body
        while self._done and self._has_room and not body.gone:
            event = self._event(self._done.popleft())
            self._has_room = body.write(event)
            self._heartbeat.note()
            self._left -= 1
            if len(event) >= PIECE_BYTES:
                body.request_turn()
                break
        if not self._left and not body.gone and not body.ended:
            self._heartbeat.stop()
            answers = len(self._futures) - self._errors
            body.write(
                encode_event(b'{"answers":%d,"errors":%d}' % (answers, self._errors), name=b"done")
            )
            body.end()

    def _event(self, index: int) -> bytes:
        name = b"answer"
        try:
            text = self._encode(self._futures[index])
        except Exception as error:
            if not isinstance(error, ClipperError):
                _log.exception(
                    "request %s: answer %d cannot be text",
                    self._request_id.decode(),
                    index,
                    exc_info=error,
                )
            name, text = b"error", problem(error, self._request_id).body
            self._errors += 1
        return encode_event(b'{"index":%d,%s' % (index, text[1:]), name=name)

    def _beat(self) -> None:
        """Give a sign of life where nothing else comes."""
        if self._has_room:
            self._has_room = self._body.write(HEARTBEAT)


class PartEvents:
    """The response to one query that is answered in parts. Threads: the event loop's.

    encode: makes an event of a part, the last of which is the whole. encode_error: makes the event
    that ends the body instead, if there is no whole or no text of it.
    """

    def __init__(
        self,
        future: PartsFuture,
        resolved: ResolvedApplication,
        encode: Callable[[AnswerPart], bytes],
        encode_error: Callable[[Exception], bytes],
        request_id: bytes,
        heartbeat_s: float,
    ) -> None:
        self._future = future
        self._resolved = resolved
        self._encode = encode
        self._encode_error = encode_error
        self._request_id = request_id
        self._heartbeat = Heartbeat(heartbeat_s, self._beat)
        self._body: StreamedBody
        self._has_room = True
        self._is_waiting = False

    def outcome(self) -> HandlerResult:
        """Return the response, which begins with the first part. Raises the error of a query that
        has ended without one."""
        first = self._future.pending()
        if first is None:
            return self._begin()
        return DeferredResponse((first,), self._begin, self._future.cancel)

    def _begin(self) -> StreamedResponse:
        check_begun(self._future, self._resolved)
        return StreamedResponse(self.start, CONTENT_TYPE, HEADERS, id=self._request_id)

    def start(self, body: StreamedBody) -> None:
        """Write to `body` from now on: what has arrived first."""
        self._body = body
        body.listen(room=self._on_room, turn=self._write, gone=self._on_gone)
        self._heartbeat.start()
        self._write()

    def _on_room(self) -> None:
        self._has_room = True
        self._write()

    def _on_gone(self) -> None:
        self._heartbeat.stop()
        self._future.cancel()

    def _on_part(self, _: Future) -> None:
        self._is_waiting = False
        self._write()

    def _write(self) -> None:
        """Write what has arrived, at most a piece in one turn, and wait for more."""
        body = self._body
        if self._is_waiting or not self._has_room or body.gone or body.ended:
            return
        events: list[bytes] = []
        size = 0
        is_over = False
        while not is_over and size < PIECE_BYTES:
            if (waits_for := self._future.pending()) is not None:
                self._is_waiting = body.on_done(waits_for, self._on_part)
                if self._is_waiting:
                    break
            event, is_over = self._next()
            events.append(event)
            size += len(event)
        if events:
            self._heartbeat.note()
            self._has_room = body.write(b"".join(events))
        if is_over:
            self._heartbeat.stop()
            body.end()
        elif not self._is_waiting and self._has_room:
            body.request_turn()

    def _next(self) -> tuple[bytes, bool]:
        """Return the event of the next part, which has arrived, and whether it is the last one."""
        try:
            part = next(self._future)
            return self._encode(part), part.is_last
        except Exception as error:
            if not isinstance(error, ClipperError):
                about = self._request_id.decode()
                _log.exception("request %s: a part cannot be text", about, exc_info=error)
            self._future.cancel()
            return self._encode_error(error), True

    def _beat(self) -> None:
        """Give a sign of life where nothing else comes."""
        if self._has_room:
            self._has_room = self._body.write(HEARTBEAT)
