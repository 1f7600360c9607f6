"""A model host is a process of the supervisor: none is left, and none is waited for in vain."""

import asyncio
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from clipper.mesh.loading import model_host
from clipper.mesh.loading.model_host import HostProcess, started
from clipper.mesh.transport.channel import RequestFailed
from clipper.processes import ChildState, Supervisor
from tests.memory_container import wait_until

IGNORES_SIGTERM = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
)
ENTERS = ("sh", "-c", 'touch "$0"; exec sleep 60')
ROUNDS = 50


@pytest.fixture
def processes() -> Iterator[Supervisor]:
    with Supervisor() as processes:
        yield processes


def never_ready(
    folder: Path,
    processes: Supervisor,
    words: Sequence[str] = (sys.executable, "-c", IGNORES_SIGTERM),
) -> HostProcess:
    """Return a host whose process never connects, and ignores SIGTERM."""

    def command(control: str) -> Sequence[str]:
        return [*words, str(folder / "runs")]

    return HostProcess("h", folder, command, processes, node="n")


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not predicate():
            await asyncio.sleep(0.005)


async def running(host: HostProcess, folder: Path) -> int:
    await until(lambda: (folder / "runs").exists() and host.pid)
    return host.pid


def left_over(folder: Path, pid: int) -> list[str]:
    alive = [f"process {pid}"] if os.path.exists(f"/proc/{pid}") else []
    return alive + sorted(path.name for path in folder.iterdir() if path.name != "runs")


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (thread / "children").read_text().split()}
    return found


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_cancelled_stop_ends_the_process_and_closes_the_socket(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch, is_starting: bool
) -> None:
    monkeypatch.setattr(model_host, "POLICY", dataclasses.replace(model_host.POLICY, grace_s=900.0))

    async def main() -> int:
        host = never_ready(tmp_path, processes)
        if is_starting:
            starting = asyncio.ensure_future(started(host))
            pid = await running(host, tmp_path)
            starting.cancel()  # it stops the host
            stopping: asyncio.Future[object] = starting
        else:
            await host.start()
            pid = await running(host, tmp_path)
            stopping = asyncio.ensure_future(host.stop())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        return pid

    pid = asyncio.run(main())
    assert left_over(tmp_path, pid) == []


def test_a_host_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> int:
        host = never_ready(tmp_path, processes)
        await host.start()
        pid = await running(host, tmp_path)
        await host.stop()
        return pid

    monkeypatch.setattr(model_host, "POLICY", dataclasses.replace(model_host.POLICY, grace_s=0.1))
    assert left_over(tmp_path, asyncio.run(main())) == []
    wait_until(lambda: not processes.list())


