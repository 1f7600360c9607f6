"""Health files of a shard for an external supervisor: alive while it answers, safe to stop while
its copies are complete."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.params.shard import server as server_module
from clipper.params.shard.durability.recovery import recover
from clipper.params.shard.health_files import HealthFiles, is_safe_to_stop
from clipper.params.shard.server import ShardServer, folder_of
from clipper.params.shard.shard import ShardConfig
from clipper.settings.params import ParamsSettings
from tests.params.conftest import TOKEN, Shards, until


def copy(
    last_request_s: float = 0.0, *, on: bool = True, whole: bool = True, has_request: bool = False
) -> Any:
    """Return the state of a follower. heard_s: when its last request came."""
    call = (0, 1.0) if has_request else None
    return SimpleNamespace(is_whole=on and whole, last_seen_s=last_request_s, waiting_call=call)


@pytest.mark.parametrize(
    ("found", "settled"),
    [
        (copy(99), True),
        (copy(99, whole=False), False),  # it walks
        (copy(99, on=False), False),  # it is looked for
        (copy(90, on=False), False),
        (copy(90), False),  # it was whole, and says nothing any more
        (copy(90, has_request=True), True),  # it waits for news
        (copy(70, on=False), True),  # it was given up: pushes go on, and so does an update
    ],
)
def test_a_shard_is_safe_to_stop_when_its_copies_are_complete_or_abandoned(
    found: Any, settled: bool
) -> None:
    settings = ParamsSettings(without_replica_s=20.0)
    assert is_safe_to_stop(True, [found], 100, settings) is settled
    assert is_safe_to_stop(True, [copy(99), found], 100, settings) is settled
    assert not is_safe_to_stop(False, [found], 100, settings)
    assert is_safe_to_stop(True, [], 100, settings)
    assert not is_safe_to_stop(True, [copy(0)], 100, ParamsSettings(without_replica_s=0)), (
        "pushes wait for it for ever"
    )
    assert is_safe_to_stop(
        True, [copy(90)], 100, ParamsSettings(replication="periodic", period_s=8)
    ), "it comes by now and then"


def test_a_shard_that_recovers_for_long_is_alive_and_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, alive = threading.Event(), tmp_path / "alive"

    def slowly(*given: Any, **more: Any) -> Any:
        assert go_on.wait(60)
        return recover(*given, **more)

    monkeypatch.setattr(server_module, "recover", slowly)
    address = (f"unix:{tmp_path}/0.sock",)
    place = ShardConfig(
        0, address, ParamsSettings(snapshot_s=0.0), TOKEN, folder_of(tmp_path, 0), alive=alive
    )
    server = ShardServer(place).start()
    try:
        until(alive.exists)
        alive.unlink()
        until(alive.exists)  # again and again
        assert not (tmp_path / "alive.ready").exists()
        go_on.set()
        until((tmp_path / "alive.ready").exists)
    finally:
        go_on.set()
        server.close()
    assert not list(tmp_path.glob("alive*"))


def test_a_shard_without_its_copy_is_not_ready(shards: Shards) -> None:
    alive = shards.root / "alive"
    shards.settings = ParamsSettings(
        shards=2, replicas=1, snapshot_s=0.0, recover_s=0.0, without_replica_s=3.5
    )
    shards.addresses = tuple(f"unix:{shards.root}/{i}.sock" for i in range(2))
    place = ShardConfig(
        0, shards.addresses, shards.settings, TOKEN, folder_of(shards.root, 0), alive=alive
    )
    shards.servers[0] = ShardServer(place).start()
    shards.begin(1)
    until((shards.root / "alive.ready").exists)
    shards.lose(1)
    until(lambda: not (shards.root / "alive.ready").exists())
    until((shards.root / "alive.ready").exists)  # it went on without


def test_an_unwritable_health_file_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pulse = HealthFiles(tmp_path / "nowhere" / "alive", ParamsSettings())
    pulse.update(True, [], 0.0)
    pulse.update(True, [], 0.0)
    assert len(caplog.records) == 1
    pulse.end()
    HealthFiles(None, ParamsSettings()).update(True, [], 0.0)
