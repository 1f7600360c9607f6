"""A set of shards as processes on this host, restarted under the same addresses when they end.

`clipper params up` runs it in the foreground. Its folder holds shards.json (addresses and token,
for clients and shards), a folder and a log of each shard, and the snapshots of all.
"""

import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from clipper.errors import (
    AlreadyExists,
    ClipperError,
    ConfigError,
    DoesNotFit,
    InvalidInput,
    ShardAway,
    StateLost,
)
from clipper.foreign_text import last_line
from clipper.params.local.address_file import (
    UNKNOWN_ADDRESS,
    ShardAddresses,
    former_of,
    running_shards,
    write_address_file,
)
from clipper.params.local.address_file import read_address_file as read_address_file
from clipper.params.local.health_check import HealthCheck
from clipper.params.local.live_reshard import LiveReshard, complete_move, home_in
from clipper.params.shard.durability.disk_log import check_other_sizes, log_files
from clipper.params.shard.durability.dropped_tables import forget_drops
from clipper.params.shard.durability.snapshots import newest_of, newest_position, parts_in, sets_in
from clipper.params.tables import optimizer_in
from clipper.params.tokens import TokenFile
from clipper.settings.params import (
    ParamsSettings,
    grpc_address,
    params_tls,
    shard_tls,
    tls_address,
    with_absolute_paths,
)
from clipper.tls import Certificate
from clipper_container.params.connection import ShardConnection, addresses_in, call_once

log = logging.getLogger("clipper.params")
GRACE_S = 30.0  # from SIGTERM to SIGKILL, for a last snapshot
END_POLL_S = 0.02
QUICK_S = 1.0  # a shard that lives shorter has failed to start
FORK_SERVER_QUICK_S = 10.0  # so has a fork server that lives shorter, and forks no shard
QUICK_MAX = 3  # failures in a row before restarts are delayed
PAUSE_S_MAX = 1.0  # serving waits for the rows of a shard, and its start costs little
UNIX_PATH_MAX = 100
REPLY_BYTES_MAX = 1 << 16
FORK_SERVER_LOG = "standby.log"
PROGRAM = "clipper.params.local.fork_server"
PROGRAM_WITH_GRPC = (  # with gRPC; by name, since params does not import it
    "clipper.frontend.params_grpc.server"
)


def supervisor_of(folder: Path) -> int:
    """Return the process id of the set's supervisor; 0 if none runs."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 0
    except BlockingIOError:
        return int(read_address_file(folder).get("pid", 0))
    finally:
        os.close(fd)


def snapshot_all(
    addresses: list[str], token: str, folder: Path, *, whole: bool = False
) -> dict[str, object]:
    """Take a snapshot of all shards under one number.

    Raises ShardAway, and the error of the first shard that fails.
    """
    number = 1 + max((one.number for one in sets_in(home_in(folder) / "snapshots")), default=0)
    parts = []
    for shard in range(len(addresses)):
        connection = ShardConnection(shard, addresses.__getitem__, token, None, 600.0)
        try:
            parts.append(call_once(connection, "snapshot", number=number, whole=whole)[1])
        except OSError as error:
            raise ShardAway(
                f"{connection.name}: {error}.", hint="`clipper params ps` lists those that run."
            ) from None
        finally:
            connection.close()
    return {
        "number": number,
        "rows": sum(p["rows"] for p in parts),
        "nbytes": sum(p["nbytes"] for p in parts),
        "parts": parts,
    }


class _ForkServerProcess:
    """Connection to the fork server. Threads: the supervising one.

    has_replied: it has come up. has_ended: it is closed, and another one is not started yet.
    log_at: where its part of the log begins.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self.began_s, self.has_replied, self.has_ended = time.monotonic(), False, False
        words = [sys.executable, "-X", "faulthandler", "-m", program, str(os.getpid())]
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alone = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
        }  # a process with threads cannot be forked safely
        with theirs, open(folder / FORK_SERVER_LOG, "ab") as log_file:
            self.log_at = log_file.tell()
            self.popen: subprocess.Popen[bytes] = subprocess.Popen(
                words,
                stdin=theirs.fileno(),
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                env=alone,
            )
        self.pid_fd = os.pidfd_open(self.popen.pid)

    def request(self, number: int, folder: Path) -> None:
        """Request a shard. If the fork server has ended, the request goes to the next one."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps({"number": number, "folder": str(folder)}).encode())

    def receive(self) -> tuple[dict[str, Any], int] | None:
        """Return the next reply and a pidfd (-1: none); None if there is no more."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self.connection, REPLY_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        self.has_replied |= bool(data)
        return (json.loads(data), fds[0] if fds else -1) if data else None

    def close(self) -> int:
        """End the fork server. Returns its exit code."""
        self.has_ended = True
        self.connection.close()  # the process ends at end of file
        try:
            code = self.popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        os.close(self.pid_fd)
        return code


