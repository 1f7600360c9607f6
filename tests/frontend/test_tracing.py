"""Spans, as a collector gets them; and traces over HTTP and gRPC."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="pip install opentelemetry-proto")

import clipper
from clipper.errors import ConfigError
from clipper.frontend.tracing.context import sampler_named, start_trace, state_of, trace_of
from clipper.frontend.tracing.spans import Batch, Find, Spans
from clipper.settings.tracing import TracingSettings, export_settings
from tests.frontend.collector import Collector, attributes_of
from tests.frontend.conftest import QUICK, Reply, ask, total, warm_workers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "one=1, two@vendor=b c"}
QUERY_BODY = {"input": [1, 2, 3]}
PREDICT = "POST /api/{}/predict"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@contextlib.contextmanager
def tracing(collector: Collector, **more: Any) -> Iterator[clipper.ClipperServer]:
    tracing = {"endpoint": collector.url, "delay_s": 0.02} | more.pop("tracing", {})
    with clipper.start(**({"http": "127.0.0.1:0"} | QUICK | more), tracing=tracing) as server:
        server.deploy("sum", total, input="f64[3]", cache=False)
        server.deploy("other", total, input="f64[3]", cache=False)
        server.app("total", models=["sum", "other"], slo_ms=30_000)
        server._learning.states.start_writing()  # its thread stays
        warm_workers(server)
        yield server


def predict(
    server: clipper.ClipperServer, headers: dict[str, str] | None = None, body: Any = QUERY_BODY
) -> Reply:
    return ask(server.http_address, "POST", "/api/total/predict", body, headers)


def counted(server: clipper.ClipperServer, outcome: str) -> float:
    frontends: Any = server._endpoints.frontends
    return float(
        frontends.scrape.metrics.collect().get("clipper_traced_requests_total", outcome) or 0
    )


# -- what a request did


def test_a_request_and_the_models_it_queried(collector: Collector) -> None:
    with tracing(collector) as server:
        began_ns = time.time_ns()
        reply = predict(server, CALLER | {"X-Request-Id": "mine-1"})
        (root,) = collector.named(PREDICT)
        ended_ns = time.time_ns()
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, SPAN, 2)
        assert reply.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
        assert root.trace_state == reply.headers["tracestate"] == "one=1,two@vendor=b c"
        assert (
            began_ns - 10**8
            < root.start_time_unix_nano
            < root.end_time_unix_nano
            < ended_ns + 10**8
        )
        about = attributes_of(root)
        assert about["http.request.method"] == "POST"
        assert about["http.route"] == "/api/{}/predict"
        assert about["http.response.status_code"] == 200
        assert (about["clipper.application"], about["clipper.request_id"]) == ("total", "mine-1")
        (select,) = collector.named("select")
        assert attributes_of(select)["clipper.models"] == ["other:1", "sum:1"]
        for name in ("sum", "other"):
            (task,) = collector.named(f"predict {name}:1")
            found = attributes_of(task)
            assert (
                found["clipper.model.name"],
                found["clipper.status"],
                found["clipper.cache.hit"],
            ) == (name, "ok", False)
            assert root.start_time_unix_nano <= task.start_time_unix_nano < task.end_time_unix_nano
            queue, sent = (child_of(collector, task, kind) for kind in ("queue", "batch"))
            container = child_of(collector, sent, "container")
            assert (
                queue.start_time_unix_nano <= queue.end_time_unix_nano == sent.start_time_unix_nano
            )
            assert (
                sent.start_time_unix_nano
                <= container.start_time_unix_nano
                < container.end_time_unix_nano
            )
            assert container.end_time_unix_nano == sent.end_time_unix_nano
            assert attributes_of(container)["clipper.batch.rows"] == 1
            (batch,) = collector.named(f"batch {name}:1")
            assert [(link.trace_id, link.span_id) for link in sent.links] == [
                (batch.trace_id, batch.span_id)
            ]
            assert [(link.trace_id, link.span_id) for link in batch.links] == [
                (task.trace_id, task.span_id)
            ]
            assert batch.trace_id != root.trace_id
        mine = [span for span in collector.spans if span.trace_id == root.trace_id]
        assert (
            len({span.span_id for span in collector.spans})
            == len(collector.spans)
            == len(mine) + 2
            == 12
        )
        assert collector.resource["service.name"] == "clipper"
        assert collector.posts[0][0] == "/v1/traces"
        assert collector.posts[0][1]["content-type"] == "application/x-protobuf"


def test_two_models_that_were_sent_to_in_the_same_microsecond(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Spans.__init__

    def at_once(self: Spans, find: Find) -> None:
        def found(ids: Iterable[int]) -> dict[int, Batch]:
            batches = find(ids)
            return dict.fromkeys(batches, min(batches.values(), default=(0, 0, 0, 0, 0)))

        made(self, found)

    monkeypatch.setattr(Spans, "__init__", at_once)
    with tracing(collector) as server:
        predict(server)
        for name in ("sum", "other"):
            (task,) = collector.named(f"predict {name}:1")
            (batch,) = collector.named(f"batch {name}:1")
            assert [(link.trace_id, link.span_id) for link in batch.links] == [
                (task.trace_id, task.span_id)
            ]


def child_of(collector: Collector, parent: Any, name: str) -> Any:
    (found,) = [span for span in collector.named(name) if span.parent_span_id == parent.span_id]
    return found


def test_a_batch_has_a_link_to_each_of_its_requests(collector: Collector) -> None:
    with tracing(
        collector, tracing={"delay_s": 0.5}, batching={"mode": "static", "size_max": 64}
    ) as server:
        predict(server, None, {"inputs": [[i, 0, 0] for i in range(10)]})
        collector.named("predict sum:1", 10)
        batches = collector.named("batch sum:1")
        assert sum(attributes_of(batch)["clipper.batch.rows"] for batch in batches) == 10
        tasks = {span.span_id for span in collector.named("predict sum:1")}
        linked = [link.span_id for batch in batches for link in batch.links]
        assert sorted(linked) == sorted(tasks)


def test_a_request_without_a_caller_begins_a_trace(collector: Collector) -> None:
    with tracing(collector) as server:
        reply = predict(server)
        (root,) = collector.named(PREDICT)
        assert reply.headers["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
        assert root.parent_span_id == b""
        predict(server, {"traceparent": "nonsense"})
        assert collector.named(PREDICT, 2)[1].trace_id != root.trace_id


def test_what_the_caller_does_not_record_is_not(collector: Collector) -> None:
    with tracing(collector) as server:
        reply = predict(server, {"traceparent": f"00-{TRACE}-{SPAN}-00"})
        assert reply.headers["traceparent"].endswith("-00")
        predict(server)
        (root,) = collector.named(PREDICT)
        assert root.trace_id.hex() != TRACE


def test_many_inputs_arrays_and_failures(collector: Collector) -> None:
    with tracing(collector) as server:
        predict(server, None, {"inputs": [[i, 0, 0] for i in range(3)]})
        collector.named("predict sum:1", 3)
        assert attributes_of(collector.named("select")[0])["clipper.queries"] == 3
        tensor = {"name": "input", "shape": [50, 3], "datatype": "FP64", "data": [0.5] * 150}
        assert (
            ask(server.http_address, "POST", "/v2/models/sum/infer", {"inputs": [tensor]}).status
            == 200
        )
        assert (
            attributes_of(collector.named("POST /v2/models/{}/infer")[0])["clipper.model"] == "sum"
        )
        assert ask(server.http_address, "POST", "/api/totl/predict", QUERY_BODY).status == 404
        assert ask(server.http_address, "GET", "/nothing").status == 404
        refused = [
            span
            for span in collector.named(PREDICT, 2)
            if attributes_of(span)["http.response.status_code"] == 404
        ]
        assert len(refused) == 1
        assert refused[0].status.code == 0, "what the client got wrong is no error of the server's"
        server.scale("sum", 0)
        server.scale("other", 0)
        assert predict(server, None, {**QUERY_BODY, "slo_ms": 200}).status == 503
        collector.await_that(
            lambda: [
                s
                for s in collector.named(PREDICT)
                if s.status.code == 2 and s.status.message == "503"
            ]
        )
        collector.await_that(
            lambda: [
                s for s in collector.named("predict sum:1") if s.status.message == "no_replica"
            ]
        )


def test_a_cache_hit_is_marked(collector: Collector) -> None:
    with tracing(collector) as server:
        server.deploy("kept", total, input="f64[3]")
        server.app("total", models=["kept"], slo_ms=30_000)
        predict(server)
        predict(server)
        hits = [
            attributes_of(span)["clipper.cache.hit"]
            for span in collector.named("predict kept:1", 2)
        ]
        assert sorted(hits) == [False, True]


# -- the collector


def test_a_push_to_a_busy_collector_is_retried(collector: Collector) -> None:
    collector.statuses = [503, 429, 502]
    with tracing(collector) as server:
        predict(server)
        collector.named(PREDICT)
        collector.await_that(lambda: counted(server, "exported") == 1)
    assert len(collector.posts) == 4


def test_a_push_that_a_collector_refuses_is_not_retried(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.statuses = [400]
    with tracing(collector) as server:
        predict(server)
        collector.await_that(lambda: counted(server, "refused") == 1)
        collector.await_that(lambda: "400" in caplog.text)
        predict(server)
        collector.named(PREDICT)
    assert len(collector.posts) == 2


def test_a_collector_that_hangs_delays_no_request(collector: Collector) -> None:
    collector.hold.clear()
    with tracing(collector, tracing={"queue_max": 3, "batch_max": 1}) as server:
        for _ in range(20):
            assert predict(server).json["output"] == 6
        collector.await_that(lambda: counted(server, "dropped") >= 15)
        collector.hold.set()
    assert 1 <= len(collector.named(PREDICT)) <= 5


def test_a_collector_that_cannot_be_reached(collector: Collector) -> None:
    collector.close()
    with tracing(collector, tracing={"tries_max": 1}) as server:
        assert predict(server).status == 200
        collector.await_that(lambda: counted(server, "dropped") == 1)


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "clipper.frontend.http_post")
    collector.statuses = [503, 503, 503]
    with tracing(collector) as server:
        predict(server)
        collector.await_that(lambda: counted(server, "exported") == 1)
        predict(server)
        collector.await_that(lambda: counted(server, "exported") == 2)
    logged = [record.getMessage() for record in caplog.records if "reach" in record.getMessage()]
    assert [("do not reach" in line) for line in logged] == [True, False], logged


def test_what_is_left_is_sent_at_the_end(collector: Collector) -> None:
    with tracing(collector, tracing={"delay_s": 60}) as server:
        predict(server)
        assert not collector.spans
    assert collector.named(PREDICT)


# -- OpenTelemetry's variables


def test_the_environment_is_honoured(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=abc%20d")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=other")
    with tracing(collector, tracing={"endpoint": ""}) as server:
        predict(server)
        collector.named(PREDICT)
    assert collector.posts[0][1]["x-api-key"] == "abc d"
    assert collector.resource == {"service.name": "shop", "deployment.environment": "test"}


@pytest.mark.parametrize(
    ("env", "field", "value"),
    [
        ({}, "url", None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1/"}, "url", "http://a:1/v1/traces"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2/x",
            },
            "url",
            "http://b:2/x",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_SDK_DISABLED": "TRUE"}, "url", None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "none"},
            "url",
            None,
        ),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "2500"}, "timeout_s", 2.5),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "500", "OTEL_EXPORTER_OTLP_TIMEOUT": "2500"},
            "timeout_s",
            0.5,
        ),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, "share", 0.25),
        ({"OTEL_TRACES_SAMPLER": "always_on", "OTEL_TRACES_SAMPLER_ARG": "x"}, "share", 1.0),
        ({}, "sampler", "parentbased_always_on"),
    ],
)
def test_each_variable(env: dict[str, str], field: str, value: Any) -> None:
    assert getattr(export_settings(TracingSettings(), env), field) == value


def test_settings_come_first() -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
        "OTEL_SDK_DISABLED": "true",
        "OTEL_SERVICE_NAME": "x",
    }
    found = export_settings(
        TracingSettings("http://b:2", service="y", sampler="traceidratio", share=0.5, timeout_s=3),
        env,
    )
    assert (found.url, found.attributes["service.name"]) == ("http://b:2/v1/traces", "y")
    assert (found.sampler, found.share, found.timeout_s) == ("traceidratio", 0.5, 3)


@pytest.mark.parametrize(
    "env",
    [
        {"OTEL_TRACES_SAMPLER": "sometimes"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "7"},
    ],
)
def test_variables_that_cannot_be(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER"):
        clipper.start(http="127.0.0.1:0")


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(
        ConfigError, match=r"tracing\.endpoint: 'nowhere/v1/traces' is not an address"
    ):
        clipper.start(http="127.0.0.1:0", tracing={"endpoint": "nowhere"})


def test_a_share_of_traces() -> None:
    sample = sampler_named("traceidratio", 0.25)
    hits = sum(start_trace(sample, b"", b"") is not None for _ in range(4000))
    assert 800 < hits < 1200
    low, high = (
        trace_of(f"00-{'0' * 15}1{half}-{SPAN}-00".encode())
        for half in ("3" + "f" * 15, "4" + "0" * 15)
    )
    assert low is not None
    assert high is not None
    assert (sample(low, True), sample(high, True)) == (True, False), (
        "not as OpenTelemetry's own samplers decide"
    )
    by_parent = sampler_named("parentbased_always_off", 1)
    sampled = start_trace(by_parent, CALLER["traceparent"].encode(), b"")
    assert sampled is not None
    assert sampled.sampled
    assert start_trace(by_parent, b"", b"") is None


# -- tracestate


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"a=1", b"a=1"),
        (b"a=1,b=2", b"a=1,b=2"),
        (b" a=1 ,\t b=2,", b"a=1,b=2"),
        (b"1a@b=x", b"1a@b=x"),
        (b"", b""),
        (b"A=1", b""),
        (b"a", b""),
        (b"a=", b""),
        (b"a=1=2", b""),
        (b"a=1,a=2", b""),
        (b"a=\xff", b""),
        (b"a=1\r\nx: y", b""),
        (b",".join(b"k%d=1" % i for i in range(33)), b""),
        (
            b",".join(b"k%d=%s" % (i, b"v" * 100) for i in range(10)),
            b",".join(b"k%d=%s" % (i, b"v" * 100) for i in range(4)),
        ),
    ],
)
def test_a_tracestate_is_kept_if_it_is_one(given: bytes, kept: bytes) -> None:
    assert state_of(given) == kept


def test_tracestate_comes_back_without_a_collector_too(server: clipper.ClipperServer) -> None:
    reply = ask(server.http_address, "POST", "/api/total/predict", QUERY_BODY, CALLER)
    assert reply.headers["tracestate"] == "one=1,two@vendor=b c"
    reply = ask(
        server.http_address, "POST", "/api/total/predict", QUERY_BODY, {"tracestate": "one=1"}
    )
    assert not {"traceparent", "tracestate"} & set(reply.headers)


# -- gRPC


def test_traces_over_grpc(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    import grpc

    from tests.frontend.test_grpc import APPLICATIONS, Client, numbers, tensor_of

    caplog.set_level(logging.INFO, "clipper.requests")
    with tracing(collector, grpc="127.0.0.1:0") as server:
        client = Client(server.grpc_address, metadata=list(CALLER.items()))
        call = client.method("inference.GRPCInferenceService", "ModelInfer")
        _, call_result = call.with_call(
            tensor_of("total", [[1, 2, 3]]), timeout=10, metadata=client.metadata
        )
        (root,) = collector.named("inference.GRPCInferenceService/ModelInfer")
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, SPAN, 2)
        trailing = dict(call_result.trailing_metadata())
        assert trailing["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
        assert trailing["tracestate"] == "one=1,two@vendor=b c"
        assert attributes_of(root)["rpc.grpc.status"] == "OK"
        assert collector.named("predict sum:1")[0].parent_span_id == root.span_id
        error = client.refused(APPLICATIONS, "Predict", application="totl", input=numbers(1, 2, 3))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert dict(error.trailing_metadata())["traceparent"].startswith(f"00-{TRACE}-")
        assert (
            attributes_of(collector.named(f"{APPLICATIONS}/Predict")[0])["rpc.grpc.status"]
            == "NOT_FOUND"
        )
        assert (
            client(
                APPLICATIONS, "Predict", application="total", input=numbers(1, 2, 3)
            ).output.number
            == 6
        )
        assert {
            getattr(record, "trace_id", "")
            for record in caplog.records
            if record.name == "clipper.requests"
        } == {TRACE}
        client.channel.close()
