"""Specification of a table, as workers and shards exchange it."""

from collections.abc import Mapping

import msgspec

from clipper.errors import ConfigError, InvalidInput
from clipper.spec.table import ALTERABLE, COUNT_MAX, DIM_MAX, TableFields
from clipper.types import check_name
from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Initializer, Optimizer

ROW_BYTES = 24  # of a row beside its weights and state


class TableSpec(TableFields, frozen=True):
    """An embedding table: f32[dim] for each 64-bit id. All shards have the same specification.

    Its fields are those of `clipper.spec.table.TableFields`. The first value of a row depends on
    (seed, name, id) only. The optimizer's state is f32, whatever weights are stored as. A push that
    would make more rows than a quota is refused as a whole (QuotaExceeded).
    """

    def check(self) -> "TableSpec":
        """Return this specification if a table can be made of it. Raises InvalidInput."""
        try:
            check_name(self.name, "table")
            if not 1 <= self.dim <= DIM_MAX:
                raise ValueError(
                    f"table {self.name!r}: dim is {self.dim}, where 1 to {DIM_MAX} are possible."
                )
            for key in ("seed", "expire_s", "quota_rows", "quota_bytes"):
                if not 0 <= getattr(self, key) <= COUNT_MAX:
                    raise ValueError(f"table {self.name!r}: {key} is a number from 0 to 2^63 - 1.")
            self.made()
        except (ValueError, TypeError, MemoryError) as error:
            raise InvalidInput(str(error)) from None
        return self

    def altered(self, changes: Mapping[str, object]) -> "TableSpec":
        """Return this specification with changes. Raises InvalidInput.

        changes: of ALTERABLE; optimizer_settings are merged with those there are.
        """
        for key in changes:
            if key not in ALTERABLE:
                hint = f"These can: {', '.join(ALTERABLE)}."
                raise InvalidInput(f"table {self.name!r}: {key} cannot be changed.", hint=hint)
        fields = msgspec.to_builtins(self) | dict(changes)
        given = changes.get("optimizer_settings", {})
        if isinstance(given, Mapping):
            fields["optimizer_settings"] = {**self.optimizer_settings, **given}
        try:
            return msgspec.convert(fields, TableSpec).check()
        except msgspec.ValidationError as error:
            raise InvalidInput(f"table {self.name!r}: {error}.") from None

    def row_quota(self, nbytes: int) -> int:
        """Return the rows that the quotas allow on one shard; 0: any. nbytes: of a row."""
        by_bytes = self.quota_bytes // (nbytes + ROW_BYTES)
        rows = [self.quota_rows] if self.quota_rows else []
        return min([*rows, max(1, by_bytes)] if self.quota_bytes else rows, default=0)

    @property
    def corrects_bias(self) -> bool:
        """Tell whether a step of the optimizer depends on the number of steps before it."""
        return self.optimizer in ("adam", "amsgrad", "adamw")

    def made(self) -> Table:
        """Make an empty table. Raises what clipper_core.params.embedding raises."""
        return Table(
            self.name,
            self.dim,
            optimizer=Optimizer(self.optimizer, **self.optimizer_settings),
            initializer=Initializer(self.initializer, **self.initializer_settings),
            seed=self.seed,
            dtype=self.dtype,
            rows_max=self.rows_max,
            evicts=self.evicts,
            admit_after=self.admit_after,
        )


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
