"""Switching a name from one model to another: its conditions, its counts, and that a loaded model
always serves the queries."""

from random import Random
from typing import Any

import msgspec
import pytest

from clipper.errors import AlreadyExists, Forbidden, InvalidInput, StillLinked, UnknownModel
from clipper.mesh.decisions import vmodels
from clipper.mesh.decisions.vmodels import (
    LINGER_MS,
    FailVModel,
    LoadVModelTarget,
    NoStep,
    SwitchVModel,
    VChange,
    VStep,
)
from clipper.mesh.records import Copy, Failure, MeshModel, Policy, VModel
from clipper.settings.mesh import MeshSettings

NOW = 1_700_000_000_000
SETTINGS = MeshSettings()
ALIVE = frozenset({"a", "b", "c"})


class Registry:
    """A fake registry of models and v-models that writes changes whole."""

    def __init__(self, *models: MeshModel) -> None:
        self.models = {model.id: model for model in models}
        self.vmodels: dict[str, VModel] = {}

    def write(self, id: str, change: VChange) -> VModel | None:
        if change.vmodel is None:
            self.vmodels.pop(id, None)
        else:
            self.vmodels[id] = change.vmodel
        for model in change.models:
            self.models[model.id] = model
        return change.vmodel

    def set(self, id: str, target: str, **options: Any) -> VModel:
        change = vmodels.set_target(
            id, self.vmodels.get(id), target, self.models.get, NOW, **options
        )
        after = self.write(id, change)
        assert after is not None
        return after


def some(id: str, loaded: int = 0, **fields: Any) -> MeshModel:
    return MeshModel(id, "onnx", copies={i: Copy(1, 2) for i in "abc"[:loaded]}, **fields)


def next_step(vmodel: VModel, registry: Registry, now_ms: int = NOW, **options: Any) -> VStep:
    active, target = registry.models.get(vmodel.active), registry.models.get(vmodel.target)
    return vmodels.step(vmodel, active, target, now_ms, alive=ALIVE, settings=SETTINGS, **options)


def test_a_new_name_stands_for_its_model_at_once() -> None:
    registry = Registry(some("m1"))
    vmodel = registry.set("v", "m1", owner="me")
    assert (vmodel.active, vmodel.target, vmodel.status()) == ("m1", "m1", "DEFINED")
    assert registry.models["m1"].refs == 1
    assert registry.set("v", "m1", owner="me") == vmodel
    assert registry.models["m1"].refs == 1
    assert isinstance(next_step(vmodel, registry), NoStep)


def test_the_switch_waits_for_as_many_copies_as_the_active_has() -> None:
    registry = Registry(some("m1", 2), some("m2"))
    registry.set("v", "m1")
    vmodel = registry.set("v", "m2")
    assert (vmodel.active, vmodel.status()) == ("m1", "TRANSITIONING")
    assert next_step(vmodel, registry) == LoadVModelTarget("m2", 2, "0 of 2 copies are loaded")
    registry.models["m2"] = some("m2", 1, refs=1)
    assert isinstance(next_step(vmodel, registry), LoadVModelTarget)
    registry.models["m2"] = some("m2", 2, refs=1)
    assert isinstance(next_step(vmodel, registry), SwitchVModel)
    after = registry.write("v", vmodels.switched(vmodel, registry.models.get, NOW + 1))
    assert after is not None
    assert (after.active, after.target, after.previous, after.status()) == (
        "m2",
        "m2",
        "m1",
        "DEFINED",
    )
    assert (registry.models["m1"].refs, registry.models["m2"].refs) == (0, 1)


def test_fewer_copies_are_enough_where_more_cannot_be() -> None:
    registry = Registry(some("m1", 3), some("m2", 1))
    registry.set("v", "m1")
    vmodel = registry.set("v", "m2")
    assert isinstance(next_step(vmodel, registry, places=1), SwitchVModel)
    registry.models["m2"] = some("m2", 1, policy=Policy(copies_max=1))
    assert isinstance(next_step(vmodel, registry), SwitchVModel)
    blocked = {i: Failure(NOW, "x", "artifact") for i in "bc"}
    registry.models["m2"] = some("m2", 1, failures=blocked)
    assert isinstance(next_step(vmodel, registry, places=3), SwitchVModel)


