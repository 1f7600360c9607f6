"""Loading, eviction and lending of the models of this node.

Each load is claimed in the registry before it begins, and then completed, failed or released there,
so the other nodes know of every copy. decisions/model_cache.py decides what is evicted,
decisions/load_queue.py what loads next. Threads: all on the event loop of the node; calls that
block on the store run elsewhere.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

import msgspec

from clipper.component import Tasks
from clipper.errors import ClipperError, StoreError, UnknownModel
from clipper.mesh.decisions import claims, failures
from clipper.mesh.decisions.load_queue import LoadPace, LoadQueue, LoadTimes, QueuedLoad
from clipper.mesh.decisions.model_cache import Eviction, ModelCache, NoRoom
from clipper.mesh.loading.isolation import Isolation
from clipper.mesh.loading.model_host import HostDied, LoadResult, ModelHost
from clipper.mesh.loading.record_writer import RecordWriter, RunBlocking
from clipper.mesh.records import FAULTS, MeshModel
from clipper.mesh.registry import CopiesStep, Registry, now_ms
from clipper.mesh.transport.channel import NOT_LOADED_HERE, ConnectionLost, RequestFailed
from clipper.metrics import MeshCounts
from clipper.settings.mesh import MeshSettings

UNLOAD_S: Final = 120.0  # for the batches of a model that is unloaded
SERVE_S: Final = 10.0
SIZE_S: Final = 0.5  # for an estimate of a size
HOST_S: Final = 10.0  # for a model host that is started again, before a load in it fails
CLAIMS_AHEAD: Final = 8  # loads that may be claimed before they have a place
AHEAD_MS: Final = 50.0  # a load that cannot have a place within this time is not claimed yet
CHURN: Final = 10.0  # times the mean load time: newer models are not evicted
CLAIM_GONE: Final = "its claim was gone"
_log = logging.getLogger(__name__)
Note = Callable[[str, str, str], None]


class NotLoadedHere(RequestFailed):
    """Refusal to load a model that others hold, or that may not be loaded here now.

    The caller reads the record again.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why, NOT_LOADED_HERE)


class ModelCrashed(RequestFailed):
    """The model has ended a model host in which it was alone."""

    def __init__(self, why: str) -> None:
        super().__init__(why, "artifact")


@dataclass(slots=True)
class LoadedCopy:
    """A copy that is loaded here. lent: addresses of the servers that it serves, with tokens."""

    record: MeshModel
    host: ModelHost
    loaded_ms: int
    concurrency: int = 1
    lent: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Job:
    """A load in progress or in the queue.

    copies: greatest number of copies with this one; 0: it was claimed before, and is loaded again.
    started: it has left the queue. placed: it has, or had, one of the `loading_max` places.
    since_s: when it began, or took its place, by the clock of the loop; None: before that, and
    once its load has ended. ready_ms: wall clock time at which it will be loaded, as forecast when
    it was queued. wanted: returns whether a request still waits for it; None: it is loaded in any
    case. dropped: why the copy may not stay, since the load began; empty: it may.
    """

    copies: int
    done: "asyncio.Future[None]"
    why: str = ""
    started: bool = False
    placed: bool = False
    since_s: float | None = None
    ready_ms: float = 0.0
    wanted: Callable[[], bool] | None = None
    dropped: str = ""


