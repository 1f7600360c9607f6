"""Malformed bytes at the listening socket: whatever a client sends, the server continues to serve
all others."""

import contextlib
import os
import random
import resource
import select
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import zlib

import numpy as np
import pytest

import clipper
from clipper.errors import TooLarge
from clipper_container.wire import frames as wire
from tests.memory_container import MemoryContainer, wait_until
from tests.threads import join

ROW = np.arange(4.0)


@pytest.fixture(scope="module")
def server():
    """Yield a server with rare heartbeats, so that a connection is closed for its bytes and not for
    silence."""
    with clipper.start(heartbeat_ms=60_000, drain_s=0.1) as started:
        started.deploy("serving", lambda xs: xs.sum(axis=1), input="f64[4]", cache=False)
        yield started


@pytest.fixture
def serving(server):
    """Yield a model that must still answer correctly from the same process when the test is
    over."""
    model = server.model("serving")
    pid = server.stats()["models"][model.name]["replicas"][0]["pid"]
    yield model
    for i in range(20):
        assert model.predict(ROW + i).result(60) == 6.0 + 4 * i
    assert server.stats()["models"][model.name]["replicas"][0]["pid"] == pid


def dial(server):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(8)  # less than a stranger has for its HELLO
    try:
        client.connect(server.address.removeprefix("unix:"))
    except OSError:  # the backlog is full, for one
        client.close()
        raise
    return client


