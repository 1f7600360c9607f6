"""Batches that overlap: the real container process against a server that speaks docs/wire.md."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from container_sdk.tests import fake_server as fake

MODEL = '''
import numpy as np
from clipper_container import Model

class Overlapping(Model):
    """Each output is the number of batches that had begun when it was collected."""
    input = "f64[1]"

    def load(self):
        self.begun = 0

    def submit(self, inputs):
        if (inputs == -1).any():
            raise ValueError("not this row")
        self.begun += 1
        return inputs

    def collect(self, batch):
        if (batch == -2).any():
            raise ValueError("not that row")
        return np.full(len(batch), float(self.begun))

    def predict_batch(self, inputs):
        if (inputs < 0).any():
            raise ValueError(f"negative: {inputs.min()}")
        return inputs[:, 0]

class Slow(Overlapping):
    """A batch is done when the next has begun, or after ten seconds."""
    def submit(self, inputs):
        import time
        self.begun += 1
        return self.begun, time.monotonic()

    def is_done(self, batch):
        import time
        return self.begun > batch[0] or time.monotonic() - batch[1] > 10.0

    def collect(self, batch):
        return np.full(1, float(self.begun - batch[0]))
'''


@contextmanager
def serving(
    folder: Path, *options: str, target: str = "Overlapping"
) -> Iterator[tuple[fake.Peer, "subprocess.Popen[str]"]]:
    (folder / "overlapping.py").write_text(MODEL)
    server = fake.Server(folder)
    process = fake.start(
        f"overlapping:{target}", server.address, "--warmup", "off", *options, cwd=folder
    )
    peer = server.accept()
    try:
        peer.welcome()
        yield peer, process
    finally:
        process.kill()
        process.communicate()
        peer.close()
        server.close()


def batch(*values: float, id: int) -> bytes:
    return fake.fixed(np.array(values)[:, None], id=id)


def rows(reply: fake.Frame) -> list[Any]:
    assert reply.kind == fake.REPLY, reply.payload
    found: list[Any] = reply.parts()["rows"].tolist()
    return found


def test_a_batch_begins_before_the_one_before_it_ends_and_replies_keep_the_order(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as (peer, process):
        process.send_signal(signal.SIGSTOP)  # both are there when it goes on
        peer.sock.sendall(batch(1.0, 2.0, id=7) + batch(3.0, id=8))
        process.send_signal(signal.SIGCONT)
        first, second = peer.frame(), peer.frame()
        assert (first.id, rows(first)) == (7, [2.0, 2.0])
        assert (second.id, rows(second)) == (8, [2.0])
        assert rows(peer.request(batch(4.0, id=9))) == [3.0], "a batch alone is answered at once"


@pytest.mark.parametrize("bad", [-1.0, -2.0])
def test_a_batch_that_fails_is_reported_with_its_traceback_and_harms_no_other(
    tmp_path: Path, bad: float
) -> None:
    with serving(tmp_path) as (peer, process):
        process.send_signal(signal.SIGSTOP)
        peer.sock.sendall(batch(1.0, bad, id=1) + batch(2.0, id=2))
        process.send_signal(signal.SIGCONT)
        failure, reply = peer.frame(), peer.frame()
        assert (failure.kind, failure.id) == (fake.FAILURE, 1)
        assert f"ValueError: negative: {bad}" in failure.payload.decode()
        assert reply.id == 2
        assert len(rows(reply)) == 1


def test_with_retries_only_the_bad_row_fails(tmp_path: Path) -> None:
    with serving(tmp_path, "--retry-singly") as (peer, _):
        parts = peer.request(batch(5.0, -2.0, 6.0, id=1)).parts()
        assert parts["rows"].tolist() == [5.0, 0.0, 6.0]
        assert parts["status"] == [0, 1, 0]


def test_what_is_under_way_is_answered_before_the_goodbye(tmp_path: Path) -> None:
    with serving(tmp_path) as (peer, process):
        process.send_signal(signal.SIGSTOP)
        peer.sock.sendall(batch(1.0, id=1) + batch(2.0, id=2) + fake.frame(fake.GOODBYE))
        process.send_signal(signal.SIGCONT)
        assert [peer.frame().kind for _ in range(3)] == [fake.REPLY, fake.REPLY, fake.GOODBYE]
        assert process.wait(60) == 0


def test_a_batch_that_comes_while_one_is_computed_begins_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, target="Slow") as (peer, _):
        for id in range(1, 5):  # with pauses: each finds the one before under way
            peer.sock.sendall(batch(1.0, id=id))
            if id > 1:
                reply = peer.frame()
                assert (reply.id, rows(reply)) == (id - 1, [1.0])
