"""The folder of one server: created, locked, released."""

import errno
import os
import subprocess
import sys

import pytest

from clipper.errors import AlreadyExists, ConfigError
from clipper.state_dir import StateDir, lock_file, sweep


@pytest.mark.parametrize("state", ["", "memory", "memory://"])
def test_nothing_is_kept_without_a_state(state):
    place = StateDir(state)
    assert place.models == place.run / "models"
    assert place.run.stat().st_mode & 0o777 == 0o700
    place.close()
    assert not place.run.exists()


@pytest.mark.parametrize(
    "state", ["{}/a/b", "sqlite:{}/a/b/catalog.db", "sqlite://{}/a/b/catalog.db"]
)
def test_models_are_kept_in_the_folder(tmp_path, state):
    place = StateDir(state.format(tmp_path))
    assert place.models == tmp_path / "a" / "b" / "models"
    assert (tmp_path / "a" / "b" / "lock").read_text() == f"{os.getpid()}\n"
    assert tmp_path not in place.run.parents
    place.close()
    assert not place.run.exists()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_relative_folder_does_not_move_with_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = StateDir("here")
    assert place.models == tmp_path / "here" / "models"
    place.close()


def test_one_server_a_folder(tmp_path):
    first = StateDir(str(tmp_path))
    with pytest.raises(
        AlreadyExists, match=f"{tmp_path} is in use by process {os.getpid()}. Stop it"
    ):
        StateDir(f"sqlite:{tmp_path}/catalog.db")
    first.close()
    first.close()
    StateDir(str(tmp_path)).close()


def test_a_file_system_without_locks_is_no_other_server(tmp_path, monkeypatch):
    opened, closed = [], []
    close = os.close

    def fails(fd, operation):
        opened.append(fd)
        raise OSError(errno.ENOLCK, "No locks available")

    def closes(fd):
        closed.append(fd)
        close(fd)

    monkeypatch.setattr("fcntl.flock", fails)
    monkeypatch.setattr("os.close", closes)
    with pytest.raises(OSError, match="No locks available"):
        lock_file(tmp_path / "lock", AlreadyExists("taken"))
    assert opened[0] in closed


def test_a_refused_folder_leaves_no_other_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    first = StateDir(str(tmp_path / "state"))
    with pytest.raises(AlreadyExists):
        StateDir(str(tmp_path / "state"))
    assert list((tmp_path / "temporary").iterdir()) == [first.run]
    first.close()


def test_a_killed_server_holds_nothing(tmp_path):
    code = (
        f"import os; from clipper.state_dir import StateDir; s = StateDir({str(tmp_path)!r});"
        " os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    StateDir(str(tmp_path)).close()


def test_a_child_that_outlives_its_parent_does_not_hold_the_folder(tmp_path):
    place = StateDir(str(tmp_path))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    os.close(read)
    place.close()
    StateDir(str(tmp_path)).close()
    os.close(write)
    os.waitpid(child, 0)


@pytest.mark.parametrize("state", ["{}/file", "{}/file/below", "sqlite:{}/file/x.db"])
def test_a_folder_that_cannot_be(tmp_path, state):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ConfigError, match=r"cannot use the state folder .*file.*Choose another with state="
    ):
        StateDir(state.format(tmp_path))


def test_a_lock_that_cannot_be_made(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        StateDir(str(tmp_path))


def test_what_a_killed_server_left_is_swept(tmp_path, monkeypatch):
    """Nothing else is deleted: neither a running server's folder, nor one that only has such a
    name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    running = StateDir("")
    (tmp_path / "clipper-notes").mkdir()
    code = (
        "import os; from clipper.state_dir import StateDir; print(StateDir('').run, flush=True);"
        " os.kill(os.getpid(), 9)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert os.path.isdir(dead)
    another = StateDir("")
    assert not os.path.exists(dead)
    assert running.run.is_dir()
    assert (tmp_path / "clipper-notes").is_dir()
    assert sweep() == 0
    another.close()
    running.close()
