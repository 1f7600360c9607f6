"""Records changed by transactions: races have one winner, references are counted, names are of one
kind."""

from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest

from clipper.catalog.catalog import Catalog
from clipper.errors import (
    AlreadyExists,
    InvalidInput,
    Overloaded,
    StillLinked,
    StoreConflict,
    StoreError,
    UnknownModel,
)
from clipper.mesh.decisions import claims, vmodels
from clipper.mesh.records import MODELS, Copy, Instance, MeshModel, VModel, encode
from clipper.mesh.registry import Registry, now_ms
from clipper.settings.mesh import MeshSettings
from clipper.store import Candidate, Delete, MemoryStore, Record, history
from clipper.types import InputType, Model
from tests.memory_container import wait_until


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


@pytest.fixture
def registry(store: MemoryStore) -> Iterator[Registry]:
    registry = Registry(store, MeshSettings(models_max=3))
    yield registry
    registry.leave()
    registry.close()


def model(id: str, path: str = "m.onnx") -> MeshModel:
    return MeshModel(id, "onnx", path)


def set_to(registry: Registry, id: str, target: str) -> VModel | None:
    return registry.change_vmodel(
        id, lambda before, read: vmodels.set_target(id, before, target, read, 1)
    )


def test_one_of_many_claims_wins(registry: Registry) -> None:
    registry.register(model("m"))
    names = [f"i{n}" for n in range(16)]

    def claim(me: str) -> bool:
        found = registry.change(
            "m",
            lambda m: claims.claimed(m, me, 1, alive=names, copies=1, settings=registry.settings),
        )
        return not isinstance(found, claims.ClaimRefused)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(claim, names))
    assert sum(won) == 1
    found = registry.read("m")
    assert found is not None
    assert list(found.copies) == [names[won.index(True)]]


def test_a_refusal_by_an_old_record_is_made_again_by_the_newest(registry: Registry) -> None:
    registry.register(model("m"))
    wait_until(lambda: "m" in registry.models)
    registry.models.close()  # it stays as old as it is now
    claim = {"alive": ("a", "b"), "copies": 1, "settings": registry.settings}
    registry.change("m", lambda m: claims.claimed(m, "a", 1, **claim))  # type: ignore[arg-type]
    registry.change("m", lambda m: claims.released(m, "a"))
    found = registry.change("m", lambda m: claims.claimed(m, "b", 2, **claim))  # type: ignore[arg-type]
    assert isinstance(found, MeshModel)
    assert list(found.copies) == ["b"]


@pytest.fixture
def behind(store: MemoryStore, registry: Registry) -> Iterator[Registry]:
    """Return the registry of node `a`, which has not read yet of node `b`, the holder of model
    `m`."""
    own = Registry(store, registry.settings)
    own.enter(Instance("a", 1, "", ""))
    own.instances.close()
    registry.enter(Instance("b", 2, "", ""))
    registry.register(model("m"))
    registry.change_copies(
        "m",
        lambda m, alive: claims.claimed(
            m, "b", 1, alive=alive, copies=1, settings=registry.settings
        ),
    )
    registry.change("m", lambda m: claims.completed(m, "b", 2, size_bytes=1))
    wait_until(lambda: own.read("m") == own.models.get("m"))
    yield own
    own.leave()
    own.close()


def test_claim_counts_the_copy_of_an_instance_that_this_node_does_not_know(
    behind: Registry,
) -> None:
    assert "b" not in behind.alive()
    claim = {"copies": 1, "settings": behind.settings}
    found = behind.change_copies(
        "m", lambda m, alive: claims.claimed(m, "a", 3, alive=alive, **claim)
    )  # type: ignore[arg-type]
    assert isinstance(found, claims.ClaimRefused)
    record = behind.read("m")
    assert record is not None
    assert list(record.copies) == ["b"]


def test_copy_of_an_instance_that_lives_is_not_forgotten_by_one_that_does_not_know_it(
    behind: Registry,
) -> None:
    found = behind.change_copies("m", lambda m, alive: claims.without_gone(m, "b", alive=alive))
    assert isinstance(found, claims.ClaimRefused)
    assert list(behind.read("m").copies) == ["b"]  # type: ignore[union-attr]


