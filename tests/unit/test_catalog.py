"""The catalog: constraints across records, concurrent writers, and a view that follows."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.catalog.catalog import Catalog, View, plain
from clipper.errors import (
    AlreadyExists,
    InvalidInput,
    StillLinked,
    StoreError,
    TypeConflict,
    UnknownApplication,
    UnknownModel,
    UnknownVersion,
)
from clipper.store import Compare, MemoryStore, Op, SqliteStore, Store, TxnResult
from clipper.types import Application, Batching, InputType, Model, VersionedModel
from tests.threads import join


@pytest.fixture
def store() -> Iterator[Store]:
    with MemoryStore() as store:
        yield store


@pytest.fixture
def catalog(store: Store) -> Iterator[Catalog]:
    with Catalog(store, follow=False, wall_us=lambda: 1_700_000_000_000_000) as catalog:
        yield catalog


def links(*names: str) -> tuple[VersionedModel, ...]:
    return tuple(map(VersionedModel.parse, names))


def register_model(
    catalog: Catalog, name: str, input: str, *, version: int | None = None, **fields: Any
) -> Model:
    """Register a version; None: the next free one."""
    taken = [model.version for model in catalog.view.versions.get(name, ())]
    for chosen in itertools.count(version or max(taken, default=0) + 1):
        try:
            return catalog.register(Model(name, chosen, InputType.parse(input), **fields))
        except AlreadyExists:
            if version is not None:
                raise
    raise AssertionError


# -- models


def test_versions_count_up_and_the_latest_is_the_highest(catalog: Catalog) -> None:
    assert [register_model(catalog, "svm", "f64[64]").version for _ in range(3)] == [1, 2, 3]
    assert register_model(catalog, "svm", "f64[64]", version=10).version == 10
    assert register_model(catalog, "svm", "f64[64]", version=7).version == 7
    assert register_model(catalog, "svm", "f64[64]").version == 11
    assert [model.version for model in catalog.versions("svm")] == [1, 2, 3, 7, 10, 11]
    assert catalog.latest("svm").version == 11


def test_a_model_comes_back_as_it_was_registered(store: Store, catalog: Catalog) -> None:
    model = register_model(
        catalog,
        "svm",
        "f32[8,8]",
        output="i64",
        replicas=3,
        batching=Batching("static", size_max=8, pad=True),
        cache=False,
        retry_singly=True,
        target="mine:predict",
        sha256="ab" * 32,
    )
    assert model.created_us == 1_700_000_000_000_000
    assert Catalog(store, follow=False).latest("svm") == model == catalog.latest("svm")
    assert model.input == InputType("f32", (8, 8))


def test_a_version_never_changes(catalog: Catalog) -> None:
    first = register_model(catalog, "svm", "f64[64]", version=1)
    with pytest.raises(
        AlreadyExists, match=r"'svm:1' already exists.*Leave the version out to get the next"
    ):
        register_model(catalog, "svm", "f64[2]", version=1)
    assert catalog.models() == [first]


def test_bad_models_are_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidInput, match="cannot be recorded"):
        register_model(catalog, "svm", "f64[3]", target="\ud800")
    assert catalog.models() == []
    register_model(catalog, "svm", "f64[3]")
    for replicas in (-1, True):
        with pytest.raises(InvalidInput, match=f"replicas={replicas}"):
            catalog.set_replicas("svm", replicas)


def test_unknown_names_are_rejected_with_the_known_ones(catalog: Catalog) -> None:
    register_model(catalog, "svm", "f64[64]")
    register_model(catalog, "logreg", "f64[64]")
    with pytest.raises(UnknownModel) as caught:
        catalog.latest("svn")
    assert str(caught.value) == "no model 'svn' - did you mean 'svm'? Loaded: logreg, svm."
    with pytest.raises(
        UnknownVersion, match=r"no model version 'svm:2' - did you mean 'svm:1'\? Versions: svm:1"
    ):
        catalog.view.model("svm:2")
    with pytest.raises(UnknownModel):
        catalog.versions("none")
    with pytest.raises(InvalidInput):
        catalog.view.model("svm:x")


def test_replicas_are_set_without_touching_the_version(catalog: Catalog) -> None:
    register_model(catalog, "svm", "str", replicas=1)
    register_model(catalog, "svm", "str", replicas=1)
    assert catalog.set_replicas("svm", 5).replicas == 5
    assert catalog.set_replicas("svm:1", 0).replicas == 0
    assert [(m.version, m.replicas, m.created_us > 0) for m in catalog.models()] == [
        (1, 0, True),
        (2, 5, True),
    ]
    for bad in (-1, 10**9, 1.5, "2"):
        with pytest.raises(InvalidInput, match="replicas="):
            catalog.set_replicas("svm", bad)  # type: ignore[arg-type]
    with pytest.raises(UnknownModel):
        catalog.set_replicas("forest", 1)


def test_a_retired_version_is_removed_and_its_number_is_not_used_again(catalog: Catalog) -> None:
    register_model(catalog, "svm", "str")
    register_model(catalog, "svm", "str")
    assert catalog.retire_model("svm").version == 2
    assert catalog.latest("svm").version == 1
    with pytest.raises(UnknownVersion):
        catalog.retire_model("svm:2")
    with pytest.raises(AlreadyExists):
        register_model(catalog, "svm", "str", version=2)
    assert register_model(catalog, "svm", "str").version == 3
    assert [(m.version, bool(m.retired_us), m.replicas) for m in catalog.view.versions["svm"]] == [
        (1, False, 1),
        (2, True, 0),
        (3, False, 1),
    ]


def test_a_linked_model_is_retired_only_by_force(catalog: Catalog) -> None:
    for _ in range(2):
        register_model(catalog, "svm", "str")
    catalog.register_application("pinned", ["svm:1"])
    catalog.register_application("latest", ["svm"])
    with pytest.raises(StillLinked, match="'svm:1' is still linked to: pinned"):
        catalog.retire_model("svm:1")
    with pytest.raises(StillLinked, match="'svm:2' is still linked to: latest") as caught:
        catalog.retire_model("svm:2")
    assert "clipper promote svm:1 " in caught.value.hint
    assert catalog.latest("svm").version == 2
    catalog.retire_model("svm:2", force=True)
    assert [app.models for app in catalog.applications()] == [
        (VersionedModel("svm"),),
        (VersionedModel("svm", 1),),
    ]
    with pytest.raises(StillLinked, match="latest, pinned"):
        catalog.retire_model("svm:1")
    catalog.retire_model("svm:1", force=True)
    assert [app.models for app in catalog.applications()] == [(), ()]
    assert catalog.models() == []


def test_retiring_the_latest_may_not_leave_an_application_with_other_inputs(
    catalog: Catalog,
) -> None:
    register_model(catalog, "svm", "f64[3]")
    register_model(catalog, "svm", "f64[4]")
    catalog.register_application("digits", ["svm"])
    with pytest.raises(StillLinked, match="digits"):
        catalog.retire_model("svm:2")
    catalog.retire_model("svm:1")


# -- which version is the latest


def test_the_latest_is_what_came_last_deployed_or_promoted(store: Store, catalog: Catalog) -> None:
    for _ in range(3):
        register_model(catalog, "svm", "f64[64]")
    catalog.register_application("digits", ["svm"])
    assert catalog.promote("svm:1").version == 1
    assert catalog.latest("svm").version == 1
    assert [model.version for model in catalog.versions("svm") if catalog.view.linking(model)] == [
        1
    ]
    with Catalog(store, follow=False) as restarted:
        assert restarted.latest("svm").version == 1
    catalog.promote("svm:3")
    assert catalog.latest("svm").version == 3
    catalog.promote("svm:2")
    assert register_model(catalog, "svm", "f64[64]").version == 4
    assert catalog.latest("svm").version == 4
    catalog.promote("svm:2")
    catalog.retire_model("svm:2", force=True)
    assert catalog.latest("svm").version == 1, "not a version that somebody went back from"
    catalog.retire_model("svm:1", force=True)
    assert catalog.latest("svm").version == 4


def test_a_version_may_stay_behind_until_it_is_promoted(catalog: Catalog) -> None:
    record = register_model(catalog, "svm", "f64[64]")
    for version in (2, 3):
        catalog.register(msgspec.structs.replace(record, version=version), promote=False)
        assert catalog.latest("svm").version == 1
    catalog.promote("svm:3")
    assert catalog.latest("svm").version == 3
    first = msgspec.structs.replace(record, name="forest", version=7)
    catalog.register(first, promote=False)
    assert catalog.latest("forest").version == 7, "there is nothing to stay behind"


def test_promotion_within_one_application(catalog: Catalog) -> None:
    register_model(catalog, "svm", "f64[64]")
    register_model(catalog, "svm", "f64[64]")
    register_model(catalog, "forest", "f64[64]")
    catalog.register_application(
        "digits", ["svm", "forest", "svm:2"], roles={"svm:2": "shadow", "forest": "shadow"}
    )
    catalog.promote("svm:2", "digits")
    app = catalog.application("digits")
    assert (app.models, app.roles) == (links("svm:2", "forest"), {"forest": "shadow"})
    assert catalog.latest("svm").version == 2
    catalog.register_application("other", ["forest"])
    with pytest.raises(UnknownModel, match="'other' does not link 'svm'"):
        catalog.promote("svm:1", "other")


def test_a_promotion_that_cannot_be(catalog: Catalog) -> None:
    register_model(catalog, "svm", "f64[64]")
    register_model(catalog, "svm", "f64[32]")
    catalog.register_application("digits", ["svm"])
    with pytest.raises(TypeConflict):
        catalog.promote("svm:1")
    with pytest.raises(InvalidInput, match="which version"):
        catalog.promote("svm")
    with pytest.raises(UnknownVersion):
        catalog.promote("svm:3")
    with pytest.raises(UnknownModel, match="did you mean 'svm'"):
        catalog.promote("svn:1")


# -- applications


DEFAULTS = [
    None,
    -1,
    2**63,
    0.5,
    float("inf"),
    "none",
    "",
    b"\x00\xff",
    True,
    [1.0, 2.0],
    [[b"x"], ["y", None]],
    np.array([[1, 2], [3, 4]]),
    np.float32(0.5),
    np.int64(-1),
    np.array(["a"]),
    (1, 2),
    bytearray(b"x"),
]


@pytest.mark.parametrize("default", DEFAULTS, ids=repr)
def test_an_application_comes_back_as_it_was_registered(
    store: Store, catalog: Catalog, default: object
) -> None:
    register_model(catalog, "svm", "f64[64]")
    app = catalog.register_application(
        "digits",
        ["svm:1", VersionedModel("svm")],
        slo_ms=7.5,
        default=default,
        policy="single",
        confidence_min=0.25,
    )
    assert app.input == InputType("f64", (64,)), "the model's"
    assert app.models == links("svm:1", "svm")
    assert app.slo_us == 7500
    again = Catalog(store, follow=False).application("digits")
    assert again == app == catalog.application("digits")
    assert type(again.default) is type(plain(default))


def test_named_tensors_and_a_default_of_them_survive(store: Store, catalog: Catalog) -> None:
    types = '{"ids": "i64[*]", "x": "f32[2,3]"}'
    register_model(catalog, "m", types)
    default = {"label": 1, "raw": b"a", "scores": np.array([float("nan")])}
    catalog.register_application("a", ["m"], default=default, output="label")
    found = Catalog(store, follow=False)
    assert str(found.view.model("m").input) == types
    app = found.application("a")
    assert (str(app.input), app.output) == (types, "label")
    assert app.default["raw"] == b"a"
    assert np.isnan(app.default["scores"][0])


def test_a_nan_default_survives(store: Store, catalog: Catalog) -> None:
    catalog.register_application("a", default=np.array([float("nan"), 1.0]))
    found = Catalog(store, follow=False).application("a").default
    assert np.isnan(found[0])
    assert found[1] == 1.0


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"name": "Digits"}, InvalidInput, "bad application name 'Digits': 'D' is not allowed"),
        ({"models": ["forest"]}, UnknownModel, "no model 'forest'"),
        ({"models": ["svm:9"]}, UnknownVersion, "svm:9"),
        ({"models": ["svm", "svm"]}, InvalidInput, "twice"),
        ({"models": ["svm:zero"]}, InvalidInput, "bad version"),
        (
            {"models": ["svm", "text"]},
            TypeConflict,
            r"'text:1' has the input str, application 'digits' has f64\[64\]",
        ),
        ({"models": ["svm"], "input": "f64[63]"}, TypeConflict, "has f64.63."),
        ({"input": "f64[-1]"}, InvalidInput, "dimensions"),
        ({"slo_ms": 0}, InvalidInput, "slo_ms=0"),
        ({"slo_ms": float("nan")}, InvalidInput, "slo_ms=nan"),
        ({"slo_ms": float("inf")}, InvalidInput, "slo_ms=inf"),
        ({"slo_ms": "20"}, InvalidInput, "slo_ms='20'"),
        ({"confidence_min": 1.5}, InvalidInput, "confidence_min=1.5"),
        ({"policy": "No Policy"}, InvalidInput, "bad policy name"),
        ({"default": object()}, InvalidInput, "cannot be an application's default"),
        ({"default": {1: 1}}, InvalidInput, "dict"),
        ({"default": {"a": object()}}, InvalidInput, "object"),
        ({"default": 2**64}, InvalidInput, "64 bits"),
    ],
)
def test_bad_applications_are_refused(
    catalog: Catalog, options: dict[str, Any], error: type[Exception], why: str
) -> None:
    register_model(catalog, "svm", "f64[64]")
    register_model(catalog, "text", "str")
    revision = catalog.view.revision
    with pytest.raises(error, match=why):
        catalog.register_application(**{"name": "digits", **options})
    assert catalog.applications() == []
    assert catalog.refresh().revision == revision


def test_a_deleted_application_leaves_no_record(store: Store, catalog: Catalog) -> None:
    register_model(catalog, "svm", "f64[64]")
    catalog.register_application("digits", ["svm"], default=-1)
    with pytest.raises(AlreadyExists, match="'digits' is already registered"):
        catalog.register_application("digits")
    catalog.unregister_application("digits")
    left = [record for record in store.range("")[0] if not record.key.startswith("history/")]
    assert not any("digits" in record.key or b"digits" in record.value for record in left)
    for call in (catalog.application, catalog.unregister_application):
        with pytest.raises(UnknownApplication, match=r"no application 'digits'.*none yet"):
            call("digits")
    catalog.retire_model("svm")
    assert catalog.register_application("digits", input="str").default is None


def test_links_decide_the_input_and_must_agree(catalog: Catalog) -> None:
    for name, input in (("svm", "f64[64]"), ("forest", "f64[64]"), ("text", "str"), ("all", "any")):
        register_model(catalog, name, input)
    assert catalog.register_application("digits").input == InputType("any")

    def linked(*names: str) -> Application:
        return catalog.update_application("digits", models=names)

    assert linked("all").input == InputType("any")
    assert linked("all", "svm").input == InputType("f64", (64,))
    assert linked("all", "svm", "forest:1").models == links("all", "svm", "forest:1")
    revision = catalog.view.revision
    linked("all", "svm", "forest:1")
    assert catalog.refresh().revision == revision, "linking twice writes nothing"
    with pytest.raises(TypeConflict):
        linked("all", "svm", "text")
    assert linked("all", "forest:1").models == links("all", "forest:1")
    with pytest.raises(UnknownModel):
        linked("all", "forrest")
    with pytest.raises(UnknownApplication):
        catalog.update_application("digit", models=["svm"])


def test_update(catalog: Catalog) -> None:
    register_model(catalog, "svm", "f64[64]")
    before = catalog.register_application("digits", ["svm"])
    after = catalog.update_application(
        "digits", slo_ms=5, default=np.array([1]), policy="single", models=["svm:1"]
    )
    assert (after.slo_ms, after.default, after.policy, after.models) == (
        5,
        [1],
        "single",
        links("svm:1"),
    )
    assert (after.input, after.created_us) == (before.input, before.created_us)
    assert catalog.application("digits") == after
    for changes in ({"name": "x"}, {"slo": 3}, {"slo_ms": -1}, {"confidence_min": "1"}):
        with pytest.raises(InvalidInput):
            catalog.update_application("digits", **changes)
    with pytest.raises(TypeConflict):
        catalog.update_application("digits", input="str")
    assert catalog.application("digits") == after


def test_a_new_version_may_not_change_the_input_under_its_applications(catalog: Catalog) -> None:
    register_model(catalog, "svm", "f64[64]")
    catalog.register_application("digits", ["svm"])
    with pytest.raises(
        TypeConflict, match=r"'svm:2' has the input f64\[63\], application 'digits' has f64\[64\]"
    ):
        register_model(catalog, "svm", "f64[63]")
    catalog.update_application("digits", models=["svm:1"])
    assert register_model(catalog, "svm", "f64[63]").version == 2
    register_model(catalog, "forest", "f64[64]", version=5)
    catalog.update_application("digits", models=["svm:1", "forest"])
    assert register_model(catalog, "forest", "str", version=2), "not the latest, so nobody asks it"


def test_a_record_may_not_change_the_input_either(catalog: Catalog) -> None:
    record = register_model(catalog, "svm", "f64[64]")
    catalog.register_application("digits", ["svm"])
    other = msgspec.structs.replace(record, version=2, input=InputType.parse("f64[63]"))
    with pytest.raises(TypeConflict, match=r"'svm:2' has the input f64\[63\]"):
        catalog.register(other)
    assert catalog.latest("svm").version == 1
    catalog.register(other, promote=False)
    with pytest.raises(AlreadyExists):
        catalog.register(other)


# -- views, writers, damage


def test_a_view_never_changes(catalog: Catalog) -> None:
    register_model(catalog, "svm", "str")
    old = catalog.view
    catalog.register_application("a", ["svm"])
    assert old.applications == {}
    assert catalog.view.revision > old.revision
    with pytest.raises(TypeError):
        old.applications["x"] = 1  # type: ignore[index]


def test_listeners_are_notified_of_changes_and_only_of_them(store: Store, catalog: Catalog) -> None:
    views: list[View] = []
    end = catalog.on_change(views.append)
    register_model(catalog, "svm", "str")
    catalog.refresh()
    store.put("elsewhere", b"")
    assert catalog.refresh().revision == store.revision
    assert [sorted(view.versions) for view in views] == [["svm"]]
    end()
    end()
    catalog.register_application("a")
    assert len(views) == 1


def test_a_listener_that_raises_does_not_affect_the_others(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    views: list[View] = []

    def broken(view: View) -> None:
        raise ZeroDivisionError(view.revision)

    catalog.on_change(broken)
    catalog.on_change(views.append)
    assert register_model(catalog, "svm", "str").version == 1
    assert len(views) == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_another_catalog_on_the_same_store_follows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    mine: Store = MemoryStore() if kind == "memory" else SqliteStore(path, durable=False)
    theirs = mine if kind == "memory" else SqliteStore(path, durable=False)
    with Catalog(mine) as writer, Catalog(theirs) as reader:
        seen, revisions = threading.Event(), []

        def listen(view: View) -> None:
            revisions.append(view.revision)
            if "last" in view.applications:
                seen.set()

        reader.on_change(listen)
        register_model(writer, "svm", "str")
        writer.register_application("first", ["svm"])
        writer.register_application("last", ["svm"])
        assert seen.wait(60)
        assert revisions == sorted(revisions), "a view never goes back"
        assert reader.view.applications == writer.view.applications
    theirs.close()
    mine.close()


class Failing(MemoryStore):
    """A store whose reads or writes fail when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_left = self.writes_left = 10**9

    def range(self, prefix: str) -> tuple[list[Any], int]:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise StoreError("down")
        return super().range(prefix)

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise StoreError("down")
        return super().txn(compares, then, orelse)


