"""A container whose model learns: feedback when there is time for it, the accuracy that the model
reports, and sessions."""

import struct
import textwrap
from contextlib import contextmanager

import numpy as np
import pytest

from clipper_container import Model, session_of
from clipper_container.model import as_model
from clipper_container.worker.feedback_queue import FEEDBACK_FRAMES_MAX, FeedbackQueue
from container_sdk.tests import fake_server as fake

FEEDBACK, ACCURACY, SESSIONS = 10, 11, 64
MODELS = """
from clipper_container import Model

class Pupil(Model):
    input = "f64[1]"

    def load(self):
        self.seen = []

    def predict_batch(self, inputs):
        return [f"{len(self.seen)} {self.seen}"] * len(inputs)

    def correct(self, inputs, labels, sessions):
        if labels[0] < 0:
            raise KeyError("no such label")
        self.seen += zip(inputs[:, 0].tolist(), labels.tolist(), sessions.tolist())

    def accuracy(self):
        return len(self.seen) / 8

class Guest(Model):
    sessions = True

    def predict_batch(self, inputs, sessions):
        return sessions + inputs[:, 0].astype("u8")

class Borrowed:
    def predict_batch(self, inputs):
        return inputs[:, 0]

    def correct(self, inputs, labels, sessions):
        raise ValueError("borrowed")

def whose(row, session):
    return float(row[0]) + session

whose.sessions = True
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    directory = tmp_path_factory.mktemp("code")
    (directory / "models.py").write_text(textwrap.dedent(MODELS))
    return directory


@contextmanager
def serving(tmp_path, code, target, *options, **welcome):
    server = fake.Server(tmp_path)
    process = fake.start(target, server.address, *options, cwd=code)
    try:
        peer = server.accept()
        peer.greeting = peer.welcome(**{"accuracy": True, "heartbeat_ms": 50, **welcome})
        peer.process = process
        yield peer
    finally:
        process.kill()
        if not process.stdout.closed:
            process.communicate()
        peer.close()
        server.close()


def rows(array, kind=fake.PREDICT, sessions=None, id=0):
    payload = fake.padded(array.tobytes()) + (
        b"" if sessions is None else struct.pack(f"<{len(sessions)}Q", *sessions)
    )
    flags = 0 if sessions is None else SESSIONS
    dtype = fake.NUMBERS[array.dtype.str.lstrip("<|")]
    return fake.frame(
        kind, payload, dtype=dtype, dims=array.shape[1:], rows=len(array), flags=flags, id=id
    )


def feedback(inputs, labels, sessions=None):
    inside = rows(np.array(inputs, "f8").reshape(-1, 1), sessions=sessions or [0] * len(inputs))
    return fake.frame(FEEDBACK, inside + rows(np.array(labels, "i8"), fake.REPLY))


def counts_of(frame):
    counts = struct.unpack("<QQ", frame.payload[:16])
    return (
        *counts,
        struct.unpack("<d", frame.payload[16:])[0] if len(frame.payload) > 16 else None,
    )


def ends(peer):
    """Return whether the container closes the connection and sends only statistics before that."""
    try:
        while peer.frame().kind == ACCURACY:
            pass
    except (EOFError, ConnectionResetError):
        return True
    return False


def next_counts(peer):
    frame = peer.frame()
    assert frame.kind == ACCURACY
    return counts_of(frame)


def test_feedback_is_taken_when_no_batch_waits(tmp_path, code):
    """Two frames of feedback and a batch come in one piece: the batch is answered by the model as
    it was."""
    with serving(tmp_path, code, "models:Pupil") as peer:
        assert (peer.greeting["corrects"], peer.greeting["sessions"]) == (True, False)
        assert next_counts(peer) == (0, 0, 0.0)
        batch = fake.fixed(np.ones((1, 1)), id=1)
        peer.sock.sendall(feedback([1, 2], [10, 20]) + feedback([3], [30], [7]) + batch)
        frames = [peer.frame()]
        while frames[-1].kind == ACCURACY:
            frames.append(peer.frame())
        assert frames[-1].parts()["rows"] == ["0 []"]
        while next_counts(peer) != (3, 0, 3 / 8):
            pass
        peer.sock.sendall(fake.fixed(np.ones((1, 1)), id=2))
        assert peer.frame().parts()["rows"] == ["3 [(1.0, 10, 0), (2.0, 20, 0), (3.0, 30, 7)]"]


def test_what_correct_raises_is_reported_and_counted_and_harms_nothing(tmp_path, code):
    with serving(tmp_path, code, "models:Pupil") as peer:
        assert next_counts(peer) == (0, 0, 0.0)
        peer.sock.sendall(feedback([1, 1], [-1, 5]) + feedback([4], [40]))
        while next_counts(peer) != (1, 2, 1 / 8):
            pass
        assert peer.request(fake.fixed(np.ones((1, 1)))).parts()["rows"] == ["1 [(4.0, 40, 0)]"]
        peer.process.kill()
        printed = peer.process.communicate()[0]
    assert "model 'svm': correct() failed on 2 rows:" in printed
    assert "KeyError: 'no such label'" in printed
    assert 'models.py", line' in printed


def test_a_server_that_knows_no_accuracy_is_sent_none(tmp_path, code):
    with serving(tmp_path, code, "models:Pupil", accuracy=False) as peer:
        for _ in range(4):
            assert peer.frame(heartbeats=True).kind == fake.HEARTBEAT
        assert peer.request(fake.fixed(np.ones((1, 1)))).parts()["rows"] == ["0 []"]


def test_an_object_that_is_no_model_of_ours_may_learn_too(tmp_path, code):
    with serving(tmp_path, code, "models:Borrowed") as peer:
        assert peer.greeting["corrects"]
        peer.sock.sendall(feedback([1], [1]))
        assert next_counts(peer) == (0, 1, None)


@pytest.mark.parametrize("flood", [b"", feedback([1], [1])[:-8] + bytes(8)])
def test_feedback_for_a_model_that_does_not_learn_or_that_is_none_closes(tmp_path, code, flood):
    target = "models:Guest" if not flood else "models:Pupil"
    broken = fake.frame(FEEDBACK, feedback([1], [1])[64:-8]) if flood else feedback([1], [1])
    with serving(tmp_path, code, target) as peer:
        peer.sock.sendall(broken)
        assert ends(peer)


def test_sessions_of_the_rows(tmp_path, code):
    with serving(tmp_path, code, "models:Guest") as peer:
        assert (peer.greeting["corrects"], peer.greeting["sessions"]) == (False, True)
        numbers = [session_of("u1"), 0, 2**63]
        peer.sock.sendall(rows(np.arange(3.0).reshape(3, 1), sessions=numbers, id=3))
        assert peer.frame().parts()["rows"].tolist() == [numbers[0], 1, 2**63 + 2]
        peer.sock.sendall(rows(np.arange(3.0).reshape(3, 1), id=4))
        assert peer.frame().parts()["rows"].tolist() == [0, 1, 2], "a server that knows no sessions"


def test_a_function_row_by_row_with_sessions(tmp_path, code):
    with serving(tmp_path, code, "models:whose", "--row-by-row") as peer:
        peer.sock.sendall(rows(np.array([[0.5], [1.0]]), sessions=[10, 20], id=3))
        assert peer.frame().parts()["rows"].tolist() == [10.5, 21.0]


# -- by itself


class Counting(Model):
    result: object = None

    def predict_batch(self, inputs):
        return inputs

    def correct(self, inputs, labels, sessions):
        self.last = labels.tolist()

    def accuracy(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def payload(label):
    return np.frombuffer(feedback([0, 0], [label, label])[64:], np.uint8)


def test_the_oldest_feedback_gives_way(capsys):
    model = Counting()
    queue = FeedbackQueue(model, "m", 1 << 20, 0.0)
    for label in range(FEEDBACK_FRAMES_MAX + 5):
        queue.add(payload(label))
    assert (len(queue), queue.failed, queue.learned) == (FEEDBACK_FRAMES_MAX, 10, 0)
    queue.run_one()
    assert model.last == [5, 5]
    assert capsys.readouterr().err.count("dropped 2 rows") == 3, (
        "at the first, the second, the fourth"
    )


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan"), "good", ValueError("none")])
def test_an_accuracy_that_is_none_is_not_sent(wrong, capsys):
    model = Counting()
    queue = FeedbackQueue(model, "m", 1 << 20, 0.0)
    assert queue.changed_accuracy() == []
    model.result = 0.5
    queue.add(payload(1))
    queue.run_one()
    assert struct.unpack("<QQd", queue.changed_accuracy()[1]) == (2, 0, 0.5)
    model.result = wrong
    queue.add(payload(1))
    queue.run_one()
    assert struct.unpack("<QQd", queue.changed_accuracy()[1]) == (4, 0, 0.5), (
        "the last that was one"
    )
    assert "accuracy()" in capsys.readouterr().err


def test_models_that_learn():
    assert Counting().corrects
    assert not as_model(lambda inputs: inputs).corrects
