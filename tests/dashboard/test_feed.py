"""The feed without a browser: rows as differences of counters, the past, viewers and their limits,
and the page's routes."""

import hashlib
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.frontend.http.messages import HttpError
from clipper.frontend.http.streamed_body import StreamedBody
from clipper.manage.dashboard.feed import (
    COARSE_EACH,
    COARSE_ROWS,
    FINE_ROWS,
    SLOWEST_MAX,
    STALLED_TICKS,
    Feed,
)
from clipper.manage.dashboard.seconds import NAMES_MAX, between, busiest, outcome_of
from clipper.serving.query.stats import SLOWEST_QUERIES_MAX, Slowest
from clipper_core.runtime.histogram import LatencyHistogram
from clipper_core.runtime.status import Status
from tests.frontend.conftest import PATIENCE_S, QUICK, ask

SOURCE = Path(__file__).parents[2] / "dashboard"
STATIC = Path(clipper.__file__).parent / "manage" / "dashboard" / "static"


def histogram(*values: int) -> Any:
    found = LatencyHistogram()
    for value in values:
        found.record(value)
    return found.snapshot()


def application(
    queries: int, ok: int, default: dict[str, int], took: tuple[int, ...], fed: tuple[float, float]
) -> dict[str, Any]:
    feedback = {"n": fed[0], "mean": fed[1]} if fed[0] else {"n": 0.0}
    counts = {
        "used": ok,
        "feedback": feedback,
        "role": "primary",
        "agreement": {"n": 0.0},
        "missing": {},
    }
    return {
        "queries": queries,
        "answers": {"ok": ok, "default": default, "feedback": feedback},
        "latency_us": histogram(*took),
        "models": {"m:1": counts},
        "decided_by": {},
    }


def model(
    ok: int, failed: int, took: tuple[int, ...], limit: int = 4, misses: int = 0
) -> dict[str, Any]:
    replica = {"number": 0, "state": "ready", "limit": limit, "misses": misses, "pid": 0}
    return {
        "ended": {"OK": ok, "DEADLINE": failed, "UNNEEDED": 7},
        "latency_us": histogram(*took),
        "batch_rows": histogram(*[2] * ok),
        "replicas": [replica],
        "evaluated": ok,
        "hits": 3 * ok,
        "joined": 0,
        "queued": 5,
        "delay_us": 100,
        "has": 1,
        "wanted": 1,
        "slo_us": 20_000,
        "accuracy": None,
    }


def stats(**applications: Any) -> dict[str, Any]:
    return {
        "applications": applications,
        "models": {"m:1": model(0, 0, ())},
        "cache": {"bytes": 1, "entries": 2, "evictions": 0},
        "loop": {"late_us_max": 3},
        "feedback": {"waiting": 0},
        "issued": 9,
        "answered": 7,
    }


# -- what a second comes to


def test_a_row_is_the_difference_of_two_readings() -> None:
    before = stats(a=application(10, 8, {"deadline": 2}, (100, 100), (4.0, 0.5)))
    defaults = {"deadline": 3, "full": 1, "model_error": 2, "unsure": 1}
    after = stats(a=application(25, 18, defaults, (100, 100, 5000, 5000), (8.0, 0.75)))
    after["models"]["m:1"] = model(6, 2, (1000,) * 6, limit=8, misses=1)
    row = between(before, after, {"a": {"m:1": 0.25}}, 1000.04, 1.50049)
    assert (row["t"], row["dt"]) == (1000.0, 1.5)
    one = row["apps"]["a"]
    assert (one["q"], one["ok"], one["default"], one["error"], one["refused"]) == (15, 10, 2, 2, 1)
    assert one["why"] == {"deadline": 1, "full": 1, "model_error": 2, "unsure": 1}
    assert all(4400 < us <= 5700 for us in one["us"])  # of the two that came since
    assert one["fb"] == [4.0, 4.0]  # 8 x 0.75 - 4 x 0.5
    assert one["models"] == {"m:1": [0.25, 10, 4.0, 4.0]}
    same = row["models"]["m:1"]
    assert (
        same["ok"],
        same["failed"],
        same["rows"],
        same["hits"],
        same["limit"],
        same["misses"],
    ) == (6, 2, 6, 18, 8, 1)
    assert same["batches"] == 6
    assert same["size"] == 2


