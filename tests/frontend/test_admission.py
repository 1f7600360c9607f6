"""Limits of a client before it is known, and of what all clients together may make the server
keep: through sockets, with and without keys and TLS, on both HTTP servers."""

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import clipper
from clipper.credentials.credential_file import line_of, new_key
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S, QUICK, total, warm_workers

BODY = b'{"input": [1, 2, 3]}'
BODIES_MAX = 1 << 20


class Listener(NamedTuple):
    """One listener of a server under test. good: the value of Authorization; empty: needs none."""

    server: clipper.ClipperServer
    address: str
    path: str
    good: str
    tls: ssl.SSLContext | None = None

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        line = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        return line if self.tls is None else self.tls.wrap_socket(line, server_hostname=host)

    @property
    def held(self) -> int:
        """The bytes of bodies that the server keeps, in Python and in the core."""
        listeners: Any = self.server._endpoints.frontends
        bodies = listeners._listeners._bodies
        return int(bodies.held) + (bodies.core_server.kept if bodies.core_server else 0)


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Listener]]:
    """Servers of which every kind of HTTP listener is one."""
    folder = tmp_path_factory.mktemp("admission")
    key, authority = new_key(), Authority(folder)
    (folder / "keys").write_text(f"{line_of('ann', key)}\n")
    cert, private = authority.sign("one")
    trusted = ssl.create_default_context(cafile=authority.ca)
    both: dict[str, Any] = {
        "address": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "bodies_bytes_max": BODIES_MAX,
    }
    both |= {"body_bytes_max": BODIES_MAX, "header_s": 60.0}
    keys = {"api_keys_file": str(folder / "keys"), "tokens_file": str(folder / "keys")}
    tls = {"tls_cert": cert, "tls_key": private}
    with (
        clipper.start(http=both, **QUICK) as open_,
        clipper.start(http={**both, "workers": 0}, **QUICK) as python,
        clipper.start(http={**both, **keys}, **QUICK) as guarded,
        clipper.start(http={**both, **keys, **tls}, **QUICK) as secured,
    ):
        for server in (open_, python, guarded, secured):
            server.deploy("sum", total, input="f64[3]")
            server.app("total", models=["sum"], slo_ms=5000)
            warm_workers(server)
        query = "/api/total/predict"
        manage = "/admin/applications/new"
        good = f"Bearer {key}"
        yield {
            "core": Listener(open_, open_.http_address, query, ""),
            "python": Listener(python, python.http_address, query, ""),
            "keys": Listener(guarded, guarded.http_address, query, good),
            "keys over TLS": Listener(secured, secured.http_address, query, good, trusted),
            "management": Listener(guarded, guarded.admin_address, manage, good),
            "management over TLS": Listener(secured, secured.admin_address, manage, good, trusted),
        }


GUARDED = ["keys", "keys over TLS", "management", "management over TLS"]
ALL = ["core", "python", *GUARDED]


def head(listener: Listener, *lines: str, length: int = len(BODY), auth: str = "") -> bytes:
    """Return the head of a request with a body of `length` bytes."""
    given = [f"Authorization: {auth}"] if auth else []
    method = "PUT" if listener.path.startswith("/admin") else "POST"
    every = [f"{method} {listener.path} HTTP/1.1", "Host: localhost"]
    return "\r\n".join([*every, f"Content-Length: {length}", *given, *lines, "", ""]).encode()


def answer(line: socket.socket) -> tuple[int, bytes]:
    """Return the status and the text of the next response, and whatever came after it."""
    text = b""
    while b"\r\n\r\n" not in text:
        part = line.recv(1 << 16)
        assert part, f"closed without a response after {text!r}"
        text += part
    return int(text.split()[1]), text


