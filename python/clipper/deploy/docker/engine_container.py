"""Model containers of Docker or podman. A thread for each start builds the image, starts the
container and follows its output.

Starts are decided by the supervisor; the engine's own policy is off. Each start creates a new
container, so that its output can be read from the beginning.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from signal import SIGKILL, Signals
from typing import Final

from clipper.component import Stop, Worker
from clipper.deploy.deployer import ContainerSpec
from clipper.deploy.docker.daemon import Daemon, EngineAway
from clipper.deploy.replicas import Replicas
from clipper.errors import ClipperError, DeployFailed, NotStarted
from clipper.processes import End, Handle, Told, describe_exit
from clipper.processes.output import LINE_BYTES_MAX, LineSplitter

PID: Final = 1  # the model's process id inside its container
CLOSE_S: Final = 30.0  # for the threads, once all containers have ended
_AGAIN_S: Final = 0.5
_SIGNALS: Final = 64
_UNKNOWN: Final = 255  # the exit code of a container whose end its engine has not seen


class EngineContainers:
    """Makes the handles of the containers of one engine. Threads: any."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._workers: dict[tuple[str, int, int], Worker] = {}  # of the last start of each

    def handle(self, spec: ContainerSpec, replica: int, around: Replicas) -> Handle:
        """See HandleMaker."""
        return EngineContainer(self._daemon, spec, replica, self._began)

    def close(self) -> None:
        """See HandleMaker."""
        until_s = time.monotonic() + CLOSE_S
        for worker in [*self._workers.values()]:
            worker.request_stop()
        for worker in [*self._workers.values()]:
            worker.join(until_s)
        self._daemon.close()

    def _began(self, spec: ContainerSpec, replica: int, worker: Worker) -> Worker | None:
        """Take note of the thread of a start; return that of the start before it, whose container
        has the same name."""
        key = spec.name, spec.version, replica
        before = self._workers.get(key)
        self._workers[key] = worker
        return before


