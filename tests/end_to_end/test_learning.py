"""Feedback through the public API, real models and real kills."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, UnknownPrediction

ROW = np.array([3.0, 0.0])


def right(xs):
    return xs[:, 0].astype(int)


def wrong(xs):
    return (xs[:, 0].astype(int) + 1) % 10


def stray(xs):
    return (xs[:, 0].astype(int) + 5) % 10


@pytest.fixture
def models(deploy):
    return [deploy(model, input="f64[2]") for model in (wrong, stray, right)]


@pytest.mark.parametrize("policy", ["exp3", "squarecb(shadow=0.1)", "thompson", "exp4", "stacking"])
def test_a_policy_finds_the_model_that_is_right(models, app, policy):
    handle = app(*models, slo_ms=5000, default=-1, policy=policy)
    errors = []
    for i in range(400):
        x = np.array([i % 10, 0.0])
        answer = handle.predict(x, user=f"u{i % 3}").result(10)
        errors.append(answer.output != i % 10)
        assert handle.feedback(answer, label=i % 10)
    assert sum(errors[200:]) <= 20
    shares = handle.shares()
    assert max(shares, key=shares.get) == models[2].name
    assert handle.predict(ROW).result(10).confidence > 0.5


def test_feedback_counts_once(models, app):
    handle = app(*models, slo_ms=5000, policy="exp4")
    answers = [handle.predict(np.array([i, 0.0])).result(10) for i in range(10)]
    assert handle.feedback(answers[0].id, label=0)
    assert not handle.feedback(answers[0], correct=True)
    counted = handle.feedback_many([*answers, "n-1"], [*range(10), 1])
    assert (counted.counted, counted.duplicates, counted.unknown) == (9, 1, 1)


def test_feedback_with_the_input_itself(models, app):
    handle = app(*models, slo_ms=5000, policy="stacking")
    for i in range(60):
        assert handle.feedback(input=np.array([i % 10, 0.0]), label=i % 10)
    assert handle.predict(ROW).result(10).output == 3


def test_what_feedback_is_refused(models, app):
    handle, other = app(*models, policy="exp4", slo_ms=5000), app(*models, slo_ms=5000, policy="exp4")
    answer = handle.predict(ROW).result(10)
    with pytest.raises(UnknownPrediction, match="one of application"):
        other.feedback(answer, label=1)
    with pytest.raises(UnknownPrediction, match="no prediction 'x'"):
        handle.feedback("x", label=1)
    with pytest.raises(InvalidInput, match="one of label, correct and score"):
        handle.feedback(answer)
    with pytest.raises(InvalidInput, match="one of the two"):
        handle.feedback(answer, input=ROW, label=1)
    with pytest.raises(InvalidInput, match="one of the two"):
        handle.feedback(label=1)
    with pytest.raises(InvalidInput, match="2 predictions and 1 labels"):
        handle.feedback_many([answer, answer], [1])
    assert handle.feedback(answer, label=3), "what was refused is not counted"
    plain = app(*models, slo_ms=5000)
    with pytest.raises(InvalidInput, match=r"'ensemble' of application .* learns nothing"):
        plain.feedback(plain.predict(ROW).result(10), label=1)


TEACHER = """
import sys
import numpy as np
import clipper

def right(xs):
    return xs[:, 0].astype(int)

with clipper.start(state=sys.argv[1], feedback={"write_ms": 5}) as server:
    if "m" not in server.catalog.view.versions:
        server.deploy("m", right, input="f64[2]")
    app = server.app("a", models=["m"], policy="kl_ucb", slo_ms=30_000)
    answers = [app.predict(np.array([i % 10, 0.0])).result() for i in range(300)]
    assert not any(answer.is_default for answer in answers)
    for answer in answers:
        app.feedback(answer, label=answer.output, user="u")
        print("told", flush=True)
    sys.stdin.read()
"""


def taught(folder: Path, kill_after: int) -> int:
    """Feedbacks acknowledged by a server that is killed after so many of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", TEACHER, folder], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    told = 0
    while told < kill_after:
        assert process.stdout.readline().strip() == "told"
        told += 1
    process.send_signal(signal.SIGKILL)
    told += process.stdout.read().count("told\n")  # not communicate(): it would miss what readline() has read ahead
    process.communicate()
    return told


def test_acknowledged_feedback_survives_kills(tmp_path: Path):
    """One more than was acknowledged may be there: the one whose acknowledgement died with the process."""
    acknowledged = 0
    for kill_after in (1, 50, 111, 150):
        acknowledged += taught(tmp_path, kill_after)
    with clipper.start(state=str(tmp_path)) as server:
        server.app("a")
        learner = server._learning.states.learner("a", "kl_ucb", None, [clipper.VersionedModel("m", 1)])
        seen = learner.state(None).seen
    assert acknowledged <= seen <= acknowledged + 4
