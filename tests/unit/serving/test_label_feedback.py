"""The core reads feedback objects as Python does."""

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.errors import Overloaded
from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.policy import loss, losses
from clipper.serving.feedback.journal_records import read, written
from clipper.serving.feedback.states import Learner, States
from clipper.store.journal import Journal, read_journal
from clipper.store.memory import MemoryStore
from clipper.types import Answer, VersionedModel
from clipper_core.learning.answer_window import AnswerWindow
from clipper_core.learning.label_feedback import (
    LabelCounts,
    Mean,
    alike,
    is_plain,
    learn_label,
    learn_labels,
    record_of,
)

MODELS = tuple(VersionedModel(name, 1) for name in "abc")
PLACE = {model: i for i, model in enumerate(MODELS)}
EDGES = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1]
VALUES: list[Any] = [
    *EDGES,
    *(-edge - 1 for edge in EDGES),
    *("", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "é", b"", b"x" * 255, b"x" * 256),
    *(None, True, False, 0.5, float("inf"), -0.0),
]
QUALIFIERS: list[Any] = [{}, {"p:1": 0.5, "p:2": 1}, {f"p:{i}": "é" for i in range(16)}]


class Counts(msgspec.Struct):
    feedback: Mean


def seen_of(chance: random.Random, values: list[Any]) -> Observation:
    predictions = {
        model: Prediction(
            chance.choice(values), chance.choice([None, 0.25]), chance.choice(QUALIFIERS)
        )
        for model in chance.sample(MODELS, chance.randint(1, 3))
    }
    plan = Plan(MODELS, (), (), tuple(chance.sample([0.5, -1.0], chance.randint(0, 2))))
    label = chance.choice([value for value in values if value is not None])
    return Observation(
        plan, predictions, Truth(label), chance.choice(values), chance.choice([1.0, 2.5])
    )


def test_a_record_has_the_bytes_of_the_general_encoder() -> None:
    chance, head = random.Random(7), b"\x9d" + msgspec.msgpack.encode(("a", "exp4", ("a:1",)))[1:]
    for _ in range(300):
        seen = seen_of(chance, VALUES)
        predictions = [
            (PLACE[m], one.output, one.confidence, *([one.qualifiers] if one.qualifiers else []))
            for m, one in seen.predictions.items()
        ]
        truth, plan = seen.truth, seen.plan
        rest = msgspec.msgpack.encode(
            (
                *("ü", (0, 2), (0.25,), predictions, truth.label, truth.score),
                *(seen.answer, seen.weight, plan.features, 1_790_000_000_000_000),
            )
        )
        record = record_of(head, "ü", PLACE, (0, 2), (0.25,), seen, 1_790_000_000_000_000)
        assert record == head + rest[1:]


@pytest.mark.parametrize("value", [2**64, np.zeros(3), "x" * 3000, np.float64(0.5)])
def test_other_values_are_for_the_general_encoder(value: Any) -> None:
    seen = Observation(Plan(MODELS), {MODELS[0]: Prediction(value)}, Truth(1), 1)
    assert record_of(b"\x9d", "", PLACE, (0,), (), seen, 0) is None


def test_predictions_may_be_of_any_types_in_turn() -> None:
    class Slots:
        __slots__ = "confidence", "output", "qualifiers"
        output: int
        confidence: None
        qualifiers: None

    class Plain:
        output, confidence, qualifiers = 7, None, None

    class Computed(Prediction):
        def __getattribute__(self, name: str) -> Any:
            return 9 if name == "output" else None

    slots, derived = Slots(), type("Derived", (Prediction,), {})(5)
    for prediction, output in [
        *((Prediction(3), 3), (slots, None), (Plain(), 7), (Prediction(4), 4)),
        *((Computed(1), 9), (derived, 5), (slots, 8), (Prediction(6), 6)),
    ]:
        seen = Observation(Plan(MODELS), {MODELS[0]: prediction}, Truth(1), 1)  # type: ignore[dict-item]
        if output is None:  # an empty slot
            with pytest.raises(AttributeError, match="output"):
                record_of(b"\x9d", "", PLACE, (0,), (), seen, 0)
            slots.output, slots.confidence, slots.qualifiers = 8, None, None
        else:
            record = record_of(b"\x9d", "", PLACE, (0,), (), seen, 0)
            assert record is not None
            assert bytes([0x93, 0, output, 0xC0]) in record


