"""Runs the tests with one pytest process per room, several at a time, the longest first.

    python -m tests.run                      all tests
    python -m tests.run tests/core -k cache  pytest arguments pass through; paths select rooms and
    files
    python -m tests.run --jobs 4             processes at a time (default: two more than cores, or
                                             JOBS): tests wait for other processes, too
    python -m tests.run --fetch "COMMAND"    what fetches the programs that tests need; until it has
                                             ended, only rooms run that need none

A room is a folder of tests (tests/core, container_sdk/tests) or the files tests/test_*.py. A room
that takes much longer than its fair share is split by file. The last line is "N passed, N failed, N
skipped". The exit status is 0 if every room ran all that it collected and nothing failed; a process
that crashes, hangs or collects nothing is a failure. A process in which no test starts or ends for
`--test-limit` seconds is killed; its stacks are printed.

A test that failed is not run again: one that passes alone is a fault of the test or of the product.

Durations of files are kept in build/test-times.json; tests/times.json has those of a fresh clone.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

TEST_LIMIT_S = 300.0  # a process in which no test starts or ends for this long is killed
START_LIMIT_S = 300.0  # the same, before its tests are collected
INTERRUPT_S = 10.0  # how long an interrupted process has for its teardown before it is killed
POLL_S = 0.05
SHARES = 4  # a room is split if it takes more than 1/SHARES of what one job has to do
SPLIT_MIN_S = 60.0  # shorter rooms are never split: each process imports everything again
PROCESS_S = 2.0  # start of a process, imports, collection
UNKNOWN_FILE_S = 3.0  # expected of a file that has no recorded duration

# Rooms that load the whole machine: one process each, and no two of them at the same time.
HEAVY = frozenset({"images", "stress"})

# Rooms whose tests need nothing but the project itself: they run while programs are being fetched.
SELF_CONTAINED = frozenset({"simulation", "schedules", "selection", "stress", "allocation"})

# Threads of OpenBLAS and OpenMP sleep while there is nothing to do. As they come, those of each
# process that imports numpy keep a core busy for 60 ms, and after each call for 30 ms more.
IDLE_THREADS = {"OPENBLAS_THREAD_TIMEOUT": "4", "OMP_WAIT_POLICY": "passive"}

# pytest options whose value is the next argument; needed to tell values from paths.
OPTIONS_WITH_VALUE = frozenset(
    {
        "-k",
        "-m",
        "-p",
        "-o",
        "-c",
        "-W",
        "-r",
        "--tb",
        "--durations",
        "--maxfail",
        "--deselect",
        "--ignore",
        "--rootdir",
        "--color",
        "--capture",
        "--log-level",
        "--log-cli-level",
        "--confcutdir",
        "--junitxml",
        "--hypothesis-seed",
    }
)
SELECTING = ("-k", "-m", "--deselect", "--ignore")  # with these a room without tests is no failure


@dataclass
class Room:
    """The tests of one pytest process.

    name: the folder, with a number if the room is split.  folder: the folder's name.  tests: files
    or node ids. expected_s: seconds that it is expected to take.
    """

    name: str
    folder: str
    tests: list[str]
    expected_s: float


@dataclass
class Result:
    """The result of a room that has ended. problem: why the process failed apart from its tests
    ("crashed: ..."); empty if it did not."""

    room: Room
    tests: list[dict[str, Any]]
    seconds: float
    cpu: float = 0.0
    problem: str = ""
    empty: bool = False

    def count(self, outcome: str) -> int:
        extra = 1 if self.problem and outcome == "failed" else 0
        return sum(test["outcome"] == outcome for test in self.tests) + extra

    @property
    def good(self) -> bool:
        return self.count("failed") == 0


# -- which tests, in which rooms


def split_arguments(arguments: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """Divide pytest's arguments into paths (files, folders, node ids) and options."""
    paths, options, takes_value = [], [], False
    for argument in arguments:
        is_path = (
            not takes_value
            and not argument.startswith("-")
            and (root / argument.split("::")[0]).exists()
        )
        (paths if is_path else options).append(argument)
        takes_value = not takes_value and argument in OPTIONS_WITH_VALUE
    return paths, options


def tests_below(path: str, root: Path) -> list[str]:
    """Return the test files below a folder, relative to the root; a file or a node id is returned
    as it is."""
    if not (root / path).is_dir():
        return [path]
    found = [
        file for pattern in ("test_*.py", "bench_*.py") for file in (root / path).rglob(pattern)
    ]
    return sorted(file.relative_to(root).as_posix() for file in found)


