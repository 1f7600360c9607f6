"""Files of models: removed with their version, and never because a record is missing."""

import errno
import os
from pathlib import Path

import pytest

from clipper.catalog.view import View
from clipper.errors import AddressInUse, DeployFailed
from clipper.manage.model_files import ModelFiles
from clipper.types import InputType, Model, VersionedModel

ANY = InputType.parse("any")
SHA = "0123456789ab"


def model(
    version: int, target: str, name: str = "m", code: tuple[str, ...] = (), retired_us: int = 0
) -> Model:
    return Model(name, version, ANY, target=target, code=code, retired_us=retired_us)


def view_of(*models: Model) -> View:
    names = {one.name for one in models}
    versions = {name: tuple(one for one in models if one.name == name) for name in names}
    return View(1, versions, {}, {})


def test_a_version_takes_its_files_with_it(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    kept = [f"m-2-{SHA}.pkl", f"m-1-x-1-{SHA}.pkl", "notes.txt", f"m-11-{SHA}.packed"]
    for name in (f"m-1-{SHA}.pkl", f"m-1-{SHA}.packed", *kept):
        (tmp_path / name).touch()
    (tmp_path / f"m-1-{SHA}.code" / "0").mkdir(parents=True)
    (tmp_path / f"m-1-{SHA}.code" / "0" / "data").symlink_to(tmp_path)
    files.remove(VersionedModel("m", 1))
    files.remove(VersionedModel("m", 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_start_removes_what_no_container_needs(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    live = [f"m-3-{SHA}.pkl", f"a-b-1-{SHA}.code", f"lost-1-{SHA}.pkl"]
    gone = [f"m-1-{SHA}.pkl", f"m-3-{'f' * 12}.pkl", ".x.tmp", f"new-1-{SHA}.pkl", ".new-1.new"]
    for name in (*live, *gone, ".m-3.new"):
        (tmp_path / name).touch()
    view = view_of(
        model(1, f"/elsewhere/m-1-{SHA}.pkl", retired_us=5),
        model(3, f"/elsewhere/m-3-{SHA}.pkl"),
        model(1, "feat:f", "a-b", (f"/elsewhere/a-b-1-{SHA}.code/0", "/home")),
    )
    assert files.sweep(view) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(live)


def test_an_empty_catalog_removes_nothing(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    (tmp_path / f"m-1-{SHA}.pkl").touch()
    assert files.sweep(view_of()) == 0
    assert (tmp_path / f"m-1-{SHA}.pkl").exists()
    assert ModelFiles(tmp_path / "absent").sweep(view_of()) == 0


def test_a_deployment_under_way_is_marked(tmp_path: Path) -> None:
    files, id_ = ModelFiles(tmp_path / "models"), VersionedModel("m", 1)
    packed = tmp_path / "models" / f"m-1-{SHA}.pkl"
    with files.packing(id_):
        packed.touch()
    assert ModelFiles(tmp_path / "models").sweep(view_of()) == 1  # it was killed here
    with files.packing(id_):
        packed.touch()
    files.keep(id_)
    assert files.sweep(view_of()) == 0
    with pytest.raises(ZeroDivisionError), files.packing(id_):
        1 / 0  # noqa: B018
    assert not list((tmp_path / "models").iterdir())


def test_what_cannot_be_written_is_said_with_the_next_step(tmp_path: Path) -> None:
    files, id_ = ModelFiles(tmp_path / "models"), VersionedModel("m", 1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.tmp")
    said = r"'m:1' cannot be packed .*No space.*Free room"
    with pytest.raises(DeployFailed, match=said), files.packing(id_):
        raise full
    assert not list((tmp_path / "models").iterdir())
    (tmp_path / "file").touch()
    none = ModelFiles(tmp_path / "file")
    with pytest.raises(DeployFailed, match="cannot be packed"), none.packing(id_):
        pass
    with pytest.raises(AddressInUse), files.packing(id_):  # it is typed already
        raise AddressInUse("taken")
