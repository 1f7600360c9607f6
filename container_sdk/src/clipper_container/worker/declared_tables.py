"""Opens the parameter tables that a model declares, before its `load` runs.

The environment names the folder of the shards (TABLES_ENV) and the tables declared at deployment
(DECLARED_ENV); the model's class may declare more.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from clipper_container.loading.errors import LoadError
from clipper_container.model import BorrowedModel, Model, UserValue

TABLES_ENV = "CLIPPER_TABLES"
DECLARED_ENV = "CLIPPER_TABLES_DECLARED"


def declared(model: Model) -> dict[str, object]:
    """Return the tables declared by the class and at deployment. Raises: LoadError."""
    tables = getattr(_owner(model), "tables", None)
    of_class = (
        {str(name): spec for name, spec in tables.items()} if isinstance(tables, Mapping) else {}
    )
    try:
        declared_elsewhere = json.loads(os.environ.get(DECLARED_ENV) or "{}")
    except ValueError as error:
        raise LoadError(f"{DECLARED_ENV} is not JSON: {error}") from None
    return {**of_class, **declared_elsewhere}


def give_tables(model: Model) -> dict[str, object]:
    """Set `model.tables` and create every declared table; return the declarations.

    Raises: LoadError, and the errors of `Tables`.
    """
    wanted = declared(model)
    if not wanted:
        return {}
    place = os.environ.get(TABLES_ENV, "")
    if not place:
        names = ", ".join(map(repr, wanted))
        raise LoadError(
            f"the model declares parameter tables ({names}), and its server has no parameter"
            " server. Start it with clipper.start(params='FOLDER')"
        )
    from clipper_container.tables import Tables

    tables = Tables(place)
    for name, spec in wanted.items():
        if not isinstance(spec, Mapping) or "dim" not in spec:
            raise LoadError(
                f'table {name!r} is declared by {spec!r:.100}: a mapping with "dim" is needed'
            )
        tables.create(name, **spec)
    with contextlib.suppress(AttributeError):  # a class with __slots__ opens its tables itself
        _owner(model).tables = tables
    return wanted


def _owner(model: Model) -> UserValue:
    """Return the user's object."""
    return model.inner if isinstance(model, BorrowedModel) else model
