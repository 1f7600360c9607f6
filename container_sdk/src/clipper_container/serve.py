"""The loop of a container: dial, say HELLO, answer each batch, dial again when the server is lost.

Over a unix socket each side hears at once when the other has died, as the kernel closes its end; so
such a connection is quiet: no heartbeats either way. Over TCP they are sparse. A model that learns
says now and then how right it is, and an alive file is touched with each heartbeat: these keep the
usual ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clipper_container.answers import Answers, evaluate
from clipper_container.evaluate import Evaluator, ModelFailed
from clipper_container.lessons import Lessons
from clipper_container.model import Model
from clipper_container.regions import CannotShare, Regions, can_share
from clipper_container.transport import (
    Backoff,
    Connection,
    Disconnected,
    Heart,
    Stopping,
    StopSwitch,
    connect,
)
from clipper_container.version1 import V1_HEAD_BYTES, v1_content_bytes, v1_open
from clipper_container.warmup import WarmUp
from clipper_container.wire import (
    CONTROL_BYTES_MAX,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    BadFrame,
    Bytes,
    Flag,
    Header,
    Kind,
    check_payload,
    control_frame,
    decode_header,
    open_rows,
    pack_map,
    unpack_map,
)

ATTEMPT_S = 10.0  # to connect, and to be welcomed
SILENCE_HEARTBEATS = 6
SAY_AGAIN_S = 30.0
_SHARED = int(Flag.SHARED)


class Refused(Exception):
    """The server does not want this container; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """Who this container is, and how it runs its model."""

    name: str
    version: int = 1
    replica: int = 0
    input: str = "any"
    output: str = "any"
    batch_max: int = 0
    protocol: int = 2
    token: str = ""
    retry_singly: bool = False
    row_by_row: bool = False
    pad: int = 0
    corrects: bool = False
    sessions: bool = False
    quiet: bool = False
    sparse: bool = False
    tables: bool = False
    warm: WarmUp = field(default_factory=WarmUp)

    def hello(self, address: str, shared: bool = False) -> dict[str, Any]:
        """The fields of HELLO to the server at `address`. Over TCP, payloads are to carry a
        checksum."""
        from clipper_container import __version__

        return {
            **({"quiet": True} if self.quiet else {}),
            **({"sparse": True} if self.sparse else {}),
            **(
                {"timings": self.warm.timings, "gives": self.warm.output}
                if self.warm.output
                else {}
            ),
            **({"tables": True} if self.tables else {}),
            **({"crc": True} if address.startswith("tcp:") and self.protocol == 2 else {}),
            "name": self.name,
            "version": self.version,
            "replica": self.replica,
            "input": self.input,
            "output": self.output,
            "batch_max": self.batch_max,
            "protocol": self.protocol,
            "token": self.token,
            "pid": os.getpid(),
            "sdk": f"python/{__version__}",
            "shared": shared and self.protocol == 2,
            "corrects": self.corrects and self.protocol == 2,
            "sessions": self.sessions and self.protocol == 2,
        }


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the server said when it accepted."""

    heartbeat_s: float
    payload_bytes_max: int
    crc: bool
    shared: bool = False
    accuracy: bool = False
    qualifiers: bool = False
    quiet: bool = False

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Welcome:
        heartbeat_ms, payload_bytes_max = (
            fields.get("heartbeat_ms", 500),
            fields.get("payload_bytes_max", PAYLOAD_BYTES_MAX),
        )
        for key, value in (
            ("heartbeat_ms", heartbeat_ms),
            ("payload_bytes_max", payload_bytes_max),
        ):
            if not isinstance(value, int) or not 0 < value < 1 << 40:
                raise BadFrame(f"WELCOME's {key} is {value!r}")
        told = (
            bool(fields.get(key, False))
            for key in ("crc", "shared", "accuracy", "qualifiers", "quiet")
        )
        return cls(heartbeat_ms / 1000, payload_bytes_max, *told)


def evaluator_of(model: Model, options: Options) -> Evaluator:
    return Evaluator(model, options.name, options.retry_singly, options.row_by_row, options.pad)


def serve(
    model: Model, address: str, options: Options, stop: StopSwitch | None = None, alive: str = ""
) -> None:
    """Answer batches until the server says GOODBYE or `stop` is requested. The model is loaded
    already.

    address: `unix:/path` or `tcp:host:port`.  alive: a file to touch with every heartbeat while
    connected. Raises: Refused; ValueError for an address of another kind.
    """
    stop = stop or StopSwitch()
    evaluator = evaluator_of(model, options)
    backoff, say = Backoff(), _Announcer(options.name)
    signs = (lambda: _touch(alive)) if alive else _nothing
    sharing = address.startswith("unix:") and can_share()
    try:
        while True:
            try:
                _serve_once(
                    evaluator, address, options, stop, (backoff.reset, say.reset, signs), sharing
                )
                return
            except CannotShare as error:
                sharing = False
                say(f"{address}: {error}; going on without shared memory")
            except (Disconnected, BadFrame, OSError) as error:
                say(f"{address}: {error}; trying again")
                stop.wait(backoff.next_s())
    except Stopping:
        return


class _Announcer:
    """Tells of trouble on stderr, the same trouble only now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reset()

    def reset(self) -> None:
        self._last, self._when = "", 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if text != self._last or now - self._when > SAY_AGAIN_S:
            print(f"model '{self._name}': {text}", file=sys.stderr, flush=True)
            self._last, self._when = text, now


