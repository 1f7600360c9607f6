"""Learning goes through changes of an application while it serves: another policy, other
models, other servers."""

import contextlib
import logging
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import UnknownApplication
from clipper.selection import POLICIES, create_policy
from clipper.selection.policies.stateless_policy import learns
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer, own_redis
from tests.threads import join

__all__ = ["own_redis"]

PATIENCE_S = 60.0
OWN = "user_classes:Counts"


def right(xs):
    return xs[:, 0].astype(int)


def wrong(xs):
    return (xs[:, 0].astype(int) + 1) % 10


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "selection"))


@pytest.fixture(params=["memory", "sqlite", "redis"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    if request.param == "memory":
        return {}
    if request.param == "sqlite":
        return {"state": str(tmp_path / "state")}
    url = request.getfixturevalue("own_redis").url
    return {"state": url, "folder": str(tmp_path / "folder")}


class Feedback:
    """A thread that rates the answers of applications as fast as it can. counted: by application
    and policy that answered."""

    def __init__(self, server: clipper.ClipperServer, names: list[str]) -> None:
        self.counted: Counter[tuple[str, str]] = Counter()
        self._server, self._names = server, names
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feedback")
        self.errors: list[Exception] = []

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            for name in self._names:
                try:
                    handle = self._server.app(name)
                    answer = handle.predict(np.array([turn % 10, 0.0]), user="ann").result(20)
                    assert handle.feedback(answer, label=turn % 10)
                except Exception as error:
                    self.errors.append(error)
                    return

    def __enter__(self) -> "Feedback":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        join(self._thread)


def states_of(server: clipper.ClipperServer) -> dict[str, bytes]:
    """Return what the server has learned, by key of the store."""
    states = server._learning.states
    with states.lock:
        return {
            key: states._by_prefix[key.rpartition("/")[0] + "/"].policy.encode(held.state)
            for key, held in states.all()
            if held.applied
        }


@pytest.mark.slow
def test_every_policy_follows_another_while_feedback_comes(
    settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with clipper.start(**settings, feedback={"write_ms": 30}, drain_s=1.0) as server:
        for name, model in (("bad", wrong), ("good", right)):
            server.deploy(name, model, input="f64[2]")
        for app in ("one", "other"):
            server.app(app, models=["bad", "good"], slo_ms=20_000, policy="stacking")
        with Feedback(server, ["one", "other"]) as feedback:
            for policy in [*POLICIES, OWN, "stacking(rate=0.1)", *reversed(POLICIES)]:
                server.app("one", models=["bad", "good"], slo_ms=20_000, policy=policy)
                taught = states_of(server)
                if learns(create_policy(policy)):
                    wait_until(
                        lambda taught=taught: states_of(server) != taught, "it learns", PATIENCE_S
                    )
        assert not feedback.errors

        def are_written() -> bool:
            server._learning.states.flush()
            return not server._learning.states.dirty  # a merge is written by the next call

        wait_until(are_written, "all states are written", PATIENCE_S)
        wanted = states_of(server)
    assert "could not be written" not in caplog.text
    if "state" not in settings:
        return
    with clipper.start(**settings, drain_s=1.0) as again:  # the folder is not locked
        states = again._learning.states
        for policy in (*POLICIES, OWN):
            again.app("one", models=["bad", "good"], slo_ms=20_000, policy=policy)
        for learner in list(states._by_prefix.values()):
            learner.held("ann")

        def found() -> bool:
            return {key: states_of(again).get(key) for key in wanted} == wanted

        wait_until(found, "a state that the store did not hand out at once comes", PATIENCE_S)
    assert len(wanted) > 2 * len([name for name in POLICIES if learns(create_policy(name))])


def taught(server: clipper.ClipperServer, name: str, user: str, model: str) -> None:
    """Have a user say that the answer of this model is right, of two that answer 1 and 2."""
    handle = server.app(name)
    for _ in range(60):
        answer = handle.predict(np.array([0.0, 0.0]), user=user).result(20)
        assert handle.feedback(answer, label={"one": 1, "two": 2}[model])


def models_of(server: clipper.ClipperServer) -> list[str]:
    """Return the models that an application has on a server; none if it has not heard of it."""
    with contextlib.suppress(UnknownApplication):
        return [str(model) for model in server.app("app")._resolve("app").models]
    return []


def ones(xs):
    return np.full(len(xs), 1)


def twos(xs):
    return np.full(len(xs), 2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixture", "exp4", "stacking", OWN])
def test_all_servers_answer_each_user_as_before_after_a_deployment(
    policy: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    settings = {"state": own_redis.url, "drain_s": 1.0, "feedback": {"write_ms": 20}}
    x = np.array([0.0, 0.0])
    with (
        clipper.start(**settings, folder=str(tmp_path / "a")) as one,
        clipper.start(**settings, folder=str(tmp_path / "b")) as other,
    ):
        for name, model in (("one", ones), ("two", twos)):
            one.deploy(name, model, input="f64[2]")
        one.app("app", models=["one", "two"], slo_ms=20_000, policy=policy)
        for user, model in (("ann", "two"), ("bob", "one")):
            taught(one, "app", user, model)
        one.deploy("two", twos, input="f64[2]")
        for server in (one, other):
            wait_until(lambda server=server: "two:2" in models_of(server), "it serves", PATIENCE_S)

        def answers(user: str) -> list[int]:
            return [
                server.app("app").predict(x, user=user).result(20).output for server in (one, other)
            ]

        wait_until(lambda: answers("bob") == [1, 1], "both know bob", PATIENCE_S)
        wait_until(lambda: answers("ann") == [2, 2], "both know ann", PATIENCE_S)
    with clipper.start(**settings, folder=str(tmp_path / "a")) as again:
        again.deploy("two", twos, input="f64[2]")
        again.deploy("two", twos, input="f64[2]")
        handle = again.app("app")
        wait_until(lambda: "two:4" in models_of(again), "it serves", PATIENCE_S)
        for user, model in (("ann", 2), ("bob", 1)):
            wait_until(
                lambda user=user, model=model: (
                    handle.predict(x, user=user).result(20).output == model
                ),
                f"it knows {user}",
                PATIENCE_S,
            )


@pytest.mark.parametrize("policy", ["stacking", "exp4", "logodds", "mixture"])
def test_answers_that_are_called_wrong_are_learned(policy: str, app, deploy_for_all) -> None:
    models = [deploy_for_all(model, input="f64[2]") for model in (right, wrong, wrong)]
    handle = app(*models, slo_ms=30_000, default=-1, policy=policy)
    found = []
    for i in range(200):
        answer = handle.predict(np.array([i % 10, 0.0])).result(60)
        found.append(answer.output == i % 10)
        assert handle.feedback(answer, correct=found[-1])
    assert all(found[-50:])
