"""Connection of a client of a parameter server to one shard.

Requests are answered in any order and matched by id. A connection is made again when the shard was
restarted.

Threads: one at a time; threads that share a connection hold its `lock` while they send and while
they wait.
"""

import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from clipper_container.backoff import Backoff
from clipper_container.errors import (
    AlreadyExists,
    ClipperError,
    FrameError,
    InvalidInput,
    ShardAway,
    TableLost,
    TooLarge,
    UnknownTable,
    UnknownVariable,
)
from clipper_container.params import frames
from clipper_container.params.frames import (
    HEAD_BYTES,
    IN_REGION,
    VARIABLE,
    Head,
    MessageKind,
    RefusalCode,
    packed,
    read_head,
    refusal,
    unpacked,
)
from clipper_container.params.push_identity import PushIdentity
from clipper_container.params.shared_rows import SharedRowsAllocator
from clipper_container.wire.frames import BytesLike
from clipper_container.wire.transport import connect

Connect = Callable[[str, float], socket.socket]  # (address, seconds)
Check = Callable[[int], None]  # of the generation of a set
Fill = Callable[[socket.socket, bytearray | memoryview], bool]
SHARDS_FILE = "shards.json"  # {"addresses": [...], "token": ...}, in a set's folder
SHARED_BYTES_MIN = 1 << 16  # smaller answers are as fast over the socket
PAUSE_S = 0.02
PAUSE_S_MAX = 0.1
IDLE_S = 1.0  # then it is checked whether a connection is open before a push is sent
PROTOCOL = 1
_AGAIN = (RefusalCode.NOT_READY, RefusalCode.OTHER_EPOCH)


class RequestPart(NamedTuple):
    """One table or dense variable of a request. size: number of ids, or of a variable's floats."""

    name: str
    size: int
    is_variable: bool = False


class ShardRequest:
    """A request: its header without id and epoch, the buffers of its payload, and its answer.

    table: name of the table; its number may differ in each life of the shard. parts: of a message
    about several, the tables or dense variables with their numbers of ids or floats. expects: size
    of a pull's answer, which may arrive in shared memory; `body` has the rows either way.
    """

    __slots__ = (
        "answer",
        "block",
        "body",
        "buffers",
        "expects",
        "head",
        "id",
        "parts",
        "sequence",
        "table",
    )

    def __init__(
        self,
        head: Head,
        buffers: Sequence[BytesLike] = (),
        *,
        table: str = "",
        parts: Sequence["RequestPart"] = (),
        expects: int = 0,
        sequence: int = 0,
    ) -> None:
        self.head, self.buffers, self.table, self.expects = head, buffers, table, expects
        self.parts = parts
        self.sequence = sequence or head.sequence  # of a push, else 0
        self.id = 0
        self.answer: Head | None = None
        self.body: memoryview = memoryview(b"")
        self.block: np.ndarray | None = None


def call(name: str, **fields: object) -> ShardRequest:
    """Return the request of a call."""
    body = packed({"call": name, **fields})
    return ShardRequest(
        Head(MessageKind.CALL, payload_bytes=len(body)),
        (body,),
        sequence=cast("int", fields.get("sequence", 0)),
    )


