"""The Open Inference Protocol over HTTP: routes, headers and status codes.

inference/operations.py implements the operations, inference/codec.py the encoding.
"""

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from clipper.errors import InvalidInput, UnknownModel
from clipper.frontend.http.health import unavailable
from clipper.frontend.http.json_body import answer_texts, answer_whole
from clipper.frontend.http.messages import (
    BINARY,
    DeferredResponse,
    HandlerResult,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    WorkerTask,
    answer_json,
    problem,
    read_json,
    to_json,
)
from clipper.frontend.http.prediction_stream import PartEvents
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.server_sent_events import encode_event
from clipper.frontend.inference import codec
from clipper.frontend.inference.generation import PendingText, TextRequest, generate
from clipper.frontend.inference.multi_model import MultiModelRequest, ids_in
from clipper.frontend.inference.operations import (
    InferenceOperations,
    InferenceTarget,
    PendingInference,
    timeout_ms,
)
from clipper.frontend.inference.whole_answers import asks_for_answers
from clipper.frontend.server_interface import ServerInterface
from clipper.types import AnswerPart


class IndexRequest(msgspec.Struct):
    """The body of a repository index request. ready: list only models that are ready."""

    ready: bool = False


_GENERATE: "msgspec.json.Decoder[TextRequest]" = msgspec.json.Decoder(TextRequest)
_INDEX: "msgspec.json.Decoder[IndexRequest]" = msgspec.json.Decoder(IndexRequest)


class InferenceRoutes:
    """The routes under /v2. Threads: any."""

    def __init__(self, node: ServerInterface) -> None:
        self._node = node
        self._models = InferenceOperations(node)

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        routes.add("GET", "/v2", self.server)
        routes.add("GET", "/v2/models/stats", self.statistics)
        for model in ("/v2/models/{}", "/v2/models/{}/versions/{}"):
            routes.add("GET", model, self.model)
            routes.add("GET", f"{model}/ready", self.model_ready)
            routes.add("GET", f"{model}/config", self.config)
            routes.add("GET", f"{model}/stats", self.statistics)
            routes.add("POST", f"{model}/infer", self.infer)
            routes.add("POST", f"{model}/generate", self.generate)
            routes.add("POST", f"{model}/generate_stream", self.generate_stream)
        routes.add("POST", "/v2/repository/index", self.index)
        routes.add("POST", "/v2/repository/models/{}/load", self.load)
        routes.add("POST", "/v2/repository/models/{}/unload", self.unload)

    # -- about the server

    def server(self, request: HttpRequest) -> HandlerResult:
        """Return the server's metadata."""
        return answer_json(self._models.server())

    def index(self, request: HttpRequest) -> HandlerResult:
        """List applications and models, and whether they are ready."""
        only_ready = bool(request.body) and read_json(_INDEX, request.body).ready
        return WorkerTask(lambda: answer_json(self._models.index(only_ready)))

    def load(self, request: HttpRequest) -> HandlerResult:
        """Check that a model is loaded. Raises Forbidden if it is not: loading is for
        management."""

        def check() -> HttpResponse:
            self._models.load(request.params[0])
            return answer_json({})

        return WorkerTask(check)

    def unload(self, request: HttpRequest) -> HandlerResult:
        """Raise Forbidden: unloading is for management."""
        self._models.unload(request.params[0])
        return answer_json({})

    # -- about a model

    def model(self, request: HttpRequest) -> HandlerResult:
        """Return a model's metadata: its tensors."""
        return self._described(request, self._models.metadata)

    def config(self, request: HttpRequest) -> HandlerResult:
        """Return a model's configuration in Triton's format."""
        return self._described(request, self._models.config)

    def _described(
        self, request: HttpRequest, describe: Callable[[InferenceTarget], object]
    ) -> HandlerResult:
        target = self._target(request)
        if not self._models.waits_for_types(target):
            return answer_json(describe(target))

        def wait() -> HttpResponse:
            self._models.wait_for_types(target)
            return answer_json(describe(target))

        return WorkerTask(wait)

    def statistics(self, request: HttpRequest) -> HandlerResult:
        """Return counts since the start, of one model or of all.

        The path of all, /v2/models/stats, is also that of the metadata of a model named `stats`,
        which comes first: its client cannot use another path.
        """
        if not request.params and self._models.exists("stats"):
            request.params = ("stats",)
            return self.model(request)
        return WorkerTask(lambda: answer_json(self._models.statistics(*request.params)))

    def model_ready(self, request: HttpRequest) -> HandlerResult:
        """Return whether a model has a container; 503 if not."""
        target = self._target(request)

        def check() -> HttpResponse:
            body = {"name": target.name, "ready": self._models.is_ready(target)}
            return answer_json(body) if body["ready"] else unavailable(body)

        return WorkerTask(check)

    def _target(self, request: HttpRequest) -> InferenceTarget:
        return self._models.target(*request.params)

    # -- queries

    def infer(self, request: HttpRequest) -> HandlerResult:
        """Answer an infer request. Raises UnknownModel, UnknownVersion, InvalidInput."""
        if (
            "," in request.params[0]
            or b"mm-model-id" in request.headers
            or b"mm-vmodel-id" in request.headers
        ):
            return self._infer_several(request)
        target = self._infer_target(request)
        infer_request = _decoded(request)
        slo_ms = _slo_ms(infer_request, request)
        if not self._models.waits_for_types(target, infer_request):
            return self._infer(target, infer_request, request, slo_ms, 0)

        def wait() -> HandlerResult:
            waited_us = self._models.wait_for_types(target, slo_ms)
            return self._infer(target, infer_request, request, slo_ms, waited_us)

        return WorkerTask(wait)

    def generate(self, request: HttpRequest) -> HandlerResult:
        """Answer a text by the whole text that a model generates. Raises UnknownModel,
        UnknownVersion, InvalidInput."""
        pending = self._generation(request)
        ending = pending.future.ending()
        if ending is None:
            return answer_json(pending.whole())
        return DeferredResponse(
            (ending,), lambda: answer_json(pending.whole()), pending.future.cancel
        )

    def generate_stream(self, request: HttpRequest) -> HandlerResult:
        """Answer a text by the parts of the text that a model generates, as server-sent events."""
        pending = self._generation(request)

        def part_event(part: AnswerPart) -> bytes:
            return encode_event(to_json(pending.event(part)))

        def error_event(error: Exception) -> bytes:
            return encode_event(problem(error, request.id).body)

        return PartEvents(
            pending.future,
            pending.target.resolved,
            part_event,
            error_event,
            request.id,
            self._node.config.http.heartbeat_s,
        ).outcome()

    def _generation(self, request: HttpRequest) -> PendingText:
        target = self._target(request)
        asked = read_json(_GENERATE, request.body)
        return generate(self._node, target, asked, request.given_id.decode("ascii"))

    def _infer_target(self, request: HttpRequest) -> InferenceTarget:
        """Return the target of an infer request. Raises UnknownModel; UnknownApplication if whole
        answers are asked for."""
        try:
            return self._target(request)
        except UnknownModel:
            with contextlib.suppress(InvalidInput):
                if asks_for_answers(_decoded(request)):
                    raise self._models.unknown_application(request.params[0]) from None
            raise

    def _infer(
        self,
        target: InferenceTarget,
        infer_request: codec.InferRequest,
        request: HttpRequest,
        slo_ms: float | None,
        waited_us: int,
    ) -> HandlerResult:
        """Answer an infer request whose model's tensors are known. waited_us: time used already."""
        rows = self._models.rows(target, infer_request)
        slo_us = max(self._models.slo_us(target, rows, slo_ms) - waited_us, 1)
        id = request.given_id.decode("ascii")
        if self._models.is_array(rows):
            return WorkerTask(
                lambda: _later(
                    self._models.submit(
                        target, rows, infer_request, slo_us, "", request.trace, request.key
                    ),
                    target,
                    infer_request,
                )
            )
        pending = self._models.submit(
            target, rows, infer_request, slo_us, id, request.trace, request.key
        )
        if all(future.done() for future in pending.futures):
            return inferred(pending, target, infer_request)
        return _later(pending, target, infer_request)

    def _infer_several(self, request: HttpRequest) -> HandlerResult:
        """Answer `/v2/models/m1,m2/infer`, or a request whose headers name the models.

        The headers take precedence over the path. With `mm-required` all models must be known.
        """
        if len(request.params) > 1:
            raise InvalidInput(
                "several models have no version in common.",
                hint="Leave it out: /v2/models/m1,m2/infer",
            )
        named = [
            (name.decode(), value)
            for name, value in request.headers.items()
            if name.startswith(b"mm-")
        ]
        path = (
            [("mm-model-id", request.params[0])]
            if {name for name, _ in named} <= {"mm-required"}
            else []
        )
        ids = ids_in([*named, *path])
        assert ids is not None
        infer_request = _decoded(request)
        several = MultiModelRequest(self._models, ids, infer_request)
        slo_ms, id = _slo_ms(infer_request, request), request.given_id.decode("ascii")

        def submit() -> DeferredResponse:
            several.submit(
                lambda target, rows: self._models.slo_us(target, rows, slo_ms),
                id,
                request.trace,
                request.key,
            )
            return DeferredResponse(several.futures, lambda: _response(*several.body()))

        return WorkerTask(submit) if several.is_array else submit()


