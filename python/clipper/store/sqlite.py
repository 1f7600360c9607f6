"""The store of one host: a SQLite file that processes share and that survives kill -9 and power
cuts.

It uses WAL with synchronous=FULL: a write is on disk when it returns, and readers never wait for
writers. One fsync per change of the catalog is affordable; a transaction whose writes are all not
`lasting` (the mesh's placements) waits for none, and a later one syncs it as well. `durable=False`
trades the last changes before a power cut for speed (kill -9 still loses nothing). There are two
connections, one for the writers of this process and one for its readers, each under a lock. A
watch is a cursor over the event table. Writers in this process hand it the events of its prefix,
so that a watch of other keys sleeps on; changes of other processes are detected by polling
SQLite's `data_version` (a few microseconds) twenty times a second.

A lease is a row with its end by the monotonic clock, which all processes of a host share until the
next boot; then all of them, and their leases, are gone. Each read or watch after the end deletes
its keys.

SQLite's own locking is unfair: writers of several processes poll a locked file, up to 100 ms apart,
so that the last writer usually wins again and others wait for a second. These writers queue at a
lock on a second file (`-turn`) instead: one process waits for SQLite's lock, the others for their
turn.
"""

import fcntl
import itertools
import os
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from clipper.errors import ForkedProcess, StoreError
from clipper.store.store import (
    EVENTS_MAX,
    Compare,
    Delete,
    Event,
    Get,
    Op,
    Put,
    Record,
    Store,
    TxnResult,
    Watch,
    check_key,
    check_txn,
    closed_error,
    lost_error,
)

_APPLICATION_ID = 0x434C5053  # "CLPS"
_FORMAT = 2  # 2: leases
_QUICK_CHECK_BYTES_MAX = 64 << 20  # larger files are not checked at the start
_POLL_S = 0.05
_RECENT_MAX, _RECENT_BYTES_MAX = 256, 4 << 20  # events that all watches of a process share
# pauses while polling for SQLite's lock, and for the turn
_RETRY_S, _TURN_S = (
    0.0001,
    0.0005,
)
_SCHEMA = """
create table if not exists kv (
    key blob primary key, value blob not null, crc integer not null,
    revision integer not null, created integer not null, version integer not null) without rowid;
create table if not exists event (
    id integer primary key autoincrement, revision integer not null, key blob not null,
    value blob, created integer not null, version integer not null);
create index if not exists event_revision on event (revision);
create table if not exists meta (name text primary key, value integer not null) without rowid;
insert or ignore into meta values ('revision', 0), ('forgotten', 0), ('boot', 0);
create table if not exists lease (
    id text primary key, ttl_s real not null, until_s real not null) without rowid;
create index if not exists lease_until on lease (until_s);
"""
_SINCE_2 = """
alter table kv add column lease text not null default '';
alter table event add column lease text not null default '';
create index kv_lease on kv (lease) where lease != '';
"""
_SELECT = "select key, value, crc, revision, created, version, lease from kv"