Key = tuple[Path, int]  # folder of a set, number of a shard


class _Shard(NamedTuple):
    key: Key
    pid: int
    pid_fd: int
    began_s: float


class LocalSet:
    """Supervisor of a set: start(), then clients may connect to `folder`; stop(). Threads: any.

    The number of shards in a folder is changed by `reshard`, or, while it runs, by LiveReshard;
    `home` is the folder of the shards that serve. Raises ConfigError, AlreadyExists (another
    supervisor runs it), DoesNotFit.
    """

    def __init__(self, settings: ParamsSettings, *, code: str = "") -> None:
        self.settings = settings = with_absolute_paths(settings)
        self.folder = self.home = Path(settings.folder).absolute()
        if settings.replicas >= settings.shards:
            raise ConfigError(
                f"params.replicas = {settings.replicas}: fewer than params.shards ="
                f" {settings.shards}."
            )
        if settings.grpc:
            self._check_grpc()
        if settings.tokens_file:
            TokenFile("", settings.tokens_file)
        if (files := shard_tls(settings)) is not None:
            Certificate(files, "params.tls")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            complete_move(self.folder)
            self.addresses, self.token = self._write_addresses()
        except BlockingIOError:
            os.close(self._lock)
            hint = "clipper params down, or another folder."
            raise AlreadyExists(f"a set of shards runs in {self.folder}.", hint=hint) from None
        except BaseException:
            os.close(self._lock)
            raise
        self._program = PROGRAM_WITH_GRPC if settings.grpc else PROGRAM
        self._shards: dict[Key, _Shard] = {}
        self._wanted: set[Key] = set()  # requested and not started yet
        self._names: dict[int, int] = {}  # pid -> number, until the exit code is known
        self._retired: set[Path] = set()  # sets whose shards are not started again
        self._posted: deque[Callable[[], None]] = deque()
        self._fork_server: _ForkServerProcess
        self._quick: dict[Key | None, int] = {}  # failures in a row; None: of fork servers
        self._has_forked = False
        self._failed_start = ""  # why no fork server has come up yet, after several have failed
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self.restarts = 0
        self._hung: deque[int] = deque()  # shards to kill
        self._health_check = self._new_health_check()
        self._ends = threading.Event()
        self._reshards = threading.Thread(
            target=LiveReshard(self).run, name="clipper-params-reshard", daemon=True
        )
        self._thread = threading.Thread(target=self._run, name="clipper-params", daemon=True)

    def _check_grpc(self) -> None:
        """Check the settings of gRPC before any process starts."""
        grpc_address(self.settings, 0)
        optimizer_in(self.settings.grpc_optimizer)
        if importlib.util.find_spec("grpc") is None:
            raise ConfigError(
                "params.grpc needs grpcio.", hint='pip install "clipper-serving[grpc]"'
            )
        files = params_tls(self.settings)
        if files is not None:
            Certificate(files, "params.grpc_tls")
        keys = self.settings.grpc_keys_file
        if keys and not os.access(keys, os.R_OK):
            hint = "Add a key with: clipper key NAME --file FILE"
            raise ConfigError(f"params.grpc_keys_file = {keys!r} cannot be read.", hint=hint)

    def _write_addresses(self) -> tuple[list[str], str]:
        """Write shards.json. A token that was generated earlier is kept."""
        settings, before = self.settings, read_address_file(self.folder)
        if before.get("engine") and running_shards(self.folder):
            hint = f"clipper params down --folder {self.folder}, or another folder."
            raise AlreadyExists(
                f"a set of shards runs in {self.folder}, on {before['engine']}.", hint=hint
            )
        there = len(before.get("addresses", [])) or settings.shards
        if there != settings.shards:
            hint = f"clipper params reshard --folder {self.folder} --shards {settings.shards}"
            raise DoesNotFit(
                f"the set in {self.folder} has {there} shards, not {settings.shards}.", hint=hint
            )
        token = settings.token or str(before.get("token", "")) or secrets.token_urlsafe(24)
        addresses = self.addresses_of(self.folder, settings)
        grpc = [grpc_address(settings, i) for i in range(settings.shards)] if settings.grpc else []
        public = msgspec.to_builtins(
            msgspec.structs.replace(settings, token="", folder=str(self.folder))
        )
        content: ShardAddresses = {
            "addresses": addresses,
            "token": token,
            "pid": os.getpid(),
            "settings": public,
            "grpc": grpc,
            "generation": before.get("generation", 0),
            "before": before.get("before", 0),
            "former": former_of(before, addresses),
        }
        write_address_file(self.folder, content)
        return addresses, token

    def _new_health_check(self) -> HealthCheck | None:
        if not self.settings.hung_s:
            return None
        return HealthCheck(self.addresses, self.token, self.settings.hung_s, self._is_hung)

    def _address(self, home: Path, settings: ParamsSettings, shard: int) -> str:
        if settings.address != "unix":
            host, _, port = settings.address.rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigError(f"params.address = {settings.address!r}: `unix`, or HOST:PORT.")
            where = f"{host}:{int(port) + shard}"
            return tls_address(settings, where) if settings.tls_cert else f"tcp:{where}"
        if settings.tls_cert:
            raise ConfigError(
                "params.tls_cert is set, and params.address is 'unix': no other host reaches it.",
                hint="Set params.address = 'HOST:PORT'.",
            )
        path = home / f"shard-{shard}.sock"
        if len(str(path)) > UNIX_PATH_MAX:
            raise ConfigError(
                f"{path} is too long for a socket.",
                hint="Name a folder with a shorter path, or params.address.",
            )
        return f"unix:{path}"

    # -- any thread

    def start(self) -> "LocalSet":
        """Start the supervising thread, which starts the shards."""
        self._thread.start()
        if self._health_check is not None:
            self._health_check.start()
        self._reshards.start()
        return self

    def _is_hung(self, number: int) -> None:
        """Have the supervising thread kill and restart a shard."""
        self._hung.append(number)
        os.eventfd_write(self._wake, 1)

    def wait_ready(self, patience_s: float = 60.0) -> None:
        """Wait until every shard serves. Raises ShardAway, also when no shard can be forked;
        StateLost."""
        until = time.monotonic() + patience_s
        for shard in range(len(self.addresses)):
            why = "it does not answer"
            while time.monotonic() < until:
                if self._failed_start:
                    raise ShardAway(
                        f"the process that shards are forked from does not start:"
                        f" {self._failed_start}.",
                        hint=f"Its log: {self.folder / FORK_SERVER_LOG}",
                    )
                connection = ShardConnection(
                    shard, self.addresses.__getitem__, self.token, None, 5.0
                )
                try:
                    answer = call_once(connection, "stats")[1]
                    if answer["ready"]:
                        break
                    if answer.get("state_lost"):
                        raise _lost(shard, self.folder)
                    why = "it recovers"
                except StateLost:
                    raise
                except (OSError, ClipperError) as error:
                    why = str(error)
                finally:
                    connection.close()
                time.sleep(0.02)
            else:
                raise ShardAway(
                    f"shard {shard} does not come up: {why}.",
                    hint=f"Its log: {self.home / f'shard-{shard}.log'}",
                )

    def pids(self) -> dict[int, int]:
        """Return the process ids of the shards that run, by number."""
        each = list(self._shards.items())
        return {number: one.pid for (home, number), one in each if home == self.home}

    def stop(self, *, snapshot: bool = True) -> None:
        """End all shards. snapshot: take a snapshot of all first."""
        self._ends.set()
        if self._reshards.ident is not None:
            self._reshards.join()
        if snapshot and self._thread.is_alive():
            try:
                snapshot_all(self.addresses, self.token, self.home)
            except ClipperError as error:
                log.warning("no snapshot of all shards before the end: %s", error)
        if self._health_check is not None:
            self._health_check.stop()
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake)
        os.close(self._lock)

    # -- for LiveReshard, from its thread

    def addresses_of(self, home: Path, settings: ParamsSettings) -> list[str]:
        """Return the addresses of a set in a folder. Raises ConfigError."""
        return [self._address(home, settings, i) for i in range(settings.shards)]

    def start_set(self, home: Path, shards: int) -> None:
        """Start the shards of another set, and restart them when they end."""
        for number in range(shards):
            self._post(partial(self._start, (home, number)))

    def retire_set(self, home: Path) -> None:
        """Start no shard of a set again."""
        self._retired.add(home)

    def end_set(self, home: Path) -> None:
        """End the shards of a retired set, and wait for that."""
        until_s, signalled = time.monotonic() + GRACE_S, set[int]()
        while any(key[0] == home for key in (*self._shards, *self._wanted)):
            if time.monotonic() > until_s:
                signalled, until_s = set(), time.monotonic() + GRACE_S
                self._post(partial(self._signal_set, home, signal.SIGKILL, set()))
            self._post(partial(self._signal_set, home, signal.SIGTERM, signalled))
            time.sleep(END_POLL_S)

    def serve(self, home: Path, settings: ParamsSettings, addresses: list[str]) -> None:
        """Have another set as the one that serves."""
        if self._health_check is not None:
            self._health_check.stop()
        self.settings, self.addresses, self.home = settings, addresses, home
        self._health_check = self._new_health_check()
        if self._health_check is not None:
            self._health_check.start()

    def ends(self, wait_s: float) -> bool:
        """Wait, and tell whether this set ends."""
        return self._ends.wait(wait_s)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the supervising thread do something."""
        self._posted.append(work)
        os.eventfd_write(self._wake, 1)

    # -- the supervising thread: the process that shards are forked from asks for a signal when the
    # thread that made it ends

    def _run(self) -> None:
        self._fork_server = _ForkServerProcess(self.folder, self._program)
        for number in range(self.settings.shards):
            self._start((self.home, number))
        while not self._stopping:
            self._turn(min((at for at, _ in self._due), default=time.monotonic() + 60))
            now = time.monotonic()
            ready = [work for at, work in self._due if at <= now]
            self._due = [(at, work) for at, work in self._due if at > now]
            for work in ready:
                work()
        self._end()

    def _turn(self, until_s: float) -> None:
        """Wait for an event until a time, and handle it."""
        poll, shards = select.poll(), {one.pid_fd: one for one in self._shards.values()}
        fork_server = self._fork_server
        replies = fork_server.connection.fileno()  # -1 once it has ended
        for fd in (self._wake, *shards, *(() if replies < 0 else (replies, fork_server.pid_fd))):
            poll.register(fd, select.POLLIN)
        happened = [fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1000)]
        if self._wake in happened:
            os.eventfd_read(self._wake)
        while self._hung:
            self._kill_hung(self._hung.popleft())
        while self._posted:
            self._posted.popleft()()
        if replies in happened:
            self._received(fork_server.receive())
        for fd in happened:
            if fd in shards:
                self._ended(shards[fd])
        if replies >= 0 and fork_server.pid_fd in happened:
            self._lost()

    def _start(self, key: Key) -> None:
        if key[0] not in self._retired:
            self._wanted.add(key)
            self._fork_server.request(key[1], key[0])

    def _signal_set(self, home: Path, number: int, signalled: set[int]) -> None:
        """Signal each shard of a set once."""
        for one in self._shards.values():
            if one.key[0] == home and one.pid not in signalled:
                signalled.add(one.pid)
                _signal(one, number)

    def _received(self, message: tuple[dict[str, Any], int] | None) -> None:
        if message is None:
            return
        event, pid_fd = message
        if "code" in event:
            number = self._names.pop(event["pid"], None)
            log.info("shard %s, process %d: %s", number, event["pid"], _exit(event["code"]))
            return
        key = Path(event["folder"]), event["number"]
        self._wanted.discard(key)
        if "pid" in event:
            self._has_forked, self._failed_start = True, ""
            self._shards[key] = _Shard(key, event["pid"], pid_fd, time.monotonic())
            self._names[event["pid"]] = event["number"]
        else:
            log.warning(
                "shard %d is not started: %s; again in %g s",
                event["number"],
                event["error"],
                PAUSE_S_MAX,
            )
            self._due.append((time.monotonic() + PAUSE_S_MAX, lambda: self._start(key)))

    def _lost(self) -> None:
        """Replace the fork server that has ended; its shards go on."""
        ended = self._fork_server
        while (message := ended.receive()) is not None:
            self._received(message)
        code = ended.close()
        self._names.clear()  # their exit codes are lost
        if self._stopping:
            return
        age_s = time.monotonic() - ended.began_s
        pause_s = self._pause_s(None, not ended.has_replied and age_s < FORK_SERVER_QUICK_S)
        log.warning(
            "the process that shards are forked from ended (%s); another is made%s",
            _exit(code),
            f" in {pause_s:g} s. Its log: {self.folder / FORK_SERVER_LOG}" if pause_s else "",
        )
        if pause_s and not self._has_forked:
            text = (self.folder / FORK_SERVER_LOG).read_bytes()[ended.log_at :]
            self._failed_start = f"{_exit(code)}: {last_line(text.decode(errors='replace'))}"
        if pause_s:
            self._due.append((time.monotonic() + pause_s, self._start_fork_server))
        else:
            self._start_fork_server()

    def _start_fork_server(self) -> None:
        """Start another fork server, and request the shards that the last one has not started."""
        try:
            self._fork_server = _ForkServerProcess(self.folder, self._program)
        except OSError as error:  # no memory for it, or no descriptor
            log.warning("no process to fork shards from: %s; again in %g s", error, PAUSE_S_MAX)
            self._due.append((time.monotonic() + PAUSE_S_MAX, self._start_fork_server))
            return
        for home, number in self._wanted:
            self._fork_server.request(number, home)

    def _pause_s(self, key: Key | None, is_quick: bool) -> float:
        """Return for how long a process that has ended is not started again.

        is_quick: it has failed to start. After `QUICK_MAX` of these in a row, the pause grows.
        """
        self._quick[key] = self._quick.get(key, 0) + 1 if is_quick else 0
        late = self._quick[key] - QUICK_MAX
        return min(PAUSE_S_MAX, 0.1 * 2 ** min(late, 9)) if late >= 0 else 0.0

    def _ended(self, one: _Shard) -> None:
        os.close(one.pid_fd)
        key, number = one.key, one.key[1]
        del self._shards[key]
        if self._stopping or key[0] in self._retired:
            return
        self.restarts += 1
        pause_s = self._pause_s(key, time.monotonic() - one.began_s < QUICK_S)
        log.warning(
            "shard %d ended; it is started again%s. Its log: %s",
            number,
            f" in {pause_s:g} s" if pause_s else "",
            key[0] / f"shard-{number}.log",
        )
        if pause_s:
            self._due.append((time.monotonic() + pause_s, lambda: self._start(key)))
        else:
            self._start(key)

    def _kill_hung(self, number: int) -> None:
        """Kill a shard that does not answer, unless it has just been started."""
        one, patience_s = self._shards.get((self.home, number)), self.settings.hung_s
        if one is not None and time.monotonic() - one.began_s >= patience_s and not self._stopping:
            log.warning("shard %d has not answered for %g s: it is killed", number, patience_s)
            _signal(one, signal.SIGKILL)

    def _end(self) -> None:
        until_s, signalled = time.monotonic() + GRACE_S, set[int]()
        while self._shards or (self._wanted and not self._fork_server.has_ended):
            for one in self._shards.values():
                if one.pid not in signalled:
                    signalled.add(one.pid)
                    _signal(one, signal.SIGTERM)
            self._turn(until_s)
            if time.monotonic() >= until_s:
                for one in self._shards.values():
                    log.warning("shard %d does not end: it is killed", one.key[1])
                    _signal(one, signal.SIGKILL)
                until_s = time.monotonic() + GRACE_S
        if not self._fork_server.has_ended:
            self._fork_server.close()


def _lost(shard: int, folder: Path) -> StateLost:
    hint = f"Restore a snapshot, or let it begin anew: clipper params begin-anew --folder {folder}"
    return StateLost(
        f"shard {shard} restarted without its state: neither replica nor snapshot was found.",
        hint=hint,
    )


def _signal(one: _Shard, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(one.pid_fd, number)


def _exit(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _must_rest(folder: Path) -> None:
    if supervisor_of(folder) or running_shards(folder):
        raise DoesNotFit(
            f"the set in {folder} runs.", hint=f"clipper params down --folder {folder}"
        )
    complete_move(folder)


def reshard(folder: Path, shards: int) -> int:
    """Change the number of shards of a set that does not run.

    Returns the number of the snapshot that the shards will read. Raises DoesNotFit; StoreError if
    a log on disk has more than the snapshots.
    """
    _must_rest(folder)
    addresses, _ = addresses_in(folder)
    chains = newest_of(parts_in(folder / "snapshots"), len(addresses))
    if not chains:
        hint = "Start it, and end it by `clipper params down`."
        raise DoesNotFit(
            f"{folder} has no snapshot with parts of all {len(addresses)} shards.", hint=hint
        )
    check_other_sizes(folder, shards, partial(newest_position, folder / "snapshots"))
    content = read_address_file(folder)
    content["addresses"] = [
        UNKNOWN_ADDRESS if content.get("engine") else f"unix:{folder.absolute()}/shard-{i}.sock"
        for i in range(shards)
    ]
    content["settings"]["shards"] = shards
    content["settings"]["replicas"] = min(content["settings"].get("replicas", 0), shards - 1)
    content["generation"], content["before"] = content.get("generation", 0) + 1, -1
    write_address_file(folder, content)
    return max(chain[-1].number for chain in chains)


def restore(folder: Path, source: Path, number: int = 0) -> int:
    """Choose a snapshot of `source` as what the shards of a set that does not run read next.

    number: 0 for the newest complete one. Newer snapshots of the set itself, and its logs on disk,
    are set aside. Returns the number. Raises DoesNotFit, InvalidInput.
    """
    _must_rest(folder)
    root = source / "snapshots" if (source / "snapshots").is_dir() else source
    complete = [one for one in sets_in(root) if one.complete and number in (0, one.number)]
    if not complete:
        which = f" {number}" if number else ""
        raise InvalidInput(
            f"{root} has no complete snapshot{which}.", hint="`clipper params ps` lists them."
        )
    chosen, own = complete[-1], folder / "snapshots"
    if root.absolute() != own.absolute():
        _set_aside(own, 0)
        _copied(root, own, chosen.number)
    else:
        _set_aside(own, chosen.number)
    forget_drops(folder)
    for shard in folder.glob("shard-*"):
        for one in log_files(shard):
            aside = own / f"aside-{time.strftime('%Y%m%d-%H%M%S')}" / shard.name
            aside.mkdir(parents=True, exist_ok=True)
            one.path.rename(aside / one.path.name)
    return chosen.number


def _set_aside(root: Path, after: int) -> None:
    aside = root / f"aside-{time.strftime('%Y%m%d-%H%M%S')}"
    for one in root.glob("version-*"):
        if int(one.name.removeprefix("version-")) > after:
            aside.mkdir(exist_ok=True)
            one.rename(aside / one.name)


def _copied(root: Path, own: Path, upto: int) -> None:
    import shutil

    for one in root.glob("version-*"):
        if int(one.name.removeprefix("version-")) <= upto:
            shutil.copytree(one, own / one.name)
