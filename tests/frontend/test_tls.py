"""TLS for queries, management and gRPC: which clients are admitted, errors for others, and
certificates that change."""

import asyncio
import contextlib
import errno
import http.client
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import clipper
from clipper.errors import ConfigError, NoServer, NotAllowed
from clipper.frontend import frontends
from clipper.frontend.http import tls
from clipper.frontend.http.messages import HttpResponse, StreamedResponse
from clipper.metrics import TlsCounts
from clipper.settings.http import TlsFiles
from clipper.tls import Certificate
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S, QUICK, InMemoryConnection, total, warm_workers
from tests.frontend.test_http2 import Line
from tests.memory_container import wait_until

QUERY_BODY = b'{"input": [1, 2, 3]}'


class World(NamedTuple):
    server: clipper.ClipperServer
    authority: Authority
    cert: str
    key: str


@pytest.fixture(scope="module", params=["core", "Python"], autouse=True)
def speaker(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the tests with TLS of the core, and with that of Python, which serves where the core
    cannot. Yield the name of the speaker."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Python":
            patch.setattr(frontends, "secured_by", lambda secured: None)
        yield request.param


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def world(speaker: str, authority: Authority) -> Iterator[World]:
    cert, key = authority.sign("server")
    http = {
        "address": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "token": "secret",
        "tls_cert": cert,
        "tls_key": key,
    }
    with started(http | {"header_s": 0.3}) as server:
        yield World(server, authority, cert, key)


@pytest.fixture(scope="module")
def patient(speaker: str, authority: Authority) -> Iterator[World]:
    """A server that gives clients time."""
    cert, key = authority.sign("patient")
    http = {"address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key, "header_s": 60}
    with started(http) as server:
        yield World(server, authority, cert, key)


@contextlib.contextmanager
def started(http: dict[str, Any], **more: Any) -> Iterator[clipper.ClipperServer]:
    with clipper.start(http=http, **QUICK, **more) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=30_000)
        server._learning.states.start_writing()  # its thread stays
        warm_workers(server)
        yield server


def trusting(ca: str, cert: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if cert:
        context.load_cert_chain(*cert)
    return context


@contextlib.contextmanager
def connected(
    address: str, context: ssl.SSLContext, name: str = "127.0.0.1"
) -> Iterator[ssl.SSLSocket]:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE_S) as connection,
        context.wrap_socket(connection, server_hostname=name) as tls,
    ):
        yield tls


def exchange(
    connection: Any, path: str = "/api/total/predict", body: bytes = QUERY_BODY, **headers: str
) -> tuple[int, Any]:
    """Send a request on an open connection and return the response."""
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return response_of(connection)


def response_of(connection: Any) -> tuple[int, Any]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def ended(connection: Any) -> bool:
    """Return whether the server closes, or has closed."""
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass
    return True


def metric(server: clipper.ClipperServer, name: str, *labels: str) -> float:
    scrape: Any = server._endpoints.frontends
    counts = next(each for each in scrape._tls_counts.values() if each.listener == labels[0])
    return float(counts.ends_s if name == "ends" else counts.counters[labels[1]].value)


def held_by(server: clipper.ClipperServer) -> int:
    """Return how many connections the server has, those in a handshake and their relays too."""
    frontends: Any = server._endpoints.frontends
    held = 0
    for each in frontends._listeners._listeners:
        held += len(each._service.connections)
        if each._tls is not None:
            held += len(each._tls.waiting)
        if each._hot is not None:
            held += each._hot.core_server.connections + each._hot.core_server.relays
    return held


# -- asking


def test_queries_over_tls(world: World) -> None:
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        assert connection.version() == "TLSv1.3"
        for _ in range(3):
            assert exchange(connection)[1]["output"] == 6
        status, reply = exchange(
            connection, body=b'{"inputs": [' + b",".join([b"[1, 2, 3]"] * 1000) + b"]}"
        )
        assert (status, len(reply["predictions"])) == (200, 1000)


def test_requests_in_a_row_and_in_pieces(world: World) -> None:
    request = b"POST /api/total/predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        len(QUERY_BODY),
        QUERY_BODY,
    )
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        connection.sendall(request * 20)
        data = b""
        while data.count(b'"output":6') < 20:
            data += connection.recv(65536)
        for i in range(len(request)):
            connection.send(request[i : i + 1])
        assert response_of(connection)[1]["output"] == 6


