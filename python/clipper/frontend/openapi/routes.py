"""Descriptions of the query listener's routes: in general, and for each application's input type.

tests/frontend/test_openapi.py fails for a route without a description, and for a description
without its route.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from clipper.frontend.http import applications, inference
from clipper.frontend.inference import codec
from clipper.frontend.openapi.document import (
    OpenApiDocument,
    RouteInfo,
    RouteTable,
    Schema,
    example_of_input,
    list_of,
    members,
    only,
    schema_of_columns,
    schema_of_input,
)
from clipper.metrics import CONTENT_TYPES
from clipper.schema import Tensors
from clipper.serving.feedback.observe import Counted
from clipper.types import InputType, UserValue

APPLICATIONS, PROTOCOL, ORIGINAL, SERVER = (
    "applications",
    "Open Inference Protocol",
    "original Clipper",
    "server",
)
OF = ("management", "queries")
_EVENT_STREAM = "text/event-stream"
_QUERY_ERRORS = (404, 429, 500, 503, 504)  # statuses of failed queries
_READ_ERRORS = (404,)

ABOUT = """Predictions from models in any framework, each by its own deadline.

Errors have one body (RFC 9457, and `error`). `X-Request-Id` comes back in every response: the request's own, or a generated one.
`traceparent` is passed on. Bodies may be compressed by gzip or deflate. A default is an answer: its status is 200, and `default` is true."""  # noqa: E501


# -- schemas


class ApplicationInfo(msgspec.Struct):
    """An application. input: the type of one input, such as `f64[3]`. models: those in use now."""

    name: str
    input: str
    models: list[str]
    slo_ms: float
    default: UserValue
    policy: str
    confidence_min: float


class ApplicationList(msgspec.Struct):
    """All applications."""

    applications: list[ApplicationInfo]


class PredictManyResponse(msgspec.Struct):
    """The answers to several queries."""

    predictions: list[applications.PredictResponse]


class FeedbackResponse(msgspec.Struct):
    """The result of one feedback. counted: false if the same feedback was received before."""

    counted: bool


class RouteList(msgspec.Struct):
    """The server's version and routes."""

    name: str
    version: str
    routes: list[str]


def _slo(most: float, about: str = "instead of the application's") -> Schema:
    return {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": most,
        "description": about,
    }


def _query_members(slo_ms_max: float) -> dict[str, Schema]:
    return {
        "user": {"type": ["string", "null"], "description": "whose selection state applies"},
        "context": _CONTEXT,
        "slo_ms": _slo(slo_ms_max),
        "salt": {
            "type": "integer",
            "minimum": 0,
            "maximum": applications.SALT_MAX,
            "description": "another salt, another cache entry",
        },
        "priority": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": 3,
            "description": "1 is the highest; instead of the key's, or the application's",
        },
    }


def _parts_members(slo_ms_max: float) -> dict[str, Schema]:
    """Return the members of a request that is answered in parts."""
    return {
        "stream": {"type": ["boolean", "null"], "description": "answer in parts, by events"},
        "part_slo_ms": _slo(slo_ms_max, "from a part to the next one"),
        "slo_total_ms": _slo(slo_ms_max, "until the end; a minute if not given"),
    }


_CONTEXT: Schema = {
    "type": ["array", "null"],
    "items": {"type": "number", "minimum": -1e6, "maximum": 1e6},
    "minItems": 1,
    "maxItems": 32,
    "description": "features of the query, for policies that use them",
}
_FINITE: Schema = {"type": "number"}
_LABEL: Schema = {
    "anyOf": [
        _FINITE,
        {"type": "string"},
        {"type": "boolean"},
        {"type": "array", "items": _FINITE, "minItems": 1},
    ],
    "description": "the truth, as models return it",
}
_ID: Schema = {"type": "string", "description": "of the prediction"}


class SchemaLimits(msgspec.Struct):
    """Limits of sizes and times in the schemas."""

    slo_ms_max: float = 3_600_000.0
    queries_max: int = 1024