class ModelLoader:
    """Loads, evicts and lends the models of this node.

    me: this instance's id.  number: the replica number of the copies that it lends.
    capacity_bytes: memory for models; see `refresh_capacity`.  run_blocking: runs a function that
    blocks in another thread.  note: records (model, event, reason) for `explain`.  isolation:
    places models that may have crashed a host in hosts of their own; None: never.  on_evicted:
    called with the record and the last use of a model that made room for another.
    """

    def __init__(
        self,
        me: str,
        number: int,
        registry: Registry,
        settings: MeshSettings,
        hosts: Sequence[ModelHost],
        capacity_bytes: int,
        run_blocking: RunBlocking,
        tasks: Tasks,
        note: Note = lambda *_: None,
        isolation: Isolation | None = None,
        on_evicted: Callable[[MeshModel, int], None] = lambda *_: None,
    ) -> None:
        self.me, self.number = me, number
        self._registry, self._settings, self._hosts = registry, settings, hosts
        self._run_blocking, self._tasks, self._note = run_blocking, tasks, note
        self._records = RecordWriter(registry, run_blocking, tasks)
        self._isolation, self._on_evicted = isolation, on_evicted
        self.cache = ModelCache(capacity_bytes, models_max=settings.loaded_max)
        self.queue = LoadQueue(settings.queue_max)
        self.times, self.pace = LoadTimes(settings.load_s), LoadPace()
        self.evicted_worth = -math.inf  # of the last model that was evicted for another
        self.held: dict[str, LoadedCopy] = {}
        self._jobs: dict[str, _Job] = {}
        self._finishing: dict[str, ModelHost] = {}  # loaded, and being written to the registry
        self.loading = 0  # left the queue, and have not ended their loads
        self._placed = 0
        self._turns: deque[tuple[_Job, asyncio.Future[None]]] = deque()  # they wait for a place
        # stopping: it refuses new loads. closed: `stop` has been called.
        self.stopping = self.closed = False
        self.counts = MeshCounts()

    def set_stopping(self, stopping: bool) -> None:
        """Refuse new loads, or accept them again."""
        self.stopping = stopping

    def refresh_capacity(self) -> None:
        """Set the memory for models to the configured size, or else to what the hosts report."""
        reported = sum(host.status.capacity_bytes for host in self._hosts)
        self.cache.capacity_bytes = self._settings.capacity_mib << 20 or reported

    @property
    def loading_max(self) -> int:
        """The number of models that may load at the same time."""
        return self._settings.loading_max or max(
            1, sum(host.status.loading_max for host in self._hosts)
        )

    @property
    def types(self) -> tuple[str, ...]:
        """The model types that the hosts can load."""
        return tuple(sorted({type for host in self._hosts for type in host.types}))

    def host_of(self, model: MeshModel) -> ModelHost:
        """Return the host for a model, chosen by its id so that models spread over the hosts."""
        return self._hosts[crc32(model.id.encode()) % len(self._hosts)]

    # -- loading

    async def load(
        self,
        id: str,
        used_ms: int,
        *,
        waiting: bool,
        copies: int = 1,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Load a model, and return when it is loaded.

        copies: greatest number of copies with this one. wanted: asked when the load could start;
        one that nobody waits for any more is dropped. RequestFailed; NotLoadedHere: others have it.
        """
        if id in self.held:
            return
        job = self._jobs.get(id)
        if job is None:
            job = self._enqueue(id, used_ms, waiting, copies)
            job.wanted = wanted
        else:
            job.wanted = None  # several want it
            if waiting:
                self.queue.promote(id, now_ms())
        await asyncio.shield(job.done)

    def is_loading(self, id: str) -> bool:
        """Return whether a load of the model runs or is queued."""
        return id in self._jobs

    def stage(self, id: str) -> str:
        """Return how far the load of a model has come. Threads: any."""
        if id in self.held:
            return "it is loaded, and connects"
        job = self._jobs.get(id)
        if job is None:
            return "no load of it runs here"
        if not job.started:
            return "its load waits in the queue"
        if not job.placed:
            return "its load waits for its claim, or a place"
        return "it is being loaded" if job.since_s is not None else "its load is being written"

    def _enqueue(self, id: str, used_ms: int, waiting: bool, copies: int, why: str = "") -> _Job:
        if self.stopping:
            raise RequestFailed(f"{self.me} is stopping", "none")
        job = self._new_job(id, copies, why)
        job.ready_ms = now_ms() + self._ready_ms()
        gone = self.queue.push(QueuedLoad(id, used_ms, now_ms(), waiting))
        if gone is not None:
            self._finish(
                gone.model,
                RequestFailed(f"{len(self.queue)} loads wait in {self.me}, as many as may", "none"),
            )
        self._pump()
        return job

    def _new_job(self, id: str, copies: int, why: str = "") -> _Job:
        job = self._jobs[id] = _Job(copies, asyncio.get_running_loop().create_future(), why)
        # avoid a warning if no one waits
        job.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        return job

    def _pump(self) -> None:
        places, slot_ms = self.loading_max, self.pace.slot_ms
        ahead = min(CLAIMS_AHEAD, int(places * AHEAD_MS / slot_ms)) if slot_ms else 0
        while (
            not self.closed
            and self.loading < places + ahead
            and (load := self.queue.pop()) is not None
        ):
            job = self._jobs[load.model]
            if load.waiting and job.wanted is not None and not job.wanted():
                self._finish(load.model, NotLoadedHere("no request waits for it any more"))
                continue
            self.loading += 1
            job.started, job.since_s = True, asyncio.get_running_loop().time()
            self._tasks.spawn(self._do(load, job))

    async def _take_place(self, job: _Job) -> None:
        """Wait for one of the `loading_max` places, unless the load has one."""
        if job.placed:
            return
        if self._placed < self.loading_max:
            self._place(job)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((job, turn))
        await turn

    def _place(self, job: _Job) -> None:
        self._placed += 1
        job.placed, job.since_s = True, asyncio.get_running_loop().time()

    def _free_place(self, job: _Job) -> None:
        """Note that a load has ended; its place goes to the load that has waited longest."""
        if job.since_s is None:
            return
        if job.placed:
            self.pace.add((asyncio.get_running_loop().time() - job.since_s) * 1000)
            self._placed -= 1
        job.since_s = None
        self.loading -= 1
        while self._turns and self._placed < self.loading_max:
            waiting, turn = self._turns.popleft()
            if not turn.done():  # its task was not cancelled
                self._place(waiting)
                turn.set_result(None)
        self._pump()

    def _wait_ms(self) -> float:
        return self.pace.wait_ms(self.queue.waiting + self.loading, self.loading_max)

    def _ready_ms(self) -> float:
        return self.pace.ready_ms(self.queue.waiting + self.loading, self.loading_max)

    def forecast_ms(self, id: str) -> tuple[float, float]:
        """Return the time until a load of a model could start, and until it would serve queries; 0
        and 0 when it is loading. Threads: any.
        """
        job = self._jobs.get(id)
        if job is None:
            return self._wait_ms(), self._ready_ms()
        if job.started:
            return 0.0, 0.0
        ready_ms = max(0.0, job.ready_ms - now_ms())
        return ready_ms, ready_ms

    def is_worth_loading(self, id: str) -> bool:
        """Return whether a model is used more than those that would be evicted for it. Threads:
        any.
        """
        record = self._registry.models.get(id)
        if record is None:
            return False
        size = record.size_bytes or self.host_of(record).status.default_size_bytes
        if self.cache.free_bytes >= size and len(self.cache) < self.cache.models_max:
            return True  # nothing would be evicted
        cost_ms = self.times.mean_ms(record.type)
        return self.cache.worth_if_loaded(id, size, cost_ms) >= self.evicted_worth

    async def _do(self, load: QueuedLoad, job: _Job) -> None:
        failure: RequestFailed | None = RequestFailed(f"{self.me} is stopping", "none")
        try:
            await self._load(load, job)
            failure = None
        except RequestFailed as failed:
            failure = failed
        except ClipperError as error:
            failure = RequestFailed(error.message, "none")
        except Exception as error:
            _log.exception("model %r could not be loaded", load.model)
            failure = RequestFailed(f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            self._free_place(job)
            self._finish(load.model, failure)
            raise
        self._free_place(job)
        self._finish(load.model, failure)

    def _finish(self, id: str, failure: RequestFailed | None) -> None:
        job = self._jobs.pop(id, None)
        if job is None or job.done.done():
            return
        if failure is None:
            job.done.set_result(None)
        else:
            self._note(id, "not loaded here", failure.why)
            job.done.set_exception(failure)

    async def _load(self, load: QueuedLoad, job: _Job) -> None:
        id, began_ms = load.model, now_ms()
        record = self._registry.models.get(id) or await self._run_blocking(self._registry.read, id)
        if record is None:
            raise NotLoadedHere(f"model {id!r} is registered no more")
        host = self.host_of(record)
        if record.type not in host.types:
            raise RequestFailed(
                f"no runtime of {self.me} opens type {record.type!r}; there are:"
                f" {', '.join(self.types)}",
                "none",
            )
        if "://" in record.path or not self._is_alone(record):
            await _until_ready(host)
        if "://" in record.path:
            await self._take_place(job)  # a pull may be long, and is part of the pace
        record, path = await self._pull(host, record)
        size = record.size_bytes or await self._guess(host, _at(record, path))
        self._room_for(size, load)  # a claim without room would be two writes for nothing
        claim = self._claim(record, job, size)
        leaving: list[LoadedCopy] = []
        try:
            record = _granted(await claim)
            await self._take_place(job)
            leaving += self._make_room(record, size, load)  # not before: nothing goes in vain
            host, found = await self._in_host(host, _at(record, path), leaving)
        except (Exception, asyncio.CancelledError) as error:
            self.cache.remove(id)
            for copy in leaving:
                self._tasks.spawn(self._unload(copy.host, copy.record.id))
            await self._release_alone(id)
            await self._not_loaded(record, error)
            raise
        self._free_place(job)
        self.times.add(record.type, found.took_ms)
        self.cache.churn_ms = min(
            CHURN * self.times.mean_ms(record.type), self._settings.load_s * 1000
        )
        size = found.size_bytes or size
        self._finishing[id] = host
        try:
            done = await self._records.change(
                id,
                lambda m: claims.completed(
                    m, self.me, now_ms(), size_bytes=size, input=found.input, output=found.output
                ),
            )
        except (Exception, asyncio.CancelledError) as error:  # unregistered, or the store is away
            self._finishing.pop(id, None)
            self.cache.remove(id)
            await self._unload(host, id)
            await self._not_loaded(record, error)
            raise
        if isinstance(done, MeshModel):
            self.cache.resize(id, size)
            await self._evict_excess(id)
        if self._finishing.pop(id, None) is None:
            ended = self._host_ended(id)
            self.cache.remove(id)
            await self._release_alone(id)
            await self._not_loaded(record, ended)
            raise ended
        if isinstance(done, claims.ClaimRefused) or job.dropped:
            refused = NotLoadedHere(job.dropped if isinstance(done, MeshModel) else done.why)
            self.cache.remove(id)
            await self._unload(host, id)
            if isinstance(done, MeshModel):  # the claim may be in a record that came after
                await self._not_loaded(done, refused)
            raise refused
        self.cache.loaded(id, size, now_ms=now_ms(), cost_ms=found.took_ms)
        self.cache.pin(id, record.policy.pinned)
        self.held[id] = LoadedCopy(done, host, now_ms(), found.concurrency)
        queued_ms = began_ms - load.since_ms
        self.counts.loaded(now_ms() - load.since_ms, queued_ms, found.took_ms, size)
        self._note(
            id,
            "loaded",
            f"{size} bytes in {found.took_ms:.0f} ms, after {queued_ms} ms in the queue{job.why}",
        )

    async def _pull(self, host: ModelHost, record: MeshModel) -> tuple[MeshModel, str]:
        """Pull a model whose path is a URL, before it is claimed; return its record and the path
        of its files here.

        The content that the first node of all finds is recorded; a pull that finds another fails.
        """
        if "://" not in record.path:
            return record, record.path
        try:
            found = await host.pull(record)
            if record.sha256 != found.sha256:

                def step(model: MeshModel) -> MeshModel:
                    return msgspec.structs.replace(model, sha256=model.sha256 or found.sha256)

                record = _granted(await self._records.change(record.id, step, lasting=True))
            if record.sha256 != found.sha256:  # another node was first, with other content
                found = await host.pull(record)
        except ConnectionLost:
            raise self._host_ended(record.id) from None
        except RequestFailed as failed:
            await self._not_loaded(record, failed)
            raise
        return record, found.path

    async def _guess(self, host: ModelHost, record: MeshModel) -> int:
        """Return an estimate of the size of a model that has never been measured."""
        with contextlib.suppress(RequestFailed, TimeoutError):
            async with asyncio.timeout(SIZE_S):
                return await host.predict_size(record) or host.status.default_size_bytes
        return host.status.default_size_bytes

    def _claim(
        self, record: MeshModel, job: _Job, size: int
    ) -> "asyncio.Future[MeshModel | claims.ClaimRefused]":
        """Start to claim a copy. RequestFailed when this node may claim none now."""
        if not job.copies:
            there = asyncio.get_running_loop().create_future()
            there.set_result(record)
            return there
        if self._registry.is_fenced:
            raise RequestFailed(f"{self.me} does not hold its lease", "none")
        if self._registry.other_history:  # what makes room now is not known to be wanted
            raise RequestFailed(self._registry.other_history, "none")
        return self._records.change_copies(record.id, self._claim_step(job, size))

    def _claim_step(self, job: _Job, size: int) -> CopiesStep:
        settings, me = self._settings, self.me

        def step(m: MeshModel, alive: Container[object]) -> MeshModel | claims.ClaimRefused:
            if me in m.copies:  # from a load whose end could not be written to the store
                return m
            return claims.claimed(
                m, me, now_ms(), alive=alive, copies=job.copies, settings=settings, size_bytes=size
            )

        return step

    def _room_for(self, size: int, load: QueuedLoad) -> Eviction:
        """Return what must be evicted before a load. Raises: RequestFailed without room."""
        room = self.cache.room_for(size, load.used_ms, now_ms(), waiting=load.waiting)
        if isinstance(room, NoRoom):
            self.counts.failed("refused")
            raise RequestFailed(f"{self.me} has no room: {room.why}", "none")
        return room

    def _make_room(self, record: MeshModel, size: int, load: QueuedLoad) -> list[LoadedCopy]:
        """Reserve the memory of a load; start to give up the claims of what is evicted for it.

        Returns the evicted copies; the host unloads them before it loads.
        """
        room = self._room_for(size, load)
        for id in room.evict:
            if (entry := self.cache.get(id)) is not None:
                self.evicted_worth = entry.worth
        leaving = [self._detach(id) for id in room.evict]
        self.cache.add(
            record.id, size, load.used_ms, now_ms(), loading=True, pinned=record.policy.pinned
        )
        found = []
        for id, copy, used_ms in leaving:
            if copy is not None:
                found.append(copy)
                released = self._give_up(id, copy, used_ms, f"to make room for {record.id}")
                released.add_done_callback(
                    lambda done, copy=copy, used_ms=used_ms: (
                        done.cancelled()  # type: ignore[misc]
                        or done.exception()
                        or self._on_evicted(copy.record, used_ms)
                    )
                )
        return found

    def _give_up(
        self, id: str, held: LoadedCopy, used_ms: int, why: str
    ) -> "asyncio.Future[MeshModel | claims.ClaimRefused]":
        """Start to release the claim of a copy that is to be unloaded."""
        self.counts.unloaded(now_ms() - (used_ms or held.loaded_ms))
        self._note(id, "unloaded", why)
        return self._records.change(
            id, lambda m: m if id in self.cache else claims.released(m, self.me, used_ms)
        )

    async def _evict_excess(self, but: str) -> None:
        """Evict models because one has turned out larger than estimated."""
        if self.cache.used_bytes <= self.cache.capacity_bytes:
            return
        # memory is exceeded already: recent models may be evicted
        churn_ms, self.cache.churn_ms = (
            self.cache.churn_ms,
            0.0,
        )
        room = self.cache.room_for(0, now_ms(), now_ms())
        self.cache.churn_ms = churn_ms
        if isinstance(room, NoRoom):
            _log.warning("the models of %s are larger than its memory: %s", self.me, room.why)
            return
        for held in [self._detach(id) for id in room.evict if id != but]:
            await self._unload_detached(held, f"{but} is larger than was thought")

    async def _in_host(
        self, host: ModelHost, record: MeshModel, leaving: list[LoadedCopy]
    ) -> tuple[ModelHost, LoadResult]:
        """Load into the model's host, or into one of its own if it may have ended a host before.

        leaving: copies to unload before; emptied. Returns the host and what it reports.
        """
        isolation, id = self._isolation, record.id
        alone = self._is_alone(record)
        evict = [] if alone else [copy.record.id for copy in leaving if copy.host is host]
        others = [copy for copy in leaving if alone or copy.host is not host]
        leaving.clear()
        if others:
            await asyncio.gather(*(self._unload(copy.host, copy.record.id) for copy in others))
        try:
            if not alone:
                return host, await host.load(record, self._settings.load_s, evict)
        except HostDied as died:
            if isolation is None:
                raise self._host_ended(id) from None
            isolation.suspect(died.blamed)
            if id not in died.blamed:
                raise self._host_ended(id) from None
        except ConnectionLost:
            raise self._host_ended(id) from None
        assert isolation is not None
        self._note(id, "loaded alone", "it was at work when a model host ended")
        own = await isolation.host_of(id, self._settings.load_s)
        try:
            return own, await own.load(record, self._settings.load_s)
        except HostDied:
            raise ModelCrashed(
                f"it ends the process that loads it, in {self.me}, where it was alone"
            ) from None
        except ConnectionLost:
            raise self._host_ended(id) from None

    def _is_alone(self, record: MeshModel) -> bool:
        """Return whether a model is to be loaded into a host that holds nothing else."""
        isolation = self._isolation
        return isolation is not None and (
            isolation.is_suspect(record.id) or failures.has_crashed(record)
        )

    def _host_ended(self, id: str) -> RequestFailed:
        return RequestFailed(
            f"the model host of {self.me} died, or did not answer, while it loaded {id!r}"
        )

    async def _release_alone(self, id: str) -> None:
        if self._isolation is not None:
            await self._isolation.release(id)

    async def _not_loaded(self, record: MeshModel, error: BaseException) -> None:
        """Write a failure, or release the claim, in the registry."""
        me = self.me
        fault = FAULTS.get(error.fault) if isinstance(error, RequestFailed) else None
        if fault is not None:
            self.counts.failed(fault)

        def step(model: MeshModel) -> MeshModel:
            if isinstance(error, RequestFailed) and fault is not None:
                return claims.failed(
                    model,
                    me,
                    now_ms(),
                    why=error.why,
                    fault=fault,
                    crashed=isinstance(error, ModelCrashed),
                )
            return claims.released(model, me)

        with contextlib.suppress(UnknownModel, StoreError):  # the janitor releases the claim later
            await self._records.change(record.id, step)

    # -- serving

    async def lend(self, id: str, address: str, token: str) -> None:
        """Make the copy here connect to a server and serve it. RequestFailed."""
        held = self.held.get(id)
        if held is None:
            self._tasks.spawn(self._disclaim(id))
            raise NotLoadedHere(f"{self.me} does not hold {id!r}")
        try:
            await held.host.serve(id, address, token, self.number, SERVE_S)
        except RequestFailed:
            if self.held.get(id) is not held:
                raise NotLoadedHere(f"{self.me} has just given up {id!r}") from None
            raise
        held.lent[address] = token

    async def unlend(self, id: str, address: str) -> None:
        """Make the copy here leave a server."""
        held = self.held.get(id)
        if held is not None and held.lent.pop(address, None) is not None:
            await held.host.leave(id, address, UNLOAD_S)

    def left(self, id: str, address: str) -> None:
        """Note that a server has disconnected a copy."""
        held = self.held.get(id)
        if held is not None:
            held.lent.pop(address, None)

    # -- unloading

    async def evict(self, id: str, why: str) -> bool:
        """Release the copy here and free its memory. Returns False if there is none."""
        if id not in self.held:
            return False
        await self._unload_detached(self._detach(id), why)
        return True

    def _detach(self, id: str) -> tuple[str, LoadedCopy | None, int]:
        resident = self.cache.get(id)
        self.cache.remove(id)
        return id, self.held.pop(id, None), resident.used_ms if resident else 0

    async def _unload_detached(self, leaving: tuple[str, LoadedCopy | None, int], why: str) -> None:
        """Unload a copy that was removed from `held`.

        The claim is released first, so that other nodes use other copies; then the host answers the
        rows that it has. A claim of a copy that was loaded here meanwhile stays.
        """
        id, held, used_ms = leaving
        if held is None:
            return
        with contextlib.suppress(UnknownModel, StoreError):
            await self._give_up(id, held, used_ms, why)
        await self._unload(held.host, id)

    async def drop(self, id: str, why: str) -> None:
        """Free the memory of a copy whose record or claim is gone; that of a load at its end."""
        job = self._jobs.get(id)
        if job is not None and job.started:  # one that waits will read the record itself
            job.dropped = why
            return
        _, held, _ = self._detach(id)
        if held is not None:
            self._note(id, "unloaded", why)
            await self._unload(held.host, id)

    async def _unload(self, host: ModelHost, id: str) -> None:
        try:
            await host.unload(id, UNLOAD_S)
        except RequestFailed as failure:
            _log.warning("model %r was not unloaded: %s", id, failure.why)
        await self._release_alone(id)

    async def reclaim(self, id: str) -> None:
        """Write the claim of a loaded copy again, after other nodes have removed it, or the store
        has returned to a state in which the copy was loading.

        The copy is dropped instead when enough others are loaded by now.
        """
        held, resident = self.held.get(id), self.cache.get(id)
        if held is None or resident is None:
            return
        size, me = resident.size_bytes, self.me

        def step(model: MeshModel, alive: Container[object]) -> MeshModel | claims.ClaimRefused:
            if self.held.get(id) is not held:  # dropped or evicted, since this waits for its turn
                return claims.ClaimRefused(f"{me} does not hold it any more")
            copy = model.copies.get(me)
            if copy is not None and copy.loaded_ms:
                return model
            least = max(1, model.policy.copies_min)
            return claims.restored(model, me, now_ms(), alive=alive, copies=least, size_bytes=size)

        try:
            found = await self._records.change_copies(id, step)
        except ClipperError:
            return
        if id not in self.cache:  # evicted while the claim was being written
            await self._disclaim(id)
        elif isinstance(found, claims.ClaimRefused) and self.held.get(id) is held:
            await self.drop(id, f"{CLAIM_GONE}: {found.why}")

    async def _disclaim(self, id: str) -> None:
        """Remove a claim that others would believe, although the model is not loaded here."""

        def step(model: MeshModel) -> MeshModel:
            copy = model.copies.get(self.me)
            is_here = id in self.cache or id in self._jobs  # or is loaded again, in a new host
            return (
                model
                if is_here or not (copy and copy.loaded_ms)
                else claims.released(model, self.me)
            )

        with contextlib.suppress(UnknownModel, StoreError):  # the janitor does it later
            await self._records.change(id, step)

    # -- dead hosts

    def host_lost(self, host: ModelHost) -> list[tuple[str, LoadedCopy]]:
        """Remove and return the copies of a dead host. Claims stay: copies are loaded again."""
        lost = [(id, held) for id, held in self.held.items() if held.host is host]
        for id, _ in lost:
            del self.held[id]
        self._finishing = {id: one for id, one in self._finishing.items() if one is not host}
        return lost

    def crashed(self, id: str, why: str) -> None:
        """Start to write that a model ended the host in which it was alone; that blocks it for a
        while.

        Until it is written, the model counts as loading here: its claim stays, so that no node
        loads it meanwhile, and requests wait for the outcome.
        """
        job = self._new_job(id, 0)
        job.started = job.placed = True
        self._note(id, "unloaded", why)
        self._tasks.spawn(self._write_crash(id, why))

    async def _write_crash(self, id: str, why: str) -> None:
        written = self._records.change(
            id,
            lambda m: claims.failed(m, self.me, now_ms(), why=why, fault="artifact", crashed=True),
        )
        try:
            await self._release_alone(id)
            with contextlib.suppress(UnknownModel, StoreError):
                await written
        finally:
            self._detach(id)
            self._finish(id, ModelCrashed(why))

    def load_again(self, id: str, used_ms: int) -> None:
        """Start to load a model again whose host died; its claim exists."""
        if id in self.held or id in self._jobs or self.stopping:
            return
        self.cache.remove(id)
        self._enqueue(id, used_ms, waiting=False, copies=0, why=", again after its host had died")

    async def stop(self) -> None:
        """Refuse loads, fail those that wait, and cancel all background tasks."""
        self.stopping = self.closed = True
        self._records.close()
        for job in self._jobs.values():
            if not job.done.done():
                job.done.set_exception(RequestFailed(f"{self.me} is stopping", "none"))
        await self._tasks.cancel()


async def _until_ready(host: ModelHost) -> None:
    """Wait for a host that is started again, at most HOST_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HOST_S):
            await host.is_ready.wait()


def _granted(found: MeshModel | claims.ClaimRefused) -> MeshModel:
    """Return the record with the claim. NotLoadedHere when it was refused."""
    if isinstance(found, claims.ClaimRefused):
        raise NotLoadedHere(found.why)
    return found


def _at(record: MeshModel, path: str) -> MeshModel:
    """Return a record with the path of its files on this host."""
    return record if record.path == path else msgspec.structs.replace(record, path=path)
