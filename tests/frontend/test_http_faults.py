"""Faults around a server: overload, slow clients, a container that dies, a client that leaves,
closing."""

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.deploy.ray.ingress import Backend, Ingress
from clipper.errors import AddressInUse, ConfigError
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, total
from tests.memory_container import wait_until
from tests.threads import join


class Gate:
    """A model that answers once a file exists."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "open")
        self.seen = str(folder / "seen")

    def predict(self, rows: Any) -> Any:
        Path(self.seen).touch()
        while not os.path.exists(self.path):
            time.sleep(0.005)
        return rows[:, 0]

    def open(self) -> None:
        Path(self.path).touch()

    def wait_until_seen(self) -> None:
        wait_until(lambda: os.path.exists(self.seen))


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def gated(gate: Gate) -> Iterator[clipper.ClipperServer]:
    """Yield a server whose application `app` waits for the gate and has a short queue."""
    limits = {"queue_rows_max": 16, "tasks_max": 256}
    with clipper.start(
        http={"address": "127.0.0.1:0", "header_s": 1.0, "idle_s": 1.2, "pipeline_max": 6},
        limits=limits,
        **QUICK,
    ) as server:
        server.deploy(
            "gate",
            gate.predict,
            input="f64[1]",
            cache=False,
            batching={"mode": "static", "size_max": 1},
        )
        server.app("app", models=["gate"], slo_ms=30_000)
        try:
            yield server
        finally:
            gate.open()


def send(
    address: str, x: float, path: str = "/api/app/predict", way: str = "core"
) -> http.client.HTTPConnection:
    """Send a query. way: "python": with a header that the core leaves to the Python server; "read":
    for a user, so that the core only reads it."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    headers = {"Clipper-Deadline-Ms": "30000"} if way == "python" else {}
    user = {"user": "ann"} if way == "read" else {}
    connection.request("POST", path, json.dumps({"input": [x], **user}), headers)
    return connection


def test_what_does_not_fit_is_given_a_time_to_retry(
    gated: clipper.ClipperServer, gate: Gate
) -> None:
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(contextlib.closing(send(gated.http_address, i))) for i in range(40)
        ]
        ready = select.select([connection.sock for connection in connections], [], [], PATIENCE_S)[
            0
        ]
        refused = next(connection for connection in connections if connection.sock in ready)
        first = refused.getresponse()
        assert first.status == 429
        assert int(first.getheader("Retry-After") or 0) >= 1
        body = json.loads(first.read())
        assert (body["status"], body["type"]) == (429, "urn:clipper:error:overloaded")
        gate.open()
        statuses = {
            i: connection.getresponse()
            for i, connection in enumerate(connections)
            if connection is not refused
        }
        answered = {i: json.loads(reply.read()) for i, reply in statuses.items()}
        assert {reply.status for reply in statuses.values()} == {200, 429}
        assert all(body["output"] == i for i, body in answered.items() if statuses[i].status == 200)


def test_a_container_that_dies_with_a_query(gated: clipper.ClipperServer, gate: Gate) -> None:
    connection = send(gated.http_address, 7)
    gate.wait_until_seen()
    pid = gated.stats()["models"]["gate:1"]["replicas"][0]["pid"]
    gate.open()  # for the one that comes in its place
    os.kill(pid, signal.SIGKILL)
    reply = connection.getresponse()
    body = json.loads(reply.read())
    assert (reply.status, body.get("output")) == (200, 7) or reply.status == 503
    connection.close()


def wait_for_issued(server: clipper.ClipperServer, count: int) -> None:
    wait_until(lambda: server.stats()["issued"] >= count)


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset: its peer knows at once that nobody reads any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("whose", ["core", "read", "python"])
@pytest.mark.parametrize(
    "way", ["reset", "half-closed, then reset", "closed", "closed before an ingress"]
)
def test_a_connection_that_is_closed_or_reset_cancels_its_query(
    gated: clipper.ClipperServer, gate: Gate, whose: str, way: str
) -> None:
    """Also after the client had ended its sending side, when nothing is read from it. One that is
    closed is reset when it is written to."""
    first = send(gated.http_address, 1)
    gate.wait_until_seen()
    with contextlib.closing(Ingress({"http": "127.0.0.1:0"})) as front:
        front.route([Backend("the server", {"http": gated.http_address})])
        is_before = way == "closed before an ingress"
        address = front.addresses["http"] if is_before else gated.http_address
        second = send(address, 2, way=whose)
        wait_for_issued(gated, 2)
        if way.startswith("closed"):
            second.close()
        else:
            if way != "reset":
                second.sock.shutdown(socket.SHUT_WR)
                assert ask(gated.http_address, "GET", "/v2/health/live").status == 200
            reset(second.sock)
        # while the model still holds the first
        wait_until(lambda: gated.stats()["answered"])
    gate.open()
    assert first.getresponse().status == 200
    first.close()


