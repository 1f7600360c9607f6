"""Applications as speculative servers: made, changed and removed while queries are in flight; ids,
qualifiers, both arrangements, statistics."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, Overloaded, ShuttingDown, StillLinked, UnknownApplication
from clipper_container.model import Scored
from tests.conftest import PATIENCE_S
from tests.threads import join

SLO_MS = 20_000
OWN = Path(__file__).resolve().parents[1] / "selection"


def row(i: float = 0.0) -> Any:
    return np.array([i, 1.0])


def first(xs: Any) -> Any:
    return np.asarray(xs)[:, 0].astype(np.int64) % 10


def breaks(xs: Any) -> Any:
    raise ValueError("no")


def qualified(quality: int, slow_s: float = 0.0) -> Callable[[Any], Any]:
    """Return an output and its quality for each row, and nothing for inputs that begin with -1."""

    def model(xs: Any) -> Any:
        time.sleep(slow_s)
        qualifiers = [
            (
                None
                if x[0] == -1
                else {"quality": quality, "mode": "fast", "x": float(x[0]), "sure": True}
            )
            for x in xs
        ]
        return Scored(np.full(len(xs), quality), qualifiers=qualifiers)

    return model


@pytest.fixture(scope="module")
def one(server: Any) -> Any:
    return server.deploy("one", first, input="f64[2]")


@pytest.fixture(scope="module")
def two(server: Any) -> Any:
    return server.deploy("two", first, input="f64[2]")


@pytest.fixture(scope="module")
def low_quality(server: Any) -> Any:
    return server.deploy("poor", qualified(1), input="f64[2]")


@pytest.fixture(scope="module")
def good(server: Any) -> Any:
    return server.deploy("good", qualified(5, 0.02), input="f64[2]")


@pytest.fixture
def removed(server: Any, names: Iterator[str]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes applications; remove those that the test has not removed."""
    made = []

    def do(*models: Any, **settings: Any) -> Any:
        handle = server.app(next(names), models=[model.name for model in models], **settings)
        made.append(handle.name)
        return handle

    yield do
    for name in made:
        if name in server.catalog.view.applications:
            server.remove_app(name)


# -- removed and changed at run time