def test_padding_is_that_of_the_batches_since() -> None:
    readings = [stats(), stats(), stats()]
    for reading, cost, padded in zip(readings, (100, 175, 175), (200, 300, 300), strict=True):
        reading["models"]["m:1"] |= {"cost": cost, "cost_padded": padded}
    shares = [
        between(before, after, {}, 0, 1)["models"]["m:1"].get("padding", 0)
        for before, after in pairwise(readings)
    ]
    assert shares == [0.25, 0]


def test_counters_that_began_anew_are_all_new() -> None:
    before = stats(a=application(100, 90, {"full": 10}, (100,) * 9, (50.0, 1.0)))
    after = stats(a=application(3, 2, {"full": 1}, (7,), (0, 0)))
    one = between(before, after, {}, 0, 1)["apps"]["a"]
    assert (one["q"], one["ok"], one["refused"], one["us"][3]) == (3, 2, 1, 7)
    assert "fb" not in one
    assert between(stats(), after, {}, 0, 1)["apps"]["a"]["q"] == 3  # one that was not there before


@pytest.mark.parametrize("status", list(Status))
def test_every_way_a_task_can_end_has_a_kind(status: Status) -> None:
    assert outcome_of(status.name.lower()) in ("default", "error", "refused")


def test_of_many_names_the_busiest_have_numbers() -> None:
    many = {f"a{i}": {"queries": i} for i in range(3 * NAMES_MAX)}
    assert busiest({}, many, "queries") == [
        f"a{i}" for i in reversed(range(2 * NAMES_MAX, 3 * NAMES_MAX))
    ]
    assert busiest({}, {"b": {}, "a": {}}, "queries") == ["b", "a"]


# -- who is told


class Scripted:
    """A fake of the feed's sources, whose values the test sets."""

    def __init__(self) -> None:
        self.queries = 0
        self.name = "first"
        self.slow: list[dict[str, Any]] = []

    def stats(self) -> dict[str, Any]:
        return stats(a=application(self.queries, self.queries, {}, (), (0, 0)))

    def shares(self) -> dict[str, dict[str, float]]:
        return {}

    def about(self) -> dict[str, Any]:
        return {"name": self.name}

    def slowest(self) -> dict[str, list[dict[str, Any]]]:
        found, self.slow = self.slow, []
        return {"a": found}

    def rollouts(self) -> list[dict[str, Any]]:
        return []

    def troubles(self, stats: Any) -> dict[str, tuple[str, str, str]]:
        return dict.fromkeys(stats["models"], ("ready", "", ""))


class Page:
    """A fake of the connection of a viewer."""

    def __init__(self) -> None:
        self.full = self.aborted = self.finished = False
        self.data = b""
        self.body = StreamedBody(self, self, False)  # type: ignore[arg-type]

    def write_body(self, data: bytes) -> int:
        self.data += data
        return 0

    def finish_body(self) -> None:
        self.finished = True

    def abort(self) -> None:
        self.aborted = True
        self.body.lose()

    def post(self, step: Callable[..., Any], *args: Any) -> None:
        step(*args)

    def watch(self, feed: Feed, since_s: float = 0) -> "Page":
        self.body.start(lambda body: feed.join(body, since_s))
        return self

    def events(self) -> list[tuple[str, Any, int]]:
        found = []
        for block in self.data.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if "data" in lines:
                found.append((lines["event"], json.loads(lines["data"]), int(lines.get("id", 0))))
        self.data = b""
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake of a feed's clocks, whose wall and monotonic time are the same number."""
    now = [1000.0]
    monkeypatch.setattr("clipper.manage.dashboard.feed.wall_time_us", lambda: int(now[0] * 1e6))
    monkeypatch.setattr("clipper.manage.dashboard.feed.time.monotonic", lambda: now[0])
    return now


def ticked(feed: Feed, clock: list[float], times: int, sources: Scripted) -> None:
    for _ in range(times):
        clock[0] += 1
        sources.queries += 2
        feed.tick()