def test_a_failed_write_changes_nothing_and_a_done_one_is_reported_done() -> None:
    store = Failing()
    catalog = Catalog(store, follow=False)
    store.writes_left = 0
    with pytest.raises(StoreError, match="down"):
        register_model(catalog, "svm", "str")
    assert catalog.models() == []
    store.writes_left, store.reads_left = 10, 1
    assert register_model(catalog, "svm", "str").version == 1, "only the reading back failed"
    store.reads_left = 10
    catalog.refresh()
    assert catalog.latest("svm").version == 1


def test_an_unreadable_record_is_named_and_the_rest_goes_on(
    store: Store, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "bad", "torn", "scale"):
        register_model(catalog, name, "str")
    catalog.register_application("app", ["good"])
    catalog.register_application("foreign", ["good"])
    store.put(
        "catalog/model/bad/1",
        b'{"schema":"clipper.model/1","name":"good","version":1,"input":{"dtype":"str"}}',
    )
    store.put("catalog/model/torn/1", b'{"schema":"clipper.mod')
    store.put("catalog/scale/scale/1", b'{"schema":"clipper.scale/1","replicas":"many"}')
    store.put("catalog/application/foreign", b'{"schema":"clipper.application/2","name":"foreign"}')
    view = catalog.refresh()
    catalog.refresh()
    assert sorted(record.args[0] for record in caplog.records) == sorted(view.unreadable)
    assert [model.name for model in view.models()] == ["good"]
    assert list(view.applications) == ["app"]
    assert sorted(view.unreadable) == [
        "catalog/application/foreign",
        "catalog/model/bad/1",
        "catalog/model/torn/1",
        "catalog/scale/scale/1",
    ]
    assert register_model(catalog, "torn", "str").version == 2, "its number stays taken"
    with pytest.raises(AlreadyExists):
        catalog.register_application("foreign")
    catalog.unregister_application("foreign")
    catalog.register_application("foreign")