def predict_schemas(
    input: Schema, limits: SchemaLimits, columns: Schema | None = None
) -> dict[str, Schema]:
    """Return the schemas of a predict body: with one input, with one that is never answered in
    parts, and with many.

    columns: of named tensors: a list with a value for each input, by name.
    """
    many: Schema = {
        "type": "array",
        "items": input,
        "minItems": 1,
        "maxItems": limits.queries_max,
    }
    if columns is not None:
        many = {"anyOf": [many, columns]}
    whole = members(
        applications.PredictRequest,
        input=input,
        inputs=many,
        **_query_members(limits.slo_ms_max),
        **_parts_members(limits.slo_ms_max),
    )
    rest_of = ("user", "context", "slo_ms", "salt", "priority")
    of_parts = ("stream", "part_slo_ms", "slo_total_ms")
    return {
        "Predict": _limits_of_parts(only(whole, "input", *rest_of, *of_parts, required=["input"])),
        "PredictOne": only(whole, "input", *rest_of, required=["input"]),
        "PredictMany": only(whole, "inputs", *rest_of, required=["inputs"]),
    }


def _limits_of_parts(schema: Schema) -> Schema:
    """Require `stream` with the limits of an answer in parts, and no priority with `stream`; null
    counts as absent.

    The conditions are in `if`, which code generators ignore and validators check.
    """
    given = [
        {"required": [key], "properties": {key: {"type": "number"}}}
        for key in ("part_slo_ms", "slo_total_ms")
    ]
    asked = {"required": ["stream"], "properties": {"stream": {"const": True}}}
    whole = {"properties": {"priority": {"type": "null"}}}
    return {
        **schema,
        "allOf": [{"if": {"anyOf": given}, "then": asked}, {"if": asked, "then": whole}],
    }


def feedback_schemas(input: Schema, limits: SchemaLimits) -> dict[str, Schema]:
    """Return the schemas of a feedback body: by the prediction's id, and by the input.

    Each has one of label, correct and score.
    """
    whole = members(
        applications.FeedbackRequest,
        input=input,
        feedback={"type": "array"},
        id=_ID,
        context=_CONTEXT,
        label={**_LABEL, "anyOf": [*_LABEL["anyOf"], {"type": "null"}]},
        correct={"type": ["boolean", "null"], "description": "whether the answer was"},
        score={
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 1,
            "description": "how right it was",
        },
        weight={
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 1000,
            "description": "counts it as so many",
        },
    )
    whole = {**whole, "required": []}
    by_id = only(whole, "id", "label", "correct", "score", "weight", required=["id"])
    by_input = only(
        whole, "input", "user", "context", "label", "correct", "score", "weight", required=["input"]
    )
    return {"FeedbackById": _one_truth(by_id), "FeedbackByInput": _one_truth(by_input)}


def _one_truth(schema: Schema) -> Schema:
    """Require exactly one of label, correct and score; null counts as absent.

    The condition is in `if`, which code generators ignore and validators check.
    """
    given = {"label": _LABEL, "correct": {"type": "boolean"}, "score": {"type": "number"}}
    one_of = [{"required": [key], "properties": {key: kind}} for key, kind in given.items()]
    return {**schema, "if": True, "then": {"oneOf": one_of}}


def _tensor(name: str) -> Schema:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "examples": [name]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 8},
            "datatype": {"enum": [*codec.DATATYPES, "BYTES"]},
            "parameters": {
                "type": "object",
                "description": "`binary_data_size`: it follows the JSON, as so many bytes",
            },
            "data": {"type": "array", "items": {}, "description": "flat or nested, row by row"},
        },
        "required": ["name", "shape", "datatype"],
    }


