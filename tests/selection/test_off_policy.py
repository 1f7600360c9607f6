"""Off-policy evaluation against simulated logs whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from clipper.errors import NotAllowed
from clipper.selection import Observation, Plan, Prediction, Query, Truth, create_policy
from clipper.selection.learning.off_policy import Estimate, Evaluation, evaluate
from clipper.types import VersionedModel

MODELS = tuple(VersionedModel(name, 1) for name in "abcd")
ACCURACY = (0.55, 0.7, 0.8, 0.9)


def truths(count: int, seed: int, accuracy: Sequence[float] = ACCURACY) -> Iterator[dict]:
    """Yield, for each query, what each model predicts; 1 is right."""
    random_ = random.Random(seed)
    for _ in range(count):
        yield {
            model: Prediction(int(random_.random() < right))
            for model, right in zip(MODELS, accuracy, strict=True)
        }


def log_of(policy_name: str, count: int, seed: int) -> list[Observation]:
    """Run a policy on the world and return what it logged."""
    policy, random_ = create_policy(policy_name), random.Random(seed + 1_000_000)
    state, log = policy.init(MODELS), []
    for said in truths(count, seed):
        plan = policy.select(state, Query(uniform=random_.random()), MODELS)
        seen = Observation(plan, {model: said[model] for model in plan.models}, Truth(1))
        state = policy.observe(state, seen)
        log.append(seen)
    return log


def value_of(policy_name: str, count: int, seed: int) -> float:
    """Run a policy on the world; return the share of queries that it answered rightly."""
    log = log_of(policy_name, count, seed)
    policy = create_policy(policy_name)
    state, right = policy.init(MODELS), 0
    for seen in log:
        combined = policy.combine(state, seen.predictions, ())
        right += combined.output == 1
        state = policy.observe(state, seen)
    return right / count


def holds(estimate: Estimate, truth: float) -> bool:
    return abs(estimate.value - truth) <= 2 * estimate.standard_error


@pytest.mark.slow
def test_estimates_of_a_fixed_policy_hold_the_truth_in_95_of_100_logs() -> None:
    policy = create_policy("ab(shares={'a': 1, 'b': 2, 'c': 3, 'd': 4})")
    truth = sum(share * right for share, right in zip((0.1, 0.2, 0.3, 0.4), ACCURACY, strict=True))
    logs = (log_of("epsilon_greedy(epsilon=0.4)", 300, seed) for seed in range(200))
    found = [evaluate(policy, MODELS, log) for log in logs]
    for kind in ("ips", "snips", "dr"):
        estimates = [getattr(each, kind) for each in found]
        covered = sum(holds(estimate, truth) for estimate in estimates)
        assert covered >= 0.925 * len(found), f"{kind}: expected are 95.4 %; this is 2 sd below"
        bias = sum(estimate.value for estimate in estimates) / len(found) - truth
        assert abs(bias) < 0.01, kind


@pytest.mark.slow
def test_doubly_robust_estimates_vary_less_than_ips() -> None:
    policy = create_policy("ab(shares={'a': 1, 'b': 1, 'c': 1, 'd': 1})")
    found = [evaluate(policy, MODELS, log_of("exp3(floor=0.05)", 800, seed)) for seed in range(20)]
    widths = {
        kind: sum(getattr(each, kind).standard_error for each in found) for kind in ("ips", "dr")
    }
    assert widths["dr"] < 0.9 * widths["ips"]


@pytest.mark.slow
def test_a_policy_that_learns_is_scored_before_it_learns() -> None:
    """The estimate from a log of all predictions equals that of a run of the policy."""
    count, found, true = 1500, [], []
    for seed in range(8):
        found.append(evaluate(create_policy("squarecb"), MODELS, log_of("ensemble", count, seed)))
        true.append(value_of("squarecb", count, seed + 500))
    mean = sum(each.ips.value for each in found) / len(found)
    assert abs(mean - sum(true) / len(true)) < 0.04, "runs of different seeds"
    assert all(each.effective == count and each.skipped == 0 for each in found)
    assert mean > 0.8, "it has learned to ask the better models"


@pytest.mark.slow
def test_better_policies_are_distinguished_from_worse_ones() -> None:
    log = log_of("epsilon_greedy(epsilon=0.5)", 1500, 7)
    found: dict[str, Evaluation] = {
        name: evaluate(create_policy(name), MODELS, log)
        for name in ("exp3", "squarecb", "ab(shares={'a': 1})")
    }
    bad = found.pop("ab(shares={'a': 1})")
    assert all(each.dr.low > bad.dr.high for each in found.values())
    assert bad.logged is not None
    assert bad.logged.value > bad.dr.high


def test_a_log_without_randomness_is_refused_with_the_reason() -> None:
    log = [
        Observation(Plan(MODELS[:1], (1.0,)), {MODELS[0]: Prediction(1)}, Truth(1))
        for _ in range(50)
    ]
    with pytest.raises(NotAllowed, match="50 logged choices were made without randomness"):
        evaluate(create_policy("exp3"), MODELS, log)


def test_a_policy_that_combines_needs_the_predictions_of_all_models() -> None:
    log = log_of("exp3", 60, 1)
    with pytest.raises(NotAllowed, match="60 logged queries were not answered by all models"):
        evaluate(create_policy("ensemble"), MODELS, log)


def test_a_combining_policy_is_scored_on_a_log_of_all_predictions() -> None:
    found = evaluate(create_policy("stacking"), MODELS, log_of("ensemble", 1000, 3))
    assert found.queries == 1000
    assert found.ips == found.dr
    assert found.ips.low > 0.85
    assert found.logged is None


@pytest.mark.parametrize("count", [0, 19])
def test_a_short_log_is_refused(count: int) -> None:
    with pytest.raises(NotAllowed, match=f"{count} usable observations; 20 are needed"):
        evaluate(create_policy("exp3"), MODELS, log_of("epsilon_greedy(epsilon=0.9)", count, 1))


def test_observations_without_information_are_skipped_and_counted() -> None:
    log = log_of("epsilon_greedy(epsilon=0.9)", 30, 1)
    silent = Observation(log[0].plan, {}, Truth(1))
    strange = Observation(log[0].plan, log[0].predictions, Truth(1), weight=float("nan"))
    stranger = VersionedModel("z", 1)
    other = Observation(Plan((stranger,), (0.5,)), {stranger: Prediction(1)}, Truth(1))
    found = evaluate(create_policy("exp3"), MODELS, [*log, silent, strange, other])
    assert (found.queries, found.skipped) == (30, 3)


def test_weights_of_known_choices_are_exact() -> None:
    """Ten queries went to each of two models, at probability 0.5; the policy selects the first."""
    models = MODELS[:2]
    log = [
        Observation(Plan((model,), (0.5,)), {model: Prediction(said)}, Truth(1))
        for model, said in ((models[0], 1), (models[1], 0)) * 10
    ]
    found = evaluate(create_policy("ab(shares={'a': 1, 'b': 0})"), models, log)
    assert found.ips.value == found.snips.value == pytest.approx(1.0)
    assert found.effective == pytest.approx(10)
    assert found.logged is not None
    assert found.logged.value == 0.5
