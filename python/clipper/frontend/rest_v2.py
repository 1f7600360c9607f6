"""The Open Inference Protocol over HTTP. What it calls a model is an application here, or, by its own name, a model.

A tensor of up to 32 rows is as many queries, each by the application's SLO. More rows are one array, which has a minute unless
`parameters.timeout` says otherwise.
"""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from clipper.errors import InvalidInput, UnknownModel
from clipper.frontend import v2
from clipper.frontend.answers import answer_of, answers_of
from clipper.frontend.inputs import input_of
from clipper.frontend.messages import BINARY, JSON, Later, Outcome, Request, Response, Work, answer_json, read_json
from clipper.frontend.node import Node
from clipper.frontend.routes import Routes
from clipper.serving.application import array_slo_in_us, fits_id
from clipper.serving.arrays import predict_array
from clipper.serving.ear import Future
from clipper.serving.processor import Question, predict
from clipper.types import InputType, PredictionRequest

_SINGLY_MAX = 32
_EXTENSIONS = ["binary_tensor_data", "model_repository(index)", "schedule_policy"]


class _Index(msgspec.Struct):
    ready: bool = False


_INDEX: "msgspec.json.Decoder[_Index]" = msgspec.json.Decoder(_Index)


class RestV2:
    """Threads: any."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/v2", self.server)
        routes.add("GET", "/v2/health/live", self.live)
        routes.add("GET", "/v2/health/ready", self.ready)
        routes.add("POST", "/v2/repository/index", self.index)
        for model in ("/v2/models/{}", "/v2/models/{}/versions/{}"):
            routes.add("GET", model, self.model)
            routes.add("GET", f"{model}/ready", self.model_ready)
            routes.add("POST", f"{model}/infer", self.infer)

    # -- about the server

    def server(self, request: Request) -> Outcome:
        return answer_json({"name": "clipper", "version": self._node.version, "extensions": _EXTENSIONS})

    def live(self, request: Request) -> Outcome:
        return answer_json({"live": True})

    def ready(self, request: Request) -> Outcome:
        def look() -> Response:
            waiting = self._node.unready()
            body = {"live": True, "ready": not waiting, **({"waiting_for": waiting} if waiting else {})}
            return answer_json(body) if not waiting else _unavailable(body)

        return Work(look)

    def index(self, request: Request) -> Outcome:
        only_ready = request.body and read_json(_INDEX, request.body).ready

        def look() -> Response:
            running = self._node.running()
            names = self._node.catalog.view.applications
            rows = [self._row(name, "", self._node.is_ready(name, running)) for name in sorted(names)]
            rows += [self._row(m.name, str(m.version), str(m.id) in running) for m in self._node.catalog.view.models()]
            return answer_json([row for row in rows if not only_ready or row["state"] == "READY"])

        return Work(look)

    def _row(self, name: str, version: str, is_ready: bool) -> dict[str, Any]:
        state = {"state": "READY", "reason": ""} if is_ready else {"state": "UNAVAILABLE", "reason": "no container is connected"}
        return {"name": name, **({"version": version} if version else {}), **state}

    # -- about a model

    def model(self, request: Request) -> Outcome:
        question, name, version = self._asked(request)
        known = self._node.catalog.view.versions.get(name, ())
        versions = [version] if version else [] if question.name else [str(m.version) for m in known if not m.retired_us]
        output = self._output_of(question)
        body: dict[str, Any] = {"name": name, **({"versions": versions} if versions else {}), "platform": "clipper"}
        inputs = v2.described(v2.INPUT, input_of(question))
        return answer_json({**body, "inputs": inputs, "outputs": v2.described(v2.OUTPUT, output)})

    def _output_of(self, question: Question) -> InputType:
        if not question.models:
            return InputType("any")
        return InputType.parse(self._node.catalog.view.model(question.models[0]).output)

    def model_ready(self, request: Request) -> Outcome:
        question, name, _ = self._asked(request)

        def look() -> Response:
            running = self._node.running()
            body = {"name": name, "ready": any(str(id) in running for id in question.models)}
            return answer_json(body) if body["ready"] else _unavailable(body)

        return Work(look)

    def _asked(self, request: Request) -> tuple[Question, str, str]:
        """-> the application, or the model as a question of its own; its name and version."""
        name, version = request.params[0], request.params[1] if len(request.params) > 1 else ""
        view = self._node.catalog.view
        if not version and name in view.applications:
            return self._node.question(name), name, ""
        if name not in view.versions:
            raise UnknownModel.named(name, {*view.applications, *(model.name for model in view.models())})
        asked = PredictionRequest(None, candidate_models=(f"{name}:{version}" if version else name,))
        return self._node.question_for(asked), name, version

    # -- asking

    def infer(self, request: Request) -> Outcome:
        question, name, version = self._asked(request)
        asked = v2.decode(request.body, request.headers.get(b"inference-header-content-length", b""))
        rows = v2.rows_of(asked, input_of(question))
        slo_ms = _slo_ms(asked, request)
        user, salt = _user(asked), _whole(asked, "salt", 0)
        _whole(asked, "priority", 0)
        about = name, version or (str(question.models[0].version) if not question.name else ""), asked
        if len(rows) > _SINGLY_MAX:
            return Work(lambda: self._infer_array(question, rows, user, slo_ms, salt, about))
        slo_us = self._node.slo_us(slo_ms, question.slo_us)
        id = request.given_id.decode("ascii") or (asked.id if fits_id(asked.id) else "")
        futures = [predict(question, row, user, slo_us, salt, None, id) for row in rows]
        make = functools.partial(_inferred, futures, question, about)
        return make() if all(future.done() for future in futures) else Later(futures, make)

    def _infer_array(
        self, question: Question, rows: Any, user: str | None, slo_ms: float | None, salt: int, about: Any
    ) -> Later:
        slo_us = array_slo_in_us(slo_ms, self._node.config.limits.slo_ms_max)
        future = predict_array(question, rows, user, slo_us, salt)
        return Later((future,), functools.partial(_inferred_array, future, question, about))


def _unavailable(body: Any) -> Response:
    response = answer_json(body, 503)
    response.headers = ((b"retry-after", b"1"),)
    return response


def _slo_ms(asked: v2.InferRequest, request: Request) -> float | None:
    """`parameters.timeout` (microseconds; 0: none), else the header Clipper-Deadline-Ms, else None: the application's."""
    if timeout_us := _whole(asked, "timeout", 0):
        return timeout_us / 1000
    text = request.headers.get(b"clipper-deadline-ms", b"")
    try:
        return float(text) if text else None
    except ValueError:
        raise InvalidInput(f"Clipper-Deadline-Ms {text[:20].decode('ascii', 'replace')!r} is no number.") from None


