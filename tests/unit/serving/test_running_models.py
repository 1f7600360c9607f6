"""The versions that a node serves."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clipper.serving.models.model_source import ResolvedModel
from clipper.serving.models.running_models import RunningModels, row_shape
from clipper.serving.query.resolver import ApplicationResolver
from clipper.settings.server import LimitSettings
from clipper.types import InputType, Model, Similar, VersionedModel
from clipper_core.application.application import ApplicationTable
from clipper_core.engine.engine import Engine
from tests.threads import join


def record(name="m", version=1, **fields):
    return Model(name, version, **{"input": InputType.parse("f64[4]"), **fields})


@pytest.fixture
def running():
    engine = Engine(manual_clock=True, cache_bytes_max=1 << 20, tasks_max=1024)
    return RunningModels(lambda _: engine, LimitSettings(), lambda _: None)


def test_one_for_each_record(running):
    first, second = running.ensure(record()), running.ensure(record(version=2))
    assert first.core is not second.core
    assert running.ensure(record()) is first
    assert running.get(VersionedModel("m", 1)) is first
    assert running.ids() == {VersionedModel("m", 1), VersionedModel("m", 2)}
    assert {one.core.name for one in running} == {"m:1", "m:2"}


def test_queries_see_a_model_that_is_ready(running):
    model: ResolvedModel = running.ensure(record())
    model.touch()
    model.admit(1)
    assert (model.record, model.is_on_demand) == (record(), False)
    assert (model.is_ready, model.reason()) == (True, "")


def test_models_that_no_application_links_run_too(running):
    """They can then load, and answer by their own names, before an application links them."""
    resolver: Any = object.__new__(ApplicationResolver)
    resolver._running, resolver._tallies, resolver._may_roll = running, {}, lambda _: True
    resolver.table, resolver._by_name = ApplicationTable(), {}
    resolver._is_closed = False
    resolver._served = SimpleNamespace(follow=lambda view: None)
    view: Any = SimpleNamespace(
        models=lambda: [record(), record("n", 3)], applications={}, rollouts={}
    )
    resolver.resolve(view)
    assert running.ids() == {VersionedModel("m", 1), VersionedModel("n", 3)}


def test_the_engine_is_notified_of_models_that_are_cached():
    engine, calls = Engine(manual_clock=True, cache_bytes_max=1 << 20, tasks_max=1024), []
    running = RunningModels(lambda _: engine, LimitSettings(), calls.append)
    running.ensure(record(cache=False))
    assert calls == []
    running.ensure(record("n"))
    assert calls == [engine]


def test_a_model_with_tables_that_does_not_declare_its_rows_is_not_cached_for_a_stated_reason(
    running, caplog
):
    caplog.set_level("INFO")
    running.ensure(record(tables={"users": {"dim": 4}}))
    assert "does not declare which rows it reads" in caplog.text
    caplog.clear()
    running.ensure(record("n", tables={"users": {"dim": 4}}, reads={"users": (0,)}))
    assert "does not declare which rows it reads" not in caplog.text


def test_a_changed_record_keeps_its_queue(running):
    first = running.ensure(record())
    scaled = running.ensure(record(replicas=3))
    assert scaled.core is first.core
    assert scaled.model.replicas == 3


def test_near_rows_share_where_the_record_allows_it(running):
    near = running.ensure(record(similar=Similar(width=0.5, projections=8, check_share=0.0))).core
    exact = running.ensure(record(version=2)).core
    for core in (near, exact):
        core.put(np.zeros(4), 1.0)
    assert near.cached(np.full(4, 1e-9)) == (True, 1.0)
    assert exact.cached(np.full(4, 1e-9)) == (False, None)
    assert (near.similar.width, near.similar.projections, exact.similar) == (0.5, 8, None)


def test_a_version_that_comes_back_is_another_one(running):
    """Its cache entries are its own."""
    first = running.ensure(record())
    first.core.put(np.zeros(4), 1.0)
    running.forget(VersionedModel("m", 1))
    assert running.get(VersionedModel("m", 1)) is None
    second = running.ensure(record())
    assert first.core.cached(np.zeros(4)) == (True, 1.0)
    assert second.core.cached(np.zeros(4)) == (False, None)


def test_many_threads_make_one(running):
    made, barrier = [], threading.Barrier(8)

    def make():
        barrier.wait()
        made.append(running.ensure(record()))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert len({id(one.core) for one in made}) == 1


@pytest.mark.parametrize(
    "notation", ["f64[4]", "i32[*]", "str", "bytes", "f64", "u8[2,3,4]", "any", "bool[1]"]
)
def test_a_seat_has_the_type_as_it_was_given(running, notation):
    seat = running.seat(
        running.ensure(record(name=f"m{abs(hash(notation))}", input=InputType.parse(notation)))
    )
    assert str(seat.input) == notation


def test_the_first_input_determines_an_undeclared_type(running):
    one = running.ensure(record(input=InputType.parse("any")))
    assert str(running.seat(one).input) == "any"
    one.core.cached(np.zeros((2, 3), np.float32))
    assert str(running.seat(one).input) == "f32[2,3]"


def test_the_engines_notation():
    assert row_shape(InputType.parse("f64[2,3]")) == (2, 3)
    assert row_shape(InputType.parse("f64[*]")) == (-1,)
    assert row_shape(InputType.parse("str")) == ()
    assert row_shape(InputType.parse("f64")) == ()
