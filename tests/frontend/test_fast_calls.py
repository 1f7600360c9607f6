"""Calls of ModelInfer in the core: the replies that Python gives to the same calls, and the same
errors, counts and ends."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.credentials.credential_file import line_of, new_key
from clipper.frontend.grpc import call_stream
from clipper.frontend.protocols import message
from tests.frontend.conftest import PATIENCE_S, total
from tests.frontend.test_call_stream import HEAD, INFER, CallLine, grpc_of, prefixed
from tests.frontend.test_grpc import INFERENCE, Client, gated, start, tensor_of
from tests.memory_container import wait_until

REQUEST: Any = message("inference.ModelInferRequest")
# a field that ModelInferRequest does not have: the core leaves such a request to Python
UNKNOWN = b"\x78\x01"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def pairs(rows: Any) -> Any:
    return rows[:, :2]


def labels(rows: Any) -> list[str]:
    return [f"row {row[0]:.0f} Ü" for row in rows]


def positive(rows: Any) -> list[bool]:
    return [bool(row[0] > 0) for row in rows]


def doubled(rows: Any) -> Any:
    return 2 * rows.sum(1)


def raising(rows: Any) -> Any:
    raise ValueError("no row is right")


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def server(gates: Path) -> Iterator[clipper.ClipperServer]:
    with start() as server:
        for dtype in ("f64", "f32", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"):
            server.deploy(f"of_{dtype}", total, input=f"{dtype}[3]")
            server.app(dtype, models=[f"of_{dtype}"], slo_ms=5000)
        server.deploy("pairs", pairs, input="f64[3]")
        server.deploy("labels", labels, input="f64[3]")
        server.deploy("positive", positive, input="f64[3]")
        server.deploy("raising", raising, input="f64[3]")
        server.deploy("raising2", raising, input="f64[3]")
        server.deploy("doubled", doubled, input="f64[3]")
        server.app("mean", models=["of_f64", "doubled"], slo_ms=5000)
        server.app("mixture", models=["of_f64", "doubled"], slo_ms=5000, policy="mixture")
        server.app("stacking", models=["of_f64", "doubled"], slo_ms=5000, policy="stacking")
        server.app("texts", models=["labels"], slo_ms=5000, policy="mixture")
        server.app("half", models=["of_f64", "raising"], slo_ms=5000)
        server.app("none", models=["raising", "raising2"], slo_ms=5000)
        server.deploy("stuck", gated(gates), input="f64[1]", cache=False)
        server.app("stuck", models=["stuck"], slo_ms=60_000)
        server.deploy("stuck2", gated(gates), input="f64[1]", cache=False)
        server.app("both", models=["stuck", "stuck2"], slo_ms=60_000)
        server.app("hasty", models=["stuck"], slo_ms=1, default=-1.0)
        server.app("strict", models=["stuck"], slo_ms=1)
        yield server
        (gates / "1").touch()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams of the calls that Python answers."""
    found: list[int] = []

    class Noted(call_stream.CallStream):
        def __init__(self, server: Any, owner: Any, id: int, head: bytes) -> None:
            found.append(id)
            super().__init__(server, owner, id, head)

    monkeypatch.setattr(call_stream, "CallStream", Noted)
    return found


@pytest.fixture(scope="module")
def client(server: clipper.ClipperServer) -> Iterator[Client]:
    made = Client(server.grpc_address)
    with made.channel:
        yield made


def plain(reply: Any) -> Any:
    """Return a reply without what differs between equal queries."""
    if "prediction_id" in reply.parameters:
        del reply.parameters["prediction_id"]
    return reply


def outcome(client: Client, request: bytes, **more: Any) -> Any:
    """Return a reply, or the code and the text of an error."""
    call = client.method(INFERENCE, "ModelInfer")
    try:
        return plain(call(request, **({"timeout": PATIENCE_S} | more)))
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]


