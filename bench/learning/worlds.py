"""Streams of queries with known truth, as Figure 8 of the paper has them: what each model answers,
and what is right."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class World:
    """errors: of each model alone.  failing: its error between `begins` and `ends` for the last
    model.  rho: how far models find the same queries hard.  confused: share of wrong answers that
    fall on the same wrong label. While the last model fails it errs at random: on easy queries too,
    and on labels of its own."""

    errors: tuple[float, ...] = (0.38, 0.34, 0.30, 0.26, 0.20)
    failing: float = 0.60
    begins: int = 5_000
    ends: int = 10_000
    queries: int = 20_000
    classes: int = 10
    rho: float = 0.5
    confused: float = 0.5


WORLDS = {
    "base": World(),
    "nearly independent": World(rho=0.2),
    "strongly correlated": World(rho=0.8, confused=0.8),
    "mild degradation": World(failing=0.30),
    "total failure": World(failing=0.90),
}


def error_rates(world: World) -> Array:
    """f64[queries, models]"""
    rates = np.tile(np.array(world.errors), (world.queries, 1))
    rates[world.begins : world.ends, -1] = world.failing
    return rates


def stream(world: World, seed: int) -> tuple[Array, Array]:
    """Return (labels i64[queries], answers i64[queries, models]), with labels from 0. A Gaussian
    copula ties the models' errors."""
    rng = np.random.default_rng(seed)
    n, k, c = world.queries, len(world.errors), world.classes
    hard = rng.standard_normal(n)[:, None]
    z = np.sqrt(world.rho) * hard + np.sqrt(1 - world.rho) * rng.standard_normal((n, k))
    failing = slice(world.begins, world.ends)
    z[failing, -1] = rng.standard_normal(world.ends - world.begins)
    wrong = z > quantile_normal(1 - error_rates(world))
    labels = rng.integers(0, c, n)
    confuser = (labels + rng.integers(1, c, n)) % c
    other = (labels[:, None] + rng.integers(1, c, (n, k))) % c
    shares = rng.random((n, k)) < world.confused
    shares[failing, -1] = False
    astray = np.where(shares, confuser[:, None], other)
    return labels, np.where(wrong, astray, labels[:, None])


@dataclass(frozen=True)
class Contexts:
    """Models that are good at queries of some features: each errs by .4 less .35 times how far the
    features point its way."""

    queries: int = 5_000
    models: int = 3
    features: int = 4


def contexts(world: Contexts, seed: int) -> tuple[Array, Array]:
    """Return (features f64[queries, features], error rates f64[queries, models])."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(-1, 1, (world.queries, world.features))
    ways = rng.standard_normal((world.features, world.models))
    return features, np.clip(
        0.4 - 0.35 * features @ (ways / np.linalg.norm(ways, axis=0)), 0.02, 0.98
    )


def oracle(world: World) -> float:
    """Return the expected error of a policy that knows the best model of each phase."""
    return float(error_rates(world).min(axis=1).mean())


def quantile_normal(p: Array) -> Array:
    """Return the inverse of the normal distribution function (Acklam's approximation, below 1e-8
    off)."""
    from statistics import NormalDist

    values, inverse = np.unique(p, return_inverse=True)
    return np.array([NormalDist().inv_cdf(float(v)) for v in values])[inverse.reshape(p.shape)]
