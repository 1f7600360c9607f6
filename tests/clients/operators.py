"""Tools of operators: Prometheus and its promtool on our metrics, redis-cli on our streams."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clipper
from bench.system.fixtures.store_servers import Redis
from tests.clients.addresses import PATIENCE_S, Addresses, Done
from tests.processes import Program, free_ports


def found(name: str) -> str:
    return shutil.which(name) or ""


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
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        own = f"127.0.0.1:{free_ports(1)[0]}"
        job = {
            "job_name": "clipper",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [at.admin]}],
        }
        # JSON is YAML
        Path(folder, "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
        words = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={own}",
        ]
        words.append("--log.level=error")
        with Program(found("prometheus"), *words, environment={"GOMAXPROCS": "1"}) as program:
            program.until(lambda: _query(own, 'up{job="clipper"} == 1'))
            yield "scrape"
            program.until(lambda: _query(own, 'clipper_queries_total{application="total"}'))
            yield "query"


def _query(address: str, query: str) -> Any:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)["data"]["result"]
    return None


def redis_cli(_: Addresses) -> Done:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        redis = Redis(Path(folder))
        with redis.program as program:

            def cli(*words: str) -> str:
                command = [found("redis-cli"), "-s", redis.socket, *words]
                return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout

            with clipper.start() as server:
                server.deploy("sum", lambda rows: rows.sum(axis=1), input="f64[3]")
                server.app("total", models=["sum"], slo_ms=10_000)
                with server.stream("total", redis.url, source="records", answers="answers"):
                    cli("XADD", "records", "*", "id", "r-17", "input", "[1, 2, 3]")
                    answer = program.until(lambda: cli("XREAD", "STREAMS", "answers", "0").split())
                    assert answer[answer.index("id") + 1] == "r-17"
                    assert float(answer[answer.index("output") + 1]) == 6.0
                    yield "XADD a record, XREAD its answer"


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
