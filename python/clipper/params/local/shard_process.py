"""The process of a shard of a set on this host: forked from a fork server that has imported what
it needs, or started plainly.

It goes on when its fork server ends, and ends when its supervisor has ended, whose pidfd it
watches. PR_SET_PDEATHSIG would tell it the death of the fork server, which must not end shards.
"""

import contextlib
import logging
import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from clipper.component import Health, Stop, Worker
from clipper.errors import ClipperError, DoesNotFit, InvalidInput
from clipper.log_output import log_to_terminal
from clipper.params.local.address_file import has_moved, read_address_file
from clipper.params.shard.server import EXIT_FAILED, Beside, folder_of, run
from clipper.params.shard.shard import Shard, ShardConfig
from clipper.settings.params import ParamsSettings
from clipper_container.forking.fork_server import Parent
from clipper_container.forking.replica import received, set_title
from clipper_container.forking.report import Reporter
from clipper_container.params.connection import SHARDS_FILE, addresses_in

log = logging.getLogger("clipper.params")
LOOK_MS = 1000  # between two looks whether the shard ends


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


def run_shard(folder: Path, number: int, beside: Beside, reporter: Reporter) -> int:
    """Run shard `number` until it ends, and report when it serves. Returns the exit code."""

    def serves() -> None:
        reporter.send(serves=True)
        reporter.close()

    try:
        log_to(folder / f"shard-{number}.log")
        return run(config_in(folder, number), beside, serves)
    except ClipperError as error:
        log.error("shard %d: %s", number, error)
        return EXIT_FAILED


def watched(supervisor_fd: int, beside: Beside) -> Beside:
    """Return `beside`, extended so that the shard ends when the supervisor has ended."""

    @contextlib.contextmanager
    def both(shard: Shard) -> Iterator[None]:
        def watch(stop: Stop) -> None:
            poll = select.poll()
            poll.register(supervisor_fd, select.POLLIN)
            while not stop.requested:
                if poll.poll(LOOK_MS):
                    shard.end("its supervisor is gone")
                    return

        def health() -> list[Health]:
            return [worker.health()]

        worker = Worker("clipper-shard-supervisor", watch, once=True, vital=True)
        worker.start()
        shard.watch(health)
        try:
            with beside(shard):
                yield
        finally:
            worker.end()

    return both


def become(fds: Sequence[int], parent: Parent, beside: Beside = contextlib.nullcontext) -> int:
    """Run a shard in a child that was just forked: an entry of a fork server.

    fds: for its output, and the socket by which its supervisor sends {"folder", "number"} with the
    supervisor's own pidfd. beside: see `clipper.params.shard.server.run`.
    """
    output, control = fds
    request, sent = received(control)
    if request is None or not sent:
        return 0  # the supervisor has given up, or has ended
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    parent.restore()
    set_title(f"clipper shard {request['number']} {request['folder']}")
    log_to_terminal()
    return run_shard(
        Path(request["folder"]), request["number"], watched(sent[0], beside), Reporter(control)
    )


def main(beside: Beside = contextlib.nullcontext) -> int:
    """Run a shard that was not forked, as `python -m clipper.params.local.shard_process FOLDER
    NUMBER SUPERVISOR CONTROL`. beside: see `clipper.params.shard.server.run`.
    """
    folder, number, supervisor, control = sys.argv[1:]
    supervisor_fd = os.pidfd_open(int(supervisor))
    if os.getppid() != int(supervisor):
        return 0  # it has ended
    log_to_terminal()
    reporter = Reporter(int(control))
    return run_shard(Path(folder), int(number), watched(supervisor_fd, beside), reporter)


if __name__ == "__main__":
    sys.exit(main())
