"""Models of a server and the containers that run them: started, followed, restarted, drained,
stopped.

A version is numbered and packed at once, and becomes the latest only when its containers are
connected: until then queries go on to the one before.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import cast

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.clock import wall_time_us
from clipper.component import Health
from clipper.config import Config
from clipper.credentials.container_tokens import ContainerTokens, TokenHolder
from clipper.deploy.deployer import (
    ContainerSpec,
    ReplicaStatus,
    spec_of,
    threads_of,
)
from clipper.deploy.deployers import ENGINES, ContainerKinds
from clipper.deploy.docker.daemon import Owner
from clipper.deploy.needs import needs_of
from clipper.deploy.packages.environments import Environments
from clipper.deploy.packages.package import pack
from clipper.deploy.packages.pulling import PullLimits, pulled, source_of, url_of
from clipper.deploy.replicas import ReplicaDeployer
from clipper.errors import (
    ClipperError,
    DeployFailed,
    InvalidInput,
    ShardAway,
    ShuttingDown,
    StoreError,
    TypeConflict,
    Unknown,
    UnknownModel,
)
from clipper.foreign_text import printable
from clipper.manage.building import (
    FAILED,
    IMAGE,
    LOADING,
    PACKING,
    PULLING,
    STARTING,
    WARM,
    Building,
    Stage,
    needs_environment,
)
from clipper.manage.model_files import ModelFiles
from clipper.manage.tables.parameters import ParameterSet, make_tables
from clipper.mesh.membership import MeshMembership
from clipper.metrics.stats import ModelStats, ReplicaStats
from clipper.processes import ChildState, Notice, NoticeKind, RestartPolicy, Supervisor
from clipper.serving.feedback.online_learning import OnlineLearning
from clipper.serving.models.batch_cost import shown_costs
from clipper.serving.models.containers import Containers, Hello, Replica, Seat
from clipper.serving.models.engines import Engines
from clipper.serving.models.row_blames import RowBlames, loss_of
from clipper.serving.models.running_models import (
    Running,
    RunningModels,
    settle_input,
    settle_output,
)
from clipper.serving.models.scaling import Expected, Reading, Scaling, replica_bounds
from clipper.serving.models.served_versions import ServedVersions
from clipper.serving.query.stats import duration
from clipper.settings.server import ServerSettings
from clipper.state_dir import StateDir
from clipper.types import VERSION_MAX, InputType, Model, PulledFrom, UserValue, VersionedModel
from clipper_core.engine.model import Model as CoreModel

_log = logging.getLogger(__name__)
_DRAIN_POLL_S = 0.002
_QUIET_S = 0.025
# an environment of its own sees nothing of ours
_APART = {
    "PYTHONPATH": "",
    "PYTHONNOUSERSITE": "1",
}
INCIDENTS_MAX = 200
INCIDENT_CHARS_MAX = 500
FAILED_LOGS_MAX = 16


class Incident(msgspec.Struct, frozen=True):
    """Something that happened to a container. event: `started`, `exited`, `restarting`, `failed`,
    `stopped` or `stuck`. last: the last line that it wrote."""

    time_us: int
    model: str
    replica: int
    event: str
    detail: str = ""
    last: str = ""


class Deployment:
    """The deployment of models and their containers. Threads: any.

    address: returns the address that containers connect to."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        engines: Engines,
        running: RunningModels,
        folder: StateDir,
        tokens: ContainerTokens,
        address: Callable[[], str],
        parameters: ParameterSet,
        mesh: MeshMembership,
        processes: Supervisor,
    ) -> None:
        self.config = config
        self._processes = processes
        self.catalog = catalog
        self._engines = engines
        self._running = running
        self._dir = folder
        self._files = ModelFiles(folder.models)
        self._tokens = tokens
        self._address = address
        self._closed = False
        self.online_learning = OnlineLearning(
            config.feedback.pending_rows_max,
            config.feedback.inputs_bytes_max,
            config.limits.frame_bytes_max,
        )
        self.containers = Containers(
            engines,
            tokens,
            config.server.heartbeat_ms,
            config.limits.frame_bytes_max,
            self._seat_of,
            self._came_or_went,
            shared_memory=config.server.shared_memory,
            parts_ahead_max=config.limits.parts_ahead_max,
            calls_max=config.limits.calls_max,
            online_learning=self.online_learning,
            served=self._served,
            lost=self._lost,
        )
        self.served_versions = ServedVersions(self.containers)
        self.row_blames = RowBlames(config.server.row_failure_s, self._excuse)
        self._expected = Expected(self._expect, engines.now_us)
        self._scaling = Scaling(config.server, self._checks, self._follow, self._restart)
        self._followed: dict[VersionedModel, Model] = {}  # of the catalog, as they run here
        self._checked_at = -1  # queries ever issued, when a look found no container with a batch
        self._changing = threading.Lock()  # how many replicas a model has
        owner = Owner(folder.run, str(folder.folder or ""))
        self._deployer = ReplicaDeployer(
            processes,
            ContainerKinds(processes, config.docker, owner, config.server.fork_server),
            self._on_replica,
            restart_policy(config.server),
            config.limits.log_lines_max,
        )
        self._failures: dict[VersionedModel, str] = {}
        # of versions whose deployment failed, the last of them last
        self._failed_logs: dict[VersionedModel, Sequence[str]] = {}
        environments = Environments(
            processes,
            folder.environments,
            config.server.pip_args,
            config.server.build_s,
            config.server.env_pass,
        )
        self._building = Building(self._in_service, environments, self._built)
        self.incidents: deque[Incident] = deque(maxlen=INCIDENTS_MAX)
        self._parameters, self._mesh = parameters, mesh
        self._pull_limits = PullLimits.from_environment(config.artifacts.environment(folder.folder))
        self._numbering = threading.Lock()  # from the choice of a version to its place in _running

    # -- life

    def start(self) -> None:
        """Start the threads."""
        self.containers.start()
        self._scaling.start()
        self._building.sweep()

    def sweep_files(self) -> None:
        """Remove files of models that no version in service needs. For a start whose catalog is
        that of the store, before the first deployment."""
        self._files.sweep(self.catalog.view)

    def resume(self, model: Model) -> None:
        """Serve a model of the catalog, with as many replicas as its record or its load wants."""
        with self._changing:  # `follow` may have seen it, too
            self._resume(model)

    def _resume(self, model: Model) -> None:
        self._followed[model.id] = model
        self._running.ensure(model)
        try:
            make_tables(self._parameters.served, model, networked=self._networked)
            self._scale_to(model, self._count(model))
        except (InvalidInput, TypeConflict, ShardAway) as error:
            self._fail(model.id, str(error))

    def follow(self) -> None:
        """Apply the catalog, whichever server wrote it: start the containers of new versions,
        change the number of those that were scaled, stop retired ones. Repeating it changes
        nothing. Threads: one at a time."""
        self.end_retired()
        for model in self.catalog.models():
            with self._changing:
                if not self._closed and _bounds(self._followed.get(model.id)) != _bounds(model):
                    self._follow_model(model.id)

    def end_retired(self) -> None:
        """Stop the containers of versions that are out of service, but for those whose queries go
        on until another version is up. Threads: one at a time."""
        gone = self._followed.keys() - {model.id for model in self.catalog.models()}
        for id_ in gone - self.served_versions.in_use:
            self._end(id_)
            self._followed.pop(id_, None)

    def _follow_model(self, id_: VersionedModel) -> None:
        """Apply one model's record, under `_changing`: it is not older than the last scale()."""
        try:
            model = self.catalog.view.model(id_)
        except Unknown:  # retired meanwhile
            return
        self._resume(model)

    def _count(self, model: Model) -> int:
        """Return the replicas that a version should have: a fixed number, or by its load."""
        least, most = model.replicas, model.replicas_max
        return min(max(self._scaling.wanted(model.id, least), least), most) if most else least

    def health(self) -> list[Health]:
        """Return the states of the threads that scale."""
        return [*self._scaling.health()]

    def refuse_new(self) -> None:
        """Refuse changes from now on, and stop scaling."""
        self._closed = True
        self._scaling.stop()

    def stop(self) -> None:
        """Stop the containers. `containers` itself is stopped once the loops have ended."""
        self.containers.leaving = True
        self._building.close()
        self._deployer.close()

    # -- verbs

    def deploy(
        self,
        name: str,
        model: UserValue,
        version: int | None,
        code: Sequence[str],
        input: str | Mapping[str, str] | InputType | None,
        wait: bool,
        promote: bool = True,
        **settings: UserValue,
    ) -> Running:
        """See ClipperServer.deploy; settings: of the record. A URL is pulled first."""
        given = settings.pop("tables", {})
        with self._pulled(name, model, version) as (thing, source), self._numbering:
            record = self._record(name, thing, version, code, input)
            record = msgspec.structs.replace(
                record, **settings, tables={**record.tables, **given}, source=source
            )
            running = self._running.ensure(record)
        self._building.enter(record.id, STARTING)
        try:
            make_tables(self._parameters.served, record, networked=self._networked)
            self._start_replicas(record)
            if wait and record.replicas:
                self._await_replicas(record)
            self.catalog.register(record, promote=promote)
            self._files.keep(record.id)
            self._failed_logs.pop(record.id, None)
        except BaseException as error:
            self._keep_log(record)
            self._deployer.stop(record.name, record.version)
            self._running.forget(record.id)
            self._building.forget(record.id)
            if not isinstance(error, StoreError):  # else it may be registered: a start will know
                self._files.remove(record.id)
            self._run_others(record.id)
            if isinstance(error, DeployFailed) and not error.hint and self._failed_log(record.id):
                hint = f"Its whole log: clipper logs {record.id}"
                raise DeployFailed(error.message, hint=hint) from None
            raise
        return running

    def _run_others(self, id_: VersionedModel) -> None:
        """Run the version of another server that was first with this version, if there is one."""
        if self._is_known(id_):
            with self._changing:
                self._followed.pop(id_, None)
            self.catalog.refresh_listeners()

    def stages(self, name: str) -> dict[VersionedModel, Stage]:
        """Return the deployment stage of each version of a model that was started here."""
        return self._building.stages(name)

    def core_of(self, model: Model) -> CoreModel:
        """Return the engine's handle of a model; the model is made if it is new."""
        return (self._running.get(model.id) or self._running.ensure(model)).core

    def scale(self, name: str | VersionedModel, replicas: int | tuple[int, int]) -> None:
        """Start or stop containers until `replicas` of a version run, or within these bounds as
        many as the load requires."""
        least, most = replica_bounds(str(name), replicas, self.config.limits.replicas_max)
        with self._changing:
            model = self.catalog.view.model(name)
            model = self.catalog.set_replicas(model.id, least, most)
            self._running.ensure(model)
            self._scale_to(model, self._count(model))

    def _scale_to(self, model: Model, count: int) -> None:
        """Drain and then stop the replicas from number `count` on, and start those below it. The
        caller holds `_changing`."""
        mine = [
            s for s in self._deployer.list() if (s.name, s.version) == (model.name, model.version)
        ]
        for number in sorted(
            s.replica for s in mine if s.replica >= count and s.state != "stopped"
        ):
            self.containers.drain(model.id, number)
            self._deployer.stop(model.name, model.version, number)
        self._start_replicas(msgspec.structs.replace(model, replicas=count))

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Take a version out of service for good. StillLinked while an application needs it, unless
        by `force`."""
        model = self.catalog.retire_model(name, force=force)
        if model.id in self.served_versions.in_use:
            self._followed[model.id] = model  # end_retired() ends it
        else:
            self._end(model.id)
        if needs_environment(model):
            self._building.sweep()

    def _end(self, id_: VersionedModel) -> None:
        """Stop the containers of a version that was retired, after their last queries."""
        self._await_quiet(id_)
        with self._changing:
            self.containers.drain(id_)
            self._deployer.stop(id_.name, id_.version or 0)
            self._running.forget(id_)
        self._building.forget(id_)
        if self._is_retired(id_):
            self._files.remove(id_)

    def _is_retired(self, id_: VersionedModel) -> bool:
        """Return whether the catalog says so: a record that is missing says nothing."""
        return any(
            model.version == id_.version and model.retired_us
            for model in self.catalog.view.versions.get(id_.name, ())
        )

    def _await_quiet(self, id_: VersionedModel) -> None:
        """Wait until nothing has been queued or in flight for a moment, at most `drain_s`: a thread
        that resolved the model just before it was retired may submit its query only now."""
        running = self._running.get(id_)
        until = time.monotonic() + self.config.server.drain_s
        quiet = time.monotonic()
        while (
            running
            and self.containers.of(id_)
            and quiet < until
            and time.monotonic() - quiet < _QUIET_S
        ):
            time.sleep(_DRAIN_POLL_S)
            queued = running.core.engine.model_counts(running.core.index)["queued"]
            replicas = [replica.engine.replica(replica.conn) for replica in self.containers.of(id_)]
            if queued or any(replica and replica["in_flight"] for replica in replicas):
                quiet = time.monotonic()

    def logs(self, name: str | VersionedModel, replica: int = 0) -> Sequence[str]:
        """Return the last lines a container wrote: of a version that was not deployed, those before
        its end. Raises UnknownModel, UnknownVersion."""
        try:
            model = self.catalog.view.model(name)
        except Unknown:
            kept = self._failed_log(VersionedModel.parse(name))
            if kept is None:
                raise
            return kept
        try:
            return self._deployer.logs(model.name, model.version, replica)
        except KeyError:
            raise UnknownModel(f"no container {model.id}/{replica} was started here.") from None

    def _keep_log(self, record: Model) -> None:
        """Keep what the first container of a deployment that fails has written."""
        with contextlib.suppress(KeyError):
            lines = self._deployer.logs(record.name, record.version, 0)
            self._failed_logs.pop(record.id, None)
            self._failed_logs[record.id] = lines
        while len(self._failed_logs) > FAILED_LOGS_MAX:
            del self._failed_logs[next(iter(self._failed_logs))]

    def _failed_log(self, id_: VersionedModel) -> Sequence[str] | None:
        """Return the lines that were kept of a version, or of the last one of a name; None if there
        are none."""
        kept = [*self._failed_logs.items()]
        found = (lines for one, lines in reversed(kept) if id_ in (one, VersionedModel(one.name)))
        return next(found, None)

    # -- looking in

    def stats(self) -> dict[str, ModelStats]:
        """Return statistics by `name:version`.

        Each has counters, replicas (how many are `wanted`, how many it `has`), the model's own
        `accuracy`, rows of feedback that were dropped (`feedback_dropped`), the start of counting,
        and durations.
        """
        by_place = {
            (row["engine"], row["index"]): row for row in self._engines.snapshot()["models"]
        }
        models: dict[str, ModelStats] = {}
        started = self._deployer.list()
        for running in self._running:
            counters = by_place.get(self._engines.place_of(running.core))
            if counters is None or not (running.model.target or self._is_known(running.model.id)):
                # it comes just now
                continue
            replicas = self._replica_stats(running, started)
            wanted = self._scaling.wanted(running.model.id, running.model.replicas)
            has = sum(replica["state"] == "ready" for replica in replicas)
            near = running.core.similar
            row = {
                **counters,
                **shown_costs(running.model.batching, counters, ("cost", "cost_padded")),
                "since_us": running.model.created_us,
                "duration_us": duration(counters["latency_us"]),
                "replicas": replicas,
                "wanted": wanted,
                "has": has,
                "output": self._output_of(running.model),
                "warmup_error": self.warmup_error(running.model.id),
                "instead": str(self.served_versions.waiting.get(running.model.id, "")),
                "accuracy": _accuracy(replicas),
                "stage": self._building.stage_of(running.model.id).stage,
                "feedback_dropped": self.online_learning.pending(running.model.id)
                + sum(replica.get("feedback_dropped", 0) for replica in replicas),
                **({"similar": near.stats()} if near is not None else {}),
                **(
                    {"followed": running.core.watch.stats()}
                    if running.core.watch is not None
                    else {}
                ),
            }
            models[str(running.model.id)] = cast(ModelStats, row)
        return models

    def _output_of(self, model: Model) -> str:
        """Return the type of its output, as registered, or as the warm-up of a container reported;
        else "any"."""
        if (core := self._running.get(model.id)) is not None and core.core.outputs is not None:
            return str(core.core.outputs)
        types = (replica.hello.gives for replica in self.containers.of(model.id))
        return (
            model.output
            if model.output != "any"
            else next((gives for gives in types if gives), "any")
        )

    def warmup_error(self, id_: VersionedModel) -> str:
        """Return why the warm-up of a container of a version failed; "" if none did."""
        errors = (replica.hello.warm_error for replica in self.containers.of(id_))
        return next(filter(None, errors), "")

    def _is_known(self, id_: VersionedModel) -> bool:
        """Return whether the catalog lists a version. A model that connected is served a moment
        before that.
        """
        return any(
            model.version == id_.version for model in self.catalog.view.versions.get(id_.name, ())
        )

    def _replica_stats(
        self, running: Running, started: Sequence[ReplicaStatus]
    ) -> list[ReplicaStats]:
        # by number and pid: two started elsewhere may have one number, and in containers of their
        # own one pid, too
        rows: dict[tuple[int, int, int], dict[str, object]] = {}
        for replica in self.containers.of(running.model.id):
            batcher = replica.engine.replica(replica.conn)
            if batcher is not None:
                batcher |= shown_costs(running.model.batching, batcher, ("limit_cost", "row_cost"))
                key = replica.hello.replica, replica.hello.pid, 0
                while key in rows:
                    key = (*key[:2], key[2] + 1)
                rows[key] = {**batcher, "pid": replica.hello.pid, "state": "ready"}
        for status in started:
            if (status.name, status.version) == (running.model.name, running.model.version):
                # one that was ready has lost its connection, unless it is among those above
                state = ChildState.RUNNING if status.state is ChildState.READY else status.state
                row = rows.setdefault(
                    (status.replica, status.pid, 0),
                    {"number": status.replica, "pid": status.pid, "state": str(state)},
                )
                row |= {"restart_count": status.restart_count, "detail": status.detail}
                row |= {"start": status.start} if status.start else {}
                row |= {"again_s": round(status.again_s, 1)} if status.again_s else {}
        return [cast(ReplicaStats, rows[key]) for key in sorted(rows)]

    # -- records and containers

    @contextlib.contextmanager
    def _pulled(
        self, name: str, model: object, version: int | None
    ) -> Iterator[tuple[object, PulledFrom | None]]:
        """Yield what is packed, and where it is from: of a URL the file or folder in the cache."""
        if not (url := url_of(model)):
            yield model, None
            return
        id_ = self._chosen(name, version)
        try:
            with pulled(url, self._pull_limits, lambda done: self._pulling(id_, done)) as found:
                yield found.path, source_of(url, found)
        except BaseException:
            if self._building.stage_of(id_).stage == PULLING:
                self._building.forget(id_)
            raise

    def _pulling(self, id_: VersionedModel, done: str) -> None:
        if self._closed:
            raise ShuttingDown(f"the pull of model '{id_}' was given up.")
        self._building.enter(id_, PULLING, done)

    def _pull_again(self, model: Model, source: PulledFrom) -> str:
        """Pull what another server deployed, into this server's folder; return what went wrong, or
        "".
        """
        url = f"{source.url}#sha256={source.sha256}"
        try:
            with pulled(url, self._pull_limits, lambda d: self._pulling(model.id, d)) as found:
                package = pack(
                    found.path,
                    model.name,
                    model.version,
                    self._dir.models,
                    no_pickle=self.config.server.no_pickle,
                )
        except (ClipperError, OSError) as error:
            return f"model '{model.id}' is not in this server's folder: {error}"
        if package.sha256 == model.sha256:
            return ""
        os.unlink(package.target)
        return (
            f"model '{model.id}' was packed by another version of Python or of its framework, and"
            " is not the same here. Deploy it again."
        )

    def _here(self, model: Model) -> Model | None:
        """Return a model with the path of its packed file here; None while that is pulled."""
        if model.source is None or os.path.exists(model.target):
            return model
        target = self._dir.models / os.path.basename(model.target)
        if target.exists():
            return msgspec.structs.replace(model, target=str(target))
        source = model.source
        self._building.run(model, PULLING, lambda: self._pull_again(model, source))
        return None

    def _chosen(self, name: str, version: int | None) -> VersionedModel:
        """Return the version to deploy: a new one. Raises: InvalidInput, AlreadyExists."""
        chosen = self._next_version(name) if version is None else version
        if not isinstance(chosen, int) or not 1 <= chosen <= VERSION_MAX:
            raise InvalidInput(
                f"version={version!r} of model {name!r}: a whole number from 1, or None for the"
                " next."
            )
        id_ = VersionedModel(name, chosen)
        if id_ in self._running.ids() or any(
            known.id == id_ for known in self.catalog.view.versions.get(name, ())
        ):
            self.catalog.refuse_existing(id_)
        return id_

    def _record(
        self,
        name: str,
        model: UserValue,
        version: int | None,
        code: Sequence[str],
        input: str | Mapping[str, str] | InputType | None,
    ) -> Model:
        id_ = self._chosen(name, version)
        chosen = id_.version or 0
        self._building.enter(id_, PACKING)
        try:
            places = [code] if isinstance(code, str) else code
            with self._files.packing(id_):
                package = pack(
                    model, name, chosen, self._dir.models, places, self.config.server.no_pickle
                )
        except BaseException:
            self._building.forget(id_)
            raise
        type_ = InputType.parse(input or package.input or "any")
        return Model(
            name,
            chosen,
            type_,
            target=package.target,
            sha256=package.sha256,
            code=package.code,
            tables=package.tables,
            command=package.command,
            folder=package.folder,
            columns=package.columns,
        )

    def _next_version(self, name: str) -> int:
        taken = [model.version for model in self.catalog.view.versions.get(name, ())]
        taken += [id_.version or 0 for id_ in self._running.ids() if id_.name == name]
        return max(taken, default=0) + 1

    def _start_replicas(self, model: Model) -> None:
        self._failures.pop(model.id, None)
        if not model.target or (here := self._here(model)) is None:
            return
        model = here
        own = needs_environment(model)
        python = self._building.interpreter(model) if own else sys.executable
        if not python:
            return  # _built() comes back
        alive = {
            (s.name, s.version, s.replica)
            for s in self._deployer.list()
            if s.state not in ("stopped", "failed", "held")
        }
        tables, secrets = self._with_table_access(model)
        spec = self._spec(model)
        spec = dataclasses.replace(
            spec,
            python=python,
            env={**spec.env, **(_APART if own else {}), **tables},
            env_pass=self.config.server.env_pass,
            secrets=secrets,
        )
        for number in range(model.replicas):
            if (model.name, model.version, number) not in alive:
                token = self._tokens.of_replica(model.id, number)
                self._deployer.start(dataclasses.replace(spec, token=token), number)

    def _with_table_access(self, model: Model) -> tuple[dict[str, str], dict[str, str]]:
        """Return a container's environment, and its secrets."""
        tables = self._parameters.served
        if tables is None:
            return {}, {}
        if model.deployer in ENGINES:
            return tables.carried(model.tables) if self._networked else ({}, {})
        return tables.environment(model.tables), {}

    @property
    def _networked(self) -> bool:
        """True if a container of an engine has a network."""
        network = self.config.docker.network
        return network != "none" if network else not self._address().startswith("unix:")

    def _built(self, model: Model, error: str) -> None:
        """Note that the environment of a version was built, or cannot be."""
        if error:
            self._fail(model.id, error)
            return
        with self._changing:
            running = self._running.get(model.id)
            if running is not None and not self._closed:
                self._building.enter(model.id, STARTING)
                self._start_replicas(running.model)

    def _fail(self, id_: VersionedModel, why: str) -> None:
        """Mark a version as failed: it does not come up until it is started again."""
        self._failures[id_] = why
        self._building.enter(id_, FAILED, why)
        _log.error("model %s: %s", id_, why, extra={"model": str(id_)})
        self.containers.notify()

    def _in_service(self) -> list[Model]:
        return [*self.catalog.view.models(), *(running.model for running in self._running)]

    def _spec(self, model: Model) -> ContainerSpec:
        threads = threads_of(model, self.config.server.model_threads)
        needs = needs_of(model) if model.deployer in ENGINES else None
        return spec_of(model, connect=self._address(), threads=threads, needs=needs)

    def wait_ready(self, names: Collection[str] | None, timeout_s: float | None) -> None:
        """Wait until the replicas of models that are in service are connected, of these names or of
        all."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for model in self.catalog.view.models():
            if model.target and model.replicas and (names is None or model.name in names):
                self._await_replicas(model, until)

    def _await_replicas(self, model: Model, until_s: float | None = None) -> None:
        """Wait for the containers of a version: until `until_s`, or for server.load_s after its
        environment or image is built."""
        load_s = self.config.server.load_s
        while until_s is None and not self._building.wait(model.id, 1.0):
            self._check_open()
        until = time.monotonic() + load_s if until_s is None else until_s
        began = time.monotonic()

        def failed() -> bool:
            return model.id in self._failures or bool(self._deployer.failure)

        while not self.containers.wait_for(
            model.id, model.replicas, min(1.0, max(0.0, until - time.monotonic())), failed
        ):
            if failure := self._failures.get(model.id) or self._deployer.failure:
                raise DeployFailed(failure)
            if until_s is None and self._building.stage_of(model.id).stage == IMAGE:
                until = time.monotonic() + load_s
            if time.monotonic() >= until:
                waited_s = load_s if until_s is None else time.monotonic() - began
                raise DeployFailed(
                    f"model '{model.id}' did not connect within {waited_s:g} s. Its last"
                    f" lines:\n{self._last_lines(model)}",
                    hint="Raise server.load_s if it is slow to load." if until_s is None else "",
                )
            self._check_open()
        if any(replica.hello.broken for replica in self.containers.of(model.id)):
            raise DeployFailed(
                f"model '{model.id}': {self.warmup_error(model.id).rstrip('. ')}.",
                hint="Deploy it again when it is mended; if it fails so on made-up rows only, with"
                " rows that it takes: warmup=[...].",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("this server is closed.", hint="Start another with clipper.start().")

    def _last_lines(self, model: Model) -> str:
        try:
            lines = self._deployer.logs(model.name, model.version, 0)[-20:]
            return "\n".join(map(printable, lines))
        except KeyError:  # it was not started yet
            return "none"

    # -- replicas come, go and are requested

    def _checks(self) -> dict[VersionedModel, Reading]:
        """Return the readings for `Scaling`; none while no query comes and no container works.

        With hundreds of containers each look costs milliseconds.
        """
        issued = sum(engine.completion.issued for engine in self._engines)
        if issued == self._checked_at and not any(one.model.replicas_max for one in self._running):
            return {}
        models = self.stats()
        busy = any(
            replica.get("in_flight") for row in models.values() for replica in row["replicas"]
        )
        self._checked_at = -1 if busy else issued
        running = [one.model for one in self._running if str(one.model.id) in models]
        return {
            m.id: Reading(m.replicas if m.replicas_max else 0, m.replicas_max, models[str(m.id)])
            for m in running
        }

    def _follow(self, id_: VersionedModel, count: int, why: str) -> None:
        with self._changing:
            running = self._running.get(id_)
            if (
                running is None
                or not running.model.target
                or not running.model.replicas_max
                or self._closed
            ):
                return
            _log.info(
                "model %s: %d replicas from now on (%s)", id_, count, why, extra={"model": str(id_)}
            )
            self._scale_to(running.model, count)

    def _restart(self, id_: VersionedModel, number: int, pid: int) -> None:
        killed = self._deployer.restart(id_.name, id_.version or 0, number, pid)
        what = "is restarted" if killed else "was started elsewhere: restart it there"
        about = {"model": str(id_), "replica": number}
        stuck_s = self.config.server.stuck_s
        stuck = f"with a batch for {stuck_s:g} s; it {what}"
        self.incidents.append(Incident(wall_time_us(), str(id_), number, "stuck", stuck))
        _log.warning(
            "container %s/%d is stuck with a batch for %g s; it %s",
            id_,
            number,
            stuck_s,
            what,
            extra=about,
        )

    def _expect(self, id_: VersionedModel, when_us: int) -> None:
        running = self._running.get(id_)
        if running is not None and not self._closed:
            running.core.engine.set_earliest_replica(running.core.index, when_us)

    def _came_or_went(self, id_: VersionedModel) -> None:
        if self._mesh.on_replicas_changed(id_):
            return
        if self.containers.of(id_):
            self._failures.pop(id_, None)  # a container that was held has come up
            self._building.enter(id_, WARM)
        self._expected.connected(
            id_, [replica.hello.replica for replica in self.containers.of(id_)]
        )

    def _served(self, hello: Hello) -> None:
        self._deployer.served(hello.name, hello.version, hello.replica, hello.pid)

    def _lost(self, replica: Replica, data: bytes) -> None:
        loss = loss_of(replica, data)
        if loss is not None:
            self.row_blames.lost(loss)

    def _excuse(self, id_: VersionedModel, number: int, pid: int) -> None:
        self._deployer.excuse(id_.name, id_.version or 0, number, pid)

    def _on_replica(self, name: str, version: int, replica: int, notice: Notice) -> None:
        id_ = VersionedModel(name, version)
        if notice.kind is NoticeKind.EXITED:
            self.row_blames.exited(id_, replica, notice.pid, notice.by_itself)
            self.containers.ended(id_, replica, notice.pid)
        if notice.kind in (NoticeKind.BUILDING, NoticeKind.WAITING):
            stage = IMAGE if notice.kind is NoticeKind.BUILDING else STARTING
            self._building.enter(id_, stage, notice.detail)
            return
        if notice.kind is NoticeKind.READY:  # its connection has told it
            return
        if notice.kind in (NoticeKind.STARTED, NoticeKind.RESTARTING):
            self._expected.starting(id_, replica, notice.again_s)
            if self._building.stage_of(id_).stage in (STARTING, IMAGE):
                self._building.enter(id_, LOADING)
        elif notice.kind is NoticeKind.FAILED and notice.again_s:
            self._expected.starting(id_, replica, notice.again_s)
        elif notice.kind is NoticeKind.FAILED:
            self._expected.failed(id_, replica)
        elif notice.kind is NoticeKind.STOPPED:
            self._expected.stopped(id_, replica)
        level = (
            logging.INFO
            if notice.kind in (NoticeKind.STARTED, NoticeKind.RESTARTING, NoticeKind.STOPPED)
            else logging.WARNING
        )
        about = {"model": str(id_), "replica": replica, "event": str(notice.kind)}
        last = next((line for line in reversed(notice.log_tail) if line.strip()), "")[
            :INCIDENT_CHARS_MAX
        ]
        told = f"{notice.kind}: {notice.detail}" if notice.detail else str(notice.kind)
        told = f"{told}. Its last line: {printable(last)}" if last else told
        _log.log(level, "container %s/%d %s", id_, replica, told, extra=about)
        self.incidents.append(
            Incident(wall_time_us(), str(id_), replica, str(notice.kind), notice.detail, last)
        )
        if notice.kind is NoticeKind.FAILED:
            lines = "\n".join(map(printable, once(notice.log_tail)))
            unable = f"container {id_}/{replica} does not stay up: {notice.detail}." + (
                f" Its last lines:\n{lines}" if lines.strip() else " It wrote nothing."
            )
            self._failures[id_] = (
                unable
                if notice.pid
                else f"container {id_}/{replica} was not started: {notice.detail}"
            )
            self._building.enter(id_, FAILED, notice.detail)
            self.containers.notify()

    def _seat_of(self, hello: Hello, holder: TokenHolder) -> Seat:
        started = holder.is_replica
        if started and not self._deployer.runs(hello.name, hello.version, hello.replica):
            raise InvalidInput(f"replica {hello.replica} of '{hello.id}' was stopped.")
        running = self._running.get(hello.id)
        if running is None:
            external = self._mesh.seat(hello.name, hello.version, hello.input, hello.output)
            if external is not None:
                return external
            running = self._admit(hello)
        elif running.core.describe_input() == "any" and hello.input != "any":
            settle_input(running.core, InputType.parse(hello.input))
        if running.model.output == "any":
            settle_output(running.core, InputType.parse(hello.output))
        return self._running.seat(running)

    def _admit(self, hello: Hello) -> Running:
        """Admit a container that was started elsewhere, with a model of its own: the model is added
        (MISSION A5), as the latest version if its name has no other."""
        known = self.catalog.view.versions.get(hello.name, ())
        if any(model.version == hello.version for model in known):
            raise InvalidInput(
                f"model '{hello.id}' was retired.", hint="Start the container with a new version."
            )
        if not 1 <= hello.version <= VERSION_MAX:
            raise InvalidInput(
                f"version {hello.version} of model {hello.name!r}: a version is a whole number"
                " from 1."
            )
        record = Model(
            hello.name,
            hello.version,
            InputType.parse(hello.input),
            str(InputType.parse(hello.output)),
            replicas=0,
            batching=self.config.batching,
        )
        running = self._running.ensure(record)
        try:
            # no container may take the queries of a version that serves
            self.catalog.register(record, promote=False)
        except BaseException:
            self._running.forget(record.id)
            raise
        return running


def once(lines: Sequence[str]) -> Sequence[str]:
    """Return the last lines of a container once, if each of its starts wrote the same. The first
    of them may be cut."""
    count = len(lines)
    for length in range(1, count // 2 + 1):
        if lines[length:] == lines[: count - length]:
            return lines[count - length :]
    return lines


def _accuracy(replicas: Sequence[ReplicaStats]) -> float | None:
    """Return the mean of the accuracies that replicas report; each learns by itself."""
    accuracies = [
        accuracy for replica in replicas if (accuracy := replica.get("accuracy")) is not None
    ]
    return sum(accuracies) / len(accuracies) if accuracies else None


def _bounds(model: Model | None) -> tuple[int, int] | None:
    return None if model is None else (model.replicas, model.replicas_max)


def restart_policy(server: ServerSettings) -> RestartPolicy:
    """Return the restart policy of the server's settings."""
    return RestartPolicy(
        backoff_s_min=server.restart_ms_min / 1000,
        backoff_s_max=server.restart_ms_max / 1000,
        exits_max=server.restarts_max,
        window_s=server.restart_window_s,
        grace_s=server.stop_grace_s,
        queued=True,
    )
