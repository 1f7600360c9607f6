"""The Answer computed from ended tasks."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from clipper.errors import ForkedProcess, UnknownModel
from clipper.foreign_text import last_line
from clipper.selection import Plan, create_policy
from clipper.serving.feedback.states import States
from clipper.serving.query.processor import (
    QueryContext,
    ResolvedApplication,
    RolloutState,
    finish,
    predict,
    why,
)
from clipper.serving.query.stats import ApplicationCounters
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel
from clipper_core.application.output_means import OutputMeans
from clipper_core.runtime.status import Status

A, B = VersionedModel("a", 1), VersionedModel("b", 2)


@dataclass
class Ended:
    """A fake of the members of a future that finish() reads, by task: (status, output, confidence,
    detail)."""

    extra: QueryContext
    tasks: list = field(default_factory=list)
    latency_us: int = 1234
    id: int = 255

    def __len__(self):
        return len(self.tasks)

    def latencies_us(self):
        return np.full(len(self.tasks), self.latency_us)

    def status(self, i=0):
        return self.tasks[i][0]

    def output(self, i=0):
        return self.tasks[i][1]

    def confidence(self, i=0):
        return self.tasks[i][2]

    def prediction(self, i=0):
        return self.tasks[i][1:3]

    def detail(self, i=0):
        return self.tasks[i][3]


def resolved(*models, policy="ensemble", **fields):
    chosen = create_policy(policy)
    learner = learner_of("app", policy, models)
    return ResolvedApplication(
        "app", models, {}, chosen, learner, 1000, **{"default": "none", "node": "n0", **fields}
    )


def learner_of(application, policy, models):
    states = States(MemoryStore(), Journal(None), "node", 100, 1.0)
    return states.learner(application, policy, create_policy(policy), models)


def ended(application, *tasks):
    full = [(status, *rest, *(None, None, "")[len(rest) :]) for status, *rest in tasks]
    return finish(
        Ended(
            QueryContext(application, Plan(application.models), application.learner.state(None)),
            full,
        )
    )


def test_one_prediction():
    answer = ended(resolved(A), (Status.OK, 7, 0.5))
    assert (answer.output, answer.confidence, answer.is_default, answer.reason) == (
        7,
        0.5,
        False,
        "",
    )
    assert (answer.models, answer.missing, answer.latency_us, answer.id) == (
        (A,),
        (),
        1234,
        "n0-ff",
    )


def test_one_is_missing():
    answer = ended(resolved(A, B), (Status.OK, 7), (Status.DEADLINE,))
    assert (answer.output, answer.is_default, answer.models, answer.missing) == (
        7,
        False,
        (A,),
        (B,),
    )
    assert answer.confidence == 0.5


@pytest.mark.parametrize(
    "status", [s for s in Status if s not in (Status.OK, Status.PENDING, Status.FORKED)]
)
def test_default_when_no_model_answered(status):
    answer = ended(resolved(A), (status, None, None, "Traceback\n  x\nValueError: boom"))
    assert (answer.output, answer.is_default, answer.models, answer.missing) == (
        "none",
        True,
        (),
        (A,),
    )
    assert answer.reason == why(status, A, "ValueError: boom")
    assert "\n" not in answer.reason


def test_every_way_to_end_has_its_words():
    combined = {
        status: why(status, A, f"E: {status}")
        for status in Status
        if status not in (Status.OK, Status.PENDING)
    }
    assert len(set(combined.values())) == len(combined)
    assert why(Status.NO_REPLICA, A, "") == "no container of a:1 is connected"
    assert why(Status.MODEL_ERROR, A, "") == "a:1 failed: no reason given"
    assert (
        why(Status.TOO_LARGE, A, "the model returned too much")
        == "a:1: the model returned too much"
    )
    assert why(Status.TOO_LARGE, A, "") == "the input of a:1 is larger than a frame may be"


def test_reasons_are_reported_once_each():
    answer = ended(resolved(A, B), (Status.CLOSED,), (Status.CLOSED,))
    assert answer.reason == "the server is shutting down"
    answer = ended(resolved(A, B), (Status.FULL,), (Status.NO_REPLICA,))
    assert answer.reason == "a:1 is overloaded; no container of b:2 is connected"


@pytest.mark.parametrize("output", [float("nan"), float("inf"), np.array([1.0, np.nan])])
def test_an_output_that_is_no_number(output):
    answer = ended(resolved(A), (Status.OK, output))
    assert (answer.output, answer.is_default) == ("none", True)
    assert answer.reason == "the output of a:1 is not a finite value"


def test_not_sure_enough():
    application = resolved(A, confidence_min=0.6)
    assert ended(application, (Status.OK, 1, 0.6)).output == 1
    unsure = ended(application, (Status.OK, 1, 0.59))
    assert (unsure.output, unsure.is_default, unsure.models) == ("none", True, (A,))
    assert unsure.reason == "confidence 0.59 is below the application's 0.60"


def test_in_a_fork_it_raises():
    with pytest.raises(ForkedProcess, match=r"'app'.*clipper\.start"):
        ended(resolved(A, B), (Status.FORKED,), (Status.FORKED,))


def test_nothing_is_linked():
    with pytest.raises(
        UnknownModel, match=r"application 'app' links no model\. Link one: server\.app\('app'"
    ):
        predict(resolved(), 1.0, None, 1000, 0)


def test_the_last_line_is_the_error_itself():
    assert last_line("Traceback\n  File x\nKeyError: 'a'\n\n") == "KeyError: 'a'"
    assert len(last_line("x" * 10_000)) == 500
    assert last_line("") == "no reason given"


def test_a_straggler_is_its_mean_and_is_named():
    means = OutputMeans()
    means.add(B, 30.0)
    application = resolved(A, B, means=means)
    tasks = [(Status.OK, 10.0, None, ""), (Status.DEADLINE, None, None, "")]
    answer = finish(Ended(QueryContext(application, Plan((A, B)), (A, B)), tasks))
    assert (answer.output, answer.models, answer.missing) == (20.0, (A,), (B,))
    assert answer.confidence == 0.5
    assert not answer.is_default


def test_what_queries_came_to_is_counted():
    counters = ApplicationCounters()
    stats = counters.for_models((A, B), None)
    application = resolved(A, B, rollout=RolloutState(stats), confidence_min=0.6)
    ended(application, (Status.OK, 7), (Status.OK, 7))
    ended(application, (Status.OK, 7), (Status.OK, 8))
    ended(application, (Status.OK, 7), (Status.DEADLINE,))
    ended(application, (Status.FULL,), (Status.DEADLINE,))
    ended(application, (Status.OK, float("nan")), (Status.OK, None))
    stats = counters.stats(stats)
    assert stats["answers"]["ok"] == 1
    assert stats["answers"]["default"] == {"unsure": 2, "full": 1, "not_finite": 1}
    a, b = stats["models"]["a:1"], stats["models"]["b:2"]
    assert (a["used"], a["missing"], a["role"]) == (3, {"full": 1}, "primary")
    assert (b["used"], b["missing"]) == (2, {"deadline": 2})
    assert stats["agreement"] == {"a:1 b:2": {"n": 3.0, "mean": pytest.approx(1 / 3)}}
    assert a["agreement"]["mean"] == pytest.approx(2 / 3), (
        "with the answer: it was a's, when they did not agree"
    )


def test_decoys_receive_the_answer():
    class Decoy:
        def __init__(self):
            self.replies = []

        def add_reply(self, *combined):
            self.replies.append(combined)

    decoy = Decoy()
    ended(resolved(A, rollout=RolloutState(decoys=(decoy,))), (Status.OK, 7))
    ended(resolved(A, rollout=RolloutState(decoys=(decoy,))), (Status.DEADLINE,))
    assert decoy.replies == [(255, "n0-ff", 7, False), (255, "n0-ff", "none", True)]
