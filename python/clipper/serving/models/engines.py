"""The engines of a server: how many there are, what each may take of the limits, and which of them
serves a model.

An engine has a loop thread, lanes, a cache and connections of its own, and shares nothing with the
others on a query's way; all versions of a model are of one engine. A query for models of
several engines is one future all the same (docs/design.md).
"""

import itertools
import logging
import operator
import os
import threading
from collections.abc import Iterator

from clipper.config import Config
from clipper.metrics.samples import Stats
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model as CoreModel

LINKS_MAX = 65_533  # of an engine
_log = logging.getLogger(__name__)


class Engines:
    """Threads: any."""

    def __init__(self, config: Config) -> None:
        count = _count(config.server.engines)
        self._all = tuple(_engine_of(config, number, count) for number in range(count))
        for one, other in itertools.combinations(self._all, 2):
            one.link_peer(other)
        self._guard = threading.Lock()
        self._placed: dict[str, int] = {}
        self._models = [0] * count

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, name: str) -> Engine:
        """Return the engine that serves the model of this name: at first the one with the fewest
        models."""
        with self._guard:
            number = self._placed.get(name)
            if number is None:
                number = self._placed[name] = self._models.index(min(self._models))
                self._models[number] += 1
            return self._all[number]

    def forget(self, name: str) -> None:
        """Forget a name of which there is no model any more. The engine of a later model is chosen
        anew."""
        with self._guard:
            number = self._placed.pop(name, None)
            if number is not None:
                self._models[number] -= 1

    def place_of(self, core: CoreModel) -> tuple[int, int]:
        """Return the number of its engine, and its own there: a row of `snapshot()` has both."""
        return self._all.index(core.engine), core.index

    def now_us(self) -> int:
        """Return the engines' monotonic time in microseconds."""
        return self._all[0].now_us()

    def refuse_new(self) -> None:
        """Refuse new queries from now on."""
        for engine in self._all:
            engine.refuse_new()

    def in_flight(self) -> bool:
        """Return the number of queries that have not ended."""
        return any(engine.completion.issued != engine.completion.answered for engine in self._all)

    def snapshot(self) -> Stats:
        """Return the engines' counters and gauges, summed; `models` are of all of them, in no
        order, each with its `engine`."""
        total: dict[str, object] = {}
        for number, engine in enumerate(self._all):
            one = engine.snapshot()
            one["models"] = [{"engine": number, **model} for model in one["models"]]
            total = {key: _sum(total[key], value) for key, value in one.items()} if total else one
        return total


def _sum(left: object, right: object) -> object:
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _sum(left[key], right[key]) for key in left}
    return operator.add(left, right)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _count(configured: int) -> int:
    if configured <= _cores():
        return configured
    _log.warning(
        "server.engines = %d, but there are %d cores for this process: %d are started",
        configured,
        _cores(),
        _cores(),
    )
    return _cores()


def _engine_of(config: Config, number: int, count: int) -> Engine:
    """Create an engine; limits of the whole server are divided evenly between engines."""
    limits = config.limits
    unlisted_model = (
        min(config.mesh.loaded_max, LINKS_MAX - limits.connections_max)
        if config.mesh.enabled
        else 0
    )
    return Engine(
        number=number,
        cache_bytes_max=limits.cache_bytes_max // count,
        cache_policy=config.server.cache_policy,
        tasks_max=max(1, limits.tasks_max // count),
        queue_bytes_max=limits.queue_bytes_max,
        frame_bytes_max=limits.frame_bytes_max,
        row_bytes_max=limits.input_bytes_max,
        rows_max=limits.batch_size_max,
        output_bytes_max=limits.output_bytes_max,
        connections_max=max(1, (limits.connections_max + unlisted_model) // count),
        models_max=limits.models_max + (config.mesh.models_max if config.mesh.enabled else 0),
        heartbeat_ms=config.server.heartbeat_ms,
        eject_after=config.server.eject_after,
        compression=config.server.compression,
        parts_ahead_max=limits.parts_ahead_max,
        answer_bytes_max=limits.answer_bytes_max,
        streams_max=limits.streams_max,
    )