class ShardConnection:
    """Connection to one shard.

    number: of the shard. address: called at each connect, since a restarted shard may have another
    address. identity: of the client that pushes; None: nothing is pushed. shares: use shared memory
    for large pulls from a shard on this host. fill: reads from the socket until a buffer is full,
    and returns False if the shard closed the connection. connect: as `connected`. check: is given
    the generation of the set at each connect, and raises if it is another. sent: the highest
    sequence that this client may have sent.
    """

    def __init__(
        self,
        number: int,
        address: Callable[[int], str],
        token: str,
        identity: PushIdentity | None,
        answer_s: float,
        *,
        shares: bool = False,
        fill: Fill | None = None,
        connect: Connect | None = None,
        check: Check | None = None,
        sent: int = 0,
    ) -> None:
        self._check_generation = check
        self._connect = connect or connected
        self.number, self._address, self._token, self._answer_s = number, address, token, answer_s
        self._identity = identity
        self.lock = threading.RLock()
        self._shares, self._sharing = shares, SharedRowsAllocator()
        self._fill = fill or receive_all
        self._socket: socket.socket | None = None
        self._encrypts = False  # the socket has TLS
        self._used_s = 0.0  # when something was received last
        self._next = 0
        self._open: dict[int, ShardRequest] = {}
        self._head = bytearray(HEAD_BYTES)
        self.epoch = 0  # highest seen; a shard with a lower one has been replaced
        self.version = 0  # of the model on the shard, as of the last answer
        self.sequence = 0  # highest push of this worker that the shard knew at connect
        self._sent = sent  # highest that this client sent or knew of
        self.frame_bytes_max = 0  # limit of a payload; 0: unknown
        self.mode = "async"
        self.replicas = 0  # of each shard
        self.tables: dict[str, int] = {}
        self._known: dict[str, int] = {}  # of earlier connections too
        self.variables: dict[str, tuple[int, tuple[int, ...]]] = {}  # name -> number, shape
        self._ready = self._lost = False  # at connect: it serves; it has lost its state

    @property
    def name(self) -> str:
        """The shard and its address, for messages."""
        return f"shard {self.number} at {self._address(self.number).partition('?')[0]}"

    def fileno(self) -> int:
        """Return the descriptor of the socket, to poll it; -1 if it is not connected."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Close the socket. Requests under way are lost; the next one connects again."""
        self._open.clear()
        self._sharing.disable()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> "ShardConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def interrupt(self) -> None:
        """Have a thread that waits for an answer find the connection closed. Threads: any."""
        with contextlib.suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]  # it may be None

    # -- one request

    def check(self, request: ShardRequest) -> None:
        """Raise TooLarge if the request is larger than the shard accepts."""
        size, most = request.head.payload_bytes, self.frame_bytes_max
        if 0 < most < size:
            hint = "Push fewer rows at once, or raise params.frame_bytes_max."
            raise TooLarge(
                f"{self.name}: a message of {size} bytes, and it takes {most}.", hint=hint
            )

    def send(self, request: ShardRequest) -> None:
        """Send a request, and connect first if necessary.

        Raises OSError, ClipperError; the connection is closed then, and the request may be sent
        again. After TooLarge it may not.
        """
        if request.sequence and not self._open and time.monotonic() - self._used_s > IDLE_S:
            self._close_if_ended()
        if self._socket is None:
            self._dial()
        self.check(request)
        self._send(request)

    def _close_if_ended(self) -> None:
        """Close the socket if the shard has: the kernel takes a push to it, and nobody gets it."""
        if self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if poll.poll(0):
                self.close()

    def wait(self, request: ShardRequest) -> Head:
        """Wait for the answer of a request; answers of others are kept. Raises OSError,
        ClipperError."""
        while request.answer is None:
            if request.id not in self._open:
                raise ConnectionError("the connection is gone")
            self._receive()
        return request.answer

    def wait_for_answer(self, request: ShardRequest) -> Head:
        """Wait as `wait`, and raise the error of an answer that refuses the request."""
        head = self.wait(request)
        if head.kind != MessageKind.ANSWER:
            raise refusal(head, request.body, self.name)
        return head

    def wait_with_retries(self, request: ShardRequest, until: float) -> Head:
        """Wait for the answer until a time of the monotonic clock, with as many connections as it
        takes.

        Raises ShardAway, and the error that the shard answers.
        """
        backoff, why = Backoff(PAUSE_S, PAUSE_S_MAX), "it does not answer"
        while True:
            with contextlib.suppress(OSError):
                try:
                    if request.id not in self._open and request.answer is None:
                        self.send(request)
                    head = self.wait(request)
                    if head.kind == MessageKind.ANSWER:
                        return head
                    error = refusal(head, request.body, self.name)
                    if head.rows == RefusalCode.UNKNOWN:
                        gone = int.from_bytes(request.body[:8], "little", signed=True)
                        raise self._dropped([k for k, n in self.tables.items() if n == gone])
                    if head.rows == RefusalCode.NOT_SHARED and request.block is not None:
                        self._sharing.disable()  # use the socket from now on
                        request.answer, request.id = None, 0
                        continue
                    if head.rows not in _AGAIN:
                        raise error
                    why = error.message
                    self._note_epoch(head)
                except ShardAway as error:
                    why = error.message
            request.answer, request.id = None, 0
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s > until:
                why = why.removeprefix(f"{self.name}: ").removesuffix(".")
                hint = (
                    "Do the shards run? `clipper params up` starts them, `clipper params ps` lists "
                    "them."
                )
                raise ShardAway(f"{self.name}: {why}.", hint=hint)
            time.sleep(pause_s)

    def _note_epoch(self, head: Head) -> None:
        """Note that the shard recovers, or has a new epoch."""
        if head.epoch > self.epoch:
            self.epoch = head.epoch
        if head.rows == RefusalCode.OTHER_EPOCH:
            self.close()

    # -- bytes

    def _send(self, request: ShardRequest) -> None:
        assert self._socket is not None
        kind, dtype, flags, table, rows, _, _, worker, sequence, *rest = request.head
        buffers: list[BytesLike] = [one for one in request.buffers if len(one)]
        if request.table:
            table = self._number(request.table)
        elif request.parts:
            buffers.insert(0, self._part_numbers(request.parts))
        request.block = None
        if request.expects >= SHARED_BYTES_MIN:
            place = self._sharing.place(request.expects)
            if place is not None:
                sequence, request.block, fd = place
                flags |= IN_REGION
                if fd is not None:
                    self._share(fd)
        self._next += 1
        request.id, request.answer = self._next, None
        self._open[request.id] = request
        self._sent = max(self._sent, request.sequence)
        epoch = 0 if kind == MessageKind.CALL else self.epoch
        fields = kind, dtype, flags, table, rows, request.id, epoch, worker, sequence, *rest
        head = frames.HEAD.pack(frames.MAGIC, frames.VERSION, *fields)
        size = HEAD_BYTES + request.head.payload_bytes
        self._write([head, *buffers], size, sequence=request.sequence)

    def _part_numbers(self, parts: Sequence[RequestPart]) -> bytes:
        each: list[int] = []
        for name, size, is_variable in parts:
            each += self._variable(name) | VARIABLE if is_variable else self._number(name), size
        return struct.pack(f"<{len(each)}I", *each)

    def _number(self, table: str) -> int:
        if table not in self.tables:
            self._check_ready()
            raise TableLost.named(table, self.tables)
        return self.tables[table]

    def _variable(self, name: str) -> int:
        if name not in self.variables:
            self._check_ready()
            raise UnknownVariable.named(name, self.variables)
        return self.variables[name][0]

    def _check_ready(self) -> None:
        """Raise ConnectionError or StateLost if the shard did not serve when it was connected."""
        if self._ready:
            return
        lost = self._lost
        self.close()  # hello tells the tables when it has recovered
        if lost:
            raise refusal(Head(MessageKind.REFUSED, rows=RefusalCode.STATE_LOST), b"", self.name)
        raise ConnectionError("it recovers")

    def _dropped(self, tables: Sequence[str]) -> UnknownTable:
        names = ", ".join(map(repr, sorted(tables)))
        return UnknownTable(
            f"{self.name}: table {names} was dropped.",
            hint="One that was created since with this name is used from the next request on.",
        )

    def forget_names(self) -> None:
        """Forget the numbers of tables; they are requested again."""
        self.tables, self._known = {}, {}

    def note_names(self, answer: Mapping[str, Any], numbers: str) -> None:
        """Note the numbers of tables and dense variables that the shard tells."""
        self.tables |= {str(name): int(number) for name, number in answer.get(numbers, {}).items()}
        self._known |= self.tables
        each = enumerate(answer.get("variables", ()))
        self.variables = {str(name): (i, tuple(map(int, shape))) for i, (name, shape) in each}

    def _share(self, fd: int) -> None:
        """Send the descriptor of shared memory.

        The answer is ignored: if the shard does not take the memory, it refuses pulls that name it.
        """
        self._next += 1
        beside = socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder)
        self._write([Head(MessageKind.SHARE, id=self._next).packed()], HEAD_BYTES, [beside])
        assert self._sharing.rows is not None
        self._sharing.rows.close()  # the descriptor; the memory is mapped

    def _write(
        self,
        pieces: list[BytesLike],
        nbytes: int,
        beside: Sequence[tuple[int, int, bytes]] = (),
        sequence: int = 0,
    ) -> None:
        assert self._socket is not None
        try:
            if self._encrypts:  # it has no sendmsg
                self._note_sent(sequence)
                for one in pieces:
                    self._socket.sendall(one)
                return
            sent = self._socket.sendmsg(pieces, beside)
            self._note_sent(sequence)
            if sent == nbytes:
                return
            rest = [memoryview(one).cast("B") for one in pieces]
            while rest:
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][sent:]
                    sent = self._socket.sendmsg(rest)
        except BlockingIOError:
            self.close()
            raise TimeoutError("it does not read") from None
        except BaseException:
            self.close()
            raise

    def _note_sent(self, sequence: int) -> None:
        if sequence and self._identity is not None:
            self._identity.sent(sequence)

    def _receive(self) -> None:
        try:
            self._read(self._head)
            self._used_s = time.monotonic()
            head = read_head(self._head)
            request = self._open.pop(head.id, None)
            if (
                head.flags & IN_REGION
                and head.kind == MessageKind.ANSWER
                and request is not None
                and request.block is not None
            ):
                body = memoryview(request.block.data)
            else:
                body = memoryview(np.empty(head.payload_bytes, np.uint8).data)
                self._read(body)
        except BlockingIOError:
            self.close()
            raise TimeoutError("it does not answer") from None
        except OSError as error:
            encrypts = self._encrypts
            self.close()
            if not encrypts:
                raise
            from clipper_container.params.tls import tls_failed

            raise tls_failed(error, self.name) from None
        except BaseException:
            self.close()
            raise
        self.version = max(self.version, head.model) if head.epoch == self.epoch else head.model
        if request is not None:
            request.body, request.answer = body, head

    def _read(self, into: bytearray | memoryview) -> None:
        assert self._socket is not None
        fill = _receive_decrypted if self._encrypts else self._fill
        if not fill(self._socket, into):
            raise ConnectionError("it closed the connection")

    def _dial(self) -> None:
        self._socket = self._connect(self._address(self.number), self._answer_s)
        self._encrypts = hasattr(self._socket, "cipher")
        me = self._identity
        who = (
            {"worker": me.worker, "incarnation": me.incarnation}
            if me is not None
            else {"worker": 0}
        )
        request = call("hello", token=self._token, protocol=PROTOCOL, **who)
        try:
            self._send(request)
            head = self.wait_for_answer(request)
            answer = unpacked(request.body)
            if answer.get("shard") != self.number:
                raise InvalidInput(
                    f"{self.name} reports that it is shard {answer.get('shard')}.",
                    hint="Give the addresses in order.",
                )
            if self._check_generation is not None:
                self._check_generation(int(answer.get("generation", 0)))
            if head.epoch < self.epoch:
                raise ShardAway(
                    f"{self.name}: it has epoch {head.epoch} and should be dead; its successor"
                    f" has {self.epoch}."
                )
            self.sequence = int(answer.get("sequence", 0))
            if me is not None and me.has_pushed and self.sequence > self._sent:
                hint = "Make a new client, with a worker number of its own."
                raise AlreadyExists(
                    f"{self.name}: another client pushes as worker {me.worker}.", hint=hint
                )
            self.epoch, self._sent = head.epoch, max(self._sent, self.sequence)
            self.frame_bytes_max = int(answer.get("frame_bytes_max", 0))
            self.mode = str(answer.get("mode", "async"))
            self.replicas = int(answer.get("replicas", 0))
            self._ready, self._lost = bool(answer.get("ready")), bool(answer.get("state_lost"))
            self.tables, known = {}, dict(self._known)
            self.note_names(answer, "tables")
            made_anew = [name for name in known if self._known[name] != known[name]]
            if made_anew:
                raise self._dropped(made_anew)
            if self._shares and self._socket is not None and self._socket.family == socket.AF_UNIX:
                self._sharing.enable(int(answer.get("shared", 0)))
        except (OSError, ClipperError):
            self.close()
            raise
        except (TypeError, ValueError) as error:
            self.close()
            raise FrameError(f"{self.name} answers a hello that cannot be read: {error}.") from None