def _serve_once(
    evaluator: Evaluator,
    address: str,
    options: Options,
    stop: StopSwitch,
    welcomed: Sequence[Callable[[], None]],
    sharing: bool = False,
) -> None:
    """One connection, from the dial to GOODBYE. Returns when the server wants no more; raises for
    any other end."""
    connection = Connection(connect(address, ATTEMPT_S), stop, PAYLOAD_BYTES_MAX, ATTEMPT_S)
    try:
        if sharing:
            connection.take_descriptors()  # one may come right behind WELCOME
        connection.send(control_frame(Kind.HELLO, pack_map(options.hello(address, sharing))))
        welcome = _read_welcome(connection)
        for reset in welcomed:
            reset()
        connection.buffer.size_max = HEADER_BYTES + welcome.payload_bytes_max
        if options.protocol == 1:
            connection.set_silence(float("inf"))  # version 1 has no heartbeats
            _Version1(connection, evaluator, welcome).run()
        connection.set_silence(
            float("inf") if welcome.quiet else SILENCE_HEARTBEATS * welcome.heartbeat_s
        )
        _Version2(connection, evaluator, welcome, sharing and welcome.shared).run(welcomed[-1])
    finally:
        connection.close()


def _touch(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "ab"):
        os.utime(path)


def _nothing() -> None:
    return


def _read_welcome(connection: Connection) -> Welcome:
    connection.begin()
    header = decode_header(connection.take(HEADER_BYTES), CONTROL_BYTES_MAX)
    return welcome_of(header, connection.take(header.payload_bytes))


def welcome_of(header: Header, payload: Bytes) -> Welcome:
    """What the first frame of a server says. Raises: Refused, BadFrame."""
    check_payload(header, payload)
    if header.kind == Kind.REFUSE:
        raise Refused(payload.tobytes().decode("utf-8", "replace"))
    if header.kind != Kind.WELCOME:
        raise BadFrame(f"expected WELCOME or REFUSE, got {Kind(header.kind).name}")
    return Welcome.read(unpack_map(payload))