def test_a_viewer_gets_the_present_and_the_past_and_then_each_second(clock: list[float]) -> None:
    sources = Scripted()
    feed = Feed(sources, 4)
    ticked(feed, clock, 25, sources)
    page = Page().watch(feed)
    events = page.events()
    assert [name for name, _, _ in events] == ["about", "day", "coarse", "past", "now"]
    assert events[0][1] == {"name": "first"}
    assert [row["dt"] for row in events[2][1]] == [COARSE_EACH, COARSE_EACH]
    assert [row["apps"]["a"]["q"] for row in events[2][1]] == [20, 20]
    past = events[3][1]
    assert [row["t"] for row in past] == [1002 + i for i in range(24)]
    assert events[3][2] == 10250  # the newest row's time
    ticked(feed, clock, 1, sources)
    assert [(name, id) for name, _, id in page.events()] == [("row", 10260), ("now", 0)]
    sources.name = "second"
    ticked(feed, clock, 1, sources)
    assert [name for name, _, _ in page.events()] == ["about", "row", "now"]


def test_a_client_that_reconnects_gets_missed_events(clock: list[float]) -> None:
    sources = Scripted()
    feed = Feed(sources, 4)
    ticked(feed, clock, 30, sources)
    page = Page().watch(feed, since_s=1027.05)
    rows = {name: data for name, data, _ in page.events()}
    assert [row["t"] for row in rows["past"]] == [1028, 1029, 1030]
    assert rows["coarse"] == []


def test_the_past_is_bounded(clock: list[float]) -> None:
    sources = Scripted()
    feed = Feed(sources, 4)
    ticked(feed, clock, COARSE_EACH * (COARSE_ROWS + 5), sources)
    rows: dict[str, list[Any]] = {"past": [], "coarse": []}
    for name, data, _ in Page().watch(feed).events():
        if name in rows:
            rows[name] += data
    assert (len(rows["past"]), len(rows["coarse"])) == (FINE_ROWS, COARSE_ROWS)


