"""Queries that the core schedules: their answers equal those of the policies in Python, which are
the reference; what they count and remember equals what a query in Python does."""

import copy
import gc
import itertools
import math
import pickle
import random
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.selection import (
    Observation,
    Plan,
    Prediction,
    Truth,
    create_policy,
    features_of,
)
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.prediction_sets import with_coverage
from clipper.selection.policy import is_number, is_usable
from clipper.serving.feedback.states import States
from clipper.serving.feedback.stored_state import publish
from clipper.serving.feedback.window import FeedbackWindow
from clipper.serving.query import core_application
from clipper.serving.query.core_application import MODELS_MAX, core_of, selection_of
from clipper.serving.query.processor import (
    FeedbackState,
    ResolvedApplication,
    RolloutState,
    finish,
    plan_for,
    predict,
)
from clipper.serving.query.speculation import speculation_of
from clipper.serving.query.stats import ApplicationCounters
from clipper.serving.rollout.roles import Role, RoleAssignment
from clipper.serving.rollout.traffic_split import SideStats
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import PredictionRequest, VersionedModel
from clipper_core.application.application import (
    Application,
    ApplicationQuery,
    ApplicationTable,
    QueryHandle,
)
from clipper_core.application.selection import Combining, Selection
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.runtime.status import Status, StatusError
from clipper_core.wire.codec import Kind, encode_rows

POLICIES = (
    "ensemble",
    "single",
    "ab(shares={'m0': 0.7, 'm1': 0.3})",
    "ab",
    "static(weights={'m0': 2, 'm1': 0.5})",
    "exp4",
    "logodds",
    "stacking",
    "mixture",
    "ridge",
    "exp3",
    "bandit",
    "squarecb",
    "epsilon_greedy",
    "thompson",
    "kl_ucb",
    "tsallis_inf",
    "linucb",
    "lints",
)
SLO_US = 1_000_000


DECIDERS = (
    "majority",
    "quorum(2)",
    "weighted",
    "first",
    "best_quality",
    "surest",
    "surest(confidence=0.6)",
    "cascade(confidence=0.6)",
    "hedged(after_ms=3, budget=1)",
    "hedged",
    "tied",
    "mean(tolerance=1)",
    "mean(low=-5, high=5, tolerance=0.1)",
    "median",
    "floor(m1)",
    "guaranteed_time",
    "quorum(3) within 5 ms, else first",
    "surest(confidence=0.9) within 2 ms, else majority within 4 ms, else all",
)


class Failure(NamedTuple):
    """A model's failure in the place of an output."""

    text: str


class Served:
    """An application over models whose containers a test answers for."""

    def __init__(
        self, world, policy, k, decider="all", averages=False, side=None, roles=None, **fields
    ):
        self.world = world
        self.models = tuple(VersionedModel(f"m{i}", 1) for i in range(k))
        self.cores = [world.model(shape=(2,), lane_rows=64) for _ in range(k)]
        self.containers = [world.container(core) for core in self.cores]
        self.policy = create_policy(policy)
        states = States(MemoryStore(), Journal(None), "n0", 100, 1.0)
        self.learner = states.learner("app", policy, self.policy, self.models)
        self.counters = ApplicationCounters()
        assignment = None
        if roles is not None:
            by_place = {self.models[i]: role for i, role in roles.items() if i < k}
            assignment = RoleAssignment(by_place, self.models)
        self.window = FeedbackWindow(1000, 60.0, node="n0")
        # an entry keeps the futures of late predictions, and these keep the engine
        world.closing.append(self.window.close)
        if averages:
            fields["means"] = self.counters.means
        self.resolved = ResolvedApplication(
            "app",
            self.models,
            dict(zip(self.models, self.cores, strict=True)),
            self.policy,
            self.learner,
            SLO_US,
            node="n0",
            feedback=FeedbackState(self.window),
            rollout=RolloutState(
                self.counters.for_models(self.models, assignment), assignment, side=side
            ),
            **fields,
        )
        found = speculation_of(decider, self.resolved, None)
        self.resolved = msgspec.structs.replace(self.resolved, speculation=found)
        self.core = core_of(self.resolved)

    def learn(self, rng, outputs, n, features=0):
        """Publish the state after n random observations of these outputs, about queries with so
        many features."""
        state = self.learner.state(None)
        for _ in range(n):
            context = features_from(rng, features)
            arrived = {
                model: Prediction(rng.choice(outputs), rng.choice((None, 0.3, 0.9)))
                for model in self.models
            }
            plan = self.policy.select(
                state,
                SimpleNamespace(user=None, uniform=rng.random(), features=context),
                self.models,
            )
            arrived = {model: arrived[model] for model in plan.models}
            truth = Truth(rng.choice([one for one in outputs if is_usable(one)]))
            state = self.policy.observe(state, Observation(plan, arrived, truth))
        publish(self.learner.shared, state)
        self.learner.shared.prior = None

    def answer_all(self, outputs, confidences, qualifiers=None):
        """Answer every task that waits: model i with outputs[i], confidences[i] and
        qualifiers[i]."""
        self.world.step(1)
        for i, container in enumerate(self.containers):
            while container.read():
                beside = None if qualifiers is None else qualifiers[i]
                self.send(container, outputs[i], confidences[i], beside)
                self.world.step(1)

    def send(self, container, output, confidence, qualifiers=None):
        """Answer the oldest batch of a container: with this output, or a failure."""
        if isinstance(output, Failure):
            container.fail(output.text)
            return
        number, rows = container.inbox.pop(0)
        values = [output] * len(rows)
        sent = None if confidence is None else [confidence] * len(rows)
        beside = None if qualifiers is None else [qualifiers] * len(rows)
        if isinstance(output, bool | int | float):
            values = np.array(values)
        assert container.send(
            encode_rows(Kind.REPLY, values, id=number, confidence=sent, qualifiers=beside)
        )

    def play(self, events):
        """Have models answer at times, in microseconds: (time, model, output, confidence); then let
        the deadline pass."""
        now = 0
        for time, i, output, confidence in events:
            self.world.step(time - now)
            now = time
            while self.containers[i].read():
                self.send(self.containers[i], output, confidence)
                self.world.step()
        self.world.pass_deadline(SLO_US)

    def told(self):
        """Return what was counted and what is remembered, in a form that may be compared."""
        stats = self.counters.stats(self.resolved.rollout.stats)
        del stats["since_us"], stats["duration_us"], stats["latency_us"]
        late = [
            [
                (model, task.status().name, task.prediction())
                for model, task in joined.late
                if task.status() is not Status.UNNEEDED
            ]
            for _, joined in self.window.table.items()
        ]
        return shown((stats, self.entries(), late))

    def fill_cache(self, x, outputs, confidences):
        """Have the outputs of all models for an input cached."""
        for core in self.cores:
            core.predict(x)
        self.answer_all(outputs, confidences)

    def entries(self):
        """Return what is remembered of the answers, oldest first."""
        return [
            (
                joined.user,
                joined.plan.models,
                joined.answer,
                *[(m, p.output, p.confidence) for m, p in joined.arrived.items()],
            )
            for _, joined in self.window.table.items()
        ]

    def by_policy(self, future, answer):
        """Return what the policy in Python makes of the outputs of the models that were called."""
        outputs = dict(zip(self.models, self.sent, strict=True))
        sure = dict(zip(self.models, self.sure, strict=True))
        called = future.extra.models
        arrived = {model: Prediction(outputs[model], sure[model]) for model in called}
        return self.policy.combine(self.learner.state(None), arrived, [])

    def ask(self, x, outputs, confidences):
        """Return the futures and answers of a query twice: of tasks, and from the cache."""
        self.sent, self.sure = outputs, confidences
        missed = self.core.predict(x, "", SLO_US, 0, "")
        self.answer_all(outputs, confidences)
        yield missed, missed.result(0)
        hit = self.core.predict(x, "", SLO_US, 0, "")
        if not hit.done():  # another model was chosen
            self.answer_all(outputs, confidences)
        yield hit, hit.result(0)


