"""The specification of a parameter table, as people, workers and shards exchange it: its fields,
each declared once."""

from functools import partial
from typing import Annotated, Final

import msgspec

from clipper.spec.field import field, one_of

DIM_MAX: Final = 1 << 16
ROWS_MAX: Final = 1 << 32
ROW_BYTES: Final = 24  # of a row beside its weights and state
COUNT_MAX: Final = (1 << 63) - 1  # of seeds, seconds and quotas
OPTIMIZERS: Final = (
    *("sgd", "momentum", "nesterov", "adagrad", "adam", "amsgrad", "ftrl", "adamw", "rmsprop"),
    *("lion", "rowwise_adagrad"),
)
INITIALIZERS: Final = ("zeros", "constant", "uniform", "normal", "truncated_normal", "glorot")
# what can be changed while a table is trained
ALTERABLE: Final = (
    "optimizer_settings",
    "rows_max",
    "evicts",
    "expire_s",
    "quota_rows",
    "quota_bytes",
)
_ADMITTED_MAX: Final = 255  # pushes
_field = partial(field, without={"file": "a model or a command makes a table"})
_Numbers = dict[str, float]


class TableSpec(msgspec.Struct, frozen=True):
    """An embedding table: f32[dim] for each 64-bit id. All shards have the same specification.

    Its fields are the arguments of `clipper.params.TableSpec`, the body of its creation and options
    of `clipper table create`. The first value of a row depends on (seed, name, id) only. The
    optimizer's state is f32, whatever weights are stored as. A push that would make more rows than
    a quota is refused as a whole (QuotaExceeded).
    """

    name: Annotated[str, _field("name of the table", names={"command": "TABLE"})]
    dim: Annotated[
        int,
        _field("width of a row", "weights", ge=1, le=DIM_MAX, names={"command": "DIM"}),
    ]
    optimizer: Annotated[
        str, _field("rule by which a push changes rows, as `adam`", wire=one_of(*OPTIMIZERS))
    ] = "adagrad"
    optimizer_settings: Annotated[
        dict[str, float],
        _field(
            "numbers of the optimizer, as `rate`; a change leaves those that it does not name",
            wire=_Numbers | None,
            python="Mapping[str, float] | None",
            names={"command": "--set"},
        ),
    ] = {}
    initializer: Annotated[
        str,
        _field("distribution of the first values of a row, as `zeros`", wire=one_of(*INITIALIZERS)),
    ] = "uniform"
    initializer_settings: Annotated[
        dict[str, float],
        _field(
            "numbers of the initializer, as `scale`",
            wire=_Numbers | None,
            python="Mapping[str, float] | None",
            names={"command": "--set-initializer"},
        ),
    ] = {}
    seed: Annotated[
        int, _field("of the first values, beside the table's name and the id", ge=0, le=COUNT_MAX)
    ] = 0
    rows_max: Annotated[
        int, _field("rows of one shard, above which new ids are refused", "rows", ge=1, le=ROWS_MAX)
    ] = ROWS_MAX - 1
    evicts: Annotated[
        bool, _field("a new row of a full table replaces the oldest one, instead of being refused")
    ] = False
    admit_after: Annotated[
        int, _field("number of pushes after which an id gets a row", ge=1, le=_ADMITTED_MAX)
    ] = 1
    expire_s: Annotated[
        int,
        _field(
            "time after which rows that were neither pulled nor pushed are removed; 0: never",
            "s",
            ge=0,
            le=COUNT_MAX,
        ),
    ] = 0
    quota_rows: Annotated[
        int,
        _field(
            "rows of one shard, above which a whole push is refused; 0: no quota",
            "rows",
            ge=0,
            le=COUNT_MAX,
        ),
    ] = 0
    quota_bytes: Annotated[
        int, _field("the same in bytes of one shard; 0: no quota", "bytes", ge=0, le=COUNT_MAX)
    ] = 0
    dtype: Annotated[
        str,
        _field(
            "type of stored weights: `f32`, `f16`, `bf16` or `i8`; all but the first are rounded at"
            " random, without bias",
            wire=one_of("f32", "f16", "bf16", "i8"),
        ),
    ] = "f32"

    def row_quota(self, nbytes: int) -> int:
        """Return the rows that the quotas allow on one shard; 0: any. nbytes: of a row."""
        by_bytes = self.quota_bytes // (nbytes + ROW_BYTES)
        rows = [self.quota_rows] if self.quota_rows else []
        return min([*rows, max(1, by_bytes)] if self.quota_bytes else rows, default=0)

    @property
    def corrects_bias(self) -> bool:
        """Tell whether a step of the optimizer depends on the number of steps before it."""
        return self.optimizer in ("adam", "amsgrad", "adamw")