def test_copies_of_the_dead_do_not_count() -> None:
    registry = Registry(some("m1", 1), MeshModel("m2", "onnx", copies={"dead": Copy(1, 2)}))
    registry.set("v", "m1")
    assert isinstance(next_step(registry.set("v", "m2"), registry), LoadVModelTarget)


def test_at_once_when_requested_or_when_nothing_is_lost() -> None:
    registry = Registry(some("m1", 1), some("m2"))
    registry.set("v", "m1")
    assert registry.set("v", "m2", force=True).active == "m2"
    assert registry.vmodels["v"].previous == "m1"
    unloaded = Registry(some("m1"), some("m2"))
    unloaded.set("v", "m1")
    assert isinstance(next_step(unloaded.set("v", "m2"), unloaded), SwitchVModel)


def test_a_target_that_fails_leaves_the_active_and_is_tried_again() -> None:
    bad = {i: Failure(NOW, "corrupt", "artifact") for i in "ab"}
    registry = Registry(some("m1", 1), some("m2", failures=bad))
    registry.set("v", "m1")
    vmodel = registry.set("v", "m2")
    assert next_step(vmodel, registry) == FailVModel("corrupt")
    after = registry.write("v", vmodels.failed(vmodel, "corrupt"))
    assert after is not None
    assert (after.active, after.status(), after.why) == ("m1", "TRANSITION_FAILED", "corrupt")
    assert isinstance(next_step(after, registry), NoStep)
    assert isinstance(next_step(after, registry, NOW + 600_001), LoadVModelTarget)


def test_it_gives_up_in_time() -> None:
    registry = Registry(some("m1", 1), some("m2"))
    registry.set("v", "m1")
    vmodel = registry.set("v", "m2", give_up_ms=NOW + 100)
    assert isinstance(next_step(vmodel, registry, NOW + 99), LoadVModelTarget)
    assert isinstance(next_step(vmodel, registry, NOW + 100), FailVModel)
    failed = vmodels.failed(vmodel, "late").vmodel
    assert failed is not None
    assert next_step(failed, registry, NOW + 10**9) == NoStep("late", settled=True)


def test_a_missing_target() -> None:
    registry = Registry(some("m1", 1), some("m2"))
    registry.set("v", "m1")
    vmodel = registry.set("v", "m2")
    del registry.models["m2"]
    assert isinstance(next_step(vmodel, registry), FailVModel)
    failed = vmodels.failed(vmodel, "gone").vmodel
    assert failed is not None
    assert isinstance(next_step(failed, registry), NoStep)


def test_rollback() -> None:
    registry = Registry(some("m1", 1), some("m2", 1))
    registry.set("v", "m1")
    with pytest.raises(InvalidInput, match="has stood for 'm1' only"):
        vmodels.rollback(registry.vmodels["v"], registry.models.get, NOW)
    half = registry.set("v", "m2")
    away = registry.write("v", vmodels.rollback(half, registry.models.get, NOW))
    assert away is not None
    assert (away.active, away.target) == ("m1", "m1")
    registry.write("v", vmodels.switched(registry.set("v", "m2"), registry.models.get, NOW))
    back = registry.write("v", vmodels.rollback(registry.vmodels["v"], registry.models.get, NOW))
    assert back is not None
    assert (back.active, back.target) == ("m2", "m1")
    del registry.models["m1"]
    missing = VModel("v", "m2", "m2", previous="m1")
    with pytest.raises(UnknownModel):
        vmodels.rollback(missing, registry.models.get, NOW)


def test_a_split_goes_to_the_target_only_where_it_is_loaded() -> None:
    registry = Registry(some("m1", 1), some("m2"))
    registry.set("v", "m1")
    vmodel = registry.set("v", "m2", share=0.25)
    assert vmodel.status() == "DEFINED"
    assert isinstance(next_step(vmodel, registry), LoadVModelTarget)
    assert vmodels.resolve(vmodel, 0.1, lambda id: False) == "m1"
    assert vmodels.resolve(vmodel, 0.1, lambda id: True) == "m2"
    assert vmodels.resolve(vmodel, 0.3, lambda id: True) == "m1"
    registry.models["m2"] = some("m2", 1, refs=1)
    assert next_step(vmodel, registry) == NoStep("both are loaded", settled=True)
    whole = registry.set("v", "m2")
    assert (whole.share, whole.status()) == (0.0, "TRANSITIONING")
    assert isinstance(next_step(whole, registry), SwitchVModel)


