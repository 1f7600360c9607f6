"""Laws of a simulated mesh, checked from outside: in the store, in hosts, at queries.

No check calls a decision of the mesh, so a wrong decision is noticed. Laws about time count only
time in which the store could be reached by all, and wait long enough for the mesh to act.
"""

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import msgspec

from bench.node_simulator.virtual_time import Life
from clipper.mesh.loading.loader import CLAIM_GONE
from clipper.mesh.records import MODELS, VMODELS, Failure, MeshModel, VModel
from clipper.store import Delete, Op, Put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.node_simulator.servers import Query, VirtualHost
    from bench.node_simulator.world import SimulatedNode, World

LOOK_S: Final = 1.0
ROUNDS: Final = 2  # of the reaper or janitor, in which what is due must have been done
HOT: Final = 3.0  # times the rate of one copy, at which another must come
ROOM: Final = 0.25  # of its memory that is free: another node could have taken it
SWITCH_LOADS: Final = 12  # times the limit of a load, in which a name has switched or failed to
SEEN_WRONG: Final = 0.5  # of its memory, by which a node's record may be wrong for a while
BELIEVED: Final = 2  # nodes that blame the artifact of a model, after which no other tries it
LATE_S: Final = 0.002
CLAIMED_S: Final = 0.1  # after a claim of a loaded copy, in which a false one is taken back
SLOW_CALLS: Final = 10  # of a slow store, in which it is taken back then: two, and those before
WRITTEN_S: Final = 1.0  # in which a failed load is written, if the store can be reached
REFUSED_ROUNDS: Final = 3  # of rates, in which a node that has no memory is asked again
REFUSED_S: Final = 1.0  # after a refused load, in which another node is chosen and asked
CALM_S: Final = 30.0  # after a fault, in which a further copy may have its reason
MISSED_S: Final = 5.0  # in which a claim without a copy is given up or loaded again