class EngineContainer:
    """A handle of one container; see `Handle`.

    began: takes the thread of a start, and returns the one before it.
    """

    def __init__(
        self,
        daemon: Daemon,
        spec: ContainerSpec,
        replica: int,
        began: Callable[[ContainerSpec, int, Worker], Worker | None],
    ) -> None:
        self._daemon = daemon
        self._spec = spec
        self._replica = replica
        self._began = began
        self._image = ""
        self._id = ""  # of the container that may be signalled
        self._made = ""  # of the one to remove; belongs to the thread of a start
        self._before: Worker | None = None
        self._worker: Worker | None = None

    def start(self, number: int, told: Told) -> None:
        """See Handle."""
        name = f"clipper-container-{self._spec.name}"
        worker = Worker(name, partial(self._live, told), once=True)
        before = self._began(self._spec, self._replica, worker)
        self._before, self._worker = before, worker
        try:
            worker.start()
        except NotStarted as error:
            if before is not None:
                self._began(self._spec, self._replica, before)
            told.lacks(error.message)

    def hurry(self) -> None:
        """See Handle. An image takes the time that it takes."""

    def signal(self, number: Signals) -> None:
        """See Handle. A thread calls the engine, which may take its time; the supervisor's waits
        for it where there is no other."""
        if self._id:
            self._signal(self._id, number)

    def clear(self) -> None:
        """See Handle. The thread removes the container."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.request_stop()
        container, self._id = self._id, ""
        if container:  # it may have been started just now
            self._signal(container, SIGKILL)

    def _signal(self, container: str, number: Signals) -> None:
        send = partial(self._send, container, number)
        worker = Worker(f"clipper-signal-{self._spec.name}", send, once=True)
        try:
            worker.start()
        except NotStarted:
            send(worker.stop)

    def _send(self, container: str, number: Signals, stop: Stop) -> None:
        self._daemon.kill(container, number)

    # -- the thread of a start

    def _live(self, told: Told, stop: Stop) -> None:
        """Run one container. Its end is told once the container is removed, so that who stops a
        replica finds none of it left."""
        before = self._before
        if before is not None:
            before.join(time.monotonic() + CLOSE_S)
        outcome: Callable[[], None] | None = None
        try:
            outcome = self._run(told, stop)
        except EngineAway as error:
            outcome = partial(told.lacks, error.message, soon=False)
        except ClipperError as error:
            outcome = partial(_refused, told, str(error))
        except Exception as error:
            outcome = partial(told.failed, error)
            raise
        finally:
            try:
                self._remove()
            finally:
                if outcome is not None:
                    told.post(outcome)

    def _remove(self) -> None:
        container, self._made = self._made, ""
        if container:
            self._daemon.remove(container)

    def _run(self, told: Told, stop: Stop) -> Callable[[], None] | None:
        """Build, create, start and follow a container; return what is told at its end."""
        image = self._image or self._daemon.image(
            self._spec, partial(self._progress, told), partial(_is_over, stop)
        )
        self._image = image
        self._made = self._daemon.create(image, self._spec, self._replica)
        if stop.requested:
            return None
        self._id = self._made
        self._daemon.start(self._made)
        if stop.requested:
            return None
        told.post(partial(self._started, told))
        return partial(self._ended, told, self._follow(self._made, told, stop))

    def _started(self, told: Told) -> None:
        told.started(PID)
        told.is_up()

    def _ended(self, told: Told, end: End) -> None:
        self._id = ""
        told.ended(end)

    def _progress(self, told: Told, line: str) -> None:
        told.post(partial(told.progress, line[:LINE_BYTES_MAX]))

    def _follow(self, container: str, told: Told, stop: Stop) -> End:
        """Read the output until the container ends; return how it ended. Waits for an engine that
        is temporarily away; its own end may have been that of the container.
        """
        all_of_it = True
        cut = False  # since it was last seen to run
        while True:
            try:
                _take(self._daemon.output(container, all_of_it), told)
            except Exception as error:  # any error of a broken connection
                told.post(partial(told.wrote, [f"({self._daemon.kind} was cut off: {error})"]))
                cut = True
            try:
                state = self._daemon.state(container)
                if not state["Running"]:
                    detail = describe_end(state, self._spec.memory_mib)
                    if cut:
                        detail = f"ended while {self._daemon.kind} was away: {detail}"
                    return End(exit_code(state), detail, own=cut and may_be_its_engine(state))
                cut = False
            except DeployFailed as error:
                cut = True
                if stop.requested:
                    return End(None, f"left behind: {error.message}")
            all_of_it = False
            stop.wait(_AGAIN_S)


def _is_over(stop: Stop) -> bool:
    return stop.requested


def _refused(told: Told, why: str) -> None:
    told.wrote(why.splitlines())
    told.refused(why)


def _take(output: Iterable[bytes], told: Told) -> None:
    """Tell a stream as lines."""
    lines = LineSplitter()
    for piece in output:
        told.post(partial(told.wrote, lines.split(piece)))
    told.post(partial(told.wrote, lines.end()))


def exit_code(state: dict[str, object]) -> int:
    """Return the exit code, negative for a signal, as of a process."""
    code = state.get("ExitCode")
    number = code if isinstance(code, int) else 0
    if state.get("OOMKilled"):
        return -SIGKILL
    return 128 - number if 128 < number <= 128 + _SIGNALS else number


def may_be_its_engine(state: dict[str, object]) -> bool:
    """Return whether an engine may have ended a container as it stopped, or started again: by
    SIGTERM, at which ours exit with 0, or SIGKILL; or does not know how it ended.
    """
    code = exit_code(state)
    return not state.get("OOMKilled") and (code in (0, _UNKNOWN) or End(code).is_stop)


def describe_end(state: dict[str, object], memory_mib: int) -> str:
    """Describe an exit: "exit 3", "killed (SIGKILL)", "killed for memory (its limit is 512
    MiB)".
    """
    if state.get("OOMKilled"):
        return (
            f"killed for memory (its limit, memory_mib, is {memory_mib})"
            if memory_mib
            else "killed for memory"
        )
    return describe_exit(exit_code(state))
