"""`python -m bench.system.containers.idle ADDRESS COUNT PREFIX` runs containers that are
connected and never have anything to do.

One process and one epoll serve all of them. Each connects to the server's unix socket and says
HELLO for the model PREFIX<i>, as a container on the server's host does: its connection is quiet,
and sends heartbeats only if the server does not grant that. The token comes in CLIPPER_TOKEN.
"""

import contextlib
import os
import select
import socket
import sys
import time

from clipper_container.wire.frames import (
    HEADER_BYTES,
    Kind,
    control_frame,
    decode_header,
    pack_map,
    unpack_map,
)

DIALS_A_TURN = 20
POLL_S = 0.1


class Fake:
    """One connection, with received bytes that are no complete frame yet."""

    def __init__(self, path: str, name: str) -> None:
        self.name, self.dismissed = name, False
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.inbox = b""
        self.heartbeat_s = 0.0
        hello = {
            "name": name,
            "input": "f64[1]",
            "token": os.environ["CLIPPER_TOKEN"],
            "pid": os.getpid(),
            "quiet": True,
        }
        self.send(Kind.HELLO, pack_map(hello))

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        self.socket.sendall(b"".join(control_frame(kind, payload)))

    def beat(self) -> None:
        if self.heartbeat_s:
            with contextlib.suppress(OSError):  # the next read hears of it
                self.send(Kind.HEARTBEAT)

    def read(self) -> bool:
        """Read from the connection. Return False at its end. Raises SystemExit if the server
        rejects it."""
        try:
            data = self.socket.recv(4096)
        except ConnectionError:
            return False
        self.inbox += data
        while len(self.inbox) >= HEADER_BYTES:
            header = decode_header(self.inbox)
            end = HEADER_BYTES + header.payload_bytes
            if len(self.inbox) < end:
                break
            payload, self.inbox = self.inbox[HEADER_BYTES:end], self.inbox[end:]
            if header.kind == Kind.WELCOME:
                welcome = unpack_map(payload)
                self.heartbeat_s = 0 if welcome.get("quiet") else welcome["heartbeat_ms"] / 1000
            elif header.kind == Kind.REFUSE:
                raise SystemExit(f"{self.name}: {payload.decode()}")
            elif header.kind == Kind.GOODBYE:
                self.dismissed = True
                return False
        return bool(data)


def main(address: str, count: int, prefix: str) -> None:
    """Run until the server has sent GOODBYE to all, or has ended. A lost connection is opened
    again, as by a container."""
    path, poll = address.removeprefix("unix:"), select.epoll()
    fakes: dict[int, Fake] = {}
    absent = [f"{prefix}{number}" for number in range(count)]
    beat = time.monotonic()
    while fakes or absent:
        for name in [absent.pop() for _ in range(min(len(absent), DIALS_A_TURN))]:
            try:
                fake = Fake(path, name)
            except OSError:  # the server is gone
                return
            fakes[fake.socket.fileno()] = fake
            poll.register(fake.socket, select.EPOLLIN)
        for fd, _ in poll.poll(0 if absent else POLL_S):
            if not fakes[fd].read():
                lost = fakes.pop(fd)
                poll.unregister(fd)
                lost.socket.close()
                absent += [] if lost.dismissed else [lost.name]
        if time.monotonic() - beat >= min(
            (fake.heartbeat_s or POLL_S for fake in fakes.values()), default=POLL_S
        ):
            beat = time.monotonic()
            for fake in fakes.values():
                fake.beat()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