def in_core(client: Client, in_python: list[int], request: bytes, **more: Any) -> Any:
    """Return the outcome of a call that the core has answered: Python has the first ones for a
    class of SLO, and makes its lane."""
    found: list[Any] = []

    def is_in_core() -> bool:
        del in_python[:]
        found.append(outcome(client, request, **more))
        return in_python == []

    wait_until(is_in_core, "the core answers")
    return found[-1]


NAMES = {
    "f64": "FP64",
    "f32": "FP32",
    "i64": "INT64",
    "i32": "INT32",
    "i16": "INT16",
    "i8": "INT8",
    "u64": "UINT64",
    "u32": "UINT32",
    "u16": "UINT16",
    "u8": "UINT8",
}
FIELDS = {
    "FP64": "fp64_contents",
    "FP32": "fp32_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "INT16": "int_contents",
    "INT8": "int_contents",
    "UINT64": "uint64_contents",
    "UINT32": "uint_contents",
    "UINT16": "uint_contents",
    "UINT8": "uint_contents",
}


def sent(model: str, rows: Any, dtype: str, *, is_raw: bool = True, **fields: Any) -> Any:
    """Return a request with rows of this type."""
    array = np.asarray(rows).astype(f"{dtype[0]}{int(dtype[1:]) // 8}")
    request = REQUEST(model_name=model, **fields)
    tensor = request.inputs.add(name="x", datatype=NAMES[dtype], shape=array.shape)
    if is_raw:
        request.raw_input_contents.append(array.tobytes())
    else:
        getattr(tensor.contents, FIELDS[NAMES[dtype]]).extend(array.ravel().tolist())
    return request


@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "typed"])
@pytest.mark.parametrize("dtype", [*NAMES])
def test_numbers_of_each_type(client: Client, in_python: Any, dtype: str, is_raw: bool) -> None:
    rows = [[1, 2, 100], [3, 4, 5]] if dtype[0] == "u" else [[1, -2, 100], [3, -4, 5]]
    for some in (rows, rows[:1], rows[0]):
        request = sent(dtype, some, dtype, is_raw=is_raw, id="q 1").SerializeToString()
        found = in_core(client, in_python, request)
        assert found.id == "q 1"
        assert found == outcome(client, request + UNKNOWN)
        assert len(in_python) == 1


ROWS = [[1, 2, 3], [4, 5, 6]]
PLAIN = {
    "two models": sent("mean", ROWS[:1], "f64", id="q"),
    "two models, two rows": sent("mean", ROWS, "f64"),
    "two models by mixture": sent("mixture", ROWS[:1], "f64"),
    "two models by stacking": sent("stacking", ROWS, "f64", id="q"),
    "a text by mixture": sent("texts", ROWS[:1], "f64"),
    "two models of which one fails": sent("half", ROWS[:1], "f64"),
    "two models that fail": sent("none", ROWS[:1], "f64"),
    "a version": sent("of_f64", [[1, 2, 3]], "f64", model_version="1"),
    "a model by its name": sent("of_f64", [[1, 2, 3]], "f64"),
    "no id": sent("f64", [[1, 2, 3]], "f64"),
    "32 rows": sent("f64", np.arange(96).reshape(32, 3), "f64"),
    "an output of two numbers": sent("pairs", [[1, 2, 3]], "f64"),
    "outputs of two numbers": sent("pairs", [[1, 2, 3], [4, 5, 6]], "f64"),
    "a text": sent("labels", [[1, 2, 3]], "f64"),
    "texts": sent("labels", [[1, 2, 3], [10, 5, 6]], "f64", id="some"),
    "a truth value": sent("positive", [[1, 2, 3]], "f64"),
    "truth values": sent("positive", [[1, 2, 3], [-1, 5, 6]], "f64"),
    "the output's name": sent("f64", [[1, 2, 3]], "f64", outputs=[{"name": "output"}]),
    "an error of the model": sent("raising", [[1, 2, 3]], "f64"),
    "a default": sent("hasty", [[0]], "f64", id="mine"),
    "no answer in time": sent("strict", [[0]], "f64"),
    "a timeout": sent("f64", [[1, 2, 3]], "f64", parameters={"timeout": {"int64_param": 90_000}}),
    "a salt": sent("f64", [[1, 2, 3]], "f64", parameters={"salt": {"int64_param": 7}}),
    "a user": sent("f64", [[1, 2, 3]], "f64", parameters={"user": {"string_param": "ann"}}),
}


