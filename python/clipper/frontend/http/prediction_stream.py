"""Streamed answers: one server-sent event for each query of a request, in order of completion.

The events `answer` and `error` name their query by `index`; `done` is the last event. Once the
headers are sent, the status can no longer report a failure, so each query reports its own, with the
body that a response of its own would have. While a client does not read, finished answers wait
here, at most one event per query. A disconnected client cancels the unfinished queries.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from clipper.errors import ClipperError
from clipper.frontend.http.json_body import PIECE_BYTES
from clipper.frontend.http.messages import StreamedResponse, problem
from clipper.frontend.http.server_sent_events import CONTENT_TYPE, HEADERS, HEARTBEAT, encode_event
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.serving.query.future_watcher import Future

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
        self._futures, self._encode, self._request_id, self._heartbeat_s = (
            futures,
            encode,
            request_id,
            heartbeat_s,
        )
        self._body: StreamedBody
        self._done: deque[int] = deque()  # finished, not yet written
        self._left = len(futures)
        self._errors = 0
        self._has_room = self._is_quiet = True
        self._timer: asyncio.TimerHandle | None = None

    def response(self) -> StreamedResponse:
        """Return the streamed response for the connection."""
        return StreamedResponse(self.start, CONTENT_TYPE, HEADERS, id=self._request_id)

    def start(self, body: StreamedBody) -> None:
        """Write to `body` from now on: what is done already first."""
        self._body = body
        body.on_room, body.on_gone, body.on_turn = self._on_room, self._on_gone, self._write
        for index, future in enumerate(self._futures):
            if not body.on_done(future, functools.partial(self._on_done, index)):
                self._done.append(index)
        self._beat()
        self._write()

    def _on_done(self, index: int, _: Future) -> None:
        self._done.append(index)
        self._write()

    def _on_room(self) -> None:
        self._has_room = True
        self._write()

    def _on_gone(self) -> None:
        self._stop_beating()
        for future in self._futures:
            future.cancel()

    def _write(self) -> None:
        body = self._body
        while self._done and self._has_room and not body.gone:
            event = self._event(self._done.popleft())
            self._has_room = body.write(event)
            self._is_quiet = False
            self._left -= 1
            if len(event) >= PIECE_BYTES:
                body.request_turn()
                break
        if not self._left and not body.gone and not body.ended:
            self._stop_beating()
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

    # -- a sign of life where nothing else comes

    def _beat(self) -> None:
        if self._is_quiet and self._has_room and self._timer is not None:
            self._has_room = self._body.write(HEARTBEAT)
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    def _stop_beating(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
