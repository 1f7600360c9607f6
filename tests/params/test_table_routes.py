"""Tables of a server over HTTP: what each route does, and what the history has of it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import DoesNotFit, InvalidInput, TypeConflict, UnknownTable
from clipper.params import TableSpec
from clipper.params.local.live_reshard import request_in
from tests.frontend.conftest import warm_workers
from tests.params.conftest import ones, until
from tests.params.test_table_changes import SGD


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    folder = tmp_path_factory.mktemp("tables")
    with clipper.start(
        params=str(folder / "set"), http={"admin": "127.0.0.1:0"}, warmup=False
    ) as started:
        warm_workers(started)
        yield started


@pytest.fixture
def remote(server: clipper.ClipperServer) -> Iterator[Any]:
    with clipper.connect(f"http://{server.admin_address}") as found:
        found.headers["Clipper-Actor"] = "ann"
        yield found


def test_a_table_is_created_altered_and_dropped_over_http(
    server: clipper.ClipperServer, remote: Any
) -> None:
    client = server.params
    client.create(TableSpec("plain", 3, **SGD))
    client.push("plain", range(10), -ones((10, 3)))

    def post(path: str, members: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = remote.request("POST", f"/admin/tables/{path}", members)
        return found

    (row,) = remote.request("GET", "/admin/tables")["tables"]
    assert (row["name"], row["dim"], row["rows"]) == ("plain", 3, 10)
    tried = post("plain/drop?dry_run=true", {})
    assert (tried["dry_run"], tried["rows"]) == (True, 10)
    assert client.pull("plain", [1]).tolist() == [[1] * 3]
    assert not [one for one in remote.history() if "table" in one["verb"]]
    assert post("plain/alter", {"expire_s": 900})["changed"][0]["after"]["expire_s"] == 900
    assert post("plain/erase", {"ids": [1, 2.0, 77]})["rows"] == 2
    assert post("plain/copy", {"to": "twin"})["rows"] == 8
    made = {"dim": 4, "dtype": "f16", "optimizer": "adam", "optimizer_settings": {"rate": 0.5}}
    assert post("small/create?dry_run=true", made)["dry_run"]
    assert post("small/create", made)["changed"][0]["after"]["dtype"] == "f16"
    assert client.spec("small") == TableSpec("small", **made)
    assert post("twin/export", {"file": "twin.npz"})["rows"] == 8
    assert post("twin/drop", {})["message"] == "dropped table twin"
    assert post("twin/import", {"file": "twin.npz", "create": True})["rows"] == 8
    np.testing.assert_array_equal(
        client.pull("twin", range(3, 10)), client.pull("plain", range(3, 10))
    )
    assert remote.request("GET", "/admin/tables/twin")["rows"] == 8
    entries = [one for one in remote.history() if one["changed"][0]["key"].startswith("tables/")]
    assert [(one["actor"], one["verb"]) for one in entries] == [
        ("ann", verb)
        for verb in (
            "alter table",
            "erase rows",
            "copy table",
            "create table",
            "export table",
            "drop table",
            "import table",
        )
    ]
    assert entries[1]["changed"][0]["after"] == {"erased": 2}
    assert entries[5]["changed"][0]["before"]["rows"] == 8
    assert entries[5]["changed"][0]["after"] is None
    assert not server.catalog.applications()


def test_methods_of_a_remote_client(server: clipper.ClipperServer) -> None:
    spec = TableSpec("typed", 3, dtype="f16", **SGD)
    with clipper.connect(f"http://{server.admin_address}") as remote:
        tables = remote.tables
        assert tables.create(spec, dry_run=True)["dry_run"]
        with pytest.raises(UnknownTable):
            tables.get("typed")
        assert tables.create(spec)["verb"] == "create table"
        with pytest.raises(TypeConflict):
            tables.create(TableSpec("typed", 4))
        server.params.push("typed", range(10), -ones((10, 3)))
        assert tables.get("typed") == (spec, 10)
        assert (spec, 10) in tables.list()
        altered = tables.alter("typed", quota_rows=50, optimizer_settings={"rate": 0.5})
        assert altered["changed"][0]["key"] == "tables/typed"
        assert tables.get("typed").spec.quota_rows == 50
        with pytest.raises(InvalidInput):
            tables.alter("typed")
        assert tables.erase("typed", [1, 2, 77])["rows"] == 2
        assert tables.copy("typed", "more")["rows"] == 8
        assert tables.export_rows("typed", "typed.npz")["rows"] == 8
        assert tables.drop("typed", dry_run=True)["rows"] == 8
        assert tables.drop("typed")["message"] == "dropped table typed"
        assert tables.import_rows("typed", "typed.npz", create=True)["rows"] == 8
        with pytest.raises(UnknownTable):
            tables.drop("none")
        for name in ("typed", "more"):
            tables.drop(name)


@pytest.mark.slow
def test_the_number_of_shards_changes_over_http(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shards")
    with (
        clipper.start(params=str(folder), http={"admin": "127.0.0.1:0"}, warmup=False) as server,
        clipper.connect(f"http://{server.admin_address}") as remote,
    ):
        client = server.params
        client.create(TableSpec("t", 2, **SGD))
        client.push("t", range(10), -ones((10, 2)))
        tables, before = remote.tables, remote.tables.shards()
        assert before["resharding"] is None
        wanted = int(str(before["shards"])) + 1
        assert tables.reshard(wanted, dry_run=True)["dry_run"]
        assert tables.shards() == before
        changed = tables.reshard(wanted)["changed"][0]
        assert (changed["key"], changed["after"]) == ("shards", {"shards": wanted})
        with pytest.raises(InvalidInput):
            tables.reshard(0)
        until(lambda: tables.shards()["shards"] == wanted)
        assert (client.pull("t", range(10)) == 1).all()
        assert len(client) == wanted
        until(lambda: not request_in(folder))
        assert tables.shards()["resharding"]["phase"] == "done"
        assert "reshard" in [one["verb"] for one in remote.history()]


@pytest.mark.parametrize(
    ("path", "members", "error"),
    [
        ("none/drop", {}, UnknownTable),
        ("none/export", {"file": "a.npz"}, UnknownTable),
        ("new/create", {"dim": 0}, InvalidInput),
        ("new/create", {"dtype": "f16"}, InvalidInput),
        ("new/create", {"dim": 2, "dtype": "f8"}, InvalidInput),
        ("there/create", {"dim": 2, "dtype": "f16"}, TypeConflict),
        ("there/alter", {}, InvalidInput),
        ("there/alter", {"dim": 3}, InvalidInput),
        ("there/alter", {"rows_max": 0}, InvalidInput),
        ("there/erase", {"ids": []}, InvalidInput),
        ("there/erase", {"ids": [1 << 64]}, InvalidInput),
        ("there/export", {"file": "../a.npz"}, InvalidInput),
        ("there/export", {"file": "a.txt"}, InvalidInput),
        ("there/import", {"file": "nothing.npz"}, InvalidInput),
        ("there/import", {"file": "/etc/passwd"}, InvalidInput),
        ("there/copy", {"to": "a b"}, InvalidInput),
    ],
)
def test_invalid_requests_change_nothing(
    server: clipper.ClipperServer,
    remote: Any,
    path: str,
    members: dict[str, Any],
    error: type[Exception],
) -> None:
    server.params.create(TableSpec("there", 2))
    before = server.params.spec("there"), len(remote.history())
    with pytest.raises(error):
        remote.request("POST", f"/admin/tables/{path}", members)
    assert (server.params.spec("there"), len(remote.history())) == before


def test_a_server_without_tables_refuses_table_requests() -> None:
    with (
        clipper.start(http={"admin": "127.0.0.1:0"}, warmup=False) as server,
        clipper.connect(f"http://{server.admin_address}") as remote,
        pytest.raises(DoesNotFit, match="no tables"),
    ):
        remote.request("POST", "/admin/tables/a/drop", {})
