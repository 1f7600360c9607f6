"""The streams of `python -m bench learning`: reproducible, and as hard as they say."""

import numpy as np
import pytest

from bench.harness import Sample, UnknownRows
from bench.learning import policies
from bench.learning.streams import NAMES, WORLDS, stream


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_reproducible_and_its_models_err_at_their_stated_rate(name: str) -> None:
    one, again, other = stream(name, 3, 0), stream(name, 3, 0), stream(name, 3, 1)
    assert np.array_equal(one.answers, again.answers)
    assert not np.array_equal(one.labels, other.labels)
    wrong = one.answers != one.labels[:, None]
    assert np.abs(wrong.mean(axis=0) - one.rates.mean(axis=0)).max() < 0.02
    assert one.confidence is None or ((one.confidence >= 0) & (one.confidence <= 1)).all()


def test_only_the_drawn_worlds_depend_on_the_seed() -> None:
    shapes = {seed: stream("drawn 1", seed, 0).rates.mean(axis=0).tolist() for seed in (1, 2)}
    assert shapes[1] != shapes[2]
    for name in ("ties", "confidences", "drift"):
        assert name in WORLDS
        first, second = (stream(name, seed, 0).rates.mean() for seed in (1, 2))
        assert abs(first - second) < 0.01


def test_feedback_of_a_stream_comes_late_or_rarely_and_may_be_wrong() -> None:
    assert stream("late", 1, 0).delay == 500
    assert 0.04 < stream("sparse", 1, 0).heard.mean() < 0.06
    noisy = stream("noise", 1, 0)
    assert 0.16 < (noisy.feedback != noisy.labels).mean() < 0.2


def test_a_run_has_the_error_of_the_first_model_if_nothing_is_learned() -> None:
    one = stream("fails", 1, 0)
    expected = (one.answers[:, 0] != one.labels).mean()
    assert policies.error("single", "fails", 1, 0) == pytest.approx(expected)


def test_goals_of_a_world_come_from_its_anchors() -> None:
    errors = {"ensemble": Sample((0.2,)), "stacking": Sample((0.3,))}
    goal = policies.goal_of(policies.MAIN, "fails", errors)
    assert goal is not None
    assert goal.bound == pytest.approx(0.203)
    goal = policies.goal_of(policies.MAIN, "class experts", errors)
    assert goal is not None
    assert goal.bound == 0.14
    assert policies.goal_of("exp4", "fails", errors) is None


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownRows, match="there are: fails"):
        policies.main(True, ["nothing"])


def test_models_of_real_data_err_apart_and_report_how_sure_they_are() -> None:
    one, again = (policies.stream("real digits", 1, i) for i in (0, 0))
    assert np.array_equal(one.answers, again.answers)
    rates = one.rates.mean(axis=0)
    assert (rates < 0.9).all()
    assert one.rates.min(axis=1).mean() < rates.min() / 3, "each knows what others do not"
    assert one.confidence is not None
    right = one.answers == one.labels[:, None]
    assert one.confidence[right].mean() > one.confidence[~right].mean()