@pytest.mark.parametrize("by_python", [False, True])
def test_a_client_that_ends_its_sending_side_gets_all_its_answers(
    gated: clipper.ClipperServer, gate: Gate, by_python: bool
) -> None:
    """Its queries wait for longer than `idle_s`; the begin of a request after them is dropped.
    Meanwhile it is sent one response that is skipped."""
    host, _, port = gated.http_address.rpartition(":")
    body = b'{"input": [%d]}'
    more = b"Clipper-Deadline-Ms: 30000\r\n" if by_python else b""
    head = b"POST /api/app/predict HTTP/1.1\r\nHost: a\r\n%sContent-Length: 14\r\n\r\n" % more
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(b"".join(head + body % i for i in range(5)) + head[:20])
        client.shutdown(socket.SHUT_WR)
        wait_for_issued(gated, 5)
        with socket.create_connection((host, int(port)), PATIENCE_S) as idle:
            assert idle.recv(1) == b""  # after idle_s
        assert client.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        gate.open()
        received = b""
        while chunk := client.recv(4096):
            received += chunk
    assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200 OK") == 5
    assert re.findall(rb'"output":([^,]+),', received) == [b"%d.0" % i for i in range(5)]


def test_a_client_that_sends_without_end_is_not_read_once_its_requests_are_pythons(
    gated: clipper.ClipperServer,
) -> None:
    """They come together with the connection, which is paused while it is handed over."""
    host, _, port = gated.http_address.rpartition(":")
    head = "POST /api/app/predict HTTP/1.1\r\nHost: a\r\nClipper-Deadline-Ms: 30000\r\n"
    data = f'{head}Content-Length: 14\r\n\r\n{{"input": [1]}}'.encode() * 1000
    sent_bytes = 0
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(data)
        wait_for_issued(gated, 6)
        client.setblocking(False)
        while sent_bytes < 1 << 26 and select.select([], [client], [], 1.0)[1]:
            sent_bytes += client.send(data)
    assert sent_bytes < 1 << 26, "more than the buffers of the kernel"


@pytest.mark.parametrize("by_python", [False, True])
@pytest.mark.parametrize("half_closed", [False, True])
def test_a_client_that_reads_nothing_of_large_responses_is_closed(
    by_python: bool, half_closed: bool
) -> None:
    """After `idle_s`, also when the kernel takes nothing of a response that has begun."""
    http = {"address": "127.0.0.1:0", "idle_s": 0.4}
    with clipper.start(http=http, **QUICK) as server:
        server.deploy("wide", lambda rows: ["x" * 100_000] * len(rows), input="f64[1]")
        server.app("app", models=["wide"], slo_ms=30_000)
        first = send(server.http_address, 1, way="python" if by_python else "core")
        assert first.getresponse().read()
        first.close()
        host, _, port = server.http_address.rpartition(":")
        more = b"Clipper-Deadline-Ms: 30000\r\n" if by_python else b""
        head = b"POST /api/app/predict HTTP/1.1\r\nHost: a\r\n%sContent-Length: 14\r\n\r\n" % more
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE_S)
            client.connect((host, int(port)))
            client.sendall((head + b'{"input": [1]}') * 200)
            if half_closed:
                client.shutdown(socket.SHUT_WR)
            frontends: Any = server._endpoints.frontends
            core_server = frontends._listeners.hot.core_server
            answers = lambda: server.stats()["applications"]["app"]["queries"]  # noqa: E731
            wait_until(lambda: answers() > 1, "one of its requests is read")
            wait_until(lambda: not core_server.connections + core_server.outside)


