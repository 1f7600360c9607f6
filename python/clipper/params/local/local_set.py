"""A set of shards as processes on this host, restarted under the same addresses when they end.

`clipper params up` runs it in the foreground. Its folder holds shards.json (addresses and token,
for clients and shards), a folder and a log of each shard, and the snapshots of all.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from clipper.child_environment import child_environment
from clipper.component import Backoff, Health, Stop, Worker
from clipper.component import State as ComponentState
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
    content_for,
    former_of,
    running_shards,
    write_address_file,
)
from clipper.params.local.address_file import read_address_file as read_address_file
from clipper.params.local.health_check import HealthCheck
from clipper.params.local.live_reshard import (
    AGAIN_S,
    AGAIN_S_MAX,
    LiveReshard,
    complete_move,
    home_in,
)
from clipper.params.shard.durability.disk_log import check_other_sizes, log_files
from clipper.params.shard.durability.dropped_tables import forget_drops
from clipper.params.shard.durability.snapshots import newest_of, newest_position, parts_in, sets_in
from clipper.params.tables import optimizer_in
from clipper.params.tokens import TokenFile
from clipper.processes import (
    NEVER_HELD,
    ChildState,
    Notice,
    NoticeKind,
    RestartPolicy,
    StartCommand,
    Supervisor,
    Told,
)
from clipper.processes.fork_servers import ForkServers, Program
from clipper.processes.forked import ForkedChild
from clipper.settings.grpc import has_protobuf
from clipper.settings.params import (
    ParamsSettings,
    grpc_address,
    params_tls,
    shard_tls,
    tls_address,
    with_absolute_paths,
)
from clipper.state_dir import is_locked, lock_file
from clipper.tls import Certificate
from clipper_container.forking import Message
from clipper_container.params.connection import ShardConnection, addresses_in, call_once

log = logging.getLogger("clipper.params")
GRACE_S = 30.0  # from SIGTERM to SIGKILL, for a last snapshot
QUICK_MAX = 3  # failures in a row before restarts are delayed
PAUSE_S_MAX = 1.0  # serving waits for the rows of a shard, and its start costs little
RESHARD_END_S = 60.0  # for the thread of a change of their number
POLICY = RestartPolicy(
    backoff_s_min=0.1,
    backoff_s_max=PAUSE_S_MAX,
    healthy_s=1.0,
    at_once=QUICK_MAX - 1,
    exits_max=NEVER_HELD,
    apart_s=0.0,
    grace_s=GRACE_S,
    own_s_max=PAUSE_S_MAX,
)
UNIX_PATH_MAX = 100
MODULE = "clipper.params.local.shard_process"
# by name, since params does not import it
MODULE_WITH_GRPC = "clipper.frontend.params_grpc.server"


def supervisor_of(folder: Path) -> int:
    """Return the process id of the set's supervisor; 0 if none runs."""
    with contextlib.suppress(OSError):
        if is_locked(folder / "lock"):
            return int(read_address_file(folder).get("pid", 0))
    return 0


def snapshot_all(
    addresses: list[str],
    token: str,
    folder: Path,
    *,
    whole: bool = False,
    dry_run: bool = False,
) -> dict[str, object]:
    """Take a snapshot of all shards under one number. dry_run: only ask them for their rows.

    Raises ShardAway, and the error of the first shard that fails.
    """
    number = 1 + max((one.number for one in sets_in(home_in(folder) / "snapshots")), default=0)
    parts = []
    for shard in range(len(addresses)):
        with ShardConnection(shard, addresses.__getitem__, token, None, 600.0) as connection:
            try:
                if dry_run:
                    tables = call_once(connection, "stats")[1]["tables"]
                    rows = sum(int(table["rows"]) for table in tables.values())
                    parts.append({"rows": rows, "nbytes": 0})
                else:
                    parts.append(call_once(connection, "snapshot", number=number, whole=whole)[1])
            except OSError as error:
                raise ShardAway(
                    f"{connection.name}: {error}.", hint="`clipper params ps` lists those that run."
                ) from None
    return {
        "number": number,
        "rows": sum(p["rows"] for p in parts),
        "nbytes": sum(p["nbytes"] for p in parts),
        "parts": parts,
    }


Key = tuple[Path, int]  # folder of a set, number of a shard


