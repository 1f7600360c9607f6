"""Applications over HTTP: predict, feedback, metadata; and the routes of the original Clipper.

`POST /api/APP/predict` and `/feedback` take one item or many; `GET /api` and `GET /api/APP`
describe applications. frontend/http/messages.py has the errors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from clipper.errors import ClipperError, InvalidInput, UnknownPrediction, did_you_mean
from clipper.frontend.auth.api_keys import band_of
from clipper.frontend.http.json_body import answer_texts, answer_whole, json_list, json_texts
from clipper.frontend.http.messages import (
    TEXT,
    DeferredResponse,
    HandlerResult,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    WorkerTask,
    answer_json,
    problem,
    read_json,
)
from clipper.frontend.http.prediction_stream import PartEvents, PredictionStream
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.server_sent_events import encode_event
from clipper.frontend.inference.json_inputs import (
    InputReaders,
    Row,
    input_of,
    items_of,
    rows_in_columns,
)
from clipper.frontend.inference.outcome import answer_of
from clipper.frontend.inference.type_wait import types_are_known, wait_for_types
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import Trace
from clipper.selection import features_of
from clipper.serving.feedback.ground_truth import truth_of, weight_of
from clipper.serving.feedback.observe import observe, observe_many, rehearse
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.parts import no_priority_of_parts, predict_parts
from clipper.serving.query.processor import ResolvedApplication, predict
from clipper.types import Answer, AnswerPart, InputType, PredictionRequest, Qualifiers, UserValue

SALT_MAX = 2**63 - 1
Inputs = list[msgspec.Raw] | msgspec.Raw
_NOTHING = msgspec.Raw(b"")
_T = TypeVar("_T", bound=msgspec.Struct)


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a predict request. context: as in ApplicationHandle.predict. stream: answer in
    parts; null: if the request accepts server-sent events. part_slo_ms, slo_total_ms: of such an
    answer. priority: 1, the highest, to 3; null: that of the key, else of the application.
    """

    input: msgspec.Raw = _NOTHING
    inputs: msgspec.Raw = _NOTHING
    user: str | None = None
    context: list[float] | None = None
    slo_ms: float | None = None
    salt: int | float = 0
    stream: bool | None = None
    part_slo_ms: float | None = None
    slo_total_ms: float | None = None
    priority: int | float | None = None


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Feedback on one prediction, by the prediction's id or by the input; or many in `feedback`."""

    id: str | None = None
    input: msgspec.Raw = _NOTHING
    user: str | None = None
    context: list[float] | None = None
    label: UserValue = None
    correct: bool | None = None
    score: float | None = None
    weight: float = 1.0
    feedback: "list[FeedbackRequest] | None" = None


class LegacyPredictRequest(msgspec.Struct):
    """The body of a predict request by clients of the original Clipper."""

    input: msgspec.Raw = _NOTHING
    input_batch: msgspec.Raw = _NOTHING
    version: str | int | None = None


class LegacyUpdateRequest(msgspec.Struct):
    """The body of an update request by clients of the original Clipper."""

    input: msgspec.Raw
    label: UserValue
    uid: int | str = 0


class PredictResponse(msgspec.Struct):
    """The answer to one query. id: for feedback.

    The last three members are present only when they have a value: further outputs of the models,
    the decision step (of an application with a decider), and the prediction set that contains the
    truth.
    """

    id: str
    output: UserValue
    confidence: float
    default: bool
    reason: str
    models: list[str]
    missing: list[str]
    agreement: float
    latency_us: int
    qualifiers: dict[str, Qualifiers] | msgspec.UnsetType = msgspec.UNSET
    decided_by: str | msgspec.UnsetType = msgspec.UNSET
    set: UserValue = msgspec.UNSET


class PartEvent(msgspec.Struct):
    """A part of an answer in parts. confidence: present if the model gave one with the part."""

    index: int
    output: UserValue
    confidence: float | msgspec.UnsetType = msgspec.UNSET


