"""ClipperServer: one serving node, composed from a Config."""

import atexit
import contextlib
import functools
import logging
import os
import resource
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, Unpack, cast

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.component import Components, Health, require_descriptors
from clipper.config import Config
from clipper.credentials.container_tokens import ContainerTokens
from clipper.deploy.processes.command import Command, chosen
from clipper.errors import AlreadyExists, ModelWarning, ShuttingDown, refuse_unknown
from clipper.log_output import LogOutput
from clipper.manage.applications import Applications
from clipper.manage.building import Stage
from clipper.manage.declared import (
    application_settings,
    declared,
    declared_model,
    model_settings,
)
from clipper.manage.deployment import Deployment
from clipper.manage.following import CatalogFollower
from clipper.manage.http.endpoints import Endpoints
from clipper.manage.model_record import model_spec, record_fields, to_run
from clipper.manage.moving import Place
from clipper.manage.operations import Operations
from clipper.manage.rollouts.rolling import Rolling
from clipper.manage.tables.parameters import ParameterSet
from clipper.mesh.membership import MeshMembership, ServerHost
from clipper.mesh.node.node import MeshNode
from clipper.mesh.records import Policy
from clipper.mesh.reports import ModelStatus
from clipper.mesh.routing.router import MeshModelHandle
from clipper.metrics.stats import ServerStats, StoreStats
from clipper.options import (
    Environment,
    Resources,
    TableAccess,
    grouped,
    keywords_of,
    refusing_unknown_keywords,
)
from clipper.processes import Supervisor
from clipper.schema import type_text
from clipper.serving.feedback.learning import Learning
from clipper.serving.feedback.observe import observe_for_others
from clipper.serving.models.address import Listener, listen
from clipper.serving.models.cache import Cache
from clipper.serving.models.engine_memory import EngineMemory
from clipper.serving.models.engines import Engines
from clipper.serving.models.running_models import RunningModels
from clipper.serving.query.application import ApplicationHandle
from clipper.serving.query.collector import Collector
from clipper.serving.query.decider_threads import DeciderThreads
from clipper.serving.query.dispatch import Dispatch
from clipper.serving.query.model_calls import ModelCalls
from clipper.serving.query.prediction import Prediction
from clipper.serving.query.resolver import ApplicationResolver
from clipper.serving.rollout.decoys import Recorded, Recorder
from clipper.settings.connection_budget import within_files
from clipper.settings.logging import LoggingSettings
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.application import Links
from clipper.spec.keywords import (
    ApplicationKeywords,
    ModelKeywords,
    ModelStreamKeywords,
    StreamKeywords,
)
from clipper.state_dir import StateDir
from clipper.store import CachedStore, MemoryStore, open_server_store
from clipper.store.history import audit_context, default_actor
from clipper.types import (
    Answer,
    Answers,
    PredictionRequest,
    UserValue,
    VersionedModel,
)
from clipper_container.machine import raise_files_max
from clipper_core.application.application import RequestScheduler
from clipper_core.engine.model import Model as CoreModel
from clipper_core.results.future import Future

if TYPE_CHECKING:
    from clipper.frontend.streams.model_updates import ModelUpdates
    from clipper.frontend.streams.scoring import ScoringStream
    from clipper.frontend.streams.stream_set import StreamSet
    from clipper.params.client.client import Client

_DRAIN_POLL_S = 0.002
_CLOSE_S = 60.0  # for the parts to end, after the queries
_log = logging.getLogger(__name__)
_DEFAULT_POLICY = Policy()


