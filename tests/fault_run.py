"""Cause many faults of four kinds in a server on Redis, in an order that a seed gives, and check
what must hold after each of them.

    python -m tests.fault_run --kills 500 --store-faults 60 --shortages 100 --starts 50 --seed 7

Kills end processes by SIGKILL: containers that were forked, are commands, or are of Docker, hosts
of the mesh, shards, the fork servers of both, and Docker itself, where root can run one. Store
faults stop Redis, slow it, fill it, kill and restart it, empty it, take it back to an older state,
or put an empty one in its place. Shortages leave the server a few file descriptors and take these
with idle connections while a container or a shard is killed; every second one leaves it no further
process instead, where a cgroup can be made. Starts begin another server on the same store, and end
it in the midst of its start, or once it serves: on request, by SIGINT or by SIGKILL.

It fails if a query does not end within `LATE_S`, or another operation within `HANG_S`, and shows
what the threads of the server do then. It also fails if a version, an application, feedback or a
push that was acknowledged is missing at the end, if a model does not answer within `DOWN_S` after a
fault has ended, or if a process, a temporary file or a descriptor is left behind. It prints one row
for each kind of fault, and the figures as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.system.fixtures import store_servers
from clipper.errors import AlreadyExists
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings
from tests.images.engines import Engine, NoEngine, running
from tests.processes import Program

HANG_S = 60.0
LATE_S = 20.0  # queries have a deadline of at most SLO_MS
SLO_MS = 1000
START_S = 180.0  # for the first start, which builds an image
DOWN_S = 5.0
LEFT_S = 10.0  # for the end of what a server has started, after its own
APPS = {"total": 2, "plain": 1, "command": 1}  # replicas of the model of each
BOXED = "boxed"  # the model in a container of Docker, where that runs
SHARDS = 2
DESCRIPTORS_MORE = 24  # that a server may have after all faults: fork servers that came later
CHANGE_SHARE = 0.3  # of the faults after which a version is deployed and feedback is given
FEEDBACK = 3
LAST_LINES = 12  # of the server's log, with a problem
ANSWER = "answer: "  # no line of a log begins so
SHOW = signal.SIGUSR1  # the server shows what its threads of Python do
MESHED = "meshed"
PUSHED = "pushed"
# A container that is a program of its own, as one in another language is.
COMMAND = """
exec "$0" -m clipper_container serve meshed:total --code "$1" \\
  --name "$CLIPPER_MODEL" --version "$CLIPPER_VERSION" --replica "$CLIPPER_REPLICA" \\
  --connect "$CLIPPER_ADDRESS" --token-env CLIPPER_TOKEN --input "$CLIPPER_INPUT"
