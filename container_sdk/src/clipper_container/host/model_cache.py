"""The models of a host: loading, loaded, unloading.

Each of `loading_max` threads loads one model at a time; the timeout counts from the start of the
load. A load that exceeds it cannot be stopped: its thread is replaced and its result is dropped.
After OVERRUNS_MAX such loads the host reports FAILING.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeVar

from clipper_container.host.model_sizes import (
    CollectionSchedule,
    ModelSizes,
    SizeMeasurement,
    UnloadedModel,
    trim,
)
from clipper_container.host.server_connection import Gate, done_with, relay
from clipper_container.host.server_connections import ServerConnections
from clipper_container.host.timers import Timers
from clipper_container.host.work_record import WorkRecord
from clipper_container.loading.targets import explain
from clipper_container.machine import resident_bytes
from clipper_container.model import Model
from clipper_container.runtime import Artifact, ArtifactError, Loaded, Runtime
from clipper_container.schema import type_text
from clipper_container.shortage import is_own
from clipper_container.threads import KeptThread
from clipper_container.worker.evaluation import Evaluator, user_traceback
from clipper_container.worker.handshake import ContainerOptions
from clipper_container.worker.named_tensors import with_tensors

OVERRUNS_MAX = 3
PREPARE_S = 60.0  # to import the framework, in addition to the load's own timeout
UNLOAD_S = 60.0  # for batches that are being evaluated
AGAIN_S = 1.0  # until another try to start a loader, when the system has no thread
TRIM_S = 1.0  # least time between two calls of malloc_trim
_T = TypeVar("_T")


class RequestFailed(Exception):
    """A request of the node failed.

    whose: the cause: "artifact" (the model), "load" (the runtime raised: the model, its files or
    its code), "host" (this process lacks something), or "none" (the request).
    """

    def __init__(self, whose: str, why: str) -> None:
        super().__init__(why)
        self.whose = whose


def _cause_of(error: BaseException) -> str:
    """Return whose fault an exception of a load is: of the host if it, or a server behind it, lacks
    something, which may be there soon; else of what is loaded."""
    lacks = is_own(error) or isinstance(error, (ConnectionError, TimeoutError))
    return "host" if lacks else "load"


def _call_after(futures: Sequence[Future[_T]], function: Callable[[], None]) -> None:
    """Call a function once, when all futures are done: at once, if there are none."""
    left, lock = len(futures), threading.Lock()

    def done(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            function()

    for future in futures:
        future.add_done_callback(done)
    if not futures:
        function()


class Phase(Enum):
    """State of a model in the cache."""

    LOADING = 0
    LOADED = 1
    LEAVING = 2


@dataclass(eq=False, slots=True)
class CachedModel:
    """One model of the cache. The fields after `answer` are set once the phase is LOADED."""

    artifact: Artifact
    runtime: Runtime
    timeout_s: float
    phase: Phase = Phase.LOADING
    answer: Future[dict[str, object]] = field(default_factory=Future)  # the description
    settled: bool = False  # it has loaded, failed, or overrun its time
    given_up: bool = False
    loaded: Loaded | None = None
    evaluator: Evaluator | None = None
    gate: Gate = field(default_factory=lambda: Gate(1))
    size_bytes: int = 0
    took_ms: float = 0.0
    gone: Future[None] = field(default_factory=Future)

    def describe(self) -> dict[str, object]:
        """Return the answer to a `load` request."""
        assert self.loaded is not None
        options = self.options()
        return {
            "size_bytes": self.size_bytes,
            "concurrency": max(1, self.loaded.concurrency),
            "input": options.input,
            "output": options.output,
            "took_ms": self.took_ms,
        }

    def options(self, token: str = "", replica: int = 0) -> ContainerOptions:
        """Return the fields of the HELLO that a connection of this model sends."""
        assert self.loaded is not None
        model, artifact = self.loaded.model, self.artifact
        input, output = _types(artifact, model)
        return ContainerOptions(
            name=artifact.model,
            replica=replica,
            input=input,
            output=output,
            batch_max=model.batch_max,
            token=token,
            sessions=model.sessions,
        )


def _types(artifact: Artifact, model: Model) -> tuple[str, str]:
    """Return the types of input and output: as registered, else the model's own."""
    return (
        type_text(artifact.input if artifact.input != "any" else model.input),
        type_text(artifact.output if artifact.output != "any" else model.output),
    )