def shown(value):
    """Return a text that equals another's if numbers differ in the last places only."""
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    if isinstance(value, dict):
        return {key: shown(one) for key, one in value.items()}
    return repr(value)


def features_from(rng, n):
    """Return so many random features."""
    return tuple(rng.choice((0.0, -0.0, 1.0, rng.uniform(-2.0, 2.0))) for _ in range(n))


def f32(confidence):
    """Return a confidence as it arrives."""
    return None if confidence is None else float(np.float32(confidence))


KINDS = (
    (0, 1, 2),
    (-3, 5, 2**62),
    (2**63, 2**64 - 1, 1),
    (True, False),
    ("cat", "dog", "ünï"),
    (b"a", b"bb", b""),
    (0.5, -1.25, 3e5),
    (0.0, -0.0, 1.0),
)
ODD = ((math.nan, 1.0, math.inf), (1, 2.5), (1, "1"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_answers_equal_the_policys_own(new_world, policy, seed):
    rng = random.Random(f"{policy} {seed}")
    for kind in (*KINDS, *ODD):
        served = Served(new_world(), policy, rng.randint(1, 5))
        assert isinstance(served.core, Application)
        if seed and not isinstance(served.learner.state(None), tuple):
            served.learn(rng, kind, rng.randint(1, 40))
        for i in range(4):
            outputs = [rng.choice(kind) for _ in served.models]
            sure = [f32(rng.choice((None, None, 0.25, 0.5, 1.0))) for _ in served.models]
            for future, answer in served.ask(np.full(2, float(i)), outputs, sure):
                expected = served.by_policy(future, answer)
                if not expected.used:
                    assert answer.is_default
                    continue
                assert not answer.is_default
                assert type(answer.output) is type(expected.output)
                assert (
                    answer.output == pytest.approx(expected.output, rel=1e-12)
                    if is_number(expected.output)
                    else answer.output == expected.output
                )
                assert answer.confidence == pytest.approx(expected.confidence, abs=1e-12)
                assert answer.agreement == pytest.approx(expected.agreement, abs=1e-12)
                assert answer.models == expected.used
                assert (answer.missing, answer.set, answer.reason) == ((), (), "")
                assert answer.decided_by == "all"


@pytest.mark.parametrize("policy", [one for one in POLICIES if one != "lints"])
@pytest.mark.parametrize("seed", range(2))
def test_answers_in_a_context_equal_pythons(new_world, monkeypatch, policy, seed):
    """The features of a query choose the model, and weigh the votes, as in Python; and they are
    remembered alike."""
    rng = random.Random(f"{policy} {seed}")
    calls = Calls(monkeypatch)
    chance = create_policy(policy).chance and policy != "linucb"
    for kind in (*KINDS[::2], ODD[0]):
        k, learned_with = 1 if chance else rng.randint(2, 5), rng.choice((0, 1, 3, 32))
        served, twin = (Served(new_world(), policy, k) for _ in range(2))
        if not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(seed), kind, 60, learned_with)
        # a choice by features has to know as many
        fits = policy == "linucb" and learned_with
        for i in range(6):
            n = rng.choice((0, learned_with)) if fits else rng.choice((0, 1, 3, learned_with))
            features = features_from(rng, n) or None
            outputs = [rng.choice(kind) for _ in served.models]
            sure = [f32(rng.choice((None, None, 0.25, 0.5, 1.0))) for _ in served.models]
            answers = []
            for _ in range(2):
                future = served.core.predict(np.full(2, float(i)), "", SLO_US, 0, "", features)
                other = predict(twin.resolved, np.full(2, float(i)), "", SLO_US, 0, features)
                assert type(future.extra) is ApplicationQuery
                assert type(other.extra) is not ApplicationQuery
                for each in (served, twin):
                    each.answer_all(outputs, sure)
                assert future.extra.models == other.extra.plan.models or future.done()
                answers = [future.result(0), other.result(0)]
                assert_same_answer(*answers, ignored=("latency_us",))
        assert served.told() == twin.told()
        assert [plan_of(one) for one in entries_of(served)] == [
            plan_of(one) for one in entries_of(twin)
        ]
    assert calls.count == 0


ROLES = (
    {1: Role("shadow")},
    {0: Role("canary"), 2: Role("shadow", 0.5)},
    {2: Role("challenger", 0.3)},
    {0: Role("challenger", 0.2), 1: Role("challenger", 0.3), 3: Role("canary", 0.4)},
)


@pytest.mark.parametrize("policy", [*POLICIES, "exp3(shadow=0.5)", "linucb(shadow=0.4)"])
@pytest.mark.parametrize("seed", range(3))
def test_answers_of_applications_with_roles_equal_pythons(new_world, monkeypatch, policy, seed):
    """Challengers answer their share alone, observers see theirs; both are chosen by the query's
    number as in Python, and are counted, compared and remembered alike."""
    rng = random.Random(f"{policy} {seed}")
    calls = Calls(monkeypatch)
    seen = set()
    reads_context = policy.startswith(("linucb", "lints", "mixture"))
    for n, kind in enumerate((*KINDS, *ODD)):
        roles = rng.choice((*ROLES, None) if "shadow" in policy else ROLES)
        k = rng.randint(max(roles or (2,)) + 1, 5)
        fields = {
            "roles": roles,
            "confidence_min": rng.choice((0.0, 0.0, 0.6)),
            "averages": kind in (KINDS[-2], ODD[0]) and policy != "single",
        }
        served, twin = (Served(new_world(), policy, k, **fields) for _ in range(2))
        assert isinstance(served.core, Application)
        learned_with = 2 if reads_context and n % 3 else 0
        if (n + seed) % 2 and not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(seed), kind, 30, learned_with)
        for i in range(16):
            features = (features_from(rng, learned_with) or None) if rng.random() < 0.5 else None
            events = random_events(rng, served.models, kind)
            x = np.full(2, float(i % 5))
            future = served.core.predict(x, "ann", SLO_US, 0, f"{n} {i}", features)
            assert isinstance(future.extra, ApplicationQuery)
            other = predict(twin.resolved, x, "ann", SLO_US, 0, features, id=f"{n} {i}")
            assert [model for model, _ in future.extra.late] == [m for m, _ in other.extra.late]
            for each in (served, twin):
                each.play(events)
            answer = future.result(0)
            assert_same_answer(answer, other.result(0))
            seen.add((answer.is_default, len(future.extra.models), bool(future.extra.late)))
        assert served.told() == twin.told()
        assert [shown(plan_of(one)) for one in entries_of(served)] == [
            shown(plan_of(one)) for one in entries_of(twin)
        ]
    assert calls.count == 0
    assert {late for _, _, late in seen} == {True, False}


