"""Routes of queries: from a model name to the core model in whose queue they wait.

A model of the mesh has a core model, made at its first query here, with a queue like any model's.
Its replicas are the copies that serve this node. While there are none, a query waits in the queue,
and the event loop of the node is called once. So a query costs a dict look-up and three stores;
nothing here blocks, and a hit takes no lock. Threads: any, unless stated.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Final, Protocol

import msgspec

from clipper.clock import wall_time_us
from clipper.errors import ClipperError, Overloaded
from clipper.serving.models.containers import Seat
from clipper.serving.models.model_source import ModelQueue, ResolvedModel
from clipper.serving.models.running_models import settle_input, settle_output
from clipper.serving.query.application import model_slo_in_us
from clipper.serving.query.arrays import ARRAY_SLO_MS, repeatable
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.processor import ResolvedApplication, if_cached
from clipper.types import Batching, InputType, Model, UserValue

MESH_VERSION: Final = 1  # of each mesh model, where a version is needed
ANY: Final = InputType.parse("any")
ABSENT_MAX: Final = 4096  # unknown names that are remembered
ABSENT_S: Final = 0.25
UNREGISTERED: Final = "it was unregistered"
CheckLoad = Callable[[str, float | None], None]


class Alias(msgspec.Struct, frozen=True):
    """The model that a v-model stands for. share: of its queries that go to `other`."""

    model: str
    other: str = ""
    share: float = 0.0


class Route:
    """One model as this node queries it.

    resolved: for queries while a copy serves it. cold: for queries while none does; one without a
    deadline has the time of a load as well. used_ms: last use, wall clock. queries: queries since
    they were last counted. waited: those of them that came while no copy served. served: a replica
    is connected. miss_reported: the event loop knows that a query waits. listed: in `UsedRoutes`.
    lenders: numbers of the instances whose copies serve it. why: reason why none does. ended:
    reason why the route was given up. type_known: its row type was registered, stated by a copy, or
    led to an output; otherwise it is that of the first row. successor: the route that replaced it.
    """

    __slots__ = (
        "__weakref__",
        "_check_load",
        "_is_failing",
        "_stage",
        "cold",
        "core",
        "ended",
        "id",
        "lenders",
        "listed",
        "miss_reported",
        "queries",
        "record",
        "resolved",
        "served",
        "successor",
        "touched",
        "type_known",
        "used_ms",
        "waited",
        "why",
    )

    def __init__(
        self,
        record: Model,
        host: "RouteHost",
        touched: "UsedRoutes",
        is_failing: Callable[[str], bool],
        check_load: "CheckLoad",
        stage: Callable[[str], str],
    ) -> None:
        self.id, self.record, self.touched = record.name, record, touched
        self._is_failing, self._check_load, self._stage = is_failing, check_load, stage
        self.why = ""
        self.used_ms = 0
        self.queries = self.waited = 0
        self.lenders: frozenset[int] = frozenset()
        self.served = self.miss_reported = self.listed = False
        self.successor: Route | None = None
        self.type_known = record.input.dtype != "any"
        self.ended = [UNREGISTERED]
        self.core = host.new_core(record)
        self.resolved, self.cold = host.applications(RoutedModel(self))

    @property
    def is_on_demand(self) -> bool:
        """Return True: its queries have it loaded."""
        return True

    @property
    def is_ready(self) -> bool:
        """Return whether a copy serves it."""
        return self.served

    def reason(self) -> str:
        """Return why a query was not answered; empty if a copy served the model."""
        if self.served:
            return ""
        return self.why or f"it was not loaded by the deadline: {self._stage(self.id)}"

    def current_application(self) -> ResolvedApplication:
        """Return the resolved application for a query that states no deadline.

        While the model has to be loaded it has more time, unless loads have failed lately.
        """
        return self.resolved if self.served or self._is_failing(self.id) else self.cold

    def queue_ms(self) -> float:
        """Return the forecast wait in ms of a row submitted now, until a copy takes it."""
        delay_us: int = self.core.engine.model_counts(self.core.index)["delay_us"]
        return round(delay_us / 1000, 3)

    def admit(self, slo_us: int) -> None:
        """Report a miss if no copy serves the model, before a query is queued. Overloaded when the
        model cannot be loaded by the query's deadline.

        slo_us: of the query; that of `resolved` or `cold`: it has none of its own.
        """
        if self.served:
            return
        has_own = slo_us not in (self.resolved.slo_us, self.cold.slo_us)
        self._check_load(self.id, slo_us / 1000 if has_own else None)
        self._report_miss()

    def _report_miss(self) -> None:
        if not self.miss_reported:
            self.miss_reported = True
            self.touched.missed(self)

    def touch(self) -> None:
        """Count a query; report a miss if no copy serves the model."""
        self.count()
        if not self.served:
            self._report_miss()

    def count(self) -> None:
        """Count a query."""
        self.used_ms = wall_time_us() // 1000
        self.queries += 1
        if not self.listed:  # after counting: `take` clears the flag before it reads the count
            self.listed = True
            self.touched.routes.append(self)
        if not self.served:
            self.waited += 1


class RoutedModel:
    """The model of a route, as the route's own resolved applications hold it: weakly, so that the
    queue is freed with the last reference to the route."""

    is_on_demand = True

    def __init__(self, route: Route) -> None:
        self.record, self.core = route.record, route.core
        self._route, self._ended = weakref.ref(route), route.ended

    @property
    def is_ready(self) -> bool:
        """Return whether a copy serves it."""
        route = self._route()
        return route is not None and route.served

    def touch(self) -> None:
        """Count a query, and have the model loaded if it is not."""
        route = self._route()
        if route is not None:
            route.touch()

    def admit(self, slo_us: int) -> None:
        """Have the model loaded for a query, as Route.admit does."""
        route = self._route()
        if route is not None:
            route.admit(slo_us)

    def reason(self) -> str:
        """Return why it is not loaded; empty if it is."""
        route = self._route()
        return self._ended[0] if route is None else route.reason()


class RouteHost(Protocol):
    """The part of a NodeHost that routes need."""

    def new_core(self, record: Model) -> ModelQueue:
        """Return a new queue for a model."""

    def applications(self, model: ResolvedModel) -> tuple[ResolvedApplication, ResolvedApplication]:
        """Return a model's resolved applications: while it is loaded, and while it is not."""