def test_last_copy_is_kept_when_the_other_holder_is_gone_and_the_mirror_does_not_know(
    behind: Registry, registry: Registry
) -> None:
    claim = {"copies": 2, "settings": behind.settings}
    behind.change_copies("m", lambda m, alive: claims.claimed(m, "a", 3, alive=alive, **claim))  # type: ignore[arg-type]
    behind.change("m", lambda m: claims.completed(m, "a", 4, size_bytes=1))
    wait_until(lambda: "a" in registry.instances and len(registry.models["m"].copies) == 2)
    registry.instances.close()
    behind.leave()
    assert "a" in registry.alive()
    found = registry.change_copies(
        "m", lambda m, alive: claims.released_if_spare(m, "b", alive=alive, keep=1)
    )
    assert isinstance(found, claims.ClaimRefused)


def test_claim_is_decided_again_when_an_instance_enters_meanwhile(
    store: MemoryStore, registry: Registry
) -> None:
    registry.register(model("m"))
    registry.change("m", lambda m: msgspec.structs.replace(m, copies={"b": Copy(1, 2)}))
    late = Registry(store, registry.settings)
    seen: list[bool] = []

    def claim(m: MeshModel, alive: Container[object]) -> MeshModel | claims.ClaimRefused:
        seen.append("b" in alive)
        if len(seen) == 1:
            late.enter(Instance("b", 2, "", ""))
        return claims.claimed(m, "a", 3, alive=alive, copies=1, settings=registry.settings)

    assert isinstance(registry.change_copies("m", claim), claims.ClaimRefused)
    assert seen == [False, True]
    late.leave()
    late.close()


class ForgetfulStore(MemoryStore):
    """A store that once loses all just before a listing of the models and is restored just after
    it."""

    restored_by: Registry | None = None

    def forget(self) -> None:
        self.txn((), [Delete(record.key) for record in super().range("")[0]])

    def range(self, prefix: str) -> tuple[list[Record], int]:
        if prefix != MODELS or self.restored_by is None:
            return super().range(prefix)
        registry, self.restored_by = self.restored_by, None
        self.forget()
        found = super().range(prefix)
        registry.take_store(restore=True)
        return found


def test_store_that_is_emptied_and_restored_while_it_is_listed_takes_no_model_away() -> None:
    store, removed = ForgetfulStore(), list[str]()
    with store, closing(Registry(store, MeshSettings())) as registry:
        registry.token()
        for id in ("m0", "m1"):
            registry.register(model(id))
        with closing(Registry(store, MeshSettings())) as follower:
            follower.token()
            wait_until(lambda: len(registry.models) == len(follower.models) == 2)
            registry.models.close()  # it knows what it knows, and lists no more
            registry.vmodels.close()
            follower.models.on_change(
                lambda changes: removed.extend(change.key for change in changes if not change.new)
            )
            store.forget()
            wait_until(lambda: follower.other_history)
            store.restored_by = registry
            registry.take_store(restore=True)
            wait_until(lambda: store.restored_by is None)
            registry.register(model("m2"))
            wait_until(lambda: "m2" in follower.models)
            assert sorted(follower.models) == ["m0", "m1", "m2"]
            assert not removed


def test_node_that_joins_an_emptied_store_learns_its_history_when_it_is_restored(
    store: MemoryStore, registry: Registry
) -> None:
    registry.token()
    registry.register(model("m"))
    wait_until(lambda: "m" in registry.models)
    registry.models.close()  # it knows what it knows, and lists no more
    store.txn((), [Delete(record.key) for record in store.range("")[0]])
    with pytest.raises(StoreError, match="lost its history"):
        registry._accept()
    assert registry.read("m") == registry.models["m"]
    with pytest.raises(StoreError, match="lost its history"):
        registry.change("m", lambda m: claims.released(m, "a"))
    late = Registry(store, registry.settings)
    late.token()
    late.publish(Instance("late", 2, "", ""))
    assert not late._history
    registry.take_store(restore=True)
    late.publish(Instance("late", 2, "", ""))
    assert late._history == registry._history
    late.close()


