"""The checks of `clipper doctor`. Each check performs the operation on a small scale and names
the next step when it fails.
"""

import importlib
import os
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clipper.cli.servers.up import file_or_default
from clipper.clock import wall_time_us
from clipper.config import load
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.processes.control_groups import own_group
from clipper.settings.grpc import grpc_tls
from clipper.settings.http import admin_tls, query_tls
from clipper.settings.params import params_tls, shard_tls
from clipper.tls import Certificate
from clipper.version import VERSION
from clipper_container.loading.kinds import KINDS

_NEEDED = (
    "numpy",
    "clipper-container",
    "clipper-client",
    "msgspec",
    "msgpack",
    "lz4",
    "cloudpickle",
    "click",
    "rich",
)
# alternative distributions -> the extra that installs one
_OPTIONAL = {
    ("scikit-learn",): "demo",
    ("redis",): "redis",
    ("protobuf",): "grpc",
    ("docker",): "docker",
    ("pyjwt",): "jwt",
    ("ray",): "ray",
} | {kind.packages[0]: kind.extra for kind in KINDS.values() if kind.extra}
_ENGINES = {"docker": "systemctl start docker", "podman": "systemctl --user start podman.socket"}
# tools/build_core.py compiles for these where the CPU has them
_CPU_WANTED = ("avx2", "bmi2")
_COMMITS = 9
_COMMIT_SLOW_MS = 20.0
_TRIAL_S = 30.0
_RENEW_DAYS = 21


class Finding(NamedTuple):
    """Result of a check. verdict: ok, warn, fail or skip."""

    verdict: str
    text: str


def examine() -> list[Finding]:
    """Run every check in order. An exception counts as a failure of that check only."""
    found: list[Finding] = []
    for trial in (
        core,
        machine,
        memory,
        descriptors,
        control_groups,
        interpreter,
        round_trip,
        disk,
        tls,
        certificates,
        packages,
        containers,
    ):
        try:
            found += trial()
        except Exception as error:
            name = trial.__name__.replace("_", " ")
            found.append(Finding("fail", f"{name}: {type(error).__name__}: {error}"))
    return found


def core() -> Iterator[Finding]:
    """Check that the compiled core loads."""
    try:
        engine = importlib.import_module("clipper_core.engine.engine")
        engine.Engine(cache_bytes_max=1 << 16)
    except ImportError as error:
        yield Finding("fail", f"core extension: {error}. In a checkout run: make build")
        return
    yield Finding("ok", f"core extension, Python {sys.version.split()[0]}")


def machine() -> Iterator[Finding]:
    """Check the CPU and its features."""
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    lacking = (
        [name.upper() for name in _CPU_WANTED if name not in flags]
        if os.uname().machine == "x86_64" and flags
        else []
    )
    core_folder = Path(importlib.import_module("clipper_core").__file__ or "").parent
    if lacking and not (core_folder / "avx2").is_dir():  # a wheel has a core for every CPU
        yield Finding(
            "warn",
            f"this CPU has no {' and no '.join(lacking)}, which a core that was compiled on another"
            " machine may need. Compile it here: make build",
        )
    simd = next(
        (name.upper() for name in ("avx512f", "avx2", "asimd", "sse2") if name in flags),
        "no known SIMD",
    )
    if cores == 1:
        yield Finding(
            "warn",
            f"1 core, CPU {simd}: server and models take turns; expect latencies of milliseconds",
        )
    else:
        yield Finding("ok", f"{cores} cores, CPU {simd}")


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return set(lines[0].partition(":")[2].split()) if lines else set()


def memory() -> Iterator[Finding]:
    """Check that a container can map a model's rows; otherwise rows are sent over the socket."""
    from clipper_container.params.shared_rows import can_share

    if can_share():
        yield Finding("ok", "shared memory for rows")
    else:
        yield Finding(
            "warn",
            "no memfd here: rows of models are sent over sockets. It takes Linux, 3.17 or newer",
        )