"""


# -- the server's process


def total(rows: np.ndarray) -> np.ndarray:
    return rows.sum(axis=1)


class Hung(Exception):
    """A query did not end."""


def ended(future: Any) -> Any:
    """Wait for the result of a query.

    Raises: Hung, after it has shown what the threads do; or what the query ended with.
    """
    try:
        return future.result(LATE_S)
    except TimeoutError as error:
        if isinstance(error, clipper.ClipperError):
            raise
        faulthandler.dump_traceback()
        raise Hung(str(error)) from error


class Served:
    """Carries out what its parent asks, a line each, and answers with a line of JSON that has the
    number of the request."""

    def __init__(
        self,
        server: clipper.ClipperServer,
        shards: LocalSet,
        folder: Path,
        models: Mapping[str, int],
    ) -> None:
        self._server = server
        module = folder / "meshed.py"
        module.write_text("def total(rows):\n    return rows.sum(axis=1)\n")
        words = ["/bin/sh", "-c", COMMAND, sys.executable, str(folder)]
        kinds: dict[str, dict[str, Any]] = {
            "command": {"command": words},
            BOXED: {"model": total, "deployer": "docker"},
        }
        for name, replicas in models.items():
            if name not in server.catalog.view.versions:
                kind = kinds.get(name, {"model": total})
                server.deploy(name, input="f64[2]", replicas=replicas, cache=False, **kind)
            if name not in server.catalog.view.applications:
                server.app(name, models=[name], slo_ms=SLO_MS, default=-1.0, policy="ensemble")
        if MESHED not in server.catalog.view.versions:
            server.register_model(MESHED, "meshed.py:total", key=str(folder))
        self._n = 0
        self._shards = shards
        self._client = Client(shards.folder, patience_s=LATE_S, answer_s=2.0)
        adds = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}, "initializer": "zeros"}
        with contextlib.suppress(AlreadyExists):
            self._client.create(TableSpec("t", 1, **adds))

    def answer(self, name: str) -> bool:
        """Return whether a model answers now."""
        self._n += 1
        if name == PUSHED:
            return len(self._client.pull("t", [0, 1])) == SHARDS
        row = [float(self._n), 1.0]
        if name == MESHED:
            found = ended(self._server.predict(MESHED, np.array(row), slo_ms=SLO_MS))
            return not found.is_default
        answer = ended(self._server.app(name).predict(row))
        return not answer.is_default and answer.output == sum(row)

    def deploy(self, name: str) -> str:
        """Deploy a version, which is an acknowledgement."""
        self._server.deploy(name, "operator:pos", input="f64[2]", promote=False, replicas=0)
        return max(model.id_text for model in self._versions(name))

    def app(self, name: str) -> str:
        self._server.app(name, models=["plain"], slo_ms=50, default=-1.0)
        return name

    def feedback(self, name: str) -> int:
        """Give feedback; return how much was acknowledged."""
        app, counted = self._server.app(name), 0
        for _ in range(FEEDBACK):
            self._n += 1
            row = [float(self._n), 2.0]
            answer = ended(app.predict(row))
            if not answer.is_default:
                counted += bool(app.feedback(answer.id, label=sum(row)))
        return counted

    def push(self, _: str) -> int:
        """Add one to the row of each shard, which is an acknowledgement."""
        self._client.push("t", [0, 1], -np.ones((SHARDS, 1)))
        return 1

    def shards(self, _: str) -> list[int]:
        """Return the processes of the shards."""
        return [*self._shards.pids().values()]

    def accept(self, _: str) -> int:
        return self._server.accept_store(restore=True)

    def _versions(self, name: str) -> list[Any]:
        return [
            _Named(f"{name}:{model.version}")
            for model in self._server.catalog.view.versions.get(name, ())
        ]

    def known(self, _: str) -> dict[str, Any]:
        """Return all versions and applications, and how much feedback was learned."""
        stats = self._server.stats()
        view = self._server.catalog.view
        return {
            "versions": [f"{m.name}:{m.version}" for all_ in view.versions.values() for m in all_],
            "applications": sorted(view.applications),
            "feedback": {
                name: row["answers"]["feedback"]["n"] for name, row in stats["applications"].items()
            },
            "waiting": stats["feedback"]["waiting"],
            "pushes": int(self._client.pull("t", [0, 1]).min()),
        }


@dataclass(frozen=True)
class _Named:
    id_text: str


@contextlib.contextmanager
def started_set(shards: LocalSet) -> Iterator[LocalSet]:
    try:
        shards.start().wait_ready(HANG_S)
        yield shards
    finally:
        shards.stop(snapshot=False)


def serve(state: str, folder: str, engine: str) -> None:
    """Run the server until the end of standard input. engine: the settings of Docker, in JSON, or
    empty if there is none."""
    faulthandler.register(SHOW)
    models = {**APPS, BOXED: 1} if engine else APPS
    docker = json.loads(engine or "{}")
    mesh = {"enabled": True, "name": "node", "hosts": 1, "failure_s": 1.0}
    settings = ParamsSettings(folder=f"{folder}/params", shards=SHARDS, durability="disk")
    with (
        started_set(LocalSet(settings)) as shards,
        clipper.start(
            state=state, folder=folder, http="127.0.0.1:0", mesh=mesh, docker=docker
        ) as server,
    ):
        served = Served(server, shards, Path(folder), models)
        print(ANSWER + json.dumps({"number": 0, "http": server.http_address}), flush=True)
        for line in sys.stdin:
            number, verb, name = line.rstrip("\n").split(" ")
            try:
                found = {"ok": getattr(served, verb)(name)}
            except (clipper.ClipperError, OSError) as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            except Hung as error:
                found = {"hung": str(error)}
            # at the begin of a line, whatever was logged
            print(f"\n{ANSWER}{json.dumps({'number': int(number), **found})}", flush=True)


# -- the store


class Redis(store_servers.Redis):
    """A Redis of the run, on a unix socket, with each write on disk before it is answered."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._data.mkdir()
        debug = ("--enable-debug-command", "local")
        super().__init__(folder, "--dir", str(self._data), *store_servers.SYNCED, *debug)

    def keep(self) -> None:
        """Keep the present state, for `restore`."""
        shutil.rmtree(self.folder / "older", ignore_errors=True)
        with contextlib.suppress(shutil.Error):  # it is being written
            shutil.copytree(self._data, self.folder / "older")

    def restore(self) -> None:
        """Go back to the state that was kept."""
        self.kill()
        if (self.folder / "older").exists():
            shutil.rmtree(self._data)
            shutil.copytree(self.folder / "older", self._data)
        self.start()

    def replace(self) -> None:
        """Put an empty one in its place."""
        self.kill()
        shutil.rmtree(self._data)
        self._data.mkdir()
        self.start()