class _Version2:
    """Frames with ids, heartbeats both ways, and failures as text."""

    def __init__(
        self, connection: Connection, evaluator: Evaluator, welcome: Welcome, shared: bool = False
    ) -> None:
        self._connection, self._evaluator, self._welcome = connection, evaluator, welcome
        self._regions = Regions(welcome.payload_bytes_max) if shared else None
        self._lessons = Lessons(
            evaluator.model, evaluator.name, welcome.payload_bytes_max, welcome.heartbeat_s
        )
        self._answers = Answers(
            evaluator, welcome.payload_bytes_max, welcome.crc, welcome.qualifiers
        )

    def run(self, signs: Callable[[], None] = _nothing) -> None:
        """Returns after the server's GOODBYE. Raises: Stopping (after our GOODBYE), Disconnected,
        BadFrame.

        signs: called as often as a heartbeat is due.
        """
        connection = self._connection

        def news() -> Any:
            signs()
            return self._lessons.news() if self._welcome.accuracy else None

        heart = None
        if not self._welcome.quiet:
            heart = Heart(
                connection,
                self._welcome.heartbeat_s,
                lambda: connection.send(control_frame(Kind.HEARTBEAT)),
                news,
            )
        try:
            while self._one():
                pass
            self._say_goodbye()
        except Stopping:
            self._say_goodbye()
            raise
        finally:
            if heart is not None:
                heart.stop()
            if self._regions is not None:
                self._regions.close()

    def _say_goodbye(self) -> None:
        try:
            self._connection.send(control_frame(Kind.GOODBYE))
        except Disconnected:
            return

    def _one(self) -> bool:
        """Read one frame and answer it. False after GOODBYE. Only the model's own views of the
        buffer outlive it."""
        connection, limit = self._connection, self._welcome.payload_bytes_max
        while self._lessons and not connection.is_readable():
            self._lessons.run_one()
        connection.begin()
        header = decode_header(connection.take(HEADER_BYTES), limit)
        payload = connection.take(header.payload_bytes)
        if header.kind == Kind.PREDICT:
            connection.send(self._answer_of(header, payload))
        elif header.kind == Kind.REGION and self._regions is not None:
            check_payload(header, payload)
            self._regions.add(payload, connection.descriptor())
        elif header.kind == Kind.FEEDBACK and self._evaluator.model.corrects:
            check_payload(header, payload)
            self._lessons.add(payload)
        elif header.kind == Kind.GOODBYE:
            return False
        elif header.kind != Kind.HEARTBEAT:
            raise BadFrame(f"unexpected {Kind(header.kind).name}")
        return True

    def _answer_of(self, header: Header, payload: Bytes) -> list[Any]:
        """The frame that answers a batch, after which the server may write over its rows."""
        if self._regions is None or not header.flags & _SHARED:
            return self._answers.to(
                header, open_rows(header, payload, self._welcome.payload_bytes_max)
            )
        pieces = self._answers.to(header, self._regions.open(header, payload))
        if self._regions.are_lent():
            pieces = [b"".join(pieces)]  # outputs may be views of the inputs
            if self._regions.are_lent():
                self._regions.leave(header, payload)
        return pieces


class _Version1:
    """The design document's bare batches: n x f64 back, no ids; a model that fails closes the
    connection."""

    def __init__(self, connection: Connection, evaluator: Evaluator, welcome: Welcome) -> None:
        self._connection, self._evaluator, self._welcome = connection, evaluator, welcome

    def run(self) -> None:
        """Never returns. Raises: Stopping, Disconnected, BadFrame."""
        while True:
            self._one()

    def _one(self) -> None:
        connection, limit = self._connection, self._welcome.payload_bytes_max
        connection.begin(
            offset=-V1_HEAD_BYTES % HEADER_BYTES
        )  # the content behind the head is aligned
        head = connection.take(V1_HEAD_BYTES)
        rows = v1_open(head, connection.take(v1_content_bytes(head, limit)), limit)
        try:
            outputs, _ = evaluate(self._evaluator, rows)
        except ModelFailed as failure:
            print(failure, file=sys.stderr, flush=True)
            raise Disconnected(
                f"model '{self._evaluator.name}' failed, and version 1 has no word for it"
            ) from None
        if outputs.lengths is not None or outputs.data.size != rows.n or outputs.status is not None:
            raise Disconnected(
                f"model '{self._evaluator.name}': version 1 takes one number per row"
            )
        connection.send([outputs.data.reshape(-1).astype("<f8")])
