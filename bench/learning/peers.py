"""River, Vowpal Wabbit and mabwiser on the streams of the benchmarks: one model a query, its loss
told right after it, or when the feedback comes."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.learning.streams import Stream

Array = np.ndarray[Any, Any]
HOW = "pip install --group learning-peers"
PACKAGES = {"river": "river", "Vowpal Wabbit": "vowpalwabbit", "mabwiser": "mabwiser"}


def missing(name: str) -> str:
    """Return the reason why the peer cannot be run; empty if it can."""
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


# -- the streams of `python -m bench learning`: delays, rare feedback and users

# (query, its chance) -> the model and the probability of it; (query, model, probability, loss)
Pull = Callable[[int, float], tuple[int, float]]
Tell = Callable[[int, int, float, float], None]


def streamed(one: Stream, chance: Array, pull: Pull, tell: Tell) -> Array:
    """Return which answers were wrong, bool[queries]. Feedback arrives `delay` queries later, if at
    all."""
    n = len(one.labels)
    picked: list[tuple[int, float]] = []
    lost = (one.answers != one.feedback[:, None]).astype(float).tolist()
    for t in range(n):
        picked.append(pull(t, float(chance[t])))
        past = t - one.delay
        if past >= 0 and one.heard[past]:
            model, p = picked[past]
            tell(past, model, p, lost[past][model])
    models = np.array([model for model, _ in picked])
    wrong: Array = one.answers[np.arange(n), models] != one.labels
    return wrong


def river_streamed(make: Callable[[Any, int], Any]) -> Callable[[Stream, Array], Array]:
    """Run one policy for each user."""

    def run(one: Stream, chance: Array) -> Array:
        from river import bandit

        arms, users = list(range(one.answers.shape[1])), one.users.tolist()
        policies = {user: make(bandit, user + 1) for user in set(users)}
        return streamed(
            one,
            chance,
            lambda t, _: (policies[users[t]].pull(arms), 1.0),
            lambda t, arm, _, loss: policies[users[t]].update(arm, 1.0 - loss),
        )

    return run


def vowpal_wabbit_streamed(one: Stream, chance: Array) -> Array:
    """Run Vowpal Wabbit; the user is a feature that is crossed with the model."""
    import vowpalwabbit

    by_user = bool(one.users.any())
    settings = "--cb_explore_adf --squarecb --quiet" + (" -q ua" if by_user else "")
    learner = vowpalwabbit.Workspace(settings)
    arms = [f"|a a{i}" for i in range(one.answers.shape[1])]

    def example(t: int) -> list[str]:
        return [f"shared |u u{one.users[t]}", *arms] if by_user else arms

    def pull(t: int, uniform: float) -> tuple[int, float]:
        p = np.array(learner.predict(example(t)))
        i = int(np.searchsorted(np.cumsum(p) / p.sum(), uniform, side="right"))
        i = min(i, len(arms) - 1)
        return i, float(p[i])

    def tell(t: int, arm: int, p: float, loss: float) -> None:
        lines, first = example(t), int(by_user)
        lines = list(lines)
        lines[first + arm] = f"0:{loss}:{p} {lines[first + arm]}"
        learner.learn(lines)

    wrong = streamed(one, chance, pull, tell)
    learner.finish()
    return wrong


def mabwiser_streamed(make: Callable[[Any], Any]) -> Callable[[Stream, Array], Array]:
    """Run one policy for each user, which starts with one right answer of each model."""

    def run(one: Stream, chance: Array) -> Array:
        from mabwiser.mab import MAB, LearningPolicy

        arms, users = list(range(one.answers.shape[1])), one.users.tolist()
        policies = {user: MAB(arms, make(LearningPolicy), seed=user) for user in set(users)}
        for policy in policies.values():
            policy.fit(arms, [1] * len(arms))
        return streamed(
            one,
            chance,
            lambda t, _: (int(policies[users[t]].predict()), 1.0),
            lambda t, arm, _, loss: policies[users[t]].partial_fit([arm], [int(1 - loss)]),
        )

    return run


STREAMED: dict[str, Callable[[Stream, Array], Array]] = {
    "Vowpal Wabbit SquareCB": vowpal_wabbit_streamed,
    "river Exp3": river_streamed(lambda bandit, s: bandit.Exp3(gamma=0.1, seed=s)),
    "river UCB": river_streamed(lambda bandit, s: bandit.UCB(delta=1.0, seed=s)),
    "river Thompson": river_streamed(thompson),
    "mabwiser UCB1": mabwiser_streamed(lambda policy: policy.UCB1(alpha=1.0)),
    "mabwiser Thompson": mabwiser_streamed(lambda policy: policy.ThompsonSampling()),
}
