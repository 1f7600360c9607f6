"""The supervisor with real processes: whatever ends or fails, every stop is answered and nothing is
left."""

import errno
import os
import random
import resource
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

import pytest

from clipper.errors import NotStarted, ShuttingDown
from clipper.processes import (
    NEVER_HELD,
    ChildState,
    Notice,
    NoticeKind,
    RestartPolicy,
    Spawned,
    StartCommand,
    Supervisor,
    Told,
    spawned,
)
from clipper.processes.spawned import spawn

LIMIT_S = 60.0
QUICK = RestartPolicy(
    backoff_s_min=0.001,
    backoff_s_max=0.02,
    apart_s=0.0,
    exits_max=NEVER_HELD,
    own_s_max=0.02,
    grace_s=5.0,
)
SLEEPS = "exec sleep 600"
LEAVES_SOME = "sleep 600 & sleep 601 & exec sleep 602"
IS_DEAF = "trap '' TERM; sleep 600; sleep 600"
ENDS = "sleep 0.0$((RANDOM % 10)); exit 3"


class Notices:
    """The owner of children: records what it is told."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[str, Notice]] = SimpleQueue()
        self.seen: list[tuple[str, Notice]] = []

    def on_notice(self, name: str, notice: Notice) -> None:
        """See Listener."""
        self._queue.put((name, notice))

    def next(self, *kinds: NoticeKind) -> Notice:
        """Return the next notice of one of these kinds."""
        while True:
            told = self._queue.get(timeout=LIMIT_S)
            self.seen.append(told)
            if told[1].kind in kinds:
                return told[1]

    def of(self, name: str) -> Sequence[NoticeKind]:
        """Return the kinds of all notices about a child so far."""
        try:
            while True:
                self.seen.append(self._queue.get_nowait())
        except Empty:
            return [notice.kind for about, notice in self.seen if about == name]


class Marked:
    """Commands with a mark in their environment, by which all their processes are found."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of a command."""
        return {"PATH": os.environ["PATH"], "MARK": self.mark}

    def run(self, text: str) -> Spawned:
        """Return the handle of a command of the shell."""
        return Spawned(StartCommand(["bash", "-c", text], self.environment))

    def left(self) -> Sequence[int]:
        """Return the processes that have the mark, but zombies."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if self.mark.encode() in file.read():
                        found.append(int(pid))
            except OSError:
                continue
        return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_start_that_fails_half_way_leaves_nothing_that_the_program_started(
    marked: "Marked", monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pid: int) -> int:
        until(lambda: len(marked.left()) == 2)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("os.pidfd_open", full)
    words = ["bash", "-c", "sleep 600; true"]
    with pytest.raises(OSError, match="too many"):
        spawn(StartCommand(words, marked.environment), 1, None)
    until(lambda: not marked.left())


def test_a_start_that_fails_once_another_part_has_reaped_its_process_is_undone(
    marked: "Marked", monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pid: int) -> int:
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("os.pidfd_open", full)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    try:
        with pytest.raises(OSError, match="too many"):
            spawn(StartCommand(["true"], marked.environment), 1, None)
    finally:
        signal.signal(signal.SIGCHLD, before)


def opened() -> Sequence[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def notices() -> Notices:
    return Notices()


@pytest.fixture
def marked() -> Iterator[Marked]:
    made = Marked()
    yield made
    until(lambda: not made.left())


@pytest.fixture
def processes(marked: Marked) -> Iterator[Supervisor]:
    with Supervisor() as made:
        yield made
        assert not made.failure


class Broken:
    """A handle that raises when it is asked for some things."""

    def __init__(self, real: Spawned, *broken: str) -> None:
        self._real, self._broken = real, broken

    def _may_break(self, what: str) -> None:
        if what in self._broken:
            raise LookupError(f"{what} is broken")

    def start(self, number: int, told: Told) -> None:
        self._may_break("start")
        self._real.start(number, told)
        self._may_break("started")

    def hurry(self) -> None:
        self._real.hurry()

    def signal(self, number: signal.Signals) -> None:
        self._real.signal(number)
        self._may_break("signal")

    def clear(self) -> None:
        self._real.clear()
        self._may_break("clear")


@pytest.mark.parametrize("broken", ["start", "started", "signal", "clear"])
def test_a_handle_that_raises_ends_its_own_child_only(
    processes: Supervisor, notices: Notices, marked: Marked, broken: str
) -> None:
    processes.add("good", marked.run(SLEEPS), QUICK, notices)
    good = notices.next(NoticeKind.STARTED).pid
    processes.add("bad", Broken(marked.run(SLEEPS), broken), QUICK, notices)
    until(lambda: {NoticeKind.STARTED, NoticeKind.RESTARTING} & {*notices.of("bad")})
    assert not processes.stop(["bad"])
    assert notices.of("bad")[-1] is NoticeKind.STOPPED
    status = processes.get("good")
    assert status is not None
    assert (status.state, status.pid, status.starts) == (ChildState.RUNNING, good, 1)
    processes.add("bad", marked.run(SLEEPS), QUICK, notices)
    notices.next(NoticeKind.STARTED)


def test_an_owner_that_raises_and_one_that_calls_back(
    processes: Supervisor, marked: Marked
) -> None:
    ended = threading.Event()

    class Owner:
        """Stops what has started, adds another, and raises at everything."""

        def on_notice(self, name: str, notice: Notice) -> None:
            if notice.kind is NoticeKind.STARTED and name == "first":
                processes.add("second", marked.run(SLEEPS), QUICK, self)
                assert processes.get("second") is not None
                assert not processes.stop(["first", "second"])
                assert not processes.end()
            if notice.kind is NoticeKind.STOPPED and name == "second":
                ended.set()
            raise LookupError("the owner is broken")

    processes.add("first", marked.run(SLEEPS), QUICK, Owner())
    assert ended.wait(LIMIT_S)
    until(lambda: {each.state for each in processes.list()} == {ChildState.STOPPED})


def test_a_held_child_that_its_owner_replaces_at_once_waits_for_its_turn(
    processes: Supervisor, marked: Marked
) -> None:
    """The turn of the new one is not given back with the old one."""
    started = threading.Event()
    policy = RestartPolicy(exits_max=1, queued=True)

    class Owner:
        def on_notice(self, name: str, notice: Notice) -> None:
            if notice.kind is NoticeKind.FAILED:
                for each in ("before", name):
                    processes.add(each, marked.run(SLEEPS), policy, self)
            if notice.kind is NoticeKind.STARTED and name == "it":
                pids.append(notice.pid)
                if len(pids) == 2:
                    started.set()

    pids: list[int] = []
    processes.add("it", marked.run("exit 1"), policy, Owner())
    assert started.wait(LIMIT_S)


def test_what_a_process_leaves_in_its_group_ends_with_it(
    processes: Supervisor, notices: Notices, marked: Marked
) -> None:
    """Also if it was killed by another, and while it holds the output."""
    policy = RestartPolicy(again=False)
    processes.add("it", marked.run(LEAVES_SOME), policy, notices)
    pid = notices.next(NoticeKind.STARTED).pid
    until(lambda: len(marked.left()) == 3)
    os.kill(pid, signal.SIGKILL)
    notices.next(NoticeKind.STOPPED)
    until(lambda: not marked.left())


def test_a_process_that_another_part_has_reaped_has_ended(
    processes: Supervisor, notices: Notices, marked: Marked
) -> None:
    """A program that embeds the server may wait for any child."""
    processes.add("it", marked.run(LEAVES_SOME), QUICK, notices)
    pid = notices.next(NoticeKind.STARTED).pid
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    try:
        os.kill(pid, signal.SIGKILL)
        exited = notices.next(NoticeKind.EXITED)
        assert (exited.pid, exited.code, exited.by_itself) == (pid, None, False)
        notices.next(NoticeKind.STARTED)
        assert not processes.stop(["it"])
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_restart_and_serves_are_for_the_process_that_they_name(
    processes: Supervisor, notices: Notices, marked: Marked
) -> None:
    processes.add("it", marked.run(SLEEPS), QUICK, notices)
    first = notices.next(NoticeKind.STARTED).pid
    processes.serves("it", first)
    assert notices.next(NoticeKind.READY).pid == first
    assert processes.restart("it", first)
    second = notices.next(NoticeKind.STARTED).pid
    assert not processes.restart("it", first)
    assert not processes.restart("it", 0)
    assert not processes.restart("other", second)
    processes.serves("it", first)
    processes.excuse("it", first)
    assert not processes.stop(["it"])
    assert notices.of("it") == [
        NoticeKind.STARTED,
        NoticeKind.READY,
        NoticeKind.EXITED,
        NoticeKind.RESTARTING,
        NoticeKind.STARTED,
        NoticeKind.STOPPED,
    ]


def test_one_that_runs_is_not_replaced_and_one_that_is_held_is(
    processes: Supervisor, notices: Notices, marked: Marked
) -> None:
    policy = RestartPolicy(exits_max=1)
    processes.add("it", marked.run("exit 3"), policy, notices)
    notices.next(NoticeKind.FAILED)
    processes.add("it", marked.run(SLEEPS), policy, notices)
    notices.next(NoticeKind.STARTED)
    with pytest.raises(ValueError, match="it is running already"):
        processes.add("it", marked.run(SLEEPS), policy, notices)
    processes.forget("it")
    assert processes.get("it") is not None, "it runs"
    assert not processes.stop(["it", "other"])
    processes.forget("it")
    assert processes.get("it") is None


def test_those_that_others_need_end_last(notices: Notices, marked: Marked) -> None:
    with Supervisor() as processes:
        processes.add("last", marked.run(SLEEPS), RestartPolicy(last=True), notices)
        for number in range(5):
            processes.add(f"{number}", marked.run(SLEEPS), QUICK, notices)
    ends = [name for name, notice in told(notices) if notice.kind is NoticeKind.STOPPED]
    assert len(ends) == 6
    assert ends[-1] == "last"


def told(notices: Notices) -> Sequence[tuple[str, Notice]]:
    notices.of("")
    return notices.seen


def test_the_end_of_the_thread_is_told_and_nothing_waits_for_it(
    notices: Notices, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = opened()
    processes = Supervisor()
    processes.start()
    held = RestartPolicy(backoff_s_min=600.0, backoff_s_max=600.0)
    processes.add("runs", marked.run(SLEEPS), QUICK, notices)
    processes.add("waits", marked.run("exit 3"), held, notices)
    processes.add("queued", marked.run(SLEEPS), RestartPolicy(queued=True), notices)
    notices.next(NoticeKind.RESTARTING)

    def dies() -> None:
        raise SystemExit("the thread ends")

    processes.loop.call_soon_threadsafe(dies)
    until(lambda: processes.failure)
    began_s = time.monotonic()
    assert not processes.stop(["runs", "waits", "queued"])
    assert notices.of("runs")[-1] is notices.of("waits")[-1] is NoticeKind.FAILED
    assert {each.state for each in processes.list()} == {ChildState.FAILED}
    with pytest.raises(NotStarted, match="not supervised any more"):
        processes.add("late", marked.run(SLEEPS), QUICK, notices)
    assert processes.end()
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert processes.health().state == "failed"
    until(lambda: not marked.left())
    assert opened() == before


def test_before_its_start_and_after_its_end_none_is_added(notices: Notices, marked: Marked) -> None:
    before = opened()
    processes = Supervisor()
    with pytest.raises(NotStarted):
        processes.add("it", marked.run(SLEEPS), QUICK, notices)
    assert processes.end()
    processes = Supervisor()
    processes.start()
    assert processes.end()
    assert processes.end()
    with pytest.raises(ShuttingDown):
        processes.add("it", marked.run(SLEEPS), QUICK, notices)
    assert opened() == before


def test_many_that_lack_something_at_once_are_started_when_it_is_there(
    notices: Notices, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are started one by one, without a call for each in the one before."""
    real = spawned.spawn
    count = 500
    lacks = threading.Event()
    lacks.set()

    def starts(*given: object) -> object:
        if lacks.is_set():
            raise OSError(errno.EMFILE, "no file descriptor is free")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(spawned, "spawn", starts)
    with Supervisor() as processes:
        for number in range(count):
            policy = RestartPolicy(
                backoff_s_min=0.001, own_s_max=0.5, apart_s=0.0, queued=bool(number % 2)
            )
            processes.add(f"{number}", marked.run("exit 0"), policy, notices)
        until(
            lambda: (
                {each.state for each in processes.list()} <= {ChildState.SHORT, ChildState.STARTING}
            )
        )
        assert not any(each.starts > 1 for each in processes.list())
        lacks.clear()
        until(
            lambda: sum(notice.kind is NoticeKind.STARTED for _, notice in told(notices)) >= count
        )
        assert not processes.failure


