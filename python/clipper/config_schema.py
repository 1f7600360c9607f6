"""A JSON Schema of the TOML file, for editors that complete and check. `config.load` decides:
it also checks values that depend on each other.
"""

from typing import get_args, get_type_hints

import msgspec

from clipper.config import Config, describe, keys_of, tables, typed
from clipper.settings.redaction import shown
from clipper.spec.field import default_of, schema_of
from clipper.types import Batching


def schema() -> dict[str, object]:
    """Draft 2020-12; as strict as `config.load` about keys, types and ranges."""
    sections: dict[str, object] = {}
    for name, kind in tables().items():
        section, _, any_name = name.partition(".")
        table = _table(kind)
        sections[section] = {"type": "object", "additionalProperties": table} if any_name else table
    sections["http"] = {"anyOf": [sections["http"], {"type": "string"}]}
    sections["batching"] = {"anyOf": [sections["batching"], _modes()]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clipper.toml",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _table(kind: type[msgspec.Struct]) -> dict[str, object]:
    known = keys_of(kind)
    keys = {
        field.name: _key(default_of(field), *typed(kind, field.name))
        for field in msgspec.structs.fields(kind)
        if field.name in known
    }
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _key(default: object, type_: object, meta: msgspec.Meta) -> dict[str, object]:
    if type_ is Batching:
        found: dict[str, object] = {"anyOf": [_table(Batching), _modes()]}
    else:
        bounds = {"minimum": meta.ge, "maximum": meta.le}
        found = {
            **schema_of(type_),
            **{name: bound for name, bound in bounds.items() if bound is not None},
        }
        found["default"] = msgspec.to_builtins(default)
    unit = (meta.extra or {}).get("unit", "")
    return {**found, "description": f"{meta.description or ''}{f', in {unit}' if unit else ''}"}


def _modes() -> dict[str, object]:
    return {"enum": list(get_args(get_type_hints(Batching)["mode"]))}


def settings_of(config: Config) -> list[dict[str, object]]:
    """Return a row for each key: those of the sections, and for each model and application those of
    its table. Secrets are masked."""
    rows = []
    for info in describe():
        section, *middle, key = info.key.split(".")
        holders = getattr(config, section)
        tables = (
            {f"{section}.{name}": table for name, table in holders.items()}
            if middle
            else {section: holders}
        )
        for prefix, table in tables.items():
            value = getattr(table, key)
            origins = [
                o for at, o in config.origins.items() if f"{at}.".startswith(f"{prefix}.{key}.")
            ]
            row = {
                "key": f"{prefix}.{key}",
                "value": msgspec.to_builtins(shown(key, value)),
            }
            row |= {
                "unit": info.unit,
                "default": msgspec.to_builtins(info.default),
                "origin": ", ".join(origins[:1]),
            }
            rows.append({**row, "origin": row["origin"] or "default", "text": info.text})
    return rows