def test_a_day_is_kept_by_five_minutes(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper.manage.dashboard.feed.DAY_EACH", 4)
    monkeypatch.setattr("clipper.manage.dashboard.feed.DAY_ROWS", 3)
    sources = Scripted()
    feed = Feed(sources, 4)
    ticked(feed, clock, 4 * 5 + 1, sources)
    (rows,) = [data for name, data, _ in Page().watch(feed).events() if name == "day"]
    assert [row["dt"] for row in rows] == [4, 4, 4]
    assert [row["t"] for row in rows] == [1013, 1017, 1021]


def test_a_page_too_many_is_refused_and_one_that_leaves_makes_room(clock: list[float]) -> None:
    feed = Feed(Scripted(), 2)
    pages = [Page().watch(feed), Page().watch(feed)]
    with pytest.raises(HttpError, match="2 dashboards are open already"):
        feed.check_room()
    pages[0].body.lose()
    feed.check_room()
    assert feed.viewer_count == 1


def test_a_client_that_does_not_read_is_disconnected(clock: list[float]) -> None:
    sources = Scripted()
    feed = Feed(sources, 4)
    slow, quick = Page().watch(feed), Page().watch(feed)
    slow.full = True
    ticked(feed, clock, STALLED_TICKS, sources)
    assert not slow.aborted
    written = len(slow.data)
    ticked(feed, clock, 1, sources)
    assert slow.aborted
    assert len(slow.data) == written  # nothing was kept for it
    assert not quick.aborted
    assert feed.viewer_count == 1


def test_a_viewer_that_missed_something_is_disconnected_and_starts_again(
    clock: list[float],
) -> None:
    sources = Scripted()
    feed = Feed(sources, 4)
    page = Page().watch(feed)
    page.full = True
    ticked(feed, clock, 3, sources)
    page.full = False
    page.body.room()
    assert page.finished
    assert feed.viewer_count == 0


def test_a_store_with_another_content_is_told(clock: list[float]) -> None:
    class Refusing(Scripted):
        refused = "store redis://one has lost the catalog"

        def stats(self) -> dict[str, Any]:
            store = {"name": "redis://one", "connected": True, "refused": self.refused}
            return {**super().stats(), "store": store}

    sources = Refusing()
    feed = Feed(sources, 1)
    page = Page().watch(feed)
    ticked(feed, clock, 1, sources)
    assert "has lost the catalog" in page.events()[-1][1]["store"]
    sources.refused = ""
    ticked(feed, clock, 1, sources)
    assert page.events()[-1][1]["store"] == ""


def test_the_slowest_queries_of_the_last_minutes_are_listed(clock: list[float]) -> None:
    sources = Scripted()
    feed = Feed(sources, 4)
    page = Page().watch(feed)
    for i in range(SLOWEST_MAX):
        sources.slow += [
            {"us": 10 * i + j, "time_us": int(clock[0] * 1e6), "number": f"{i}{j}"}
            for j in range(2)
        ]
        ticked(feed, clock, 1, sources)
    found = page.events()[-1][1]["slowest"]
    slowest = sorted((10 * i + j for i in range(SLOWEST_MAX) for j in range(2)), reverse=True)
    assert [row["us"] for row in found] == slowest[:SLOWEST_MAX]
    clock[0] += 400
    ticked(feed, clock, 1, sources)
    assert page.events()[-1][1]["slowest"] == []


def test_a_reading_that_fails_is_tried_again() -> None:
    class Failing(Scripted):
        tries = 0

        def stats(self) -> dict[str, Any]:
            self.tries += 1
            if self.tries < 3:
                raise clipper.ClipperError("not now.")
            feed._worker.request_stop()
            return super().stats()

    sources = Failing()
    feed = Feed(sources, 1, period_s=0.001)
    feed.start()
    assert feed._worker.join(time.monotonic() + PATIENCE_S)
    assert sources.tries == 3
    feed.stop()


# -- the slowest queries


class SlowQuery:
    """A fake of a query's future that is done."""

    def __init__(self, us: int, waits: tuple[int, ...] = ()) -> None:
        self.latency_us, self.id, self._waits = us, us, waits or (us,)

    def __len__(self) -> int:
        return len(self._waits)

    def latencies_us(self) -> Any:
        return np.array(self._waits, np.uint32)

    def status(self, i: int) -> Status:
        return Status.OK if self._waits[i] <= self.latency_us else Status.PENDING


def test_the_bar_rises_to_the_slowest_few_and_falls_when_they_are_taken() -> None:
    names = (clipper.VersionedModel("m", 1),)
    slowest = Slowest()
    for us in np.random.default_rng(5).permutation(1000).tolist():
        if us > slowest.bar.value:
            slowest.add(SlowQuery(us), names, names, "")  # type: ignore[arg-type]
    assert slowest.bar.value == 1000 - SLOWEST_QUERIES_MAX
    assert [row["us"] for row in slowest.take()] == [999 - i for i in range(SLOWEST_QUERIES_MAX)]
    assert slowest.bar.value == -1
    assert slowest.take() == []


def test_a_task_that_had_not_ended_was_waited_for_until_the_answer() -> None:
    slowest = Slowest()
    names = (clipper.VersionedModel("m", 1), clipper.VersionedModel("n", 2))
    slowest.add(SlowQuery(50, (20, 99)), names, names[:1], "n:2 was late")  # type: ignore[arg-type]
    row = slowest.take()[0]
    assert row["tasks"] == [
        {"model": "m:1", "status": "ok", "us": 20},
        {"model": "n:2", "status": "pending", "us": 50},
    ]
    assert (row["used"], row["reason"]) == (["m:1"], "n:2 was late")


# -- a server


def total(rows: Any) -> Any:
    return np.asarray(rows).sum(axis=1)


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(admin="127.0.0.1:0", **QUICK) as started:
        started.deploy("sum", total, input="f64[3]")
        started.app("total", models=["sum"], slo_ms=5000)
        from tests.frontend.conftest import warm_workers

        warm_workers(started)
        yield started


def test_a_server_reports_its_state(server: clipper.ClipperServer) -> None:
    app = server.app("total")
    line = http.client.HTTPConnection(server.admin_address, timeout=PATIENCE_S)
    line.request("GET", "/admin/stream")
    response = line.getresponse()
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    seen: dict[str, Any] = {}
    name = ""
    while not (
        seen.get("row", {}).get("apps", {}).get("total", {}).get("q") and seen["now"]["slowest"]
    ):
        app.predict([1, 2, 3], salt=len(seen)).result(PATIENCE_S)
        text = response.readline().decode().rstrip("\n")
        kind, _, value = text.partition(": ")
        name = value if kind == "event" else name
        if kind == "data":
            seen[name] = json.loads(value)
    line.close()
    assert [one["name"] for one in seen["about"]["applications"]] == ["total"]
    assert [one["id"] for one in seen["about"]["models"]] == ["sum:1"]
    # changes, and containers
    assert {"verb", "event"} <= {key for one in seen["about"]["events"] for key in one}
    assert seen["now"]["models"]["sum:1"]["replicas"][0]["rss"] > 1 << 20
    assert seen["now"]["troubles"] == {"sum:1": ["ready", "", ""]}
    slow = seen["now"]["slowest"][0]
    assert (slow["application"], slow["tasks"][0]["model"]) == ("total", "sum:1")


def test_the_page_is_what_its_source_gives(server: clipper.ClipperServer) -> None:
    for path, kind in (
        ("/dashboard", "text/html"),
        ("/dashboard/app.js", "text/javascript"),
        ("/dashboard/app.css", "text/css"),
    ):
        reply = ask(server.admin_address, "GET", path)
        assert reply.status == 200
        assert reply.headers["content-type"].startswith(kind)
        assert reply.headers["content-security-policy"].startswith("default-src 'self'")
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert (
        ask(server.admin_address, "GET", "/", headers={"accept": "text/html,*/*"}).headers[
            "location"
        ]
        == "/dashboard"
    )
    assert ask(server.admin_address, "GET", "/").json["name"] == "clipper"
    assert ask(server.admin_address, "GET", "/dashboard/../secret").status == 404


def test_settings_are_shown_with_their_origin_and_without_secrets(
    server: clipper.ClipperServer,
) -> None:
    rows = {
        row["key"]: row
        for row in ask(server.admin_address, "GET", "/admin/configuration").json["settings"]
    }
    assert rows["http.admin"]["value"] == "127.0.0.1:0"
    assert rows["http.admin"]["origin"] != "default"
    assert rows["http.idle_s"]["origin"] == "default"


def test_a_page_of_this_listener_may_manage_and_others_may_not(
    server: clipper.ClipperServer,
) -> None:
    at = server.admin_address
    for origin, status in (
        (f"http://{at}", 200),
        ("http://127.0.0.1:1", 403),
        ("https://example.org", 403),
        ("null", 403),
    ):
        body = {"input": [1, 2, 3]}
        found = ask(at, "POST", "/admin/applications/total/predict", body, {"origin": origin})
        assert found.status == status, origin
    assert (
        ask(
            at,
            "GET",
            "/admin/stats",
            headers={"host": "example.org", "origin": "http://example.org"},
        ).status
        == 403
    )


def test_with_a_token_the_files_are_for_all_and_the_figures_are_not() -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "5f3a-token"}, **QUICK) as server:
        at = server.admin_address
        assert ask(at, "GET", "/dashboard").status == 200
        assert ask(at, "GET", "/", headers={"accept": "text/html"}).status == 303
        assert ask(at, "GET", "/").status == 401
        for path in ("/admin/stream", "/admin/configuration"):
            assert ask(at, "GET", path).status == 401
        settings = ask(
            at, "GET", "/admin/configuration", headers={"authorization": "Bearer 5f3a-token"}
        )
        assert b"5f3a-token" not in settings.body