class Laws:
    """Checks what must hold, and reports what does not to the world. Threads: one."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._models: dict[str, MeshModel] = {}
        self._vmodels: dict[str, VModel] = {}
        self._due: Counter[tuple[str, str]] = Counter()
        self._asked: dict[str, deque[tuple[float, Life | None]]] = {}
        self._failed: dict[tuple[str, str], float] = {}
        self._disturbed_s = self._restored_s = -CALM_S
        self._suspects: set[str] = set()
        self._held: dict[SimulatedNode, tuple[list[int], set[str]]] = {}
        self._free: dict[str, deque[int]] = {}  # memory of each node, at the last looks
        self._free_here: dict[str, deque[tuple[float, int]]] = {}  # and as it is, by time
        self._refusals: Counter[str] = Counter()  # of loads by each node, for want of memory
        self._refused_s: dict[str, float] = {}  # when each has refused one, at a look
        self._seen_s: dict[str, float] = {}  # when each node was last in the store, at a look
        world.loop.call_later(LOOK_S, self._look)

    # -- what the world tells

    def asked(self, name: str, life: "Life | None") -> None:
        """Note a query, of a model or of what a v-model stands for. life: the process that got
        it."""
        vmodel, asked = self._vmodels.get(name), (self._world.loop.time(), life)
        for id in {name} if vmodel is None else {vmodel.active, vmodel.target}:
            self._asked.setdefault(id, deque(maxlen=2048)).append(asked)

    def disturbed(self) -> None:
        """Note a fault after which a further copy may have its reason."""
        self._disturbed_s = self._world.loop.time()

    def lost(self) -> None:
        """Note that the store has lost what it had: until it is restored, all stays loaded."""
        self.disturbed()
        self._held = {
            one: ([host.epoch for host in one.hosts], {*one.node.joined.loader.held})
            for one in self._world.nodes.values()
            if one.ready and not one.leaving and one.node is not None
        }

    def restored(self) -> None:
        """Note that the store has other records now, and check what `lost` says."""
        self.disturbed()
        self._restored_s = self._disturbed_s
        world = self._world
        self._models, self._vmodels = {**world.models()}, {**world.vmodels()}
        self._due.clear()
        for one, (epochs, before) in self._held.items():
            if one.node is None or one.life.over or one.leaving:
                continue
            gone = before - {*one.node.joined.loader.held}
            world.check(
                not gone or epochs != [host.epoch for host in one.hosts],
                f"{one.name} has unloaded {sorted(gone)[:5]}, whose records the store had lost",
            )
        self._held.clear()

    def host_ended(self, host: "VirtualHost", id: str) -> None:
        """Check that a model that is known to end its process ends no process of others."""
        model = self._models.get(id)
        known = model is not None and any(f.crashed for f in model.failures.values())
        others = sorted({*host.resident} - {id})
        self._world.check(
            not (known and others),
            f"{id}, known to end its process, ends one of {host.life.name} with {others[:5]}",
        )

    def suspected(self, node: str) -> None:
        """Note a node that may be left alone from now on, since loads fail there by its fault."""
        self._suspects.add(node)

    def load_failed(self, node: str, id: str) -> None:
        """Note a load that has failed by its artifact."""
        self._failed[node, id] = self._world.loop.time()

    def ended(self, query: "Query") -> None:
        """Check that a query has ended by its deadline."""
        late_s = query.ended_s - query.deadline_s if query.deadline_s else 0.0
        self._world.check(late_s <= LATE_S, f"{query.name} ended {late_s:.3f} s late")

    def unloaded(self, node: str, id: str) -> None:
        """Check that a copy without a claim, by a node that was cut off, stays until another one is
        loaded: one that loads may fail."""
        world, one, model = self._world, self._world.nodes[node], self._models.get(id)
        away = world.store.away or world.store.errors or world.store.slow_s or world.is_emptied
        if one.node is None or model is None or away or node in world.store.cut or world.split:
            return
        if world.loop.time() - self._restored_s < MISSED_S:
            return  # claims of an older state of the store are not given up yet
        decisions = one.node._log.of(id)
        if not decisions or not decisions[-1].why.startswith(CLAIM_GONE):
            return
        what = f"{node} unloads {id}, which no other node has loaded"
        world.check(bool(self._alive_lately().intersection(model.loaded)), what)

    def drained(self, one: "SimulatedNode") -> None:
        """Check a graceful stop: models used lately that only this node held are elsewhere."""
        world = self._world
        others = [i for i in world.instances().values() if i.id != one.name and not i.stopping]
        if not others or world.store.away or world.store.cut or world.split or world.corrupt:
            return
        calm = not self._recent(CALM_S / 3) and world.slow == 1.0
        if not calm or min(self._free_lately(i.id) / i.capacity_bytes for i in others) < ROOM:
            return
        alive, now = {i.id for i in others}, world.loop.time()
        held = {id for host in one.hosts for id in host.resident}
        # uses of the last moment are not reported yet
        used = {id for id in held if any(2 < now - at < 30 for at, _ in self._asked.get(id, ()))}
        models = world.models()
        alone = [id for id in sorted(used) if id in models and not alive & {*models[id].copies}]
        world.check(not alone, f"{one.name} has stopped, and no other node has {alone[:5]}")

    # -- each transaction

    def written(self, life: "Life | None", ops: "Sequence[Op]") -> None:
        """Check the changes of a transaction."""
        self._note_free()
        models = {}
        for op in ops:
            if not isinstance(op, Put | Delete):
                continue
            if op.key.startswith(MODELS):
                id = op.key.removeprefix(MODELS)
                before = self._models.get(id)
                if isinstance(op, Delete):
                    self._models.pop(id, None)
                    continue
                after = self._models[id] = models[id] = msgspec.json.decode(
                    op.value, type=MeshModel
                )
                if life is not None and before is not None and not self._world.is_emptied:
                    self._changed(life, before, after)
        for op in ops:
            if isinstance(op, Put) and op.key.startswith(VMODELS):
                vmodel = msgspec.json.decode(op.value, type=VModel)
                known = self._vmodels.get(vmodel.id)
                self._vmodels[vmodel.id] = vmodel
                if known is None or known.active == vmodel.active:
                    continue
                if not self._world.is_emptied:
                    self._switched(known, vmodel)

    def _alive(self, model: MeshModel) -> list[str]:
        instances = self._world.instances()
        return [i for i in model.copies if i in instances]

    def _changed(self, life: "Life", before: MeshModel, after: MeshModel) -> None:
        me = life.name
        if me in after.copies and me not in before.copies:
            self._claimed(life, before, after)
        if me in before.copies and me not in after.copies:
            self._given_up(life, before, after)

    def _claimed(self, life: "Life", before: MeshModel, after: MeshModel) -> None:
        world, me, id = self._world, life.name, after.id
        if not (world.clocks or after.copies[me].loaded_ms):
            left_ms = self._blocked(before).get(me, 0)
            world.check(left_ms <= 0, f"{me} tries to load {id} again {left_ms} ms too early")
            blaming = self._blaming(before)  # loads that began before the second may still fail
            what = f"{me} tries to load {id}, whose artifact {blaming} have found invalid"
            world.check(len(blaming) < BELIEVED, what)
        if after.copies[me].loaded_ms:
            node = world.nodes[me].node
            loader = node.joined.loader if node is not None else None
            # while a load waits for its claim, a slow store may still write an older claim
            is_false = (
                loader is not None
                and loader.is_loading(id)
                and (id in loader.cache or not world.store.slow_s)
            )
            world.check(not is_false, f"{me} claims {id} as loaded while its load runs")
            within_s = CLAIMED_S + SLOW_CALLS * world.store.slow_s
            world.loop.call_later(within_s, self._check_claim, world.nodes[me], id)
        alive = self._alive(after)
        world.check(
            len(alive) <= self._copies_max(after),
            f"{id} has copies in {alive}, and only {self._copies_max(after)} have a reason",
        )
        if not before.copies and me not in before.failures:
            self._placed(me, after)

    def _check_claim(self, one: "SimulatedNode", id: str) -> None:
        """Check that a copy that was said to be loaded is there, or is not said to be any more."""
        model = self._models.get(id)
        if one.life.over or self._world.store.away or one.node is None or model is None:
            return
        is_held = id in one.node.joined.loader.cache or one.node.joined.loader.is_loading(id)
        self._world.check(
            is_held or one.name not in model.loaded,
            f"{one.name} has claimed {id} as loaded, and does not hold it",
        )

    def _copies_max(self, model: MeshModel) -> int:
        """Return how many copies a model may have for known reasons."""
        world = self._world
        least = max(1, model.policy.copies_min)
        recently = world.loop.time() - self._disturbed_s < CALM_S
        is_busy = self._was_busy(model)
        is_target = any(model.id in (v.active, v.target) for v in self._vmodels.values())
        is_regular = world.loop.time() > 6 * 60
        if recently or is_busy or is_target or is_regular:
            return len(world.nodes)
        return least + sum(i.stopping for i in world.instances().values())

    def _was_busy(self, model: MeshModel) -> bool:
        """Return whether some round of rates, of the last ones, may have seen many queries."""
        settings = self._world.plan.settings
        first_s = self._world.loop.time() - 4 * settings.rate_s - 2
        asked = [at for at, _ in self._asked.get(model.id, ()) if at > first_s]
        many = max(2, int(0.6 * settings.rate_per_copy * settings.rate_s / 60))
        return any(
            last - first < settings.rate_s + 1
            for first, last in zip(asked, asked[many - 1 :], strict=False)
        )

    def _placed(self, me: str, after: MeshModel) -> None:
        """Check where a first copy goes: not to a full node while others are nearly empty."""
        world, instances = self._world, self._world.instances()
        if world.loop.time() - self._disturbed_s < CALM_S or after.failures or world.store.cut:
            return
        mine = instances.get(me)
        size = after.size_bytes or world.plan.typical_bytes
        node = world.nodes[me].node
        if mine is None or node is None or mine.free_bytes >= size:
            return
        loading = sum(
            one.size_bytes
            for id, one in node.joined.loader.cache.items()
            if one.loading and id != after.id
        )
        if self._free_before(me, after.id) + loading >= size:
            return  # loads that were sent there at the same time have taken the room
        if max(self._free.get(me, (size,))) >= size:
            return  # not full for long: the load may have waited for others
        empty = [
            i.id
            for i in instances.values()
            if i.id != me
            and not i.stopping
            and not world.nodes[i.id].leaving
            and i.id not in self._suspects
            # by its record, by what it knows itself if it is the node that chooses, and not only
            # since it was asked, and had refused
            and min(i.free_bytes, self._free_lately(i.id), *list(self._free.get(i.id, ()))[-1:])
            > max(2 * size, ROOM * i.capacity_bytes)
        ]
        world.check(not empty, f"{after.id} is loaded on {me}, which is full, and {empty} are not")

    def _note_free(self) -> None:
        """Note the memory that each node has free now, whatever its record says."""
        now = self._world.loop.time()
        for name, one in self._world.nodes.items():
            noted = self._free_here.setdefault(name, deque())
            free = one.node.joined.loader.cache.free_bytes if one.node is not None else 0
            noted.append((now, free))
            while now - noted[0][0] > REFUSED_S:
                noted.popleft()

    def _note_refusals(self) -> None:
        """Note which nodes have refused a load for want of memory."""
        for name, one in self._world.nodes.items():
            loads = one.node.joined.loader.counts.loads if one.node is not None else {}
            count = loads["refused"].value if loads else 0
            if count > self._refusals[name]:
                self._refused_s[name] = self._world.loop.time()
            self._refusals[name] = count

    def _free_lately(self, me: str) -> int:
        """Return the least memory that a node had free since loads may have been refused there."""
        return min(free for _, free in self._free_here[me])

    def _free_before(self, me: str, id: str) -> int:
        """Return the memory that was free before a node made room for a model: what it evicts is
        unloaded after the claim.
        """
        life = self._world.nodes[me]
        assert life.node is not None
        cache = life.node.joined.loader.cache
        held = {one: size for host in life.hosts for one, size in host.resident.items()}
        held |= {one: entry.size_bytes for one, entry in cache.items() if one != id}
        return cache.capacity_bytes - sum(held.values())

    def _given_up(self, life: "Life", before: MeshModel, after: MeshModel) -> None:
        world, me, id = self._world, life.name, after.id
        if not before.copies[me].loaded_ms:
            failed_s = self._failed.pop((me, id), -1.0)
            if failed_s >= 0 and world.loop.time() - failed_s < WRITTEN_S:
                what = f"a failed load of {id} on {me} is not written to the store"
                world.check(me in after.failures, what)
            return
        if me in after.failures or world.nodes[me].leaving:
            return
        one = world.nodes[me]
        host_died = not all(host.is_ready.is_set() for host in one.hosts)
        again = one.node is not None and one.node.joined.loader.is_loading(id)
        if one.node is None or id not in one.node.joined.loader.held:  # it makes room
            world.check(
                not after.policy.pinned or host_died or again or self._recent(CALM_S),
                f"{me} unloads {id}, which is pinned",
            )
            return
        rest = [i for i in self._alive(after) if after.copies[i].loaded_ms]
        world.check(bool(rest), f"the last copy of {id} was unloaded as a spare one")
        rate, most = self.rate(after, known=True), HOT * world.plan.settings.rate_per_copy
        world.check(
            rate <= most * max(len(rest), 1),
            f"a copy of {id} was unloaded at {rate:.0f} queries a minute",
        )
        if not self._recent(CALM_S):
            world.check(
                min(i.free_bytes / i.capacity_bytes for i in world.instances().values()) < ROOM,
                f"a spare copy of {id} was unloaded while each node has free memory",
            )

    def _recent(self, seconds: float) -> bool:
        return self._world.loop.time() - self._disturbed_s < seconds

    def _switched(self, before: VModel, after: VModel) -> None:
        """Check that a switch loses no query: the target is loaded if the active model was."""
        old, new = self._models.get(before.active), self._models.get(after.active)
        if old is None or new is None or after.force or after.active == before.previous:
            return
        if self._world.store.slow_s or self._recent(LOOK_S):
            return  # whoever held the target may have died since the decision was made
        had = [i for i in self._alive(old) if old.copies[i].loaded_ms]
        has = self._alive_lately().intersection(new.loaded)
        self._world.check(
            not had or bool(has), f"{after.id} switches to {new.id}, which is not loaded"
        )

    def _alive_lately(self) -> set[str]:
        """Return the nodes that are alive, and those that were when something was decided that is
        done now."""
        now_s = self._world.loop.time()
        lately = {i for i, seen_s in self._seen_s.items() if now_s - seen_s <= LOOK_S}
        return lately.union(self._world.instances())

    def _blocked(self, model: MeshModel) -> dict[str, int]:
        """Return the nodes that do not try a model now, since it failed there, and for how many ms.

        A failure counts as over if the clock of its node was far ahead.
        """
        now_ms, longest_ms = self._world.now_ms, 2000 * self._world.plan.settings.failure_s
        left = {i: f.time_ms + self._block_ms(f) - now_ms for i, f in model.failures.items()}
        return {i: left_ms for i, left_ms in left.items() if 0 < left_ms <= longest_ms}

    def _blaming(self, model: MeshModel) -> list[str]:
        """Return the nodes of `_blocked` where the artifact was at fault."""
        failures = model.failures
        return [
            i
            for i in self._blocked(model)
            if failures[i].fault == "artifact" and not failures[i].crashed
        ]

    def _has_failed(self, model: MeshModel) -> bool:
        """Return whether no node tries a model now, whether it failed there or not."""
        blocked = self._blocked(model)
        return (
            len(self._blaming(model)) >= BELIEVED
            or len(blocked) >= self._world.plan.settings.tries
            or any(model.failures[i].crashed for i in blocked)
        )

    def _block_ms(self, failure: Failure) -> int:
        longest = self._world.plan.settings.failure_s * 1000
        if failure.fault == "artifact" and not failure.crashed:
            return int(longest)
        return int(min(longest, longest / 60 * 2 ** (failure.count - 1)))

    def rate(self, model: MeshModel, seconds: float = 0.0, *, known: bool = False) -> float:
        """Return the queries a minute, over three rounds of rates. known: without those of
        processes that have ended, which took their counts with them."""
        window_s = seconds or 3 * self._world.plan.settings.rate_s
        count, now = 0, self._world.loop.time()
        for at, life in reversed(self._asked.get(model.id, ())):
            if now - at >= window_s:
                break
            count += not known or (life is not None and not life.over)
        return count * 60 / window_s

    # -- looked at each second

    def _look(self) -> None:
        world = self._world
        self._note_free()
        self._note_refusals()
        self._seen_s |= dict.fromkeys(world.instances(), world.loop.time())
        away = world.store.away or world.store.errors or world.store.slow_s or world.is_emptied
        if not (away or world.store.cut or world.split or world.clocks) and world.instances():
            self._look_at_models()
            self._look_at_names()
            self._look_at_nodes()
        world.loop.call_later(LOOK_S, self._look)

    def _hold(
        self, law: str, whom: str, holds: bool, within_s: float, what: str, *values: object
    ) -> None:
        if holds:
            self._due.pop((law, whom), None)
            return
        self._due[law, whom] += 1
        since_s = self._due[law, whom] * LOOK_S
        if since_s > within_s:
            self._world.check(False, f"{what.format(*values)} for {since_s:g} s")

    def _look_at_models(self) -> None:
        world, settings = self._world, self._world.plan.settings
        instances = world.instances()
        round_s = ROUNDS * settings.reaper_s + 2 * settings.lease_s + 2
        for id, model in world.models().items():
            gone = [i for i in model.copies if i not in instances]
            what = "the store has claims of {} by {}, which have ended,"
            self._hold("claims of ended nodes", id, not gone, round_s, what, id, gone)
            stale = [
                i
                for i, failure in model.failures.items()
                if world.now_ms - failure.time_ms > 1000 * settings.failure_s
            ]
            what = "failures of {} on {}, which are over, stay in the store"
            self._hold("old failures", id, not stale, round_s, what, id, stale)
            rate = self.rate(model)
            enough = rate < HOT * settings.rate_per_copy or not self._has_one_copy(model)
            what = "{} has one copy at {:.0f} queries a minute"
            self._hold("copies by rate", id, enough, 10 * settings.rate_s, what, id, rate)
            alive, least = len(model.copies) - len(gone), model.policy.copies_min
            kept = alive >= least or bool(model.failures) or not self._has_room(model)
            within_s = (1 + ROUNDS) * settings.reaper_s + 2 * settings.lease_s
            what = "{} has {} of the {} copies of its policy"
            self._hold("copies of the policy", id, kept, within_s, what, id, alive, least)

    def _has_one_copy(self, model: MeshModel) -> bool:
        """Return whether one live node has it loaded, and others could: not where it has failed, or
        loads are refused for want of memory."""
        instances = self._world.instances()
        since_s = self._world.loop.time() - REFUSED_ROUNDS * self._world.plan.settings.rate_s
        refusing = {name for name, at_s in self._refused_s.items() if at_s > since_s}
        loaded = [i for i, c in model.copies.items() if c.loaded_ms and i in instances]
        no_place = {*loaded, *self._blocked(model), *refusing}
        others = [i for i in instances.values() if i.id not in no_place and not i.stopping]
        return len(loaded) == 1 and bool(others) and not self._has_failed(model)

    def _has_room(self, model: MeshModel) -> bool:
        """Return whether a node without a copy has much memory for it."""
        size = self._world.size_of(model.id)
        return any(
            i.id not in model.copies
            and not i.stopping
            and i.free_bytes > max(2 * size, ROOM * i.capacity_bytes)
            for i in self._world.instances().values()
        )

    def _look_at_names(self) -> None:
        world = self._world
        for vmodel in world.vmodels().values():
            ready = vmodel.active == vmodel.target or vmodel.failed or vmodel.share
            whom = f"{vmodel.id} {vmodel.target}"
            within_s = SWITCH_LOADS * world.plan.settings.load_s
            what = "{} has not switched to {}"
            self._hold("switches", whom, bool(ready), within_s, what, vmodel.id, vmodel.target)

    def _look_at_nodes(self) -> None:
        world, settings = self._world, self._world.plan.settings
        models = world.models().values()
        for id, told in world.instances().items():
            node = world.nodes[id].node
            self._free.setdefault(id, deque(maxlen=4)).append(told.free_bytes)
            if node is None or not world.nodes[id].ready:
                continue
            if not self._recent(CALM_S):
                here = {held for host in world.nodes[id].hosts for held in host.resident}
                loading = node.joined.loader.is_loading
                said = [m for m in models if id in m.copies and m.id not in here]
                missed = [m.id for m in said if m.copies[id].loaded_ms]
                for model in missed:
                    what = "the store says that {} is loaded on {}, where it is not,"
                    whom = f"{id} {model}"
                    self._hold("missing copies", whom, loading(model), MISSED_S, what, model, id)
                for law, whom in [key for key in self._due if key[0] == "missing copies"]:
                    if whom.startswith(f"{id} ") and whom.partition(" ")[2] not in missed:
                        del self._due[law, whom]
            differs = abs(told.used_bytes - node.joined.loader.cache.used_bytes)
            known = differs < SEEN_WRONG * max(told.capacity_bytes, 1)
            what = "the memory in use in the record of {} is wrong by {} bytes"
            self._hold("records of nodes", id, known, 20 * settings.publish_s, what, id, differs)

    # -- at the end

    def agree(self) -> None:
        """Check that store, memory and hosts agree."""
        world = self._world
        instances = world.instances()
        models = world.models()
        for one in world.nodes.values():
            if one.name in world.gone:
                continue
            world.check(one.ready and one.name in instances, f"{one.name} is not in the mesh")
            if not one.ready or one.node is None:
                continue
            loader = one.node.joined.loader
            here = {id for host in one.hosts for id in host.resident}
            said = {id for id, m in models.items() if one.name in m.loaded}
            world.check(
                here == said,
                f"{one.name} holds {sorted(here - said)[:5]}, which are not written to the store,"
                f" and does not hold {sorted(said - here)[:5]}, which are",
            )
            world.check(
                here == {*loader.held},
                f"loader and hosts of {one.name} differ in {sorted({*loader.held} ^ here)[:5]}",
            )
            used = sum(world.size_of(id) for id in here)
            world.check(
                used <= loader.cache.capacity_bytes,
                f"{one.name} uses {used} bytes of {loader.cache.capacity_bytes}",
            )
            pinned = [id for id, m in models.items() if m.policy.pinned and not m.copies]
            world.check(not pinned, f"{pinned} are pinned, and have no copy")
        for model in models.values():
            gone = [i for i in model.copies if i not in instances]
            world.check(not gone, f"the store has claims of {model.id} by {gone}, which have ended")