def test_another_history_is_seen_before_a_mirror_has_looked(
    store: MemoryStore, registry: Registry
) -> None:
    registry.token()
    registry.register(model("m"))
    wait_until(lambda: "m" in registry.models)
    assert not registry.has_other_history()
    registry.models.close()  # neither of them looks any more
    registry.vmodels.close()
    registry.instances.close()
    store.txn((), [Delete(record.key) for record in store.range("")[0]])
    assert not registry.other_history
    assert registry.has_other_history()
    assert registry.take_store(restore=True)
    assert not registry.has_other_history()


def test_a_model_is_registered_once_and_as_often_as_it_is_the_same(registry: Registry) -> None:
    registry.register(model("m"))
    registry.register(model("m"))
    with pytest.raises(AlreadyExists, match=r"path 'm\.onnx', not 'other\.onnx'"):
        registry.register(model("m", "other.onnx"))
    with pytest.raises(InvalidInput):
        registry.register(model("bad name"))


def test_there_are_as_many_as_may_be(registry: Registry) -> None:
    for n in range(3):
        registry.register(model(f"m{n}"))
    wait_until(lambda: len(registry.models) == 3)
    with pytest.raises(Overloaded, match="models_max"):
        registry.register(model("m3"))
    assert registry.unregister("m0")
    wait_until(lambda: len(registry.models) == 2)
    registry.register(model("m3"))
    assert not registry.unregister("m0")
    with pytest.raises(UnknownModel):
        registry.change("m0", lambda m: m)


def test_models_and_vmodels_share_their_names(registry: Registry) -> None:
    registry.register(model("m"))
    set_to(registry, "v", "m")
    with pytest.raises(AlreadyExists, match="v-model"):
        registry.register(model("v"))
    with pytest.raises(AlreadyExists, match="is a model"):
        set_to(registry, "m", "m")


def test_what_a_vmodel_names_stays(registry: Registry) -> None:
    registry.register(model("m"))
    set_to(registry, "v", "m")
    wait_until(lambda: "v" in registry.vmodels)
    with pytest.raises(StillLinked, match="what v stands for"):
        registry.unregister("m")
    registry.change_vmodel("v", lambda before, read: vmodels.delete(before, read, 1))
    assert registry.read_vmodel("v") is None
    assert registry.unregister("m")


def test_a_model_that_goes_with_its_vmodel_goes_some_time_after_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = model("m")
    registry.change_vmodel(
        "v",
        lambda before, read: vmodels.set_target(
            "v", before, "m", read, 1, info=info, auto_delete=True
        ),
    )
    assert not registry.unregister_unnamed("m")
    registry.change_vmodel("v", lambda before, read: vmodels.delete(before, read, now_ms()))
    assert not registry.unregister_unnamed("m")
    monkeypatch.setattr(vmodels, "LINGER_MS", 0)
    assert registry.unregister_unnamed("m")
    assert registry.read("m") is None
    assert not registry.unregister_unnamed("m")


def test_a_model_that_is_to_go_and_is_registered_stays(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vmodels, "LINGER_MS", 0)
    info = model("m")
    registry.change_vmodel(
        "v",
        lambda before, read: vmodels.set_target(
            "v", before, "m", read, 1, info=info, auto_delete=True
        ),
    )
    registry.change_vmodel("v", lambda before, read: vmodels.delete(before, read, 1))
    assert not registry.register(model("m")).auto_delete
    assert not registry.unregister_unnamed("m")
    assert registry.read("m") is not None


def test_a_leader_that_stands_no_more_writes_nothing(
    registry: Registry, store: MemoryStore
) -> None:
    registry.register(model("m"))
    set_to(registry, "v", "m")
    registry.enter(Instance("a", 1, "", ""))
    assert registry.lease is not None
    candidate = Candidate(store, "mesh", b"a", registry.lease)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipper.store.store.TRIES_MAX", 3)
        store.delete(candidate._key)
        with pytest.raises(StoreConflict, match="by other writers 3 times"):
            registry.change_vmodel(
                "v",
                lambda before, read: vmodels.VChange(VModel("v", "m", "m", since_ms=9)),
                candidate,
            )
    found = registry.read_vmodel("v")
    assert found is not None
    assert found.since_ms == 1
    candidate.resign()


