"""Choice of the instance that loads a copy: an order of the instances, a shortlist, a random draw.

Hard conditions come first: the labels that the type requires, enough memory in total, not stopping,
no copy there already, no failure there. Then the order: not about to be replaced by a newer
version, free memory, another zone and host than the other copies, fewer models; when all are full,
the one whose least recently used model is oldest. Nearly equal instances form a shortlist, without
those that are much busier than the least busy. The draw is random because all nodes decide from
records that are up to two seconds old, and must not all choose the same instance.

The numbers are those of model-mesh, except for what counts as too busy. Its 100 queries a minute
send all loads of a full mesh to the few instances with the fewest queries, which then evict what
they need: ten simulated nodes hit 59 % with it, and 65 % without. Its shortlist used the wrong
record; the tests check ours for that.
"""

import bisect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, overload

import msgspec

from clipper.mesh.decisions.load_queue import LoadTimes
from clipper.mesh.records import Instance, MeshModel
from clipper.mesh.reports import Verdict

DEFAULT: Final = "_default"  # key of the constraint for types that have none
FULL_SHARE: Final = 0.05  # of capacity: an instance with less left is full
LRU_WINDOW_MS: Final = (
    45_000  # full instances whose oldest models differ by less are equal; or by 10 % of the age
)
LRU_SHARE: Final = 0.10
PREFERRED_MS: Final = 120_000  # the same window for instances with preferred labels
PREFERRED_SHARE: Final = 0.25
FREE_SHARE: Final = 0.25  # of the free memory of the best instance
MODELS_FEW: Final = 10
MODELS_RATIO: Final = 1.25
BUSY_RATE: Final = 6000.0  # queries a minute below which an instance is never too busy
UPGRADE_MS: Final = 20 * 60_000  # after a newer version appears, instances of the older one will go
QUEUED_FEW: Final = 2
RETRY_MS: Final = 1000
DRAWN: Final = 12  # a longer shortlist is sampled
# ms since the last use, and the multiple of the least rate that is too busy
TOLERATED: Final = ((5_000, 1.5), (720_000, 3.0), (86_400_000, 4.0))


class Constraint(msgspec.Struct, frozen=True):
    """Labels of instances for models of one type."""

    required: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()


