"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`.

inference/operations.py implements the operations.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Final

from google.protobuf.message import Message

from clipper.errors import InvalidInput
from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher, Handle, known, text_of
from clipper.frontend.http.repository import ModelContainers
from clipper.frontend.inference import codec, protobuf_codec
from clipper.frontend.inference.generation import submit_parts
from clipper.frontend.inference.multi_model import MultiModelRequest, ids_in
from clipper.frontend.inference.operations import InferenceOperations, InferenceTarget, timeout_ms
from clipper.frontend.inference.outcome import whole_of
from clipper.frontend.protocols import message
from clipper.types import AnswerPart, PartsFuture
from clipper_core.http.infer_message import (
    InferMessage,
    infer_response,
    stream_infer_response,
)

SERVICE: Final = "inference.GRPCInferenceService"
_STREAM = "stream"  # a parameter: true: answer in parts, false: by one response
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
                lambda: models.submit(
                    target, rows, request_in, slo_us, call.request_id, call.trace, call.key
                )
            )
        else:
            pending = models.submit(
                target, rows, request_in, slo_us, call.request_id, call.trace, call.key
            )
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
            await self._calls.work(
                lambda: several.submit(slo_us_of, call.request_id, call.trace, call.key)
            )
        else:
            several.submit(slo_us_of, call.request_id, call.trace, call.key)
        await self._calls.done(several.futures)
        return several.response()

    async def stream(
        self, requests: AsyncIterator[InferMessage], call: GrpcCall
    ) -> AsyncIterator[bytes]:
        """Answer a stream of infer requests, each by one response, or by one for each part. An
        error is a reply to its request, and the stream goes on."""

        async def answer(request: InferMessage) -> bytes | PartReplies:
            try:
                if (parts := await self._in_parts(request, call)) is not None:
                    return parts
                found = await self._infer(request, call, False)
            except Exception as error:
                return error_reply(request.id, error)
            if request.parameters.get(_WANTS_FINAL) is True:
                found += infer_response("", "", "", (), {_FINAL: True})  # merged by the reader
            return stream_infer_response("", found)

        async for reply in self._calls.in_order(requests, answer):
            if isinstance(reply, bytes):
                yield reply
                continue
            async with contextlib.aclosing(reply.replies()) as parts:
                async for part in parts:
                    yield part

    async def _in_parts(self, request: InferMessage, call: GrpcCall) -> "PartReplies | None":
        """Begin to answer a request in parts; return None if it is answered by one response."""
        if ids_in(call.context.invocation_metadata() or ()) is not None:
            return None
        target = self._models.target(request.model_name, request.model_version)
        asked = request.parameters.get(_STREAM)
        cores = target.resolved.cores.values()
        gives_parts = len(cores) == 1 and all(core.gives_parts for core in cores)
        if asked is False or not (asked or gives_parts):
            return None
        request_in = protobuf_codec.decode(request)
        rows = self._models.rows(target, request_in)
        if len(rows) != 1:
            if asked:
                raise InvalidInput(f"an answer in parts is of one row: {len(rows)} are given.")
            return None
        self._calls.admit_query(call, [request.model_name])
        named_us = self._models.slo_us(target, rows, timeout_ms(request_in))
        slo_us = self._calls.slo_us(call, named_us, named_us)
        (row,) = rows
        future = submit_parts(self._node, target, row, request_in, slo_us, call.request_id)
        return PartReplies(self._calls, target, request, request_in, future)


class PartReplies:
    """The responses to a request that is answered in parts: one for each, as a decoupled model of
    Triton has them. Threads: the event loop's."""

    def __init__(
        self,
        calls: GrpcDispatcher,
        target: InferenceTarget,
        request: InferMessage,
        request_in: codec.InferRequest,
        future: PartsFuture,
    ) -> None:
        self._calls = calls
        self._target = target
        self._id = request.id
        self._wants_final = request.parameters.get(_WANTS_FINAL) is True
        self._wanted = request_in.outputs
        self._future = future

    async def replies(self) -> AsyncGenerator[bytes, None]:
        """Yield the responses. Closing it before its end stops the model."""
        try:
            is_last = False
            while not is_last:
                if (waits_for := self._future.pending()) is not None:
                    await self._calls.done((waits_for,))
                part = self._next()
                is_last = part.is_last
                for reply in self._of(part):
                    yield reply
        except Exception as error:
            yield error_reply(self._id, error)
        finally:
            self._future.cancel()

    def _next(self) -> AnswerPart:
        """Return the next part, or the whole. Raises the error of a query that has no part and no
        default."""
        part = next(self._future)
        if part.is_last:
            whole_of(self._future, self._target.resolved)
        return part

    def _of(self, part: AnswerPart) -> Iterator[bytes]:
        parameters: dict[str, codec.JsonValue] = {}
        if part.confidence is not None:
            parameters["confidence"] = part.confidence
        if not part.is_last:
            parameters |= {_FINAL: False} if self._wants_final else {}
            yield self._reply(part, parameters)
            return
        if part.is_default:
            about = {"default": True, "reason": part.reason or ""}
            yield self._reply(part, about | ({_FINAL: False} if self._wants_final else {}))
        elif not part.complete:
            reason = part.reason or ""
            yield stream_infer_response(
                reason, infer_response("", "", self._id, (), {_FINAL: True, "complete": False})
            )
            return
        if self._wants_final:
            parameters |= {_FINAL: True, "prediction_id": part.id or ""}
            yield stream_infer_response(
                "",
                infer_response(
                    self._target.name, self._target.answered_version, self._id, (), parameters
                ),
            )

    def _reply(self, part: AnswerPart, parameters: dict[str, codec.JsonValue]) -> bytes:
        """Return a response with the output of a part."""
        return stream_infer_response(
            "",
            protobuf_codec.encode(
                self._target.name,
                self._target.answered_version,
                self._id,
                [part.output],
                parameters,
                self._wanted,
            ),
        )


def error_reply(id: str, error: Exception) -> bytes:
    """Return the response with an error, to a request with this id."""
    return stream_infer_response(text_of(known(error)), infer_response("", "", id, (), {}))
