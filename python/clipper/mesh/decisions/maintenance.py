"""Decisions on what one instance, or the leader, should do now, as lists of actions.

All are pure functions of a view of the registry. `rates` runs every ten seconds in each instance:
more copies of models with high rates. `janitor` runs every few minutes in each instance: it makes
the registry agree with what the instance holds, expires failures and releases spare copies.
`reaper` runs in the elected leader: it removes what dead instances left behind, enforces policies,
steps v-models and fills free memory. An unreadable record is reported and never ends a round.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from clipper.mesh.decisions import failures, scaling, vmodels
from clipper.mesh.decisions.claims import alive_copies, loaded_copies
from clipper.mesh.decisions.load_queue import LoadTimes
from clipper.mesh.decisions.placement import (
    NO_CONSTRAINT,
    Constraints,
    InstanceIndex,
    constraint_of,
    is_full,
    unfit,
)
from clipper.mesh.decisions.usage import Usage
from clipper.mesh.records import ANY_NUMBER, Instance, MeshModel, VModel
from clipper.settings.mesh import MeshSettings

HOUR_MS: Final = 3_600_000
STALE_USE_MS: Final = 6 * HOUR_MS  # older last uses in the registry are renewed
FILL_RESERVE: Final = 0.125  # of memory that proactive loads leave free
FILL_SHARE: Final = 0.5  # of the memory free beyond FILL_RESERVE, filled in one round
REPLACE_SHARE: Final = 0.05  # of the memory replaced in one round when nothing is free
NEWER_MS: Final = 20 * 60_000  # a proactive load must be newer than the oldest model by this
QUEUED_MAX: Final = 50  # queued loads per loader above which an instance gets no proactive loads
MIGRATE_MS: Final = HOUR_MS  # a stopping instance waits for models used within this time
DOWN_SHARE: Final = 0.05  # of its memory that one janitor round frees by releasing copies
LOST_LOADS: Final = 2  # times the load limit after which an unfinished claim is removed


@dataclass(frozen=True, slots=True)
class LoadCopy:
    """Load one more copy, until there are `copies`. instance: where; empty: placement decides."""

    model: str
    copies: int
    why: str
    instance: str = ""
    used_ms: int = 0


@dataclass(frozen=True, slots=True)
class UnloadCopy:
    """Release this instance's copy. spare: only if the transaction finds another one loaded."""

    model: str
    why: str
    spare: bool = False


@dataclass(frozen=True, slots=True)
class RemoveClaim:
    """Remove a claim of an instance that does not hold the model.

    gone: because the instance is dead, which the transaction checks again.
    """

    instance: str
    model: str
    why: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class ExpireFailure:
    """Remove the failures of a model that have expired."""

    model: str
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublishUse:
    """Write the last use of a model, since that in the registry is hours old."""

    model: str
    used_ms: int


@dataclass(frozen=True, slots=True)
class StepVModel:
    """Take the next step of a v-model."""

    vmodel: str
    step: vmodels.VStep


