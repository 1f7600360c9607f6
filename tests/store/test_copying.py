"""A store moves: what is copied, what stays behind, and that a difference is seen."""

import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clipper.catalog.catalog import Catalog
from clipper.cli import main
from clipper.errors import InvalidInput, StoreError
from clipper.store import (
    Delete,
    MemoryStore,
    Put,
    RedisStore,
    SqliteStore,
    Store,
    copying,
    open_store,
)
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.store.etcd_server import EtcdServer
from tests.threads import join


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["registry", "copy", *words])


def contents(store: Store) -> dict[str, bytes]:
    return {record.key: record.value for record in store.range("")[0]}


def test_all_records_are_copied_but_those_on_a_lease(store: Store) -> None:
    """Records are copied into every kind of store, more and larger ones than one transaction can
    have."""
    source = MemoryStore()
    expected = {f"k/{i}": bytes([i % 251]) * (i % 7) for i in range(250)} | {
        f"big/{i}": bytes(200_000) for i in range(4)
    }
    for key, value in expected.items():
        source.put(key, value)
    with source.lease(60) as lease:
        source.put("node", b"1", lease.id)
        copied = copying.copy(source, store)
        assert (copied.records, copied.leased, copied.written, copied.deleted) == (254, 1, 254, 0)
        assert contents(store) == expected
        assert copying.different(source, store) == []
    again = copying.copy(source, store)
    assert (again.written, again.deleted) == (0, 0), "what is there already is fine"


def test_other_records_are_kept_unless_replace_is_given() -> None:
    source, target = MemoryStore(), MemoryStore()
    source.put("a", b"1")
    source.put("b", b"1")
    target.put("b", b"2")
    target.put("c", b"3")
    with pytest.raises(InvalidInput, match=r"2 of its records are others, as 'b'.*--replace"):
        copying.copy(source, target)
    assert copying.different(source, target) == ["a", "b", "c"]
    copied = copying.copy(source, target, replace=True)
    assert (copied.written, copied.deleted) == (2, 1)
    assert copying.different(source, target) == []


def test_only_records_with_the_prefix_are_copied() -> None:
    source, target = MemoryStore(), MemoryStore()
    for key in ("mesh/a", "catalog/a"):
        source.put(key, b"1")
    target.put("other", b"1")
    assert copying.copy(source, target, "mesh/").records == 1
    assert set(contents(target)) == {"mesh/a", "other"}
    assert copying.different(source, target, "mesh/") == []


def test_a_target_follows_its_source(store: Store) -> None:
    """Changes that come one by one, and more at once than the source keeps."""
    source, go_on = MemoryStore(events_max=20), threading.Event()
    source.put("a", b"1")
    source.put("gone", b"1")
    copied = copying.copy(source, store)
    follower = threading.Thread(
        target=copying.follow, args=(source, store, copied.revision),
        kwargs={"on_change": lambda count: not go_on.is_set(), "check_s": 0.02},
    )  # fmt: skip
    follower.start()
    source.put("a", b"2")
    source.delete("gone")
    with source.lease(60) as lease:
        source.put("node", b"1", lease.id)
        wait_until(lambda: contents(store) == {"a": b"2"})
        for i in range(60):
            source.put(f"k{i % 30}", b"%d" % i)
        wait_until(lambda: copying.different(source, store) == [])
    go_on.set()
    join(follower)
    assert len(contents(store)) == 31


@pytest.mark.parametrize("loss", ["FLUSHALL", "DEL", "records"])
def test_a_source_that_is_emptied_empties_no_target(
    own_redis: RedisServer, tmp_path: Path, loss: str
) -> None:
    with RedisStore(own_redis.url) as source, MemoryStore() as target:
        if loss == "records":
            for key in "abc":
                source.put(key, b"1")
        else:
            with Catalog(source, follow=False) as catalog:
                for name in "abc":
                    catalog.register_application(name)
        copied = copying.copy(source, target)
        known = contents(target)
        failed = threading.Event()
        rounds = iter(range(2000))

        def lose(count: int) -> bool:
            if not failed.is_set():
                failed.set()
                if loss == "DEL":
                    for record in source.range("")[0]:
                        source.delete(record.key)
                else:
                    assert own_redis.ask("FLUSHALL") == b"+OK"
            return next(rounds, None) is not None

        with pytest.raises(StoreError, match=r"has lost the catalog|came back without 3 of 3"):
            copying.follow(source, target, copied.revision, on_change=lose, check_s=0.02)
        if loss != "DEL":
            assert contents(target) == known
        assert "catalog/guard" in known or loss == "records"


