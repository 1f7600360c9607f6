"""The states of a child, as a pure machine: whatever happens, in whatever order."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from clipper.processes.child import KILL_AGAIN_S, Child, ChildEvent
from clipper.processes.handle import End, Notice, NoticeKind
from clipper.processes.restarts import NEVER_HELD, RestartPolicy, Spacing
from clipper.processes.state import AT_REST, TABLE, WITH_PROCESS, Action, ChildState, Happened

POLICIES = (
    RestartPolicy(),
    RestartPolicy(exits_max=0),
    RestartPolicy(exits_max=1, ready_s=5.0),
    RestartPolicy(exits_max=NEVER_HELD, at_once=2, backoff_s_min=0.0),
    RestartPolicy(again=False),
    RestartPolicy(again=False, ready_s=1.0, last=True, grace_s=0.0),
)
ENDS = (
    End(0, "exit 0"),
    End(3, "exit 3"),
    End(-9, "killed (SIGKILL)"),
    End(None, "ended with its fork server", own=True),
    End(1, "exit 1", changed="a smaller warm-up"),
)
WAITS = frozenset(
    {ChildState.SHORT, ChildState.BACKOFF, ChildState.HELD, ChildState.STOPPING, ChildState.KILLING}
)


@dataclass
class World:
    """A child, and what its owner and its handle know of it."""

    child: Child
    policy: RestartPolicy
    now_s: float = 100.0
    last_pid: int = 0
    opened: bool = False  # a start was requested, and what it opened is not closed
    lives: bool = False  # between STARTED and its end, as it is told
    stops: int = 0  # how often STOPPED was told
    late: bool = False  # the time of this state has passed once

    def take(self, event: ChildEvent) -> Sequence[Action | Notice]:
        """Have the child take an event; check it against the table, and what is done."""
        before, due_s = self.child.state, self.child.due_s
        rule = TABLE[before].get(event.kind)
        what = self.child.step(event, self.now_s, ("last line",))
        if rule is None:
            assert not what
            assert (self.child.state, self.child.due_s) == (before, due_s)
            return what
        assert self.child.state in rule.to
        actions = [one for one in what if isinstance(one, Action)]
        assert actions == [*rule.actions]
        if event.kind is Happened.DUE and before is self.child.state:
            self.late = True
        elif before is not self.child.state:
            self.late = False
        for one in what:
            self.follow(one)
        self.check()
        return what

    def follow(self, one: Action | Notice) -> None:
        """Note what is done and told; nothing is opened twice, and nothing is told out of turn."""
        match one:
            case Action.START:
                assert not self.opened
                self.opened = True
            case Action.CLEAR:
                self.opened = False
            case Action.HURRY | Action.TERM | Action.KILL:
                assert self.opened
            case Notice(kind=NoticeKind.STARTED):
                assert not self.lives
                assert one.pid == self.last_pid
                self.lives = True
            case Notice(kind=NoticeKind.READY):
                assert self.lives
            case Notice(kind=NoticeKind.EXITED):
                assert one.pid == (self.last_pid if self.lives else 0)
                assert one.log_tail == ("last line",)
                self.lives = False
            case Notice(kind=NoticeKind.STOPPED):
                self.lives = False
                self.stops += 1
            case Notice(kind=NoticeKind.RESTARTING | NoticeKind.FAILED):
                assert not self.lives
                assert one.again_s >= 0

    def check(self) -> None:
        """Check what is true in every state."""
        child = self.child
        assert (child.pid != 0) == (child.state in WITH_PROCESS) == self.lives
        assert self.opened == (child.state is ChildState.STARTING or child.state in WITH_PROCESS)
        assert self.stops == (child.state is ChildState.STOPPED)
        if child.state in WAITS:
            assert child.due_s is not None
        elif child.state is ChildState.STARTING:
            assert (child.due_s is None) == self.late
        elif child.state is ChildState.RUNNING:
            assert (child.due_s is None) == (self.late or not self.policy.ready_s)
        else:
            assert child.due_s is None
        assert child.is_at_rest == (child.state in AT_REST)
        if child.state is ChildState.FAILED:
            assert not self.policy.exits_max


def world(policy: RestartPolicy) -> World:
    return World(Child(policy, Spacing()), policy)


def event(kind: Happened, chance: random.Random, at: World) -> ChildEvent:
    """Return an event of this kind with random details."""
    if kind is Happened.STARTED and kind in TABLE[at.child.state]:
        at.last_pid += 1
    return ChildEvent(
        kind,
        pid=at.last_pid,
        why="why",
        end=chance.choice(ENDS),
        grace_s=chance.choice((0.0, 5.0)),
        hold=chance.random() < 0.3,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(40))
def test_any_event_in_any_state_follows_the_table(seed: int, policy: RestartPolicy) -> None:
    chance = random.Random(seed)
    at = world(policy)
    for _ in range(300):
        at.now_s += chance.choice((0.0, 0.01, 1.0, 40.0))
        known = [*TABLE[at.child.state]]
        kinds = known if known and chance.random() < 0.7 else [*Happened]
        if chance.random() < 0.1:
            kinds = [Happened.STOP] if chance.random() < 0.05 else [Happened.KILL]
        elif chance.random() < 0.9 and Happened.STOP in kinds:
            kinds = [kind for kind in kinds if kind is not Happened.STOP] or kinds
        at.take(event(chance.choice(kinds), chance, at))
        if chance.random() < 0.2:
            for notice in at.child.excuse(at.last_pid, at.now_s):
                at.follow(notice)
            at.check()
    was = at.child.state
    at.take(ChildEvent(Happened.STOP, grace_s=1.0))
    if was not in AT_REST:
        if at.child.state in WITH_PROCESS:
            at.take(ChildEvent(Happened.ENDED, end=ENDS[2]))
        assert at.child.state is ChildState.STOPPED
    for kind in Happened:
        assert not at.take(event(kind, chance, at)), "it is final"


def test_the_table_knows_every_state() -> None:
    assert set(TABLE) == set(ChildState)
    assert all(not TABLE[state] for state in AT_REST)
    for state, rules in TABLE.items():
        for happened, rule in rules.items():
            assert rule.to, (state, happened)


def turned(policy: RestartPolicy) -> World:
    at = world(policy)
    at.take(ChildEvent(Happened.TURN))
    return at


def started(policy: RestartPolicy) -> World:
    at = turned(policy)
    again(at)
    return at


def again(at: World) -> None:
    """Have the start succeed, when it is due."""
    if at.child.state is not ChildState.STARTING:
        assert at.child.due_s is not None
        at.now_s = at.child.due_s
        at.take(ChildEvent(Happened.DUE))
    at.last_pid += 1
    at.take(ChildEvent(Happened.STARTED, pid=at.last_pid))


def kinds(what: Sequence[Action | Notice]) -> list[Action | NoticeKind]:
    return [one.kind if isinstance(one, Notice) else one for one in what]


def test_a_shortage_is_never_counted_and_told_once() -> None:
    at = turned(RestartPolicy(exits_max=2, own_s_max=0.5))
    told = kinds(at.take(ChildEvent(Happened.LACKING, why="no descriptor")))
    assert told == [Action.CLEAR, NoticeKind.RESTARTING]
    for _ in range(50):
        assert at.child.state is ChildState.SHORT
        assert at.child.starts == 0
        assert at.child.due_s is not None
        assert at.child.due_s - at.now_s <= 1.0
        at.now_s = at.child.due_s
        at.take(ChildEvent(Happened.DUE))
        assert kinds(at.take(ChildEvent(Happened.LACKING, why="no descriptor"))) == [Action.CLEAR]
    assert "no descriptor" in at.child.detail
    again(at)
    assert at.child.starts == 1
    at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
    assert at.child.state is ChildState.BACKOFF, "it is the first exit"


def test_what_will_be_lacking_for_long_is_told_as_a_failure_and_tried_all_the_same() -> None:
    at = turned(RestartPolicy())
    _, notice = at.take(ChildEvent(Happened.LACKING, why="the engine is away", hold=True))
    assert isinstance(notice, Notice)
    assert notice.kind is NoticeKind.FAILED
    assert notice.again_s > 0
    assert at.child.state is ChildState.SHORT


def test_without_another_start_it_stops_and_tells_its_exit_first() -> None:
    at = started(RestartPolicy(again=False))
    what = at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
    assert kinds(what) == [Action.CLEAR, NoticeKind.EXITED, NoticeKind.STOPPED]
    assert at.child.detail == "exit 3"
    refused = turned(RestartPolicy(again=False))
    what = refused.take(ChildEvent(Happened.REFUSED, why="no such program"))
    assert kinds(what) == [Action.CLEAR, NoticeKind.EXITED, NoticeKind.STOPPED]
    short = turned(RestartPolicy(again=False))
    short.take(ChildEvent(Happened.LACKING, why="no process is free"))
    assert short.child.state is ChildState.SHORT, "it is started once, when that is possible"


def test_one_that_is_never_held_is_never_held() -> None:
    at = started(RestartPolicy(exits_max=NEVER_HELD, backoff_s_max=1.0, at_once=2, apart_s=0))
    pauses = []
    for _ in range(200):
        at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
        assert at.child.state is ChildState.BACKOFF
        pauses.append(at.child.again_s(at.now_s))
        again(at)
    assert pauses[:2] == [0.0, 0.0]
    assert all(0 < pause_s <= 1.0 for pause_s in pauses[2:])


def test_one_that_is_not_ready_in_time_is_killed() -> None:
    at = started(RestartPolicy(ready_s=5.0))
    assert at.child.due_s == at.now_s + 5.0
    at.now_s += 5.0
    assert at.take(ChildEvent(Happened.DUE)) == [Action.KILL]
    at.take(ChildEvent(Happened.ENDED, end=ENDS[2]))
    assert at.child.state is ChildState.BACKOFF
    again(at)
    at.take(ChildEvent(Happened.SERVES))
    assert at.child.state is ChildState.READY
    assert at.child.due_s is None


def test_a_late_answer_is_hurried_once() -> None:
    at = turned(RestartPolicy(answer_s=3.0))
    assert at.child.due_s == at.now_s + 3.0
    assert at.take(ChildEvent(Happened.DUE)) == [Action.HURRY]
    assert at.child.due_s is None
    at.take(ChildEvent(Happened.STOP))
    assert at.child.state is ChildState.STOPPED


def test_a_second_stop_may_be_in_more_haste_and_not_in_less() -> None:
    at = started(RestartPolicy())
    assert at.take(ChildEvent(Happened.STOP, grace_s=60.0)) == [Action.TERM]
    at.take(ChildEvent(Happened.STOP, grace_s=1.0))
    assert at.child.due_s == at.now_s + 1.0
    at.take(ChildEvent(Happened.STOP, grace_s=60.0))
    assert at.child.due_s == at.now_s + 1.0
    assert at.take(ChildEvent(Happened.DUE)) == [Action.KILL]
    for _ in range(3):
        assert at.child.state is ChildState.KILLING
        assert at.child.due_s == at.now_s + KILL_AGAIN_S
        assert at.take(ChildEvent(Happened.DUE)) == [Action.KILL], "the kernel may hold it"


def test_an_end_that_is_excused_is_not_counted_whenever_that_is_known() -> None:
    at = started(RestartPolicy(exits_max=2))
    for early in (True, False) * 10:
        if early:
            at.child.excuse(at.last_pid, at.now_s)
        at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
        if not early:
            at.child.excuse(at.last_pid, at.now_s)
            at.child.excuse(at.last_pid, at.now_s)  # of two rows
        assert at.child.state is ChildState.BACKOFF
        again(at)


def test_one_that_is_held_and_excused_is_started_soon_and_told_so() -> None:
    at = started(RestartPolicy(exits_max=1))
    at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
    assert at.child.state is ChildState.HELD
    (notice,) = at.child.excuse(at.last_pid, at.now_s)
    assert notice.kind is NoticeKind.RESTARTING
    assert at.child.state is ChildState.BACKOFF
    assert at.child.again_s(at.now_s) <= 0.1


def test_an_excuse_does_not_put_off_a_start() -> None:
    at = started(RestartPolicy(exits_max=9, at_once=1))
    at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
    assert at.child.again_s(at.now_s) == 0.0
    at.child.excuse(at.last_pid, at.now_s)
    assert at.child.again_s(at.now_s) == 0.0


def test_the_excuse_of_one_process_is_none_of_the_next_with_its_number() -> None:
    """The process of a container has the number 1 each time."""
    at = started(RestartPolicy(exits_max=1))
    at.child.excuse(at.last_pid, at.now_s)
    at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
    assert at.child.state is ChildState.BACKOFF
    at.last_pid -= 1
    again(at)
    at.take(ChildEvent(Happened.ENDED, end=ENDS[1]))
    assert at.child.state is ChildState.HELD


@pytest.mark.parametrize("exits_max", [0, 1, 5])
def test_the_end_of_what_the_server_itself_provides_is_never_counted(exits_max: int) -> None:
    """A fork server that ends, or an error of the supervisor, is no exit of the child."""
    child = Child(RestartPolicy(exits_max=exits_max), Spacing())
    child.step(ChildEvent(Happened.TURN), 0.0)
    for number in range(20):
        child.step(ChildEvent(Happened.STARTED, pid=number + 1), float(number))
        child.step(ChildEvent(Happened.ENDED, end=End(None, "lost", own=True)), number + 0.1)
        assert child.state is ChildState.BACKOFF
        assert 0 < child.again_s(number + 0.1) <= RestartPolicy().own_s_max
        child.step(ChildEvent(Happened.DUE), number + 0.9)
