"""River and Vowpal Wabbit on the world of Figure 8: the same stream, one model a query, its loss
told right after."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
HOW = "pip install 'clipper-serving[peers]'"
PACKAGES = {"river": "river", "Vowpal Wabbit": "vowpalwabbit"}


def missing(name: str) -> str:
    """Why the peer cannot be run; empty when it can."""
    package = next(package for peer, package in PACKAGES.items() if name.startswith(peer))
    return "" if importlib.util.find_spec(package) else f"{package} is not installed: {HOW}"


def river(make: Callable[[Any, int], Any], lost: Array, seed: int) -> Array:
    from river import bandit

    policy, arms = make(bandit, seed), list(range(lost.shape[1]))
    wrong = np.empty(len(lost), bool)
    for t, row in enumerate(lost.tolist()):
        arm = policy.pull(arms)
        wrong[t] = row[arm] > 0
        policy.update(arm, 1.0 - row[arm])
    return wrong


def thompson(bandit: Any, seed: int) -> Any:
    from river import proba

    return bandit.ThompsonSampling(reward_obj=proba.Beta(), seed=seed)


def vowpal_wabbit(lost: Array, seed: int) -> Array:
    import vowpalwabbit

    learner = vowpalwabbit.Workspace("--cb_explore_adf --squarecb --quiet")
    chance, wrong = np.random.default_rng(seed).random(len(lost)), np.empty(len(lost), bool)
    arms = [f"|a a{i}" for i in range(lost.shape[1])]
    for t, row in enumerate(lost.tolist()):
        p = np.array(learner.predict(arms))
        i = min(
            int(np.searchsorted(np.cumsum(p) / p.sum(), chance[t], side="right")), len(arms) - 1
        )
        wrong[t] = row[i] > 0
        learner.learn([f"0:{row[i]}:{p[i]} {arm}" if j == i else arm for j, arm in enumerate(arms)])
    learner.finish()
    return wrong


PEERS: dict[str, Callable[[Array, int], Array]] = {
    "river Exp3": lambda lost, seed: river(
        lambda bandit, s: bandit.Exp3(gamma=0.1, seed=s), lost, seed
    ),
    "river UCB": lambda lost, seed: river(
        lambda bandit, s: bandit.UCB(delta=1.0, seed=s), lost, seed
    ),
    "river Thompson": lambda lost, seed: river(thompson, lost, seed),
    "river epsilon-greedy": lambda lost, seed: river(
        lambda bandit, s: bandit.EpsilonGreedy(epsilon=0.05, seed=s), lost, seed
    ),
    "Vowpal Wabbit SquareCB": vowpal_wabbit,
}
