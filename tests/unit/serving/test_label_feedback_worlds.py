"""Labels learned from the entries of the window, in random worlds, beside the general path."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.serving.feedback.journal_records import written
from clipper.serving.feedback.states import Learner, States
from clipper.serving.feedback.window import FeedbackWindow, seen_of
from clipper.serving.query.stats import ApplicationCounters
from clipper.store.journal import Journal, read_journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel
from clipper_core.learning.answer_window import Joined
from clipper_core.learning.label_feedback import learn_label, learn_labels
from clipper_core.results.answer import Answer, answer_of

MODELS = tuple(VersionedModel(name, 1) for name in "abcd")
POLICIES = (
    *("exp3", "squarecb", "kl_ucb", "thompson", "tsallis_inf", "bandit", "linucb", "exp4"),
    *("stacking", "mixture", "ensemble", "stacking(coverage=0.8)", "mixture(coverage=0.8)"),
)
ALL_MODELS = ("exp4", "stacking", "mixture", "ensemble")
KINDS: dict[str, list[Any]] = {
    "int": [0, 1, 2, 70, 2**63 - 1],
    "negative": [-1, -2, -65, -(2**63)],
    "above 2^63": [2**63, 2**64 - 1, 2**63 + 1, 5],
    "bool": [True, False],
    "str": ["", "x", "yy", "z" * 300],
    "other str": ["é", "x", "日本"],
    "bytes": [b"", b"x", b"\xff\x00"],
    "float": [0.5, -0.0, math.inf, math.nan, 2.0],
    "mixed": [0, "x", b"x", True, 1.0, None],
}
TIME_BYTES = 9  # at the end of a record


class Side:
    """A server with its states, its journal and its counts."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        self.states = States(MemoryStore(), Journal(folder), "n", 100, 1e9)
        self.learner: Learner = self.states.learner("app", text, create_policy(text), MODELS)
        self.counters = ApplicationCounters()
        self.counters.for_models(MODELS, None)
        self.learner.watcher = self.counters

    def learn(self, user: str, seen: Observation) -> None:
        """Learn as the general path does."""
        learner = self.learner
        record = written(learner, user, seen)
        self.states.commit(self.states.observe_one(learner, user, seen, record))
        self.counters.on_feedback(seen)

    def counted(self) -> Any:
        """Return what was counted of labels."""
        by_model = {model: self.counters.of(model).feedback for model in MODELS}
        means = {"": self.counters.labels.right, **by_model}
        return {str(of): (mean.n, mean.total) for of, mean in means.items()}

    def learned(self) -> Any:
        """Return the bytes of all states, with what is in each."""
        if not self.learner.learns:
            return None
        encode = self.learner.policy.encode
        return {
            user: (encode(held.state), held.applied, held.since)
            for user in self.learner.users()
            for held in [self.learner.held(user)]
        }

    def records(self) -> list[bytes]:
        """Close, and return the records without their times."""
        self.states.close()
        return [record[:-TIME_BYTES] for record in read_journal(self.folder)]


class World:
    """Answers and labels by chance."""

    def __init__(self, seed: int, tmp_path: Path) -> None:
        self.draw = draw = random.Random(seed)
        self.text = POLICIES[seed % len(POLICIES)]
        kind = draw.choice([*KINDS, "int", "str"])
        self.values = KINDS[kind]
        self.labels = self.values if draw.random() < 0.8 else [*self.values, 1, "x"]
        self.core, self.twin = (Side(tmp_path / name, self.text) for name in ("core", "twin"))
        self.window = FeedbackWindow(10_000, 60.0, node="n")
        self.number = 0
        self.given: dict[int, Answer] = {}

    def plan(self) -> Plan:
        """Return what a query chose."""
        if self.text.partition("(")[0] in ALL_MODELS:
            models = MODELS
        else:
            models = (self.draw.choice(MODELS),)
        odds = (self.draw.random(),) if len(models) == 1 and self.draw.random() < 0.7 else ()
        features = tuple(self.draw.sample([0.5, -1.0], 2)) if self.draw.random() < 0.1 else ()
        return Plan(models, odds, (), features)

    def answer(self) -> str | Answer:
        """Add an answer; return it or its id."""
        draw, window = self.draw, self.window
        self.number += 1
        user = draw.choice(["", "", "u", "ü", f"w{draw.randrange(30)}"])
        if draw.random() < 0.15 and self.text.partition("(")[0] not in ALL_MODELS:
            owner = window.owner(self.core.learner, (draw.choice(MODELS),))
            output = draw.choice([v for v in self.values if v is not None])
            if type(output) is int and output >= 2**63:
                output = np.array(output, np.uint64)
            window.table.add_output(self.number, owner, output, user)
            return f"n-{self.number:x}"
        plan = self.plan()
        arrived = {
            model: Prediction(
                draw.choice(self.values),
                draw.choice([None, 0.25, 1.5, math.nan, -0.0]),
                {"speed": 1, "p:1": 0.5} if draw.random() < 0.05 else {},
            )
            for model in draw.sample(plan.models, draw.randint(0, len(plan.models)))
        }
        output = draw.choice([*self.values, *self.values, None, 0.5, -0.0])
        window.add(self.number, self.core.learner, user, plan, arrived, output)
        if draw.random() < 0.5:
            return f"n-{self.number:x}"

        class Combined:
            confidence = 1.0
            used = ()
            agreement = 1.0
            set = ()

        return answer_of(output, Combined, "", (), 1, "n", self.number, "all", "", {})

    def joined(self, prediction: str | Answer) -> Joined:
        """Return an answer as the general path has it."""
        id = prediction if isinstance(prediction, str) else prediction.id
        found = self.window.table.get(id)
        assert found is not None
        return found

    def both(self, prediction: str | Answer, label: Any, is_learned: bool) -> None:
        """Learn a label on the twin's side, and on the core's if that has not learned it."""
        joined = self.joined(prediction)
        assert joined.has_feedback == is_learned
        seen = seen_of(joined, Truth(label))
        if not is_learned:
            joined.has_feedback = True
            self.core.learn(joined.user, seen)
        self.twin.learn(joined.user, seen)


