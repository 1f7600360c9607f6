"""Deciders through the public API, with models in processes that answer when the test opens a
gate."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, TypeConflict
from clipper_container.model import Scored
from clipper_core.runtime.status import Status
from tests.memory_container import wait_until

SLO_MS = 20_000
PATIENCE_S = 30.0
OWN = Path(__file__).resolve().parents[1] / "selection"


def constant(label: Any) -> Callable[[Any], Any]:
    return lambda xs: [label] * len(xs) if isinstance(label, str) else np.full(len(xs), label)


def sure(label: int, confidence: float) -> Callable[[Any], Any]:
    return lambda xs: Scored(np.full(len(xs), label), np.full(len(xs), confidence))


def gated(gate: str, label: Any) -> Callable[[Any], Any]:
    """Answer once the file `gate` exists."""

    def model(xs: Any) -> Any:
        while not os.path.exists(gate):
            time.sleep(0.005)
        return [label] * len(xs) if isinstance(label, str) else np.full(len(xs), label)

    return model


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Yield the file; create it at the end at the latest, so that containers end with the test."""
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture(scope="module")
def one(server: Any) -> Any:
    return server.deploy("one", constant(1), input="f64[2]")


@pytest.fixture(scope="module")
def another(server: Any) -> Any:
    return server.deploy("another", constant(1), input="f64[2]")


@pytest.fixture
def slow(deploy: Any, gate: Path) -> Any:
    return deploy(gated(str(gate), 2), input="f64[2]")


rows = (np.array([float(i), 0.5]) for i in range(10**9))


def ids(*models: Any) -> tuple[clipper.VersionedModel, ...]:
    return tuple(clipper.VersionedModel.parse(model.name) for model in models)


@pytest.mark.parametrize(
    ("decider", "policy"),
    [
        ("majority", "ensemble"),
        ("majority", "exp3"),
        ("quorum(2)", "stacking"),
        ("weighted", "static(weights={'one': 2})"),
    ],
)
def test_consensus_does_not_wait_for_models_that_cannot_change_it(
    one: Any, another: Any, slow: Any, app: Any, gate: Path, decider: str, policy: str
) -> None:
    handle = app(slow, another, one, slo_ms=SLO_MS, default=-1, decider=decider, policy=policy)
    x = next(rows)
    future = handle.predict(x)
    answer = future.result(PATIENCE_S)
    assert (answer.output, answer.decided_by, answer.missing) == (1, decider, ())
    assert set(answer.models) == {*ids(one, another)}
    gate.touch()
    # its prediction may have come by now, and agrees with nobody
    late = handle.predict(x).result(PATIENCE_S)
    assert late.output == 1
    assert future.result() is answer


def test_a_late_prediction_is_cached_and_learned_from_and_changes_no_answer(
    server: Any, one: Any, slow: Any, app: Any, gate: Path
) -> None:
    handle = app(slow, one, slo_ms=SLO_MS, default=-1, decider="first", policy="stacking")
    x = next(rows)
    future = handle.predict(x)
    at = 1
    wait_until(lambda: future.done())
    assert not gate.exists()
    gate.touch()
    wait_until(lambda: server.model(slow.name).cached(x)[0])
    answer = future.result(PATIENCE_S)
    assert (answer.output, answer.models, answer.missing) == (1, ids(one), ())
    assert future.status(1 - at) is Status.OK, "read after the verdict, by whoever learns"
    assert handle.feedback(answer, label=2)
    learner = server._resolver.application(handle.name).learner
    state = learner.state(None)
    weight = dict(zip(state.models, state.rows[:, 0], strict=True))
    assert weight[ids(slow)[0]] > weight[ids(one)[0]], "the late one was right"


def test_below_the_least_confidence_the_default_is_answered(deploy: Any, app: Any) -> None:
    unsure = deploy(sure(1, 0.4), input="f64[2]")
    handle = app(unsure, slo_ms=SLO_MS, default=-1, decider="first", confidence_min=0.5)
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.is_default, answer.decided_by) == (-1, True, "first")
    assert answer.reason.startswith("confidence 0.40 is below")