def call_once(
    connection: ShardConnection, name: str, **fields: object
) -> tuple[Head, dict[str, Any]]:
    """Make one call to a shard, without retries. Raises OSError, and the error of the answer."""
    request = call(name, **fields)
    connection.send(request)
    head = connection.wait_for_answer(request)
    return head, unpacked(request.body)


def receive_all(
    connection: socket.socket, into: bytearray | memoryview, flags: int = socket.MSG_WAITALL
) -> bool:
    """Read until a buffer is full; False if the peer closed the connection. Raises OSError."""
    rest = memoryview(into)
    while rest:
        n = connection.recv_into(rest, 0, flags)
        if n == 0:
            return False
        rest = rest[n:]
    return True


def _receive_decrypted(connection: socket.socket, into: bytearray | memoryview) -> bool:
    """Read as `receive_all` from a socket with TLS, which has no flags."""
    return receive_all(connection, into, flags=0)


def connected(address: str, answer_s: float) -> socket.socket:
    """Connect to `unix:/path`, `tcp:host:port` or `tls:host:port?ca=FILE` (see `params.tls`).

    Raises OSError, InvalidInput; with TLS also TlsFailed, ShardAway.
    """
    if address.startswith("tls:"):
        from clipper_container.params.tls import connect_tls

        return connect_tls(address, answer_s, connected)
    try:
        connection = connect(address, answer_s)
    except ValueError as error:
        raise InvalidInput(f"{error}.") from None
    try:
        # one host: see calm_loopback of the core
        if (
            connection.family != socket.AF_UNIX
            and connection.getsockname()[0] == connection.getpeername()[0]
        ):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        connection.settimeout(None)
        set_timeouts(connection, answer_s)
    except OSError:
        connection.close()
        raise
    return connection


def set_timeouts(connection: socket.socket, answer_s: float) -> None:
    """Set the kernel's timeouts: Python's would poll before each read."""
    waits = struct.pack("ll", int(answer_s), int(answer_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, waits)


class SetAddress(NamedTuple):
    """The addresses of a set. generation, before: the number of the set, and that of the set that
    was resharded to it; -1: unknown."""

    addresses: list[str]
    token: str
    generation: int = -1
    before: int = -1


def set_in(folder: str | os.PathLike[str]) -> SetAddress:
    """Return what the file of a set says, which its supervisor wrote. Raises InvalidInput."""
    path = Path(folder) / SHARDS_FILE
    try:
        found = json.loads(path.read_text())
        return SetAddress(
            [str(one) for one in found["addresses"]],
            str(found.get("token", "")),
            int(found.get("generation", 0)),
            int(found.get("before", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path}: {error}.", hint="Start shards with `clipper params up --folder ...`."
        ) from None


def addresses_in(folder: str | os.PathLike[str]) -> tuple[list[str], str]:
    """Return the addresses of all shards and their token, from the file that the supervisor wrote.

    Raises InvalidInput.
    """
    return set_in(folder)[:2]
