"""Event feed of the dashboard: one reading per second, shared by all viewers, and the past for late
ones.

A viewer gets three kinds of events. `about`: applications, models and their settings, after a
change; `row`: the counts of a second (seconds.py), with its time as the id; `now`: values of
which only the latest counts. A viewer starts with `about` and the rows that it has not seen: the
last minutes by the second (`past`), the hour by ten seconds (`coarse`), the day by five minutes
(`day`). Rows are encoded once.

A viewer that does not read for a while is disconnected, and reconnects by itself: only its
socket buffers data for it. Reading may cost a hundredth of a core; with so many models that it
takes longer, readings become rarer.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from clipper.clock import wall_time_us
from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import ClipperError
from clipper.frontend.http.messages import HttpError, to_json
from clipper.frontend.http.server_sent_events import HEARTBEAT, encode_event
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.frontend.server_interface import store_warning
from clipper.manage.dashboard.seconds import between, now_of
from clipper.manage.dashboard.shards import Row
from clipper.metrics.samples import Stats

FINE_ROWS: Final = 300  # by the second
COARSE_ROWS: Final = 360  # by ten
COARSE_EACH: Final = 10
DAY_ROWS: Final = 288  # by five minutes
DAY_EACH: Final = 300
STALLED_TICKS: Final = 10  # a viewer that took nothing for so long is cut off
PAST_BYTES: Final = 128 << 10  # of the past, in one event
SLOWEST_S: Final = 300.0
SLOWEST_MAX: Final = 20
PAUSE_S_MAX: Final = 5.0  # between readings: after a longer pause a page reconnects
_SHARE = 0.01  # of a core, that readings may cost
_RETRY_MS = 1000
_log = logging.getLogger(__name__)


class Sources(Protocol):
    """Interface of the data that the feed reads."""

    def stats(self) -> Stats:
        """Return the stats of the server."""

    def shares(self) -> dict[str, dict[str, float]]:
        """Return the weight of each model, by application."""

    def about(self) -> dict[str, object]:
        """Return what stays the same: version, addresses, models, applications."""

    def slowest(self) -> dict[str, list[Row]]:
        """Return the slowest queries, by application."""

    def rollouts(self) -> list[dict[str, object]]:
        """Return the rollouts, each as a row."""

    def troubles(self, stats: Stats) -> dict[str, tuple[str, str, str]]:
        """Return (trouble, cause, next command) of models that have one."""


class LongerRows:
    """The last rows over a longer time: `name` of their events, of `each` so many readings."""

    def __init__(self, name: bytes, each: int, most: int) -> None:
        self.name, self.each = name, each
        self.rows: deque[tuple[float, bytes]] = deque(maxlen=most)
        self.before: tuple[float, Stats] | None = None


class Feed:
    """Threads: any. One of its own reads; viewers are written to on the event loop."""

    def __init__(self, sources: Sources, viewers_max: int, period_s: float = 1.0) -> None:
        self._sources, self._viewers_max, self._period_s = sources, viewers_max, period_s
        self._fine: deque[tuple[float, bytes]] = deque(maxlen=FINE_ROWS)
        self._longer = (
            LongerRows(b"day", DAY_EACH, DAY_ROWS),
            LongerRows(b"coarse", COARSE_EACH, COARSE_ROWS),
        )
        self._about = self._now = b"{}"
        self._slowest: list[Row] = []
        self._viewers: set[Viewer] = set()
        self._lock = threading.Lock()
        self._worker = Worker("clipper-dashboard", self._run, again=Backoff(period_s, PAUSE_S_MAX))
        self._before: tuple[float, Stats] | None = None
        self._turn = 0

    def start(self) -> None:
        """Start the thread that reads. Raises NotStarted."""
        self._worker.start()

    def stop(self) -> None:
        """Stop reading. Idempotent."""
        self._worker.end()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    @property
    def viewer_count(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    # -- reading

    def _run(self, stop: Stop) -> None:
        due_s, pause_s, is_sent = time.monotonic(), self._period_s, False
        while not stop.wait(max(0.0, due_s - time.monotonic())):
            began_s = time.monotonic()
            try:
                self.tick()
                is_sent = False
            except ClipperError as error:
                # it is closing, or the store is away: the next reading tries again
                if not is_sent:
                    _log.info("the dashboard has no reading: %s", error)
                is_sent = True
            except Exception:
                _log.exception("the dashboard has no reading")
            took_s = time.monotonic() - began_s
            pause_s = min(
                PAUSE_S_MAX, self._period_s * max(1, math.ceil(took_s / _SHARE / self._period_s))
            )
            due_s = max(due_s + pause_s, time.monotonic() + self._period_s / 2)

    def tick(self) -> None:
        """Read once, and send it to all viewers."""
        sources = self._sources
        now_s, wall_s = time.monotonic(), wall_time_us() / 1e6
        stats, shares = sources.stats(), sources.shares()
        messages = []
        about = to_json(sources.about())
        if about != self._about:
            messages.append(encode_event(about, name=b"about"))
        row = self._row(self._before, stats, shares, now_s, wall_s)
        self._note_slowest(wall_s)
        more: dict[str, object] = {
            "rollouts": sources.rollouts(),
            "troubles": sources.troubles(stats),
            "slowest": self._slowest,
            "store": store_warning(stats.get("store")),
        }
        more["viewers"] = len(self._viewers)
        now = to_json({**now_of(stats), "t": round(wall_s, 1), **more})
        if row is not None:
            messages.append(encode_event(row, name=b"row", id=int(wall_s * 10)))
        added: list[tuple[LongerRows, bytes]] = []
        for longer in self._longer:
            if self._turn % longer.each == 0:
                sum_ = self._row(longer.before, stats, shares, now_s, wall_s)
                longer.before = now_s, stats
                if sum_ is not None:
                    messages.append(encode_event(b"[%s]" % sum_, name=longer.name))
                    added.append((longer, sum_))
        messages.append(encode_event(now, name=b"now"))
        self._turn += 1
        with self._lock:
            self._about, self._now = about, now
            if row is not None:
                self._fine.append((wall_s, row))
            for longer, sum_ in added:
                longer.rows.append((wall_s, sum_))
            viewers = tuple(self._viewers)
        self._before = now_s, stats
        data = b"".join(messages)
        for viewer in viewers:
            viewer.body.post(viewer.send, data)

    def _row(
        self,
        before: tuple[float, Stats] | None,
        stats: Stats,
        shares: dict[str, dict[str, float]],
        now_s: float,
        wall_s: float,
    ) -> bytes | None:
        if before is None:
            return None
        row: Row = between(before[1], stats, shares, wall_s, now_s - before[0])
        return to_json(row)

    def _note_slowest(self, wall_s: float) -> None:
        """Note the slowest of the last minutes, of all applications."""
        found = [row for row in self._slowest if row["time_us"] / 1e6 > wall_s - SLOWEST_S]
        for application, rows in self._sources.slowest().items():
            found += [{"application": application, **row} for row in rows]
        self._slowest = sorted(found, key=lambda row: -int(row["us"]))[:SLOWEST_MAX]

    # -- viewers

    def check_room(self) -> None:
        """Raise HttpError when there are as many viewers as there may be."""
        if len(self._viewers) >= self._viewers_max:
            hint = "Close another page, or see http.dashboard_viewers_max."
            raise HttpError(
                503,
                f"{self._viewers_max} dashboards are open already.",
                hint,
                ((b"retry-after", b"5"),),
            )

    def join(self, body: StreamedBody, since_s: float) -> None:
        """Add a viewer that has seen the rows up to `since_s`. On the event loop."""
        with self._lock:
            viewer = Viewer(body, self._first_message(since_s), self.leave)
            self._viewers.add(viewer)
        viewer.pump()

    def _first_message(self, since_s: float) -> Iterator[bytes]:
        """Return the first messages of a viewer, as copies. The caller holds the lock."""
        fine = [row for at_s, row in self._fine if at_s > since_s]
        last_id = int(self._fine[-1][0] * 10) if self._fine else 0
        about, now = self._about, self._now
        first = encode_event(about, name=b"about", retry_ms=_RETRY_MS) if about != b"{}" else b""
        rows = []
        for longer in self._longer:
            rows += _packed([row for at_s, row in longer.rows if at_s > since_s], longer.name, 0)
        rows += _packed(fine, b"past", last_id)
        return iter(
            [HEARTBEAT + first, *rows, encode_event(now, name=b"now") if now != b"{}" else b""]
        )

    def leave(self, viewer: "Viewer") -> None:
        """Remove a viewer. Idempotent."""
        with self._lock:
            self._viewers.discard(viewer)


def _packed(rows: list[bytes], name: bytes, last_id: int) -> list[bytes]:
    """Pack past rows into events of at most about PAST_BYTES; the last event has the id."""
    packed, part, size = [], [], 0
    for row in rows:
        part.append(row)
        size += len(row)
        if size > PAST_BYTES:
            packed.append(encode_event(b"[%s]" % b",".join(part), name=name))
            part, size = [], 0
    packed.append(encode_event(b"[%s]" % b",".join(part), name=name, id=last_id))
    return packed


class Viewer:
    """One page. Threads: the event loop's."""

    def __init__(
        self, body: StreamedBody, first_message: Iterator[bytes], leave: Callable[["Viewer"], None]
    ) -> None:
        self.body = body
        self._first_message: Iterator[bytes] | None = first_message
        self._leave = leave
        self._stalled = 0
        self._has_room = True
        self._has_missed = False
        body.listen(room=self.pump, gone=self._on_gone)

    def _on_gone(self) -> None:
        self._leave(self)

    def pump(self) -> None:
        """Send what is left of the past, as far as there is room. A viewer that has missed
        something since is disconnected, and requests it when it connects again."""
        self._has_room, self._stalled = True, 0
        while self._first_message is not None and self._has_room:
            data = next(self._first_message, None)
            if data is None:
                self._first_message = None
            elif data:
                self._has_room = self.body.write(data)
        if self._first_message is None and self._has_missed:
            self._leave(self)
            self.body.end()

    def send(self, data: bytes) -> None:
        """Send an event."""
        if self.body.ended or self.body.gone:
            self._leave(self)
        elif self._has_room and self._first_message is None:
            self._has_room = self.body.write(data)
        else:
            self._has_missed = True
            self._stalled += 1
            if self._stalled >= STALLED_TICKS:
                self._leave(self)
                self.body.drop()
