"""Limits of a client of gRPC before it is known: connections, keepalive pings, metadata and
messages of calls without a key."""

import contextlib
import queue
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.credentials.credential_file import line_of, new_key
from clipper.settings.grpc import GrpcSettings
from tests.frontend.conftest import PATIENCE_S, total
from tests.frontend.test_grpc import APPLICATIONS, HEALTH, Client, numbers, start
from tests.memory_container import wait_until

ANSWER = {"application": "total", "input": numbers(1, 2, 3)}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = 4
PING = 6
GOAWAY = 7


class Guarded:
    """A server that requires a key."""

    def __init__(self, server: clipper.ClipperServer, key: str) -> None:
        self.server, self.key = server, key

    def client(self, *metadata: tuple[str, str]) -> Client:
        return Client(self.server.grpc_address, None, metadata)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    keys, key = tmp_path_factory.mktemp("door") / "keys", new_key()
    keys.write_text(f"{line_of('ann', key)}\n")
    with start(http={"api_keys_file": str(keys)}) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        yield Guarded(server, key)


# -- calls


@pytest.mark.parametrize("shown", [(), (("authorization", "Bearer wrong"),)])
@pytest.mark.parametrize(
    "method",
    [
        f"/{APPLICATIONS}/Predict",
        f"/{APPLICATIONS}/PredictStream",
        "/inference.GRPCInferenceService/ModelInfer",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/no.such.Service/Method",
    ],
)
def test_a_call_without_a_key_is_refused_before_its_message(
    guarded: Guarded, method: str, shown: tuple[tuple[str, str], ...]
) -> None:
    never: queue.Queue[bytes] = queue.Queue()
    with contextlib.closing(guarded.client().channel) as channel:
        call = channel.stream_unary(method)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter(never.get, None), timeout=PATIENCE_S, metadata=shown)
        never.put(None)  # type: ignore[arg-type]  # ends the thread of the client
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "clipper key NAME" in refused.value.details()


def test_a_call_with_a_key_and_a_probe_without_one_are_answered(guarded: Guarded) -> None:
    client = guarded.client(("authorization", f"Bearer {guarded.key}"))
    with contextlib.closing(client.channel):
        assert client(APPLICATIONS, "Predict", **ANSWER).output.number == 6
    client = guarded.client()
    with contextlib.closing(client.channel):
        client(HEALTH, "Check")


def test_refused_calls_are_counted(guarded: Guarded) -> None:
    def count() -> int:
        frontends: Any = guarded.server._endpoints.frontends
        return sum(
            found.by_code.get("UNAUTHENTICATED", 0)
            for found in frontends._grpc_counts._methods
            if (found.service, found.method) == (APPLICATIONS, "Predict")
        )

    before, client = count(), guarded.client()
    with contextlib.closing(client.channel):
        client.refused(APPLICATIONS, "Predict", **ANSWER)
    assert count() == before + 1


@pytest.mark.parametrize("name", ["authorization", "x-request-id"])
def test_metadata_that_comes_twice_is_refused(guarded: Guarded, name: str) -> None:
    good = ("authorization", f"Bearer {guarded.key}")
    twice = ((name, "a"),) if name == "authorization" else ((name, "a"), (name, "b"))
    client = guarded.client(good, *twice)
    with contextlib.closing(client.channel):
        error = client.refused(APPLICATIONS, "Predict", **ANSWER)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"the metadata {name} comes 2 times" in error.details()


# -- connections


class Frames:
    """A connection that speaks HTTP/2 by frames."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.line = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.send(SETTINGS, b"", before=PREFACE)

    def send(self, kind: int, payload: bytes, before: bytes = b"") -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes((kind, 0)) + bytes(4)
        self.line.sendall(before + head + payload)

    def next(self) -> tuple[int, int, bytes]:
        """Return the next frame: its kind, its flags and its payload."""
        head = self._read(9)
        return head[3], head[4], self._read(int.from_bytes(head[:3], "big"))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.line.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def until(self, kind: int, flags: int = 0) -> bytes:
        while True:
            found, has, payload = self.next()
            if found == kind and has == flags:
                return payload


def test_keepalive_pings_are_answered_unless_they_come_too_often() -> None:
    assert GrpcSettings().ping_s_min <= 5, "clients with pings each 5 s are usual"
    with start(grpc={"address": "127.0.0.1:0", "ping_s_min": 0}) as server:
        frames = Frames(server.grpc_address)
        with contextlib.closing(frames.line):
            for i in range(50):
                frames.send(PING, struct.pack(">Q", i))
                assert frames.until(PING, 1) == struct.pack(">Q", i)
    with start(grpc={"address": "127.0.0.1:0", "ping_s_min": 3600}) as server:
        frames = Frames(server.grpc_address)
        with contextlib.closing(frames.line):
            with contextlib.suppress(ConnectionError):
                for i in range(5):
                    frames.send(PING, struct.pack(">Q", i))
            assert frames.until(GOAWAY)[8:] == b"too_many_pings"


def test_connections_have_a_bound() -> None:
    with start(grpc={"address": "127.0.0.1:0", "connections_max": 2}) as server:
        first, second = Frames(server.grpc_address), Frames(server.grpc_address)
        for frames in (first, second):
            frames.until(SETTINGS)
        third = Frames(server.grpc_address)
        with pytest.raises((EOFError, ConnectionError)):
            third.until(SETTINGS)
        first.line.close()
        wait_until(lambda: _is_served(server.grpc_address), "a free place is given again")
        for frames in (second, third):
            frames.line.close()


def _is_served(address: str) -> bool:
    with contextlib.suppress(EOFError, ConnectionError):
        frames = Frames(address)
        with contextlib.closing(frames.line):
            frames.until(SETTINGS)
            return True
    return False
