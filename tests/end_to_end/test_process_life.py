"""The server's own process: close with queries in flight, fork, interpreter exit, SIGTERM,
Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import clipper
from clipper.errors import ForkedProcess, ShuttingDown
from tests.memory_container import wait_until
from tests.processes import Program
from tests.signals import has_ended
from tests.sizes import sized
from tests.threads import join

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


def slow(xs):
    time.sleep(0.5)
    return xs.sum(axis=1)


def run(script, *arguments, **options):
    words = [
        sys.executable,
        "-X",
        "faulthandler",
        "-W",
        "error",
        "-c",
        textwrap.dedent(script),
        *arguments,
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


# -- close


def test_close_lets_what_is_in_flight_finish():
    server = clipper.start(drain_s=20)
    model = server.deploy("m", slow, input="f64[4]", cache=False)
    futures = [model.predict(ROW + i, slo_ms=30_000) for i in range(10)]
    server.close()
    assert [future.result(0) for future in futures] == [6.0 + 4 * i for i in range(10)]


def test_close_ends_the_rest_and_refuses_new_ones():
    server = clipper.start(drain_s=0)
    model = server.deploy("m", slow, input="f64[4]", cache=False)
    app = server.app("a", models=["m"], slo_ms=30_000, default=-1)
    futures = [model.predict(ROW + i, slo_ms=30_000) for i in range(10)]
    answer, done = app.predict(ROW), []
    futures[0].add_done_callback(done.append)
    server.close()
    assert all(future.done() for future in futures)
    ended = [future.exception(0) for future in futures]
    assert all(
        error is None or isinstance(error, (ShuttingDown, clipper.errors.ReplicaLost))
        for error in ended
    )
    assert any(isinstance(error, ShuttingDown) for error in ended)
    assert answer.result(0).is_default
    wait_until(lambda: done == futures[:1])
    with pytest.raises(ShuttingDown):
        model.predict(ROW).result(0)
    for act in (
        lambda: app.predict(ROW),
        lambda: server.deploy("n", total),
        lambda: server.app("b"),
        lambda: server.scale("m", 2),
    ):
        with pytest.raises(ShuttingDown, match=r"closed.*clipper\.start"):
            act()
    server.close()  # twice is once
    assert server.stats()["issued"] == server.stats()["answered"]


def test_while_it_closes_it_takes_nothing_new(tmp_path):
    gate = tmp_path / "gate"

    def waits(xs):
        while not gate.exists():
            time.sleep(0.005)
        return xs.sum(axis=1)

    server = clipper.start(drain_s=60)
    model = server.deploy("m", waits, input="f64[4]", cache=False, warmup=False)
    future = model.predict(ROW, slo_ms=60_000)
    closing = threading.Thread(target=server.close)
    closing.start()
    refused = wait_until(lambda: (tried := model.predict(ROW + 1, slo_ms=60_000)).done() and tried)
    assert not future.done()
    assert isinstance(refused.exception(0), ShuttingDown)
    gate.touch()
    join(closing)
    assert future.result(0) == 6.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_request_that_arrives_in_pieces_while_the_server_closes_is_answered(workers, monkeypatch):
    refusing = threading.Event()
    with clipper.start(
        drain_s=20, http={"address": "127.0.0.1:0", "workers": workers}, warmup=False
    ) as server:
        server.deploy("m", total, input="f64[4]")
        server.app("a", models=["m"], slo_ms=20_000, default=-1)
        host, _, port = server.http_address.rpartition(":")
        body = b'{"input": [0, 1, 2, 3]}'
        head = b"POST /api/a/predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection((host, int(port)), 30) as line:
            line.sendall(head % len(body) + body)
            while b"}" not in line.recv(4096):
                pass  # now the connection is where it stays
            body = body.replace(b"0", b"1")  # it is not in the cache
            expects = head.replace(b"Host", b"Expect: 100-continue\r\nHost")
            line.sendall(expects % len(body) + body[:5])
            assert b"100 Continue" in line.recv(4096)
            refuse_new = server._engines.refuse_new
            monkeypatch.setattr(
                server._engines, "refuse_new", lambda: (refuse_new(), refusing.set())
            )
            closing = threading.Thread(target=server.close)
            closing.start()
            wait_until(lambda: refused(host, int(port)), "no new connections")
            assert not refusing.wait(0.5), "a query is on its way"
            line.sendall(body[5:])
            reply = b"".join(iter(lambda: line.recv(4096), b""))
        join(closing)
    assert b"200 OK" in reply
    assert b'"output":7.0' in reply.replace(b" ", b""), reply


def refused(host, port):
    try:
        socket.create_connection((host, port), 1).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # the listener was closed meanwhile
        return False
    return False


def test_close_wakes_waiters():
    server = clipper.start(drain_s=0)
    model = server.deploy("m", slow, input="f64[4]", cache=False)
    ended, ready = [], threading.Barrier(3)

    def wait():
        future = model.predict(ROW, slo_ms=50_000)
        ready.wait(60)
        ended.append(future.exception(20))

    async def await_it():
        future = model.predict(ROW + 1, slo_ms=50_000)
        ready.wait(60)
        try:
            ended.append(await future)
        except clipper.ClipperError as error:
            ended.append(error)

    threads = [
        threading.Thread(target=wait),
        threading.Thread(target=lambda: asyncio.run(await_it())),
    ]
    for thread in threads:
        thread.start()
    ready.wait(60)
    server.close()
    for thread in threads:
        join(thread)
    assert len(ended) == 2


def test_many_servers_one_after_another_leave_nothing():
    def open_fds():
        return len(os.listdir("/proc/self/fd"))

    for i in range(12):
        with clipper.start() as server:
            assert server.stats()["issued"] == 0
        if i == 1:
            before = open_fds()
    import gc

    del server
    gc.collect()
    assert open_fds() <= before


def test_two_servers_side_by_side():
    with clipper.start() as one, clipper.start() as two:
        first = one.deploy("m", lambda xs: xs[:, 0] * 0 + 1, input="f64[4]")
        second = two.deploy("m", lambda xs: xs[:, 0] * 0 + 2, input="f64[4]")
        assert (first.predict(ROW).result(60), second.predict(ROW).result(60)) == (1, 2)
        one.close()
        assert second.predict(ROW + 1).result(60) == 2


# -- fork


def test_fork(server, deploy, app):
    """New queries and those in flight raise ForkedProcess at once in the child; the parent does not
    notice."""
    model = deploy(slow, input="f64[4]", cache=False)
    handle = app(model, slo_ms=20_000, default=-1)
    in_flight, answer = model.predict(ROW, slo_ms=20_000), handle.predict(ROW + 1)

    async def awaits(future):
        return await future

    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a call that never returns must not be the end of the tests
        code = 1
        try:
            for act in (
                lambda: in_flight.result(),
                lambda: answer.result(),
                lambda: model.predict(ROW).result(),
                lambda: handle.predict(ROW).result(),
                lambda: model.predict_many(np.ones((3, 4))).result(),
                lambda: asyncio.run(awaits(in_flight)),
                lambda: asyncio.run(awaits(model.predict(ROW))),
                lambda: in_flight.add_done_callback(print),
            ):
                with pytest.raises(ForkedProcess):
                    act()
            server.close()  # does nothing here
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert in_flight.result(20) == 6.0
    assert answer.result(20).output == 10.0
    assert model.predict(ROW, slo_ms=20_000).result(20) == 6.0


def test_a_server_of_its_own_in_the_child(server):
    done = run("""
        import os, numpy as np, clipper
        server = clipper.start()
        server.deploy("m", lambda xs: xs.sum(axis=1), input="f64[4]")
        child = os.fork()
        if child == 0:
            with clipper.start() as mine:
                mine.deploy("m", lambda xs: xs.sum(axis=1) * 2, input="f64[4]")
                assert mine.model("m").predict(np.ones(4), slo_ms=9000).result(60) == 8.0
            raise SystemExit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert server.model("m").predict(np.ones(4), slo_ms=9000).result(60) == 4.0
        server.close()
        """)
    assert (done.returncode, done.stderr) == (0, "")


# -- the interpreter ends

EXIT = """
import numpy as np, clipper, sys
server = clipper.start(drain_s=0.05, heartbeat_ms=100)
def slow(xs):
    import time
    time.sleep(0.3)
    return xs.sum(axis=1)
