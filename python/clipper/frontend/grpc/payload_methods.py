"""Unary gRPC methods of other services: the payload is a row of bytes, the model's output the
reply.

A table (mesh/data_plane.py) lists the methods, and where the model's id is in a payload. A header
`mm-model-id` takes precedence. If it names several models, all are queried and their replies are
concatenated, which protobuf reads as one message.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from clipper.errors import BadOutput, InvalidInput
from clipper.frontend.auth.api_keys import band_of
from clipper.frontend.grpc.call_context import CallDetails
from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher
from clipper.frontend.grpc.method import CallMethod
from clipper.frontend.inference.json_inputs import input_of
from clipper.frontend.inference.multi_model import ModelIds, ids_in, submit_each, those_known
from clipper.frontend.inference.operations import (
    InferenceOperations,
    InferenceTarget,
    PendingInference,
)
from clipper.frontend.inference.outcome import answer_of
from clipper.mesh.data_plane import OTHER, DataPlane
from clipper.mesh.data_plane import Method as Listed
from clipper.mesh.splice import inject
from clipper.serving.query.processor import predict
from clipper.types import InputType

_INFER: Final = "inference.GRPCInferenceService/ModelInfer"
_MODEL_NAME: Final = (1,)  # field path in ModelInferRequest
_OTHERS: Final = "other/other"  # label of unlisted methods in the metrics


class PayloadMethods:
    """Handles the methods that no service defines (CallMethods). Threads: the event
    loop's."""

    def __init__(self, calls: GrpcDispatcher, table: DataPlane) -> None:
        self._calls, self._table, self._models = calls, table, InferenceOperations(calls.node)
        self._known: dict[str, CallMethod] = {}

    def method_of(self, details: CallDetails) -> CallMethod | None:
        """Return the method of a call; None for UNIMPLEMENTED."""
        name = details.method.removeprefix("/")
        method = self._table.of(name)
        if method is None:
            return None
        counted = _OTHERS if method is OTHER else name
        if counted not in self._known:
            service, _, last = counted.partition("/")
            self._known[counted] = self._calls.unary(service, last, self._answer(counted))
        return self._known[counted]

    def _answer(self, counted: str) -> Callable[[bytes, GrpcCall], Awaitable[bytes]]:
        async def answer(payload: bytes, call: GrpcCall) -> bytes:
            return await self._query(self._table.of(counted) or OTHER, payload, call)

        return answer

    async def _query(self, method: Listed, payload: bytes, call: GrpcCall) -> bytes:
        ids = ids_in(call.context.invocation_metadata() or ())
        if ids is None and not (found := method.id_of(payload)):
            where = "the header mm-model-id"
            if path := method.id_extraction_path:
                where = f"field {'.'.join(map(str, path))} of its payload, or {where}"
            raise InvalidInput(f"the call names no model: {where} would.")
        ids = ModelIds((found,), True) if ids is None else ids
        self._calls.admit_query(call, ids.names)
        targets = [self._checked(target) for target in those_known(ids, self._models.target)]
        pending = submit_each(
            partial(self._one, method, target, payload, call) for target in targets
        )
        await self._calls.done([future for each in pending for future in each.futures])
        by_name = {target.name: each for target, each in zip(targets, pending, strict=True)}
        return b"".join(
            those_known(
                ModelIds(tuple(t.name for t in targets), ids.required),
                lambda name: _reply(name, by_name[name]),
            )
        )

    def _checked(self, target: InferenceTarget) -> InferenceTarget:
        taken = input_of(target.resolved)
        if not isinstance(taken, InputType) or taken.dtype not in ("bytes", "any"):
            hint = "A model that answers methods of its own takes rows of bytes and returns bytes."
            raise InvalidInput(f"model {target.name!r} takes {taken}, and no payloads.", hint=hint)
        return target

    def _one(
        self, method: Listed, target: InferenceTarget, payload: bytes, call: GrpcCall
    ) -> PendingInference:
        slo_us = self._calls.slo_us(call, None, target.resolved.slo_us)
        call.start_query()
        # a payload that was addressed to a v-model is read by a model, which knows its own id
        (model, *_) = target.resolved.models
        row = method.with_id(payload, target.name if target.resolved.name else model.name)
        band = band_of(target.resolved, call.key, None)
        pending = PendingInference(
            [predict(target.resolved, row, None, slo_us, 0, None, call.request_id, (), band)],
            target.resolved,
            False,
        )
        call.end_query(target.resolved, pending.futures)
        return pending

    def named(self, service: str, method: str, payload: bytes) -> bytes:
        """Return a payload of ModelInfer with the model's id in its field, if the table has it
        elsewhere."""
        name = f"{service}/{method}"
        if (
            name != _INFER
            or (found := self._table.of(name)) is None
            or not (id := found.id_of(payload))
        ):
            return payload
        return (
            payload if found.id_extraction_path == _MODEL_NAME else inject(payload, _MODEL_NAME, id)
        )


def _reply(name: str, pending: PendingInference) -> bytes:
    output = answer_of(pending.futures[0], pending.resolved).output
    if isinstance(output, str):
        return output.encode()
    if isinstance(output, bytes | bytearray | memoryview):
        return bytes(output)
    raise BadOutput(f"model {name!r} returned {type(output).__name__}: a reply is bytes.")