COVERED = tuple(
    with_coverage(one, 0.8)
    for one in POLICIES
    if isinstance(create_policy(one), LearningPolicy) and one != "lints"
)


@pytest.mark.parametrize("policy", COVERED)
@pytest.mark.parametrize("seed", range(4))
def test_prediction_sets_equal_pythons(new_world, monkeypatch, policy, seed):
    """Labels that models gave or named, and those that feedback had, in the same order; intervals
    around numbers. Also of a challenger, of the queries in a context, and of a part of the
    models."""
    rng = random.Random(f"{policy} {seed}")
    calls = Calls(monkeypatch)
    sizes = set()
    chance = create_policy(policy).chance
    for n, kind in enumerate((*KINDS, *ODD)):
        k = rng.randint(2, 5)
        fields = {
            "roles": {0: Role("challenger", 0.3)} if n % 3 == 1 else None,
            "confidence_min": rng.choice((0.0, 0.0, 0.6)),
            "averages": kind in (KINDS[-2], ODD[0]) and not chance,
        }
        served, twin = (Served(new_world(), policy, k, **fields) for _ in range(2))
        assert served.core.selection.makes_sets
        features = (0.5, -1.0) if policy.startswith(("mixture", "linucb")) and n % 2 else None
        for each in (served, twin):
            each.learn(random.Random(seed), kind, 15 * seed, 2 if features else 0)
        before = calls.count
        for i in range(12):
            x, id = np.full(2, float(i % 6)), f"{n} {i}"
            events = random_events(rng, served.models, kind)
            qualified = rng.random() < 0.5
            outputs = [rng.choice(kind) for _ in served.models]
            beside = [random_qualifiers(rng, kind) for _ in served.models]
            future = served.core.predict(x, "ann", SLO_US, 0, id, features)
            other = predict(twin.resolved, x, "ann", SLO_US, 0, features, id=id)
            for each in (served, twin):
                if qualified:
                    each.answer_all(outputs, [None] * k, beside)
                each.play([] if qualified else events)
            answer, expected = future.result(0), other.result(0)
            assert_same_answer(answer, expected, ignored=("latency_us", "set"))
            assert [type(one) for one in answer.set] == [type(one) for one in expected.set]
            assert shown(answer.set) == shown(expected.set)
            sizes.add(len(answer.set))
        assert served.told() == twin.told()
        # labels of more than one kind, and large ones, are Python's
        if kind not in (KINDS[2], *ODD):
            assert calls.count == before
    assert {0, 1, 2} <= sizes if seed else {0, 1} & sizes
    if seed and not chance:
        assert max(sizes) > 2


def test_users_without_feedback_have_the_sets_of_the_shared_state(world):
    served = Served(world, "stacking(coverage=0.8)", 3)
    plan = Plan(served.models)
    labels = ("a", "b", "c", "d")
    for number in range(1, 41):
        arrived = {
            model: Prediction(labels[(number + i) % 3]) for i, model in enumerate(plan.models)
        }
        truth = Truth(labels[number % 4])
        served.learner.observe(None, Observation(plan, arrived, truth), number)
    found = []
    for user in ("", "ann"):
        future = served.core.predict(np.zeros(2), user, SLO_US, 0, "")
        served.answer_all(["a", "a", "b"], [None] * 3)
        state = served.learner.state(user or None)
        arrived = {m: Prediction(one) for m, one in zip(plan.models, ("a", "a", "b"), strict=True)}
        answer = future.result(0)
        assert answer.set == served.policy.combine(state, arrived, ()).set
        found.append(answer.set)
    assert found[0][0] == "a"
    assert len(found[0]) > 1


@pytest.mark.parametrize("decider", DECIDERS)
@pytest.mark.parametrize("policy", ["ensemble", "stacking", "mixture"])
def test_decisions_beside_observers_equal_pythons(new_world, monkeypatch, decider, policy):
    """A decider has the primaries only; observers are queried beside them."""
    rng = random.Random(f"{decider} {policy}")
    calls = Calls(monkeypatch)
    for n, kind in enumerate(KINDS):
        roles = {0: Role("shadow", 0.6), 2: Role("canary", rate_max=1e6)}
        served, twin = (Served(new_world(), policy, 4, decider, roles=roles) for _ in range(2))
        assert isinstance(served.core, Application)
        if n % 2 and not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(n), kind, 20)
        for i in range(8):
            events = random_events(rng, served.models, kind)
            x = np.full(2, float(i % 3))
            future = served.core.predict(x, "ann", SLO_US, 0, f"{i}")
            if future is None:
                future = predict(served.resolved, x, "ann", SLO_US, 0, id=f"{i}")
            other = predict(twin.resolved, x, "ann", SLO_US, 0, id=f"{i}")
            for each in (served, twin):
                each.play(events)
            assert_same_answer(future.result(0), other.result(0))
        assert served.told() == twin.told()
        assert [plan_of(one) for one in entries_of(served)] == [
            plan_of(one) for one in entries_of(twin)
        ]
    assert calls.count < 20


@pytest.mark.parametrize(
    "policy", ["ensemble", "single", "ab", "exp3(shadow=0.3)", "thompson", "linucb"]
)
def test_roles_are_those_of_the_callers_id(world, policy):
    """Models, probabilities and observers are those that Python plans for the same number."""
    served = Served(world, policy, 5, roles=ROLES[3])
    plans = set()
    for i in range(200):
        x = np.full(2, float(i))
        future = served.core.predict(x, "", SLO_US, 0, f"id-{i}")
        _, plan = plan_for(served.resolved, None, None, f"id-{i}")
        assert shown(plan_of(future.extra)) == shown(plan_of(SimpleNamespace(plan=plan)))
        plans.add((plan.models, bool(plan.observers)))
    served.answer_all(["a"] * 5, [None] * 5)
    # two challengers and the policy's, with and without observers
    assert len(plans) >= 6