def descriptors() -> Iterator[Finding]:
    """Check the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = load().limits.connections_max
    verdict, more = (
        ("ok", "")
        if soft > wanted
        else ("warn", f": fewer than limits.connections_max ({wanted}). ulimit -n 4096")
    )
    yield Finding(verdict, f"{soft} file descriptors{more}")


def control_groups() -> Iterator[Finding]:
    """Check that all that a model has started ends with it."""
    try:
        yield Finding("ok", f"what models start ends with them (cgroup v2, {own_group()})")
    except OSError as error:
        yield Finding(
            "skip", f"{error}: what a model starts in a session of its own outlives the model"
        )


def interpreter() -> Iterator[Finding]:
    """Check that the Python of models can import the SDK."""
    started = time.perf_counter()
    code = "import clipper_container.worker.serve as s; import numpy"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TRIAL_S, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Finding(
            "fail",
            f"a container's interpreter: {last}. Run: pip install clipper-container=={VERSION}",
        )
    else:
        yield Finding(
            "ok",
            f"a container's interpreter starts in {(time.perf_counter() - started) * 1000:.0f} ms",
        )


def round_trip() -> Iterator[Finding]:
    """Check that a deployed model answers a query."""
    from clipper.server import ClipperServer

    row = np.arange(4.0)
    with ClipperServer(load(env={})).start() as server:
        started = time.perf_counter()
        model = server.deploy("doctor", _sums, input="f64[4]", cache=False)
        up_ms = (time.perf_counter() - started) * 1000
        outputs, times = [], []
        for _ in range(100):
            future = model.predict(row)
            outputs.append(future.result(timeout=_TRIAL_S))
            times.append(future.latency_us)
    if outputs != [6.0] * 100:
        yield Finding(
            "fail", f"a model in a process of its own answered {outputs[0]!r} instead of 6.0"
        )
    median = statistics.median(times)
    yield Finding(
        "ok",
        f"a model in a process of its own: up in {up_ms:.0f} ms, then {median:.0f} µs a query"
        " (median)",
    )


def _sums(
    rows: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    return np.asarray(rows.sum(axis=1))


def disk() -> Iterator[Finding]:
    """Check that the state folder persists data."""
    state = load().server.state
    folder = Path(state.removeprefix("sqlite:")) if state else Path.cwd()
    while not folder.is_dir():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "fail",
            f"{folder} cannot be written: no state can be kept there. Run: export"
            " CLIPPER_SERVER__STATE=FOLDER",
        )
        return
    with tempfile.TemporaryDirectory(prefix=".clipper-doctor-", dir=folder) as trial:
        median = statistics.median(_commit_ms(Path(trial) / "trial.db"))
    verdict, more = (
        ("ok", "")
        if median < _COMMIT_SLOW_MS
        else ("warn", "; a slow disk: deploys wait for it, queries never do")
    )
    yield Finding(verdict, f"a commit to sqlite with fsync takes {median:.1f} ms in {folder}{more}")


def _commit_ms(path: Path) -> list[float]:
    times = []
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        connection.execute("create table t (x)")
        for number in range(_COMMITS):
            started = time.perf_counter()
            connection.execute("insert into t values (?)", (number,))
            times.append((time.perf_counter() - started) * 1000)
    finally:
        connection.close()
    return times


def tls() -> Iterator[Finding]:
    """Check that the core can use OpenSSL; otherwise Python speaks TLS."""
    from clipper.frontend.http.tls import openssl

    try:
        yield Finding("ok", f"TLS by {openssl()}")
    except OSError as error:
        yield Finding("warn", f"TLS is spoken by Python, which is slower: {error}")


def certificates() -> Iterator[Finding]:
    """Check the certificates of ./clipper.toml as a server would load them."""
    config = load(file_or_default(None))
    http = config.http
    each = (
        ("http.tls", query_tls(http)),
        ("http.admin_tls", admin_tls(http)),
        ("grpc.tls", grpc_tls(config.grpc, http)),
        ("params.grpc_tls", params_tls(config.params)),
        ("params.tls", shard_tls(config.params)),
    )
    seen = set()
    for where, files in each:
        if files is None or files in seen:
            continue
        seen.add(files)
        days = (Certificate(files, where).ends_s - wall_time_us() / 1e6) / 86_400
        when = "has ended, or is not valid yet" if days < 0 else f"ends in {days:.0f} days"
        verdict = "fail" if days < 0 else "warn" if days < _RENEW_DAYS else "ok"
        renew = "" if verdict == "ok" else ". Renew it; a server that runs takes it up"
        yield Finding(verdict, f"{where}_cert: {files.cert} {when}{renew}")
        if Path(files.key).stat().st_mode & 0o077:
            yield Finding(
                "warn", f"{where}_key: others can read {files.key}. Run: chmod 600 {files.key}"
            )
    if http.api_keys_file:
        ApiKeys(http.api_keys_file)
        yield Finding("ok", f"http.api_keys_file: {http.api_keys_file} is in order")


def packages() -> Iterator[Finding]:
    """Check the packages that the server needs, and optional ones."""
    for package in _NEEDED:
        if not _version(package):
            yield Finding("fail", f"{package} is not installed. Run: pip install {package}")
    if not _version("uvloop"):
        more = "HTTP and gRPC run on asyncio, which is slower. Run: pip install uvloop"
        yield Finding("warn", f"uvloop is not installed: {more}")
    for distributions, extra in _OPTIONAL.items():
        there = next((name for name in distributions if _version(name)), "")
        if there:
            yield Finding("ok", f"{there} {_version(there)}")
        else:
            yield Finding(
                "skip",
                f'{distributions[0]} is not installed. Run: pip install "clipper-serving[{extra}]"',
            )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def containers() -> Iterator[Finding]:
    """Check for an engine for `deployer = "docker"` or "podman". Optional."""
    there = [name for name in _ENGINES if shutil.which(name)]
    if not there:
        yield Finding(
            "skip",
            'no docker and no podman, for deployer = "docker". Install one; other models need none',
        )
    for name in there:
        done = subprocess.run(
            [name, "version"], capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            # docker asks behind its reason whether its daemon runs
            last = last.partition(". Is the ")[0]
            yield Finding(
                "skip",
                f"{name} is installed, but its engine does not answer: {last.rstrip('.?!')}. Run:"
                f" {_ENGINES[name]}",
            )
        else:
            yield Finding("ok", f"{name} answers")
