"""What a table is, as workers and shards tell it to one another."""

import msgspec

from clipper.errors import ConfigError, InvalidInput
from clipper.types import check_name
from clipper_core.params.embedding import Table
from clipper_core.params.initializer import Initializer
from clipper_core.params.optimizer import Optimizer

DIM_MAX = 1 << 16


class TableSpec(msgspec.Struct, frozen=True):
    """An embedding table: f32[dim] by a 64-bit id. Every shard has the same; the first to be told
    of it makes it.

    optimizer: sgd, momentum, nesterov, adagrad, adam, amsgrad, ftrl.  initializer: zeros, constant,
    uniform, normal, truncated_normal, glorot: what a row is before its first update, by (seed,
    name, id) alone.  rows_max: of one shard; evicts: then the oldest row goes for a new one.
    admit_after: an id gets a row at its so-many-th push.  expire_s: rows that were neither pulled
    nor pushed for so long go; 0: never.
    """

    name: str
    dim: int
    optimizer: str = "adagrad"
    optimizer_settings: dict[str, float] = {}
    initializer: str = "uniform"
    initializer_settings: dict[str, float] = {}
    seed: int = 0
    rows_max: int = (1 << 32) - 1
    evicts: bool = False
    admit_after: int = 1
    expire_s: int = 0

    def check(self) -> "TableSpec":
        """Itself, if it can be made. Raises InvalidInput."""
        try:
            check_name(self.name, "table")
            if not 1 <= self.dim <= DIM_MAX:
                raise ValueError(
                    f"table {self.name!r}: dim is {self.dim}, where 1 to {DIM_MAX} are possible."
                )
            self.made()
        except (ValueError, TypeError, MemoryError) as error:
            raise InvalidInput(str(error)) from None
        return self

    def made(self, rows_max: int = 0) -> Table:
        """An empty table. rows_max: less than its own, for a trial. Raises what
        clipper_core.params.embedding raises."""
        return Table(
            self.name,
            self.dim,
            optimizer=Optimizer(self.optimizer, **self.optimizer_settings),
            initializer=Initializer(self.initializer, **self.initializer_settings),
            seed=self.seed,
            rows_max=rows_max or self.rows_max,
            evicts=self.evicts,
            admit_after=self.admit_after,
        )


def optimizer_in(text: str) -> tuple[str, dict[str, float]]:
    """`adam rate=0.001 beta1=0.9` -> its name and settings. Raises ConfigError."""
    name, *pairs = text.split() or [""]
    try:
        settings = {key: float(value) for key, _, value in (pair.partition("=") for pair in pairs)}
        Optimizer(name, **settings)
    except (ValueError, TypeError) as error:
        hint = "Write a name and settings: `adam rate=0.001`."
        raise ConfigError(f"params.grpc_optimizer = {text!r}: {error}.", hint=hint) from None
    return name, settings
