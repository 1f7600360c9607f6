"""Measures what choosing, combining and learning cost, each rule beside an anchor: a call that does
nothing, numpy, river.

pytest bench/micro/bench_bandit.py --benchmark-columns=min,median,iqr --benchmark-group-by=group

Goal: to choose and to combine by a built-in policy takes at most 1 us in the core, for up to 8
models: the rows `core`. The rows `whole` are the same through the policy's methods, dictionaries of
predictions included.
"""

from typing import Any

import numpy as np
import pytest

from clipper.selection import Observation, Prediction, Query, Truth, create_policy
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.linear import Blend, Context

MODELS = (5, 8)
RULES: dict[str, tuple[Rule, tuple[float, ...]]] = {
    "exp3": (Rule(RuleKind.EXP3, eta=0.1, floor=1e-6), (0.0,)),
    "squarecb": (
        Rule(RuleKind.SQUARECB, eta=1000.0, discount=0.01, share=0.001, floor=0.0005),
        (0.3, 100.0, 0.3),
    ),
    "thompson": (Rule(RuleKind.THOMPSON, discount=0.9995), (70.0, 30.0)),
    "kl_ucb": (Rule(RuleKind.KL_UCB), (30.0, 100.0)),
    "tsallis_inf": (Rule(RuleKind.TSALLIS, eta=0.15, discount=0.999, floor=1e-3), (0.0,)),
}
WEIGHING = {
    "exp4": (Rule(RuleKind.HEDGE, eta=0.1, share=0.03), (0.0,)),
    "logodds": (Rule(RuleKind.LOGODDS, discount=0.998), (70.0, 100.0)),
    "stacking": (Rule(RuleKind.STACKING, eta=0.02), (1.0,)),
}
WHOLE = (
    "ensemble",
    "mixture",
    "bandit",
    "exp4",
    "stacking",
    "stacking(coverage=0.9)",
    "ridge",
    "exp3",
    "squarecb",
    "linucb",
    "thompson",
)


def measure(benchmark: Any, run: Any, group: str) -> None:
    benchmark.group = group
    benchmark.pedantic(run, rounds=9, iterations=1000, warmup_rounds=2)


def rows_of(fresh: tuple[float, ...], k: int) -> Any:
    return (
        np.tile(np.array(fresh), (k, 1)) + np.random.default_rng(1).random((k, len(fresh))) * 0.01
    )


@pytest.mark.parametrize("k", MODELS)
@pytest.mark.parametrize("name", RULES)
def test_core_choose(benchmark: Any, name: str, k: int) -> None:
    rule, fresh = RULES[name]
    rows = rows_of(fresh, k)
    measure(benchmark, lambda: rule.choose(rows, 1000.0, 0.7), f"core: choose, {k} models")


@pytest.mark.parametrize("k", MODELS)
@pytest.mark.parametrize("d", [1, 9, 33])
@pytest.mark.parametrize("sampled", [False, True], ids=["linucb", "lints"])
def test_core_choose_by_features(benchmark: Any, sampled: bool, d: int, k: int) -> None:
    rule = Context(sampled=sampled, width=1.0, discount=0.9995, ridge=1.0)
    rows, x = np.tile(rule.fresh(d), (k, 1)), np.random.default_rng(2).random(d)
    measure(benchmark, lambda: rule.choose(rows, x, 0.7), f"core: choose, {k} models")


@pytest.mark.parametrize("k", MODELS)
def test_anchor_choose_nothing(benchmark: Any, k: int) -> None:
    """Measure a method of a compiled object that does next to nothing, with the call and the lambda
    around it."""
    benchmark_call = RULES["exp3"][0].__sizeof__
    measure(benchmark, lambda: benchmark_call(), f"core: choose, {k} models")