# -- the run


def until(is_so: Callable[[], object], limit_s: float) -> float | None:
    """Return how long it took until it was so; None if that was too long."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - began


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return ""


class Group:
    """A cgroup for all processes of a server, where one can be made: it limits their number, and
    knows those that are left."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        for top in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
            folder = Path(top, f"clipper-faults-{os.getpid()}")
            with contextlib.suppress(OSError):
                folder.mkdir()
                if (folder / "pids.max").exists():
                    self.folder = folder
                    return
                folder.rmdir()

    def add(self, pid: int) -> None:
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        if self.folder is None:
            return []
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]

    def limit(self, more: int | None) -> None:
        """Allow so many more processes and threads than there are; None: any number."""
        assert self.folder is not None
        now = int((self.folder / "pids.current").read_text())
        (self.folder / "pids.max").write_text("max" if more is None else str(now + more))

    def close(self) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


class Watched:
    """The server's process. engine: Docker, if there is one. awaited: whether this returns once it
    serves."""

    def __init__(
        self, state: str, folder: Path, group: Group, engine: Engine | None, awaited: bool = True
    ) -> None:
        docker = json.dumps(engine.settings) if engine else ""
        words = [sys.executable, "-m", "tests.fault_run", "--serve", state, folder, docker]
        self.models = (*APPS, BOXED) if engine else (*APPS,)
        self.group, self.temporary = group, folder.parent / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self.program = Program(*words, environment={"TMPDIR": str(self.temporary)})
        group.add(self.program.pid)
        self._asked = 0
        self.http = self._answer("its start", START_S)["http"] if awaited else ""

    def _answer(self, asked: str, limit_s: float = HANG_S) -> dict[str, Any]:
        """Return the answer to the last request. Those to earlier ones are late: their requests
        have been counted as hung.

        Raises: AssertionError, with what its threads do, if it hangs.
        """
        give_up = time.monotonic() + limit_s
        while True:
            try:
                line = self.program.line(max(0.0, give_up - time.monotonic()))
            except AssertionError as error:
                raise AssertionError(f"{asked}: {error}\n{self._threads()}") from error
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.JSONDecoder().raw_decode(line, len(ANSWER))[0]
                if found["number"] == self._asked:
                    return found

    def ask(self, verb: str, name: str = "") -> dict[str, Any]:
        """Ask for something. Raises AssertionError as `_answer`."""
        self._asked += 1
        self.program.say(f"{self._asked} {verb} {name}")
        found = self._answer(f"{verb} {name}")
        assert "hung" not in found, f"{verb} {name}: {found['hung']}\n{self._threads()}"
        return found

    def _threads(self) -> str:
        """Return what the threads of the server do: in Python, and in the kernel."""
        if not self.program.lives:
            return "it has ended"
        known = len(self.program.output)
        os.kill(self.program.pid, SHOW)
        with contextlib.suppress(AssertionError):
            self.program.until(lambda: "(most recent call first)" in self.program.output[known:])
            time.sleep(1.0)  # until it has shown all of them
        texts = [self.program.output[known:]]
        for task in Path(f"/proc/{self.program.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                each = [(task / name).read_text().strip() for name in ("comm", "wchan")]
                texts.append(" ".join((task.name, *each)))
        return "\n".join(texts)

    def children(self) -> dict[int, str]:
        """Return the command lines of all processes below the server."""
        parents, lines = {}, {}
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                parents[pid] = int(stat[1])
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found = {self.program.pid}
        for _ in range(4):
            found |= {pid for pid, parent in parents.items() if parent in found}
        return {pid: lines[pid] for pid in found - {self.program.pid}}

    def pids(self, *words: str) -> list[int]:
        return sorted(
            pid
            for pid, line in self.children().items()
            if any(word in line for word in words) and "-c from" not in line
        )

    def descriptors(self) -> list[str]:
        """Return what the server has open, without numbers."""
        found, folder = [], f"/proc/{self.program.pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(re.sub(r"[0-9]+", "", os.readlink(f"{folder}/{name}")))
        return found

    def left(self, started: Iterable[int], *, files: bool = True) -> list[str]:
        """Return what is left of it after its end: processes, and temporary files, of which those
        of a killed server are removed by the next that serves."""

        def those() -> list[str]:
            pids = {*self.group.pids(), *(pid for pid in started if lives(pid))}
            found = [f"process {pid}: {command_of(pid)}" for pid in sorted(pids)]
            if files:
                found += [f"file {path}" for path in self.temporary.rglob("*")]
            return found

        until(lambda: not those(), LEFT_S)
        return those()

    def close(self) -> int | None:
        self.program.end_input()
        with contextlib.suppress(AssertionError):
            return self.program.wait(HANG_S)
        return None


@dataclass
class Figures:
    """The figures of one kind of fault."""

    faults: int = 0
    hangs: int = 0
    down: int = 0  # models that did not answer within DOWN_S
    refused: int = 0  # changes that were refused, with an error
    longest_s: float = 0.0  # until all models answered


@dataclass
class Run:
    """One run. engine: Docker, if there is one. versions, applications, feedback by application,
    pushes: those acknowledged."""

    watched: Watched
    redis: Redis
    engine: Engine | None
    chance: random.Random
    figures: dict[str, Figures] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    applications: set[str] = field(default_factory=set)
    feedback: dict[str, int] = field(default_factory=dict)
    pushes: int = 0
    problems: list[str] = field(default_factory=list)

    def fault(self, name: str) -> None:
        """Cause one fault, then check that all models answer, and sometimes change something."""
        seen = self.figures.setdefault(name, Figures())
        seen.faults += 1
        getattr(self, f"_{name}")()
        began = time.monotonic()
        for model in (*self.watched.models, MESHED, PUSHED):
            try:
                took = until(lambda model=model: self._answers(model), HANG_S)  # type: ignore[misc]
            except AssertionError as error:
                seen.hangs += 1
                self.problems.append(f"hung after {name}: {error}")
                continue
            if took is None or took > DOWN_S:
                seen.down += 1
                lines = self.watched.program.lines
                last = [line for line in lines if line and not line.startswith(ANSWER)]
                self.problems.append(
                    f"{model} is down after {name} for {took or HANG_S:.1f} s; the server's last"
                    f" lines: {last[-LAST_LINES:]}"
                )
        seen.longest_s = max(seen.longest_s, time.monotonic() - began)
        if self.chance.random() < CHANGE_SHARE:
            self._change(seen, name)

    def all_answer(self) -> bool:
        """Return whether all models answer, and the shards."""
        return all(self._answers(model) for model in (*self.watched.models, MESHED, PUSHED))

    def _answers(self, model: str) -> bool:
        """Return whether a model answers three times in a row: the first may be sent to a container
        whose end is not known yet."""
        return all(self.watched.ask("answer", model).get("ok") for _ in range(3))

    def _change(self, seen: Figures, name: str) -> None:
        app = self.chance.choice(self.watched.models)
        changes = ("deploy", app), ("app", f"app{seen.faults}-{name}"), ("feedback", app)
        for verb, what in (*changes, ("push", "")):
            try:
                found = self.watched.ask(verb, what.replace("_", "-"))
            except AssertionError as error:
                seen.hangs += 1
                self.problems.append(f"hung after {name}: {error}")
                return
            seen.refused += "error" in found
            if "error" in found:
                continue
            if verb == "deploy":
                self.versions.add(found["ok"])
            elif verb == "app":
                self.applications.add(found["ok"])
            elif verb == "push":
                self.pushes += found["ok"]
            else:
                self.feedback[what] = self.feedback.get(what, 0) + found["ok"]

    # kills

    def _kill_one(self, *words: str) -> None:
        if found := self.watched.pids(*words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(found), signal.SIGKILL)

    def _kill_container(self) -> None:
        self._kill_one("clipper-container")

    def _kill_command(self) -> None:
        self._kill_one("clipper_container serve")

    def _kill_shard(self) -> None:
        if found := self.watched.ask("shards").get("ok"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(found), signal.SIGKILL)

    def _kill_fork_server(self) -> None:
        self._kill_one("clipper_container fork-server")

    def _kill_host(self) -> None:
        self._kill_one("clipper_container host")

    def _kill_boxed(self) -> None:
        """Kill the first process of a container of Docker."""
        assert self.engine is not None
        if found := self.engine.containers(f"{BOXED}:1"):
            with contextlib.suppress(subprocess.CalledProcessError):  # it has ended
                self.engine.run("kill", self.chance.choice(found))

    def _kill_engine(self) -> None:
        """Kill Docker, and start it a moment later: then it ends the containers that it finds."""
        assert self.engine is not None
        self.engine.daemon.kill()
        time.sleep(self.chance.uniform(0, 2))
        self.engine.daemon.start()

    # the store

    def _store_stops(self) -> None:
        self.redis.send(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.2, 3))
        self.redis.send(signal.SIGCONT)

    def _store_is_killed(self) -> None:
        self.redis.kill()
        time.sleep(self.chance.uniform(0, 2))
        self.redis.start()

    def _store_is_slow(self) -> None:
        self.redis.ask(f"CLIENT PAUSE {self.chance.randrange(100, 3000)} ALL")

    def _store_is_full(self) -> None:
        self.redis.ask("CONFIG SET maxmemory 1")
        time.sleep(self.chance.uniform(0.2, 2))
        self.redis.ask("CONFIG SET maxmemory 0")

    def _store_is_emptied(self) -> None:
        self.redis.ask("FLUSHALL")
        self._accept()

    def _store_goes_back(self) -> None:
        self.redis.restore()
        self._accept()

    def _store_is_replaced(self) -> None:
        self.redis.replace()
        self._accept()

    def _accept(self) -> None:
        """Have the server write back what it knows, as an operator does."""
        time.sleep(0.5)
        until(lambda: "error" not in self.watched.ask("accept"), HANG_S)
        self.redis.keep()

    # shortages

    def _kill_any(self) -> None:
        self.chance.choice((self._kill_container, self._kill_command, self._kill_shard))()

    def _no_processes(self) -> None:
        """Leave the server few further processes and threads."""
        group = self.watched.group
        if group.folder is None:
            return
        group.limit(self.chance.randrange(3))
        try:
            self._kill_one("clipper-container", "clipper_container", "clipper shard")
            time.sleep(self.chance.uniform(0.1, 1.5))
        finally:
            group.limit(None)

    def _shortage(self) -> None:
        pid = self.watched.program.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        free = [fd for fd in range(1 << 12) if fd not in taken]
        host, _, port = self.watched.http.rpartition(":")
        with contextlib.ExitStack() as idle:
            resource.prlimit(
                pid, resource.RLIMIT_NOFILE, (free[self.chance.randrange(8)], limits[1])
            )
            try:
                for _ in range(20):
                    with contextlib.suppress(OSError):
                        idle.enter_context(socket.create_connection((host, int(port)), 1))
                self._kill_any()
                time.sleep(self.chance.uniform(0.1, 1.5))
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    # the end

    def check(self) -> dict[str, Any]:
        """Compare what was acknowledged with what is known."""
        known = self.watched.ask("known")["ok"]
        lost: dict[str, Any] = {
            "versions": sorted(self.versions - {*known["versions"]}),
            "applications": sorted(self.applications - {*known["applications"]}),
            "feedback": {
                name: count - known["feedback"].get(name, 0)
                for name, count in self.feedback.items()
                if known["feedback"].get(name, 0) < count
            },
        }
        if known["pushes"] < self.pushes:
            lost["pushes"] = self.pushes - known["pushes"]
        self.problems += [f"lost {what}: {which}" for what, which in lost.items() if which]
        return lost


