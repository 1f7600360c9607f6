"""Resharding of a set while it serves: a second set is started beside it, gets its rows, and takes
its place.

The new set is in the folder `set-N` of the set's folder. Its shards are ordinary ones, with their
own replicas, logs and snapshots, that refuse workers. set_move explains what the shards do; this
module tells them when. Everything up to the decision can be given up and begun again: a shard that
is killed, or this process, only ends the attempt. After the decision, the next start of the set can
complete the rest.

A request is the file reshard.json in the set's folder; reshard-state.json says how far it is.
"""

import contextlib
import json
import logging
import os
import select
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from clipper.component import Stop
from clipper.errors import ClipperError, ConfigError, DoesNotFit, ShardAway
from clipper.params.local.address_file import (
    AddressFile,
    ShardAddresses,
    addresses_locked,
    former_of,
    read_address_file,
    write_address_file,
)
from clipper.params.shard.durability.recovery import EpochFile, write_atomically
from clipper.params.shard.parameters import Piece
from clipper.params.shard.resharding.decision import (
    MOVE_FILE,
    Decision,
    decide,
    decision_in,
    note_move,
    prepare_decision,
)
from clipper.params.shard.server import folder_of
from clipper.settings.params import ParamsSettings
from clipper_container.params.connection import ShardConnection, call, call_once

log = logging.getLogger("clipper.params")
REQUEST, STATE = "reshard.json", "reshard-state.json"
ATTEMPTS_MAX = 20
SEALS_MAX = 10  # of one attempt
POLL_S = 0.05
SEALED_POLL_S = 0.001
START_S = 120.0  # for the new set to be ready
AGAIN_S = 0.5
AGAIN_S_MAX = 30.0  # after unexpected errors
ANSWER_S = 30.0
SNAPSHOT_S = 3600.0
FULL = 0.9  # of rows_max
PORT_MAX = 65535


class ReshardState(msgspec.Struct, frozen=True):
    """Progress of a request. phase: start, copy, follow, switch, done, failed. done: share of the
    rows, 0 to 1. left_s: estimated; -1: unknown. pause_s: that pushes waited at the switch."""

    shards: int
    phase: str
    done: float = 0.0
    left_s: float = -1.0
    attempt: int = 1
    pause_s: float = 0.0
    error: str = ""


class SetHost(Protocol):
    """The supervisor of a set's processes."""

    folder: Path
    home: Path
    settings: ParamsSettings
    token: str

    @property
    def addresses(self) -> list[str]:
        """The addresses of the shards that serve."""

    def addresses_of(self, home: Path, settings: ParamsSettings) -> list[str]:
        """Return the addresses of a set in a folder."""

    def start_set(self, home: Path, shards: int) -> None:
        """Start the shards of another set, and restart them when they end."""

    def end_set(self, home: Path) -> None:
        """End the shards of a set, and wait for that."""

    def retire_set(self, home: Path) -> None:
        """Start no shard of a set again."""

    def serve(self, home: Path, settings: ParamsSettings, addresses: list[str]) -> None:
        """Have another set as the one that serves."""

    def ends(self, wait_s: float) -> bool:
        """Wait, and tell whether the host ends."""


class _Ended(Exception):
    """The host ends: the request is continued at the next start."""


class _Set(NamedTuple):
    """Connections to the shards of one set."""

    connections: list[ShardConnection]

    def call_all(self, name: str, **fields: object) -> list[Piece]:
        """Call each shard, one after the other. Raises ShardAway, ClipperError."""
        try:
            return [call_once(one, name, **fields)[1] for one in self.connections]
        except OSError as error:
            raise ShardAway(f"{name}: {error}.") from None

    def close(self) -> None:
        """Close all connections."""
        for one in self.connections:
            one.close()


def progress(state: ReshardState) -> str:
    """Return the state in words."""
    left = f", {state.left_s:.0f} s left" if state.left_s > 0 else ""
    return f"to {state.shards} shards: {state.phase}, {state.done:.0%}{left}"