def test_a_node_counts_while_it_holds_its_lease(registry: Registry, store: MemoryStore) -> None:
    assert registry.is_fenced
    registry.enter(Instance("a", registry.number(), "", ""))
    wait_until(lambda: list(registry.instances) == ["a"])
    assert not registry.is_fenced
    assert registry.alive() == {"a"}
    assert registry.number() == 2
    assert registry.token() == registry.token() != ""
    assert registry.lease is not None
    store.revoke(registry.lease.id)
    registry.lease.lost.set()
    wait_until(lambda: not registry.instances)
    assert registry.is_fenced
    assert not registry.alive()


# -- the history


def changes_in(store: MemoryStore) -> list[tuple[str, str, list[str]]]:
    return [
        (one.actor, one.verb, [changed.key for changed in one.changed])
        for one in history.entries(store)
    ]


def deleted(registry: Registry, id: str) -> VModel | None:
    return registry.change_vmodel(id, lambda before, read: vmodels.delete(before, read, 1))


def test_each_change_by_management_has_an_entry_and_what_a_node_does_by_itself_has_none(
    registry: Registry, store: MemoryStore
) -> None:
    with history.audit_context("ann", ""):
        registry.register(model("m"))
    registry.register(model("m"))  # it is so already
    with pytest.raises(AlreadyExists):
        registry.register(model("m", "other.onnx"))
    registry.change(
        "m", lambda m: claims.claimed(m, "a", 1, alive=("a",), copies=1, settings=registry.settings)
    )
    set_to(registry, "v", "m")
    deleted(registry, "v")
    deleted(registry, "v")
    registry.unregister("m")
    registry.unregister("m")
    here = history.default_actor()
    assert changes_in(store) == [
        ("ann", "mesh register", ["mesh/model/m"]),
        (here, "mesh vmodel set", ["mesh/model/m", "mesh/vmodel/v"]),
        (here, "mesh vmodel delete", ["mesh/model/m", "mesh/vmodel/v"]),
        (here, "mesh unregister", ["mesh/model/m"]),
    ]
    first, second, _, last = (history.plain(one)["changed"] for one in history.entries(store))
    assert (first[0]["before"], first[0]["after"]["path"]) == (None, "m.onnx")
    assert (second[0]["before"].get("refs", 0), second[0]["after"]["refs"]) == (0, 1)
    assert (last[0]["before"]["path"], last[0]["after"]) == ("m.onnx", None)


def test_what_the_leader_decides_of_a_vmodel_is_entered_as_its(
    registry: Registry, store: MemoryStore
) -> None:
    for id in ("m1", "m2"):
        registry.register(model(id))
    set_to(registry, "v", "m1")
    set_to(registry, "v", "m2")
    registry.enter(Instance("a", 1, "", ""))
    assert registry.lease is not None
    candidate = Candidate(store, "mesh", b"a", registry.lease)
    for step in (
        lambda before, read: vmodels.failed(before, "it is broken"),
        lambda before, read: vmodels.switched(before, read, 2),
    ):
        registry.change_vmodel("v", step, candidate)
    mine = "the mesh (node a)"
    assert [(actor, verb) for actor, verb, _ in changes_in(store)[-2:]] == [
        (mine, "mesh vmodel failed"),
        (mine, "mesh vmodel switched"),
    ]
    candidate.resign()


def test_a_rehearsal_is_checked_and_writes_nothing(registry: Registry, store: MemoryStore) -> None:
    registry.register(model("m"))
    set_to(registry, "v", "m")
    wait_until(lambda: "v" in registry.vmodels)
    before = store.range("")
    with history.audit_context("ann", "", dry=True) as rehearsal:
        assert registry.register(model("n")) == model("n")
        assert set_to(registry, "w", "m") == VModel("w", "m", "m", since_ms=1)
        assert deleted(registry, "v") is None
        with pytest.raises(StillLinked):
            registry.unregister("m")
        with pytest.raises(AlreadyExists):
            registry.register(model("m", "other.onnx"))
    assert [one.verb for one in rehearsal.entries] == [
        "mesh register",
        "mesh vmodel set",
        "mesh vmodel delete",
    ]
    assert store.range("") == before


