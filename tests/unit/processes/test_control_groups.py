"""Control groups of children: what a child has started ends with it, in whichever session it is."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from clipper.processes import NoticeKind, Spawned, StartCommand, Supervisor, control_groups
from clipper.processes.control_groups import NAME, ControlGroups, end, own_group
from clipper_container import parent_death
from tests.control_groups import own_group_mounted
from tests.processes import Program
from tests.unit.processes.test_supervisor import QUICK, Marked, Notices, until
from tests.unit.processes.test_supervisor import marked as marked  # a fixture
from tests.unit.processes.test_supervisor import notices as notices  # a fixture

# a process that is in no group or session of its parent, whose parent has ended
LEAVES_A_DAEMON = "(setsid sleep 600 &); exec sleep 601"
V1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / {}/v1 rw - cgroup cgroup rw\n"
V2 = "41 31 0:38 {} {} rw,relatime shared:3 - cgroup2 cgroup2 rw\n"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The group of this process, which can be written."""
    with own_group_mounted(tmp_path) as found:
        yield found


def run(marked: Marked, text: str) -> Spawned:
    """Return the handle of a command of the shell that joins its control group."""
    words = parent_death.command(["/bin/bash", "-c", text], "/")
    return Spawned(StartCommand(words, marked.environment, joins=True))


def asleep(marked: Marked) -> set[int]:
    """Return the processes that have become what they are for."""
    found = set()
    for pid in marked.left():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            if file.read() == "sleep\n":
                found.add(pid)
    return found


def groups(place: Path) -> list[Path]:
    return sorted(place.glob(f"{NAME}{os.getpid()}-*/*/"))


@pytest.mark.parametrize(
    ("mounts", "own", "found"),
    [
        (V2.format("/", "{}"), "0::/a/b\n", "a/b"),
        (V1 + V2.format("/", "{}/v2"), "9:cpu:/x\n0::/\n", "v2"),
        (V2.format("/docker/1", "{}"), "0::/docker/1/a\n", "a"),
        (V2.format("/", "{}/a\\\\040b"), "0::/\n", "a b"),
        (V2.format("/docker/1", "{}/a") + V2.format("/", "{}/v2"), "0::/\n", "v2"),
        (V2.format("/", "{}/ro") + V2.format("/", "{}/v2"), "0::/\n", "v2"),
    ],
)
def test_the_group_of_this_process_is_found(
    tmp_path: Path, mounts: str, own: str, found: str
) -> None:
    for name in ("a/b", "v1", "v2", "a b", "a"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "cgroup.procs").touch()
    (tmp_path / "mounts").write_text(mounts.replace("{}", str(tmp_path)).replace("\\\\", "\\"))
    (tmp_path / "own").write_text(own)
    assert own_group(tmp_path / "mounts", tmp_path / "own") == tmp_path / found


@pytest.mark.parametrize(
    ("mounts", "own", "why"),
    [
        (V1, "9:cpu:/x\n", "no cgroup v2 is mounted"),
        (V2.format("/docker/1", "{}"), "0::/\n", "no cgroup v2 is mounted"),
        (V2.format("/", "{}"), "0::/../other\n", "no cgroup v2 is mounted"),
        (V2.format("/", "{}"), "0::/gone\n", "gone cannot be written"),
    ],
)
def test_where_no_group_can_be_made_the_reason_is_told(
    tmp_path: Path, mounts: str, own: str, why: str
) -> None:
    (tmp_path / "mounts").write_text(mounts.replace("{}", str(tmp_path)))
    (tmp_path / "own").write_text(own)
    with pytest.raises(OSError, match=why):
        own_group(tmp_path / "mounts", tmp_path / "own")


def test_a_group_that_cannot_be_locked_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(control_groups, "own_group", partial(Path, tmp_path))
    made = ControlGroups()
    with monkeypatch.context() as lacking:
        lacking.setattr(os, "open", full)
        made.open()
    assert [*tmp_path.iterdir()] == []
    assert made.new() is None
    (tmp_path / f"{NAME}1-left").mkdir()  # of a server that has ended
    with monkeypatch.context() as lacking:
        lacking.setattr(os, "open", full)
        made.open()
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}1-left"]


