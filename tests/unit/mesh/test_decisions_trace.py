"""The decisions of the mesh in drawn worlds, compared as a whole text.

Times lie at the limits of the rules and beside them. The other tests say what a rule is for; this
one notices that something is decided otherwise.
"""

import random
from collections.abc import Callable
from dataclasses import astuple, is_dataclass
from functools import partial
from typing import Any

import msgspec

from clipper.errors import ClipperError
from clipper.mesh.decisions import claims, failures, maintenance, scaling, vmodels
from clipper.mesh.decisions.load_queue import LoadQueue, LoadTimes, QueuedLoad
from clipper.mesh.decisions.maintenance import MeshView
from clipper.mesh.decisions.model_cache import ModelCache
from clipper.mesh.decisions.usage import Usage, UsageCounter, together
from clipper.mesh.records import Copy, Failure, Instance, MeshModel, Policy, VModel
from clipper.settings.mesh import MeshSettings
from tests.expected import check_expected

NOW_MS = 1_700_000_000_000
SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000
SETTINGS = MeshSettings(failure_s=600.0, load_s=30.0, rate_s=10.0, publish_s=5.0, tries=3)
AGES = [
    *(limit + more for limit in (200, 10 * SECOND, MINUTE, 2 * MINUTE, 10 * MINUTE, 20 * MINUTE)
      for more in (-1, 0, 1)),
    *(limit + more for limit in (30 * MINUTE, HOUR, 5 * HOUR, 6 * HOUR) for more in (-1, 0, 1)),
    0, 1, 26_000, 10 * HOUR, 50 * HOUR, -1, -5 * SECOND, -20 * MINUTE,
]  # fmt: skip
NAMES = ("n1", "n2", "n3", "n4", "gone")
MIB = 1 << 20


def text(value: Any) -> str:
    """Return a short text of a record: times as seconds ago, defaults left out."""
    if isinstance(value, bool | str | None):
        return repr(value)
    if isinstance(value, int | float):
        if abs(value - NOW_MS) < 1000 * HOUR:
            return f"now{(value - NOW_MS) / 1000:+.10g}"
        return f"{value:.6g}"
    if isinstance(value, vmodels.VChange):
        models = [(one.id, one.refs, one.used_ms, one.auto_delete) for one in value.models]
        return f"{text(value.vmodel)} {text(models)}"
    if isinstance(value, msgspec.Struct):
        fields = zip(msgspec.structs.fields(value), msgspec.structs.astuple(value), strict=True)
        shown = [f"{field.name}={text(one)}" for field, one in fields if one != field.default]
        return f"({' '.join(one for one in shown if not one.endswith('={}'))})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, name) for name in value.__dataclass_fields__]
        return f"{type(value).__name__}({' '.join(map(text, inner))})"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}:{text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, frozenset | set):
        return text(sorted(value))
    return "[" + " ".join(map(text, value)) + "]"


def tried(call: Callable[[], object]) -> str:
    try:
        return text(call())
    except ClipperError as error:
        return f"{type(error).__name__}: {error} {error.hint}"


