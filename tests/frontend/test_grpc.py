"""gRPC by grpcio's own channel and our messages: services, deadlines, errors, streams, and the
end."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.errors import AddressInUse, ConfigError
from clipper.frontend.grpc.applications import _value_of
from clipper.frontend.protocols import message, methods_of, pool
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, beside, total, warm_workers
from tests.memory_container import wait_until

INFERENCE, APPLICATIONS = "inference.GRPCInferenceService", "clipper.v1.Applications"
# however busy this machine is, a reply is at the client before the call's deadline
WAY_BACK_MS = 1500
WAY_THERE_S = 1.0  # and its request at the server
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"


class Client:
    """A client of gRPC: client(service, method, request fields...) returns the response."""

    def __init__(
        self, address: str, credentials: Any = None, metadata: Any = (), **options: Any
    ) -> None:
        words = address, [*options.items()]
        if credentials is None:
            self.channel = grpc.insecure_channel(*words)
        else:
            self.channel = grpc.secure_channel(words[0], credentials, words[1])
        self.metadata = metadata

    def method(self, service: str, name: str) -> Any:
        (method,) = [method for method in methods_of(service) if method.name == name]
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"  # noqa: E501
        return getattr(self.channel, kind)(
            f"/{service}/{name}",
            request_serializer=lambda sent: (
                sent if isinstance(sent, bytes) else sent.SerializeToString()
            ),
            response_deserializer=message(method.output_type.full_name).FromString,
        )

    def __call__(
        self,
        service: str,
        method: str,
        request: Any = None,
        /,
        *,
        timeout: float | None = PATIENCE_S,
        **fields: Any,
    ) -> Any:
        if request is None:
            (found,) = [each for each in methods_of(service) if each.name == method]
            request = message(found.input_type.full_name)(**fields)
        return self.method(service, method)(request, timeout=timeout, metadata=self.metadata)

    def infer(self, model: str, rows: Any, timeout: float | None = PATIENCE_S, **more: Any) -> Any:
        return self(INFERENCE, "ModelInfer", tensor_of(model, rows, **more), timeout=timeout)

    def refused(self, *words: Any, **more: Any) -> Any:
        """Return the error of a call."""
        with pytest.raises(grpc.RpcError) as caught:
            self(*words, **more)
        return caught.value


def tensor_of(
    model: str,
    rows: Any,
    version: str = "",
    id: str = "",
    datatype: str = "FP64",
    **parameters: int,
) -> Any:
    rows = np.asarray(rows, float)
    request = message("inference.ModelInferRequest")(model_name=model, model_version=version, id=id)
    request.inputs.add(name="input", datatype=datatype, shape=rows.shape)
    request.raw_input_contents.append(rows.tobytes())
    for key, value in parameters.items():
        request.parameters[key].int64_param = value
    return request


def details_of(error: Any) -> Any:
    """Return (google.rpc.ErrorInfo, google.rpc.RetryInfo) of an error."""
    trailing = dict(error.trailing_metadata())
    status = message("google.rpc.Status").FromString(trailing["grpc-status-details-bin"])
    info, retry = message("google.rpc.ErrorInfo")(), message("google.rpc.RetryInfo")()
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(retry)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    return info, retry


def start(**more: Any) -> clipper.ClipperServer:
    server = clipper.start(**({"grpc": "127.0.0.1:0"} | QUICK | more))
    server._learning.states.start_writing()  # its thread stays
    warm_workers(server)
    return server


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def numbers_of_gates() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def gate(gates: Path, numbers_of_gates: Iterator[int]) -> Iterator[int]:
    """Yield the first of a thousand rows that the model `stuck` has not answered when the test
    ends."""
    number = next(numbers_of_gates)
    yield 1000 * number
    (gates / f"{number}").touch()


@pytest.fixture(scope="module")
def server(gates: Path) -> Iterator[clipper.ClipperServer]:
    limits = {"message_bytes_max": 200_000, "queries_max": 5, "way_back_ms": WAY_BACK_MS}
    with start(grpc={"address": "127.0.0.1:0", **limits}) as started:
        started.deploy("sum", total, input="f64[3]")
        started.deploy("whole", total, input="i32[2]")
        started.deploy("beside", beside, input="f64[3]")
        started.app("beside", models=["beside"], slo_ms=5000)
        started.app("personal", models=["sum"], slo_ms=5000, policy="linucb")
        started.deploy("words", lambda rows: [row.upper() for row in rows], input="str")
        started.deploy("stuck", gated(gates), input="f64[1]", cache=False)
        started.app("total", models=["sum"], slo_ms=5000)
        started.app("learns", models=["sum"], slo_ms=5000, policy="stacking")
        started.app("shout", models=["words"], slo_ms=5000)
        started.app("patient", models=["stuck"], slo_ms=30_000)
        started.app("assured", models=["stuck"], slo_ms=30_000, default=-1.0)
        yield started


def slow(rows: Any) -> Any:
    time.sleep(0.3)
    return rows[:, 0]


def gated(gates: Path) -> Callable[[Any], Any]:
    """Return a model that answers rows from 1000 on when the file `1` exists, from 2000 on when `2`
    does, and so on; others after 0.3 s."""

    def predict(rows: Any) -> Any:
        wanted = [gates / f"{int(x) // 1000}" for x in rows[:, 0] if x >= 1000]
        while not all(gate.exists() for gate in wanted):
            time.sleep(0.005)
        return rows[:, 0] if wanted else slow(rows)

    return predict


@pytest.fixture(scope="module")
def client(server: clipper.ClipperServer) -> Iterator[Client]:
    made = Client(server.grpc_address)
    yield made
    made.channel.close()


def frozen(rows: Any) -> Any:
    time.sleep(60)
    return rows[:, 0]


# -- the Open Inference Protocol


def test_about_the_server_and_its_models(client: Client) -> None:
    assert client(INFERENCE, "ServerLive").live
    assert client(INFERENCE, "ServerReady").ready
    assert client(INFERENCE, "ServerMetadata").name == "clipper"
    assert client(INFERENCE, "ModelReady", name="sum", version="1").ready
    about = client(INFERENCE, "ModelMetadata", name="total")
    assert [(each.name, each.datatype, list(each.shape)) for each in about.inputs] == [
        ("input", "FP64", [-1, 3])
    ]
    config = client(INFERENCE, "ModelConfig", name="sum").config
    assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (
        512,
        12,
        [3],
    )
    index = client(INFERENCE, "RepositoryIndex", ready=True).models
    assert {"total", "sum", "words"} <= {row.name for row in index if row.state == "READY"}


def test_statistics_move(client: Client) -> None:
    def count(name: str) -> int:
        return int(
            client(INFERENCE, "ModelStatistics", name=name)
            .model_stats[0]
            .inference_stats.success.count
        )

    before = count("sum"), count("total")
    client.infer("total", np.random.default_rng(1).random((4, 3)))
    assert (count("sum"), count("total")) == (before[0] + 4, before[1] + 4)
    assert len(client(INFERENCE, "ModelStatistics").model_stats) >= 5


@pytest.mark.parametrize("n", [1, 32, 33, 3000])
def test_infer(client: Client, n: int) -> None:
    rows = np.arange(3.0 * n).reshape(n, 3)
    response = client.infer("total", rows, id="q1")
    assert (response.id, list(response.outputs[0].shape), response.outputs[0].datatype) == (
        "q1",
        [n],
        "FP64",
    )
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0]), rows.sum(axis=1))


def test_a_version_of_a_model(client: Client) -> None:
    response = client.infer("sum", [[1, 2, 3]], version="1")
    assert (response.model_name, response.model_version) == ("sum", "1")
    assert response.parameters["confidence"].double_param == 1.0
    assert response.parameters["prediction_id"].string_param


@pytest.mark.parametrize(
    ("model", "rows", "more", "code", "parts"),
    [
        ("totl", [[1, 2, 3]], {}, "NOT_FOUND", ["did you mean 'total'?"]),
        ("sum", [[1, 2, 3]], {"version": "9"}, "NOT_FOUND", ["sum:9"]),
        ("total", [[1, 2, 3]], {"version": "1"}, "NOT_FOUND", ["no version '1'"]),
        ("sum", [[1, 2, 3]], {"version": "x"}, "INVALID_ARGUMENT", ["version"]),
        ("total", [[1, 2]], {}, "INVALID_ARGUMENT", ["[1, 2]", "[-1, 3] is taken"]),
        ("shout", [[1, 2]], {}, "INVALID_ARGUMENT", ["FP64", "BYTES is taken"]),
        (
            "total",
            [[1, 2, 3]],
            {"datatype": "FP32"},
            "INVALID_ARGUMENT",
            ["24 bytes", "FP32[1, 3] takes 12"],
        ),
        ("total", [[1, 2, 3]], {"timeout": -1}, "INVALID_ARGUMENT", ["timeout"]),
        ("total", [[1, 2, 3]], {"priority": -1}, "INVALID_ARGUMENT", ["priority"]),
    ],
)
def test_what_is_wrong_is_reported(
    client: Client, model: str, rows: Any, more: Any, code: str, parts: list[str]
) -> None:
    error = client.refused(INFERENCE, "ModelInfer", tensor_of(model, rows, **more))
    assert error.code() is grpc.StatusCode[code]
    assert all(part in error.details() for part in parts), error.details()
    info, retry = details_of(error)
    assert info.domain == "clipper"
    assert not retry.HasField("retry_delay")


def test_another_dtype_is_named(client: Client) -> None:
    error = client.refused(INFERENCE, "ModelInfer", tensor_of("whole", [[1, 2]]))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected i32[2], got f64[2]" in error.details()


def test_a_message_that_is_none_and_one_too_large(client: Client) -> None:
    error = client.refused(INFERENCE, "ModelInfer", b"\xff\xff\xff")
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the bytes are no inference.ModelInferRequest.",
    )
    with pytest.raises(grpc.RpcError, match="the bytes are no clipper"):
        list(client.method(APPLICATIONS, "PredictStream")(iter([b"\xff"]), timeout=PATIENCE_S))
    error = client.refused(INFERENCE, "ModelInfer", tensor_of("total", np.zeros((10_000, 3))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client(INFERENCE, "ServerLive").live


def test_a_message_that_swells_is_refused(server: clipper.ClipperServer) -> None:
    swelling = Client(server.grpc_address, **{"grpc.default_compression_algorithm": 2})
    error = swelling.refused(INFERENCE, "ModelInfer", tensor_of("total", np.zeros((100_000, 3))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    swelling.channel.close()


def test_load_and_unload_are_for_management(client: Client) -> None:
    client(INFERENCE, "RepositoryModelLoad", model_name="sum")
    error = client.refused(INFERENCE, "RepositoryModelUnload", model_name="sum")
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert (
        client.refused(INFERENCE, "RepositoryModelUnload", model_name="sun").code()
        is grpc.StatusCode.NOT_FOUND
    )
    assert details_of(error)[0].reason == "forbidden"


# -- what goes along with a query


def test_qualifiers_and_the_callers_id(client: Client) -> None:
    answer = client(
        APPLICATIONS, "Predict", application="beside", input=numbers(1, 2, 3), request_id="mine-1"
    )
    assert answer.request_id == "mine-1"
    qualifiers = answer.qualifiers["beside:1"].values
    assert (qualifiers["quality"].whole, qualifiers["note"].text) == (3, "fine")
    parameters = client.infer("beside", [[1, 2, 3]], id="mine-2").parameters
    assert parameters["request_id"].string_param == "mine-2"
    assert json.loads(parameters["qualifiers"].string_param) == {
        "beside:1": {"quality": 3, "note": "fine"}
    }
    replies = client(
        APPLICATIONS,
        "PredictMany",
        application="total",
        inputs=[numbers(1, 2, 3)] * 2,
        request_id="all",
    ).replies
    assert [reply.prediction.request_id for reply in replies] == ["all", "all"]
    error = client.refused(
        APPLICATIONS, "Predict", application="total", input=numbers(1, 2, 3), request_id="x" * 1000
    )
    assert "the request's id" in error.details()


def test_the_callers_id_may_be_metadata(server: clipper.ClipperServer) -> None:
    client = Client(server.grpc_address, metadata=[("x-request-id", "mine-3")])
    assert (
        client(APPLICATIONS, "Predict", application="total", input=numbers(1, 2, 3)).request_id
        == "mine-3"
    )
    assert client.infer("total", [[1, 2, 3]]).parameters["request_id"].string_param == "mine-3"
    client.channel.close()


def test_a_context_is_a_parameter(client: Client) -> None:
    request = tensor_of("personal", [[1, 2, 3]])
    request.parameters["context"].string_param = "[0.5, 2]"
    request.parameters["user"].string_param = "ann"
    assert np.frombuffer(client(INFERENCE, "ModelInfer", request).raw_output_contents[0]) == [6.0]
    answer = client(
        APPLICATIONS, "Predict", application="personal", input=numbers(1, 2, 3), context=[0.5, 2]
    )
    assert answer.output.number == 6
    for wrong, why in (('["a"]', "context"), ("[", "not JSON")):
        request.parameters["context"].string_param = wrong
        error = client.refused(INFERENCE, "ModelInfer", request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert why in error.details()
    many = tensor_of("personal", np.zeros((50, 3)))
    many.parameters["context"].string_param = "[0.5, 2]"
    assert "no context" in client.refused(INFERENCE, "ModelInfer", many).details()


def test_calls_are_counted(server: clipper.ClipperServer, client: Client) -> None:
    def counted() -> tuple[float, ...]:
        samples = server._endpoints.frontends.scrape.metrics.collect()  # type: ignore[union-attr]
        names = ("OK", "NOT_FOUND")
        found = [
            samples.get("clipper_grpc_requests_total", APPLICATIONS, "Predict", code) or 0
            for code in names
        ]
        took = samples.get("clipper_grpc_request_duration_seconds", APPLICATIONS, "Predict")
        sent = samples.get("clipper_grpc_stream_messages_total", APPLICATIONS, "PredictStream") or 0
        return (*found, took.count if took else 0, sent, samples.get("clipper_grpc_calls"))

    before = counted()
    client(APPLICATIONS, "Predict", application="total", input=numbers(1, 2, 3))
    client.refused(APPLICATIONS, "Predict", application="totl", input=numbers(1, 2, 3))
    sent = [message("clipper.v1.PredictRequest")(application="total", input=numbers(1, 2, 3))] * 3
    assert (
        len(list(client.method(APPLICATIONS, "PredictStream")(iter(sent), timeout=PATIENCE_S))) == 3
    )
    wait_until(lambda: counted() == (before[0] + 1, before[1] + 1, before[2] + 2, before[3] + 3, 0))


def test_too_many_calls_are_given_a_time_to_retry(tmp_path: Path) -> None:
    with start(grpc={"address": "127.0.0.1:0", "calls_max": 2}) as server:
        server.deploy("stuck", gated(tmp_path), input="f64[1]", cache=False)
        client = Client(server.grpc_address)
        infer_async = client.method(INFERENCE, "ModelInfer").future
        rows = [[1000 + i] for i in range(10)]
        futures = [infer_async(tensor_of("stuck", [row], timeout=20_000_000)) for row in rows]
        refused = wait_until(
            lambda: len(done := [future for future in futures if future.done()]) == 8 and done
        )
        (tmp_path / "1").touch()
        errors = [future.exception(PATIENCE_S) for future in refused]
        assert all(future in refused or future.result(PATIENCE_S) for future in futures)
        info, retry = details_of(errors[0])
        assert (errors[0].code(), info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
        assert "grpc.calls_max" in errors[0].details()
        assert retry.retry_delay.ToMilliseconds() > 0
        client.channel.close()


# -- deadlines


def test_a_deadline_is_the_querys_slo(client: Client, gate: int) -> None:
    timeout_s = WAY_BACK_MS / 1000 + WAY_THERE_S
    row = tensor_of("patient", [[gate]])
    error = client.refused(INFERENCE, "ModelInfer", row, timeout=timeout_s)
    assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "stuck:1" in error.details(), "the client gave up before the answer came"
    answer = client(
        APPLICATIONS,
        "Predict",
        application="assured",
        input=numbers(gate),
        timeout=timeout_s,
    )
    assert (answer.output.number, answer.default) == (-1.0, True)


def test_a_timeout_of_its_own_is_the_querys_slo(client: Client) -> None:
    error = client.refused(INFERENCE, "ModelInfer", tensor_of("patient", [[2]], timeout=20_000))
    assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    response = client.infer("patient", [[3]], timeout=None, priority=1)
    assert np.frombuffer(response.raw_output_contents[0]) == [3.0]


def test_a_query_has_no_longer_than_its_call(client: Client, gate: int) -> None:
    more_than_the_call = tensor_of("assured", [[gate]], timeout=25_000_000)
    response = client(
        INFERENCE, "ModelInfer", more_than_the_call, timeout=WAY_BACK_MS / 1000 + WAY_THERE_S
    )
    assert response.parameters["default"].bool_param


def test_a_deadline_that_is_too_short_queries_no_model(
    server: clipper.ClipperServer, client: Client
) -> None:
    before = server.stats()["issued"]
    error = client.refused(
        INFERENCE, "ModelInfer", tensor_of("patient", [[4]]), timeout=WAY_BACK_MS / 1000 - 0.1
    )
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "its reply takes up to 1500 ms" in error.details()
    assert server.stats()["issued"] == before


def cancelled(server: clipper.ClipperServer) -> int:
    return int(server.stats()["models"]["stuck:1"]["ended"]["CANCELLED"])


def in_flight(server: clipper.ClipperServer) -> int:
    stats = server.stats()
    return int(stats["issued"] - stats["answered"])


def test_a_client_that_goes_away_takes_its_query_along(
    server: clipper.ClipperServer, client: Client, gate: int, gates: Path
) -> None:
    wait_until(lambda: not in_flight(server))
    before = cancelled(server)
    future = client.method(INFERENCE, "ModelInfer").future(tensor_of("patient", [[gate]]))
    wait_until(lambda: in_flight(server))
    future.cancel()
    wait_until(lambda: not in_flight(server))
    # what it has sent to the container is counted when that replies
    (gates / f"{gate // 1000}").touch()
    wait_until(lambda: cancelled(server) == before + 1)


# -- overload


def test_overload_names_a_time_to_retry() -> None:
    with start(limits={"queue_rows_max": 16}) as server:
        server.deploy(
            "stuck", slow, input="f64[1]", cache=False, batching={"mode": "static", "size_max": 1}
        )
        server.app("patient", models=["stuck"], slo_ms=60_000)
        client = Client(server.grpc_address)
        infer_async = client.method(INFERENCE, "ModelInfer").future
        futures = [infer_async(tensor_of("patient", [[i]]), timeout=30) for i in range(100)]
        refused = []
        for future in futures:
            if future.exception() is not None:
                refused.append(future.exception())
                break
        for future in futures:
            future.cancel()
        assert refused
        assert refused[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "overloaded" in refused[0].details()
        trailing = dict(refused[0].trailing_metadata())
        info, retry = details_of(refused[0])
        assert int(trailing["grpc-retry-pushback-ms"]) > 0
        assert int(trailing["retry-after"]) >= 1
        assert retry.retry_delay.ToMilliseconds() > 0
        assert info.reason == "overloaded"
        client.channel.close()


# -- applications


def numbers(*values: float) -> dict[str, Any]:
    return {"numbers": {"values": values}}


def test_predict(client: Client) -> None:
    answer = client(APPLICATIONS, "Predict", application="total", input=numbers(1, 2, 3.5))
    assert (answer.output.number, answer.confidence, answer.default, list(answer.models)) == (
        6.5,
        1.0,
        False,
        ["sum:1"],
    )
    tensor = {"datatype": "FP64", "shape": [3], "data": np.array([1.0, 2, 4]).tobytes()}
    assert (
        client(APPLICATIONS, "Predict", application="total", input={"tensor": tensor}).output.number
        == 7
    )
    assert (
        client(APPLICATIONS, "Predict", application="shout", input={"text": "hi"}).output.text
        == "HI"
    )


@pytest.mark.parametrize(
    ("fields", "code", "part"),
    [
        ({"application": "totl", "input": numbers(1, 2, 3)}, "NOT_FOUND", "did you mean 'total'?"),
        ({"application": "total"}, "INVALID_ARGUMENT", "has no input"),
        ({"application": "total", "input": numbers(1, 2)}, "INVALID_ARGUMENT", "3"),
        ({"application": "total", "input": {"text": "hi"}}, "INVALID_ARGUMENT", "f64[3]"),
        ({"application": "shout", "input": numbers(1)}, "INVALID_ARGUMENT", "str is taken"),
        (
            {"application": "total", "input": numbers(1, 2, 3), "slo_ms": -1},
            "INVALID_ARGUMENT",
            "slo_ms",
        ),
    ],
)
def test_what_is_wrong_with_a_query_is_reported(
    client: Client, fields: Any, code: str, part: str
) -> None:
    error = client.refused(APPLICATIONS, "Predict", **fields)
    assert error.code() is grpc.StatusCode[code]
    assert part in error.details(), error.details()


def test_many(client: Client) -> None:
    replies = client(
        APPLICATIONS,
        "PredictMany",
        application="total",
        inputs=[numbers(i, 0, 1) for i in range(5)],
    ).replies
    assert [reply.prediction.output.number for reply in replies] == [1, 2, 3, 4, 5]
    error = client.refused(
        APPLICATIONS, "PredictMany", application="total", inputs=[numbers(0, 0, 1)] * 6
    )
    assert "grpc.queries_max" in error.details()
    assert (
        "inputs[1]"
        in client.refused(
            APPLICATIONS, "PredictMany", application="total", inputs=[numbers(0, 0, 1), {}]
        ).details()
    )


def test_feedback_by_id_and_by_input(client: Client) -> None:
    answer = client(
        APPLICATIONS, "Predict", application="learns", input=numbers(1, 2, 3), user="ann"
    )
    feedback = {"application": "learns", "id": answer.id, "label": {"number": 6}}
    assert client(APPLICATIONS, "Feedback", **feedback).counted
    assert not client(APPLICATIONS, "Feedback", **feedback).counted
    assert client(
        APPLICATIONS, "Feedback", application="learns", input=numbers(1, 2, 3), score=0.5, weight=2
    ).counted
    unknown = client.refused(APPLICATIONS, "Feedback", application="learns", id="0-0", correct=True)
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    nothing = client.refused(APPLICATIONS, "Feedback", application="learns", id=answer.id)
    assert nothing.code() is grpc.StatusCode.INVALID_ARGUMENT
    default = client(APPLICATIONS, "Predict", application="total", input=numbers(1, 2, 3))
    assert client(
        APPLICATIONS, "Feedback", application="total", id=default.id, correct=True
    ).counted


# -- streams


def test_a_stream_of_queries_has_its_replies_in_order(client: Client) -> None:
    request = message("clipper.v1.PredictRequest")
    sent = [request(application="total", input=numbers(i, i % 7, 0)) for i in range(300)]
    sent[100] = request(application="totl", input=numbers(0, 0, 0))
    replies = list(client.method(APPLICATIONS, "PredictStream")(iter(sent), timeout=PATIENCE_S))
    assert replies[100].failure.code == grpc.StatusCode.NOT_FOUND.value[0]
    del replies[100], sent[100]
    assert [reply.prediction.output.number for reply in replies] == [
        sum(each.input.numbers.values) for each in sent
    ]


def test_a_stream_of_infers(client: Client) -> None:
    good = tensor_of("total", [[1, 2, 3]], id="1")
    with_end_marker = tensor_of("total", [[1, 2, 4]], id="3")
    with_end_marker.parameters["triton_enable_empty_final_response"].bool_param = True
    sent = [good, tensor_of("totl", [[1, 2, 3]], id="2"), with_end_marker]
    one, two, three = client.method(INFERENCE, "ModelStreamInfer")(iter(sent), timeout=PATIENCE_S)
    assert np.frombuffer(one.infer_response.raw_output_contents[0]) == [6.0]
    assert "did you mean 'total'?" in two.error_message
    assert (two.infer_response.id, three.infer_response.id) == ("2", "3")
    assert three.infer_response.parameters["triton_final_response"].bool_param


def test_a_stream_that_is_left_takes_its_queries_along(
    server: clipper.ClipperServer, client: Client, gate: int
) -> None:
    wait_until(lambda: not in_flight(server))
    before = cancelled(server)
    replies = client.method(INFERENCE, "ModelStreamInfer")(
        iter([tensor_of("patient", [[gate + i]]) for i in range(200)])
    )
    wait_until(lambda: in_flight(server) > 1)
    replies.cancel()
    wait_until(lambda: not in_flight(server))
    wait_until(lambda: cancelled(server) > before)


# -- health and reflection


def test_health(client: Client) -> None:
    for service in ("", INFERENCE, APPLICATIONS, "total"):
        assert client(HEALTH, "Check", service=service).status == 1
    unknown = client.refused(HEALTH, "Check", service="totl")
    assert unknown.code() is grpc.StatusCode.NOT_FOUND


def test_health_is_watched() -> None:
    with start() as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"])
        client = Client(server.grpc_address)
        watching = client(HEALTH, "Watch", service="total", timeout=30)
        assert next(watching).status == 1
        server.scale("sum", 0)
        assert next(watching).status == 2
        server.close()
        assert list(watching) == []
        client.channel.close()


def test_reflection_is_enough_to_call_a_method(client: Client) -> None:
    """List the services, get the file of one, and call it with nothing else, as grpcurl does."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    reflection_request = message("grpc.reflection.v1.ServerReflectionRequest")
    sent = [
        reflection_request(list_services=""),
        reflection_request(file_containing_symbol=APPLICATIONS),
        reflection_request(file_by_filename="status.proto"),
        reflection_request(file_by_filename="nothing.proto"),
        reflection_request(all_extension_numbers_of_type="clipper.v1.Value"),
    ]
    listed, found, status, missing, extensions = client.method(REFLECTION, "ServerReflectionInfo")(
        iter(sent), timeout=10
    )
    names = [service.name for service in listed.list_services_response.service]
    assert names == [INFERENCE, APPLICATIONS, HEALTH, REFLECTION]
    assert len(status.file_descriptor_response.file_descriptor_proto) == 3
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert extensions.error_response.error_code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    theirs = descriptor_pool.DescriptorPool()
    for data in found.file_descriptor_response.file_descriptor_proto:
        theirs.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    method = theirs.FindServiceByName(APPLICATIONS).methods_by_name["Predict"]
    request, response = (
        message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type)
    )
    call = client.channel.unary_unary(
        f"/{APPLICATIONS}/Predict",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    assert call(request(application="total", input=numbers(1, 1, 1)), timeout=60).output.number == 3


def test_every_service_can_be_called(client: Client) -> None:
    for service in (INFERENCE, APPLICATIONS, HEALTH, REFLECTION):
        assert pool().FindServiceByName(service).methods
    unknown = client.channel.unary_unary("/inference.GRPCInferenceService/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        unknown(b"", timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- beginning and end


def test_an_address_that_is_taken() -> None:
    with start() as server, pytest.raises(AddressInUse, match=r"grpc\.address"):
        clipper.start(grpc=server.grpc_address)


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"grpc\.address.*expected 'HOST:PORT'"):
        clipper.start(grpc="here")


@pytest.mark.slow  # the frozen container is killed only after its time to end
@pytest.mark.parametrize("drain_s", [0.0, 5.0])
def test_closing_ends_calls_and_streams(drain_s: float) -> None:
    server = start()
    server.deploy("stuck", slow if drain_s else frozen, input="f64[1]", cache=False)
    client = Client(server.grpc_address)
    idle, sent = threading.Event(), threading.Event()

    def requests() -> Iterator[Any]:
        yield tensor_of("stuck", [[1]], timeout=20_000_000)
        sent.set()
        idle.wait(PATIENCE_S)

    stream = client.method(INFERENCE, "ModelStreamInfer")(requests())
    call = client.method(INFERENCE, "ModelInfer").future(
        tensor_of("stuck", [[2]], timeout=20_000_000)
    )
    assert sent.wait(PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while server.stats()["issued"] < 2 and time.monotonic() < until:
        threading.Event().wait(0.001)
    server.close(drain_s=drain_s)
    if drain_s:
        assert np.frombuffer(call.result(PATIENCE_S).raw_output_contents[0]) == [2.0]
        assert np.frombuffer(next(stream).infer_response.raw_output_contents[0]) == [1.0]
    else:
        assert call.exception(PATIENCE_S).code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    idle.set()
    client.channel.close()


def test_http_and_grpc_beside_each_other() -> None:
    with start(http="127.0.0.1:0") as server:
        assert ask(server.http_address, "GET", "/v2/health/live").status == 200
        client = Client(server.grpc_address)
        assert client(INFERENCE, "ServerLive").live
        client.channel.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (0, "whole"),
        (2**63 - 1, "whole"),
        (-(2**63), "whole"),
        (2**63, "json"),
        (-(2**63) - 1, "json"),
    ],
)
def test_a_whole_number_beyond_64_bits_is_json(number: int, kind: str) -> None:
    value = _value_of(number)
    assert value.WhichOneof("kind") == kind
    assert int(getattr(value, kind)) == number
