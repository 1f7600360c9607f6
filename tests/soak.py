"""Serve a mixed load for minutes with a fault every few seconds, and check what must hold all the
time.

    python -m tests.soak --minutes 10 --seed 7        (make soak ARGS="--minutes 120")

A server runs in a process of its own. Inside it one thread sends queries and feedback; from
outside, HTTP clients send queries. Every few seconds a fault is chosen by the seed: a container is
killed or stopped, or a hostile client appears.

It fails if an answer is missing or doubled, wrong, or an error that no client should see; if the
server's memory or its open descriptors grow; or if a model does not come back at the end. The
lateness of answers is reported, not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from tests.memory_container import wait_until
from tests.processes import Program

SLO_MS = 200.0
# queries a second of the thread inside the server; each HTTP client sends one after another
RATE = 200.0
CLIENTS = 4
FAULT_EVERY_S = 5.0
STOP_S = 1.5  # how long a stopped container stays stopped
SETTLED = 0.3  # memory and descriptors are compared from this share of the run on
MEMORY_GROWTH_MAX = 64 << 20  # bytes of the server
DESCRIPTORS_GROWTH_MAX = 32
GRACE_S = 30.0  # after the load: until every model has its replicas again
MODELS = {"total": 2, "slow": 1}  # replicas
TAKEN = (200, 429, 503)  # what an HTTP client may be answered


def kind_of(output: float, expected: float, is_default: bool, missing: Sequence[object]) -> str:
    """Classify an answer. Where a model is missing, its mean stands for it, so the output may
    differ."""
    if is_default:
        return "default"
    if missing:
        return "partial"
    return "right" if abs(output - expected) < 1e-6 else "wrong"


# -- the server's process


def total(rows: np.ndarray) -> np.ndarray:
    return rows.sum(axis=1)


def slow(rows: np.ndarray) -> np.ndarray:
    time.sleep(0.004)
    return rows.sum(axis=1)


class Inside:
    """Queries and feedback from a thread of the server's process; each future is counted when it
    ends."""

    def __init__(self, app: Any, seed: int) -> None:
        self._app = app
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._open: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.late_ms: list[float] = []
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="soak-load")

    def _run(self) -> None:
        due = time.monotonic()
        number = 0
        while not self.stopping.is_set():
            due = max(due + self._random.expovariate(RATE), time.monotonic() - 0.1)
            time.sleep(max(due - time.monotonic(), 0))
            number += 1
            self._send(number)

    def _send(self, number: int) -> None:
        row = np.array([number % 5000, 1.0, self._random.random()])
        sent = time.monotonic()
        with self._guard:
            self.counts["sent"] += 1
            self._open[number] = sent
        try:
            future = self._app.predict(row)
        except clipper.ClipperError as error:
            self._end(number, type(error).__name__)
            return
        future.add_done_callback(lambda done: self._answered(number, float(row.sum()), done))

    def _answered(self, number: int, expected: float, future: Any) -> None:
        try:
            answer = future.result(0)
        except (clipper.ClipperError, CancelledError) as error:
            self._end(number, type(error).__name__)
            return
        self._end(number, kind_of(answer.output, expected, answer.is_default, answer.missing))
        if self._random.random() < 0.2:
            with contextlib.suppress(clipper.ClipperError):
                self._app.feedback(answer.id, label=expected)

    def _end(self, number: int, kind: str) -> None:
        now = time.monotonic()
        with self._guard:
            sent = self._open.pop(number, None)
            self.counts["doubled" if sent is None else kind] += 1
            if sent is not None:
                self.late_ms.append(max((now - sent) * 1000 - SLO_MS, 0.0))

    def report(self) -> dict[str, Any]:
        with self._guard:
            late = sorted(self.late_ms)
            return {
                "counts": dict(self.counts),
                "open": len(self._open),
                "late_p999_ms": late[int(len(late) * 0.999)] if late else 0.0,
            }


def serve(state: str, seed: int) -> None:
    """Run the server; answer each line of standard input with one line of JSON, until it ends."""
    with clipper.start(
        state=state, http="127.0.0.1:0", restarts_max=1000, restart_ms_max=1000
    ) as server:
        server.deploy("total", total, input="f64[3]", replicas=MODELS["total"])
        server.deploy("slow", slow, input="f64[3]", replicas=MODELS["slow"])
        app = server.app(
            "soak", models=["total", "slow"], slo_ms=SLO_MS, default=-1.0, policy="ensemble"
        )
        inside = Inside(app, seed)
        inside.thread.start()
        print(
            json.dumps({"http": server.http_address, "socket": server.address, "pid": os.getpid()}),
            flush=True,
        )
        for line in sys.stdin:
            if line.strip() == "stop":
                inside.stopping.set()
                inside.thread.join()
            models = {
                name: [(r["state"], r.get("pid", 0)) for r in model["replicas"]]
                for name, model in server.stats()["models"].items()
            }
            print(json.dumps({"models": models, **inside.report()}), flush=True)


# -- the process that watches it


class Watched:
    """Watches the server's process: its statistics, its memory and its descriptors."""

    def __init__(self, state: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.soak", "--serve", state, "--seed", seed]
        self.program = Program(*command, apart=True)
        self.hello: dict[str, Any] = json.loads(self.program.line())
        host, _, port = self.hello["http"].removeprefix("http://").rpartition(":")
        self.http = host, int(port)

    def ask(self, what: str = "report") -> dict[str, Any]:
        self.program.say(what)
        found: dict[str, Any] = json.loads(self.program.line())
        return found

    def memory(self) -> int:
        pages = Path(f"/proc/{self.hello['pid']}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.hello['pid']}/fd"))

    def close(self) -> int:
        self.program.end_input()
        return self.program.wait()


