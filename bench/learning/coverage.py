"""Coverage of prediction sets in drifting worlds, with feedback at once and late."""

from dataclasses import replace

import numpy as np

from bench.harness import Goal, Row, Sample, row
from bench.learning.streams import stream
from bench.runs import in_parallel
from clipper.selection import Observation, Prediction, Query, Truth, create_policy
from clipper.types import VersionedModel

COVERAGE, WINDOW = 0.9, 2_000
POLICIES, WORLDS, DELAYS = ("mixture", "stacking"), ("fails", "drift"), (0, 500)
POINT = 0.01  # that a window may be off, when feedback comes at once
Found = tuple[float, float, float, float]


def main(quick: bool, seed: int = 1, seeds: int = 0) -> list[Row]:
    """Run the benchmark. seed: of the streams. seeds: repetitions; 0: 3, or 1 with `quick`."""
    repetitions = range(seeds or (1 if quick else 3))
    cases = [(policy, world, delay) for world in WORLDS for delay in DELAYS for policy in POLICIES]
    jobs = [(*case, seed, i) for case in cases for i in repetitions]
    found = dict(zip(jobs, in_parallel("coverage", covered, jobs), strict=True))
    lines = []
    for policy, world, delay in cases:
        runs = [found[policy, world, delay, seed, i] for i in repetitions]
        whole, low, high, labels = (
            Sample(tuple(run[column] for run in runs)) for column in range(4)
        )
        late = f"feedback {delay} queries late" if delay else "feedback at once"
        goal = None if delay else Goal("value_at_least", COVERAGE - POINT)
        note = (
            f"windows up to {high.median:.3f}, all queries {whole.median:.4f},"
            f" {labels.median:.2f} labels in a set"
        )
        title = f"{world}, {late}: {policy}, lowest window of {WINDOW}"
        lines.append(row(title, low, "", "asked for", COVERAGE, goal, note))
    return lines


def covered(name: str, world: str, delay: int, seed: int, repetition: int) -> Found:
    """Return the share of sets that contain the label, of all, of the lowest and of the highest
    window, and the mean number of labels in a set."""
    one = replace(stream(world, seed, repetition), delay=delay)
    n, k = one.answers.shape
    policy = create_policy(f"{name}(coverage={COVERAGE})")
    models = tuple(VersionedModel(f"m{i:02}", 1) for i in range(k))
    state, plan = policy.init(models), policy.select(policy.init(models), Query(), models)
    held, sizes = np.zeros(n), np.zeros(n)
    waiting: list[Observation] = []
    for t, (label, told, said) in enumerate(
        zip(one.labels.tolist(), one.feedback.tolist(), one.answers.tolist(), strict=True)
    ):
        heard = {model: Prediction(said[i]) for i, model in enumerate(models)}
        answer = policy.combine(state, heard, ())
        held[t], sizes[t] = label in answer.set, len(answer.set)
        waiting.append(Observation(plan, heard, Truth(told), answer.output))
        if t >= delay:
            state = policy.observe(state, waiting[t - delay])
    windows = np.convolve(held, np.ones(WINDOW) / WINDOW, "valid")
    return float(held.mean()), float(windows.min()), float(windows.max()), float(sizes.mean())
