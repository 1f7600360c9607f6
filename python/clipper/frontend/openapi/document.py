"""OpenAPI 3.1 documents, made from descriptions of routes. Pure: no sockets, no server.

frontend/openapi/routes.py and manage/http/described.py have the descriptions;
frontend/openapi/endpoint.py serves the document. JSON schemas come from msgspec, for the types that
the handlers read and write. A schema is written by hand where a member is raw JSON (an input has
its application's type), or where members depend on each other. Errors have one schema.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from clipper.frontend.http.messages import phrase
from clipper.schema import FREE, Tensors, TensorSpec
from clipper.types import NAME_GRAMMAR, InputType

Schema = dict[str, Any]
Example = object  # a JSON value
RouteTable = Mapping[tuple[str, str], "RouteInfo"]  # (method, pattern) -> description
_REF = "#/components/schemas/"
_OWN_MEDIA = "application/problem+json"
_JSON = "application/json"
_COME_AGAIN = (429, 503)
_EXAMPLE_NUMBERS_MAX = 64
_EXAMPLE_LENGTH = 3  # of a free dimension


class RouteInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a route.

    id: operationId. summary, more: a line and a paragraph. names: of the pattern's `{}`. query,
    headers: schemas of parameters. query_needed: those of the query that must be there. takes:
    schema or type of the body; None for no body. needs_body: the body is required. gives: schema or
    type of a successful response; None for no body. status: its status. others: bodies of other
    statuses that are no Problem. media: content type; `also` has further ones. errors: statuses
    with a Problem body.
    """

    id: str
    summary: str
    tag: str
    more: str = ""
    names: tuple[str, ...] = ()
    query: Mapping[str, Schema] = {}
    query_needed: tuple[str, ...] = ()
    headers: Mapping[str, Schema] = {}
    takes: Any = None
    needs_body: bool = True
    example: object = None
    gives: object = msgspec.UNSET
    status: int = 200
    others: Mapping[int, object] = {}
    media: str = _JSON
    also: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    links: Mapping[str, object] = {}
    old: bool = False


class Problem(msgspec.Struct):
    """The body of an error: RFC 9457, plus `error` for clients of the Open Inference Protocol.

    hint: the next step. request_id: X-Request-Id of the response, as in the server's log.
    """

    error: str
    type: str
    title: str
    status: int
    detail: str
    hint: str
    request_id: str


