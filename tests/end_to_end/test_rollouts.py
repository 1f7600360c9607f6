"""A new version gets an application's queries stage by stage, or the rollout is reverted
automatically: real containers."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper import errors
from clipper_core.application.application import ApplicationQuery
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until

PATIENCE_S = 60.0
OPEN = ("running", "paused")
numbers = itertools.count()


def old(rows: Any) -> Any:
    return rows.sum(axis=1)


def new(rows: Any) -> Any:
    return rows.sum(axis=1) + 0.0


def other(rows: Any) -> Any:
    return rows.sum(axis=1) + 1.0


def broken(rows: Any) -> Any:
    raise ValueError("not today")


@pytest.fixture
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(**QUICK) as started:
        started.deploy("m", old, input="f64[2]")
        started.app("a", models=["m"], slo_ms=20_000, default=-1)
        yield started


def state(server: clipper.ClipperServer) -> str:
    return str(server.manage.rollouts("a")[0]["state"])


def predict(server: clipper.ClipperServer, user: str | None = None) -> clipper.Answer:
    answer: clipper.Answer = (
        server.app("a").predict(np.array([next(numbers), 1.0]), user=user).result(PATIENCE_S)
    )
    return answer


def drive(
    server: clipper.ClipperServer,
    until: Callable[[], bool],
    send_feedback: Callable[[clipper.Answer], Any] | None = None,
) -> None:
    """Send queries of a hundred users one by one until a condition holds."""

    def step() -> bool:
        for i in range(50):
            answer = predict(server, f"u{i * 7 % 100}")
            if send_feedback is not None:
                send_feedback(answer)
        return until()

    wait_until(step, "the rollout moves", PATIENCE_S)


def over(server: clipper.ClipperServer) -> Callable[[], bool]:
    return lambda: state(server) not in OPEN


def test_a_good_version_takes_over(server: clipper.ClipperServer) -> None:
    server.deploy("m", new, input="f64[2]", promote=False)
    guard = "error<5%, p99<19000ms, agreement>90%"
    server.manage.rollout("a", "m:2", canary="20%", stages="50,100", hold="0.2s", guard=guard)
    defaults: list[str] = []
    drive(
        server,
        over(server),
        lambda answer: defaults.append(answer.reason) if answer.is_default else None,
    )
    assert not defaults
    assert state(server) == "promoted"
    assert server.catalog.latest("m").version == 2
    assert {str(predict(server, f"u{i}").models[0]) for i in range(30)} == {"m:2"}
    verbs = [entry["verb"] for entry in server.manage.history()][-4:]
    assert verbs == ["rollout", "rollout grow", "rollout grow", "rollout promote"]
    assert server.manage.history(1)[0]["actor"] == "rollout of a"
    assert "0 of" in server.manage.rollouts()[0]["reason"]


def test_a_broken_version_goes_back_by_itself(server: clipper.ClipperServer) -> None:
    server.deploy("m", broken, input="f64[2]", promote=False)
    server.manage.rollout("a", "m:2", canary="20%", hold="1h")
    drive(server, over(server))
    assert state(server) == "reverted"
    assert server.catalog.latest("m").version == 1
    assert all(str(predict(server, f"u{i}").models[0]) == "m:1" for i in range(30))
    entry = server.manage.history(1)[0]
    assert (entry["verb"], entry["actor"]) == ("rollout revert", "rollout of a")
    assert "error<1% is broken" in entry["changed"][0]["after"]["reason"]


def test_worse_answers_are_noticed_by_feedback(server: clipper.ClipperServer) -> None:
    server.deploy("m", other, input="f64[2]", promote=False)
    server.manage.rollout("a", "m:2", canary=0.3, hold=3600, guard="reward>=-5%")

    def send_feedback(answer: clipper.Answer) -> None:
        assert server.app("a").feedback(answer, correct=str(answer.models[0]) == "m:1")

    drive(server, over(server), send_feedback)
    assert state(server) == "reverted"
    assert "reward>=-5% is broken: mean reward" in server.manage.rollouts()[0]["reason"]


def test_a_user_stays_on_a_side_and_an_array_is_of_one(server: clipper.ClipperServer) -> None:
    server.deploy("m", other, input="f64[2]", promote=False)
    server.manage.rollout("a", "m:2", canary="40%", hold="1h", guard="error<50%")
    wait_until(
        lambda: any(str(predict(server, f"u{i}").models[0]) == "m:2" for i in range(20)),
        "it takes queries",
    )
    for user in (f"u{i}" for i in range(40)):
        assert len({predict(server, user).models for _ in range(4)}) == 1
    seen = {str(predict(server).models[0]) for _ in range(100)}
    assert seen == {"m:1", "m:2"}, "without a user, each query by itself"
    futures = [server.app("a").predict(np.zeros(2), user=f"u{i}") for i in range(30)]
    assert {type(future.extra) for future in futures} == {ApplicationQuery}
    assert {str(future.extra.models[0]) for future in futures} == {"m:1", "m:2"}
    before = server.manage.rollouts()[0]
    answers = server.app("a").predict_many(np.ones((30, 2)), user="u1").result(PATIENCE_S)
    after = server.manage.rollouts()[0]
    moved = [after[side]["answers"] - before[side]["answers"] for side in ("new", "before")]
    assert sorted(moved) == [0, 30]
    assert len(answers.models) == 1


def test_verbs_by_hand(server: clipper.ClipperServer) -> None:
    manage = server.manage
    server.deploy("m", new, input="f64[2]", promote=False)
    assert manage.by("ann", dry_run=True).rollout("a", "m:2").changed
    assert manage.rollouts("a") == []
    manage.rollout("a", "m:2", stages="10,100", hold="0s", guard="error<20%")
    with pytest.raises(errors.AlreadyExists, match="clipper rollout abort a"):
        manage.rollout("a", "m:2")
    with pytest.raises(errors.StillLinked, match="being rolled out in: a"):
        manage.retire("m:2")
    assert manage.pause_rollout("a").message == "the rollout of m:2 in a is paused"
    assert manage.pause_rollout("a").message == "the rollout of m:2 in a is paused already"
    drive(
        server,
        lambda: (
            manage.rollouts("a")[0]["new"] is not None
            and manage.rollouts("a")[0]["new"]["answers"] > 40
        ),
    )
    assert (state(server), manage.rollouts("a")[0]["share"]) == ("paused", 0.1)
    assert manage.by("ann", dry_run=True).abort_rollout("a").dry_run
    assert state(server) == "paused"
    manage.resume_rollout("a")
    drive(server, lambda: manage.rollouts("a")[0]["share"] == 1.0)
    manage.by("ann").promote_rollout("a") if state(server) in OPEN else None
    assert server.catalog.latest("m").version == 2
    with pytest.raises(errors.Unknown, match="no running rollout"):
        manage.abort_rollout("a")
    for wrong, why in (
        ("m:2", "already uses 'm:2'"),
        ("m", "which version"),
        ("m:9", "version 'm:9'"),
        ("x:1", "no model 'x'"),
    ):
        with pytest.raises(errors.ClipperError, match=why):
            manage.rollout("a", wrong)
    server.deploy("m", new, input="f64[2]", promote=False, replicas=0)
    with pytest.raises(errors.NoReplica, match="clipper scale m:3 1"):
        manage.rollout("a", "m:3")


def test_a_rollout_ends_when_its_models_are_replaced_or_retired(
    server: clipper.ClipperServer,
) -> None:
    server.deploy("m", new, input="f64[2]", promote=False)
    server.deploy("m", new, input="f64[2]", promote=False)
    server.manage.rollout("a", "m:2", hold="1h")
    server.manage.promote("m:3")
    wait_until(lambda: state(server) == "aborted", "it notices that m is another")
    assert server.manage.rollouts()[0]["reason"] == "'m' is m:3 now"
    server.manage.rollout("a", "m:2", hold="1h")
    server.manage.retire("m:2", force=True)
    wait_until(lambda: state(server) == "aborted", "it notices that m:2 is gone")
    server.manage.remove_application("a")
    assert server.manage.rollouts() == []


def test_other_applications_are_not_moved(server: clipper.ClipperServer) -> None:
    """Another application queries m too, but only the one of the rollout gets the new version."""
    server.deploy("m", new, input="f64[2]", promote=False)
    server.app("b", models=["m"], slo_ms=20_000)
    server.manage.rollout("a", "m:2")
    server.manage.promote_rollout("a")
    assert server.catalog.latest("m").version == 1
    assert [str(link) for link in server.catalog.application("a").models] == ["m:2"]


def test_beside_a_decider_roles_and_other_models(server: clipper.ClipperServer) -> None:
    """The canary is the application as it will be: its policy, decider and observers with the new
    version."""
    server.deploy("n", old, input="f64[2]")
    server.deploy("m", new, input="f64[2]", promote=False)
    server.app("a", models=["m", "n"], policy="stacking", decider="majority", roles={})
    server.deploy("watch", old, input="f64[2]")
    server.manage.shadow("a", "watch")
    server.manage.rollout(
        "a", "m:2", canary="50%", stages="100", hold="0.1s", guard="error<10%, agreement>50%"
    )
    names: set[str] = set()
    drive(server, over(server), lambda answer: names.update(map(str, answer.models)))
    assert state(server) == "promoted"
    assert {"m:1", "m:2", "n:1"} >= names
    assert server.stats()["applications"]["a"]["models"]["watch:1"]["role"] == "shadow"


def test_a_rollout_goes_on_after_a_restart(tmp_path: Path) -> None:
    with clipper.start(state=str(tmp_path), **QUICK) as first:
        first.deploy("m", old, input="f64[2]")
        first.deploy("m", new, input="f64[2]", promote=False)
        first.app("a", models=["m"], slo_ms=20_000, default=-1)
        first.manage.rollout("a", "m:2", stages="10,50,100", hold="0.1s", guard="error<20%")
        drive(first, lambda: first.manage.rollouts("a")[0]["stage"] == 1)
        first.manage.pause_rollout("a")
        before = first.manage.rollouts("a")[0]
    with clipper.start(state=str(tmp_path), **QUICK) as again:
        after = again.manage.rollouts("a")[0]
        same = ("model", "control", "stages", "guard", "stage", "state", "began_us", "stage_us")
        assert {key: after[key] for key in same} == {key: before[key] for key in same}
        again.manage.resume_rollout("a")
        wait_until(
            lambda: again.manage.rollouts("a")[0]["new"] is not None,
            "both versions are connected again",
        )
        drive(again, over(again))
        assert state(again) == "promoted", "starting again is no regression"
