"""A fake mesh without nodes: the methods of MeshNode on dicts. Loads last until the test calls
`settle`."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from clipper.errors import (
    AlreadyExists,
    Forbidden,
    InvalidInput,
    StillLinked,
    StoreConflict,
    UnknownModel,
)
from clipper.mesh.decisions.vmodels import UnknownVModel
from clipper.mesh.records import Copy, Instance, MeshModel, Policy, VModel
from clipper.mesh.reports import (
    CopyStatus,
    Decision,
    Explanation,
    Info,
    MeshEvent,
    MigrationProgress,
    ModelStatus,
    Verdict,
    VModelStatus,
)
from clipper.types import check_name

MIB = 1 << 20
NODES = (
    Instance(
        "a",
        1,
        "unix:/a",
        "unix:/a.c",
        "here",
        ("gpu",),
        ("onnx",),
        "z1",
        capacity_bytes=100 * MIB,
        used_bytes=75 * MIB,
        models=3,
        lru_ms=1_000,
        rate=120.0,
    ),
    Instance("b", 2, "unix:/b", "unix:/b.c", "there", capacity_bytes=200 * MIB, stopping=True),
)


class FakeMesh:
    """A fake MeshNode. loads_at_once: whether a load is done at its request. fails: ids whose loads
    fail, and why."""

    instance = "a"

    def __init__(self) -> None:
        self.loads_at_once = True
        self.fails: dict[str, str] = {}
        self.registered: dict[str, MeshModel] = {}
        self.named: dict[str, VModel] = {}
        self.used: dict[str, int] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.revision = 0
        self._changed = threading.Condition(threading.RLock())
        self._events: list[MeshEvent] = []

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
        policy: Policy = Policy(),  # noqa: B008 - immutable
        owner: str = "",
    ) -> ModelStatus:
        try:
            check_name(id, "model")
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        self.calls.append(("register", {"load_now": load_now, "sync": sync, "used_ms": used_ms}))
        new = MeshModel(
            id,
            type or path.rpartition(".")[2],
            path,
            key,
            input or "any",
            output or "any",
            policy,
            5,
            owner,
        )
        known = self.registered.get(id)
        if known is not None and (known.path, known.type, known.key) != (
            new.path,
            new.type,
            new.key,
        ):
            raise AlreadyExists(
                f"model {id!r} is registered as another.", hint="Unregister it first."
            )
        if known is None:
            self._put(new)
        if load_now:
            self._load(id)
        return self._settled(id) if sync else self.status(id)

    def _settled(self, id: str) -> ModelStatus:
        """Wait until the model has loaded or failed."""
        with self._changed:
            while (found := self.status(id)).status in ("NOT_LOADED", "LOADING"):
                self._changed.wait()
        return found

    def _put(self, record: MeshModel | VModel) -> None:
        with self._changed:
            self.revision += 1
            if isinstance(record, MeshModel):
                self.registered[record.id] = record
                self._events.append(MeshEvent("PUT", "model", record.id, self.revision, record))
            else:
                self.named[record.id] = record
                self._events.append(MeshEvent("PUT", "vmodel", record.id, self.revision, record))
            self._changed.notify_all()

    def _load(self, id: str) -> None:
        model = self.registered[id]
        if not model.copies and id not in self.fails:
            self._put(msgspec.structs.replace(model, copies={"a": Copy(7)}))
            if self.loads_at_once:
                self.settle(id)

    def settle(self, id: str) -> None:
        """End the load of a model, and the switch of a v-model to it."""
        self._put(msgspec.structs.replace(self.registered[id], copies={"a": Copy(7, 9, 3 * MIB)}))
        for one in list(self.named.values()):
            if one.target == id and one.active != id:
                self._put(msgspec.structs.replace(one, active=id, previous=one.active))

    def unregister(self, id: str) -> None:
        if any(id in (one.active, one.target) for one in self.named.values()):
            raise StillLinked(f"model {id!r} is named by a v-model.", hint="Delete that first.")
        with self._changed:
            if self.registered.pop(id, None) is not None:
                self.revision += 1
                self._events.append(MeshEvent("DELETE", "model", id, self.revision))
                self._changed.notify_all()

    def status(self, id: str) -> ModelStatus:
        model = self.registered.get(id)
        if model is None:
            return ModelStatus(id, "NOT_FOUND")
        if id in self.fails:
            why = self.fails[id]
            return ModelStatus(
                id,
                "LOADING_FAILED",
                (why,),
                (CopyStatus("a", "LOADING_FAILED", 8, why=why),),
                model,
            )
        copies = tuple(
            CopyStatus(
                at,
                "LOADED" if one.loaded_ms else "LOADING",
                one.loaded_ms or one.claimed_ms,
                one.size_bytes,
            )
            for at, one in model.copies.items()
        )
        return ModelStatus(id, model.status(), (), copies, model, self.used.get(id, 0))

    def ensure_loaded(self, id: str, *, sync: bool = False, used_ms: int = 0) -> ModelStatus:
        self.calls.append(("ensure_loaded", {"sync": sync, "used_ms": used_ms}))
        if id not in self.registered:
            raise UnknownModel.named(id, self.registered)
        self._load(id)
        return self._settled(id) if sync else self.status(id)

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
        known = self.named.get(id)
        if known is None and update_only:
            raise UnknownVModel.named(id, self.named)
        if known is not None and owner and known.owner != owner:
            raise Forbidden(f"v-model {id!r} is another owner's.")
        if expected and (known.target if known else target) != expected:
            raise StoreConflict(f"v-model {id!r} does not stand for {expected!r}.")
        if model is not None:
            self.register(target, model.path, model.type, model.key)
        if target not in self.registered:
            raise UnknownModel.named(target, self.registered)
        active = target if known is None or force else known.active
        previous = known.active if known is not None and active != known.active else ""
        self._put(VModel(id, active, target, owner, share, previous))
        if load_now or active != target:
            self._load(target)
        return self.vmodel_status(id)

    def delete_vmodel(self, id: str, owner: str = "") -> None:
        known = self.named.get(id)
        if known is not None and owner and known.owner != owner:
            raise Forbidden(f"v-model {id!r} is another owner's.")
        self.named.pop(id, None)

    def vmodel_status(self, id: str, owner: str = "") -> VModelStatus:
        known = self.named.get(id)
        if known is None or (owner and known.owner != owner):
            return VModelStatus(id, "NOT_FOUND")
        status = known.status()
        if status == "TRANSITIONING" and known.target in self.fails:
            status = "TRANSITION_FAILED"
        return VModelStatus(
            id,
            status,
            known.active,
            known.target,
            self.status(known.active).status,
            self.status(known.target).status,
            known.owner,
            known.share,
            known.previous,
            self.fails.get(known.target, ""),
        )

    def rollback_vmodel(self, id: str) -> VModelStatus:
        known = self.named[id]
        self._put(VModel(id, known.previous, known.previous, known.owner, previous=known.active))
        return self.vmodel_status(id)

    # -- lists, and what changes

    def models(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[ModelStatus]:
        ids = sorted(id for id in self.registered if id.startswith(prefix) and id > after)
        return [self.status(id) for id in ids[:limit]]

    def vmodels(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[VModelStatus]:
        ids = sorted(id for id in self.named if id.startswith(prefix) and id > after)
        return [self.vmodel_status(id) for id in ids[:limit]]

    def instances(self) -> list[Instance]:
        return list(NODES)

    def explain(self, id: str) -> Explanation:
        verdicts = (Verdict("a", True, "holds least", 0), Verdict("b", False, "it stops"))
        return Explanation(
            id,
            self.status(id).status,
            verdicts,
            (Decision(5, "registered", "asked to"),),
            "it waits for its first query",
        )

    def watch(
        self, prefix: str = "", *, stop: Callable[[], bool] = lambda: False
    ) -> Generator[MeshEvent, None, None]:
        with self._changed:
            seen = len(self._events)
            now: list[MeshModel | VModel] = [*self.registered.values(), *self.named.values()]
        for record in now:
            if record.id.startswith(prefix):
                yield MeshEvent(
                    "PUT",
                    "model" if isinstance(record, MeshModel) else "vmodel",
                    record.id,
                    self.revision,
                    record,
                )
        yield MeshEvent("SYNC", "", "", self.revision)
        while not stop():
            with self._changed:
                if len(self._events) == seen:
                    self._changed.wait(0.05)
                new, seen = self._events[seen:], len(self._events)
            yield from (event for event in new if event.id.startswith(prefix))

    def stats(self) -> dict[str, Any]:
        return {"instance": "a"}

    def drain(
        self, progress: Callable[[MigrationProgress], None] | None = None
    ) -> MigrationProgress:
        return MigrationProgress(0, 0, 0, 0)