@refusing_unknown_keywords
class ClipperServer(RequestScheduler):
    """One serving node: predictions from models in processes of their own, each by its deadline.

    Build one with `clipper.start()`; use it in a `with` block, or call close(). The work is done by
    its parts; this class starts, connects and stops them. Threads: any.

    ends_by_signal: whether SIGTERM ends this process in good order, so that `clipper down` may send
    it.
    """

    def __init__(self, config: Config, *, ends_by_signal: bool = False) -> None:
        require_descriptors(_descriptors(config), "this server")
        raise_files_max()
        files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        http, grpc, limits = within_files(config.http, config.grpc, config.limits, files_max)
        config = msgspec.structs.replace(config, http=http, grpc=grpc, limits=limits)
        self.config = config
        self._pid = os.getpid()
        self._closed = False
        self._drain_s = self._drain_until_s = 0.0
        self._log: LogOutput | None = None
        self._listener: Listener | None = None
        self._streams: StreamSet | None = None
        self._token = config.server.token or secrets.token_urlsafe(24)
        self._container_tokens = ContainerTokens(self._token)
        self._engines = Engines(config)
        self._engine_memory = EngineMemory()
        self._dir = StateDir(config.server.state, config.server.folder)
        # closed from its end; what is closed last comes first
        self._parts = parts = Components("this server")
        parts.callback("the log", self._close_log)
        parts.callback("the state folder", self._dir.close)
        parts.callback("the address for containers", self._remove_listener)
        self._processes = Supervisor()
        try:
            parts.enter(self._processes)
            self._store, copy = open_server_store(
                config.server.state,
                config.limits.state_bytes_max,
                self._dir.folder,
                required=config.server.require_store,
            )
            parts.callback("the store", self._store.close)
            self._mesh = MeshMembership(
                config, self._store, self._dir.run, self._dir.folder, self._processes
            )
            self.catalog = Catalog(self._store, external=self._mesh.record, copy=copy)
            self._learning = Learning(
                self._store,
                self._dir.folder,
                config.feedback,
                self._is_shared,
                config.limits.state_bytes_max,
                self.catalog,
            )
            if self._store_is_away:
                self._learning.start_without_store()
            self._compose(ends_by_signal=ends_by_signal)
        except BaseException:
            self._close_after_an_error()
            del self._engines  # their descriptors close now, also if the error is kept
            raise

    def _compose(self, *, ends_by_signal: bool) -> None:
        """Make the parts above the store, and say in which order they are closed."""
        with contextlib.ExitStack() as made:  # of threads that constructors start
            made.callback(self._learning.close)
            made.callback(self.catalog.close)
            self._make_parts(made, ends_by_signal=ends_by_signal)
            made.pop_all()
        self._stack()

    def _make_parts(self, made: contextlib.ExitStack, *, ends_by_signal: bool) -> None:
        config = self.config
        self._dispatch = Dispatch(*self._engines)
        self._parameters = ParameterSet(config)
        self._running_models = RunningModels(
            self._engines.of,
            config.limits,
            self._engine_memory.prepare,
            lambda: self._parameters.watching,
        )
        self._deployment = Deployment(
            config,
            self.catalog,
            self._engines,
            self._running_models,
            self._dir,
            self._container_tokens,
            lambda: self.address,
            self._parameters,
            self._mesh,
            self._processes,
        )
        made.callback(self._deployment.containers.stop)
        made.callback(self._deployment.stop)
        self._recorder = Recorder((self._dir.folder or self._dir.run) / "decoys")
        self._decider_threads = DeciderThreads()
        self._resolver = ApplicationResolver(
            self.catalog,
            self._running_models,
            self._deployment.served_versions,
            self._learning,
            self._recorder,
            self._deployment.online_learning,
            self._decider_threads,
            self._mesh,
            self._parameters.users,
        )
        slo_ms_max = config.limits.slo_ms_max
        self._prediction = Prediction(self._resolver, slo_ms_max)
        super().__init__(self._resolver.table, self._prediction)
        self._applications = Applications(
            self.catalog, self._resolver, self._parameters, slo_ms_max
        )
        self.cache = Cache(self._core_of, lambda: self.stats()["cache"])
        containers = self._deployment.containers
        self._rolling = Rolling(
            self.catalog,
            self._resolver,
            self._deployment.served_versions,
            lambda model: bool(containers.of(model)),
        )
        deployment = self._deployment
        self._calls = ModelCalls(
            self._engines,
            config.limits.call_depth_max,
            lambda: self.catalog.view,
            containers.model_of,
            self.model,
            lambda name: self._applications.handle(name, None, {}),
        )
        self._follower = CatalogFollower(
            self.catalog, deployment.follow if self._is_shared else deployment.end_retired
        )
        place = Place(self._store, self._dir.models, self._deployment.resume)
        self.manage = Operations(self, place, self._rolling, default_actor())
        self._endpoints = Endpoints(
            self,
            self._resolver,
            self._dispatch,
            self._deployment,
            self._parameters,
            self._mesh,
            self._dir.run,
            lambda: self._closed,
            ends_by_signal=ends_by_signal,
        )

    def _stack(self) -> None:
        """Put what closes the parts on the stack: what is closed last comes first."""
        containers, each = self._deployment.containers, self._parts.callback
        each("the recorder of decoys", self._recorder.close)
        each("the learned states", self._learning.close)
        each("the catalog", self.catalog.close)
        each("the parameter tables", self._parameters.stop)
        each("the containers' connections", containers.stop)
        each("the calls of models", self._calls.stop)
        each("the deciders", self._decider_threads.close)
        each("the frontends", self._endpoints.stop)
        each("the applications", self._resolver.close)
        each("the loops of the engines", self._dispatch.stop)
        each("the mesh", self._mesh.close)
        each("the deployments", self._deployment.stop)
        # refuse what is new, and wait for what is under way
        each("queries under way", self._await_queries)
        each("connections of HTTP", self._await_connections)
        each("the memory of the engines", self._engine_memory.stop)
        each("the streams", self._stop_streams)
        each("following the catalog", self._follower.stop)
        each("new deployments", self._deployment.refuse_new)
        each("the rollouts", self._rolling.stop)
        each("the queries of the mesh", self._drain_mesh)
        each("new connections", self._endpoints.drain)
        each("new queries", self._prediction.close)
        for source in (
            self._dispatch,
            self._calls,
            containers,
            self._deployment,
            self._recorder,
            self._parameters,
            self._learning,
            self.catalog,
            self._rolling,
            self._follower,
            self._mesh,
            self._endpoints,
        ):
            self._parts.watch(source.health)
        self._parts.watch(self._health_of_streams)

    # -- start and stop

    def start(self) -> Self:
        """Listen, resume the models of the catalog, then add those that the config declares.

        Raises ConfigError, StoreError, DeployFailed; then the server is closed.
        """
        config = self.config
        self._log = LogOutput(config.logging.level, config.logging.format)
        try:
            if not self._store_is_away:
                self._share_feedback()
            self._listener = listen(config.server.address, self._dir.run)
            self._dispatch.loop.listen(self._listener.fd)
            self._dispatch.start()
            self._parameters.start()
            self._calls.start()
            self._deployment.start()
            self._mesh.start(self._host(), store_is_away=self._store_is_away)
            self.catalog.on_change(self._resolver.resolve)
            for model in self.catalog.models():
                self._deployment.resume(model)
            self._resolver.resolve(self.catalog.view)
            self._rolling.start()
            if not self._store_is_away:
                self._warn_of_lost_catalog()
                if not self.catalog.continuity.trouble:  # nothing can be changed
                    self._deployment.sweep_files()
                    self._declare()
                self._learning.replay()
            self._endpoints.start()
            if config.streams or config.model_streams:
                self.streams.start()
            if isinstance(self._store, CachedStore):
                self._store.start(self._store_has_returned)
            self._follower.start()
            atexit.register(self.close)
        except BaseException:
            self._close_after_an_error()
            raise
        return self

    def _close_after_an_error(self) -> None:
        """Close what has been started; what goes wrong now is logged, for the first error is the
        one that tells the cause."""
        try:
            self.close(drain_s=0)
        except BaseException:
            _log.exception("closing a server that did not start")

    def _warn_of_lost_catalog(self) -> None:
        """Log it if the folder has models or feedback of a catalog that the store does not have."""
        view, packed = self.catalog.view, self._dir.packed_models
        journal = self._learning.stats()["journal_records"]
        if view.versions or view.applications or isinstance(self._store, MemoryStore):
            return
        if packed or journal:
            _log.warning(
                "the store %s has no models and no applications, but the folder %s has %d packed"
                " models and %d records of feedback: was the store emptied, or is it another one?"
                " Restore it, or deploy again: clipper deploy --help",
                self._store.name,
                self._dir.folder,
                packed,
                journal,
            )

    def _host(self) -> ServerHost:
        return ServerHost(
            self.config,
            self.catalog,
            self._engines,
            self._running_models,
            self._resolver,
            self._deployment.containers,
            self._container_tokens,
            lambda: self.address,
        )

    def _share_feedback(self) -> None:
        """Register with the servers that share the store, which forward feedback to each other."""
        self._learning.enter(functools.partial(observe_for_others, self._resolver.application))

    @property
    def _is_shared(self) -> bool:
        """Return whether other servers may use the store."""
        return self._store.remote or self._dir.is_apart

    @property
    def _store_is_away(self) -> bool:
        return isinstance(self._store, CachedStore) and self._store.is_away

    def _store_has_returned(self) -> None:
        """Continue the start, which had no store. Raises StoreError when it is away again."""
        self.catalog.refresh()
        self._resolver.resolve(self.catalog.view)
        with contextlib.suppress(ShuttingDown):
            self._mesh.enter()
            self._share_feedback()
            self._learning.resume()
            self._declare()

    def _declare(self) -> None:
        """Deploy the models and make the applications of the config that the catalog lacks."""
        with audit_context("the configuration", ""):
            for name, wanted in self.config.models.items():
                if name not in self.catalog.view.versions:
                    with declared(self.config, "models", name), self._unless_others_did(name):
                        model = declared_model(name, wanted)
                        self.deploy(name, model, wait=False, **model_settings(wanted))
            for name, app in self.config.apps.items():
                with declared(self.config, "apps", name):
                    settings = application_settings(app)
                    self._applications.handle(name, app.models, settings, measured=False)

    @contextlib.contextmanager
    def _unless_others_did(self, name: str) -> Iterator[None]:
        """Allow that another server, which starts at the same time, deploys this model first."""
        try:
            yield
        except AlreadyExists:  # in the store; the view may not have followed yet
            if name not in self.catalog.refresh().versions:
                raise

    def wait_ready(self, timeout: float | None = None, models: Iterable[str] | None = None) -> None:
        """Wait until all replicas of the models that this server starts are connected.

        models: names; None: all. timeout: seconds for all of them; None: server.load_s for each, in
        addition to the time that environments and images take to build. Raises DeployFailed with
        the model, the cause and the last lines of its container; ShuttingDown. Threads: any.
        """
        self._check_open()
        self._deployment.wait_ready(None if models is None else set(models), timeout)

    def close(self, drain_s: float | None = None) -> None:
        """Refuse new queries, wait for those in flight, then stop all parts. Idempotent.

        drain_s: seconds to wait; None: server.drain_s. Queries that are not answered by then fail.
        An error of one part does not keep the others; errors are raised at the end, as one group.
        """
        if os.getpid() != self._pid:
            return
        if not self._closed:
            self._closed = True
            self._drain_s = self.config.server.drain_s if drain_s is None else drain_s
            self._drain_until_s = time.monotonic() + self._drain_s
        atexit.unregister(self.close)
        self._parts.close(max(self._drain_until_s, time.monotonic()) + _CLOSE_S)

    def _drain_mesh(self) -> None:
        if self._drain_s != 0:
            self._mesh.drain()
        # the time for queries begins once the others no longer send any
        self._drain_until_s = time.monotonic() + self._drain_s

    def _stop_streams(self) -> None:
        if self._streams is not None:
            self._streams.stop(self._drain_until_s - time.monotonic())

    def _health_of_streams(self) -> list[Health]:
        return [] if self._streams is None else self._streams.health()

    def _await_connections(self) -> None:
        while self._endpoints.is_busy and time.monotonic() < self._drain_until_s:
            time.sleep(_DRAIN_POLL_S)  # their queries are still answered

    def _await_queries(self) -> None:
        self._engines.refuse_new()
        while self._engines.in_flight() and time.monotonic() < self._drain_until_s:
            time.sleep(_DRAIN_POLL_S)

    def _remove_listener(self) -> None:
        if self._listener is not None:
            self._listener.remove()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    def set_logging(self, settings: LoggingSettings) -> None:
        """Log at the level and in the format of these settings from now on. Threads: any."""
        if self._log is not None:
            self._log.change(settings.level, settings.format)

    def health(self) -> list[Health]:
        """Return the threads, event loops and pools of this server with their states."""
        return self._parts.health()

    def unready(self) -> list[str]:
        """Return the reasons why queries cannot all be answered yet, as `/v2/health/ready` does; an
        empty list if this server is ready. Threads: any."""
        return self._endpoints.unready()

    def dead(self) -> list[str]:
        """Return the parts without which this server cannot go on and that have failed, as
        `/v2/health/live` does; an empty list if it lives. Threads: any."""
        return self._endpoints.dead()

    @property
    def is_closed(self) -> bool:
        """Return whether close() was called."""
        return self._closed

    def __repr__(self) -> str:
        if self._closed:
            return "<ClipperServer, closed>"
        addresses = filter(None, (self.http_address, self.grpc_address, self.admin_address))
        models = ", ".join(str(model.id) for model in self.catalog.view.models())
        return f"<ClipperServer at {', '.join(addresses) or 'no address'}: {models or 'no models'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("this server is closed.", hint="Start another with clipper.start().")

    # -- addresses

    @property
    def address(self) -> str:
        """The address that containers connect to: `unix:/path` or `tcp:host:port`."""
        assert self._listener is not None, "the server has not been started"
        return self._listener.connect

    @property
    def http_address(self) -> str:
        """The address of HTTP queries, `host:port`; empty without [http]."""
        return self._endpoints.http_address

    @property
    def admin_address(self) -> str:
        """The address of HTTP management, `host:port`; empty without http.admin."""
        return self._endpoints.admin_address

    @property
    def grpc_address(self) -> str:
        """The address of gRPC queries, `host:port`; empty without [grpc]."""
        return self._endpoints.grpc_address

    def dashboard_link(self) -> str:
        """Return a link that opens the dashboard in a browser: once, within an hour, where the page
        needs http.token. Empty without http.admin or with http.dashboard = false. Threads: any."""
        return self._endpoints.dashboard_link()

    @property
    def token(self) -> str:
        """The secret with which a container started elsewhere may serve any model (CLIPPER_TOKEN);
        containers that this server starts have tokens of their own."""
        return self._token

    # -- models

    def deploy(
        self,
        name: str,
        model: object = None,
        *,
        resources: Resources | None = None,
        environment: Environment | None = None,
        table_access: TableAccess | None = None,
        wait: bool = True,
        promote: bool = True,
        **options: Unpack[ModelKeywords],
    ) -> CoreModel:
        """Deploy a model in container processes of its own, and return its handle.

        model: a function, a bound method, an estimator of scikit-learn, a module of PyTorch, a
        model of XGBoost or LightGBM, a `clipper_container.Model`, "module:attribute", or a file
        such as "model.onnx" or "s3://bucket/model.onnx" (docs/models.md). It takes a batch: an
        array of shape (n, *row), or a list of str or bytes; with `row_by_row`, one input at a time.

        resources: Resources(replicas=(1, 4), deployer="docker", memory_mib=512, gpus="all").
        environment: Environment(requirements="requirements.txt", python="3.12", code=["lib"]):
            built once for the model.
        table_access: TableAccess(tables={"factors": {"dim": 8}}, reads={"factors": 0},
            tolerance=0.1): parameter tables of the model (docs/params.md, "Serving").
        wait: return when every replica is connected; only then does the version become the latest.
        promote: make the version the latest; otherwise `manage.promote` does so later.
        options: the fields of `clipper.spec.model.ModelSpec`, each with a sentence there and in
            docs/managing.md, "Options of a model", such as `replicas=2`; those of the groups too.

        Where Python takes more than a file does:

        - input, output, inputs, outputs, schema: also dicts of types, {"ids": "i64[*]"}, and a
          `clipper.schema.Schema`. None: the estimator's, or that of the first query.
        - batching: also a Batching. {"cost": "length", "padded": True} batches by what rows cost.
        - command: words, as ["java", "-jar", "svm.jar"], or a text (docs/sdk-cpp-java.md).
        - reads: also a function of an input. warmup: also an array of rows.
        - similar: Similar(width=0.5); `stats()` reports the measured error.

        Warns (ModelWarning) if the model fails on the rows of its warm-up.

        Raises PackagingError (PullFailed for a URL), InvalidInput, AlreadyExists, DeployFailed
        (with the container's last lines, or if the model fails on every batch); for tables
        DoesNotFit (this server has none), TypeConflict (a table exists with other settings),
        ShardAway. Threads: any.
        """
        self._check_open()
        keywords: dict[str, UserValue] = dict(options)
        for kind, group in ((Resources, resources), (Environment, environment)):
            keywords |= grouped(kind, group, keywords)
        keywords |= grouped(TableAccess, table_access, keywords)
        known = (*keywords_of(self.deploy), *ModelKeywords.__annotations__)
        refuse_unknown("ClipperServer.deploy", [key for key in keywords if key not in known], known)
        spec = model_spec(name, cast(ModelKeywords, keywords))
        thing = to_run(chosen(name, model, keywords.get("command"), spec.folder), spec)
        fields = record_fields(name, spec, self.config, is_program=isinstance(thing, Command))
        running = self._deployment.deploy(
            name, thing, spec.version or None, spec.code, spec.input, wait, promote, **fields
        )
        if trouble := self._deployment.warmup_error(running.model.id):
            text = f"model '{running.model.id}' is deployed, but {trouble}"
            warnings.warn(text, ModelWarning, stacklevel=2)
        return running.core

    def model(self, name: str | VersionedModel) -> CoreModel | MeshModelHandle:
        """Return the handle of one model, which has predict(), predict_many() and put().

        Without a version it is the latest. Raises UnknownModel, UnknownVersion.
        """
        if str(name) not in self.catalog.view.versions and self._mesh.is_routed(str(name)):
            return self._mesh.model(str(name))
        return self._core_of(name)

    def _core_of(self, name: str | VersionedModel) -> CoreModel:
        return self._deployment.core_of(self.catalog.view.model(name))

    def scale(self, name: str | VersionedModel, replicas: int | tuple[int, int]) -> None:
        """Start or stop containers until `replicas` of a version run.

        replicas: a number, or bounds between which the load decides. Raises UnknownModel,
        InvalidInput.
        """
        self._check_open()
        self._deployment.scale(name, replicas)

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Take a version out of service for good.

        Raises StillLinked while an application needs it, unless `force` is set; UnknownModel.
        """
        self._deployment.retire(name, force=force)

    def accept_store(self, *, restore: bool) -> int:
        """Take a store that came back empty, older or as another for the one that is known here,
        on all servers; return how many records were written.

        restore: write back what is known here and missing there; otherwise what the store lacks is
        gone. Covers the catalog and, of a node, the registry of its mesh. Does nothing to a store
        that continues what is known. Raises StoreError.
        """
        self._check_open()
        written = self.catalog.accept_store(restore=restore)
        return written + self._mesh.take_store(restore=restore)

    def stages(self, name: str) -> dict[VersionedModel, Stage]:
        """Return the deployment stage of each version of a model that was started here.

        Stages: packing, building environment, starting, loading, warm; or failed.
        """
        return self._deployment.stages(name)

    def logs(self, name: str | VersionedModel, replica: int = 0) -> Sequence[str]:
        """Return the last lines that a container wrote. Raises UnknownModel."""
        return self._deployment.logs(name, replica)

    # -- applications and queries

    def app(
        self, name: str, models: Links | None = None, **settings: Unpack[ApplicationKeywords]
    ) -> ApplicationHandle:
        """Return the handle of an application; make or change it when settings are given.

        models: the models to query, `svm` (the latest version) or `svm:3`. settings: those of
        `clipper.spec.application.ApplicationSpec`, which docs/managing.md lists; what is not given
        stays as it is.

        Raises UnknownApplication, UnknownModel, TypeConflict, InvalidInput.
        """
        self._check_open()
        return self._applications.handle(name, models, settings)

    def remove_app(self, name: str) -> None:
        """Remove an application and its statistics. Its models stay.

        What its policy has learned stays for an application of the same name. Queries in flight are
        answered. Raises UnknownApplication, StoreError.
        """
        self._check_open()
        self._applications.remove(name)

    def predict(
        self,
        name: str,
        x: UserValue,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
    ) -> "Future[Answer]":
        """Query one model, of the catalog or of the mesh, and return the future of its answer.

        Raises UnknownModel, InvalidInput.
        """
        return self.schedule_prediction(
            PredictionRequest(
                x, candidate_models=(name,), slo_ms=slo_ms, salt=salt, priority=priority
            )
        )

    def schedule_predictions(
        self,
        inputs: object,
        application: str | None = None,
        models: Sequence[str | VersionedModel] = (),
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
    ) -> "Future[Answers]":
        """Schedule an array of queries to an application, or to the models named here.

        See ApplicationHandle.predict_many and PredictionRequest.
        """
        return self._prediction.schedule_array(
            PredictionRequest(
                inputs, application, tuple(models), user, slo_ms, salt, priority=priority
            )
        )

    def collector(self, capacity: int = 4096) -> Collector:
        """Return a queue of queries that some threads start and others collect: see Collector.

        capacity: queries between start and collection. Raises InvalidInput.
        """
        self._check_open()
        return self._prediction.collector(capacity)

    # -- mesh

    @property
    def mesh(self) -> MeshNode:
        """The mesh, whose models are loaded on demand: docs/mesh.md.

        Raises DoesNotFit without `mesh=True`.
        """
        return self._mesh.required_node

    def register_model(
        self,
        id: str,
        path: str,
        type: str = "",
        key: str = "",
        *,
        input: str | Mapping[str, str] = "",
        output: str | Mapping[str, str] = "",
        load_now: bool = False,
        sync: bool = False,
        policy: Policy = _DEFAULT_POLICY,
    ) -> ModelStatus:
        """Register a model with the mesh: `server.register_model("m1", "models/m1.onnx")`.

        It is loaded when it is first queried.

        type: `onnx`, `skops`, `python` ("module:attribute"), `packed`, or another that a runtime
        opens; empty: by the path's suffix. input, output: `f32[64]`, or a dict of types by name;
        empty: as its first copy reports. load_now: load it at once; sync: and wait for it.
        Repeating a registration has no effect; AlreadyExists when it differs. Raises DoesNotFit
        without `mesh=True`.
        """
        self._check_open()
        return self._mesh.required_node.register(
            id,
            path,
            type,
            key,
            input=type_text(input),
            output=type_text(output),
            load_now=load_now,
            sync=sync,
            policy=policy,
        )

    # -- parameters and streams

    @property
    def params(self) -> "Client":
        """A client of the shards whose tables this server's models use.

        It handles one request at a time, so a worker makes its own. Raises DoesNotFit without
        `params=`.
        """
        return self._parameters.client

    def stream(self, app: str, url: str, **settings: Unpack[StreamKeywords]) -> "ScoringStream":
        """Score the records of a Redis stream by an application; write the answers to another.

        settings: those of `[streams.NAME]` in docs/configuration.md; docs/streams.md has the fields
        of records and answers. Each record is answered exactly once by all servers of one group
        together, also after crashes. Redis may come up later. Returns a handle with stats() and
        stop(). Raises UnknownApplication, InvalidInput, ConfigError (no Redis URL, or the package
        redis is missing).
        """
        from clipper.frontend.streams.stream_set import settings_of

        self._check_open()
        chosen = settings_of(StreamSettings, {"app": app, "url": url, **settings})
        return self.streams.add(chosen)

    def models_from(self, url: str, **settings: Unpack[ModelStreamKeywords]) -> "ModelUpdates":
        """Deploy the models of a Redis stream as next versions, while serving.

        An entry is ONNX or skops bytes with a descriptor. settings: those of
        `[model_streams.NAME]`. Queries use the old version until the new one's containers are
        connected. Invalid models are written to `STREAM.refused`. Returns a handle with stats() and
        stop(). Raises InvalidInput, ConfigError.
        """
        from clipper.frontend.streams.stream_set import settings_of

        self._check_open()
        return self.streams.add_models(settings_of(ModelStreamSettings, {"url": url, **settings}))

    @property
    def streams(self) -> "StreamSet":
        """The running streams, by name."""
        if self._streams is None:
            from clipper.frontend.streams.stream_set import StreamSet

            self._streams = StreamSet(self, self._processes)
        return self._streams

    # -- inspection

    def stats(self) -> ServerStats:
        """Return counters and gauges as they are now.

        `models` by `name:version` (their replicas, how many are `wanted`, how many it `has`, the
        number of its `engine`); `cache`, `issued`, `answered` and `loop` over all engines;
        `applications` by name: outcomes of queries; `feedback`: the journal, and answers that await
        feedback; `mesh`; `params`: the shards of [server] params; `store`: a remote store's
        connection.
        """
        found = {
            **self._engines.snapshot(),
            "models": self._deployment.stats(),
            "loop": self._dispatch.snapshot(),
            "applications": self._resolver.stats(),
            "feedback": self._learning.stats(),
        }
        optional = {
            "mesh": self._mesh.stats(),
            "params": self._parameters.stats(),
            "store": self._store_stats(),
        }
        present = {part: stats for part, stats in optional.items() if stats is not None}
        return cast(ServerStats, found | present)

    def _store_stats(self) -> StoreStats | None:
        """Return the connection to a remote store, and of any whether it is trusted; None for a
        local one that is."""
        store, refused = self._store, self.catalog.continuity.trouble or self._mesh.other_history
        if isinstance(store, CachedStore):
            return {**store.stats(), "refused": refused}
        if not refused:
            return None
        return {
            "name": store.name,
            "connected": True,
            "tries": 0,
            "copy_age_s": None,
            "away_s": 0.0,
            "refused": refused,
        }

    def recorded(self, application: str) -> Iterator[Recorded]:
        """Iterate over what the decoys of an application recorded, oldest first per decoy.

        Each item has id, time, input, and the answer if there was one. Raises StoreError. Threads:
        any.
        """
        return self._recorder.recorded(application)


def _descriptors(config: Config) -> int:
    """Return how many file descriptors a server opens while it starts, and some for containers and
    clients. They are counted before anything is opened, since a part that lacks one fails in its
    own words."""
    listeners = (config.http.address, config.http.admin)
    counts = ((12, config.server.state), (20, any(listeners)), (28, config.grpc.address))
    return 24 + sum(count for count, wanted in counts if wanted)