class WholeEvent(msgspec.Struct):
    """The whole of an answer in parts. parts: how many there were. complete: whether the model gave
    all of them; `reason` says why not."""

    id: str
    output: UserValue
    confidence: float | None
    default: bool
    complete: bool
    reason: str
    models: list[str]
    missing: list[str]
    parts: int
    latency_us: int


_read_predict = functools.partial(read_json, msgspec.json.Decoder(PredictRequest))
_read_feedback = functools.partial(read_json, msgspec.json.Decoder(FeedbackRequest))
_read_old_predict = functools.partial(read_json, msgspec.json.Decoder(LegacyPredictRequest))
_read_old_update = functools.partial(read_json, msgspec.json.Decoder(LegacyUpdateRequest))
_name_of = functools.lru_cache(4096)(str)


class ApplicationRoutes:
    """The routes under /api, and those of the original Clipper. Threads: any."""

    def __init__(self, node: ServerInterface) -> None:
        self._node = node
        self._inputs = InputReaders()

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        routes.add("GET", "/api", self.applications)
        routes.add("GET", "/api/{}", self.application)
        routes.add("POST", "/api/{}/predict", self.predict)
        routes.add("POST", "/api/{}/predict/stream", self.predict_stream)
        routes.add("POST", "/api/{}/feedback", self.feedback)
        routes.add("POST", "/{}/predict", self.old_predict)
        routes.add("POST", "/{}/update", self.old_update)

    # -- looking

    def applications(self, request: HttpRequest) -> HandlerResult:
        """Describe all applications."""
        names = sorted(self._node.catalog.view.applications)
        return answer_json({"applications": [self._about(name) for name in names]})

    def application(self, request: HttpRequest) -> HandlerResult:
        """Describe one application."""
        return answer_json(self._about(request.params[0]))

    def _about(self, name: str) -> dict[str, object]:
        record, resolved = self._node.catalog.view.application(name), self._node.resolve(name)
        return {
            "name": name,
            "input": str(record.input),
            "models": [str(id) for id in resolved.models],
            "slo_ms": record.slo_ms,
            "default": record.default,
            "policy": record.policy,
            "confidence_min": record.confidence_min,
        }

    # -- queries

    def predict(self, request: HttpRequest) -> HandlerResult:
        """Answer one query or many. Raises UnknownApplication, InvalidInput."""
        resolved = self._node.resolve(request.params[0])
        body: PredictRequest = _reading(_read_predict, request.body, PredictRequest)
        slo_us = resolved.slo_us if body.slo_ms is None else self._node.slo_us(body.slo_ms, 0)
        if body.inputs is not _NOTHING:
            if body.input is not _NOTHING:
                raise InvalidInput("a request has `input` or `inputs`, not both.")
        elif body.input is _NOTHING:
            raise InvalidInput(
                "the request lacks `input`.", hint='Write {"input": ...} or {"inputs": [...]}.'
            )
        answer = self._predict_parts if _asks_for_parts(request, body) else self._predict
        return _with_types(resolved, body, slo_us, functools.partial(answer, request, body))

    def _predict_parts(
        self,
        request: HttpRequest,
        body: PredictRequest,
        resolved: ResolvedApplication,
        slo_us: int,
    ) -> HandlerResult:
        """Answer a query in parts, by server-sent events."""
        if body.priority is not None:
            raise no_priority_of_parts()
        for limit_ms in (body.part_slo_ms, body.slo_total_ms):
            self._node.slo_us(limit_ms, 0)
        row = self._inputs.reader(resolved)(body.input, "$.input")
        future = predict_parts(
            resolved,
            row,
            body.user,
            slo_us,
            salt_of(body.salt),
            body.context,
            request.given_id.decode("ascii"),
            (),
            body.part_slo_ms,
            body.slo_total_ms,
        )
        events = PartEvents(
            future,
            resolved,
            _part_event,
            functools.partial(_error_event, request.id),
            request.id,
            self._node.config.http.heartbeat_s,
        )
        return events.outcome()

    def _predict(
        self,
        request: HttpRequest,
        body: PredictRequest,
        resolved: ResolvedApplication,
        slo_us: int,
    ) -> HandlerResult:
        """Answer a predict request whose model's tensors are known."""
        user, request_id = body.user, request.given_id.decode("ascii")
        read, salt = self._inputs.reader(resolved), salt_of(body.salt)
        band = band_of(resolved, request.key, asked_priority(body.priority))
        if body.inputs is not _NOTHING:
            futures = self._submit_all(
                resolved,
                body.inputs,
                "$.inputs",
                user,
                slo_us,
                salt,
                body.context,
                request_id,
                request.trace,
                band,
            )
            return _outcome(futures, functools.partial(_many_predicted, futures, resolved))
        row, trace = read(body.input, "$.input"), request.trace
        if trace is not None:
            trace.start_query()
        context = body.context
        future = predict(resolved, row, user, slo_us, salt, context, request_id, (), band)
        if trace is not None:
            trace.end_query(resolved.name, (future,))
        if future.done():
            return one_predicted(future, resolved)
        return DeferredResponse((future,), functools.partial(one_predicted, future, resolved))

    def predict_stream(self, request: HttpRequest) -> HandlerResult:
        """Answer one query or many by server-sent events, each as soon as it is ready."""
        resolved = self._node.resolve(request.params[0])
        body: PredictRequest = _reading(_read_predict, request.body, PredictRequest)
        if (body.input is _NOTHING) == (body.inputs is _NOTHING):
            raise InvalidInput("a request has `input` or `inputs`, one of the two.")
        if _asks_for_parts(request, body, if_accepted=False):
            raise InvalidInput(
                "this route sends whole answers, not parts of one.",
                hint="POST /api/APP/predict takes `stream`.",
            )
        slo_us = resolved.slo_us if body.slo_ms is None else self._node.slo_us(body.slo_ms, 0)
        return _with_types(resolved, body, slo_us, functools.partial(self._stream, request, body))

    def _stream(
        self,
        request: HttpRequest,
        body: PredictRequest,
        resolved: ResolvedApplication,
        slo_us: int,
    ) -> HandlerResult:
        """Answer a request for a stream whose model's tensors are known."""
        given: Inputs = [body.input] if body.inputs is _NOTHING else body.inputs
        id = request.given_id.decode("ascii")
        futures = self._submit_all(
            resolved,
            given,
            "$.input" if body.inputs is _NOTHING else "$.inputs",
            body.user,
            slo_us,
            salt_of(body.salt),
            body.context,
            id,
            request.trace,
            band_of(resolved, request.key, asked_priority(body.priority)),
        )

        def encoded(future: Future) -> bytes:
            return b"".join(json_texts(_predicted(answer_of(future, resolved))))

        return PredictionStream(
            futures, encoded, request.id, self._node.config.http.heartbeat_s
        ).response()

    def _submit_all(
        self,
        resolved: ResolvedApplication,
        inputs: Inputs,
        at: str,
        user: str | None,
        slo_us: int,
        salt: int = 0,
        context: UserValue = None,
        request_id: str = "",
        trace: Trace | None = None,
        band: int | None = None,
    ) -> list[Future]:
        """Submit a query for each input. All inputs are parsed before the first is submitted.

        inputs: the text of each, or the text of all: a list or, of named tensors, an object with a
        list for each tensor.
        """
        rows = self._rows(resolved, inputs, at)
        if not rows:
            features_of(context)
        if trace is not None:
            trace.start_query()
        futures = [
            predict(resolved, row, user, slo_us, salt, context, request_id, (), band)
            for row in rows
        ]
        if trace is not None:
            trace.end_query(resolved.name, futures)
        return futures

    def _rows(self, resolved: ResolvedApplication, inputs: Inputs, at: str) -> Sequence[Row]:
        """Return the rows of inputs. Raises InvalidInput for too many, and a wrong one."""
        if not isinstance(inputs, list):
            type_ = input_of(resolved)
            if not isinstance(type_, InputType) and bytes(memoryview(inputs)[:1]) == b"{":
                rows = rows_in_columns(inputs, at, type_)
                self._check_count(len(rows), at)
                return rows
            inputs = items_of(inputs, at)
        self._check_count(len(inputs), at)
        read = self._inputs.reader(resolved)
        return [read(text, f"{at}[{i}]") for i, text in enumerate(inputs)]

    def _check_count(self, count: int, at: str) -> None:
        if not count:
            raise InvalidInput(f"`{at}` holds no rows.")
        most = self._node.config.http.queries_max
        if count > most:
            hint = "See http.queries_max; POST /v2/models/NAME/infer takes arrays of any length."
            raise InvalidInput(f"`{at}` has {count} inputs, at most {most} are taken.", hint=hint)

    # -- feedback

    def feedback(self, request: HttpRequest) -> HandlerResult:
        """Record feedback, on a worker thread. Raises UnknownApplication, InvalidInput,
        UnknownPrediction."""
        name = request.params[0]
        resolved = self._node.resolve(name)
        body: FeedbackRequest = _reading(_read_feedback, request.body, FeedbackRequest)
        if body.feedback is None:
            single = self._checked(resolved, body)
            return WorkerTask(lambda: answer_json({"counted": observe(resolved, *single)}))
        items = body.feedback
        if body != FeedbackRequest(feedback=items):
            raise InvalidInput(
                "a request has `feedback`, or the members of one feedback, not both."
            )
        checked = [self._checked(resolved, item) for item in items]
        return WorkerTask(lambda: self._record_all(resolved, items, checked))

    def rehearse_feedback(self, request: HttpRequest) -> HttpResponse:
        """Check one feedback by id, and learn nothing: `counted` is null if only another server
        knows. Raises UnknownApplication, InvalidInput, UnknownPrediction."""
        resolved = self._node.resolve(request.params[0])
        body: FeedbackRequest = _reading(_read_feedback, request.body, FeedbackRequest)
        if body.feedback is not None or body.id is None:
            raise InvalidInput("a dry run is of one feedback, by the `id` of its prediction.")
        id, _, _, truth, *_ = self._checked(resolved, body)
        return answer_json({"counted": rehearse(resolved, id, truth)})

    def _checked(
        self, resolved: ResolvedApplication, item: FeedbackRequest
    ) -> tuple[UserValue, ...]:
        """Return the arguments of `observe`. Raises InvalidInput."""
        if item.feedback is not None:
            raise InvalidInput("an item of `feedback` has no `feedback` of its own.")
        row = (
            None if item.input is _NOTHING else self._inputs.reader(resolved)(item.input, "$.input")
        )
        truth = truth_of(item.label, item.correct, item.score)
        return item.id, row, item.user, truth, weight_of(item.weight), item.context

    def _record_all(
        self,
        resolved: ResolvedApplication,
        items: list[FeedbackRequest],
        checked: list[tuple[UserValue, ...]],
    ) -> HttpResponse:
        if all(
            item.id is not None and item.label is not None and item.weight == 1 for item in items
        ):
            counted = observe_many(
                resolved, [item.id or "" for item in items], [item.label for item in items]
            )
            return answer_json(msgspec.structs.asdict(counted))
        counts = {"counted": 0, "duplicates": 0, "unknown": 0}
        for each in checked:
            try:
                counts["counted" if observe(resolved, *each) else "duplicates"] += 1
            except UnknownPrediction:
                counts["unknown"] += 1
        return answer_json(counts)

    # -- the original's routes

    def old_predict(self, request: HttpRequest) -> HandlerResult:
        """Answer a predict request of the original Clipper's clients."""
        resolved = self._node.resolve(request.params[0])
        body: LegacyPredictRequest = _read_old_predict(request.body)
        if body.version is not None:
            resolved = self._pinned(resolved, str(body.version))
        band = band_of(resolved, request.key, None)
        if body.input_batch is not _NOTHING:
            futures = self._submit_all(
                resolved, body.input_batch, "$.input_batch", None, resolved.slo_us, band=band
            )
            return _outcome(futures, functools.partial(_old_many, futures))
        if body.input is _NOTHING:
            raise InvalidInput(
                "the request lacks `input`.", hint='Write {"input": ...} or {"input_batch": [...]}.'
            )
        row = self._inputs.reader(resolved)(body.input, "$.input")
        future = predict(resolved, row, None, resolved.slo_us, 0, band=band)
        return _outcome((future,), functools.partial(old_one, future))

    def _pinned(self, resolved: ResolvedApplication, version: str) -> ResolvedApplication:
        """Return the application with one version of its first model, which need not be the
        latest."""
        if not resolved.models:
            raise InvalidInput(
                f"application {resolved.name!r} links no model, so it has no version"
                f" {version[:20]!r}."
            )
        model = f"{resolved.models[0].name}:{version}"
        return self._node.resolve_request(PredictionRequest(None, resolved.name, (model,)))

    def old_update(self, request: HttpRequest) -> HandlerResult:
        """Record feedback of the original Clipper's clients."""
        resolved = self._node.resolve(request.params[0])
        body: LegacyUpdateRequest = _read_old_update(request.body)
        row = self._inputs.reader(resolved)(body.input, "$.input")
        user = None if body.uid in (0, "", "0") else str(body.uid)

        def encoded() -> HttpResponse:
            counts = observe(resolved, None, row, user, truth_of(body.label, None, None), 1.0)
            return HttpResponse(200, b"Feedback received? %d" % counts, TEXT)

        return WorkerTask(encoded)


