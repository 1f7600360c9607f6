"""Figure 8: five models, the best of which fails for a quarter of the stream: each policy's
cumulative error."""

from pathlib import Path
from typing import Any

import numpy as np

from bench import plots
from bench.harness import Goal, Row, Sample, absent, row
from bench.learning import peers
from bench.learning.worlds import WORLDS, Contexts, World, contexts, error_rates, oracle, stream
from bench.runs import in_parallel
from clipper.selection import Observation, Policy, Prediction, Query, Truth, create_policy
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
    "linucb": None,
    "lints": None,
    "ensemble": None,
}
PAPER = ("the paper's exp3", "the paper's exp4")
QUERIES = {"5 K": 5_000, "10 K": 10_000, "20 K": 20_000}
RECOVERING = {
    "stacking": (250, 250),
    "exp4": (250, 250),
    "squarecb": (350, 1600),
    "squarecb(shadow=0.1)": (350, 1600),
}
PLOTTED = ("exp3", "squarecb(shadow=0.1)", "exp4", "stacking", "Vowpal Wabbit SquareCB", *PAPER)
BEST = "best model of each phase"
NEAR = 0.03  # of the best model's error: recovered
RECENT = 250
WINDOW = 2000  # queries over which sets must hold the truth as often as asked for


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    seeds = range(2 if quick else 60)
    names = [*POLICIES, *PAPER, *(name for name in peers.PEERS if not peers.missing(name))]
    jobs = [(name, "base", seed) for name in names for seed in seeds]
    found = in_parallel("figure 8", wrong, jobs)
    curves = {
        name: np.stack(found[i * len(seeds) : (i + 1) * len(seeds)]) for i, name in enumerate(names)
    }
    if plot is not None:
        shown = {name: curves[name].mean(axis=0) for name in PLOTTED if name in curves}
        shown[f"oracle: {BEST}"] = error_rates(WORLDS["base"]).min(axis=1)
        span = (WORLDS["base"].begins, WORLDS["base"].ends)
        plots.curves(
            plot / "figure8.png",
            f"The best of five models fails; {len(seeds)} seeds",
            shown,
            (span,),
        )
    few = seeds[: max(2, len(seeds) // 6)]
    return cumulative(curves) + recovery(curves) + worlds(few) + coverage(few) + contextual(few)


def cumulative(curves: dict[str, Array]) -> list[Row]:
    rows, best = [], Sample((oracle(WORLDS["base"]),))
    for name in (*POLICIES, *PAPER, *peers.PEERS):
        for label, n in QUERIES.items() if name in POLICIES else [("20 K", 20_000)]:
            title = f"{name}: error of {label} queries"
            if name in curves:
                goal = POLICIES.get(name) if n == 20_000 else None
                rows.append(
                    row(
                        title,
                        Sample(tuple(curves[name][:, :n].mean(axis=1).tolist())),
                        "",
                        BEST,
                        best,
                        goal,
                    )
                )
            else:
                rows.append(absent(title, "", peers.missing(name), BEST))
    return rows


def recovery(curves: dict[str, Array]) -> list[Row]:
    """Return the number of queries after each change until the error of the next 250, averaged over
    the seeds, is within 3 points of that of the phase's best model."""
    world, rows = WORLDS["base"], []
    for name, (down, up) in RECOVERING.items():
        error = np.convolve(curves[name].mean(axis=0), np.ones(RECENT) / RECENT, "valid")
        for what, begin, end, most in (
            ("failure", world.begins, world.ends, down),
            ("return", world.ends, world.queries, up),
        ):
            near = error[begin : min(end, len(error))] <= error_rates(world)[begin].min() + NEAR
            took = float(np.argmax(near)) if near.any() else float(end - begin)
            rows.append(
                row(
                    f"{name}: queries to recover from the {what}",
                    took,
                    "",
                    goal=Goal("value_at_most", most),
                )
            )
    return rows


def worlds(seeds: range) -> list[Row]:
    """Check that the default ensemble that learns is within a point of the oracle, wherever the
    models err."""
    rows = []
    for name, world in WORLDS.items():
        runs = in_parallel(f"figure 8, {name}", wrong, [("stacking", name, seed) for seed in seeds])
        best = oracle(world)
        rows.append(
            row(
                f"stacking, {name}: error",
                Sample(tuple(float(run.mean()) for run in runs)),
                "",
                BEST,
                Sample((best,)),
                Goal("value_at_most", round(best + 0.01, 4)),
            )
        )
    return rows


def coverage(seeds: range) -> list[Row]:
    """Return how far sets with a coverage of 0.9 are off in the worst 2000 consecutive queries of a
    stream."""
    rows = []
    for name in ("stacking", "exp4", "squarecb"):
        runs = in_parallel(
            "figure 8, sets", held, [(f"{name}(coverage=0.9)", "base", seed) for seed in seeds]
        )
        worst = [
            float(np.abs(np.convolve(run[0], np.ones(WINDOW) / WINDOW, "valid") - 0.9).max())
            for run in runs
        ]
        sizes = Sample(tuple(float(run[1].mean()) for run in runs))
        rows.append(
            row(
                f"{name}: sets of 90 %, off in the worst 2 K",
                Sample(tuple(worst)),
                "",
                goal=Goal("value_at_most", 0.01),
                note=f"the worst of {len(runs)} streams: {max(worst):.4f}",
            )
        )
        rows.append(row(f"{name}: labels in a set of 90 %", sizes, ""))
    return rows


def contextual(seeds: range) -> list[Row]:
    """Compare policies with and without a context, on three models that are each good at queries of
    some features."""
    rows, world = [], Contexts()
    best = Sample(tuple(float(contexts(world, seed)[1].min(axis=1).mean()) for seed in seeds))
    for name in ("linucb", "lints", "squarecb"):
        runs = in_parallel("figure 8, contexts", by_context, [(name, seed) for seed in seeds])
        found = Sample(tuple(float(run.mean()) for run in runs))
        title = f"{name}: error by context, {world.queries // 1000} K queries"
        rows.append(row(title, found, "", "best model of each query", best))
    return rows


# -- one run


def wrong(name: str, world: str, seed: int) -> Array:
    """Return which answers were wrong, bool[queries]; each label is sent right after its answer."""
    if name in PAPER:
        return paper(name, WORLDS[world], seed)
    if name in peers.PEERS:
        labels, answers = stream(WORLDS[world], seed)
        return peers.PEERS[name]((answers != labels[:, None]).astype(float), seed + 10**6)
    return errors(create_policy(name), WORLDS[world], seed)


def errors(policy: Policy, world: World, seed: int) -> Array:
    labels, _, said = answered(policy, world, seed)
    return np.array([output != label for output, label in zip(said, labels.tolist(), strict=True)])


def held(name: str, world: str, seed: int) -> tuple[Array, Array]:
    """Return which sets contained the label, bool[queries], and how many labels were in each."""
    labels, sets, _ = answered(create_policy(name), WORLDS[world], seed)
    inside = [label in one for label, one in zip(labels.tolist(), sets, strict=True)]
    return np.array(inside), np.array([len(one) for one in sets])


def answered(policy: Policy, world: World, seed: int) -> tuple[Array, list[Any], list[Any]]:
    """Return (labels, sets, answers)."""
    labels, answers = stream(world, seed)
    models = [VersionedModel(f"m{i}", 1) for i in range(answers.shape[1])]
    state, chance = policy.init(models), np.random.default_rng(seed + 10**6).random(len(labels))
    sets, found = [], []
    for t, (label, said) in enumerate(zip(labels.tolist(), answers.tolist(), strict=True)):
        plan = policy.select(state, Query(uniform=float(chance[t])), models)
        heard = {
            model: Prediction(said[models.index(model)])
            for model in (*plan.models, *plan.observers)
        }
        answer = policy.combine(state, {model: heard[model] for model in plan.models}, ())
        sets.append(answer.set)
        found.append(answer.output)
        state = policy.observe(state, Observation(plan, heard, Truth(label), answer.output))
    return labels, sets, found


def by_context(name: str, seed: int) -> Array:
    """bool[queries]"""
    features, rates = contexts(Contexts(), seed)
    policy, models = (
        create_policy(name),
        [VersionedModel(f"m{i}", 1) for i in range(rates.shape[1])],
    )
    rng = np.random.default_rng(seed + 10**6)
    lost, chance = rng.random(rates.shape) < rates, rng.random(len(rates))
    state, found = policy.init(models), np.empty(len(rates), bool)
    for t, x in enumerate(features.tolist()):
        plan = policy.select(state, Query(None, float(chance[t]), tuple(x)), models)
        found[t] = lost[t, models.index(plan.models[0])]
        heard = {plan.models[0]: Prediction(0 if found[t] else 1)}
        state = policy.observe(state, Observation(plan, heard, Truth(1)))
    return found


def paper(name: str, world: World, seed: int) -> Array:
    """Return the rules as in the paper: Exp3 with eta .1, Exp4 with eta .01 and no share; with
    log-weights, because weights would underflow."""
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
