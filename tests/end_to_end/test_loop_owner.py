"""A single caller that waits runs the loop itself: with a real container, and with signals, forks
and closes meanwhile."""

import ctypes
import os
import select
import signal
import threading
import time

import numpy as np
import pytest

from clipper.errors import DeadlineExceeded, ForkedProcess
from clipper_core.results.future import MailboxReader
from clipper_core.runtime.status import Status
from tests import signals
from tests.memory_container import wait_until
from tests.threads import join

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


@pytest.fixture
def model(deploy):
    return deploy(total, input="f64[4]", cache=False)


@pytest.fixture
def owner_turns(server):
    """Return how often a caller has taken the loop's place so far: once to send, once more to
    wait."""
    return lambda: server.stats()["loop"]["led"]


@pytest.fixture
def make_a_caller_own_the_loop(owner_turns):
    """Send queries one by one until the loop thread leaves the loop to this thread."""

    def ask(model):
        def sent_and_waited():
            before = owner_turns()
            assert model.predict(ROW, slo_ms=20_000).result(30) == 6.0
            return owner_turns() >= before + 2

        wait_until(sent_and_waited, "a caller that leads")

    return ask


@pytest.fixture
def freeze(server, model):
    """Yield a function that stops the model's container until `freeze.end()` or the end of the
    test."""
    pid = server.stats()["models"][model.name]["replicas"][0]["pid"]

    class Freeze:
        def __call__(self):
            signals.freeze(pid)

        def end(self):
            os.kill(pid, signal.SIGCONT)

    freeze = Freeze()
    yield freeze
    freeze.end()


def test_the_deadline_of_a_caller_that_owns_the_loop(
    model, make_a_caller_own_the_loop, freeze, owner_turns
):
    def owned_until_the_deadline():
        """Return whether the caller owned the loop until the deadline. Not always so: on a busy
        machine the loop thread may be back between the query and the wait."""
        make_a_caller_own_the_loop(model)
        freeze()
        before = owner_turns()
        with pytest.raises(DeadlineExceeded):
            model.predict(ROW, slo_ms=60).result()
        freeze.end()
        return owner_turns() >= before + 2

    wait_until(owned_until_the_deadline)


@pytest.mark.parametrize("kind", [signal.SIGALRM, signal.SIGINT])
def test_a_signal_is_handled_by_a_thread_that_owns_the_loop(
    model, make_a_caller_own_the_loop, freeze, kind
):
    class SignalRaised(Exception):
        pass

    def on_signal(number, frame):
        raise SignalRaised

    make_a_caller_own_the_loop(model)
    freeze()
    waits = threading.Event()

    def send():
        waits.wait()
        time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, kind)

    def wait():
        waits.set()
        future.result()

    sender = threading.Thread(target=send)
    sender.start()
    handler = signal.signal(kind, on_signal)
    future = model.predict(ROW, slo_ms=3000)
    try:
        with pytest.raises(SignalRaised):
            wait()
    finally:
        waits.set()
        join(sender)
        signal.signal(kind, handler)
    assert not future.done()
    wait_until(future.done)  # whoever runs the loop now: the lead was given back
    assert future.status() is Status.DEADLINE


def test_a_fork_while_a_caller_owns_the_loop(
    model, make_a_caller_own_the_loop, freeze, owner_turns
):
    futures, ended = [], []

    def query_and_wait():
        futures.append(model.predict(ROW, slo_ms=2000))
        ended.append(futures[-1].exception())

    def owns_the_loop():
        """Return the waiting thread if it owns the loop, else None: on a busy machine the loop
        thread may be back between the query and the wait."""
        make_a_caller_own_the_loop(model)
        freeze()
        before, thread = owner_turns(), threading.Thread(target=query_and_wait)
        thread.start()
        wait_until(lambda: owner_turns() >= before + 2 or ended)
        if not ended:
            return thread
        freeze.end()
        ended.clear()
        return None

    thread = wait_until(owns_the_loop)
    future = futures[-1]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            for query in (future, model.predict(ROW), model.predict_many(np.ones((9, 4)))):
                with pytest.raises(ForkedProcess):
                    query.result()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    thread.join(20)
    assert [type(error) for error in ended] == [DeadlineExceeded]


@pytest.mark.parametrize("parked", [False, True])
def test_answers_come_while_the_gil_is_held(
    server, deploy, model, make_a_caller_own_the_loop, parked
):
    """The main thread keeps the GIL in a C call that only an answer can end: if the loop thread
    took the GIL even once for the answer, the call would run into its time limit."""
    other = deploy(total, input="f64[4]", cache=False)
    assert other.predict(ROW, slo_ms=20_000).result(30) == 6.0
    if parked:
        make_a_caller_own_the_loop(model)
    libc = ctypes.PyDLL(None)  # PyDLL: a call keeps the GIL
    mailbox = MailboxReader(next(iter(server._engines)).completion)
    wanted = (ctypes.c_int32 * 2)(mailbox.fd, select.POLLIN)
    before = server.stats()["loop"]
    futures = [other.predict(ROW + i, slo_ms=20_000) for i in range(100)]
    registered = sum(mailbox.add(future, None) for future in futures)
    drained = 0
    while drained < registered:
        assert libc.poll(wanted, 1, 15_000) == 1
        drained += len(mailbox.drain())
    after = server.stats()["loop"]
    assert all(future.done() for future in futures)
    assert after["steps"] > before["steps"]
    assert (
        after["mailbox_writes"] - before["mailbox_writes"] <= after["batches"] - before["batches"]
    )
