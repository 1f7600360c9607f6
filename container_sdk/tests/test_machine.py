"""The limits of control groups: made up ones of both versions, and real ones of this machine; the
limit of open files.
"""

import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper_container.machine import FILES_MAX, cores, memory_bytes, raise_files_max

MEMORY = Path("/sys/fs/cgroup/memory")


def groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """Write a tree of groups; names have `__` for `/`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return folder, folder / "own"


def test_version_2_counts_the_smallest_from_the_own_group_up(tmp_path: Path) -> None:
    tree = {
        "pod__memory.max": "1048576\n",
        "pod__one__memory.max": "max\n",
        "pod__cpu.max": "max 100000\n",
        "pod__one__cpu.max": "50000 100000\n",
    }
    found = groups(tmp_path, "0::/pod/one\n", **tree)
    assert memory_bytes(*found) == 1 << 20
    assert cores(*found) == 1


def test_version_1_and_a_group_that_is_not_mounted_here(tmp_path: Path) -> None:
    tree = {"memory__memory.limit_in_bytes": "2097152\n", "cpu__cpu.cfs_quota_us": "-1\n"}
    found = groups(tmp_path, "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n", **tree)
    assert memory_bytes(*found) == 2 << 20
    assert cores(*found) == len(os.sched_getaffinity(0))


def test_nothing_that_can_be_read_is_no_limit(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(tmp_path, tmp_path / "none") == whole
    assert cores(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a real control group with a limit of 64 MiB."""
    made = MEMORY / f"clipper-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield made
    made.rmdir()


def test_a_real_group_is_seen_by_a_process_in_it(group: Path) -> None:
    code = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
        "from clipper_container.machine import memory_bytes; print(memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 64 << 20


def test_the_soft_limit_of_files_is_raised_for_the_connections_to_come() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        raise_files_max()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], FILES_MAX)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
