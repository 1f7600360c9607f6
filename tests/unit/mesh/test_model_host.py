"""A model host whose stop, or whose start, is cancelled leaves no process and no socket."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clipper.mesh.loading.model_host import HostProcess, started

IGNORES_SIGTERM = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
)


def never_ready(folder: Path) -> HostProcess:
    """Return a host whose process never connects, and ignores SIGTERM."""

    def command(control: str) -> Sequence[str]:
        return [sys.executable, "-c", IGNORES_SIGTERM, str(folder / "runs")]

    return HostProcess("h", folder, command)


async def running(host: HostProcess, folder: Path) -> int:
    while not (folder / "runs").exists():
        await asyncio.sleep(0.01)
    return host.pid


def left_over(folder: Path, pid: int) -> list[str]:
    alive = [f"process {pid}"] if os.path.exists(f"/proc/{pid}") else []
    return alive + sorted(path.name for path in folder.iterdir() if path.name != "runs")


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_cancelled_stop_ends_the_process_and_closes_the_socket(
    tmp_path: Path, is_starting: bool
) -> None:
    async def main() -> int:
        host = never_ready(tmp_path)
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
