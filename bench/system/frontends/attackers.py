"""The server that is attacked and those who attack it, each in a process of its own.

`python -m bench.system.frontends.attackers server [keys]` prints what an attacker and a client need
to know, as JSON, and serves until its standard input ends. `python -m
bench.system.frontends.attackers NAME TARGET` prepares the attack NAME on the server that the JSON
TARGET describes, prints "ready", and for each line `SECONDS` that it reads attacks for so long and
prints how many times it did what it does.
"""

import contextlib
import gzip
import http.client
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import clipper
from clipper.credentials.credential_file import line_of, new_key
from clipper.errors import ClipperError
from clipper_container.wire import frames as wire
from tests.memory_container import MemoryContainer

ANSWER_NUMBERS = 37_500  # of the large answer: 300 KB as JSON
BATCH_BYTES = 65_536  # of pipelined requests that are sent at once
UNREAD_CONNECTIONS = 10
STRANGERS = 1100  # more than limits.connections_max
NAME_CHARS = 10_000_000
PATIENCE_S = 0.2  # of a client that sends or reads, so that an attack ends in time
F64 = 12
TOKEN = "the token of management"


class Target(NamedTuple):
    """Addresses and secrets of the attacked server. key: of its clients; containers: the address
    that containers dial."""

    http: str
    admin: str
    containers: str
    token: str
    key: str
    pid: int


# until that time of time.monotonic; how many times it did what it does
Attack = Callable[[Target, float], int]


# -- the server


def total(rows: Any) -> Any:
    return rows.sum(axis=1)


def large(rows: Any) -> Any:
    return np.full((len(rows), ANSWER_NUMBERS), 0.25)


def serve(keys: bool) -> None:
    """Serve until standard input ends. keys: whether clients need one."""
    with tempfile.TemporaryDirectory() as folder:
        http = {"address": "127.0.0.1:0", "admin": "127.0.0.1:0", "token": TOKEN}
        key = new_key() if keys else ""
        if keys:
            http["api_keys_file"] = str(Path(folder) / "keys")
            Path(folder, "keys").write_text(line_of("client", key) + "\n")
        with clipper.start(http=http) as server:
            server.deploy("cheap", total, input="f64[4]", cache=False)
            server.deploy("large", large, input="f64[1]")
            server.app("cheap", models=["cheap"], slo_ms=1000, default=-1.0)
            server.app("large", models=["large"], slo_ms=10_000)
            told = Target(
                server.http_address,
                server.admin_address,
                server.address,
                server.token,
                key,
                os.getpid(),
            )
            print(json.dumps(told), flush=True)
            sys.stdin.read()


def ask(target: Target, path: str, body: bytes, *headers: str, key: bool = True) -> bytes:
    """Return the bytes of one POST."""
    mine = [f"Authorization: Bearer {target.key}"] if key and target.key else []
    head = [
        f"POST {path} HTTP/1.1",
        "Host: here",
        f"Content-Length: {len(body)}",
        *mine,
        *headers,
        "",
        "",
    ]
    return "\r\n".join(head).encode() + body


def dial(target: Target) -> socket.socket:
    host, _, port = target.http.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def send_and_read(target: Target, data: bytes, until: float) -> None:
    """Send `data` on a connection of its own, and read what comes until the server closes or is
    silent."""
    with contextlib.suppress(OSError), dial(target) as line:
        line.sendall(data)
        while line.recv(1 << 20) and time.monotonic() < until:
            pass


# -- attacks. Each is one function of the target and the time when it ends.


def compute(target: Target, until: float) -> int:
    """Compute without an attack, so that the process takes as much of the machine as an attacker
    does."""
    count = 0
    while time.monotonic() < until:
        count += sum(range(1000)) > 0
    return count


def empty_lists(target: Target, until: float) -> int:
    """Run a container that answers each query by tensors of billions, and of 4096, empty lists."""
    count = 0
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            for _ in _empty_replies(target):
                count += 1
                if time.monotonic() >= until:
                    break
    return count


def _empty_replies(target: Target) -> Iterator[None]:
    """Serve one connection of the hostile container: replies that are just allowed, and one that
    ends it. Yields after each."""
    shapes = [(4096, 0, 0, 0)] * 20 + [(2**31, 2**31, 0, 0)]
    with (
        MemoryContainer(target.containers, target.token, "hostile", input="f64[1]") as container,
        dial(target) as line,
    ):
        container.send_hello()
        container.socket.settimeout(PATIENCE_S)
        for dims in shapes:
            tensor = {"name": "x", "shape": [1, 1], "datatype": "FP64", "data": [time.monotonic()]}
            line.sendall(
                ask(target, "/v2/models/hostile/infer", json.dumps({"inputs": [tensor]}).encode())
            )
            batch, _ = container.read_batch()
            rank = dims.index(0) + 1
            front = wire.Header(
                wire.Kind.REPLY, F64, 0, 1, batch, payload_bytes=0, rank=rank, dims=dims
            )
            container.send(wire.encode_header(front))
            yield
            if rank == 2:
                line.recv(1 << 20)


