"""Calls of gRPC on our own HTTP/2: the same replies as grpcio's server gives with the same
handlers, and every error of gRPC itself, by a client of frames."""

import asyncio
import contextlib
import gzip
import itertools
import random
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc
import grpc.aio
import h2.events

import clipper
from clipper.frontend.grpc.call_context import CallDetails
from clipper.frontend.protocols import message
from clipper_core.http.http2_protocol import Http2Error
from tests.frontend.conftest import PATIENCE_S, total
from tests.frontend.test_grpc import (
    APPLICATIONS,
    HEALTH,
    INFERENCE,
    Client,
    gated,
    numbers,
    start,
    tensor_of,
)
from tests.frontend.test_http2 import Client as FrameClient
from tests.frontend.test_http2 import Line
from tests.memory_container import wait_until

INFER = f"/{INFERENCE}/ModelInfer"
HEAD = {"content-type": "application/grpc", "te": "trailers"}
REQUEST: bytes = tensor_of("total", [[1, 2, 3]]).SerializeToString()
MESSAGE_BYTES_MAX = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    gates = tmp_path_factory.mktemp("gates")
    grpc_settings = {"address": "127.0.0.1:0", "message_bytes_max": MESSAGE_BYTES_MAX}
    with start(grpc=grpc_settings) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        server.deploy("stuck", gated(gates), input="f64[1]", cache=False)
        server.app("stuck", models=["stuck"], slo_ms=60_000)
        yield server
        (gates / "1").touch()  # the model ends


def grpc_of(server: clipper.ClipperServer) -> Any:
    endpoints: Any = server._endpoints
    return endpoints.frontends._grpc


class WithGrpcio:
    """Our methods as handlers of grpcio (grpc.GenericRpcHandler)."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def service(self, details: Any) -> Any:
        """Return the handler of a call."""
        found = self._source.method_of(CallDetails(details.method, details.invocation_metadata))
        if found is None:
            return None
        sides = (
            "stream" if stream else "unary" for stream in (found.reads_stream, found.writes_stream)
        )
        make = getattr(grpc, f"{'_'.join(sides)}_rpc_method_handler")
        run = serving_stream(found) if found.writes_stream else serving(found)
        return make(run, response_serializer=found.write)


def serving(method: Any) -> Any:
    """Return a method's coroutine function, with what grpcio gives it."""

    async def serve(request: Any, context: Any) -> Any:
        return await method.run(request, WithCodes(context))

    return serve


def serving_stream(method: Any) -> Any:
    """Return a method's generator function, with what grpcio gives it."""

    async def serve(request: Any, context: Any) -> Any:
        async for reply in method.run(request, WithCodes(context)):
            yield reply

    return serve