def test_a_large_body_both_ways(world: World) -> None:
    rows = json.dumps(
        {
            "inputs": [
                {"name": "input", "shape": [20_000, 3], "datatype": "FP64", "data": [1.0] * 60_000}
            ]
        }
    ).encode()
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        status, reply = exchange(connection, "/v2/models/total/infer", rows)
        assert (status, reply["outputs"][0]["data"][:2], len(reply["outputs"][0]["data"])) == (
            200,
            [3, 3],
            20_000,
        )


def test_a_response_that_is_written_bit_by_bit(world: World) -> None:
    def begin(body: Any) -> None:
        for _ in range(3):
            body.write(b"x" * 100_000)
        body.end()

    frontends: Any = world.server._endpoints.frontends
    frontends.routes.add("GET", "/bits", lambda request: StreamedResponse(begin, b"text/plain"))
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        connection.sendall(b"GET /bits HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            more = connection.recv(65536)
            assert more, data[:1000]
            data += more
        assert data.count(b"x") >= 300_000
        assert exchange(connection)[0] == 200


def test_alpn_and_versions(world: World) -> None:
    offering = trusting(world.authority.ca)
    offering.set_alpn_protocols(["h2", "http/1.1"])
    with Line(world.server.http_address, offering) as line:
        assert line.socket.selected_alpn_protocol() == "h2"
        assert line.ask("POST", "/api/total/predict", QUERY_BODY).status == 200
    offering.set_alpn_protocols(["http/1.1"])
    offering.maximum_version = ssl.TLSVersion.TLSv1_2
    with connected(world.server.http_address, offering) as connection:
        assert (connection.selected_alpn_protocol(), connection.version()) == (
            "http/1.1",
            "TLSv1.2",
        )
        assert exchange(connection)[0] == 200
    service: Any = world.server._endpoints.frontends
    context = service._access.certificates["address"][0].context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_the_addresses_of_a_client_are_known_whoever_has_its_tls(patient: World) -> None:
    """A connection of HTTP/2, as calls of gRPC use it, and one of HTTP/1.1 know the client's
    address."""
    offering = trusting(patient.authority.ca)
    offering.set_alpn_protocols(["h2"])
    listeners: Any = patient.server._endpoints.frontends
    open_ones = listeners._listeners._listeners[0]._service.connections
    with Line(patient.server.http_address, offering) as line:
        # plain queries do not come to Python
        assert line.ask("GET", "/v2/health/live").status == 200
        (found,) = open_ones
        assert found.get_extra_info("peername") == line.socket.getsockname()
        assert found.get_extra_info("sockname") == line.socket.getpeername()
    wait_until(lambda: not open_ones)
    with connected(patient.server.http_address, trusting(patient.authority.ca)) as connection:
        assert exchange(connection, Origin="http://elsewhere")[0] == 200
        (found,) = open_ones
        host, port = connection.getsockname()
        assert found.client == f"{host}:{port}"


def test_close_is_noticed(world: World) -> None:
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        assert exchange(connection, Connection="close")[0] == 200
        assert connection.recv(1) == b"", "no farewell"
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert response_of(connection)[0] == 400
        assert connection.recv(1) == b""


# -- strangers


def test_plain_http_is_answered_with_the_expected_protocol(world: World) -> None:
    before = metric(world.server, "handshakes", "query", "plain")
    host, _, port = world.server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        status, reply = exchange(connection)
        assert (status, reply["detail"]) == (
            400,
            "this address speaks TLS, and the request came without.",
        )
        assert "https://" in reply["hint"]
        assert ended(connection)
    assert metric(world.server, "handshakes", "query", "plain") == before + 1


def test_a_client_that_does_not_trust_the_certificate_sends_nothing(
    world: World, tmp_path: Path
) -> None:
    other_authority = Authority(tmp_path, "stranger")
    with (
        pytest.raises(ssl.SSLCertVerificationError),
        connected(world.server.http_address, trusting(other_authority.ca)),
    ):
        pass
    other_name = connected(world.server.http_address, trusting(world.authority.ca), "example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"), other_name:
        pass
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        assert exchange(connection)[0] == 200


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"\x00"])
def test_a_handshake_has_a_time(world: World, sent: bytes) -> None:
    host, _, port = world.server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(sent)
        start = time.monotonic()
        assert ended(connection)
        assert time.monotonic() - start < PATIENCE_S


