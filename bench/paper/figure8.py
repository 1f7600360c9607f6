"""Figure 8: five models, the best of which fails for a quarter of the stream: each policy's cumulative error."""

from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, row
from bench.paper.worlds import WORLDS, World, oracle, stream
from clipper.selection import Observation, Policy, Prediction, Query, Truth, policy_named
from clipper.types import VersionedModel

Array = np.ndarray[Any, Any]
POLICIES = {
    "exp3": Goal("value_at_most", 0.245),
    "exp4": Goal("value_at_most", 0.175),
    "squarecb": Goal("value_at_most", 0.235),
    "squarecb(shadow=0.1)": Goal("value_at_most", 0.229),
    "stacking": Goal("value_at_most", 0.170),
    "logodds": None,
    "thompson": None,
    "kl_ucb": None,
    "tsallis_inf": None,
    "epsilon_greedy": None,
    "ensemble": None,
}
QUERIES = {"5 K": 5_000, "10 K": 10_000, "20 K": 20_000}


def main(quick: bool) -> list[Row]:
    seeds = range(2 if quick else 60)
    base = WORLDS["base"]
    best = Sample((oracle(base),))
    rows = []
    for name, goal in POLICIES.items():
        curves = [errors(policy_named(name), base, seed) for seed in seeds]
        for label, n in QUERIES.items():
            found = Sample(tuple(float(curve[:n].mean()) for curve in curves))
            due = goal if n == base.queries else None
            rows.append(row(f"{name}: error of {label} queries", found, "", "best model of each phase", best, due))
    for name in ("the paper's exp3", "the paper's exp4"):
        found = Sample(tuple(float(paper(name, base, seed).mean()) for seed in seeds))
        rows.append(row(f"{name}: error of 20 K queries", found, "", "best model of each phase", best))
    return rows + worlds(seeds)


def worlds(seeds: range) -> list[Row]:
    """The default ensemble that learns must be within a point of the oracle wherever the models err."""
    rows = []
    for name, world in WORLDS.items():
        few = seeds[: max(2, len(seeds) // 6)]
        found = Sample(tuple(float(errors(policy_named("stacking"), world, seed).mean()) for seed in few))
        best = oracle(world)
        rows.append(row(f"stacking, {name}: error", found, "", "best model of each phase", Sample((best,)),
                        Goal("value_at_most", round(best + 0.01, 4))))  # fmt: skip
    return rows


def errors(policy: Policy, world: World, seed: int) -> Array:
    """bool[queries]: which answers were wrong; each label is told right after its answer."""
    labels, answers = stream(world, seed)
    models = [VersionedModel(f"m{i}", 1) for i in range(answers.shape[1])]
    state, chance = policy.init(models), np.random.default_rng(seed + 10**6).random(len(labels))
    wrong = np.empty(len(labels), bool)
    for t, (label, said) in enumerate(zip(labels.tolist(), answers.tolist(), strict=True)):
        plan = policy.select(state, Query(uniform=float(chance[t])), models)
        heard = {model: Prediction(said[models.index(model)]) for model in (*plan.models, *plan.observers)}
        answer = policy.combine(state, {model: heard[model] for model in plan.models}, ())
        wrong[t] = answer.output != label
        state = policy.observe(state, Observation(plan, heard, Truth(label), answer.output))
    return wrong


def paper(name: str, world: World, seed: int) -> Array:
    """The rules as printed: Exp3 with eta .1, Exp4 with eta .01 and no share; log-weights, else they vanish."""
    labels, answers = stream(world, seed)
    lost = (answers != labels[:, None]).astype(float)
    chance, logs = np.random.default_rng(seed + 10**6).random(len(labels)), np.zeros(lost.shape[1])
    wrong = np.empty(len(labels), bool)
    for t in range(len(labels)):
        p = np.exp(logs - logs.max())
        p /= p.sum()
        if name.endswith("exp3"):
            i = min(int(np.searchsorted(np.cumsum(p), chance[t])), len(p) - 1)
            wrong[t] = lost[t, i]
            logs[i] -= 0.1 * lost[t, i] / p[i]
        else:
            wrong[t] = np.bincount(answers[t], p).argmax() != labels[t]
            logs -= 0.01 * lost[t]
    return wrong