KILLS = (
    *("kill_container", "kill_container", "kill_command"),
    *("kill_fork_server", "kill_host", "kill_shard"),
)
BOXED_KILLS = ("kill_boxed", "kill_boxed", "kill_engine")
STORE = (
    *("store_stops", "store_is_killed", "store_is_slow", "store_is_full"),
    *("store_is_emptied", "store_goes_back", "store_is_replaced"),
)


def order(kills: int, store_faults: int, shortages: int, run: Run) -> list[str]:
    """Return all faults in a random order."""
    kinds = KILLS + BOXED_KILLS * (run.engine is not None)
    found = [kinds[i % len(kinds)] for i in range(kills)]
    found += [STORE[i % len(STORE)] for i in range(store_faults)]
    found += [("shortage", "no_processes")[i % 2] for i in range(shortages)]
    run.chance.shuffle(found)
    return found


ENDS = ("on request", "by SIGINT", "by SIGKILL")


def start_and_end(run: Run, folder: Path, how: str) -> None:
    """Start another server on the same store and end it, in its start or when it serves."""
    in_start = run.chance.random() < 0.5
    seen = run.figures.setdefault(f"end {how}", Figures())
    seen.faults += 1
    began = time.monotonic()
    try:
        group = run.watched.group
        watched = Watched(run.redis.url, folder, group, run.engine, awaited=not in_start)
    except AssertionError as error:
        seen.hangs += 1
        run.problems.append(f"no start: {error}")
        return
    if in_start:
        time.sleep(run.chance.uniform(0, 5))
    started, code = [*watched.children()], None
    if how == "on request":
        code = watched.close()
    else:
        number = signal.SIGINT if how == "by SIGINT" else signal.SIGKILL
        os.kill(watched.program.pid, number)
        with contextlib.suppress(AssertionError):
            code = watched.program.wait(HANG_S)
    if code is None or (how == "on request" and code):
        seen.hangs += 1
        run.problems.append(f"a server that was ended {how} hung or failed: {code}")
    seen.longest_s = max(seen.longest_s, time.monotonic() - began)
    left = watched.left(started, files=how == "on request")
    if run.engine is not None and how == "on request":
        left += [f"container {name}" for name in run.engine.containers()]
    run.problems += [f"left of a server that ended {how}: {it}" for it in left]