def request_in(folder: Path) -> int:
    """Return the number of shards that is requested; 0: none."""
    try:
        return int(json.loads((folder / REQUEST).read_bytes())["shards"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def state_in(folder: Path) -> ReshardState | None:
    """Return the state of the last request; None if there was none."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=ReshardState)
    except (OSError, msgspec.MsgspecError):
        return None


def request(folder: Path, shards: int, *, dry_run: bool = False) -> None:
    """Request a number of shards of a running set. The same request again changes nothing. dry_run:
    only check whether it can be requested.

    Raises DoesNotFit: another one is under way, or the set cannot be resharded while it runs.
    """
    under_way = request_in(folder)
    if under_way == shards:
        return
    if under_way:
        raise DoesNotFit(
            f"the set in {folder} is being resharded to {under_way} shards.",
            hint=f"Wait: clipper params reshard --shards {under_way} --folder {folder}",
        )
    for path in (folder / "snapshots", *folder.glob("shard-*")):
        if path.is_mount():
            raise DoesNotFit(
                f"{path} is a mounted disk, and the folders of the new set take its place.",
                hint="clipper params down, reshard, and up.",
            )
    content = read_address_file(folder)
    check(msgspec.convert(content.get("settings", {}), ParamsSettings))
    if dry_run:
        return
    (folder / STATE).unlink(missing_ok=True)
    write_atomically(folder / REQUEST, json.dumps({"shards": shards}).encode())


def check(settings: ParamsSettings) -> None:
    """Raise DoesNotFit if a set with these settings cannot be resharded while it runs."""
    if settings.grpc:
        raise DoesNotFit(
            f"a set with params.grpc = {settings.grpc!r} cannot be resharded while it serves:"
            " clients of its gRPC service know the number of shards.",
            hint="clipper params down, reshard, and up.",
        )


class LiveReshard:
    """Does what is requested in a set's folder. Threads: one."""

    def __init__(self, host: SetHost) -> None:
        self._host = host
        self._state = ReshardState(0, "")
        self._last = 0  # number of the last attempt's set
        self._replicas = host.settings.replicas  # also after a set with too few shards for them

    def run(self, stop: Stop) -> None:
        """Look for requests until it is stopped."""
        while not stop.wait(AGAIN_S):
            self.reshard_if_requested()

    def reshard_if_requested(self) -> None:
        """Do what is requested now, if anything is."""
        with contextlib.suppress(_Ended):
            if shards := request_in(self._host.folder):
                self._reshard(shards)

    def _reshard(self, shards: int) -> None:
        host = self._host
        for attempt in range(1, ATTEMPTS_MAX + 1):
            self._state = ReshardState(shards, "start", attempt=attempt)
            try:
                check(host.settings)
                self._attempt(shards)
                break
            except (DoesNotFit, ConfigError) as error:
                self._failed(str(error))
                break
            except _Ended:
                raise
            except Exception as error:
                if not isinstance(error, ClipperError | OSError):
                    log.exception("an unexpected error")
                log.warning("the set is not resharded, attempt %d: %s", attempt, error)
                self._write_state(error=str(error))
                if attempt == ATTEMPTS_MAX:
                    self._failed(str(error))
                    break
                self._wait(AGAIN_S)

    def _failed(self, why: str) -> None:
        log.error("the set is not resharded: %s", why)
        self._write_state(phase="failed", error=why)
        (self._host.folder / REQUEST).unlink(missing_ok=True)

    def _write_state(self, **fields: object) -> None:
        self._state = msgspec.structs.replace(self._state, **fields)
        with contextlib.suppress(OSError):  # no room
            write_atomically(self._host.folder / STATE, msgspec.json.encode(self._state))

    def _wait(self, seconds: float) -> None:
        if self._host.ends(seconds):
            raise _Ended

    # -- an attempt

    def _attempt(self, shards: int) -> None:
        """Move the set. Raises DoesNotFit, ClipperError, OSError; nothing has changed then."""
        host, old, olds = self._host, self._host.home, tuple(self._host.addresses)
        home, settings, addresses = self._plan(shards)
        sources = self._connections(olds.__getitem__, len(olds))
        targets = self._connections(AddressFile(home).address, shards)
        try:
            self._until(lambda: self._serve(sources), START_S)
            self._check_room(sources, shards)
            self._write_set(home, settings, addresses)
            note_move(old, home)
            host.start_set(home, shards)
            self._write_state(phase="start")
            self._until(lambda: self._serve(targets), START_S)
            sources.call_all("move_begin", to=str(home), pause_s=settings.reshard_pause_s)
            self._copy(sources)
            self._keep_as_before(sources, targets, home)
            paused_s = self._switch(sources, home, settings.reshard_pause_s)
        except BaseException:
            if _aborted(home) != "commit":
                self._give_up(sources, home)
                raise
            paused_s = 0.0
        finally:
            sources.close()
            targets.close()
        self._complete(home, settings, addresses, (old, olds), paused_s)

    def _plan(self, shards: int) -> tuple[Path, ParamsSettings, list[str]]:
        """Return folder, settings and addresses of the new set. Raises ConfigError, DoesNotFit."""
        host = self._host
        before = int(read_address_file(host.folder).get("generation", 0))
        self._last = max([self._last, before, *map(number_of, sets_of(host.folder))]) + 1
        home = host.folder / f"set-{self._last}"
        replicas = min(self._replicas, shards - 1)
        settings = msgspec.structs.replace(host.settings, shards=shards, replicas=replicas)
        if settings.address != "unix":
            known = read_address_file(host.folder)
            now, former = (
                {int(one.partition("?")[0].rpartition(":")[2]) for one in each}
                for each in (host.addresses, known.get("former", ()))
            )
            name = settings.address.rpartition(":")[0]
            ports = range(1 + max(now), PORT_MAX - shards + 2)
            first = next((p for p in ports if former.isdisjoint(range(p, p + shards))), 0)
            if not first:
                raise DoesNotFit(
                    f"no {shards} ports above {max(now)} are left for the shards.",
                    hint="Stop the set and start it: its ports begin at params.address again.",
                )
            settings = msgspec.structs.replace(settings, address=f"{name}:{first}")
        return home, settings, host.addresses_of(home, settings)

    def _write_set(self, home: Path, settings: ParamsSettings, addresses: list[str]) -> None:
        """Write the folder of the new set. Its epochs are above those of the old one."""
        host = self._host
        home.mkdir(mode=0o700)
        prepare_decision(home)
        public = msgspec.structs.replace(settings, token="", folder=str(host.folder))
        content: ShardAddresses = {
            "addresses": addresses,
            "token": host.token,
            "pid": os.getpid(),
            "settings": msgspec.to_builtins(public),
            "generation": number_of(home),
            "before": int(read_address_file(host.folder).get("generation", 0)),
            "fills": True,
            "former": former_of(read_address_file(host.folder), addresses),
        }
        if engine := read_address_file(host.folder).get("engine"):
            content["engine"] = engine
        write_address_file(home, content)
        epoch = 1 + max(_epoch_in(folder_of(host.home, i)) for i in range(host.settings.shards))
        for shard in range(settings.shards):
            file = EpochFile(folder_of(home, shard))
            file.write(epoch)
            file.close()

    def _connections(self, address: Callable[[int], str], shards: int) -> _Set:
        token = self._host.token
        return _Set([ShardConnection(i, address, token, None, ANSWER_S) for i in range(shards)])

    def _check_room(self, sources: _Set, shards: int) -> None:
        """Raise DoesNotFit if a table would have more rows in a shard than its `rows_max`."""
        specs = sources.call_all("tables")[0]["tables"]
        stats = sources.call_all("stats")
        for name, spec in specs.items():
            rows = sum(one["tables"].get(name, {}).get("rows", 0) for one in stats)
            if not spec["evicts"] and rows > FULL * spec["rows_max"] * shards:
                raise DoesNotFit(
                    f"table {name!r} has {rows} rows; {shards} shards have room for"
                    f" {spec['rows_max'] * shards}.",
                    hint=f"Raise its rows_max: clipper params alter {name} --rows-max N",
                )

    def _serve(self, targets: _Set) -> bool:
        try:
            return all(one["ready"] for one in targets.call_all("stats"))
        except ClipperError:
            return False

    def _until(self, true: Callable[[], bool], seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not true():
            if time.monotonic() > until_s:
                raise ShardAway("shards do not get ready.")
            self._wait(POLL_S)

    def _states(self, sources: _Set) -> list[Piece]:
        """Return the states of the old shards. Raises ShardAway if one has given up."""
        states = sources.call_all("move_state")
        for number, one in enumerate(states):
            if one["error"]:
                raise ShardAway(f"shard {number} does not move: {one['error']}.")
        return states

    def _copy(self, sources: _Set) -> None:
        """Wait until all rows are copied."""
        began_s, written_s = time.monotonic(), 0.0
        while (states := self._states(sources)) and any(one["phase"] == "copy" for one in states):
            now = time.monotonic()
            if now - written_s > AGAIN_S:
                written_s = now
                sent, total = (sum(one[key] for one in states) for key in ("sent", "total"))
                done = min(1.0, sent / max(1, total))
                left_s = (now - began_s) * (1 - done) / done if done else -1.0
                self._write_state(phase="copy", done=done, left_s=left_s)
            self._wait(POLL_S)
        self._write_state(phase="follow", done=1.0, left_s=0.0)

    def _keep_as_before(self, sources: _Set, targets: _Set, home: Path) -> None:
        """Have the new set keep what it has as the old one did: in replicas and in a snapshot."""
        targets.call_all("fill_resync")
        shards = len(targets.connections)
        with contextlib.closing(self._connections(AddressFile(home).address, shards)) as slow:
            for one in slow.connections:
                request = call("snapshot", number=1, whole=True)
                one.send(request)
                self._until(partial(self._answers, sources, one), SNAPSHOT_S)
                one.wait_for_answer(request)
        self._until(
            lambda: all(
                follower["whole"]
                for one in targets.call_all("stats")
                for follower in one["followers"]
            ),
            START_S,
        )

    def _answers(self, sources: _Set, one: ShardConnection) -> bool:
        """Return whether a shard answers; the move goes on meanwhile. Raises ShardAway."""
        self._states(sources)
        poll = select.poll()
        poll.register(one, select.POLLIN)
        return bool(poll.poll(0))

    # -- the switch

    def _switch(self, sources: _Set, home: Path, pause_s: float) -> float:
        """Decide for the new set. Return for how long pushes waited. Raises ShardAway."""
        self._write_state(phase="switch")
        for _ in range(SEALS_MAX):
            began_s = time.monotonic()
            if self._sealed(sources, began_s + pause_s):
                sources.call_all("move_close")
                if decide(home, "commit") != "commit":
                    raise ShardAway("a shard has given the move up.")
                return time.monotonic() - began_s
            sources.call_all("move_seal", sealed=False)
            self._wait(AGAIN_S)
        raise ShardAway(f"the last changes took longer than {pause_s:g} s to send.")

    def _sealed(self, sources: _Set, until_s: float) -> bool:
        """Have the old shards take no pushes, and tell whether they have sent all in time."""
        if self._host.settings.mode == "sync":
            _Set(sources.connections[:1]).call_all("move_seal", sealed=True)
            if not self._come(
                sources, until_s, lambda each: len({one["steps"] for one in each}) < 2
            ):
                return False
        sources.call_all("move_seal", sealed=True)
        return self._come(
            sources, until_s, lambda each: {one["phase"] for one in each} == {"sealed"}
        )

    def _come(self, sources: _Set, until_s: float, there: Callable[[list[Piece]], bool]) -> bool:
        """Wait for a state of the old shards, and tell whether it came in time."""
        while time.monotonic() < until_s:
            if there(self._states(sources)):
                return True
            time.sleep(SEALED_POLL_S)
        return False

    def _complete(
        self,
        home: Path,
        settings: ParamsSettings,
        addresses: list[str],
        before: tuple[Path, Sequence[str]],
        paused_s: float,
    ) -> None:
        """Have the new set serve, and after a while end the old one. before: its folder and its
        addresses."""
        host, (old, olds) = self._host, before
        host.retire_set(old)
        self._until_done(lambda: publish(host.folder, home))
        for address, number, name in (
            (AddressFile(home).address, settings.shards, "fill_open"),
            (olds.__getitem__, len(olds), "move_finish"),
        ):
            each = self._connections(address, number)
            with contextlib.suppress(ClipperError):  # they look at the decision themselves
                each.call_all(name)
            each.close()
        host.serve(home, settings, addresses)
        log.info("the set has %d shards now; pushes waited for %.3f s", settings.shards, paused_s)
        self._write_state(phase="done", done=1.0, left_s=0.0, pause_s=paused_s)
        self._until_done(lambda: (host.folder / REQUEST).unlink(missing_ok=True))
        host.ends(settings.reshard_keep_s)
        try:
            host.end_set(old)
            link(host.folder, home)
        except Exception as error:  # also of Ray: the set has moved, and does not move again
            log.warning(
                "the folders of the new set are not linked before the next start: %s", error
            )

    def _until_done(self, work: Callable[[], None]) -> None:
        """Do a part of what was decided, again until it is done. Raises _Ended."""
        while True:
            try:
                work()
                return
            except (ClipperError, OSError) as error:
                log.warning("the new set serves, and it is not written down: %s", error)
                self._wait(AGAIN_S)

    def _give_up(self, sources: _Set, home: Path) -> None:
        for one in sources.connections:
            with contextlib.suppress(ClipperError, OSError):
                one.close()  # a request may be under way
                call_once(one, "move_finish")
        self._host.retire_set(home)
        self._host.end_set(home)
        shutil.rmtree(home, ignore_errors=True)


def _aborted(home: Path) -> Decision:
    """Decide against a move. Return the decision; empty if there is no room for one: a set whose
    folder is then removed does not serve."""
    try:
        return decide(home, "abort")
    except OSError as error:
        log.warning("%s: %s", home, error)
        return decision_in(home)


# -- folders


def home_in(folder: Path) -> Path:
    """Return the folder that has the shards and snapshots of a set: its own until it is resharded
    while it serves."""
    home = folder / f"set-{read_address_file(folder).get('generation', 0)}"
    return home if home.is_dir() else folder


def sets_of(folder: Path) -> list[Path]:
    """Return the folders of the sets that were made beside the first one."""
    return [path for path in folder.glob("set-*") if path.is_dir() and number_of(path)]


def number_of(home: Path) -> int:
    """Return the generation of the set in a folder, from its name; 0 for another name."""
    number = home.name.removeprefix("set-")
    return int(number) if number.isdecimal() else 0


def _epoch_in(folder: Path) -> int:
    try:
        return int((folder / "epoch").read_text())
    except (OSError, ValueError):
        return 0


def publish(folder: Path, home: Path) -> None:
    """Have clients find the new set. Raises OSError, InvalidInput."""
    with addresses_locked(home), addresses_locked(folder):
        content = read_address_file(home)
        content.pop("fills", None)
        write_address_file(folder, content)


def link(folder: Path, home: Path) -> None:
    """Have the folders of the new set under the names of those of the old one, which has ended.

    The snapshots of the old set are kept as `snapshots-before-N`. Raises OSError.
    """
    shards = len(read_address_file(home)["addresses"])
    there = folder / "snapshots"
    if there.is_dir() and there.resolve() != (home / "snapshots").resolve():
        before = there.resolve()
        if not before.is_relative_to(folder.resolve()):
            before = there  # a link to another disk: the snapshots stay where they are
        os.rename(before, folder / f"snapshots-before-{number_of(home)}")
    names = {path.name for path in folder.glob("shard-*") if path.is_dir() or path.is_symlink()}
    for name in (*names, "snapshots"):
        path = folder / name
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    for name in (*(f"shard-{i}" for i in range(shards)), "snapshots"):
        os.symlink(Path(home.name) / name, folder / name)
    for other in sets_of(folder):
        if other.name != home.name:
            shutil.rmtree(other, ignore_errors=True)
    (folder / MOVE_FILE).unlink(missing_ok=True)


def complete_move(folder: Path) -> None:
    """Complete what was decided, and remove what was not, before the set is started. Raises
    OSError, InvalidInput."""
    homes = sorted(sets_of(folder), key=number_of)
    decided = [one for one in homes if decide(one, "abort") == "commit"]
    if decided:
        home = decided[-1]
        if number_of(home) > int(read_address_file(folder).get("generation", 0)):
            publish(folder, home)
        if (folder / "snapshots").resolve() != (home / "snapshots").resolve():
            shards = len(read_address_file(home)["addresses"])
            if request_in(folder) == shards:  # this set is what was requested
                state = state_in(folder) or ReshardState(shards, "")
                state = msgspec.structs.replace(state, phase="done", done=1.0, left_s=0.0, error="")
                write_atomically(folder / STATE, msgspec.json.encode(state))
                (folder / REQUEST).unlink()
            link(folder, home)
    for one in homes:
        if one not in decided[-1:]:
            shutil.rmtree(one, ignore_errors=True)
    (folder / MOVE_FILE).unlink(missing_ok=True)
