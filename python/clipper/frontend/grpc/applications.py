"""The service `clipper.v1.Applications`: predictions and feedback."""

import functools
import math
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np
from google.protobuf.message import Message

from clipper.errors import ClipperError, InvalidInput
from clipper.frontend.auth.api_keys import band_of
from clipper.frontend.grpc.calls import (
    GrpcCall,
    GrpcDispatcher,
    code_of,
    known,
    retry_s_of,
    text_of,
)
from clipper.frontend.http.applications import salt_of
from clipper.frontend.http.messages import to_json
from clipper.frontend.inference import codec
from clipper.frontend.inference.json_inputs import input_of, numpy_dtype
from clipper.frontend.inference.outcome import answer_of
from clipper.frontend.protocols import message
from clipper.schema import FREE, Tensors, TensorSpec
from clipper.serving.feedback.ground_truth import truth_of, weight_of
from clipper.serving.feedback.observe import observe
from clipper.serving.query.application import request_id
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.processor import ResolvedApplication, predict
from clipper.types import InputType

SERVICE: Final = "clipper.v1.Applications"
_PREDICTION, _VALUE, _REPLY = (
    message(f"clipper.v1.{name}") for name in ("Prediction", "Value", "PredictReply")
)
_KINDS: Final = ((bool, "truth"), (int, "whole"), (float, "number"), (str, "text"), (bytes, "data"))
_name_of = functools.lru_cache(4096)(str)


class ApplicationService:
    """The methods of the service. Threads: the event loop's."""

    def __init__(self, calls: GrpcDispatcher) -> None:
        self._calls, self._node = calls, calls.node
        each = {
            "Predict": self.predict,
            "PredictMany": self.predict_many,
            "PredictStream": self.predict_stream,
            "Feedback": self.feedback,
        }
        self.handlers = calls.handlers(SERVICE, each)

    async def predict(self, request: Message, call: GrpcCall) -> Message:
        """Answer one query."""
        return await self._predict(request, call, True)

    async def _predict(self, request: Message, call: GrpcCall, until_deadline: bool) -> Message:
        self._calls.admit_query(call, [request.application])
        resolved = self._node.resolve(request.application)
        row = row_of(request.input, input_of(resolved), "input")
        slo_us = self._slo_us(request, resolved, call, until_deadline)
        id = request_id(request.request_id) or call.request_id
        call.start_query()
        future = predict(
            resolved,
            row,
            request.user or None,
            slo_us,
            salt_of(request.salt),
            _context(request),
            id,
            (),
            band_of(resolved, call.key, request.priority),
        )
        call.end_query(resolved, (future,))
        await self._calls.done((future,))
        return _prediction(future, resolved)

    def _slo_us(
        self, request: Message, resolved: ResolvedApplication, call: GrpcCall, until_deadline: bool
    ) -> int:
        """Return the SLO of a query. until_deadline: without an SLO of its own, the call's
        deadline is it."""
        if request.slo_ms:
            given_us: int | None = self._node.slo_us(request.slo_ms, 0)
        else:
            given_us = None if until_deadline else resolved.slo_us
        return self._calls.slo_us(call, given_us, resolved.slo_us)

    async def predict_many(self, request: Message, call: GrpcCall) -> Message:
        """Answer many queries. All inputs are read before the first query is submitted.

        A failed query has its error in its reply. The call fails only if no query has an answer.
        """
        self._calls.admit_query(call, [request.application])
        most = self._node.config.grpc.queries_max
        if not 1 <= len(request.inputs) <= most:
            hint = "See grpc.queries_max; ModelInfer takes arrays of any length."
            raise InvalidInput(
                f"there are {len(request.inputs)} inputs: 1 to {most} are taken.", hint=hint
            )
        resolved = self._node.resolve(request.application)
        type_ = input_of(resolved)
        rows = [row_of(value, type_, f"inputs[{i}]") for i, value in enumerate(request.inputs)]
        slo_us = self._slo_us(request, resolved, call, True)
        user, context, id = (
            request.user or None,
            _context(request),
            request_id(request.request_id) or call.request_id,
        )
        salt, band = salt_of(request.salt), band_of(resolved, call.key, request.priority)
        call.start_query()
        queries = [
            predict(resolved, row, user, slo_us, salt, context, id, (), band) for row in rows
        ]
        call.end_query(resolved, queries)
        await self._calls.done(queries)
        return message("clipper.v1.PredictManyReply")(replies=_replies(queries, resolved))

    async def predict_stream(
        self, requests: AsyncIterator[Message], call: GrpcCall
    ) -> AsyncIterator[Message]:
        """Answer a stream of queries, in order."""

        async def answer(request: Message) -> Message:
            try:
                return _REPLY(prediction=await self._predict(request, call, False))
            except Exception as error:
                return _failure(known(error))

        async for reply in self._calls.in_order(requests, answer):
            yield reply

    async def feedback(self, request: Message, call: GrpcCall) -> Message:
        """Record feedback by id or by input."""
        self._calls.admit_query(call, [request.application])
        resolved = self._node.resolve(request.application)
        row = (
            row_of(request.input, input_of(resolved), "input")
            if request.HasField("input")
            else None
        )
        what = request.WhichOneof("what")
        label = _label_of(request.label) if what == "label" else None
        correct, score = (
            getattr(request, key) if what == key else None for key in ("correct", "score")
        )
        truth, weight = truth_of(label, correct, score), weight_of(request.weight or 1.0)
        about = (
            resolved,
            request.id or None,
            row,
            request.user or None,
            truth,
            weight,
            _context(request),
        )
        return message("clipper.v1.FeedbackReply")(
            counted=await self._calls.work(lambda: observe(*about))
        )


