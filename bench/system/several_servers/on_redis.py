"""Several servers on one Redis as one system: learning, feedback, and queries through upgrades and
kills.

The servers are processes of `clipper up` that share nothing but a Redis. Clients hold a connection
to each server, choose among those whose readiness probe was true when it was last looked at, as a
Kubernetes Service does, and send a query whose connection broke once more, to another server.
"""

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import redis

import clipper
from bench.harness import Goal, Row, Sample, row
from bench.system.fixtures.store_servers import SYNCED, Redis
from clipper.selection import create_policy
from tests.memory_container import wait_until
from tests.processes import Program, free_ports

SERVERS = 3
QUERIES = 10_000
RATE_S = 300.0  # queries of all clients
CLIENTS = 6
PATIENCE_S = 90.0
PROBE_S = 0.05  # between two readiness probes of a server
POLICY = "kl_ucb(discount=1)"  # counts exactly
_MODEL = """
def total(rows):
    return rows.sum(axis=1)
"""
_SETTINGS = """
[server]
warmup = false
restart_ms_min = 50
drain_s = 5.0
[models.m]
target = "model:total"
code = ["{folder}"]
input = "f64[2]"
[apps.a]
models = ["m"]
slo_ms = 10000
default = -1
policy = "{policy}"
"""


class Server:
    """One `clipper up`, at the same port after each start. ready: as its last probe found."""

    def __init__(self, number: int, port: int, folder: Path, state: str) -> None:
        self.port, self._folder, self._state = port, folder, state
        self._own = folder / f"server-{number}"
        self.ready = False
        self.start()

    def start(self) -> None:
        """Start it; it takes queries once it is ready."""
        words = [sys.executable, "-m", "clipper", "up", str(self._folder / "clipper.toml")]
        own = {"CLIPPER_SERVER__STATE": self._state, "CLIPPER_SERVER__FOLDER": str(self._own)}
        self.program = Program(
            *words, "--http", f"127.0.0.1:{self.port}", environment=own, session=True
        )

    def probe(self) -> bool:
        """Probe whether it is ready."""
        try:
            self.ready = send_request(self.port, "GET", "/v2/health/ready")[0] == 200
        except OSError:
            self.ready = False
        return self.ready

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end."""
        self.program.stop(number)
        self.ready = False


def send_request(
    port: int, method: str, path: str, body: object = None
) -> tuple[int, dict[str, object]]:
    """Send a request over a connection of its own; return the status and the JSON of the body."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        return _send(line, method, path, body)
    except http.client.HTTPException as error:
        raise ConnectionError(repr(error)) from None
    finally:
        line.close()


def _send(
    line: http.client.HTTPConnection, method: str, path: str, body: object = None
) -> tuple[int, dict[str, object]]:
    data = None if body is None else json.dumps(body)
    line.request(method, path, data, {"Content-Type": "application/json"})
    response = line.getresponse()
    return response.status, json.loads(response.read() or b"null")


class Cluster:
    """Servers on one Redis, and a thread that probes them. Threads: any.

    settings: lines of the configuration file besides the usual ones.  shared: False for servers
    with a state of their own.
    """

    def __init__(
        self, folder: Path, count: int, settings: str = "", *, shared: bool = True
    ) -> None:
        self.redis = Redis(folder, *SYNCED)
        (folder / "model.py").write_text(_MODEL)
        text = _SETTINGS.format(folder=folder, policy=POLICY) + settings
        (folder / "clipper.toml").write_text(text)
        self.servers: list[Server] = []
        self._stop = threading.Event()
        self._probes = threading.Thread(target=self._probe)
        try:
            for number, port in enumerate(free_ports(count)):
                state = self.redis.url if shared else f"{folder}/state-{number}"
                self.servers.append(Server(number, port, folder, state))
            self._probes.start()
            for server in self.servers:
                self.await_ready(server)
        except BaseException:
            self.close()
            raise

    def _probe(self) -> None:
        while not self._stop.wait(PROBE_S):
            for server in self.servers:
                server.probe()

    def await_ready(self, server: Server) -> None:
        """Wait until a server that was started is ready."""
        server.program.until(server.probe, limit_s=PATIENCE_S)

    def places(self) -> list[tuple[str, int]]:
        """Return the addresses of the servers that are ready; of all, if none is."""
        ready = [server for server in self.servers if server.ready] or self.servers
        return [("127.0.0.1", server.port) for server in ready]

    def close(self) -> None:
        """End all processes."""
        self._stop.set()
        if self._probes.ident is not None:
            self._probes.join()
        for server in self.servers:
            server.end(signal.SIGTERM)
        self.redis.stop()


