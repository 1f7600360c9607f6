"""What a person sees in a shell, of a real `clipper up`: bench, ps, top, logs, down."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from clipper.cli import main
from clipper.manage.running import the_one

PATIENCE_S = 60.0
MODELS = """
import os, sys


def total(rows):
    print("a batch of", len(rows), flush=True)
    return rows.sum(axis=1)


def broken(rows):
    print("reads a file that is not there", file=sys.stderr, flush=True)
    os._exit(3)
"""
FILE = """
[server]
state = "state"
drain_s = 1.0
[http]
address = "127.0.0.1:0"
[grpc]
address = "127.0.0.1:0"
[models.sums]
target = "mine:total"
input = "f64[3]"
replicas = 2
[apps.total]
models = ["sums"]
slo_ms = 5000
default = -1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CLIPPER_")]:
        monkeypatch.delenv(name)
    (tmp_path / "mine.py").write_text(MODELS)
    (tmp_path / "clipper.toml").write_text(FILE)
    return tmp_path


class Process:
    """A command in a process of its own; what it says, until now, is in `seen`."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-u", "-m", "clipper", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.seen = ""

    def until(self, *texts: str) -> str:
        assert self.process.stdout is not None
        give_up = time.monotonic() + PATIENCE_S
        while not all(text in self.seen for text in texts):
            assert select.select([self.process.stdout], [], [], max(0.0, give_up - time.monotonic()))[0], self.seen
            data = os.read(self.process.stdout.fileno(), 4096).decode()
            assert data, f"it ended before saying {texts}: {self.seen}"
            self.seen += data
        return self.seen

    def rest(self) -> str:
        assert self.process.stdout is not None
        self.seen += self.process.stdout.read().decode()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        return self.seen

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.rest()
        return int(self.process.returncode)


@contextlib.contextmanager
def running(*words: str) -> Iterator[Process]:
    started = Process(*words)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        assert started.process.stdout is not None
        started.process.stdout.close()
        started.process.wait(PATIENCE_S)


@contextlib.contextmanager
def up() -> Iterator[Process]:
    with running("up") as started:
        started.until("sums:1/0 is connected", "sums:1/1 is connected", "containers dial in")
        yield started


def shell(*words: str, code: int = 0) -> str:
    result = click.testing.CliRunner().invoke(main, words, prog_name="clipper")
    assert result.exit_code == code, result.output
    return result.stdout if code in (0, 130) else result.stderr


def said(*words: str) -> Any:
    return json.loads(shell(*words, "-o", "json"))


# -- bench


def test_bench_over_http_grpc_and_management(here: Path) -> None:
    with up():
        for way in ((), ("--grpc",), ("--to", the_one("state").queries)):
            [step] = said("bench", "total", "--rate", "100", "--for", "200ms", *way)["steps"]
            assert step["outcomes"]["ok"] == step["sent"] > 0
        report = said("bench", "total", "--rates", "50,100", "--for", "200ms", "--html", "report.html", "--steady")
        assert [step["sent"] for step in report["steps"]] == [10, 20]
        assert set(report["machine"]) >= {"cpu", "cores", "python", "clipper"}
        assert "<svg" in (here / "report.html").read_text()
        found = said("bench", "total", "--search", "--rate", "20000", "--for", "100ms", "--slo-ms", "0.01")
        assert found["highest_rate"] == 0
        text = shell("bench", "total", "--rate", "50", "--for", "200ms", "--cached", "--input", "[1, 2, 3]")
        assert "  p99 " in text
        assert "does not take the queries: 400 " in shell("bench", "total", "--input", "[1, 2]", code=2)
        assert "no application 'totl' - did you mean 'total'?" in shell("bench", "totl", code=2)
        assert "no folder for --html" in shell("bench", "total", "--html", "nowhere/r.html", code=2)
    assert "no server of yours runs here" in shell("bench", "total", code=2)


def test_bench_by_way_of_management_where_that_is_all(here: Path) -> None:
    (here / "clipper.toml").write_text(FILE.replace('[http]\naddress = "127.0.0.1:0"\n[grpc]\naddress = "127.0.0.1:0"\n', ""))
    with up():
        report = said("bench", "total", "--rate", "100", "--for", "200ms")
        assert "management" in report["to"]
        assert report["steps"][0]["outcomes"]["ok"] == report["steps"][0]["sent"]
        assert "takes no queries over gRPC" in shell("bench", "total", "--grpc", code=2)


def test_bench_of_a_server_that_is_killed_tells_what_became_of_each(here: Path) -> None:
    with up() as server, running("bench", "total", "--rate", "100", "--for", "3s", "-o", "json") as bench:
        wait_until(lambda: bool(said("stats")["applications"]["total"]["queries"]))
        server.process.kill()
        report = json.loads(bench.rest())
    [step] = report["steps"]
    assert sum(step["outcomes"].values()) == step["sent"] > 100
    assert step["outcomes"]["error"] > 0
    assert "no connection" in step["errors"]


def test_bench_interrupted_prints_what_was_measured(here: Path) -> None:
    with up(), running("bench", "total", "--rate", "100", "--for", "60s", "-o", "json") as bench:
        wait_until(lambda: said("stats")["applications"]["total"]["queries"] > 5)
        assert bench.end(signal.SIGINT) == 130
        [step] = json.loads(bench.seen)["steps"]
    assert step["interrupted"] is True
    assert step["sent"] > 0


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up
        threading.Event().wait(0.02)
