"""Process of a shard: socket, threads, signals. `python -m clipper params shard` runs it."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from clipper.component import Components, Health, State, Stop, Worker
from clipper.errors import AddressInUse, ClipperError, InvalidInput
from clipper.params.local.address_file import publish_address
from clipper.params.shard.durability.recovery import EpochFile, Recovered, recover
from clipper.params.shard.durability.saved_copies import save_copy
from clipper.params.shard.durability.snapshots import Snapshots
from clipper.params.shard.resharding.move import OPEN
from clipper.params.shard.shard import Shard, ShardConfig

log = logging.getLogger("clipper.params")
EXIT_FAILED, EXIT_FENCED = 2, 3
END_S = 60.0  # for each thread, when the shard ends
LISTEN_S = 0.5  # between two attempts to listen at a former address
LOOK_S = 1.0  # between two looks whether a vital thread has failed
_BACKLOG = 512
Beside = Callable[[Shard], contextlib.AbstractContextManager[object]]


class ShardServer:
    """start(), wait() until it ends, close(). Threads: one.

    The server listens, recovers, and serves, until `end`, a signal (`run`), a later epoch, or the
    failure of a vital thread ends it. failed: the error that ended it.
    """

    def __init__(self, config: ShardConfig, serves: Callable[[], None] = lambda: None) -> None:
        if config.folder is None and config.settings.durability == "disk":
            raise InvalidInput(
                f"shard {config.number} has no folder for its log (params.durability is 'disk').",
                hint="Set params.folder.",
            )
        self._on_serving = serves
        self._epochs = EpochFile(config.folder)
        with contextlib.ExitStack() as opened:
            opened.callback(self._epochs.close)
            self._listener = opened.enter_context(
                listening(config.listen or config.addresses[config.number])
            )
            self.config = published(config, self._listener)
            self._plain: socket.socket | None = None
            if config.settings.tls_cert:
                self._plain = opened.enter_context(_private())
                name = os.fsdecode(self._plain.getsockname())
                self.config = msgspec.structs.replace(self.config, plain=f"unix:{name}")
            self.shard = Shard(self.config)
            opened.pop_all()
        self.shard.core.listen((self._plain or self._listener).fileno())
        self._former = former_of_host(self.config)
        self._further: list[socket.socket] = []  # listeners
        self._listens_s = 0.0
        self.failed: Exception | None = None
        self._loop = Worker(
            "clipper-shard-loop", self._loops, once=True, vital=True, on_end=self._loop_has_ended
        )
        self._answerer = Worker(
            "clipper-shard-answers", self._answers, once=True, vital=True, on_end=self._has_ended
        )
        self._recovery = Worker("clipper-shard-recovers", self._recovers, once=True, vital=True)
        self._ended = threading.Event()
        self.ready = threading.Event()
        self._takes_snapshot = self._was_ready = False
        self._parts = self._stack()
        self.shard.watch(self._health_of_threads)

    def _stack(self) -> Components:
        """Return what closes the parts: what is closed last comes first."""
        shard = self.shard
        parts = Components(f"shard {self.config.number}")
        parts.callback("the epoch", self._epochs.close)
        parts.callback("the descriptors", shard.close)
        parts.callback("the listeners", self._close_listeners)
        if shard.relay is not None:
            parts.callback("TLS", shard.relay.close)
        parts.callback("the copies of other shards", self._keep_copies)
        parts.callback("the log", self._close_log)
        parts.callback("the loop", self._end_loop)
        parts.callback("the snapshots", self._close_snapshots)
        parts.callback("the moves", self._end_moves)
        parts.callback("the followers", self._stop_copies)
        parts.callback("the recovery", partial(self._recovery.end, END_S))
        parts.callback("the answers", partial(self._answerer.end, END_S))
        return parts

    def start(self) -> "ShardServer":
        """Start all threads. Raises NotStarted; `close` ends those that run."""
        if self.config.folder is not None:
            snapshots = Snapshots(self.config, self.shard)
            self.shard.snapshots = snapshots
        for worker in (self._loop, self._answerer, self._recovery):
            worker.start()
        if self.shard.relay is not None:
            inner = self.config.plain.removeprefix("unix:")
            self.shard.relay.start(self._listener if inner else None, inner)
        return self

    def end(self, why: str) -> None:
        """End the shard. why: for the log."""
        self.shard.end(why)

    def wait(self) -> str:
        """Wait until the shard has ended. Returns why. Ends a shard of which a vital thread has
        failed, so that its supervisor starts it again."""
        while not self._ended.wait(LOOK_S):
            self._end_if_failed()
        self._end_if_failed()
        return self.shard.ended

    def _end_if_failed(self) -> None:
        for one in self.shard.health():
            if one.vital and one.state is State.FAILED and self.failed is None:
                log.error("shard %d ends: %s has failed", self.config.number, one.name)
                self._fails(ClipperError(f"{one.name} has failed: {one.why}."))

    def _fails(self, error: Exception) -> None:
        """End the shard with an error."""
        self.failed = self.failed or error
        self.shard.end("failed")

    def close(self, *, snapshot: bool = True) -> None:
        """End the shard, take a last snapshot, and save its copies of other shards. Idempotent.

        snapshot: False for none. A shard that was fenced off takes no snapshot. Errors of the parts
        are raised as one group, when all have been closed.
        """
        self._takes_snapshot = snapshot
        self.shard.end("closed")
        self._parts.close()

    # -- closing, in this order

    def _stop_copies(self) -> None:
        for copy in self.shard.copies.values():
            copy.stop()

    def _end_moves(self) -> None:
        self._was_ready, self.shard.core.ready = self.shard.core.ready, False
        self.shard.move.end()
        self.shard.fill.tick()

    def _close_snapshots(self) -> None:
        shard = self.shard
        self._takes_snapshot &= shard.core.access == OPEN
        if shard.snapshots is not None:
            last = self._takes_snapshot and self._was_ready and "fenced" not in shard.ended
            shard.snapshots.close(last=last)

    def _end_loop(self) -> None:
        self.shard.core.stop()
        self._loop.end(END_S)

    def _close_log(self) -> None:
        snapshots = self.shard.snapshots
        if snapshots is not None and snapshots.log is not None:
            snapshots.log.close()

    def _keep_copies(self) -> None:
        for copy in self.shard.copies.values():
            copy.join()
            if self._takes_snapshot:
                save_copy(self.config.folder, copy, self.config.shards)

    def _close_listeners(self) -> None:
        for one in (self._listener, *self._further, *filter(None, (self._plain,))):
            one.close()

    # -- threads

    def _loops(self, stop: Stop) -> None:
        self.shard.core.run()

    def _loop_has_ended(self) -> None:
        self._end_if_failed()
        self.shard.end("its loop has ended")

    def _answers(self, stop: Stop) -> None:
        while not self.shard.ended:
            self.shard.turn()
            if self._former and self.shard.core.ready and self.shard.core.access == OPEN:
                self._listen_further()

    def _has_ended(self) -> None:
        try:
            self._end_if_failed()
        finally:
            self._ended.set()

    def _health_of_threads(self) -> list[Health]:
        return [one.health() for one in (self._loop, self._answerer, self._recovery)]

    def _listen_further(self) -> None:
        """Listen also at former addresses that are free now, since their shards have ended."""
        if time.monotonic() < self._listens_s:
            return
        self._listens_s = time.monotonic() + LISTEN_S
        for address in tuple(self._former):
            with contextlib.suppress(AddressInUse):
                self._further.append(listening(address))
                self.shard.core.listen(self._further[-1].fileno())
                self._former.remove(address)

    def _recovers(self, stop: Stop) -> None:
        config, shard, snapshots = self.config, self.shard, self.shard.snapshots
        connections = [
            shard.connection((config.number + 1 + k) % config.shards)
            for k in range(config.replicas)
        ]
        began_s = time.monotonic()
        try:
            found = recover(
                config.number,
                config.shards,
                connections,
                self._epochs,
                snapshots.sources() if snapshots is not None else (),
                patience_s=config.settings.recover_s,
                stopping=lambda: bool(shard.ended),
                settle=shard.dropped.apply,
            )
        except Exception as error:
            expected = isinstance(error, ClipperError | OSError)
            log.error(
                "shard %d does not come up: %s",
                config.number,
                error,
                exc_info=None if expected else error,
            )
            self._fails(error)
            return
        shard.post(lambda: self._serves(found, time.monotonic() - began_s))

    def _serves(self, found: Recovered, seconds: float) -> None:
        for copy in self.shard.copies.values():
            copy.start(found.epoch)
        if found.is_new and self.shard.mark.is_set:
            log.error(
                "shard %d, epoch %d, has lost its state: neither replica nor snapshot was found; "
                "run `clipper params begin-anew` to continue without it",
                self.config.number,
                found.epoch,
            )
            self.shard.refuse_until_reset(found.epoch, lambda: self._adopts(found, seconds))
            return
        self._adopts(found, seconds)

    def _adopts(self, found: Recovered, seconds: float) -> None:
        self.shard.adopt(found)
        self.shard.recovery = (seconds, found.source)
        rows = found.parameters.rows
        log.info(
            "shard %d serves: epoch %d, version %d, %d rows in %.2f s from %s",
            self.config.number,
            found.epoch,
            found.version,
            rows,
            seconds,
            found.source,
        )
        if self.shard.snapshots is not None:
            self.shard.snapshots.start()
        self.ready.set()
        self._on_serving()


def published(config: ShardConfig, listener: socket.socket) -> ShardConfig:
    """Return the configuration with the port that the system chose, and publish the address."""
    if config.book is None or not config.listen.endswith(":0"):
        return config
    listens = f"{config.listen[:-1]}{listener.getsockname()[1]}"
    publish_address(config.book, config.number, listens)
    return msgspec.structs.replace(config, listen=listens)


def former_of_host(config: ShardConfig) -> list[str]:
    """Return the former addresses that have the protocol and the host of the present one: where
    its operator has since chosen TLS, a unix socket or another interface, it listens there only."""
    place = (config.listen or config.addresses[config.number]).rpartition(":")[0]
    return [one for one in config.former if one.rpartition(":")[0] == place]


def _private() -> socket.socket:
    """Return a listening socket for connections of this process, under a name that is no file."""
    found = socket.socket(socket.AF_UNIX)
    found.bind("")
    found.listen(_BACKLOG)
    found.setblocking(False)
    return found


def listening(address: str) -> socket.socket:
    """Return a listening socket. Raises InvalidInput, AddressInUse.

    The name of a unix socket is taken over; the lock in the shard's folder prevents two shards.
    """
    kind, _, rest = address.partition("?")[0].partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "unix" and rest:
        new = f"{rest}.{os.getpid()}"
        found = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            found.bind(new)
            os.chmod(new, 0o600)
            found.listen(_BACKLOG)
            os.rename(new, rest)
        except OSError as error:
            found.close()
            raise InvalidInput(
                f"cannot listen at {address}: {error}.", hint="A path has at most 107 bytes."
            ) from None
    elif kind in ("tcp", "tls") and port.isdecimal():
        found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host.strip("[]"), int(port)))
            found.listen(_BACKLOG)
        except OSError as error:
            found.close()
            raise AddressInUse(
                f"cannot listen at {address}: {error}.", hint="Name another port."
            ) from None
    else:
        raise InvalidInput(
            f"bad address {address!r} of a shard.",
            hint="Write unix:/path, tcp:host:port or tls:host:port.",
        )
    found.setblocking(False)
    return found


def run(
    config: ShardConfig,
    beside: Beside = contextlib.nullcontext,
    serves: Callable[[], None] = lambda: None,
) -> int:
    """Run a shard until a signal. Returns the exit code.

    beside: context that lasts while the shard runs. serves: called when the shard serves.
    """
    server = ShardServer(config, serves)

    def stop(number: int, _: FrameType | None) -> None:
        server.end(f"signal {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        with beside(server.start().shard):
            why = server.wait()
    finally:
        server.close()
    log.info("shard %d ended: %s", config.number, why)
    return EXIT_FENCED if "fenced" in why else EXIT_FAILED if server.failed else 0


def folder_of(root: Path, number: int) -> Path:
    """Return the folder of one shard in the folder of its set."""
    return root / f"shard-{number}"
