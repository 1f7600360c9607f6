"""Feedback through the public API, real models and real kills."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import clipper
from bench.system.faults.durability import STORES, killed
from clipper.errors import InvalidInput, Overloaded, UnknownPrediction
from clipper_container import Scored
from tests.processes import Program

ROW = np.array([3.0, 0.0])


def right(xs):
    return xs[:, 0].astype(int)


def wrong(xs):
    return (xs[:, 0].astype(int) + 1) % 10


def stray(xs):
    return (xs[:, 0].astype(int) + 5) % 10


@pytest.fixture(scope="module")
def models(deploy_for_all):
    return [deploy_for_all(model, input="f64[2]") for model in (wrong, stray, right)]


@pytest.mark.parametrize(
    "policy", ["exp3", "squarecb(shadow=0.1)", "bandit", "thompson", "exp4", "stacking", "mixture"]
)
def test_a_policy_finds_the_model_that_is_right(models, app, policy):
    handle = app(*models, slo_ms=30_000, default=-1, policy=policy)
    errors = []
    for i in range(400):
        x = np.array([i % 10, 0.0])
        answer = handle.predict(x, user=f"u{i % 3}").result(60)
        errors.append(answer.output != i % 10)
        assert handle.feedback(answer, label=i % 10)
    assert sum(errors[200:]) <= 20
    shares = handle.shares()
    assert max(shares, key=shares.get) == models[2].name
    assert handle.predict(ROW).result(60).confidence > 0.5


def test_several_models_learn_by_default_and_one_does_not(models, app, server):
    handle, alone = app(*models, slo_ms=30_000), app(models[2], slo_ms=30_000)
    known = server.catalog.view.applications
    assert known[handle.name].policy == "mixture"
    assert known[alone.name].policy == "ensemble"
    first = handle.predict(ROW).result(60)
    assert first.confidence == pytest.approx(1 / 3)  # an equal vote of three that differ
    for i in range(60):
        answer = handle.predict(np.array([i % 10, 0.0])).result(60)
        assert handle.feedback(answer, label=i % 10)
    assert handle.predict(ROW).result(60).output == 3


@pytest.mark.parametrize("former", ["ensemble", "stacking", "squarecb"])
def test_what_a_former_policy_learned_is_no_error_for_the_next(models, tmp_path, former):
    settings = {"state": str(tmp_path), "feedback": {"write_ms": 5}}
    for policy in (former, "mixture", "mixture"):
        with clipper.start(**settings) as server:
            for name, model in (("one", wrong), ("two", right)):
                if name not in server.catalog.view.versions:
                    server.deploy(name, model, input="f64[2]")
            handle = server.app("a", models=["one", "two"], slo_ms=30_000, policy=policy)
            for i in range(20):
                answer = handle.predict(np.array([i % 10, 0.0])).result(60)
                assert handle.feedback(answer, label=i % 10)
            seen = handle._resolve("a").learner.state(None).seen if policy != "ensemble" else 0.0
    assert seen == 40.0


def doubtful(shift):
    """Return a model that is never right and gives the right label nearly the highest
    probability."""

    def predict(xs):
        labels = xs[:, 0].astype(int)
        probabilities = [{f"p:{(x + shift) % 10}": 0.5, f"p:{x}": 0.4} for x in labels.tolist()]
        return Scored((labels + shift) % 10, np.full(len(xs), 0.5), probabilities)

    return predict


@pytest.mark.parametrize("policy", ["mixture", "stacking"])
def test_class_probabilities_are_learned_and_survive_a_restart(tmp_path, policy):
    def predict(handle, i, user=None):
        return handle.predict(np.array([i % 10, 0.0]), user=user).result(60)

    with clipper.start(state=str(tmp_path)) as server:
        for shift in (1, 2, 3):
            server.deploy(f"m{shift}", doubtful(shift), input="f64[2]")
        handle = server.app("a", models=["m1", "m2", "m3"], slo_ms=30_000, policy=policy)
        for i in range(40):
            assert handle.feedback(predict(handle, i, "u" if i % 2 else None), label=i % 10)
        answers = [predict(handle, i) for i in range(20)]
        assert handle.feedback_many(answers, [i % 10 for i in range(20)]).counted == 20
        assert handle.feedback(input=np.array([4.0, 0.0]), label=4)
        assert [predict(handle, i).output for i in range(10)] == list(range(10))
        assert predict(handle, 3, "u").output == 3
        learner = handle._resolve("a").learner
        before = [policy_state(learner, user) for user in (None, "u")]
    with clipper.start(state=str(tmp_path)) as server:
        handle = server.app("a", models=["m1", "m2", "m3"], slo_ms=30_000, policy=policy)
        learner = handle._resolve("a").learner
        assert [policy_state(learner, user) for user in (None, "u")] == before
        assert predict(handle, 7).output == 7


def policy_state(learner, user):
    return learner.policy.encode(learner.state(user))


def test_feedback_counts_once(models, app):
    handle = app(*models, slo_ms=30_000, policy="exp4")
    answers = [handle.predict(np.array([i, 0.0])).result(60) for i in range(10)]
    assert handle.feedback(answers[0].id, label=0)
    assert not handle.feedback(answers[0], correct=True)
    counted = handle.feedback_many([*answers, "n-1"], [*range(10), 1])
    assert (counted.counted, counted.duplicates, counted.unknown) == (9, 1, 1)


def test_feedback_with_the_input_itself(models, app):
    handle = app(*models, slo_ms=30_000, policy="stacking")
    for i in range(60):
        assert handle.feedback(input=np.array([i % 10, 0.0]), label=i % 10)
    assert handle.predict(ROW).result(60).output == 3


def named(xs):
    return [["no", "yes", "maybe"][int(x[0]) % 3] for x in xs]


def always(xs):
    return ["yes"] * len(xs)


def halves(xs):
    return xs[:, 0] / 2


def thirds(xs):
    return xs[:, 0] / 3


def learned(handle):
    learner = handle._resolve(handle.name).learner
    return learner.policy.encode(learner.state("u"))


@pytest.fixture(scope="module")
def models_by_kind(models, deploy_for_all):
    texts, floats = (
        [deploy_for_all(model, input="f64[2]") for model in pair]
        for pair in ((named, always), (halves, thirds))
    )
    return {"ints": models, "texts": texts, "floats": floats}


@pytest.mark.parametrize("policy", ["exp4", "logodds", "stacking", "mixture"])
@pytest.mark.parametrize("kind", ["ints", "texts", "floats"])
def test_feedback_for_an_array_equals_feedback_for_its_rows(models_by_kind, app, policy, kind):
    """Feedback by an array, by a list and one by one gives the same state, bit for bit."""
    linked = models_by_kind[kind]
    xs = np.array([[i % 10, i] for i in range(100)], float)
    labels = {
        "ints": [int(x) for x in xs[:, 0]],
        "texts": [["no", "yes", "maybe"][int(x) % 3] for x in xs[:, 0]],
        "floats": [float(x) / 2 for x in xs[:, 0]],
    }[kind]
    array, many, single = (app(*linked, slo_ms=30_000, policy=policy) for _ in range(3))
    answers = array.predict_many(xs, user="u").result(60)
    odd = np.arange(1, 100, 2)
    order = [*odd.tolist(), *range(0, 100, 2)]
    assert array.feedback_many(answers, np.array(labels)[odd], rows=odd).counted == 50
    counted = array.feedback_many(answers, labels)
    assert (counted.counted, counted.duplicates, counted.unknown) == (50, 50, 0)
    given = [many.predict(x, user="u").result(60) for x in xs]
    assert many.feedback_many([given[i] for i in order], [labels[i] for i in order]).counted == 100
    for i in order:
        assert single.feedback(single.predict(xs[i], user="u").result(60), label=labels[i])
    assert learned(array) == learned(many) == learned(single)


@pytest.mark.parametrize("policy", ["squarecb", "bandit", "thompson"])
def test_an_array_trains_the_one_model_that_was_queried(models, app, policy):
    handle = app(*models, slo_ms=30_000, policy=policy)
    for _ in range(30):
        answers = handle.predict_many(np.array([[i, 0] for i in range(10)], float)).result(60)
        assert handle.feedback_many(answers, np.arange(10)).counted == 10
    state = handle._resolve(handle.name).learner.state(None)
    assert state.seen == 300
    assert handle.predict(ROW).result(60).output == 3


@pytest.mark.parametrize("policy", ["exp4", "exp3", "linucb", "single"])
def test_statistics_count_feedback_in_bulk(models, app, server, policy):
    """All feedback is counted, of lists and arrays, whether it is learned from in columns, in
    Python or not at all."""
    handle = app(
        *models[1:], slo_ms=30_000, policy=policy, roles={models[2].name: "challenger(share=0.2)"}
    )
    xs = np.array([[i % 10, i] for i in range(200)], float)
    labels = xs[:, 0].astype(int)
    answers = [handle.predict(x).result(60) for x in xs[:100]]
    assert handle.feedback_many(answers, labels[:100]).counted == 100
    array = handle.predict_many(xs[100:]).result(60)
    assert handle.feedback_many(array, labels[150:], rows=np.arange(50, 100)).counted == 50
    given = [*(answer.output for answer in answers), *np.asarray(array.outputs)[50:]]
    right = sum(
        output == label for output, label in zip(given, [*labels[:100], *labels[150:]], strict=True)
    )
    found = server.stats()["applications"][handle.name]
    assert found["answers"]["feedback"] == {"n": 150.0, "mean": pytest.approx(right / 150)}
    of_models = [found["models"][model.name]["feedback"] for model in models[1:]]
    assert sum(counted["n"] for counted in of_models) == 150.0
    assert [counted["mean"] for counted in of_models if counted["n"]] in ([0.0, 1.0], [0.0])


def test_what_feedback_of_an_array_is_refused(models, app):
    handle, other = (
        app(*models, policy="exp4", slo_ms=30_000),
        app(*models, slo_ms=30_000, policy="exp4"),
    )
    answers = handle.predict_many(np.zeros((3, 2))).result(60)
    for labels, rows, message in (
        ([1], None, "3 predictions and 1 labels"),
        ([1], [3], "whole numbers from 0 to 2"),
        ([1], [-1], "from 0 to 2"),
        ([1.0], [0.5], "whole numbers"),
        ([np.nan] * 3, None, "it must be finite"),
        ([None] * 3, None, "a label is"),
    ):
        with pytest.raises(InvalidInput, match=message):
            handle.feedback_many(answers, labels, rows)
    with pytest.raises(InvalidInput, match="rows= chooses among"):
        handle.feedback_many([answers.id], [1], [0])
    before = learned(other)
    assert other.feedback_many(answers, [1, 1, 1]).unknown == 3
    assert learned(other) == before
    assert handle.feedback_many(answers, [0, 0, 0]).counted == 3, "what was refused is not counted"


def test_feedback_of_an_array_that_the_journal_refuses_may_be_sent_again(
    models, app, server, monkeypatch
):
    handle = app(*models, policy="exp4", slo_ms=30_000)
    answers = handle.predict_many(np.zeros((100, 2))).result(60)
    states, allowed = server._learning.states, 2
    write = states.journal.append

    def append(record):
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise Overloaded("the journal is full")
        return write(record)

    with monkeypatch.context() as patch:
        patch.setattr("clipper.serving.feedback.journal_records.CHUNK", 30)
        patch.setattr(states.journal, "append", append)
        with pytest.raises(Overloaded):
            handle.feedback_many(answers, [0] * 100)
    counted = handle.feedback_many(answers, [0] * 100)
    assert (counted.counted, counted.duplicates) == (40, 60)
    assert handle._resolve(handle.name).learner.state(None).seen == 100


def test_what_feedback_is_refused(models, app):
    handle, other = (
        app(*models, policy="exp4", slo_ms=30_000),
        app(*models, slo_ms=30_000, policy="exp4"),
    )
    answer = handle.predict(ROW).result(60)
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


@pytest.mark.parametrize("policy", ["ensemble", "single", "ab", "static", "stacking", "exp3"])
def test_feedback_counts_under_every_policy(models, app, server, policy):
    handle = app(*models, policy=policy, slo_ms=30_000)
    answers = [handle.predict(ROW + i, user="ann").result(60) for i in range(4)]
    records = server._learning.journal.last
    assert handle.feedback(answers[0], label=3)
    assert not handle.feedback(answers[0], label=3), "it was told already"
    assert handle.feedback(input=ROW, label=3)
    assert handle.feedback_many(answers, [3, 4, 5, 6]).counted == 3
    array = handle.predict_many(np.array([ROW, ROW])).result(60)
    assert handle.feedback_many(array, np.array([3, 3])).counted == 2
    assert server._learning.journal.last > records
    stats = server.stats()["applications"][handle.name]
    assert stats["answers"]["feedback"]["n"] == 7
    accuracy = {
        name: row["feedback"] for name, row in stats["models"].items() if row["feedback"]["n"]
    }
    assert accuracy
    assert all(row["mean"] == float(name == models[2].name) for name, row in accuracy.items())


def test_a_correct_default_answer_does_not_reward_models_that_disagreed(models, app):
    """The models answer 4, 8 and 3, each with too low a confidence, so the default, 3, was
    returned."""
    handle = app(*models, policy="stacking", slo_ms=30_000, confidence_min=0.99, default=3)
    exp = app(*models, policy="exp4", slo_ms=30_000, confidence_min=0.99, default=3)
    for each in (handle, exp):
        answer = each.predict(ROW).result(60)
        assert (answer.output, answer.is_default) == (3, True)
        assert each.feedback(answer, correct=True)
    shares = exp.shares()
    assert shares[models[2].name] == max(shares.values())
    assert len({round(share, 9) for share in shares.values()}) == 2, (
        "both that were wrong lose alike"
    )


def test_a_score_of_a_default_that_is_nothing_teaches_nobody(models, app):
    handle = app(*models, policy="exp4", slo_ms=30_000, confidence_min=0.99)
    before = handle.shares()
    assert handle.feedback(handle.predict(ROW).result(60), correct=True)
    assert handle.shares() == before


def test_whole_floats_are_labels_where_the_outputs_are_whole_numbers(models, app):
    handle = app(*models, policy="stacking", slo_ms=30_000)
    for _ in range(30):
        assert handle.feedback(handle.predict(ROW).result(60), label=3.0)
    answers = [handle.predict(ROW).result(60) for _ in range(30)]
    assert handle.feedback_many(answers, [3.0] * 30).counted == 30
    array = handle.predict_many(np.array([ROW] * 30)).result(60)
    assert handle.feedback_many(array, np.full(30, 3.0)).counted == 30
    shares = handle.shares()
    assert shares[models[2].name] > 0.5


@pytest.mark.parametrize("policy", ["stacking", "ensemble"])
def test_feedback_that_can_not_be_is_refused_and_changes_nothing(models, app, server, policy):
    handle = app(*models, policy=policy, slo_ms=30_000)
    answer, array = (
        handle.predict(ROW).result(60),
        handle.predict_many(np.array([ROW, ROW])).result(60),
    )
    before = handle._resolve(handle.name).learner.state(None), server._learning.journal.last
    for label in (3.5, 10**30, "\ud800", np.array([1.0, 2.0]), float("nan")):
        with pytest.raises(InvalidInput):
            handle.feedback(answer, label=label)
        with pytest.raises(InvalidInput):
            handle.feedback(input=ROW, label=label)
        with pytest.raises(InvalidInput):
            handle.feedback_many([answer], [label])
        with pytest.raises(InvalidInput):
            handle.feedback_many(array, [label, label])
    for user in (7, "\ud800", "x" * 5000):
        with pytest.raises(InvalidInput):
            handle.feedback(input=ROW, label=3, user=user)
        with pytest.raises(InvalidInput):
            handle.predict(ROW, user=user)
        with pytest.raises(InvalidInput):
            handle.predict_many(np.array([ROW]), user=user)
        with pytest.raises(InvalidInput):
            handle.shares(user=user)
    for labels in (5, None, np.array(3)):
        with pytest.raises(InvalidInput):
            handle.feedback_many([answer], labels)
    with pytest.raises(InvalidInput):
        handle.feedback_many(array, [3], rows=[[0], [1, 2]])
    assert before == (
        handle._resolve(handle.name).learner.state(None),
        server._learning.journal.last,
    )
    assert handle.feedback(answer, label=3), "what was refused is not counted"
    assert handle.feedback_many(array, [3, 3]).counted == 2


FEEDBACK_SCRIPT = """
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


