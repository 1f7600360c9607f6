"""Notices to systemd, by a real server of the shell over a real socket of datagrams."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.cli.servers.systemd import NotifySocket, SystemdService
from tests.processes import PATIENCE_S, Program

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "clipper.service"
FILE = """\
[server]
drain_s = 2.0
[http]
address = "127.0.0.1:0"
admin = "127.0.0.1:0"
[models.sums]
target = "ours_for_systemd:total"
input = "f64[3]"
[apps.total]
models = ["sums"]
slo_ms = 20000
"""


class Listener:
    """The socket of a manager. Messages are dicts of their lines."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.address = address
        self.seen: list[dict[str, str]] = []

    def close(self) -> None:
        self._socket.close()

    def next(self) -> dict[str, str]:
        lines = self._socket.recv(4096).decode().split("\n")
        self.seen.append(dict(line.split("=", 1) for line in lines))
        return self.seen[-1]

    def rest(self) -> None:
        """Read what is there already."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.next():
                pass

    def until(self, wanted: Callable[[dict[str, str]], Any]) -> dict[str, str]:
        """Return the next message for which this is true."""
        while not wanted(self.next()):
            pass
        return self.seen[-1]

    def has(self, **values: str) -> dict[str, str]:
        """Return the next message that has these values."""
        wanted = {name.upper(): value for name, value in values.items()}.items()
        return self.until(lambda message: wanted <= message.items())


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    found = Listener(f"{tmp_path}/n")
    yield found
    found.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ours_for_systemd.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    (tmp_path / "clipper.toml").write_text(FILE)
    return tmp_path


def up(folder: Path, address: str, **variables: str) -> Program:
    return Program(
        *(sys.executable, "-u", "-m", "clipper", "up"),
        environment={"NOTIFY_SOCKET": address, **variables},
        folder=folder,
    )


@pytest.mark.slow
def test_systemd_follows_a_server_from_start_to_end(listener: Listener, folder: Path) -> None:
    with up(folder, listener.address, WATCHDOG_USEC="1000000") as server:
        listener.has(ready="1")
        assert "sums:1/0 is connected" in server.output, "before a query could be answered"
        starting = [one for one in listener.seen if "EXTEND_TIMEOUT_USEC" in one]
        assert starting, "a start that loads models has its time"
        listener.has(watchdog="1", status="ready")
        file = folder / "clipper.toml"
        file.write_text(f'{FILE}[apps.more]\nmodels = ["sums"]\nslo_ms = 20000\n')
        server.send(signal.SIGHUP)
        assert listener.has(reloading="1")["MONOTONIC_USEC"].isdecimal()
        listener.has(ready="1")
        assert "application more is made" in server.output
        file.write_text("nonsense")
        server.send(signal.SIGHUP)
        listener.has(reloading="1")
        listener.has(ready="1")
        assert "and what was stays" in server.output
        server.send(signal.SIGTERM)
        assert listener.has(stopping="1")["EXTEND_TIMEOUT_USEC"] == "62000000"
        assert server.wait() == 0


def dies() -> None:
    raise SystemExit("the thread ends")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_has_failed_asks_to_be_killed(listener: Listener) -> None:
    """Its models are supervised by a thread that it cannot do without."""
    line = NotifySocket({"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "40000"})
    with clipper.start() as server, SystemdService(server, line) as service:
        listener.has(watchdog="1", status="ready")
        server._processes.post(dies)
        listener.until(lambda message: "failed: clipper-proc" in message.get("STATUS", ""))
        count = len(listener.seen)
        for _ in range(5):
            listener.next()
        assert not [one for one in listener.seen[count:] if "WATCHDOG" in one]
        service.stopping(0.0)
        listener.has(stopping="1")
        with service.reloading():
            pass
    listener.rest()
    assert not [one for one in listener.seen if "RELOADING" in one], "it ends"


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "often"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_watchdog_of_another_process_is_none(
    environment: dict[str, str], watchdog_s: float
) -> None:
    assert NotifySocket(environment).watchdog_s == watchdog_s
    assert not NotifySocket(environment)


def test_an_abstract_name_is_reached() -> None:
    listener = Listener(f"@clipper-test-{os.getpid()}")
    NotifySocket({"NOTIFY_SOCKET": listener.address}).tell(ready=1, status="it is")
    assert listener.next() == {"READY": "1", "STATUS": "it is"}
    listener.close()


def test_a_manager_that_is_gone_costs_a_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    NotifySocket({"NOTIFY_SOCKET": f"{tmp_path}/gone"}).tell(ready=1)
    assert "systemd cannot be told 'READY=1': " in caplog.text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/clipper/bin/clipper", sys.executable)
    unit = tmp_path / "clipper.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    told = (done.stdout + done.stderr).splitlines()
    # systemd before 254 ignores it, and limits of models are then those of each process
    told = [line for line in told if "Unknown key 'DelegateSubgroup'" not in line]
    assert (done.returncode, told) == (0, [])