def test_a_container_that_is_killed_with_a_query(
    server: Any, one: Any, slow: Any, app: Any, gate: Path
) -> None:
    """The vote is undecided until the container is back, or until the query's deadline."""
    handle = app(slow, one, slo_ms=SLO_MS, default=-1, decider="best_quality")
    future = handle.predict(next(rows))
    wait_until(lambda: future.progress()[0] == 1)
    stats = server.stats()["models"][slow.name]["replicas"][0]
    wait_until(lambda: server.stats()["models"][slow.name]["replicas"][0].get("in_flight", 0) > 0)
    os.kill(stats["pid"], signal.SIGKILL)
    gate.touch()
    answer = future.result(PATIENCE_S)
    assert not answer.is_default
    assert answer.output in (1, 2)
    assert (answer.output == 2) == (answer.missing == ())
    assert (answer.output == 1) == (answer.missing == ids(slow))


def test_a_guaranteed_time_must_be_measured(
    server: Any, one: Any, slow: Any, app: Any, gate: Path
) -> None:
    with pytest.raises(
        InvalidInput, match=rf"{slow.name} has made 0 predictions of the 100.*run server.model"
    ):
        app(slow, one, slo_ms=300, default=-1, decider=f"guaranteed_time(floor={slow.name})")
    with pytest.raises(InvalidInput, match=r"'onex'.*does not link - did you mean 'one'"):
        app(slow, one, slo_ms=300, default=-1, decider="guaranteed_time(floor=onex)")
    decider = "guaranteed_time(floor=one, margin_ms=500)"
    for _ in range(200):
        server.model(one.name).predict(next(rows)).result(PATIENCE_S)
    with pytest.raises(
        InvalidInput, match=rf"no model is known to answer within 0\.001 ms: {one.name} takes"
    ):
        app(slow, one, slo_ms=500.001, default=-1, decider=decider)
    handle = app(slow, one, slo_ms=1500, default=-1, decider=decider)
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.models, answer.missing) == (1, ids(one), ids(slow))
    assert answer.decided_by == "guaranteed_time"
    gate.touch()
    wait_until(lambda: handle.predict(next(rows)).result(PATIENCE_S).models == ids(slow))


def test_a_combination_goes_on_to_its_next_step(one: Any, slow: Any, deploy: Any, app: Any) -> None:
    other = deploy(constant(3), input="f64[2]")
    handle = app(
        slow,
        other,
        one,
        slo_ms=SLO_MS,
        default=-1,
        decider="majority within 50 ms, else floor(one)",
    )
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.decided_by, answer.models) == (1, "floor(one)", ids(one))
    assert ids(slow)[0] in answer.missing
    assert answer.agreement == pytest.approx(1 / 3)


def test_a_table_widens(one: Any, slow: Any, app: Any) -> None:
    name = slow.name.partition(":")[0]
    handle = app(slow, one, slo_ms=SLO_MS, default=-1, decider=f"table(0: {name}; 30: any)")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.decided_by, answer.missing) == (1, "table(30)", ids(slow))


def test_a_cascade_queries_the_next_model_only_if_needed(
    server: Any, deploy: Any, app: Any
) -> None:
    cheap, expensive = deploy(sure(1, 0.95), input="f64[2]"), deploy(sure(2, 0.99), input="f64[2]")
    handle = app(cheap, expensive, slo_ms=SLO_MS, default=-1, decider="cascade(confidence=0.9)")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.models, answer.missing) == (1, ids(cheap), ())
    assert answer.confidence == pytest.approx(0.95)
    assert server.stats()["models"][expensive.name]["evaluated"] == 0
    strict = app(cheap, expensive, slo_ms=SLO_MS, default=-1, decider="cascade(confidence=0.98)")
    assert strict.predict(next(rows)).result(PATIENCE_S).output == 2


def test_a_hedge_is_queried_in_time(one: Any, slow: Any, app: Any) -> None:
    handle = app(slow, one, slo_ms=SLO_MS, default=-1, decider="hedged(after_ms=20, budget=1)")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.models) == (1, ids(one))


def test_roles_and_counts(
    server: Any, one: Any, another: Any, slow: Any, deploy: Any, app: Any
) -> None:
    """An observer has no vote; an unneeded prediction does not count as missing, in the statistics
    either."""
    shadow = deploy(constant(7), input="f64[2]")
    roles = {shadow.name.partition(":")[0]: "shadow"}
    handle = app(
        slow, one, another, shadow, slo_ms=SLO_MS, default=-1, decider="majority", roles=roles
    )
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, set(answer.models), answer.confidence) == (
        1,
        {*ids(one, another)},
        pytest.approx(2 / 3),
    )
    stats = server.stats()["applications"][handle.name]
    assert (stats["queries"], stats["answers"]["ok"]) == (1, 1)
    assert not any(model["missing"] for model in stats["models"].values())


