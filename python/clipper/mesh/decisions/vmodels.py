"""V-models: names that stand for a model, and switch to another one without a lost query.

Each function takes records as they were read and returns those to write in one transaction,
including the counts of references in the models. Raised errors are for the caller. A v-model whose
target differs from its active model waits in `step` until the target has as many loaded copies as
the active model; if the target fails, the active model stays.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from clipper.errors import (
    AlreadyExists,
    Forbidden,
    InvalidInput,
    StillLinked,
    Unknown,
    UnknownModel,
)
from clipper.mesh.decisions import failures
from clipper.mesh.decisions.claims import loaded_copies
from clipper.mesh.records import MeshModel, VModel
from clipper.settings.mesh import MeshSettings


class UnknownVModel(Unknown):
    """No v-model of this name is defined."""

    slug = "vmodel-not-found"
    noun = "v-model"
    known_as = "Defined"


@dataclass(frozen=True, slots=True)
class VChange:
    """Records to write together, each only if it is as it was read.

    vmodel: the new record; None: delete it. models: models whose reference counts change.
    """

    vmodel: VModel | None
    models: tuple[MeshModel, ...] = ()


@dataclass(frozen=True, slots=True)
class NoStep:
    """Do nothing now. settled: nor is there anything to wait for."""

    why: str
    settled: bool = False


@dataclass(frozen=True, slots=True)
class LoadVModelTarget:
    """Load the target until it has this many copies."""

    model: str
    copies: int
    why: str


@dataclass(frozen=True, slots=True)
class SwitchVModel:
    """Make the target the active model, by `switched`."""

    why: str


@dataclass(frozen=True, slots=True)
class FailVModel:
    """Keep the active model, by `failed`."""

    why: str


VStep = NoStep | LoadVModelTarget | SwitchVModel | FailVModel
Read = Callable[[str], MeshModel | None]
LINGER_MS: Final = 10_000


def named(vmodel: VModel | None) -> frozenset[str]:
    """Return the models that a v-model refers to."""
    return frozenset({vmodel.active, vmodel.target}) if vmodel else frozenset()


def set_target(
    id: str,
    before: VModel | None,
    target: str,
    read: Read,
    now_ms: int,
    *,
    owner: str = "",
    update_only: bool = False,
    info: MeshModel | None = None,
    auto_delete: bool = False,
    force: bool = False,
    expected: str = "",
    share: float = 0.0,
    give_up_ms: int = 0,
) -> VChange:
    """Define a v-model or change its target.

    read: returns a model's record. info: the target's record, registered if it does not exist.
    expected: what the target must be now. share: of the queries that go to the target without a
    switch, 0 to 1. give_up_ms: wall time.

    UnknownModel, UnknownVModel, InvalidInput. AlreadyExists when the v-model has another owner, or
    `info` differs from the registered model. StillLinked when the target is not `expected`.
    """
    if not 0.0 <= share <= 1.0:
        raise InvalidInput(
            f"v-model {id!r}: share is {share:g}", hint="Give a share of the queries, 0 to 1."
        )
    if before is None and update_only:
        raise UnknownVModel.named(id, ())
    if before is not None and before.owner != owner:
        raise AlreadyExists(
            f"v-model {id!r} belongs to {before.owner or 'nobody'!r}", hint="Take another name."
        )
    if expected and (before is None or before.target != expected):
        is_now = before.target if before else "nothing"
        raise StillLinked(
            f"v-model {id!r} stands for {is_now!r}, not for {expected!r}", hint="Read it again."
        )
    found = read(target)
    if found is None and info is None:
        raise UnknownModel(
            f"v-model {id!r}: no model {target!r}", hint="Register it, or give its path."
        )
    if found is not None and info is not None and not same_model(found, info):
        raise AlreadyExists(
            f"model {target!r} is registered with another type, path or key",
            hint="Take another id.",
        )
    made = found is None
    goal = found or replace(info, auto_delete=auto_delete) if info else found
    assert goal is not None
    after = _after(id, before, target, owner, force, share, now_ms, give_up_ms)
    if after == before and not made:
        return VChange(before)
    return _change(
        before,
        after,
        lambda model: goal if model == target else read(model),
        now_ms,
        made=goal if made else None,
    )


def _after(
    id: str,
    before: VModel | None,
    target: str,
    owner: str,
    force: bool,
    share: float,
    now_ms: int,
    give_up_ms: int,
) -> VModel:
    if before is None:
        return VModel(id, target, target, owner, since_ms=now_ms)
    if (before.target, before.share) == (target, share) and not force and not before.failed:
        return before
    if target == before.active:
        return replace(
            before,
            target=target,
            share=0.0,
            failed=False,
            why="",
            force=False,
            since_ms=now_ms,
            give_up_ms=0,
        )
    if force:
        previous = before.active if before.active != target else before.previous
        return VModel(id, target, target, owner, previous=previous, since_ms=now_ms)
    return replace(
        before,
        target=target,
        share=share,
        failed=False,
        why="",
        force=False,
        since_ms=now_ms,
        give_up_ms=give_up_ms,
    )


def delete(before: VModel | None, read: Read, now_ms: int, *, owner: str = "") -> VChange:
    """Delete a v-model; no error if there is none. Forbidden if it has another owner."""
    if before is None:
        return VChange(None)
    if before.owner != owner:
        raise Forbidden(
            f"v-model {before.id!r} is {before.owner or 'nobody'!r}'s",
            hint="Its owner can delete it.",
        )
    return _change(before, None, read, now_ms)


def rollback(before: VModel, read: Read, now_ms: int) -> VChange:
    """Switch back to the previous active model, or away from a target that is not active yet."""
    goal = before.active if before.target != before.active else before.previous
    if not goal:
        raise InvalidInput(
            f"v-model {before.id!r} has stood for {before.active!r} only",
            hint="There is nothing to go back to.",
        )
    if read(goal) is None:
        raise UnknownModel(
            f"v-model {before.id!r}: no model {goal!r} any longer",
            hint="Register it again, then set it.",
        )
    return set_target(before.id, before, goal, read, now_ms, owner=before.owner)


def switched(before: VModel, read: Read, now_ms: int) -> VChange:
    """Make the target the active model.

    The transaction that writes this must decide `step` again on the records that it reads: a copy
    that was loaded when the switch was decided may have been evicted.
    """
    after = VModel(
        before.id,
        before.target,
        before.target,
        before.owner,
        previous=before.active,
        since_ms=now_ms,
    )
    return _change(before, after, read, now_ms)


def failed(before: VModel, why: str) -> VChange:
    """Record that the target cannot be loaded; the active model stays."""
    return VChange(replace(before, failed=True, why=why[:500]))


def step(
    vmodel: VModel,
    active: MeshModel | None,
    target: MeshModel | None,
    now_ms: int,
    *,
    alive: Container[object],
    settings: MeshSettings,
    places: int = 0,
) -> VStep:
    """Return the next step of a v-model.

    active, target: their records. alive: ids of live instances. places: how many instances could
    hold the target; 0: unknown.
    """
    if vmodel.active == vmodel.target:
        return NoStep("it stands for one model", settled=True)
    if target is None:
        return (
            NoStep("its target is gone", settled=True)
            if vmodel.failed
            else FailVModel(f"model {vmodel.target!r} is gone")
        )
    if vmodel.force:
        return SwitchVModel("at once, as requested")
    needed, has = _degree(active, target, now_ms, alive, settings, places)
    if vmodel.share:
        return (
            NoStep("both are loaded", settled=True)
            if has
            else LoadVModelTarget(target.id, needed, "queries are split")
        )
    if not (active and loaded_copies(active, alive)):
        return SwitchVModel("nothing is lost: the active one is not loaded")
    if has >= needed:
        return SwitchVModel(f"the target has {has} loaded {'copy' if has == 1 else 'copies'}")
    if vmodel.give_up_ms and now_ms >= vmodel.give_up_ms:
        return (
            NoStep(vmodel.why, settled=True)
            if vmodel.failed
            else FailVModel("its target was not loaded in time")
        )
    over = failures.verdict(target, now_ms, settings, places)
    if over and not has:
        return (
            NoStep(f"{over.why}; again in {max(0, over.retry_ms - now_ms) // 1000} s")
            if vmodel.failed
            else FailVModel(over.why)
        )
    return LoadVModelTarget(target.id, needed, f"{has} of {needed} copies are loaded")


def _degree(
    active: MeshModel | None,
    target: MeshModel,
    now_ms: int,
    alive: Container[object],
    settings: MeshSettings,
    places: int,
) -> tuple[int, int]:
    """Return the copies that the target needs to match the active model, and those loaded."""
    wanted = max(len(loaded_copies(active, alive)) if active else 1, target.policy.copies_min, 1)
    most = target.policy.copies_max or wanted
    if places:
        most = min(most, max(places - len(failures.blocked(target, now_ms, settings)), 1))
    return min(wanted, most), len(loaded_copies(target, alive))


def resolve(vmodel: VModel, draw: float, is_loaded: Callable[[str], bool]) -> str:
    """Return the model that a query goes to. draw: 0 to 1, random or derived from the user."""
    if vmodel.share and draw < vmodel.share and is_loaded(vmodel.target):
        return vmodel.target
    return vmodel.active


def same_model(held: MeshModel, other: MeshModel) -> bool:
    """Return whether two registrations are of the same artifact."""
    return (held.type, held.path, held.key) == (other.type, other.path, other.key)


def is_unnamed(model: MeshModel) -> bool:
    """Return whether a model is to be deleted since no v-model names it any more."""
    return model.auto_delete and not model.refs


def is_left_over(model: MeshModel, now_ms: int) -> bool:
    """Return whether an unnamed model can be deleted now.

    Not at once: nodes notice a switch one after another and use the old model until then.
    """
    return is_unnamed(model) and now_ms - model.used_ms >= LINGER_MS


def _change(
    before: VModel | None,
    after: VModel | None,
    read: Read,
    now_ms: int,
    made: MeshModel | None = None,
) -> VChange:
    """Return the change with new reference counts; a model that loses its last was in use until
    now.
    """
    was, becomes = named(before), named(after)
    models = []
    for id in sorted(was ^ becomes):
        model = read(id)
        if model is None:
            continue
        refs = max(0, model.refs + (1 if id in becomes else -1))
        used_ms = model.used_ms if refs else max(model.used_ms, now_ms)
        models.append(replace(model, refs=refs, used_ms=used_ms))
    if made is not None and all(model.id != made.id for model in models):
        models.append(made)
    return VChange(after, tuple(models))