def unread_answers(target: Target, until: float) -> int:
    """Let ten clients send 64 KB of requests each for a large cached answer and read nothing."""
    request = ask(target, "/api/large/predict", b'{"input": [1.0]}')
    batch, count = request * (BATCH_BYTES // len(request)), 0
    while time.monotonic() < until:
        with contextlib.ExitStack() as stack:
            for _ in range(UNREAD_CONNECTIONS):
                with contextlib.suppress(OSError):
                    stack.enter_context(line := dial(target)).sendall(batch)
                    line.setblocking(False)
                    count += 1
            time.sleep(max(0.0, min(0.5, until - time.monotonic())))
    return count


def gzip_bombs(target: Target, until: float) -> int:
    """Send requests without a key, of 16 KB that decompress to 16 MB."""
    body = gzip.compress(bytes(16 << 20), 9)
    bomb = ask(target, "/api/cheap/predict", body, "Content-Encoding: gzip", key=False)
    count = 0
    while time.monotonic() < until:
        send_and_read(target, bomb * 4, until)
        count += 4
    return count


def trailers(target: Target, until: float) -> int:
    """Send chunked bodies with endless trailers. Return how many megabytes the server has read."""
    head = (
        b"POST /api/cheap/predict HTTP/1.1\r\nHost: here\r\nTransfer-Encoding:"
        b" chunked\r\n\r\n1\r\nx\r\n0\r\n"
    )
    piece, count = b"X-Trailer: " + b"a" * 1000 + b"\r\n", 0
    while time.monotonic() < until:
        with contextlib.suppress(OSError), dial(target) as line:
            line.sendall(head)
            while time.monotonic() < until:
                line.sendall(piece * 1024)
                count += 1
    return count


def upgrades(target: Target, until: float) -> int:
    """Send thousands of pipelined requests that each offer another protocol."""
    offer = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    count = 0
    while time.monotonic() < until:
        send_and_read(target, offer * 1000, until)
        count += 1000
    return count


def long_names(target: Target, until: float) -> int:
    """Send queries of users with different names of ten million characters."""
    count = 0
    while time.monotonic() < until:
        body = json.dumps(
            {"input": [1.0, 2.0, 3.0, 4.0], "user": f"{count}-{'u' * NAME_CHARS}"}
        ).encode()
        send_and_read(target, ask(target, "/api/cheap/predict", body), until)
        count += 1
    return count


def strangers(target: Target, until: float) -> int:
    """Open more connections than may wait to the socket of the containers, and send half of a HELLO
    on each."""
    half, count = b"".join(wire.control_frame(wire.Kind.HELLO, bytes(100)))[:80], 0
    held: list[socket.socket] = []
    path = target.containers.removeprefix("unix:")
    while time.monotonic() < until:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        try:
            stranger.connect(path)
            stranger.send(half)
            count += 1
        except OSError:  # the backlog is full
            time.sleep(0.001)
        held.append(stranger)
        if len(held) > STRANGERS:
            held.pop(0).close()
    for stranger in held:
        stranger.close()
    return count


def deployments(target: Target, until: float) -> int:
    """Make four deployments at a time."""
    counts = [0] * 4

    def deploy(which: int) -> None:
        client = clipper.connect(f"http://{target.admin}", token=TOKEN)
        while time.monotonic() < until:
            name = f"deployed-{which}-{until:.0f}"  # its versions are counted from 1
            with contextlib.suppress(ClipperError):
                client.deploy(name, "bench.system.fixtures.noop:first", input="f64[1]")
                counts[which] += 1
            with contextlib.suppress(ClipperError):
                client.retire(f"{name}:{counts[which]}", force=True)

    threads = [threading.Thread(target=deploy, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def failing_replica(target: Target, until: float) -> int:
    """Run a second replica of the client's own model that fails each batch at once, with a text of
    60 KB."""
    count, text = 0, "\x1b]0;owned\x07 /etc/secret\r" * 2500
    hello = (target.containers, target.token, "cheap")
    while time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            MemoryContainer(*hello, input="f64[4]", replica=1) as container,
        ):
            container.send_hello()
            container.socket.settimeout(PATIENCE_S)
            while time.monotonic() < until:
                count += _fail_one(container, text)
    return count


def _fail_one(container: MemoryContainer, text: str) -> int:
    """Fail the next batch, if one comes; how many were failed."""
    try:
        batch, _ = container.read_batch()
    except TimeoutError:
        container.beat()
        return 0
    container.fail(batch, text)
    return 1


ATTACKS: dict[str, tuple[Attack, str]] = {
    "compute": (compute, "no attack, a process that computes"),
    "empty-lists": (empty_lists, "a container that replies with empty lists"),
    "unread": (unread_answers, "pipelined requests for a large cached answer, unread"),
    "unread-python": (unread_answers, "the same where clients need keys"),
    "gzip": (gzip_bombs, "gzip bombs without a key"),
    "trailers": (trailers, "chunked trailers without end"),
    "upgrades": (upgrades, "1000 pipelined offers of another protocol"),
    "names": (long_names, "names of users of 10 MB"),
    "strangers": (strangers, "half a HELLO on each of 1100 connections"),
    "deployments": (deployments, "four deployments under way"),
    "failing": (failing_replica, "a replica that fails at once"),
}


def attack(name: str, target: Target) -> None:
    """Attack for the number of seconds on each line of standard input, and print the count."""
    run = ATTACKS[name][0]
    with contextlib.suppress(OSError):
        warm = http.client.HTTPConnection(target.http, timeout=10)
        bearer = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        warm.request("POST", "/api/large/predict", b'{"input": [1.0]}', bearer)
        warm.getresponse().read()
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(target, time.monotonic() + float(line)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve("keys" in sys.argv[2:])
    else:
        attack(sys.argv[1], Target(*json.loads(sys.argv[2])))