@pytest.mark.parametrize("k", MODELS)
@pytest.mark.parametrize("name", ["Exp3", "UCB"])
def test_anchor_choose_river(benchmark: Any, name: str, k: int) -> None:
    bandit = pytest.importorskip("river.bandit", reason="pip install --group peers")
    policy = bandit.Exp3(gamma=0.1, seed=1) if name == "Exp3" else bandit.UCB(delta=1.0, seed=1)
    arms = list(range(k))
    for _ in range(100):
        policy.update(policy.pull(arms), 0.5)
    measure(benchmark, lambda: policy.pull(arms), f"core: choose, {k} models")


@pytest.mark.parametrize("k", MODELS)
@pytest.mark.parametrize("name", WEIGHING)
def test_core_weights(benchmark: Any, name: str, k: int) -> None:
    rule, fresh = WEIGHING[name]
    rows = rows_of(fresh, k)
    measure(benchmark, lambda: rule.weights(rows, 10.0), f"core: weights of the votes, {k} models")


@pytest.mark.parametrize("k", MODELS)
def test_core_blend(benchmark: Any, k: int) -> None:
    blend, rng = Blend(ridge=2.0, discount=0.999), np.random.default_rng(3)
    rows = np.zeros((k + 1, k + 3))
    for _ in range(100):
        rows = blend.learn(rows, rng.random((1, k)), rng.random(1))
    outputs = rng.random((1, k))
    measure(
        benchmark, lambda: blend.blended(rows, outputs), f"core: weights of the votes, {k} models"
    )


@pytest.mark.parametrize("k", MODELS)
def test_anchor_weights_numpy(benchmark: Any, k: int) -> None:
    logs = np.random.default_rng(4).random(k)

    def softmax() -> Any:
        e = np.exp(logs - logs.max())
        return e / e.sum()

    measure(benchmark, softmax, f"core: weights of the votes, {k} models")


def learned(name: str, k: int) -> tuple[Any, Any, list[VersionedModel], Any]:
    policy, models = create_policy(name), [VersionedModel(f"m{i}", 1) for i in range(k)]
    state, rng = policy.init(models), np.random.default_rng(5)
    numbers = name == "ridge"
    for t in range(200):
        plan = policy.select(state, Query(uniform=float(rng.random())), models)
        arrived = {
            m: Prediction(float(rng.random()) if numbers else int(rng.integers(3)))
            for m in plan.models
        }
        state = policy.observe(
            state, Observation(plan, arrived, Truth(0.5 if numbers else t % 3), None)
        )
    return policy, state, models, arrived


@pytest.mark.parametrize("k", MODELS)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_select_and_combine(benchmark: Any, name: str, k: int) -> None:
    policy, state, models, _ = learned(name, k)
    query = Query(uniform=0.7)
    said = {model: Prediction(0.5 if name == "ridge" else i % 3) for i, model in enumerate(models)}

    def both() -> Any:
        plan = policy.select(state, query, models)
        return policy.combine(
            state, said if len(plan.models) == k else {plan.models[0]: said[plan.models[0]]}, ()
        )

    measure(benchmark, both, f"whole: select and combine, {k} models")


@pytest.mark.parametrize("name", ["ensemble", "ridge"])
def test_whole_combine_numbers(benchmark: Any, name: str) -> None:
    policy, state, models, _ = learned(name, 3)
    said = {model: Prediction(float(i)) for i, model in enumerate(models)}
    measure(benchmark, lambda: policy.combine(state, said, ()), "whole: combine 3 numbers")


@pytest.mark.parametrize("name", WHOLE[1:])
def test_whole_first_state_of_users(benchmark: Any, name: str) -> None:
    policy, state, _, _ = learned(name, 5)
    measure(benchmark, lambda: policy.init(state.models, state), "whole: first state, 5 models")


@pytest.mark.parametrize("name", WHOLE[1:])
def test_whole_observe(benchmark: Any, name: str) -> None:
    policy, state, models, arrived = learned(name, 5)
    plan = policy.select(state, Query(uniform=0.7), models)
    arrived = {model: Prediction(0.5 if name == "ridge" else 1) for model in plan.models}
    seen = Observation(plan, arrived, Truth(0.4 if name == "ridge" else 1), 1)
    measure(benchmark, lambda: policy.observe(state, seen), "whole: observe, 5 models")
