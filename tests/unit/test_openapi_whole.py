"""The routes of the OpenAPI documents, with their parameters and statuses, and schemas of inputs.

The texts for people are left out.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from clipper.frontend.openapi import document as openapi
from clipper.manage.http.described import plain_document
from clipper.manage.mesh.described import of_mesh
from clipper.schema import Tensors
from clipper.types import InputType
from tests.expected import check_expected, shown


def test_routes() -> None:
    found = []
    for management in (False, True):
        made: Any = plain_document(management=management)
        for path, methods in made["paths"].items():
            for method, one in methods.items():
                places = [f"{p['in']} {p['name']}" for p in one.get("parameters", ())]
                body = [*one.get("requestBody", {}).get("content", ())]
                answers = [
                    f"{status} {[*answer.get('content', ())]}"
                    for status, answer in one["responses"].items()
                ]
                found.append(f"{method} {path} {one['operationId']} {places} {body} {answers}")
        found.append(str(sorted(made["components"]["responses"])))
    check_expected("openapi/routes.txt", "\n".join(found) + "\n")


def test_routes_of_a_mesh() -> None:
    class Registering(msgspec.Struct):
        pass

    found = []
    for (method, path), about in of_mesh(Registering, Registering).items():
        fields = msgspec.structs.asdict(about)
        kept = {
            name: getattr(value, "__name__", value)
            for name, value in fields.items()
            if name not in ("summary", "more")
        }
        found.append(f"{method} {path} {kept}")
    check_expected("openapi/mesh.txt", "\n".join(found).replace(f"{__name__}.", "") + "\n")


def test_schemas_of_inputs() -> None:
    types: list[InputType | Tensors] = [
        InputType.parse(text)
        for text in (
            "any", "str", "bytes", "bool[2]", "u8", "i8[3]", "i64[*]", "f16[2]", "f32[2,3]",
        )
    ]  # fmt: skip
    types += [
        Tensors.parse(side)
        for side in (
            {"a": "f32[2]", "b": "str", "c": "i64[*]", "d": "bytes[2]", "e": "bool"},
            {"x": "u16[2,*]", "y": "f16"},
        )
    ]
    found = []
    for one in types:
        found.append(f"{one}: {shown(openapi.schema_of_input(one))}")
        found.append(f"  example {shown(openapi.example_of_input(one))}")
        if isinstance(one, Tensors):
            found.append(f"  columns {shown(openapi.schema_of_columns(one, 7))}")
    names = "version", "model_version", "exact_version", "application"
    found += [shown(openapi._path_schema(name)) for name in names]
    found += [shown(openapi.list_of("rows", {"type": "string"}, most)) for most in (None, 0, 3)]
    schema = {"type": "integer", "description": "d"}
    found += [shown(openapi._parameter(where, "n", schema)) for where in ("path", "query")]
    found.append(shown(openapi._without_titles({"title": "t", "description": " a  b\n c"})))
    whole = {"properties": {"a": 1, "b": 2}, "type": "object"}
    found += [shown(openapi.only(whole, "a")), shown(openapi.only(whole, "a", "b", required=["b"]))]
    check_expected("openapi/inputs.txt", "\n".join(found) + "\n")


def test_members_of_a_struct() -> None:
    class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
        first_one: int
        other: str = ""

    class Loose(msgspec.Struct):
        other: str = ""

    assert openapi.members(Strict, other={"type": "null"}) == {
        "type": "object",
        "properties": {"firstOne": {"type": "integer"}, "other": {"type": "null"}},
        "required": ["firstOne"],
        "additionalProperties": False,
    }
    loose = openapi.members(Loose)
    assert (loose.keys(), loose["properties"]["other"]["type"]) == (
        {"type", "properties"},
        "string",
    )


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_a_pattern_with_other_names(names: tuple[str, ...]) -> None:
    assert openapi.named("/api/{}/x", ("application",)) == "/api/{application}/x"
    call: Callable[[], str] = lambda: openapi.named("/api/{}", names)  # noqa: E731
    with pytest.raises(ValueError, match=f"/api/{{}} has 1 places, and {len(names)} names"):
        call()