# -- values


def row_of(value: Message, taken: InputType | Tensors, name: str) -> object:
    """Return a Value as an input. Raises InvalidInput for an empty or an unsuitable value."""
    kind = value.WhichOneof("kind")
    if kind in (None, "json"):
        raise InvalidInput(
            f"`{name}` has no input.",
            hint="Fill one of number, whole, truth, text, data, numbers, tensor, record.",
        )
    if isinstance(taken, Tensors):
        return taken.arrays(_record_of(value, taken, name))
    if kind == "record":
        raise InvalidInput(f"`{name}` has named tensors: {taken} is taken.")
    return _unnamed(value, kind, taken, name)


def _record_of(value: Message, tensors: Tensors, name: str) -> object:
    """Return the values of named tensors, in the tensors' own types where these are known."""
    if value.WhichOneof("kind") != "record":
        return _unnamed(value, value.WhichOneof("kind"), InputType("any"), name)
    specs = tensors.by_name
    return {
        key: one if key not in specs else _tensor_of(one, specs[key], f"{name}.{key}")
        for key, one in value.record.values.items()
    }


def _tensor_of(value: Message, spec: TensorSpec, name: str) -> object:
    """Return a Value as a tensor. Raises InvalidInput for one that does not fit."""
    kind = value.WhichOneof("kind")
    if kind in (None, "json", "record"):
        raise InvalidInput(f"tensor {spec.name!r}: expected {spec.type}, got nothing.")
    if kind == "tensor":
        given = codec.Tensor(
            spec.name,
            value.tensor.datatype,
            tuple(value.tensor.shape),
            _array_of(value.tensor, name),
        )
        return spec.array(codec.array_of(given, spec))
    if kind != "numbers" or spec.is_text:
        return spec.array(_unnamed(value, kind, InputType("any"), name))
    found = np.array(value.numbers.values)
    with np.errstate(invalid="ignore", over="ignore"):
        values = found.astype(spec.numpy)
    if spec.numpy.kind in "iub" and not (values == found).all():
        raise InvalidInput(f"tensor {spec.name!r}: expected {spec.type}, got other numbers.")
    is_flat = FREE not in spec.shape and values.size == math.prod(spec.shape)
    return spec.array(values.reshape(spec.shape) if is_flat else values)