class OpenApiDocument:
    """Collects operations and their schemas. Threads: one at a time."""

    def __init__(self, title: str, version: str, about: str, server: str = "/") -> None:
        self._paths: dict[str, Schema] = {}
        self._schemas: dict[str, Schema] = {}
        self._tags: dict[str, None] = {}
        self._problems: Schema = {}
        self._schemes: Schema = {}
        self._info = {
            "title": title,
            "version": version,
            "description": about,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        }
        self._server = server
        self._schema_of(Problem)

    def require_bearer(self) -> None:
        """State that requests need a bearer token."""
        self._schemes["bearer"] = {
            "type": "http",
            "scheme": "bearer",
            "description": "the value of http.token",
        }

    def schema(self, name: str, schema: Schema) -> Schema:
        """Keep `schema` under `name`; return a reference to it."""
        self._schemas[name] = schema
        return {"$ref": _REF + name}

    def keep(self, *types: type[msgspec.Struct]) -> None:
        """Keep the schemas of some types."""
        for one in types:
            self._schema_of(one)

    def add(self, method: str, pattern: str, about: RouteInfo) -> None:
        """Add an operation."""
        path = named(pattern, about.names)
        self._paths.setdefault(path, {})[method.lower()] = self._operation(about)
        self._tags[about.tag] = None

    def json(self) -> Schema:
        """Return the document."""
        found: Schema = {
            "openapi": "3.1.0",
            "info": self._info,
            "servers": [{"url": self._server}],
            "tags": [{"name": tag} for tag in self._tags],
            "paths": self._paths,
            "components": {
                "schemas": dict(sorted(self._schemas.items())),
                "responses": self._problems,
            },
        }
        if self._schemes:
            found["components"]["securitySchemes"] = self._schemes
            found["security"] = [{name: []} for name in self._schemes]
        return found

    # -- one operation

    def _operation(self, about: RouteInfo) -> Schema:
        found: Schema = {
            "operationId": about.id,
            "summary": about.summary,
            "tags": [about.tag],
        }
        if about.more:
            found["description"] = about.more
        if about.old:
            found["deprecated"] = True
        parameters = [_parameter("path", name, _path_schema(name)) for name in about.names]
        parameters += [
            _parameter("query", name, schema, name in about.query_needed)
            for name, schema in about.query.items()
        ]
        parameters += [_parameter("header", name, schema) for name, schema in about.headers.items()]
        if parameters:
            found["parameters"] = parameters
        if about.takes is not None:
            content: Schema = {"schema": self._schema_of(about.takes)}
            if about.example is not None:
                content["example"] = about.example
            found["requestBody"] = {"required": about.needs_body, "content": {_JSON: content}}
        found["responses"] = self._responses(about)
        return found

    def _responses(self, about: RouteInfo) -> Schema:
        found = {str(about.status): self._good(about, about.status, about.gives)}
        for status, gives in about.others.items():
            found[str(status)] = self._good(about, status, gives)
        statuses = {400, 413, 415, *about.errors} if about.takes is not None else {*about.errors}
        if about.query or about.headers:
            statuses.add(400)
        if self._schemes:
            statuses.add(401)
        for status in sorted(statuses - {about.status, *about.others}):
            found[str(status)] = self._bad(phrase(status), status in _COME_AGAIN)
        found["default"] = self._bad("Refused")
        return found

    def _good(self, about: RouteInfo, status: int, gives: object) -> Schema:
        found: Schema = {"description": phrase(status)}
        if gives is not None:
            schema = {} if gives is msgspec.UNSET else self._schema_of(gives)
            found["content"] = {
                about.media: {"schema": schema},
                **{media: {} for media in about.also},
            }
        if status in _COME_AGAIN:
            found["headers"] = {"Retry-After": _RETRY_AFTER}
        if about.links and status == about.status:
            found["links"] = dict(about.links)
        return found

    def _bad(self, title: str, come_again: bool = False) -> Schema:
        """Return a reference to an error response.

        Under /v2 a Problem has the type application/json, for the protocol's clients; elsewhere
        application/problem+json.
        """
        name = title.replace(" ", "").replace("-", "")
        if name not in self._problems:
            content = {"schema": {"$ref": f"{_REF}Problem"}}
            self._problems[name] = {
                "description": title,
                "content": {_OWN_MEDIA: content, _JSON: content},
            }
            if come_again:
                self._problems[name]["headers"] = {"Retry-After": _RETRY_AFTER}
        return {"$ref": f"#/components/responses/{name}"}

    def _schema_of(self, thing: object) -> Schema:
        if isinstance(thing, dict):
            return thing
        (schema,), components = msgspec.json.schema_components(
            [thing], schema_hook=_any_schema, ref_template=_REF + "{name}"
        )
        self._schemas |= {name: _without_titles(found) for name, found in components.items()}
        return schema


def _any_schema(kind: type) -> Schema:
    """Return the schema of a value of any type, for `object`. Raises: NotImplementedError."""
    if kind is object:
        return {"title": "any"}  # msgspec refuses an empty one; `_without_titles` makes it so
    raise NotImplementedError(kind)


_RETRY_AFTER = {
    "description": "seconds after which another try may succeed",
    "schema": {"type": "integer", "minimum": 1},
}


def document(
    title: str,
    version: str,
    about: str,
    table: RouteTable,
    routes: Iterable[tuple[str, str]] | None = None,
    bearer: bool = False,
) -> OpenApiDocument:
    """Return the document of the `routes` that `table` describes, or of all that it describes."""
    found = OpenApiDocument(title, version, about)
    if bearer:
        found.require_bearer()
    for route in routes if routes is not None else table:
        if (known := table.get(route)) is not None:
            found.add(*route, known)
    return found


def named(pattern: str, names: Sequence[str]) -> str:
    """Fill in a pattern: `/api/{}`, ("application",) becomes `/api/{application}`."""
    if pattern.count("{}") != len(names):
        raise ValueError(
            f"{pattern} has {pattern.count('{}')} places, and {len(names)} names:"
            f" {', '.join(names)}."
        )
    return pattern.format(*(f"{{{name}}}" for name in names))


def _parameter(where: str, name: str, schema: Schema, required: bool = False) -> Schema:
    used = {key: value for key, value in schema.items() if key != "description"}
    found = {"name": name, "in": where, "required": required or where == "path", "schema": used}
    return {**found, "description": schema["description"]} if "description" in schema else found