def _whole(asked: v2.InferRequest, key: str, otherwise: int) -> int:
    value = asked.parameters.get(key, otherwise)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"parameters.{key} = {str(value)[:40]!r}: it is a whole number from 0.")
    return value


def _user(asked: v2.InferRequest) -> str | None:
    user = asked.parameters.get("user")
    if user is not None and not isinstance(user, str):
        raise InvalidInput("parameters.user is a string.")
    return user


def _inferred(futures: Sequence[Future], question: Question, about: Any) -> Response:
    answers = [answer_of(future, question) for future in futures]
    reasons = dict.fromkeys(answer.reason for answer in answers if answer.is_default)
    parameters: dict[str, Any] = {"default": True, "reason": "; ".join(reasons)} if reasons else {}
    if len(answers) == 1:
        parameters |= {"prediction_id": answers[0].id, "confidence": answers[0].confidence}
    return _response([answer.output for answer in answers], parameters, about)


def _inferred_array(future: Future, question: Question, about: Any) -> Response:
    answers = answers_of(future, question)
    parameters = {"default": True, "reason": "; ".join(answers.reasons)} if answers.is_default.any() else {}
    return _response(answers.outputs, parameters, about)


def _response(outputs: Any, parameters: dict[str, Any], about: tuple[str, str, v2.InferRequest]) -> Response:
    name, version, asked = about
    body, head_size = v2.encode(name, version, asked.id, outputs, asked.binary, parameters)
    if not head_size:
        return Response(200, body, JSON)
    return Response(200, body, BINARY, ((b"inference-header-content-length", b"%d" % head_size),))