class World:
    """A generator of records. Sizes are known, and small beside the memory of an instance or
    not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def one(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def ago(self) -> int:
        return NOW_MS - int(self.rng.choice(AGES))

    def some(self, values: tuple[str, ...], most: int) -> list[str]:
        return self.rng.sample(values, self.rng.randrange(most + 1))

    def model(self, id: str = "m") -> MeshModel:
        loaded = self.rng.random() < 0.8
        copies = {
            name: Copy(self.ago(), self.ago() if loaded or self.one(0, 1) else 0, self.one(5, 50))
            for name in self.some(NAMES, 4)
        }
        failed = {
            name: Failure(
                self.ago(),
                f"why {name}",
                self.one("host", "artifact"),
                self.one(1, 2, 3, 40),
                self.rng.random() < 0.2,
            )
            for name in self.some(NAMES, self.one(0, 0, 3))
        }
        policy = Policy(
            self.one(0, 0, 0, 1, 3),
            self.one(0, 0, 2),
            self.rng.random() < 0.1,
            self.one(0.0, 100.0),
            self.one(0, 1, 4),
        )
        return MeshModel(
            id,
            self.one("onnx", "python"),
            f"/{id}",
            input=self.one("any", "doubles"),
            policy=policy,
            copies=copies,
            failures=failed,
            refs=self.one(0, 1, 2),
            auto_delete=self.rng.random() < 0.2,
            used_ms=self.ago(),
            size_bytes=self.one(1, 10, 60) * MIB,
        )

    def instances(self) -> list[Instance]:
        is_full = self.one(0, 0, 1)
        return [
            Instance(
                name,
                i,
                f"unix:/{name}",
                f"unix:/{name}.c",
                zone=self.one("z1", "z2"),
                capacity_bytes=self.one(100, 200) * MIB,
                used_bytes=(self.one(95, 99, 100) if is_full else self.one(0, 50, 100)) * MIB,
                models=self.one(0, 3, 40),
                lru_ms=self.one(0, self.ago(), self.ago()),
                loading=self.one(0, 2),
                queued=self.one(0, 3, 51, 101),
                loading_max=self.one(1, 2),
                rate=self.one(0.0, 50.0, 2000.0),
                stopping=self.rng.random() < 0.1,
            )
            for i, name in enumerate(NAMES[: self.one(1, 2, 4, 4)])
        ]

    def usage(self) -> Usage:
        return Usage(
            self.ago(),
            self.one(0.0, 10.0, 2000.0, 4500.0, 30_000.0),
            self.one(True, False),
            self.one(0.0, 29.0, 31.0, 3000.0),
            self.one(0.0, 5.0, 200.0),
            self.one(0, 1, 2),
            self.one(0, self.ago()),
        )


def test_copies_claims_and_failures() -> None:
    shown = []
    for seed in range(90):
        world = World(seed)
        model, instances, usage = world.model(), world.instances(), world.usage()
        alive = {one.id for one in instances}
        me = world.one(*NAMES)
        shown += [f"-- {seed} {me} of {' '.join(sorted(alive))}: {text(model)}", text(usage)]
        made = {
            "copies": scaling.decide(model, usage, instances, NOW_MS, SETTINGS),
            "grow": scaling.may_grow(model, usage, SETTINGS),
            "spare": scaling.spare(model, instances),
            "blocked": failures.blocked(model, NOW_MS, SETTINGS),
            "verdict": [failures.verdict(model, NOW_MS, SETTINGS, n) for n in (0, 1, 2)],
            "loaded": claims.loaded_copies(model, alive),
            "without": text(claims.without_failures(model, NOW_MS, SETTINGS).failures),
            "evicted": maintenance.evicted(model, me, instances, NOW_MS, SETTINGS),
            "left over": [vmodels.is_unnamed(model), vmodels.is_left_over(model, NOW_MS)],
        }
        changes = {
            "claimed": claims.claimed(
                model, me, NOW_MS, alive=alive, copies=2, settings=SETTINGS, size_bytes=7
            ),
            "completed": claims.completed(
                model, me, NOW_MS, size_bytes=9, input="ints", output="bytes", concurrency=2
            ),
            "failed": claims.failed(model, me, NOW_MS, why="w" * 501, fault="host", crashed=True),
            "released": claims.released(model, me, NOW_MS),
            "spared": claims.released_if_spare(model, me, alive=alive, keep=1, used_ms=NOW_MS),
            "gone": claims.without_gone(model, me, alive=alive),
        }
        shown += [f"{name}: {text(one)}" for name, one in made.items()]
        for name, one in changes.items():
            if isinstance(one, MeshModel):
                fields = zip(msgspec.structs.fields(one), msgspec.structs.astuple(one), strict=True)
                one = {f.name: v for f, v in fields if v != getattr(model, f.name)}
            shown.append(f"{name}: {text(one).replace('w' * 500, '500 w')}")
    check_expected("mesh/copies.txt", "\n".join(shown) + "\n")


def test_actions_of_every_round() -> None:
    shown = []
    for seed in range(70):
        world = World(1000 + seed)
        models = {id: world.model(id) for id in ("m1", "m2", "m3", "m4")}
        seen = LoadTimes()
        seen.add("onnx", 1500.0)
        instances = world.instances()
        view = MeshView(
            "n1",
            instances,
            mine=[*models.items(), *([("lost", None)] if seed % 9 == 0 else [])],
            resident={
                id: (world.one(5, 60) * MIB, world.ago()) for id in world.some((*models, "x"), 4)
            },
            loading=world.some(tuple(models), 1),
            usage={id: world.usage() for id in world.some(tuple(models), 4)},
            vmodels=[],
            read=models.get,
            waking=sorted(models.values(), key=lambda model: -model.used_ms),
            seen=seen,
        )
        shown.append(f"-- {seed}")
        for round in (maintenance.janitor, maintenance.rates, maintenance.reaper):
            shown += [f"{round.__name__} {text(one)}" for one in round(view, NOW_MS, SETTINGS)]
        shown += [text(move) for move in maintenance.migration(view, NOW_MS)]
        was = instances[0]
        shown += ["publish "]
        for name, value in (
            ("stopping", not was.stopping),
            ("capacity_bytes", was.capacity_bytes + world.one(1, 3, 5) * MIB),
            ("used_bytes", was.used_bytes + world.one(1, 3, 30) * MIB),
            ("lru_ms", (was.lru_ms or NOW_MS) + world.one(20_000, 20_001, HOUR)),
            ("models", was.models + world.one(10, 11, 1)),
            ("rate", was.rate + world.one(100.0, 101.0, 201.0)),
            ("queued", was.queued + world.one(1, 2, 3, 30)),
            ("zone", "z3"),
            ("zone", was.zone),
        ):
            now = msgspec.structs.replace(was, **{name: value})
            since = world.one(0, 4999, 5000, 5001, 399_999, 400_000, -1)
            is_worth = maintenance.worth_publishing(was, now, NOW_MS - since, NOW_MS, SETTINGS)
            shown[-1] += f"{name}:{since}:{is_worth:d} "
    check_expected("mesh/rounds.txt", "\n".join(shown) + "\n")


def test_steps_of_vmodels() -> None:
    shown = []
    for seed in range(70):
        world = World(2000 + seed)
        models = {id: world.model(id) for id in ("m1", "m2", "m3") if world.rng.random() < 0.9}
        active, target = world.one("m1", "m2"), world.one("m1", "m2", "m3")
        before = VModel(
            "v",
            active,
            target,
            world.one("", "me"),
            share=world.one(0.0, 0.0, 0.3),
            previous=world.one("", "m2", "m3"),
            failed=world.one(True, False, False),
            why="why",
            force=world.rng.random() < 0.1,
            since_ms=world.ago(),
            give_up_ms=world.one(0, 0, world.ago()),
        )
        alive = set(NAMES[:4])
        goal, owner = world.one("m1", "m2", "m3", "m9"), world.one("", "me")
        more: dict[str, Any] = {
            "owner": owner,
            "update_only": world.one(True, False),
            "info": world.one(None, None, MeshModel(goal, "onnx", f"/{goal}")),
            "auto_delete": world.one(True, False),
            "force": world.rng.random() < 0.2,
            "expected": world.one("", "", "", "m1"),
            "share": world.one(0.0, 0.0, 0.3, 1.0, -0.1, 1.1),
            "give_up_ms": world.one(0, NOW_MS + 1),
        }
        was = None if seed % 10 == 0 else before
        found = vmodels.step(
            before,
            models.get(active),
            models.get(target),
            NOW_MS,
            alive=alive,
            settings=SETTINGS,
            places=world.one(0, 2, 4),
        )
        status = was and was.status()
        shown += [f"-- {seed} {text(was)} {status}: {text(found)}", f"{goal} {text(more)}"]
        read = models.get
        for name, call in (
            ("set", partial(vmodels.set_target, "v", was, goal, read, NOW_MS, **more)),
            ("again", partial(vmodels.set_target, "v", was, goal, read, NOW_MS, owner="me")),
            ("delete", partial(vmodels.delete, was, read, NOW_MS, owner=owner)),
            ("back", partial(vmodels.rollback, before, read, NOW_MS)),
            ("switched", partial(vmodels.switched, before, read, NOW_MS)),
        ):
            outcome = tried(call)
            shown.append(f"{name}: {outcome}")
        is_loaded = [active].__contains__ if seed % 2 else [target].__contains__
        draws = [vmodels.resolve(before, draw, is_loaded) for draw in (0.0, 0.299, 0.3)]
        shown.append(f"{text(draws)} {text(vmodels.failed(before, 'w' * 501))[-40:]}")
    check_expected("mesh/vmodels.txt", "\n".join(shown) + "\n")


def test_uses_are_counted() -> None:
    rng, counter, now_ms, shown = random.Random(1), UsageCounter(), NOW_MS, []
    for i in range(200):
        now_ms += rng.choice((0, 500, 59_999, 60_000, 5 * MINUTE, 39 * MINUTE))
        model, late = rng.choice("abc"), rng.choice((0, 0, 70_000, 50 * MINUTE))
        more = rng.choice(((), (3,), (2, 10.0, 4.0)))
        counter.note(model, now_ms - late, *more)
        if i % 7 == 3:
            counter.heavy(rng.choice("abcd"), now_ms)
        if i % 5 == 4:
            at_s = rng.choice((None, None, (now_ms + 500) / 1000))
            found = counter.read(now_ms, at_s)
            shown += [text(found), text(together(found.values())), text(counter.rate)]
            shown.append(text([astuple(counter.last(id, now_ms)) for id in "abcd"]))
        if i % 31 == 30:
            counter.forget(rng.choice("abc"))
    check_expected("mesh/usage.txt", "\n".join(shown) + "\n")


def test_a_cache_and_a_queue_in_use() -> None:
    rng, now_ms, shown = random.Random(2), NOW_MS, []
    cache, queue, times = ModelCache(1000, models_max=12), LoadQueue(6), LoadTimes(20.0)
    names = [f"m{i}" for i in range(20)]
    for i in range(400):
        now_ms += rng.choice((0, 1, 150, 200, 30_000, HOUR))
        model = rng.choice(names)
        size, waiting = rng.choice((0, 10, 90, 300)), rng.random() < 0.5
        used_ms = now_ms - rng.choice((0, 1000, 7 * HOUR, 90 * HOUR))
        match i % 6:
            case 0 | 1:
                found = cache.room_for(size, used_ms, now_ms, waiting=waiting)
                shown.append(f"room {size} {text(found)}")
                for evicted in getattr(found, "evict", ()):
                    cache.remove(evicted)
                if hasattr(found, "evict"):
                    cost = rng.choice((0.0, 500.0))
                    loading, pinned = rng.random() < 0.3, rng.random() < 0.1
                    cache.add(
                        model, size, used_ms, now_ms, pinned=pinned, loading=loading, cost_ms=cost
                    )
            case 2:
                cache.touch(model, now_ms, rng.choice((1, 1, 8)))
            case 3:
                is_known = cache.loaded(model, size, now_ms=now_ms, cost_ms=rng.choice((0.0, 900)))
                shown.append(f"loaded {is_known}")
            case 4:
                cache.pin(model, pinned=rng.random() < 0.2)
                cache.resize(model, size)
            case 5:
                took_ms = rng.choice((100.0, 900.0, 5000.0, 19_000.0))
                times.add(rng.choice("ab"), took_ms)
                each = [(times.count(t), times.mean_ms(t), times.assumed_ms(t)) for t in "abc"]
                shown.append(f"times {text(each)}")
        held = cache.get(model)
        totals = cache.used_bytes, cache.free_bytes, cache.lru_ms(now_ms), len(cache)
        shown.append(f"{model} {text(held and astuple(held))} {text(totals)}")
        left_out = queue.push(QueuedLoad(model, used_ms, now_ms - rng.choice((0, 5)), waiting, i))
        if i % 3 == 2:
            rose = queue.promote(rng.choice(names), now_ms)
            dropped = queue.drop(rng.choice(names)) if i % 9 == 8 else None
            shown.append(f"next {text([left_out, rose, dropped, queue.pop()])}")
        shown.append(f"queue {len(queue)} {queue.waiting} {[one for one in names if one in queue]}")
    quarantine = failures.Quarantine()
    for i in range(200):
        now_ms += rng.choice((0, 10_000, 60_000))
        name, fault = rng.choice(NAMES), rng.choice(("host", "host", "artifact"))
        is_new = quarantine.failed(name, rng.choice(names[:5]), fault, now_ms)
        if i % 20 in (13, 19):
            quarantine.loaded(name)
        shown.append(f"{is_new:d} {text(quarantine.left_alone(now_ms))}")
    check_expected("mesh/cache.txt", "\n".join(shown) + "\n")
