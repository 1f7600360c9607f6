"""Fork server: the process that shards are forked from, `python -m
clipper.params.local.fork_server`.

To start Python and import what a shard needs takes half a second of a core, on a busy machine two;
to fork a process that has imported it takes 5 ms. The fork server has no thread (a fork copies only
the thread that forks) and no state of a shard. Its standard input is a socket of packets. A request
is {"number": I, "folder": DIR}. The reply is both with {"pid"} with the child's pidfd, sent before
the child starts; later {"pid", "code"}. If the fork server is killed, its shards go on.

A shard ends when its supervisor has ended, since it watches the supervisor's pidfd.
PR_SET_PDEATHSIG would signal the death of the fork server, which must not end shards.
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

import msgspec

from clipper.errors import ClipperError, DoesNotFit, InvalidInput
from clipper.params.local.address_file import has_moved, read_address_file
from clipper.params.shard.server import EXIT_FAILED, Beside, die_with, folder_of, run
from clipper.params.shard.shard import Shard, ShardConfig
from clipper.settings.params import ParamsSettings
from clipper_container.params.connection import SHARDS_FILE, addresses_in

log = logging.getLogger("clipper.params")
REQUEST_BYTES_MAX = 1 << 16


def config_in(folder: Path, number: int, keep: Path | None = None) -> ShardConfig:
    """Return the configuration of shard `number` of the set in a folder. Raises InvalidInput;
    DoesNotFit if the set has moved.

    keep: folder of its epoch and snapshots, if not the same.
    """
    addresses, token = addresses_in(folder)
    try:
        content = read_address_file(folder)
        settings = msgspec.convert(content.get("settings", {}), ParamsSettings)
    except ValueError as error:
        raise InvalidInput(f"{folder / SHARDS_FILE}: {error}.") from None
    if has_moved(folder, content):
        raise DoesNotFit(
            f"the set in {folder} has moved to set-{content['generation']}.",
            hint="Its supervisor ends the old shards; on Ray, run `clipper params reshard` again.",
        )
    if not 0 <= number < len(addresses):
        raise InvalidInput(f"no shard {number} in {folder}: it has {len(addresses)}.")
    book = folder if content.get("engine") else None
    return ShardConfig(
        number,
        tuple(addresses),
        settings,
        token,
        folder_of(keep or folder, number),
        book=book,
        home=folder,
        generation=int(content.get("generation", 0)),
        fills=bool(content.get("fills", False)),
        former=tuple(content.get("former", ())) if number == 0 else (),
    )


def log_to(path: Path) -> None:
    """Append standard output and standard error of this process to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class ForkServer:
    """Loop of the fork server. Threads: its process has one."""

    def __init__(self, connection: socket.socket, supervisor_fd: int, beside: Beside) -> None:
        self._connection, self._supervisor_fd, self._beside = connection, supervisor_fd, beside
        self._children: dict[int, int] = {}  # pidfd -> pid

    def run(self) -> int:
        """Fork shards until the supervisor closes the socket; in a child, run the shard. Returns
        the exit code."""
        while True:
            poll = select.poll()
            for fd in (self._connection.fileno(), *self._children):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                data = self._connection.recv(REQUEST_BYTES_MAX)
                if not data:
                    return 0
                code = self._fork(**json.loads(data))
                if code is not None:
                    return code

    def _send(self, fds: list[int], **message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self._connection, [json.dumps(message).encode()], fds)

    def _fork(self, number: int, folder: str) -> int | None:
        """Fork a shard. The child waits until the supervisor knows it, so that none runs unknown.

        Returns the child's exit code in the child, else None.
        """
        waits, goes = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(waits)
            os.close(goes)
            self._send([], number=number, folder=folder, error=str(error))
            return None
        if pid == 0:
            os.close(goes)
            return self._become(number, folder, waits)
        os.close(waits)
        fd = os.pidfd_open(pid)  # the child is not reaped yet, so the pid is valid
        self._children[fd] = pid
        self._send([fd], number=number, folder=folder, pid=pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(goes, b".")
        os.close(goes)
        return None

    def _become(self, number: int, folder: str, waits: int) -> int:
        os.setsid()
        self._connection.close()
        for fd in self._children:
            os.close(fd)
        known = os.read(waits, 1)
        os.close(waits)
        if not known:
            return EXIT_FAILED
        return run_shard(
            Path(folder),
            number,
            watched(self._supervisor_fd, self._beside),
        )

    def _reap(self, fd: int) -> None:
        pid = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._send([], pid=pid, code=os.waitstatus_to_exitcode(status))


def run_shard(folder: Path, number: int, beside: Beside) -> int:
    """Run shard `number` until it ends. Returns the exit code."""
    try:
        log_to(folder / f"shard-{number}.log")
        return run(config_in(folder, number), beside)
    except ClipperError as error:
        log.error("shard %d: %s", number, error)
        return EXIT_FAILED


def watched(supervisor_fd: int, beside: Beside) -> Beside:
    """Return `beside`, extended so that the shard ends when the supervisor has ended."""

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
    """Run the fork server. beside: see `clipper.params.shard.server.run`."""
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
        gc.freeze()  # keeps these objects' pages shared with the children
        return ForkServer(connection, supervisor_fd, beside).run()


if __name__ == "__main__":
    sys.exit(main())