@pytest.mark.parametrize("of", [*PLAIN])
def test_plain_calls_get_the_reply_that_python_gives(
    client: Client, in_python: Any, of: str
) -> None:
    request = PLAIN[of].SerializeToString()
    for metadata in ((), (("x-request-id", "own id"), ("user-agent-of", "somebody"))):
        found = in_core(client, in_python, request, metadata=metadata)
        again = outcome(client, request + UNKNOWN, metadata=metadata)
        assert len(in_python) == 1
        assert found == again


def changed(**fields: Any) -> Any:
    """Return a request that the core reads, with these fields."""
    request = sent("f64", [[1, 2, 3]], "f64")
    request.MergeFrom(REQUEST(**fields))
    return request


def of_tensor(**fields: Any) -> Any:
    request = sent("f64", [[1, 2, 3]], "f64")
    request.inputs[0].MergeFrom(type(request.inputs[0])(**fields))
    return request


FOREIGN = {
    "an unknown model": changed(model_name="no"),
    "an unknown version": changed(model_name="of_f64", model_version="7"),
    "a version of an application": changed(model_version="1"),
    "an id that is no ASCII": changed(id="schön"),
    "a long id": changed(id="x" * 129),
    "two tensors": changed(inputs=[{"name": "y", "datatype": "FP64", "shape": [1]}]),
    "two raw contents": changed(raw_input_contents=[bytes(8)]),
    "too few bytes": sent("f64", [[1, 2]], "f64"),
    "another shape": sent("f64", [[[1, 2, 3]]], "f64"),
    "another type": sent("f64", [[1, 2, 3]], "f32"),
    "no rows": sent("f64", np.empty((0, 3)), "f64"),
    "33 rows": sent("f64", np.zeros((33, 3)), "f64"),
    "parameters of a tensor": of_tensor(parameters={"binary_data_size": {"int64_param": 24}}),
    "another dimension": of_tensor(shape=[2]),
    "another output": changed(outputs=[{"name": "other"}]),
    "an output twice": changed(outputs=[{"name": "output"}, {"name": "output"}]),
    "an output with parameters": changed(
        outputs=[{"name": "output", "parameters": {"classification": {"int64_param": 2}}}]
    ),
    "a priority that there is not": changed(parameters={"priority": {"int64_param": 4}}),
    "a wrong timeout": changed(parameters={"timeout": {"int64_param": -1}}),
    "a timeout that is no number": changed(parameters={"timeout": {"string_param": "soon"}}),
    "a timeout beyond all bounds": changed(parameters={"timeout": {"int64_param": 1 << 62}}),
    "a user that is no text": changed(parameters={"user": {"int64_param": 1}}),
    "slo_ms": changed(parameters={"slo_ms": {"int64_param": 1}}),
    "a wrong byte": sent("i8", [[1, 2, 3]], "i8", is_raw=False),
}
FOREIGN["a wrong byte"].inputs[0].contents.int_contents[0] = 1000


@pytest.mark.parametrize("of", [*FOREIGN])
def test_other_calls_are_left_to_python(client: Client, in_python: Any, of: str) -> None:
    request = FOREIGN[of].SerializeToString()
    found = outcome(client, request)
    assert len(in_python) == 1
    assert found == outcome(client, request + UNKNOWN)


@pytest.mark.parametrize(
    "metadata",
    [
        ("mm-model-id", "of_f64"),
        ("data-bin", b"\x00"),
        ("tracestate", "a=b"),
        ("x-request-id", "x" * 200),
    ],
)
def test_calls_whose_metadata_means_more_are_left_to_python(
    client: Client, in_python: Any, metadata: Any
) -> None:
    request = sent("f64", [[1, 2, 3]], "f64").SerializeToString()
    assert outcome(client, request, metadata=(metadata,)).model_name
    assert len(in_python) == 1


