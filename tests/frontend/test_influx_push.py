"""Metrics that are pushed to InfluxDB."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

import clipper
from clipper.errors import ConfigError
from tests.frontend.collector import Collector
from tests.frontend.conftest import QUICK


@pytest.fixture
def sink() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def pushing(sink: Collector, **more: Any) -> clipper.ClipperServer:
    influx = {
        "url": f"{sink.url}/api/v2/write?org=o&bucket=b",
        "token": "secret",
        "each_s": 0.05,
        "timeout_s": 5,
    } | more
    return clipper.start(influx=influx, **QUICK)


def counted(server: clipper.ClipperServer, outcome: str) -> float:
    frontends: Any = server._endpoints.frontends
    return float(
        frontends.scrape.metrics.collect().get("clipper_influx_pushes_total", outcome) or 0
    )


def test_lines_are_pushed_without_any_listener(sink: Collector) -> None:
    with pushing(sink) as server:
        sink.await_that(lambda: len(sink.lines) >= 2)
        assert counted(server, "exported") >= 1
        assert "secret" not in repr(server.config)
    assert sink.posts[0][0] == "/api/v2/write?org=o&bucket=b"
    assert sink.posts[0][1]["authorization"] == "Token secret"
    assert re.search(rb"^process_threads value=\d+\.0 \d{19}$", sink.lines[0], re.M)


def test_rows_that_are_not_accepted_are_reported_once_and_dropped(
    sink: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    sink.statuses = [401, 401, 503]
    with pushing(sink, tries_max=1) as server:
        sink.await_that(lambda: counted(server, "exported"))
        assert (counted(server, "refused"), counted(server, "dropped")) == (2, 1)
    warnings = [
        record.message for record in caplog.records if record.name == "clipper.frontend.http_post"
    ]
    assert [message.partition("http")[0] for message in warnings] == ["metrics do not reach "]
    assert "bucket" not in caplog.text


def test_a_sink_that_hangs_delays_the_end_only_so_long(sink: Collector) -> None:
    sink.hold.clear()
    with pushing(sink, timeout_s=0.2, tries_max=1) as server:
        sink.await_that(lambda: counted(server, "dropped"))
    assert sink.posts == [], "the server ended while the sink still held every request back"


def test_an_address_that_is_none(sink: Collector) -> None:
    with pytest.raises(ConfigError, match=r"influx\.url: 'nowhere' is not an address"):
        pushing(sink, url="nowhere")