def _decoded(request: HttpRequest) -> codec.InferRequest:
    """Return the infer request of a body. Raises InvalidInput."""
    head_bytes = request.headers.get(b"inference-header-content-length", b"")
    return codec.decode(request.body, head_bytes)


def _slo_ms(infer_request: codec.InferRequest, request: HttpRequest) -> float | None:
    """Return `parameters.timeout`, else Clipper-Deadline-Ms, else None for the application's
    SLO."""
    if (given_ms := timeout_ms(infer_request)) is not None:
        return given_ms
    text = request.headers.get(b"clipper-deadline-ms", b"")
    try:
        return float(text) if text else None
    except ValueError:
        raise InvalidInput(
            f"Clipper-Deadline-Ms {text[:20].decode('ascii', 'replace')!r} is not a number."
        ) from None


def _later(
    pending: PendingInference, target: InferenceTarget, infer_request: codec.InferRequest
) -> DeferredResponse:
    return DeferredResponse(pending.futures, lambda: inferred(pending, target, infer_request))


def inferred(
    pending: PendingInference,
    target: InferenceTarget,
    infer_request: codec.InferRequest,
    whole: bool = False,
) -> HttpResponse | StreamedResponse:
    """Return the response to a finished infer request. whole: not streamed."""
    outputs, parameters = pending.inferred()
    return _response(
        *codec.encode(
            target.name,
            target.answered_version,
            infer_request.id,
            outputs,
            infer_request.binary,
            parameters,
            infer_request.outputs,
        ),
        whole,
    )


def _response(
    texts: Iterator[bytes], head_size: int, whole: bool = False
) -> HttpResponse | StreamedResponse:
    if not head_size:
        return answer_whole(texts) if whole else answer_texts(texts)
    length = (b"inference-header-content-length", b"%d" % head_size)
    return HttpResponse(200, b"".join(texts), BINARY, (length,))