# -- what comes in


def _with_types(
    resolved: ResolvedApplication,
    body: PredictRequest,
    slo_us: int,
    answer: Callable[[ResolvedApplication, int], HandlerResult],
) -> HandlerResult:
    """Return the answer of a request with the time that is left for it. It waits, on a worker
    thread, for the first load of a mesh model whose named tensors are known only then.
    """
    if types_are_known(resolved) or not _names_tensors(body):
        return answer(resolved, slo_us)

    def wait() -> HandlerResult:
        waited_us = wait_for_types(resolved, resolved.name, slo_us)
        return answer(resolved, max(slo_us - waited_us, 1))

    return WorkerTask(wait)


def _names_tensors(body: PredictRequest) -> bool:
    """Return whether an input is a JSON object, or all inputs are."""
    given = body.input if body.inputs is _NOTHING else body.inputs
    return bytes(memoryview(given)).lstrip(b"[ \t\r\n").startswith(b"{")


def _asks_for_parts(request: HttpRequest, body: PredictRequest, if_accepted: bool = True) -> bool:
    """Return whether a request is to be answered in parts. if_accepted: also one that says nothing
    of it, but accepts server-sent events above all. Raises InvalidInput."""
    is_asked = body.stream
    if is_asked is None and if_accepted:
        accepted = request.headers.get(b"accept", b"").lower()
        is_asked = accepted.startswith(b"text/event-stream")
    if is_asked and body.inputs is not _NOTHING:
        raise InvalidInput(
            "an answer in parts is of one `input`.",
            hint="POST /api/APP/predict/stream sends the answers of several, each when it is made.",
        )
    if not is_asked and (body.part_slo_ms is not None or body.slo_total_ms is not None):
        raise InvalidInput('`part_slo_ms` and `slo_total_ms` are for requests with "stream": true.')
    return bool(is_asked)


