"""The handshake: HELLO describes the container, WELCOME or REFUSE is the server's answer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from clipper_container.wire.frames import (
    PAYLOAD_BYTES_MAX,
    BadFrame,
    Bytes,
    Header,
    Kind,
    check_payload,
    unpack_map,
)
from clipper_container.worker.warmup import WarmUp

ATTEMPT_S = 10.0  # to connect and to receive WELCOME
SILENCE_HEARTBEATS = 6  # heartbeats without a frame after which a peer counts as lost
HEARTBEAT_MS_MAX = 3_600_000
PARTS_AHEAD_MAX = 65_536
CALLS_MAX = 65_536
CONCURRENCY_MAX = 8192  # batches that a container works at
_BYTES_MAX = (1 << 40) - 1


class ContainerRejected(Exception):
    """The server rejected this container. The text is its reason."""


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """Identity of a container and how it runs its model; the source of HELLO."""

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
    parts: bool = False
    concurrency: int = 0
    calls: bool = False
    warm: WarmUp = field(default_factory=WarmUp)

    def hello(self, address: str, shared: bool = False) -> dict[str, object]:
        """Return the fields of HELLO. Over TCP payloads are to carry a checksum."""
        from clipper_container import __version__

        return {
            **({"quiet": True} if self.quiet else {}),
            **({"sparse": True} if self.sparse else {}),
            **(
                {
                    "timings": self.warm.timings,
                    "gives": self.warm.output,
                    "warm_lengths": self.warm.lengths,
                }
                if self.warm.output
                else {}
            ),
            **({"warm_error": self.warm.error} if self.warm.error else {}),
            **({"broken": True} if self.warm.broken else {}),
            **({"tables": True} if self.tables else {}),
            **({"parts": True} if self.parts and self.protocol == 2 else {}),
            **({"cancels": True} if self.protocol == 2 else {}),
            **({"calls": True} if self.calls and self.protocol == 2 else {}),
            **(
                {"concurrency": self.concurrency} if self.concurrency and self.protocol == 2 else {}
            ),
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
    """The fields of WELCOME."""

    heartbeat_s: float
    payload_bytes_max: int
    crc: bool
    shared: bool = False
    accuracy: bool = False
    qualifiers: bool = False
    quiet: bool = False
    partial: bool = False
    parts_ahead: int = 0
    concurrency: int = 0
    calls: int = 0

    @classmethod
    def read(cls, fields: dict[str, object]) -> Welcome:
        """Check and convert the fields. Raises: BadFrame."""
        flags = {
            key: bool(fields.get(key, False))
            for key in ("crc", "shared", "accuracy", "qualifiers", "quiet", "partial")
        }
        return cls(
            _whole(fields, "heartbeat_ms", 500, HEARTBEAT_MS_MAX) / 1000,
            _whole(fields, "payload_bytes_max", PAYLOAD_BYTES_MAX, _BYTES_MAX),
            parts_ahead=_optional(fields, "parts_ahead", PARTS_AHEAD_MAX),
            concurrency=_optional(fields, "concurrency", CONCURRENCY_MAX),
            calls=_optional(fields, "calls", CALLS_MAX),
            **flags,
        )


def _optional(fields: dict[str, object], key: str, most: int) -> int:
    """Return the number of something that the server supports; 0 if it does not."""
    return _whole(fields, key, 1, most) if key in fields else 0


def _whole(fields: dict[str, object], key: str, default: int, most: int) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or not 0 < value <= most:
        raise BadFrame(f"WELCOME's {key} is {value!r}, not a number from 1 to {most}")
    return value


def welcome_of(header: Header, payload: Bytes) -> Welcome:
    """Decode the first frame of a server. Raises: ContainerRejected, BadFrame."""
    check_payload(header, payload)
    if header.kind == Kind.REFUSE:
        raise ContainerRejected(payload.tobytes().decode("utf-8", "replace"))
    if header.kind != Kind.WELCOME:
        raise BadFrame(f"expected WELCOME or REFUSE, got {Kind(header.kind).name}")
    return Welcome.read(unpack_map(payload))