class ModelCache:
    """Loads and unloads models, and measures their memory. Threads: any."""

    def __init__(
        self,
        runtimes: Iterable[Runtime],
        connections: ServerConnections,
        timers: Timers,
        capacity_bytes: int,
        loading_max: int,
        work: WorkRecord,
    ) -> None:
        self._by_type: dict[str, Runtime] = {}
        for runtime in runtimes:
            for type in runtime.types:
                self._by_type.setdefault(type, runtime)
        self.capacity_bytes, self.loading_max = capacity_bytes, loading_max
        self.sizes = ModelSizes()
        self._work = work
        self.loading = 0
        self.overruns = 0
        self._connections, self._timers = connections, timers
        self._lock = threading.Lock()
        self._models: dict[str, CachedModel] = {}
        self._queue: queue.SimpleQueue[CachedModel | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._trimming = self._to_trim = False
        self._leftovers = CollectionSchedule(time.monotonic(), capacity_bytes)
        self._dropped: list[tuple[UnloadedModel, int]] = []  # unloaded since the last trim
        for _ in range(loading_max):
            self._start_loader()

    @property
    def types(self) -> list[str]:
        """Return the types of models that the runtimes open."""
        return list(self._by_type)

    def sizes_of_all(self) -> list[tuple[str, int]]:
        """Return (model, bytes) of each loaded model."""
        with self._lock:
            return [
                (model, entry.size_bytes)
                for model, entry in self._models.items()
                if entry.phase is Phase.LOADED
            ]

    def get(self, model: str) -> CachedModel:
        """Return a loaded model. Raises: RequestFailed."""
        with self._lock:
            entry = self._models.get(model)
        if entry is None or entry.phase is not Phase.LOADED:
            raise RequestFailed("none", f"model {model!r} is not loaded here")
        return entry

    def predict_size(self, artifact: Artifact) -> int:
        """Estimate the bytes that a model will occupy. Raises: RequestFailed."""
        return self._runtime_of(artifact).predict_size(artifact) or self.sizes.predict(
            artifact.type, artifact.path
        )

    def _runtime_of(self, artifact: Artifact) -> Runtime:
        runtime = self._by_type.get(artifact.type)
        if runtime is None:
            raise RequestFailed(
                "host",
                f"no runtime of this host opens type {artifact.type!r}; it opens"
                f" {', '.join(self.types)}",
            )
        return runtime

    # -- loading

    def load(self, artifact: Artifact, timeout_s: float) -> Future[dict[str, object]]:
        """Load a model; the result is its description. The future fails with RequestFailed.

        A second load of the same artifact gets the same future. A load of a model that is being
        unloaded starts afterwards.
        """
        runtime = self._runtime_of(artifact)
        with self._lock:
            there = self._models.get(artifact.model)
            if there is None:
                entry = self._models[artifact.model] = CachedModel(artifact, runtime, timeout_s)
                self._queue.put(entry)
                return entry.answer
        if there.phase is Phase.LEAVING:
            answer: Future[dict[str, object]] = Future()
            there.gone.add_done_callback(lambda _: self._load_for(answer, artifact, timeout_s))
            return answer
        if (there.artifact.type, there.artifact.path, there.artifact.key) != (
            artifact.type,
            artifact.path,
            artifact.key,
        ):
            raise RequestFailed(
                "none",
                f"model {artifact.model!r} is already loaded from {there.artifact.path!r};"
                " unload it first",
            )
        return there.answer

    def load_after(
        self, unloads: list[Future[None]], artifact: Artifact, timeout_s: float
    ) -> Future[dict[str, object]]:
        """Load a model once others are unloaded, or could not be; see `load`."""
        answer: Future[dict[str, object]] = Future()
        _call_after(unloads, partial(self._load_for, answer, artifact, timeout_s))
        return answer

    def _load_for(
        self, answer: Future[dict[str, object]], artifact: Artifact, timeout_s: float
    ) -> None:
        try:
            relay(self.load(artifact, timeout_s), answer)
        except RequestFailed as error:
            answer.set_exception(error)

    def _start_loader(self) -> None:
        name = f"clipper-host-load-{next(self._numbers)}"
        KeptThread(name, self._load_all)

    def _replace_loader(self) -> None:
        """Start another loader; try again in a moment while the system has no thread."""
        try:
            self._start_loader()
        except (RuntimeError, MemoryError) as error:
            print(f"no thread that loads models: {error}", file=sys.stderr, flush=True)
            self._timers.after(AGAIN_S, self._replace_loader)

    def _load_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                if entry.phase is Phase.LOADING:
                    with self._work.on(entry.artifact.model):
                        self._load(entry)
                else:
                    self._settle(entry, None, None)
            except BaseException as error:  # this thread goes on: without it nothing is loaded
                self._end(entry, error)
            if entry.given_up:  # another thread is in this entry's place
                return

    def _load(self, entry: CachedModel) -> None:
        artifact, loaded, fault, measure = entry.artifact, None, None, None
        served: Model | None = None
        started = time.monotonic()
        with self._lock:
            self.loading += 1
        timers = [
            self._timers.after(entry.timeout_s + PREPARE_S, lambda: self._give_up(entry, measure))
        ]
        try:
            if (size := self.predict_size(artifact)) > self.capacity_bytes:
                why = (
                    f"model {artifact.model!r} needs about {size} bytes; the capacity of this host"
                    f" is {self.capacity_bytes}"
                )
                raise RequestFailed("host", why)
            entry.runtime.prepare(artifact.type)
            measure = self.sizes.start(artifact.type, artifact.path)
            timers.append(
                self._timers.after(entry.timeout_s, lambda: self._give_up(entry, measure))
            )
            loaded = entry.runtime.load(artifact)
            served = with_tensors(
                loaded.model,
                *_types(artifact, loaded.model),
                name=artifact.model,
                row_by_row=False,
            )
            entry.size_bytes = loaded.size_bytes or (
                measure.take() if loaded.inside else self.sizes.default_bytes()
            )
        except RequestFailed as error:
            fault = error
        except ArtifactError as error:
            fault = RequestFailed("artifact", str(error) or "the model cannot be loaded")
        except BaseException as error:  # also SystemExit raised by a user's module
            print(
                f"model {artifact.model!r} did not load:\n{user_traceback(error)}",
                file=sys.stderr,
                flush=True,
            )
            fault = RequestFailed(_cause_of(error), explain(error))
        if measure is not None:
            measure.end()
        if loaded is not None and entry.size_bytes > self.capacity_bytes:
            why = (
                f"model {artifact.model!r} occupies {entry.size_bytes} bytes; the capacity of this"
                f" host is {self.capacity_bytes}"
            )
            fault = RequestFailed("host", why)
        entry.took_ms = (time.monotonic() - started) * 1000
        with self._lock:
            self.loading -= not entry.given_up
        self._settle(entry, loaded, fault, served)
        for timer in timers:
            timer.cancel()

    def _settle(
        self,
        entry: CachedModel,
        loaded: Loaded | None,
        fault: RequestFailed | None,
        served: Model | None = None,
    ) -> None:
        """Finish a load that succeeded or failed. served: the model as batches call it."""
        description: dict[str, object] | None = None
        with self._lock:
            if not entry.settled:
                entry.settled = True
                if loaded is not None and fault is None and entry.phase is Phase.LOADING:
                    entry.loaded, entry.gate = loaded, Gate(loaded.concurrency)
                    entry.evaluator = Evaluator(
                        served or loaded.model, entry.artifact.model, work=self._work
                    )
                    entry.phase = Phase.LOADED
                    description = entry.describe()
        if description is not None:
            entry.answer.set_result(description)
            return
        if loaded is not None:
            self._unload(entry, loaded)
        if not entry.given_up:
            self._forget(entry)
            entry.answer.set_exception(
                fault
                or RequestFailed("host", f"model {entry.artifact.model!r} was unloaded meanwhile")
            )

    def _give_up(self, entry: CachedModel, measure: SizeMeasurement | None) -> None:
        """Give up a load that exceeded its timeout. Does nothing if the load has finished."""
        with self._lock:
            if entry.settled:
                return
            entry.given_up = entry.settled = True
            self.loading -= 1
            self.overruns += 1
        if measure is not None:
            measure.end()
        self._replace_loader()
        self._forget(entry)
        name = entry.artifact.model
        entry.answer.set_exception(
            RequestFailed("host", f"model {name!r} did not load within {entry.timeout_s:g} s")
        )

    def _end(self, entry: CachedModel, error: BaseException) -> None:
        """Finish a load that ended with an unexpected error."""
        name = entry.artifact.model
        print(f"model {name!r}:\n{user_traceback(error)}", file=sys.stderr, flush=True)
        entry.settled = True
        self._forget(entry)
        with contextlib.suppress(InvalidStateError):
            entry.answer.set_exception(RequestFailed("host", explain(error)))

    def _unload(self, entry: CachedModel, loaded: Loaded) -> None:
        """Let the runtime unload a model; what it raises does not keep the model here."""
        try:
            entry.runtime.unload(entry.artifact, loaded)
        except BaseException as error:
            name = entry.artifact.model
            print(
                f"model {name!r} did not unload:\n{user_traceback(error)}",
                file=sys.stderr,
                flush=True,
            )

    def _forget(self, entry: CachedModel) -> None:
        with self._lock:
            if self._models.get(entry.artifact.model) is entry:
                del self._models[entry.artifact.model]
            entry.phase = Phase.LEAVING
        with contextlib.suppress(InvalidStateError):
            entry.gone.set_result(None)

    # -- unloading

    def unload(self, model: str, timeout_s: float = UNLOAD_S) -> Future[None]:
        """Unload a model; the future is done when nothing of it is left.

        It fails with RequestFailed when a running batch does not end within timeout_s.
        """
        with self._lock:
            entry = self._models.get(model)
            if entry is None:
                return done_with(None)
            was, entry.phase = entry.phase, Phase.LEAVING
        if was is Phase.LOADED:
            self._leave(entry, timeout_s)
        return entry.gone

    def _leave(self, entry: CachedModel, timeout_s: float) -> None:
        connections = self._connections.leave_all(entry.artifact.model)
        _call_after(connections, partial(self._drop, entry))
        if connections:
            stuck = self._timers.after(timeout_s, lambda: self._stuck(entry, timeout_s))
            entry.gone.add_done_callback(stuck.cancel)

    def _drop(self, entry: CachedModel) -> None:
        loaded, entry.loaded, entry.evaluator = entry.loaded, None, None
        unloaded = UnloadedModel(loaded.model if loaded is not None else None)
        if loaded is not None:
            self._unload(entry, loaded)
        del loaded
        self._forget(entry)
        with self._lock:
            self._dropped.append((unloaded, entry.size_bytes))
            self._to_trim = True
        self._trim_soon()

    def _stuck(self, entry: CachedModel, timeout_s: float) -> None:
        if entry.gone.done():
            return
        with self._lock:
            self.overruns += 1
            if self._models.get(entry.artifact.model) is entry:
                del self._models[entry.artifact.model]
        with contextlib.suppress(InvalidStateError):
            entry.gone.set_exception(
                RequestFailed(
                    "host",
                    f"a batch of model {entry.artifact.model!r} did not end within {timeout_s:g} s",
                )
            )

    def _trim_soon(self) -> None:
        with self._lock:
            if self._trimming:
                return
            self._trimming = True
        self._timers.after(TRIM_S, self._trim)

    def _trim(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._trimming = False
            for unloaded, size_bytes in self._dropped:
                if not unloaded.is_gone():
                    self._leftovers.add(size_bytes)
            self._dropped.clear()
            other_bytes = resident_bytes() - sum(one.size_bytes for one in self._models.values())
            wait_s = self._leftovers.wait_s(now_s, other_bytes)
            to_trim, self._to_trim = self._to_trim, False
            if wait_s == 0:
                self._leftovers.clear(now_s)
        if wait_s == 0:
            gc.collect()
        elif wait_s is not None:
            self._trim_soon()  # check again later
        if to_trim or wait_s == 0:
            trim()

    def close(self) -> None:
        """Stop the loader threads once they are idle."""
        for _ in range(self.loading_max):
            self._queue.put(None)