def test_half_open_handshakes_are_connections(authority: Authority) -> None:
    cert, key = authority.sign("small")
    http = {
        "address": "127.0.0.1:0",
        "tls_cert": cert,
        "tls_key": key,
        "connections_max": 4,
        "header_s": 60,
    }
    with started(http) as server, contextlib.ExitStack() as open:
        host, _, port = server.http_address.rpartition(":")
        connections = [
            open.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            for _ in range(50)
        ]
        wait_until(lambda: metric(server, "handshakes", "query", "full") == 46)
        wait_until(lambda: held_by(server) <= 4)
        for connection in connections:
            connection.close()
        wait_until(lambda: not held_by(server))
        with connected(server.http_address, trusting(authority.ca)) as connection:
            assert exchange(connection)[0] == 200


def test_a_client_that_leaves_at_any_time_leaves_nothing(world: World) -> None:
    host, _, port = world.server.http_address.rpartition(":")
    for size in (0, 1, 5, 100, 300):
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall((b"\x16\x03\x01\x01\x00" + b"\x01" * 400)[:size])
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        connection.sendall(b"POST /api/total")
        connection.unwrap()
    wait_until(lambda: not held_by(world.server))


def test_a_broken_record_ends_its_connection_only(world: World) -> None:
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        os.write(connection.fileno(), b"\x17\x03\x03\x00\x20" + b"x" * 32)
        assert ended(connection)
    with connected(world.server.http_address, trusting(world.authority.ca)) as connection:
        assert exchange(connection)[0] == 200


class Records:
    """A client that makes records of TLS without a socket, so that they can be cut anywhere."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._come, self._gone = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._come, self._gone, server_hostname=host)

    def shake(self, step: int) -> None:
        """Shake hands, `step` bytes at a time."""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                self.send(step)
                return
            self.send(step)
            self.receive()

    def send(self, step: int = 1 << 20) -> None:
        """Send what was made, `step` bytes at a time."""
        made = self._gone.read()
        for at in range(0, len(made), step):
            self.socket.sendall(made[at : at + step])

    def receive(self) -> None:
        """Take what the server has sent. Raises ConnectionError at its end."""
        came = self.socket.recv(1 << 16)
        if not came:
            raise ConnectionError
        self._come.write(came)

    def read(self) -> bytes:
        """Return what the server says until it ends the connection, or has said all for now."""
        said = b""
        with contextlib.suppress(ConnectionError, ssl.SSLZeroReturnError):
            while b'"output"' not in said:
                with contextlib.suppress(ssl.SSLWantReadError):
                    piece = self.tls.read(1 << 16)
                    if not piece:
                        return said
                    said += piece
                    continue
                self.receive()
        return said

    def say(self, text: bytes) -> None:
        """Make records of a text."""
        self.tls.write(text)

    def reset(self) -> None:
        """Break the connection."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def query(path: str = "/api/total/predict", lines: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(QUERY_BODY)}\r\n\r\n"
    return head.encode() + QUERY_BODY


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("lines", ["", "Origin: http://elsewhere\r\n"])
def test_records_of_one_byte_in_pieces_of_one_byte(
    patient: World, version: ssl.TLSVersion, lines: str
) -> None:
    """The handshake too. With an Origin the request is answered by Python."""
    context = trusting(patient.authority.ca)
    context.maximum_version = version
    records = Records(patient.server.http_address, context)
    records.shake(1)
    assert records.tls.version() == version.name.replace("_", ".")
    assert records.tls.compression() is None
    for byte in query(lines=lines):
        records.say(bytes([byte]))
    records.send(1)
    assert b'"output":6' in records.read()
    records.socket.close()


@pytest.mark.parametrize("lines", ["", "Origin: http://elsewhere\r\n"])
def test_a_client_that_breaks_in_the_middle_of_a_record_leaves_nothing(
    patient: World, lines: str
) -> None:
    for cut in (1, 4, 5, 6, 50):
        records = Records(patient.server.http_address, trusting(patient.authority.ca))
        records.shake(1 << 20)
        records.say(query(lines=lines))
        records.send()
        assert b'"output":6' in records.read()
        records.say(query(lines=lines))
        records.socket.sendall(records._gone.read()[:cut])
        records.reset()
    wait_until(lambda: not held_by(patient.server))


def test_a_client_that_breaks_a_handshake_anywhere_leaves_nothing(patient: World) -> None:
    for cut in range(1, 300, 30):
        records = Records(patient.server.http_address, trusting(patient.authority.ca))
        with contextlib.suppress(ssl.SSLWantReadError):
            records.tls.do_handshake()
        records.socket.sendall(records._gone.read()[:cut])
        records.reset()
    wait_until(lambda: not held_by(patient.server))