class _ShardWork:
    """The task of a shard's process; see `Work`.

    module: has `become`, the entry, and runs as a program. supervisor_fd: pidfd of this process.
    """

    def __init__(self, key: Key, module: str, supervisor_fd: int) -> None:
        self._key = key
        self._module = module
        self._supervisor_fd = supervisor_fd

    def program(self, number: int) -> Program:
        """Return the program of a fork server that becomes the shard."""
        return Program(
            self._module,
            f"{self._module}:become",
            child_environment(),
            preload=(self._module,),
            session=True,
            urgent=number > 1,
        )

    def request(self, number: int) -> Mapping[str, object]:
        """Return the folder and the number of the shard, which a forked process is sent."""
        home, shard = self._key
        return {"folder": str(home), "number": shard}

    def descriptors(self) -> Sequence[int]:
        """Return the supervisor's pidfd, which a forked process is sent."""
        return [self._supervisor_fd]

    def command(self, number: int, control: int) -> StartCommand:
        """Return the command of a shard that is started plainly."""
        home, shard = self._key
        words = [sys.executable, "-X", "faulthandler", "-m", self._module]
        words += [str(home), str(shard), str(os.getpid()), str(control)]
        around = {**child_environment(), "OPENBLAS_NUM_THREADS": "1"}
        return StartCommand(words, around, (control,))

    def reported(self, report: Message, told: Told) -> bool:
        """Take the report of a shard that it serves."""
        if "serves" in report:
            told.serves()
        return False

    def ended(self) -> str:
        """Return nothing: the next start of a shard does nothing differently."""
        return ""


def check_start(settings: ParamsSettings) -> list[str]:
    """Check what can be checked of a set without starting or writing anything, and return the
    addresses of its shards.

    Raises ConfigError, DoesNotFit; AlreadyExists: another supervisor runs it.
    """
    settings = with_absolute_paths(settings)
    folder = Path(settings.folder).absolute()
    _check_files(settings)
    with contextlib.suppress(OSError):
        if is_locked(folder / "lock"):
            raise _taken(folder)
    before = read_address_file(folder)
    _refuse_other_engine(folder, before)
    content_for(settings, folder, before)
    return _addresses_of(folder, settings)


def _taken(folder: Path) -> AlreadyExists:
    hint = "clipper params down, or another folder."
    return AlreadyExists(f"a set of shards runs in {folder}.", hint=hint)


def _refuse_other_engine(folder: Path, before: ShardAddresses) -> None:
    """Refuse a folder whose shards an engine runs. before: what its shards.json has."""
    if before.get("engine") and running_shards(folder):
        hint = f"clipper params down --folder {folder}, or another folder."
        raise AlreadyExists(f"a set of shards runs in {folder}, on {before['engine']}.", hint=hint)


def _check_files(settings: ParamsSettings) -> None:
    """Check gRPC, tokens and certificates before any process starts."""
    if settings.grpc:
        _check_grpc(settings)
    if settings.tokens_file:
        TokenFile("", settings.tokens_file)
    if (files := shard_tls(settings)) is not None:
        Certificate(files, "params.tls")


def _check_grpc(settings: ParamsSettings) -> None:
    """Check the settings of gRPC before any process starts."""
    grpc_address(settings, 0)
    optimizer_in(settings.grpc_optimizer)
    if not has_protobuf():
        raise ConfigError(
            "params.grpc needs the package protobuf.",
            hint='pip install "clipper-serving[grpc]"',
        )
    files = params_tls(settings)
    if files is not None:
        Certificate(files, "params.grpc_tls")
    keys = settings.grpc_keys_file
    if keys and not os.access(keys, os.R_OK):
        hint = "Add a key with: clipper key NAME --file FILE"
        raise ConfigError(f"params.grpc_keys_file = {keys!r} cannot be read.", hint=hint)


def _addresses_of(home: Path, settings: ParamsSettings) -> list[str]:
    return [_address(home, settings, i) for i in range(settings.shards)]


def _address(home: Path, settings: ParamsSettings, shard: int) -> str:
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