@pytest.mark.parametrize("policy", [*POLICIES, "stacking(coverage=0.8)"])
def test_answers_of_many_models_equal_pythons(new_world, monkeypatch, policy):
    """The twin is compared for more models than an entry of the window has, for more than are
    compared with each other, and for as many as the core combines."""
    rng = random.Random(policy)
    calls = Calls(monkeypatch)
    for k, kind in ((17, KINDS[0]), (33, KINDS[-2]), (MODELS_MAX, KINDS[4])):
        roles = {3: Role("shadow", 0.5)} if k < MODELS_MAX else None
        served, twin = (Served(new_world(), policy, k, roles=roles) for _ in range(2))
        if not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(k), kind, 10)
        for i in range(3):
            events = random_events(rng, served.models, kind)
            x = np.full(2, float(i % 2))
            future = served.core.predict(x, "ann", SLO_US, 0, f"{i}")
            other = predict(twin.resolved, x, "ann", SLO_US, 0, id=f"{i}")
            for each in (served, twin):
                each.play(events)
            assert_same_answer(future.result(0), other.result(0))
        assert served.told() == twin.told()
    assert calls.count == 0


@pytest.mark.parametrize("decider", ["majority", "median", "best_quality", "quorum(9)"])
def test_decisions_of_many_models_equal_pythons(new_world, monkeypatch, decider):
    rng = random.Random(decider)
    calls = Calls(monkeypatch)
    for kind in (KINDS[0], KINDS[-2]):
        served, twin = (Served(new_world(), "ensemble", 40, decider) for _ in range(2))
        for i in range(4):
            played(served, twin, np.full(2, float(i % 2)), random_events(rng, served.models, kind))
        assert served.told() == twin.told()
    assert calls.count == 0


def test_queries_are_spread_over_roles_by_chance(world):
    roles = {0: Role("challenger", 0.3), 1: Role("shadow", 0.5)}
    served = Served(world, "ensemble", 3, roles=roles)
    futures = [served.core.predict(np.full(2, float(i)), "", SLO_US, 0, "") for i in range(600)]
    served.answer_all(["a"] * 3, [None] * 3)
    alone = sum(future.extra.models == served.models[:1] for future in futures)
    watched = sum(bool(future.extra.late) for future in futures)
    assert 120 < alone < 240
    assert 240 < watched < 360
    assert {future.extra.models for future in futures} == {served.models[:1], served.models[2:]}


def test_an_application_without_primaries_or_with_many_observers_is_left_to_python(world):
    served = Served(world, "ensemble", 2, roles={0: Role("shadow"), 1: Role("canary")})
    assert served.core is None
    for observers, is_core in ((MODELS_MAX, True), (MODELS_MAX + 1, False)):
        models = tuple(VersionedModel(f"m{i}", 1) for i in range(1 + observers))
        roles = RoleAssignment(dict.fromkeys(models[1:], Role("shadow")), models)
        found = selection_of(create_policy("ensemble"), models, roles)
        assert (found is not None) == is_core


def entries_of(served):
    return [joined for _, joined in served.window.table.items()]


def plan_of(joined):
    """Return what feedback reads of the plan of an answer."""
    plan = joined.plan
    return plan.models, plan.probabilities, plan.observers, plan.features


def test_a_choice_by_features_is_by_chance_where_the_policy_draws(world):
    """`lints` chooses each model about as often as in Python."""
    served = Served(world, "lints", 3)
    served.learn(random.Random(1), ("a", "b"), 60, 2)
    features = (0.5, -1.0)
    chosen = []
    expected = []
    state = served.learner.state(None)
    for i in range(600):
        query = served.core.predict(np.full(2, float(i)), "", SLO_US, 0, "", features).extra
        assert plan_of(query) == (query.models, (), (), features)
        chosen.append(query.models[0])
        uniform = SimpleNamespace(user=None, uniform=(i + 0.5) / 600, features=features)
        expected.append(served.policy.select(state, uniform, served.models).models[0])
    for model in served.models:
        assert abs(chosen.count(model) - expected.count(model)) < 120
    served.answer_all(["a"] * 3, [None] * 3)


def test_another_number_of_features_is_refused(world):
    """Python says which number the state has learned with."""
    served = Served(world, "linucb", 2)
    served.learn(random.Random(1), ("a", "b"), 20, 3)
    served.resolved = msgspec.structs.replace(served.resolved, core=served.core)
    for context in ((1.0,), [1.0, 2.0], np.ones(4)):
        with pytest.raises(InvalidInput, match="has learned with 3"):
            predict(served.resolved, np.zeros(2), "", SLO_US, 0, context)
    with pytest.raises(StatusError, match="1 to 32"):
        served.core.predict(np.zeros(2), "", SLO_US, 0, "", (0.0,) * 33)
    assert served.counters.queries.value == 0


def test_contexts_of_a_table_are_read_in_python(world):
    """The row of a query's user is its context, if it has none of its own."""
    rows = {"ann": (1.0, 2.0)}
    served = Served(world, "linucb", 1, rows=rows.get)
    table = ApplicationTable()
    table.replace({"app": served.core})
    handle = QueryHandle("app", table, 60_000.0, Others())
    assert handle.predict(np.zeros(2), user="ann")[1] == "ann"
    assert handle.predict(np.zeros(2)).extra.plan.features == ()
    own = handle.predict(np.zeros(2), user="ann", context=[3.0, 4.0])
    assert own.extra.plan.features == (3.0, 4.0)
    served.resolved = msgspec.structs.replace(served.resolved, core=served.core)
    assert predict(served.resolved, np.zeros(2), "ann", SLO_US, 0).extra.plan.features == (1.0, 2.0)
    assert predict(served.resolved, np.zeros(2), "bob", SLO_US, 0).extra.plan.features == ()
    served.answer_all(["a"], [None])


@pytest.mark.parametrize(
    "context",
    [
        [1, -2.5],
        (0.0, -0.0),
        np.arange(3.0),
        np.arange(6.0)[::2],
        [1e6],
        [0.0] * 32,
        np.array([1, 2]),
        np.float32([0.5]),
        [np.float64(2.0)],
        [True],
    ],
)
def test_a_context_is_read_as_python_reads_it(world, context):
    """Contexts of any form choose alike; the handle leaves those it does not read to Python."""
    served = Served(world, "linucb", 1)
    table = ApplicationTable()
    table.replace({"app": served.core})
    handle = QueryHandle("app", table, 60_000.0, Others())
    future = handle.predict(np.zeros(2), context=context)
    if isinstance(future, tuple):
        assert future[4] is context
        future = served.core.predict(np.zeros(2), "", SLO_US, 0, "", features_of(context))
    assert future.extra.plan.features == features_of(context)
    assert all(type(one) is float for one in future.extra.plan.features)
    served.answer_all(["a"], [None])


@pytest.mark.parametrize(
    "context", [[], [1e7], [math.nan], [-math.inf], "abc", [[1.0]], [0.0] * 33, [10**400], 1.0]
)
def test_a_context_of_other_numbers_is_left_to_python(world, context):
    served = Served(world, "linucb", 1)
    table = ApplicationTable()
    table.replace({"app": served.core})
    handle = QueryHandle("app", table, 60_000.0, Others())
    assert handle.predict(np.zeros(2), context=context)[4] is context
    request = PredictionRequest("app", np.zeros(2), context=context)
    assert table.schedule(request) is None


class Others:
    """Gets the queries that the core does not take."""

    def predict(self, *given):
        return given