def test_a_client_that_says_it_sends_no_more(speaker: str, patient: World) -> None:
    """The core answers what came before; Python's TLS ends with its client's side."""
    for lines in ("", "Origin: http://elsewhere\r\n"):
        records = Records(patient.server.http_address, trusting(patient.authority.ca))
        records.shake(1 << 20)
        records.say(query(lines=lines))
        with contextlib.suppress(ssl.SSLWantReadError):
            records.tls.unwrap()
        records.send()
        said = records.socket.recv(1 << 16)
        if speaker == "core":
            assert len(said) > 100, "an answer, and not only a farewell"
        records.socket.close()
    wait_until(lambda: not held_by(patient.server))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="takes the program openssl")
@pytest.mark.parametrize(("version", "asked"), [("-tls1_2", b"R\n"), ("-tls1_3", b"K\n")])
def test_a_client_that_asks_for_other_keys(patient: World, version: str, asked: bytes) -> None:
    """A client may not negotiate again in TLS 1.2; in 1.3 it may change keys."""
    command = ["openssl", "s_client", "-connect", patient.server.http_address, version]
    with subprocess.Popen(
        [*command, "-CAfile", patient.authority.ca],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        # an empty line is the end of a program that has failed
        lines = iter(program.stdout.readline, b"")
        assert any(b"Verify return code: 0" in line for line in lines)
        program.stdin.write(asked)
        program.stdin.flush()
        if asked == b"R\n":
            said = program.stdout.read()
            assert b"no renegotiation" in said
        else:
            while b"KEYUPDATE" not in program.stdout.readline():
                pass
        program.kill()
    with connected(patient.server.http_address, trusting(patient.authority.ca)) as connection:
        assert exchange(connection)[0] == 200


def test_a_thousand_connections_leave_nothing(speaker: str, patient: World) -> None:
    """Half of them go to Python and come back."""
    context = trusting(patient.authority.ca)
    descriptors = 0
    for i in range(1000 if speaker == "core" else 200):
        if i == 100:
            wait_until(lambda: not held_by(patient.server))
            descriptors = len(os.listdir("/proc/self/fd"))
        with connected(patient.server.http_address, context) as connection:
            if i % 2:
                connection.sendall(b"GET /api/total HTTP/1.1\r\nHost: x\r\n\r\n")
                assert response_of(connection)[0] == 200
            assert exchange(connection)[1]["output"] == 6
            if i % 2:
                assert exchange(connection)[1]["output"] == 6
    wait_until(lambda: not held_by(patient.server))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


# -- clients with certificates


def test_clients_show_certificates(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("mutual")
    http = {
        "address": "127.0.0.1:0",
        "tls_cert": cert,
        "tls_key": key,
        "tls_client_ca": authority.ca,
    }
    other_authority = Authority(tmp_path, "stranger")
    with started(http) as server:
        with connected(
            server.http_address, trusting(authority.ca, authority.sign("ann"))
        ) as connection:
            assert exchange(connection)[0] == 200
        for shown in (None, other_authority.sign("eve"), authority.sign("late", days=-1)):
            connection = connected(server.http_address, trusting(authority.ca, shown))
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)), connection as tls:
                exchange(tls)
        until_s = time.monotonic() + PATIENCE_S  # a client may know before the server counts
        while metric(server, "handshakes", "query", "failed") < 3 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert metric(server, "handshakes", "query", "failed") == 3


# -- management


def test_connecting_by_https(world: World, tmp_path: Path) -> None:
    url = f"https://{world.server.admin_address}"
    with clipper.connect(url, "secret", ca=world.authority.ca) as client:
        assert {row["name"] for row in client.models()} == {"sum"}
    with pytest.raises(NotAllowed):
        clipper.connect(url, "wrong", ca=world.authority.ca).models()
    with pytest.raises(NoServer, match="is not trusted"):
        clipper.connect(url, "secret", ca=Authority(tmp_path).ca).models()
    with pytest.raises(clipper.ClipperError, match="speaks TLS"):
        clipper.connect(url.replace("https", "http"), "secret").models()
    with pytest.raises(ConfigError, match="holds no certificates"):
        clipper.connect(url, ca=str(tmp_path / "nothing.pem"))