def test_without_a_dashboard_there_is_neither_page_nor_thread() -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "dashboard": False}, **QUICK) as server:
        assert ask(server.admin_address, "GET", "/dashboard").status == 404
        assert ask(server.admin_address, "GET", "/admin/stream").status == 404
        assert server._endpoints.dashboard is None


# -- the files


def test_the_shipped_files_are_those_of_the_sources() -> None:
    sources = [
        *sorted((SOURCE / "src").iterdir()),
        SOURCE / "build.mjs",
        SOURCE / "package-lock.json",
    ]
    whole = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    lines = [f"{whole}  sources"]
    lines += [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(STATIC.iterdir())
    ]
    assert (SOURCE / "built.sha256").read_text().splitlines() == lines, (
        "the sources have changed: make dashboard"
    )


def test_a_build_gives_the_shipped_files(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (SOURCE / "node_modules" / "esbuild").exists():
        pytest.skip("no esbuild: python tools/fetch.py npm")
    subprocess.run(
        ["node", "build.mjs", str(tmp_path)], cwd=SOURCE, check=True, timeout=PATIENCE_S * 3
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        p.name: p.read_bytes() for p in STATIC.iterdir()
    }


def test_the_page_sends_requests_to_no_other_host_and_is_small() -> None:
    import gzip

    app = (STATIC / "app.js").read_bytes()
    assert (
        len(gzip.compress(app, 9)) + len(gzip.compress((STATIC / "app.css").read_bytes(), 9))
        < 52 << 10
    )
    html = (STATIC / "index.html").read_text()
    assert "http" not in html
    assert "<style" not in html
    assert html.count("<script") == html.count("<script src=") == 1