@pytest.mark.parametrize("policy", ["ensemble", "stacking", "exp3"])
def test_what_is_counted_and_remembered_equals_a_query_of_python(new_world, policy):
    """The same queries by the core and by Python count alike, and are remembered alike."""
    told = []
    for by_core in (True, False):
        served = Served(new_world(), policy, 3 if policy != "exp3" else 1)
        table = ApplicationTable()
        if by_core:
            table.replace({"app": served.core})
        for i, (output, sure) in enumerate(itertools.product(("a", "b"), (None, 0.5))):
            served.sent, served.sure = [output, "a", "c"], [sure, None, 1.0]
            for _ in range(2):
                if by_core:
                    future = served.core.predict(np.full(2, float(i)), "ann", SLO_US, 0, "mine")
                    future = future or served.core.predict(
                        np.full(2, float(i)), "ann", SLO_US, 0, ""
                    )
                else:
                    future = predict(served.resolved, np.full(2, float(i)), "ann", SLO_US, 0)
                served.answer_all(
                    served.sent[: len(served.models)], served.sure[: len(served.models)]
                )
                assert future.result(0).output in ("a", "b", "c")
        stats = served.counters.stats(served.resolved.rollout.stats)
        entries = [
            (
                joined.user,
                joined.plan.models,
                joined.plan.probabilities,
                joined.answer,
                *[(m, p.output, p.confidence) for m, p in joined.arrived.items()],
            )
            for _, joined in served.window.table.items()
        ]
        del stats["since_us"], stats["duration_us"], stats["latency_us"]
        told.append((stats, entries, len(served.window)))
    assert told[0] == told[1]
    assert told[0][2] == 8


@pytest.mark.parametrize("decider", DECIDERS)
@pytest.mark.parametrize(
    "policy", ["ensemble", "static(weights={'m0': 2, 'm1': 0.5})", "exp4", "stacking", "mixture"]
)
def test_decisions_about_what_is_cached_equal_pythons(new_world, decider, policy):
    """The core decides alike, counts alike and remembers alike, or leaves the query to Python."""
    rng = random.Random(f"{decider} {policy}")
    decided = 0
    for kind in (*KINDS, *ODD):
        served = Served(new_world(), policy, 3, decider)
        twin = Served(new_world(), policy, 3, decider)
        assert isinstance(served.core, Application)
        for each in (served, twin):
            if decided % 2 and not isinstance(each.learner.state(None), tuple):
                each.learn(random.Random(decided), kind, 20)
        for i in range(4):
            outputs = [rng.choice(kind) for _ in served.models]
            sure = [f32(rng.choice((None, None, 0.25, 0.5, 1.0))) for _ in served.models]
            x = np.full(2, float(i))
            for each in (served, twin):
                each.fill_cache(x, outputs, sure)
            future = served.core.predict(x, "ann", SLO_US, 0, "")
            if future is None:
                future = predict(served.resolved, x, "ann", SLO_US, 0)
            else:
                decided += 1
                assert future.done()
            answer = future.result(0)
            expected = predict(twin.resolved, x, "ann", SLO_US, 0).result(0)
            assert type(answer.output) is type(expected.output)
            assert shown(answer.output) == shown(expected.output)
            assert answer.confidence == pytest.approx(expected.confidence, abs=1e-12)
            assert answer.agreement == pytest.approx(expected.agreement, abs=1e-12)
            for name in ("models", "missing", "set", "reason", "decided_by", "is_default"):
                assert getattr(answer, name) == getattr(expected, name), name
        told = [each.counters.stats(each.resolved.rollout.stats) for each in (served, twin)]
        for stats in told:
            del stats["since_us"], stats["duration_us"], stats["latency_us"]
        assert told[0] == told[1]
        assert shown(served.entries()) == shown(twin.entries())
    # what learned policies say of a part of the models, or of numbers, is Python's
    assert decided or (policy in ("exp4", "stacking") and decider.startswith(("hedged", "mean")))


@pytest.mark.parametrize("decider", DECIDERS)
@pytest.mark.parametrize(
    "policy", ["ensemble", "static(weights={'m0': 2, 'm1': 0.5})", "exp4", "stacking", "mixture"]
)
def test_decisions_about_predictions_that_come_equal_pythons(
    new_world, monkeypatch, decider, policy
):
    """Models answer in any order, fail or are late: the answer is the same, and is counted and
    remembered alike, what comes after the decision too."""
    rng = random.Random(f"{decider} {policy}")
    calls = Calls(monkeypatch)
    seen = set()
    for n, kind in enumerate((*KINDS, *ODD)):
        fields = {
            "confidence_min": rng.choice((0.0, 0.0, 0.6)),
            "default": rng.choice((None, "none", 0.0, 7)),
        }
        served, twin = (Served(new_world(), policy, 3, decider, **fields) for _ in range(2))
        if n % 2 and not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(n), kind, 20)
        for i in range(8):
            events = random_events(rng, served.models, kind)
            answer = played(served, twin, np.full(2, float(i % 5)), events)
            seen.add((bool(answer.missing), answer.is_default))
        assert served.told() == twin.told()
    assert len(seen) > 2
    # floats beside labels are Python's
    assert calls.count < 12


def test_a_decision_that_needs_more_than_is_cached_calls_the_models(world):
    """The decider takes the predictions that are cached, and the other models are queried."""
    served = Served(world, "ensemble", 3, "majority")
    x = np.zeros(2)
    served.cores[0].predict(x)
    served.answer_all(["a"] * 3, [None] * 3)
    future = served.core.predict(x, "", SLO_US, 0, "")
    assert not future.done()
    assert (served.counters.queries.value, len(served.window)) == (1, 0)
    assert served.cores[0].engine.model_counts(served.cores[0].index)["hits"] == 1
    served.play([(10, 1, "a", None)])
    answer = future.result(0)
    assert (answer.output, answer.decided_by) == ("a", "majority")
    assert answer.models == served.models[:2]
    assert len(served.window) == 1


def test_a_decider_ends_when_the_policy_has_learned(world):
    """The order of the models follows the state."""
    served = Served(world, "stacking", 2, "best_quality")
    x = np.zeros(2)
    served.fill_cache(x, ["a", "b"], [None, None])
    outputs = []
    numbers = itertools.count(1)
    for right, times in (("a", 50), ("b", 500)):
        plan = Plan(served.models)
        arrived = {served.models[0]: Prediction("a"), served.models[1]: Prediction("b")}
        for _ in range(times):
            served.learner.observe(None, Observation(plan, arrived, Truth(right)), next(numbers))
        outputs.append(served.core.predict(x, "", SLO_US, 0, "").result(0).output)
    assert outputs == ["a", "b"]


def random_events(rng, models, outputs):
    """Return when each model answers and with what: an output, a failure or nothing in time."""
    events = []
    for i in range(len(models)):
        if rng.random() < 0.25:
            continue
        output = rng.choice(outputs) if rng.random() < 0.75 else Failure(f"line\nno {i}")
        sure = f32(rng.choice((None, None, 0.25, 0.5, 1.0)))
        events.append((rng.choice((10, 1_000, 4_000, 20_000)), i, output, sure))
    return sorted(events, key=lambda event: event[:2])


