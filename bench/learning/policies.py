"""Learning from feedback in nine worlds, three drawn ones and three data sets: each policy's error,
beside peers."""

import math
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, UnknownRows, absent, row
from bench.learning import peers, real_streams, streams
from bench.learning.streams import Stream
from bench.runs import in_parallel
from clipper.selection import Observation, Policy, Prediction, Query, Truth, create_policy
from clipper.selection.learning.batch_learning import count_user
from clipper.types import VersionedModel

Array = np.ndarray[Any, Any]
STILL, MAIN, LEARNING = "ensemble", "mixture", "stacking"
ALL_MODELS = ("mixture", "ensemble", "stacking", "exp4", "logodds")
ONE_MODEL = (
    "bandit",
    "bandit(shadow=0.1)",
    "exp3",
    "squarecb",
    "squarecb(shadow=0.1)",
    "thompson",
    "kl_ucb",
    "tsallis_inf",
)
RECOMMENDED = "bandit"  # for one model a query
PEERS = tuple(peers.STREAMED)
NAMES = (*streams.NAMES, *real_streams.NAMES)
ANCHOR = "Vowpal Wabbit SquareCB"
SLACK = 0.003  # of an error: a policy that learns may be this much worse than one that does not
GOALS = {"confidences": 0.070, "class experts": 0.140, "users": 0.110}
BEST = "best model of each query"


def main(quick: bool, rows: list[str] | None = None, seed: int = 1, seeds: int = 0) -> list[Row]:
    """Run the benchmark. seed: of the worlds that are drawn, and of all streams. seeds:
    repetitions; 0: 20, or 2. rows: names of worlds and policies; all without one."""
    policies, wanted = (*ALL_MODELS, *ONE_MODEL), set(rows or ())
    if unknown := wanted - {*NAMES, *policies, *PEERS}:
        known = ", ".join((*NAMES, *policies, *PEERS))
        raise UnknownRows(f"no row {', '.join(sorted(unknown))}; there are: {known}")
    worlds = [name for name in NAMES if name in wanted] or list(NAMES)
    chosen = [name for name in (*policies, *PEERS) if name in wanted] or [*policies, *PEERS]
    run = [name for name in chosen if not missing(name)]
    repetitions = range(seeds or (2 if quick else 20))
    jobs = [(policy, world, seed, i) for world in worlds for policy in run for i in repetitions]
    found = dict(zip(jobs, in_parallel("learning", error, jobs), strict=True))
    lines = []
    for world in worlds:
        errors = {
            name: Sample(tuple(found[name, world, seed, i] for i in repetitions)) for name in run
        }
        best = Sample(
            tuple(float(stream(world, seed, i).rates.min(axis=1).mean()) for i in repetitions[:3])
        )
        for name in chosen:
            title = f"{world}: {name}"
            if name in errors:
                goal = goal_of(name, world, errors)
                note, why = interval(errors[name]), bound_of(name, errors)
                lines.append(row(title, errors[name], "", BEST, best, goal, note, why))
            else:
                lines.append(absent(title, "", missing(name), BEST))
    return lines


def goal_of(name: str, world: str, errors: dict[str, Sample]) -> Goal | None:
    """Return the bound of a policy's error: for the main one, the error of a policy that does not
    learn, or learns one weight per model; for the recommended bandit, that of Vowpal Wabbit."""
    if name == RECOMMENDED and ANCHOR in errors:
        return Goal("value_at_most", round(errors[ANCHOR].median, 4))
    if name != MAIN or STILL not in errors or LEARNING not in errors:
        return None
    bound = min(errors[STILL].median, errors[LEARNING].median) + SLACK
    return Goal("value_at_most", round(min(bound, GOALS.get(world, 1.0)), 4))


def bound_of(name: str, errors: dict[str, Sample]) -> str:
    """Return what the other policies of the same kind reach in this world."""
    alike = ONE_MODEL if name in ONE_MODEL else ALL_MODELS
    others = {other: errors[other].median for other in alike if other in errors and other != name}
    if not others:
        return ""
    best = min(others, key=lambda other: others[other])
    found = f"{best}, {others[best]:.4f}"
    return f"the best of the other {len(others)} policies of its kind here is {found}"


def interval(sample: Sample) -> str:
    """Return the mean and its 95 % interval, by the normal approximation."""
    mean, n = float(np.mean(sample.values)), len(sample.values)
    if n < 2:
        return f"mean {mean:.4f}"
    return f"mean {mean:.4f} ± {1.96 * float(np.std(sample.values, ddof=1)) / math.sqrt(n):.4f}"


def missing(name: str) -> str:
    """Return the reason why a row cannot be measured; empty if it can."""
    return peers.missing(name) if name in PEERS else ""


# -- one run


def stream(world: str, seed: int, repetition: int) -> Stream:
    """Return one repetition of a name of NAMES."""
    of = real_streams.real_stream if world in real_streams.NAMES else streams.stream
    return of(world, seed, repetition)


def error(name: str, world: str, seed: int, repetition: int) -> float:
    """Return the share of wrong answers, with those at the start of each user's state."""
    one = stream(world, seed, repetition)
    chance = np.random.default_rng([seed, repetition, 10**6]).random(len(one.labels))
    if name in PEERS:
        return float(peers.STREAMED[name](one, chance).mean())
    return float((outputs(create_policy(name), one, chance) != one.labels).mean())


def outputs(policy: Policy, one: Stream, chance: Array) -> Array:
    """Return the answers, i64[queries]. Feedback arrives `delay` queries later. A user's state
    starts at the first feedback, from the state that all users share, as in the server."""
    n, k = one.answers.shape
    models = [VersionedModel(f"m{i:02}", 1) for i in range(k)]
    shared, is_shared = policy.init(models), not one.users.any()
    own: dict[Any, Any] = {}
    waiting: list[Any] = [None] * n
    found = np.empty(n, np.int64)
    answers, told = one.answers.tolist(), one.feedback.tolist()
    sure = None if one.confidence is None else one.confidence.tolist()
    user, heard = one.users.tolist(), one.heard.tolist()
    reported = None if one.probabilities is None else one.probabilities.astype(np.float32).tolist()
    for t in range(n):
        state = own.get(user[t], shared)
        plan = policy.select(state, Query(uniform=float(chance[t])), models)
        outputs = {
            model: Prediction(
                answers[t][i],
                None if sure is None else sure[t][i],
                {} if reported is None else {f"p:{c}": p for c, p in enumerate(reported[t][i])},
            )
            for i, model in enumerate(models)
            if model in plan.models or model in plan.observers
        }
        answer = policy.combine(state, {model: outputs[model] for model in plan.models}, ())
        found[t] = answer.output
        waiting[t] = (plan, outputs, answer.output)
        past = t - one.delay
        if past < 0 or not heard[past]:
            continue
        plan, outputs, answered = waiting[past]
        waiting[past] = None
        observation = Observation(plan, outputs, Truth(told[past]), answered)
        if not is_shared:
            before = own.get(user[past])
            own[user[past]] = policy.observe(
                policy.init(models, shared) if before is None else before, observation
            )
        shared = policy.observe(shared, observation)
        if not is_shared:
            shared = count_user(policy, shared, str(user[past]), observation)
    return found