def until_closed(line: socket.socket) -> None:
    """Read until the server closes the connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while line.recv(1 << 16):
            pass


# -- without a key


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
def test_a_client_without_a_key_is_refused_at_the_end_of_its_head(
    listeners: dict[str, Listener], name: str, framing: str
) -> None:
    listener = listeners[name]
    sent = {
        "length": head(listener, length=BODIES_MAX),
        "chunked": head(listener, "Transfer-Encoding: chunked").replace(
            b"Content-Length: 20\r\n", b""
        ),
        "expect": head(listener, "Expect: 100-continue", length=BODIES_MAX),
    }[framing]
    for auth in ("", "Bearer wrong"):
        shown = sent.replace(b"\r\n\r\n", f"\r\nAuthorization: {auth}\r\n\r\n".encode())
        with listener.connect() as line:
            line.sendall(shown if auth else sent)
            status, text = answer(line)  # not a byte of the body was sent
            assert (status, b"connection: close" in text) == (401, True)
            until_closed(line)


@pytest.mark.parametrize("name", GUARDED)
def test_clients_without_a_key_take_no_memory(listeners: dict[str, Listener], name: str) -> None:
    listener, part = listeners[name], bytes(64 << 10)
    lines = [listener.connect() for _ in range(20)]
    try:
        for line in lines:
            line.sendall(head(listener, length=BODIES_MAX))
        for line in lines:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                line.sendall(part)
            assert listener.held == 0
        for line in lines:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert answer(line)[0] == 401
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("name", GUARDED)
def test_a_client_without_a_key_does_not_disturb_one_with_a_key(
    listeners: dict[str, Listener], name: str
) -> None:
    listener = listeners[name]
    with listener.connect() as line:
        for _ in range(3):
            line.sendall(head(listener, auth=listener.good) + BODY)
            assert answer(line)[0] in (200, 400)  # management knows no `input`
        line.sendall(head(listener) + BODY + head(listener, auth=listener.good) + BODY)
        status, text = answer(line)
        assert status == 401
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while part := line.recv(1 << 16):
                text += part
        assert text.count(b"HTTP/1.1 ") == 1  # what follows the refusal is not read


# -- headers that come twice

SINGLE = [
    ("Authorization", "Bearer other"),
    ("Host", "other"),
    ("Content-Length", str(len(BODY))),
    ("Content-Type", "application/json"),
    ("Clipper-Actor", "ann"),
    ("Clipper-Deadline-Ms", "100"),
    ("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("X-Request-Id", "a"),
    ("Inference-Header-Content-Length", "20"),
    ("Origin", "http://localhost"),
    ("Last-Event-Id", "1"),
]
LISTS = [("Accept", "application/json"), ("Tracestate", "a=b"), ("If-None-Match", '"x"')]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("header", "value"), SINGLE)
def test_a_header_that_comes_twice_is_refused(
    listeners: dict[str, Listener], name: str, header: str, value: str
) -> None:
    listener = listeners[name]
    rng = random.Random(f"{name}{header}")
    line_, other = f"{header}: {value}", f"{header.lower()}:  {value}"
    has_one = header in ("Host", "Content-Length") or (header, bool(listener.good)) == (
        "Authorization",
        True,
    )
    lines = [other] if has_one else [line_, other]
    noise = [f"X-Noise-{i}: {i}" for i in range(3)]
    shuffled = [*lines, *noise]
    rng.shuffle(shuffled)
    with listener.connect() as line:
        line.sendall(head(listener, *shuffled, auth=listener.good) + BODY)
        status, text = answer(line)
        assert (status, b"connection: close" in text) == (400, True), text
        until_closed(line)


@pytest.mark.parametrize("name", ["core", "python", "keys", "keys over TLS"])
@pytest.mark.parametrize(("header", "value"), [*LISTS, ("X-Forwarded-For", "1.2.3.4")])
def test_a_header_that_is_a_list_or_unknown_may_come_twice(
    listeners: dict[str, Listener], name: str, header: str, value: str
) -> None:
    listener = listeners[name]
    twice = [f"{header}: {value}", f"{header.lower()}: {value}"]
    with listener.connect() as line:
        line.sendall(head(listener, *twice, auth=listener.good) + BODY)
        assert answer(line)[0] == 200


# -- the memory for bodies


@pytest.mark.parametrize("name", ["core", "python", "keys", "management"])
@pytest.mark.parametrize("size", [20 << 10, 200 << 10, 900 << 10])
def test_all_bodies_under_way_have_one_bound(
    listeners: dict[str, Listener], name: str, size: int
) -> None:
    listener = listeners[name]
    lines: list[socket.socket] = []
    refused: tuple[int, bytes] | None = None
    try:
        while refused is None:
            assert len(lines) * size <= 2 * BODIES_MAX, "no connection is ever refused"
            line = listener.connect()
            lines.append(line)
            line.sendall(head(listener, length=size + 1, auth=listener.good) + bytes(size))
            refused = _refusal(lines, listener, len(lines) * size)
            assert listener.held <= BODIES_MAX + (256 << 10)
        status, text = refused
        assert (status, b"retry-after: 1" in text) == (503, True)
        assert b"http.bodies_bytes_max" in text
        assert (len(lines) - 1) * size <= BODIES_MAX < len(lines) * size + (256 << 10)
    finally:
        for line in lines:
            line.close()
    _until_held(listener, 0)
    with listener.connect() as line:
        line.sendall(head(listener, auth=listener.good) + BODY)
        assert answer(line)[0] in (200, 400)
    _until_held(listener, 0)


def _refusal(lines: list[socket.socket], listener: Listener, sent: int) -> tuple[int, bytes] | None:
    """Wait until the server has read what was sent; return a response if there is one."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for line in lines:
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                line.recv(1, socket.MSG_PEEK)
                line.settimeout(PATIENCE_S)
                return answer(line)
            line.settimeout(PATIENCE_S)
        if listener.held >= sent:
            return None
    raise AssertionError(f"{sent} bytes were sent, {listener.held} are held")


def _until_held(listener: Listener, wanted: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while listener.held != wanted:
        assert time.monotonic() < until, f"{listener.held} bytes are still counted"
        threading.Event().wait(0.005)
