"""ClipperServer: one node, built from a Config. The only place where objects meet."""

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from clipper.catalog import Catalog, View
from clipper.config import Config, ServerSettings, merge_batching
from clipper.deploy.deployer import ContainerSpec, EventKind, ReplicaEvent
from clipper.deploy.package import pack
from clipper.deploy.process import ProcessDeployer, RestartPolicy
from clipper.errors import (
    ClipperError,
    DeployFailed,
    InvalidInput,
    ShuttingDown,
    UnknownApplication,
    UnknownModel,
    did_you_mean,
)
from clipper.selection import policy_named
from clipper.serving.address import listen
from clipper.serving.application import ApplicationHandle, array_slo_in_us, slo_in_us
from clipper.serving.arrays import predict_array
from clipper.serving.cache import Cache
from clipper.serving.containers import Containers, Hello, Seat
from clipper.serving.dispatch import Dispatch
from clipper.serving.engines import Engines
from clipper.serving.learning import Learning
from clipper.serving.models import Running, RunningModels, row_shape
from clipper.serving.processor import Question, predict
from clipper.serving.scaling import Expected, Look, Scaling, replica_bounds
from clipper.state_dir import StateDir
from clipper.store import open_store
from clipper.types import VERSION_MAX, Application, Batching, InputType, Model, PredictionRequest, Similar, VersionedModel
from clipper_core.future import Future
from clipper_core.model import Model as CoreModel

_log = logging.getLogger(__name__)
_QUESTIONS_MAX = 4096  # distinct sets of candidate models kept resolved
_DRAIN_POLL_S = 0.002
_QUIET_S = 0.025
_APP_SETTINGS = ("slo_ms", "default", "policy", "confidence_min", "input")


