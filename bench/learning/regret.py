"""Regret of the selection rules against their bounds: losses by chance, losses that switch, losses
that an adversary picks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness import Goal, Row, row
from bench.runs import in_parallel
from clipper.selection import create_policy
from clipper.types import VersionedModel

Array = np.ndarray[Any, Any]
ERRORS = np.array([0.38, 0.34, 0.30, 0.26, 0.20])
T, K = 20_000, len(ERRORS)
BLOCKS = 20  # of a sequence that switches
SHARE = 0.001  # of Exp4 against sequences that switch
D = 5  # features, the constant included


@dataclass(frozen=True)
class Trial:
    """One rule on one kind of losses. bound: of its theorem, for so many rounds. figure: measured
    before, by another implementation, over 200 seeds."""

    policy: str
    losses: str
    bound: Callable[[int], float]
    figure: float | None = None


def lai_robbins(rounds: int) -> float:
    """Return the least regret of any rule in the long run when losses are random."""
    good = 1 - ERRORS
    best = good.max()
    return float(sum((best - g) / kl(g, best) for g in good if g < best) * math.log(rounds))


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def shared(rounds: int) -> float:
    """Return the bound of Herbster and Warmuth 1998, against the best sequence of models with
    BLOCKS - 1 switches."""
    eta, switches = 0.1, BLOCKS - 1
    paid = (
        (switches + 1) * math.log(K)
        + switches * math.log(K / SHARE)
        - (rounds - switches - 1) * math.log(1 - SHARE)
    )
    return paid / eta + eta * rounds / 8


def exp3(rounds: int) -> float:
    return math.sqrt(2 * rounds * K * math.log(K))


def hedge(rounds: int) -> float:
    return math.sqrt(rounds * math.log(K) / 2)


def eta_exp3(rounds: int) -> float:
    return math.sqrt(2 * math.log(K) / (rounds * K))


def eta_hedge(rounds: int) -> float:
    return math.sqrt(8 * math.log(K) / rounds)


EXP3, EXP4 = "exp3(eta={eta_exp3}, floor=0.0)", "exp4(eta={eta_hedge}, share=0.0)"
TSALLIS = "tsallis_inf(least_step=0.0, discount=1.0, floor=1e-9)"
TRIALS = {
    "exp3, by chance": Trial(EXP3, "chance", exp3, 314),
    "exp3, switching": Trial(EXP3, "switching", exp3),
    "tsallis_inf, by chance": Trial(TSALLIS, "chance", lambda t: 4 * math.sqrt(K * t) + 1, 124),
    "tsallis_inf, switching": Trial(TSALLIS, "switching", lambda t: 4 * math.sqrt(K * t) + 1),
    "kl_ucb, by chance": Trial("kl_ucb(discount=1.0)", "chance", lai_robbins, 98),
    "thompson, by chance": Trial("thompson(discount=1.0)", "chance", lai_robbins, 64),
    "exp4 without share, by chance": Trial(EXP4, "chance", hedge, 65),
    "exp4 without share, switching": Trial(EXP4, "switching", hedge),
    "exp4 without share, an adversary": Trial(EXP4, "adversary", hedge),
    f"exp4 with share, against {BLOCKS - 1} switches": Trial(
        f"exp4(eta=0.1, share={SHARE})", "tracking", shared
    ),
    "linucb, by context": Trial("linucb(discount=1.0)", "context", lambda t: D * math.sqrt(t)),
}


def main(quick: bool) -> list[Row]:
    seeds = range(2 if quick else 200)
    rows = []
    for name, trial in TRIALS.items():
        found = in_parallel(f"regret, {name}", regret, [(name, T, seed) for seed in seeds])
        mean, most = float(np.mean(found)), max(found)
        note = "mean over the seeds, as bounds are of the expectation"
        rows.append(row(name, mean, "", "bound", trial.bound(T), Goal("at_most", 1.0), note))
        rows.append(row(f"{name}: greatest of {len(found)}", most, "", "bound", trial.bound(T)))
        if trial.figure is not None:
            rows.append(
                row(
                    f"{name}, again",
                    mean,
                    "",
                    "measured before",
                    trial.figure,
                    Goal("at_most", 1.15),
                )
            )
    return rows


def regret(name: str, rounds: int, seed: int) -> float:
    """Return the losses of one run; expected losses where they come by chance."""
    trial = TRIALS[name]
    rng = np.random.default_rng(seed)
    policy: Any = create_policy(
        trial.policy.format(eta_exp3=eta_exp3(rounds), eta_hedge=eta_hedge(rounds))
    )
    if trial.losses == "context":
        return by_context(policy, rounds, rng)
    if policy.name == "exp4":
        return all_heard(policy, trial.losses, rounds, rng)
    rates = np.tile(ERRORS, (rounds, 1)) if trial.losses == "chance" else switching(rounds)
    return one_asked(policy, rates, rng)


def switching(rounds: int) -> Array:
    """Return losses without randomness: in every block another model is the only good one; over
    all, the last one is slightly the best."""
    rates = np.ones((rounds, K))
    for block, at in enumerate(np.array_split(np.arange(rounds), BLOCKS)):
        rates[at, block % K] = 0.0
        rates[at[: len(at) // 8], K - 1] = 0.0
    return rates


def one_asked(policy: Any, rates: Array, rng: Any) -> float:
    """Measure the regret of a rule that queries one model, against the best fixed model."""
    rule, rows = policy.rule, policy.init([VersionedModel(f"m{i}", 1) for i in range(K)]).rows
    lost, chance = (rng.random(rates.shape) < rates).astype(float), rng.random(len(rates)).tolist()
    paid = 0.0
    for t, uniform in enumerate(chance):
        i, p = rule.choose(rows, float(t), uniform)
        paid += rates[t, i]
        told = np.full(K, np.nan)
        told[i] = lost[t, i]
        rows = rule.learn(rows, float(t), told, i, p)
    return paid - float(rates.sum(axis=0).min())


def all_heard(policy: Any, kind: str, rounds: int, rng: Any) -> float:
    """Return the loss of a draw by the weights, against the best fixed model, or the best
    sequence with BLOCKS - 1 switches."""
    rule, rows = policy.rule, policy.init([VersionedModel(f"m{i}", 1) for i in range(K)]).rows
    rates = np.tile(ERRORS, (rounds, 1)) if kind == "chance" else switching(rounds)
    lost = (rng.random(rates.shape) < rates).astype(float)
    paid, sums = 0.0, np.zeros(K)
    for t in range(rounds):
        weights = rule.weights(rows)
        losses = np.eye(K)[np.argmax(weights)] if kind == "adversary" else lost[t]
        paid += float(weights @ losses)
        sums += losses
        rows = rule.learn(rows, float(t), losses)
    if kind == "tracking":
        return paid - sum(
            float(lost[at].sum(axis=0).min()) for at in np.array_split(np.arange(rounds), BLOCKS)
        )
    return paid - float(sums.min())


def by_context(policy: Any, rounds: int, rng: Any) -> float:
    """Measure the regret with rewards that are linear in the features, against the best model of
    every query."""
    rule, rows = policy.linear, np.tile(policy.linear.fresh(D), (K, 1))
    ways = rng.standard_normal((D - 1, K))
    x = np.column_stack([np.ones(rounds), rng.uniform(-1, 1, (rounds, D - 1))])
    good = np.clip(0.5 + 0.3 * x[:, 1:] @ (ways / np.linalg.norm(ways, axis=0)), 0.0, 1.0)
    won, chance, paid = rng.random(good.shape) < good, rng.random(rounds).tolist(), 0.0
    for t, uniform in enumerate(chance):
        i = rule.choose(rows, x[t], uniform)
        paid += good[t].max() - good[t, i]
        told = np.full(K, np.nan)
        told[i] = won[t, i]
        rows = rule.learn(rows, x[t], told, t)
    return float(paid)