def salt_of(salt: int | float) -> int:
    """Return the salt as an integer. Raises InvalidInput unless it is a whole number of 0 to
    SALT_MAX."""
    if not (0 <= salt <= SALT_MAX and salt == int(salt)):
        raise InvalidInput(f"salt={salt!r:.40}: it is a whole number from 0 to {SALT_MAX}.")
    return int(salt)


def asked_priority(priority: int | float | None) -> int | None:
    """Return the priority that a request names, as an integer. Raises InvalidInput for 0, which is
    none, and what is no whole number."""
    if priority is None:
        return None
    if priority == 0 or (isinstance(priority, float) and not priority.is_integer()):
        raise InvalidInput(
            f"priority={priority!r:.40}: it is 1, the highest, to 3; leave it out for none."
        )
    return int(priority)


def _reading(
    read: Callable[[bytes | bytearray], _T], text: bytes | bytearray, kind: type[_T]
) -> _T:
    try:
        return read(text)
    except InvalidInput as error:
        unknown = error.message.partition("unknown field `")[2].partition("`")[0]
        if unknown:
            guess = did_you_mean(unknown, kind.__struct_fields__) or "."
            known = ", ".join(kind.__struct_fields__)
            raise InvalidInput(
                f"unknown member {unknown!r}{guess}", hint=f"Members: {known}."
            ) from None
        raise


