"""The calls of a client, without connections: the body of each one's request, and its result from
the response.

Queries of one input are JSON, or binary tensors where the input is a large array; arrays are binary
tensors (docs/http.md, "Open Inference Protocol") with the parameter `answers`, for which the server
returns what an `Answer` has beside its output.
"""

import base64
import binascii
import json
import math
import urllib.parse
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from clipper_client import tensors
from clipper_client.answers import Answer, AnswerPart, Answers, FeedbackCounts, UserValue
from clipper_client.errors import InvalidInput, error_of
from clipper_client.http_wire import Response, ServerEvent

ARRAY_SLO_MS: Final = 60_000.0  # of an array for which no SLO is named, as in process
BINARY_BYTES_MIN: Final = 2048  # arrays from this size on are sent as binary tensors
_T_co = TypeVar("_T_co", covariant=True)


class Body(NamedTuple):
    """The body of a request in parts. headers: lines that it needs, each with its end."""

    parts: Sequence[bytes | memoryview]
    headers: str


class Call(Protocol[_T_co]):
    """One call. method, path: of its request. slo_ms: how long the server may take; None: no time
    of its own. may_repeat: doing it twice is as good as once."""

    @property
    def method(self) -> str:
        """Return the method of HTTP."""

    @property
    def path(self) -> str:
        """Return the path, quoted."""

    @property
    def slo_ms(self) -> float | None:
        """Return the time that the server has by the request."""

    @property
    def may_repeat(self) -> bool:
        """Return whether the request may be sent again."""

    def body(self, left_ms: float | None) -> Body:
        """Return the body, for a server that has `left_ms` of `slo_ms`. Raises InvalidInput."""

    def read(self, response: Response) -> _T_co:
        """Return the result from a response with status 200. Raises ValueError for another body
        than a server of Clipper sends."""


class Settings(NamedTuple):
    """The settings of a query: see Client.predict."""

    user: str | None = None
    slo_ms: float | None = None
    salt: int = 0
    context: UserValue = None
    id: str = ""
    outputs: tuple[str, ...] = ()
    priority: int | None = None


def predict(application: str, input: UserValue, settings: Settings) -> "Call[Answer]":
    """Return the call of one query. Raises InvalidInput."""
    _check_slo(settings.slo_ms)
    if not (settings.outputs or _is_large(input)):
        return QueryCall(application, input, settings)
    try:
        return OneRowCall(application, tensors.one_row(input), settings)
    except tensors.Ragged:
        if settings.outputs:
            raise InvalidInput(
                f"outputs={settings.outputs!r} of an input that is no tensor.",
                hint="Leave outputs out, and take those of the answer.",
            ) from None
        return QueryCall(application, input, settings)


def predict_many(application: str, inputs: UserValue, settings: Settings) -> "Call[Answers]":
    """Return the call of n queries. Raises InvalidInput."""
    _check_slo(settings.slo_ms)
    slo_ms = ARRAY_SLO_MS if settings.slo_ms is None else settings.slo_ms
    settings = settings._replace(slo_ms=slo_ms)
    try:
        return RowsCall(application, tensors.many_rows(inputs), settings)
    except tensors.Ragged as error:
        if settings.outputs:
            raise InvalidInput(
                f"outputs={settings.outputs!r} of inputs that are no tensors: {error}.",
                hint="Leave outputs out, and take those of the answers.",
            ) from None
        return QueriesCall(application, tensors.rows_of(inputs), settings)


def check_no_limits(limits: Mapping[str, float | None]) -> None:
    """Raise InvalidInput for limits of parts, of a query that is not answered in parts."""
    if any(limit is not None for limit in limits.values()):
        raise InvalidInput(f"{' and '.join(limits)} are for queries with stream=True.")


def _check_slo(slo_ms: object) -> None:
    if slo_ms is None:
        return
    is_number = isinstance(slo_ms, int | float) and not isinstance(slo_ms, bool)
    if not (is_number and 0 < float(slo_ms) < math.inf):  # type: ignore[arg-type]
        raise InvalidInput(
            f"slo_ms={slo_ms!r:.100}: it is a number of milliseconds above 0.",
            hint="Leave it out for the application's own.",
        )


