"""A client's connection to a shard against scripted answers: every message that arrives at the
shard, and what the client makes of the answer, compared whole."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

from clipper_container.errors import ClipperError
from clipper_container.params import frames
from clipper_container.params.connection import (
    RequestPart,
    ShardConnection,
    ShardRequest,
    call,
    call_once,
    connected,
    set_timeouts,
)
from clipper_container.params.frames import IN_REGION, Head, MessageKind, RefusalCode
from clipper_container.params.push_identity import PushIdentity
from tests.expected import check_expected, shown
from tests.threads import join

HELLO = {"shard": 3, "ready": True, "sequence": 7, "tables": {"t": 5, "u": 6}, "replicas": 2}
HELLO |= {"frame_bytes_max": 1 << 17, "mode": "steps", "variables": [["w", [2, 3]], ["b", [4]]]}
Answer = Callable[[Head, bytes], list[bytes]]


def answer(head: Head, body: bytes = b"", kind: int = MessageKind.ANSWER, **more: Any) -> bytes:
    words = {"id": head.id, "epoch": 4, "payload_bytes": len(body), **more}
    return Head(kind, **words).packed() + body


def refused(head: Head, code: int, about: int, **more: Any) -> bytes:
    body = about.to_bytes(8, "little", signed=True)
    return answer(head, body, MessageKind.REFUSED, rows=code, **more)


class ScriptedShard:
    """A shard that answers each connection with the next `hello`, and each request as `then` says.
    It records what it receives."""

    def __init__(self, hellos: list[dict[str, Any] | int], then: Answer) -> None:
        self._hellos, self._then = iter(hellos), then
        self._threads: list[threading.Thread] = []
        self.lines: list[str] = []
        self.fds: list[int] = []

    def connect(self, address: str, answer_s: float) -> socket.socket:
        self.lines.append(f"connect {address} {answer_s:g}")
        ours, theirs = socket.socketpair()
        set_timeouts(ours, answer_s)
        self._threads.append(threading.Thread(target=self._serve, args=(theirs,)))
        self._threads[-1].start()
        return ours

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            while message := self._read(peer):
                head, body = message
                if head.kind == MessageKind.SHARE:
                    continue
                if head.kind == MessageKind.CALL and frames.unpacked(body)["call"] == "hello":
                    hello = next(self._hellos, None)
                    if hello is None:
                        return
                    if isinstance(hello, int):
                        peer.sendall(refused(head, hello, 0))
                        continue
                    fields = dict(hello)
                    epoch = fields.pop("epoch", 4)
                    peer.sendall(answer(head, frames.packed(fields), epoch=epoch))
                    continue
                for piece in self._then(head, body):
                    if not piece:
                        return
                    peer.sendall(piece)

    def _read(self, peer: socket.socket) -> tuple[Head, bytes] | None:
        data, fds, _, _ = socket.recv_fds(peer, frames.HEAD_BYTES, 1, socket.MSG_WAITALL)
        if not data:
            return None
        self.fds += fds
        head = frames.read_head(data)
        body = peer.recv(head.payload_bytes, socket.MSG_WAITALL) if head.payload_bytes else b""
        said: object = np.frombuffer(body[:48], "<u4")
        if head.kind == MessageKind.CALL:
            said = frames.unpacked(body)
        self.lines.append(f"  shard: {shown(tuple(head))} {shown(said)} {len(fds)}")
        return head, body

    def close(self) -> None:
        for thread in self._threads:
            join(thread)
        for fd in self.fds:
            os.close(fd)


def state(connection: ShardConnection) -> str:
    public = {key: value for key, value in vars(connection).items() if not key.startswith("_")}
    public.pop("lock")
    return shown(
        {**public, "name": connection.name, "open": connection.fileno() >= 0}
        | {key: getattr(connection, key) for key in ("_sent", "_ready", "_lost", "_known", "_open")}
    )


@contextmanager
def trace(
    title: str, out: list[str], hellos: list[dict[str, Any] | int], then: Answer, **more: Any
) -> Iterator[tuple[ShardConnection, Callable[..., None]]]:
    shard = ScriptedShard(hellos, then)
    identity = PushIdentity(9)
    identity.incarnation = 77
    if more.pop("has_pushed", False):
        identity.start_after(1)
    connection = ShardConnection(
        3, "unix:/{}?x".format, "secret", identity, 2.5, connect=shard.connect, **more
    )
    out.append(f"== {title}")

    def step(work: Callable[..., object], *words: Any) -> None:
        try:
            found = shown(work(*words))
        except (ClipperError, OSError) as error:
            found = f"{type(error).__name__}: {error}"
        out.extend(shard.lines)
        shard.lines.clear()
        out.extend((f"  {found}", f"  {state(connection)}"))

    try:
        yield connection, step
    finally:
        connection.close()
        shard.close()


def echo(head: Head, body: bytes) -> list[bytes]:
    return [answer(head, body, model=head.table + 1, rows=head.rows)]


def refusing(code: int) -> Answer:
    """Refuse the first request."""
    first = iter([True])

    def then(head: Head, body: bytes) -> list[bytes]:
        if not next(first, False):
            return echo(head, body)
        if code == RefusalCode.CALL_FAILED:
            fields = {"slug": "too-large", "message": "m", "hint": "h"}
            return [answer(head, frames.packed(fields), MessageKind.REFUSED, rows=code)]
        return [refused(head, code, 5, epoch=6)]

    return then


def pull(table: str = "t", **more: Any) -> ShardRequest:
    ids = np.arange(2)
    head = Head(MessageKind.PULL, rows=2, payload_bytes=ids.nbytes)
    return ShardRequest(head, (ids, b""), table=table, **more)


def test_messages_and_errors_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper_container.params.connection.PAUSE_S", 0.0)
    out: list[str] = []

    def done(connection: ShardConnection, request: ShardRequest) -> object:
        connection.send(request)
        return [tuple(connection.wait(request)), bytes(request.body[:64]), len(request.body)]

    with trace("requests", out, [HELLO], echo) as (connection, step):
        step(lambda: call_once(connection, "stats", table="t", sequence=12)[1])
        step(lambda: done(connection, pull()))
        parts = [RequestPart("u", 2), RequestPart("b", 4, True), RequestPart("t", 0)]
        step(
            lambda: done(
                connection,
                ShardRequest(
                    Head(MessageKind.PULL_TABLES, payload_bytes=40), (b"x" * 16,), parts=parts
                ),
            )
        )
        step(lambda: done(connection, pull("v")))
        step(lambda: done(connection, ShardRequest(Head(7), parts=[RequestPart("x", 1, True)])))
        step(
            lambda: done(
                connection, ShardRequest(Head(2, payload_bytes=1 << 17), (bytes(1 << 17),))
            )
        )
        step(
            lambda: done(
                connection, ShardRequest(Head(2, payload_bytes=(1 << 17) + 8), (b"",), sequence=20)
            )
        )
        step(lambda: connection.note_names({"n": {"z": 1}}, "n"))
        step(connection.forget_names)
        step(connection.close)

    kept: list[Head] = []

    def in_reverse(head: Head, body: bytes) -> list[bytes]:
        kept.append(head)
        if len(kept) < 3:
            return []
        return [answer(one, bytes(8 * i), epoch=5, model=1) for i, one in enumerate(kept[::-1])]

    with trace("answers in reverse", out, [HELLO], in_reverse) as (connection, step):
        requests = [pull(), pull("u"), call("x")]
        step(lambda: [*map(connection.send, requests), *map(connection.wait, requests)])
        step(lambda: [len(one.body) for one in requests])
        step(lambda: connection.wait(pull()))

    for title, hellos in (
        ("another shard", [{**HELLO, "shard": 2}]),
        ("recovers", [RefusalCode.NOT_READY, {**HELLO, "ready": False, "tables": {}}, HELLO]),
        ("lost its state", [{**HELLO, "ready": False, "state_lost": True, "tables": {}}]),
        ("an old one", [{**HELLO, "epoch": 3}]),
        ("made anew", [{**HELLO, "tables": {"t": 5, "u": 1030}}, HELLO]),
        ("bad fields", [{**HELLO, "sequence": "x"}, {**HELLO, "variables": 3}]),
        ("nothing said", [{"shard": 3}]),
        ("not admitted", [RefusalCode.NOT_ADMITTED]),
    ):
        with trace(title, out, [HELLO, *hellos], echo) as (connection, step):
            step(lambda: done(connection, pull("u")))
            connection.close()
            for until in (0.0, 0.0) if len(hellos) == 1 else (0.0, 0.0, 12.0):
                with monkeypatch.context() as patch:
                    patch.setattr("time.monotonic", count(5).__next__)
                    request = pull("u", sequence=3)
                    step(connection.wait_with_retries, request, until)
                if title in ("bad fields", "nothing said"):
                    break

    with trace("pushes of another", out, [HELLO, HELLO], echo, has_pushed=True) as (
        connection,
        step,
    ):
        step(lambda: done(connection, pull()))

    codes = [*RefusalCode, 99]
    for code in codes:
        with trace(f"refused with {code}", out, [HELLO, {**HELLO, "epoch": 6}], refusing(code)) as (
            connection,
            step,
        ):
            step(lambda: tuple(connection.wait_with_retries(pull(), time.monotonic() + 9)))

    for title, bad in (
        ("another protocol", [b"x" * 64]),
        ("the end in an answer", [Head(4, id=2, payload_bytes=8).packed(), b"abc", b""]),
        ("the end", [b""]),
    ):
        with trace(title, out, [HELLO] * 3, lambda head, body, bad=bad: bad) as (connection, step):
            step(lambda: done(connection, pull()))
            step(lambda: connection.wait_with_retries(pull(), 0.0))
    check_expected("tables/connection.txt", "\n".join(out) + "\n")


def test_rows_in_shared_memory() -> None:
    out: list[str] = []
    size = 1 << 16

    def in_region(head: Head, body: bytes) -> list[bytes]:
        if not head.flags & IN_REGION:
            return [answer(head, bytes(8))]
        if head.rows == 1:
            return [refused(head, RefusalCode.NOT_SHARED, 5)]
        with mmap.mmap(shard_fds()[-1], 0) as memory:
            memory[head.sequence : head.sequence + 3] = b"abc"
        return [answer(head, flags=IN_REGION, payload_bytes=size)]

    def shard_fds() -> list[int]:
        return connection._connect.__self__.fds  # type: ignore[attr-defined]

    hello = {**HELLO, "shared": 1 << 26}
    with trace("shared", out, [hello], in_region, shares=True) as (connection, step):
        for rows, expects in ((2, size), (2, size - 1), (2, size + 8), (1, size), (2, size)):
            ids = np.arange(rows)
            head = Head(MessageKind.PULL, rows=rows, payload_bytes=ids.nbytes)
            request = ShardRequest(head, (ids,), table="t", expects=expects)
            step(connection.wait_with_retries, request, time.monotonic() + 9)
            out.append(f"  {bytes(request.body[:3])!r} {len(request.body)}")
    check_expected("tables/connection-shared.txt", "\n".join(out) + "\n")


def test_a_connection_sets_tcp_timeouts_of_the_kernel(tmp_path: os.PathLike[str]) -> None:
    found = []
    for family, place in ((socket.AF_UNIX, f"{tmp_path}/s"), (socket.AF_INET, ("127.0.0.1", 0))):
        with socket.socket(family) as listener:
            listener.bind(place)  # type: ignore[arg-type]
            listener.listen()
            name = listener.getsockname()
            address = f"unix:{name}" if family == socket.AF_UNIX else f"tcp:127.0.0.1:{name[1]}"
            with connected(address, 2.5) as connection:
                found += [
                    connection.gettimeout(),
                    *(
                        np.frombuffer(
                            connection.getsockopt(socket.SOL_SOCKET, option, 16), "<i8"
                        ).tolist()
                        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
                    ),
                ]
                if family == socket.AF_INET:
                    named = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    assert named.rstrip(b"\0") == b"reno"
    (seconds, rest) = found[1]
    assert (seconds, found[2], found[4], found[5]) == (2, [2, rest], [2, rest], [2, rest])
    assert 490_000 <= rest <= 510_000  # the kernel counts in ticks
    assert found[0] is found[3] is None