def run_until_killed(folder: Path, kill_after: int) -> int:
    """Kill a server after so many acknowledged feedbacks; return the number of all acknowledged
    ones."""
    with Program(sys.executable, "-c", FEEDBACK_SCRIPT, folder, apart=True) as process:
        process.until(lambda: len(process.lines) >= kill_after)
    assert {*process.lines} == {"told"}
    return len(process.lines)


def test_acknowledged_feedback_survives_kills(tmp_path: Path):
    """There may be one more than was acknowledged: the one whose acknowledgement was lost with the
    process."""
    acknowledged = 0
    for kill_after in (1, 50, 111, 150):
        acknowledged += run_until_killed(tmp_path, kill_after)
    with clipper.start(state=str(tmp_path)) as server:
        server.app("a")
        learner = server._learning.states.learner(
            "a", "kl_ucb", None, [clipper.VersionedModel("m", 1)]
        )
        seen = learner.state(None).seen
    assert acknowledged <= seen <= acknowledged + 4


def test_what_was_learned_survives_in_a_folder_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal deletes segments that are written to the store; a store in memory ends with the
    process."""
    monkeypatch.setattr("clipper.store.journal.SEGMENT_BYTES", 1 << 12)
    counted = 0
    for _ in range(2):
        with clipper.start(folder=str(tmp_path), feedback={"write_ms": 5}) as server:
            server.deploy("m", lambda xs: xs[:, 0].astype(int), input="f64[1]")
            app = server.app("a", models=["m"], policy="kl_ucb", slo_ms=30_000)
            model = clipper.VersionedModel("m", 1)
            learner = server._learning.states.learner("a", "kl_ucb", None, [model])
            assert learner.state(None).seen == counted
            answers = [app.predict(np.array([float(i % 7)])).result() for i in range(200)]
            counted += sum(app.feedback(answer, label=1) for answer in answers)


@pytest.mark.parametrize("store", ["sqlite", "redis", "etcd", "memory"])
def test_after_kills_the_states_are_those_of_serial_replay(store: str):
    """A short `python -m bench durability`: single labels, lists and arrays of several users, while
    the server is killed, and its store is killed or stopped."""
    program = STORES[store]
    if program and shutil.which(program) is None:
        pytest.skip(f"no {program}: python tools/fetch.py {store}")
    kills = 1 if store in ("etcd", "memory") else 2
    found = killed(kills, seed=7, store=store, tell=lambda text: None)
    assert found.failures == []
    assert found.kills == kills