def _path_schema(name: str) -> Schema:
    if name == "version":
        return {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
    if name == "model_version":
        return {
            "type": "string",
            "pattern": f"^{NAME_GRAMMAR}(:[1-9][0-9]{{0,8}})?$",
            "description": "`svm`, or `svm:3`",
        }
    if name == "exact_version":
        return {
            "type": "string",
            "pattern": f"^{NAME_GRAMMAR}:[1-9][0-9]{{0,8}}$",
            "description": "`svm:3`",
        }
    return {"type": "string", "pattern": f"^{NAME_GRAMMAR}$"}


def _without_titles(schema: Schema) -> Schema:
    """Return a schema without its title, which code generators would take for a second class."""
    found = {key: value for key, value in schema.items() if key != "title"}
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    return found


# -- schemas of what travels


def members(kind: type[msgspec.Struct], **instead: Schema) -> Schema:
    """Return the schema of a struct. instead: schemas of members whose type does not say enough."""
    fields = msgspec.structs.fields(kind)
    properties = {
        one.encode_name: instead.get(one.name) or msgspec.json.schema(one.type) for one in fields
    }
    found: Schema = {"type": "object", "properties": properties}
    if required := [one.encode_name for one in fields if one.required]:
        found["required"] = required
    if kind.__struct_config__.forbid_unknown_fields:
        found["additionalProperties"] = False
    return found


def only(schema: Schema, *names: str, required: Sequence[str] = ()) -> Schema:
    """Return the schema of an object with these members only."""
    return {
        **schema,
        "properties": {name: schema["properties"][name] for name in names},
        "required": list(required or names),
    }


def list_of(member: str, item: object, most: int | None = None) -> Schema:
    """Return the schema of an object with one member, an array."""
    array: Schema = {
        "type": "array",
        "items": item,
        **({"maxItems": most} if most is not None else {}),
    }
    return {"type": "object", "properties": {member: array}, "required": [member]}


_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
# values from here on are rounded to infinity
_ROUNDED_TO_INFINITY = {
    "f16": 65520.0,
    "f32": 3.4028235677973366e38,
}


def schema_of_input(type_: InputType | Tensors) -> Schema:
    """Return the JSON schema of one input."""
    if isinstance(type_, Tensors):
        return _closed({spec.name: _schema_of_tensor(spec) for spec in type_.specs})
    if type_.dtype == "any":
        return {"description": "an input of any type"}
    if type_.dtype == "str":
        return {"type": "string"}
    if type_.dtype == "bytes":
        return {"type": "string", "contentEncoding": "base64", "pattern": _BASE64}
    found = _schema_of_number(type_.dtype)
    if type_.variable:
        return {"type": "array", "items": found}
    for n in reversed(type_.shape):
        found = {"type": "array", "items": found, "minItems": n, "maxItems": n}
    return found


def schema_of_columns(tensors: Tensors, most: int) -> Schema:
    """Return the JSON schema of the inputs of up to `most` queries, as a list for each tensor."""
    return _closed(
        {
            spec.name: {"type": "array", "items": _schema_of_tensor(spec), "maxItems": most}
            for spec in tensors.specs
        }
    )


def _closed(properties: dict[str, Schema]) -> Schema:
    """Return the schema of an object with all of these members and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _schema_of_tensor(spec: TensorSpec) -> Schema:
    found = schema_of_input(InputType.parse(spec.dtype))
    for n in reversed(spec.shape):
        found = {"type": "array", "items": found}
        found |= {"minItems": n, "maxItems": n} if n != FREE else {}
    return found


def _schema_of_number(dtype: str) -> Schema:
    if dtype == "bool":
        return {"type": "boolean"}
    if dtype in _ROUNDED_TO_INFINITY:
        most = _ROUNDED_TO_INFINITY[dtype]
        return {"type": "number", "exclusiveMinimum": -most, "exclusiveMaximum": most}
    if dtype == "f64":
        return {"type": "number"}
    bits = int(dtype[1:])
    least, most = (0, 2**bits - 1) if dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return {"type": "integer", "minimum": least, "maximum": most}


def example_of_input(type_: InputType | Tensors) -> Example:
    """Return an example of an input; None if it would be long, or the type is unknown."""
    if isinstance(type_, Tensors):
        row = {spec.name: _example_of_tensor(spec) for spec in type_.specs}
        return None if None in row.values() else row
    if type_.dtype == "any":
        return None
    if type_.dtype == "str":
        return "hello"
    if type_.dtype == "bytes":
        return "aGVsbG8="
    found: object = False if type_.dtype == "bool" else 0 if type_.dtype[0] in "iu" else 0.5
    return _repeated(found, (FREE,) if type_.variable else type_.shape)


def _example_of_tensor(spec: TensorSpec) -> Example:
    return _repeated(example_of_input(InputType.parse(spec.dtype)), spec.shape)


def _repeated(element: Example, shape: tuple[int, ...]) -> Example:
    """Return an element in nested lists of this shape; None if they would be long."""
    size = 1
    for n in reversed(shape):
        n = _EXAMPLE_LENGTH if n == FREE else n
        size *= n
        if size > _EXAMPLE_NUMBERS_MAX:
            return None
        element = [element] * n
    return element