@dataclass(frozen=True, slots=True)
class BadRecord:
    """Report a record that cannot be used."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class UnregisterUnnamed:
    """Unregister a model that was to be deleted with its last v-model."""

    model: str


Action = (
    LoadCopy
    | UnloadCopy
    | RemoveClaim
    | ExpireFailure
    | PublishUse
    | StepVModel
    | UnregisterUnnamed
    | BadRecord
)


@dataclass(frozen=True, slots=True)
class MeshView:
    """The state that decisions are made on.

    me: the instance that decides. mine: pairs of id and record, None for unreadable ones: models
    with a claim or failure of the instance (janitor), models used since the last look (rates), or
    all with copies, failures, policies or auto_delete (reaper). resident: id -> (size, last use) of
    what the instance really holds. loading: ids that it loads or has queued. usage: by model. read:
    returns any model's record. waking: unloaded models for proactive loads, most recently used
    first.
    """

    me: str
    instances: Sequence[Instance]
    mine: Iterable[tuple[str, MeshModel | None]] = ()
    resident: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    loading: Collection[str] = ()
    usage: Mapping[str, Usage] = field(default_factory=dict)
    vmodels: Iterable[VModel] = ()
    read: Callable[[str], MeshModel | None] = lambda id: None
    waking: Iterable[MeshModel] = ()
    constraints: Constraints = field(default_factory=dict)
    seen: LoadTimes = field(default_factory=LoadTimes)


def janitor(view: MeshView, now_ms: int, settings: MeshSettings) -> list[Action]:
    """Return the actions that make the registry and one instance agree."""
    instances = InstanceIndex.of(view.instances)
    me = instances.get(view.me)
    budget = DOWN_SHARE * me.capacity_bytes if me else 0.0
    actions: list[Action] = []
    known = set()
    for id, model in view.mine:
        known.add(id)
        try:
            found = list(_check_entry(view, instances, id, model, now_ms, settings))
        except Exception as broken:  # one entry never ends the round
            found = [BadRecord(id, repr(broken))]
        for action in found:
            if isinstance(action, UnloadCopy) and action.spare:
                size = view.resident.get(action.model, (0, 0))[0]
                if size > budget:
                    continue
                budget -= size
            actions.append(action)
    actions += [
        UnloadCopy(id, "the registry does not know it here")
        for id in view.resident
        if id not in known
    ]
    return actions


def _check_entry(
    view: MeshView,
    instances: InstanceIndex,
    id: str,
    model: MeshModel | None,
    now_ms: int,
    settings: MeshSettings,
) -> Iterator[Action]:
    if model is None:
        yield BadRecord(id, "its record cannot be read")
        return
    gone = tuple(
        i
        for i, failure in model.failures.items()
        if failures.is_over(failures.forgotten_at(failure, settings), now_ms, settings)
    )
    if gone:
        yield ExpireFailure(id, gone)
    held, copy = view.resident.get(id), model.copies.get(view.me)
    if held is None:
        if copy is None or id in view.loading:
            return
        if copy.loaded_ms or now_ms - copy.claimed_ms > LOST_LOADS * settings.load_s * 1000:
            yield RemoveClaim(view.me, id, "it is not loaded here")
        return
    if copy is None or not copy.loaded_ms:
        if id not in view.loading:
            yield UnloadCopy(id, "the registry does not know it here")
        return
    used_ms = held[1]
    if used_ms - model.used_ms > STALE_USE_MS:
        yield PublishUse(id, used_ms)
    if len(model.copies) < 2:
        return
    usage = view.usage.get(id, Usage(used_ms))
    decided = scaling.decide(
        model,
        usage,
        instances,
        now_ms,
        settings,
        constraint=constraint_of(model.type, view.constraints),
        assumed_ms=view.seen.assumed_ms(model.type),
    )
    if (
        decided.copies < len(loaded_copies(model, instances))
        and scaling.spare(model, instances) == view.me
    ):
        yield UnloadCopy(id, decided.why, spare=True)


def rates(view: MeshView, now_ms: int, settings: MeshSettings) -> list[Action]:
    """Return loads of more copies of models used since the last look."""
    actions: list[Action] = []
    for id, model in view.mine:
        usage = view.usage.get(id)
        if model is None or usage is None or not scaling.may_grow(model, usage, settings):
            continue
        decided = scaling.decide(
            model,
            usage,
            view.instances,
            now_ms,
            settings,
            constraint=constraint_of(model.type, view.constraints),
            assumed_ms=view.seen.assumed_ms(model.type),
        )
        held = len(alive_copies(model, ids_of(view.instances)))
        actions += [LoadCopy(id, decided.copies, decided.why, used_ms=usage.used_ms)] * (
            decided.copies - held
        )
    return actions


def reaper(view: MeshView, now_ms: int, settings: MeshSettings) -> list[Action]:
    """Return the leader's actions; each is one transaction."""
    instances = InstanceIndex.of(view.instances)
    actions: list[Action] = []
    for id, model in view.mine:
        try:
            actions += _reaped(view, instances, id, model, now_ms, settings)
        except Exception as broken:
            actions.append(BadRecord(id, repr(broken)))
    for vmodel in view.vmodels:
        found = step_of(vmodel, view, now_ms, settings)
        if not isinstance(found, vmodels.NoStep):
            actions.append(StepVModel(vmodel.id, found))
    return [*actions, *_proactive(view, instances, now_ms, settings)]


def step_of(vmodel: VModel, view: MeshView, now_ms: int, settings: MeshSettings) -> vmodels.VStep:
    """Return the next step of a v-model."""
    target = view.read(vmodel.target)
    places = 0
    if target is not None and vmodel.target != vmodel.active:
        constraint = constraint_of(target.type, view.constraints)
        places = sum(not unfit(target, i, constraint, target.size_bytes) for i in view.instances)
    active, alive = view.read(vmodel.active), ids_of(view.instances)
    return vmodels.step(
        vmodel, active, target, now_ms, alive=alive, settings=settings, places=places
    )


def ids_of(instances: Sequence[Instance]) -> Container[object]:
    """Return the ids of live instances."""
    return instances if type(instances) is InstanceIndex else frozenset(i.id for i in instances)


def _reaped(
    view: MeshView,
    instances: InstanceIndex,
    id: str,
    model: MeshModel | None,
    now_ms: int,
    settings: MeshSettings,
) -> Iterator[Action]:
    if model is None:
        yield BadRecord(id, "its record cannot be read")
        return
    if vmodels.is_left_over(model, now_ms):
        yield UnregisterUnnamed(id)
        return
    alive = ids_of(instances)
    for instance, copy in model.copies.items():
        if instance not in alive:
            yield RemoveClaim(instance, id, "its instance is gone", gone=True)
        elif (
            not copy.loaded_ms
            and now_ms - copy.claimed_ms > 2 * LOST_LOADS * settings.load_s * 1000
        ):
            yield RemoveClaim(instance, id, "its load has never ended")
    gone = tuple(
        i
        for i, failure in model.failures.items()
        if failures.is_over(failures.forgotten_at(failure, settings), now_ms, settings)
        or (i not in alive and failure.fault != "artifact")
    )
    if gone:
        yield ExpireFailure(id, gone)
    least = max(model.policy.copies_min, int(model.policy.pinned))
    if least > (held := len(alive_copies(model, instances))) and not failures.verdict(
        model, now_ms, settings
    ):
        for _ in range(min(least, len(instances)) - held):
            yield LoadCopy(id, least, f"its policy requires {least}", used_ms=model.used_ms)


