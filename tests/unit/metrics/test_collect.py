"""How long a collection and a call took, and the dashboard of Grafana whole."""

from collections.abc import Iterator
from itertools import count

import msgspec
import pytest

from clipper.metrics import collect, grpc_counts
from clipper.metrics.grafana import dashboard
from clipper.metrics.samples import Samples
from clipper_core.runtime.histogram import Snapshot
from tests.expected import check_expected


def test_a_collection_has_the_duration_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[int] = count(3, 2)
    monkeypatch.setattr(collect.Metrics, "_collect", lambda metrics: metrics._duration_s)
    monkeypatch.setattr("time.monotonic", clock.__next__)
    metrics = collect.Metrics("1.2", dict, dict, dict, 5)
    found = [metrics.collect() for _ in range(3)]
    monkeypatch.undo()
    assert found == [0.0, 2, 2]


def test_the_duration_of_a_call_is_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_counts, "now_ns", lambda: 17_000_000)
    counts = grpc_counts.GrpcCounts()
    call, stream = counts.method("s", "Call", False), counts.method("s", "Stream", True)
    for began_ns in (16_936_000, 1_000):
        call.count("OK", began_ns)
        stream.count("OK", began_ns)
    stream.messages += 3
    into = Samples()
    counts.collect(into)
    took = into.get("clipper_grpc_request_duration_seconds", "s", "Call")
    assert isinstance(took, Snapshot)
    assert (took.count, took.sum) == (2, 64 + 16_999)
    assert into.get("clipper_grpc_request_duration_seconds", "s", "Stream") is None
    assert into.get("clipper_grpc_requests_total", "s", "Stream", "OK") == 2
    assert into.get("clipper_grpc_stream_messages_total", "s", "Stream") == 3
    assert into.get("clipper_grpc_stream_messages_total", "s", "Call") is None
    assert into.get("clipper_grpc_calls") == 0


def test_the_dashboard_of_grafana() -> None:
    found = dashboard()
    panels = found.pop("panels")
    lines = [msgspec.json.encode(one).decode() for one in (found, *panels)]
    check_expected("grafana.txt", "\n".join(lines) + "\n")
