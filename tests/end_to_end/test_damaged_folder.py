"""A damaged state folder: the server starts, or says in one typed error what is wrong."""

from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper import errors
from tests.memory_container import wait_until

QUICK: dict[str, Any] = {"warmup": False, "drain_s": 0.0, "stop_grace_s": 1.0}
SEGMENT = f"{1:020d}.log"
NAMES = ("node", "journal", f"journal/{SEGMENT}", "state.db", "catalog.copy", "models", "lock")
PLACES = [*NAMES, "environments", "learned.db"]


def damaged(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if damage == "a folder":
        (path / "within").mkdir(parents=True)
    elif damage == "no text":
        path.write_bytes(b"\xff\xfe\x00\x80" * 64)
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("damage", ["a folder", "no text", "empty"])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("state", ["folder", "memory"])
def test_a_damaged_folder_is_used_or_named(
    tmp_path: Path, name: str, damage: str, state: str
) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    damaged(folder, name, damage)
    settings = {"state": str(folder)} if state == "folder" else {"folder": str(folder)}
    refused: errors.ClipperError | None = None
    try:
        clipper.start(**settings, **QUICK).close(drain_s=0)
    except errors.ClipperError as error:
        refused = error
    if refused is not None:
        assert str(folder) in refused.message, "it says where"
        assert refused.hint, "and what to do"


@pytest.mark.parametrize("damage", ["a folder", "no text", "empty"])
def test_a_name_that_cannot_be_read_is_no_new_name(tmp_path: Path, damage: str) -> None:
    """Under another name it would learn again what the journal has."""
    damaged(tmp_path, "node", damage)
    with pytest.raises(errors.ConfigError, match=r"name .*/node cannot be read"):
        clipper.start(state=str(tmp_path), **QUICK)


def total(rows: Any) -> Any:
    return rows.sum(axis=1)


@pytest.mark.parametrize("what", ["models", "journal"])
def test_a_folder_that_knows_more_than_the_catalog_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The copy is gone as well, so nothing else tells that the store was emptied."""
    settings: dict[str, Any] = {"state": str(tmp_path), **QUICK}
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        app = server.app("a", ["m"], slo_ms=20_000, policy="exp3")
        app.feedback(app.predict([1.0, 2.0]).result(60), label=3.0)
        wait_until(lambda: server.stats()["feedback"]["journal_records"] == 1)
    assert "was the store emptied" not in caplog.text
    for name in ("state.db", "state.db-wal", "state.db-shm", "catalog.copy"):
        (tmp_path / name).unlink(missing_ok=True)
    for file in (tmp_path / ("journal" if what == "models" else "models")).iterdir():
        file.unlink()
    with clipper.start(**settings) as server:
        assert server.catalog.models() == []
    assert "was the store emptied" in caplog.text
