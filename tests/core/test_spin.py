"""Tests of clipper_core.runtime.spin: when to poll, compared with a simple model; and a reader of
sockets that polls, compared with one that does not."""

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper_core.runtime.spin import Receiver, SpinPolicy

SPIN_US, GAP_US, TRIAL, SCORE_MAX = 50, 20, 64, 16
Pair = tuple[socket.socket, socket.socket]


class Twin:
    def __init__(self) -> None:
        self.score = self.unasked = 0
        self.polled = self.begun = 0

    def begin(self, now: int) -> bool:
        if self.score < 0:
            self.unasked += 1
            if self.unasked < TRIAL:
                return False
            self.unasked = 0
        self.begun = self.polled = now
        return True

    def on(self, now: int) -> bool:
        late, self.polled = now - self.polled > GAP_US, now
        if not late and now - self.begun < SPIN_US:
            return True
        self.score = max(-1, (max(self.score, 0) // 2 if late else self.score) - 1)
        return False

    def paid(self) -> None:
        self.score = min(SCORE_MAX, self.score + 1)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 25)), max_size=300))
def test_polling_is_done_while_it_pays(policy: list[tuple[int, int]]) -> None:
    """Each spell has a number of polls that find nothing before one finds something, and a time
    between them."""
    ours, twin, now = SpinPolicy(SPIN_US), Twin(), 1_000
    for polls, apart_us in policy:
        begun = ours.begin(now)
        assert begun == twin.begin(now)
        while begun and polls:
            now, polls = now + apart_us, polls - 1
            begun = ours.on(now)
            assert begun == twin.on(now)
        if begun:
            ours.paid()
            twin.paid()
        assert ours.score == twin.score
        now += 100


def test_what_does_not_pay_is_seldom_tried() -> None:
    policy, begun = SpinPolicy(SPIN_US), 0
    for turn in range(100 * TRIAL + 1):
        if policy.begin(turn * 1_000):
            begun += 1
            assert not policy.on(turn * 1_000 + SPIN_US)
    assert begun == 101  # the first, and then one in so many


def test_no_spin_is_started_for_no_time() -> None:
    assert not any(SpinPolicy(0).begin(turn) for turn in range(2 * TRIAL))


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


@pytest.mark.parametrize("spin_us", [0, SPIN_US, 1_000_000])
def test_all_is_read_however_it_comes(pair: Pair, spin_us: int) -> None:
    ours, theirs = pair
    receiver, whole = Receiver(spin_us=spin_us), os.urandom(1 << 20)

    def send() -> None:
        at = 0
        for size in (1, 63, 4096, 100_000, len(whole)):
            theirs.sendall(whole[at : at + size])
            at += size
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    got = bytearray()
    for size in (0, 1, 64, 1 << 19):
        into = bytearray(size)
        assert receiver.fill(ours.fileno(), into)
        got += into
    rest = bytearray(len(whole) - len(got))
    assert receiver.fill(ours.fileno(), memoryview(rest))
    assert got + rest == whole
    assert not receiver.fill(ours.fileno(), bytearray(1))  # closed
    sender.join()


def test_polling_needs_several_cores(pair: Pair) -> None:
    ours, _ = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
    receiver, mine = Receiver(spin_us=SPIN_US), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        alone = Receiver(spin_us=SPIN_US)
    finally:
        os.sched_setaffinity(0, mine)
    for one in (receiver, alone):
        with pytest.raises(BlockingIOError):  # nothing comes
            one.fill(ours.fileno(), bytearray(1))
    assert alone.spins == 0
    assert receiver.spins == (len(mine) > 1)


@pytest.mark.parametrize("spin_us", [0, SPIN_US])
def test_its_errors_are_those_of_a_socket(pair: Pair, spin_us: int) -> None:
    ours, _ = pair
    receiver = Receiver(spin_us=spin_us)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
    with pytest.raises(BlockingIOError):
        receiver.fill(ours.fileno(), bytearray(1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        receiver.fill(-1, bytearray(1))
    with pytest.raises(BufferError):
        receiver.fill(ours.fileno(), b"to be written")


@pytest.mark.parametrize("spin_us", [0, SPIN_US])
def test_a_signal_is_received_while_it_waits(pair: Pair, spin_us: int) -> None:
    ours, theirs = pair
    signals: list[int] = []

    def on_signal(number: int, _: object) -> None:
        signals.append(number)
        theirs.sendall(b"went on")

    before = signal.signal(signal.SIGUSR1, on_signal)
    me = threading.get_ident()
    try:
        later = threading.Timer(0.01, signal.pthread_kill, [me, signal.SIGUSR1])
        later.start()
        into = bytearray(7)
        assert Receiver(spin_us=spin_us).fill(ours.fileno(), into)
        later.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signals == [signal.SIGUSR1]
    assert into == b"went on"