def test_slow_clients_end_and_others_do_not_notice(
    gated: clipper.ClipperServer, gate: Gate
) -> None:
    gate.open()
    host, _, port = gated.http_address.rpartition(":")
    slow = []
    for i in range(100):
        slow.append(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        slow[-1].sendall(
            [
                b"GET /v2",
                b"POST /api/app/predict HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
                b"",
            ][i % 3]
        )
    assert ask(gated.http_address, "POST", "/api/app/predict", {"input": [5]}).json["output"] == 5
    for i, connection in enumerate(slow):
        received = b""
        while chunk := connection.recv(4096):
            received += chunk
        assert (b" 408 " in received) is (i % 3 != 2), received
        connection.close()


def test_a_response_waits_for_its_query_when_the_server_closes(gate: Gate) -> None:
    with clipper.start(http="127.0.0.1:0", **{**QUICK, "drain_s": PATIENCE_S}) as server:
        server.deploy("gate", gate.predict, input="f64[1]", cache=False)
        server.app("app", models=["gate"], slo_ms=30_000)
        address = server.http_address
        idle = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        idle.request("GET", "/v2/health/live")
        assert idle.getresponse().read()
        connection = send(address, 3)
        gate.wait_until_seen()
        closing = threading.Thread(target=server.close)
        closing.start()
        assert idle.sock.recv(1) == b""  # an idle connection is closed at once
        idle.close()
        gate.open()
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["output"]) == (200, 3)
        assert reply.getheader("Connection") == "close"
        join(closing)
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        ask(address, "GET", "/v2/health/live")


def status_of_next(connection: socket.socket) -> int:
    """Read an answer, after which nothing else was sent yet; return its status."""
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        response.read()
        return response.status


def test_a_request_that_has_partly_arrived_is_answered_when_the_server_closes() -> None:
    with clipper.start(http="127.0.0.1:0", **{**QUICK, "drain_s": PATIENCE_S}) as server:
        server.deploy("sum", total, input="f64[1]", cache=False)
        server.app("app", models=["sum"], slo_ms=30_000)
        host, _, port = server.http_address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            body = b'{"input": [3]}'
            head = b"POST /api/app/predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
            head %= len(body)
            connection.sendall(head + body + head + body[:5])
            assert status_of_next(connection) == 200  # so the part behind it was read, too
            closing = threading.Thread(target=server.close)
            closing.start()
            closing.join(0.2)
            connection.sendall(body[5:])
            assert status_of_next(connection) == 200
            join(closing)


def test_waiting_calls_are_answered_at_the_end(gate: Gate) -> None:
    with clipper.start(http="127.0.0.1:0", **{**QUICK, "drain_s": 0.0}) as server:
        server.deploy("gate", gate.predict, input="f64[1]", cache=False)
        server.app("app", models=["gate"], slo_ms=30_000)
        connection = send(server.http_address, 3)
        gate.wait_until_seen()
    reply = connection.getresponse()
    assert reply.status == 503
    assert reply.getheader("Retry-After")
    assert "shutting down" in json.loads(reply.read())["error"]
    connection.close()


def test_an_address_in_use_is_named_and_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        message = (
            r"cannot listen on http.address = '127.0.0.1:\d+': it is taken by process"
            rf" {os.getpid()} \(.*python"
        )
        with pytest.raises(AddressInUse, match=message):
            clipper.start(http=address)
        with pytest.raises(AddressInUse, match=r"http.admin"):
            clipper.start(http="127.0.0.1:0", admin=address)


def test_addresses_that_cannot_be() -> None:
    for wrong in ("8080", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"):
        with pytest.raises(ConfigError, match="expected 'HOST:PORT'"):
            clipper.load_config(http=wrong)
    with pytest.raises(ConfigError, match=r"http.token"):
        clipper.load_config(admin="0.0.0.0:0")
    assert (
        clipper.load_config(admin="0.0.0.0:0", http={"token": "secret"}).http.admin == "0.0.0.0:0"
    )
    assert "secret" not in repr(clipper.load_config(http={"token": "secret"}))


def test_without_an_address_nothing_listens() -> None:
    with clipper.start() as server:
        assert (server.http_address, server.admin_address) == ("", "")
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("clipper-http")
        ]


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with clipper.start(http="[::1]:0") as server:
        assert ask(server.http_address, "GET", "/v2/health/live").status == 200


def test_curl_sends_a_large_body_after_100_continue(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"inputs": [[1.0] * 1000] * 500}))
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        server.deploy("sum", lambda rows: rows.sum(axis=1), input="f64[1000]")
        server.app("total", models=["sum"], slo_ms=30_000)
        url = f"http://{server.http_address}/api/total/predict"
        command = [
            "curl",
            "-sS",
            "--http2",
            "-H",
            "Expect: 100-continue",
            "--data-binary",
            f"@{body}",
            url,
        ]
        done = subprocess.run(command, capture_output=True, timeout=30)
        assert not done.stderr
        assert {one["output"] for one in json.loads(done.stdout)["predictions"]} == {1000.0}