_INFER: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "timeout": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "microseconds until the answer is due",
                },
                "priority": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 3,
                    "description": "1 is the highest; 0: the key's, or the application's",
                },
                "user": {"type": "string"},
                "salt": {"type": "integer", "minimum": 0, "maximum": applications.SALT_MAX},
                "binary_data_output": {"type": "boolean"},
            },
        },
        "inputs": {"type": "array", "items": _tensor(codec.INPUT), "minItems": 1},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "examples": [codec.OUTPUT]}},
                "required": ["name"],
            },
        },
    },
    "required": ["inputs"],
}
_INFERRED: Schema = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "default": {"type": "boolean"},
                "reason": {"type": "string"},
                "prediction_id": {"type": "string"},
                "confidence": {"type": "number"},
            },
        },
        "outputs": {"type": "array", "items": _tensor(codec.OUTPUT)},
    },
    "required": ["model_name", "outputs"],
}
_MICROSECONDS: Schema = {"type": "integer", "minimum": 0}
_GENERATE: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "text_input": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "timeout": {**_MICROSECONDS, "description": "until the first part"},
                "part_timeout": {**_MICROSECONDS, "description": "from a part to the next one"},
                "total_timeout": {**_MICROSECONDS, "description": "until the end"},
                "user": {"type": "string"},
                "salt": {"type": "integer", "minimum": 0, "maximum": applications.SALT_MAX},
            },
        },
    },
    "required": ["text_input"],
}
_GENERATED: Schema = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "prediction_id": {"type": "string"},
                "default": {"type": "boolean"},
                "complete": {"type": "boolean"},
                "reason": {"type": "string"},
            },
        },
        "text_output": {"type": "string"},
    },
    "required": ["model_name", "text_output"],
}
_OLD_PREDICT: Schema = {
    "type": "object",
    "properties": {
        "input": {},
        "input_batch": {"type": "array", "items": {}},
        "version": {"type": ["string", "integer", "null"]},
    },
}
_OLD_UPDATE: Schema = {
    "type": "object",
    "properties": {"uid": {"type": ["integer", "string"]}, "input": {}, "label": {}},
    "required": ["input", "label"],
}
_TENSOR_ABOUT: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
    },
    "required": ["name", "datatype", "shape"],
}
_TENSORS: Schema = {"type": "array", "items": _TENSOR_ABOUT}
_METADATA: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "versions": {"type": "array", "items": {"type": "string"}},
        "platform": {"type": "string"},
        "inputs": _TENSORS,
        "outputs": _TENSORS,
    },
    "required": ["name", "platform", "inputs", "outputs"],
}
_READY: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "live": {"type": "boolean"},
        "ready": {"type": "boolean"},
        "waiting_for": {"type": "array", "items": {"type": "string"}},
        "store": {
            "type": "string",
            "description": "that it is away, or has another content, if so",
        },
    },
}
_NAMED: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
}
_INDEX: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("name", "version", "state", "reason")},
        "required": ["name", "state", "reason"],
    },
}
_DEADLINE = {
    "Clipper-Deadline-Ms": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 3_600_000,
        "description": "instead of the application's",
    }
}


# -- routes


_LIVES = "The process answers"
_SERVES = "Every application has a model with a container"


def of_server() -> RouteTable:
    """Describe the routes of every listener."""
    return {
        ("GET", "/"): RouteInfo(
            id="listRoutes", summary="The routes there are", tag=SERVER, gives=RouteList
        ),
        ("GET", "/openapi.json"): RouteInfo(
            id="readDescription", summary="This description", tag=SERVER, gives={"type": "object"}
        ),
        ("GET", "/docs"): _page("readPage", "This description, to read and to try", "text/html"),
        ("GET", "/docs/page.css"): _page("readPageStyle", "Style of that page", "text/css"),
        ("GET", "/docs/page.js"): _page("readPageScript", "What that page does", "text/javascript"),
    }


def of_health() -> RouteTable:
    """Describe the routes of health, which every listener has."""
    each = (
        ("/livez", "livez", SERVER, _LIVES),
        ("/healthz", "healthz", SERVER, _LIVES),
        ("/v2/health/live", "isLive", PROTOCOL, _LIVES),
        ("/readyz", "readyz", SERVER, _SERVES),
        ("/v2/health/ready", "isReady", PROTOCOL, _SERVES),
    )
    return {
        ("GET", path): RouteInfo(
            id=id, summary=summary, tag=tag, gives=_READY, others={503: _READY}
        )
        for path, id, tag, summary in each
    }


