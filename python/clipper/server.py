"""ClipperServer: one node, built from a Config. The only place where objects meet."""

import atexit
import contextlib
import functools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from clipper.catalog import Catalog
from clipper.config import Config, merge_batching
from clipper.deploy.deployers import placing
from clipper.deploy.environments import lines_of
from clipper.deploy.warmup import warmup_of
from clipper.errors import ShuttingDown
from clipper.frontend.streaming import Streaming
from clipper.json_log import JsonLog
from clipper.manage.applying import Applying
from clipper.manage.building import Stage
from clipper.manage.declared import application_settings, declared, model_settings
from clipper.manage.deployment import Deployment, type_of
from clipper.manage.described import of_management
from clipper.manage.moving import Place
from clipper.manage.operations import Operations
from clipper.manage.rolling import Rolling
from clipper.manage.running import Running, announce, state_named
from clipper.mesh.joining import Ground, Joining
from clipper.mesh.routing.router import MeshedModel
from clipper.serving.address import listen
from clipper.serving.cache import Cache
from clipper.serving.collector import Collector
from clipper.serving.deciding import Deciding
from clipper.serving.dispatch import Dispatch
from clipper.serving.ear import Ear
from clipper.serving.engine_memory import EngineMemory
from clipper.serving.engines import Engines
from clipper.serving.learning import Learning
from clipper.serving.models import RunningModels
from clipper.serving.observe import observe_for_others
from clipper.serving.questions import Questions
from clipper.serving.reads import said_of
from clipper.serving.recorder import Recorded, Recorder
from clipper.serving.scaling import replica_bounds
from clipper.settings.http import admin_tls, query_tls, scheme_of
from clipper.state_dir import StateDir
from clipper.store import CachedStore, open_server_store
from clipper.store.etcd_address import redacted_url
from clipper.store.history import audit_context, default_actor
from clipper.types import VERSION, Batching, InputType, Model, Similar, VersionedModel
from clipper_core.model import Model as CoreModel

if TYPE_CHECKING:
    from clipper.frontend.frontends import Frontends
    from clipper.manage.dashboard.feed import Feed
    from clipper.mesh.facade import MeshFacade

_log = logging.getLogger(__name__)
_DRAIN_POLL_S = 0.002


