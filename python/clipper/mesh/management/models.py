"""The verbs of management (clipper.mesh.facade): registrations, v-models, what is where and why.
Threads: any."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from pathlib import PurePath
from typing import Any, Final, Literal

from clipper.errors import (
    AlreadyExists,
    ClipperError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    StillLinked,
    UnknownModel,
)
from clipper.mesh.decisions import failures, placement, vmodels
from clipper.mesh.facade import (
    LIST_MAX,
    CopyState,
    CopyStatus,
    Explanation,
    Info,
    MeshEvent,
    ModelStatus,
    Verdict,
    VModelStatus,
)
from clipper.mesh.loading.loader import Elsewhere
from clipper.mesh.node.parts import Parts
from clipper.mesh.records import MeshModel, Policy, Status, VModel
from clipper.mesh.registry import now_ms
from clipper.mesh.transport.channel import Failed
from clipper.store import KeyChange, Mirror
from clipper.store.history import is_dry_run
from clipper.types import InputType, check_name

HOUR_MS: Final = 3_600_000
NO_POLICY: Final = Policy()
EVENTS_MAX: Final = 10_000  # of one watch, not yet taken
POLL_S: Final = 0.1
TYPES: Final = {".onnx": "onnx", ".skops": "skops", ".packed": "packed", ".pkl": "packed"}
Of = Literal["model", "vmodel", "instance"]
NEVER: Final = lambda: False  # noqa: E731


class Managing(Parts):
    # -- the store

    @property
    def other_history(self) -> str:
        """Why nothing is taken from the store, which is not the one that it was; empty while it
        is."""
        return self.registry.other_history if self._begun.is_set() else ""

    def take_store(self, *, restore: bool) -> int:
        """Say which holds of a store that has lost its history, and of what the nodes remember; ->
        how many records were written.

        restore: what this node knows and the store does not is written back. Without it, those
        models and v-models are unregistered, on all nodes. Does nothing to a store that is the one
        that it was.
        """
        self._check_open()
        return self.registry.take_store(restore) if self.registry.other_history else 0

    # -- models

    def register(
        self,
        id: str,
        path: str,
        type: str = "",
        key: str = "",
        *,
        input: str = "",
        output: str = "",
        load_now: bool = False,
        sync: bool = False,
        used_ms: int = 0,
        policy: Policy = NO_POLICY,
        owner: str = "",
    ) -> ModelStatus:
        self._check_open()
        info = Info(path, type, key, input, output, policy)
        record = self.registry.register(self._record(id, info, used_ms, load_now, owner))
        if is_dry_run():
            return self._status_of(id, record)
        if load_now:
            return self.ensure_loaded(id, sync=sync, used_ms=used_ms)
        return self.status(id)

    def _record(
        self, id: str, info: Info, used_ms: int, load_now: bool, owner: str = ""
    ) -> MeshModel:
        checked(id, "model")
        if self.ground.is_taken(id):
            raise AlreadyExists(
                f"{id!r} is a model or an application of the catalog.", hint="Choose another id."
            )
        kind, path = info.type or type_of(info.path), info.path
        if kind != "python" and "://" not in path:
            path = os.path.abspath(path)
        for what in (info.input, info.output):
            try:
                InputType.parse(what or "any")
            except ValueError as error:
                raise InvalidInput(str(error)) from None
        used = used_ms or (now_ms() - HOUR_MS * (1 if load_now else 6))
        return MeshModel(
            id,
            kind,
            path,
            info.key,
            info.input or "any",
            info.output or "any",
            info.policy,
            now_ms(),
            owner,
            used_ms=used,
        )

    def unregister(self, id: str) -> None:
        self._check_open()
        if apps := self.ground.linking(id):
            raise StillLinked(
                f"model {id!r} is asked by application {apps[0]!r}.", hint="Unlink it there first."
            )
        if self.registry.unregister(id) and not is_dry_run():
            self._tell(self.notes.note, id, "unregistered", "by management")

    def status(self, id: str) -> ModelStatus:
        self._check_open()
        return self._status_of(id, self.registry.read(id))

    def _status_of(self, id: str, record: MeshModel | None) -> ModelStatus:
        if record is None:
            return ModelStatus(id, "NOT_FOUND")
        alive = self.registry.alive()
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
        route = self.routes.get(id)
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
        return "LOADING_FAILED" if self._failed(record) else "NOT_LOADED"

    def _failed(self, record: MeshModel) -> failures.Failed | None:
        return failures.verdict(record, now_ms(), self.settings, len(self.registry.alive()))

    def ensure_loaded(self, id: str, *, sync: bool = False, used_ms: int = 0) -> ModelStatus:
        self._check_open()
        if self.registry.read(id) is None:
            raise UnknownModel(
                f"no model {id!r} is registered.",
                hint="Register it: server.register_model(id, path).",
            )
        self._tell(self._touch, id, used_ms or now_ms())
        self._do(self._ensure(id, used_ms or now_ms(), sync))
        return self.status(id)

    def _touch(self, id: str, used_ms: int) -> None:
        self.local.residents.touch(id, used_ms)

    async def _ensure(self, id: str, used_ms: int, sync: bool) -> None:
        """sync: until it is loaded or has failed, which its status then says."""
        limit_s = self.settings.load_s * self.settings.tries
        if not sync:
            self.local.spawn(self._load_unheard(id, used_ms, limit_s))
            return
        try:
            await self.supply.load(id, used_ms, until_s=limit_s)
        except Elsewhere:
            raise UnknownModel(f"no model {id!r} is registered any more.") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"model {id!r} was not loaded within {limit_s:g} s.", hint="Ask for its status."
            ) from None
        except Failed as failure:
            if failure.fault == "none":
                raise Overloaded(f"model {id!r} is not loaded: {failure.why}") from None

    async def _load_unheard(self, id: str, used_ms: int, limit_s: float) -> None:
        """Nobody waits for it: what becomes of it, its status and `explain` say."""
        try:
            await self.supply.load(id, used_ms, until_s=limit_s)
        except (Failed, TimeoutError, ClipperError) as error:
            self.notes.note(
                id, "not loaded", getattr(error, "why", "") or str(error) or "it took too long"
            )

    def models(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[ModelStatus]:
        self._check_open()
        return [
            self._status_of(id, self.registry.models.get(id))
            for id in _page(self.registry.models, prefix, after, limit)
        ]

    # -- v-models

    def set_vmodel(
        self,
        id: str,
        target: str,
        *,
        owner: str = "",
        update_only: bool = False,
        model: Info | None = None,
        auto_delete: bool = False,
        load_now: bool = False,
        force: bool = False,
        sync: bool = False,
        expected: str = "",
        share: float = 0.0,
        give_up_s: float = 0.0,
    ) -> VModelStatus:
        self._check_open()
        checked(id, "v-model")
        if self.ground.is_taken(id):
            raise AlreadyExists(
                f"{id!r} is a model or an application of the catalog.", hint="Choose another id."
            )
        info = self._record(target, model, 0, load_now, owner) if model is not None else None
        now = now_ms()
        give_up_ms = now + int(give_up_s * 1000) if give_up_s else 0

        def decide(
            before: VModel | None, read: Callable[[str], MeshModel | None]
        ) -> vmodels.VChange:
            return vmodels.set_target(
                id,
                before,
                target,
                read,
                now,
                owner=owner,
                update_only=update_only,
                info=info,
                auto_delete=auto_delete,
                force=force,
                expected=expected,
                share=share,
                give_up_ms=give_up_ms,
            )

        after = self.registry.change_vmodel(id, decide)
        if is_dry_run():
            return self._vstatus_of(id, after, owner)
        self._tell(self.vmodels_moved)
        if load_now and after is not None and after.active == after.target:
            self.ensure_loaded(target, sync=sync)
        if sync and after is not None:
            self._await_vmodel(after)
        return self.vmodel_status(id, owner)

    def _await_vmodel(self, told: VModel) -> None:
        """Until it has switched, or cannot. told: as it was written."""
        id = told.id

        def is_settled(_: object) -> bool:
            vmodel: VModel | None = self.registry.vmodels.get(id)
            if self._stopping or vmodel is None or vmodel.since_ms < told.since_ms:
                return self._stopping
            if vmodel.since_ms == told.since_ms and vmodel.target != told.target:
                return False  # what was there before, of the same millisecond
            return vmodel.active == vmodel.target or vmodel.failed or bool(vmodel.share)

        limit_s = self.settings.load_s * self.settings.tries
        if not self.registry.vmodels.wait_for(is_settled, limit_s):
            late = f"v-model {id!r} has not switched within {limit_s:g} s; it goes on."
            raise DeadlineExceeded(late, hint="Ask for its status.")
        self.follow_vmodel(id)  # the mirror tells others of it before it tells this node's thread

    def delete_vmodel(self, id: str, owner: str = "") -> None:
        self._check_open()
        self.registry.change_vmodel(
            id, lambda before, read: vmodels.delete(before, read, now_ms(), owner=owner)
        )

    def vmodel_status(self, id: str, owner: str = "") -> VModelStatus:
        self._check_open()
        return self._vstatus_of(id, self.registry.read_vmodel(id), owner)

    def _vstatus_of(self, id: str, vmodel: VModel | None, owner: str = "") -> VModelStatus:
        if vmodel is None or (owner and vmodel.owner != owner):
            return VModelStatus(id, "NOT_FOUND")
        active = self._status_of(vmodel.active, self.registry.read(vmodel.active)).status
        target = active
        if vmodel.target != vmodel.active:
            target = self._status_of(vmodel.target, self.registry.read(vmodel.target)).status
        return VModelStatus(
            id,
            vmodel.status(),
            vmodel.active,
            vmodel.target,
            active,
            target,
            vmodel.owner,
            vmodel.share,
            vmodel.previous,
            vmodel.why,
            vmodel.since_ms,
        )

    def rollback_vmodel(self, id: str) -> VModelStatus:
        self._check_open()

        def decide(
            before: VModel | None, read: Callable[[str], MeshModel | None]
        ) -> vmodels.VChange:
            if before is None:
                raise vmodels.UnknownVModel.named(id, ())
            return vmodels.rollback(before, read, now_ms())

        after = self.registry.change_vmodel(id, decide, verb="rollback")
        if is_dry_run():
            return self._vstatus_of(id, after)
        self._tell(self.vmodels_moved)
        return self.vmodel_status(id)

    def vmodels(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[VModelStatus]:
        self._check_open()
        known = self.registry.vmodels
        return [self._vstatus_of(id, known.get(id)) for id in _page(known, prefix, after, limit)]

    # -- why

    def explain(self, id: str) -> Explanation:
        self._check_open()
        record = self.registry.read(id)
        if record is None:
            return Explanation(
                id, "NOT_FOUND", (), self.notes.of(id), "Nothing: no such model is registered."
            )
        found = placement.explain(
            record,
            self.instances(),
            now_ms(),
            constraints=self.supply.constraints,
            seen=self.local.times,
            exclude=failures.blocked(record, now_ms(), self.settings),
        )
        verdicts = tuple(Verdict(one.instance, one.ok, one.why, one.rank - 1) for one in found)
        status = self._status_of(id, record)
        return Explanation(
            id, status.status, verdicts, self.notes.of(id), self._next(record, status)
        )

    def _next(self, record: MeshModel, status: ModelStatus) -> str:
        failed = self._failed(record)
        if status.status == "LOADED":
            copies = ", ".join(copy.instance for copy in status.copies if copy.state == "LOADED")
            return (
                f"It is served by {copies}, until it is the one of least worth where room is"
                " needed."
            )
        if status.status == "LOADING":
            return "It is being loaded; queries that came meanwhile are served then."
        if failed is not None:
            return (
                f"It is tried again in {max(0, failed.retry_ms - now_ms()) // 1000} s: {failed.why}"
            )
        return "It is loaded when it is asked."

    # -- events

    def watch(self, prefix: str = "", *, stop: Callable[[], bool] = NEVER) -> Iterator[MeshEvent]:
        self._check_open()
        registry = self.registry
        waiting: queue.Queue[MeshEvent] = queue.Queue(EVENTS_MAX)
        missed = threading.Event()

        def heard(event: MeshEvent) -> None:
            if event.id.startswith(prefix):
                try:
                    waiting.put_nowait(event)
                except queue.Full:
                    missed.set()

        self._watchers.add(heard)
        try:
            mirrors: tuple[tuple[Of, Mirror[Any]], ...] = (
                ("model", registry.models),
                ("vmodel", registry.vmodels),
                ("instance", registry.instances),
            )
            for of, mirror in mirrors:
                for id in sorted(id for id in mirror if id.startswith(prefix)):
                    if (record := mirror.record(id)) is not None:
                        yield MeshEvent("PUT", of, id, record.revision, mirror.get(id))
            yield MeshEvent("SYNC", "", "", max(mirror.revision for _, mirror in mirrors))
            while not self._stopping and not stop():
                if missed.is_set():
                    missed.clear()
                    with contextlib.suppress(queue.Empty):
                        while True:
                            waiting.get_nowait()
                    yield MeshEvent("RESET", "", "", registry.models.revision)
                with contextlib.suppress(queue.Empty):
                    yield waiting.get(timeout=POLL_S)
        finally:
            self._watchers.discard(heard)

    def _tell_watchers(self, of: Of, changes: list[KeyChange[Any]]) -> None:
        for heard in tuple(self._watchers):
            for change in changes:
                heard(event_of(of, change))


def checked(id: str, noun: str) -> None:
    """InvalidInput for what is no id."""
    try:
        check_name(id, noun)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def event_of(of: Of, change: KeyChange[Any]) -> MeshEvent:
    record = change.new
    if record is None:
        return MeshEvent("DELETE", of, change.key, change.old.revision if change.old else 0)
    return MeshEvent("PUT", of, change.key, record.revision, change.after)


def type_of(path: str) -> str:
    """Guessed by its ending."""
    found = TYPES.get(PurePath(path).suffix)
    if found is None and ":" in path and "://" not in path:
        found = "python"
    if found is None:
        endings = ", ".join(sorted(TYPES))
        raise InvalidInput(
            f"the type of {path!r} cannot be told by its name.",
            hint=f"Give type=; endings are known: {endings}.",
        )
    return found


def _page(mirror: Mirror[Any], prefix: str, after: str, limit: int) -> list[str]:
    if not 1 <= limit <= LIST_MAX:
        raise InvalidInput(f"limit={limit}: 1 to {LIST_MAX} are possible.")
    return nsmallest(limit, (id for id in mirror if id.startswith(prefix) and id > after))