def test_right_answers_are_counted_as_by_their_losses() -> None:
    chance, counts, right = random.Random(8), {m: Counts(Mean()) for m in MODELS[:2]}, Mean()
    expected, expected_right = {m: Mean() for m in MODELS[:2]}, Mean()
    labels_right = LabelCounts(counts, right)
    for _ in range(300):
        seen = seen_of(chance, chance.choice([[0, 1, 2], ["x", "y"], [b"x", b""], [1, 1.0, True]]))
        kinds = {type(one.output) for one in seen.predictions.values()} | {type(seen.answer)}
        labels = kinds == {type(seen.truth.label)} and kinds != {float}
        truth, answer = seen.truth, seen.answer
        is_counted = labels_right.count(seen.predictions, truth.label, answer, seen.weight)
        assert is_counted == labels
        if labels:
            for model, model_loss in losses(seen).items():
                if model in expected:
                    expected[model].add(1.0 - model_loss, seen.weight)
            expected_right.add(1.0 - loss(seen.answer, seen.truth.label), seen.weight)
    assert {m: one.feedback.stats() for m, one in counts.items()} == {
        m: one.stats() for m, one in expected.items()
    }
    assert right.stats() == expected_right.stats()


def test_labels_that_need_no_check() -> None:
    assert all(map(is_plain, (0, True, -(2**63), 2**63 - 1, "text", b"bytes")))
    assert not any(map(is_plain, (None, 2**63, 0.5, "é", "\ud800", "x" * 1025, np.int64(1), [1])))
    predictions = {MODELS[0]: Prediction(1), MODELS[1]: Prediction(2)}
    assert alike(3, predictions)
    assert not alike(3.0, predictions)
    assert not alike(True, predictions)


@pytest.mark.parametrize("seed", range(8))
def test_labels_are_learned_in_the_core_as_by_the_policy(seed: int) -> None:
    """Labels one by one and in lists, of several users, each sent twice, give the same state and
    journal as `observe_one` in the same order."""
    chance = random.Random(seed)
    text = chance.choice(["exp3", "kl_ucb", "exp4", "stacking", "mixture", "ensemble"])
    one, other = learner_of(text), learner_of(text)
    table = window_of()
    values: list[Any] = chance.choice(
        [[0, 1, 70], ["x", "yy", "z"], [b"x", b""], [True, False], [0, "x"]]
    )
    counted = 0
    for turn in range(40):
        ids = [f"n-{100 * turn + i + 1:x}" for i in range(chance.choice([1, 1, 30]))]
        for id in ids:
            plan = plan_of(text, chance)
            predictions = {
                model: Prediction(
                    chance.choice(values),
                    chance.choice([None, 0.25, math.nan]),
                    chance.choice([{}, {"speed": 1}]),
                )
                for model in chance.sample(MODELS, chance.randint(1, 3))
            }
            user = chance.choice(["", "u", "v", f"w{turn}"])
            answer = chance.choice([*values, None])
            table.add(number_in(id), one, user, plan, predictions, answer)
        labels = [chance.choice(values) for _ in ids]
        if len(ids) > 1:
            found = learn_labels(table, [*ids, ids[0]], "app", [*labels, labels[0]])
            learned = found == len(ids)
        else:
            learned = learn_label(table, ids[0], "app", labels[0]) is True
            assert learn_label(table, ids[0], "app", labels[0]) is (False if learned else None)
        if not learned:
            assert not any(joined.has_feedback for joined in map(table.get, ids) if joined)
            continue
        counted += len(ids)
        for id, label in zip(ids, labels, strict=True):
            joined = table.get(id)
            assert joined is not None
            assert joined.has_feedback
            seen = Observation(joined.plan, joined.arrived, Truth(label), joined.answer)
            other.states.observe_one(other, joined.user, seen, written(other, joined.user, seen))
    assert counted or len({type(value) for value in values}) > 1
    assert one.states.journal.last == other.states.journal.last == counted
    assert one.users() == other.users()
    if one.learns:
        for user in one.users():
            encoded = [each.policy.encode(each.state(user)) for each in (one, other)]
            assert encoded[0] == encoded[1]
            assert one.held(user).applied == other.held(user).applied
    one.states.close()
    other.states.close()


