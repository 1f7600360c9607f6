"""Acknowledged records are in the journal after a crash, in order, once; torn ones are not."""

import errno
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest

from clipper.errors import Overloaded, StoreError
from clipper.store import journal
from clipper.store.journal import Journal
from tests.processes import Program
from tests.threads import join


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 200)


def reopened(folder: Path) -> list[tuple[int, bytes]]:
    again = Journal(folder)
    try:
        assert again.damaged == ""
        return list(again.replay())
    finally:
        again.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(20))
def test_a_journal_equals_a_list_without_its_forgotten_records(tmp_path: Path, seed: int) -> None:
    draw, model = random.Random(seed), dict[int, bytes]()
    log = Journal(tmp_path, draw.choice(["os", "fsync"]))
    for _ in range(60):
        match draw.randrange(5):
            case 0 | 1:
                records = [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 4))]
                last = log.append_many(records)
                model |= {last - len(records) + 1 + i: record for i, record in enumerate(records)}
            case 2:
                log.forget(draw.randint(0, log.last))
            case 3:
                log.close()
                log = Journal(tmp_path)
            case 4:
                after = draw.randint(0, log.last)
                found = list(log.replay(after))
                assert found == [(n, model[n]) for n, _ in found]
                assert [n for n, _ in found] == list(range(log.last - len(found) + 1, log.last + 1))
        assert log.last == len(model)
    log.close()


