"""Containers of an engine that is faked: nothing of a stopped one is left."""

import threading
from collections.abc import Iterator
from signal import Signals

import pytest

from clipper.deploy.deployer import ContainerSpec
from clipper.deploy.docker.daemon import EngineAway
from clipper.deploy.docker.engine_container import EngineContainers
from clipper.deploy.replicas import ReplicaDeployer
from clipper.processes import ChildState, NoticeKind, RestartPolicy, Supervisor
from tests.unit.deploy.test_process import Events, until

SPEC = ContainerSpec(name="svm", target="json:loads", connect="unix:/x", deployer="docker")
QUICK = RestartPolicy(backoff_s_min=0.001, own_s_max=0.01, apart_s=0.0)


class Engine:
    """A fake of `Daemon`. hold: what a start waits for. away: how often it is away."""

    kind = "docker"

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.starts, self.hold = threading.Event(), threading.Event()
        self.hold.set()
        self.made: list[str] = []
        self.runs: dict[str, threading.Event] = {}  # container -> set when it ends

    def image(self, *given: object) -> str:
        if self.away:
            self.away -= 1
            raise EngineAway("it is away")
        return "image"

    def create(self, image: str, spec: ContainerSpec, replica: int) -> str:
        self.made.append(f"c{len(self.made)}")
        return self.made[-1]

    def start(self, container: str) -> None:
        self.starts.set()
        assert self.hold.wait(60)
        self.runs[container] = threading.Event()

    def output(self, container: str, all_of_it: bool) -> Iterator[bytes]:
        yield b"up\n"
        assert self.runs[container].wait(60)

    def state(self, container: str) -> dict[str, object]:
        return {"Running": not self.runs[container].is_set(), "ExitCode": 137}

    def kill(self, container: str, number: Signals) -> None:
        if container in self.runs:
            self.runs[container].set()

    def remove(self, container: str) -> None:
        self.runs.pop(container, threading.Event()).set()

    def close(self) -> None:
        pass


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return a new engine, of the class that a test names."""
    made: Engine = getattr(request, "param", Engine)()
    return made


@pytest.fixture
def deployer(engine: Engine, events: Events) -> Iterator[ReplicaDeployer]:
    with Supervisor() as supervisor:
        containers = EngineContainers(engine)  # type: ignore[arg-type]
        with ReplicaDeployer(supervisor, containers, events, QUICK) as made:
            yield made


def test_a_container_runs_and_is_removed(
    deployer: ReplicaDeployer, engine: Engine, events: Events
) -> None:
    deployer.start(SPEC)
    events.next(NoticeKind.STARTED)
    until(lambda: deployer.logs("svm", 1, 0) == ["up"])
    deployer.stop("svm")
    stopped = events.next(NoticeKind.STOPPED)
    assert stopped.detail == "killed (SIGKILL)"
    until(lambda: not engine.runs)


def test_one_that_is_stopped_while_the_engine_starts_it_does_not_run_on(
    deployer: ReplicaDeployer, engine: Engine, events: Events
) -> None:
    engine.hold.clear()
    deployer.start(SPEC)
    assert engine.starts.wait(60)
    deployer.stop("svm")
    events.next(NoticeKind.STOPPED)
    engine.hold.set()
    until(lambda: engine.made == ["c0"] and not engine.runs)
    deployer.start(SPEC)
    events.next(NoticeKind.STARTED)
    assert [*engine.runs] == ["c1"]


def test_an_engine_that_is_away_is_waited_for(events: Events) -> None:
    engine = Engine(away=3)
    with Supervisor() as supervisor:
        containers = EngineContainers(engine)  # type: ignore[arg-type]
        with ReplicaDeployer(supervisor, containers, events, QUICK) as deployer:
            deployer.start(SPEC)
            failed = events.next(NoticeKind.FAILED)
            assert "it is away" in failed.detail
            assert failed.again_s > 0
            events.next(NoticeKind.STARTED)
            (status,) = deployer.list()
            assert (status.state, status.restart_count) == (ChildState.RUNNING, 0)
            assert not any(event.kind is NoticeKind.EXITED for event in events.drain())


class CutEngine(Engine):
    """A fake of `Daemon` whose first stream of output is cut off.

    cut: what the cut waits for. end: how its containers end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.end: dict[str, object] = {"ExitCode": 3}
        self.cut = threading.Event()
        self.streams = 0

    def output(self, container: str, all_of_it: bool) -> Iterator[bytes]:
        self.streams += 1
        if self.streams == 1:
            assert self.cut.wait(60)
            raise ConnectionError("the engine has ended")
        yield from super().output(container, all_of_it)

    def state(self, container: str) -> dict[str, object]:
        return {**super().state(container), **self.end}


