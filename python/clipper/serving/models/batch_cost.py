"""Batches by cost: what `batching.cost` of a model means for its rows, limits and warm-up."""

import logging
import math
from collections.abc import Mapping, Sequence

import msgspec

from clipper.errors import InvalidInput
from clipper.metrics.stats import ModelStats
from clipper.serving.models.given_functions import Function, function_named, name_of
from clipper.types import Batching, InputType, UserValue, cost_problem

Given = str | Mapping[str, UserValue] | Batching | None  # as `deploy(batching=)` takes it
_log = logging.getLogger(__name__)
_BUILT_IN = ("bytes", "length")
_PARTS = 1000  # the core counts a function's costs in thousandths
_HINT = 'Write batching={"cost": "length", "padded": True}, or "bytes", or a function of an input.'


def storable(batching: Given) -> Given:
    """Return the batching of a deployment with a cost function replaced by its name."""
    if isinstance(batching, Batching) and callable(batching.cost):
        return msgspec.structs.replace(batching, cost=name_of(batching.cost))
    if isinstance(batching, Mapping) and callable(batching.get("cost")):
        return {**batching, "cost": name_of(batching["cost"])}
    return batching


def check_batching(what: str, batching: Batching) -> Batching:
    """Check that the settings of cost fit together, and return them.

    what: whose batching it is, for messages. Raises InvalidInput.
    """
    if why := cost_problem(batching):
        raise InvalidInput(f"batching of {what}: {why}", hint=_HINT)
    if _parts(batching) != 1:
        function_named(batching.cost, f"the batching cost of {what},")
    return batching


def row_cost(batching: Batching, input: InputType) -> str | Function:
    """Return what the core needs to know the cost of a row: empty if all rows cost the same."""
    if batching.cost in _BUILT_IN:
        return batching.cost if input.variable or input.dtype in ("any", "str", "bytes") else ""
    if _is_length(batching.cost):
        return batching.cost
    try:
        return function_named(batching.cost, "batching cost") if batching.cost else ""
    except InvalidInput as error:
        _log.error("rows are counted, and not their cost: %s", error)
        return ""


def _is_length(cost: str) -> bool:
    """Return whether it is the length of a named tensor."""
    return cost.startswith("length:")


def _parts(batching: Batching) -> int:
    """Return the units of the core in one of the user."""
    cost = batching.cost
    return 1 if not cost or cost in _BUILT_IN or _is_length(cost) else _PARTS


def cost_limit(batching: Batching) -> int:
    """Return the limit of a batch's cost in the units of the core; 0: no bound."""
    return max(1, int(batching.cost_max * _parts(batching))) if batching.cost_max else 0


def shown_costs(
    batching: Batching, counted: Mapping[str, float], keys: Sequence[str]
) -> dict[str, float]:
    """Return these costs, which the core counted, in the units of the user."""
    return {key: counted[key] / _parts(batching) for key in keys}


def rows_limit(batching: Batching, input: InputType) -> int:
    """Return the limit of a batch's rows: with cost_max where all rows cost the same, too."""
    if not batching.cost_max or batching.cost not in _BUILT_IN or row_cost(batching, input):
        return batching.size_max
    one = math.prod(input.shape) * (_item_bytes(input) if batching.cost == "bytes" else 1)
    return max(1, min(batching.size_max, int(batching.cost_max // max(one, 1))))


def _item_bytes(input: InputType) -> int:
    return 1 if input.dtype in ("any", "bool", "str", "bytes") else int(input.dtype[1:]) // 8


def with_costs(
    timings: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    batching: Batching,
    input: InputType,
) -> list[tuple[int, int, float]]:
    """Return the timings of a warm-up with the cost of each batch; 0 where it is not known.

    lengths: of the rows that the batches repeat, in elements; of str and bytes in bytes.
    """
    if not lengths or batching.cost not in _BUILT_IN:
        return [(rows, time_us, 0.0) for rows, time_us in timings]
    each = [max(1, n * (_item_bytes(input) if batching.cost == "bytes" else 1)) for n in lengths]
    found = []
    for rows, time_us in timings:
        costs = (each * -(-rows // len(each)))[:rows]
        cost = rows * max(costs) if batching.padded else sum(costs)
        found.append((rows, time_us, float(cost)))
    return found


def padding_of(row: ModelStats) -> float | None:
    """Return the share of padding in the batches of a model's statistics; None: not measured."""
    padded = row.get("cost_padded")
    return 1.0 - (row.get("cost") or 0.0) / padded if padded else None