def played(served, twin, x, events):
    """Return the answer to a query of the core's application, after these events. It is the one of
    Python's, the twin, after the same."""
    future = served.core.predict(x, "ann", SLO_US, 0, "mine")
    assert isinstance(future.extra, ApplicationQuery)
    other = predict(twin.resolved, x, "ann", SLO_US, 0, id="mine")
    for each in (served, twin):
        each.play(events)
    answer = future.result(0)
    assert_same_answer(answer, other.result(0))
    return answer


def assert_same_answer(answer, expected, ignored=()):
    """Compare all but what the number of the query decides."""
    # NaN is not equal to itself
    assert repr(answer.qualifiers) == repr(expected.qualifiers)
    assert type(answer.output) is type(expected.output)
    assert shown(answer.output) == shown(expected.output)
    assert answer.confidence == pytest.approx(expected.confidence, abs=1e-12)
    assert answer.agreement == pytest.approx(expected.agreement, abs=1e-12)
    for name in (
        "models",
        "missing",
        "set",
        "reason",
        "decided_by",
        "is_default",
        "latency_us",
        "request_id",
    ):
        if name not in ignored:
            assert getattr(answer, name) == getattr(expected, name), name


class Calls:
    """Counts the answers that Python makes of queries that the core has scheduled."""

    def __init__(self, monkeypatch):
        self.count = 0
        monkeypatch.setattr(core_application, "finish", self.finish)

    def finish(self, future):
        self.count += 1
        return finish(future)


@pytest.mark.parametrize("policy", [one for one in POLICIES if not create_policy(one).chance])
@pytest.mark.parametrize("seed", range(2))
def test_answers_with_missing_predictions_equal_pythons(new_world, monkeypatch, policy, seed):
    """Models fail, are late, or say nothing finite: the answer of the others, or the default, is
    the same, and is counted and remembered alike."""
    rng = random.Random(f"{policy} {seed}")
    calls = Calls(monkeypatch)
    seen = set()
    for kind in (*KINDS, *ODD):
        k = rng.randint(1, 4)
        fields = {
            "confidence_min": rng.choice((0.0, 0.0, 0.6)),
            "default": rng.choice((None, "none", 0.0, 7)),
            "averages": kind in (KINDS[-2], ODD[0]),
        }
        served, twin = (Served(new_world(), policy, k, **fields) for _ in range(2))
        if seed and not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(seed), kind, 20)
        for i in range(12):
            events = random_events(rng, served.models, kind)
            answer = played(served, twin, np.full(2, float(i % 5)), events)
            seen.add((bool(answer.missing), answer.is_default, bool(answer.models)))
        assert served.told() == twin.told()
        # floats beside labels are Python's
        assert calls.count == 0
    partly = {(True, False, True)} if policy != "single" else set()
    assert seen >= {(True, True, False), (False, False, True)} | partly


def test_a_side_of_a_rollout_counts_its_answers_as_python_does(new_world):
    """The core counts for the guards of a rollout as Python does: answers, defaults, durations, and
    those beyond a limit."""
    rng = random.Random(7)
    sides = SideStats([1_000, 10_000]), SideStats([1_000, 10_000])
    served, twin = (
        Served(new_world(), "ensemble", 2, side=side, confidence_min=0.6) for side in sides
    )
    for i in range(40):
        played(
            served, twin, np.full(2, float(i % 9)), random_events(rng, served.models, ("a", "b"))
        )
        one, other = (side.counts() for side in sides)
        assert one == other
    assert one.answers == 40
    assert 0 < one.defaults < 40
    assert 0 < one.slower[10_000] <= one.slower[1_000] < 40


def test_queries_go_to_the_side_of_their_user(new_world):
    """Both sides are the core's, and the application itself has none."""
    new, before = (Served(new_world(), "ensemble", 1, side=SideStats([])) for _ in range(2))
    for each in (new, before):
        each.resolved = msgspec.structs.replace(each.resolved, core=each.core)
    split = SimpleNamespace(
        takes={"ann"}.__contains__,
        new=new.resolved,
        before=before.resolved,
        cores=new.resolved.cores,
    )
    whole = msgspec.structs.replace(
        before.resolved,
        rollout=msgspec.structs.replace(before.resolved.rollout, split=split),
        core=None,
    )
    assert core_of(whole) is None
    for user, side in (("ann", new), ("bob", before), (None, before)):
        future = predict(whole, np.zeros(2), user, SLO_US, 0)
        assert future.extra.application is side.core
        side.answer_all(["a"], [None])
        assert future.result(0).output == "a"
    assert new.resolved.rollout.side.counts().answers == 1
    assert before.resolved.rollout.side.counts().answers == 2


def test_a_prediction_that_is_missing_lowers_the_confidence(world):
    """The answer of two models names the third one as missing."""
    served = Served(world, "ensemble", 3)
    future = served.core.predict(np.zeros(2), "", SLO_US, 0, "")
    world.step(1)
    for container in served.containers[:2]:
        container.read()
        container.reply(lambda rows: ["cat"] * len(rows))
    world.pass_deadline(SLO_US)
    answer = future.result(0)
    assert (answer.output, answer.models) == ("cat", served.models[:2])
    assert answer.missing == served.models[2:]
    assert answer.confidence == pytest.approx(2 / 3)


def test_an_answer_that_is_not_sure_enough_is_the_default(world):
    served = Served(world, "ensemble", 2, confidence_min=0.9, default="none")
    for _ in range(2):
        future = served.core.predict(np.zeros(2), "", SLO_US, 0, "")
        served.answer_all(["a", "b"], [None, None])
        answer = future.result(0)
        assert (answer.output, answer.is_default) == ("none", True)
        assert "confidence 0.50 is below" in answer.reason
    assert served.counters.queries.value == 2


def random_qualifiers(rng, labels):
    """Return what a model reports beside its output: class probabilities, other values, both, or
    nothing that can be read."""
    kind = rng.random()
    if kind < 0.2:
        return b""
    if kind < 0.3:
        return rng.choice((b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({})))
    found = {}
    if kind < 0.8:
        for label in labels:
            if rng.random() < 0.8:
                text = label.decode("latin-1") if isinstance(label, bytes) else str(label)
                found[f"p:{text}"] = rng.choice((rng.random(), 1, 0.0, math.nan))
    if rng.random() < 0.4:
        found |= {"note": "é", "n": 3, "is_odd": True}
    return msgspec.msgpack.encode(found)