class AwayEngine(CutEngine):
    """A fake of `Daemon` which is away each time that a container ends."""

    def output(self, container: str, all_of_it: bool) -> Iterator[bytes]:
        yield b"up\n"
        assert self.runs[container].wait(60)
        raise ConnectionError("the engine has ended")

    def start(self, container: str) -> None:
        super().start(container)
        self.runs[container].set()


@pytest.mark.parametrize("engine", [AwayEngine], indirect=True)
@pytest.mark.parametrize(
    ("end", "detail"),
    [
        # so an engine ends them when it stops, or starts again; ours end with 0 at its SIGTERM
        ({"ExitCode": 0}, "exit 0"),
        ({"ExitCode": 137}, "killed (SIGKILL)"),
        ({"ExitCode": 143}, "killed (SIGTERM)"),
        # an engine says this of one whose end it has not seen
        ({"ExitCode": 255}, "exit 255"),
    ],
)
def test_containers_that_their_engine_has_ended_are_not_to_blame(
    deployer: ReplicaDeployer,
    engine: AwayEngine,
    events: Events,
    end: dict[str, object],
    detail: str,
) -> None:
    engine.end = end
    deployer.start(SPEC)
    for _ in range(2 * QUICK.exits_max):
        ended = events.next(NoticeKind.EXITED)
        assert (ended.detail, ended.by_itself) == (f"ended while docker was away: {detail}", False)
    deployer.stop("svm")
    assert not any(event.kind is NoticeKind.FAILED for event in events.drain()), "it is never held"


@pytest.mark.parametrize("engine", [AwayEngine], indirect=True)
@pytest.mark.parametrize(
    ("end", "detail", "by_itself"),
    [
        ({"ExitCode": 3}, "exit 3", True),
        ({"ExitCode": 139}, "killed (SIGSEGV)", True),
        ({"ExitCode": 137, "OOMKilled": True}, "killed for memory", False),
        ({"ExitCode": 0, "OOMKilled": True}, "killed for memory", False),
    ],
)
def test_a_container_that_crashes_while_its_engine_is_away_has_failed(
    deployer: ReplicaDeployer,
    engine: AwayEngine,
    events: Events,
    end: dict[str, object],
    detail: str,
    by_itself: bool,
) -> None:
    engine.end = end
    deployer.start(SPEC)
    ended = events.next(NoticeKind.EXITED)
    assert (ended.detail, ended.by_itself) == (f"ended while docker was away: {detail}", by_itself)
    held = events.next(NoticeKind.FAILED)
    assert "held" in held.detail
    assert len(engine.made) == QUICK.exits_max


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set of names; threads whose names begin with one of them cannot be started."""
    lacking: set[str] = set()
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(lacking)):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return lacking


def test_a_container_is_stopped_without_a_free_thread(
    deployer: ReplicaDeployer, engine: Engine, events: Events, threads: set[str]
) -> None:
    deployer.start(SPEC)
    events.next(NoticeKind.STARTED)
    threads.add("clipper-signal")
    deployer.stop("svm")
    assert events.next(NoticeKind.STOPPED).detail == "killed (SIGKILL)"
    until(lambda: not engine.runs)


def test_a_start_without_a_free_thread_is_made_later_and_waits_for_the_one_before(
    deployer: ReplicaDeployer,
    engine: Engine,
    events: Events,
    threads: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.hold.clear()
    deployer.start(SPEC)
    assert engine.starts.wait(60)
    deployer.stop("svm")
    threads.add("clipper-container")
    deployer.start(SPEC)
    short = events.next(NoticeKind.RESTARTING)
    assert "can't start new thread" in short.detail
    threads.clear()
    until(lambda: deployer.list()[0].state is ChildState.STARTING)
    assert engine.made == ["c0"], "the one before has the name of the container"
    engine.hold.set()
    events.next(NoticeKind.STARTED)
    assert engine.made == ["c0", "c1"]
    assert not any("the supervisor failed" in record.message for record in caplog.records)


@pytest.mark.parametrize("engine", [CutEngine], indirect=True)
def test_a_container_that_was_seen_to_run_after_the_engine_was_away_fails_by_itself(
    deployer: ReplicaDeployer, engine: CutEngine, events: Events
) -> None:
    engine.cut.set()
    deployer.start(SPEC)
    events.next(NoticeKind.STARTED)
    until(lambda: engine.streams == 2)
    engine.runs["c0"].set()
    ended = events.next(NoticeKind.EXITED)
    assert (ended.detail, ended.by_itself) == ("exit 3", True)
