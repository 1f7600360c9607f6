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

from clipper.processes import (
    End,
    NoticeKind,
    ProcessLimits,
    Spawned,
    StartCommand,
    Supervisor,
    control_groups,
)
from clipper.processes.control_groups import CONTROLLERS, NAME, ControlGroups, end, own_group
from clipper_container import parent_death
from clipper_container.parent_death import GROUP_ENV, LIMITS_ENV
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
    assert made.new().folder is None
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
    assert made.new().folder is None
    made.close()


# -- limits


@pytest.mark.parametrize(
    ("delegated", "busy", "below"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_group_that_is_delegated_is_divided_beside_the_server(
    tmp_path: Path, place: Path, delegated: bool, busy: bool, below: bool
) -> None:
    """As a unit of systemd with `DelegateSubgroup=` has it."""
    unit = place / f"{NAME}test-{os.getpid()}"
    own = unit / "server"
    own.mkdir(parents=True)
    words = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        if delegated:
            os.setxattr(unit, "user.delegate", b"1")
        if busy:
            (unit / "cgroup.procs").write_text(str(child.pid))
        (tmp_path / "own").write_text("0::/own/server\n")
        (tmp_path / "mounts").write_text(V2.format("/own", unit))
        found = own_group(tmp_path / "mounts", tmp_path / "own")
        assert found == (unit if below else own)
    finally:
        child.communicate(b"\n")
        until(partial(end, unit))


@pytest.fixture
def limiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlGroups:
    """Groups in a folder that is none of the kernel's, as if it had both controllers."""
    monkeypatch.setattr(control_groups, "own_group", partial(Path, tmp_path))
    monkeypatch.setattr(control_groups, "_enabled", lambda group: frozenset(CONTROLLERS))
    made = ControlGroups()
    made.open()
    return made


def test_a_group_with_controllers_has_the_limits(limiting: ControlGroups) -> None:
    group = limiting.new(ProcessLimits(64, 1.5))
    assert group.folder is not None
    written = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert written == {
        "memory.max": str(64 << 20),
        "memory.oom.group": "1",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
    }
    assert LIMITS_ENV not in group.variables
    assert group.text == "memory_mib=64 of its group, cpus=1.5 of its group"
    killed, stopped = End(-signal.SIGKILL, "killed (SIGKILL)"), End(0, "exit 0")
    (group.folder / "memory.events").write_text("max 12\noom_kill 0\n")
    assert group.explained(killed) == killed, "by somebody else"
    (group.folder / "memory.events").write_text("max 12\noom_kill 1\n")
    assert group.explained(killed).detail == "killed for memory (its limit, memory_mib, is 64)"
    assert not group.explained(killed).is_stop, "it counts as an end by itself"
    assert group.explained(stopped) == stopped


def test_a_start_without_limits_has_none(limiting: ControlGroups) -> None:
    group = limiting.new()
    assert group.folder is not None
    assert [*group.folder.iterdir()] == []
    assert group.text == ""
    assert [*group.variables] == [GROUP_ENV]


def test_without_controllers_each_process_has_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: Notices
) -> None:
    def nowhere() -> Path:
        raise OSError

    monkeypatch.setattr(control_groups, "own_group", nowhere)
    tells = f"""
import os, resource
data_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
print(data_bytes >> 20, len(os.sched_getaffinity(0)), "{LIMITS_ENV}" in os.environ, flush=True)
os.abort()
"""
    words = parent_death.command([sys.executable, "-c", tells], "/")
    limits = ProcessLimits(300, 0.5)
    command = StartCommand(words, {"PATH": os.environ["PATH"]}, joins=True, limits=limits)
    with Supervisor() as processes:
        processes.add("a", Spawned(command), QUICK, notices)
        started = notices.next(NoticeKind.STARTED)
        ended = notices.next(NoticeKind.EXITED)
    assert ended.log_tail == ("300 1 False",)
    assert started.detail == (
        "memory_mib=300 of the data of each process (RLIMIT_DATA),"
        " cpus=0.5 of the cores it may run on"
    )
    assert ended.detail.endswith("(the limit of its data, memory_mib, is 300)")