def test_updates_of_a_vmodel_that_are_refused() -> None:
    registry = Registry(some("m1"), some("m2"))
    with pytest.raises(vmodels.UnknownVModel):
        registry.set("v", "m1", update_only=True)
    with pytest.raises(UnknownModel):
        registry.set("v", "none")
    with pytest.raises(InvalidInput):
        registry.set("v", "m1", share=1.5)
    registry.set("v", "m1", owner="me")
    with pytest.raises(AlreadyExists):
        registry.set("v", "m2", owner="you")
    with pytest.raises(StillLinked):
        registry.set("v", "m2", owner="me", expected="m2")
    assert registry.set("v", "m2", owner="me", expected="m1").target == "m2"
    with pytest.raises(AlreadyExists):
        registry.set("v", "m1", owner="me", info=MeshModel("m1", "skops"))
    with pytest.raises(Forbidden):
        vmodels.delete(registry.vmodels["v"], registry.models.get, NOW, owner="you")
    assert vmodels.delete(None, registry.models.get, NOW) == VChange(None)


def test_a_target_is_registered_with_it_and_goes_with_it() -> None:
    registry = Registry(some("m1", 1))
    registry.set("v", "m1")
    registry.set("v", "m2", info=MeshModel("m2", "onnx"), auto_delete=True)
    assert (registry.models["m2"].refs, registry.models["m2"].auto_delete) == (1, True)
    assert not vmodels.is_left_over(registry.models["m2"], NOW + 2 * LINGER_MS)
    registry.set("v", "m1")
    left = registry.models["m2"]
    assert (left.refs, left.used_ms) == (0, NOW)
    assert [
        vmodels.is_left_over(left, NOW + late_ms) for late_ms in (0, LINGER_MS - 1, LINGER_MS)
    ] == [False, False, True]
    assert vmodels.is_unnamed(left)
    registry.set("v", "m2", info=MeshModel("m2", "onnx"))
    assert not vmodels.is_unnamed(registry.models["m2"])
    registry.write("v", vmodels.delete(registry.vmodels["v"], registry.models.get, NOW + 5))
    assert [
        id
        for id, model in registry.models.items()
        if vmodels.is_left_over(model, NOW + 5 + LINGER_MS)
    ] == ["m2"]
    assert (registry.models["m1"].refs, registry.models["m1"].used_ms) == (0, NOW + 5)


@pytest.mark.parametrize("seed", range(30))
def test_references_are_what_the_names_state(seed: int) -> None:
    """No step leaves the active model without a loaded copy if it had one."""
    rng = Random(seed)
    registry = Registry(*(some(f"m{n}") for n in range(6)))
    forever = set(registry.models)
    for now in range(NOW, NOW + 200_000, 1000):
        id = f"v{rng.randrange(4)}"
        before = registry.vmodels.get(id)
        kind = rng.random()
        if kind < 0.4:
            target = f"m{rng.randrange(9)}"
            info = MeshModel(target, "onnx")
            registry.set(
                id,
                target,
                info=info,
                auto_delete=True,
                force=rng.random() < 0.1,
                share=rng.choice([0, 0, 0.5]),
            )
        elif kind < 0.5 and before:
            registry.write(id, vmodels.delete(before, registry.models.get, now))
        elif (
            kind < 0.6
            and before
            and (registry.models.get(before.previous) or before.active != before.target)
        ):
            registry.write(id, vmodels.rollback(before, registry.models.get, now))
        elif before:
            step = next_step(before, registry)
            if isinstance(step, SwitchVModel):
                had = registry.models[before.active].loaded
                registry.write(id, vmodels.switched(before, registry.models.get, now))
                assert not had or registry.models[before.target].loaded
            elif isinstance(step, LoadVModelTarget):
                target_model = registry.models[step.model]
                more = {i: Copy(1, 2) for i in "abc"[: step.copies]}
                registry.models[step.model] = msgspec.structs.replace(target_model, copies=more)
        registry.models = {
            id: model
            for id, model in registry.models.items()
            if not vmodels.is_left_over(model, now)
        }
        named = [model for vmodel in registry.vmodels.values() for model in vmodels.named(vmodel)]
        assert forever <= set(registry.models)
        for model in registry.models.values():
            assert model.refs == named.count(model.id), model
        assert set(named) <= set(registry.models)
        for model in registry.models.values():
            if rng.random() < 0.2:
                registry.models[model.id] = msgspec.structs.replace(model, copies={})