@contextlib.contextmanager
def cluster(count: int = SERVERS, settings: str = "", *, shared: bool = True) -> Iterator[Cluster]:
    """Return ready servers on one Redis; end them with the block. See Cluster."""
    folder = Path(tempfile.mkdtemp(prefix="several-"))
    started = Cluster(folder, count, settings, shared=shared)
    try:
        yield started
    finally:
        started.close()
        shutil.rmtree(folder)


Place = tuple[str, int]  # host and port


class Client(threading.Thread):
    """One client: `rate_s` queries a second, each to one of the servers that are ready.

    places: returns the addresses of these. timeout_s: of a connection that says nothing.
    """

    def __init__(
        self,
        places: Callable[[], list[Place]],
        rate_s: float,
        stop: threading.Event,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        super().__init__()
        self._places, self._gap_s, self._stopping = places, 1 / rate_s, stop
        self._timeout_s = timeout_s
        self._lines: dict[Place, http.client.HTTPConnection] = {}
        self._turn = 0
        self.sent = self.again = 0
        self.failed: list[str] = []

    def run(self) -> None:
        due_s = time.monotonic()
        while not self._stopping.wait(max(0.0, due_s - time.monotonic())):
            due_s += self._gap_s
            self.sent += 1
            why = self._query()
            if why:
                self.failed.append(why)
        for line in self._lines.values():
            line.close()

    def _query(self) -> str:
        first = self._next(None)
        line = self._open_line(first)
        try:
            return self._try(first, line)
        except (OSError, http.client.HTTPException):
            self.again += 1
        try:
            return self._try(self._next(first), None)  # over a new connection
        except (OSError, http.client.HTTPException) as error:
            return f"connection, twice: {error!r}"

    def _next(self, but: Place | None) -> Place:
        """Return the next place in turn, another one than before if there is one."""
        ready = self._places()
        some = [one for one in ready if one != but] or ready
        self._turn += 1
        return some[self._turn % len(some)]

    def _try(self, place: Place, line: http.client.HTTPConnection | None) -> str:
        if line is None:
            line = http.client.HTTPConnection(*place, timeout=self._timeout_s)
        number = float(self.sent)
        try:
            status, answer = _send(line, "POST", "/api/a/predict", {"input": [number, 1.0]})
        except BaseException:
            line.close()
            raise
        self._put_back(place, line)
        if status != 200:
            return f"status {status}: {answer}"
        return "" if answer["output"] == number + 1.0 else f"a default: {answer.get('reason')}"

    def _open_line(self, place: Place) -> http.client.HTTPConnection | None:
        """Return the connection to a server, unless the server has closed it, which urllib3 checks
        too."""
        line = self._lines.pop(place, None)
        if line is not None and line.sock is not None and select.select([line.sock], [], [], 0)[0]:
            line.close()
            return None
        return line

    def _put_back(self, place: Place, line: http.client.HTTPConnection) -> None:
        old, self._lines[place] = self._lines.get(place), line
        if old is not None:
            old.close()


def replace(servers: Cluster, server: Server, number: signal.Signals) -> None:
    """End a server by a signal, start it again, and wait until it is ready."""
    server.end(number)
    server.start()
    servers.await_ready(server)


def rolling_upgrade(servers: Cluster) -> None:
    """Replace each server by a new one, as a Deployment with one pod at a time does."""
    for server in servers.servers:
        replace(servers, server, signal.SIGTERM)


def kill_each(servers: Cluster) -> None:
    """Kill -9 each server in turn; start it again."""
    for server in servers.servers:
        replace(servers, server, signal.SIGKILL)


def restart_redis(servers: Cluster) -> None:
    """Kill -9 the store, and start it again after a second."""
    servers.redis.stop(signal.SIGKILL)
    time.sleep(1.0)
    servers.redis.start()
    time.sleep(1.0)


def drain(servers: Cluster) -> None:
    """End one server for good, and add another one later."""
    server = servers.servers[0]
    server.end(signal.SIGTERM)
    time.sleep(1.0)
    server.start()
    servers.await_ready(server)


Story = tuple[tuple[str, Callable[[Cluster], None]], ...]
STORY: Story = (
    ("a rolling upgrade", rolling_upgrade),
    ("kill -9 of each server in turn", kill_each),
    ("a Redis restart", restart_redis),
    ("a drain", drain),
)


def through(
    servers: Cluster, queries: int, rate_s: float, story: Story = STORY
) -> list[tuple[str, int, list[str], int]]:
    """Query all the time, at least so many queries, through each part of the story; return for each
    part its name, the queries, why some failed, and how many were sent again."""
    stop = threading.Event()
    clients = [Client(servers.places, rate_s / CLIENTS, stop) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    found: list[tuple[str, int, list[str], int]] = []
    sent = again = failures = 0
    try:
        for part, (name, act) in enumerate(story, 1):
            act(servers)
            enough = queries * part // len(story)
            while sum(client.sent for client in clients) < enough:
                time.sleep(0.05)
            now = sum(client.sent for client in clients)
            tries = sum(client.again for client in clients)
            failed = [why for client in clients for why in client.failed]
            found.append((name, now - sent, failed[failures:], tries - again))
            sent, again, failures = now, tries, len(failed)
    finally:
        stop.set()
        for client in clients:
            client.join()
    return found


def predicted(port: int, number: float) -> tuple[str, float]:
    """Send a query to a server. Return the id of the answer, and the right label."""
    _, answer = send_request(port, "POST", "/api/a/predict", {"input": [number, 1.0]})
    return str(answer["id"]), number + 1.0


def give_feedback(port: int, about: tuple[str, float]) -> dict[str, object]:
    """Tell a server the right label of an answer."""
    return send_request(port, "POST", "/api/a/feedback", {"id": about[0], "label": about[1]})[1]


def feedback_anywhere(servers: Cluster, count: int) -> tuple[int, int]:
    """Send a query to one server and its feedback to another one, for all pairs in turn. Return how
    many of them counted exactly once."""
    ports = [server.port for server in servers.servers]
    good = 0
    for i in range(count):
        about = predicted(ports[i % len(ports)], i)
        once = give_feedback(ports[(i + i // len(ports)) % len(ports)], about)
        twice = give_feedback(ports[(i + 1) % len(ports)], about)
        good += once == {"counted": True} and twice == {"counted": False}
    return good, count


def learning_s(rounds: int, count: int = SERVERS) -> list[float]:
    """Tell one server, and wait until all the others have learned it: seconds."""
    folder = Path(tempfile.mkdtemp(prefix="several-"))
    redis, took = Redis(folder, *SYNCED), []
    try:
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(clipper.start(state=redis.url, folder=f"{folder}/{i}"))
                for i in range(count)
            ]
            servers[0].deploy("m", lambda rows: rows.sum(axis=1), input="f64[2]")
            servers[0].app("a", ["m"], slo_ms=10_000, policy=POLICY)
            wait_until(lambda: all("a" in one.stats()["applications"] for one in servers))
            apps = [server.app("a") for server in servers]
            for i in range(rounds):
                answer = apps[0].predict([i, 1.0]).result(PATIENCE_S)
                began_s = time.monotonic()
                apps[0].feedback(answer, label=i + 1.0)
                wait_until(partial(_have_seen, servers, i + 1))
                took.append(time.monotonic() - began_s)
    finally:
        redis.stop()
        shutil.rmtree(folder)
    return took


def _have_seen(servers: list[clipper.ClipperServer], count: int) -> bool:
    return all(_seen(server) == count for server in servers)


def _seen(server: clipper.ClipperServer) -> int:
    models = [clipper.VersionedModel("m", 1)]
    learner = server._learning.states.learner("a", POLICY, create_policy(POLICY), models)
    return int(learner.state(None).seen)


def cpu_us(servers: Cluster, count: int, seconds: float, users: int = CLIENTS) -> float:
    """Return the CPU time of servers and containers for each query, in microseconds, while so many
    clients query the first `count` servers as fast as they can."""
    stop = threading.Event()
    places = [("127.0.0.1", server.port) for server in servers.servers[:count]]
    clients = [Client(lambda: places, 1e6, stop) for _ in range(users)]
    sessions = {server.program.pid for server in servers.servers[:count]}
    began_s = _cpu_s(sessions)
    for client in clients:
        client.start()
    time.sleep(seconds)
    stop.set()
    for client in clients:
        client.join()
    return (_cpu_s(sessions) - began_s) * 1e6 / sum(client.sent for client in clients)


def _cpu_s(sessions: set[int]) -> float:
    """Return the CPU seconds so far of the processes of these sessions."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13])) if int(fields[3]) in sessions else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def record_bytes(servers: Cluster, count: int = 2000) -> float:
    """Return the bytes that Redis keeps for each answer that waits for feedback."""
    with contextlib.closing(redis.Redis.from_url(servers.redis.url)) as client:
        before = client.memory_stats()["dataset.bytes"]
        for i in range(count):
            predicted(servers.servers[0].port, i)
        time.sleep(2.0)
        return float(client.memory_stats()["dataset.bytes"] - before) / count


def costs(quick: bool) -> list[Row]:
    """Measure what the store that is shared costs a query: CPU with it, without the records of
    answers, and with a state of each server's own; of one server, and of two."""
    each_s, times = (0.5, 3) if quick else (3.0, 5)
    off = "[feedback]\nrecords_ms = 0\n"
    rows: list[Row] = []
    with cluster(2) as with_records, cluster(2, off) as without, cluster(2, shared=False) as apart:
        kinds = (with_records, without, apart)
        found = [
            [
                *(cpu_us(kind, count, each_s) for kind in kinds for count in (2, 1)),
                cpu_us(with_records, 2, each_s, 2 * CLIENTS),
            ]
            for _ in range(times)
        ]
        two, one, two_off, one_off, two_apart, one_apart, two_busy = (
            Sample(tuple(values)) for values in zip(*found, strict=True)
        )
        why = "batches are smaller, since two servers share the queries"
        goal = Goal("at_most", 1.05)
        name = "CPU of servers and containers per query, 2 servers"
        rows.append(row(name, two, "us", "1 server", one, goal=goal, bounded_by=why))
        name = "the same, twice the clients, so that each server has as many as 1 server had"
        alone = two_apart.median / one_apart.median
        left = f"not the store alone: 2 servers that share no state need {alone:.2f} x"
        rows.append(row(name, two_busy, "us", "1 server", one, goal=goal, bounded_by=left))
        name = "the same, answers not written to Redis"
        rows.append(row(name, two_off, "us", "1 server", one_off))
        name = "the same, each server with a state of its own"
        rows.append(row(name, two_apart, "us", "1 server", one_apart))
        name = "CPU per query of 2 servers that share a store"
        written = one.median / one_off.median
        stored = f"records of answers: 1 server that writes them needs {written:.2f} x"
        rows.append(
            row(name, two, "us", "2 that share nothing", two_apart, goal=goal, bounded_by=stored)
        )
        name = "CPU per query of 1 server that writes answers to Redis"
        rows.append(row(name, one, "us", "not written", one_off))
        used = record_bytes(with_records)
        rows.append(row("Redis memory per answer that waits for feedback", used, "bytes"))
    return rows


def main(quick: bool = False) -> list[Row]:
    rounds, pairs = (5, 30) if quick else (50, 900)
    queries = QUERIES // 10 if quick else QUERIES
    slowest = max(learning_s(rounds))
    rows = [
        row(
            f"feedback to one of {SERVERS} servers, used by all: slowest of {rounds}",
            slowest,
            "s",
            goal=Goal("value_at_most", 1.0),
        )
    ]
    with cluster() as servers:
        good, count = feedback_anywhere(servers, pairs)
        rows.append(
            row(
                "feedback at any server about an answer of any server, counted once",
                good / count,
                "share",
                goal=Goal("value_at_least", 1.0),
                note=f"{good} of {count}",
            )
        )
        for name, sent, failed, again in through(servers, queries, RATE_S):
            note = f"of {sent}; {again} sent again" + (f"; {failed[0]}" if failed else "")
            goal = Goal("value_at_most", 0.0)
            rows.append(row(f"failed through {name}", len(failed), "queries", goal=goal, note=note))
    return rows + costs(quick)
