"""Queries on their way into the mesh: from a name to the core model whose lane they wait in.

A meshed model has a core model, made when it is first asked here, with a lane as any model's; its
replicas are the copies that serve this node. While there is none a query waits in the lane, and the
mesh's thread is told once. So a query costs a look into a dict and three stores; nothing here
waits, and a hit takes no lock. Threads: any, but for what says otherwise.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, Final

import msgspec

from clipper.clock import wall_time_us
from clipper.errors import ClipperError, InvalidInput
from clipper.serving.models.containers import Seat
from clipper.serving.models.running_models import row_shape
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import Batching, InputType, Model

MESH_VERSION: Final = 1  # of every meshed model, where versions are asked for
ANY: Final = InputType.parse("any")
ABSENT_MAX: Final = 4096  # names that were asked and do not exist, remembered
ABSENT_S: Final = 0.25
UNREGISTERED: Final = "it was unregistered"
Make = Callable[[Model, Callable[[], str]], tuple[ResolvedApplication, ResolvedApplication]]


class Alias(msgspec.Struct, frozen=True):
    """What a v-model stands for. share: of its queries that ask `other`."""

    model: str
    other: str = ""
    share: float = 0.0


class Route:
    """One model as this node asks it.

    question: to a copy that is there.  cold: while there is none; a query of it that states no
    deadline has the time of a load as well.  used_ms: last use, wall clock.  asked: queries since
    they were last counted.  waited: those of them that came while nobody served it.  served: a
    replica is attached.  told: the mesh's thread knows that there is none. lenders: numbers of the
    instances whose copies serve it.  why: it is not served.  ended: why it was given up.
    type_known: the type of its rows was registered, or said by a copy, or has had an output; else
    it is that of the first row. successor: the route that replaced it.
    """

    __slots__ = (
        "__weakref__",
        "_is_failing",
        "asked",
        "cold",
        "core",
        "ended",
        "id",
        "lenders",
        "listed",
        "miss_reported",
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
        self, record: Model, make: "Make", touched: "UsedRoutes", is_failing: Callable[[str], bool]
    ) -> None:
        self.id, self.record, self.touched = record.name, record, touched
        self._is_failing = is_failing
        self.why = ""
        self.used_ms = 0
        self.asked = self.waited = 0
        self.lenders: frozenset[int] = frozenset()
        self.served = self.miss_reported = self.listed = False
        self.successor: Route | None = None
        self.type_known = record.input.dtype != "any"
        self.ended = ended = [UNREGISTERED]
        ref = weakref.ref(
            self
        )  # no circle of route and question: the core model goes with the last of them
        self.resolved, self.cold = make(
            record, lambda: ended[0] if (route := ref()) is None else route.reason()
        )
        self.core: Any = self.resolved.cores[record.id]

    def reason(self) -> str:
        """Why a query was not answered; empty when it is not that nobody serves it."""
        return "" if self.served else self.why or "it was not loaded by the deadline"

    def current_question(self) -> ResolvedApplication:
        """Return the question for a query that states no deadline. It has more time while the model
        has to be loaded first, unless loads of it have lately failed."""
        return self.resolved if self.served or self._is_failing(self.id) else self.cold

    def queue_ms(self) -> float:
        """What a row that is submitted now waits until a copy takes it, as forecast."""
        delay_us: int = self.core.engine.model_counts(self.core.index)["delay_us"]
        return round(delay_us / 1000, 3)

    def touch(self) -> None:
        """A query comes."""
        self.used_ms = wall_time_us() // 1000
        self.asked += 1
        if (
            not self.listed
        ):  # after it was counted: whoever takes the list clears this before he reads the count
            self.listed = True
            self.touched.routes.append(self)
        if not self.served:
            self.waited += 1
            if not self.miss_reported:
                self.miss_reported = True
                self.touched.missed(self)


class UsedRoutes:
    """Router that were asked since they were last taken. missed: told of a query that nobody serves
    here yet."""

    def __init__(self, missed: Callable[[Route], None]) -> None:
        self.routes: list[Route] = []
        self.missed = missed

    def take(self) -> Iterator[tuple[Route, int]]:
        """Each with the number of its queries since. One thread only."""
        routes, self.routes = self.routes, []
        for route in routes:
            route.listed = False
            asked, route.asked = route.asked, 0
            if asked:
                yield route, asked


class MeshedModel:
    """A model of the mesh by itself, as a `Model` of the catalog is: `server.model("m1")`. Every
    call loads it where it is not. Threads: any."""

    __slots__ = ("_route", "name")

    def __init__(self, route: Route) -> None:
        self._route = route
        self.name = route.id

    def predict(self, x: Any, slo_ms: float | None = None, salt: int = 0) -> Future:
        """-> the Future of its output. slo_ms: when not given, a second, and the time of a load
        where it has to be loaded first. Raises InvalidInput, Overloaded."""
        self._route.touch()
        if slo_ms is None and not self._route.served:
            slo_ms = self._route.current_question().slo_us / 1000
        future: Future = self._route.core.predict(x, slo_ms, salt)
        return future

    def predict_many(self, rows: Any, slo_ms: float = 60_000, salt: int = 0) -> Future:
        """-> the Future of the outputs of an array, or a list, of inputs."""
        self._route.touch()
        future: Future = self._route.core.predict_many(rows, slo_ms, salt)
        return future

    def put(self, x: Any, output: Any, salt: int = 0) -> None:
        """What the cache says of an input from now on."""
        self._route.core.put(x, output, salt)

    def cached(self, x: Any, salt: int = 0) -> tuple[bool, Any]:
        """Whether the cache has it, and what."""
        found: tuple[bool, Any] = self._route.core.cached(x, salt)
        return found


class Router:
    """From names to routes.

    make: (record, why it is not served) -> the question of a model, with its core, and that of one
    to be loaded first. find_record: an id's, as known in memory; None when there is none.  look_up:
    has a name looked up elsewhere, by `add` or `alias`, and may return before.  missed: see
    UsedRoutes. replaced: told of a route whose model has a new one.  is_failing: whether loads of a
    model have lately failed.
    """

    def __init__(
        self,
        make: "Make",
        find_record: Callable[[str], Model | None],
        missed: Callable[[Route], None],
        batching: Batching,
        rng: Random | None = None,
        replaced: Callable[[Route], None] = lambda _: None,
        look_up: Callable[[str], None] = lambda _: None,
        is_failing: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._make, self._find_record, self._batching = make, find_record, batching
        self._replaced, self._look_up, self._is_failing = replaced, look_up, is_failing
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
        """Of a model that has been asked here; nothing is made, and nothing counted."""
        return self._routes.get(id)

    def resolve(self, name: str) -> ResolvedApplication | None:
        """Of a model or v-model, for a query that is about to be asked; None when the mesh has none
        of this name."""
        route = self.route(name)
        if route is None:
            return None
        route.touch()
        return route.current_question()

    def route(self, name: str) -> Route | None:
        route = self._routes.get(name)
        if route is not None:
            return route
        alias = self._aliases.get(name)
        if alias is not None:
            return self._of_alias(alias)
        return self._first(name)

    def _of_alias(self, alias: Alias) -> Route | None:
        id = alias.other if alias.share and self._uniform() < alias.share else alias.model
        return self._routes.get(id) or self._first(id)

    def _first(self, name: str) -> Route | None:
        """It is asked for the first time."""
        record = self._find_record(name)
        if record is None:
            known_s = self._absent.get(name)
            if known_s is not None and time.monotonic() - known_s < ABSENT_S:
                return None
            self._look_up(
                name
            )  # raises where this node is not in its mesh: then nothing is known of the name
            if len(self._absent) >= ABSENT_MAX:
                self._absent.clear()
            self._absent[name] = time.monotonic()
            alias = self._aliases.get(name)
            return self._routes.get(name) if alias is None else self._of_alias(alias)
        return self.add(record)

    def link(self, name: str) -> Route | None:
        """Of a model, for an application that asks it; nothing is counted. A v-model has none: an
        application names models."""
        return None if name in self._aliases else self._routes.get(name) or self._first(name)

    def add(self, record: Model) -> Route:
        """The route of a model; made when there is none."""
        with self._guard:
            route = self._routes.get(record.name)
            if route is None:
                route = self._routes[record.name] = Route(
                    record, self._make, self.touched, self._is_failing
                )
            return route

    def forget(self, id: str) -> Route | None:
        """It is registered no more. Its lanes are given back once nobody has the route, and its
        queries are answered."""
        with self._guard:
            route = self._routes.pop(id, None)
        if route is not None:
            route.served, route.why = False, UNREGISTERED
        return route

    def replace(self, route: Route, input: InputType, why: str) -> bool:
        """Give the model a new queue, for rows of another type. False: it has one by now.

        Queries that wait in the old queue are to be ended by the caller, and are told `why`.
        """
        record = msgspec.structs.replace(route.record, input=input)
        with self._guard:
            if self._routes.get(route.id) is not route:
                return False
            new = self._routes[route.id] = Route(record, self._make, self.touched, self._is_failing)
        new.used_ms = route.used_ms
        route.successor, route.served, route.why, route.ended[0] = new, False, why, why
        self._replaced(route)
        return True

    def set_alias(self, name: str, alias: Alias | None) -> None:
        """What a v-model stands for from now on; None: it is gone."""
        if alias is None:
            self._aliases.pop(name, None)
        else:
            self._aliases[name] = alias
            self._absent.pop(name, None)

    def forget_absence(self, name: str) -> None:
        """It exists, whatever was found when it was last asked."""
        self._absent.pop(name, None)

    def aliases(self) -> dict[str, Alias]:
        return self._aliases

    # -- replicas, as those who have dialled in

    def seat(self, name: str, version: int, input: str) -> Seat | None:
        """Where a copy of a meshed model is served here; None: it is none of the mesh's.

        input: the type of rows that the copy takes. Hosts convert numbers, so that only the shape
        has to be the same; where the queue was made for rows of another shape, by a first query
        that nobody could check then, it is replaced.
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
        return Seat(route.core, ANY, ANY, self._batching)

    def _settled(self, route: Route, input: InputType) -> Route:
        """A copy has said what its rows are."""
        if route.core.describe_input() == "any":
            with contextlib.suppress(ClipperError):  # a first row came meanwhile
                route.core.settle(input.dtype, row_shape(input))
        queued = InputType.parse(route.core.describe_input())
        if not is_convertible(queued, input):
            why = f"it takes rows of {input}, not {queued}"
            self.replace(route, input, why)
            route = self._routes.get(route.id, route)
        route.type_known = True
        return route

    def set_lenders(self, name: str, lenders: Iterable[int]) -> Route | None:
        """These serve it now. -> its route, if it has one."""
        route = self._routes.get(name)
        if route is not None:
            route.lenders = frozenset(lenders)
            route.served = bool(route.lenders)
            if not route.served:
                route.miss_reported = False
        return route


def is_convertible(queued: InputType, taken: InputType) -> bool:
    """Whether a host that takes rows of one type can be sent rows of the other."""
    if "any" in (queued.dtype, taken.dtype) or queued == taken:
        return True
    texts = {"str", "bytes"} & {queued.dtype, taken.dtype}
    return not texts and (queued.variable or taken.variable or queued.shape == taken.shape)


def core_record(id: str, input: str, output: str) -> Model:
    """What the engine is told of a meshed model."""
    try:
        InputType.parse(output)
        return Model(id, MESH_VERSION, InputType.parse(input), output, replicas=0)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
