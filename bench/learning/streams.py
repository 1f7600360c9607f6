"""Streams of queries with feedback: nine worlds that differ in what makes learning hard, and others
that are drawn at random."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.learning.worlds import quantile_normal

Array = np.ndarray[Any, Any]
QUERIES = 20_000
CLASSES = 10
ERRORS = (0.38, 0.34, 0.30, 0.26, 0.20)
FAILS, RETURNS = 5_000, 10_000  # the best of the five models fails between these queries
DRAWN = 3


@dataclass(frozen=True)
class Stream:
    """Queries, what each model answers, and the feedback.

    labels: i64[queries].  answers: i64[queries, models].  rates: f64[queries, models], the
    probability that a model errs.  confidence: f64[queries, models], as the models report it; None
    if they do not.  told: i64[queries], the labels of the feedback.  heard: bool[queries], where
    there is feedback.  delay: queries until the feedback.  users: i64[queries].
    probabilities: f64[queries, models, classes], as the models report them; None if they do not.
    """

    labels: Array
    answers: Array
    rates: Array
    confidence: Array | None = None
    told: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    heard: Array = field(default_factory=lambda: np.ones(QUERIES, bool))
    delay: int = 0
    users: Array = field(default_factory=lambda: np.zeros(QUERIES, np.int64))
    probabilities: Array | None = None

    @property
    def feedback(self) -> Array:
        """Return the labels of the feedback: the right ones, unless others are given."""
        return self.told if len(self.told) else self.labels


def answered(
    rng: np.random.Generator,
    labels: Array,
    rates: Array,
    classes: int = CLASSES,
    rho: float = 0.5,
    confused: float = 0.5,
    apart: Array | None = None,
) -> Array:
    """Return the answers. A Gaussian copula of correlation `rho` ties the models' errors; a share
    `confused` of the wrong answers falls on the same wrong label. apart: bool[queries, models],
    where a model errs on its own."""
    n, k = rates.shape
    z = np.sqrt(rho) * rng.standard_normal(n)[:, None] + np.sqrt(1 - rho) * rng.standard_normal(
        (n, k)
    )
    alone = np.zeros((n, k), bool) if apart is None else apart
    z = np.where(alone, rng.standard_normal((n, k)), z)
    wrong = z > quantile_normal(np.round(1 - rates, 4).clip(1e-4, 1 - 1e-4))
    confuser = (labels + rng.integers(1, classes, n)) % classes
    other = (labels[:, None] + rng.integers(1, classes, (n, k))) % classes
    shared = (rng.random((n, k)) < confused) & ~alone
    return np.where(wrong, np.where(shared, confuser[:, None], other), labels[:, None])


# -- the nine worlds


def failing(rng: np.random.Generator) -> Stream:
    """Five models; the best one fails for a quarter of the stream, as in Figure 8 of the paper."""
    labels = rng.integers(0, CLASSES, QUERIES)
    rates = np.tile(ERRORS, (QUERIES, 1))
    rates[FAILS:RETURNS, -1] = 0.6
    apart = np.zeros(rates.shape, bool)
    apart[FAILS:RETURNS, -1] = True
    return Stream(labels, answered(rng, labels, rates, apart=apart), rates)


def drift(rng: np.random.Generator) -> Stream:
    """Return a stream in which the errors of five models rise and fall slowly, in turn."""
    labels = rng.integers(0, CLASSES, QUERIES)
    time = np.arange(QUERIES)[:, None] / QUERIES + np.arange(5) / 5
    rates = 0.27 + 0.15 * np.sin(2 * np.pi * time)
    return Stream(labels, answered(rng, labels, rates), rates)


def delay(rng: np.random.Generator) -> Stream:
    """Return the failing world with feedback 500 queries late."""
    return replace(failing(rng), delay=500)


def noise(rng: np.random.Generator) -> Stream:
    """Return the failing world; a fifth of the labels of the feedback is drawn at random."""
    world = failing(rng)
    any_label = rng.integers(0, CLASSES, QUERIES)
    return replace(world, told=np.where(rng.random(QUERIES) < 0.2, any_label, world.labels))


def sparse(rng: np.random.Generator) -> Stream:
    """Return the failing world; one query in twenty has feedback."""
    return replace(failing(rng), heard=rng.random(QUERIES) < 0.05)


def ties(rng: np.random.Generator) -> Stream:
    """Return a world of twenty models that are nearly equally good."""
    labels = rng.integers(0, CLASSES, QUERIES)
    rates = np.tile(0.22 + rng.uniform(0, 0.04, 20), (QUERIES, 1))
    return Stream(labels, answered(rng, labels, rates), rates)


def users(rng: np.random.Generator) -> Stream:
    """Return a world of forty users, each with a best model."""
    labels, user = rng.integers(0, CLASSES, QUERIES), rng.integers(0, 40, QUERIES)
    best = rng.integers(0, 5, 40)[user]
    rates = np.where(best[:, None] == np.arange(5), 0.10, 0.35)
    return Stream(labels, answered(rng, labels, rates, rho=0.3), rates, users=user)


def class_experts(rng: np.random.Generator) -> Stream:
    """Return a world of five models, each of which knows two of the ten labels."""
    labels = rng.integers(0, CLASSES, QUERIES)
    rates = np.where((labels // 2)[:, None] == np.arange(5), 0.05, 0.45)
    return Stream(labels, answered(rng, labels, rates, rho=0.3), rates)


def confidences(rng: np.random.Generator) -> Stream:
    """Return a world of five models whose confidences are calibrated."""
    labels = rng.integers(0, CLASSES, QUERIES)
    sure = 0.1 + 0.9 * rng.beta(2.0, 1.2, (QUERIES, 5))
    return Stream(
        labels, answered(rng, labels, 1 - sure, rho=0.1, confused=0.3), 1 - sure, confidence=sure
    )


# -- worlds drawn at random


def drawn(rng: np.random.Generator, shape: np.random.Generator) -> Stream:
    """Return a world whose properties come from `shape`: 2 to 12 models, 2 to 50 classes of uneven
    frequency, up to four phases, models that know some labels better, easy and hard queries,
    confidences that are honest, partly honest or noise, and late, rare or wrong feedback."""
    k, classes = int(shape.integers(2, 13)), int(shape.choice([2, 3, 5, 10, 20, 50]))
    phases = int(shape.integers(1, 5))
    begins = np.sort(shape.integers(1000, QUERIES - 1000, phases - 1))
    phase = np.searchsorted(begins, np.arange(QUERIES), side="right")
    spread = shape.normal(0, 0.12 * (phases > 1), (phases, k))
    level = np.clip(shape.uniform(0.1, 0.45, k) + spread, 0.03, 0.8)
    by_class = shape.normal(0, 1, (classes, k)) * shape.choice([0, 0.08, 0.2])
    frequency = shape.dirichlet(np.full(classes, shape.choice([0.7, 5.0])))
    labels = rng.choice(classes, QUERIES, p=frequency)
    most = 0.6 if classes == 2 else 1 - 1 / classes
    rates = np.clip(level[phase] + by_class[labels], 0.02, most)
    hard = shape.choice([0, 0.5, 1.0]) * rng.normal(0, 1.5, rates.shape)
    sure = 1 / (1 + np.exp(np.log(rates) - np.log(1 - rates) - hard))
    rho, confused = shape.uniform(0, 0.8, 2)
    answers = answered(rng, labels, 1 - sure, classes, rho, confused)
    world = Stream(labels, answers, 1 - sure)
    if shape.random() < 0.6:
        honest = shape.choice([0, 0.5, 1.0])
        reported = honest * sure + (1 - honest) * rng.random(sure.shape)
        world = replace(world, confidence=reported ** (0.3 if shape.random() < 0.4 else 1.0))
    if shape.random() < 0.3:
        world = replace(world, delay=int(shape.integers(10, 1500)))
    if shape.random() < 0.3:
        world = replace(world, heard=rng.random(QUERIES) < shape.uniform(0.03, 0.5))
    if shape.random() < 0.3:
        wrong = rng.random(QUERIES) < shape.uniform(0.05, 0.3)
        world = replace(world, told=np.where(wrong, rng.integers(0, classes, QUERIES), labels))
    return world


WORLDS: dict[str, Callable[[np.random.Generator], Stream]] = {
    "fails": failing,
    "drift": drift,
    "late": delay,
    "noise": noise,
    "sparse": sparse,
    "ties": ties,
    "users": users,
    "class experts": class_experts,
    "confidences": confidences,
}
NAMES = (*WORLDS, *(f"drawn {i}" for i in range(1, DRAWN + 1)))


def stream(name: str, seed: int, repetition: int) -> Stream:
    """Return one repetition of a world. The drawn worlds differ by seed; the nine do not."""
    rng = np.random.default_rng([seed, repetition, NAMES.index(name)])
    if name in WORLDS:
        return WORLDS[name](rng)
    return drawn(rng, np.random.default_rng([seed, NAMES.index(name)]))