@pytest.mark.parametrize("how", ["stop", "kill", "kill before Linux 5.14"])
def test_a_daemon_of_a_child_ends_with_it(
    place: Path, marked: Marked, notices: Notices, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if "before" in how:
        monkeypatch.setattr(control_groups, "_KILL", "cgroup.none")
    with Supervisor() as processes:
        processes.add("it", run(marked, LEAVES_A_DAEMON), QUICK, notices)
        pid = notices.next(NoticeKind.STARTED).pid
        until(lambda: len(asleep(marked)) == 2)
        (group,) = groups(place)
        before = asleep(marked)
        until(lambda: {*map(int, (group / "cgroup.procs").read_text().split())} == before)
        if how == "stop":
            assert not processes.stop(["it"])
            until(lambda: not marked.left())
        else:
            os.kill(pid, signal.SIGKILL)
            until(lambda: len(asleep(marked) - before) == 2)
            until(lambda: not before & {*marked.left()})
        until(lambda: not group.exists())
    until(lambda: not [*place.glob(f"{NAME}{os.getpid()}-*")])


def test_the_next_server_ends_what_a_killed_one_has_left(
    place: Path, marked: Marked, notices: Notices
) -> None:
    source = f"""
        import sys, time
        from clipper.processes import Supervisor
        from tests.unit.processes.test_control_groups import LEAVES_A_DAEMON, run
        from tests.unit.processes.test_supervisor import QUICK, Marked, Notices
        marked = Marked()
        marked.mark = {marked.mark!r}
        processes = Supervisor()
        processes.start()
        processes.add("it", run(marked, LEAVES_A_DAEMON), QUICK, Notices())
        time.sleep(600)
    """
    with Supervisor() as other:
        other.add("another", run(marked, LEAVES_A_DAEMON), QUICK, notices)
        until(lambda: len(asleep(marked)) == 2)
        stay = asleep(marked)
        with Program(sys.executable, "-c", textwrap.dedent(source)) as server:
            until(lambda: len(asleep(marked)) == 4)
            (folder,) = place.glob(f"{NAME}{server.pid}-*")
            os.kill(server.pid, signal.SIGKILL)
        with Supervisor():  # or any other that starts on this machine now
            until(lambda: not folder.exists())
            until(lambda: {*marked.left()} == stay)


def test_groups_below_one_that_a_child_has_made_end_with_it(
    place: Path, marked: Marked, notices: Notices
) -> None:
    makes = "mkdir $0/a && echo $$ > $0/a/cgroup.procs && exec sleep 602"
    with Supervisor() as processes:
        processes.add("it", run(marked, "exec sleep 601"), QUICK, notices)
        notices.next(NoticeKind.STARTED)
        (group,) = groups(place)
        inner = subprocess.Popen(["bash", "-c", makes, group], env=marked.environment)
        joined = group / "a" / "cgroup.procs"
        until(lambda: joined.exists() and str(inner.pid) in joined.read_text().split())
        processes.stop(["it"])
        assert inner.wait(60) == -signal.SIGKILL
        until(lambda: not group.exists())


def test_where_no_groups_can_be_made_children_run_without(
    marked: Marked, notices: Notices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(control_groups, "own_group", Path(tmp_path / "none").read_text)
    with Supervisor() as processes:
        processes.add("it", run(marked, "echo =$CLIPPER_CONTROL_GROUP; sleep 600"), QUICK, notices)
        notices.next(NoticeKind.STARTED)
        until(lambda: processes.lines("it")[0] == ["="])


def test_a_group_that_another_has_removed_is_no_error(place: Path) -> None:
    made = ControlGroups()
    made.open()
    (folder,) = place.glob(f"{NAME}{os.getpid()}-*")
    assert end(folder)
    assert end(folder)
    assert made.new() is None
    made.close()