class WithCodes:
    """The context of a call of grpcio, which takes our codes."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: Any, text: str, trailing: Any = ()) -> None:
        """End the call by an error."""
        await self._context.abort(grpc.StatusCode[code.name], text, trailing)


# -- beside grpcio's server


@pytest.fixture(scope="module")
def beside(server: clipper.ClipperServer) -> Iterator[str]:
    """Yield the address of a server of grpcio with the same handlers."""
    ours, found = grpc_of(server), {}
    loop = server._endpoints.frontends._listeners._loop  # type: ignore[union-attr]
    ready, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
        theirs = found["server"] = grpc.aio.server(options=options)
        theirs.add_generic_rpc_handlers(tuple(map(WithGrpcio, ours._open._sources)))
        found["port"] = theirs.add_insecure_port("127.0.0.1:0")
        await theirs.start()
        ready.set()

    async def end() -> None:
        await found["server"].stop(0)
        ended.set()

    loop.call(lambda: found.update(task=asyncio.ensure_future(serve())))
    assert ready.wait(PATIENCE_S)
    yield f"127.0.0.1:{found['port']}"
    loop.call(lambda: found.update(task=asyncio.ensure_future(end())))
    assert ended.wait(PATIENCE_S)


def drawn(rng: random.Random) -> tuple[str, bytes, list[tuple[str, str | bytes]]]:
    """Draw a call: its method, its message and its metadata."""
    infer = tensor_of(
        rng.choice(("total", "sum", "sun")),
        [[rng.random()] * rng.choice((2, 3, 3, 3))] * rng.choice((1, 1, 2, 40)),
        datatype=rng.choice(("FP64", "FP64", "FP32", "FP99")),
        **rng.choice(({}, {"timeout": 3_000_000}, {"timeout": -1})),
    )
    predict = message("clipper.v1.PredictRequest")(
        application=rng.choice(("total", "total", "tota")),
        input=rng.choice((numbers(1, 2, 3), numbers(1, 2), {"text": "no"}, {})),
        slo_ms=rng.choice((0, 0, 2000, -1)),
        request_id=rng.choice(("", "mine")),
    )
    feedback = message("clipper.v1.FeedbackRequest")(application="total", id="none", correct=True)
    named = rng.choice(("total", "sum", "sun", ""))
    method, sent = rng.choice(
        (
            (INFER, infer),
            (INFER, infer),
            (f"/{APPLICATIONS}/Predict", predict),
            (f"/{APPLICATIONS}/Predict", predict),
            (f"/{APPLICATIONS}/Feedback", feedback),
            (f"/{INFERENCE}/ServerLive", None),
            (f"/{INFERENCE}/ServerReady", None),
            (f"/{INFERENCE}/ServerMetadata", None),
            (f"/{INFERENCE}/ModelReady", message("inference.ModelReadyRequest")(name=named)),
            (f"/{INFERENCE}/ModelMetadata", message("inference.ModelMetadataRequest")(name=named)),
            (f"/{HEALTH}/Check", message("grpc.health.v1.HealthCheckRequest")(service=named)),
            (f"/{INFERENCE}/Nothing", None),
            ("/no.such.Service/Method", infer),
        )
    )
    data = b"" if sent is None else sent.SerializeToString()
    if rng.random() < 0.2:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(rng.randrange(3)) + data[at + 1 :]
    if rng.random() < 0.03:
        data = bytes(MESSAGE_BYTES_MAX + 1)
    metadata: list[tuple[str, str | bytes]] = []
    for each in (
        ("x-request-id", "1"),
        ("x-request-id", "2"),
        ("mm-model-id", "sum"),
        ("mm-model-id-bin", b"sum,total"),
        ("some-bin", bytes(range(7))),
        ("traceparent", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-00"),
    ):
        if rng.random() < 0.1:
            metadata.append(each)
    return method, data, metadata


# of a reply and of a call, what differs each time
VARYING = ("latency_us", "id", "prediction_id", "answers")
SPANS = ("traceparent", "grpc-accept-encoding")
REPLIES = {
    INFER: "inference.ModelInferResponse",
    f"/{APPLICATIONS}/Predict": "clipper.v1.Prediction",
}


def outcome(channel: Any, method: str, data: bytes, metadata: Any, said: set[str]) -> Any:
    """Return how a call ends, without what differs each time."""
    try:
        reply, call = channel.unary_unary(method).with_call(
            data, timeout=PATIENCE_S, metadata=metadata
        )
    except grpc.RpcError as error:
        reply, call = None, error
    said.add(call.code().name)
    if reply is not None and method in REPLIES:
        read = message(REPLIES[method]).FromString(reply)
        for name in VARYING:
            if name in read.DESCRIPTOR.fields_by_name and method != INFER:
                read.ClearField(name)
            if method == INFER:
                read.parameters.pop(name, None)
        reply = read
    trailing = [pair for pair in call.trailing_metadata() if pair[0] not in SPANS]
    text = call.details() or ""
    if call.code() in OWN_TEXTS and "grpc-status-details-bin" not in dict(trailing):
        text = ""
    return call.code(), text, trailing, reply


# statuses of gRPC itself, which every server words as it likes
OWN_TEXTS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_replies_are_those_of_grpcio(server: clipper.ClipperServer, beside: str) -> None:
    rng, said = random.Random(1), set[str]()
    with (
        grpc.insecure_channel(server.grpc_address) as ours,
        grpc.insecure_channel(beside) as theirs,
    ):
        for _ in range(300):
            call = drawn(rng)
            assert outcome(ours, *call, said) == outcome(theirs, *call, said), call
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"} <= said


def test_many_calls_of_an_asynchronous_client(server: clipper.ClipperServer) -> None:
    async def ask() -> list[float]:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            call = channel.unary_unary(INFER)
            sent = [tensor_of("total", [[i, 1, 2]]).SerializeToString() for i in range(200)]
            replies = await asyncio.gather(*[call(each, timeout=PATIENCE_S) for each in sent])
        read = [message("inference.ModelInferResponse").FromString(each) for each in replies]
        return [struct.unpack("<d", each.raw_output_contents[0])[0] for each in read]

    assert asyncio.run(ask()) == [i + 3 for i in range(200)]


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(server: clipper.ClipperServer, coding: Any) -> None:
    with grpc.insecure_channel(server.grpc_address, compression=coding) as channel:
        sent = tensor_of("total", [[i, 1, 2] for i in range(500)]).SerializeToString()
        reply = channel.unary_unary(INFER)(sent, timeout=PATIENCE_S)
    read = message("inference.ModelInferResponse").FromString(reply)
    assert list(read.outputs[0].shape) == [500]


# -- by frames


class Calls(FrameClient):
    """A client of frames that reads trailers."""

    def _heed(self, event: Any) -> None:
        if isinstance(event, h2.events.TrailersReceived):
            self.replies[event.stream_id][1].update(dict(event.headers))
        else:
            super()._heed(event)


class CallLine(Line):
    """A connection that makes calls."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.client.__class__ = Calls

    def __enter__(self) -> "CallLine":
        return self

    def call(
        self, sent: bytes, path: str = INFER, ends: bool = True, **more: str
    ) -> tuple[int, str, bytes, dict[str, str]]:
        """Make a call; return its status, its text, the bytes of its messages and its fields."""
        headers = HEAD | {name.replace("_", "-"): value for name, value in more.items()}
        stream = self.client.ask("POST", path, sent, headers, ends)
        self.wait(stream)
        status, fields, body = self.client.replies[stream]
        assert status == 200
        return int(fields["grpc-status"]), fields.get("grpc-message", ""), body, fields