@pytest.mark.parametrize("seed", range(4 * len(POLICIES)))
def test_states_journal_and_counts_are_those_of_the_general_path(seed: int, tmp_path: Path) -> None:
    world = World(seed, tmp_path)
    draw = world.draw
    table = world.window.table
    fast = 0
    for _ in range(60):
        predictions = [world.answer() for _ in range(draw.choice([1, 1, 1, 20]))]
        labels = [draw.choice(world.labels) for _ in predictions]
        if len(predictions) == 1:
            counts = learn_label(table, predictions[0], "app", labels[0])
            learned = counts is True
            assert counts is not False
            if learned:
                assert learn_label(table, predictions[0], "app", labels[0]) is False
        else:
            again = [*predictions, predictions[0]], [*labels, labels[0]]
            count = learn_labels(table, again[0], "app", again[1])
            assert count in (None, len(predictions))
            learned = count is not None
        fast += learned
        assert learn_label(table, predictions[0], "other", 1) is None
        for prediction, label in zip(predictions, labels, strict=True):
            if label is not None:
                world.both(prediction, label, learned)
            else:
                assert not learned
        if draw.random() < 0.3:
            assert world.core.learner.state("u") is world.core.learner.state("u")
    assert world.core.learned() == world.twin.learned()
    assert repr(world.core.counted()) == repr(world.twin.counted())
    records = world.core.records()
    assert records == world.twin.records()
    assert fast > 5 or world.values in (KINDS["float"], KINDS["mixed"], KINDS["above 2^63"])


def test_a_state_is_made_once_for_each_block() -> None:
    states = States(MemoryStore(), Journal(None), "n", 100, 1e9)
    learner = states.learner("app", "mixture", create_policy("mixture"), MODELS)
    window = FeedbackWindow(100, 60.0, node="n")
    found = []
    for number in range(1, 20):
        window.add(number, learner, "u", Plan(MODELS), {MODELS[0]: Prediction(number % 3)}, 1)
        assert learn_label(window.table, f"n-{number:x}", "app", 1)
        state = learner.held("u").state
        assert state is learner.state("u")
        assert state.seen == number
        assert not state.rows.flags.writeable
        found.append((state, state.rows.copy()))
    for state, rows in found:
        assert np.array_equal(state.rows, rows), "a state that somebody has does not change"
    assert learner.held("u").applied == {"n": 19}
    learner.held("u").applied["m"] = 3
    assert learner.held("u").applied == {"n": 19, "m": 3}
    states.close()


def test_models_that_are_counted_no_more_are_looked_up_again() -> None:
    states = States(MemoryStore(), Journal(None), "n", 100, 1e9)
    learner = states.learner("app", "exp4", create_policy("exp4"), MODELS)
    counters = ApplicationCounters()
    learner.watcher = counters
    window = FeedbackWindow(100, 60.0, node="n")
    for number, counted in enumerate((MODELS, MODELS[:2], MODELS), 1):
        counters.for_models(counted, None)
        before = {model: counters.of(model).feedback.n for model in counted}
        arrived = {model: Prediction(1) for model in MODELS}
        window.add(number, learner, "", Plan(MODELS), arrived, 1)
        assert learn_label(window.table, f"n-{number:x}", "app", 1)
        assert {model: counters.of(model).feedback.n for model in counted} == {
            model: n + 1 for model, n in before.items()
        }
    assert counters.of(MODELS[3]).feedback.n == 1
    states.close()
