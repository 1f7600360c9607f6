"""The rows of tables that a prediction for an input depends on, from `deploy(reads=)`.

Either columns of the input by table, {"users": 0, "items": [1, 2]}; or a function that
returns {"users": ids} for an input, kept as "module:function".
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput
from clipper.serving.models.given_functions import function_named, name_of
from clipper.types import InputType, Model, UserValue
from clipper_container.errors import fails_call_only

Ids = npt.NDArray[np.int64]
IDS_MAX = 1024  # of one input
Declared = dict[str, tuple[int, ...]] | str
Reads = Callable[[UserValue], dict[str, Ids] | None]


class Watches(Protocol):
    """Interface that reports moved rows: `clipper.params.client.row_watcher.Watching`."""

    def watched(
        self,
        reads: Reads,
        tolerance: float,
        made_max: int,
        forget: Callable[[tuple[int, int], int], object],
        /,
    ) -> object:
        """Start to watch the rows that predictions read. forget: called with keys that changed."""

    def remove(self, watched: object, /) -> None:
        """End a watch."""


_HINT = (
    'Write reads={"users": 0, "items": [1, 2]}: columns of the input, by table; or reads=FUNCTION,'
    " of an input."
)


def declaration_of(name: str, reads: object) -> Declared:
    """Return `reads` as a model's record keeps it. Raises InvalidInput."""
    if callable(reads):
        return name_of(reads)
    if isinstance(reads, str) and reads.count(":") == 1:
        return reads
    if not isinstance(reads, Mapping) or not reads:
        raise InvalidInput(f"model {name!r}: reads is {reads!r:.100}.", hint=_HINT)
    found = {str(table): (at,) if isinstance(at, int) else tuple(at) for table, at in reads.items()}
    if not all(
        at and all(isinstance(one, int) and one >= 0 for one in at) for at in found.values()
    ):
        raise InvalidInput(f"model {name!r}: reads is {reads!r:.100}.", hint=_HINT)
    return found


def check_reads(model: Model) -> None:
    """Check that `reads`, the tables and the input of a record fit together. Raises
    InvalidInput.
    """
    what = f"model {model.name!r}"
    if not model.reads:
        if model.tolerance:
            raise InvalidInput(
                f"{what} has a tolerance, and does not declare what it reads.", hint=_HINT
            )
        return
    if not 0 <= model.tolerance < np.inf:
        raise InvalidInput(
            f"{what}: tolerance is {model.tolerance!r}: how far a row may move, a share of its"
            " norm; from 0 on."
        )
    if model.similar is not None:
        raise InvalidInput(
            f"{what} reads tables: inputs that are only similar read other rows.",
            hint="Leave out similar.",
        )
    if model.input.tensors:
        raise InvalidInput(
            f"{what} reads tables by columns of its input, and takes named tensors.",
            hint="Leave out reads.",
        )
    ids_of(model.reads)
    columns = (
        [at for each in model.reads.values() for at in each]
        if isinstance(model.reads, dict)
        else []
    )
    if columns and (model.input.dtype in ("str", "bytes") or beyond(model.input, max(columns))):
        raise InvalidInput(
            f"{what} reads column {max(columns)} of an input that is {model.input}.", hint=_HINT
        )


def beyond(input: InputType, column: int) -> bool:
    """Return whether a column is not in an input of this type."""
    return input.dtype != "any" and not input.variable and column >= int(np.prod(input.shape))


def ids_of(declared: Declared) -> Reads:
    """Return a function from an input to the ids of the rows that its prediction depends on.

    That function returns None where it fails, or where the ids are too many. Raises InvalidInput
    when the user's function is not found.
    """
    if isinstance(declared, str):
        function = function_named(declared, "reads")
        return lambda x: _by_function(function, x)
    columns = {table: np.array(at) for table, at in declared.items()}
    return lambda x: _by_columns(columns, x)


def _by_columns(columns: Mapping[str, npt.NDArray[np.intp]], x: object) -> dict[str, Ids] | None:
    flat = np.asarray(x).reshape(-1)
    try:
        found = {table: as_ids(flat[at]) for table, at in columns.items()}
    except (IndexError, ValueError):
        return None
    return found


def _by_function(function: Callable[..., UserValue], x: UserValue) -> dict[str, Ids] | None:
    try:
        found = {
            str(table): as_ids(np.atleast_1d(np.asarray(ids))) for table, ids in function(x).items()
        }
    except BaseException as error:  # the user's own: whatever it raises, the rows are not known
        if not fails_call_only(error):
            raise
        return None
    return found if sum(ids.size for ids in found.values()) <= IDS_MAX else None


def as_ids(values: np.ndarray) -> Ids:
    """Return the values as ids. Raises ValueError for what is no whole number."""
    if values.dtype.kind in "iu":
        return (
            values.astype(np.int64, copy=False)
            if values.dtype != np.uint64
            else values.view(np.int64)
        )
    with np.errstate(invalid="ignore"):
        ids = np.asarray(values).astype(np.int64)
    if values.ndim != 1 or not np.array_equal(ids, values):
        raise ValueError("no ids")
    return ids