class ClipperServer:
    """One serving node. Threads: any. Use it in a `with` block, or call close().

    Answers queries by their own deadline from models in processes of their own. Build one with `clipper.start()`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pid = os.getpid()
        self._closed = False
        self._engines = Engines(config)
        self._dir = StateDir(config.server.state, config.server.folder)
        try:
            self._store = open_store(config.server.state, config.limits.state_bytes_max)
            self.catalog = Catalog(self._store)
            self._learning = Learning(self._store, self._dir.folder, config.feedback)
        except BaseException:
            self._dir.close()
            raise
        self._dispatch = Dispatch(*self._engines)
        self._running = RunningModels(self._engines.of, config.limits)
        self._token = config.server.token or secrets.token_urlsafe(24)
        self._containers = Containers(
            self._engines,
            self._token,
            config.server.heartbeat_ms,
            config.limits.frame_bytes_max,
            self._seat_of,
            self._came_or_went,
            shared_memory=config.server.shared_memory,
        )
        self._expected = Expected(self._expect, self._engines.now_us)
        self._scaling = Scaling(config.server, self._looks, self._follow, self._restart)
        self._changing = threading.Lock()  # how many replicas a model has
        self._deployer = ProcessDeployer(self._on_replica, _restart_policy(config.server))
        self._failures: dict[VersionedModel, str] = {}
        self._numbering = threading.Lock()  # from the choice of a version to its place in _running
        self._questions: dict[str, Question] = {}
        self._candidates: dict[tuple[Any, ...], Question] = {}
        self._node = secrets.token_hex(4)
        self.cache = Cache(self.model, lambda: self.stats()["cache"])

    # -- life

    def start(self) -> Self:
        """Listen, bring back what the catalog knows, then what the config declares."""
        try:
            self._listener = listen(self.config.server.address, self._dir.run)
            self._dispatch.loop.listen(self._listener.fd)
            self._dispatch.start()
            self._containers.start()
            self._scaling.start()
            self._end_following = self.catalog.on_change(self._resolve)
            for model in self.catalog.models():
                self._running.ensure(model)
                self._start_replicas(model)
            self._resolve(self.catalog.view)
            self._declare()
            self._learning.replay()
        except BaseException:
            self.close(drain_s=0)
            raise
        atexit.register(self.close)
        return self

    def close(self, drain_s: float | None = None) -> None:
        """Refuse new queries, let those in flight finish for `drain_s` seconds, end the rest, stop all. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._engines.refuse_new()
        self._scaling.stop()
        until = time.monotonic() + (self.config.server.drain_s if drain_s is None else drain_s)
        while self._engines.in_flight() and time.monotonic() < until:
            time.sleep(_DRAIN_POLL_S)
        self._containers.leaving = True
        self._deployer.close()
        self._dispatch.stop()
        self._containers.stop()
        self.catalog.close()
        self._learning.close()
        self._store.close()
        if hasattr(self, "_listener"):
            self._listener.remove()
        self._dir.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where containers dial in: `unix:/path` or `tcp:host:port`."""
        return self._listener.connect

    @property
    def token(self) -> str:
        """What a container started elsewhere needs in CLIPPER_TOKEN."""
        return self._token

    # -- models

    def deploy(
        self,
        name: str,
        model: Any,
        *,
        version: int | None = None,
        replicas: int | tuple[int, int] | None = None,
        input: str | InputType | None = None,
        output: str = "any",
        batching: str | Mapping[str, Any] | Batching | None = None,
        cache: bool = True,
        similar: Similar | None = None,
        finite: bool = False,
        retry_singly: bool = False,
        row_by_row: bool = False,
        code: Sequence[str] = (),
        wait: bool = True,
    ) -> CoreModel:
        """Deploy a function, a bound method, a scikit-learn estimator, a `clipper_container.Model`, or "module:attribute".

        It runs in `replicas` processes of its own ((1, 4): as many of 1 to 4 as the load asks for) and takes a batch: an array
        of shape (n, *row), or a list of str or bytes; with `row_by_row`, one input at a time. input: `f64[64]`, `str`, ...;
        taken from the estimator, or from the first query, when not given. similar: near inputs share predictions, as in
        `deploy("svm", f, input="f32[784]", similar=Similar(width=0.5))`; `stats()` tells how far that was wrong.
        finite: refuse inputs with NaN or infinities. retry_singly: when a batch fails, try its rows one by one. code: folders
        or files the model imports. wait: until every replica is connected; the version becomes the latest only then.
        Raises PackagingError, AlreadyExists, DeployFailed (with the container's last lines).
        """
        self._check_open()
        least, most = replica_bounds(name, 1 if replicas is None else replicas, self.config.limits.replicas_max)
        settings = {
            "output": str(_type(output)),
            "replicas": least,
            "replicas_max": most,
            "batching": merge_batching(self.config.batching, batching),
            "cache": cache,
            "similar": similar,
            "finite": finite,
            "retry_singly": retry_singly,
            "row_by_row": row_by_row,
        }
        with self._numbering:
            record = _replace(self._record(name, model, version, code, input), **settings)
            running = self._running.ensure(record)
        try:
            self._start_replicas(record)
            if wait and record.replicas:
                self._await_replicas(record)
            self.catalog.register(record)
        except BaseException:
            self._deployer.stop(record.name, record.version)
            self._running.forget(record.id)
            raise
        return running.core

    def model(self, name: str | VersionedModel) -> CoreModel:
        """A model's own handle: predict(x), predict_many(rows), put(x, output). The latest version when none is named."""
        return self._running_of(self.catalog.view.model(name)).core

    def scale(self, name: str | VersionedModel, replicas: int | tuple[int, int]) -> None:
        """Start or stop containers until `replicas` of a version run, or within these bounds as many as the load asks for."""
        self._check_open()
        least, most = replica_bounds(str(name), replicas, self.config.limits.replicas_max)
        with self._changing:
            model = self.catalog.view.model(name)
            self._running.ensure(self.catalog.set_replicas(model.id, least, most))
            count = min(max(self._scaling.wanted(model.id, least), least), most) if most else least
            self._scale_to(model, count)

    def _scale_to(self, model: Model, count: int) -> None:
        """Under `_changing`. Numbers from `count` on are drained, then stopped; those below it are started."""
        mine = [s for s in self._deployer.list() if (s.name, s.version) == (model.name, model.version)]
        for number in sorted(s.replica for s in mine if s.replica >= count and s.state != "stopped"):
            self._containers.drain(model.id, number)
            self._deployer.stop(model.name, model.version, number)
        self._start_replicas(_replace(model, replicas=count))

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Take a version out of service for good. StillLinked while an application needs it, unless by `force`."""
        model = self.catalog.retire_model(name, force=force)
        self._await_quiet(model.id)
        with self._changing:
            self._containers.drain(model.id)
            self._deployer.stop(model.name, model.version)
            self._running.forget(model.id)

    def _await_quiet(self, id_: VersionedModel) -> None:
        """Wait until nothing has been queued or in flight for a moment, at most `drain_s`: a thread that looked the model up
        just before it was retired is yet to ask."""
        running = self._running.get(id_)
        until = time.monotonic() + self.config.server.drain_s
        quiet = time.monotonic()
        while running and self._containers.of(id_) and quiet < until and time.monotonic() - quiet < _QUIET_S:
            time.sleep(_DRAIN_POLL_S)
            queued = running.core.engine.snapshot()["models"][running.core.index]["queued"]
            replicas = [replica.engine.replica(replica.conn) for replica in self._containers.of(id_)]
            if queued or any(replica and replica["in_flight"] for replica in replicas):
                quiet = time.monotonic()

    def logs(self, name: str | VersionedModel, replica: int = 0) -> Sequence[str]:
        """The last lines a container wrote."""
        model = self.catalog.view.model(name)
        try:
            return self._deployer.logs(model.name, model.version, replica)
        except KeyError:
            raise UnknownModel(f"no container {model.id}/{replica} was started here.") from None

    # -- applications

    def app(
        self,
        name: str,
        models: str | VersionedModel | Sequence[str | VersionedModel] | None = None,
        **settings: Any,
    ) -> ApplicationHandle:
        """An application: made, or changed, when settings are given; else the one of that name.

        models: linked models, `svm` or `svm:3`.  settings: slo_ms, default, policy ("stacking", "exp3(eta=0.05)"),
        confidence_min, input. Raises UnknownModel, TypeConflict, InvalidInput.
        """
        self._check_open()
        if "policy" in settings:
            policy_named(settings["policy"])
        if unknown := sorted(set(settings) - set(_APP_SETTINGS)):
            guess = did_you_mean(unknown[0], _APP_SETTINGS) or "."
            hint = f"Settings: {', '.join(_APP_SETTINGS)}."
            raise InvalidInput(f"unknown setting {unknown[0]!r} of application {name!r}{guess}", hint=hint)
        if models is not None:
            settings["models"] = (models,) if isinstance(models, str | VersionedModel) else tuple(models)
        if "slo_ms" in settings:
            slo_in_us(settings["slo_ms"], self.config.limits.slo_ms_max)
        if name not in self.catalog.view.applications and not settings:
            raise UnknownApplication.named(name, self.catalog.view.applications)
        if name in self.catalog.view.applications:
            if settings:
                self.catalog.update_application(name, **settings)
        else:
            self.catalog.register_application(name, settings.pop("models", ()), **settings)
        return ApplicationHandle(name, self._question, self.config.limits.slo_ms_max)

    def schedule_prediction(self, request: PredictionRequest) -> Future:
        """Schedule one query; -> the Future of an Answer, at once. See PredictionRequest."""
        question = self._question_asked(request)
        slo_us = question.slo_us
        if request.slo_ms is not None:
            slo_us = slo_in_us(request.slo_ms, self.config.limits.slo_ms_max)
        return predict(question, request.input, request.user, slo_us, request.salt)

    def _question_asked(self, request: PredictionRequest) -> Question:
        if request.application is not None and not request.candidate_models:
            return self._question(request.application)
        return self._question_for(request)

    def schedule_predictions(
        self,
        inputs: Any,
        application: str | None = None,
        models: Sequence[str | VersionedModel] = (),
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
    ) -> Future:
        """Schedule an array of queries to an application, or to models named here; -> the Future of `Answers`.
        See ApplicationHandle.predict_many and PredictionRequest."""
        request = PredictionRequest(inputs, application, tuple(models), user, slo_ms, salt)
        slo_us = array_slo_in_us(slo_ms, self.config.limits.slo_ms_max)
        return predict_array(self._question_asked(request), inputs, user, slo_us, salt)

    # -- looking in

    def stats(self) -> dict[str, Any]:
        """Counters and gauges now: `models` by `name:version` (their replicas, how many are `wanted` and how many it `has`;
        `engine`: the number of the one that serves it), `cache`, `issued`, `answered`, `loop`: of all engines."""
        snapshot = self._engines.snapshot()
        by_place = {(row["engine"], row["index"]): row for row in snapshot["models"]}
        models = {}
        for running in self._running:
            counters = by_place.get(self._engines.place_of(running.core))
            if counters is None:  # deployed just now
                continue
            replicas = self._replica_stats(running)
            wanted = self._scaling.wanted(running.model.id, running.model.replicas)
            has = sum(replica["state"] == "ready" for replica in replicas)
            near = running.core.similar
            models[str(running.model.id)] = {
                **counters, "replicas": replicas, "wanted": wanted, "has": has,
                **({"similar": near.stats()} if near is not None else {}),
            }  # fmt: skip
        return {**snapshot, "models": models, "loop": self._dispatch.snapshot()}

    def _replica_stats(self, running: Running) -> list[dict[str, Any]]:
        rows: dict[tuple[int, int], dict[str, Any]] = {}  # by number and pid: two started elsewhere may have one number
        for replica in self._containers.of(running.model.id):
            batcher = replica.engine.replica(replica.conn)
            if batcher is not None:
                key = replica.hello.replica, replica.hello.pid
                rows[key] = {**batcher, "pid": replica.hello.pid, "state": "ready"}
        for status in self._deployer.list():
            if (status.name, status.version) == (running.model.name, running.model.version):
                row = rows.setdefault(
                    (status.replica, status.pid),
                    {"number": status.replica, "pid": status.pid, "state": str(status.state)},
                )
                row |= {"restart_count": status.restart_count, "detail": status.detail}
        return [rows[key] for key in sorted(rows)]

    # -- inside

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("this server is closed.", hint="Start another with clipper.start().")

    def _record(
        self, name: str, model: Any, version: int | None, code: Sequence[str], input: str | InputType | None
    ) -> Model:
        chosen = self._next_version(name) if version is None else version
        if not isinstance(chosen, int) or not 1 <= chosen <= VERSION_MAX:
            raise InvalidInput(f"version={version!r} of model {name!r}: a whole number from 1, or None for the next.")
        id_ = VersionedModel(name, chosen)
        if id_ in self._running.ids() or any(known.id == id_ for known in self.catalog.view.versions.get(name, ())):
            self.catalog.refuse_existing(id_)
        package = pack(model, name, chosen, self._dir.models, [code] if isinstance(code, str) else code)
        type_ = _type(input or package.input or "any")
        return Model(name, chosen, type_, target=package.target, sha256=package.sha256, code=package.code)

    def _next_version(self, name: str) -> int:
        taken = [model.version for model in self.catalog.view.versions.get(name, ())]
        taken += [id_.version or 0 for id_ in self._running.ids() if id_.name == name]
        return max(taken, default=0) + 1

    def _start_replicas(self, model: Model) -> None:
        self._failures.pop(model.id, None)
        if not model.target:
            return
        alive = {(s.name, s.version, s.replica) for s in self._deployer.list() if s.state not in ("stopped", "failed")}
        spec = self._spec(model)
        for number in range(model.replicas):
            if (model.name, model.version, number) not in alive:
                self._deployer.start(spec, number)

    def _spec(self, model: Model) -> ContainerSpec:
        cores = os.cpu_count() or 1
        return ContainerSpec(
            name=model.name,
            version=model.version,
            target=model.target,
            sha256=model.sha256,
            input=str(model.input),
            output=model.output,
            connect=self.address,
            token=self._token,
            threads=self.config.server.model_threads or max(1, cores // max(1, model.replicas)),
            retry_singly=model.retry_singly,
            row_by_row=model.row_by_row,
            pad=model.batching.size_max if model.batching.pad else 0,
            code=model.code,
        )

    def _await_replicas(self, model: Model) -> None:
        until = time.monotonic() + self.config.server.load_s

        def failed() -> bool:
            return model.id in self._failures

        while not self._containers.wait_for(model.id, model.replicas, min(1.0, max(0.0, until - time.monotonic())), failed):
            if failure := self._failures.get(model.id):
                raise DeployFailed(failure)
            if time.monotonic() >= until:
                lines = "\n".join(self._deployer.logs(model.name, model.version, 0)[-20:])
                raise DeployFailed(
                    f"model '{model.id}' did not connect within {self.config.server.load_s:g} s. Its last lines:\n{lines}",
                    hint="Raise server.load_s if it is slow to load.",
                )
            self._check_open()

    # -- replicas come, go and are asked for

    def _looks(self) -> dict[VersionedModel, Look]:
        models = self.stats()["models"]
        running = [one.model for one in self._running if str(one.model.id) in models]
        return {m.id: Look(m.replicas if m.replicas_max else 0, m.replicas_max, models[str(m.id)]) for m in running}

    def _follow(self, id_: VersionedModel, count: int, why: str) -> None:
        with self._changing:
            running = self._running.get(id_)
            if running is None or not running.model.target or not running.model.replicas_max or self._closed:
                return
            _log.info("model %s: %d replicas from now on (%s)", id_, count, why)
            self._scale_to(running.model, count)

    def _restart(self, id_: VersionedModel, number: int, pid: int) -> None:
        killed = self._deployer.restart(id_.name, id_.version or 0, number, pid)
        what = "is restarted" if killed else "was started elsewhere: restart it there"
        _log.warning("container %s/%d is stuck with a batch for %g s; it %s", id_, number, self.config.server.stuck_s, what)

    def _expect(self, id_: VersionedModel, when_us: int) -> None:
        running = self._running.get(id_)
        if running is not None and not self._closed:
            running.core.engine.expect(running.core.index, when_us)

    def _came_or_went(self, id_: VersionedModel) -> None:
        self._expected.connected(id_, [replica.hello.replica for replica in self._containers.of(id_)])

    def _on_replica(self, event: ReplicaEvent) -> None:
        id_ = VersionedModel(event.name, event.version)
        if event.kind in (EventKind.STARTED, EventKind.RESTARTING):
            self._expected.starting(id_, event.replica, event.again_s)
        elif event.kind is EventKind.FAILED:
            self._expected.failed(id_, event.replica)
        elif event.kind is EventKind.STOPPED:
            self._expected.stopped(id_, event.replica)
        level = logging.INFO if event.kind in (EventKind.STARTED, EventKind.STOPPED) else logging.WARNING
        _log.log(level, "container %s:%d/%d %s %s", event.name, event.version, event.replica, event.kind, event.detail)
        if event.kind is EventKind.FAILED:
            lines = "\n".join(event.log_tail)
            self._failures[id_] = f"container {id_}/{event.replica} does not stay up: {event.detail}. Its last lines:\n{lines}"
            self._containers.notify()

    def _seat_of(self, hello: Hello) -> Seat:
        running = self._running.get(hello.id)
        if running is None:
            running = self._admit(hello)
        elif running.core.describe_input() == "any" and hello.input != "any":
            running.core.settle(*_row_type(InputType.parse(hello.input)))
        return self._running.seat(running)

    def _admit(self, hello: Hello) -> Running:
        """A container that was started elsewhere, with a model of its own: the model is added (MISSION A5)."""
        known = self.catalog.view.versions.get(hello.name, ())
        if any(model.version == hello.version for model in known):
            raise InvalidInput(f"model '{hello.id}' was retired.", hint="Start the container with a new version.")
        if not 1 <= hello.version <= VERSION_MAX:
            raise InvalidInput(f"version {hello.version} of model {hello.name!r}: a version is a whole number from 1.")
        record = Model(hello.name, hello.version, _type(hello.input), str(_type(hello.output)), replicas=0,
                       batching=self.config.batching)  # fmt: skip
        running = self._running.ensure(record)
        try:
            self.catalog.register(record)
        except BaseException:
            self._running.forget(record.id)
            raise
        return running

    def _running_of(self, model: Model) -> Running:
        return self._running.get(model.id) or self._running.ensure(model)

    def _declare(self) -> None:
        """Models and applications of the config that the catalog does not have yet."""
        for name, wanted in self.config.models.items():
            if name not in self.catalog.view.versions:
                replicas = (wanted.replicas, wanted.replicas_max) if wanted.replicas_max else wanted.replicas
                self.deploy(name, wanted.target, replicas=replicas, input=wanted.input or None, wait=False,
                            batching=wanted.batching, cache=wanted.cache, retry_singly=wanted.retry_singly)  # fmt: skip
        for name, app in self.config.apps.items():
            self.app(name, app.models, slo_ms=app.slo_ms, default=app.default, policy=app.policy,
                     confidence_min=app.confidence_min, **({"input": app.input} if app.input else {}))  # fmt: skip

    # -- questions: applications resolved to running models

    def _question(self, name: str) -> Question:
        try:
            return self._questions[name]
        except KeyError:
            raise UnknownApplication.named(str(name), self._questions) from None

    def _resolve(self, view: View) -> None:
        for model in view.models():
            self._running.ensure(model)
        self._questions = {name: self._question_of(view, app) for name, app in view.applications.items()}
        self._candidates = {}

    def _question_of(self, view: View, app: Application) -> Question:
        models = []
        for link in app.models:
            try:
                models.append(view.model(link))
            except ClipperError as error:
                _log.warning("application %r: %s", app.name, error)
        ids = tuple(dict.fromkeys(model.id for model in models))
        cores = {model.id: self._running_of(model).core for model in models}
        policy, learner, window = self._learning.learner(app.name, app.policy, ids)
        return Question(
            app.name, ids, cores, policy, learner, app.slo_us, app.default, app.confidence_min, self._node, window
        )

    def _question_for(self, request: PredictionRequest) -> Question:
        """The question of a request that names its candidate models itself."""
        candidates = request.candidate_models
        if isinstance(candidates, str | VersionedModel):
            candidates = (candidates,)
        key = (request.application, *map(str, candidates))
        known = self._candidates  # a change of the catalog swaps it: what is resolved from an old view goes with it
        question = known.get(key)
        if question is not None:
            return question
        if not candidates:
            raise InvalidInput("a request names an application or candidate models; this one names neither.")
        base = Application("", slo_ms=1000.0)
        if request.application is not None:
            base = self.catalog.view.application(request.application)
        links = tuple(self.catalog.view.model(model).id for model in candidates)
        question = self._question_of(self.catalog.view, _replace(base, models=links))
        if len(known) < _QUESTIONS_MAX:
            known[key] = question
        return question


def _replace(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)


def _type(text: str | InputType) -> InputType:
    try:
        return InputType.parse(text)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def _row_type(input: InputType) -> tuple[str, tuple[int, ...]]:
    return input.dtype, row_shape(input)


def _restart_policy(server: ServerSettings) -> RestartPolicy:
    return RestartPolicy(
        backoff_s_min=server.restart_ms_min / 1000,
        backoff_s_max=server.restart_ms_max / 1000,
        exits_max=server.restarts_max,
        window_s=server.restart_window_s,
    )