def test_the_command_copies_and_verifies(tmp_path: Path, etcd_server: EtcdServer) -> None:
    with SqliteStore(tmp_path / "state.db") as source:
        source.put("catalog/a", b"1")
        source.put("learned", b"2")
    url = f"{etcd_server.url}/{tmp_path.name}"
    done = run(str(tmp_path), url, "--verify")
    assert done.exit_code == 0, done.output
    assert "copied 2 records at revision 2" in done.output
    assert "both stores are equal" in done.output
    with open_store(url) as target:
        assert contents(target) == {"catalog/a": b"1", "learned": b"2"}
        target.put("learned", b"3")
    refused = run(str(tmp_path), url)
    assert refused.exit_code == 1
    assert "1 of its records are others" in refused.output
    back = run(url, f"sqlite:{tmp_path}/back.db", "--verify", "-o", "json")
    assert json.loads(back.output)["different"] == []
    assert json.loads(back.output)["written"] == 2


@pytest.mark.parametrize("source", ["", "memory://", "nowhere", "sqlite:nowhere.db"])
def test_a_missing_source_is_not_created(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run(source, "sqlite:new.db")
    assert refused.exit_code == 1
    assert "there is no store" in refused.output
    assert list(tmp_path.iterdir()) == []


def test_a_difference_makes_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SqliteStore(tmp_path / "a.db") as source:
        source.put("a", b"1")
    monkeypatch.setattr(copying, "_apply", lambda target, ops: None)
    found = run(f"sqlite:{tmp_path}/a.db", f"sqlite:{tmp_path}/b.db", "--verify")
    assert found.exit_code == 1
    assert "1 records differ: a" in found.output


def test_the_command_follows_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SqliteStore(tmp_path / "a.db") as source:
        source.put("a", b"1")

    def follow(source: Store, target: Store, revision: int, prefix: str, on_change: object) -> None:
        source.put("b", b"2")
        target.put("b", b"2")
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "follow", follow)
    done = run(f"sqlite:{tmp_path}/a.db", f"sqlite:{tmp_path}/b.db", "--follow", "--verify")
    assert done.exit_code == 0
    assert "both stores are equal" in done.output


def test_changes_are_written_in_transactions_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "_OPS_MAX", 3)
    monkeypatch.setattr(copying, "_BYTES_MAX", 10)

    def parts(*sizes: int) -> list[list[int]]:
        ops = [Put("k", bytes(size - 1)) if size > 1 else Delete("k") for size in sizes]
        written = [*copying._transactions(ops)]
        assert [op for some in written for op in some] == ops
        return [
            [1 + len(op.value) if isinstance(op, Put) else 1 for op in some] for some in written
        ]

    assert parts() == []
    assert parts(1, 1, 1, 1) == [[1, 1, 1], [1]]
    assert parts(5, 5, 1, 9, 2) == [[5, 5], [1, 9], [2]]
    assert parts(11, 10, 10, 1) == [[11], [10], [10], [1]]
    assert parts(6, 5, 5, 5) == [[6], [5, 5], [5]]


def test_a_dry_run_of_the_command_makes_no_store(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with open_store(str(here)) as store:
        store.put("a", b"1")
    said = run(str(here), str(there), "--dry-run")
    assert said.output.startswith("dry run: copied 1 records at revision"), said.output
    assert not there.exists()
    with open_store(str(there)) as store:
        store.put("b", b"2")
    assert "is not empty" in run(str(here), str(there), "--dry-run").stderr
    counts = json.loads(run(str(here), str(there), "--replace", "--dry-run", "-o", "json").stdout)
    assert (counts["written"], counts["deleted"]) == (1, 1)
    with open_store(str(there)) as store:
        assert contents(store) == {"b": b"2"}
    assert run(str(here), str(there), "--dry-run", "--verify").exit_code == 2