class SqliteStore(Store):
    """A store in a SQLite file. Threads: any. Processes: any on this host, not across a fork.

    path: the file; its folder is created.  bytes_max: bound of the file, 0 for none.
    busy_s: how long a write waits for other processes' writes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durable: bool = True,
        events_max: int = EVENTS_MAX,
        bytes_max: int = 0,
        busy_s: float = 10.0,
    ) -> None:
        self.path = Path(path)
        self.name = f"sqlite:{self.path}"
        self._events_max = events_max
        self._busy_s = busy_s
        self._pid = os.getpid()
        self._closed = False
        self._turnstile = -1
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._watches: tuple[_SqliteWatch, ...] = ()  # those that are open
        self._watches_lock = threading.Lock()
        self._recent_lock = threading.Lock()
        self._recent = _RecentEvents(count_max=min(_RECENT_MAX, events_max))
        with self._typed("open"):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._keep_private()
            self._writer = self._connect(busy_s)
            with suppress(OSError):
                self._turnstile = os.open(
                    f"{self.path}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
            try:
                self._prepare(durable, bytes_max)
                self._reader = self._connect(busy_s)
            except BaseException:
                self._writer.close()
                self._leave_turnstile()
                raise

    def _keep_private(self) -> None:
        """Restrict the file to its owner; SQLite gives the files beside it the same permissions."""
        with suppress(OSError):  # SQLite reports a bad path
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if self.path.stat().st_mode & 0o077:
                self.path.chmod(0o600)

    def _leave_turnstile(self) -> None:
        if self._turnstile >= 0:
            os.close(self._turnstile)
            self._turnstile = -1

    def _connect(self, busy_s: float) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=busy_s, isolation_level=None, check_same_thread=False
        )
        connection.execute("pragma trusted_schema = off")
        return connection

    def _prepare(self, durable: bool, bytes_max: int) -> None:
        run = self._writer.execute
        run("begin")
        owner = run("pragma application_id").fetchone()[0]
        format_ = run("pragma user_version").fetchone()[0]
        tables = run("select count(*) from sqlite_master").fetchone()[0]
        run("rollback")
        if owner != _APPLICATION_ID and (owner or tables):
            raise StoreError(
                f"{self.path} is the SQLite file of another program.", hint="Name another file."
            )
        if format_ > _FORMAT:
            raise StoreError(
                f"{self.path} has format {format_}, this version of clipper reads up to {_FORMAT}.",
                hint="Upgrade clipper, or name another file.",
            )
        if self.path.stat().st_size <= _QUICK_CHECK_BYTES_MAX:
            report = run("pragma quick_check(1)").fetchone()[0]
            if report != "ok":
                raise self._corrupt(str(report).splitlines()[-1])
        # while another process switches a new file, SQLite reports it as locked without waiting
        self._execute_when_free("pragma journal_mode = wal", time.monotonic() + self._busy_s)
        self._syncs = self._durable = durable
        run(f"pragma synchronous = {'full' if durable else 'normal'}")
        page_bytes = run("pragma page_size").fetchone()[0]
        run(
            "pragma max_page_count ="
            f" {max(16, bytes_max // page_bytes) if bytes_max else 0xFFFFFFFE}"
        )
        with self._transaction():
            upgrade = run("pragma user_version").fetchone()[0] < _FORMAT
            for statement in (_SCHEMA + _SINCE_2 if upgrade else _SCHEMA).split(";"):
                run(statement)
            run(f"pragma application_id = {_APPLICATION_ID}")
            run(f"pragma user_version = {_FORMAT}")
            self._end_leases_of_another_boot()
        run("pragma busy_timeout = 1")  # from here on `_transaction` waits

    def _execute_when_free(self, statement: str, give_up_s: float) -> None:
        """Run a statement, and again while the file is locked, until a time of the clock."""
        while True:
            try:
                self._writer.execute(statement)
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > give_up_s:
                    raise
            time.sleep(_RETRY_S)

    # -- reading

    def get(self, key: str) -> Record | None:
        """Return the record; None if the key does not exist."""
        raw = check_key(key)
        self._expire()
        with self._reading() as run:
            return self._fetch(run, raw)

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix and the revision of the snapshot."""
        where, args = _starts_with(prefix)
        self._expire()
        with self._reading() as run:
            run.execute("begin")
            try:
                rows = run.execute(f"{_SELECT} where {where} order by key", args).fetchall()
                revision = _meta(run, "revision")
            finally:
                run.execute("rollback")
        return [self._record(row) for row in rows], revision

    @property
    def revision(self) -> int:
        """Return the revision of the newest change."""
        self._expire()
        with self._reading() as run:
            return _meta(run, "revision")

    def _fetch(self, run: sqlite3.Connection, raw: bytes) -> Record | None:
        row = run.execute(f"{_SELECT} where key = ?", (raw,)).fetchone()
        return self._record(row) if row else None

    def _record(self, row: tuple[bytes, bytes, int, int, int, int, str]) -> Record:
        raw, value, crc, revision, created, version, lease = row
        if crc32(value, crc32(raw)) != crc:
            raise self._corrupt(f"the record {raw!r} fails its checksum")
        return Record(raw.decode(), value, revision, created, version, lease)

    # -- writing

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Run a transaction; see `Store.txn`."""
        check_txn(compares, then, orelse)
        self._check_process()
        lasting = not all(
            isinstance(op, Get) or (isinstance(op, Put) and not op.lasting)
            for op in (*then, *orelse)
        )
        with self._write_lock:
            with self._typed("write"), self._transaction(lasting):
                run = self._writer
                self._end_leases("until_s <= ?", time.monotonic())
                known = {
                    key: self._fetch(run, key.encode()) for key in {part.key for part in compares}
                }
                ok = all(compare.holds(known[compare.key]) for compare in compares)
                ops = then if ok else orelse
                self._check_leases({op.lease for op in ops if isinstance(op, Put) and op.lease})
                before = {
                    op.key: known[op.key] if op.key in known else self._fetch(run, op.key.encode())
                    for op in ops
                }
                changes = [
                    op
                    for op in ops
                    if isinstance(op, Put) or (isinstance(op, Delete) and before[op.key])
                ]
                revision = self._next_revision(len(changes)) if changes else _meta(run, "revision")
                written = {op.key: self._write(op, before[op.key], revision) for op in changes}
                results = tuple(
                    written[op.key] if isinstance(op, Put) else before[op.key] for op in ops
                )
            if changes:
                self._notify(revision, written)
        return TxnResult(ok, results, revision)

    def _notify(self, revision: int, written: Mapping[str, Record | None]) -> None:
        """Hand the changes of a transaction of this process to the watches of their keys.

        If other processes have written meanwhile, the watches read what they have missed.
        """
        events = [
            Event("DELETE" if record is None else "PUT", revision, key, record)
            for key, record in written.items()
        ]
        with self._recent_lock:
            recent = self._recent
            is_next = recent.version >= 0 and recent.revision == revision - 1
            if is_next:
                with self._reading() as run:
                    version = int(run.execute("pragma data_version").fetchone()[0])
                    newest, end_s = run.execute(
                        "select value, (select min(until_s) from lease) from meta"
                        " where name = 'revision'"
                    ).fetchone()
                if newest != revision:  # another process was next: its events are read later
                    version, end_s = recent.version, recent.next_end_s
                self._recent = recent.followed(
                    version, float("inf") if end_s is None else end_s, events, revision, False
                )
        for watch in self._watches:
            if not is_next or any(key.startswith(watch.prefix) for key in written):
                watch.woken.set()

    def _wake_all(self) -> None:
        for watch in self._watches:
            watch.woken.set()

    def _next_revision(self, changes: int) -> int:
        """Return the revision of a transaction with this number of changes."""
        self._make_room(changes)
        query = "update meta set value = value + 1 where name = 'revision' returning value"
        return int(self._writer.execute(query).fetchone()[0])

    def _write(self, op: Op, old: Record | None, revision: int) -> Record | None:
        raw = op.key.encode()
        insert_event = (
            "insert into event (revision, key, value, created, version, lease) values (?, ?, ?, ?,"
            " ?, ?)"
        )
        if not isinstance(op, Put):
            self._writer.execute("delete from kv where key = ?", (raw,))
            self._writer.execute(insert_event, (revision, raw, None, 0, 0, ""))
            return None
        created, version = (old.created_revision, old.version + 1) if old else (revision, 1)
        crc = crc32(op.value, crc32(raw))
        self._writer.execute(
            "insert or replace into kv (key, value, crc, revision, created, version, lease) values"
            " (?, ?, ?, ?, ?, ?, ?)",
            (raw, op.value, crc, revision, created, version, op.lease),
        )
        self._writer.execute(insert_event, (revision, raw, op.value, created, version, op.lease))
        return Record(op.key, op.value, revision, created, version, op.lease)

    def _make_room(self, count: int) -> None:
        """Delete the oldest changes, whole revisions at a time, before new ones are added."""
        run = self._writer
        newest = run.execute("select coalesce(max(id), 0) from event").fetchone()[0]
        if newest + count <= self._events_max:
            return
        last = run.execute(
            "select revision from event where id <= ? order by id desc limit 1",
            (newest + count - self._events_max,),
        ).fetchone()
        if last is not None:
            run.execute("delete from event where revision <= ?", last)
            run.execute("update meta set value = ? where name = 'forgotten'", last)

    # -- leases

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """Grant a lease; return its id and its time to live in seconds."""
        id = secrets.token_hex(8)
        with self._writing() as run:
            run.execute("insert into lease values (?, ?, ?)", (id, ttl_s, time.monotonic() + ttl_s))
        return id, ttl_s

    def renew(self, lease: str) -> float:
        """Renew a lease; return its time to live in seconds."""
        with self._writing() as run:
            self._end_leases("until_s <= ?", time.monotonic())
            query = "update lease set until_s = ttl_s + ? where id = ? returning ttl_s"
            found = run.execute(query, (time.monotonic(), lease)).fetchone()
        if found is None:
            raise lost_error(self.name, lease)
        return float(found[0])

    def revoke(self, lease: str) -> None:
        """End a lease and delete its keys."""
        with self._writing():
            self._end_leases("id = ?", lease)

    def _check_leases(self, leases: set[str]) -> None:
        for lease in leases:
            if (
                self._writer.execute("select 1 from lease where id = ?", (lease,)).fetchone()
                is None
            ):
                raise lost_error(self.name, lease)

    def _end_leases(self, where: str, arg: float | str) -> None:
        """End leases in a transaction; the keys of each are deleted in one revision."""
        for (lease,) in self._writer.execute(
            f"select id from lease where {where} order by until_s", (arg,)
        ).fetchall():
            self._writer.execute("delete from lease where id = ?", (lease,))
            keys = self._writer.execute(
                "select key from kv where lease = ? order by key", (lease,)
            ).fetchall()
            revision = self._next_revision(len(keys)) if keys else 0
            for (raw,) in keys:
                self._write(Delete(raw.decode()), None, revision)

    def _end_leases_of_another_boot(self) -> None:
        boot = crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
        if _meta(self._writer, "boot") != boot:
            self._end_leases("id != ?", "")
            self._writer.execute("update meta set value = ? where name = 'boot'", (boot,))

    def _expire(self) -> None:
        """End expired leases, so that the next read does not see their keys."""
        now_s = time.monotonic()
        with self._reading() as run:
            due = run.execute("select 1 from lease where until_s <= ? limit 1", (now_s,)).fetchone()
        if due:
            with self._writing():
                self._end_leases("until_s <= ?", now_s)

    def _next_end_s(self) -> float:
        """Return the time at which the next lease ends."""
        with self._reading() as run:
            found = run.execute("select min(until_s) from lease").fetchone()[0]
        return float("inf") if found is None else float(found)

    # -- watching

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Watch the keys under a prefix."""
        watch = _SqliteWatch(
            self, prefix, self.revision if from_revision is None else from_revision
        )
        with self._watches_lock:
            self._watches = (*self._watches, watch)
        return watch

    def _forget(self, watch: "_SqliteWatch") -> None:
        with self._watches_lock:
            self._watches = tuple(one for one in self._watches if one is not watch)

    def _events_after(self, cursor: int, prefix: str) -> tuple[list[Event], int, bool]:
        """Return (events, last revision, True if some are lost) as one snapshot."""
        where, args = _starts_with(prefix)
        with self._reading() as run:
            run.execute("begin")
            try:
                revision = _meta(run, "revision")
                if not _meta(run, "forgotten") <= cursor <= revision:
                    return [], revision, True
                query = (
                    "select revision, key, value, created, version, lease from event where"
                    f" revision > ? and {where}"
                )
                rows = run.execute(f"{query} order by id", (cursor, *args)).fetchall()
            finally:
                run.execute("rollback")
        return [_event(*row) for row in rows], revision, False

    def _latest(self) -> "_RecentEvents":
        """Return the last events of all keys, read once for all watches of this process."""
        with self._recent_lock:
            recent = self._recent
            with self._reading() as run:
                version = int(run.execute("pragma data_version").fetchone()[0])
                newest = _meta(run, "revision")  # `self.revision` might wait for a writer
            if version != recent.version:
                end_s = self._next_end_s()
                after = newest if recent.version < 0 else recent.revision
                events, revision, lost = self._events_after(after, "")
                lost = lost or recent.version < 0
                self._recent = recent = recent.followed(version, end_s, events, revision, lost)
            return recent

    # -- the file

    def close(self) -> None:
        """End the watches and close the connection or file."""
        if os.getpid() != self._pid:
            return
        with self._write_lock, self._read_lock:
            if not self._closed:
                self._closed = True
                self._writer.close()
                self._reader.close()
                self._leave_turnstile()
        self._wake_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"store {self.name} was opened before fork().", hint="Open it again in the child."
            )

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self._check_process()
        with self._read_lock, self._typed("read"):
            if self._closed:
                raise closed_error(self.name)
            yield self._reader

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._check_process()
        with self._write_lock, self._typed("write"), self._transaction():
            yield self._writer
        self._wake_all()

    def _start_transaction(self) -> None:
        give_up_s = time.monotonic() + self._busy_s
        with self._turn(give_up_s):
            self._execute_when_free("begin immediate", give_up_s)

    @contextmanager
    def _turn(self, give_up_s: float) -> Iterator[None]:
        """Wait for this process's turn at SQLite's lock; pass if files cannot be locked, or on
        timeout.
        """
        while self._turnstile >= 0:
            with suppress(BlockingIOError):
                fcntl.flock(self._turnstile, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > give_up_s:
                break
            time.sleep(_TURN_S)
        try:
            yield
        finally:
            if self._turnstile >= 0:
                fcntl.flock(self._turnstile, fcntl.LOCK_UN)

    @contextmanager
    def _transaction(self, lasting: bool = True) -> Iterator[None]:
        """Run a transaction. lasting: it is on disk at the end, if the store is durable."""
        self._check_process()
        if self._closed:
            raise closed_error(self.name)
        if self._durable and lasting != self._syncs:
            self._writer.execute(f"pragma synchronous = {'full' if lasting else 'normal'}")
            self._syncs = lasting
        self._start_transaction()
        try:
            yield
            self._writer.execute("commit")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has rolled back by itself
                self._writer.execute("rollback")
            raise

    @contextmanager
    def _typed(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(verb, error) from error
        except OSError as error:
            raise StoreError(
                f"cannot {verb} {self.path}: {error.strerror or error}.",
                hint="Check the folder, or name another one.",
            ) from error

    def _explain(self, verb: str, error: sqlite3.Error) -> StoreError:
        code = (getattr(error, "sqlite_errorname", None) or "").removeprefix("SQLITE_")
        if code.startswith(("CORRUPT", "NOTADB")):
            return self._corrupt(str(error))
        folder = self.path.parent
        why, hint = {
            "FULL": (
                "the disk, or the file's bound, is full",
                "Make room; reads go on, and so do writes then.",
            ),
            "READONLY": ("it may not be written", f"Check who owns {folder} and its files."),
            "CANTOPEN": (
                "it cannot be opened",
                f"Check that {folder} is a folder you may write to.",
            ),
            "BUSY": (
                "another process has held it locked too long",
                "See who has it open: fuser " + str(self.path),
            ),
            "IOERR": ("the disk reported an error", "Check the disk (dmesg), then start again."),
        }.get(code.split("_")[0], ("SQLite refused", "Check the file, or name another one."))
        return StoreError(f"cannot {verb} {self.path}: {why} ({error}).", hint=hint)

    def _corrupt(self, why: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged or no store: {why}.",
            hint=(
                f"Restore it from a copy, or move it aside to start empty: mv {self.path}"
                f" {self.path}.bad"
            ),
        )


@dataclass(frozen=True, slots=True)
class _RecentEvents:
    """The last events of a file, as of SQLite's data_version.

    count_max: the greatest number of them. start: all events after this revision, up to `revision`,
    are here. next_end_s: when the next lease ended, as of that version.
    """

    count_max: int
    version: int = -1
    revision: int = 0
    start: int = 0
    next_end_s: float = 0.0
    events: tuple[Event, ...] = ()
    size_bytes: int = 0  # of their values

    def followed(
        self, version: int, next_end_s: float, events: list[Event], revision: int, lost: bool
    ) -> "_RecentEvents":
        """Return these events and those that came after them. lost: some between are unknown."""
        if lost:
            return _RecentEvents(self.count_max, version, revision, revision, next_end_s)
        stored, start = (*self.events, *events), self.start
        size = self.size_bytes + _values_bytes(events)
        if size > _RECENT_BYTES_MAX:
            start, stored, size = revision, (), 0
        elif len(stored) > self.count_max:
            dropped = len(stored) - self.count_max // 2
            start, stored = stored[dropped - 1].revision, stored[dropped:]
            size = _values_bytes(stored)
        return _RecentEvents(self.count_max, version, revision, start, next_end_s, stored, size)

    def after(self, cursor: int, prefix: str) -> list[Event] | None:
        """Return the events of a prefix after a revision; None if they are not all here."""
        if not self.start <= cursor <= self.revision:
            return None
        later = itertools.takewhile(lambda event: event.revision > cursor, reversed(self.events))
        return [event for event in later if event.key.startswith(prefix)][::-1]


def _values_bytes(events: Sequence[Event]) -> int:
    return sum(len(event.record.value) for event in events if event.record is not None)


class _SqliteWatch:
    """A cursor over the event table; a slow reader costs the store nothing.

    woken: set by the writers of this process when a key under the prefix has changed.
    """

    def __init__(self, store: SqliteStore, prefix: str, cursor: int) -> None:
        self._store = store
        self.prefix, self.woken = prefix, threading.Event()
        self._cursor = cursor
        self._seen = -1  # SQLite's data_version at the last poll
        self.contact_s = time.monotonic()
        self._lease_end_s = 0.0  # end of the next lease, as of that poll
        self._synced = False
        self._ready: deque[Event] = deque()
        self._closed = False

    def next(self, timeout_s: float | None = None) -> Event | None:
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        woken = self.woken.is_set()
        while not self.closed:
            if not self._ready:
                self.woken.clear()  # before the look: what is written after it wakes again
                self._collect(woken and self._synced)
            if self._ready:
                return self._ready.popleft()
            left = _POLL_S if give_up is None else min(give_up - time.monotonic(), _POLL_S)
            if left <= 0:
                return None
            woken = self.woken.wait(left)
        return None

    def _collect(self, notified: bool) -> None:
        """Collect the events after the cursor.

        notified: a writer of this process has just handed over the events; the file is not read if
        they follow the cursor.
        """
        try:
            if notified and self._lease_end_s > time.monotonic():
                recent = self._store._recent
                events = recent.after(self._cursor, self.prefix)
                if events is not None and recent.revision > self._cursor:
                    self.contact_s = time.monotonic()
                    self._ready.extend(events)
                    self._cursor = recent.revision
                    return
            if self._lease_end_s <= time.monotonic():
                self._store._expire()
                self._lease_end_s = self._store._next_end_s()
            recent = self._store._latest()
            self.contact_s = time.monotonic()
            if recent.version == self._seen and recent.revision == self._cursor:
                return
            self._lease_end_s = recent.next_end_s
            events = recent.after(self._cursor, self.prefix)
            revision, lost = recent.revision, False
            if events is None:
                events, revision, lost = self._store._events_after(self._cursor, self.prefix)
        except StoreError:
            if self.closed:  # closed by another thread meanwhile
                return
            raise
        self._ready.extend([Event("RESET", revision)] if lost else events)
        self._cursor, self._seen = revision, recent.version
        if not self._synced:
            self._synced = True
            self._ready.append(Event("SYNC", revision))

    @property
    def closed(self) -> bool:
        return self._closed or self._store._closed

    def close(self) -> None:
        self._closed = True
        self._store._forget(self)
        self.woken.set()


def _starts_with(prefix: str) -> tuple[str, tuple[bytes, ...]]:
    """Return the condition on `key` and its arguments.

    UTF-8 has no byte 0xff, so the last byte of a prefix can always be incremented.
    """
    raw = prefix.encode()
    if not raw:
        return "true", ()
    return "key >= ? and key < ?", (raw, raw[:-1] + bytes([raw[-1] + 1]))


def _meta(run: sqlite3.Connection, name: str) -> int:
    return int(run.execute("select value from meta where name = ?", (name,)).fetchone()[0])


def _event(
    revision: int, raw: bytes, value: bytes | None, created: int, version: int, lease: str
) -> Event:
    key = raw.decode()
    if value is None:
        return Event("DELETE", revision, key)
    return Event("PUT", revision, key, Record(key, value, revision, created, version, lease))
