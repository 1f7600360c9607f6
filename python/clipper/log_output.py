"""The log: its lines as text or as JSON, and where `[logging]` sends them.

A line of JSON is one object: `time` (UTC), `level`, `logger`, `message`; where they are known
`application`, `model`, `replica`, `request_id`, `trace_id`, `span_id` and what else a line was
given; and `exception`, a traceback in one string.
"""

import json
import logging
import threading
import warnings
from datetime import UTC, datetime
from typing import TextIO

_log = logging.getLogger(__name__)

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextLines(logging.Formatter):
    """Formats each log record as its date, with the offset from UTC, its level and its message.
    Threads: any."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return when a record was made, as `2026-11-30 15:04:05.123+00:00`."""
        moment = datetime.fromtimestamp(record.created, UTC).astimezone()
        return moment.isoformat(" ", timespec="milliseconds")


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


def log_to_terminal(*, quiet: bool = False) -> None:
    """Send the log of this process, and warnings of Python, to stderr, for commands. quiet:
    warnings only."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextLines())
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a warning of Python as a line of the log, with its place if it is not of Clipper."""
    text = str(message)
    if category.__module__.partition(".")[0] != "clipper":
        text = f"{category.__name__}: {text} ({filename}:{lineno})"
    _log.warning("%s", text)


class LogOutput:
    """The level and the form of the log of `clipper`, until close(). Threads: any.

    level: the least that is logged, by its lower-case name; empty: as `logging` is configured, and
    `info` for JSON. form: `json` sends lines to stderr, and to no other handler; `text` sends them
    to the handlers of `logging`.

    Several servers of a process share the log: what was set last holds, and the last that closes
    restores what was before.
    """

    _guard = threading.Lock()
    _open = 0
    _handler: logging.Handler | None = None
    _before: tuple[int, bool]

    def __init__(self, level: str = "", form: str = "text") -> None:
        kind, logger = LogOutput, logging.getLogger("clipper")
        with kind._guard:
            kind._open += 1
            if kind._open == 1:
                kind._before = logger.level, logger.propagate
        self._closed = False
        self.change(level, form)

    def change(self, level: str, form: str) -> None:
        """Set another level and form. Does nothing after close()."""
        kind, logger = LogOutput, logging.getLogger("clipper")
        with kind._guard:
            if self._closed:
                return
            kind._remove_handler()
            before, logger.propagate = kind._before
            if form == "json":
                kind._handler = logging.StreamHandler()
                kind._handler.setFormatter(JsonLines())
                logger.addHandler(kind._handler)
                logger.propagate = False
                if before == logging.NOTSET or before > logging.INFO:
                    before = logging.INFO
            logger.setLevel(level.upper() if level else before)

    def close(self) -> None:
        """Close the log. Idempotent."""
        kind, logger = LogOutput, logging.getLogger("clipper")
        with kind._guard:
            if self._closed:
                return
            self._closed = True
            kind._open -= 1
            if kind._open == 0:
                kind._remove_handler()
                level, logger.propagate = kind._before
                logger.setLevel(level)

    @classmethod
    def _remove_handler(cls) -> None:
        if cls._handler is not None:
            logging.getLogger("clipper").removeHandler(cls._handler)
            cls._handler = None
