"""Properties of a store in a file: it outlives its process, is shared, is damaged, and runs out of
room."""

import contextlib
import fcntl
import os
import random
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import clipper.store.store
from clipper.errors import ConfigError, ForkedProcess, StoreError
from clipper.store import Event, MemoryStore, Put, Record, SqliteStore, open_store
from tests.processes import Program
from tests.signals import freeze
from tests.threads import join

SOURCE = str(Path(clipper.store.store.__file__).parents[2])


def spawn(code: str, *args: object) -> Program:
    path = os.pathsep.join((SOURCE, os.environ.get("PYTHONPATH", "")))
    return Program(sys.executable, "-c", code, *args, environment={"PYTHONPATH": path}, apart=True)


def finish(process: Program) -> str:
    assert process.wait() == 0
    return process.output


def content(store: SqliteStore) -> dict[str, bytes]:
    return {record.key: record.value for record in store.range("")[0]}


# -- surviving


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "state.db"
    with SqliteStore(path) as store:
        store.put("a", b"1")
        store.txn((), (Put("a", b"2"), Put("b", b"3")))
        records = store.range("")
    with SqliteStore(path) as store:
        assert store.range("") == records
        assert store.put("c", b"").revision == 3
        assert [e.kind for e in (store.watch("", 0).next(0),) if e] == ["PUT"], "events survive too"


WRITER = """
import sys
from clipper.store import SqliteStore, Put, Compare
store = SqliteStore(sys.argv[1])
record = store.get("n")
n = int(record.value) if record else 0
while True:
    n += 1
    value = b"%d" % n
    values = {"n": value, "twin": value * 500, "last%d" % (n % 7): value}
    store.txn((), [Put(key, value, lasting=n % 3 == 0) for key, value in values.items()])
    print(n, flush=True)
"""


@pytest.mark.slow
def test_kill_9_of_the_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path, rng, acknowledged = tmp_path / "state.db", random.Random(9), 0
    for _ in range(20):
        with spawn(WRITER, path) as writer:
            for _ in range(rng.randrange(1, 30)):
                writer.line()
        acknowledged = max(acknowledged, int(writer.lines[-1]))
        with SqliteStore(path) as store:
            found = content(store)
            assert acknowledged <= int(found["n"]) <= acknowledged + 1, (
                "all acknowledged, and one in the air"
            )
            assert found["twin"] == found["n"] * 500, "no transaction is torn"
            assert store.revision == int(found["n"])
            acknowledged = int(found["n"])


def test_only_a_transaction_with_a_lasting_write_waits_for_the_disk(tmp_path: Path) -> None:
    def synced(store: SqliteStore, *lasting: bool) -> int:
        store.txn((), [Put(f"k{n}", b"", lasting=one) for n, one in enumerate(lasting)])
        return int(store._writer.execute("pragma synchronous").fetchone()[0])

    normal, full = 1, 2
    with SqliteStore(tmp_path / "a.db") as store:
        assert synced(store, True) == full
        assert synced(store, False, False) == normal
        assert synced(store, False, True) == full
        assert synced(store, False) == normal
        store.delete("k0")
        assert synced(store) == normal
        assert store.lease(5).ttl_s > 0
    with SqliteStore(tmp_path / "b.db", durable=False) as store:
        assert synced(store, True) == synced(store, False) == normal


ADDER = """
import sys
from clipper.store import SqliteStore
with SqliteStore(sys.argv[1], durable=False) as store:
    for _ in range(int(sys.argv[2])):
        store.update("n", lambda old: b"%d" % (int(old or b"0") + 1))
"""


