"""Servers that share a store: each answers with the version that it has until its own containers
of a new one are up."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

import clipper
from clipper.errors import Unknown
from clipper_client.answers import Answer
from tests.end_to_end.commands import running
from tests.memory_container import wait_until
from tests.processes import free_ports
from tests.store.conftest import own_redis

__all__ = ["own_redis"]

PATIENCE_S = 60.0
OLD = 3.0
NEW = 30.0
DEFAULT = -1

# The container of the first server comes up at once; the other's waits for a file, or ends.
_MODEL = """
import os
import time

FOLDER = {folder!r}

def is_first():
    try:
        os.close(os.open(FOLDER + "/first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

if not is_first():
    while not os.path.exists(FOLDER + "/go"):
        time.sleep(0.01)
    if os.path.exists(FOLDER + "/break"):
        raise ValueError("no such weights here")

def total(rows):
    return rows.sum(axis=1) * 10
"""


class Queries(threading.Thread):
    """Queries one server all the time, until `end`, with an SLO far below the time of a start."""

    def __init__(self, server: clipper.ClipperServer) -> None:
        super().__init__()
        self._app, self._over = server.app("a"), threading.Event()
        self.outputs: list[object] = []

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.outputs.append(self._app.predict([1.0, 2.0]).result(PATIENCE_S).output)

    def wait_for_more(self, count: int = 30) -> None:
        """Wait until so many more queries are answered."""
        wanted = len(self.outputs) + count
        wait_until(lambda: len(self.outputs) >= wanted, "more answers", PATIENCE_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()


class Pair:
    """Two servers on one store, both with m:1 up and asked by the application a."""

    def __init__(self, one: clipper.ClipperServer, other: clipper.ClipperServer, folder: Path):
        self.one = one
        self.other = other
        self.folder = folder
        (folder / "slow.py").write_text(_MODEL.format(folder=str(folder)))

    def mark(self, name: str) -> None:
        """Make a file that the second container waits for."""
        (self.folder / name).touch()

    def deploy_second(self) -> None:
        """Deploy m:2 by the first server, which has it when this returns."""
        code = [str(self.folder)]
        self.one.deploy("m", "slow:total", code=code, input="f64[2]", warmup=False)
        assert self.one.app("a").predict([1.0, 2.0]).result(PATIENCE_S).output == NEW
        wait_until(lambda: knows(self.other, "m:2"), "the other server knows it", PATIENCE_S)


def knows(server: clipper.ClipperServer, model: str) -> bool:
    try:
        server.catalog.view.model(model)
    except Unknown:
        return False
    return True


def connected(server: clipper.ClipperServer, model: str) -> int:
    return int(server.stats()["models"].get(model, {}).get("has", 0))


def row_of(server: clipper.ClipperServer, version: int) -> dict[str, object]:
    (row,) = [row for row in server.manage.ps() if row["version"] == version]
    return row


@pytest.fixture(params=["sqlite", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    state = str(tmp_path / "store")
    if request.param == "redis":
        state = request.getfixturevalue("own_redis").url
    settings = {"drain_s": 1.0, "warmup": False, "restarts_max": 1, "restart_ms_min": 50}
    with (
        clipper.start(state=state, folder=str(tmp_path / "a"), **settings) as one,
        clipper.start(state=state, folder=str(tmp_path / "b"), **settings) as other,
    ):
        one.deploy("m", lambda rows: rows.sum(axis=1), input="f64[2]", warmup=False)
        one.app("a", ["m"], slo_ms=500, default=DEFAULT)
        wait_until(lambda: connected(other, "m:1") == 1, "the other runs m:1", PATIENCE_S)
        wait_until(lambda: "a" in other.catalog.view.applications, "and knows a", PATIENCE_S)
        yield Pair(one, other, tmp_path)


@pytest.mark.slow
def test_a_server_answers_with_the_version_it_has_until_the_new_one_is_up_there(
    pair: Pair,
) -> None:
    other = pair.other
    with Queries(other) as queries:
        pair.deploy_second()
        queries.wait_for_more()
        assert set(queries.outputs) == {OLD}
        says = "queries get m:1"  # from when its containers are started, a moment after it is known
        wait_until(lambda: says in str(row_of(other, 2)["error"]), "ps says it", PATIENCE_S)
        pair.one.retire("m:1")
        wait_until(lambda: not knows(other, "m:1"), "m:1 is retired", PATIENCE_S)
        queries.wait_for_more()
        assert connected(other, "m:1") == 1
        assert other.app("a").predict([1.0, 2.0]).result(PATIENCE_S).output == OLD
        pair.mark("go")
        wait_until(lambda: connected(other, "m:2") == 1, "m:2 is up", PATIENCE_S)
        wait_until(lambda: queries.outputs[-1] == NEW, "queries follow", PATIENCE_S)
        wait_until(lambda: connected(other, "m:1") == 0, "then m:1 ends", PATIENCE_S)
        queries.wait_for_more()
    assert set(queries.outputs) == {OLD, NEW}
    assert queries.outputs == sorted(queries.outputs, key=[OLD, NEW].index)
    assert row_of(other, 2)["error"] == ""


@pytest.mark.slow
def test_a_version_that_does_not_come_up_there_leaves_the_old_one_and_ps_says_so(
    pair: Pair,
) -> None:
    pair.mark("break")
    pair.mark("go")
    with Queries(pair.other) as queries:
        pair.deploy_second()
        wait_until(lambda: "no such" in str(row_of(pair.other, 2)["error"]), "ps", PATIENCE_S)
        assert "queries get m:1" in str(row_of(pair.other, 2)["error"])
        queries.wait_for_more()
    assert set(queries.outputs) == {OLD}
    assert row_of(pair.one, 2)["error"] == ""


@pytest.mark.slow
def test_an_application_that_names_a_version_gets_it_once_it_is_up(pair: Pair) -> None:
    with Queries(pair.other) as queries:
        pair.deploy_second()
        pair.one.app("a", ["m:2"])
        wait_until(
            lambda: str(pair.other.catalog.application("a").models[0]) == "m:2",
            "the link",
            PATIENCE_S,
        )
        queries.wait_for_more()
        pair.mark("go")
        wait_until(lambda: queries.outputs[-1] == NEW, "queries follow", PATIENCE_S)
    assert set(queries.outputs) == {OLD, NEW}


# Of each version, the container that is started first comes up at once; the other waits for a file.
_VERSIONS = """
import os
import time
from pathlib import Path

FOLDER = Path({folder!r})
VERSION = os.environ["VERSION"]

try:
    os.close(os.open(FOLDER / f"first-{{VERSION}}", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    while not (FOLDER / f"go-{{VERSION}}").exists():
        time.sleep(0.01)

def version(rows):
    return [int(VERSION)] * len(rows)
"""


class Process:
    """A server that runs as a process of its own, queried over HTTP all the time until `end`."""

    def __init__(self, folder: Path, state: str, name: str) -> None:
        query, admin = free_ports(2)
        file = folder / f"{name}.toml"
        file.write_text(
            f'[server]\nstate = "{state}"\nfolder = "{folder / name}"\ndrain_s = 1.0\n'
            f'[http]\naddress = "127.0.0.1:{query}"\nadmin = "127.0.0.1:{admin}"\n'
        )
        self.program = running("up", str(file))
        self.manage = clipper.connect(f"http://127.0.0.1:{admin}")
        self._client = clipper.Client(f"http://127.0.0.1:{query}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._query, name=name)
        self.answers: list[Answer] = []
        self.failed: list[Exception] = []

    def start(self) -> None:
        """Wait until the application has a model here, then query it."""
        wait_until(lambda: self.known().get(1) == 1, "m:1 is up", PATIENCE_S)
        wait_until(self.manage.applications, "a is known", PATIENCE_S)
        self._thread.start()

    def known(self) -> dict[int, int]:
        """Return how many containers are connected here, by version that is known here."""
        return {row["version"]: row["has"] for row in self.manage.models()}

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for something, and then until 20 more queries are answered."""
        wait_until(is_there, what, PATIENCE_S)
        count = len(self.answers) + 20
        wait_until(lambda: len(self.answers) >= count or self.failed, "more answers", PATIENCE_S)

    def _query(self) -> None:
        for number in itertools.count():
            if self._over.wait(0.002):
                return
            try:
                self.answers.append(self._client.predict("a", [float(number), 0.0]))
            except Exception as error:
                self.failed.append(error)
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()
        self.program.kill()


@pytest.mark.slow
def test_no_query_of_two_processes_fails_while_versions_are_deployed(tmp_path: Path) -> None:
    (tmp_path / "versions.py").write_text(_VERSIONS.format(folder=str(tmp_path)))
    state = f"sqlite:{tmp_path}/store"

    def deploy(by: Process, version: int) -> None:
        env = {"VERSION": str(version)}
        by.manage.deploy("m", "versions:version", code=str(tmp_path), input="f64[2]", env=env)

    with Process(tmp_path, state, "one") as one, Process(tmp_path, state, "other") as other:
        for each in (one, other):
            each.program.until("state: ")
        (tmp_path / "go-1").touch()
        deploy(one, 1)
        one.manage.set_application("a", ["m"], slo_ms=PATIENCE_S * 1000)
        one.start()
        other.start()
        for version in range(2, 5):
            deployer, follower = (one, other) if version % 2 else (other, one)
            deploy(deployer, version)
            deployer.wait_for(
                lambda by=deployer, version=version: by.answers[-1].output == version, "it is up"
            )
            follower.wait_for(
                lambda by=follower, version=version: version in by.known(), "it is known"
            )
            assert follower.answers[-1].output == version - 1
            (tmp_path / f"go-{version}").touch()
            follower.wait_for(
                lambda by=follower, version=version: by.answers[-1].output == version, "it follows"
            )
    for each in (one, other):
        assert each.failed == []
        assert not any(answer.is_default for answer in each.answers)
        outputs = [answer.output for answer in each.answers]
        assert outputs == sorted(outputs)
        assert set(outputs) == {1, 2, 3, 4}