def test_numbers(deploy: Any, app: Any) -> None:
    models = [deploy(constant(value), input="f64[2]") for value in (1.0, 2.0, 6.0)]
    assert app(*models, slo_ms=SLO_MS, decider="mean").predict(next(rows)).result(
        PATIENCE_S
    ).output == pytest.approx(3.0)
    assert (
        app(*models, slo_ms=SLO_MS, decider="median").predict(next(rows)).result(PATIENCE_S).output
        == 2.0
    )


def test_an_array_waits_for_all(one: Any, another: Any, app: Any) -> None:
    handle = app(one, another, slo_ms=SLO_MS, default=-1, decider="first")
    answers = handle.predict_many(np.random.default_rng(1).random((5, 2))).result(PATIENCE_S)
    assert answers.outputs.tolist() == [1] * 5
    assert set(answers.models) == {*ids(one, another)}


def test_what_does_not_fit_is_refused(one: Any, another: Any, app: Any) -> None:
    for decider, message in (
        ("majorty", "did you mean 'majority'"),
        ("quorum(3)", "needs 3 models; it links 2"),
        ("majority within 20 s, else first", "no step after it decides"),
        (7, "`decider`: Expected `str`"),
        ("nowhere:X", "no module 'nowhere'"),
    ):
        with pytest.raises(InvalidInput, match=message):
            app(one, another, slo_ms=1000, decider=decider)


def test_a_decider_outlives_its_server(tmp_path: Path) -> None:
    with clipper.start(state=str(tmp_path)) as server:
        server.deploy("m", constant(1), input="f64[2]")
        server.app("a", models=["m"], decider="first", slo_ms=SLO_MS)
    with clipper.start(state=str(tmp_path)) as server:
        answer = server.app("a").predict(next(rows)).result(PATIENCE_S)
        assert answer.decided_by == "first"
        server.app("a", decider="all")
        assert server.app("a").predict(next(rows)).result(PATIENCE_S).decided_by == "all"


def test_a_decider_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "clipper.toml").write_text(
        '[apps.a]\ndecider = "majority within 5 ms, else first"\n'
    )
    with clipper.start(str(tmp_path / "clipper.toml")) as server:
        assert server.catalog.application("a").decider == "majority within 5 ms, else first"


# -- of one's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(OWN))
    import user_classes  # type: ignore[import-not-found]

    # an object of another test has logged its first failure already
    clipper.selection.create_policy.cache_clear()
    clipper.selection.parse_decider.cache_clear()
    return user_classes


@pytest.mark.usefixtures("own")
def test_a_decider_of_ones_own(one: Any, another: Any, slow: Any, app: Any) -> None:
    handle = app(slow, one, another, slo_ms=SLO_MS, default=-1, decider="user_classes:Two")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.decided_by, set(answer.models)) == (
        1,
        "user_classes:Two",
        {*ids(one, another)},
    )
    assert answer.missing == ids(slow) or answer.missing == ()


@pytest.mark.usefixtures("own")
def test_a_decider_that_names_a_time(one: Any, slow: Any, app: Any) -> None:
    handle = app(slow, one, slo_ms=SLO_MS, default=-1, decider="user_classes:Patient(until_ms=30)")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.decided_by) == (1, "user_classes:Patient(until_ms=30)")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("which", ["Raises", "SaysNonsense", "SaysNonsense(kind='absent')"])
def test_a_decider_that_fails_is_ignored(one: Any, another: Any, app: Any, which: str) -> None:
    handle = app(one, another, slo_ms=SLO_MS, default=-1, decider=f"user_classes:{which}")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.decided_by, answer.is_default) == (1, "all", False)