def test_an_application_is_removed_while_queries_are_in_flight(
    server: Any, removed: Any, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")

    def waits(xs: Any) -> Any:
        import os
        import time

        while not os.path.exists(gate):
            time.sleep(0.002)
        return np.zeros(len(xs))

    model = server.deploy("waits", waits, input="f64[2]", cache=False)
    handle = removed(model, policy="stacking", slo_ms=SLO_MS)
    futures = [handle.predict(row(i)) for i in range(50)]
    with pytest.raises(StillLinked):
        server.retire(model.name)
    server.remove_app(handle.name)
    for refused in (
        lambda: handle.predict(row()),
        lambda: handle.feedback("x", label=1),
        lambda: server.app(handle.name),
    ):
        with pytest.raises(UnknownApplication):
            refused()
    with pytest.raises(UnknownApplication):
        server.remove_app(handle.name)
    assert handle.name not in server.stats()["applications"]
    Path(gate).touch()
    answers = [future.result(PATIENCE_S) for future in futures]
    assert not any(answer.is_default for answer in answers), "those in flight are answered"
    with pytest.raises(UnknownApplication):
        handle.feedback(answers[0], label=0.0)
    again = removed(model, slo_ms=SLO_MS)
    assert again.predict(row(1)).result(PATIENCE_S).output == 0.0
    server.remove_app(again.name)
    server.retire(model.name)


def test_it_is_changed_under_load_and_nothing_is_lost(
    server: Any, one: Any, two: Any, removed: Any
) -> None:
    handle = removed(one, slo_ms=SLO_MS, default=-1)
    stop = threading.Event()
    seen: Counter[str] = Counter()
    wrong: list[Any] = []
    query_counts = [0, 0]

    def query(me: int) -> None:
        while not stop.is_set():
            futures = [handle.predict(row(query_counts[me] + i), salt=1 + me) for i in range(20)]
            for i, future in enumerate(futures):
                answer = future.result(PATIENCE_S)
                seen[answer.decided_by] += 1
                if answer.output != (query_counts[me] + i) % 10:
                    wrong.append(answer)
            query_counts[me] += 20

    threads = [threading.Thread(target=query, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    both = ["one", "two"]
    changes: tuple[dict[str, Any], ...] = (
        {"models": both},
        {"decider": "first"},
        {"decider": "majority within 5000 ms, else first"},
        {"slo_ms": 10_000},
        {"policy": "exp3"},
        {"decider": "hedged"},
        {"roles": {"two": "shadow"}},
        {"decider": "all"},
        {"roles": {}},
        {"policy": "ensemble"},
        {"coverage": 0.9, "policy": "stacking"},
        {"coverage": None},
        {"missing": "skip"},
    )
    try:
        for change in (*changes, {"models": "one", "decider": "all"}, *changes):
            before = sum(query_counts)
            server.app(handle.name, **change)
            while (
                sum(query_counts) < before + 40
                and not wrong
                and all(thread.is_alive() for thread in threads)
            ):
                time.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            join(thread)
    assert not wrong, wrong[:3]
    assert sum(seen.values()) == sum(query_counts)
    assert {"all", "first"} < set(seen)
    counted = server.stats()["applications"][handle.name]
    assert counted["queries"] == counted["duration_us"]["count"] == sum(query_counts)
    assert sum(counted["decided_by"].values()) == sum(query_counts)


def test_what_is_declared_in_a_file_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").write_text("def same(xs):\n    return xs\n")
    (tmp_path / "clipper.toml").write_text(
        '[models.same]\ntarget = "models:same"\ninput = "f64"\n[apps.a]\nmodels = ["same"]\ndecider'
        ' = "first within 50 ms, else all"\nslo_ms = 5000\ncoverage = 0.8\npolicy ='
        ' "stacking"\nmissing = "skip"\nroles = ["same = primary", "saw = decoy"]\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with clipper.start("clipper.toml") as server:
        record = server.catalog.application("a")
        assert (record.decider, record.coverage, record.missing) == (
            "first within 50 ms, else all",
            0.8,
            "skip",
        )
        assert record.roles == {"same": "primary", "saw": "decoy"}
        server.remove_app("a")
        assert server.catalog.applications() == []
        with pytest.raises(UnknownApplication):
            server.remove_app("a")
    with pytest.raises(ShuttingDown):
        server.remove_app("a")


# -- ids


def test_an_id_comes_back_and_reaches_logs_and_decoys(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="clipper.serving.query.processor")
    with clipper.start(state=str(tmp_path)) as server:
        server.deploy("one", first, input="f64[2]")
        app = server.app("a", ["one"], roles={"saw": "decoy"}, slo_ms=SLO_MS)
        answer = app.predict(row(3), id="r-17").result(PATIENCE_S)
        assert (answer.request_id, answer.output) == ("r-17", 3)
        assert answer.id != "r-17", "the one for feedback is another"
        assert app.predict(row(3)).result(PATIENCE_S).request_id == ""
        twice = [app.predict(row(4), id="same").result(PATIENCE_S) for _ in range(2)]
        assert [each.request_id for each in twice] == ["same", "same"]
        assert twice[0].id != twice[1].id
        request = clipper.PredictionRequest(row(5), "a", id="r-ü")
        assert server.schedule_prediction(request).result(PATIENCE_S).request_id == "r-ü"
        assert [record.request_id for record in server.recorded("a")] == [
            "r-17",
            "",
            "same",
            "same",
            "r-ü",
        ]
        assert not caplog.records
        server.deploy("broken", breaks, input="f64[2]")
        server.app("a", ["broken"], default=-1)
        failed = app.predict(row(6), id="r-18").result(PATIENCE_S)
        assert (failed.is_default, failed.request_id) == (True, "r-18")
        assert (
            f"application 'a', request 'r-18', prediction {failed.id}: the default, broken:1 failed"
            in caplog.text
        )


@pytest.mark.parametrize("id", ["x" * 513, "a\nb", "a\x00", "\ud800", "tab\t", 7, b"r", None])
def test_ids_that_are_refused(server: Any, one: Any, app: Any, id: Any) -> None:
    handle = app(one, slo_ms=SLO_MS)
    before = server.stats()["applications"][handle.name]["queries"]
    with pytest.raises(InvalidInput, match="id"):
        (
            server.schedule_prediction(clipper.PredictionRequest(row(), handle.name, id=id))
            if id
            else handle.predict(row(), id=7)
        )
    if id:
        with pytest.raises(InvalidInput, match="id"):
            handle.predict(row(), id=id)
    assert server.stats()["applications"][handle.name]["queries"] == before
    assert handle.predict(row(), id="x" * 512).result(PATIENCE_S).request_id == "x" * 512


# -- qualifiers


def test_qualifiers_come_back_with_the_answer(low_quality: Any, one: Any, app: Any) -> None:
    handle = app(low_quality, one, slo_ms=SLO_MS)
    for salt in (1, 1):  # from the container, then from the cache
        answer = handle.predict(row(2.5), salt=salt).result(PATIENCE_S)
        qualifiers = {str(model): qualifiers for model, qualifiers in answer.qualifiers.items()}
        assert qualifiers == {
            low_quality.name: {"quality": 1, "mode": "fast", "x": 2.5, "sure": True}
        }
    assert handle.predict(row(-1)).result(PATIENCE_S).qualifiers == {}
    bare = low_quality.predict(row(3))
    assert bare.result(PATIENCE_S) == 1
    assert bare.prediction()[:2] == (1, None)
    assert len(bare.prediction()) == 3
    many = handle.predict_many(np.array([row(i) for i in range(5)])).result(PATIENCE_S)
    assert len(many.outputs) == 5, "arrays carry no qualifiers, and lose no outputs by them"


def test_a_decider_and_a_policy_go_by_qualifiers(
    low_quality: Any,
    good: Any,
    deploy: Any,
    app: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(OWN))
    gate = str(tmp_path / "gate")

    def waits(xs: Any) -> Any:
        import os
        import time

        while not os.path.exists(gate):
            time.sleep(0.002)
        return np.zeros(len(xs))

    handle = app(
        low_quality,
        good,
        deploy(waits, input="f64[2]"),
        slo_ms=SLO_MS,
        decider="user_classes:GoodEnough(quality=3)",
    )
    try:
        answer = handle.predict(row(1)).result(PATIENCE_S)
    finally:
        Path(gate).touch()
    assert (answer.output, [str(model) for model in answer.models]) == (5, [good.name])
    assert answer.decided_by == "user_classes:GoodEnough(quality=3)"
    assert answer.qualifiers[answer.models[0]]["quality"] == 5
    chosen = app(low_quality, good, slo_ms=SLO_MS, policy="user_classes:BestQuality")
    answer = chosen.predict(row(2)).result(PATIENCE_S)
    assert (answer.output, [str(model) for model in answer.models], len(answer.qualifiers)) == (
        5,
        [good.name],
        2,
    )


def test_equal_outputs_with_other_qualifiers_are_equal_votes(deploy: Any, app: Any) -> None:
    def answering(mode: str) -> Callable[[Any], Any]:
        return lambda xs: Scored(["yes"] * len(xs), qualifiers=[{"mode": mode}] * len(xs))

    models = [deploy(answering(mode), input="f64[2]") for mode in "ab"]
    handle = app(*models, slo_ms=SLO_MS, decider="majority")
    answer = handle.predict(row(1)).result(PATIENCE_S)
    assert (answer.output, answer.decided_by, len(answer.models)) == ("yes", "majority", 2)
    assert sorted(qualifiers["mode"] for qualifiers in answer.qualifiers.values()) == ["a", "b"]


def test_qualifiers_that_cannot_be_sent_fail_the_batch(deploy: Any, app: Any) -> None:
    def long(xs: Any) -> Any:
        return Scored(np.zeros(len(xs)), qualifiers=[{"text": "x" * 2000}] * len(xs))

    handle = app(deploy(long, input="f64[2]"), slo_ms=SLO_MS, default=-1)
    answer = handle.predict(row(1)).result(PATIENCE_S)
    assert (answer.output, answer.is_default) == (-1, True)
    assert "at most 1024" in answer.reason


# -- both arrangements


def test_both_arrangements_give_equal_answers(
    server: Any, one: Any, two: Any, low_quality: Any, app: Any
) -> None:
    for decider in ("all", "first", "majority within 5000 ms, else first"):
        handle = app(one, two, slo_ms=SLO_MS, decider=decider)
        controller = {i: handle.predict(row(i), id=str(i)).result(PATIENCE_S) for i in range(40)}
        with server.collector(capacity=64) as collector:
            for i in range(40):
                assert collector.start(handle.name, row(i), id=str(i), user="u") == str(i)
        replies = list(collector)
        assert len(replies) == 40
        assert all(reply.application == handle.name for reply in replies)
        collected = {int(reply.id): reply.answer for reply in replies}
        for i, answer in controller.items():
            same = collected[i]
            assert (answer.output, answer.decided_by, answer.is_default) == (
                same.output,
                same.decided_by,
                same.is_default,
            )
            assert same.request_id == str(i)


def test_several_starters_and_collectors(server: Any, one: Any, two: Any, app: Any) -> None:
    handles = [app(one, slo_ms=SLO_MS), app(one, two, slo_ms=SLO_MS, decider="first")]
    collector = server.collector(capacity=32)
    found: list[tuple[str, str, Any]] = []

    def start(thread_number: int) -> None:
        for i in range(200):
            while True:
                try:
                    collector.start(handles[i % 2].name, row(i), id=f"{thread_number}-{i}", salt=7)
                    break
                except Overloaded as full:
                    time.sleep(full.retry_after_s / 10)

    def collect() -> None:
        found.extend((reply.id, reply.application, reply.answer.output) for reply in collector)

    starters = [threading.Thread(target=start, args=(thread_number,)) for thread_number in range(3)]
    collectors = [threading.Thread(target=collect) for _ in range(3)]
    for thread in (*starters, *collectors):
        thread.start()
    for thread in starters:
        join(thread)
    collector.close()
    for thread in collectors:
        join(thread)
    expected = {
        (f"{thread_number}-{i}", handles[i % 2].name, i % 10)
        for thread_number in range(3)
        for i in range(200)
    }
    assert len(found) == 600
    assert set(found) == expected


def test_a_server_that_closes_ends_its_collectors() -> None:
    with clipper.start() as server:
        server.deploy("one", first, input="f64[2]")
        server.app("a", ["one"], slo_ms=SLO_MS)
        collector = server.collector()
        collector.start("a", row(1))
        found: list[Any] = []
        waits = threading.Thread(target=lambda: found.extend(collector))
        waits.start()
    join(waits)
    assert len(found) == 1
    for refused in (
        lambda: collector.start("a", row(1)),
        lambda: server.collector(),
        lambda: collector.get(),
    ):
        with pytest.raises(ShuttingDown):
            refused()


def test_starts_that_are_refused(server: Any, one: Any, app: Any) -> None:
    handle = app(one, slo_ms=SLO_MS)
    with server.collector(capacity=1) as collector:
        for application, x, more in (
            ("nobody", row(), {}),
            (handle.name, "text", {}),
            (handle.name, row(), {"id": "\n"}),
        ):
            with pytest.raises((UnknownApplication, InvalidInput)):
                collector.start(application, x, **more)
        assert len(collector) == 0
    with pytest.raises(InvalidInput, match="capacity"):
        server.collector(capacity=0)


# -- statistics


def test_statistics_of_an_application_and_of_a_model(
    server: Any, one: Any, two: Any, app: Any
) -> None:
    before_us = time.time_ns() // 1000
    handle = app(one, two, slo_ms=SLO_MS, decider="first", default=-1)
    for i in range(30):
        handle.predict(row(100 + i), salt=9).result(PATIENCE_S)
    stats = server.stats()["applications"][handle.name]
    assert (stats["decider"], stats["policy"], stats["slo_ms"]) == ("first", "mixture", SLO_MS)
    assert before_us <= stats["since_us"] <= time.time_ns() // 1000
    assert (stats["queries"], stats["decided_by"]) == (30, {"first": 30})
    took = stats["duration_us"]
    assert took["count"] == 30
    assert 0 <= took["min"] <= took["p50"] <= took["p99"] <= took["max"]
    assert took["min"] <= took["mean"] <= took["max"]
    assert sum(model["wins"] for model in stats["models"].values()) == 30
    assert all(model["in_time"] >= model["wins"] for model in stats["models"].values())
    model = server.stats()["models"]["one:1"]
    assert model["since_us"] > 0
    assert model["duration_us"]["count"] == model["latency_us"].count
    assert (
        model["duration_us"]["min"] <= model["duration_us"]["mean"] <= model["duration_us"]["max"]
    )
