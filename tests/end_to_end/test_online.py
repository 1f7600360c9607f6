"""Models that learn while they serve: feedback reaches their containers, sessions travel, and
predictions never mind."""

import json

import numpy as np
import pytest

from clipper_container import Model, session_of
from tests.memory_container import wait_until

FEEDBACK_QUERY = np.array([-1.0, 0.0])
ROW = np.array([3.0, 4.0])


class Recorder(Model):
    """A model that answers 3. To QUESTION it answers all feedback that it got."""

    input = "f64[2]"

    def load(self):
        self.feedback = []

    def predict_batch(self, inputs):
        return [json.dumps(self.feedback) if row[0] == -1 else "3" for row in inputs]

    def correct(self, inputs, labels, sessions):
        self.feedback += [
            [row.tolist(), label, str(session)]
            for row, label, session in zip(inputs, labels, sessions, strict=True)
        ]

    def accuracy(self):
        return min(1.0, len(self.feedback) / 100)


class Failing(Recorder):
    def correct(self, inputs, labels, sessions):
        raise RuntimeError("I will not learn")

    def accuracy(self):
        return float("nan")


class Whose(Model):
    input = "f64[2]"
    sessions = True

    def predict_batch(self, inputs, sessions):
        return [str(session) for session in sessions]

    def correct(self, inputs, labels, sessions):
        raise RuntimeError(f"taught by {sessions.tolist()}")


def feedback_of(model):
    return json.loads(model.predict(FEEDBACK_QUERY, slo_ms=30_000).result(30))


@pytest.fixture
def recorder(deploy):
    return deploy(Recorder, cache=False)


def test_feedback_of_every_kind_reaches_the_container_once(server, recorder, app):
    handle = app(recorder, policy="stacking", slo_ms=30_000)
    first, second, third, fourth = [
        handle.predict(ROW + i, user=f"u{i}").result(30) for i in range(4)
    ]
    handle.feedback(first, label="7")
    handle.feedback(first, label="8")  # a duplicate
    handle.feedback_many([second, third.id], ["5", "6"])
    handle.feedback(fourth, correct=True)
    # says of no output that it is right
    handle.feedback(handle.predict(ROW).result(30), correct=False)
    handle.feedback(input=np.array([9.0, 9.0]), label="9")
    wait_until(lambda: len(feedback_of(recorder)) == 5)
    assert feedback_of(recorder) == [
        [[3.0, 4.0], "7", "0"],
        [[4.0, 5.0], "5", "0"],
        [[5.0, 6.0], "6", "0"],
        [[6.0, 7.0], "3", "0"],
        [[9.0, 9.0], "9", "0"],
    ]
    wait_until(lambda: server.stats()["models"][recorder.name]["accuracy"] == 0.05)
    row = server.stats()["models"][recorder.name]
    assert (
        row["replicas"][0]["feedback_sent"],
        row["replicas"][0]["learned"],
        row["feedback_dropped"],
    ) == (5, 5, 0)


def test_a_model_receives_feedback_under_the_default_policy(recorder, app):
    handle = app(recorder, slo_ms=30_000)
    answer = handle.predict(ROW).result(30)
    assert handle.feedback(answer, label="7")
    assert handle.feedback(input=ROW + 1, label="8")
    wait_until(lambda: len(feedback_of(recorder)) == 2)
    assert feedback_of(recorder) == [[[3.0, 4.0], "7", "0"], [[4.0, 5.0], "8", "0"]]


def test_feedback_has_the_input_as_it_was_at_the_query(recorder, app):
    handle = app(recorder, policy="stacking", slo_ms=30_000)
    x = ROW.copy()
    answer = handle.predict(x).result(30)
    x[:] = 0
    handle.feedback(answer, label="1")
    wait_until(lambda: feedback_of(recorder))
    assert feedback_of(recorder) == [[[3.0, 4.0], "1", "0"]]


