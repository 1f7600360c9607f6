"""The process that shards are forked from: `python -m clipper.params.local.fork_server`.

To start Python and import what a shard needs takes half a second of a core, on a busy machine two:
longer than to recover one. To fork a process that has imported it takes 5 ms. So a supervisor keeps
one that does nothing else: it has no thread (a fork has only the thread that forks), and no shard's
state. Its input is a socket of packets: it is asked {"number": I, "folder": DIR}, and says
{"number", "pid"} with the child's pidfd, before the child goes on; later {"pid", "code"}. When it
is killed, its shards go on.

A shard ends when its supervisor is gone: it has the supervisor's pidfd. (The signal at a parent's
death would be that of this process, whose death should cost nothing.)
"""

import contextlib
import gc
import json
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from clipper.errors import ClipperError, InvalidInput
from clipper.params.client.connection import SHARDS_FILE, addresses_in
from clipper.params.local.address_file import read_address_file
from clipper.params.shard.server import EXIT_FAILED, Beside, die_with, folder_of, run
from clipper.params.shard.shard import Shard, ShardConfig
from clipper.settings.params import ParamsSettings

log = logging.getLogger("clipper.params")
ASK_BYTES_MAX = 1 << 16


def config_in(folder: Path, number: int, keep: Path | None = None) -> ShardConfig:
    """Shard `number` of the set whose file is there. keep: where its epoch and snapshots go, if not
    there too. Raises InvalidInput."""
    addresses, token = addresses_in(folder)
    try:
        said = read_address_file(folder)
        settings = msgspec.convert(said.get("settings", {}), ParamsSettings)
    except ValueError as error:
        raise InvalidInput(f"{folder / SHARDS_FILE}: {error}.") from None
    if not 0 <= number < len(addresses):
        raise InvalidInput(f"no shard {number} in {folder}: it has {len(addresses)}.")
    book = folder if said.get("engine") else None
    return ShardConfig(
        number, tuple(addresses), settings, token, folder_of(keep or folder, number), book=book
    )


def log_to(path: Path) -> None:
    """What this process says from here on goes there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class ForkServer:
    """Threads: its process has one."""

    def __init__(self, connection: socket.socket, supervisor_fd: int, beside: Beside) -> None:
        self._connection, self._supervisor_fd, self._beside = connection, supervisor_fd, beside
        self._children: dict[int, int] = {}  # pidfd -> pid

    def run(self) -> int:
        """Until its supervisor hangs up; in a child, until that has been a shard. -> exit code"""
        while True:
            poll = select.poll()
            for fd in (self._connection.fileno(), *self._children):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                data = self._connection.recv(ASK_BYTES_MAX)
                if not data:
                    return 0
                code = self._fork(json.loads(data))
                if code is not None:
                    return code

    def _say(self, fds: list[int], **said: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self._connection, [json.dumps(said).encode()], fds)

    def _fork(self, asked: Any) -> int | None:
        """The child waits until it was spoken of: one that nobody knows would never be ended. ->
        the child's exit code, there"""
        waits, goes = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(waits)
            os.close(goes)
            self._say([], number=asked["number"], error=str(error))
            return None
        if pid == 0:
            os.close(goes)
            return self._become(asked, waits)
        os.close(waits)
        fd = os.pidfd_open(pid)  # it is not reaped before: the number is its own
        self._children[fd] = pid
        self._say([fd], number=asked["number"], pid=pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(goes, b".")
        os.close(goes)
        return None

    def _become(self, asked: Any, waits: int) -> int:
        os.setsid()
        self._connection.close()
        for fd in self._children:
            os.close(fd)
        known = os.read(waits, 1)
        os.close(waits)
        if not known:
            return EXIT_FAILED
        return run_shard(
            Path(asked["folder"]), int(asked["number"]), watched(self._supervisor_fd, self._beside)
        )

    def _reap(self, fd: int) -> None:
        pid = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._say([], pid=pid, code=os.waitstatus_to_exitcode(status))


def run_shard(folder: Path, number: int, beside: Beside) -> int:
    """Shard `number`, until it ends. -> exit code"""
    try:
        log_to(folder / f"shard-{number}.log")
        return run(config_in(folder, number), beside)
    except ClipperError as error:
        log.error("shard %d: %s", number, error)
        return EXIT_FAILED


def watched(supervisor_fd: int, beside: Beside) -> Beside:
    """`beside`, and an end when that process has ended."""

    def wait(shard: Shard) -> None:
        poll = select.poll()
        poll.register(supervisor_fd, select.POLLIN)
        poll.poll()
        shard.end("its supervisor is gone")

    @contextlib.contextmanager
    def both(shard: Shard) -> Iterator[None]:
        threading.Thread(
            target=wait, args=[shard], name="clipper-shard-supervisor", daemon=True
        ).start()
        with beside(shard):
            yield

    return both


def main(beside: Beside = contextlib.nullcontext) -> int:
    """beside: see `clipper.params.shard.server.run`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parent = int(sys.argv[1])
    die_with(parent)
    supervisor_fd = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 0
    with socket.socket(fileno=os.dup(0)) as connection:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        gc.collect()
        gc.freeze()  # what is here stays shared with the children
        return ForkServer(connection, supervisor_fd, beside).run()


if __name__ == "__main__":
    sys.exit(main())