def test_bytes_that_are_no_message_get_an_error(client: Client, in_python: Any) -> None:
    whole = sent("f64", [[1, 2, 3]], "f64", id="q").SerializeToString()
    for end in range(len(whole)):
        assert outcome(client, whole[:end]) == outcome(client, UNKNOWN + whole[:end])


def test_a_trace_goes_on(client: Client, in_python: Any) -> None:
    call = client.method(INFERENCE, "ModelInfer")
    request = sent("f64", [[1, 2, 3]], "f64").SerializeToString()
    in_core(client, in_python, request)
    _, ended = call.with_call(request, timeout=PATIENCE_S, metadata=(("traceparent", TRACE),))
    trailing = dict(ended.trailing_metadata())
    assert trailing["traceparent"].split("-")[1] == TRACE.split("-")[1]
    assert trailing["traceparent"] != TRACE
    assert in_python == []


def test_many_calls_at_once(server: clipper.ClipperServer, in_python: Any) -> None:
    """Heads of all calls first, then all messages; every reply is its caller's."""
    with CallLine(server.grpc_address) as line:
        h2 = line.client.h2
        streams = []
        for _ in range(50):
            stream = h2.get_next_available_stream_id()
            fields = [(":method", "POST"), (":scheme", "http"), (":path", INFER)]
            h2.send_headers(stream, [*fields, (":authority", "x"), *HEAD.items()])
            streams.append(stream)
        for i, stream in enumerate(streams):
            data = sent("f64", [[i, 2, 3]], "f64", id=str(i)).SerializeToString()
            h2.send_data(stream, prefixed(data), end_stream=True)
        line.client.flush()
        line.wait(*streams)
        for i, stream in enumerate(streams):
            _, trailers, body = line.client.replies[stream]
            assert trailers["grpc-status"] == "0"
            reply = message("inference.ModelInferResponse").FromString(body[5:])
            assert (reply.id, reply.raw_output_contents[0]) == (
                str(i),
                np.float64(i + 5).tobytes(),
            )
    assert in_python == []


def asked_at_once(line: CallLine, data: bytes) -> int:
    """Send a call in one piece, so that the core gets all of it; return its stream."""
    h2 = line.client.h2
    stream = h2.get_next_available_stream_id()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x")]
    h2.send_headers(stream, [*fields, *HEAD.items()])
    h2.send_data(stream, prefixed(data), end_stream=True)
    line.client.flush()
    return int(stream)


def cancelled(server: clipper.ClipperServer) -> int:
    return sum(
        found.cancelled.value
        for found in grpc_of(server)._counts._methods
        if found.method == "ModelInfer"
    )


@pytest.mark.parametrize("application", ["stuck", "both"])
@pytest.mark.parametrize("by", ["a reset", "the end of the connection"])
def test_a_client_that_gives_up_cancels_its_query(
    server: clipper.ClipperServer, in_python: Any, by: str, application: str
) -> None:
    ours, before = grpc_of(server), cancelled(server)
    request = sent(application, [[1000]], "f64").SerializeToString()
    with CallLine(server.grpc_address) as line:
        streams = [asked_at_once(line, request) for _ in range(3)]
        wait_until(lambda: ours._counts.open == 3, "the calls are under way")
        assert (ours._counts.under_way, in_python) == (0, [])
        if by == "a reset":
            for stream in streams:
                line.client.h2.reset_stream(stream, 8)
            line.client.flush()
            wait_until(lambda: ours._counts.open == 0, "the calls have ended")
            plain_one = asked_at_once(line, sent("f64", [[1, 2, 3]], "f64").SerializeToString())
            line.wait(plain_one)
    wait_until(lambda: ours._counts.open == 0, "the calls have ended")
    wait_until(lambda: cancelled(server) == before + 3, "the calls are counted")