class Client:
    """One HTTP connection that sends one query after the other, and counts the answers."""

    def __init__(self, address: tuple[str, int], number: int, stopping: threading.Event) -> None:
        self._address, self._number, self._stopping = address, number, stopping
        self.counts: Counter[str] = Counter()
        self.thread = threading.Thread(target=self._run, name=f"soak-client-{number}")
        self.thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=30)
        number = 0
        while not self._stopping.is_set():
            number += 1
            row = [float(self._number), float(number % 3000), 0.5]
            try:
                connection.request("POST", "/api/soak/predict", json.dumps({"input": row}))
                response = connection.getresponse()
                body = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counts[f"broken: {type(error).__name__}"] += 1
                connection.close()
                continue
            if response.status not in TAKEN:
                self.counts[f"status {response.status}"] += 1
            elif response.status != 200:
                self.counts["refused"] += 1
            else:
                self.counts[
                    kind_of(body["output"], sum(row), body["default"], body["missing"])
                ] += 1
            self._stopping.wait(0.01)
        connection.close()


class Faults:
    """Causes faults by a seed. Each method is one fault; its hostile clients have disconnected when
    it returns."""

    def __init__(self, watched: Watched, chance: random.Random) -> None:
        self._watched, self._random = watched, chance
        self.counts: Counter[str] = Counter()
        self._all: list[Callable[[], None]] = [
            self.kill_container,
            self.stop_container,
            self.random_bytes,
            self.half_a_request,
            self.gzip_bomb,
            self.large_head,
            self.many_requests_unread,
            self.strangers_at_the_container_socket,
            self.many_connections,
            self.bad_feedback,
            self.reset_in_the_middle,
        ]

    def one(self) -> None:
        fault = self._random.choice(self._all)
        self.counts[fault.__name__] += 1
        with contextlib.suppress(OSError):  # the server may close the connection at any point
            fault()

    def _container(self) -> int:
        replicas = [
            pid
            for states in self._watched.ask()["models"].values()
            for state, pid in states
            if state == "ready"
        ]
        return self._random.choice(replicas) if replicas else 0

    def kill_container(self) -> None:
        if pid := self._container():
            os.kill(pid, signal.SIGKILL)

    def stop_container(self) -> None:
        if pid := self._container():
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
            time.sleep(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            os.close(descriptor)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._watched.http, timeout=10)

    def _send(self, data: bytes) -> None:
        with self._connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    def random_bytes(self) -> None:
        self._send(self._random.randbytes(4000))

    def half_a_request(self) -> None:
        with self._connect() as connection:
            connection.sendall(
                b"POST /api/soak/predict HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
            )
            time.sleep(0.5)

    def gzip_bomb(self) -> None:
        body = gzip.compress(bytes(16 << 20))
        head = (
            "POST /api/soak/predict HTTP/1.1\r\nHost: a\r\nContent-Encoding:"
            f" gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._send(head.encode() + body)

    def large_head(self) -> None:
        self._send(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n")

    def many_requests_unread(self) -> None:
        body = b'{"input": [1, 2, 3]}'
        request = b"POST /api/soak/predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (
            len(body),
            body,
        )
        with self._connect() as connection:
            connection.settimeout(1)
            connection.sendall(request * 2000)

    def strangers_at_the_container_socket(self) -> None:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(5)
                stranger.connect(self._watched.hello["socket"].removeprefix("unix:"))
                stranger.sendall(self._random.randbytes(300))

    def many_connections(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(self._connect())

    def bad_feedback(self) -> None:
        body = json.dumps({"feedback": [{"id": "nonsense", "label": 1e308}] * 50}).encode()
        head = b"POST /api/soak/feedback HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        self._send(head + body)

    def reset_in_the_middle(self) -> None:
        connection = self._connect()
        # close() resets it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.sendall(
            b"POST /api/soak/predict HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n"
            + b'{"input": [1, 2, 3]}'
        )
        connection.close()


def soak(minutes: float, seed: int) -> int:
    """Run the load and the faults; returns the exit status."""
    chance = random.Random(seed)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="clipper-soak-") as folder:
        watched = Watched(f"{folder}/state", seed)
        stopping = threading.Event()
        clients = [Client(watched.http, number, stopping) for number in range(CLIENTS)]
        faults = Faults(watched, chance)
        memory, descriptors = [], []
        begun = time.monotonic()
        until = begun + minutes * 60
        said = begun
        while (now := time.monotonic()) < until:
            time.sleep(min(FAULT_EVERY_S, max(until - now, 0)))
            memory.append(watched.memory())
            descriptors.append(watched.descriptors())
            if time.monotonic() - said >= 30:
                said = time.monotonic()
                counts = watched.ask()["counts"]
                done = (said - begun) / (until - begun)
                print(
                    f"{done:4.0%} {memory[-1] >> 20} MiB, {descriptors[-1]} descriptors, {counts}",
                    flush=True,
                )
            faults.one()
        stopping.set()
        for client in clients:
            client.thread.join()
        watched.ask("stop")

        def whole() -> bool:
            report = watched.ask()
            states = {
                name: sum(state == "ready" for state, _ in models)
                for name, models in report["models"].items()
            }
            return report["open"] == 0 and all(
                states.get(f"{name}:1", 0) == wanted for name, wanted in MODELS.items()
            )

        try:
            wait_until(whole, "all answered and every replica ready", patience_s=GRACE_S)
        except AssertionError as error:
            problems.append(f"{error}: {watched.ask()}")
        report = watched.ask()
        outside = sum((client.counts for client in clients), Counter[str]())
        if code := watched.close():
            problems.append(f"the server ended with {code}")
    ended = sum(count for kind, count in report["counts"].items() if kind != "sent")
    if report["counts"]["sent"] != ended or report["counts"].get("doubled"):
        problems.append(f"not answered exactly once: {report['counts']}")
    problems += [
        f"{count} answers inside: {kind}"
        for kind, count in report["counts"].items()
        if kind == "wrong"
    ]
    allowed = {"right", "partial", "default", "refused"}
    problems += [
        f"{count} HTTP answers: {kind}" for kind, count in outside.items() if kind not in allowed
    ]
    for what, values, bound in (
        ("bytes", memory, MEMORY_GROWTH_MAX),
        ("descriptors", descriptors, DESCRIPTORS_GROWTH_MAX),
    ):
        settled = values[int(len(values) * SETTLED) :]
        half = len(settled) // 2
        if half and statistics.median(settled[half:]) - statistics.median(settled[:half]) > bound:
            problems.append(f"{what} grew from {settled[0]} to {settled[-1]}")
    print(f"inside: {report['counts']}, p99.9 of lateness {report['late_p999_ms']:.1f} ms")
    print(f"over HTTP: {dict(outside)}")
    print(f"faults: {dict(faults.counts)}")
    if memory:
        print(
            f"memory: {memory[0] >> 20} to {memory[-1] >> 20} MiB; descriptors: {descriptors[0]} to"
            f" {descriptors[-1]}"
        )
    for problem in problems:
        print(f"FAILED: {problem}")
    return int(bool(problems))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.seed)
        return 0
    return soak(options.minutes, options.seed)


if __name__ == "__main__":
    sys.exit(main())
