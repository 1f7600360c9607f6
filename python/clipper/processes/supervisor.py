"""The supervisor of all processes that this one starts: model containers, model hosts, shards,
servers on Ray, pip, checks of files.

One thread, which runs an event loop, starts them and follows them. They ask for SIGKILL when their
parent ends (PR_SET_PDEATHSIG), and to Linux the parent is the thread that forked: so a killed
server leaves no processes. For the same reason this thread must not end: what it does for one child
is guarded, and an error there ends the process of that child only. What the server itself lacks
(descriptors, processes, memory) is no exit of a child; the start is made again until it succeeds.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from clipper.component import Health, Loop
from clipper.component import State as ComponentState
from clipper.errors import NotStarted, ShuttingDown
from clipper.foreign_text import printable
from clipper.processes.child import Child, ChildEvent
from clipper.processes.control_groups import ControlGroups, StartGroup, end
from clipper.processes.handle import (
    NO_LIMITS,
    ChildListener,
    End,
    Handle,
    Notice,
    NoticeKind,
    ProcessLimits,
)
from clipper.processes.restarts import RestartPolicy, Spacing, StartLimit
from clipper.processes.state import Action, ChildState, Happened
from clipper_container.shortage import SpareDescriptors, is_own

_LOOK_S: Final = 0.005  # from SIGKILL to the end of what a child has left; doubles
_LOOK_S_MAX: Final = 1.0
START_S: Final = 0.25  # a child that starts counts as one for so long at most: many only wait
KILL_S: Final = 30.0  # from SIGKILL to the end of a process; the kernel may hold it for longer
LINES_MAX: Final = 200
TAIL_LINES: Final = 20
OnLines = Callable[[str, Sequence[str]], object]
log = logging.getLogger("clipper.processes")


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """The status of a child. starts: so far. detail: of the last end, or what it waits for. how:
    its process was started, "" where there is no choice. again_s: seconds until its next start; 0
    if none is due.
    """

    name: str
    state: ChildState
    pid: int
    starts: int
    detail: str
    how: str
    again_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Entry:
    """The record of one child."""

    name: str
    child: Child
    handle: Handle
    listener: ChildListener
    policy: RestartPolicy
    lines: deque[str]  # the last ones
    log_lines: bool
    on_lines: OnLines | None
    written: int = 0  # lines
    told: "_Told | None" = None  # of the start that is under way
    timer: asyncio.TimerHandle | None = None
    at_rest: bool = False  # at rest, and its owner knows
    closed: bool = False


class Supervisor:
    """Starts children and keeps them running; a component.

    lines_max: lines kept of each child's output. starts_at_once: 0 for one fewer than the cores.

    Threads: any, but start() once. A fork of this process must not use it.
    """

    def __init__(self, name: str = "clipper-processes", starts_at_once: int = 0) -> None:
        self.name, self.vital = name, True
        self._loop = Loop(
            name,
            self._open,
            self._close,
            make=asyncio.SelectorEventLoop,
            vital=True,
            on_end=self._has_ended,
        )
        self._io: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._spacing, self._turns = Spacing(), StartLimit[str](starts_at_once)
        self._giving = False
        self._spares: SpareDescriptors | None = None
        self._groups = ControlGroups()
        self._pid = os.getpid()
        self._thread = 0
        self._failure = ""
        self._closing = False

    # -- component

    def start(self, limit_s: float = 10.0) -> None:
        """Start the thread. Raises: NotStarted."""
        self._loop.start(limit_s)

    def request_stop(self) -> None:
        """Refuse further children, and end those that run."""
        with self._changed:
            self._closing = True

    def join(self, until_s: float) -> bool:
        """End all children, and the thread; return whether they have ended."""
        if self._is_own_thread:
            return False
        self.request_stop()
        if not self._failure:
            with self._changed:
                entries = [*self._entries.values()]
            left = [
                *self.stop(_names(entries, last=False), limit_s=until_s - time.monotonic()),
                *self.stop(_names(entries, last=True), limit_s=until_s - time.monotonic()),
            ]
            if left:
                log.error("SIGKILL does not end all of: %s", ", ".join(left))
        self._loop.request_stop()
        return self._loop.join(until_s)

    def end(self, limit_s: float = KILL_S) -> bool:
        """End all children, and the thread; return whether they have ended. Idempotent."""
        return self.join(time.monotonic() + limit_s)

    def health(self) -> Health:
        """Return the state of the thread."""
        if self._failure:
            return Health(self.name, ComponentState.FAILED, self._failure, self.vital)
        return self._loop.health()

    @property
    def failure(self) -> str:
        """Return why children are not supervised any more; empty while they are."""
        return self._failure

    @property
    def is_closing(self) -> bool:
        """Return whether its end was requested."""
        return self._closing

    def __enter__(self) -> "Supervisor":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    # -- called by anyone

    def add(
        self,
        name: str,
        handle: Handle,
        policy: RestartPolicy,
        listener: ChildListener,
        *,
        lines_max: int = LINES_MAX,
        log_lines: bool = False,
        on_lines: OnLines | None = None,
    ) -> None:
        """Start a child and keep it running; returns at once.

        It may replace one of its name that has ended or is held. In the supervising thread, the
        first start has been tried when this returns.

        log_lines: whether its output is logged as well. on_lines: called in the supervising thread
        with its name and the lines that it has written.

        Raises: ValueError if one of its name runs; ShuttingDown after the end was requested;
        NotStarted if the supervising thread has not started, or has ended.
        """
        child = Child(policy, self._spacing)
        lines = deque[str](maxlen=lines_max)
        new = _Entry(name, child, handle, listener, policy, lines, log_lines, on_lines)
        with self._changed:
            self._check_alive()
            if self._io is None:
                raise NotStarted(f"{self.name} has not started.")
            if self._closing:
                raise ShuttingDown("this process ends.", hint="Start another.")
            old = self._entries.get(name)
            if old is not None and not (old.at_rest or old.child.may_be_replaced):
                raise ValueError(f"{name} is {old.child.state} already; stop it first")
            self._entries[name] = new
        if self._is_own_thread:
            self._begin_instead(new, old)
        else:
            self._post(partial(self._begin_instead, new, old), new)

    def stop(
        self,
        names: Collection[str],
        grace_s: float | None = None,
        limit_s: float | None = None,
    ) -> Sequence[str]:
        """Stop children: SIGTERM, SIGKILL after `grace_s` (None: as their policies say); wait for
        their end. Returns the names of those that have not ended within `limit_s` (None: the
        grace, and `KILL_S`).

        Called in the supervising thread it does not wait. Unknown names are ignored.
        """
        with self._changed:
            entries = [self._entries[name] for name in names if name in self._entries]
        longest_s = 0.0
        for entry in entries:
            grace = entry.policy.grace_s if grace_s is None else grace_s
            longest_s = max(longest_s, grace)
            stop = ChildEvent(Happened.STOP, grace_s=grace)
            with contextlib.suppress(NotStarted):
                self._post(partial(self._take, entry, stop), entry)
        if self._is_own_thread:
            return ()
        wait_s = longest_s + KILL_S if limit_s is None else max(0.0, limit_s)
        with self._changed:
            self._changed.wait_for(partial(self._are_over, entries), wait_s)
            return [entry.name for entry in entries if not entry.at_rest]

    def restart(self, name: str, pid: int) -> bool:
        """Kill process `pid` of a child, which then restarts; return whether it is that one's."""
        entry = self._entry_with(name, pid)
        if entry is None:
            return False
        self._post(partial(self._take_of, entry, pid, Happened.KILL), entry)
        return True

    def serves(self, name: str, pid: int) -> None:
        """Note that process `pid` of a child is ready: later ends are judged by it."""
        entry = self._entry_with(name, pid)
        if entry is not None:
            self._post(partial(self._take_of, entry, pid, Happened.SERVES), entry)

    def excuse(self, name: str, pid: int) -> None:
        """Do not count the end of process `pid` of a child, whether it has come or not."""
        with self._changed:
            entry = self._entries.get(name)
        if entry is not None:
            self._post(partial(self._excuse, entry, pid), entry)

    def forget(self, name: str) -> None:
        """Forget a child that is at rest; others are ignored."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None or not entry.at_rest:
                return
            del self._entries[name]
        self._post(partial(self._replaced, entry))

    def get(self, name: str) -> ChildStatus | None:
        """Return the status of a child; None for an unknown one."""
        with self._changed:
            entry = self._entries.get(name)
            return None if entry is None else self._status(entry)

    def list(self) -> Sequence[ChildStatus]:
        """Return the status of each child, including stopped ones, in the order of their names."""
        with self._changed:
            return [self._status(entry) for _, entry in sorted(self._entries.items())]

    def lines(self, name: str) -> tuple[Sequence[str], int]:
        """Return the last lines of a child, and how many it has written. Raises: KeyError."""
        with self._changed:
            entry = self._entries[name]
            return [*entry.lines], entry.written

    def post(self, work: Callable[[], object]) -> None:
        """Call a function in the supervising thread; what it raises is logged. Raises: NotStarted
        if there is none any more."""
        self._post(partial(self._do, work))

    def later(self, pause_s: float, work: Callable[[], object]) -> None:
        """Call a function after so many seconds, unless the thread has ended; what it raises is
        logged. Threads: the supervising one."""
        self.loop.call_later(pause_s, self._do, work)

    def spare_descriptors(self) -> contextlib.AbstractContextManager[None]:
        """Give up the descriptors that are kept for starts, for as long as one is made. Threads:
        the supervising one."""
        assert self._spares is not None
        return self._spares.lent()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the supervising thread, for what children share. Threads: this one."""
        if self._io is None:
            raise NotStarted(f"{self.name} has not started.")
        return self._io

    @property
    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _entry_with(self, name: str, pid: int) -> _Entry | None:
        with self._changed:
            entry = self._entries.get(name)
            return entry if entry is not None and pid and entry.child.pid == pid else None

    def _status(self, entry: _Entry) -> ChildStatus:
        child = entry.child
        return ChildStatus(
            entry.name,
            child.state,
            child.pid,
            child.starts,
            child.detail,
            child.how,
            child.again_s(time.monotonic()),
        )

    def _are_over(self, entries: Sequence[_Entry]) -> bool:
        return bool(self._failure) or all(entry.at_rest for entry in entries)

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this supervisor belongs to the process that forked this one")
        if self._failure:
            raise NotStarted(
                f"processes are not supervised any more: {self._failure}.",
                hint="Restart the server.",
            )

    def _post(self, work: Callable[[], object], entry: _Entry | None = None) -> None:
        """Have the supervising thread do something; nothing after the end."""
        self._check_alive()
        self._loop.call(self._do, work, entry)

    # -- the supervising thread

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._spares = SpareDescriptors()
        self._io = loop
        self._thread = threading.get_ident()
        with self.spare_descriptors():
            self._do(self._groups.open)

    async def _close(self) -> None:
        self._giving = True  # none starts any more
        for entry in [*self._entries.values()]:
            self._do(partial(self._close_entry, entry), entry)
        self._do(self._groups.close)
        if self._spares is not None:
            self._spares.close()

    def _has_ended(self) -> None:
        """Note that this thread has ended, and with it, by the kernel, all children."""
        self._thread = 0  # another thread may get its number
        if self._closing and all(entry.at_rest for entry in self._entries.values()):
            return
        why = self._loop.health().why or "it was stopped"
        with self._changed:
            self._failure = f"the thread that supervises processes has ended ({why})"
            ended = [one for one in self._entries.values() if not one.child.is_at_rest]
            for entry in ended:
                entry.child.fail(self._failure)
        for entry in ended:
            self._tell(entry, Notice(NoticeKind.FAILED, 0, self._failure))
        with self._changed:
            for entry in self._entries.values():
                entry.at_rest = True
            self._changed.notify_all()

    def _do(self, work: Callable[[], object], entry: _Entry | None = None) -> None:
        """Run a job. Its failure is logged, and is an event of its child, so that this thread and
        all other children live on.
        """
        try:
            work()
        except Exception as error:
            name = "" if entry is None else f" of {entry.name}"
            log.exception("the supervisor failed at an event%s", name)
            if entry is not None:
                self._broke(entry, error)

    def _broke(self, entry: _Entry, error: Exception) -> None:
        try:
            with self._changed:
                what = entry.child.broke(f"{type(error).__name__}: {error}", time.monotonic())
            self._carry_out(entry, what)
        except Exception:
            log.exception("%s is left as it is", entry.name)

    def _begin_instead(self, entry: _Entry, old: _Entry | None) -> None:
        """Start a child for the first time, in the place of another."""
        if old is not None:
            self._do(partial(self._replaced, old))
        self._do(partial(self._begin, entry), entry)

    def _begin(self, entry: _Entry) -> None:
        """Start a child for the first time, after those that start or wait already."""
        if not entry.policy.queued:
            self._take(entry, ChildEvent(Happened.TURN))
            return
        before = self._turns.wait(entry.name)
        self._give_turns()
        if not entry.child.starts:
            detail = f"containers that start before it: {before}"
            self._tell(entry, Notice(NoticeKind.WAITING, 0, detail))

    def _give_turns(self) -> None:
        """Start the next children that wait, if they may. A start that ends at once calls this
        again, and the first call goes on.
        """
        if self._giving:
            return
        self._giving = True
        try:
            while (name := self._turns.next()) is not None:
                if (entry := self._entries.get(name)) is not None:
                    self._do(partial(self._take, entry, ChildEvent(Happened.TURN)), entry)
        finally:
            self._giving = False

    def _turn_is_over(self, entry: _Entry) -> None:
        self._turns.ended(entry.name)
        self._give_turns()

    def _take(self, entry: _Entry, event: ChildEvent) -> None:
        """Have a child take an event, and do what follows; one that was replaced takes none."""
        with self._changed:
            if entry.closed or self._entries.get(entry.name) is not entry:
                return
            tail = tuple(entry.lines)[-TAIL_LINES:]
            what = entry.child.step(event, time.monotonic(), tail)
        self._carry_out(entry, what)

    def _carry_out(self, entry: _Entry, what: Sequence[Action | Notice]) -> None:
        """Do and tell all of it, even after an error, which is raised then."""
        self._set_timer(entry)
        with contextlib.ExitStack() as all_of_it:
            if entry.child.is_at_rest:
                all_of_it.callback(self._rests, entry)
                all_of_it.callback(self._close_entry, entry)
            for one in reversed(what):
                if isinstance(one, Notice):
                    all_of_it.callback(self._tell, entry, one)
                else:
                    all_of_it.callback(self._act, entry, one)

    def _rests(self, entry: _Entry) -> None:
        with self._changed:
            entry.at_rest = True
            self._changed.notify_all()

    def _act(self, entry: _Entry, action: Action) -> None:
        match action:
            case Action.START:
                self._start(entry)
            case Action.HURRY:
                self._request(entry, entry.handle.hurry)
            case Action.TERM:
                entry.handle.signal(signal.SIGTERM)
            case Action.KILL:
                entry.handle.signal(signal.SIGKILL)
            case Action.CLEAR:
                self._clear(entry)

    def _start(self, entry: _Entry) -> None:
        """Request a process. What the server lacks for it is an event of the child."""
        told = entry.told = _Told(self, entry)
        if entry.policy.queued:
            self._turns.began(entry.name)
            told.later(START_S, told.is_up)
        self._request(entry, partial(entry.handle.start, entry.child.starts, told))

    def _request(self, entry: _Entry, start: Callable[[], None]) -> None:
        try:
            with self.spare_descriptors():
                start()
        except (OSError, MemoryError, ValueError, RuntimeError) as error:
            self._failed(entry, error)

    def _failed(self, entry: _Entry, error: Exception) -> None:
        """Note that a start has failed."""
        if is_own(error):
            self._take(entry, ChildEvent(Happened.LACKING, why=str(error)))
            return
        self._wrote(entry, [f"cannot be started: {error}"])
        self._take(entry, ChildEvent(Happened.REFUSED, why=f"not started: {error}"))

    def _clear(self, entry: _Entry) -> None:
        """Give back what was opened for a start, and hear nothing more of it."""
        told, entry.told = entry.told, None
        try:
            if told is not None:
                told.close()
                entry.handle.clear()
        finally:
            if told is not None:
                told.end_group()
            self._turn_is_over(entry)

    def _close_entry(self, entry: _Entry) -> None:
        if not entry.closed:
            entry.closed = True
            self._clear(entry)

    def _replaced(self, entry: _Entry) -> None:
        """Give back what a child had whose place another has taken."""
        if entry.timer is not None:
            entry.timer.cancel()
        try:
            self._close_entry(entry)
        finally:
            self._rests(entry)

    def _end_group(self, group: Path, pause_s: float = _LOOK_S) -> None:
        """Kill what a child has left in its control group, until that is gone."""
        with self.spare_descriptors():
            is_over = end(group)
        if not is_over:
            longer_s = min(_LOOK_S_MAX, 2 * pause_s)
            self.later(pause_s, partial(self._end_group, group, longer_s))

    def _set_timer(self, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        due_s = entry.child.due_s
        if due_s is not None:
            entry.timer = self.loop.call_later(
                max(0.0, due_s - time.monotonic()), self._do, partial(self._is_due, entry), entry
            )

    def _is_due(self, entry: _Entry) -> None:
        due_s = entry.child.due_s
        if due_s is None:
            return
        if due_s > time.monotonic():
            self._set_timer(entry)
            return
        if entry.child.state in (ChildState.KILLING, ChildState.STOPPING) and not entry.policy.last:
            log.warning("%s (pid %d) does not end: it is killed", entry.name, entry.child.pid)
        self._take(entry, ChildEvent(Happened.DUE))

    def _take_of(self, entry: _Entry, pid: int, happened: Happened) -> None:
        """Have a child take an event of one of its processes, unless that has ended."""
        if entry.child.pid == pid:
            self._take(entry, ChildEvent(happened))

    def _excuse(self, entry: _Entry, pid: int) -> None:
        with self._changed:
            told = entry.child.excuse(pid, time.monotonic())
        self._carry_out(entry, told)

    def _tell(self, entry: _Entry, notice: Notice) -> None:
        """Tell the owner; waiting threads are woken after it."""
        try:
            entry.listener.on_notice(entry.name, notice)
        except Exception:
            log.exception("the owner of %s failed at a notice", entry.name)

    def _wrote(self, entry: _Entry, lines: Sequence[str]) -> None:
        with self._changed:
            entry.lines.extend(lines)
            entry.written += len(lines)
        if entry.log_lines:
            for line in lines:
                log.info("%s: %s", entry.name, printable(line))
        if entry.on_lines is not None:
            self._do(partial(entry.on_lines, entry.name, lines))


def _names(entries: Iterable[_Entry], *, last: bool) -> Sequence[str]:
    return [entry.name for entry in entries if entry.policy.last == last]


class _Told:
    """The supervisor as the handle of one start sees it; see `Told`."""

    def __init__(self, supervisor: Supervisor, entry: _Entry) -> None:
        self._supervisor, self._entry = supervisor, entry
        self._fds: set[int] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._open = True
        self._group: StartGroup | None = None

    def group(self, limits: ProcessLimits = NO_LIMITS) -> Mapping[str, str]:
        """See Told."""
        self._group = self._group or self._supervisor._groups.new(limits)
        return self._group.variables

    def started(self, pid: int, how: str = "") -> None:
        """See Told."""
        self._take(ChildEvent(Happened.STARTED, pid=pid, why=self._limited(how)))

    def lacks(self, why: str, *, soon: bool = True) -> None:
        """See Told."""
        self._take(ChildEvent(Happened.LACKING, why=why, hold=not soon))

    def refused(self, why: str) -> None:
        """See Told."""
        self._take(ChildEvent(Happened.REFUSED, why=why, hold=True))

    def failed(self, error: Exception) -> None:
        """See Told."""
        if self._open:
            self._supervisor._failed(self._entry, error)

    def started_as(self, how: str) -> None:
        """See Told."""
        if self._open:
            self._entry.child.how = self._limited(how)

    def serves(self) -> None:
        """See Told."""
        self._take(ChildEvent(Happened.SERVES))

    def is_up(self) -> None:
        """See Told."""
        if self._open:
            self._supervisor._turn_is_over(self._entry)

    def progress(self, line: str) -> None:
        """See Told."""
        if self._open:
            self._supervisor._wrote(self._entry, [line])
            self._supervisor._tell(self._entry, Notice(NoticeKind.BUILDING, 0, line))

    def wrote(self, lines: Sequence[str]) -> None:
        """See Told."""
        self._supervisor._wrote(self._entry, lines)

    def ended(self, end: End) -> None:
        """See Told."""
        if self._group is not None:
            end = self._group.explained(end)
        self._take(ChildEvent(Happened.ENDED, end=end))

    def do(self, handler: Callable[[], object]) -> None:
        """See Told."""
        if self._open:
            self._supervisor._do(handler, self._entry)

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """See Told."""
        self._supervisor.loop.add_reader(fd, self.do, handler)
        self._fds.add(fd)

    def unwatch(self, fd: int) -> None:
        """See Told."""
        if fd in self._fds:
            self._fds.remove(fd)
            self._supervisor.loop.remove_reader(fd)

    def later(self, pause_s: float, handler: Callable[[], object]) -> None:
        """See Told."""
        self._timers.append(self._supervisor.loop.call_later(pause_s, self.do, handler))

    def post(self, handler: Callable[[], object]) -> None:
        """See Told."""
        with contextlib.suppress(NotStarted):
            self._supervisor._post(partial(self.do, handler))

    def close(self) -> None:
        """Hear nothing more of this start."""
        self._open = False
        for fd in [*self._fds]:
            self.unwatch(fd)
        for timer in self._timers:
            timer.cancel()

    def end_group(self) -> None:
        """End what is left in the control group of this start."""
        if self._group is not None and self._group.folder is not None:
            self._supervisor._end_group(self._group.folder)

    def _limited(self, how: str) -> str:
        """Say how the process was started, and which limits it has."""
        limits = "" if self._group is None else self._group.text
        return "; ".join(filter(None, (how, limits)))

    def _take(self, event: ChildEvent) -> None:
        if self._open:
            self._supervisor._take(self._entry, event)