def folder_of(test: str) -> str:
    """Return the room of a test: `core` for tests/core/test_ring.py, `container_sdk` for
    container_sdk/tests/test_wire.py."""
    parts = Path(test.split("::")[0]).parts
    if parts[0] != "tests":
        return parts[0]
    return parts[1] if len(parts) > 2 else "tests"


def expected(test: str, times: dict[str, float]) -> float:
    path, _, node = test.partition("::")
    seconds = times.get(path, UNKNOWN_FILE_S)
    return min(seconds, UNKNOWN_FILE_S) if node else seconds


def plan(tests: Sequence[str], times: dict[str, float], jobs: int) -> list[Room]:
    """Group tests into rooms, split those that are too long, and put the longest first."""
    folders: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        folders.setdefault(folder_of(test), []).append(test)
    share = max(SPLIT_MIN_S, sum(expected(test, times) for test in tests) / jobs / SHARES)
    rooms = []
    for folder, mine in folders.items():
        total = sum(expected(test, times) for test in mine)
        parts = 1 if folder in HEAVY or jobs == 1 else max(round(total / share), 1)
        rooms += split(folder, mine, times, min(parts, len(mine)))
    return sorted(rooms, key=lambda room: -room.expected_s)


def split(folder: str, tests: list[str], times: dict[str, float], parts: int) -> list[Room]:
    """Distribute a room's tests over `parts` processes of about the same length; each keeps the
    order of its tests."""
    rooms = [
        Room(f"{folder}-{i + 1}" if parts > 1 else folder, folder, [], PROCESS_S)
        for i in range(parts)
    ]
    for test in sorted(tests, key=lambda test: -expected(test, times)):
        room = min(rooms, key=lambda room: room.expected_s)
        room.tests.append(test)
        room.expected_s += expected(test, times)
    for room in rooms:
        room.tests.sort(key=tests.index)
    return rooms


# -- one process