def _unnamed(value: Message, kind: str, type_: InputType, name: str) -> object:
    if kind == "tensor":
        return _array_of(value.tensor, name)
    if kind == "numbers":
        plain: object = value.numbers.values
    elif kind == "text" or kind == "data" or type_.dtype in ("any", "str", "bytes"):
        return getattr(value, kind)
    else:
        plain = getattr(value, kind)
    if type_.dtype in ("str", "bytes"):
        raise InvalidInput(f"`{name}` has numbers: {type_} is taken.")
    return _numbers_of(plain, type_, name)


def _numbers_of(plain: object, type_: InputType, name: str) -> object:
    """Convert float64 to the application's element type. Raises InvalidInput if integers would
    be rounded."""
    found = np.array(plain)
    if type_.dtype == "any":
        return found
    dtype = numpy_dtype(type_)
    with np.errstate(invalid="ignore", over="ignore"):
        values = found.astype(dtype)
    if dtype.kind in "iub" and not (values == found).all():
        raise InvalidInput(f"`{name}` has numbers that are no {type_.dtype}.")
    return (
        values.reshape(type_.shape)
        if not type_.variable and values.size == math.prod(type_.shape)
        else values
    )


def _array_of(tensor: Message, name: str) -> object:
    shape = codec.checked_shape(name, tensor.datatype, tensor.shape, {})
    return codec.from_binary(name, tensor.datatype, shape, memoryview(tensor.data))


def _label_of(value: Message) -> object:
    kind = value.WhichOneof("kind")
    if kind is None:
        return None
    return row_of(value, InputType("any"), "label")


def _value_of(output: Message) -> Message:
    """Return an output as a Value: an array is a tensor, anything without a field of its own is
    JSON."""
    if isinstance(output, np.generic):
        output = output.item()
    if output is None:
        return None
    if isinstance(output, int) and not -(1 << 63) <= output < 1 << 63:
        return _VALUE(json=str(output))
    for type_, key in _KINDS:
        if isinstance(output, type_):
            return _VALUE(**{key: output})
    if isinstance(output, np.ndarray) and output.dtype.kind in "biuf":
        datatype, shape, values = codec.tensor_of(output)
        return _VALUE(
            tensor={"datatype": datatype, "shape": shape, "data": codec.to_binary(values)}
        )
    if isinstance(output, dict) and all(isinstance(name, str) for name in output):
        made = _VALUE(record={})
        for name, value in output.items():
            made.record.values[name].CopyFrom(_value_of(value))
        return made
    return _VALUE(json=to_json(output).decode())


def _context(request: Message) -> object:
    return np.array(request.context) if request.context else None


# -- replies


def _prediction(future: Future, resolved: ResolvedApplication) -> Message:
    answer = answer_of(future, resolved)
    made = _PREDICTION(
        id=answer.id,
        output=_value_of(answer.output),
        confidence=answer.confidence,
        default=answer.is_default,
        reason=answer.reason,
        models=[_name_of(model) for model in answer.models],
        missing=[_name_of(model) for model in answer.missing],
        agreement=answer.agreement,
        latency_us=answer.latency_us,
        request_id=answer.request_id,
        decided_by=answer.decided_by if answer.decided_by != "all" else "",
        set=[_value_of(label) for label in answer.set],
    )
    for model, qualifier in answer.qualifiers.items():
        values = made.qualifiers[_name_of(model)].values
        for name, value in qualifier.items():
            values[name].CopyFrom(_value_of(value))
    return made


def _failure(error: ClipperError) -> Message:
    failure = {
        "code": int(code_of(error)),
        "message": text_of(error),
        "retry_after_s": retry_s_of(error),
    }
    return _REPLY(failure=failure)


def _replies(futures: Sequence[Future], resolved: ResolvedApplication) -> list[Message]:
    replies, errors = [], []
    for future in futures:
        try:
            replies.append(_REPLY(prediction=_prediction(future, resolved)))
        except ClipperError as error:
            errors.append(error)
            replies.append(_failure(error))
    if len(errors) == len(futures):
        raise errors[0]
    return replies