class Shortages:
    """Makes starts fail for lack of something, now and then."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._popen = chance, subprocess.Popen
        self.count = 0

    def start(self, *given: object, **named: object) -> object:
        """Start a process, or not."""
        if self._chance.random() < 0.2:
            self.count += 1
            raise BlockingIOError(errno.EAGAIN, "no process is free")
        return self._popen(*given, **named)  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_stop_is_answered_and_nothing_is_left(
    seed: int, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    before = opened()
    notices = Notices()
    shortages = Shortages(random.Random(seed + 1))
    monkeypatch.setattr(subprocess, "Popen", shortages.start)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = [f"{number}" for number in range(12)]
    texts = (SLEEPS, LEAVES_SOME, IS_DEAF, ENDS, "exit 0", "exec /no/such/program")
    added = 0
    with Supervisor() as processes:

        def pid_of(name: str) -> int:
            status = processes.get(name)
            return status.pid if status is not None else 0

        def kill(name: str) -> None:
            if pid := pid_of(name):
                # a supervisor that is asked twice kills none that it does not have
                processes.restart(name, pid)
                processes.restart(name, pid)

        def limit_files(name: str) -> None:
            top = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(1, top - 4), limits[1]))
            try:
                time.sleep(0.02)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

        actions: Sequence[Callable[[str], object]] = (
            kill,
            kill,
            limit_files,
            lambda name: processes.serves(name, pid_of(name)),
            lambda name: processes.excuse(name, pid_of(name)),
            lambda name: processes.stop([name], grace_s=0.01, limit_s=LIMIT_S),
            lambda name: processes.stop([name], limit_s=0.0),
            processes.forget,
            lambda name: processes.list(),
        )
        for _ in range(300):
            name = chance.choice(names)
            if chance.random() < 0.4:
                policy = RestartPolicy(
                    backoff_s_min=0.001,
                    apart_s=0.0,
                    own_s_max=0.01,
                    exits_max=chance.choice((0, 2, NEVER_HELD)),
                    held_s_min=0.05,
                    grace_s=0.2,
                    ready_s=chance.choice((0.0, 0.3)),
                    queued=chance.random() < 0.5,
                    again=chance.random() < 0.8,
                )
                try:
                    processes.add(name, marked.run(chance.choice(texts)), policy, notices)
                    added += 1
                except ValueError:
                    continue
            else:
                chance.choice(actions)(name)
        assert not processes.failure
        assert not processes.stop(names, limit_s=LIMIT_S)
        assert {each.state for each in processes.list()} <= {ChildState.STOPPED, ChildState.FAILED}
        assert not any(each.pid for each in processes.list())
        # what a child has left was killed with it, and takes a moment to end
        until(lambda: not marked.left())
    assert added > 30
    assert shortages.count
    assert opened() == before
    check_order(told(notices))


def check_order(seen: Sequence[tuple[str, Notice]]) -> None:
    """Check that each process that was started has one end, which is told before the next start."""
    runs: dict[str, int] = {}
    ended: dict[str, int] = {}
    for name, notice in seen:
        match notice.kind:
            case NoticeKind.STARTED:
                assert runs.setdefault(name, notice.pid) == notice.pid, "one runs already"
            case NoticeKind.EXITED:
                ended[name] = runs.pop(name, 0)
                assert notice.pid == ended[name]
            case NoticeKind.STOPPED:
                assert notice.pid in (0, runs.pop(name, 0), ended.get(name))
            case NoticeKind.RESTARTING | NoticeKind.FAILED:
                assert name not in runs
    assert not runs


def test_two_supervisors_of_one_process(notices: Notices, marked: Marked) -> None:
    with Supervisor() as first, Supervisor() as second:
        for each in (first, second):
            each.add("it", marked.run(SLEEPS), QUICK, notices)
        pids = {notices.next(NoticeKind.STARTED).pid for _ in range(2)}
        assert len(pids) == 2
        assert first.end()
        status = second.get("it")
        assert status is not None
        assert status.state is ChildState.RUNNING


def test_a_fork_of_this_process_does_not_use_it(processes: Supervisor) -> None:
    """Its thread is not there."""
    pid = os.fork()
    if not pid:
        try:
            processes.post(partial(print, "never"))
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_command_that_cannot_be_made_is_no_end_of_the_others(
    processes: Supervisor, notices: Notices, marked: Marked
) -> None:
    class Commands:
        def command(self, number: int) -> StartCommand:
            raise {1: KeyError("a"), 2: OSError(errno.EMFILE, "b")}.get(number, ValueError("c"))

    processes.add("it", Spawned(Commands()), QUICK, notices)
    notices.next(NoticeKind.RESTARTING)
    assert not processes.stop(["it"])