def test_a_user_of_this_host_needs_no_ca(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stores its own certificate in its private folder."""
    from clipper.manage import client as module
    from clipper.manage.running import running

    admin_address = world.server.admin_address
    found = [one for one in running() if one.url == f"https://{admin_address}"]
    monkeypatch.setattr(module, "the_one", lambda *_: found[0])
    monkeypatch.delenv("CLIPPER_URL", raising=False)
    assert clipper.connect().models()
    another = found[0].__class__(found[0].url, 0, "secret", certificate=world.authority.ca)
    monkeypatch.setattr(module, "the_one", lambda *_: another)
    with pytest.raises(NoServer, match=r"^https://.* shows another certificate") as caught:
        clipper.connect().models()
    assert "--ca" in str(caught.value)


# -- files


def test_a_new_certificate_is_taken_up(authority: Authority, tmp_path: Path) -> None:
    cert, key = str(tmp_path / "live.crt"), str(tmp_path / "live.key")
    first, second = authority.sign("first", days=5), authority.sign("second", days=50)
    shutil.copy(first[0], cert)
    shutil.copy(first[1], key)
    http = {"address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key}
    with started(http) as server, connected(server.http_address, trusting(authority.ca)) as old:
        ends = metric(server, "ends", "query")
        assert ends > time.time()
        Path(cert).write_text("half a cert")
        access: Any = server._endpoints.frontends
        access._access.check()
        assert subject_of(server.http_address, authority) == "first", (
            "what is not in order is not taken"
        )
        shutil.copy(second[1], key)
        shutil.copy(second[0], cert)
        wait_until(lambda: subject_of(server.http_address, authority) == "second")
        wait_until(lambda: metric(server, "ends", "query") > ends)
        assert exchange(old)[0] == 200, "a connection that is open stays"


def subject_of(address: str, authority: Authority) -> str:
    with connected(address, trusting(authority.ca)) as connection:
        found: Any = connection.getpeercert()
        return str(found["subject"][0][0][1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tls_key": ""}, r"http\.tls_cert.*Set http\.tls_key"),
        ({"tls_cert": ""}, r"http\.tls_key.*Set http\.tls_cert"),
        ({"tls_cert": "/nothing"}, r"http\.tls_cert = '/nothing' cannot be read"),
        ({"tls_key": "OTHER"}, "do not go together"),
        ({"tls_client_ca": "KEY"}, r"http\.tls_client_ca = .* holds no certificates"),
    ],
)
def test_files_that_are_not_in_order(
    authority: Authority, change: dict[str, str], why: str
) -> None:
    cert, key = authority.sign("one")
    files = {"OTHER": authority.sign("other")[1], "KEY": key}
    http = {"tls_cert": cert, "tls_key": key} | {
        name: files.get(value, value) for name, value in change.items()
    }
    with pytest.raises(ConfigError, match=why):
        clipper.start(http={"address": "127.0.0.1:0"} | http)


def test_an_encrypted_key_is_refused_without_a_prompt(authority: Authority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, key = authority.sign("locked")
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    Path(key).write_bytes(
        loaded.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"x"))
    )
    with pytest.raises(ConfigError, match="is encrypted"):
        clipper.start(http={"address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key})


def test_no_handshake_outlives_the_server(authority: Authority) -> None:
    cert, key = authority.sign("brief")
    with started(
        {"address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key, "header_s": 60}
    ) as server:
        host, _, port = server.http_address.rpartition(":")
        connection = socket.create_connection((host, int(port)), PATIENCE_S)
        wait_until(lambda: held_by(server) == 1)
    assert ended(connection)
    connection.close()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), MemoryError("injected"), KeyError("injected")],
)
def test_a_connection_that_cannot_be_accepted_is_tried_again(
    error: Exception, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of a server without a free descriptor or memory: `accept` fails at first."""
    monkeypatch.setattr(tls, "_RETRY_S", 0.0)
    calls: list[int] = []

    async def run() -> None:
        loop: Any = asyncio.get_running_loop()
        accepted, accept = asyncio.Event(), loop.sock_accept

        async def failing(listener: socket.socket) -> Any:
            calls.append(1)
            if len(calls) < 4:
                raise error
            accepted.set()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", failing, raising=False)
        with socket.create_server(("127.0.0.1", 0)) as bound:
            bound.setblocking(False)
            certificate = Certificate(TlsFiles(*authority.sign("busy"), ""))
            service = InMemoryConnection(lambda request: HttpResponse(200, b"")).service
            listener = tls.TlsListener(loop, bound, service, certificate, TlsCounts("query"))
            await asyncio.wait_for(accepted.wait(), PATIENCE_S)
            await listener.close()

    asyncio.run(run())
    assert len(calls) == 4
