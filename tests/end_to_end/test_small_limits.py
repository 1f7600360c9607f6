"""A server under limits of its process that are too small says which one in one line, whatever it
is that the limit stops."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import resource, sys
import clipper, clipper.server, clipper.frontend.frontends
try:
    import clipper.frontend.grpc.server
except ImportError:
    pass
kind, limit, more = resource.RLIMIT_NOFILE, int(sys.argv[1]), eval(sys.argv[2])
resource.setrlimit(kind, (limit, limit))
try:
    with clipper.start(**more) as server:
        print("started")
except clipper.ClipperError as error:
    print(type(error).__name__, error)
"""
EACH: dict[str, dict[str, object]] = {
    "nothing": {},
    "http": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    "grpc": {"grpc": "127.0.0.1:0"},
    "state": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "state": "state"},
}


def started(limit: int, words: dict[str, object], folder: Path) -> str:
    """Return what a server under this limit of descriptors says."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(limit), repr(words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("limit", [12, 33, 47, 96])
def test_too_few_descriptors_are_named_before_anything_starts(
    name: str, limit: int, tmp_path: Path
) -> None:
    said = started(limit, EACH[name], tmp_path)
    if said == "started":
        assert limit > 24
    else:
        assert said.startswith("NotStarted")
        assert "file descriptors to start" in said
        assert "ulimit -n" in said
        assert limit < 96
        assert not (tmp_path / "state").exists() or "gRPC" in said


@pytest.mark.slow
def test_a_shell_with_few_descriptors_is_told_so(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (34, 34))

    done = subprocess.run(
        [sys.executable, "-m", "clipper", "up", "--http", "127.0.0.1:0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=few,  # this process has no other threads that it could hurt
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: this server needs 44 file descriptors to start")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.slow
def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {sys.executable} -m clipper up"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "CLIPPER_SERVER__STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert "ulimit -f" in done.stderr
