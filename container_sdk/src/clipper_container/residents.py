"""The models of a host: loading, loaded, on their way out.

A load runs on one of `loading_max` threads, its time counted from when it begins. One that overruns
it cannot be ended: it is given up, and its thread replaced; of what it may bring yet nothing is
kept. After OVERRUNS_MAX of them the host is FAILING.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from clipper_container.adapters.function import explain
from clipper_container.evaluate import Evaluator, user_traceback
from clipper_container.line import Gate, relay
from clipper_container.lines import Lines
from clipper_container.runtime import Artifact, ArtifactError, Loaded, Runtime
from clipper_container.serve import Options
from clipper_container.sizes import Leftovers, Measure, Sizes, trim
from clipper_container.timers import Timers
from clipper_container.work import WorkRecord

OVERRUNS_MAX = 3
PREPARE_S = 60.0  # to import what models of a type need, beside the time of the load
UNLOAD_S = 60.0  # for the batches in hand
TRIM_S = 1.0  # at most so often is memory given back


class Fault(Exception):
    """A request that failed. whose: artifact, host, or none (docs/hosts.md)."""

    def __init__(self, whose: str, why: str) -> None:
        super().__init__(why)
        self.whose = whose


class Phase(Enum):
    LOADING = 0
    LOADED = 1
    LEAVING = 2


@dataclass(eq=False, slots=True)
class Resident:
    """One model. The fields behind `answer` are there once it is LOADED."""

    artifact: Artifact
    runtime: Runtime
    timeout_s: float
    phase: Phase = Phase.LOADING
    answer: Future[Resident] = field(default_factory=Future)
    settled: bool = False  # it has loaded, failed, or overrun its time
    given_up: bool = False
    loaded: Loaded | None = None
    evaluator: Evaluator | None = None
    gate: Gate = field(default_factory=lambda: Gate(1))
    size_bytes: int = 0
    took_ms: float = 0.0
    gone: Future[None] = field(default_factory=Future)

    def told(self) -> dict[str, Any]:
        """What `load` answers."""
        assert self.loaded is not None
        options = self.options()
        return {
            "size_bytes": self.size_bytes,
            "concurrency": max(1, self.loaded.concurrency),
            "input": options.input,
            "output": options.output,
            "took_ms": self.took_ms,
        }

    def options(self, token: str = "", replica: int = 0) -> Options:
        """What its HELLO says."""
        assert self.loaded is not None
        model, asked = self.loaded.model, self.artifact
        return Options(
            name=asked.model,
            replica=replica,
            input=asked.input if asked.input != "any" else model.input,
            output=asked.output if asked.output != "any" else model.output,
            batch_max=model.batch_max,
            token=token,
            sessions=model.sessions,
        )


class Residents:
    """Threads: any."""

    def __init__(
        self,
        runtimes: Iterable[Runtime],
        lines: Lines,
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
        self.sizes = Sizes()
        self._work = work
        self.loading = 0
        self.overruns = 0
        self._lines, self._timers = lines, timers
        self._lock = threading.Lock()
        self._models: dict[str, Resident] = {}
        self._queue: queue.SimpleQueue[Resident | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._trimming = self._to_trim = False
        self._leftovers = Leftovers(time.monotonic())
        for _ in range(loading_max):
            self._start_loader()

    @property
    def types(self) -> list[str]:
        return list(self._by_type)

    def sizes_of_all(self) -> list[tuple[str, int]]:
        with self._lock:
            return [
                (model, one.size_bytes)
                for model, one in self._models.items()
                if one.phase is Phase.LOADED
            ]

    def of(self, model: str) -> Resident:
        """A loaded one. Raises: Fault."""
        with self._lock:
            one = self._models.get(model)
        if one is None or one.phase is not Phase.LOADED:
            raise Fault("none", f"model {model!r} is not loaded here")
        return one

    def predict_size(self, artifact: Artifact) -> int:
        """Raises: Fault."""
        return self._runtime_of(artifact).predict_size(artifact) or self.sizes.predict(
            artifact.type, artifact.path
        )

    def _runtime_of(self, artifact: Artifact) -> Runtime:
        runtime = self._by_type.get(artifact.type)
        if runtime is None:
            raise Fault(
                "host", f"no runtime here opens {artifact.type!r}, only {', '.join(self.types)}"
            )
        return runtime

    # -- loading

    def load(self, artifact: Artifact, timeout_s: float) -> Future[Resident]:
        """Fails with Fault."""
        runtime = self._runtime_of(artifact)
        with self._lock:
            there = self._models.get(artifact.model)
            if there is None:
                one = self._models[artifact.model] = Resident(artifact, runtime, timeout_s)
                self._queue.put(one)
                return one.answer
        if there.phase is Phase.LEAVING:
            answer: Future[Resident] = Future()
            there.gone.add_done_callback(lambda _: relay(self.load(artifact, timeout_s), answer))
            return answer
        if (there.artifact.type, there.artifact.path, there.artifact.key) != (
            artifact.type,
            artifact.path,
            artifact.key,
        ):
            raise Fault(
                "none",
                f"model {artifact.model!r} is here already, from {there.artifact.path!r}; unload it"
                " first",
            )
        return there.answer

    def _start_loader(self) -> None:
        name = f"clipper-host-load-{next(self._numbers)}"
        threading.Thread(target=self._load_all, name=name, daemon=True).start()

    def _load_all(self) -> None:
        while (one := self._queue.get()) is not None:
            if one.phase is Phase.LOADING:
                with self._work.on(one.artifact.model):
                    self._load(one)
            else:
                self._settle(one, None, None)
            if one.given_up:  # another thread is in this one's place
                return

    def _load(self, one: Resident) -> None:
        artifact, loaded, fault, measure = one.artifact, None, None, None
        started = time.monotonic()
        with self._lock:
            self.loading += 1
        self._timers.after(one.timeout_s + PREPARE_S, lambda: self._give_up(one, measure))
        try:
            if (size := self.predict_size(artifact)) > self.capacity_bytes:
                why = (
                    f"model {artifact.model!r} needs about {size} bytes; this host has"
                    f" {self.capacity_bytes} in all"
                )
                raise Fault("host", why)
            one.runtime.prepare(artifact.type)
            measure = self.sizes.begin(artifact.type, artifact.path)
            self._timers.after(one.timeout_s, lambda: self._give_up(one, measure))
            loaded = one.runtime.load(artifact)
            one.size_bytes = loaded.size_bytes or (
                measure.take() if loaded.inside else self.sizes.default_bytes()
            )
        except Fault as error:
            fault = error
        except ArtifactError as error:
            fault = Fault("artifact", str(error) or "it cannot be loaded")
        except BaseException as error:  # SystemExit of a user's module too
            print(
                f"model {artifact.model!r} did not load:\n{user_traceback(error)}",
                file=sys.stderr,
                flush=True,
            )
            fault = Fault("host", explain(error))
        if measure is not None:
            measure.end()
        if loaded is not None and one.size_bytes > self.capacity_bytes:
            why = (
                f"model {artifact.model!r} occupies {one.size_bytes} bytes; this host has"
                f" {self.capacity_bytes} in all"
            )
            fault = Fault("host", why)
        one.took_ms = (time.monotonic() - started) * 1000
        with self._lock:
            self.loading -= not one.given_up
        self._settle(one, loaded, fault)

    def _settle(self, one: Resident, loaded: Loaded | None, fault: Fault | None) -> None:
        """A load is over: it has brought something, or not."""
        with self._lock:
            if not one.settled:
                one.settled = True
                if loaded is not None and fault is None and one.phase is Phase.LOADING:
                    one.loaded, one.gate = loaded, Gate(loaded.concurrency)
                    one.evaluator = Evaluator(loaded.model, one.artifact.model, work=self._work)
                    one.phase = Phase.LOADED
        if one.phase is Phase.LOADED:
            one.answer.set_result(one)
            return
        if loaded is not None:
            one.runtime.unload(one.artifact, loaded)
        if not one.given_up:
            self._forget(one)
            one.answer.set_exception(
                fault or Fault("host", f"model {one.artifact.model!r} was unloaded meanwhile")
            )

    def _give_up(self, one: Resident, measure: Measure | None) -> None:
        """Its time is over. Does nothing if it has loaded, or failed."""
        with self._lock:
            if one.settled:
                return
            one.given_up = one.settled = True
            self.loading -= 1
            self.overruns += 1
        if measure is not None:
            measure.end()
        self._start_loader()
        self._forget(one)
        name = one.artifact.model
        one.answer.set_exception(
            Fault("host", f"model {name!r} had not loaded after {one.timeout_s:g} s")
        )

    def _forget(self, one: Resident) -> None:
        with self._lock:
            if self._models.get(one.artifact.model) is one:
                del self._models[one.artifact.model]
            one.phase = Phase.LEAVING
        with contextlib.suppress(InvalidStateError):
            one.gone.set_result(None)

    # -- unloading

    def unload(self, model: str, timeout_s: float = UNLOAD_S) -> Future[None]:
        """Done when nothing of it is left; fails with Fault when its batches do not end."""
        with self._lock:
            one = self._models.get(model)
            if one is None:
                nothing: Future[None] = Future()
                nothing.set_result(None)
                return nothing
            was, one.phase = one.phase, Phase.LEAVING
        if was is Phase.LOADED:
            self._leave(one, timeout_s)
        return one.gone

    def _leave(self, one: Resident, timeout_s: float) -> None:
        lines = self._lines.leave_all(one.artifact.model)
        left, lock = [len(lines)], threading.Lock()

        def closed(_: Any = None) -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                self._drop(one)

        if not lines:
            self._drop(one)
        for line in lines:
            line.add_done_callback(closed)
        if lines:
            self._timers.after(timeout_s, lambda: self._stuck(one, timeout_s))

    def _drop(self, one: Resident) -> None:
        loaded, one.loaded, one.evaluator = one.loaded, None, None
        if loaded is not None:
            one.runtime.unload(one.artifact, loaded)
        del loaded
        self._forget(one)
        with self._lock:
            self._leftovers.add(one.size_bytes)
            self._to_trim = True
        self._trim_soon()

    def _stuck(self, one: Resident, timeout_s: float) -> None:
        if one.gone.done():
            return
        with self._lock:
            self.overruns += 1
            if self._models.get(one.artifact.model) is one:
                del self._models[one.artifact.model]
        with contextlib.suppress(InvalidStateError):
            one.gone.set_exception(
                Fault(
                    "host",
                    f"a batch of model {one.artifact.model!r} has not ended after {timeout_s:g} s",
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
            wait_s, to_trim, self._to_trim = self._leftovers.wait_s(now_s), self._to_trim, False
            if wait_s == 0:
                self._leftovers.clear(now_s)
        if wait_s == 0:
            gc.collect()
        elif wait_s is not None:
            self._trim_soon()  # and look again
        if to_trim or wait_s == 0:
            trim()

    def close(self) -> None:
        for _ in range(self.loading_max):
            self._queue.put(None)