@contextlib.contextmanager
def started(seed: int, starts: int) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="clipper-faults-") as name:
        folder = Path(name)
        (folder / "server").mkdir()
        redis = Redis(folder)
        group = Group()
        with contextlib.ExitStack() as opened:
            opened.callback(group.close)
            opened.callback(redis.kill)
            engine = None
            try:
                engine = opened.enter_context(running("docker"))
            except NoEngine as error:
                print(f"no containers of Docker: {error}")
            watched = Watched(redis.url, folder / "server", group, engine)
            run = Run(watched, redis, engine, random.Random(seed))
            redis.keep()
            until(run.all_answer, HANG_S)
            before = watched.descriptors()
            yield run
            most = len(before) + DESCRIPTORS_MORE
            if until(lambda: len(watched.descriptors()) <= most, LEFT_S) is None:
                more = Counter(watched.descriptors()) - Counter(before)
                run.problems.append(f"{len(before)} descriptors before, and now more: {more}")
            else:
                after = watched.descriptors()
                more = Counter(after) - Counter(before)
                print(f"descriptors: {len(before)} before, {len(after)} after; more: {dict(more)}")
            children = [*watched.children()]
            if watched.close() != 0:
                run.problems.append("close() hung or failed")
            run.problems += [f"left after close(): {it}" for it in watched.left(children)]
            if engine is not None and (names := engine.containers()):
                run.problems.append(f"left after close(): containers {names}")
            for number in range(starts):
                start_and_end(run, folder / "server", ENDS[number % len(ENDS)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--store-faults", type=int, default=7)
    parser.add_argument("--shortages", type=int, default=10)
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--serve", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return 0
    # it is ignored in what a shell starts in the background, and then in the servers, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with started(options.seed, options.starts) as run:
        each = order(options.kills, options.store_faults, options.shortages, run)
        for number, name in enumerate(each, 1):
            known = len(run.problems)
            run.fault(name)
            for problem in run.problems[known:]:
                print(f"{number}: {problem}", flush=True)
            if number % 20 == 0:
                print(f"{number} of {len(each)}, {len(run.problems)} problems", flush=True)
        lost = run.check()
    print(f"{'fault':<20} {'n':>4} {'hangs':>6} {'down':>5} {'refused':>8} {'longest':>8}")
    for name, seen in sorted(run.figures.items()):
        print(
            f"{name:<20} {seen.faults:>4} {seen.hangs:>6} {seen.down:>5} {seen.refused:>8}"
            f" {seen.longest_s:>6.1f} s"
        )
    for problem in run.problems:
        print(f"FAILED: {problem}")
    figures = {
        "seed": options.seed,
        "took_s": round(time.monotonic() - began, 1),
        "faults": {name: asdict(seen) for name, seen in run.figures.items()},
        "acknowledged": {
            "versions": len(run.versions),
            "applications": len(run.applications),
            "feedback": sum(run.feedback.values()),
            "pushes": run.pushes,
        },
        "lost": lost,
        "problems": run.problems,
    }
    print(json.dumps(figures))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    return int(bool(run.problems))


if __name__ == "__main__":
    sys.exit(main())
