"""The log as JSON, one object a line: what `server.log_format = "json"` turns on.

Each has `time` (UTC), `level`, `logger`, `message`; where they are known `application`, `model`,
`replica`, `request_id`, `trace_id`, `span_id` and what else a line was given; and `exception`, a
traceback in one string.
"""

import json
import logging
import threading
from datetime import UTC, datetime

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats each log record as one line of JSON. Threads: any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line of JSON."""

        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value
            for name, value in vars(record).items()
            if name not in _PLAIN and name not in line
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class JsonLog:
    """Redirects the log of `clipper` to stderr as JSON until close(). Threads: any.

    Several servers of a process share it; the last that closes restores the previous handlers.
    """

    _guard = threading.Lock()
    _open = 0
    _handler: logging.Handler
    _before: tuple[int, bool]

    def __init__(self) -> None:
        kind, logger = JsonLog, logging.getLogger("clipper")
        with kind._guard:
            kind._open += 1
            if kind._open == 1:
                kind._handler = logging.StreamHandler()
                kind._handler.setFormatter(JsonLines())
                kind._before = logger.level, logger.propagate
                logger.addHandler(kind._handler)
                logger.propagate = False
                if logger.level == logging.NOTSET or logger.level > logging.INFO:
                    logger.setLevel(logging.INFO)
        self._closed = False

    def close(self) -> None:
        """Close the log. Idempotent."""
        kind, logger = JsonLog, logging.getLogger("clipper")
        with kind._guard:
            if self._closed:
                return
            self._closed = True
            kind._open -= 1
            if kind._open == 0:
                logger.removeHandler(kind._handler)
                level, logger.propagate = kind._before
                logger.setLevel(level)