class LocalSet:
    """Supervisor of a set: start(), then clients may connect to `folder`; stop(). Threads: any.

    The number of shards in a folder is changed by `reshard`, or, while it runs, by LiveReshard;
    `home` is the folder of the shards that serve. Raises ConfigError, AlreadyExists (another
    supervisor runs it), DoesNotFit.
    """

    def __init__(self, settings: ParamsSettings) -> None:
        self.settings = settings = with_absolute_paths(settings)
        self.folder = self.home = Path(settings.folder).absolute()
        _check_files(settings)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_file(self.folder / "lock", _taken(self.folder))
        try:
            complete_move(self.folder)
            self.addresses, self.token = self._write_addresses()
        except BaseException:
            os.close(self._lock)
            raise
        self._module = MODULE_WITH_GRPC if settings.grpc else MODULE
        self._supervisor = Supervisor("clipper-params")
        self._fork_servers = ForkServers(self._supervisor)
        self._self_fd = -1  # pidfd of this process
        self._keys: dict[str, Key] = {}  # of the supervisor's names
        self._began_s: dict[Key, float] = {}  # of each shard's last process
        self._retired: set[Path] = set()  # sets whose shards are not started again
        self.restarts = 0
        self._health_check = self._new_health_check()
        self._ends = Stop()
        self._reshards = Worker(
            "clipper-params-reshard", LiveReshard(self).run, again=Backoff(AGAIN_S, AGAIN_S_MAX)
        )

    def _write_addresses(self) -> tuple[list[str], str]:
        """Write shards.json. A token that was generated earlier is kept."""
        settings, before = self.settings, read_address_file(self.folder)
        _refuse_other_engine(self.folder, before)
        addresses = self.addresses_of(self.folder, settings)
        grpc = [grpc_address(settings, i) for i in range(settings.shards)] if settings.grpc else []
        content = content_for(settings, self.folder, before) | {
            "addresses": addresses,
            "pid": os.getpid(),
            "grpc": grpc,
            "former": former_of(before, addresses),
        }
        write_address_file(self.folder, content)
        return addresses, content["token"]

    def _new_health_check(self) -> HealthCheck:
        return HealthCheck(self.addresses, self.token, self.settings.hung_s, self._is_hung)

    # -- any thread

    def start(self) -> "LocalSet":
        """Start the supervisor, and the shards. Raises NotStarted; then nothing runs."""
        try:
            self._self_fd = os.pidfd_open(os.getpid())
            self._supervisor.start()
            self.start_set(self.home, self.settings.shards)
            self._health_check.start()
            self._reshards.start()
        except BaseException:
            self._close()
            raise
        return self

    def health(self) -> list[Health]:
        """Return the states of the threads."""
        checks = self._health_check.health()
        return [self._supervisor.health(), self._reshards.health(), *checks]

    def _is_hung(self, number: int) -> None:
        """Have a shard killed and restarted, unless it has just been started."""
        key, patience_s = (self.home, number), self.settings.hung_s
        status = self._supervisor.get(_name_of(key))
        began_s = self._began_s.get(key)
        if status is None or began_s is None or time.monotonic() - began_s < patience_s:
            return
        log.warning("shard %d has not answered for %g s: it is killed", number, patience_s)
        self._supervisor.restart(_name_of(key), status.pid)

    def wait_ready(self, patience_s: float = 60.0) -> None:
        """Wait until every shard serves. Raises ShardAway, also when no shard can be forked;
        StateLost."""
        until = time.monotonic() + patience_s
        for shard in range(len(self.addresses)):
            why = "it does not answer"
            while time.monotonic() < until:
                self._check_start((self.home, shard))
                address = self.addresses.__getitem__
                try:
                    with ShardConnection(shard, address, self.token, None, 5.0) as connection:
                        answer = call_once(connection, "stats")[1]
                except (OSError, ClipperError) as error:
                    why = str(error)
                else:
                    if answer["ready"]:
                        break
                    if answer.get("state_lost"):
                        raise _lost(shard, self.folder)
                    why = "it recovers"
                time.sleep(0.02)
            else:
                raise ShardAway(
                    f"shard {shard} does not come up: {why}.",
                    hint=f"Its log: {self.home / f'shard-{shard}.log'}",
                )

    def _check_start(self, key: Key) -> None:
        """Raise ShardAway if a shard ends again and again as soon as it is started."""
        status = self._supervisor.get(_name_of(key))
        if status is None or status.state is not ChildState.BACKOFF or status.starts <= QUICK_MAX:
            return
        lines, _ = self._supervisor.lines(_name_of(key))
        said = last_line("\n".join(lines)) or last_line(_text(self._log_of(key)))
        raise ShardAway(
            f"shard {key[1]} does not start: {status.detail}: {said}.",
            hint=f"Its log: {self._log_of(key)}",
        )

    def pids(self) -> dict[int, int]:
        """Return the process ids of the shards that run, by number."""
        found = {}
        for name, (home, number) in [*self._keys.items()]:
            status = self._supervisor.get(name) if home == self.home else None
            if status is not None and status.pid:
                found[number] = status.pid
        return found

    def stop(self, *, snapshot: bool = True) -> None:
        """End all shards. snapshot: take a snapshot of all first. Idempotent."""
        self._ends.request()
        self._reshards.end(RESHARD_END_S)
        if snapshot and self._supervisor.health().state is ComponentState.RUNNING:
            try:
                snapshot_all(self.addresses, self.token, self.home)
            except ClipperError as error:
                log.warning("no snapshot of all shards before the end: %s", error)
        self._close()

    def _close(self) -> None:
        self._health_check.stop()
        self._supervisor.end(2 * GRACE_S)
        fds = self._self_fd, self._lock
        self._self_fd = -1
        self._lock = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    # -- for LiveReshard, from its thread

    def addresses_of(self, home: Path, settings: ParamsSettings) -> list[str]:
        """Return the addresses of a set in a folder. Raises ConfigError."""
        return _addresses_of(home, settings)

    def start_set(self, home: Path, shards: int) -> None:
        """Start the shards of another set, and restart them when they end."""
        for number in range(shards):
            key = home, number
            self._keys[_name_of(key)] = key
            work = _ShardWork(key, self._module, self._self_fd)
            self._supervisor.add(_name_of(key), ForkedChild(self._fork_servers, work), POLICY, self)

    def retire_set(self, home: Path) -> None:
        """Start no shard of a set again."""
        self._retired.add(home)

    def end_set(self, home: Path) -> None:
        """End the shards of a retired set, and wait for that."""
        names = [name for name, key in [*self._keys.items()] if key[0] == home]
        while self._supervisor.stop(names):
            log.warning("%s: SIGKILL does not end all shards", home)
        for name in names:
            self._supervisor.forget(name)
            del self._keys[name]

    def serve(self, home: Path, settings: ParamsSettings, addresses: list[str]) -> None:
        """Have another set as the one that serves."""
        self._health_check.stop()
        self.settings, self.addresses, self.home = settings, addresses, home
        self._health_check = self._new_health_check()
        self._health_check.start()

    def ends(self, wait_s: float) -> bool:
        """Wait, and tell whether this set ends."""
        return self._ends.wait(wait_s)

    # -- Listener

    def on_notice(self, name: str, notice: Notice) -> None:
        """Note the start of a shard, and log its end."""
        key = self._keys[name]
        home, number = key
        if notice.kind is NoticeKind.STARTED:
            self._began_s[key] = time.monotonic()
        elif notice.kind is NoticeKind.EXITED and home in self._retired:
            self._supervisor.stop([name])
        elif notice.kind is NoticeKind.EXITED:
            self.restarts += 1
            log.warning("shard %d: %s. Its log: %s", number, notice.detail, self._log_of(key))
        elif notice.kind is NoticeKind.RESTARTING and not notice.pid:
            log.warning("shard %d: %s", number, notice.detail)

    def _log_of(self, key: Key) -> Path:
        return key[0] / f"shard-{key[1]}.log"