def _page(id: str, summary: str, media: str) -> RouteInfo:
    return RouteInfo(id=id, summary=summary, tag=SERVER, gives={"type": "string"}, media=media)


def of_metrics() -> RouteTable:
    """Describe /metrics."""
    format = {"enum": list(CONTENT_TYPES), "description": "else by `Accept`"}
    about = "Metrics: Prometheus' text, OpenMetrics, or InfluxDB's lines"
    media = sorted({kind.partition(b";")[0].decode() for kind in CONTENT_TYPES.values()})
    return {
        ("GET", "/metrics"): RouteInfo(
            id="readMetrics",
            summary=about,
            tag=SERVER,
            query={"format": format},
            gives={"type": "string"},
            media=media[0],
            also=tuple(media[1:]),
        )
    }


def of_applications() -> RouteTable:
    """Describe the routes of applications."""
    return {
        ("GET", "/api"): RouteInfo(
            id="listApplications",
            summary="All applications",
            tag=APPLICATIONS,
            gives=ApplicationList,
        ),
        ("GET", "/api/{}"): RouteInfo(
            id="describeApplication",
            summary="An application",
            tag=APPLICATIONS,
            names=("application",),
            gives=ApplicationInfo,
            errors=_READ_ERRORS,
        ),
        ("POST", "/api/{}/predict"): RouteInfo(
            id="predict",
            summary="Query an application, with one input or several",
            tag=APPLICATIONS,
            names=("application",),
            more=_PARTS,
            takes=_one_of("Predict", "PredictMany"),
            gives=_one_of("PredictResponse", "PredictManyResponse"),
            also=(_EVENT_STREAM,),
            errors=_QUERY_ERRORS,
        ),
        ("POST", "/api/{}/predict/stream"): RouteInfo(
            id="predictStream",
            summary="The same, each answer as soon as it is ready",
            tag=APPLICATIONS,
            names=("application",),
            more=_EVENTS,
            takes=_one_of("PredictOne", "PredictMany"),
            gives={},
            media=_EVENT_STREAM,
            errors=_READ_ERRORS,
        ),
        ("POST", "/api/{}/feedback"): RouteInfo(
            id="tellFeedback",
            summary="Send feedback",
            tag=APPLICATIONS,
            names=("application",),
            takes=_one_of("FeedbackById", "FeedbackByInput", "FeedbackMany"),
            gives=_one_of("FeedbackResponse", "Counted"),
            errors=(404, 429, 503),
        ),
        ("POST", "/{}/predict"): RouteInfo(
            id="predictAsBefore",
            summary="A query in the format of the original Clipper",
            tag=ORIGINAL,
            old=True,
            names=("application",),
            takes=_OLD_PREDICT,
            gives={"type": "object"},
            errors=_QUERY_ERRORS,
        ),
        ("POST", "/{}/update"): RouteInfo(
            id="updateAsBefore",
            summary="Feedback in the format of the original Clipper",
            tag=ORIGINAL,
            old=True,
            names=("application",),
            media="text/plain",
            gives={"type": "string"},
            takes=_OLD_UPDATE,
            errors=(404, 429, 503),
        ),
    }


_EVENTS = """Server-sent events: `answer` with the `index` of its input and the members of Predicted, `error` with its `index` and
those of Problem, and last `done`, with how many there were of either. Comments are signs of life."""  # noqa: E501
_PARTS = """With `stream` (or `Accept: text/event-stream`) one input is answered by server-sent events: `part` with the members of
PartEvent for each part, and `answer` with those of WholeEvent, or `error` with those of Problem."""  # noqa: E501