def test_a_deadline_ends_the_query(
    server: clipper.ClipperServer, client: Client, in_python: Any
) -> None:
    first, then = (sent("stuck", [[row]], "f64").SerializeToString() for row in (0, 1000))
    in_core(client, in_python, first, timeout=1)
    code, _ = outcome(client, then, timeout=1)
    assert in_python == []
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: grpc_of(server)._counts.open == 0, "the query has ended")


def test_too_many_calls_are_refused(gates: Path) -> None:
    with start(grpc={"address": "127.0.0.1:0", "calls_max": 4}) as server:
        server.deploy("stuck", gated(gates), input="f64[1]", cache=False)
        server.app("stuck", models=["stuck"], slo_ms=60_000)
        request = sent("stuck", [[2000]], "f64").SerializeToString()
        with CallLine(server.grpc_address) as line:
            streams = [asked_at_once(line, request) for _ in range(8)]
            wait_until(
                lambda: len(line_ended(line)) >= 3, "those beyond the limit have been refused"
            )
            refused = {stream: line.client.replies[stream][1] for stream in line.client.ended}
            assert {found["grpc-status"] for found in refused.values()} == {"8"}
            (gates / "2").touch()
            line.wait(*streams)


def line_ended(line: CallLine) -> list[int]:
    """Return the streams that have ended, after what has come by now."""
    line.socket.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        for event in line.client.h2.receive_data(line.socket.recv(1 << 16)):
            line.client._heed(event)
    line.socket.settimeout(PATIENCE_S)
    return line.client.ended


def test_a_call_needs_a_key(tmp_path: Path, in_python: Any) -> None:
    key = new_key()
    (tmp_path / "keys").write_text(line_of("mine", key) + "\n")
    with start(http={"address": "127.0.0.1:0", "api_keys_file": str(tmp_path / "keys")}) as server:
        server.deploy("sum", total, input="f64[3]")
        request = sent("sum", [[1, 2, 3]], "f64").SerializeToString()
        with_key = Client(server.grpc_address, metadata=(("authorization", f"Bearer {key}"),))
        with with_key.channel:
            found = in_core(with_key, in_python, request, metadata=with_key.metadata)
            assert found.model_name == "sum"
            for metadata in ((), (("authorization", "Bearer other"),)):
                code, _ = outcome(with_key, request, metadata=metadata)
                assert code is grpc.StatusCode.UNAUTHENTICATED
            assert len(in_python) == 2


def test_routes_follow_the_catalog(server: clipper.ClipperServer, in_python: Any) -> None:
    """Calls of several threads while applications come and go get an answer of the application, or
    that it is unknown."""
    numbers = itertools.count(1)
    over = threading.Event()
    wrong: list[Any] = []

    def ask() -> None:
        with Client(server.grpc_address).channel as channel:
            call = channel.unary_unary(
                f"/{INFERENCE}/ModelInfer",
                response_deserializer=message("inference.ModelInferResponse").FromString,
            )
            while not over.is_set():
                number = next(numbers)
                request = tensor_of("comes", [[number, 1, 1]]).SerializeToString()
                try:
                    reply = call(request, timeout=PATIENCE_S)
                    if reply.raw_output_contents[0] != np.float64(number + 2).tobytes():
                        wrong.append(reply)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:  # type: ignore[attr-defined]
                        wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        server.app("comes", models=["of_f64"], slo_ms=5000)
        server.remove_app("comes")
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_calls_are_counted_with_the_others(server: clipper.ClipperServer, in_python: Any) -> None:
    found = next(each for each in grpc_of(server)._counts._methods if each.method == "ModelInfer")
    before, took = found.ok.value, found.durations.snapshot().count
    with Client(server.grpc_address).channel as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        for _ in range(3):
            call(sent("f64", [[1, 2, 3]], "f64").SerializeToString(), timeout=PATIENCE_S)
    assert (found.ok.value, found.durations.snapshot().count) == (before + 3, took + 3)
    assert in_python == []