def test_every_replica_receives_feedback(server, deploy, app):
    model = deploy(Recorder, cache=False, replicas=2)
    handle = app(model, policy="stacking", slo_ms=30_000)
    for i in range(10):
        handle.feedback(handle.predict(ROW + i).result(30), label=str(i))
    replicas = lambda: server.stats()["models"][model.name]["replicas"]  # noqa: E731
    wait_until(lambda: [replica["learned"] for replica in replicas()] == [10, 10])


def test_correct_that_raises_harms_no_prediction(server, deploy, app):
    model = deploy(Failing, cache=False)
    handle = app(model, policy="stacking", slo_ms=30_000)
    for _ in range(5):
        handle.feedback(handle.predict(ROW).result(30), label="1")
    wait_until(lambda: server.stats()["models"][model.name]["replicas"][0]["failed"] == 5)
    assert handle.predict(ROW).result(30).output == "3"
    for said in (
        "RuntimeError: I will not learn",
        "accuracy() returned nan; return a number from 0 to 1, or None",
    ):
        wait_until(lambda said=said: said in "\n".join(server.logs(model.name)), said)
    assert server.stats()["models"][model.name]["accuracy"] is None


def test_sessions_travel_and_key_the_cache(server, deploy, app):
    model, other = deploy(Whose), deploy(lambda xs: ["0"] * len(xs), input="f64[2]")
    handle = app(model, policy="stacking", slo_ms=30_000)
    for _ in range(2):
        futures = {user: handle.predict(ROW, user=user) for user in ("u1", "u2", None, "ü" * 300)}
        for user, future in futures.items():
            assert future.result(30).output == str(session_of(user or ""))
    assert handle.predict_many(ROW[None], user="u1").result(30).outputs[0] == str(session_of("u1"))
    assert server.stats()["models"][model.name]["evaluated"] in (4, 5), (
        "each session once; an array may come on its own"
    )
    handle.feedback(handle.predict(ROW, user="u1").result(30), label="1")
    handle.feedback(input=ROW, user="u2", label="1")
    # in one call of correct(), or in two
    numbers = [str(session_of(user)) for user in ("u1", "u2")]
    wait_until(lambda: all(number in "\n".join(server.logs(model.name)) for number in numbers))
    plain = app(other, slo_ms=30_000)
    assert [plain.predict(ROW, user=f"u{i}").result(30).output for i in range(3)] == ["0"] * 3
    assert server.stats()["models"][other.name]["evaluated"] == 1, "who takes no sessions shares"


def test_a_model_gets_better_by_feedback(server, deploy, app):
    sklearn = pytest.importorskip("sklearn.linear_model")
    from sklearn.datasets import load_digits

    class Online(Model):
        input = "f64[64]"

        def load(self):
            self.sgd = sklearn.SGDClassifier(random_state=0)
            self.sgd.partial_fit(np.zeros((1, 64)), [0], classes=range(10))
            self.hits = []

        def predict_batch(self, inputs):
            return self.sgd.predict(inputs)

        def correct(self, inputs, labels, sessions):
            self.hits = [*self.hits, *(self.sgd.predict(inputs) == labels)][-200:]
            self.sgd.partial_fit(inputs, labels)

        def accuracy(self):
            return float(np.mean(self.hits)) if self.hits else None

    xs, ys = load_digits(return_X_y=True)
    model = deploy(Online, cache=False)
    handle = app(model, policy="stacking", slo_ms=30_000)
    before = (model.predict_many(xs[1200:]).result(30) == ys[1200:]).mean()
    for at in range(0, 1200, 300):
        answers = [handle.predict(x).result(30) for x in xs[at : at + 300]]
        assert handle.feedback_many(answers, ys[at : at + 300]).counted == 300
        wait_until(
            lambda at=at: server.stats()["models"][model.name]["replicas"][0]["learned"] == at + 300
        )
    after = (model.predict_many(xs[1200:]).result(30) == ys[1200:]).mean()
    assert before < 0.2 < 0.7 < after
    assert server.stats()["models"][model.name]["accuracy"] > 0.6
