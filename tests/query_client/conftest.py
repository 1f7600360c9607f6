"""Servers of three kinds for the tests of the query client, and an own server that answers by a
script."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import clipper
import clipper_client
from clipper.credentials.credential_file import line_of, new_key
from clipper_container.model import Scored
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S, QUICK, patient_queries, total, warm_workers

__all__ = ["patient_queries"]

SLO_MS = 60_000.0


def scale(columns: Any) -> Any:
    scaled = columns["x"] * columns["factor"][:, None]
    return {"scaled": scaled, "total": scaled.sum(axis=1)}


def price(columns: Any) -> list[float]:
    pairs = zip(columns["age"], columns["city"], strict=True)
    return [float(age) + len(city) for age, city in pairs]


def sleepy(rows: Any) -> Any:
    import time

    time.sleep(0.5)
    return np.asarray(rows).sum(axis=1)


def failing(rows: Any) -> Any:
    raise ValueError("it never works")


def scored(rows: Any) -> Any:
    return Scored(np.asarray(rows).sum(axis=1), confidence=np.full(len(rows), 0.25))


def lengths(texts: Any) -> Any:
    return [f"{text}!" for text in texts]


@contextlib.contextmanager
def serving(**http: Any) -> Iterator[clipper.ClipperServer]:
    """Start a server with the applications that the tests query."""
    address = {"address": "127.0.0.1:0", **http}
    with clipper.start(http=address, load_s=PATIENCE_S * 10, **QUICK) as server:
        server._learning.states.start_writing()  # its thread stays
        server.deploy("sum", total, input="f64[3]")
        server.deploy("sleepy", sleepy, input="f64[3]", cache=False)
        server.deploy("failing", failing, input="f64[3]", cache=False)
        server.deploy("unsure", scored, input="f64[3]")
        server.deploy("holes", lambda rows: np.isnan(rows).sum(axis=1), input="f64[3]")
        server.deploy("lengths", lengths, input="str")
        server.deploy("twice", lambda rows: [2 * row for row in rows], input="f64[*]")
        server.deploy("rows", lambda rows: np.asarray(rows) * 2, input="f32[4]")
        server.deploy(
            "scale",
            scale,
            inputs={"x": "f64[3]", "factor": "f64"},
            outputs={"scaled": "f64[3]", "total": "f64"},
        )
        server.deploy("prices", price, inputs={"age": "f64", "city": "str"})
        server.app("total", models=["sum"], slo_ms=SLO_MS)
        server.app("late", models=["sleepy"], slo_ms=50, default=-1.0)
        server.app("late-alone", models=["sleepy"], slo_ms=50)
        server.app("broken", models=["failing"], slo_ms=SLO_MS)
        server.app("unsure", models=["unsure"], slo_ms=SLO_MS, default=-1.0, confidence_min=0.5)
        server.app("holes", models=["holes"], slo_ms=SLO_MS)
        server.app("texts", models=["lengths"], slo_ms=SLO_MS)
        server.app("twice", models=["twice"], slo_ms=SLO_MS)
        server.app("rows", models=["rows"], slo_ms=SLO_MS)
        server.app("pair", models=["scale"], slo_ms=SLO_MS)
        server.app("pair-total", models=["scale"], slo_ms=SLO_MS, output="total")
        server.app("homes", models=["prices"], slo_ms=SLO_MS)
        server.app("learns", models=["sum", "unsure"], slo_ms=SLO_MS, policy="exp3")
        warm_workers(server)
        yield server


class Door(NamedTuple):
    """A way to query a server. Its methods are those of Client, blocking."""

    name: str
    predict: Callable[..., Any]
    predict_many: Callable[..., Any]
    feedback: Callable[..., bool]
    server: clipper.ClipperServer


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def api_key() -> str:
    return new_key()


@pytest.fixture(scope="session")
def plain(patient_queries: None) -> Iterator[clipper.ClipperServer]:
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def guarded(
    authority: Authority,
    api_key: str,
    tmp_path_factory: pytest.TempPathFactory,
    patient_queries: None,
) -> Iterator[clipper.ClipperServer]:
    """Yield a server that requires a key, over TLS."""
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"{line_of('ann', api_key)}\n")
    cert, key = authority.sign("server")
    with serving(api_keys_file=str(keys), tls_cert=cert, tls_key=key) as server:
        yield server


def in_process(server: clipper.ClipperServer) -> Door:
    def handle(name: str) -> Any:
        server.catalog.view.application(name)
        return server.app(name)

    return Door(
        "in process",
        lambda name, x, **more: handle(name).predict(x, **more).result(PATIENCE_S),
        lambda name, xs, **more: handle(name).predict_many(xs, **more).result(PATIENCE_S),
        lambda name, *words, **more: handle(name).feedback(*words, **more),
        server,
    )


def of_client(name: str, client: clipper_client.Client, server: clipper.ClipperServer) -> Door:
    return Door(name, client.predict, client.predict_many, client.feedback, server)


def of_asyncio(
    client: clipper_client.AsyncClient, runner: asyncio.Runner, server: clipper.ClipperServer
) -> Door:
    def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *words, **more: runner.run(method(*words, **more))

    predict, predict_many = blocking(client.predict), blocking(client.predict_many)
    return Door("asyncio", predict, predict_many, blocking(client.feedback), server)


DOORS = ("in process", "http", "asyncio", "https with a key")


@pytest.fixture(scope="session", params=DOORS)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Yield each way to query a server: in its process, and by clients over sockets."""
    if request.param == "https with a key":
        server = request.getfixturevalue("guarded")
        with clipper_client.Client(
            f"https://{server.http_address}",
            request.getfixturevalue("api_key"),
            ca=request.getfixturevalue("authority").ca,
        ) as client:
            yield of_client(request.param, client, server)
        return
    server = request.getfixturevalue("plain")
    if request.param == "in process":
        yield in_process(server)
    elif request.param == "http":
        with clipper_client.Client(f"http://{server.http_address}") as client:
            yield of_client(request.param, client, server)
    else:
        with asyncio.Runner() as runner:
            client = clipper_client.AsyncClient(f"http://{server.http_address}")
            yield of_asyncio(client, runner, server)
            runner.run(client.close())