def test_a_decider_that_hangs_delays_no_other_query(
    own: Any, deploy: Any, gate: Path, app: Any
) -> None:
    hangs, late = (
        deploy(constant("hang"), input="f64[2]"),
        deploy(gated(str(gate), "late"), input="f64[2]"),
    )
    fine = deploy(constant("fine"), input="f64[2]")
    own.Hangs.released.clear()
    own.Hangs.hung.clear()
    try:
        bad = app(late, hangs, slo_ms=2000, default="none", decider="user_classes:Hangs")
        good = app(late, fine, slo_ms=SLO_MS, default="none", decider="user_classes:Hangs")
        hung = bad.predict(next(rows))
        assert own.Hangs.hung.wait(PATIENCE_S)
        assert good.predict(next(rows)).result(PATIENCE_S).output == "fine"
        answer = hung.result(PATIENCE_S)
        assert (answer.output, answer.decided_by, answer.missing) == ("hang", "all", ids(late))
        assert good.predict(next(rows)).result(PATIENCE_S).decided_by == "user_classes:Hangs"
    finally:
        own.Hangs.released.set()


@pytest.mark.usefixtures("own")
def test_a_policy_of_ones_own(one: Any, deploy: Any, app: Any) -> None:
    handle = app(one, slo_ms=SLO_MS, default=-1, policy="user_classes:LastWord(confidence=0.25)")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.confidence) == (1, 0.25)
    assert (
        handle.predict_many(np.random.default_rng(2).random((3, 2)))
        .result(PATIENCE_S)
        .confidence.tolist()
        == [0.25] * 3
    )
    with pytest.raises(
        TypeConflict, match=r"user_classes:LastWord' of application .* does not take inputs of str"
    ):
        app(deploy(constant("x"), input="str"), policy="user_classes:LastWord")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("fails", ["select", "combine"])
def test_a_policy_that_fails_costs_the_query_its_default(
    one: Any, app: Any, fails: str, caplog: Any
) -> None:
    policy = f"user_classes:Learns(fails={fails!r})"
    handle = app(one, slo_ms=SLO_MS, default=-1, policy=policy)
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert (answer.output, answer.is_default, answer.decided_by) == (-1, True, "")
    assert f"{fails} raised ZeroDivisionError" in answer.reason
    assert "Traceback" in caplog.text
    answers = handle.predict_many(np.random.default_rng(3).random((3, 2))).result(PATIENCE_S)
    assert (answers.outputs.tolist(), answers.is_default.all()) == ([-1] * 3, True)
    assert list(answers.reasons.values()) == [3]
    speculating = app(one, slo_ms=SLO_MS, default=-1, policy=policy, decider="first")
    assert speculating.predict(next(rows)).result(PATIENCE_S).output in (-1, 1)
    assert app(one, slo_ms=SLO_MS, default=-1).predict(next(rows)).result(PATIENCE_S).output == 1


@pytest.mark.usefixtures("own")
def test_feedback_that_a_policy_cannot_learn_from_is_still_counted(one: Any, app: Any) -> None:
    handle = app(one, slo_ms=SLO_MS, default=-1, policy="user_classes:Learns(fails='observe')")
    answer = handle.predict(next(rows)).result(PATIENCE_S)
    assert handle.feedback(answer, label=1)
    assert not handle.feedback(answer, label=1)


@pytest.mark.usefixtures("own")
def test_a_user_whose_state_cannot_be_made_gets_the_default(one: Any, app: Any) -> None:
    handle = app(one, slo_ms=SLO_MS, default=-1, policy="user_classes:Learns(fails='user')")
    assert handle.predict(next(rows), user="u").result(PATIENCE_S).is_default
    assert handle.predict(next(rows)).result(PATIENCE_S).output == 1


def test_a_policy_class_that_is_missing_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The application goes on with what there is, and the log says what is missing."""
    (tmp_path / "passing.py").write_text((OWN / "user_classes.py").read_text())
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        with clipper.start(state=str(tmp_path / "state")) as server:
            server.deploy("m", constant(1), input="f64[2]")
            server.app(
                "a", models=["m"], decider="passing:Two", policy="passing:Learns", slo_ms=SLO_MS
            )
    monkeypatch.delitem(__import__("sys").modules, "passing")
    for cached in ("user_defined_decider", "create_policy"):
        getattr(clipper.selection, cached).cache_clear()
    with clipper.start(state=str(tmp_path / "state")) as server:
        answer = server.app("a").predict(next(rows)).result(PATIENCE_S)
        assert (answer.output, answer.decided_by) == (1, "all")
    assert "no module 'passing'" in caplog.text