def _proactive(
    view: MeshView, instances: InstanceIndex, now_ms: int, settings: MeshSettings
) -> Iterator[Action]:
    """Yield loads of recently used models into free memory."""
    fit = [
        i for i in instances if not i.stopping and i.queued <= QUEUED_MAX * max(i.loading_max, 1)
    ]
    capacity = sum(i.capacity_bytes for i in fit)
    models_max = sum(i.models_max or ANY_NUMBER for i in fit)
    budget = FILL_SHARE * (sum(i.free_bytes for i in fit) - FILL_RESERVE * capacity)
    count = FILL_SHARE * (sum(i.free_models for i in fit) - FILL_RESERVE * models_max)
    newer_ms = 0
    if budget <= 0 or count < 1:
        budget, count = REPLACE_SHARE * capacity, REPLACE_SHARE * models_max
        lru_ms = min((i.lru_ms for i in fit if i.lru_ms), default=now_ms)
        newer_ms = lru_ms + max((now_ms - lru_ms) // 3, NEWER_MS)
    for model in view.waking:
        size = model.size_bytes or instances.typical_bytes
        if budget < max(size, 1) or count < 1 or model.used_ms <= newer_ms:
            return
        if not model.copies and not model.failures:
            budget -= size
            count -= 1
            yield LoadCopy(
                model.id, 1, "used lately, and there is memory for it", used_ms=model.used_ms
            )


# -- an instance's own record, and its end


def worth_publishing(
    published: Instance, now: Instance, published_ms: int, now_ms: int, settings: MeshSettings
) -> bool:
    """Return whether a record has changed enough since it was published at `published_ms`."""
    if now == published:
        return False
    since = now_ms - published_ms
    if now.stopping != published.stopping:
        return True
    if 0 <= since < settings.publish_s * 1000:  # negative: the clock was set back
        return False
    age = max(0, now_ms - published.lru_ms)
    return (
        since >= 80 * settings.publish_s * 1000
        or is_full(now) != is_full(published)
        or abs(now.capacity_bytes - published.capacity_bytes) > 0.02 * published.capacity_bytes
        or abs(now.lru_ms - published.lru_ms) > max(20_000, age // 16)
        or abs(now.models - published.models) > max(10, 0.15 * published.models)
        or abs(now.used_bytes - published.used_bytes)
        > max(0.2 * published.used_bytes, 0.02 * published.capacity_bytes)
        or abs(now.rate - published.rate) > max(100.0, 0.1 * published.rate)
        or abs(now.queued + now.loading - published.queued - published.loading)
        > max(published.loading_max, (published.queued + published.loading) // 2)
        or static(now) != static(published)
    )


def static(instance: Instance) -> Instance:
    """Return an instance's record without the fields that change by themselves."""
    return msgspec.structs.replace(
        instance,
        capacity_bytes=0,
        used_bytes=0,
        models=0,
        lru_ms=0,
        loading=0,
        queued=0,
        rate=0.0,
        stopping=False,
    )


@dataclass(frozen=True, slots=True)
class Move:
    """A model to move from an instance that stops. wait: the instance waits for the new copy."""

    model: str
    used_ms: int
    wait: bool
    size_bytes: int = 0


def migration(view: MeshView, now_ms: int) -> list[Move]:
    """Return the models that only a stopping instance holds, most recently used first."""
    alive = {i.id for i in view.instances if not i.stopping} - {view.me}
    moves = [
        Move(
            id,
            view.resident[id][1],
            now_ms - view.resident[id][1] < MIGRATE_MS or model.policy.pinned,
            view.resident[id][0],
        )
        for id, model in view.mine
        if model is not None and id in view.resident and not loaded_copies(model, alive)
    ]
    return sorted(moves, key=lambda move: -move.used_ms)


def evicted(
    model: MeshModel, me: str, instances: Sequence[Instance], now_ms: int, settings: MeshSettings
) -> LoadCopy | None:
    """Return a load elsewhere for a model that was evicted here, if others have free memory.

    model: its record before the eviction.
    """
    copy = model.copies.get(me)
    others = [
        i for i in instances if i.id != me and not unfit(model, i, NO_CONSTRAINT, model.size_bytes)
    ]
    capacity = sum(i.capacity_bytes for i in others)
    if copy is None or not capacity or sum(i.free_bytes for i in others) < 0.05 * capacity:
        return None
    if now_ms - copy.claimed_ms < 2000 * settings.load_s or loaded_copies(
        model, {i.id for i in others}
    ):
        return None
    return LoadCopy(
        model.id, 1, f"evicted from {me}, and others have memory", used_ms=model.used_ms
    )
