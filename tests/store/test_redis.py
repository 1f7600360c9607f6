"""Properties of a remote store: it is killed, hangs, is read-only, loses its data, or is the wrong
one."""

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import clipper
from clipper.errors import ConfigError, StoreError
from clipper.store import Event, Mirror, Put, Record, RedisStore, open_store
from clipper.store.redis import store as redis
from tests.memory_container import wait_until
from tests.threads import join

RedisServer = Any  # conftest.py has it


def test_records_are_readable_with_redis_cli(redis_server: RedisServer) -> None:
    with RedisStore(redis_server.url + "?prefix=read:") as store:
        store.put("app/digits", b"hello")
    path = redis_server.url.removeprefix("unix://")
    found = subprocess.run(
        ["redis-cli", "-s", path, "HGETALL", "read:r:app/digits"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [
        "value",
        "hello",
        "revision",
        "1",
        "created",
        "1",
        "version",
        "1",
    ]


def test_prefixes_are_stores_of_their_own(redis_server: RedisServer) -> None:
    with (
        RedisStore(redis_server.url + "?prefix=one:") as one,
        RedisStore(redis_server.url + "?prefix=two:") as two,
    ):
        one.put("a", b"1")
        assert two.get("a") is None
        assert (one.revision, two.revision) == (1, 0)


def test_what_was_acknowledged_survives_a_kill(own_redis: RedisServer) -> None:
    """The transaction in flight at the kill is there wholly or not at all."""
    draw = random.Random(1)
    store = RedisStore(own_redis.url)
    acknowledged = 0
    for _ in range(3):
        timer = threading.Timer(draw.uniform(0.05, 0.2), own_redis.kill)
        timer.start()
        with contextlib.suppress(StoreError):
            while True:
                n = acknowledged + 1
                store.txn((), (Put("n", b"%d" % n), Put("twin", b"%d" % n)))
                acknowledged = n
        join(timer)
        own_redis.start()
        records, revision = store.range("")
        assert len({record.value for record in records}) == 1
        assert revision in (acknowledged, acknowledged + 1)
        acknowledged = revision
    store.close()


def test_a_hung_redis_raises_an_error_and_is_used_again_later(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisStore(own_redis.url) as store:
        store.put("a", b"1")
        own_redis.send(signal.SIGSTOP)
        lose_patience(store, monkeypatch)
        with pytest.raises(StoreError, match=r"did not answer within 0\.3 s|cannot be reached"):
            store.get("a")
        own_redis.send(signal.SIGCONT)
        assert wait_until(lambda: value_of(store, "a")) == b"1"


def lose_patience(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the time short in which Redis has to answer: for when it does not."""
    monkeypatch.setattr(redis, "PATIENCE_S", 0.3)
    pool = store._redis.connection_pool
    pool.connection_kwargs["socket_timeout"] = 0.3
    pool.disconnect()
    # those that come have the short time
    pool.reset()


def value_of(store: RedisStore, key: str) -> bytes:
    """Return the value of a key; nothing if it is not there, or Redis does not answer."""
    with contextlib.suppress(StoreError):
        if (record := store.get(key)) is not None:
            return record.value
    return b""


def test_a_read_only_redis_refuses_writes_and_keeps_its_records(own_redis: RedisServer) -> None:
    with RedisStore(own_redis.url) as store:
        store.put("a", b"1")
        store._redis.replicaof("127.0.0.1", "1")
        with pytest.raises(StoreError, match="refused"):
            store.put("a", b"2")
        assert [record.value for record in store.range("")[0]] == [b"1"]


@pytest.mark.parametrize("how", ["out of memory", "busy with a script", "loading"])
def test_an_error_reply_of_redis_is_raised_and_records_are_kept(
    own_redis: RedisServer, how: str
) -> None:
    """The server replies OOM, BUSY and LOADING. Acknowledged data is there afterwards."""
    with RedisStore(own_redis.url) as store:
        store.put("a", b"1")
        with refusing(own_redis, store._redis, how) as words:
            with pytest.raises(StoreError, match=words):
                store.put("a", b"2")
            if how != "out of memory":
                with pytest.raises(StoreError, match=words):
                    store.get("a")
        assert store.range("") == ([Record("a", b"1", 1, 1, 1)], 1)
        store.put("a", b"3")


@contextlib.contextmanager
def refusing(server: RedisServer, control: Any, how: str) -> Iterator[str]:
    """Have the server reject requests within the block; yield the text of its error."""
    if how == "out of memory":
        control.config_set("maxmemory", "1")
        yield "refused: .*maxmemory"
        control.config_set("maxmemory", "0")
    elif how == "busy with a script":
        control.config_set("busy-reply-threshold", "1")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(server.url.removeprefix("unix://"))
            line.sendall(b'EVAL "while true do end" 0\r\n')
            wait_until(lambda: server.ask("PING").startswith(b"-BUSY"))
            yield "refused: .*BUSY|refused: .*busy"
            control.script_kill()
            wait_until(lambda: server.ask("PING") == b"+PONG")
    else:
        draw = random.Random(1)
        control.mset({f"filler:{i}": draw.randbytes(100) for i in range(1000)})
        control.bgrewriteaof()  # the delay below is of keys in a snapshot
        wait_until(lambda: control.info("persistence")["aof_base_size"] > 100_000)
        server.kill()
        starting = threading.Thread(
            target=server.start,
            args=("--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024"),
        )
        starting.start()
        wait_until(lambda: server.ask("PING").startswith(b"-LOADING"))
        yield "loading"
        join(starting)


def test_a_server_that_lost_its_memory_resets_its_watches(own_redis: RedisServer) -> None:
    with RedisStore(own_redis.url) as store:
        store.put("a", b"1")
        store.put("b", b"1")
        watch = store.watch("", 2)
        assert watch.next(5) == Event("SYNC", 2)
        store._redis.flushall()
        store.put("c", b"1")
        event = watch.next(5)  # the watch may look before the put
        assert event in (Event("RESET", 0), Event("RESET", 1))
        if event == Event("RESET", 0):
            assert watch.next(5) == Event("PUT", 1, "c", Record("c", b"1", 1, 1, 1))


def test_watch_is_reset_when_a_server_that_lost_its_memory_has_many_new_changes(
    own_redis: RedisServer,
) -> None:
    with RedisStore(own_redis.url) as store, RedisStore(own_redis.url) as other:
        store.put("a", b"1")
        watch = store.watch("", 1)
        assert watch.next(5) == Event("SYNC", 1)
        with other._redis.pipeline(transaction=True) as pipe:  # all at once: no look between
            pipe.flushall()
            for n in range(3):
                op = [1, f"b{n}", b"1", ""]
                request = msgpack.packb([[], [op], []], use_bin_type=False)
                pipe.eval(redis._TXN, 0, "clipper:", 1000, request)
            pipe.execute()
        assert watch.next(5) == Event("RESET", 3)
        store.put("c", b"1")
        event = watch.next(5)
        assert event is not None
        assert (event.kind, event.key) == ("PUT", "c")


def test_watch_is_reset_by_an_older_copy_that_has_more_changes_than_it_has_seen(
    own_redis: RedisServer,
) -> None:
    files = own_redis.folder / "appendonlydir"
    with RedisStore(own_redis.url) as store, tempfile.TemporaryDirectory() as copy:
        store.put("kept", b"1")
        shutil.copytree(files, f"{copy}/appendonlydir")
        store.put("gone", b"1")
        watch = store.watch("", 2)
        assert watch.next(5) == Event("SYNC", 2)
        own_redis.kill()
        elsewhere = type(own_redis)(Path(copy), "--appendfsync", "always")  # unwatched, it goes on
        with RedisStore(elsewhere.url) as there:
            for _ in range(3):
                there.put("new", b"1")
        elsewhere.kill()
        shutil.rmtree(files)
        shutil.copytree(f"{copy}/appendonlydir", files)
        own_redis.start()
        event = None
        while event is None:
            with contextlib.suppress(StoreError):
                event = watch.next(5)
        assert event == Event("RESET", 4)


def test_watches_of_other_connections_are_notified(redis_server: RedisServer) -> None:
    url = redis_server.url + "?prefix=hear:"
    with RedisStore(url) as one, RedisStore(url) as two:
        watch = two.watch("a", 0)
        assert watch.next(5) == Event("SYNC", 0)
        one.put("b", b"not ours")
        record = one.put("a", b"ours")
        assert watch.next(5) == Event("PUT", 2, "a", record)


def test_an_entry_of_another_version_hides_no_change(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """One entry of the stream that could not be read ended the thread that reads for all."""
    url = f"{redis_server.url}?prefix={tmp_path.name}:"
    with RedisStore(url) as store, Mirror(store, "m/", bytes) as mirror:
        store.put("m/a", b"1")
        wait_until(lambda: "a" in mirror)
        raw, prefix = store._redis, store._prefix
        raw.xadd(f"{prefix}events", {"kind": "RENAME", "other": "fields"}, id="2-1")
        raw.set(f"{prefix}revision", 2)
        store.put("m/b", b"2")
        wait_until(lambda: "b" in mirror, "the changes after it come")
        raw.hset(f"{prefix}r:m/odd", mapping={"revision": 3, "more": "fields"})
        raw.zadd(f"{prefix}keys", {"m/odd": 0})
        records, _ = store.range("m/")
        assert [record.key for record in records] == ["m/a", "m/b", "m/odd"]
        assert records[2] == Record("m/odd", b"", 3, 3, 1)


def test_an_error_of_any_kind_ends_no_watch(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        RedisStore(f"{redis_server.url}?prefix={tmp_path.name}:") as store,
        Mirror(store, "m/", bytes) as mirror,
    ):
        changes, failed = store.changes, threading.Event()

        def fail(after: int) -> Any:
            monkeypatch.setattr(store, "changes", changes)
            failed.set()
            raise MemoryError

        monkeypatch.setattr(store, "changes", fail)
        store.put("m/a", b"1")
        assert failed.wait(20)
        store.put("m/b", b"2")
        wait_until(lambda: "b" in mirror)


def test_an_unreachable_redis_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"store unix://.* cannot be reached: .*redis-server is running there"
    ):
        RedisStore(f"unix://{tmp_path}/none.sock")


def test_a_password_is_not_shown() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError) as caught:
            RedisStore(f"redis://me:secret@127.0.0.1:{taken.getsockname()[1]}/0")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("state", ["consul://x", "http://x"])
def test_other_urls_are_refused_with_those_that_work(state: str) -> None:
    with pytest.raises(ConfigError, match="redis://HOST:PORT/DB"):
        open_store(state)


def total(xs: Any) -> Any:
    return xs.sum(axis=1)


def test_a_server_restores_its_state_from_redis(own_redis: RedisServer, tmp_path: Path) -> None:
    settings = {"state": own_redis.url, "folder": str(tmp_path)}
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        app = server.app("a", models=["m"], policy="exp4", slo_ms=60_000)
        assert app.feedback(app.predict(np.ones(2)).result(60), label=2.0)
    with clipper.start(**settings) as server:
        app = server.app("a")
        assert server.model("m").predict(np.ones(2), slo_ms=60_000).result(60) == 2.0
        assert app._resolve("a").learner.state(None).seen == 1


@pytest.mark.parametrize("how", ["stopped", "killed", "read only", "out of memory"])
def test_feedback_continues_without_redis_and_is_written_later(
    own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Neither a prediction nor feedback waits for Redis, also for users that are new."""
    settings: dict[str, Any] = {
        "state": own_redis.url,
        "folder": str(tmp_path),
        "feedback": {"write_ms": 5},
    }
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        app = server.app("a", models=["m"], policy="kl_ucb", slo_ms=60_000, default=-1.0)
        assert app.feedback(app.predict(np.ones(2), user="u").result(60), label=2.0)
        cached: Any = server._store
        control = cached._store
        match how:
            case "stopped":
                own_redis.send(signal.SIGSTOP)
                lose_patience(control, monkeypatch)
            case "killed":
                own_redis.kill()
            case "read only":
                control._redis.replicaof("127.0.0.1", "1")
            case "out of memory":
                control._redis.config_set("maxmemory", "1")
        for user in ("u", "v", ""):
            answer = app.predict(np.ones(2), user=user).result(60)
            assert (answer.output, answer.is_default) == (2.0, False)
            assert app.feedback(answer, label=2.0)
        answers = app.predict_many(np.ones((5, 2)), user="w").result(60)
        assert app.feedback_many(answers, [2.0] * 5).counted == 5
        match how:
            case "stopped":
                own_redis.send(signal.SIGCONT)
            case "killed":
                own_redis.start()
            case "read only":
                control._redis.replicaof("NO", "ONE")
            case "out of memory":
                control._redis.config_set("maxmemory", "0")
    with clipper.start(**settings) as server:
        learner = server.app("a")._resolve("a").learner
        assert {user: learner.state(user).seen for user in ("u", "v", "w", "")} == {
            "u": 2,
            "v": 1,
            "w": 5,
            "": 9,
        }
