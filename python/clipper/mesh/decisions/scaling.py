"""The number of copies that a model should have, given its use and the instances."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from clipper.mesh.decisions.claims import alive_copies, loaded_copies
from clipper.mesh.decisions.placement import NO_CONSTRAINT, Constraint, InstanceIndex, unfit
from clipper.mesh.decisions.usage import Usage
from clipper.mesh.records import Instance, MeshModel
from clipper.settings.mesh import MeshSettings

HOUR_MS: Final = 3_600_000
QUEUE_SHARE: Final = 0.3  # of the SLO that rows may wait for a free copy
BUSY_SHARE: Final = 0.7  # of its time that a copy may be busy
FULL_SHARE: Final = 0.90  # memory in use above which a second copy requires SECOND_AGE_MS
SECOND_AGE_MS: Final = 6 * HOUR_MS  # least age of the least recently used model of the cluster
AT_ONCE: Final = 2  # copies that may always be added at once; or a third of the instances
# With less of the memory free, a second copy goes as soon as it is idle for the cache's age.
TIGHT_SHARE: Final = 0.05
# Of the cache's age: where memory is short, a second copy unused for longer is unloaded.
IDLE_SHARE: Final = 0.10
# A second copy unused for longer is unloaded, also where memory is free.
IDLE_MS_MAX: Final = 10 * HOUR_MS
# after the last load, before one of more than two copies is unloaded
SETTLED_MS: Final = 30 * 60_000
# least and greatest time without heavy use before one of more than two is unloaded
CALM_MS: Final = (
    10 * 60_000,
    5 * HOUR_MS,
)
CALM_SHARE: Final = 2 / 3  # of the limit that the remaining copies would stay below
HEAVY_ROUNDS: Final = 3  # of rates, after heavy use or a load, before the second copy goes


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """The number of copies that a model should have, and the reason."""

    copies: int
    why: str


def decide(
    model: MeshModel,
    usage: Usage,
    instances: Sequence[Instance],
    now_ms: int,
    settings: MeshSettings,
    *,
    assumed_ms: float = 3000.0,
    constraint: Constraint = NO_CONSTRAINT,
) -> CopyTarget:
    """Return how many copies there should be, including those that load, and why.

    assumed_ms: time after which a load has probably ended, from `LoadTimes`.
    """
    cluster = Cluster.of(model, instances, constraint)
    held = len(alive_copies(model, cluster.alive))
    loaded = len(loaded_copies(model, cluster.alive))
    least = max(model.policy.copies_min, int(model.policy.pinned))
    most = min(model.policy.copies_max or cluster.places, cluster.places)
    if held > most:
        return CopyTarget(max(most, 0), f"at most {most} are allowed or possible")
    if held < least:
        return CopyTarget(min(least, most), f"its policy requires {least}")
    if not loaded:
        return CopyTarget(held, "none is loaded yet" if held else "it is loaded at its first query")
    more = _more(model, usage, cluster, loaded, now_ms, settings, assumed_ms)
    if more.copies > held:
        return CopyTarget(
            min(more.copies, most),
            more.why if most > held else f"{more.why}, and there are no more places",
        )
    if held == loaded > max(least, 1) and (
        fewer := _fewer(model, usage, cluster, loaded, now_ms, settings)
    ):
        return fewer
    return more


@dataclass(frozen=True, slots=True)
class Cluster:
    """Totals of the instances that could hold a model.

    alive: ids of all live instances. places: how many could hold it. lru_ms: last use of the least
    recently used model.
    """

    alive: Container[object]
    places: int
    capacity_bytes: int
    free_bytes: int
    lru_ms: int

    @classmethod
    def of(
        cls, model: MeshModel, instances: Sequence[Instance], constraint: Constraint
    ) -> "Cluster":
        """Compute the totals for a model."""
        fit = [i for i in instances if not unfit(model, i, constraint, model.size_bytes)]
        return cls(
            instances if type(instances) is InstanceIndex else frozenset(i.id for i in instances),
            len(fit),
            sum(i.capacity_bytes for i in fit),
            sum(i.free_bytes for i in fit),
            min((i.lru_ms for i in fit if i.lru_ms), default=0),
        )

    @property
    def free_share(self) -> float:
        """Share of the memory that is free."""
        return self.free_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    def age_ms(self, now_ms: int) -> int:
        """Return the time since the last use of the least recently used model; very long if there
        is none.
        """
        return max(0, now_ms - self.lru_ms) if self.lru_ms else 10 * IDLE_MS_MAX


def limit_of(model: MeshModel, usage: Usage, settings: MeshSettings) -> float:
    """Queries a minute that one copy may have: by setting, or less by its concurrency and time for
    a query."""
    if model.policy.concurrency and usage.service_ms > 0:
        return min(
            settings.rate_per_copy, 0.9 * model.policy.concurrency * 60_000 / usage.service_ms
        )
    return settings.rate_per_copy


def is_heavy(model: MeshModel, usage: Usage, settings: MeshSettings) -> bool:
    """Return whether one copy less would be near its limit."""
    copies = max(len(model.loaded) - 1, 1)
    return usage.rate > CALM_SHARE * limit_of(model, usage, settings) * copies


def may_grow(model: MeshModel, usage: Usage, settings: MeshSettings) -> bool:
    """Return False quickly for most models: nothing in their use needs more copies."""
    copies = max(len(model.copies), 1)
    slo_ms = model.policy.slo_ms or settings.deadline_ms
    return (
        usage.rate >= limit_of(model, usage, settings)
        or usage.queue_ms > QUEUE_SHARE * slo_ms
        or (usage.regular and copies == 1)
        or len(model.copies) < max(model.policy.copies_min, int(model.policy.pinned))
    )


def _more(
    model: MeshModel,
    usage: Usage,
    cluster: Cluster,
    loaded: int,
    now_ms: int,
    settings: MeshSettings,
    assumed_ms: float,
) -> CopyTarget:
    held, limit = len(alive_copies(model, cluster.alive)), limit_of(model, usage, settings)
    started_ms = max(copy.claimed_ms for copy in model.copies.values())
    settling = now_ms - started_ms < 2000 * settings.rate_s + 2 * assumed_ms
    if held > loaded or (held > 1 and settling):
        return CopyTarget(held, "a copy has just begun to load")
    if usage.rate >= limit * loaded:
        wanted = math.ceil(usage.rate / limit + 1e-9)
        at_once = max(AT_ONCE, math.ceil(cluster.places / 3))
        return CopyTarget(
            min(max(wanted, held + 1), held + at_once),
            f"{usage.rate:.0f} queries a minute, {limit:.0f} a copy",
        )
    slo_ms = model.policy.slo_ms or settings.deadline_ms
    if usage.queue_ms > QUEUE_SHARE * slo_ms:
        busy = usage.rate / 60_000 * usage.service_ms / max(model.policy.concurrency, 1)
        wanted = max(held + 1, math.ceil(busy / BUSY_SHARE))
        why = (
            f"rows wait {usage.queue_ms:.0f} ms for a free copy, and {slo_ms:.0f} ms are all they"
            " have"
        )
        return CopyTarget(min(wanted, held + AT_ONCE), why)
    if (
        held == 1
        and usage.regular
        and (cluster.free_share > 1 - FULL_SHARE or cluster.age_ms(now_ms) > SECOND_AGE_MS)
    ):
        return CopyTarget(2, "it is used regularly")
    return CopyTarget(held, "as many as its use needs")


def _fewer(
    model: MeshModel,
    usage: Usage,
    cluster: Cluster,
    loaded: int,
    now_ms: int,
    settings: MeshSettings,
) -> CopyTarget | None:
    age = cluster.age_ms(now_ms)
    if loaded == 2:
        is_tight = cluster.free_share <= TIGHT_SHARE
        idle = min(IDLE_SHARE * age, IDLE_MS_MAX) if is_tight else IDLE_MS_MAX
        since_ms = max(usage.heavy_ms, *(copy.loaded_ms for copy in model.copies.values()))
        if now_ms - since_ms <= HEAVY_ROUNDS * settings.rate_s * 1000:
            return None  # where models come and go, `idle` is less than the time between reports
        unused = now_ms - max(usage.used_ms, model.used_ms)
        return (
            CopyTarget(1, f"unused for {unused // 1000} s{', and memory is short' * is_tight}")
            if unused > idle
            else None
        )
    calm = min(max(IDLE_SHARE * age, CALM_MS[0]), CALM_MS[1])
    settled = now_ms - max(copy.loaded_ms for copy in model.copies.values()) > SETTLED_MS
    fits = usage.rate <= CALM_SHARE * limit_of(model, usage, settings) * (loaded - 1)
    if settled and fits and usage.waiting <= 1 and now_ms - usage.heavy_ms > calm:
        return CopyTarget(loaded - 1, f"{usage.rate:.0f} queries a minute need fewer copies")
    return None


def spare(model: MeshModel, instances: Sequence[Instance]) -> str:
    """Return the holder that should give up its copy, the same for every caller; empty: none."""
    field = InstanceIndex.of(instances)
    holders = [held for id in loaded_copies(model, field) if (held := field.get(id))]
    if len(holders) < 2:
        return ""
    zones = [held.zone for held in holders]

    def burden(held: Instance) -> tuple[bool, bool, float, float, str]:
        return (
            held.stopping,
            zones.count(held.zone) > 1,
            -held.free_bytes / max(held.capacity_bytes, 1),
            held.rate,
            held.id,
        )

    return max(holders, key=burden).id
