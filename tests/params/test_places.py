"""Shards that say themselves where they are, and those that some engine runs."""

import json
import threading
from pathlib import Path

import pytest

from clipper.errors import AlreadyExists, ConfigError, DoesNotFit, InvalidInput
from clipper.params import Client, TableSpec
from clipper.params.local.address_file import (
    UNKNOWN_ADDRESS,
    AddressFile,
    prepare,
    publish_address,
    read_address_file,
    running_shards,
)
from clipper.params.local.fork_server import config_in
from clipper.params.local.local_set import LocalSet, reshard, restore
from clipper.params.shard.recovery import EpochFile
from clipper.params.shard.server import ShardServer, folder_of
from clipper.settings.params import ParamsSettings
from tests.params.conftest import ones, until


def settings(folder: Path, shards: int = 2, **more: object) -> ParamsSettings:
    given: dict[str, object] = {"snapshot_s": 0.0, "recover_s": 1.0, **more}
    return ParamsSettings(folder=str(folder), shards=shards, **given)  # type: ignore[arg-type]


def begin(folder: Path, number: int) -> ShardServer:
    """On any free port of this host."""
    place = config_in(folder, number)
    given = {name: getattr(place, name) for name in place.__struct_fields__}
    return ShardServer(type(place)(**{**given, "listen": "tcp:127.0.0.1:0"})).start()


def test_shards_that_move_are_found(tmp_path: Path) -> None:
    prepare(settings(tmp_path, replicas=1), "ray")
    assert read_address_file(tmp_path)["addresses"] == [UNKNOWN_ADDRESS, UNKNOWN_ADDRESS]
    client = Client(tmp_path, patience_s=20.0)
    servers = {number: begin(tmp_path, number) for number in range(2)}
    try:
        client.create(
            TableSpec(
                "t", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
            )
        )
        client.push("t", range(10), -ones((10, 2)))
        before = read_address_file(tmp_path)["addresses"]
        for number in (1, 0):
            until(
                lambda: all(
                    [one["whole"] for one in said["followers"]] == [True]
                    for _, said in client.call_all("stats")
                )
            )
            servers.pop(number).close(snapshot=False)
            servers[number] = begin(tmp_path, number)
            assert servers[number].ready.wait(20)
            assert servers[number].recovered == f"its replica in shard {1 - number}"
        after = read_address_file(tmp_path)["addresses"]
        assert not {*before} & {*after}
        client.push("t", range(10), -ones((10, 2)))
        assert (client.pull("t", range(10)) == 2).all()
    finally:
        client.close()
        for server in servers.values():
            server.close()


def test_all_that_speak_at_once_are_written_down(tmp_path: Path) -> None:
    prepare(settings(tmp_path, 8), "ray")
    gate = threading.Barrier(8)

    def speak(number: int) -> None:
        gate.wait()
        publish_address(tmp_path, number, f"tcp:h:{number}")

    threads = [threading.Thread(target=speak, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_address_file(tmp_path)["addresses"] == [f"tcp:h:{number}" for number in range(8)]


def test_a_book_is_read_again_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(settings(tmp_path), "ray")
    book, now = AddressFile(tmp_path), [100.0]
    monkeypatch.setattr("clipper.params.local.address_file.time.monotonic", lambda: now[0])
    assert book.address(1) == UNKNOWN_ADDRESS
    publish_address(tmp_path, 1, "tcp:h:1")
    assert book.address(1) == UNKNOWN_ADDRESS
    now[0] += 1
    assert book.address(1) == "tcp:h:1"
    (tmp_path / "shards.json").unlink()
    now[0] += 1
    with pytest.raises(InvalidInput, match=r"shards\.json"):
        book.address(1)


def test_what_runs_is_left_alone(tmp_path: Path) -> None:
    prepare(settings(tmp_path), "ray")
    assert running_shards(tmp_path) == []
    one = EpochFile(folder_of(tmp_path, 1))
    publish_address(tmp_path, 1, "tcp:h:1")
    assert running_shards(tmp_path) == [1]
    with pytest.raises(AlreadyExists, match=r"runs in .*, on ray"):
        LocalSet(settings(tmp_path))
    with pytest.raises(AlreadyExists, match="a set of shards runs"):
        prepare(settings(tmp_path), "another")
    with pytest.raises(DoesNotFit, match="runs"):
        reshard(tmp_path, 3)
    with pytest.raises(DoesNotFit, match="runs"):
        restore(tmp_path, tmp_path)
    prepare(
        settings(tmp_path, lag_max=5), "ray"
    )  # those that are missing are started; those that run stay where they are
    said = read_address_file(tmp_path)
    assert (said["addresses"], said["settings"]["lag_max"]) == ([UNKNOWN_ADDRESS, "tcp:h:1"], 5)
    one.close()
    assert running_shards(tmp_path) == []
    prepare(settings(tmp_path), "another")
    assert read_address_file(tmp_path)["addresses"] == [UNKNOWN_ADDRESS, UNKNOWN_ADDRESS]


def test_what_cannot_be_prepared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than"):
        prepare(settings(tmp_path, 2, replicas=2), "ray")
    prepare(settings(tmp_path, 2), "ray")
    with pytest.raises(DoesNotFit, match="has 2 shards, not 3"):
        prepare(settings(tmp_path, 3), "ray")
    token = read_address_file(tmp_path)["token"]
    prepare(settings(tmp_path, 2), "ray")
    assert read_address_file(tmp_path)["token"] == token
    assert json.loads((tmp_path / "shards.json").read_text())["settings"]["token"] == ""
    assert (tmp_path / "shards.json").stat().st_mode & 0o777 == 0o600