@pytest.mark.parametrize("text", ["mixture", "stacking", "exp4", "ensemble"])
def test_class_probabilities_are_kept_and_learned_in_the_core(text: str, tmp_path: Path) -> None:
    """The core learns them one by one and in lists; reading the journal gives the same."""
    states = States(MemoryStore(), Journal(tmp_path), "n", 100, 1e9)
    learner = states.learner("app", text, create_policy(text), MODELS)
    table = window_of()
    for i in range(20):
        predictions = {
            model: Prediction(i % 3, 0.5, {f"p:{label}": p for label, p in enumerate([0.2, j / 4])})
            for j, model in enumerate(MODELS)
        }
        table.add(i + 1, learner, "", Plan(MODELS), predictions, 1)
        learns = learn_label(table, f"n-{i + 1:x}", "app", i % 2) if i % 3 else None
        assert learns or learn_labels(table, [f"n-{i + 1:x}"], "app", [i % 2]) == 1
    assert table.nbytes > 20 * 6 * 100
    states.close()
    policy: Any = create_policy(text)
    state = policy.init(MODELS)
    for record in read_journal(tmp_path):
        _, _, _, _, found = read(record)
        assert isinstance(found, Observation)
        assert set(found.predictions[MODELS[0]].qualifiers) == {"p:0", "p:1"}
        if learner.learns:
            state = policy.observe(state, found)
    if learner.learns:
        assert policy.encode(state) == policy.encode(learner.state(""))


def window_of() -> AnswerWindow:
    return AnswerWindow(1000, 60.0, 1 << 30, Answer, Prediction, Plan, node="n")


def number_in(id: str) -> int:
    return int(id.removeprefix("n-"), 16)


def learner_of(text: str) -> Learner:
    states = States(MemoryStore(), Journal(None), "n", 100, 1e9)
    return states.learner("app", text, create_policy(text), MODELS)


def plan_of(text: str, chance: random.Random) -> Plan:
    if text in ("exp3", "kl_ucb"):
        return Plan((chance.choice(MODELS),), (0.25,))
    return Plan(MODELS, (), (), tuple(chance.sample([0.5, -1.0], chance.randint(0, 2))))


def is_refused(table: AnswerWindow, id: str) -> bool:
    try:
        return learn_label(table, id, "app", 1) is not True
    except Overloaded:
        return True


def test_feedback_that_the_journal_refuses_may_be_sent_again(tmp_path: Path) -> None:
    states = States(MemoryStore(), Journal(tmp_path, "os", 1500), "n", 100, 1e9)
    learner = states.learner("app", "stacking", create_policy("stacking"), MODELS)
    table = window_of()
    ids = [f"n-{i + 1:x}" for i in range(30)]
    for id in ids:
        table.add(
            number_in(id), learner, "", Plan(MODELS), {model: Prediction(1) for model in MODELS}, 1
        )
    with pytest.raises(Overloaded):
        learn_labels(table, ids, "app", [1] * 30)
    assert learner.state("").seen == 0
    count_before = next(i for i, id in enumerate(ids) if is_refused(table, id))
    assert 10 < count_before < 30
    assert learner.state("").seen == count_before == states.journal.last
    states.journal.bytes_max = 1 << 20
    assert learn_labels(table, ids, "app", [1] * 30) == 30 - count_before
    assert learner.state("").seen == 30
    states.close()
    assert len(list(read_journal(tmp_path))) == 30


def test_a_list_counts_how_users_differ_as_one_by_one() -> None:
    found = []
    for in_lists in (True, False):
        chance, learner = random.Random(9), learner_of("exp4")
        table = window_of()
        ids = [f"n-{i + 1:x}" for i in range(40)]
        for i, id in enumerate(ids):
            predictions = {model: Prediction(chance.choice([0, 1])) for model in MODELS}
            table.add(number_in(id), learner, "uv"[i % 2], plan_of("exp4", chance), predictions, 1)
        for id in ids[:2]:  # who is new does not learn in a list
            assert learn_label(table, id, "app", 1)
        if in_lists:
            assert learn_labels(table, ids[2:], "app", [1] * 38) == 38
        else:
            assert all(learn_label(table, id, "app", 1) for id in ids[2:])
        found.append(learner.shared.state.differences)
        learner.states.close()
    assert found[0] == found[1]
    assert sorted(row[0] for row in found[0].users.values()) == [20, 20]