def _is_large(input: UserValue) -> bool:
    """Return whether an input is, or holds, an array that is better sent as binary data."""
    if isinstance(input, Mapping):
        return any(_is_large(value) for value in input.values())
    return bool(getattr(input, "nbytes", 0) >= BINARY_BYTES_MIN and hasattr(input, "dtype"))


def path_of(application: str, verb: str) -> str:
    """Return the path of a route of an application. Raises InvalidInput for what is no name."""
    return f"/api/{quoted(application)}/{verb}"


def quoted(application: object) -> str:
    """Return the name of an application as it is in a path. Raises InvalidInput."""
    if not isinstance(application, str) or not application:
        raise InvalidInput(
            f"application={application!r:.100}: it is the name of an application.",
            hint="client.applications() lists them.",
        )
    return urllib.parse.quote(application, safe="")


# -- JSON


def _plain(value: UserValue) -> object:
    """Return what JSON has for a value that it does not know: lists for arrays, base64 for bytes.
    Raises TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_list"):
        return value.to_list()
    if hasattr(value, "__array__"):
        return value.__array__().tolist()
    raise TypeError(f"a {type(value).__name__} is no input")


_encode: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
).encode
_decode: Final = json.JSONDecoder().decode
_JSON_HEADER: Final = "Content-Type: application/json\r\n"


def json_body(members: Mapping[str, object]) -> Body:
    """Return members as the body of a request. NaN is null. Raises InvalidInput."""
    try:
        try:
            text = _encode(members)
        except ValueError:
            text = _encode(_with_null(members))
        return Body((text.encode(),), _JSON_HEADER)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"this cannot be sent as JSON: {error}.",
            hint="Give numbers, strings, bytes, arrays, or lists and objects of these.",
        ) from None


def _with_null(value: UserValue) -> UserValue:
    """Return nested values with None for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {name: _with_null(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(part) for part in value]
    if hasattr(value, "tolist"):
        return _with_null(value.tolist())
    return value


def json_of(response: Response) -> UserValue:
    """Return the JSON of a response. Raises ValueError."""
    return _decode(response.body.decode())


def _given(settings: Settings, left_ms: float | None) -> dict[str, object]:
    """Return the members of a query beside its input that are not as they are without."""
    members: dict[str, object] = {}
    if settings.user is not None:
        members["user"] = settings.user
    if left_ms is not None:
        members["slo_ms"] = left_ms
    if settings.salt:
        members["salt"] = settings.salt
    if settings.priority is not None:
        members["priority"] = settings.priority
    if settings.context is not None:
        members["context"] = settings.context
    return members


def answer_of(members: Mapping[str, UserValue], output: UserValue, request_id: str) -> Answer:
    """Return an answer from the members of JSON beside its output."""
    return Answer(
        output,
        members["confidence"],
        members["default"],
        members["reason"],
        tuple(members["models"]),
        tuple(members["missing"]),
        members["latency_us"],
        members["id"],
        members["agreement"],
        members.get("decided_by", "all"),
        tuple(members.get("set", ())),
        request_id,
        members.get("qualifiers", {}),
    )


def _id_header(id: object) -> str:
    """Return the header with the caller's own id of a query. Raises InvalidInput."""
    if not id:
        return ""
    if not isinstance(id, str) or len(id) > 128 or not id.isascii() or not id.isprintable():
        raise InvalidInput(
            f"id={id!r:.60}: over HTTP it is up to 128 printable characters of ASCII.",
            hint="Leave it out, and take Answer.id.",
        )
    return f"X-Request-Id: {id}\r\n"


class QueryCall:
    """One query as JSON."""

    method = "POST"
    may_repeat = True
    __slots__ = ("_input", "_settings", "path", "slo_ms")

    def __init__(self, application: str, input: UserValue, settings: Settings) -> None:
        self.path = path_of(application, "predict")
        self.slo_ms = settings.slo_ms
        self._input, self._settings = input, settings

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        body = json_body({"input": self._input, **_given(self._settings, left_ms)})
        return body._replace(headers=body.headers + _id_header(self._settings.id))

    def read(self, response: Response) -> Answer:
        """Return the answer. Raises ValueError, KeyError."""
        members = json_of(response)
        return answer_of(members, tensors.of_json(members["output"]), self._settings.id)


class PartsCall:
    """One query that is answered in parts. limits: part_slo_ms and slo_total_ms, where given."""

    method = "POST"
    may_repeat = True
    __slots__ = ("_input", "_limits", "_settings", "path", "slo_ms")

    def __init__(
        self,
        application: str,
        input: UserValue,
        settings: Settings,
        limits: Mapping[str, float | None],
    ) -> None:
        """Make the call. Raises InvalidInput."""
        for slo_ms in (settings.slo_ms, *limits.values()):
            _check_slo(slo_ms)
        if settings.outputs:
            raise InvalidInput(
                "an answer in parts has all its outputs.", hint="Leave outputs= out."
            )
        self.path = path_of(application, "predict")
        self.slo_ms = settings.slo_ms
        self._input, self._settings = input, settings
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        given = _given(self._settings, left_ms)
        body = json_body({"input": self._input, "stream": True, **self._limits, **given})
        return body._replace(headers=body.headers + _id_header(self._settings.id))

    def read(self, response: Response) -> None:
        """Raise ValueError: the response has no events."""
        raise ValueError("it has no server-sent events")

    def part(self, event: ServerEvent, url: str) -> AnswerPart:
        """Return the part of an event. Raises the error that the server sent; ValueError,
        KeyError."""
        members = _decode(event.data.decode())
        if event.name == "error":
            raise error_of(Response(members["status"], {}, event.data, False), url)
        output = tensors.of_json(members["output"])
        if event.name == "part":
            return AnswerPart(output, members["index"], members.get("confidence"))
        return AnswerPart(
            output,
            members["parts"],
            members["confidence"],
            True,
            members["complete"],
            members["default"],
            members["reason"],
            tuple(members["models"]),
            tuple(members["missing"]),
            members["latency_us"],
            members["id"],
            self._settings.id,
        )


class QueriesCall:
    """Several queries as JSON, for inputs that are no tensors."""

    method = "POST"
    may_repeat = True
    __slots__ = ("_inputs", "_settings", "path", "slo_ms")

    def __init__(self, application: str, inputs: UserValue, settings: Settings) -> None:
        self.path = path_of(application, "predict")
        self.slo_ms = settings.slo_ms
        self._inputs, self._settings = inputs, settings

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        return json_body({"inputs": self._inputs, **_given(self._settings, left_ms)})

    def read(self, response: Response) -> Answers:
        """Return the answers. Raises ValueError, KeyError."""
        rows = json_of(response)["predictions"]
        return answers_of_rows(rows, tensors.of_json([row["output"] for row in rows]))


# -- binary tensors


def _infer_body(
    inputs: Sequence[tensors.PackedTensor], settings: Settings, left_ms: float | None
) -> Body:
    """Return the body of an infer request whose answers are to be whole."""
    parameters: dict[str, object] = {"binary_data_output": True, "answers": True}
    if settings.user is not None:
        parameters["user"] = settings.user
    if left_ms is not None:
        parameters["timeout"] = max(1, round(left_ms * 1000))
    if settings.salt:
        parameters["salt"] = settings.salt
    if settings.priority is not None:
        parameters["priority"] = settings.priority
    if settings.context is not None:
        parameters["context"] = settings.context
    head: dict[str, object] = {
        "inputs": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in inputs
        ],
        "parameters": parameters,
    }
    if settings.outputs:
        head["outputs"] = [{"name": name} for name in settings.outputs]
    (text,), _ = json_body(head)
    headers = (
        "Content-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n"
        f"{_id_header(settings.id)}"
    )
    return Body((text, *(tensor.data for tensor in inputs)), headers)


