"""`python -m bench.system.fakes ADDRESS COUNT PREFIX`: containers that are connected and never have anything to do.

One process and one epoll for all of them: each dials the server's unix socket, says HELLO for the model PREFIX<i>, and answers
heartbeats. The token comes in CLIPPER_TOKEN.
"""

import os
import select
import socket
import sys
import time

from clipper_container.wire import HEADER_BYTES, Kind, control_frame, decode_header, pack_map, unpack_map


class Fake:
    """One connection: what came in and is no whole frame yet."""

    def __init__(self, path: str, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.inbox = b""
        self.heartbeat_s = 0.0
        hello = {"name": name, "input": "f64[1]", "token": os.environ["CLIPPER_TOKEN"], "pid": os.getpid()}
        self.send(Kind.HELLO, pack_map(hello))

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        self.socket.sendall(b"".join(control_frame(kind, payload)))

    def read(self) -> bool:
        """False at the end of the connection."""
        data = self.socket.recv(4096)
        self.inbox += data
        while len(self.inbox) >= HEADER_BYTES:
            header = decode_header(self.inbox)
            end = HEADER_BYTES + header.payload_bytes
            if len(self.inbox) < end:
                break
            payload, self.inbox = self.inbox[HEADER_BYTES:end], self.inbox[end:]
            if header.kind == Kind.WELCOME:
                self.heartbeat_s = unpack_map(payload)["heartbeat_ms"] / 1000
            elif header.kind in (Kind.GOODBYE, Kind.REFUSE):
                return False
        return bool(data)


def main(address: str, count: int, prefix: str) -> None:
    fakes, poll = {}, select.epoll()
    for number in range(count):
        fake = Fake(address.removeprefix("unix:"), f"{prefix}{number}")
        fakes[fake.socket.fileno()] = fake
        poll.register(fake.socket, select.EPOLLIN)
    beat = time.monotonic()
    while fakes:
        for fd, _ in poll.poll(0.1):
            if not fakes[fd].read():
                poll.unregister(fd)
                fakes.pop(fd).socket.close()
        rest_s = min((fake.heartbeat_s for fake in fakes.values()), default=1.0) or 0.1
        if time.monotonic() - beat >= rest_s:
            beat = time.monotonic()
            for fake in fakes.values():
                if fake.heartbeat_s:
                    fake.send(Kind.HEARTBEAT)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