def _name_of(key: Key) -> str:
    return f"shard {key[1]} of {key[0]}"


def _text(path: Path) -> str:
    """Return a file's text; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _lost(shard: int, folder: Path) -> StateLost:
    hint = f"Restore a snapshot, or let it begin anew: clipper params begin-anew --folder {folder}"
    return StateLost(
        f"shard {shard} restarted without its state: neither replica nor snapshot was found.",
        hint=hint,
    )


def _must_rest(folder: Path) -> None:
    if supervisor_of(folder) or running_shards(folder):
        raise DoesNotFit(
            f"the set in {folder} runs.", hint=f"clipper params down --folder {folder}"
        )
    complete_move(folder)


def reshard(folder: Path, shards: int, *, dry_run: bool = False) -> int:
    """Change the number of shards of a set that does not run. dry_run: check, and change nothing.

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
    if not dry_run:
        write_address_file(folder, content)
    return max(chain[-1].number for chain in chains)


def restore(folder: Path, source: Path, number: int = 0, *, dry_run: bool = False) -> int:
    """Choose a snapshot of `source` as what the shards of a set that does not run read next.

    number: 0 for the newest complete one. Newer snapshots of the set itself, and its logs on disk,
    are set aside. dry_run: choose it, and change nothing. Returns the number. Raises DoesNotFit,
    InvalidInput.
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
    if dry_run:
        return chosen.number
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