def test_records_of_a_later_minor_version_are_read(store: Store, catalog: Catalog) -> None:
    register_model(catalog, "svm", "str")
    record = store.get("catalog/model/svm/1")
    assert record is not None
    later = msgspec.json.encode({**msgspec.json.decode(record.value), "colour": "red"})
    store.put(record.key, later)
    assert catalog.refresh().model("svm").version == 1


class Overtaken(MemoryStore):
    """A store where another client writes once between a writer's read and its write."""

    overtake: Callable[[], object] | None = None

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        other, self.overtake = self.overtake, None
        if other:
            other()
        return super().txn(compares, then, orelse)


def test_a_record_of_before_there_were_deciders(store: Store) -> None:
    store.put(
        "catalog/application/old",
        b'{"schema":"clipper.application/1","name":"old","slo_ms":5.0,"policy":"exp3"}',
    )
    with Catalog(store) as catalog:
        assert (catalog.application("old").decider, catalog.application("old").policy) == (
            "all",
            "exp3",
        )
        changed = catalog.update_application("old", decider="majority within 2 ms, else first")
        assert catalog.application("old") == changed
        with pytest.raises(InvalidInput, match=r"decider=7 of application 'old': a text is needed"):
            catalog.update_application("old", decider=7)
    with Catalog(store) as catalog:
        assert catalog.application("old").decider == "majority within 2 ms, else first"


