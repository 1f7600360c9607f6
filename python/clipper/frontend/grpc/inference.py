"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`.

inference/operations.py implements the operations.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final

from google.protobuf.message import Message

from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher, Handle, known, text_of
from clipper.frontend.http.repository import ModelContainers
from clipper.frontend.inference import protobuf_codec
from clipper.frontend.inference.multi_model import MultiModelRequest, ids_in
from clipper.frontend.inference.operations import InferenceOperations, InferenceTarget, timeout_ms
from clipper.frontend.protocols import message
from clipper_core.http.infer_message import (
    InferMessage,
    infer_response,
    stream_infer_response,
)

SERVICE: Final = "inference.GRPCInferenceService"
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


def _response(name: str) -> type[Message]:
    return message(f"inference.{name}Response")


class InferenceService:
    """The methods of the service. Threads: the event loop's."""

    def __init__(self, calls: GrpcDispatcher) -> None:
        self._calls, self._node = calls, calls.node
        self._models, self._repository = (
            InferenceOperations(calls.node),
            ModelContainers(calls.node),
        )
        each: dict[str, Handle] = {
            "ServerLive": self.live,
            "ServerReady": self.ready,
            "ServerMetadata": self.server,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.metadata,
            "ModelConfig": self.config,
            "ModelStatistics": self.statistics,
            "ModelInfer": self.infer,
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
            "ModelStreamInfer": self.stream,
        }
        readers = dict.fromkeys(("ModelInfer", "ModelStreamInfer"), protobuf_codec.read)
        self.handlers = calls.handlers(SERVICE, each, readers=readers)

    async def live(self, request: object, call: GrpcCall) -> Message:
        """Return that the process is alive, unless a part that it cannot do without has failed."""
        return _response("ServerLive")(live=not self._node.dead())

    async def ready(self, request: object, call: GrpcCall) -> Message:
        """Return whether the server is ready."""
        return _response("ServerReady")(ready=not await self._calls.work(self._node.unready))

    async def server(self, request: Message, call: GrpcCall) -> Message:
        """Return the server's metadata."""
        return _response("ServerMetadata")(**self._models.server())

    async def model_ready(self, request: Message, call: GrpcCall) -> Message:
        """Return whether a model is ready."""
        target = self._models.target(request.name, request.version)
        return _response("ModelReady")(
            ready=await self._calls.work(lambda: self._models.is_ready(target))
        )

    async def metadata(self, request: Message, call: GrpcCall) -> Message:
        """Return a model's metadata."""
        return _response("ModelMetadata")(**self._models.metadata(await self._known(request)))

    async def config(self, request: Message, call: GrpcCall) -> Message:
        """Return a model's configuration in Triton's format."""
        found = self._models.config(await self._known(request))
        return _response("ModelConfig")(config=found)

    async def _known(self, request: Message) -> InferenceTarget:
        """Return the target of a request, once its tensors are known."""
        target = self._models.target(request.name, request.version)
        if self._models.waits_for_types(target):
            await self._calls.work(lambda: self._models.wait_for_types(target))
        return target

    async def statistics(self, request: Message, call: GrpcCall) -> Message:
        """Return counts since the start, of one model or of all."""
        found = await self._calls.work(
            lambda: self._models.statistics(request.name, request.version)
        )
        return _response("ModelStatistics")(**found)

    async def index(self, request: Message, call: GrpcCall) -> Message:
        """List applications and models."""
        return _response("RepositoryIndex")(
            models=await self._calls.work(lambda: self._models.index(request.ready))
        )

    async def load(self, request: Message, call: GrpcCall) -> Message:
        """Load a model, for management; for others, check that it is loaded."""
        load = self._repository.load_named if self._calls.manages(call) else self._models.load
        await self._calls.manage(lambda: load(request.model_name))
        return _response("RepositoryModelLoad")()

    async def unload(self, request: Message, call: GrpcCall) -> Message:
        """Unload a model, for management. Raises Forbidden for others."""
        unload = self._repository.unload_named if self._calls.manages(call) else self._models.unload
        await self._calls.manage(lambda: unload(request.model_name))
        return _response("RepositoryModelUnload")()

    # -- queries

    async def infer(self, request: InferMessage, call: GrpcCall) -> bytes:
        """Answer an infer request."""
        return await self._infer(request, call, True)

    async def _infer(self, request: InferMessage, call: GrpcCall, until_deadline: bool) -> bytes:
        """Answer an infer request. until_deadline: the call's deadline is the query's SLO, not
        only a limit."""
        models = self._models
        request_in = protobuf_codec.decode(request)

        def slo_us_of(target: InferenceTarget, rows: object) -> int:
            given_ms = timeout_ms(request_in)
            named_us = models.slo_us(target, rows, given_ms)
            return self._calls.slo_us(
                call, None if until_deadline and given_ms is None else named_us, named_us
            )

        ids = ids_in(call.context.invocation_metadata() or ())
        self._calls.admit_query(call, [request.model_name] if ids is None else ids.names)
        if ids is not None:
            return await self._infer_several(
                MultiModelRequest(models, ids, request_in), slo_us_of, call
            )
        target = models.target(request.model_name, request.model_version)
        waited_us = 0
        if models.waits_for_types(target, request_in):
            slo_ms = slo_us_of(target, ()) / 1000
            waited_us = await self._calls.work(lambda: models.wait_for_types(target, slo_ms))
        rows = models.rows(target, request_in)
        slo_us = max(slo_us_of(target, rows) - waited_us, 1)
        if models.is_array(rows):
            pending = await self._calls.work(
                lambda: models.submit(target, rows, request_in, slo_us, call.request_id, call.trace)
            )
        else:
            pending = models.submit(target, rows, request_in, slo_us, call.request_id, call.trace)
        await self._calls.done(pending.futures)
        outputs, parameters = pending.inferred()
        return protobuf_codec.encode(
            target.name,
            target.answered_version,
            request_in.id,
            outputs,
            parameters,
            request_in.outputs,
        )

    async def _infer_several(
        self,
        several: MultiModelRequest,
        slo_us_of: Callable[[InferenceTarget, object], int],
        call: GrpcCall,
    ) -> bytes:
        if several.is_array:
            await self._calls.work(lambda: several.submit(slo_us_of, call.request_id, call.trace))
        else:
            several.submit(slo_us_of, call.request_id, call.trace)
        await self._calls.done(several.futures)
        return several.response()

    async def stream(
        self, requests: AsyncIterator[InferMessage], call: GrpcCall
    ) -> AsyncIterator[bytes]:
        """Answer a stream of infer requests. An error is the reply to its request, and the
        stream goes on."""

        async def answer(request: InferMessage) -> bytes:
            try:
                found = await self._infer(request, call, False)
            except Exception as error:
                about = infer_response("", "", request.id, (), {})
                return stream_infer_response(text_of(known(error)), about)
            if request.parameters.get(_WANTS_FINAL) is True:
                found += infer_response("", "", "", (), {_FINAL: True})  # merged by the reader
            return stream_infer_response("", found)

        async for reply in self._calls.in_order(requests, answer):
            yield reply