@pytest.mark.parametrize("policy", [one for one in POLICIES if not create_policy(one).chance])
@pytest.mark.parametrize("seed", range(3))
def test_answers_with_qualifiers_equal_pythons(new_world, monkeypatch, policy, seed):
    """Class probabilities weigh votes as in Python; an answer may be a label that they name and no
    model gave. Qualifiers are in the answer, and are remembered with it."""
    rng = random.Random(f"{policy} {seed}")
    calls = Calls(monkeypatch)
    named = 0
    for kind in (*KINDS, *ODD):
        served, twin = (Served(new_world(), policy, 1 + seed * 2) for _ in range(2))
        if not isinstance(served.learner.state(None), tuple):
            for each in (served, twin):
                each.learn(random.Random(seed), kind, 20 * seed)
        before = calls.count
        for i in range(10):
            outputs = [rng.choice(kind) for _ in served.models]
            sure = [f32(rng.choice((None, None, 0.25, 0.5, 1.0))) for _ in served.models]
            beside = [random_qualifiers(rng, kind) for _ in served.models]
            for _ in range(2):
                futures = [
                    served.core.predict(np.full(2, float(i)), "ann", SLO_US, 0, "mine"),
                    predict(twin.resolved, np.full(2, float(i)), "ann", SLO_US, 0, id="mine"),
                ]
                for each in (served, twin):
                    each.answer_all(outputs, sure, beside)
                answer, expected = (future.result(0) for future in futures)
                assert_same_answer(answer, expected, ignored=("latency_us",))
            named += answer.output not in outputs
        assert served.told() == twin.told()
        arrived = [[one.arrived for one in entries_of(each)] for each in (served, twin)]
        assert repr(arrived[0]) == repr(arrived[1])
        # labels of more than one kind, and large ones, are Python's
        if kind not in (KINDS[2], *ODD):
            assert calls.count == before
    if seed and policy in ("stacking", "mixture"):
        assert named


@pytest.mark.parametrize("policy", ["exp3", "linucb", "ab"])
def test_a_choice_by_chance_has_qualifiers(world, policy):
    """They are remembered with the probability of the choice, and its features."""
    served = Served(world, policy, 2)
    features = (1.0, 2.0) if policy == "linucb" else None
    for _ in range(6):
        future = served.core.predict(np.zeros(2), "", SLO_US, 0, "", features)
        served.answer_all(["a", "b"], [0.5, None], [msgspec.msgpack.encode({"x": 1})] * 2)
        answer = future.result(0)
        assert answer.qualifiers == {answer.models[0]: {"x": 1}}
        joined = entries_of(served)[-1]
        assert joined.arrived[answer.models[0]].qualifiers == {"x": 1}
        assert joined.plan.features == (features or ())
        assert len(joined.plan.probabilities) == (policy != "linucb")
        assert all(0.0 < one <= 1.0 for one in joined.plan.probabilities)


def test_qualifiers_are_in_the_answer(world):
    served = Served(world, "ensemble", 1)
    future = served.core.predict(np.zeros(2), "", SLO_US, 0, "")
    assert isinstance(future.extra, ApplicationQuery)
    world.step(1)
    served.containers[0].read()
    served.containers[0].reply(
        lambda rows: ["a"] * len(rows), qualifiers=[msgspec.msgpack.encode({"p:a": 0.7})]
    )
    assert future.result(0).qualifiers == {served.models[0]: {"p:a": 0.7}}


def test_a_salt_is_a_whole_number(world):
    served = Served(world, "ensemble", 2)
    table = ApplicationTable()
    table.replace({"app": served.core})
    handle = QueryHandle("app", table, 1e6, None)
    for salt in (-1, 2**64, 1.5, "1", None):
        with pytest.raises(StatusError, match="salt="):
            handle.predict(np.zeros(2), salt=salt)
    assert served.counters.queries.value == 0


def test_a_wrong_input_changes_nothing(world):
    served = Served(world, "ensemble", 2)
    for x in ("text", np.zeros(3), None):
        with pytest.raises(StatusError):
            served.core.predict(x, "", SLO_US, 0, "")
    assert served.counters.queries.value == 0
    assert len(served.window) == 0


@pytest.mark.parametrize("policy", ["exp3", "thompson", "ab(shares={'m0': 3, 'm1': 1})", "lints"])
def test_the_choice_follows_the_callers_id_as_in_python(world, policy):
    """A choice by chance is that of the random number of the id, by a learned state too."""
    served = Served(world, policy, 3)
    for learned in (0, 40):
        served.learn(random.Random(3), ("a", "b"), learned)
        chosen = []
        for i in range(40):
            future = served.core.predict(np.full(2, float(learned + i)), "", SLO_US, 0, f"id-{i}")
            _, plan = plan_for(served.resolved, None, None, f"id-{i}")
            found = future.extra.plan
            assert shown((found.models, found.probabilities)) == shown(
                (plan.models, plan.probabilities)
            )
            chosen.append(future.extra.models)
        served.answer_all(["a"] * 3, [None] * 3)
        assert len(set(chosen)) > 1
    assert {future.extra.id, future.result(0).request_id} == {"id-39"}


class Recorded:
    """A decoy that keeps what it is told."""

    def __init__(self):
        self.queries = []
        self.replies = []

    def saw(self, number, id, x, user, request_id):
        self.queries.append((number, id, x.tolist(), user, request_id))

    def add_reply(self, number, id, output, is_default):
        self.replies.append((number, id, output, is_default))


@pytest.mark.parametrize("decider", ["all", "majority"])
def test_decoys_are_told_of_each_query_and_of_its_answer(world, decider):
    """The queries are one that calls models, one from the cache, and one that gets a default."""
    served = Served(world, "ensemble", 3, decider, confidence_min=0.6)
    decoy = Recorded()
    rollout = msgspec.structs.replace(served.resolved.rollout, decoys=(decoy,))
    served.core = core_of(msgspec.structs.replace(served.resolved, rollout=rollout))
    x = np.array([1.0, 2.0])
    futures = []
    for _ in range(2):
        futures.append(served.core.predict(x, "ann", SLO_US, 0, "mine"))
        served.answer_all(["a"] * 3, [None] * 3)
        assert futures[-1].result(0).output == "a"
    futures.append(served.core.predict(np.zeros(2), "", SLO_US, 0, ""))
    served.answer_all(["a", "b", "c"], [None] * 3)
    assert futures[-1].result(0).is_default
    ids = [(future.id, f"n0-{future.id:x}") for future in futures]
    assert decoy.queries == [
        (*ids[0], [1.0, 2.0], "ann", "mine"),
        (*ids[1], [1.0, 2.0], "ann", "mine"),
        (*ids[2], [0.0, 0.0], "", ""),
    ]
    assert decoy.replies == [(*ids[0], "a", False), (*ids[1], "a", False), (*ids[2], None, True)]


class Link:
    """A model of a mesh that is not loaded."""

    is_on_demand = True

    def __init__(self):
        self.touched = 0

    def touch(self):
        self.touched += 1

    def reason(self):
        return "its node is away"


@pytest.mark.parametrize("decider", ["all", "majority"])
def test_links_of_a_mesh_are_told_of_each_query(world, decider):
    """A default says why a model of theirs was not loaded."""
    link = Link()
    model = VersionedModel("m1", 1)
    served = Served(world, "ensemble", 2, decider, on_demand={model: link})
    x = np.zeros(2)
    served.core.predict(x, "", SLO_US, 0, "")
    served.answer_all(["a"] * 2, [None] * 2)
    assert served.core.predict(x, "", SLO_US, 0, "").result(0).output == "a"
    assert link.touched == 2
    future = served.core.predict(np.ones(2), "", SLO_US, 0, "")
    world.pass_deadline(SLO_US)
    assert link.touched == 3
    assert "m1: its node is away" in future.result(0).reason