@dataclass
class Process:
    """A running pytest process with the files that it writes.

    PYTHONDONTWRITEBYTECODE is not passed on: with it each of the hundreds of processes that tests
    start would compile the package again, 0.4 s each.
    """

    room: Room
    folder: Path  # for its files
    child: subprocess.Popen[bytes]
    begun: float = field(default_factory=time.monotonic)
    # size of the results when they last grew, and when that was
    progress: tuple[int, float] = (0, 0.0)

    @classmethod
    def start(cls, room: Room, options: list[str], root: Path, scratch: Path) -> "Process":
        folder = scratch / room.name
        folder.mkdir()
        files = [str(folder / "results"), str(folder / "stacks")]
        command = [
            sys.executable,
            str(HERE / "room.py"),
            *files,
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
        ]
        environment = {**IDLE_THREADS, **os.environ}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PATH"] = os.pathsep.join(
            [os.path.dirname(sys.executable), environment.get("PATH", os.defpath)]
        )
        with (folder / "output").open("wb") as output:
            child = subprocess.Popen(
                [*command, *options, *room.tests],
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(room, folder, child, progress=(0, time.monotonic()))

    def is_hung(self, limit_s: float) -> bool:
        """Look whether results have grown during the last `limit_s` seconds."""
        results, now = self.folder / "results", time.monotonic()
        size = results.stat().st_size if results.exists() else 0
        if size != self.progress[0]:
            self.progress = (size, now)
        return now - self.progress[1] > (limit_s if size else max(limit_s, START_LIMIT_S))

    def kill(self) -> str:
        """Kill the process with all its descendants; return the stacks that its threads had."""
        # else SIGUSR2 has no handler yet
        if self.child.poll() is None and (self.folder / "results").exists():
            self.child.send_signal(signal.SIGUSR2)
            time.sleep(1)
        kill_all([self.child.pid, *descendants(self.child.pid)])
        self.child.wait()
        stacks = self.folder / "stacks"
        return stacks.read_text(errors="replace") if stacks.exists() else ""

    def result(self, problem: str = "") -> Result:
        """Read what the process recorded. It must have ended."""
        results, status = self.folder / "results", self.child.wait()
        lines = (
            [json.loads(line) for line in results.read_text().splitlines()]
            if results.exists()
            else []
        )
        tests = [line for line in lines if line["kind"] == "test"]
        result = Result(self.room, tests, time.monotonic() - self.begun, problem=problem)
        result.cpu = next((line["cpu"] for line in lines if line["kind"] == "finished"), 0.0)
        collected = next((line["count"] for line in lines if line["kind"] == "collected"), 0)
        result.empty = collected == 0 and not tests
        failed = any(test["outcome"] == "failed" for test in tests)
        if not problem and status not in ((0, 1) if failed else (0, 5)):
            kind = (
                f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            )
            result.problem = f"crashed: {kind}"
        if result.problem:
            last = next(
                (line for line in reversed(lines) if line["kind"] in ("start", "test")),
                {"kind": "", "test": ""},
            )
            ran = sum("::" in test["test"] for test in tests)
            where = (
                f"in {last['test']}"
                if last["kind"] == "start"
                else f"after {last['test'] or 'its start'}"
            )
            output = (self.folder / "output").read_text(errors="replace")[-6000:]
            head, _, more = result.problem.partition("\n")
            result.problem = (
                f"{head}, {where}; {max(collected - ran, 0)} of {collected} tests did not"
                f" end\n{more}\n{output}"
            )
        return result


def kill_all(processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:  # it has ended
            continue


def descendants(process: int) -> list[int]:
    """Return the ids of all descendants of a process, in whatever session they are."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # the thread has just ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


# -- all of them


class FetchFailed(Exception):
    """Raised if the command that fetches what tests need has failed."""


class Runner:
    """Runs rooms, at most `jobs` at a time, and prints a line for each that ends."""

    def __init__(
        self,
        rooms: list[Room],
        options: list[str],
        settings: argparse.Namespace,
        scratch: Path,
        fetching: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.waiting = rooms
        self._fetching = fetching
        self.results: list[Result] = []
        self._options, self._settings, self._scratch = options, settings, scratch
        self._running: list[Process] = []
        self._expected_s = sum(room.expected_s for room in rooms)
        self._begun = time.monotonic()
        self._stop_early = any(option in ("-x", "--exitfirst", "--maxfail=1") for option in options)

    def run(self) -> None:
        try:
            while self.waiting or self._running:
                self._start_some()
                time.sleep(POLL_S)
                for process in [*self._running]:
                    self._look_after(process)
        finally:
            self._end_all()

    def _fetched(self) -> bool:
        """Look whether what the tests need has been fetched. Raises: FetchFailed."""
        if self._fetching is None:
            return True
        status = self._fetching.poll()
        if status:
            raise FetchFailed(f"what the tests need was not fetched: exit status {status}")
        return status is not None

    def _start_some(self) -> None:
        fetched = self._fetched()
        while len(self._running) < self._settings.jobs:
            heavy = any(process.room.folder in HEAVY for process in self._running)
            room = next(
                (
                    room
                    for room in self.waiting
                    if not (heavy and room.folder in HEAVY)
                    and (fetched or room.folder in SELF_CONTAINED)
                ),
                None,
            )
            if room is None:
                return
            self.waiting.remove(room)
            self._running.append(
                Process.start(room, self._options, self._settings.root, self._scratch)
            )

    def _look_after(self, process: Process) -> None:
        problem = ""
        if process.child.poll() is None:
            limit = self._settings.test_limit
            if not process.is_hung(limit):
                return
            problem = f"hung: no test started or ended for {limit:g} s\n{process.kill()}"
        self._running.remove(process)
        result = process.result(problem)
        self.results.append(result)
        self._print(result)
        if self._settings.results:
            with self._settings.results.open("a") as lines:
                lines.writelines(json.dumps(test) + "\n" for test in result.tests)
        if self._stop_early and not result.good:
            self.waiting.clear()

    def _print(self, result: Result) -> None:
        done = sum(each.room.expected_s for each in self.results)
        elapsed = time.monotonic() - self._begun
        left = elapsed * (self._expected_s - done) / done
        counts = ", ".join(
            f"{result.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")
        )
        note = f"  {result.problem.splitlines()[0]}" if result.problem else ""
        print(
            f"{result.room.name:<16} {counts}, {result.seconds:.0f} s   "
            f"[{100 * done / self._expected_s:.0f} % done,"
            f" {int(left / 60)} min {left % 60:.0f} s left]{note}",
            flush=True,
        )

    def _end_all(self) -> None:
        """Interrupt what still runs, so that tests can tear down, and kill what does not end."""
        below = [child for process in self._running for child in descendants(process.child.pid)]
        if self._fetching is not None and self._fetching.poll() is None:
            self._fetching.terminate()
            self._fetching.wait()
        for process in self._running:
            process.child.send_signal(signal.SIGINT)
        give_up = time.monotonic() + INTERRUPT_S
        for process in self._running:
            try:
                process.child.wait(max(give_up - time.monotonic(), 0.0))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                give_up = 0.0  # a second Ctrl-C: no more patience
                process.kill()
            self.results.append(process.result("interrupted"))
        kill_all(below)


# -- what is said at the end


def report(results: list[Result], slowest: int) -> None:
    for result in results:
        for test in result.tests:
            if test["outcome"] == "failed":
                print(f"\n==== FAILED {test['test']} ({result.room.name})\n{test['text']}")
        if result.problem:
            print(f"\n==== FAILED room {result.room.name} {result.problem.rstrip()}")
    tests = [test for result in results for test in result.tests]
    reasons = Counter(
        test["text"].removeprefix("Skipped: ") for test in tests if test["outcome"] == "skipped"
    )
    if reasons:
        print("\nskipped:")
        for reason, count in reasons.most_common():
            print(f"  {count:>5}  {reason}")
    print(f"\nslowest {slowest} tests (seconds by the clock, seconds of CPU):")
    for test in sorted(tests, key=lambda test: -test["seconds"])[:slowest]:
        print(f"  {test['seconds']:>6.1f} {test['cpu']:>6.1f}  {test['test']}")
    failed = [test["test"] for test in tests if test["outcome"] == "failed"]
    failed += [
        f"room {result.room.name}: {result.problem.splitlines()[0]}"
        for result in results
        if result.problem
    ]
    if failed:
        print("\nfailed:", *failed, sep="\n  ")


def times_of(results: list[Result]) -> dict[str, float]:
    """Return the seconds of each file whose room ended by itself."""
    times: Counter[str] = Counter()
    for result in results:
        for test in result.tests if not result.problem else ():
            times[test["test"].split("::")[0]] += test["seconds"]
    return {path: round(seconds, 1) for path, seconds in sorted(times.items())}


def read_times(root: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for path in (root / "tests" / "times.json", root / "build" / "test-times.json"):
        try:
            found.update(json.loads(path.read_text()))
        except (OSError, ValueError):  # there is none yet, or it was cut off
            continue
    return found


def write_times(root: Path, times: dict[str, float]) -> None:
    path = root / "build" / "test-times.json"
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(dict(sorted(times.items())), indent=0))
    scratch.replace(path)


def read_settings(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.run", allow_abbrev=False, usage=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=int(os.environ.get("JOBS") or (os.cpu_count() or 2) + 2)
    )
    parser.add_argument("--fetch", default="", help="a command that fetches what tests need")
    parser.add_argument(
        "--root", type=Path, default=HERE.parent, help="the checkout whose tests are run"
    )
    parser.add_argument(
        "--slowest", type=int, default=10, help="how many of the slowest tests are listed"
    )
    parser.add_argument("--test-limit", type=float, default=TEST_LIMIT_S)
    parser.add_argument(
        "--results",
        type=Path,
        help="a file to which each test's result is appended as a line of JSON",
    )
    return parser.parse_known_args(arguments)


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def find_tests(paths: list[str], root: Path) -> Iterator[str]:
    for path in paths or [
        path for path in ("tests", "container_sdk/tests") if (root / path).is_dir()
    ]:
        yield from tests_below(path, root)


def main(arguments: Sequence[str] | None = None) -> int:
    settings, rest = read_settings(sys.argv[1:] if arguments is None else arguments)
    paths, options = split_arguments(rest, settings.root)
    times = read_times(settings.root)
    rooms = plan(list(find_tests(paths, settings.root)), times, max(settings.jobs, 1))
    if not rooms:
        print("no tests found\n0 passed, 0 failed, 0 skipped")
        return 1
    # SIGINT is ignored in what a shell starts in the background
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    interrupted, begun = False, time.monotonic()
    fetching = (
        subprocess.Popen(shlex.split(settings.fetch), cwd=settings.root) if settings.fetch else None
    )
    with tempfile.TemporaryDirectory(prefix="clipper-tests-") as scratch:
        runner = Runner(rooms, options, settings, Path(scratch), fetching)
        try:
            runner.run()
        except FetchFailed as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            interrupted = True
    results = runner.results
    selecting = any(option.startswith(SELECTING) for option in options) or any(
        "::" in path for path in paths
    )
    if not interrupted and all(result.empty and not result.problem for result in results):
        results[0].problem = "collected nothing: no test matches"
    for result in results if not selecting else ():
        if result.empty and not result.problem:
            result.problem = "collected nothing"
    if not selecting:
        write_times(settings.root, {**times, **times_of(results)})
    report(results, settings.slowest)
    cpu, elapsed = sum(result.cpu for result in results), time.monotonic() - begun
    print(
        f"\n{elapsed:.0f} s by the clock, {cpu:.0f} s of"
        f" CPU{', interrupted' if interrupted else ''}"
    )
    print(
        ", ".join(
            f"{sum(r.count(what) for r in results)} {what}"
            for what in ("passed", "failed", "skipped")
        )
    )
    return 130 if interrupted else int(not all(result.good for result in results))


if __name__ == "__main__":
    sys.exit(main())
