"""Tables of a specification, and the optimizer that a setting of a set of shards names."""

from collections.abc import Mapping

import msgspec

from clipper.errors import ConfigError, InvalidInput
from clipper.spec.table import ALTERABLE, COUNT_MAX, DIM_MAX, TableSpec
from clipper.types import check_name
from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Initializer, Optimizer


def empty_table(spec: TableSpec) -> Table:
    """Return an empty table. Raises what clipper_core.params.embedding raises."""
    return Table(
        spec.name,
        spec.dim,
        optimizer=Optimizer(spec.optimizer, **spec.optimizer_settings),
        initializer=Initializer(spec.initializer, **spec.initializer_settings),
        seed=spec.seed,
        dtype=spec.dtype,
        rows_max=spec.rows_max,
        evicts=spec.evicts,
        admit_after=spec.admit_after,
    )


def checked(spec: TableSpec) -> TableSpec:
    """Return a specification if a table can be made of it. Raises InvalidInput."""
    try:
        check_name(spec.name, "table")
        if not 1 <= spec.dim <= DIM_MAX:
            raise ValueError(
                f"table {spec.name!r}: dim is {spec.dim}, where 1 to {DIM_MAX} are possible."
            )
        for key in ("seed", "expire_s", "quota_rows", "quota_bytes"):
            if not 0 <= getattr(spec, key) <= COUNT_MAX:
                raise ValueError(f"table {spec.name!r}: {key} is a number from 0 to 2^63 - 1.")
        empty_table(spec)
    except (ValueError, TypeError, MemoryError) as error:
        raise InvalidInput(str(error)) from None
    return spec


def altered(spec: TableSpec, changes: Mapping[str, object]) -> TableSpec:
    """Return a specification with changes. Raises InvalidInput.

    changes: of ALTERABLE; optimizer_settings are merged with those there are.
    """
    for key in changes:
        if key not in ALTERABLE:
            hint = f"These can: {', '.join(ALTERABLE)}."
            raise InvalidInput(f"table {spec.name!r}: {key} cannot be changed.", hint=hint)
    fields = msgspec.to_builtins(spec) | dict(changes)
    given = changes.get("optimizer_settings", {})
    if isinstance(given, Mapping):
        fields["optimizer_settings"] = {**spec.optimizer_settings, **given}
    try:
        return checked(msgspec.convert(fields, TableSpec))
    except msgspec.ValidationError as error:
        raise InvalidInput(f"table {spec.name!r}: {error}.") from None


def optimizer_in(text: str) -> tuple[str, dict[str, float]]:
    """Parse `adam rate=0.001 beta1=0.9` into a name and settings. Raises ConfigError."""
    name, *pairs = text.split() or [""]
    try:
        settings = {key: float(value) for key, _, value in (pair.partition("=") for pair in pairs)}
        Optimizer(name, **settings)
    except (ValueError, TypeError) as error:
        hint = "Write a name and settings: `adam rate=0.001`."
        raise ConfigError(f"params.grpc_optimizer = {text!r}: {error}.", hint=hint) from None
    return name, settings