class Inferred(NamedTuple):
    """The response to an infer request. outputs: by name, with rows in the first dimension.
    about: what the answers have beside them."""

    outputs: dict[str, UserValue]
    about: dict[str, UserValue]


def _inferred(response: Response) -> Inferred:
    """Read a response to an infer request. Raises ValueError, KeyError."""
    body = memoryview(response.body)
    size = int(response.headers.get("inference-header-content-length", len(body)))
    head = _decode(str(body[:size], "utf-8"))
    outputs = {}
    for tensor in head["outputs"]:
        length = tensor.get("parameters", {}).get("binary_data_size")
        if length is None:
            found = tensors.nested(tensor["data"], tensor["shape"])
            outputs[tensor["name"]] = tensors.of_json(found)
            continue
        data = body[size : size + length]
        size += length
        outputs[tensor["name"]] = tensors.unpacked(tensor["datatype"], tensor["shape"], data)
    return Inferred(outputs, _decode(head["parameters"]["answers"]))


class OneRowCall:
    """One query as binary tensors."""

    method = "POST"
    may_repeat = True
    __slots__ = ("_inputs", "_settings", "path", "slo_ms")

    def __init__(
        self, application: str, inputs: Sequence[tensors.PackedTensor], settings: Settings
    ) -> None:
        self.path = f"/v2/models/{quoted(application)}/infer"
        self.slo_ms = settings.slo_ms
        self._inputs, self._settings = inputs, settings

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        return _infer_body(self._inputs, self._settings, left_ms)

    def read(self, response: Response) -> Answer:
        """Return the answer. Raises ValueError, KeyError."""
        outputs, about = _inferred(response)
        rows = {name: _row_of(values) for name, values in outputs.items()}
        output = rows if about["named"] else _only(rows)
        return answer_of(about["rows"][0], output, self._settings.id)