def of_protocol() -> RouteTable:
    """Describe the routes of the Open Inference Protocol."""

    def about(id: str, summary: str, names: tuple[str, ...] = (), **more: Any) -> RouteInfo:
        errors = (*_READ_ERRORS, *more.pop("errors", ())) if names else ()
        return RouteInfo(id=id, summary=summary, tag=PROTOCOL, names=names, errors=errors, **more)

    found: dict[tuple[str, str], RouteInfo] = {
        ("GET", "/v2"): about("readServer", "About the server", gives=_NAMED),
        ("GET", "/v2/models/stats"): about(
            "readStatistics",
            "Counts since the start",
            gives=list_of("model_stats", {"type": "object"}),
        ),
        ("POST", "/v2/repository/index"): about(
            "listModels",
            "What there is, and whether it is ready",
            takes=inference.IndexRequest,
            needs_body=False,
            gives=_INDEX,
        ),
        ("POST", "/v2/repository/models/{}/load"): about(
            "loadModel",
            "Allowed where it is there already; else management's",
            ("model",),
            gives={"type": "object"},
            errors=(403,),
        ),
        ("POST", "/v2/repository/models/{}/unload"): about(
            "unloadModel", "Management's", ("model",), gives={"type": "object"}, errors=(403,)
        ),
    }
    for model, of, names in (
        ("/v2/models/{}", "Model", ("model",)),
        ("/v2/models/{}/versions/{}", "Version", ("model", "version")),
    ):
        found |= {
            ("GET", model): about(f"describe{of}", "Its tensors", names, gives=_METADATA),
            ("GET", f"{model}/ready"): about(
                f"is{of}Ready",
                "A model of it has a container",
                names,
                gives=_READY,
                others={503: _READY},
            ),
            ("GET", f"{model}/config"): about(
                f"read{of}Configuration", "As Triton's has it", names, gives=_NAMED
            ),
            ("GET", f"{model}/stats"): about(
                f"read{of}Statistics",
                "Counts since the start",
                names,
                gives=list_of("model_stats", {"type": "object"}),
            ),
            ("POST", f"{model}/infer"): about(
                f"infer{'' if of == 'Model' else 'Version'}",
                "Send a tensor, whose first dimension is how many rows",
                names,
                more=_BINARY,
                takes=_INFER,
                gives=_INFERRED,
                also=("application/octet-stream",),
                headers=_DEADLINE,
                errors=(429, 500, 503, 504),
            ),
            ("POST", f"{model}/generate"): about(
                f"generate{'' if of == 'Model' else 'Version'}",
                "Send a text, and get the text that the model generates",
                names,
                takes=_GENERATE,
                gives=_GENERATED,
                errors=(429, 500, 503, 504),
            ),
            ("POST", f"{model}/generate_stream"): about(
                f"generateStream{'' if of == 'Model' else 'Version'}",
                "The same, each part of the text as an event",
                names,
                more=_TEXTS,
                takes=_GENERATE,
                gives={},
                media=_EVENT_STREAM,
                errors=(429, 500, 503, 504),
            ),
        }
    return found


def of_repository() -> RouteTable:
    """Describe loading and unloading on the management address."""
    load = "Start a container of the latest version, if there is none"
    unload = "Stop the containers of every version; the links stay"
    return {
        ("POST", "/v2/repository/models/{}/load"): RouteInfo(
            id="loadModel",
            summary=load,
            tag=PROTOCOL,
            names=("model",),
            gives={"type": "object"},
            errors=(404,),
        ),
        ("POST", "/v2/repository/models/{}/unload"): RouteInfo(
            id="unloadModel",
            summary=unload,
            tag=PROTOCOL,
            names=("model",),
            gives={"type": "object"},
            errors=(404,),
        ),
    }


_BINARY = """An application or a model. Tensors may follow the JSON as bytes, little-endian, in order: then the header
`Inference-Header-Content-Length` is the JSON's length, and `binary_data_size` of each tensor its bytes. With
`binary_data_output` the answer comes so, as `application/octet-stream`."""  # noqa: E501


_TEXTS = """Server-sent events with the members of a response to generate, whose texts are the whole together. The last one has no
text, but the parameters of the whole. An event with the members of Problem ends what fails later."""  # noqa: E501


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _one_of(*names: str) -> Schema:
    return {"oneOf": [_ref(name) for name in names]}


# -- applications


class DescribedApplication(msgspec.Struct):
    """An application with paths of its own in the document. learns: it takes feedback."""

    name: str
    input: InputType | Tensors
    learns: bool