# -- a server that answers by a script


class Last(bytes):
    """Bytes after which the connection is closed."""


class Scripted:
    """A server whose connections each play one script: what is sent after each request, in order;
    None closes the connection without an answer. requests: what came."""

    def __init__(self, scripts: Sequence[Sequence[bytes | None]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self._address = self._listener.getsockname()
        self._closing = False
        self.url = f"http://127.0.0.1:{self._address[1]}"
        self.requests: list[bytes] = []
        self.connections = 0
        self._scripts = scripts
        self._thread = threading.Thread(target=self._run, name="scripted")
        self._thread.start()

    def _run(self) -> None:
        with self._listener, contextlib.ExitStack() as open:
            for script in self._scripts:
                connection, _ = self._listener.accept()
                open.callback(connection.close)
                if self._closing:
                    return
                self.connections += 1
                connection.settimeout(PATIENCE_S)
                self._play(script, connection)

    def _play(self, script: Sequence[bytes | None], connection: socket.socket) -> None:
        for answer in script:
            request = request_of(connection)
            if request:
                self.requests.append(request)
            if answer is None or not request:
                connection.close()
                return
            connection.sendall(answer)
            if isinstance(answer, Last):
                connection.close()
                return

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # wakes accept()
            socket.create_connection(self._address, PATIENCE_S).close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def request_of(connection: socket.socket) -> bytes:
    """Return the next request on a connection; what came of it where the client closes."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:])
    size = int(lines.get(b"content-length", 0))
    while len(body) < size:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """Yield a function that starts a server: one script for each of its connections."""
    with contextlib.ExitStack() as open:

        def start(*scripts: Sequence[bytes | None]) -> Scripted:
            server = Scripted(scripts)
            open.callback(server.close)
            return server

        yield start


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body