model = server.deploy("m", slow, input="f64[4]", cache=False, replicas=1)
app = server.app("a", models=["m"], slo_ms=20_000, default=-1)
futures = [model.predict(np.ones(4) * i, slo_ms=20_000) for i in range(50)]
answers = [app.predict(np.ones(4) * i) for i in range(50)]
futures[0].add_done_callback(lambda future: None)
if sys.argv[1] == "keep":
    import builtins
    builtins.kept = server, futures, answers  # the interpreter tears everything down in an order of its own
elif sys.argv[1] == "raise":
    raise SystemExit(0)
elif sys.argv[1] == "drop":
    del server, model, app, futures, answers
"""  # noqa: E501


@pytest.mark.parametrize("how", ["keep", "raise", "drop", "fall"])
def test_interpreter_exit_with_queries_in_flight(how):
    """Run twice each, five times in the full tier: exit code 0, no hang, no output."""
    count = sized(2, 5)
    words = [sys.executable, "-W", "error", "-c", EXIT, how]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Program(*words)) for _ in range(count)]
        assert [(process.wait(), process.output) for process in running] == [(0, "")] * count


def test_a_thread_that_waits_at_exit():
    done = run("""
        import threading, numpy as np, clipper
        server = clipper.start(drain_s=0.05)
        def slow(xs):
            import time
            time.sleep(2)
            return xs.sum(axis=1)
        model = server.deploy("m", slow, input="f64[4]", cache=False)
        def wait():
            model.predict(np.ones(4), slo_ms=50_000).exception()
        threading.Thread(target=wait, daemon=True).start()
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


