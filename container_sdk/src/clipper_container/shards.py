"""A connection to one shard of a parameter server, in plain Python (docs/params.md has the
messages).

One request at a time; it is sent again over as many connections as it takes, since a shard that was
killed is relaunched under the same address. What a request does to a shard it does once: pushes are
numbered by their worker.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from clipper_container.push_identity import PushIdentity
from clipper_container.shared_rows import Sharing
from clipper_container.transport import connect

HEAD = struct.Struct("<4s4B2I5QfI")
HEAD_BYTES = HEAD.size
MAGIC, VERSION, PROTOCOL = b"CLPT", 1, 1
PULL, PUSH, CALL, ANSWER, REFUSED, SHARE = range(1, 7)
IN_REGION = 2  # flag of a pull, and of its answer: the rows are in memory that both have
SHARED_BYTES_MIN = 1 << 16  # of an answer that comes by it
NOT_READY, OTHER_EPOCH, CALL_FAILED, NOT_SHARED = 102, 103, 106, 107
DTYPES = {"f32": 0, "f16": 1, "bf16": 2, "i8": 3}
SHARDS_FILE = "shards.json"  # {"addresses": [...], "token": ...}, in a set's folder
PAUSE_S = 0.02
PAUSE_S_MAX = 0.5
_NAMES = {  # of refusals, and what they are about
    2: ("overloaded", "{about} pushes wait for replicas"),
    12: ("invalid-input", "a gradient of id {about} holds NaN or infinity; nothing was changed"),
    13: ("frame", "a payload of {about} bytes does not fit its rows"),
    14: (
        "too-large",
        "more than {about} bytes: ask for fewer rows, or raise params.frame_bytes_max",
    ),
    16: ("unknown-table", "no table of number {about}"),
    101: ("forbidden", "the token is missing or wrong"),
    NOT_READY: ("shard-away", "it recovers"),
    OTHER_EPOCH: ("shard-away", "its epoch is {about}, another was meant"),
    104: ("stale-push", "the gradient is {about} versions old"),
    NOT_SHARED: (
        "does-not-fit",
        "a place outside of the {about} bytes of memory that it shares with this worker",
    ),
    108: (
        "already-exists",
        "worker number {about} is that of another live client: give each a number of its own",
    ),
    109: (
        "state-lost",
        (
            "it came back without what it had, and waits to be told to begin anew: `clipper params"
            " begin-anew`"
        ),
    ),
    105: (
        "stale-push",
        (
            "push {about} is older than the last 1024 of this worker; whether it was applied is not"
            " known"
        ),
    ),
}


class ShardAway(ConnectionError):
    """A shard did not answer within the caller's patience; a push of rows may have been applied.

    sequence: of that push: sent again with it, shards that have applied it do not apply it twice.
    0: it was no push.
    """

    def __init__(self, message: str = "", sequence: int = 0) -> None:
        super().__init__(message)
        self.sequence = sequence


class ShardRefused(ValueError):
    """A shard will not do it. slug: why, in one word (`invalid-input`, `unknown-table`,
    `type-conflict`, `stale-push` ...)."""

    def __init__(self, message: str, slug: str = "") -> None:
        super().__init__(message)
        self.slug = slug


class Head(NamedTuple):
    """The first 64 bytes of a message."""

    kind: int
    dtype: int = 0
    flags: int = 0
    table: int = 0
    rows: int = 0
    id: int = 0
    epoch: int = 0
    worker: int = 0
    sequence: int = 0
    model: int = 0
    scale: float = 1.0
    payload_bytes: int = 0


def packed_head(*fields: Any) -> bytes:
    return HEAD.pack(MAGIC, VERSION, *fields)


def read_head(data: bytes | bytearray) -> Head:
    """Raises: ShardRefused."""
    magic, version, *fields = HEAD.unpack(data)
    head = Head(*fields)
    if magic != MAGIC or version != VERSION or head.kind not in (ANSWER, REFUSED):
        raise ShardRefused(
            "what a shard sent is no message of this protocol: another version of clipper?", "frame"
        )
    return head


def padding(nbytes: int) -> bytes:
    """What fills up a payload to a multiple of 8."""
    return bytes(-nbytes % 8)


def packed_call(name: str, fields: dict[str, Any]) -> bytes:
    body: bytes = msgpack.packb({"call": name, **fields})
    return body + padding(len(body))


def unpacked(body: memoryview) -> dict[str, Any]:
    """The map at the front of a payload. Raises: ShardRefused."""
    reader = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(1, len(body)))
    try:
        reader.feed(body)
        found = reader.unpack()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ShardRefused(f"an answer that cannot be read: {error}", "frame") from None
    if not isinstance(found, dict):
        raise ShardRefused(f"an answer is a map, not {type(found).__name__}", "frame")
    return found


def addresses_in(folder: str | os.PathLike[str]) -> tuple[list[str], str]:
    """The addresses of the shards of a set, in order, and their token. Raises: ValueError."""
    path = os.path.join(os.fspath(folder), SHARDS_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        return [str(one) for one in said["addresses"]], str(said.get("token", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: {error}; shards are started by `clipper params up --folder ...`"
        ) from None


class Ask:
    """A request: its head but for id and epoch, what follows, and what came back.

    table: its name, of which each shard, in each of its lives, has a number.
    expects: bytes of a pull's answer, which may come by memory that is shared; they are in `body`
    either way.
    """

    __slots__ = ("answer", "block", "body", "buffers", "expects", "head", "id", "table")

    def __init__(
        self, head: Head, buffers: Sequence[Any] = (), table: str = "", expects: int = 0
    ) -> None:
        size = sum(memoryview(one).nbytes for one in buffers)
        self.head, self.buffers, self.table, self.expects = (
            head._replace(payload_bytes=size),
            buffers,
            table,
            expects,
        )
        self.id = 0
        self.answer: Head | None = None
        self.body: memoryview = memoryview(b"")
        self.block: Any = None


def call(name: str, **fields: Any) -> Ask:
    return Ask(Head(CALL), (packed_call(name, fields),))


class ShardLine:
    """number: of the shard.  address: looked up at each dialling.  identity: of the client.

    Threads: one at a time; who shares it holds its `lock` while a request is sent, and while an
    answer is waited for.
    """

    def __init__(
        self,
        number: int,
        address: Callable[[int], str],
        token: str,
        identity: PushIdentity,
        answer_s: float,
    ) -> None:
        self.number, self._address, self._token, self._answer_s = number, address, token, answer_s
        self._identity = identity
        self.lock = threading.RLock()
        self._open: dict[int, Ask] = {}
        self._sock: socket.socket | None = None
        self._sharing = Sharing()
        self._next = 0
        self._head = bytearray(HEAD_BYTES)
        self.epoch = 0  # the highest seen: a shard of a lower one should be dead
        self.sequence = 0  # of this worker's pushes there, the highest it knew when we met
        self._sent = 0  # of these, the highest that this client sent or knew of
        self.frame_bytes_max = 0  # of a payload, as it says; 0: not known
        self.tables: dict[str, int] = {}

    @property
    def name(self) -> str:
        return f"shard {self.number} at {self._address(self.number)}"

    def close(self) -> None:
        self._open.clear()
        self._sharing.end()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def send(self, ask: Ask) -> None:
        """Raises: OSError, ShardAway, ShardRefused; the connection is closed then."""
        if self._sock is None:
            self._dial()
        self.check(ask)
        self._send(ask)

    def check(self, ask: Ask) -> None:
        """Raises: ShardRefused, for a request that the shard will never take; nothing of it is
        sent."""
        size, most = ask.head.payload_bytes, self.frame_bytes_max
        if 0 < most < size:
            why = (
                f"{self.name}: a message of {size} bytes, and it takes {most}: push fewer rows, or"
                " raise params.frame_bytes_max"
            )
            raise ShardRefused(why, "too-large")

    def settle(self, ask: Ask, until: float) -> Head:
        """Its answer: sent again, if it must, as often as it takes until then. Raises: ShardAway,
        ShardRefused."""
        pause, why = PAUSE_S, "it does not answer"
        while True:
            try:
                if ask.id not in self._open and ask.answer is None:
                    self.send(ask)
                head = self._hear(ask)
                if head.kind == ANSWER:
                    return head
                if head.rows == NOT_SHARED and ask.block is not None:
                    self._sharing.end()  # over the socket, from here on
                    ask.answer, ask.id = None, 0
                    continue
                why = self._again(head, ask.body)
            except OSError as error:
                why = str(error) or why
            ask.answer, ask.id = None, 0
            if time.monotonic() + pause > until:
                raise ShardAway(f"{self.name}: {why}; is it running? `clipper params ps` tells")
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S_MAX)

    def _again(self, head: Head, body: memoryview) -> str:
        """Why to ask again soon. Raises: ShardRefused, when that would not help."""
        if head.rows not in (NOT_READY, OTHER_EPOCH):
            raise refusal(head, body, self.name)
        self.epoch = max(self.epoch, head.epoch)
        if head.rows == OTHER_EPOCH:
            self.close()
        return str(refusal(head, body, self.name))

    def _send(self, ask: Ask) -> None:
        assert self._sock is not None
        kind, dtype, flags, table, rows, _, _, worker, sequence, *rest = ask.head
        if ask.table:
            if ask.table not in self.tables:
                raise ShardRefused(f"{self.name} has no table {ask.table!r}", "unknown-table")
            table = self.tables[ask.table]
        place = self._sharing.place(ask.expects) if ask.expects >= SHARED_BYTES_MIN else None
        ask.block = None
        if place is not None:
            sequence, ask.block, fd = place
            flags |= IN_REGION
            if fd >= 0:
                self._share(fd)
        self._next += 1
        ask.id, ask.answer = self._next, None
        self._open[ask.id] = ask
        if kind == PUSH:
            self._sent = max(self._sent, sequence)
        epoch = 0 if kind == CALL else self.epoch
        head = packed_head(
            kind, dtype, flags, table, rows, self._next, epoch, worker, sequence, *rest
        )
        self._write([head, *(one for one in ask.buffers if len(one))])

    def _share(self, fd: int) -> None:
        """Its answer is dropped: if the shard does not take the memory, it refuses what is to go
        there."""
        self._next += 1
        beside = socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder)
        self._write([packed_head(*Head(SHARE, id=self._next))], [beside])
        assert self._sharing.rows is not None
        self._sharing.rows.close()  # the descriptor; the memory is mapped

    def _write(self, pieces: list[Any], beside: Sequence[tuple[int, int, bytes]] = ()) -> None:
        assert self._sock is not None
        rest = [memoryview(one).cast("B") for one in pieces]
        try:
            sent = self._sock.sendmsg(rest, beside)
            while rest:
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][sent:]
                    sent = self._sock.sendmsg(rest)
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise TimeoutError("it does not read") from None
            raise

    def _hear(self, ask: Ask) -> Head:
        """Its answer; those of others are kept for them, and those that nobody waits for are
        dropped."""
        try:
            while ask.answer is None:
                if ask.id not in self._open:
                    raise ConnectionError("the connection is gone")
                self._fill(memoryview(self._head))
                head = read_head(self._head)
                one = self._open.pop(head.id, None)
                if head.flags & IN_REGION and one is not None and one.block is not None:
                    body = one.block.data
                else:
                    body = np.empty(head.payload_bytes, np.uint8).data
                    self._fill(body)
                if one is not None:
                    one.body, one.answer = body, head
            return ask.answer
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise TimeoutError("it does not answer") from None
            raise

    def _fill(self, into: memoryview) -> None:
        assert self._sock is not None
        at = 0
        while at < len(into):
            n = self._sock.recv_into(into[at:] if at else into, 0, socket.MSG_WAITALL)
            if n == 0:
                raise ConnectionError("it closed the connection")
            at += n

    def _dial(self) -> None:
        self._sock = connect(self._address(self.number), self._answer_s)
        self._sock.settimeout(None)
        for option in (
            socket.SO_RCVTIMEO,
            socket.SO_SNDTIMEO,
        ):  # the kernel's: Python's own would poll before each read
            waits = struct.pack("ll", int(self._answer_s), int(self._answer_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, waits)
        me = self._identity
        ask = call(
            "hello",
            token=self._token,
            worker=me.worker,
            incarnation=me.incarnation,
            protocol=PROTOCOL,
        )
        try:
            self._send(ask)
            head = self._hear(ask)
            if head.kind != ANSWER:
                raise refusal(head, ask.body, self.name)
            said = unpacked(ask.body)
            if said.get("shard") != self.number:
                raise ShardRefused(
                    f"{self.name} says that it is shard {said.get('shard')}: give the addresses in"
                    " order",
                    "order",
                )
            if head.epoch < self.epoch:
                raise ConnectionError(
                    f"it is one of epoch {head.epoch} that should be dead; its successor has"
                    f" {self.epoch}"
                )
            self.sequence = int(said.get("sequence", 0))
            if me.has_pushed and self.sequence > self._sent:
                raise ShardRefused(
                    f"{self.name}: another client pushes as worker {me.worker}", "already-exists"
                )
            self.epoch, self._sent = head.epoch, max(self._sent, self.sequence)
            self.frame_bytes_max = int(said.get("frame_bytes_max", 0))
            self.tables = {
                str(name): int(number) for name, number in said.get("tables", {}).items()
            }
            if self._sock.family == socket.AF_UNIX:
                self._sharing.begin(int(said.get("shared", 0)))
        except BaseException:
            self.close()
            raise


def refusal(head: Head, body: memoryview, what: str) -> ShardRefused:
    """The error that a REFUSED answer stands for."""
    if head.rows == CALL_FAILED:
        said = unpacked(body)
        hint = str(said.get("hint") or "")
        return ShardRefused(
            f"{what}: {said.get('message', '')}{' ' if hint else ''}{hint}",
            str(said.get("slug", "")),
        )
    about = int.from_bytes(body[:8], "little", signed=True) if len(body) >= 8 else 0
    slug, text = _NAMES.get(head.rows, ("refused", "refused with code {code}"))
    return ShardRefused(f"{what}: {text.format(about=about, code=head.rows)}", slug)
