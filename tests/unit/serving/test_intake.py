"""The number of records that are read at once: it grows, is halved, and stays bounded."""

import random

from clipper.serving.models.intake import Intake


def test_it_doubles_until_the_first_late_one_then_adds_one_a_window() -> None:
    intake = Intake(1000)
    sizes = []
    for _ in range(3):
        sizes.append(intake.size)
        for _ in range(intake.size):
            intake.record(False)
    assert sizes == [16, 32, 64]
    intake.record(True)
    assert intake.size == 64
    for _ in range(64):
        intake.record(False)
    assert intake.size == 64, "these were asked before"
    for _ in range(70):
        intake.record(False)
    assert 65 <= intake.size <= 66


def test_one_window_of_late_ones_halves_once() -> None:
    intake = Intake(64)
    for _ in range(100):
        intake.record(False)
    assert intake.size == 64
    for _ in range(64):
        intake.record(True)
    assert intake.size == 32
    intake.record(True)
    assert intake.size == 16


def test_it_stays_within_its_bounds() -> None:
    draw = random.Random(1)
    for size_max in (1, 2, 7, 500):
        intake = Intake(size_max)
        for _ in range(5000):
            intake.record(draw.random() < draw.choice((0.0, 0.01, 0.9)))
            assert 1 <= intake.size <= size_max


def test_it_finds_what_a_model_can_do() -> None:
    """A model is late if more than 100 records are in flight: it is kept busy but rarely late."""
    intake, late, total = Intake(10_000), 0, 0
    for _ in range(2000):
        size = intake.size
        for i in range(size):
            intake.record(i >= 100)
        late, total = late + max(0, size - 100), total + size
    assert total / 2000 > 60
    assert late / total < 0.05
