"""Management of v-models: names that stand for a model, and switch to another. Threads: any."""

from collections.abc import Callable

from clipper.errors import DeadlineExceeded
from clipper.mesh.decisions import vmodels
from clipper.mesh.management.models import ModelManagement, page
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import MeshModel, VModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.reports import VModelRequest, VModelStatus
from clipper.settings.mesh import MeshSettings
from clipper.store.history import is_dry_run


class VModelManagement:
    """The v-model operations of `clipper.mesh.reports`.

    step_vmodels: starts the leader's v-model task, on the event loop.  refresh_alias: sends
    queries of a v-model where the mirror says now.
    """

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        models: ModelManagement,
        loop: NodeLoop,
        step_vmodels: Callable[[], None],
        refresh_alias: Callable[[str], None],
    ) -> None:
        self._settings, self._registry, self._models = settings, registry, models
        self._loop, self._step_vmodels = loop, step_vmodels
        self._refresh_alias = refresh_alias

    def set(self, id: str, request: VModelRequest) -> VModelStatus:
        """Make a v-model or change its target; with `sync`, wait until it has switched."""
        owner = request.owner
        self._models.check_id(id, "v-model")
        record = None
        if request.model is not None:
            record = self._models.new_record(
                request.target, request.model, 0, request.load_now, owner
            )
        now = now_ms()
        give_up_ms = now + int(request.give_up_s * 1000) if request.give_up_s else 0

        def decide(
            before: VModel | None, read: Callable[[str], MeshModel | None]
        ) -> vmodels.VChange:
            return vmodels.set_target(
                id,
                before,
                request.target,
                read,
                now,
                owner=owner,
                update_only=request.update_only,
                info=record,
                auto_delete=request.auto_delete,
                force=request.force,
                expected=request.expected,
                share=request.share,
                give_up_ms=give_up_ms,
            )

        after = self._registry.change_vmodel(id, decide)
        if is_dry_run():
            return self._status_of(id, after, owner)
        self._loop.call(self._step_vmodels)
        if request.load_now and after is not None and after.active == after.target:
            self._models.ensure_loaded(request.target, sync=request.sync, used_ms=0)
        if request.sync and after is not None:
            self._wait_until_settled(after)
        return self.status(id, owner)

    def _wait_until_settled(self, written: VModel) -> None:
        """Wait until a v-model has switched or failed. written: as it was written."""
        id = written.id

        def is_settled(_: object) -> bool:
            vmodel: VModel | None = self._registry.vmodels.get(id)
            if self._loop.stopping or vmodel is None or vmodel.since_ms < written.since_ms:
                return self._loop.stopping
            if vmodel.since_ms == written.since_ms and vmodel.target != written.target:
                return False  # the record before, written in the same millisecond
            return vmodel.active == vmodel.target or vmodel.failed or bool(vmodel.share)

        limit_s = self._settings.load_s * self._settings.tries
        if not self._registry.vmodels.wait_for(is_settled, limit_s):
            late = f"v-model {id!r} has not switched within {limit_s:g} s; the switch continues."
            raise DeadlineExceeded(late, hint="Poll its status.")
        self._refresh_alias(id)  # the watcher on the event loop may be later than this thread

    def delete(self, id: str, owner: str) -> None:
        """Delete a v-model. Forbidden when it is another owner's."""
        self._registry.change_vmodel(
            id, lambda before, read: vmodels.delete(before, read, now_ms(), owner=owner)
        )

    def status(self, id: str, owner: str) -> VModelStatus:
        """Return the status of a v-model, read from the store."""
        return self._status_of(id, self._registry.read_vmodel(id), owner)

    def _status_of(self, id: str, vmodel: VModel | None, owner: str = "") -> VModelStatus:
        if vmodel is None or (owner and vmodel.owner != owner):
            return VModelStatus(id, "NOT_FOUND")
        active = self._models.status(vmodel.active).status
        target = active
        if vmodel.target != vmodel.active:
            target = self._models.status(vmodel.target).status
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

    def rollback(self, id: str) -> VModelStatus:
        """Switch a v-model back to its previous model. UnknownVModel."""

        def decide(
            before: VModel | None, read: Callable[[str], MeshModel | None]
        ) -> vmodels.VChange:
            if before is None:
                raise vmodels.UnknownVModel.named(id, ())
            return vmodels.rollback(before, read, now_ms())

        after = self._registry.change_vmodel(id, decide, verb="rollback")
        if is_dry_run():
            return self._status_of(id, after)
        self._loop.call(self._step_vmodels)
        return self.status(id, "")

    def list(self, prefix: str, after: str, limit: int) -> list[VModelStatus]:
        """Return the status of v-models, by id."""
        known = self._registry.vmodels
        return [self._status_of(id, known.get(id)) for id in page(known, prefix, after, limit)]
