"""Shards that report their own addresses, and those that a container engine runs."""

import json
import threading
from pathlib import Path

import pytest

from clipper.cli.params import on_ray as params_on_ray
from clipper.errors import AlreadyExists, ConfigError, DoesNotFit, InvalidInput, NoServer
from clipper.params import Client, TableSpec
from clipper.params.local import live_reshard
from clipper.params.local.address_file import (
    UNKNOWN_ADDRESS,
    AddressFile,
    prepare,
    publish_address,
    read_address_file,
    running_shards,
    write_address_file,
)
from clipper.params.local.local_set import LocalSet, reshard, restore
from clipper.params.local.shard_process import config_in
from clipper.params.shard.durability.recovery import EpochFile
from clipper.params.shard.resharding.decision import decide, note_move, prepare_decision
from clipper.params.shard.server import ShardServer, folder_of, former_of_host
from clipper.params.shard.shard import ShardConfig
from clipper.settings.params import ParamsSettings
from tests.params.conftest import ones, until
from tests.threads import join


def settings(folder: Path, shards: int = 2, **more: object) -> ParamsSettings:
    given: dict[str, object] = {"snapshot_s": 0.0, "recover_s": 1.0, **more}
    return ParamsSettings(folder=str(folder), shards=shards, **given)  # type: ignore[arg-type]


def begin(folder: Path, number: int) -> ShardServer:
    """Start a shard of the folder on a free port of this host."""
    place = config_in(folder, number)
    given = {name: getattr(place, name) for name in place.__struct_fields__}
    return ShardServer(type(place)(**{**given, "listen": "tcp:127.0.0.1:0"})).start()


def test_clients_find_shards_that_moved(tmp_path: Path) -> None:
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
            assert servers[number].ready.wait(60)
            assert servers[number].shard.recovery[1] == f"its replica in shard {1 - number}"
        after = read_address_file(tmp_path)["addresses"]
        assert not {*before} & {*after}
        client.push("t", range(10), -ones((10, 2)))
        assert (client.pull("t", range(10)) == 2).all()
    finally:
        client.close()
        for server in servers.values():
            server.close()


def test_addresses_published_at_once_are_all_stored(tmp_path: Path) -> None:
    prepare(settings(tmp_path, 8), "ray")
    gate = threading.Barrier(8)

    def write_address(number: int) -> None:
        gate.wait()
        publish_address(tmp_path, number, f"tcp:h:{number}")

    threads = [threading.Thread(target=write_address, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert read_address_file(tmp_path)["addresses"] == [f"tcp:h:{number}" for number in range(8)]


def test_an_old_address_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_running_shards_are_not_started_elsewhere(tmp_path: Path) -> None:
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
    # those that are missing are started; those that run stay where they are
    prepare(settings(tmp_path, lag_max=5), "ray")
    said = read_address_file(tmp_path)
    assert (said["addresses"], said["settings"]["lag_max"]) == ([UNKNOWN_ADDRESS, "tcp:h:1"], 5)
    one.close()
    assert running_shards(tmp_path) == []
    prepare(settings(tmp_path), "another")
    assert read_address_file(tmp_path)["addresses"] == [UNKNOWN_ADDRESS, UNKNOWN_ADDRESS]


def test_a_set_that_does_not_fit_its_folder_is_not_prepared(tmp_path: Path) -> None:
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


def moved_to(folder: Path, shards: int) -> Path:
    """Create a set of so many shards in set-1, and commit the move to it; return its folder."""
    home = folder / "set-1"
    home.mkdir()
    content = read_address_file(folder)
    content |= {"addresses": [f"tcp:h:{i}" for i in range(shards)], "generation": 1, "before": 0}
    write_address_file(home, content)
    note_move(folder, home)
    prepare_decision(home)
    decide(home, "commit")
    return home


def test_an_old_shard_that_restarts_does_not_disturb_the_new_set(tmp_path: Path) -> None:
    prepare(settings(tmp_path), "ray")
    home = moved_to(tmp_path, 3)
    assert config_in(tmp_path, 1).generation == 0
    live_reshard.publish(tmp_path, home)
    publish_address(tmp_path, 1, "tcp:old:1")
    publish_address(home, 2, "tcp:h:9")
    assert read_address_file(tmp_path)["addresses"] == ["tcp:h:0", "tcp:h:1", "tcp:h:9"]
    with pytest.raises(DoesNotFit, match="has moved to set-1"):
        config_in(tmp_path, 1)
    assert config_in(home, 1).generation == 1
    live_reshard.link(tmp_path, home)
    assert config_in(tmp_path, 1).generation == 1, "its folders are those of the new set now"


@pytest.mark.parametrize(
    ("present", "listen", "found"),
    [
        ("tcp:10.0.0.1:7002", "", ["tcp:10.0.0.1:7000"]),
        ("tcp:not-yet.invalid:1", "tcp:10.0.0.1:43210", ["tcp:10.0.0.1:7000"]),
        ("tls:10.0.0.1:7002?ca=/a:b/ca.pem", "", []),
        ("unix:/shop/shard-0.sock", "", []),
        ("tcp:127.0.0.1:7002", "", []),
    ],
)
def test_a_shard_listens_only_where_its_operator_lets_it_now(
    present: str, listen: str, found: list[str]
) -> None:
    former = ("tcp:10.0.0.1:7000", "tcp:0.0.0.0:7000")
    assert former_of_host(ShardConfig(0, (present,), listen=listen, former=former)) == found


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list that will hold the folders of sets whose actors were ended. Ray and
    resharding are replaced by fakes."""
    found: list[Path] = []
    monkeypatch.setattr("clipper.deploy.ray.nodes.join_ray", lambda _: None)
    monkeypatch.setattr(params_on_ray.RaySet, "end_set", lambda _, home: found.append(home))
    monkeypatch.setattr(live_reshard.LiveReshard, "reshard_if_requested", lambda _: None)
    return found


def requested_on_ray(folder: Path, shards: int) -> int:
    with params_on_ray.resharding_on_ray(
        folder, shards, "params", "auto", together=False, cpus=1.0, resource=""
    ):
        return live_reshard.request_in(folder)


@pytest.mark.parametrize(("shards", "requested"), [(3, 0), (5, 5)])
def test_a_decided_resharding_is_completed_before_another_is_started(
    tmp_path: Path, ended: list[Path], shards: int, requested: int
) -> None:
    prepare(settings(tmp_path), "ray")
    moved_to(tmp_path, 3)
    live_reshard.request(tmp_path, 3)
    assert requested_on_ray(tmp_path, shards) == requested
    assert len(read_address_file(tmp_path)["addresses"]) == 3
    assert ended == [tmp_path]


def test_a_serving_set_is_not_mistaken_for_an_abandoned_one(
    tmp_path: Path, ended: list[Path]
) -> None:
    """The set was resharded while it served, and again while it was stopped."""
    prepare(settings(tmp_path), "ray")
    home = moved_to(tmp_path, 3)
    live_reshard.publish(tmp_path, home)
    live_reshard.link(tmp_path, home)
    write_address_file(tmp_path, {**read_address_file(tmp_path), "generation": 2, "before": -1})
    assert requested_on_ray(tmp_path, 4) == 4
    assert ended == [home]


def test_only_a_set_on_ray_is_resharded_on_ray(tmp_path: Path, ended: list[Path]) -> None:
    prepare(settings(tmp_path / "other"), "another")
    for folder in (tmp_path / "none", tmp_path, tmp_path / "other"):
        with pytest.raises(NoServer, match="was started on Ray"):
            requested_on_ray(folder, 3)
