"""Tables that are altered while trained, erased from, written to, kept in files, and copied."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from clipper.cli.params.shards import params
from clipper.errors import DoesNotFit, InvalidInput, TypeConflict, UnknownTable
from clipper.params import Client, TableSpec
from clipper.params.client.table_files import copy_table, export_table, import_table, read_rows
from tests.params.conftest import Shards, ones, until
from tests.params.test_streams import assert_copied, streams

Settings = Any
SGD: Settings = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}, "initializer": "zeros"}
PLAIN = TableSpec("plain", 3, **SGD)
ADAM = TableSpec("adam", 2, optimizer="adam")


def trained_tables(shards: Shards, count: int = 2, **settings: Settings) -> Client:
    client = shards.up(count, **settings).client()
    for spec in (PLAIN, ADAM):
        client.create(spec)
        for _ in range(3):
            client.push(spec.name, range(-10, 20), -ones((30, spec.dim)))
    return client


def test_rate_is_changed_while_a_table_is_trained(shards: Shards) -> None:
    client = trained_tables(shards, replicas=1)
    until(lambda: streams(shards))
    assert client.alter("plain", optimizer_settings={"rate": 0.5}).optimizer_settings["rate"] == 0.5
    client.push("plain", [1, 2], -ones((2, 3)))
    assert_copied(shards)  # before a pull, which marks rows on the primary alone
    assert client.pull("plain", [1, 2]).tolist() == [[3.5] * 3] * 2
    other = TableSpec("plain", 3, **{**SGD, "optimizer_settings": {"rate": 0.25}})
    for worker in (client, shards.client()):
        worker.create(PLAIN)  # one that starts with the old settings
        worker.create(client.spec("plain"))
        with pytest.raises(TypeConflict, match="rate"):
            worker.create(other)
    for shard in (0, 1):  # it comes back with what it was changed to
        shards.wait_for_copies()
        shards.lose(shard)
        assert shards.begin(shard).ready.wait(60)
        shards.client().create(PLAIN)
    client.push("plain", [1, 2], -ones((2, 3)))
    assert client.pull("plain", [1, 2]).tolist() == [[4.0] * 3] * 2


def test_changed_settings_are_in_snapshots(shards: Shards) -> None:
    client = trained_tables(shards)
    client.alter("plain", optimizer_settings={"rate": 0.5}, expire_s=1000)
    shards.down()
    for shard in (0, 1):
        shards.begin(shard)
    client.push("plain", [1, 2], -ones((2, 3)))
    assert client.pull("plain", [1, 2]).tolist() == [[3.5] * 3] * 2
    assert shards.client().spec("plain").expire_s == 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 4},
        {"optimizer": "adam"},
        {"optimizer_settings": {"rat": 1.0}},
        {"optimizer_settings": {"rate": -1.0}},
        {"optimizer_settings": 3},
        {"rows_max": 0},
        {"expire_s": "long"},
    ],
)
def test_invalid_changes_of_a_table_change_nothing(
    shards: Shards, changes: dict[str, Settings]
) -> None:
    client = trained_tables(shards)
    before = client.spec("plain")
    with pytest.raises(InvalidInput):
        client.alter("plain", evicts=True, **changes)
    assert shards.client().spec("plain") == before
    with pytest.raises(UnknownTable):
        client.alter("other", evicts=True)


def test_limit_of_rows_is_lowered_and_raised(shards: Shards) -> None:
    client = trained_tables(shards, count=1)
    client.alter("plain", rows_max=10, evicts=True)
    assert client.call(0, "stats")["tables"]["plain"]["rows"] == 10
    client.push("plain", range(100, 130), -ones((30, 3)))
    assert client.call(0, "stats")["tables"]["plain"]["rows"] == 10
    client.alter("plain", rows_max=50)
    client.push("plain", range(200, 230), -ones((30, 3)))
    assert client.call(0, "stats")["tables"]["plain"]["rows"] == 40


def test_erased_rows_are_removed_from_replicas_and_the_next_whole_snapshot(shards: Shards) -> None:
    client = trained_tables(shards, replicas=1)
    until(lambda: streams(shards))
    assert client.erase("plain", [1, 2, 3, 1000]) == 3
    assert_copied(shards)  # before a pull, which marks rows on the primary alone
    assert client.pull("plain", [1, 2, 3, 4]).tolist() == [[0] * 3] * 3 + [[3] * 3]
    client.call_all("snapshot", whole=True)
    shards.down(snapshot=False)
    for shard in (0, 1):
        shards.begin(shard)
    assert client.pull("plain", [1, 2, 3, 4]).tolist() == [[0] * 3] * 3 + [[3] * 3]


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_a_table_is_exported_and_imported(shards: Shards, tmp_path: Path, kind: str) -> None:
    pytest.importorskip(
        {"npz": "numpy", "safetensors": "safetensors", "parquet": "pyarrow"}[kind],
        reason=f"{kind} needs a package: pip install safetensors pyarrow",
    )
    client, path = trained_tables(shards), tmp_path / f"rows.{kind}"
    assert export_table(client, "plain", path) == 30
    ids, rows = read_rows(path)
    assert ids.tolist() == list(range(-10, 20))
    assert (rows == 3).all()
    assert [one.name for one in tmp_path.glob("*rows*")] == [path.name]
    client.create(TableSpec("back", 3, **SGD))
    assert import_table(client, "back", path) == 30
    assert (client.pull("back", ids) == rows).all()


def test_pretrained_rows_are_read_and_trained_on(shards: Shards, tmp_path: Path) -> None:
    client, path = trained_tables(shards, replicas=1), tmp_path / "rows.npy"
    rows = np.random.default_rng(1).standard_normal((9000, 3))
    np.save(path, rows)
    assert import_table(client, "plain", path) == 9000
    until(lambda: streams(shards))
    client.push("plain", [5], ones((1, 3)))
    assert_copied(shards)  # before a pull, which marks rows on the primary alone
    rows[5] -= 1
    np.testing.assert_allclose(client.pull("plain", np.arange(9000)), rows, rtol=1e-5, atol=1e-6)


def test_rows_written_without_steps_leave_those_of_the_table(shards: Shards) -> None:
    client, rows = shards.up(1).client(), ones((1, 3), np.float32)
    client.create(PLAIN)
    (table,) = shards.servers[0].shard.parameters.tables
    client.call(0, "write", table="plain", ids=np.array([1]), rows=rows)
    assert table.steps == 0
    client.call(0, "write", table="plain", ids=np.array([1]), rows=rows, steps=7)
    assert table.steps == 7
    assert (client.pull("plain", [1]) == 1).all()


def test_files_that_cannot_be_read_give_the_reason(shards: Shards, tmp_path: Path) -> None:
    client = trained_tables(shards, count=1)
    np.save(tmp_path / "wide.npy", ones((4, 5)))
    np.savez(tmp_path / "other.npz", a=ones(3))
    np.savez(tmp_path / "odd.npz", ids=ones(4), rows=ones((4, 3)))
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "rows.txt").write_text("1 2 3")
    for name in ("wide.npy", "other.npz", "odd.npz", "rows.txt", "torn.npz"):
        with pytest.raises(InvalidInput, match=name):
            import_table(client, "plain", tmp_path / name)
    with pytest.raises(InvalidInput, match=r"Write \.npz"):
        export_table(client, "plain", tmp_path / "rows.npy")
    client.create(TableSpec("small", 3, rows_max=2))
    np.save(tmp_path / "rows.npy", ones((4, 3)))
    with pytest.raises(DoesNotFit, match="clipper params alter small"):
        import_table(client, "small", tmp_path / "rows.npy")
    with pytest.raises(InvalidInput, match="f32"):
        client.write("plain", [1, 2], ones((3, 3)))
    with pytest.raises(InvalidInput, match="NaN"):
        client.write("plain", [1], np.full((1, 3), np.nan))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i8"])
def test_rows_of_fewer_bits_survive_snapshot_copy_and_file(
    shards: Shards, tmp_path: Path, dtype: str
) -> None:
    client, every = shards.up(2, replicas=1).client(), np.arange(-10, 20)
    spec = TableSpec("small", 5, dtype=dtype, initializer="normal")
    client.create(spec)
    until(lambda: streams(shards))
    draw = np.random.default_rng(6)
    for _ in range(9):
        client.push("small", draw.permutation(every)[:20], draw.standard_normal((20, 5)))
    assert_copied(shards)
    rows = client.pull("small", every)
    if dtype != "bf16":  # which is pulled as bits
        assert (client.pull("small", every, dtype) == rows).all()
    export_table(client, "small", tmp_path / "rows.npz")
    client.create(TableSpec("back", 5, dtype=dtype))
    import_table(client, "back", tmp_path / "rows.npz")
    copy_table(client, "small", "twin")
    shards.wait_for_copies()
    shards.lose(0)  # it comes back from its replica, the next time from a snapshot
    assert shards.begin(0).ready.wait(60)
    assert (client.pull("small", every) == rows).all()
    shards.down()
    for shard in (0, 1):
        shards.begin(shard)
    client = shards.client()
    for name in ("small", "back", "twin"):
        found = client.pull(name, read_rows(tmp_path / "rows.npz")[0])
        assert (found == read_rows(tmp_path / "rows.npz")[1]).all()
    assert client.spec("small").dtype == dtype
    with pytest.raises(TypeConflict, match="dtype"):
        client.create(TableSpec("small", 5, initializer="normal"))
    with pytest.raises(InvalidInput, match="dtype"):
        client.create(TableSpec("other", 5, dtype="f8"))


def test_a_copied_table_trains_as_the_original(shards: Shards) -> None:
    client = trained_tables(shards)
    assert copy_table(client, "adam", "twin") == 30
    for name in ("adam", "twin"):
        client.push(name, range(20), ones((20, 2)))
    every = np.arange(-10, 20)
    assert (client.pull("adam", every) == client.pull("twin", every)).all()


def test_command_line(shards: Shards, tmp_path: Path) -> None:
    trained_tables(shards)
    folder, run = tmp_path / "set", CliRunner()
    folder.mkdir()
    address_file = {"addresses": list(shards.addresses), "token": "open sesame"}
    (folder / "shards.json").write_text(json.dumps(address_file))
    (tmp_path / "ids").write_text("1\n2\n")
    np.save(tmp_path / "rows.npy", ones((4, 2)))
    for line, shows in (
        ("create small 4 --dtype i8 --optimizer adam --set rate=0.5", "dtype i8"),
        ("alter plain --set rate=0.25", "rate"),
        (f"erase plain 5 --file {tmp_path}/ids", "3 rows are erased"),
        (f"export plain {tmp_path}/rows.npz", "27 rows"),
        (f"import words {tmp_path}/rows.npy --create", "4 rows"),
        ("copy words more", "4 rows of words are in more"),
        ("pull more 3", "3: 1 1"),
    ):
        found = run.invoke(params, [*line.split(), "--folder", str(folder)])
        assert found.exit_code == 0, found.output
        assert shows in found.output
    wrong = ("alter plain", "alter plain --set rate", "erase plain", "create few 2 --set rate")
    for line in wrong:
        found = run.invoke(params, [*line.split(), "--folder", str(folder)])
        assert found.exit_code == 2, found.output