def _only(outputs: Mapping[str, UserValue]) -> UserValue:
    """Return the output of an application that has one. Raises ValueError."""
    (found,) = outputs.values()
    return found


def _row_of(values: UserValue) -> UserValue:
    """Return the first row of an output; a number as Python's own."""
    row = values[0]
    return row.item() if hasattr(row, "item") and not getattr(row, "shape", ()) else row


class RowsCall:
    """An array of queries as binary tensors."""

    method = "POST"
    may_repeat = True
    __slots__ = ("_inputs", "_settings", "path", "slo_ms")

    def __init__(
        self, application: str, inputs: Sequence[tensors.PackedTensor], settings: Settings
    ) -> None:
        self.path = f"/v2/models/{quoted(application)}/infer"
        self.slo_ms = settings.slo_ms
        self._inputs, self._settings = inputs, settings

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        return _infer_body(self._inputs, self._settings, left_ms)

    def read(self, response: Response) -> Answers:
        """Return the answers. Raises ValueError, KeyError."""
        outputs, about = _inferred(response)
        found = outputs if about["named"] else _only(outputs)
        if "rows" in about:
            return answers_of_rows(about["rows"], found)
        count = about["count"]
        return Answers(
            found,
            _unpacked("FP64", about["confidence"], count),
            _unpacked("BOOL", about["default"], count),
            about["reasons"],
            tuple(about["models"]),
            about["missing"],
            _unpacked("UINT32", about["latency_us"], count),
        )


