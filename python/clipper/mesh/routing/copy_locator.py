"""Search for a copy that serves a queried model: a loaded one that is lent, or a new load.

A query of a model without a replica waits in its queue, and `miss` is called once. Until a copy has
connected, or no query waits any more, the search sends the query to the holders of the model, else
has it loaded where placement chooses, else pauses and tries again. An instance that fails is left
out of the rest of the search. Threads: all on the event loop of the node.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import Final

from clipper.component import Tasks
from clipper.errors import ClipperError
from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.decisions import failures, placement
from clipper.mesh.decisions.claims import alive_copies, loaded_copies
from clipper.mesh.loading.loader import ModelLoader, NotLoadedHere
from clipper.mesh.loading.record_writer import RunBlocking
from clipper.mesh.node_host import NodeHost
from clipper.mesh.records import FAULTS, Instance, MeshModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.routing.router import Route
from clipper.mesh.transport.channel import NOT_LOADED_HERE, ConnectionLost, RequestFailed
from clipper.mesh.transport.peers import Peers
from clipper.settings.mesh import MeshSettings
from clipper_container.backoff import Backoff

ATTACH_S: Final = 2.0  # from a host's connection until the engine has attached it
PAUSE_S_MIN, PAUSE_S_MAX = 0.01, 1.0
CHECK_S: Final = 0.02  # between looks at the registry while other instances load


@dataclass(slots=True)
class _Search:
    """A search for a copy.

    began_s: by the clock of the loop. forecast_ms: of the load, if there is to be one here; None:
    there is a copy, or a load that was begun for another reason. attached: set when a copy has
    connected.
    """

    began_s: float
    forecast_ms: float | None
    attached: asyncio.Event = field(default_factory=asyncio.Event)


class CopyLocator:
    """Makes a copy of each queried model serve this node.

    here: returns this node's record.  host: the server, to which copies connect.  find_route:
    returns the route of a model, if there is one.  fail_queries: called with a route and a number
    of seconds in which no replica will connect.  constraints: returns the placement constraints.
    """

    def __init__(
        self,
        loader: ModelLoader,
        peers: Peers,
        registry: Registry,
        settings: MeshSettings,
        run_blocking: RunBlocking,
        tasks: Tasks,
        log: DecisionLog,
        here: Callable[[], Instance],
        host: NodeHost,
        find_route: Callable[[str], Route | None],
        fail_queries: Callable[[Route, float], None],
        constraints: Callable[[], placement.Constraints] = dict,
        rng: Random | None = None,
    ) -> None:
        self._loader, self._peers, self._registry, self._settings = (
            loader,
            peers,
            registry,
            settings,
        )
        self._run_blocking, self._tasks = run_blocking, tasks
        self._log = log
        self._here = here
        self._host = host
        self._find_route, self._fail_queries = find_route, fail_queries
        self._constraints = constraints
        self._rng = rng or Random()
        self._searches: dict[str, _Search] = {}
        self._failed: set[str] = set()  # models whose loads failed; not tried again yet
        self._quarantine = failures.Quarantine()
        self.misses = 0

    # -- events

    def miss(self, route: Route) -> None:
        """Start a search for a copy, unless one is running: a query waits for one."""
        if route.id not in self._searches and not self._loader.closed:
            loader, id = self._loader, route.id
            is_there = id in loader.held or loader.is_loading(id)
            self._searches[id] = _Search(
                asyncio.get_running_loop().time(), None if is_there else loader.forecast_ms(id)[1]
            )
            self.misses += 1
            self._tasks.spawn(self._search(route))

    def connected(self, route: Route) -> None:
        """End the search: a copy serves the model now."""
        search, loader = self._searches.get(route.id), self._loader
        if search is None or search.attached.is_set():
            return
        search.attached.set()
        if search.forecast_ms is not None and (
            loader.is_loading(route.id) or route.id in loader.held
        ):
            took_ms = (asyncio.get_running_loop().time() - search.began_s) * 1000
            loader.pace.correct(took_ms - search.forecast_ms)

    def forget(self, id: str) -> None:
        """Drop what is remembered of a model that is no longer registered."""
        self._failed.discard(id)

    def _retry(self, id: str) -> None:
        """Clear the route's failure so that loading is retried."""
        route = self._find_route(id)
        if route is None:  # unregistered meanwhile
            return
        self._failed.discard(id)
        route.miss_reported = False
        if route.core.waiting:
            self.miss(route)

    # -- search for one model

    async def _search(self, route: Route) -> None:
        attached = self._searches[route.id].attached
        backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX, rng=self._rng)
        exclude: dict[str, bool] = {}  # instances that failed; True: could not be reached
        first = True
        try:
            while not route.served and (first or self._is_wanted(route)):
                record = await self._read(route.id, first)
                first = False
                # one more, should it be replaced again, in the next round
                route = route.successor or route
                if record is None or self._has_failed(route, record):
                    return
                try:
                    if await self._from_holders(route, record, exclude) or await self._placed(
                        route, record, exclude
                    ):
                        await _within(attached.wait(), ATTACH_S)
                        continue
                except ClipperError as error:  # for example, the store is away
                    route.why = error.message
                exclude = {} if backoff.is_longest else exclude
                await _within(attached.wait(), backoff.next_s())
        finally:
            del self._searches[route.id]
            route = route.successor or route
            route.miss_reported = route.id in self._failed

    def _is_wanted(self, route: Route) -> bool:
        return bool(route.core.waiting) or now_ms() - route.used_ms < self._settings.deadline_ms

    async def _read(self, id: str, first: bool) -> MeshModel | None:
        known: MeshModel | None = self._registry.models.get(id)
        if known is not None and first:
            return known
        found: MeshModel | None = await self._run_blocking(self._registry.read, id)
        return found

    def _has_failed(self, route: Route, record: MeshModel) -> bool:
        """Fail the queries of a model that was tried often enough, until it may be retried."""
        if loaded_copies(record, self._registry.alive()):
            return False
        failed = failures.verdict(record, now_ms(), self._settings, len(self._registry.alive()))
        if failed is None:
            return False
        route.why = f"it could not be loaded: {failed.why}"
        self._log.note(route.id, "given up for now", failed.why)
        self._failed.add(route.id)
        seconds = max(0.05, (failed.retry_ms - now_ms()) / 1000)
        self._fail_queries(route, seconds)
        asyncio.get_running_loop().call_later(seconds, self._retry, route.id)
        return True

    async def _from_holders(
        self, route: Route, record: MeshModel, exclude: dict[str, bool]
    ) -> bool:
        """Query the instances that hold or load the model; True once one serves this node."""
        alive = self._registry.alive()
        holders = [i for i in loaded_copies(record, alive) if i not in exclude]
        self._rng.shuffle(holders)
        loading = [i for i in record.copies if i in alive and i not in holders and i not in exclude]
        me = self._loader.me
        for instance in sorted(holders, key=lambda i: i != me) + loading:
            if await self._lent(route, instance, exclude, load=instance in loading):
                return True
        return False

    async def _placed(self, route: Route, record: MeshModel, exclude: dict[str, bool]) -> bool:
        """Load the model where placement says; True once that copy serves this node.

        Holders that cannot be reached count as dead: a further copy is allowed. A holder that was
        reached and refused, because it did not hold the model then, counts as a copy.
        """
        unreachable = sum(
            exclude.get(i, False) for i in loaded_copies(record, self._registry.alive())
        )
        choice = self.choose(record, exclude, route.used_ms)
        if isinstance(choice, placement.NoPlacement):
            newest = max(
                record.failures.values(), key=lambda failure: failure.time_ms, default=None
            )
            route.why = choice.why if newest is None else f"it could not be loaded: {newest.why}"
            self._log.note(route.id, "no place for it", choice.why)
            return False
        self._log.note(route.id, f"placed in {choice.instance}", choice.why)
        return await self._lent(route, choice.instance, exclude, load=True, copies=1 + unreachable)

    def choose(
        self, record: MeshModel, exclude: Collection[str], used_ms: int, prefer_local: bool = True
    ) -> placement.Placement | placement.NoPlacement:
        """Choose an instance for one more copy."""
        here, now = self._here(), now_ms()
        others = [i for i in self._registry.instances.values() if i.id != here.id]
        return placement.choose(
            record,
            [*others, *([] if self._registry.is_fenced else [here])],
            now,
            self._rng,
            constraints=self._constraints(),
            exclude={*exclude, *failures.blocked(record, now, self._settings)},
            seen=self._loader.times,
            prefer_local=here.id if prefer_local else "",
            avoid=self._quarantine.left_alone(now),
            used_ms=used_ms,
        )

    async def _lent(
        self, route: Route, instance: str, exclude: dict[str, bool], *, load: bool, copies: int = 1
    ) -> bool:
        """Have an instance serve this node, after loading the model there if `load`.

        copies: greatest number of copies with the new one.
        """
        address = self._host.address
        token = self._host.token_of(route.id, instance)
        limit_s = self._settings.load_s + 30.0 if load else 12.0
        try:
            if instance == self._loader.me:
                if load:
                    wanted = functools.partial(self._is_wanted, route)
                    await self._loader.load(
                        route.id, route.used_ms, waiting=True, copies=copies, wanted=wanted
                    )
                await self._loader.lend(route.id, address, token)
            else:
                request = {"model": route.id, "address": address, "token": token, "load": load}
                await self._peers.request(
                    instance, "lend", limit_s, **request, used_ms=route.used_ms, copies=copies
                )
        except RequestFailed as failure:
            self._log.note(route.id, f"not by {instance}", failure.why)
            if failure.fault == NOT_LOADED_HERE:
                return False
            exclude[instance] = isinstance(failure, ConnectionLost) and instance != self._loader.me
            route.why = failure.why
            fault = FAULTS.get(failure.fault)
            if load and fault is not None and not isinstance(failure, ConnectionLost):
                self._quarantine.failed(instance, route.id, fault, now_ms())
            return False
        self._quarantine.loaded(instance)
        return True

    # -- loads for other purposes than a query

    async def load(
        self,
        id: str,
        used_ms: int,
        *,
        copies: int = 1,
        until_s: float = 60.0,
        exclude: Collection[str] = (),
    ) -> None:
        """Load copies until `copies` are loaded.

        RequestFailed; NotLoadedHere when the model is no longer registered; TimeoutError.
        """
        tried = set(exclude)
        async with asyncio.timeout(until_s):
            for attempt in itertools.count():
                # what has just left there, the mirror may not know
                record = await self._read(id, not attempt and not exclude)
                if record is None:
                    raise NotLoadedHere(f"no model {id!r} is registered")
                alive = self._registry.alive()
                if len(loaded_copies(record, alive)) >= copies:
                    return
                if (
                    failed := failures.verdict(record, now_ms(), self._settings, len(alive))
                ) is not None:
                    raise RequestFailed(failed.why, failed.fault)
                is_claimed = len(alive_copies(record, alive)) >= copies
                if is_claimed or not await self._load_once(record, used_ms, copies, tried):
                    await asyncio.sleep(CHECK_S)

    async def _load_once(
        self, record: MeshModel, used_ms: int, copies: int, tried: set[str]
    ) -> bool:
        choice = self.choose(record, tried, used_ms, prefer_local=False)
        if isinstance(choice, placement.NoPlacement):
            if not choice.retry_ms or tried:
                raise RequestFailed(choice.why, "none")
            await asyncio.sleep(min(choice.retry_ms / 1000, PAUSE_S_MAX))
            return False
        self._log.note(record.id, f"placed in {choice.instance}", choice.why)
        try:
            if choice.instance == self._loader.me:
                await self._loader.load(record.id, used_ms, waiting=False, copies=copies)
            else:
                request = {"model": record.id, "used_ms": used_ms, "copies": copies}
                await self._peers.request(
                    choice.instance, "load", self._settings.load_s + 30.0, **request
                )
        except RequestFailed as failure:
            self._log.note(record.id, f"not by {choice.instance}", failure.why)
            if failure.fault == NOT_LOADED_HERE:
                return False
            tried.add(choice.instance)
        return True

    # -- additional copies

    async def use_all(self, route: Route, record: MeshModel, lenders: Collection[str]) -> None:
        """Have all holders of a model serve this node."""
        for instance in loaded_copies(record, self._registry.alive()):
            if instance not in lenders:
                await self._lent(route, instance, {}, load=False)


async def _within(waiting: "asyncio.Future[object] | object", timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await waiting  # type: ignore[misc]
    except TimeoutError:
        pass