# -- what goes out


Made = HttpResponse | StreamedResponse


def _outcome(futures: Sequence[Future], make: Callable[[], Made]) -> HandlerResult:
    return make() if all(future.done() for future in futures) else DeferredResponse(futures, make)


def _predicted(answer: Answer) -> PredictResponse:
    return PredictResponse(
        answer.id,
        answer.output,
        answer.confidence,
        answer.is_default,
        answer.reason,
        [_name_of(model) for model in answer.models],
        [_name_of(model) for model in answer.missing] if answer.missing else [],
        answer.agreement,
        answer.latency_us,
        _qualifiers(answer) if answer.qualifiers else msgspec.UNSET,
        answer.decided_by if answer.decided_by not in ("", "all") else msgspec.UNSET,
        answer.set or msgspec.UNSET,
    )


def _part_event(part: AnswerPart) -> bytes:
    """Return the event of a part, or of the whole."""
    if not part.is_last:
        sure = msgspec.UNSET if part.confidence is None else part.confidence
        event = PartEvent(part.index, part.output, sure)
        return encode_event(b"".join(json_texts(event)), name=b"part")
    whole = WholeEvent(
        part.id or "",
        part.output,
        part.confidence,
        part.is_default,
        part.complete,
        part.reason or "",
        [_name_of(model) for model in part.models],
        [_name_of(model) for model in part.missing],
        part.index,
        part.latency_us,
    )
    return encode_event(b"".join(json_texts(whole)), name=b"answer")


