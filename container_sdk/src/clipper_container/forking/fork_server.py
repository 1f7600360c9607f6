"""Fork server: a process that has imported what its children need, and forks them on request.

To start Python and import a framework takes one to three seconds of a core; to fork a process that
has imported it takes 10 ms, and the pages of the framework are shared. It is the idea of Python's
`multiprocessing.forkserver`, with pidfds and exit codes for the requesting process.

The fork server has one thread, since a fork copies only the thread that forks. It is the parent of
its children: it reaps them and reports their exit codes. Whether a child ends with it is the
matter of the child's entry: the kernel tells it (`clipper_container.parent_death`).

Messages are JSON, one a packet:

| to the fork server | answer |
|---|---|
| `{"imports": [NAME, ...]}`: installed ones | `{"ready": true, "imports": N}`, or `{"unsafe": TEXT, "module": NAME}` |
| `{"preload": [NAME, ...]}`: from any place | the same |
| `{"id": I, "entry": "MODULE:FUNCTION", "session": BOOL}` with descriptors | `{"id": I, "pid": P}` with the child's pidfd, or `{"id": I, "error": TEXT}`; later `{"pid": P, "code": C}` |

The descriptors are those of the child's output and of its control socket, on which it waits for
what to do: so none runs unknown. A child is in a process group of its own, or in a session; what it
leaves in it is killed when it ends.

An error with `"own": true` says that this process lacks descriptors, memory or processes: another
request may succeed. An error never ends this process, because the kernel would end its children.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from clipper_container.forking import Message
from clipper_container.forking.preload import Imports, Unsafe
from clipper_container.process_end import run_and_end
from clipper_container.shortage import is_own

MESSAGE_BYTES_MAX = 1 << 18
DESCRIPTORS_MAX = 4
_AFTER_ERROR_S = 0.05  # so that an error that stays does not take a core


@dataclass(frozen=True, slots=True)
class Parent:
    """The fork server, as a child knows it. restore: restores the CPU priority, which the fork
    server has lowered. safe_path: whether sys.path lacks the working directory.
    """

    pid: int
    safe_path: bool
    restore: Callable[[], None]


Entry = Callable[[Sequence[int], Parent], int]


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of a child; see above."""

    id: int
    entry: str
    session: bool = False


class ForkServer:
    """Loop of a fork server.

    connection: a SOCK_SEQPACKET socket to the requesting process. parent: given to each child.
    imports: what has been imported. before_forks: called once, before the first fork. Threads: its
    process has one.

    An entry is called in the child with the descriptors that came with the request, and returns the
    exit code. A child ends without the teardown of the interpreter, which would copy every shared
    page.
    """

    def __init__(
        self,
        connection: socket.socket,
        parent: Parent,
        imports: Imports,
        before_forks: Callable[[], object] | None = None,
    ) -> None:
        self._connection = connection
        self._parent = parent
        self._imports = imports
        self._before_forks = before_forks
        # to the process group: replicas end in their own time, and then the fork server
        self._on_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._children: dict[int, int] = {}  # pidfd -> pid

    def run(self) -> int:
        """Answer until the connection is closed. Returns the exit code."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            try:
                ready = poll.poll()
            except OSError:  # the limit of files is below what is open already
                time.sleep(_AFTER_ERROR_S)
                continue
            for fd, _ in ready:
                try:
                    if fd in self._children:
                        poll.unregister(fd)
                        self._reap(fd)
                    elif not self._answer(poll):
                        return 0
                except Exception:
                    traceback.print_exc()
                    time.sleep(_AFTER_ERROR_S)

    def _answer(self, poll: select.poll) -> bool:
        """Handle one request; return False at the end of the connection."""
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._connection, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        with contextlib.ExitStack() as opened:
            for fd in fds:
                opened.callback(os.close, fd)
            request = json.loads(data)
            passed: list[int] = []
            if "imports" in request:
                answer = self._import(self._imports.add, request["imports"])
            elif "preload" in request:
                answer = self._import(self._imports.preload, request["preload"])
            elif flags & socket.MSG_CTRUNC:
                why = "no file descriptor is free in the fork server"
                answer = {"id": request["id"], "error": why, "own": True}
            else:
                answer, passed = self._fork(_Request(**request), fds, poll)
        try:
            self._send(answer, passed)
        except OSError as error:
            if not passed:
                raise
            # the child waits on its control socket, and is known to nobody else
            signal.pidfd_send_signal(passed[0], signal.SIGKILL)
            self._send({"id": answer["id"], "error": str(error), "own": is_own(error)})
        return True

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self._connection, [json.dumps(message).encode()], [*fds])

    def _import(self, imports: Callable[[Sequence[str]], None], names: Sequence[str]) -> Message:
        gc.disable()
        try:
            imports(names)
        except Unsafe as unsafe:
            return {"unsafe": str(unsafe), "module": unsafe.module}
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()  # keeps the pages of these objects shared with the children
        return {"ready": True, "imports": len(self._imports)}

    def _fork(
        self, request: _Request, fds: Sequence[int], poll: select.poll
    ) -> tuple[Message, list[int]]:
        """Fork a child, which does not return; return the answer, and its pidfd."""
        before_forks, self._before_forks = self._before_forks, None
        if before_forks is not None:
            before_forks()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            if why := self._imports.trouble():
                raise Unsafe(why)
            pid = os.fork()
        except Exception as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return {"id": request.id, "error": str(error), "own": is_own(error)}, []
        if pid == 0:
            self._connection.close()
            for fd in self._children:
                os.close(fd)
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            run_and_end(partial(_enter, request, fds, self._parent))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not request.session:
            with contextlib.suppress(OSError):  # it was quicker, or has ended
                os.setpgid(pid, pid)
        try:
            fd = os.pidfd_open(pid)  # the child is not reaped yet, so the pid is valid
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"id": request.id, "error": str(error), "own": True}, []
        self._children[fd] = pid
        poll.register(fd, select.POLLIN)
        return {"id": request.id, "pid": pid}, [fd]

    def _reap(self, fd: int) -> None:
        pid = self._children.pop(fd)
        os.close(fd)
        # its number is not given to another process as long as it is not reaped
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._send({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _enter(request: _Request, fds: Sequence[int], parent: Parent) -> int:
    """Become what a request says, in the child."""
    with contextlib.suppress(PermissionError):  # the fork server was quicker
        if request.session:
            os.setsid()
        else:
            os.setpgid(0, 0)
    module, _, name = request.entry.partition(":")
    entry: Entry = getattr(importlib.import_module(module), name)
    return entry(fds, parent)