def test_many_nodes_at_once_enter_each_change_once(store: MemoryStore) -> None:
    registries = [Registry(store, MeshSettings()) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: registries[n % 4].register(model(f"m{n}")), range(200)))
    found = history.entries(store)
    assert sorted(one.changed[0].key for one in found) == sorted(
        f"mesh/model/m{n}" for n in range(200)
    )
    assert len({one.number for one in found}) == 200
    for registry in registries:
        registry.close()


def test_the_last_are_kept_beside_those_of_the_catalog(store: MemoryStore) -> None:
    with Catalog(store, follow=False) as catalog, pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "ENTRIES_MAX", 50)
        catalog.register(Model("svm", 1, InputType("f64", (64,))))
        registry = Registry(store, MeshSettings())
        for n in range(120):
            registry.register(model(f"m{n}"))
        catalog.register_application("digits", ["svm"])
        found = history.entries(store)
        assert [found[0].verb, found[-1].verb] == ["deploy", "set"]
        assert [one.changed[0].key for one in found[1:-1]] == [
            f"mesh/model/m{n}" for n in range(70, 120)
        ]
        assert history.entries(store, 2) == found[-2:]
        registry.close()


def test_changes_of_several_records_are_one_transaction(
    store: MemoryStore, registry: Registry
) -> None:
    for id in ("a", "b", "c"):
        registry.register(model(id))
    wait_until(lambda: len(registry.models) == 3)
    before = store.revision
    claim = [
        registry.copies_step(
            id,
            lambda m, alive: claims.claimed(
                m, "i", 1, alive=alive, copies=1, settings=registry.settings
            ),
        )
        for id in ("a", "b", "c")
    ]
    found = registry.change_all(claim)
    assert store.revision == before + 1
    assert [one.copies for one in found if isinstance(one, MeshModel)] == [{"i": Copy(1)}] * 3


def test_a_transaction_that_another_node_was_faster_with_is_decided_again_as_one(
    store: MemoryStore, registry: Registry
) -> None:
    for id in ("a", "b", "c"):
        registry.register(model(id))
    wait_until(lambda: len(registry.models) == 3)
    before, others = store.revision, ["other.onnx"]

    def after_another(m: MeshModel) -> MeshModel:
        if others:
            store.put(MODELS + "b", encode(model("b", others.pop())))
        return msgspec.structs.replace(m, used_ms=7)

    found = registry.change_all([registry.step(id, after_another) for id in ("a", "b", "c")])
    paths = [(one.path, one.used_ms) for one in found if isinstance(one, MeshModel)]
    assert paths == [("m.onnx", 7), ("other.onnx", 7), ("m.onnx", 7)]
    assert store.revision == before + 2


def test_changes_whose_records_others_have_changed_are_made_one_by_one(
    store: MemoryStore, registry: Registry
) -> None:
    for id in ("a", "b"):
        registry.register(model(id))
    wait_until(lambda: len(registry.models) == 2)
    steps = [
        registry.step(id, lambda m: msgspec.structs.replace(m, used_ms=7))
        for id in ("a", "gone", "b")
    ]
    store.put(MODELS + "a", encode(model("a", "other.onnx")))  # the mirror may not know it yet
    first, removed, last = registry.change_all(steps)
    assert isinstance(first, MeshModel)
    assert (first.path, first.used_ms) == ("other.onnx", 7)
    assert isinstance(removed, UnknownModel)
    assert isinstance(last, MeshModel)
    assert last.used_ms == 7


def test_change_that_cannot_be_decided_fails_alone(registry: Registry) -> None:
    def fail(_: MeshModel) -> MeshModel:
        raise ValueError("broken")

    for id in ("a", "b", "c"):
        registry.register(model(id))
    wait_until(lambda: len(registry.models) == 3)
    found = registry.change_all(
        [
            registry.step("a", lambda m: msgspec.structs.replace(m, used_ms=7)),
            registry.step("b", fail),
            registry.step("c", lambda m: msgspec.structs.replace(m, used_ms=7)),
        ]
    )
    assert [type(one) for one in found] == [MeshModel, ValueError, MeshModel]
    assert [one.used_ms for one in found if isinstance(one, MeshModel)] == [7, 7]