NO_CONSTRAINT: Final = Constraint()
Constraints = Mapping[str, Constraint]


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen instance, and why."""

    instance: str
    why: str


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """No instance can hold the model.

    retry_ms: time after which another try may succeed; 0: none will, as things are.
    """

    why: str
    retry_ms: int


def constraint_of(type: str, constraints: Constraints) -> Constraint:
    """Return the constraint of a model type."""
    return constraints.get(type) or constraints.get(DEFAULT) or NO_CONSTRAINT


class InstanceIndex(Sequence[Instance]):
    """Instances in placement order, kept in order as their records change.

    Makes many choices between two changes cheap. Threads: one at a time.
    """

    def __init__(self, instances: Iterable[Instance] = ()) -> None:
        self._records: dict[str, Instance] = {}
        self._keys: dict[str, _Key] = {}
        self._order: list[_Key] = []
        self._versions: dict[str, int] = {}
        self._replaced: frozenset[str] = frozenset()
        self._replaced_ms = -1
        self._used_bytes = self._models = 0
        for instance in instances:
            self._count(instance)
        self._sort()

    @classmethod
    def of(cls, instances: Sequence[Instance]) -> "InstanceIndex":
        """Return an index of the instances, or the argument if it is one.

        Compares types, since isinstance of an abstract class costs ten times as much.
        """
        return instances if type(instances) is InstanceIndex else cls(instances)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Instance: ...
    @overload
    def __getitem__(self, index: slice) -> list[Instance]: ...
    def __getitem__(self, index: int | slice) -> Instance | list[Instance]:
        if type(index) is int:
            return self._records[self._order[index][4]]
        return [self._records[key[4]] for key in self._order[index]]  # type: ignore[index]

    def __contains__(self, instance: object) -> bool:
        """Return whether an instance, given by record or id, is in the index."""
        return (instance.id if isinstance(instance, Instance) else instance) in self._records

    def get(self, id: str) -> Instance | None:
        """Return the record of an instance."""
        return self._records.get(id)

    @property
    def typical_bytes(self) -> int:
        """The mean size of the models that are loaded; 0 if there are none."""
        return self._used_bytes // max(self._models, 1)

    def put(self, instance: Instance) -> None:
        """Add or replace the record of an instance."""
        checked_ms, before = self._replaced_ms, self._records.get(instance.id)
        self.remove(instance.id)
        if before is not None and _generation(before) == _generation(instance):
            self._replaced_ms = checked_ms
        if before is None:
            self._replaced_ms = -1
        self._count(instance)
        key = self._key(instance)
        self._keys[instance.id] = key
        bisect.insort(self._order, key)

    def _count(self, instance: Instance) -> None:
        self._records[instance.id] = instance
        self._versions[instance.version] = self._versions.get(instance.version, 0) + 1
        self._used_bytes += instance.used_bytes
        self._models += instance.models

    def remove(self, id: str) -> None:
        """Remove an instance."""
        instance = self._records.pop(id, None)
        if instance is None:
            return
        self._replaced_ms = -1
        self._used_bytes -= instance.used_bytes
        self._models -= instance.models
        left = self._versions[instance.version] - 1
        if left:
            self._versions[instance.version] = left
        else:
            del self._versions[instance.version]
        key = self._keys.pop(id)
        del self._order[bisect.bisect_left(self._order, key)]

    def place(self, id: str, size_bytes: int) -> None:
        """Count a load that was sent to an instance, until its own record includes it."""
        held = self._records.get(id)
        if held is not None:
            self.put(
                msgspec.structs.replace(
                    held,
                    used_bytes=min(held.used_bytes + size_bytes, held.capacity_bytes),
                    queued=held.queued + 1,
                )
            )

    def replaced(self, now_ms: int) -> frozenset[str]:
        """Return the instances that a newer version with the same labels will replace soon."""
        if len(self._versions) > 1:
            if not 0 <= now_ms - self._replaced_ms < RETRY_MS:
                self._replaced_ms = now_ms
                self._mark(_replaced(self._records.values(), now_ms))
        elif self._replaced:
            self._mark(frozenset())
        return self._replaced

    def _mark(self, replaced: frozenset[str]) -> None:
        if replaced != self._replaced:
            self._replaced = replaced
            self._sort()

    def _sort(self) -> None:
        self._keys = {id: self._key(instance) for id, instance in self._records.items()}
        self._order = sorted(self._keys.values())

    def _key(self, instance: Instance) -> "_Key":
        full = is_full(instance)
        first = instance.lru_ms if full else instance.models
        return instance.id in self._replaced, full, first, -instance.free_bytes, instance.id


_Key = tuple[bool, bool, int, int, str]  # to be replaced, full, models or age, free, id


def is_full(instance: Instance, size_bytes: int = 0) -> bool:
    """Return whether an instance has no memory for a model of this size."""
    return instance.free_bytes < max(size_bytes, 1, FULL_SHARE * instance.capacity_bytes)


def _generation(instance: Instance) -> tuple[str, tuple[str, ...], int, bool]:
    """Return the fields that decide whether an instance will be replaced."""
    return instance.version, instance.labels, instance.started_ms, is_full(instance)


def _replaced(instances: Iterable[Instance], now_ms: int) -> frozenset[str]:
    """Return instances of old versions, while the newest version is young and has memory."""
    groups: dict[frozenset[str], dict[str, list[Instance]]] = {}
    for instance in instances:
        groups.setdefault(frozenset(instance.labels), {}).setdefault(instance.version, []).append(
            instance
        )
    found: set[str] = set()
    for versions in groups.values():
        first = {
            version: min(i.started_ms for i in members) for version, members in versions.items()
        }
        newest = max(first, key=lambda version: first[version])
        if (
            len(first) > 1
            and now_ms - first[newest] < UPGRADE_MS
            and not all(map(is_full, versions[newest]))
        ):
            found.update(
                i.id for version, members in versions.items() if version != newest for i in members
            )
    return frozenset(found)


def unfit(model: MeshModel, instance: Instance, constraint: Constraint, size_bytes: int) -> str:
    """Return why an instance can never hold a copy, as it is; empty if it can."""
    if instance.stopping:
        return "it is stopping"
    if instance.types and model.type not in instance.types:
        return f"it does not run {model.type!r}: its package is not installed there"
    for label in (*constraint.required, *model.policy.requires):
        if label not in instance.labels:
            return f"it has not the label {label!r}"
    if instance.capacity_bytes < size_bytes:
        return f"the model needs {size_bytes} bytes, its memory is {instance.capacity_bytes}"
    return ""


def choose(
    model: MeshModel,
    instances: Sequence[Instance],
    now_ms: int,
    rng: Random,
    *,
    constraints: Constraints,
    seen: LoadTimes,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    prefer_local: str = "",
    used_ms: int = 0,
    size_bytes: int = 0,
) -> Placement | NoPlacement:
    """Choose an instance for one more copy, besides those in `model.copies`.

    Pass an InstanceIndex to make many choices.

    exclude: instances where it was tried or has failed. avoid: used only if there is no other
    (quarantine). prefer_local: chosen if it is on the shortlist. used_ms: last use, 0: now; models
    used long ago may go to busy instances. size_bytes: 0: as in the record.
    """
    field = InstanceIndex.of(instances)
    constraint = constraint_of(model.type, constraints)
    size = size_bytes or model.size_bytes
    wish = _Wish(
        model,
        constraint,
        size,
        exclude,
        field.replaced(now_ms),
        now_ms,
        used_ms or now_ms,
        size or field.typical_bytes,
    )
    prefers = (*constraint.preferred, *model.policy.prefers)
    ordered: Sequence[Instance] = field
    if model.copies or prefers or avoid:
        ordered = _narrowed(field, wish, avoid, prefers)
    found = _shortlist(ordered, wish, rng) or (
        _shortlist(ordered, replace(wish, evicting=True), rng)
    )
    if not found:
        return _refusal(field, wish, max(RETRY_MS, int(seen.mean_ms(model.type))))
    found = _not_too_busy(found, wish)
    ids = [instance.id for instance in found]
    chosen = prefer_local if prefer_local in ids else rng.choice(ids)
    return Placement(
        chosen, _reason(found[ids.index(chosen)], wish, len(ids), chosen == prefer_local)
    )


@dataclass(frozen=True, slots=True)
class _Wish:
    """A model to be placed. room_bytes: what it will take, as far as is known. evicting: accept
    instances that must evict a model for it.
    """

    model: MeshModel
    constraint: Constraint
    size_bytes: int
    exclude: Collection[str]
    replaced: frozenset[str]
    now_ms: int
    used_ms: int
    room_bytes: int
    evicting: bool = False

    def why_not(self, instance: Instance) -> str:
        """Return why an instance cannot hold the model; empty if it can."""
        if instance.id in self.model.copies:
            return "it has a copy"
        if instance.id in self.exclude:
            return "it was tried, or failed lately"
        return unfit(self.model, instance, self.constraint, self.size_bytes)

    def fits(self, instance: Instance) -> bool:
        """Return whether an instance can hold the model, with eviction if that is allowed."""
        if instance.free_bytes < self.room_bytes and not self.evicting and not is_full(instance):
            return False
        return not self.why_not(instance)


def _narrowed(
    field: InstanceIndex, wish: _Wish, avoid: Collection[str], prefers: tuple[str, ...]
) -> list[Instance]:
    """Return the fit instances, narrowed by each preference that leaves any.

    Preferences: not in quarantine, in other zones, on other hosts, with the preferred labels.
    """
    found = [i for i in field if not wish.why_not(i)]
    holders = [holder for id in wish.model.copies if (holder := field.get(id))]
    zones, hosts = {h.zone for h in holders}, {h.host for h in holders if h.host}
    found = [i for i in found if i.id not in avoid] or found
    found = [i for i in found if i.zone not in zones] or found
    found = [i for i in found if i.host not in hosts] or found
    if prefers and found:
        liked = [i for i in found if all(label in i.labels for label in prefers)]
        if liked and (not is_full(liked[0], wish.size_bytes) or is_full(found[0], wish.size_bytes)):
            near = _as_good(found[0], wish, PREFERRED_MS, PREFERRED_SHARE)
            if not is_full(liked[0]) or liked[0].lru_ms <= near:
                return liked
    return found


def _as_good(best: Instance, wish: _Wish, window_ms: int, share: float) -> int:
    """Return the last use up to which a full instance is about as good as the best one."""
    return best.lru_ms + max(window_ms, int(share * max(0, wish.now_ms - best.lru_ms)))


def _shortlist(ordered: Sequence[Instance], wish: _Wish, rng: Random) -> list[Instance]:
    """Return the instances that are nearly as good as the best, or a random part of them."""
    first = next((n for n in range(len(ordered)) if wish.fits(ordered[n])), None)
    if first is None:
        return []
    best = ordered[first]
    full, outgoing = is_full(best), best.id in wish.replaced
    most = (
        _as_good(best, wish, LRU_WINDOW_MS, LRU_SHARE)
        if full
        else max(MODELS_FEW, int(MODELS_RATIO * best.models))
    )
    least_free = 0 if full else FREE_SHARE * best.free_bytes

    def as_good(instance: Instance) -> bool:
        first = instance.lru_ms if full else instance.models
        return (
            first <= most
            and is_full(instance) == full
            and (instance.id in wish.replaced) == outgoing
        )

    end = bisect.bisect_left(
        ordered, True, lo=first + 1, key=lambda instance: not as_good(instance)
    )
    places: Iterable[int] = range(first, end)
    if end - first > DRAWN:
        places = (first, *rng.sample(range(first + 1, end), DRAWN - 1))
    drawn = [ordered[n] for n in places]
    return [
        instance for instance in drawn if instance.free_bytes >= least_free and wish.fits(instance)
    ]


def _not_too_busy(found: list[Instance], wish: _Wish) -> list[Instance]:
    """Drop instances with a far higher rate, or a longer load queue, than the least busy one."""
    since = max(0, wish.now_ms - wish.used_ms)
    times = next((times for within_ms, times in TOLERATED if since <= within_ms), math.inf)
    least = min(instance.rate for instance in found)
    eligible = [i for i in found if i.rate <= max(BUSY_RATE, times * least)]
    turns = [(i.loading + i.queued) // max(i.loading_max, 1) for i in eligible]
    return [
        i for i, before in zip(eligible, turns, strict=True) if before <= min(turns) + QUEUED_FEW
    ]


def _reason(chosen: Instance, wish: _Wish, count: int, local: bool) -> str:
    """Return why an instance was chosen among `count`. local: it is the requesting node."""
    what = (
        f"its oldest model was used {max(0, wish.now_ms - chosen.lru_ms) // 1000} s ago"
        if is_full(chosen)
        else (f"{chosen.free_bytes >> 20} MiB are free beside {chosen.models} models")
    )
    if local:
        return f"{what}; the query came in there"
    return f"{what}; drawn among {count}" if count > 1 else f"{what}; the best"


def _refusal(field: InstanceIndex, wish: _Wish, retry_ms: int) -> NoPlacement:
    """Return why no instance can hold the model, and when to try again."""
    if not field:
        return NoPlacement("no instance lives", RETRY_MS)
    reasons = {instance.id: wish.why_not(instance) for instance in field}
    grave = all(
        unfit(wish.model, i, wish.constraint, wish.size_bytes) and not i.stopping for i in field
    )
    shown = "; ".join(f"{id}: {why}" for id, why in sorted(reasons.items())[:5])
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return NoPlacement(f"no instance can hold it. {shown}{more}", 0 if grave else retry_ms)


def explain(
    model: MeshModel,
    instances: Sequence[Instance],
    now_ms: int,
    *,
    constraints: Constraints,
    seen: LoadTimes,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    size_bytes: int = 0,
) -> list[Verdict]:
    """Return what `choose` finds for each instance, best first. `ok`: could be drawn."""
    field = InstanceIndex.of(instances)
    constraint = constraint_of(model.type, constraints)
    size = size_bytes or model.size_bytes
    wish = _Wish(
        model,
        constraint,
        size,
        exclude,
        field.replaced(now_ms),
        now_ms,
        now_ms,
        size or field.typical_bytes,
    )
    ordered = _narrowed(field, wish, avoid, (*constraint.preferred, *model.policy.prefers))
    found = _shortlist(ordered, wish, Random(0)) or _shortlist(
        ordered, replace(wish, evicting=True), Random(0)
    )
    listed = {i.id for i in found}
    drawn = {i.id for i in _not_too_busy(found, wish)} if found else set()
    verdicts, rank = [], -1
    for instance in sorted(field, key=lambda i: (i.id not in drawn, i.id not in listed)):
        why_not = wish.why_not(instance)
        if why_not:
            verdicts.append(Verdict(instance.id, False, why_not))
            continue
        rank += 1
        if instance.id in drawn:
            why = _reason(instance, wish, len(drawn), False)
        elif instance.id in listed:
            why = "as good, but too busy"
        elif instance.id in avoid:
            why = "it failed several models lately"
        elif instance.id in wish.replaced:
            why = "an instance of a newer version will replace it"
        else:
            why = (
                "others are better, it is full"
                if is_full(instance, wish.size_bytes)
                else f"it has {instance.models} models"
            )
        verdicts.append(Verdict(instance.id, instance.id in drawn, why, rank))
    return sorted(verdicts, key=lambda verdict: (verdict.rank < 0, verdict.rank))