def _unpacked(datatype: str, text: str, count: int) -> UserValue:
    """Return numbers that are packed in base64, one for each row. Raises ValueError."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    return tensors.unpacked(datatype, (count,), memoryview(data))


def answers_of_rows(rows: Sequence[Mapping[str, UserValue]], outputs: UserValue) -> Answers:
    """Return the answers of queries that were answered singly. rows: their members beside the
    output."""
    reasons: dict[str, int] = {}
    missing: dict[str, int] = {}
    models: dict[str, None] = {}
    for row in rows:
        if row["default"]:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
        models |= dict.fromkeys((*row["models"], *row["missing"]))
        for model in row["missing"]:
            missing[model] = missing.get(model, 0) + 1
    return Answers(
        outputs,
        _numbers("d", "FP64", [row["confidence"] for row in rows]),
        _numbers("B", "BOOL", [row["default"] for row in rows]),
        reasons,
        tuple(models),
        missing,
        _numbers("I", "UINT32", [row["latency_us"] for row in rows]),
        tuple(row["id"] for row in rows),
    )


def _numbers(code: str, datatype: str, values: list[UserValue]) -> UserValue:
    """Return numbers as an array, or as they are where numpy is not installed."""
    if tensors.numpy_or_none() is None:
        return values
    return tensors.unpacked(datatype, (len(values),), memoryview(array(code, values)).cast("B"))


# -- feedback and looking


class FeedbackCall:
    """One feedback. It is never sent twice: one about an input would count twice."""

    method = "POST"
    may_repeat = False
    slo_ms = None
    __slots__ = ("_members", "path")

    def __init__(self, application: str, members: Mapping[str, object]) -> None:
        self.path = path_of(application, "feedback")
        self._members = members

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        return json_body(self._members)

    def read(self, response: Response) -> bool:
        """Return whether it counts. Raises ValueError, KeyError."""
        return bool(json_of(response)["counted"])


class FeedbacksCall:
    """Several feedbacks, which are written to the journal together. They are never sent twice."""

    method = "POST"
    may_repeat = False
    slo_ms = None
    __slots__ = ("_items", "path")

    def __init__(self, application: str, items: Sequence[Mapping[str, object]]) -> None:
        self.path = path_of(application, "feedback")
        self._items = items

    def body(self, left_ms: float | None) -> Body:
        """Return the body. Raises InvalidInput."""
        return json_body({"feedback": self._items})

    def read(self, response: Response) -> FeedbackCounts:
        """Return what counted. Raises ValueError, KeyError."""
        found = json_of(response)
        return FeedbackCounts(found["counted"], found["duplicates"], found["unknown"])


class ApplicationsCall:
    """The applications of a server."""

    method = "GET"
    path = "/api"
    may_repeat = True
    slo_ms = None
    __slots__ = ()

    def body(self, left_ms: float | None) -> Body:
        """Return no body."""
        return Body((), "")

    def read(self, response: Response) -> list[dict[str, UserValue]]:
        """Return a description of each. Raises ValueError, KeyError."""
        return list(json_of(response)["applications"])


def feedback(
    application: str,
    prediction: "str | Answer | None",
    truth: Mapping[str, object],
    weight: float,
) -> FeedbackCall:
    """Return the call of one feedback. truth: label, correct, score, input, user and context, as
    they were given; None is left out. Raises InvalidInput."""
    members = {name: value for name, value in truth.items() if value is not None}
    if prediction is not None:
        members["id"] = id_of(prediction)
    if weight != 1.0:
        members["weight"] = weight
    return FeedbackCall(application, members)


def feedback_many(
    application: str,
    predictions: "Answers | Sequence[str | Answer]",
    labels: UserValue,
) -> FeedbacksCall:
    """Return the call of the right outputs of many predictions. Raises InvalidInput."""
    labels = [*labels]
    if isinstance(predictions, Answers):
        if len(predictions) and not predictions.ids:
            raise InvalidInput(
                f"an array of {len(predictions)} rows takes no feedback over HTTP.",
                hint="Query up to 32 rows at once, or the application in the server's process.",
            )
        ids = [*predictions.ids]
    else:
        ids = [id_of(prediction) for prediction in predictions]
    if len(ids) != len(labels):
        raise InvalidInput(
            f"{len(labels)} labels for {len(ids)} predictions.", hint="Give one for each."
        )
    items = [{"id": id, "label": label} for id, label in zip(ids, labels, strict=True)]
    return FeedbacksCall(application, items)


def id_of(prediction: object) -> str:
    """Return the id of an answer. Raises InvalidInput for what has none."""
    id = prediction if isinstance(prediction, str) else getattr(prediction, "id", None)
    if not isinstance(id, str) or not id:
        raise InvalidInput(
            f"feedback about {prediction!r:.100}: it is an Answer, or the id of one.",
            hint="Or give input=.",
        )
    return id