def prefixed(data: bytes, is_compressed: int = 0) -> bytes:
    return struct.pack(">BI", is_compressed, len(data)) + data


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


ZEROS = packed(bytes(MESSAGE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("sent", "more", "status", "text"),
    [
        (prefixed(REQUEST), {}, 0, ""),
        (prefixed(packed(REQUEST), 1), {"grpc_encoding": "gzip"}, 0, ""),
        (prefixed(zlib.compress(REQUEST), 1), {"grpc_encoding": "deflate"}, 0, ""),
        (prefixed(REQUEST), {"grpc_encoding": "gzip"}, 0, ""),
        (prefixed(REQUEST), {"some_bin": "AAE, Ag=="}, 0, ""),
        (prefixed(REQUEST), {"grpc_timeout": "99999999H"}, 0, ""),
        (prefixed(REQUEST), {"grpc_unknown": "1"}, 0, ""),
        (prefixed(REQUEST, 1), {}, 13, "does not say how"),
        (prefixed(REQUEST, 2), {}, 13, "neither 0 nor 1"),
        (prefixed(REQUEST, 1), {"grpc_encoding": "zstd"}, 12, "'zstd' is not known"),
        (prefixed(REQUEST, 1), {"grpc_encoding": "gzip"}, 13, "is not one of gzip"),
        (prefixed(packed(REQUEST)[:-1], 1), {"grpc_encoding": "gzip"}, 13, "not one of"),
        (prefixed(ZEROS, 1), {"grpc_encoding": "gzip"}, 8, "more than 1048576 bytes"),
        (struct.pack(">BI", 0, 1 << 31), {}, 8, "more than 1048576 bytes"),
        (prefixed(REQUEST)[:-1], {}, 13, "cut off"),
        (b"", {}, 12, "no messages"),
        (prefixed(REQUEST) * 2, {}, 12, "2 messages"),
        (prefixed(b"\xff"), {}, 3, "the bytes are no inference.ModelInferRequest."),
        (prefixed(REQUEST), {"grpc_timeout": "abc"}, 13, "grpc-timeout 'abc'"),
        (prefixed(REQUEST), {"grpc_timeout": "123456789S"}, 13, "grpc-timeout"),
        (prefixed(REQUEST), {"grpc_timeout": "0n"}, 4, ""),
        (prefixed(REQUEST), {"some_bin": "!"}, 13, "some-bin is not base64"),
        (prefixed(REQUEST), {"large": "x" * 17000}, 8, "metadata has more than 16384"),
        (prefixed(REQUEST), {"path": "/a.B/%C3"}, 12, "no method /a.B/%25C3"),
    ],
    ids=itertools.count(),
)
def test_how_calls_end(
    server: clipper.ClipperServer, sent: bytes, more: dict[str, str], status: int, text: str
) -> None:
    with CallLine(server.grpc_address) as line:
        found = line.call(sent, **more)
        assert found[0] == status, found
        assert text in found[1]
        if status == 12 and "zstd" in text:
            assert found[3]["grpc-accept-encoding"] == "identity,deflate,gzip"
        if status == 0:
            assert found[2][:1] == b"\0"
        assert line.call(prefixed(REQUEST))[0] == 0, "only that call has ended"


def test_a_deadline_ends_a_call_whose_message_does_not_come(server: clipper.ClipperServer) -> None:
    with CallLine(server.grpc_address) as line:
        found = line.call(prefixed(REQUEST)[:9], ends=False, grpc_timeout="20m")
        assert found[:2] == (4, "Deadline Exceeded")
        assert line.client.resets.get(1) in (None, Http2Error.NO_ERROR)


def test_messages_come_in_frames_of_one_byte(server: clipper.ClipperServer) -> None:
    with CallLine(server.grpc_address) as line:
        stream = line.client.ask("POST", INFER, None, HEAD, ends=False)
        data = prefixed(REQUEST)
        for i in range(len(data)):
            line.client.send(stream, data[i : i + 1], ends=i == len(data) - 1)
        line.wait(stream)
        assert line.client.replies[stream][1]["grpc-status"] == "0"


def test_what_is_no_call_is_answered_over_http(server: clipper.ClipperServer, query: Any) -> None:
    with CallLine(server.grpc_address) as line:
        for headers in ({"content-type": "text/plain"}, {}):
            found = line.ask("POST", INFER, prefixed(REQUEST), headers)
            assert (found.status, b"this address speaks gRPC" in found.body) == (415, True)


def test_a_reset_cancels_the_query(server: clipper.ClipperServer) -> None:
    ours = grpc_of(server)

    def cancelled() -> int:
        return sum(
            found.cancelled.value for found in ours._counts._methods if found.method == "ModelInfer"
        )

    before = cancelled()
    with CallLine(server.grpc_address) as line:
        sent = tensor_of("stuck", [[1000]]).SerializeToString()
        stream = line.client.ask("POST", INFER, prefixed(sent), HEAD)
        wait_until(lambda: ours._counts.open == 1, "the call is under way")
        line.client.h2.reset_stream(stream, Http2Error.CANCEL)
        line.client.flush()
        wait_until(lambda: ours._counts.open == 0, "the call has ended")
        assert cancelled() == before + 1
        assert line.call(prefixed(REQUEST))[0] == 0
    wait_until(lambda: ours._open.open_calls == 0, "all calls are forgotten")
    assert ours._open.memory.held == 0


@pytest.mark.parametrize("sent", ["the end of its side", "the end of both"])
def test_a_client_that_leaves_ends_its_calls(server: clipper.ClipperServer, sent: str) -> None:
    """One that only ends its sending side gets its answers."""
    ours = grpc_of(server)
    wait_until(lambda: ours._open.open_calls == 0, "calls of other tests have ended")
    line = CallLine(server.grpc_address)
    watch = line.client.ask("POST", f"/{HEALTH}/Watch", prefixed(b""), HEAD)
    while watch not in line.client.replies:
        for event in line.client.h2.receive_data(line.socket.recv(1 << 16)):
            line.client._heed(event)
    if sent == "the end of both":
        line.socket.close()
    else:
        stream = line.client.ask("POST", INFER, prefixed(REQUEST), HEAD)
        line.socket.shutdown(socket.SHUT_WR)
        while stream not in line.client.ended:
            data = line.socket.recv(1 << 16)
            assert data
            for event in line.client.h2.receive_data(data):
                line.client._heed(event)
        assert line.client.replies[stream][1]["grpc-status"] == "0"
        line.socket.close()
    wait_until(lambda: ours._open.open_calls == 0, "the calls have ended")


def test_all_messages_under_way_have_one_bound(server: clipper.ClipperServer) -> None:
    memory = grpc_of(server)._open.memory
    most, memory.bytes_max = memory.bytes_max, 1000
    try:
        with CallLine(server.grpc_address) as line:
            found = line.call(prefixed(bytes(2000)))
            assert (found[0], "have 1000 bytes already" in found[1]) == (8, True)
            assert line.call(prefixed(REQUEST))[0] == 0
        assert memory.held == 0
    finally:
        memory.bytes_max = most


def test_a_client_that_reads_nothing_stops_its_stream_only(server: clipper.ClipperServer) -> None:
    """Answers of a stream wait until there is room; another call of the connection is answered."""
    with Client(server.grpc_address).channel as channel:
        ask = channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")
        sent = tensor_of("total", np_rows(20_000)).SerializeToString()
        replies = ask(iter([sent] * 60), timeout=PATIENCE_S)
        first = next(replies)
        assert channel.unary_unary(INFER)(REQUEST, timeout=PATIENCE_S)
        assert len([first, *replies]) == 60


def np_rows(n: int) -> list[list[float]]:
    return [[1.0, 2.0, 3.0]] * n


def test_a_server_that_closes_says_so() -> None:
    with start() as server:
        line = CallLine(server.grpc_address)
        with contextlib.closing(line.socket):
            assert line.call(b"", f"/{INFERENCE}/ServerLive")[0] == 12
            assert line.call(prefixed(b""), f"/{INFERENCE}/ServerLive")[0] == 0
            server.close()
            while line.client.gone is None:
                data = line.socket.recv(1 << 16)
                assert data
                for event in line.client.h2.receive_data(data):
                    line.client._heed(event)
            assert line.client.gone.error_code == Http2Error.NO_ERROR