def test_a_host_that_cannot_be_watched_is_not_left_running(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pidfd_open = os.pidfd_open
    begun = []
    left = [2]

    def without_descriptors(pid: int) -> int:
        begun.append(pid)
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pidfd_open(pid)

    async def main() -> int:
        host = never_ready(tmp_path, processes)
        await host.start()
        await until(lambda: host.starts)
        pid = host.pid
        await host.stop()
        return pid

    monkeypatch.setattr(os, "pidfd_open", without_descriptors)
    before = opened()
    pid = asyncio.run(main())
    assert left_over(tmp_path, pid) == []
    assert len(begun) == 3
    assert not any(os.path.exists(f"/proc/{one}") for one in begun)
    wait_until(lambda: opened() <= before)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EMFILE, "the server is short of something"),
        (errno.ENOMEM, "the server is short of something"),
        (errno.ENOENT, "not started"),
    ],
)
def test_a_start_that_fails_is_made_again_and_is_no_start(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    popen, tries = subprocess.Popen, []

    def starts(*given: object, **named: object) -> object:
        tries.append(processes.list()[0].detail)
        if len(tries) < 4:
            raise OSError(number, os.strerror(number))
        return popen(*given, **named)  # type: ignore[call-overload]

    async def main() -> None:
        host = never_ready(tmp_path, processes, ENTERS)
        await host.start()
        await running(host, tmp_path)
        assert host.starts == 1
        await host.stop()

    monkeypatch.setattr(subprocess, "Popen", starts)
    before = opened()
    asyncio.run(main())
    assert why in tries[-1]
    assert os.listdir(tmp_path) == ["runs"]
    wait_until(lambda: opened() <= before)


def test_a_start_that_takes_long_does_not_block_the_node(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    may = threading.Event()
    waited = []

    def slow(*given: object, **named: object) -> object:
        waited.append(may.wait(30))
        return popen(*given, **named)  # type: ignore[call-overload]

    async def main() -> None:
        host = never_ready(tmp_path, processes, ENTERS)
        await host.start()
        stopping = asyncio.ensure_future(host.stop())
        await asyncio.sleep(0)
        may.set()
        await stopping

    monkeypatch.setattr(subprocess, "Popen", slow)
    asyncio.run(main())
    assert waited == [True]
    assert left_over(tmp_path, 0) == []


def test_a_host_that_is_not_ready_in_time_is_replaced(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        host = never_ready(tmp_path, processes, ENTERS)
        await host.start()
        await until(lambda: host.starts == 3)
        await host.stop()

    soon_s = model_host.POLICY.ready_s / 1000
    monkeypatch.setattr(
        model_host, "POLICY", dataclasses.replace(model_host.POLICY, ready_s=soon_s)
    )
    asyncio.run(main())


def test_the_models_at_work_are_those_of_the_process_that_ended(
    tmp_path: Path, processes: Supervisor
) -> None:
    """The next process has started before the node takes note of the end."""

    async def main() -> frozenset[str]:
        host = never_ready(tmp_path, processes, ENTERS)
        await host.start()
        pid = await running(host, tmp_path)
        with (tmp_path / "h.work").open("r+b") as file:
            file.write(b"\x03svm")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: processes.list()[0].pid not in (0, pid))
        await until(lambda: host.starts == 2)
        blamed = host.blamed
        await host.stop()
        assert host.blamed == frozenset()
        return blamed

    assert asyncio.run(main()) == {"svm"}


def test_a_host_whose_node_is_gone_ends(tmp_path: Path, processes: Supervisor) -> None:
    async def main() -> int:
        host = never_ready(tmp_path, processes, ENTERS)
        await host.start()
        pid = await running(host, tmp_path)
        host._server.close()
        return pid

    os.kill(asyncio.run(main()), signal.SIGKILL)
    wait_until(lambda: processes.list()[0].state is ChildState.STOPPED)


def test_no_host_starts_without_a_supervisor(tmp_path: Path) -> None:
    processes = Supervisor()
    processes.start()
    processes.end()

    async def main() -> None:
        with pytest.raises(RequestFailed, match="not started"):
            await started(never_ready(tmp_path, processes))

    asyncio.run(main())
    assert left_over(tmp_path, 0) == []


def test_nothing_is_left_after_many_starts_kills_and_stops(
    tmp_path: Path, processes: Supervisor
) -> None:
    async def start_and_stop(kind: int) -> None:
        host = never_ready(tmp_path, processes, ENTERS)
        await host.start()
        if kind:
            pid = await running(host, tmp_path)
            if kind > 1:
                os.kill(pid, signal.SIGKILL)
            if kind > 2:
                await until(lambda: host.starts == 2)
        await host.stop()

    async def main() -> None:
        for number in range(ROUNDS):
            await start_and_stop(number % 4)

    asyncio.run(main())
    wait_until(lambda: not processes.list())
    before, others = opened(), children()
    asyncio.run(main())
    wait_until(lambda: not processes.list())
    assert opened() <= before
    assert children() <= others
    assert os.listdir(tmp_path) == ["runs"]


def test_a_host_starts_in_the_folder_of_the_server_also_after_it_is_gone(
    tmp_path: Path, processes: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = tmp_path / "release", tmp_path / "sockets"
    folder.mkdir()
    place.mkdir()

    async def main() -> str:
        host = never_ready(place, processes)
        monkeypatch.chdir("/")
        folder.rmdir()
        await host.start()
        found = os.readlink(f"/proc/{await running(host, place)}/cwd")
        await host.stop()
        return found

    monkeypatch.chdir(folder)
    assert asyncio.run(main()).startswith(str(folder))
