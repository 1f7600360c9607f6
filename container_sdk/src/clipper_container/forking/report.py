"""Reports of a container, while it starts, to the process that started it.

A SOCK_SEQPACKET socket, inherited as a descriptor, carries one JSON object a packet:

| report | when |
|---|---|
| `{"warming": ROWS}` | before the first batch of a size |
| `{"warm": true}` | after the warm-up; `modules`, `packages`: imported since the fork |
| `{"serves": true}` | when a shard serves; its last report |
| `{"plain": TEXT}` | before a forked replica starts again without its fork server |
"""

from __future__ import annotations

import contextlib
import json
import os
import socket


class Reporter:
    """Sends reports; does nothing without a descriptor. Threads: one."""

    def __init__(self, fd: int) -> None:
        self._socket: socket.socket | None = None
        if fd >= 0:
            os.set_inheritable(fd, False)  # no process of the model's holds it
            self._socket = socket.socket(fileno=fd)
            self._socket.setblocking(False)

    def send(self, **message: object) -> None:
        """Send one report. A reader that has ended, or does not read, is ignored."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps(message).encode())

    def hand_on(self) -> int:
        """Return the descriptor, which the next program of this process inherits; -1 for none."""
        if self._socket is None:
            return -1
        fd = self._socket.detach()
        self._socket = None
        os.set_inheritable(fd, True)
        return fd

    def close(self) -> None:
        """End the reports."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
