"""Memory of a server on this machine: the process that listens on a port, and its children."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from clipper_container.machine import proportional_bytes

_LISTENING = "0A"


def memory_of(host: str, port: int) -> int:
    """Return the bytes (PSS); 0 when the server runs elsewhere or its memory cannot be read."""
    try:
        if not _is_here(host):
            return 0
        sockets = set(_listening(port))
        if not sockets:
            return 0
        parents = dict(_parents())
        owners = [pid for pid in parents if sockets & _sockets(pid)]
        return sum(proportional_bytes(pid) for pid in parents if _descends(pid, owners, parents))
    except OSError:
        return 0


def _is_here(host: str) -> bool:
    return all(
        str(found[4][0]).startswith(("127.", "::1")) for found in socket.getaddrinfo(host, None)
    )


def _listening(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except FileNotFoundError:
            continue
        for row in rows:
            if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{row[9]}]"


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat") as file:
                    yield int(name), int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
            except OSError:
                continue
    except OSError:
        pass
    return found


def _descends(pid: int, owners: list[int], parents: dict[int, int]) -> bool:
    while pid:
        if pid in owners:
            return True
        pid = parents.get(pid, 0)
    return False