class BodySchemas(NamedTuple):
    """References to the schemas of bodies for an input type, by route."""

    predict: Schema
    predict_stream: Schema
    feedback: Schema


def body_schemas(
    into: OpenApiDocument, type_: InputType | Tensors, limits: SchemaLimits, suffix: str = ""
) -> BodySchemas:
    """Keep the schemas of the bodies for an input type; return references to them."""
    input = schema_of_input(type_)
    columns = schema_of_columns(type_, limits.queries_max) if isinstance(type_, Tensors) else None
    if input.get("type") in ("array", "object"):
        input = into.schema(f"Input{suffix}", input)
    one, whole, several = (
        into.schema(name + suffix, schema)
        for name, schema in predict_schemas(input, limits, columns).items()
    )
    outputs = [
        into.schema(name + suffix, schema)
        for name, schema in feedback_schemas(input, limits).items()
    ]
    many = {**list_of("feedback", {"oneOf": outputs}), "additionalProperties": False}
    return BodySchemas(
        {"oneOf": [one, several]},
        {"oneOf": [whole, several]},
        {"oneOf": [*outputs, into.schema(f"FeedbackMany{suffix}", many)]},
    )


def _feedback_link(app: DescribedApplication) -> Schema:
    """Return the link from an answer's id to the feedback route."""
    return {
        "tell": {
            "operationId": f"feedback_{app.name}",
            "requestBody": {"id": "$response.body#/id", "score": 1},
        }
    }


def describe_application(
    into: OpenApiDocument, app: DescribedApplication, limits: SchemaLimits
) -> Iterator[tuple[str, str, RouteInfo]]:
    """Yield (method, path, RouteInfo) of an application's own paths."""
    bodies = body_schemas(into, app.input, limits, f".{app.name}")
    row = example_of_input(app.input)
    more = f"`{app.input}`"
    yield (
        "POST",
        f"/api/{app.name}/predict",
        RouteInfo(
            id=f"predict_{app.name}",
            summary=f"Query {app.name} with one input or several",
            tag=APPLICATIONS,
            more=f"{more}. {_PARTS}",
            takes=bodies.predict,
            gives=_one_of("PredictResponse", "PredictManyResponse"),
            also=(_EVENT_STREAM,),
            errors=_QUERY_ERRORS,
            example={"input": row} if row is not None else None,
            links=_feedback_link(app) if app.learns else {},
        ),
    )
    yield (
        "POST",
        f"/api/{app.name}/predict/stream",
        RouteInfo(
            id=f"predict_{app.name}_stream",
            summary=f"The same, each answer of {app.name} when it is there",
            tag=APPLICATIONS,
            more=_EVENTS,
            takes=bodies.predict_stream,
            gives={},
            media=_EVENT_STREAM,
            errors=_READ_ERRORS,
            example={"inputs": [row, row]} if row is not None else None,
        ),
    )
    if not app.learns:
        return
    yield (
        "POST",
        f"/api/{app.name}/feedback",
        RouteInfo(
            id=f"feedback_{app.name}",
            summary=f"Give feedback to {app.name}",
            tag=APPLICATIONS,
            more=more,
            takes=bodies.feedback,
            gives=_one_of("FeedbackResponse", "Counted"),
            errors=(404, 429, 503),
            example={"input": row, "score": 1} if row is not None else None,
        ),
    )


SHARED: tuple[type[msgspec.Struct], ...] = (
    applications.PredictResponse,
    applications.PartEvent,
    applications.WholeEvent,
    PredictManyResponse,
    FeedbackResponse,
    Counted,
)


def table(*, management: bool) -> RouteTable:
    """Return the descriptions of a listener's routes, except those in manage/http/described.py."""
    if management:
        of = {"of": {"enum": list(OF)}}
        more = {
            ("GET", "/openapi.json"): msgspec.structs.replace(
                of_server()["GET", "/openapi.json"], query=of
            )
        }
        return {**of_server(), **more, **of_health(), **of_metrics(), **of_repository()}
    return {**of_server(), **of_health(), **of_metrics(), **of_applications(), **of_protocol()}