class UsedRoutes:
    """The routes used since they were last taken.

    missed: called with a route when a query finds no copy.
    """

    def __init__(self, missed: Callable[[Route], None]) -> None:
        self.routes: list[Route] = []
        self.missed = missed

    def take(self) -> Iterator[tuple[Route, int]]:
        """Yield each used route with its number of queries since. Threads: one."""
        routes, self.routes = self.routes, []
        for route in routes:
            route.listed = False
            count, route.queries = route.queries, 0
            if count:
                yield route, count


class MeshModelHandle:
    """One model of the mesh, like a `Model` of the catalog: `server.model("m1")`.

    Each call loads the model if it is not loaded. Threads: any.
    """

    __slots__ = ("_route", "name")

    def __init__(self, route: Route) -> None:
        self._route = route
        self.name = route.id

    def predict(self, x: UserValue, slo_ms: float | None = None, salt: int = 0) -> Future:
        """Return the future of the model's output for one input.

        slo_ms: one second by default, and the time of a load if it has to be loaded. InvalidInput,
        Overloaded.
        """
        self._route.count()
        try:
            self._route.admit(model_slo_in_us(slo_ms, self._route.resolved.slo_us))
        except Overloaded as refusal:
            if not self.cached(x, salt)[0]:
                raise
            return if_cached(self._route.core.predict(x, slo_ms, salt), refusal)
        if slo_ms is None and not self._route.served:
            slo_ms = self._route.current_application().slo_us / 1000
        return self._route.core.predict(x, slo_ms, salt)

    def predict_many(self, rows: UserValue, slo_ms: float | None = None, salt: int = 0) -> Future:
        """Return the future of the outputs for an array or a list of inputs. InvalidInput,
        Overloaded."""
        self._route.count()
        try:
            self._route.admit(model_slo_in_us(slo_ms, round(ARRAY_SLO_MS * 1000)))
        except Overloaded as refusal:
            rows = repeatable(rows)
            if not self._route.core.cached_rows(rows, salt):
                raise
            return if_cached(self._route.core.predict_many(rows, slo_ms, salt), refusal)
        return self._route.core.predict_many(rows, slo_ms, salt)

    def put(self, x: object, output: object, salt: int = 0) -> None:
        """Store an output in the cache."""
        self._route.core.put(x, output, salt)

    def cached(self, x: object, salt: int = 0) -> tuple[bool, UserValue]:
        """Return whether the cache has the output of an input, and the output."""
        return self._route.core.cached(x, salt)