@pytest.mark.usefixtures("small")
def test_only_forgotten_segments_are_deleted(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    for i in range(100):
        log.append(b"%05d" % i * 5)
    log.forget(50)
    first = next(iter(log.replay()))[0]
    assert 40 < first <= 51
    assert [n for n, _ in log.replay(60)] == list(range(61, 101))
    log.close()
    assert reopened(tmp_path)[-1] == (100, b"%05d" % 99 * 5)


def test_a_torn_end_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    for record in (b"one", b"two", b"three"):
        log.append(record)
    log.close()
    (path,) = tmp_path.glob("*.log")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = [record for _, record in reopened(tmp_path)]
        assert found == [b"one", b"two", b"three"][: len(found)]
        assert len(found) == sum(size >= end for end in (11, 22, 35))
        assert path.stat().st_size == (0, 11, 22, 35)[len(found)]


@pytest.mark.parametrize("at", [0, 5, 9, 12, 20])
def test_damage_in_the_middle_is_reported_and_kept(tmp_path: Path, at: int) -> None:
    log = Journal(tmp_path)
    for record in (b"one", b"two", b"three"):
        log.append(record)
    log.close()
    (path,) = tmp_path.glob("*.log")
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0xFF
    path.write_bytes(whole)
    again = Journal(tmp_path)
    assert str(path) in again.damaged
    assert path.read_bytes() == whole
    number = again.append(b"four")
    assert number > 3, "its number is nobody else's"
    assert (number, b"four") in list(again.replay())
    again.close()


def test_a_full_journal_raises_overloaded_and_writes_nothing(tmp_path: Path) -> None:
    log = Journal(tmp_path, bytes_max=100)
    log.append(b"x" * 50)
    with pytest.raises(Overloaded, match="journal_bytes_max"):
        log.append(b"y" * 50)
    assert log.append(b"z") == 2
    log.close()
    assert [record for _, record in reopened(tmp_path)] == [b"x" * 50, b"z"]


@pytest.mark.parametrize("mode", ["os", "fsync"])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, mode: journal.Mode) -> None:
    log = Journal(tmp_path, mode)
    log.append(b"before")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.MAPPED_BYTES + 1000, limit[1]))
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"cannot write the journal .*: File too large"):
                log.append(b"x" * (journal.MAPPED_BYTES + 2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert log.append(b"after") == 2
    log.close()
    assert [record for _, record in reopened(tmp_path)] == [b"before", b"after"]


@pytest.mark.parametrize("mode", ["os", "fsync"])
def test_a_full_disk_loses_no_accepted_record(
    tmp_path: Path, mode: journal.Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small records are written until the disk and the space allocated ahead are full: each is
    stored or was refused."""
    log, taken = Journal(tmp_path, mode), list[bytes]()
    full = OSError(errno.ENOSPC, "No space left on device")
    size_max = 500

    def allocate(fd: int, offset: int, size: int) -> None:
        if offset + size > size_max:
            raise full
        os.truncate(fd, offset + size)

    def write(fd: int, data: bytes, at: int, before=os.pwrite) -> int:
        if at >= size_max:
            raise full
        return before(fd, data[: min(len(data), size_max - at, 7)], at)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(os, "pwrite", write)
    for i in range(100):
        if i == 80:
            size_max = 10_000
        record = b"%d" % i * 5
        if log.nbytes + 8 + len(record) <= size_max:
            log.append(record)
            taken.append(record)
        else:
            with pytest.raises(StoreError, match="No space left"):
                log.append(record)
    log.close()
    assert 20 < len(taken) < 100
    assert [record for _, record in reopened(tmp_path)] == taken


def test_a_journal_refuses_records_after_a_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Journal(tmp_path, "fsync")
    log.commit(log.append(b"sure"))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreError, match="could not be synced: Input/output error"):
            log.commit(log.append(b"unsure"))
    with pytest.raises(StoreError, match="could not be synced"):
        log.append(b"refused")
    with pytest.raises(StoreError, match="could not be synced"):
        log.commit(2)
    log.close()
    assert [record for _, record in reopened(tmp_path)] == [b"sure", b"unsure"]


@pytest.mark.parametrize("seed", range(20))
def test_any_end_of_a_mapped_journal_is_recovered(tmp_path: Path, seed: int) -> None:
    """The unused space is zeros; the record that was being copied ends at any byte."""
    draw, log = random.Random(seed), Journal(tmp_path)
    records = [draw.choice([bytes, draw.randbytes])(draw.randrange(200)) for _ in range(20)]
    for record in records[:-1]:
        log.append(record)
    (path,) = tmp_path.glob("*.log")
    before = log.nbytes
    log.append(records[-1])
    whole, after = path.read_bytes(), log.nbytes
    log.close()
    assert len(whole) >= journal.MAPPED_BYTES
    cut = draw.randint(before, after - 1)
    path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
    found = reopened(tmp_path)
    lost = whole[cut:after].strip(b"\0") != b""
    assert [record for _, record in found] == (records[:-1] if lost else records)
    assert path.stat().st_size == (before if lost else after)


def test_a_fork_writes_nothing(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    log.append(b"ours")
    child = os.fork()
    if child == 0:
        try:
            log.append(b"theirs")
        except StoreError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert log.append(b"ours too") == 2
    log.close()
    assert [record for _, record in reopened(tmp_path)] == [b"ours", b"ours too"]


@pytest.mark.parametrize("mode", ["os", "fsync"])
def test_threads_append_without_gaps(tmp_path: Path, mode: journal.Mode) -> None:
    log, numbers = Journal(tmp_path, mode), list[int]()

    def append(name: int) -> None:
        for i in range(100):
            numbers.append(log.append(b"%d/%d" % (name, i)))
            log.commit(numbers[-1])

    threads = [threading.Thread(target=append, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    log.close()
    found = [record for _, record in reopened(tmp_path)]
    assert sorted(numbers) == list(range(1, 401))
    for name in range(4):
        assert [record for record in found if record.startswith(b"%d/" % name)] == [
            b"%d/%d" % (name, i) for i in range(100)
        ]


WRITER = """
import sys
from pathlib import Path
from clipper.store.journal import Journal
log = Journal(Path(sys.argv[1]), sys.argv[2])
n = log.last
while True:
    n += 1
    assert log.append(b"%d" % n) == n
    log.commit(n)
    print(n, flush=True)
"""


@pytest.mark.parametrize("mode", ["os", "fsync"])
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, mode: str) -> None:
    acknowledged = 0
    for seed in range(4):
        with Program(sys.executable, "-c", WRITER, tmp_path, mode, apart=True) as process:
            for _ in range(random.Random(seed).randint(1, 300)):
                process.line()
        acknowledged = int(process.lines[-1])
        found = reopened(tmp_path)
        assert [(n, int(record)) for n, record in found] == [
            (n, n) for n in range(1, len(found) + 1)
        ]
        assert len(found) >= acknowledged


def test_a_journal_without_a_folder_keeps_nothing(tmp_path: Path) -> None:
    log = Journal(None)
    assert log.append_many([b"a", b"b"]) == 2
    assert list(log.replay()) == []
    assert log.last == 2
    log.close()


def test_skipped_numbers_are_not_used_again(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    assert log.append(b"a") == 1
    log.skip_to(10)
    assert log.append(b"b") == 11
    log.skip_to(5)
    assert log.append(b"c") == 12
    log.close()
    assert reopened(tmp_path) == [(1, b"a"), (11, b"b"), (12, b"c")]


def test_other_files_in_the_folder_are_not_touched(tmp_path: Path) -> None:
    for name in ("abc.log", "1.log", "zzz.log"):
        (tmp_path / name).write_bytes(b"not a journal")
    journal = Journal(tmp_path)
    journal.commit(journal.append(b"one"))
    journal.close()
    assert reopened(tmp_path) == [(1, b"one")]
    assert (tmp_path / "abc.log").read_bytes() == b"not a journal"
