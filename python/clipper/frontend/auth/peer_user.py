"""The user that owns the other end of a loopback TCP connection, as reported by the kernel."""

import errno
import os
import socket
import struct
from typing import Final
from urllib.parse import unquote

from clipper.errors import OutOfMemory

# what this process, or the host, lacks
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_ESTABLISHED: Final = 1
_NO_COOKIE: Final = 0xFFFFFFFF
_HEAD: Final = struct.Struct("=IHHII")  # message: length, type, flags, sequence, port
_REQUEST: Final = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_PORTS: Final = struct.Struct("!HH")
_COOKIE: Final = struct.Struct("=III")  # interface, cookie
# family, state, timer, retransmits, the socket, expires, queues, user, inode
_FOUND: Final = struct.Struct("=BBBB48xIIIII")


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user id of the process that owns the client's end of a connection.

    Returns None when the kernel does not report it, or the client has closed the connection. Raises
    OutOfMemory when this process cannot ask, which says nothing about the client.
    client, server: the addresses of both ends, as `socket.getpeername` and `getsockname` give them
    on the server's side. A closed socket has no owner any more, and the kernel would report root
    for it: only established connections count.
    """
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    try:
        ends = b"".join(
            socket.inet_pton(family, end[0]).ljust(16, b"\0") for end in (client, server)
        )
        about = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
        body = (
            about
            + _PORTS.pack(client[1], server[1])
            + ends
            + _COOKIE.pack(0, _NO_COOKIE, _NO_COOKIE)
        )
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
        ) as kernel:
            kernel.settimeout(1.0)
            kernel.send(
                _HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
                + body
            )
            answer = kernel.recv(4096)
    except OSError as error:
        if error.errno not in _SHORTAGES:
            return None
        raise OutOfMemory(
            f"the server cannot find out whose connection this is: {error.strerror}.",
            hint="Try again; if it stays so, raise the server's limit: ulimit -n 65536.",
        ) from None
    if (
        len(answer) < _HEAD.size + _FOUND.size
        or _HEAD.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY
    ):
        return None
    _, state, _, _, _, _, _, user, inode = _FOUND.unpack_from(answer, _HEAD.size)
    return int(user) if state == _ESTABLISHED and inode else None


def is_own_user(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Return whether the client is a process of this process's user, or of root. Raises
    OutOfMemory."""
    return user_of(client, server) in (os.geteuid(), 0)


def is_own_grpc_user(peer: str, address: str) -> bool:
    """Return whether the caller of a gRPC method is a process of this process's user, or of root.
    Raises OutOfMemory.

    peer: as `CallContext.peer` gives it, `ipv4:127.0.0.1:5000`. address: where the server
    listens, HOST:PORT.
    """
    family, _, client = unquote(peer).partition(":")
    loopback = {"ipv4": "127.0.0.1", "ipv6": "::1"}.get(family)
    host, _, port = address.rpartition(":")
    client_host, _, client_port = client.rpartition(":")
    if loopback is None or not (port.isdecimal() and client_port.isdecimal()):
        return False
    server = host.strip("[]") if host[:1].isdigit() else loopback
    return is_own_user((client_host.strip("[]"), int(client_port)), (server, int(port)))
