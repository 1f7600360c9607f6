"""The service `mmesh.ModelMesh`, with the names, fields and codes of model-mesh. See docs/mesh.md.

Every client may read the status and have a model loaded, as a query would. Registering, changing
and deleting models requires the management token, because what is registered is executed. Without a
token, only processes of the server's own user on a loopback address may manage, as over HTTP.
"""

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Final, TypeVar

from google.protobuf.message import Message

from clipper.component import Stop, Worker
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    Forbidden,
    InvalidInput,
    NotAllowed,
    Overloaded,
    StoreConflict,
)
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.auth.peer_user import is_own_grpc_user
from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher
from clipper.frontend.protocols import message
from clipper.mesh.node.node import MeshNode
from clipper.mesh.reports import Info, ModelStatus, VModelStatus
from clipper.settings.grpc import own_address
from clipper.settings.http import is_loopback
from clipper.store.history import audit_context

SERVICE: Final = "mmesh.ModelMesh"
WAITING_MAX: Final = 32  # maximum of calls that wait for loads
_STATUS, _VSTATUS = message("mmesh.ModelStatusInfo"), message("mmesh.VModelStatusInfo")
_MODEL_STATES: Final = {
    value.name: value.number
    for value in _STATUS.DESCRIPTOR.enum_types_by_name["ModelStatus"].values
}
_VMODEL_STATES: Final = {
    value.name: value.number
    for value in _VSTATUS.DESCRIPTOR.enum_types_by_name["VModelStatus"].values
}

_S = TypeVar("_S", ModelStatus, VModelStatus)
_T = TypeVar("_T")


class _Unmet(ClipperError):
    """A condition that the caller set is not fulfilled."""

    rest_status = 409
    grpc_code = "FAILED_PRECONDITION"
    slug = "unmet"


