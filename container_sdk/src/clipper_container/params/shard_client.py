"""A client of one shard of a parameter server, in plain Python (docs/params.md describes the
messages).

It sends one request at a time and repeats it over new connections until it is answered: a killed
shard is relaunched at the same address. Pushes carry a worker number and a sequence, so a shard
applies each once.
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

from clipper_container.params.push_identity import PushIdentity
from clipper_container.params.shared_rows import SharedRowsAllocator
from clipper_container.wire.transport import connect

HEAD = struct.Struct("<4s4B2I5QfI")
HEAD_BYTES = HEAD.size
MAGIC, VERSION, PROTOCOL = b"CLPT", 1, 1
PULL, PUSH, CALL, ANSWER, REFUSED, SHARE = range(1, 7)
IN_REGION = 2  # flag of a pull and its answer: the rows are in shared memory
SHARED_BYTES_MIN = 1 << 16  # smallest answer that uses it
NOT_READY, OTHER_EPOCH, CALL_FAILED, NOT_SHARED = 102, 103, 106, 107
UNKNOWN_TABLE = 16
DROPPED = "table-dropped"  # slug: of a table that this client knew
DTYPES = {"f32": 0, "f16": 1, "bf16": 2, "i8": 3}
SHARDS_FILE = "shards.json"  # {"addresses": [...], "token": ...}, in a set's folder
PAUSE_S = 0.02
PAUSE_S_MAX = 0.5
_NAMES = {  # refusal code -> (slug, message)
    2: ("overloaded", "{about} pushes wait for its copies"),
    12: ("invalid-input", "a gradient of id {about} holds NaN or infinity; nothing was changed"),
    13: ("frame", "a payload of {about} bytes does not fit its rows"),
    14: (
        "too-large",
        "more than {about} bytes: ask for fewer rows, or raise params.frame_bytes_max",
    ),
    16: ("unknown-table", "no table of number {about}"),
    101: ("forbidden", "the token is missing or wrong"),
    111: ("quota-exceeded", "new rows would exceed a quota; nothing was changed"),
    110: ("forbidden", "a push needs a token with the role train, and this one has read"),
    NOT_READY: ("shard-away", "it is recovering"),
    OTHER_EPOCH: ("shard-away", "its epoch is {about}, another was meant"),
    104: ("stale-push", "the gradient is {about} versions old"),
    NOT_SHARED: (
        "does-not-fit",
        "a place outside of the {about} bytes of memory that it shares with this worker",
    ),
    108: (
        "already-exists",
        "worker number {about} is in use by another live client: give each its own number",
    ),
    109: (
        "state-lost",
        ("it restarted without its data and waits for a decision: `clipper params begin-anew`"),
    ),
    105: (
        "stale-push",
        (
            "push {about} is older than the last 1024 of this worker; it may or may not have been"
            " applied"
        ),
    ),
}


class ShardAway(ConnectionError):
    """A shard did not answer in time; a push may have been applied.

    sequence: the push's number: pass it to repeat the push safely. 0: not a push.
    """

    def __init__(self, message: str = "", sequence: int = 0) -> None:
        super().__init__(message)
        self.sequence = sequence


class ShardRefused(ValueError):
    """A shard refused a request. slug: the reason in one word (`invalid-input`, `unknown-table`,
    `type-conflict`, `stale-push` ...).
    """

    def __init__(self, message: str, slug: str = "") -> None:
        super().__init__(message)
        self.slug = slug


class ShardHeader(NamedTuple):
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
    """Encode a header from its fields."""
    return HEAD.pack(MAGIC, VERSION, *fields)


def read_head(data: bytes | bytearray) -> ShardHeader:
    """Decode a header of a shard. Raises: ShardRefused."""
    magic, version, *fields = HEAD.unpack(data)
    head = ShardHeader(*fields)
    if magic != MAGIC or version != VERSION or head.kind not in (ANSWER, REFUSED):
        raise ShardRefused(
            "the shard's message has an unknown format: does it run another version of clipper?",
            "frame",
        )
    return head


def padding(nbytes: int) -> bytes:
    """Return the zeros that fill a payload to a multiple of 8 bytes."""
    return bytes(-nbytes % 8)


def packed_call(name: str, fields: dict[str, Any]) -> bytes:
    """Encode a named call with its fields as msgpack, padded."""
    body: bytes = msgpack.packb({"call": name, **fields})
    return body + padding(len(body))


def unpacked(body: memoryview) -> dict[str, Any]:
    """Decode the msgpack map at the front of a payload. Raises: ShardRefused."""
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
    """Return the addresses of a set of shards, in order, and their token. Raises: ValueError."""
    path = os.path.join(os.fspath(folder), SHARDS_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        return [str(one) for one in said["addresses"]], str(said.get("token", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: {error}; shards are started by `clipper params up --folder ...`"
        ) from None


class ShardRequest:
    """A request and, later, its answer.

    table: its name; each shard numbers its tables itself, anew after each restart. expects: bytes
    of a pull's answer, which may come through shared memory; `body` holds them either way.
    """

    __slots__ = ("answer", "block", "body", "buffers", "expects", "head", "id", "table")

    def __init__(
        self, head: ShardHeader, buffers: Sequence[Any] = (), table: str = "", expects: int = 0
    ) -> None:
        size = sum(memoryview(one).nbytes for one in buffers)
        self.head, self.buffers, self.table, self.expects = (
            head._replace(payload_bytes=size),
            buffers,
            table,
            expects,
        )
        self.id = 0
        self.answer: ShardHeader | None = None
        self.body: memoryview = memoryview(b"")
        self.block: Any = None


def call(name: str, **fields: Any) -> ShardRequest:
    """Build a request that calls a function of the shard by name."""
    return ShardRequest(ShardHeader(CALL), (packed_call(name, fields),))


class ShardClient:
    """A client of one shard.

    number: the shard's index. address: looked up before each connect. identity: worker number and
    sequence of this client.

    Threads: one at a time; share it by holding `lock` while sending and while waiting for an
    answer.
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
        self._open: dict[int, ShardRequest] = {}
        self._sock: socket.socket | None = None
        self._sharing = SharedRowsAllocator()
        self._next = 0
        self._head = bytearray(HEAD_BYTES)
        self.epoch = 0  # highest seen: a shard with a lower one is outdated
        self.sequence = 0  # highest push of this worker that the shard knew at connect
        self._sent = 0  # highest push that this client sent or knew of
        self.frame_bytes_max = 0  # the shard's limit of a payload; 0: unknown
        self.tables: dict[str, int] = {}
        self._known: dict[str, int] = {}  # of earlier connections too

    @property
    def name(self) -> str:
        """Return the shard as messages call it."""
        return f"shard {self.number} at {self._address(self.number)}"

    def close(self) -> None:
        """Close the connection; open requests are dropped."""
        self._open.clear()
        self._sharing.disable()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def send(self, request: ShardRequest) -> None:
        """Send a request, connecting first if needed.

        Raises: OSError, ShardAway, ShardRefused; the connection is closed then.
        """
        if self._sock is None:
            self._dial()
        self.check(request)
        self._send(request)

    def check(self, request: ShardRequest) -> None:
        """Check a request against the shard's limits before anything is sent. Raises:
        ShardRefused.
        """
        size, most = request.head.payload_bytes, self.frame_bytes_max
        if 0 < most < size:
            why = (
                f"{self.name}: the message has {size} bytes, the limit is {most}: push fewer rows,"
                " or raise params.frame_bytes_max"
            )
            raise ShardRefused(why, "too-large")

    def settle(self, request: ShardRequest, until: float) -> ShardHeader:
        """Wait for the answer, sending the request again as often as needed until `until`
        (monotonic seconds).

        Raises: ShardAway, ShardRefused.
        """
        pause, why = PAUSE_S, "it does not answer"
        while True:
            try:
                if request.id not in self._open and request.answer is None:
                    self.send(request)
                head = self._receive_answer(request)
                if head.kind == ANSWER:
                    return head
                if head.rows == NOT_SHARED and request.block is not None:
                    self._sharing.disable()  # use the socket from here on
                    request.answer, request.id = None, 0
                    continue
                why = self._again(head, request.body)
            except OSError as error:
                why = str(error) or why
            request.answer, request.id = None, 0
            if time.monotonic() + pause > until:
                raise ShardAway(f"{self.name}: {why}; check it with `clipper params ps`")
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S_MAX)

    def _again(self, head: ShardHeader, body: memoryview) -> str:
        """Return why the request should be repeated. Raises: ShardRefused when that cannot help."""
        if head.rows == UNKNOWN_TABLE:
            raise ShardRefused(f"{self.name}: the table was dropped", DROPPED)
        if head.rows not in (NOT_READY, OTHER_EPOCH):
            raise refusal(head, body, self.name)
        self.epoch = max(self.epoch, head.epoch)
        if head.rows == OTHER_EPOCH:
            self.close()
        return str(refusal(head, body, self.name))

    def forget_tables(self) -> None:
        """Forget the numbers of tables."""
        self.tables, self._known = {}, {}

    def _send(self, request: ShardRequest) -> None:
        assert self._sock is not None
        kind, dtype, flags, table, rows, _, _, worker, sequence, *rest = request.head
        if request.table:
            if request.table not in self.tables:
                raise ShardRefused(f"{self.name} has no table {request.table!r}", "unknown-table")
            table = self.tables[request.table]
        place = (
            self._sharing.place(request.expects) if request.expects >= SHARED_BYTES_MIN else None
        )
        request.block = None
        if place is not None:
            sequence, request.block, fd = place
            flags |= IN_REGION
            if fd is not None:
                self._share(fd)
        self._next += 1
        request.id, request.answer = self._next, None
        self._open[request.id] = request
        if kind == PUSH:
            self._sent = max(self._sent, sequence)
        epoch = 0 if kind == CALL else self.epoch
        head = packed_head(
            kind, dtype, flags, table, rows, self._next, epoch, worker, sequence, *rest
        )
        self._write([head, *(one for one in request.buffers if len(one))])

    def _share(self, fd: int) -> None:
        """Send the memory's descriptor. The answer is ignored: a shard that refuses it also
        refuses pulls into it.
        """
        self._next += 1
        beside = socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder)
        self._write([packed_head(*ShardHeader(SHARE, id=self._next))], [beside])
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

    def _receive_answer(self, request: ShardRequest) -> ShardHeader:
        """Read until this request is answered. Answers to other open requests are stored;
        unknown ones are dropped.
        """
        try:
            while request.answer is None:
                if request.id not in self._open:
                    raise ConnectionError("the connection is gone")
                self._receive_into(memoryview(self._head))
                head = read_head(self._head)
                one = self._open.pop(head.id, None)
                if head.flags & IN_REGION and one is not None and one.block is not None:
                    body = one.block.data
                else:
                    body = np.empty(head.payload_bytes, np.uint8).data
                    self._receive_into(body)
                if one is not None:
                    one.body, one.answer = body, head
            return request.answer
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise TimeoutError("it does not answer") from None
            raise

    def _receive_into(self, into: memoryview) -> None:
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
        ):  # kernel timeouts: a Python timeout costs a poll() per read
            waits = struct.pack("ll", int(self._answer_s), int(self._answer_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, waits)
        me = self._identity
        request = call(
            "hello",
            token=self._token,
            worker=me.worker,
            incarnation=me.incarnation,
            protocol=PROTOCOL,
        )
        try:
            self._send(request)
            head = self._receive_answer(request)
            if head.kind != ANSWER:
                raise refusal(head, request.body, self.name)
            said = unpacked(request.body)
            if said.get("shard") != self.number:
                raise ShardRefused(
                    f"{self.name} is shard {said.get('shard')}: give the addresses in order",
                    "order",
                )
            if head.epoch < self.epoch:
                raise ConnectionError(
                    f"its epoch is {head.epoch}, and a successor with epoch {self.epoch} exists"
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
            known, self._known = self._known, {**self._known, **self.tables}
            if any(self._known[name] != number for name, number in known.items()):
                raise ShardRefused(f"{self.name}: a table was dropped and created anew", DROPPED)
            if self._sock.family == socket.AF_UNIX:
                self._sharing.enable(int(said.get("shared", 0)))
        except BaseException:
            self.close()
            raise


def refusal(head: ShardHeader, body: memoryview, what: str) -> ShardRefused:
    """Return the error of a REFUSED answer."""
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