def test_only_the_link_that_is_chosen_is_told(world):
    links = {VersionedModel(f"m{i}", 1): Link() for i in range(3)}
    served = Served(world, "exp3", 3, on_demand=links)
    for i in range(30):
        [model] = served.core.predict(np.full(2, float(i)), "", SLO_US, 0, "").extra.models
        assert sum(link.touched for link in links.values()) == i + 1
        assert links[model].touched > 0
    served.answer_all(["a"] * 3, [None] * 3)


def test_shares_are_kept(world):
    served = Served(world, "ab(shares={'m0': 3, 'm1': 1})", 3)
    models = [
        served.core.predict(np.full(2, float(i)), "", SLO_US, 0, "").extra.models[0]
        for i in range(400)
    ]
    served.answer_all(["a"] * 3, [None] * 3)
    assert 240 < models.count(served.models[0]) < 360
    assert models.count(served.models[2]) == 0


def test_an_answer_at_once_is_like_any_other(world):
    """An answer from the cache is pickled, copied and printed, and its future is done."""
    served = Served(world, "ensemble", 3)
    for future, answer in served.ask(np.zeros(2), ["a", "a", "b"], [None] * 3):
        assert future.done()
        assert len(future) == 3
        assert future.statuses().tolist() == [1, 1, 1] or set(future.statuses()) == {
            future.statuses()[0]
        }
        assert future.latencies_us().shape == (3,)
        assert answer.id == f"n0-{future.id:x}"
        assert future.result(0) is answer
        assert pickle.loads(pickle.dumps(answer)).output == copy.copy(answer).output == "a"
        assert "from m0:1,m1:1,m2:1" in repr(answer)
        assert not future.cancel()


def test_a_user_has_a_state_of_their_own(world):
    served = Served(world, "stacking", 2)
    outputs, sure = ["a", "b"], [None, None]
    answers = []
    for learned in (False, True):
        if learned:
            plan = Plan(served.models)
            arrived = {served.models[1]: Prediction("b"), served.models[0]: Prediction("a")}
            for number in range(1, 51):
                served.learner.observe("ann", Observation(plan, arrived, Truth("b")), number)
        future = served.core.predict(np.zeros(2), "ann", SLO_US, 0, "")
        served.answer_all(outputs, sure)
        answers.append(future.result(0))
        other = served.core.predict(np.zeros(2), "", SLO_US, 0, "")
        served.answer_all(outputs, sure)
        assert other.result(0).models == served.models
    assert [answer.output for answer in answers] == ["a", "b"]


def test_a_handle_schedules_by_the_core_what_is_plain(world):
    """All others go to the other scheduler, with all that was given."""
    served = Served(world, "ensemble", 2)
    table = ApplicationTable()
    handle = QueryHandle("app", table, 60_000.0, Others())
    x = np.zeros(2)
    plain = (x, None, None, 0, None, "", (), None)
    assert handle.predict(x) == plain
    table.replace({"app": served.core})
    assert isinstance(handle.predict(x).extra, ApplicationQuery)
    assert isinstance(handle.predict(x, user="ann", slo_ms=5, salt=3).extra, ApplicationQuery)
    for name, value in (
        ("user", 5),
        ("user", "ü"),
        ("user", "a" * 513),
        ("slo_ms", -1),
        ("slo_ms", math.nan),
        ("slo_ms", True),
        ("slo_ms", 60_001.0),
        ("slo_ms", "5"),
        ("context", [1e9]),
        ("id", "mine"),
        ("outputs", ("a",)),
    ):
        assert value in handle.predict(x, **{name: value})[1:] or value != value
    with pytest.raises(Exception, match="slo_mss"):
        handle.predict(x, slo_mss=3)  # type: ignore[call-arg]
    served.answer_all(["a", "b"], [None, None])


@pytest.mark.parametrize("decider", ["all", "majority"])
def test_a_retired_application_is_freed_with_its_last_query(world, decider):
    """It waits for no garbage collector, and a query that comes late is answered as before."""
    served = Served(world, "ensemble", 2, decider)
    x = np.zeros(2)
    served.fill_cache(x, ["a", "a"], [None] * 2)
    assert served.core.predict(x, "", SLO_US, 0, "").result(0).output == "a"
    served.core.retire()
    assert served.core.predict(x, "", SLO_US, 0, "").result(0).output == "a"
    served.core.retire()
    gc.collect()
    gc.disable()
    try:
        before = applications()
        served.core = None
        assert applications() == before - 1
    finally:
        gc.enable()


def applications():
    """Return how many applications there are."""
    return sum(type(one) is Application for one in gc.get_objects())


def test_selections_are_of_policies_that_are_built_in():
    models = tuple(VersionedModel(f"m{i}", 1) for i in range(MODELS_MAX + 1))
    for policy in POLICIES:
        assert selection_of(create_policy(policy), models[:2]).models == models[:2] or (
            policy == "single"
        )
        found = selection_of(create_policy(policy), models)
        assert found.models == models[:1] if policy == "single" else found is None
    rule = Rule(RuleKind.EXP3, eta=0.1)
    for how, fields in (
        (Combining.LEARNED_VOTES, {}),
        (Combining.LEARNED_VOTES, {"rule": rule}),
        (Combining.CHOSEN_MODEL, {"rule": Rule(RuleKind.HEDGE, eta=0.1)}),
        (Combining.FIXED_VOTES, {}),
        (Combining.CHOSEN_MODEL, {"rule": Rule(RuleKind.LINEAR, eta=0.1)}),
        (Combining.DRAWN_MODEL, {"weights": [1.0]}),
    ):
        with pytest.raises(StatusError):
            Selection(how, models[:2], **fields)


def test_numbers_are_averaged_over_time(world):
    """The running means that stand for missing numbers learn from every answer."""
    served = Served(world, "ensemble", 2, means=ApplicationCounters().means)
    for i in range(4):
        future = served.core.predict(np.full(2, float(i)), "", SLO_US, 0, "")
        served.answer_all([float(i), 10.0], [None, None])
        assert future.result(0).output == pytest.approx((i + 10.0) / 2)
    means = served.resolved.means
    assert [means.of(model) for model in served.models] == [1.5, 10.0]


def test_memory_of_answers_goes_back(world):
    """Answers with texts and confidences leave nothing when the window lets them go."""
    served = Served(world, "ensemble", 2)
    for i in range(30):
        for _, answer in served.ask(np.full(2, float(i)), ["x" * 50, "y"], [0.5, None]):
            assert answer.output in ("x" * 50, "y")
    assert len(served.window) == 60
    assert served.window.nbytes > 60 * 50
    served.window.close()
    assert served.window.nbytes == 0
    gc.collect()