def test_rules_hold_when_another_client_writes_between_reading_and_writing() -> None:
    store = Overtaken()
    mine, other = Catalog(store, follow=False), Catalog(store, follow=False)
    store.overtake = lambda: register_model(other, "svm", "f64[1]")
    assert register_model(mine, "svm", "f64[1]").version == 2, "the overtaken writer decides again"
    store.overtake = lambda: register_model(other, "svm", "f64[2]")
    with pytest.raises(TypeConflict):
        mine.register_application("digits", ["svm"], input="f64[1]")
    store.overtake = lambda: other.retire_model("svm:1")
    with pytest.raises(UnknownVersion):
        mine.register_application("digits", ["svm:1"])
    assert mine.applications() == []


def test_many_writers_keep_the_rules(store: Store) -> None:
    """Threads with catalogs of their own register versions and link them; no version is given out
    twice."""
    barrier, given = threading.Barrier(4), []

    def work(seed: int) -> None:
        rng, own = random.Random(seed), Catalog(store, follow=False)
        barrier.wait()
        for _ in range(15):
            input = rng.choice(["f64[1]", "f64[2]"])
            try:
                given.append(register_model(own, "m", input).id)
                own.register_application(f"app{len(given)}-{seed}", ["m"], input=input)
            except TypeConflict:
                pass

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    final = Catalog(store, follow=False)
    assert sorted(given) == list(links(*(f"m:{i}" for i in range(1, len(given) + 1))))
    assert [m.version for m in final.versions("m")] == list(range(1, len(given) + 1))
    for app in final.applications():
        assert app.input == final.view.model(app.models[0]).input


