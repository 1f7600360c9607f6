"""An error at the entry of any thread of a shard, and of those that look after a set: it goes on,
or ends so that it is started again."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipper.component import Backoff, State, Worker
from clipper.params import Client, TableSpec
from clipper.params.local import health_check, live_reshard, metrics_page
from clipper.params.local.health_check import HealthCheck
from clipper.params.local.live_reshard import LiveReshard
from clipper.params.local.metrics_page import MetricsPage
from clipper.params.shard.resharding import move
from clipper.params.shard.server import EXIT_FAILED, ShardServer, folder_of
from clipper.params.shard.shard import ShardConfig
from clipper.settings.params import ParamsSettings
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.test_scraping import get
from tests.processes import Program
from tests.thread_faults import ERRORS, injected, names_seen

LIMIT_S = 60.0
VITAL = {
    "clipper-shard-loop",
    "clipper-shard-answers",
    "clipper-shard-recovers",
    "clipper-shard-log",
}


class Running:
    """A shard of a set of two, which is waited for as its process does."""

    def __init__(self, root: Path, number: int) -> None:
        settings = ParamsSettings(
            shards=2, replicas=1, durability="disk", snapshot_s=0.0, recover_s=1.0
        )
        self.addresses = tuple(f"unix:{root}/{i}.sock" for i in range(2))
        config = ShardConfig(number, self.addresses, settings, TOKEN, folder_of(root, number))
        self.server = ShardServer(config).start()
        self.waiting = threading.Thread(target=self.server.wait)
        self.waiting.start()

    @property
    def has_ended(self) -> bool:
        return not self.waiting.is_alive()

    def close(self) -> None:
        closing = threading.Thread(target=self.server.close)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive()
        self.waiting.join(LIMIT_S)
        assert self.has_ended
        self.server.close()


def use(addresses: tuple[str, ...]) -> None:
    """Push and pull rows of both shards."""
    with Client(addresses, token=TOKEN, patience_s=20.0) as client:
        client.create(TableSpec("users", 2))
        client.push("users", [1, 2, 3, 4], ones((4, 2)))
        assert client.pull("users", [1, 2, 3, 4]).shape == (4, 2)


def outcome(root: Path, *, ends: bool = False) -> str:
    """Start a set, use it, and close it. Return "serves", or what has ended one of its shards.

    ends: wait for that.
    """
    each = [Running(root, number) for number in range(2)]
    try:
        if not ends:
            until(lambda: all(one.server.ready.is_set() for one in each))
            use(each[0].addresses)
            return "serves"
        until(lambda: any(one.has_ended for one in each))
        (one,) = [one for one in each if one.has_ended]
        assert one.server.shard.ended == "failed"
        return str(one.server.failed)
    finally:
        for one in each:
            one.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_the_entry_of_a_thread_of_a_shard(kind: str, tmp_path: Path) -> None:
    with names_seen() as names:
        assert outcome(tmp_path / "names") == "serves"
    assert names.keys() >= {*VITAL, "clipper-follower", "clipper-shard-snapshots"}
    for name in names:
        root = tmp_path / name
        with injected(name, kind) as fault:
            found = outcome(root, ends=name in VITAL)
        assert fault.count == 1
        if name in VITAL:
            assert found.startswith(f"{name} has failed: "), found
        else:
            assert found == "serves", name
        assert outcome(root) == "serves"  # nothing holds the folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("name", sorted(VITAL))
def test_a_process_of_a_shard_ends_when_a_vital_thread_has_failed(
    name: str, kind: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.params.failing_shard", name, kind, str(tmp_path)]
    ran = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True)
    assert ran.returncode == EXIT_FAILED, ran.stderr
    assert f"shard 0 ends: {name} has failed" in ran.stderr


@pytest.mark.slow
def test_a_process_of_a_shard_serves_although_a_thread_has_failed_once(tmp_path: Path) -> None:
    name = "clipper-shard-snapshots"
    command = [sys.executable, "-m", "tests.params.failing_shard", name, "memory", str(tmp_path)]
    with Program(*command, until="it serves") as process:
        assert process.stop() == 0


def test_a_shard_tells_which_of_its_threads_has_failed(shards: Shards) -> None:
    with injected("clipper-follower", "unexpected", times=1000):
        client = shards.up(2, replicas=1).client()
        until(lambda: bool(client.call(0, "stats")["degraded"]))
        found = client.call(0, "stats")
    assert found["degraded"] == ["clipper-follower-1 failed: ZeroDivisionError: injected"]
    assert found["ready"]


def test_a_shard_ends_when_its_grpc_server_has_lost_it(shards: Shards) -> None:
    pytest.importorskip("grpc")
    from clipper.frontend.params_grpc.server import ShardGrpc

    server = shards.up(1, grpc="127.0.0.1:0").servers[0]
    front = ShardGrpc(server.shard).start()
    try:
        server.shard.watch(front.health)
        server._end_if_failed()
        assert server.failed is None
        assert front._connection._reader is not None
        front._loop.call(front._connection._reader.cancel)
        assert server.wait() == "failed"
        assert "clipper-shard-grpc-connection has failed" in str(server.failed)
    finally:
        front.stop()


def test_a_grpc_server_that_was_stopped_has_not_failed(shards: Shards) -> None:
    pytest.importorskip("grpc")
    from clipper.frontend.params_grpc.server import ShardGrpc

    server = shards.up(1, grpc="127.0.0.1:0").servers[0]
    front = ShardGrpc(server.shard).start()
    server.shard.watch(front.health)
    front.stop()
    server.end("closed")
    assert server.wait() == "closed"
    assert server.failed is None


def test_every_part_of_a_shard_is_closed_whatever_one_of_them_raises(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.up(1)
    server = shards.servers.pop(0)

    close = server.shard.snapshots.close

    def fail(*, last: bool) -> None:
        close(last=last)
        raise OSError("the disk is full")

    monkeypatch.setattr(server.shard.snapshots, "close", fail)
    with pytest.raises(BaseExceptionGroup, match="shard 0 is closed; 1 parts failed"):
        server.close()
    server.close()
    shards.begin(0)
    assert shards.servers[0].ready.wait(60)


def test_a_move_that_cannot_begin_says_so(shards: Shards, tmp_path: Path) -> None:
    shards.up(1)
    to = tmp_path / "to"
    to.mkdir()
    (to / "shards.json").write_text(f'{{"addresses": ["unix:{to}/0.sock"], "token": "t"}}')
    with injected("clipper-shard-move", "memory"):
        sender = move.RowSender(shards.servers[0].shard, to)
        until(lambda: not sender.runs)
    assert sender.error == "MemoryError: injected"


def test_the_search_for_a_successor_is_tried_again(shards: Shards) -> None:
    """A shard whose search fails neither goes on without its replica nor forgets to look."""
    shards.up(2, replicas=1, without_replica_s=0.2)
    client = shards.client()
    client.create(TableSpec("users", 2))
    shards.wait_for_copies()
    with injected("clipper-shard-check", "memory", times=2) as fault:
        shards.lose(1)
        until(lambda: client.call(0, "stats")["followers"][0]["on"] is False)
    assert fault.count == 2


def fails_once(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return a function whose first call raises."""
    failed: list[bool] = []

    def call(*given: Any, **named: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ERRORS[kind]()
        return function(*given, **named)

    return call


@pytest.mark.parametrize("kind", ["memory", "unexpected"])
def test_the_health_check_of_a_set_goes_on_after_an_error(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any, **__: Any) -> None:
        raise TimeoutError

    hung: list[int] = []
    monkeypatch.setattr(health_check, "EVERY_S", 0.01)
    monkeypatch.setattr(health_check, "call_once", fails_once(silent, kind))
    check = HealthCheck(["unix:/nowhere"], "", 0.05, hung.append)
    check.start()
    until(lambda: bool(hung))
    assert [one.state for one in check.health()] == [State.DEGRADED]
    check.stop()
    check.stop()
    assert [one.state for one in check.health()] == [State.ENDED]


@pytest.mark.parametrize("kind", ERRORS)
def test_the_page_of_metrics_goes_on_after_an_error(kind: str) -> None:
    with injected("clipper-params-metrics", kind):
        page = MetricsPage("127.0.0.1:0", list).start()
        assert get(page)[0] == 200
    page.stop()
    page.stop()
    assert page.health().state is State.ENDED


def test_a_page_of_metrics_that_does_not_come_up_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_page, "_AGAIN_S", (60.0, 60.0))
    with injected("clipper-params-metrics", "memory"):
        page = MetricsPage("127.0.0.1:0", list).start()
        until(lambda: page.health().state is State.DEGRADED)
    stopping = threading.Thread(target=page.stop, daemon=True)
    stopping.start()
    stopping.join(LIMIT_S)
    assert not stopping.is_alive()


@pytest.mark.parametrize("kind", ERRORS)
def test_resharding_goes_on_after_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Host:
        """The supervisor of a set."""

        settings = ParamsSettings()

    host: Any = Host()
    looked = threading.Event()
    reshard = LiveReshard(host)
    monkeypatch.setattr(live_reshard, "AGAIN_S", 0.01)
    monkeypatch.setattr(reshard, "reshard_if_requested", fails_once(looked.set, kind))
    worker = Worker("clipper-params-reshard", reshard.run, again=Backoff(0.01, 0.01))
    worker.start()
    assert looked.wait(LIMIT_S)
    assert worker.health().state is State.DEGRADED
    assert worker.end(LIMIT_S)
