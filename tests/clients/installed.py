"""Clients that are too large for every test run: `make works-with` installs each in an environment
of its own in .venv/works-with, and runs it.

tools/fetch.py says what each is: kserve brings 450 MB; perf_analyzer is the binary in a wheel of
tritonclient 2.50, with the two libraries that it lacks; openapi-typescript and its compiler come
from npm.
"""

import csv
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.clients.addresses import Addresses, Done
from tests.clients.described import document

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "works-with"
_HERE = Path(__file__).parent
_PATIENCE_S = 180


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


# -- openapi-typescript

_TYPESCRIPT = FOLDER / "typescript"


def openapi_typescript(at: Addresses) -> Done:
    """Generate types from either description; compile a program that uses them, strictly, and run
    it with node."""
    for name, address in (("management", at.admin), ("queries", at.http)):
        (_TYPESCRIPT / f"{name}.json").write_text(json.dumps(document(address)))
        _run("npx", "openapi-typescript", f"{name}.json", "-o", f"{name}.d.ts", cwd=_TYPESCRIPT)
    yield "generate"
    (_TYPESCRIPT / "asks.ts").write_text((_HERE / "asks.ts").read_text())
    options = (
        "--strict --target es2022 --module nodenext --moduleResolution nodenext --skipLibCheck"
        " --outDir out"
    )
    _run("npx", "tsc", *options.split(), "asks.ts", cwd=_TYPESCRIPT)
    yield "types"
    yield from _run("node", "out/asks.js", f"http://{at.http}", cwd=_TYPESCRIPT).split()


# -- kserve


def kserve(at: Addresses) -> Done:
    yield from _run(
        FOLDER / "kserve" / "bin" / "python", _HERE / "kserve_asks.py", f"http://{at.http}"
    ).splitlines()


# -- perf_analyzer


def perf_analyzer(at: Addresses) -> Done:
    """Run Triton's load tester: measure the throughput, and the rate that keeps a latency."""
    for protocol, address in (("http", at.http), ("grpc", at.grpc)):
        rows = _perf(protocol, address, "--concurrency-range", "2")
        assert float(rows[0]["Inferences/Second"]) > 1
        yield protocol
    rows = _perf(
        "http",
        at.http,
        "--request-rate-range",
        "20:80:20",
        "--latency-threshold",
        "1000",
        "--percentile",
        "99",
    )
    assert rows, "a rate was found"
    yield "--latency-threshold"


def _perf(protocol: str, address: str, *words: str) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as folder:
        table = Path(folder, "found.csv")
        output = _run(
            "perf_analyzer",
            "-m",
            "total",
            "-u",
            address,
            "-i",
            protocol,
            "-f",
            table,
            "--measurement-interval",
            "1000",
            "-s",
            "999",
            "-r",
            "5",
            *words,
        )
        assert re.search(r"Throughput: [0-9.]+", output), output[-2000:]
        with table.open() as lines:
            return list(csv.DictReader(lines))


INSTALLED = {
    "openapi-typescript": openapi_typescript,
    "kserve": kserve,
    "perf_analyzer": perf_analyzer,
}


def lacking(client: str) -> str:
    """Return what a client lacks here; empty when it can run."""
    if client == "perf_analyzer":
        return "" if shutil.which(client) else client
    needed = {
        "openapi-typescript": _TYPESCRIPT / "node_modules" / "openapi-typescript",
        "kserve": FOLDER / "kserve" / "bin" / "python",
    }
    return "" if needed[client].exists() else client


def version_of(client: str) -> str:
    if client == "openapi-typescript":
        about = json.loads((_TYPESCRIPT / "node_modules" / client / "package.json").read_text())
        return str(about["version"])
    if client == "kserve":
        ask = "import importlib.metadata as m; print(m.version('kserve'))"
        return _run(FOLDER / "kserve" / "bin" / "python", "-c", ask).strip()
    return "of tritonclient 2.50.0"
