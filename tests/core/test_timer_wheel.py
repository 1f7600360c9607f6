"""The timer wheel, compared with a list of (tick, ticket) that is searched from end to end."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipper_core.runtime.status import StatusError
from clipper_core.runtime.timer_wheel import TimerWheel, churn

NEVER = 2**64 - 1
TIME_MAX = 2**62
WORK_MAX = 16384


class SlowWheel:
    """A ticket fires at the first tick that starts at or after its deadline, or at once if that has
    passed."""

    def __init__(self, now_us: int, tick_us: int, entries_max: int) -> None:
        self.now_us = min(now_us, TIME_MAX)
        self.tick_us = 1 << (tick_us.bit_length() - 1)
        self.entries_max = entries_max
        self.held: list[tuple[int, int]] = []

    def insert(self, deadline_us: int, ticket: int) -> bool:
        if len(self.held) >= self.entries_max:
            return False
        deadline_us = min(deadline_us, TIME_MAX)
        self.held.append(
            (0 if deadline_us <= self.now_us else -(-deadline_us // self.tick_us), ticket)
        )
        return True

    def cancel(self, ticket: int) -> bool:
        before = len(self.held)
        self.held = [entry for entry in self.held if entry[1] != ticket]
        return len(self.held) < before

    def advance(self, now_us: int) -> list[int]:
        self.now_us = max(self.now_us, min(now_us, TIME_MAX))
        tick = self.now_us // self.tick_us
        fired = [ticket for due, ticket in self.held if due <= tick]
        self.held = [entry for entry in self.held if entry[0] > tick]
        return sorted(fired)

    def next_us(self) -> int:
        return max(min(self.held)[0] * self.tick_us, self.now_us) if self.held else NEVER


def drain(wheel: TimerWheel, now_us: int, due_max: int) -> list[int]:
    """Call the wheel as a loop does, with bounded calls, until no ticket is left that is due at
    this time."""
    fired: list[int] = []
    while True:
        due = wheel.step(now_us, due_max)
        assert len(due) <= due_max
        fired += due
        if len(due) < due_max and wheel.next_us() > now_us:
            return sorted(fired)


def pair(
    now_us: int = 0, tick_us: int = 64, entries_max: int = 1 << 20
) -> tuple[TimerWheel, SlowWheel]:
    return TimerWheel(now_us, tick_us, entries_max), SlowWheel(now_us, tick_us, entries_max)


def insert_both(wheel: TimerWheel, slow: SlowWheel, deadline_us: int, ticket: int) -> None:
    if slow.insert(deadline_us, ticket):
        wheel.insert(deadline_us, ticket)
    else:
        with pytest.raises(StatusError, match="entries_max"):
            wheel.insert(deadline_us, ticket)


def check_both(wheel: TimerWheel, slow: SlowWheel) -> None:
    assert len(wheel) == len(slow.held) <= wheel.entries <= slow.entries_max
    assert wheel.next_us() <= slow.next_us()
    assert (wheel.next_us() == NEVER) == (wheel.entries == 0)


# A span of time of any size: near a power of two more often than not, since that is where blocks
# end.
spans = st.one_of(
    st.integers(0, 40000),
    st.builds(
        lambda power, off: max((1 << power) + off, 0), st.integers(0, 62), st.integers(-130, 130)
    ),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), spans),
        st.tuples(st.just("insert_past"), spans),
        st.tuples(st.just("burst"), st.tuples(spans, st.integers(1, 70), st.integers(0, 5000))),
        st.tuples(st.just("cancel"), st.integers(0, 2**32)),
        st.tuples(st.just("cancel_all"), st.none()),
        st.tuples(st.just("advance"), spans),
        st.tuples(st.just("advance_to_next"), st.none()),
    ),
    max_size=40,
)


class Run:
    """Runs one sequence of operations on both wheels."""

    def __init__(self, now_us: int, tick_us: int, entries_max: int, due_max: int) -> None:
        self.wheel, self.slow = pair(now_us, tick_us, entries_max)
        self.due_max = due_max
        self.tickets = 0

    def add(self, deadline_us: int) -> None:
        self.tickets += 1
        insert_both(self.wheel, self.slow, min(deadline_us, NEVER), self.tickets)

    def advance(self, now_us: int) -> None:
        now_us = min(now_us, NEVER - 1)
        assert drain(self.wheel, now_us, self.due_max) == self.slow.advance(now_us)

    def insert(self, span: int) -> None:
        self.add(self.slow.now_us + span)

    def insert_past(self, span: int) -> None:
        self.add(max(self.slow.now_us - span, 0))

    def burst(self, shape: tuple[int, int, int]) -> None:
        span, n, step = shape
        for i in range(n):
            self.add(self.slow.now_us + span + i * step)

    def cancel(self, pick: int) -> None:
        ticket = pick % (self.tickets + 2)
        assert self.wheel.cancel(ticket) == self.slow.cancel(ticket)

    def cancel_all(self, _: None) -> None:
        for ticket in [ticket for _, ticket in self.slow.held]:
            assert self.wheel.cancel(ticket)
            assert self.slow.cancel(ticket)

    def advance_by(self, span: int) -> None:
        self.advance(self.slow.now_us + span)

    def advance_to_next(self, _: None) -> None:
        if self.wheel.entries:
            self.advance(self.wheel.next_us())


@given(
    spans,
    st.sampled_from([1, 2, 50, 64, 1000, 2**31]),
    st.sampled_from([1, 40, 200]),
    st.integers(1, 40),
    operations,
)
@example(
    2**62 + 5, 64, 40, 1, [("insert", 0), ("advance", 2**62), ("insert", 2**62), ("advance", 5)]
)
@example(
    255 * 64, 64, 200, 3, [("burst", (256 * 64, 70, 64)), ("advance", 64), ("advance", 255 * 64)]
)
@example(
    0, 1, 200, 1, [("insert", 2**62), ("insert", 2**61), ("advance", 2**61), ("advance", 2**61)]
)
@settings(max_examples=400, deadline=None)
def test_as_the_twin(
    now_us: int, tick_us: int, entries_max: int, due_max: int, ops: list[tuple[str, object]]
) -> None:
    run = Run(now_us, tick_us, entries_max, due_max)
    for name, argument in ops:
        getattr(run, "advance_by" if name == "advance" else name)(argument)
        check_both(run.wheel, run.slow)
    run.advance(NEVER - 1)
    assert len(run.wheel) == run.wheel.entries == 0


@pytest.mark.parametrize("seed", range(6))
def test_long_run_as_the_twin(seed: int) -> None:
    """Thousands of operations, so that levels fill, are entered late, and are moved ahead."""
    rng = random.Random(seed)
    wheel, slow = pair(rng.randrange(2**40), 64)
    for ticket in range(6000):
        if rng.random() < 0.9:
            insert_both(wheel, slow, slow.now_us + int(2 ** rng.uniform(0, 28 + 2 * seed)), ticket)
        if rng.random() < 0.5:
            victim = rng.randrange(ticket + 1)
            assert wheel.cancel(victim) == slow.cancel(victim)
        if rng.random() < 0.1:
            now_us = slow.now_us + int(2 ** rng.uniform(0, 20 + 2 * seed))
            assert drain(wheel, now_us, rng.choice([1, 7, 1024])) == slow.advance(now_us)
            check_both(wheel, slow)
    assert drain(wheel, NEVER - 1, 1024) == slow.advance(NEVER - 1)


@given(st.lists(spans, min_size=1, max_size=60), st.sampled_from([1, 64]))
@settings(deadline=None)
def test_a_loop_that_polls_until_next_us_is_never_early_and_never_late(
    deadlines: list[int], tick_us: int
) -> None:
    wheel, slow = pair(0, tick_us)
    for ticket, deadline_us in enumerate(deadlines):
        insert_both(wheel, slow, deadline_us, ticket)
    wakes = 0
    now_us = 0
    while wheel.entries:
        assert now_us <= wheel.next_us() <= slow.next_us()
        now_us = wheel.next_us()
        assert sorted(wheel.step(now_us, 1024)) == slow.advance(now_us)
        assert wheel.next_us() > now_us
        wakes += 1
    assert not slow.held
    assert wakes <= 16 * len(deadlines)


def test_never_early_and_less_than_a_tick_late() -> None:
    for deadline_us in range(1000, 1200):
        wheel = TimerWheel(0, 64)
        wheel.insert(deadline_us, 1)
        now_us = deadline_us - 1
        assert wheel.advance(now_us) == []
        while not wheel.advance(now_us):
            now_us += 1
        assert deadline_us <= now_us < deadline_us + 64


def test_the_tick_is_rounded_down_to_a_power_of_two() -> None:
    wheel = TimerWheel(0, 100)
    wheel.insert(65, 1)
    assert wheel.next_us() == 128


def test_the_time_never_goes_back() -> None:
    wheel = TimerWheel(1000)
    assert wheel.advance(5000) == []
    wheel.insert(4000, 7)
    assert wheel.next_us() <= 5000
    assert wheel.advance(10) == [7]


def test_fires_one_at_a_time_within_a_tick() -> None:
    wheel = TimerWheel(0)
    for ticket in range(100):
        wheel.insert(640, ticket)
    fired = []
    for left in range(100, 0, -1):
        assert wheel.next_us() <= 640
        assert len(wheel) == left
        due = wheel.step(640, 1)
        assert len(due) == 1
        fired += due
        if left == 50:
            wheel.insert(600, 1000)
            fired += wheel.step(640, 1)
    assert sorted(fired) == [*range(100), 1000]
    assert wheel.step(640, 1) == []
    assert wheel.next_us() == NEVER


@pytest.mark.parametrize("deadline_us", [20_000, 5_000_000, 40_000_000])
@pytest.mark.parametrize("cancel_every", [1, 2])
def test_one_call_does_bounded_work(deadline_us: int, cancel_every: int) -> None:
    """A hundred thousand timers of one deadline, all or half of them cancelled: no call meets more
    than its share."""
    wheel = TimerWheel(0)
    count = 100_000
    for ticket in range(count):
        wheel.insert(deadline_us, ticket)
    for ticket in range(0, count, cancel_every):
        wheel.cancel(ticket)
    calls = fired = 0
    while wheel.entries:
        before = wheel.entries
        assert calls == 0 or wheel.next_us() <= deadline_us + 64
        fired += len(wheel.step(deadline_us + 64, 1024))
        assert before - wheel.entries <= WORK_MAX
        calls += 1
    assert fired == count - count // cancel_every
    assert calls < 200


def test_what_a_call_leaves_keeps_next_us_at_the_present() -> None:
    """Time jumps to the start of a bucket; a hundred tickets that are due lie below forty thousand
    that only have to be moved."""
    wheel = TimerWheel(0)
    start_us = 4 * 65536 * 64
    for ticket in range(40_000):
        wheel.insert(start_us if ticket < 100 else start_us + 2_000_000, ticket)
    wheel.insert(2 * start_us, 40_000)
    fired: list[int] = []
    calls = 0
    while wheel.next_us() <= start_us:
        fired += wheel.step(start_us, 1024)
        calls += 1
    assert sorted(fired) == list(range(100))
    assert calls > 2


def test_a_crowd_seconds_ahead_is_moved_before_it_is_urgent() -> None:
    """Polled by `next_us`, a step at the deadline finds the tickets at the finest level: no call is
    spent on moving."""
    wheel = TimerWheel(0)
    # where a bucket of the third level begins: its entries are urgent as time enters it
    start_us = 4 * 65536 * 64
    for ticket in range(100_000):
        wheel.insert(start_us + ticket, ticket)
    fired: list[int] = []
    while wheel.entries:
        now_us = wheel.next_us()
        due = wheel.step(now_us, 1024)
        assert all(0 <= now_us - (start_us + ticket) < 64 for ticket in due)
        assert wheel.next_us() > now_us
        fired += due
    assert sorted(fired) == list(range(100_000))


def test_entries_max_makes_room_from_the_dead_and_only_from_them() -> None:
    wheel = TimerWheel(0, 64, 100)
    for ticket in range(100):
        wheel.insert(1000 * ticket, ticket)
    with pytest.raises(StatusError, match="entries_max"):
        wheel.insert(5, 1000)
    assert wheel.entries == len(wheel) == 100
    assert not wheel.cancel(1000)
    assert wheel.cancel(37)
    wheel.insert(5, 1001)
    assert wheel.entries == len(wheel) == 100
    in_order_of_deadlines = [0, 1001, *range(1, 37), *range(38, 100)]
    assert wheel.advance(100_000) == in_order_of_deadlines


@pytest.mark.parametrize("dead_share", [0.02, 0.5, 1.0])
def test_a_full_wheel_finds_dead_that_lie_anywhere(dead_share: float) -> None:
    """Beyond one sweep's reach an insert may be refused, but the hand moves on and no dead entry is
    missed."""
    rng = random.Random(5)
    entries_max = 20_000
    wheel = TimerWheel(0, 64, entries_max)
    for ticket in range(entries_max):
        wheel.insert(rng.choice([10_000, rng.randrange(10**6), rng.randrange(10**10)]), ticket)
    dead = rng.sample(range(entries_max), int(entries_max * dead_share))
    for ticket in dead:
        wheel.cancel(ticket)
    accepted = refused = 0
    while accepted < len(dead):
        try:
            wheel.insert(20_000_000_000, entries_max + accepted)
            accepted += 1
        except StatusError:
            refused += 1
    assert refused < 2 * (entries_max + 5000) // 400
    with pytest.raises(StatusError):
        wheel.insert(0, NEVER)
    expected = {*range(entries_max), *range(entries_max, entries_max + accepted)} - set(dead)
    assert sorted(wheel.advance(30_000_000_000)) == sorted(expected)


def test_no_room_at_all() -> None:
    wheel = TimerWheel(0, 64, 0)
    with pytest.raises(StatusError):
        wheel.insert(0, 1)
    assert wheel.advance(100) == []
    assert wheel.next_us() == NEVER


def test_bad_arguments() -> None:
    for tick_us in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="tick_us"):
            TimerWheel(0, tick_us)
    wheel = TimerWheel(0)
    wheel.insert(10, 1)
    with pytest.raises(ValueError, match="held already"):
        wheel.insert(10, 1)
    for due_max in (0, 1025):
        with pytest.raises(ValueError, match="due_max"):
            wheel.step(0, due_max)
    with pytest.raises(OverflowError):
        wheel.insert(-1, 2)


def test_a_steady_stream_fires_only_what_was_not_answered() -> None:
    assert churn(50_000, 1_000_000, 20_000, 5_000) == 0
    assert 50_000 - 20_000 - 64 <= churn(50_000, 1_000_000, 20_000, 30_000) <= 50_000 - 20_000
