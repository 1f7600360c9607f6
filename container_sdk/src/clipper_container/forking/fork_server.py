"""Fork server: a process that has imported what its children need, and forks them on request.

To start Python and import a framework takes one to three seconds of a core; to fork a process that
has imported it takes 10 ms, and the pages of the framework are shared. It is the idea of Python's
`multiprocessing.forkserver`, with pidfds and exit codes for the requesting process.

The fork server has one thread, since a fork copies only the thread that forks. It is the parent of
its children: it reaps them and reports their exit codes.

Messages are JSON, one a packet:

| to the fork server | answer |
|---|---|
| `{"imports": [NAME, ...]}` | `{"ready": true, "imports": N}`, or `{"unsafe": TEXT, "module": NAME}` |
| `{"id": I, ...}` with descriptors | `{"id": I, "pid": P}` with the child's pidfd, or `{"id": I, "error": TEXT}`; later `{"pid": P, "code": C}` |
"""  # noqa: E501

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from clipper_container.forking import Message
from clipper_container.forking.preload import Imports, Unsafe

MESSAGE_BYTES_MAX = 1 << 18
DESCRIPTORS_MAX = 4
Become = Callable[[Message, Sequence[int]], int]


class ReplicaForkServer:
    """Loop of a fork server.

    connection: a SOCK_SEQPACKET socket to the requesting process. become: called in each child with
    the request and the descriptors that came with it; returns the child's exit code. imports: what
    has been imported. Threads: its process has one.

    A child ends without the teardown of the interpreter, which would copy every shared page.
    """

    def __init__(self, connection: socket.socket, become: Become, imports: Imports) -> None:
        self._connection, self._become, self._imports = connection, become, imports
        # to the process group: replicas end in their own time, and then the fork server
        self._on_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._children: dict[int, int] = {}  # pidfd -> pid

    def run(self) -> int:
        """Answer until the connection is closed. Returns the exit code."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd in self._children:
                    poll.unregister(fd)
                    self._reap(fd)
                    continue
                data, fds, _, _ = socket.recv_fds(
                    self._connection, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
                if not data:
                    return 0
                request = json.loads(data)
                if "imports" in request:
                    self._import(request["imports"])
                    continue
                self._fork(request, fds, poll)

    def _send(self, fds: Sequence[int] = (), **message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self._connection, [json.dumps(message).encode()], [*fds])

    def _import(self, names: Sequence[str]) -> None:
        try:
            self._imports.add(names)
        except Unsafe as unsafe:
            self._send(unsafe=str(unsafe), module=unsafe.module)
            return
        gc.collect()
        gc.freeze()  # keeps the pages of these objects shared with the children
        self._send(ready=True, imports=len(self._imports))

    def _fork(self, request: Message, fds: list[int], poll: select.poll) -> None:
        """Fork a child, which does not return."""
        if why := self._imports.trouble():
            self._refuse(request, fds, why)
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._refuse(request, fds, str(error))
            return
        if pid == 0:
            self._connection.close()
            for fd in self._children:
                os.close(fd)
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _run_and_exit(lambda: self._become(request, fds))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        fd = os.pidfd_open(pid)  # the child is not reaped yet, so the pid is valid
        self._children[fd] = pid
        poll.register(fd, select.POLLIN)
        for one in fds:
            os.close(one)
        self._send([fd], id=request["id"], pid=pid)

    def _refuse(self, request: Message, fds: Sequence[int], why: str) -> None:
        for one in fds:
            os.close(one)
        self._send(id=request["id"], error=why)

    def _reap(self, fd: int) -> None:
        pid = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._send(pid=pid, code=os.waitstatus_to_exitcode(status))


def _run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Run a child and end its process as `multiprocessing` does: threads that are no daemons are
    awaited, and exit functions called.
    """
    code = 1
    try:
        try:
            code = work()
        except SystemExit as exit:
            code = _code_of(exit)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


def _code_of(exit: SystemExit) -> int:
    """Return the exit code of a SystemExit, as Python does."""
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    print(exit.code, file=sys.stderr)
    return 1