class ModelRouter:
    """Routes by name.

    find_record: returns the record of an id known in memory. lookup: looks a name up in the store,
    calls `add` or `set_alias`, and may return before. missed: see UsedRoutes. replaced: called with
    a route that another one has replaced. is_failing: returns whether loads of a model failed
    lately. now_s: a clock that nobody sets. check_load: called before a query of a model
    that is not loaded is queued; see LoadAdmission.check. stage: returns how far the load of a
    model has come. check_type: called with a route before a query whose rows are checked by a type
    that a first query set, and that no output has confirmed; may replace the route.
    """

    def __init__(
        self,
        host: RouteHost,
        find_record: Callable[[str], Model | None],
        missed: Callable[[Route], None],
        batching: Batching,
        rng: Random | None = None,
        replaced: Callable[[Route], None] = lambda _: None,
        lookup: Callable[[str], None] = lambda _: None,
        is_failing: Callable[[str], bool] = lambda _: False,
        now_s: Callable[[], float] = time.monotonic,
        check_load: CheckLoad = lambda *_: None,
        stage: Callable[[str], str] = lambda _: "no load of it runs here",
        check_type: Callable[[Route], None] = lambda _: None,
    ) -> None:
        self._now_s, self._check_type = now_s, check_type
        self._host = host
        self._find_record = find_record
        self._batching = batching
        self._replaced, self._lookup, self._is_failing = replaced, lookup, is_failing
        self._check_load, self._stage = check_load, stage
        self._uniform = (rng or Random()).random
        self._routes: dict[str, Route] = {}
        self._aliases: dict[str, Alias] = {}
        self._absent: dict[str, float] = {}
        self._guard = threading.Lock()
        self.touched = UsedRoutes(missed)

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(tuple(self._routes.values()))

    def get(self, id: str) -> Route | None:
        """Return the route of a model queried before. Makes none and counts nothing."""
        return self._routes.get(id)

    def application(self, name: str) -> ResolvedApplication | None:
        """Return the resolved application for a query of a model or v-model; None: unknown name.

        Its `unlisted_model.admit` has the model loaded.
        """
        route = self.route(name)
        if route is None:
            return None
        route.count()
        return route.current_application()

    def route(self, name: str) -> Route | None:
        """Return the route of a model or v-model, made if needed. None: unknown name."""
        route = self._routes.get(name)
        if route is not None:
            return route if route.type_known else self._checked(route)
        alias = self._aliases.get(name)
        if alias is not None:
            return self._of_alias(alias)
        return self._first(name)

    def _of_alias(self, alias: Alias) -> Route | None:
        id = alias.other if alias.share and self._uniform() < alias.share else alias.model
        route = self._routes.get(id)
        if route is None:
            return self._first(id)
        return route if route.type_known else self._checked(route)

    def _checked(self, route: Route) -> Route:
        """Return the route, or the one that has replaced it, after its row type was checked."""
        self._check_type(route)
        return self._routes.get(route.id, route)

    def _first(self, name: str) -> Route | None:
        """Return the route of a name that has none, after looking it up."""
        record = self._find_record(name)
        if record is None:
            known_s = self._absent.get(name)
            if known_s is not None and self._now_s() - known_s < ABSENT_S:
                return None
            self._lookup(name)  # raises if this node has not joined its mesh
            if len(self._absent) >= ABSENT_MAX:
                self._absent.clear()
            self._absent[name] = self._now_s()
            alias = self._aliases.get(name)
            return self._routes.get(name) if alias is None else self._of_alias(alias)
        return self.add(record)

    def resolve(self, name: str) -> Route | None:
        """Return the route of a model for an application, without counting a query.

        None for v-models, since applications name models.
        """
        return None if name in self._aliases else self._routes.get(name) or self._first(name)

    def add(self, record: Model) -> Route:
        """Return the route of a model, made if needed."""
        with self._guard:
            route = self._routes.get(record.name)
            if route is None:
                route = self._routes[record.name] = self._new_route(record)
            return route

    def _new_route(self, record: Model) -> Route:
        return Route(
            record, self._host, self.touched, self._is_failing, self._check_load, self._stage
        )

    def forget(self, id: str) -> Route | None:
        """Remove the route of a model that is no longer registered, and return it.

        Its queues are freed, and its queries answered, once nothing refers to the route.
        """
        with self._guard:
            route = self._routes.pop(id, None)
        if route is not None:
            route.served, route.why = False, UNREGISTERED
        return route

    def replace(self, route: Route, input: InputType, why: str) -> bool:
        """Give a model a new queue, for rows of another type. False: it already has a new one.

        The callback `replaced` is to end the queries in the old queue; their reason is `why`.
        """
        record = msgspec.structs.replace(route.record, input=input)
        with self._guard:
            if self._routes.get(route.id) is not route:
                return False
            new = self._routes[route.id] = self._new_route(record)
        new.used_ms = route.used_ms
        route.successor, route.served, route.why, route.ended[0] = new, False, why, why
        self._replaced(route)
        return True

    def set_alias(self, name: str, alias: Alias | None) -> None:
        """Set what a v-model stands for; None: it does not exist any more."""
        if alias is None:
            self._aliases.pop(name, None)
        else:
            self._aliases[name] = alias
            self._absent.pop(name, None)

    def forget_absence(self, name: str) -> None:
        """Drop the memory that a name was unknown: it exists now."""
        self._absent.pop(name, None)

    # -- replicas

    def seat(self, name: str, version: int, input: str, output: str = "any") -> Seat | None:
        """Return the queue that a connecting copy serves; None: not a model of the mesh.

        input, output: the row types of the copy. Model hosts convert element types, so only the
        shape has to match. A queue that was made for another shape, by a first query that could not
        be checked then, is replaced.
        """
        if version != MESH_VERSION:
            return None
        route = self._routes.get(name)
        if route is None:
            record = self._find_record(name)
            if record is None:
                return None
            route = self.add(record)
        if not route.type_known and input != "any":
            route = self._settled(route, InputType.parse(input))
        if route.record.output == "any":
            settle_output(route.core, InputType.parse(output))
        return Seat(route.core, ANY, ANY, self._batching, logging.DEBUG)  # many times a second

    def _settled(self, route: Route, input: InputType) -> Route:
        """Return the route after a copy has stated its row type; replaced if that differs."""
        if route.core.describe_input() == "any":
            with contextlib.suppress(ClipperError):  # a first row has set the type meanwhile
                settle_input(route.core, input)
        queued = InputType.parse(route.core.describe_input())
        if not is_convertible(queued, input):
            why = f"it takes rows of {input}, not {queued}"
            self.replace(route, input, why)
            route = self._routes.get(route.id, route)
        route.type_known = True
        return route

    def set_lenders(self, name: str, lenders: Iterable[int]) -> Route | None:
        """Set the instances that serve a model; return its route if there is one."""
        route = self._routes.get(name)
        if route is not None:
            route.lenders = frozenset(lenders)
            route.served = bool(route.lenders)
            if not route.served:
                route.miss_reported = False
        return route


def is_convertible(queued: InputType, taken: InputType) -> bool:
    """Return whether a host that takes rows of one type accepts rows of the other."""
    if "any" in (queued.dtype, taken.dtype) or queued == taken:
        return True
    if queued.tensors or taken.tensors:
        return False
    texts = {"str", "bytes"} & {queued.dtype, taken.dtype}
    return not texts and (queued.variable or taken.variable or queued.shape == taken.shape)


def core_record(id: str, input: str, output: str) -> Model:
    """Return the engine's record of a mesh model. InvalidInput."""
    InputType.parse(output)
    return Model(id, MESH_VERSION, InputType.parse(input), output, replicas=0)