class ClipperServer(Streaming, Joining, Applying):
    """One serving node. Threads: any. Use it in a `with` block, or call close().

    Answers queries by their own deadline from models in processes of their own. Build one with
    `clipper.start()`.
    """

    ends_by_signal = False  # in good order: `clipper down` may send it one

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pid = os.getpid()
        self._closed = False
        self._log: JsonLog | None = None
        self._engines = Engines(config)
        self._engine_memory = EngineMemory()
        self._dir = StateDir(config.server.state, config.server.folder)
        try:
            state, bytes_max = config.server.state, config.limits.state_bytes_max
            self._store = open_server_store(
                state, bytes_max, self._dir.folder, required=config.server.require_store
            )
            self.catalog = Catalog(self._store)
            self._learning = Learning(
                self._store,
                self._dir.folder,
                config.feedback,
                self._store.remote or self._dir.is_apart,
            )
            if self._store_is_away:
                self._learning.begin_without_store()
        except BaseException:
            self._dir.close()
            raise
        self._dispatch = Dispatch(*self._engines)
        running = RunningModels(self._engines.of, config.limits, self._engine_memory.prepare)
        self._running_models = running
        self._token = config.server.token or secrets.token_urlsafe(24)
        self._deployment = Deployment(
            config,
            self.catalog,
            self._engines,
            running,
            self._dir,
            self._token,
            lambda: self.address,
        )
        self._recorder = Recorder((self._dir.folder or self._dir.run) / "decoys")
        self._deciding = Deciding()
        self._questions = Questions(
            self.catalog,
            running,
            self._learning,
            self._recorder,
            self._deployment.teaching,
            self._deciding,
        )
        self.cache = Cache(self._core, lambda: self.stats()["cache"])
        self._frontends: Frontends | None = None
        self._dashboard: Feed | None = None
        self._collectors: weakref.WeakSet[Collector] = weakref.WeakSet()
        containers = self._deployment.containers
        self._rolling = Rolling(
            self.catalog, self._questions, lambda model: bool(containers.of(model))
        )
        place = Place(self._store, self._dir.models, self._deployment.resume)
        self.manage = Operations(self, place, self._rolling, default_actor())

    # -- life

    def start(self) -> Self:
        """Listen, bring back what the catalog knows, then what the config declares."""
        config = self.config
        self._log = JsonLog() if self.config.server.log_format == "json" else None
        try:
            if not self._store_is_away:
                self._enter()
            self._listener = listen(self.config.server.address, self._dir.run)
            self._dispatch.loop.listen(self._listener.fd)
            self._dispatch.start()
            self._open_tables()
            self._deployment.tables = self._tables
            self._questions.contexts, self._running_models.watching = (
                self._context_rows,
                self._watching,
            )
            self._deployment.start()
            self._enter_mesh()
            self._end_following = self.catalog.on_change(self._questions.resolve)
            resumed = self.catalog.models()
            for model in resumed:
                self._deployment.resume(model)
            self._questions.resolve(self.catalog.view)
            self._rolling.start()
            if not self._store_is_away:
                self._begin()
            if config.http.address or config.http.admin or config.grpc.address or config.influx.url:
                self._frontends = self._with_frontends()
                self._frontends.start()
                self._announce()
                if self._dashboard is not None:
                    self._dashboard.start()
            self._start_streams()
            if isinstance(self._store, CachedStore):
                self._store.start(lambda: self._store_has_come(resumed))
        except BaseException:
            self.close(drain_s=0)
            raise
        atexit.register(self.close)
        return self

    def _enter_mesh(self) -> None:
        ground = Ground(
            self, self._engines, self._running_models, self._questions, self._deployment.containers
        )
        mesh = self._join(self._store, self._dir.run, ground)
        if mesh is not None:
            self._deployment.mesh, self._questions.mesh = mesh, mesh.question
            self._questions.link = mesh.link
            self.catalog.elsewhere = lambda name: (
                None if (link := mesh.link(name)) is None else link.record
            )
            if self._store_is_away and self.config.mesh.enter_s:
                mesh.start_late()
            else:
                mesh.start()

    def _enter(self) -> None:
        """Be known to the servers that share the store."""
        self._learning.enter(functools.partial(observe_for_others, self._questions.of))

    def _begin(self) -> None:
        """What needs the store."""
        with audit_context("the configuration", ""):
            self._declare()
        self._learning.replay()

    @property
    def _store_is_away(self) -> bool:
        return isinstance(self._store, CachedStore) and self._store.is_away

    def _store_has_come(self, resumed: list[Model]) -> None:
        """It was away at the start. StoreError when it is gone again."""
        self.catalog.refresh()
        self._deployment.follow(resumed)
        self._questions.resolve(self.catalog.view)
        with contextlib.suppress(ShuttingDown):
            if self._mesh is not None:
                self._mesh.enter()
            self._enter()
            self._learning.begin_again()
            with audit_context("the configuration", ""):
                self._declare()

    def wait_ready(self, timeout: float | None = None, models: Iterable[str] | None = None) -> None:
        """Wait until all replicas of the models that this server starts are connected: of `models`
        by name, or of all.

        timeout: seconds for all of them; None: server.load_s for each, beside the building of
        environments and images. Raises DeployFailed with the model, the cause, and the last lines
        of its container; ShuttingDown. Threads: any.
        """
        self._check_open()
        self._deployment.wait_ready(None if models is None else set(models), timeout)

    def close(self, drain_s: float | None = None) -> None:
        """Refuse new queries, let those in flight finish for `drain_s` seconds, end the rest, stop
        all. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        for collector in list(self._collectors):
            collector.close()
        if self._dashboard is not None:
            self._dashboard.stop()
        if self._frontends is not None:
            self._frontends.drain()
        if self._mesh is not None and drain_s != 0:
            self._mesh.drain_for_good()
        until = time.monotonic() + (self.config.server.drain_s if drain_s is None else drain_s)
        self._rolling.stop()
        self._deployment.refuse_new()
        self._stop_streams(until - time.monotonic())
        self._engine_memory.stop()
        self._engines.refuse_new()
        while self._engines.in_flight() and time.monotonic() < until:
            time.sleep(_DRAIN_POLL_S)
        self._deployment.stop()
        if self._mesh is not None:
            self._mesh.close()
        self._dispatch.stop()
        if self._frontends is not None:
            self._frontends.stop()
        self._deciding.close()
        self._deployment.containers.stop()
        self._close_tables()
        self.catalog.close()
        self._learning.close()
        self._recorder.close()
        self._store.close()
        if hasattr(self, "_listener"):
            self._listener.remove()
        self._dir.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where containers dial in: `unix:/path` or `tcp:host:port`."""
        return self._listener.connect

    @property
    def http_address(self) -> str:
        """Where queries come in over HTTP, `host:port`; empty without [http]."""
        return "" if self._frontends is None else self._frontends.address

    @property
    def admin_address(self) -> str:
        """Where management comes in over HTTP, alike."""
        return "" if self._frontends is None else self._frontends.admin_address

    @property
    def grpc_address(self) -> str:
        """Where queries come in over gRPC, alike."""
        return "" if self._frontends is None else self._frontends.grpc_address

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
        warmup: Any = None,
        row_by_row: bool = False,
        code: Sequence[str] = (),
        requirements: str | os.PathLike[str] | Sequence[str] = (),
        python: str = "",
        deployer: str = "",
        memory_mib: int = 0,
        cpus: float = 0.0,
        gpus: str = "",
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        reads: Any = None,
        tolerance: float = 0.0,
        wait: bool = True,
        promote: bool = True,
    ) -> CoreModel:
        """Deploy a function, a bound method, a scikit-learn estimator, a module of PyTorch, a model
        of XGBoost or LightGBM, a `clipper_container.Model`, "module:attribute", or a file such as
        "model.onnx": docs/models.md.

        It runs in `replicas` processes of its own ((1, 4): as many of 1 to 4 as the load asks for)
        and takes a batch: an array of shape (n, *row), or a list of str or bytes; with
        `row_by_row`, one input at a time. input: `f64[64]`, `str`, ...; taken from the estimator,
        or from the first query, when not given. similar: near inputs share predictions, as in
        `deploy("svm", f, input="f32[784]", similar=Similar(width=0.5))`; `stats()` tells how far
        that was wrong. finite: refuse inputs with NaN or infinities. retry_singly: when a batch
        fails, try its rows one by one. warmup: rows that a container runs before it is ready; True:
        made-up ones, False: none, for a model whose calls have side effects. code: folders or files
        the model imports. wait: until every replica is connected; the version becomes the latest
        only then, promote: or not at all, until `manage.promote` says so.  requirements:
        "requirements.txt", or lines for pip such as "scikit-learn==1.5.2": it runs in an
        environment of its own with these, built once; python: of that, "3.12" or a path. deployer:
        "process", "docker" or "podman" (server.deployer when not given); for the last two, of each
        container: memory_mib, cpus (0: no limit), gpus ("all", a number, or ids as "0,2");
        docs/images.md. tables: of parameters, {"factors": {"dim": 8}}, beside those that the
        model's class declares: docs/params.md, "Serving". reads: the rows that a prediction is made
        of, {"taste": [0, 1]}: columns of the input by table, or a function of the input; a cached
        prediction is forgotten once one of them has moved by more than `tolerance`, a share of its
        norm. Raises PackagingError, AlreadyExists, DeployFailed (with the container's last lines);
        of tables DoesNotFit (this server has none), InvalidInput, TypeConflict (one is there, and
        another), ShardAway.
        """
        self._check_open()
        least, most = replica_bounds(
            name, 1 if replicas is None else replicas, self.config.limits.replicas_max
        )
        settings = {
            "output": str(type_of(output)),
            "replicas": least,
            "replicas_max": most,
            "batching": merge_batching(self.config.batching, batching),
            "cache": cache,
            "similar": similar,
            "finite": finite,
            "retry_singly": retry_singly,
            "row_by_row": row_by_row,
            "warmup": warmup_of(name, self.config.server.warmup if warmup is None else warmup),
            "requirements": lines_of(requirements),
            "python": python,
            "tables": dict(tables or {}),
            "reads": said_of(name, reads) if reads is not None else {},
            "tolerance": float(tolerance),
            **placing(deployer or self.config.server.deployer, memory_mib, cpus, gpus),
        }
        return self._deployment.deploy(
            name, model, version, code, input, wait, promote, **settings
        ).core

    def model(self, name: str | VersionedModel) -> CoreModel | MeshedModel:
        """A model's own handle: predict(x), predict_many(rows), put(x, output). The latest version
        when none is named."""
        if (
            self._mesh is not None
            and str(name) not in self.catalog.view.versions
            and self._mesh.routes.route(str(name))
        ):
            return self._meshed_model(str(name))
        return self._core(name)

    def _core(self, name: str | VersionedModel) -> CoreModel:
        return self._deployment.core_of(self.catalog.view.model(name))

    def scale(self, name: str | VersionedModel, replicas: int | tuple[int, int]) -> None:
        """Start or stop containers until `replicas` of a version run, or within these bounds as
        many as the load asks for."""
        self._check_open()
        self._deployment.scale(name, replicas)

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Take a version out of service for good. StillLinked while an application needs it, unless
        by `force`."""
        self._deployment.retire(name, force=force)

    def stages(self, name: str) -> dict[VersionedModel, Stage]:
        """How far each version of a model is that was deployed or started here: packing, building
        environment, starting, loading, warm; or failed."""
        return self._deployment.stages(name)

    def logs(self, name: str | VersionedModel, replica: int = 0) -> Sequence[str]:
        """The last lines a container wrote."""
        return self._deployment.logs(name, replica)

    # -- looking in

    def stats(self) -> dict[str, Any]:
        """Counters and gauges now: `models` by `name:version` (their replicas, how many are
        `wanted` and how many it `has`; `engine`: the number of the one that serves it), `cache`,
        `issued`, `answered`, `loop`: of all engines; `applications` by name: what their queries
        came to; `feedback`: the journal, and answers waiting; `params`: the set of shards of
        [server] params; `store`: of one elsewhere, whether it is there.
        """
        return {
            **self._engines.snapshot(),
            "models": self._deployment.stats(),
            "loop": self._dispatch.snapshot(),
            "applications": self._questions.stats(),
            "feedback": self._learning.stats(),
            **({"mesh": self._mesh.stats()} if self._mesh is not None else {}),
            **({"params": self._tables.stats()} if self._tables is not None else {}),
            **({"store": self._store.stats()} if isinstance(self._store, CachedStore) else {}),
        }

    def recorded(self, application: str) -> Iterator[Recorded]:
        """What an application's decoys recorded: id, time, input, and the answer when there was
        one; by decoy, oldest first. Raises StoreError. Threads: any."""
        return self._recorder.recorded(application)

    # -- inside

    def _with_frontends(self) -> "Frontends":
        """HTTP is imported by those who want it: it would be a tenth of the time that `import
        clipper` takes."""
        from clipper.frontend.frontends import Frontends
        from clipper.frontend.node import Node
        from clipper.manage.mesh_rest import MeshManagement
        from clipper.manage.rest import Management

        questions = self._questions
        mesh: MeshFacade | None = self._mesh
        node = Node(
            VERSION,
            self.config,
            self.catalog,
            questions.of,
            questions.asked,
            self.app,
            self.stats,
            lambda: self._closed,
            self.scale,
            mesh,
            self._tables,
        )
        frontends = Frontends(
            node, lambda loop: Ear(loop, self._dispatch.engines), self._dispatch.engines
        )
        Management(node, self.manage).add_to(frontends.admin_routes)
        if mesh is not None:
            MeshManagement(mesh).add_to(frontends.admin_routes)
        if self.config.http.admin and self.config.http.dashboard:
            self._dashboard = self._with_dashboard(node, frontends)
        frontends.admin_routes.describe(of_management())
        return frontends

    def _with_dashboard(self, node: Any, frontends: "Frontends") -> "Feed":
        from clipper.manage.dashboard.feed import Feed
        from clipper.manage.dashboard.page import Page
        from clipper.manage.dashboard.sources import ServerSources

        def addresses() -> Mapping[str, str]:
            each = {
                "http": self.http_address,
                "grpc": self.grpc_address,
                "admin": self.admin_address,
                "containers": self.address,
            }
            return {what: where for what, where in each.items() if where}

        incidents = lambda: tuple(self._deployment.incidents)  # noqa: E731
        sources = ServerSources(
            self, node, self.manage, incidents, self._questions.slowest, addresses
        )
        feed = Feed(sources, self.config.http.dashboard_viewers_max)
        Page(feed, self.config).add_to(frontends.admin_routes)
        return feed

    def _announce(self) -> None:
        if self.admin_address:
            http, state = self.config.http, state_named(self.config.server.state)
            queries = (
                f"{scheme_of(query_tls(http))}://{self.http_address}" if self.http_address else ""
            )
            tls = admin_tls(http)
            certificate = os.path.abspath(tls.cert) if tls else ""
            url = f"{scheme_of(tls)}://{self.admin_address}"
            running = Running(
                url,
                self._pid,
                http.token,
                queries,
                redacted_url(state),
                certificate,
                self.grpc_address,
                self.ends_by_signal,
            )
            announce(self._dir.run, running)

    def _declare(self) -> None:
        """Models and applications of the config that the catalog does not have yet."""
        for name, wanted in self.config.models.items():
            if name not in self.catalog.view.versions:
                with declared(self.config, "models", name):
                    self.deploy(name, wanted.target, **model_settings(wanted))
        for name, app in self.config.apps.items():
            with declared(self.config, "apps", name):
                self._app(name, app.models, application_settings(app), measured=False)
