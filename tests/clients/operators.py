"""Tools of operators: Prometheus and its promtool on our metrics, redis-cli on our streams."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clipper
from tests.clients.addresses import PATIENCE_S, Addresses, Done


def found(name: str) -> str:
    return shutil.which(name) or ""


def until(happens: Callable[[], Any]) -> Any:
    """Call until it returns something true; return that. Errors: AssertionError after
    PATIENCE_S."""
    last = time.monotonic() + 3 * PATIENCE_S
    while not (given := happens()):
        assert time.monotonic() < last, "nothing happened"
        time.sleep(0.05)
    return given


def promtool(at: Addresses) -> Done:
    with urllib.request.urlopen(f"http://{at.admin}/metrics", timeout=PATIENCE_S) as response:
        text = response.read()
    checked = subprocess.run(
        [found("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b""), (
        checked.stdout + checked.stderr
    )
    yield "check metrics"


def prometheus(at: Addresses) -> Done:
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{free.getsockname()[1]}"
        job = {
            "job_name": "clipper",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [at.admin]}],
        }
        Path(folder, "prometheus.yml").write_text(
            json.dumps({"scrape_configs": [job]})
        )  # JSON is YAML
        free.close()
        words = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={own}",
        ]
        with _running([found("prometheus"), *words, "--log.level=error"]):
            until(lambda: _query(own, 'up{job="clipper"} == 1'))
            yield "scrape"
            until(lambda: _query(own, 'clipper_queries_total{application="total"}'))
            yield "query"


def _query(address: str, query: str) -> Any:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)["data"]["result"]
    return None


def redis_cli(_: Addresses) -> Done:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        place = f"{folder}/redis.sock"
        with _running(
            [
                found("redis-server"),
                "--port",
                "0",
                "--unixsocket",
                place,
                "--save",
                "",
                "--dir",
                folder,
            ]
        ):

            def cli(*words: str) -> str:
                command = [found("redis-cli"), "-s", place, *words]
                return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout

            until(lambda: cli("PING") == "PONG\n")
            with clipper.start() as server:
                server.deploy("sum", lambda rows: rows.sum(axis=1), input="f64[3]")
                server.app("total", models=["sum"], slo_ms=10_000)
                with server.stream("total", f"unix://{place}", source="records", answers="answers"):
                    cli("XADD", "records", "*", "id", "r-17", "input", "[1, 2, 3]")
                    answer = until(lambda: cli("XREAD", "STREAMS", "answers", "0").split())
                    assert answer[answer.index("id") + 1] == "r-17"
                    assert float(answer[answer.index("output") + 1]) == 6.0
                    yield "XADD a record, XREAD its answer"


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[None]:
    env = {**os.environ, "GOMAXPROCS": "1"}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


OPERATORS: dict[str, Callable[[Addresses], Done]] = {
    "promtool": promtool,
    "Prometheus": prometheus,
    "redis-cli": redis_cli,
}
_COMMANDS = {
    "promtool": ("promtool",),
    "Prometheus": ("prometheus",),
    "redis-cli": ("redis-cli", "redis-server"),
}


def lacking(name: str) -> str:
    return ", ".join(command for command in _COMMANDS[name] if not found(command))


def version_of(name: str) -> str:
    completed = subprocess.run(
        [found(_COMMANDS[name][0]), "--version"], capture_output=True, text=True, timeout=30
    )
    words = (completed.stdout + completed.stderr).replace(",", " ").split()
    return next(word for word in words if word[0].isdigit())
