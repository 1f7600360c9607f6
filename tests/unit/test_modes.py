"""Files of a server are its user's own, whatever the umask."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper.deploy.docker.image import write_files
from clipper.deploy.kubernetes.secret_files import written
from tests.processes import Program

SERVE = """
import os, sys
os.umask(int(sys.argv[1], 8))
import clipper
with clipper.start(state=sys.argv[2], http="127.0.0.1:0", admin="127.0.0.1:0") as server:
    server._learning.states.start_writing()
    print(server._dir.run)
    sys.stdout.flush()
    sys.stdin.readline()
"""


def open_to_others(folder: Path) -> list[str]:
    """Return what others than its owner may read or write of the folder and what is in it."""
    each = [folder, *(Path(at) / name for at, ds, fs in os.walk(folder) for name in (*ds, *fs))]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in each}
    return [f"{path} {mode:o}" for path, mode in modes.items() if mode & 0o077]


@pytest.fixture(params=["000", "002", "077"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return the state folder and the private folder of a server with this umask."""
    state = tmp_path / "new" / "state"
    with Program(sys.executable, "-c", SERVE, request.param, state, apart=True) as process:
        yield state, Path(process.line())
        process.say()
        assert process.wait() == 0


@pytest.mark.slow
def test_the_folders_of_a_server_are_its_users_own(served: tuple[Path, Path]) -> None:
    state, run = served
    assert (state / "node").exists()
    assert (state / "journal").is_dir()
    for folder in (state, run):
        assert not open_to_others(folder)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_exported_secrets_are_their_owners(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        written(tmp_path, {}, {"store_url": "redis://u:secret@h"})
        assert not open_to_others(tmp_path / "secrets")
        (tmp_path / "secrets" / "store_url").chmod(0o444)
        written(tmp_path, {}, {"store_url": "another"})  # as an earlier version wrote it
        assert not open_to_others(tmp_path / "secrets")
        assert (tmp_path / "secrets" / "store_url").read_text() == "redis://u:secret@h"
        written(tmp_path, {}, {"store_url": ""}, are_mounted=True)
        assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_what_an_image_is_built_from_can_be_read_by_its_user(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_files(tmp_path / "out", {"code/shop/model.py": b"x", "clipper.toml": "y"})
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "out").rglob("*")
    }
    assert modes == {
        "out/code": 0o755,
        "out/code/shop": 0o755,
        "out/code/shop/model.py": 0o644,
        "out/clipper.toml": 0o644,
    }