@pytest.mark.slow
def test_processes_that_open_and_write_at_once_lose_no_update(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for process in [spawn(ADDER, path, 300) for _ in range(3)]:
        finish(process)
    with SqliteStore(path) as store:
        assert content(store) == {"n": b"900"}
        assert store.revision == 900


def test_a_new_file_that_another_process_is_switching_to_the_log_is_waited_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")  # SQLite does not wait for such a lock by itself
    other.execute("create table t(x)")
    release = threading.Timer(0.3, lambda: (other.execute("rollback"), other.close()))
    release.start()
    with SqliteStore(path, busy_s=30) as store:
        store.put("a", b"1")
        assert store.get("a")
    join(release)


def test_a_watch_sees_writes_of_another_process(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.db") as store:
        watch = store.watch("")
        assert watch.next(0) == Event("SYNC", 0)
        process = spawn(ADDER, store.path, 2)
        expected = [Event("PUT", r, "n", Record("n", b"%d" % r, r, 1, r)) for r in (1, 2)]
        assert [watch.next(60) for _ in range(2)] == expected
        finish(process)


def test_a_fork_cannot_use_its_parents_store(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.db") as store:
        store.put("a", b"1")
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (
                lambda: store.get("a"),
                lambda: store.put("a", b""),
                lambda: store.watch(""),
            ):
                try:
                    call()
                except ForkedProcess:
                    refused += 1
            store.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert store.put("a", b"2").revision == 2


# -- damage


@pytest.mark.parametrize(
    "junk", [b"only text" * 500, b"\0" * 5000, b"SQLite format 3\0" + b"\7" * 4080]
)
def test_a_file_that_is_not_a_database_is_named_with_the_remedy(
    tmp_path: Path, junk: bytes
) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(junk)
    with pytest.raises(StoreError) as caught:
        SqliteStore(path)
    assert str(path) in str(caught.value)
    assert f"mv {path} {path}.bad" in str(caught.value)
    assert path.read_bytes() == junk, "and left as it was"


def filled(path: Path, count: int = 300) -> None:
    with SqliteStore(path, durable=False) as store:
        for i in range(count):
            store.put(f"key{i:04}", b"%d" % i * 60)


def test_a_file_cut_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    filled(path)
    whole = path.read_bytes()
    for size in (len(whole) // 3, len(whole) - 4096, 4096, 2000):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match="damaged"):
            SqliteStore(path)


def test_random_damage_is_an_error_or_does_no_harm(tmp_path: Path) -> None:
    path, rng = tmp_path / "state.db", random.Random(3)
    filled(path, 60)
    whole = path.read_bytes()
    with SqliteStore(path) as store:
        true = content(store)
    noticed = 0
    for _ in range(60):
        torn = bytearray(whole)
        at = rng.randrange(len(torn))
        torn[at : at + 8] = rng.randbytes(8)
        path.write_bytes(torn)
        try:
            with SqliteStore(path) as store:
                assert content(store) == true, "a damaged value is never handed out"
        except StoreError:
            noticed += 1
    assert noticed > 5


def test_a_flipped_bit_in_a_value_fails_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with SqliteStore(path) as store:
        store.put("good", b"1")
        store.put("bad", b"2")
    with sqlite3.connect(path) as raw:
        raw.execute("update kv set value = ? where key = ?", (b"3", b"bad"))
    raw.close()
    with SqliteStore(path) as store:
        with pytest.raises(StoreError, match="checksum"):
            store.get("bad")
        with pytest.raises(StoreError, match="checksum"):
            store.range("")
        with pytest.raises(StoreError, match="checksum"):
            store.put_if("bad", b"4", 2)
        assert store.get("good"), "nothing else is touched"
        assert store.put("good", b"5").revision == 3


def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("create table precious (x)")
    theirs.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    filled(path, 1)
    with sqlite3.connect(path) as raw:
        raw.execute("pragma user_version = 3")
    raw.close()
    with pytest.raises(StoreError, match=r"has format 3.*Upgrade"):
        SqliteStore(path)


# -- no room, no rights


def test_a_full_store_refuses_writes_and_goes_on_reading(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    written = {}
    with SqliteStore(path, bytes_max=200_000, events_max=4) as store:

        def fill() -> None:
            for i in range(1000):
                store.put(f"key{i}", b"%d" % i * 1000)
                written[f"key{i}"] = b"%d" % i * 1000

        with pytest.raises(StoreError, match=r"full.*Make room"):
            fill()
        assert len(written) > 10
        revision = store.revision
        assert content(store) == written
        with pytest.raises(StoreError, match="full"):
            store.txn((), (Put("small", b"x"), Put("big", bytes(400_000))))
        assert content(store) == written, "no torn transaction"
        assert store.revision == revision
        while len(content(store)) > 3:
            store.delete(max(content(store)))
        store.put("new", bytes(2000))
    with SqliteStore(path) as store:
        assert content(store)["new"] == bytes(2000)


def test_a_disk_that_fails_is_a_typed_error_and_recovers(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the writes, as a full disk does."""
    code = """
import resource, signal, sys
from clipper.errors import StoreError
from clipper.store import SqliteStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SqliteStore(sys.argv[1])
store.put("a", b"before")
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
try:
    store.put("b", bytes(500_000))
except StoreError as error:
    print(error)
print(store.get("a").value, store.get("b"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.put("c", b"after")
print([record.key for record in store.range("")[0]])
"""
    out = finish(spawn(code, tmp_path / "state.db")).splitlines()
    assert out[0].startswith(f"cannot write {tmp_path / 'state.db'}: the disk")
    assert out[1:] == ["b'before' None", "['a', 'c']"]


def test_a_path_that_cannot_be_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "state.db", tmp_path / "folder"):
        with pytest.raises(StoreError, match=str(path)) as caught:
            SqliteStore(path)
        assert caught.value.hint


@contextlib.contextmanager
def without_privilege() -> Iterator[None]:
    """Run the block as the user `nobody`, because root may write everywhere."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_read_only_folder_is_a_typed_error() -> None:
    # pytest's own folders are closed to nobody altogether
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filled(folder / "state.db", 1)
        folder.chmod(0o555)
        try:
            with (
                without_privilege(),
                pytest.raises(StoreError, match=r"may not be written|cannot be opened") as caught,
            ):
                SqliteStore(folder / "x.db").close()
            assert caught.value.hint
            assert [path.name for path in folder.glob("x.db*")] == []
        finally:
            folder.chmod(0o755)


def test_a_file_that_may_not_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.db") as store:
        store.put("a", b"1")
        store._writer.execute("pragma query_only = on")
        with pytest.raises(StoreError, match="may not be written"):
            store.put("a", b"2")
        assert store.get("a")


def test_a_writer_that_holds_the_file_too_long_is_a_typed_error(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.db", busy_s=0.02) as store:
        store.put("a", b"1")
        other = sqlite3.connect(store.path, isolation_level=None)
        other.execute("begin immediate")
        with pytest.raises(StoreError, match="locked too long"):
            store.put("a", b"2")
        assert store.get("a"), "readers do not wait"
        other.execute("rollback")
        other.close()
        store.put("a", b"3")


READER = """
import sys
from clipper.store import SqliteStore
store = SqliteStore(sys.argv[1])
print(store.get("a"), flush=True)
list(store.watch(""))
"""


def test_a_stopped_reader_blocks_no_writer(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.db") as store:
        store.put("a", b"1")
        reader = spawn(READER, store.path)
        reader.line()
        freeze(reader.pid)
        store.put("a", b"2")
        reader.kill()


@pytest.mark.slow
def test_servers_that_start_at_once_on_a_new_file_all_come_up(tmp_path: Path) -> None:
    """SQLite reports a file as locked, without waiting, while two switch it to its log."""
    failed: list[Exception] = []

    def open_store(path: Path, start: threading.Barrier) -> None:
        start.wait()
        try:
            SqliteStore(path).close()
        except StoreError as error:
            failed.append(error)

    for round_ in range(60):
        start = threading.Barrier(4)
        path = tmp_path / f"{round_}.db"
        threads = [threading.Thread(target=open_store, args=(path, start)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            join(thread)
    assert not failed


# -- by name


def test_open_store_parses_paths_and_urls(tmp_path: Path) -> None:
    assert isinstance(open_store(""), MemoryStore)
    assert isinstance(open_store("memory://"), MemoryStore)
    for state, path in {
        str(tmp_path / "state"): tmp_path / "state" / "state.db",
        f"sqlite:{tmp_path}/x.db": tmp_path / "x.db",
        f"sqlite://{tmp_path}/y.db": tmp_path / "y.db",
    }.items():
        with open_store(state) as store:
            assert isinstance(store, SqliteStore)
            assert store.path == path
    with pytest.raises(ConfigError, match="no store for state='consul://h:1'"):
        open_store("consul://h:1")


# -- leases, formats, and the turnstile


FORMAT_1 = """
create table kv (
    key blob primary key, value blob not null, crc integer not null,
    revision integer not null, created integer not null, version integer not null) without rowid;
create table event (
    id integer primary key autoincrement, revision integer not null, key blob not null,
    value blob, created integer not null, version integer not null);
create index event_revision on event (revision);
create table meta (name text primary key, value integer not null) without rowid;
insert into meta values ('revision', 1), ('forgotten', 0);
insert into event (revision, key, value, created, version) values (1, x'61', x'31', 1, 1);
pragma application_id = 0x434C5053;
pragma user_version = 1;
pragma journal_mode = wal;
"""


def test_a_file_of_the_format_before_leases_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.executescript(FORMAT_1)
        raw.execute("insert into kv values (x'61', x'31', ?, 1, 1, 1)", (crc32(b"1", crc32(b"a")),))
        raw.commit()
    for _ in range(2):
        with SqliteStore(path) as store:
            record = store.get("a")
            assert record == Record("a", b"1", 1, 1, 1)
            assert store.watch("", 0).next(20) == Event("PUT", 1, "a", record)
    with SqliteStore(path) as store, store.lease(60) as lease:
        assert store.put("a", b"2", lease.id).revision == 2


def test_no_lease_outlives_the_machine(tmp_path: Path) -> None:
    """The monotonic clock starts anew with each boot, and every process that held a lease has
    ended."""
    path = tmp_path / "state.db"
    with SqliteStore(path) as store:
        lease = store.lease(60)
        store.txn((), (Put("a", b"1", lease.id), Put("b", b"1", lease.id), Put("c", b"1")))
    with SqliteStore(path) as store:
        assert set(content(store)) == {"a", "b", "c"}, "the same boot: another process may hold it"
        store._writer.execute("update meta set value = value + 1 where name = 'boot'")
    with SqliteStore(path) as store:
        assert set(content(store)) == {"c"}
        watch = store.watch("", 1)
        assert [watch.next(20), watch.next(20)] == [
            Event("DELETE", 2, "a"),
            Event("DELETE", 2, "b"),
        ]


HOLDER = """
import sys, threading
from clipper.errors import LeaseLost
from clipper.store import SqliteStore
with SqliteStore(sys.argv[1]) as store:
    record, ttl_s = None, 0.25
    while record is None:
        ttl_s *= 2
        try:
            record = store.put("holder", b"1", store.lease(ttl_s).id)
        except LeaseLost:
            continue  # it has ended before
    print("held", flush=True)
    threading.Event().wait(60)
"""


def test_leased_keys_of_a_dead_process_disappear(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with SqliteStore(path) as store:
        watch = store.watch("")
        holder = spawn(HOLDER, path)
        assert holder.line() == "held"
        holder.kill()
        kinds: list[str] = []
        while kinds[-1:] != ["DELETE"]:
            event = watch.next(20)
            assert event is not None
            kinds.append(event.kind)
        assert content(store) == {}


def test_a_writer_waits_behind_one_that_waits_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that finds another one waiting for the file waits behind it, but no longer than for
    the file itself."""
    path, waits, flock = tmp_path / "state.db", threading.Event(), fcntl.flock

    def observed_flock(file: int, how: int) -> None:
        try:
            flock(file, how)
        except BlockingIOError:
            waits.set()
            raise

    with (
        SqliteStore(path) as store,
        SqliteStore(path, busy_s=0.05) as hasty,
        open(f"{path}-turn") as turn,
    ):
        monkeypatch.setattr(fcntl, "flock", observed_flock)
        flock(turn, fcntl.LOCK_EX)
        writer = threading.Thread(target=store.put, args=("a", b"1"))
        writer.start()
        assert waits.wait(20)
        assert store.get("a") is None
        hasty.put("b", b"1")
        flock(turn, fcntl.LOCK_UN)
        writer.join(20)
        assert set(content(store)) == {"a", "b"}


@pytest.mark.parametrize("mode", [None, 0o644])
def test_only_the_owner_reads_the_file(tmp_path: Path, mode: int | None) -> None:
    path = tmp_path / "state.db"
    if mode is not None:
        SqliteStore(path).close()
        path.chmod(mode)
    store = SqliteStore(path)
    try:
        store.put("a", b"1")
        assert [file.name for file in tmp_path.iterdir() if file.stat().st_mode & 0o077] == []
    finally:
        store.close()


def test_a_write_wakes_the_watches_of_its_keys_and_no_others(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "s.db") as store:
        watches: list[Any] = [store.watch("near/"), store.watch("far/")]
        near, far = watches
        for watch in (near, far):
            assert watch.next(5) == Event("SYNC", 0)
            assert watch.next(0) is None
            watch.woken.clear()
        written = store.put("near/a", b"1")
        assert (near.woken.is_set(), far.woken.is_set()) == (True, False)
        assert near.next(0) == Event("PUT", 1, "near/a", written)
        assert (near.next(0), far.next(0)) == (None, None)


def test_a_watch_misses_nothing_of_writers_here_and_elsewhere(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "s.db") as here, SqliteStore(tmp_path / "s.db") as there:
        watch, rng = here.watch("k/"), random.Random(3)
        found = []

        def write(store: SqliteStore) -> None:
            for n in range(60):
                store.put(f"{rng.choice('kx')}/{n % 7}", b"%d" % n)

        writers = [threading.Thread(target=write, args=(store,)) for store in (here, there, here)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            if (event := watch.next(0.001)) is not None:
                found.append(event)
        while (event := watch.next(0.2)) is not None:
            found.append(event)
        with SqliteStore(tmp_path / "s.db") as later:
            expected = later.watch("k/", 0)
            whole = [expected.next(5) for _ in range(len(found))]
        assert [one for one in found if one.kind == "PUT"] == [
            one for one in whole if one is not None and one.kind == "PUT"
        ]
        assert here.revision == 180