def closed(client):
    """Return whether the server closes the connection; ignore what it sends before."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def send(client, data):
    with contextlib.suppress(ConnectionError):
        client.sendall(data)


def hello(server, **fields):
    container = {
        "name": "stranger",
        "version": 1,
        "input": "f64[4]",
        "token": server.token,
        **fields,
    }
    return b"".join(wire.control_frame(wire.Kind.HELLO, wire.pack_map(container)))


def crc(front):
    return front + struct.pack("<I", zlib.crc32(front))


def header(**fields):
    """Return a header with a right CRC and any fields."""
    return wire.encode_header(wire.Header(**{"kind": wire.Kind.HELLO, "id": 1, **fields}))


def test_random_bytes(server, serving):
    rng = random.Random(1)
    for size in (1, 63, 64, 65, 1000, 100_000):
        for _ in range(5):
            with dial(server) as client:
                send(client, rng.randbytes(size))
                if size >= 64:
                    assert closed(client)


HEADERS = {
    "oversized": lambda: header(payload_bytes=2**62),
    "oversized by wrap": lambda: header(payload_bytes=2**64 - 64),
    "a payload that never comes": lambda: header(payload_bytes=10_000) + b"x" * 500,
    "a HELLO of 70 kB": lambda: header(payload_bytes=70_000) + bytes(70_000),
    "huge rows": lambda: (
        header(kind=wire.Kind.REPLY, dtype=12, rows=2**32 - 1, payload_bytes=8) + bytes(8)
    ),
    "huge dims": lambda: (
        header(
            kind=wire.Kind.REPLY, dtype=12, rank=4, dims=(2**32 - 1,) * 4, rows=1, payload_bytes=8
        )
        + bytes(8)
    ),
    "rank 255": lambda: header(kind=wire.Kind.REPLY, dtype=12, rank=255, rows=1),
    "dtype 0": lambda: header(kind=wire.Kind.REPLY, dtype=0, rows=1, payload_bytes=8),
    "dtype 99": lambda: header(kind=wire.Kind.REPLY, dtype=99, rows=1, payload_bytes=8),
    "no rows": lambda: header(kind=wire.Kind.REPLY, dtype=12),
    "unknown kind": lambda: header(kind=77),
    "kind 0": lambda: header(kind=0),
    "unknown flags": lambda: header(flags=0x8000),
    "a reply nobody waits for": lambda: (
        header(kind=wire.Kind.REPLY, dtype=12, rows=1, id=99, payload_bytes=8) + bytes(8)
    ),
    "a PREDICT to the server": lambda: (
        header(kind=wire.Kind.PREDICT, dtype=12, rows=1, payload_bytes=8) + bytes(8)
    ),
    "a WELCOME to the server": lambda: header(kind=wire.Kind.WELCOME),
    "a damaged header CRC": lambda: header()[:63] + b"\0",
    "version 9": lambda: crc(b"CLPR\x09" + header()[5:60]),
    "reserved bits": lambda: crc(header()[:10] + b"\1\0" + header()[12:60]),
    "HTTP": lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(80),
    "a pickle": lambda: b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.".ljust(80),
}


@pytest.mark.parametrize("what", HEADERS)
def test_frames_that_are_none(server, serving, what):
    with dial(server) as client:
        send(client, HEADERS[what]())
        if what == "a payload that never comes":
            client.shutdown(socket.SHUT_WR)  # truncated
        assert closed(client)


@pytest.mark.parametrize("what", HEADERS)
def test_frames_that_are_none_from_a_container_that_was_let_in(server, serving, what):
    with MemoryContainer(
        server.address, server.token, f"turncoat-{list(HEADERS).index(what)}", input="f64[4]"
    ) as turncoat:
        turncoat.send_hello()
        server.model(turncoat.hello["name"]).predict(ROW, slo_ms=10_000)
        assert turncoat.read_batch()[0] == 1
        turncoat.socket.settimeout(60)
        send(turncoat.socket, HEADERS[what]())
        if what == "a payload that never comes":
            turncoat.socket.shutdown(socket.SHUT_WR)
        assert closed(turncoat.socket)


def test_hellos_of_all_kinds(server, serving):
    before = set(server.stats()["models"])
    deep = b"\x91" * 5000 + b"\xc0"
    bombs = [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx",
        deep,
        b"\x81\xa4name" + deep,
        b"\x93\1\2\3",
    ]
    bombs += [b"\x81\xc4\x04name\xa1x", wire.pack_map({"name": "x" * 60_000})]
    for payload in bombs:
        with dial(server) as client:
            send(client, b"".join(wire.control_frame(wire.Kind.HELLO, payload)))
            assert closed(client)
    assert set(server.stats()["models"]) == before


def test_a_second_hello(server, serving):
    with MemoryContainer(server.address, server.token, "twice", input="f64[4]") as container:
        container.send_hello()
        send(container.socket, hello(server, name="twice"))
        assert closed(container.socket)


def test_bit_flips_in_replies(server, serving):
    """A reply with one flipped bit either has another number as an output, or closes its
    connection."""
    rng = random.Random(2)
    for round in range(60):
        with MemoryContainer(server.address, server.token, "flips", input="f64[4]") as container:
            container.send_hello()
            model = server.model("flips")
            future = model.predict(rng.random() + ROW, slo_ms=10_000)
            batch, _ = container.read_batch()
            front = wire.encode_header(
                wire.Header(wire.Kind.REPLY, 12, 0, 1, batch, payload_bytes=8)
            )
            frame = bytearray(front + struct.pack("<d", 1.0))
            bit = rng.randrange(64 * 8)
            frame[bit // 8] ^= 1 << bit % 8
            send(container.socket, frame)
            assert closed(container.socket), f"round {round}: bit {bit} of the header was taken"
            future.cancel()


def test_truncated_replies(server, serving):
    with contextlib.ExitStack() as stack:
        for cut in (1, 63, 64, 65, 71):
            container = stack.enter_context(
                MemoryContainer(server.address, server.token, "cut", input="f64[4]")
            )
            container.send_hello()
            future = server.model("cut").predict(ROW + cut, slo_ms=1_000)
            batch, _ = container.read_batch()
            front = wire.encode_header(
                wire.Header(wire.Kind.REPLY, 12, 0, 1, batch, payload_bytes=8)
            )
            send(container.socket, (front + struct.pack("<d", 1.0))[:cut])
            container.close()
            assert future.exception(60) is not None


def test_one_byte_at_a_time(server, serving):
    frame = hello(server, name="dribble")
    with dial(server) as client:
        for at in range(len(frame)):
            client.sendall(frame[at : at + 1])
            if at % 20 == 0:
                assert serving.predict(ROW + at).result(60) == 6.0 + 4 * at
        answer = client.recv(wire.HEADER_BYTES)
        assert wire.decode_header(answer).kind == wire.Kind.WELCOME


def test_thousands_of_connects(server, serving):
    fds = len(os.listdir("/proc/self/fd"))
    for i in range(3000):
        with contextlib.suppress(BlockingIOError), dial(server) as client:
            if i % 3 == 0:
                send(client, b"x" * (i % 100))
        if i % 500 == 0:
            assert serving.predict(ROW).result(60) == 6.0
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) <= fds + 2, "the server has closed its ends"
    )


def test_silent_connections_do_not_stop_service(server, serving):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 400 if hard == resource.RLIM_INFINITY else min(400, hard // 4)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(dial(server))
        for i in range(100):
            assert serving.predict(ROW + i).result(60) == 6.0 + 4 * i


def test_a_container_that_floods(server, serving):
    """Several containers send heartbeats and late replies without end."""
    stop = threading.Event()

    def flood(i):
        with MemoryContainer(
            server.address, server.token, f"flood-{i}", input="f64[4]"
        ) as container:
            container.send_hello()
            beats = b"".join(wire.control_frame(wire.Kind.HEARTBEAT)) * 500
            while not stop.is_set():
                send(container.socket, beats)

    threads = [threading.Thread(target=flood, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        for i in range(200):
            assert serving.predict(ROW + i, slo_ms=10_000).result(20) == 6.0 + 4 * i
    finally:
        stop.set()
        for thread in threads:
            join(thread)


def test_a_container_that_does_not_read(server, serving):
    """The unread bytes of a container are bounded; its rows end by their deadline; other containers
    do not wait for it."""
    with MemoryContainer(server.address, server.token, "deaf", input="f64[10000]") as container:
        container.send_hello()
        model = server.model("deaf")
        futures = [model.predict(np.full(10_000, float(i)), slo_ms=300) for i in range(300)]
        for i in range(50):
            assert serving.predict(ROW + i).result(60) == 6.0 + 4 * i
        assert all(future.exception(60) is not None for future in futures)


def test_out_of_descriptors(tmp_path):
    """The server works with a full table of descriptors: connected clients are served, and others
    are accepted when there is room."""
    script = textwrap.dedent("""
        import os, resource, socket, numpy as np, clipper
        from tests.memory_container import wait_until
        with clipper.start(heartbeat_ms=100, drain_s=0.1) as server:
            model = server.deploy("m", lambda xs: xs.sum(axis=1), input="f64[4]", cache=False)
            model.predict(np.ones(4)).result(60)
            used = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            path, strangers = server.address.removeprefix("unix:"), []
            try:
                while True:
                    strangers.append(socket.socket(socket.AF_UNIX))
                    strangers[-1].settimeout(0.05)
                    strangers[-1].connect(path)
            except OSError as error:
                print("full:", error)
            for i in range(200):
                assert model.predict(np.ones(4) * i).result(60) == 4.0 * i
            for stranger in strangers:
                stranger.close()
            def again():
                with socket.socket(socket.AF_UNIX) as one:
                    one.connect(path)
                return True
            wait_until(again)
            server.scale("m", 2)
            wait_until(lambda: len([r for r in server.stats()["models"]["m:1"]["replicas"] if r["state"] == "ready"]) == 2)
            print("served")
        """)  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "full:" in done.stdout
    assert "served" in done.stdout


def test_those_who_only_dial_keep_no_container_out():
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(
            clipper.start(limits={"connections_max": 8}, heartbeat_ms=200, drain_s=0.1)
        )
        held = [opened.enter_context(dial(server)) for _ in range(8)]
        server.deploy("late", lambda xs: xs.sum(axis=1), input="f64[4]")
        assert server.model("late").predict(ROW).result(60) == 6.0
        assert closed(held[0]), "the one that waited longest"
        assert not select.select([held[-1]], [], [], 0)[0], "and nobody because its time was over"


def test_an_output_that_is_too_large_is_named():
    with clipper.start(limits={"output_bytes_max": 4096}, heartbeat_ms=200, drain_s=0.1) as server:
        server.deploy("wide", lambda xs: np.zeros((len(xs), 1000)), input="f64[4]")
        server.app("wide", models=["wide"], slo_ms=10_000)
        reason = server.app("wide").predict(ROW).result(60).reason
        assert "output" in reason
        assert "input" not in reason
        with pytest.raises(TooLarge, match="output beyond output_bytes_max"):
            server.model("wide").predict(ROW).result(60)
