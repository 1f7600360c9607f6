"""Management of registered models: registration, status, loading. Threads: any."""

import os
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from pathlib import PurePath
from typing import Final

from clipper.errors import (
    AlreadyExists,
    ClipperError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    StillLinked,
    UnknownModel,
)
from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.decisions import failures
from clipper.mesh.loading.loader import ModelLoader, NotLoadedHere
from clipper.mesh.node_host import NodeHost
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import MeshModel, Status
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.reports import LIST_MAX, CopyState, CopyStatus, Info, ModelStatus
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.routing.router import ModelRouter
from clipper.mesh.transport.channel import RequestFailed
from clipper.settings.mesh import MeshSettings
from clipper.store.history import is_dry_run
from clipper.types import InputType, check_name

HOUR_MS: Final = 3_600_000
TYPES: Final = {".onnx": "onnx", ".skops": "skops", ".packed": "packed", ".pkl": "packed"}


class ModelManagement:
    """The model operations of `clipper.mesh.reports`."""

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        router: ModelRouter,
        loader: ModelLoader,
        copies: CopyLocator,
        host: NodeHost,
        loop: NodeLoop,
        log: DecisionLog,
    ) -> None:
        self._settings, self._registry, self._router = settings, registry, router
        self._loader, self._copies, self._host = loader, copies, host
        self._loop, self._log = loop, log

    def register(
        self, id: str, info: Info, *, load_now: bool, sync: bool, used_ms: int, owner: str
    ) -> ModelStatus:
        """Register a model, and load it if `load_now`. AlreadyExists when it differs."""
        record = self._registry.register(self.new_record(id, info, used_ms, load_now, owner))
        if is_dry_run():
            return self.status_of(id, record)
        if load_now:
            return self.ensure_loaded(id, sync=sync, used_ms=used_ms)
        return self.status(id)

    def new_record(
        self, id: str, info: Info, used_ms: int, load_now: bool, owner: str
    ) -> MeshModel:
        """Return the record of a new model. InvalidInput, AlreadyExists."""
        self.check_id(id, "model")
        type, path = info.type or type_of(info.path), info.path
        if type != "python" and "://" not in path:
            path = os.path.abspath(path)
        for row_type in (info.input, info.output):
            InputType.parse(row_type or "any")
        return MeshModel(
            id,
            type,
            path,
            info.key,
            info.input or "any",
            info.output or "any",
            info.policy,
            now_ms(),
            owner,
            used_ms=used_ms or (now_ms() - HOUR_MS * (1 if load_now else 6)),
        )

    def check_id(self, id: str, noun: str) -> None:
        """Raise InvalidInput for an impossible id, AlreadyExists for one of the catalog's."""
        check_name(id, noun)
        if self._host.is_taken(id):
            raise AlreadyExists(
                f"{id!r} is a model or an application of the catalog.", hint="Choose another id."
            )

    def unregister(self, id: str) -> None:
        """Unregister a model. StillLinked while an application or a v-model uses it."""
        if apps := self._host.linking(id):
            raise StillLinked(
                f"model {id!r} is used by application {apps[0]!r}.", hint="Unlink it there first."
            )
        if self._registry.unregister(id) and not is_dry_run():
            self._loop.call(self._log.note, id, "unregistered", "by management")

    def status(self, id: str) -> ModelStatus:
        """Return the status of a model, read from the store."""
        return self.status_of(id, self._registry.read(id))

    def status_of(self, id: str, record: MeshModel | None) -> ModelStatus:
        """Return the status of a model with this record."""
        if record is None:
            return ModelStatus(id, "NOT_FOUND")
        alive = self._registry.alive()
        copies = [
            CopyStatus(
                i,
                "LOADED" if copy.loaded_ms else "LOADING",
                copy.loaded_ms or copy.claimed_ms,
                copy.size_bytes,
            )
            for i, copy in record.copies.items()
            if i in alive
        ]
        failing: CopyState = "LOADING_FAILED"
        failed = [
            CopyStatus(i, failing, failure.time_ms, 0, failure.why)
            for i, failure in record.failures.items()
        ]
        newest = sorted((*copies, *failed), key=lambda copy: -copy.since_ms)
        route = self._router.get(id)
        used_ms = max(record.used_ms, route.used_ms if route else 0)
        errors = tuple(copy.why for copy in newest if copy.why)
        return ModelStatus(
            id, self._state_of(record, copies), errors, tuple(newest), record, used_ms
        )

    def _state_of(self, record: MeshModel, copies: Sequence[CopyStatus]) -> Status:
        if any(copy.state == "LOADED" for copy in copies):
            return "LOADED"
        if copies:
            return "LOADING"
        return "LOADING_FAILED" if self.failure_of(record) else "NOT_LOADED"

    def failure_of(self, record: MeshModel) -> failures.FailedModel | None:
        """Return why the mesh does not load the model now; None: it may be loaded."""
        alive = len(self._registry.alive())
        return failures.verdict(record, now_ms(), self._settings, alive)

    def ensure_loaded(self, id: str, *, sync: bool, used_ms: int) -> ModelStatus:
        """Load a model unless a copy is loaded. UnknownModel."""
        if self._registry.read(id) is None:
            raise UnknownModel(
                f"no model {id!r} is registered.",
                hint="Register it: server.register_model(id, path).",
            )
        self._loop.run(self._ensure_loaded(id, used_ms or now_ms(), sync))
        return self.status(id)

    async def _ensure_loaded(self, id: str, used_ms: int, sync: bool) -> None:
        """Load a model. sync: wait until it is loaded or has failed, as its status says then."""
        self._loader.cache.touch(id, used_ms)
        limit_s = self._settings.load_s * self._settings.tries
        if not sync:
            self._loop.tasks.spawn(self._load_and_note(id, used_ms, limit_s))
            return
        try:
            await self._copies.load(id, used_ms, until_s=limit_s)
        except NotLoadedHere:
            raise UnknownModel(f"no model {id!r} is registered any more.") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"model {id!r} was not loaded within {limit_s:g} s.", hint="Poll its status."
            ) from None
        except RequestFailed as failure:
            if failure.fault == "none":
                raise Overloaded(f"model {id!r} is not loaded: {failure.why}") from None

    async def _load_and_note(self, id: str, used_ms: int, limit_s: float) -> None:
        try:
            await self._copies.load(id, used_ms, until_s=limit_s)
        except (RequestFailed, TimeoutError, ClipperError) as error:
            why = getattr(error, "why", "") or str(error) or "it took too long"
            self._log.note(id, "not loaded", why)

    def list(self, prefix: str, after: str, limit: int) -> list[ModelStatus]:
        """Return the status of models, by id."""
        models = self._registry.models
        return [self.status_of(id, models.get(id)) for id in page(models, prefix, after, limit)]


def type_of(path: str) -> str:
    """Return the model type that the ending of a path stands for. InvalidInput."""
    found = TYPES.get(PurePath(path).suffix)
    if found is None and ":" in path and "://" not in path:
        found = "python"
    if found is None:
        endings = ", ".join(sorted(TYPES))
        raise InvalidInput(
            f"the type of {path!r} does not follow from its name.",
            hint=f"Give type=; endings are known: {endings}.",
        )
    return found


def page(ids: Iterable[str], prefix: str, after: str, limit: int) -> list[str]:
    """Return the first `limit` ids with a prefix that come after `after`. InvalidInput."""
    if not 1 <= limit <= LIST_MAX:
        raise InvalidInput(f"limit={limit}: 1 to {LIST_MAX} are possible.")
    return nsmallest(limit, (id for id in ids if id.startswith(prefix) and id > after))
