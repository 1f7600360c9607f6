"""The tables of parameters that a model declares: opened before it loads, so that `load` may pull
from them.

The environment says where the shards are (a folder of this host: no secret), and which tables the
server was told of when the model was deployed; the others stand in the model's class.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from clipper_container.adapters.errors import LoadError
from clipper_container.model import BorrowedModel, Model

TABLES_ENV = "CLIPPER_TABLES"
DECLARED_ENV = "CLIPPER_TABLES_DECLARED"


def declared(model: Model) -> dict[str, Any]:
    """By its class, and by whoever deployed it. Raises: LoadError."""
    said = getattr(_owner(model), "tables", None)
    of_class = {str(name): spec for name, spec in said.items()} if isinstance(said, Mapping) else {}
    try:
        told = json.loads(os.environ.get(DECLARED_ENV) or "{}")
    except ValueError as error:
        raise LoadError(f"{DECLARED_ENV} is no JSON: {error}") from None
    return {**of_class, **told}


def give_tables(model: Model) -> dict[str, Any]:
    """`model.tables`, with every table that it declares; -> what it declares. Raises: LoadError,
    and what `Tables` raises."""
    wanted = declared(model)
    if not wanted:
        return {}
    place = os.environ.get(TABLES_ENV, "")
    if not place:
        names = ", ".join(map(repr, wanted))
        raise LoadError(
            f"it declares tables of parameters ({names}), and its server has none. Start that by"
            " clipper.start(params='FOLDER')"
        )
    from clipper_container.tables import Tables

    tables = Tables(place)
    for name, spec in wanted.items():
        if not isinstance(spec, Mapping) or "dim" not in spec:
            raise LoadError(
                f'table {name!r} is declared by {spec!r:.100}: a mapping with "dim" is needed'
            )
        tables.create(name, **spec)
    with contextlib.suppress(AttributeError):  # one with slots goes by what it opens itself
        _owner(model).tables = tables
    return wanted


def _owner(model: Model) -> Any:
    """What the user wrote."""
    return model.inner if isinstance(model, BorrowedModel) else model