class MeshService:
    """The methods of the service. Call `close` when no call is open any more.

    Threads: the event loop's, and one thread for each call that waits for a load.
    """

    def __init__(
        self,
        calls: GrpcDispatcher,
        mesh: MeshNode,
        tokens: ApiKeys | None,
    ) -> None:
        self._calls = calls
        self._mesh = mesh
        self._tokens = tokens
        self._waiting: set[Worker] = set()
        each = {
            "registerModel": self.register,
            "unregisterModel": self.unregister,
            "getModelStatus": self.status,
            "ensureLoaded": self.ensure_loaded,
            "setVModel": self.set_vmodel,
            "deleteVModel": self.delete_vmodel,
            "getVModelStatus": self.vmodel_status,
        }
        self.handlers = calls.handlers(SERVICE, each)

    # -- models

    async def register(self, request: Message, call: GrpcCall) -> Message:
        """Register a model."""
        actor = self.check_manages(call)
        info = _info(request, "modelInfo")
        if request.sync and not request.loadNow:
            raise InvalidInput("sync goes with loadNow.", hint="Set both, or neither.")
        register, about = self._mesh.register, (request.modelId, info.path, info.type, info.key)
        settings = {
            "load_now": request.loadNow,
            "sync": request.sync,
            "used_ms": request.lastUsedTime,
        }
        return _model_info(
            await self._work(request.sync, _by(actor, lambda: register(*about, **settings)))
        )

    async def unregister(self, request: Message, call: GrpcCall) -> Message:
        """Remove a model."""
        actor = self.check_manages(call)
        await self._calls.manage(_by(actor, lambda: self._mesh.unregister(request.modelId)))
        return message("mmesh.UnregisterModelResponse")()

    async def status(self, request: Message, call: GrpcCall) -> Message:
        """Return the status of a model."""
        return _model_info(await self._calls.manage(lambda: self._mesh.status(request.modelId)))

    async def ensure_loaded(self, request: Message, call: GrpcCall) -> Message:
        """Load a model."""
        ensure, sync, used_ms = self._mesh.ensure_loaded, request.sync, request.lastUsedTime
        return _model_info(
            await self._work(sync, lambda: ensure(request.modelId, sync=sync, used_ms=used_ms))
        )

    async def _work(self, waits: bool, run: Callable[[], _S]) -> _S:
        """Run a function on a management thread, or on a thread of its own if it waits for a load.

        Raises Overloaded if too many calls wait.
        """
        if not waits:
            return await self._calls.manage(run)
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded(
                f"{WAITING_MAX} calls wait for loads already.",
                hint="Leave sync out, and poll the status.",
            )
        result: Future[_S] = Future()
        worker: Worker

        def wait(stop: Stop) -> None:
            _wait(run, result)

        def ended() -> None:
            self._waiting.discard(worker)

        worker = Worker("clipper-grpc-mesh", wait, once=True, on_end=ended)
        self._waiting.add(worker)
        try:
            worker.start()
        except BaseException:
            ended()
            raise
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Wait for the threads. The mesh is closed, so that nothing waits for it any more."""
        for worker in tuple(self._waiting):
            worker.end()

    # -- v-models

    async def set_vmodel(self, request: Message, call: GrpcCall) -> Message:
        """Create or change a v-model."""
        actor = self.check_manages(call)
        info = _info(request, "modelInfo") if request.HasField("modelInfo") else None

        def set_it() -> VModelStatus:
            try:
                return self._mesh.set_vmodel(
                    request.vModelId,
                    request.targetModelId,
                    owner=request.owner,
                    update_only=request.updateOnly,
                    model=info,
                    auto_delete=request.autoDeleteTargetModel,
                    load_now=request.loadNow,
                    force=request.force,
                    expected=request.expectedTargetModelId,
                    share=request.share,
                    sync=request.sync,
                )
            except Forbidden as error:  # clients expect this code for another owner's name
                raise AlreadyExists(error.message, hint=error.hint) from None
            except StoreConflict as error:
                raise _Unmet(error.message, hint=error.hint) from None

        return await self._vmodel_info(await self._work(request.sync, _by(actor, set_it)))

    async def delete_vmodel(self, request: Message, call: GrpcCall) -> Message:
        """Delete a v-model. Another owner's is left as it is, without an error, as clients
        expect."""
        actor = self.check_manages(call)

        def delete() -> None:
            try:
                self._mesh.delete_vmodel(request.vModelId, request.owner)
            except Forbidden:
                return

        await self._calls.manage(_by(actor, delete))
        return message("mmesh.DeleteVModelResponse")()

    async def vmodel_status(self, request: Message, call: GrpcCall) -> Message:
        """Return the status of a v-model."""
        found = await self._calls.manage(
            lambda: self._mesh.vmodel_status(request.vModelId, request.owner)
        )
        return await self._vmodel_info(found)

    async def _vmodel_info(self, found: VModelStatus) -> object:
        ids = (
            [found.active, *([found.target] if found.target != found.active else [])]
            if found.active or found.target
            else []
        )
        statuses = await self._calls.manage(lambda: [self._mesh.status(id) for id in ids])
        info = _VSTATUS(
            status=_VMODEL_STATES[found.status],
            activeModelId=found.active,
            targetModelId=found.target,
            owner=found.owner,
            previousModelId=found.previous,
            why=found.why,
            share=found.share,
        )
        info.activeModelStatus.SetInParent()
        for field, status in zip(
            (info.activeModelStatus, info.targetModelStatus), statuses, strict=False
        ):
            field.CopyFrom(_model_info(status))
        return info

    # -- who may

    def check_manages(self, call: GrpcCall) -> str:
        """Return the caller's name for the history: the token's owner, or metadata `clipper-actor`.

        Raises NotAllowed, Forbidden.
        """
        http, grpc = self._calls.node.config.http, self._calls.node.config.grpc
        name = ""
        wanted = own_address(grpc, http) or http.address
        if self._tokens is not None:
            name = self._tokens.check(call.authorization)
        elif http.token:
            if not hmac.compare_digest(call.authorization, f"Bearer {http.token}".encode()):
                raise NotAllowed(
                    "management of the mesh needs the token.",
                    hint="Send authorization: Bearer, and http.token.",
                )
        elif not is_loopback(wanted.rpartition(":")[0]):
            hint = "Set http.token, and send authorization: Bearer with it."
            raise Forbidden(
                "the mesh is not managed over gRPC from elsewhere without a token.", hint=hint
            )
        elif not is_own_grpc_user(call.peer, call.address):
            hint = "Set http.token, and send authorization: Bearer with it."
            raise Forbidden(
                "without a token, only the server's own user may manage the mesh over gRPC.",
                hint=hint,
            )
        actor = str(call.metadata.get("clipper-actor", ""))[:128]
        return name or (actor if actor.isprintable() and actor else "grpc")


def _by(actor: str, run: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap a function so that the history names `actor` as the author of its changes."""

    def act() -> _T:
        with audit_context(actor, ""):
            return run()

    return act


def _wait(run: Callable[[], _S], result: "Future[_S]") -> None:
    """Run a function for a call. If the caller disconnects, the thread ends with the load."""
    try:
        found = run()
    except BaseException as error:
        _resolve(result.set_exception, error)
    else:
        _resolve(result.set_result, found)


def _resolve(resolve: Callable[[_T], None], what: _T) -> None:
    with contextlib.suppress(InvalidStateError, RuntimeError):  # the caller or the loop has gone
        resolve(what)


def _info(request: object, field: str) -> Info:
    info = getattr(request, field)
    if not info.type:
        raise InvalidInput(
            f"{field}.type is empty.",
            hint="It names the runtime of the model: onnx, skops, python.",
        )
    return Info(info.path, info.type, info.key)


def _model_info(status: ModelStatus) -> object:
    """Return a ModelStatusInfo."""
    info = _STATUS(status=_MODEL_STATES[status.status], errors=status.errors)
    for copy in status.copies:
        info.modelCopyInfos.add(
            location=copy.instance,
            copyStatus=_MODEL_STATES[copy.state],
            time=copy.since_ms,
            sizeBytes=copy.size_bytes,
        )
    return info
