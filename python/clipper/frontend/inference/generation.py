"""The generate extension of the Open Inference Protocol: a text in, a text out, whole or in parts.

Source: Triton's protocol extension "generate", with the names `text_input` and `text_output`.
"""

from typing import NamedTuple

import msgspec

from clipper.errors import BadOutput, InvalidInput
from clipper.frontend.inference import codec
from clipper.frontend.inference.json_inputs import input_of
from clipper.frontend.inference.operations import (
    InferenceTarget,
    context_of,
    timeout_ms,
    user_of,
    whole_number,
)
from clipper.frontend.inference.outcome import whole_of
from clipper.frontend.server_interface import ServerInterface
from clipper.serving.query.application import fits_id
from clipper.serving.query.parts import no_priority_of_parts, predict_parts
from clipper.types import ANY, AnswerPart, InputType, PartsFuture, UserValue

_TEXTS = ("str", "any")


class TextRequest(msgspec.Struct):
    """The body of a generate request. Other members are ignored, as the extension has it."""

    text_input: str
    id: str = ""
    parameters: dict[str, codec.JsonValue] = {}


class PendingText(NamedTuple):
    """A query whose answer is a text in parts. id: of the request."""

    target: InferenceTarget
    future: PartsFuture
    id: str

    def whole(self) -> dict[str, object]:
        """Return the body of the whole. Raises the error of a query that has ended without a
        part."""
        whole = whole_of(self.future, self.target.resolved)
        return self._body(whole.output, _about(whole))

    def event(self, part: AnswerPart) -> dict[str, object]:
        """Return the body of a part. That of the end has no text, so that the texts of all of them
        together are the whole. Raises BadOutput if a part is not text."""
        if not part.is_last:
            return self._body(part.output, {})
        return self._body(part.output if part.is_default else "", _about(part))

    def _body(self, text: object, parameters: dict[str, object]) -> dict[str, object]:
        if not isinstance(text, str):
            kind = type(text).__name__
            raise BadOutput(f"{self.target.name!r} gives no text, but {kind}.")
        body: dict[str, object] = {"model_name": self.target.name}
        if self.target.answered_version:
            body["model_version"] = self.target.answered_version
        if self.id:
            body["id"] = self.id
        if parameters:
            body["parameters"] = parameters
        return {**body, "text_output": text}


def _about(whole: AnswerPart) -> dict[str, object]:
    """Return the parameters of a whole."""
    parameters: dict[str, object] = {}
    if whole.id:
        parameters["prediction_id"] = whole.id
    if whole.is_default:
        parameters["default"] = True
    if not whole.complete:
        parameters["complete"] = False
        parameters["reason"] = whole.reason
    return parameters


def generate(
    node: ServerInterface, target: InferenceTarget, asked: TextRequest, id: str
) -> PendingText:
    """Send a text to a target. id: the caller's own; that of the body if it is empty. Raises
    InvalidInput for a model that takes no text, and what `predict_parts` raises."""
    type_ = input_of(target.resolved)
    if not isinstance(type_, InputType) or (type_ != ANY and str(type_) not in _TEXTS):
        raise InvalidInput(
            f"{target.name!r} takes {type_}, and no text.", hint="Query it by /infer."
        )
    request = codec.InferRequest(asked.id, asked.parameters, [], False)
    slo_us = node.slo_us(timeout_ms(request), target.resolved.slo_us)
    future = submit_parts(node, target, asked.text_input, request, slo_us, id)
    return PendingText(target, future, asked.id)


def submit_parts(
    node: ServerInterface,
    target: InferenceTarget,
    row: UserValue,
    request: codec.InferRequest,
    slo_us: int,
    id: str,
) -> PartsFuture:
    """Send a query that is answered in parts, with the parameters of a request. slo_us: until the
    first part. id: the caller's own; that of the request if it is empty. Raises what
    `predict_parts` raises."""
    if whole_number(request, "priority", 0):
        raise no_priority_of_parts()
    own = id or (request.id if fits_id(request.id) else "")
    return predict_parts(
        target.resolved,
        row,
        user_of(request),
        slo_us,
        whole_number(request, "salt", 0),
        context_of(request),
        own,
        (),
        _limit_ms(node, request, "part_timeout"),
        _limit_ms(node, request, "total_timeout"),
    )


def _limit_ms(node: ServerInterface, request: codec.InferRequest, name: str) -> float | None:
    """Return a parameter of microseconds in milliseconds; None if it is missing or 0."""
    given_us = whole_number(request, name, 0)
    if not given_us:
        return None
    return node.slo_us(given_us / 1000, 0) / 1000
