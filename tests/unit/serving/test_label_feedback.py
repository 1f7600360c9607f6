"""What the core reads from the objects of feedback is what Python would have."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Truth
from clipper.selection.policy import loss, losses
from clipper.types import VersionedModel
from clipper_core.learning.label_feedback import (
    Mean,
    alike,
    count_right,
    is_plain,
    label_columns,
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


class Counts(msgspec.Struct):
    feedback: Mean


class Given(msgspec.Struct):
    learner: object
    user: str
    plan: Plan
    arrived: dict[VersionedModel, Prediction]
    late: tuple[Any, ...] = ()


def seen_of(chance: random.Random, values: list[Any]) -> Observation:
    heard = {
        model: Prediction(chance.choice(values), chance.choice([None, 0.25]))
        for model in chance.sample(MODELS, chance.randint(1, 3))
    }
    plan = Plan(MODELS, (), (), tuple(chance.sample([0.5, -1.0], chance.randint(0, 2))))
    label = chance.choice([value for value in values if value is not None])
    return Observation(plan, heard, Truth(label), chance.choice(values), chance.choice([1.0, 2.5]))


def test_a_record_has_the_bytes_of_the_general_encoder() -> None:
    chance, head = random.Random(7), b"\x9d" + msgspec.msgpack.encode(("a", "exp4", ("a:1",)))[1:]
    for _ in range(300):
        seen = seen_of(chance, VALUES)
        said = [(PLACE[m], one.output, one.confidence) for m, one in seen.predictions.items()]
        truth, plan = seen.truth, seen.plan
        rest = msgspec.msgpack.encode(
            (
                *("ü", (0, 2), (0.25,), said, truth.label, truth.score),
                *(seen.answer, seen.weight, plan.features, 1_790_000_000_000_000),
            )
        )
        record = record_of(head, "ü", PLACE, (0, 2), (0.25,), seen, 1_790_000_000_000_000)
        assert record == head + rest[1:]


@pytest.mark.parametrize("value", [2**64, np.zeros(3), "x" * 3000, np.float64(0.5)])
def test_other_values_are_for_the_general_encoder(value: Any) -> None:
    seen = Observation(Plan(MODELS), {MODELS[0]: Prediction(value)}, Truth(1), 1)
    assert record_of(b"\x9d", "", PLACE, (0,), (), seen, 0) is None


def test_right_answers_are_counted_as_by_their_losses() -> None:
    chance, counts, right = random.Random(8), {m: Counts(Mean()) for m in MODELS[:2]}, Mean()
    expected, expected_right = {m: Mean() for m in MODELS[:2]}, Mean()
    for _ in range(300):
        seen = seen_of(chance, chance.choice([[0, 1, 2], ["x", "y"], [b"x", b""], [1, 1.0, True]]))
        kinds = {type(one.output) for one in seen.predictions.values()} | {type(seen.answer)}
        labels = kinds == {type(seen.truth.label)} and kinds != {float}
        truth, answer = seen.truth, seen.answer
        told = count_right(seen.predictions, truth.label, answer, seen.weight, counts, right)
        assert told == labels
        if labels:
            for model, lost in losses(seen).items():
                if model in expected:
                    expected[model].add(1.0 - lost, seen.weight)
            expected_right.add(1.0 - loss(seen.answer, seen.truth.label), seen.weight)
    assert {m: one.feedback.stats() for m, one in counts.items()} == {
        m: one.stats() for m, one in expected.items()
    }
    assert right.stats() == expected_right.stats()


def test_labels_that_need_no_check() -> None:
    assert all(map(is_plain, (0, True, -(2**63), 2**63 - 1, "text", b"bytes")))
    assert not any(map(is_plain, (None, 2**63, 0.5, "é", "\ud800", "x" * 1025, np.int64(1), [1])))
    heard = {MODELS[0]: Prediction(1), MODELS[1]: Prediction(2)}
    assert alike(3, heard)
    assert not alike(3.0, heard)
    assert not alike(True, heard)


def test_columns_of_a_list() -> None:
    one = Plan((MODELS[1],), (0.25,))
    found = [
        Given(None, "", Plan(MODELS), {m: Prediction(i, 0.5) for i, m in enumerate(MODELS)}),
        Given(None, "", one, {MODELS[1]: Prediction(7)}),
    ]
    columns = label_columns(found, MODELS, PLACE)
    assert columns is not None
    outputs, heard, confidence, asked, p = columns
    assert [column.tolist() for column in outputs] == [[0, 0], [1, 7], [2, 0]]
    assert [None if column is None else column.tolist() for column in heard] == [
        [True, False],
        None,
        [True, False],
    ]
    assert np.isnan(confidence[1][1])
    assert confidence[1][0] == 0.5
    assert asked.tolist() == [-1, 1]
    assert p.tolist() == [1.0, 0.25]
    for other in (2**63, "x", True):
        found[0].arrived[MODELS[0]] = Prediction(other)
        assert label_columns(found, MODELS, PLACE) is None
    assert label_columns([Given(None, "", Plan(MODELS[:2]), {})], MODELS, PLACE) is None