SIGNALLED = """
import json, signal, sys, time, numpy as np, clipper
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored
server = clipper.start(drain_s=0.2)
if sys.argv[1] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
model = server.deploy("m", lambda xs: xs.sum(axis=1), input="f64[4]", replicas=2, cache=False)
print(json.dumps([row["pid"] for row in server.stats()["models"]["m:1"]["replicas"]]), flush=True)
while True:
    model.predict(np.ones(4)).result()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("number", "how", "code"),
    [
        (signal.SIGTERM, "plain", -signal.SIGTERM),
        (signal.SIGTERM, "handled", 0),
        (signal.SIGINT, "plain", -signal.SIGINT),
        (signal.SIGKILL, "plain", -signal.SIGKILL),
    ],
)
def test_a_signal_ends_the_server_and_its_containers(number, how, code):
    import json

    with Program(sys.executable, "-c", SIGNALLED, how) as process:
        pids = json.loads(process.line())
        os.kill(process.pid, number)
        wait_until(lambda: all(has_ended(pid) for pid in pids))
        assert process.wait() == code, process.output
    assert "Fatal" not in process.output
    wait_until(lambda: all(has_ended(pid) for pid in pids))


@pytest.fixture
def ctrl_c():
    """Set SIGINT as at a terminal: a shell that starts tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_handled_while_waiting(deploy):
    model = deploy(slow, input="f64[4]", cache=False)
    future = model.predict(ROW, slo_ms=20_000)
    timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))

    def wait():
        timer.start()
        future.result(20)
        # on a busy machine the answer may be first
        join(timer)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert model.predict(ROW, slo_ms=20_000).result(20) == 6.0