def _error_event(request_id: bytes, error: Exception) -> bytes:
    return encode_event(problem(error, request_id).body, name=b"error")


def _qualifiers(answer: Answer) -> dict[str, Qualifiers]:
    return {_name_of(model): found for model, found in answer.qualifiers.items()}


def one_predicted(future: Future, resolved: ResolvedApplication, whole: bool = False) -> Made:
    """Return the response to one query. whole: not streamed, however large it is."""
    answer = answer_of(future, resolved)
    respond = answer_whole if whole else answer_texts
    return respond(json_texts(_predicted(answer)), answer.id.encode("ascii"))


def _many_predicted(futures: Sequence[Future], resolved: ResolvedApplication) -> Made:
    """Return the response to many queries. It is an error only when no query has an answer."""
    refused = None
    for future in futures:
        try:
            if answer_of(future, resolved).models:
                break
        except ClipperError as error:
            refused = refused or error
    else:
        if refused is not None:
            raise refused
    return answer_texts(
        json_list(b"predictions", (_predicted(future.result(0)) for future in futures))
    )


def _old_body(future: Future) -> dict[str, object]:
    answer: Answer = future.result(0)
    body = {
        "query_id": int(answer.id.rpartition("-")[2], 16),
        "output": answer.output,
        "default": answer.is_default,
    }
    return {**body, "default_explanation": answer.reason} if answer.is_default else body


def old_one(future: Future, whole: bool = False) -> Made:
    """Return the response to one query of the original Clipper's clients. whole: not streamed."""
    return (answer_whole if whole else answer_texts)(json_texts(_old_body(future)))


def _old_many(futures: Sequence[Future]) -> Made:
    return answer_texts(json_list(b"batch_predictions", map(_old_body, futures)))