# -- a read that is older than what another thread has written meanwhile is no older store


class _Overtaken(MemoryStore):
    """A store that another thread writes to after the next listing was read."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] | None = None

    def range(self, prefix: str) -> tuple[list[Any], int]:
        found = super().range(prefix)
        then, self.then = self.then, None
        if then is not None:
            then()
        return found


@pytest.mark.parametrize("kind", ["change", "record", "listing"])
def test_a_writer_that_was_overtaken_takes_the_store_for_no_older_one(kind: str) -> None:
    with _Overtaken() as store, Catalog(store, follow=False) as catalog:
        register_model(catalog, "m", "f64[1]")

        def other() -> None:
            register_model(catalog, "other", "f64[1]")

        if kind == "listing":  # of a follower; its view is not newer than the listing
            records, revision = store.range("catalog/")
            other()
            catalog.take(records, revision + 1000)
        elif kind == "change":
            store.then = other
            catalog.set_replicas(VersionedModel("m", 1), 2, 2)
            assert catalog.view.model("m").replicas == 2
        else:
            get, taken = store.get, []

            def slow(key: str) -> Any:
                found = get(key)
                if key == "catalog/guard" and not taken:
                    taken.append(key)
                    other()
                return found

            store.get = slow  # type: ignore[method-assign]
            catalog.record("verb", "k", b"", b"{}")
        assert catalog.continuity.trouble == ""
        assert "other" in catalog.view.versions
