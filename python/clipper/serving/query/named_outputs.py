"""Named outputs of models: which of them an application combines, and which a query selects."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clipper.errors import DoesNotFit, InvalidInput
from clipper.schema import Column, InvalidTensor, Tensors
from clipper.types import VersionedModel
from clipper_core.engine.model import Model as CoreModel


class NamedOutputs(Protocol):
    """The part of a resolved application that lists its outputs."""

    @property
    def name(self) -> str:
        """The name of the application; empty for a query that names its models."""

    @property
    def cores(self) -> Mapping[VersionedModel, CoreModel]:
        """The handles of its models."""

    @property
    def output_name(self) -> str:
        """The output that its policy combines; empty for all."""


def outputs_of(cores: Iterable[CoreModel]) -> Tensors | None:
    """Return the named outputs of the first model that has some; None without any."""
    for core in cores:
        outputs: Tensors | None = core.outputs
        if outputs is not None:
            return outputs
    return None


def chosen_outputs(resolved: NamedOutputs, names: Sequence[str]) -> tuple[str, ...]:
    """Return the outputs that a query selects, in the order of the model. Raises InvalidInput for
    an unknown one, and for a model without named outputs.
    """
    outputs = None if resolved.output_name else outputs_of(resolved.cores.values())
    if outputs is None:
        whose = f"application {resolved.name!r}" if resolved.name else "the model"
        raise InvalidInput(
            f"outputs={list(names)}: {whose} has one output without a name.",
            hint="Leave `outputs` out.",
        )
    if isinstance(names, str):
        raise InvalidInput(f"outputs={names!r}: give a list of names.")
    return outputs.select(names)


def only(output: object, names: tuple[str, ...]) -> object:
    """Return these of named outputs; anything else as it is."""
    if not isinstance(output, Mapping):
        return output
    return {name: output[name] for name in names if name in output}


def check_output(
    name: str, output: str, default: object, cores: Mapping[VersionedModel, CoreModel]
) -> None:
    """Check the output that an application combines, and its default.

    Raises InvalidInput for a name that a model does not have, for several models with named outputs
    without one, and for a default of other tensors; DoesNotFit for a model of one output.
    """
    for id, core in cores.items():
        if core.outputs is None:
            continue
        if output:
            core.outputs.select([output])
        elif len(cores) > 1:
            raise InvalidInput(
                f"application {name!r} links {len(cores)} models, and {id} has the outputs"
                f" {core.outputs}.",
                hint="Name the one that its policy combines: output="
                f"{next(iter(core.outputs.by_name))!r}.",
            )
        elif isinstance(default, dict):
            core.outputs.arrays(default)
    if output and cores and outputs_of(cores.values()) is None:
        raise DoesNotFit(
            f"output={output!r} of application {name!r}: its models have one output without a"
            " name.",
            hint="Leave `output` out, or deploy the model with outputs={...}.",
        )


def default_of(default: object, cores: Mapping[VersionedModel, CoreModel]) -> object:
    """Return the default of an application, of named outputs as arrays of the declared types."""
    outputs = outputs_of(cores.values())
    if outputs is None or not isinstance(default, dict):
        return default
    try:
        return outputs.arrays(default)
    except InvalidTensor:
        return default


def with_default(
    columns: dict[str, Column], is_default: NDArray[np.bool_], default: object
) -> dict[str, Column]:
    """Return columns of named outputs with the application's default in the rows that need it; None
    is NaN among floats, and otherwise makes a column a list.
    """
    if not is_default.any():
        return columns
    filled = {}
    for name, column in columns.items():
        value = default.get(name) if isinstance(default, dict) else None
        filled[name] = _filled(column, is_default, value)
    return filled


def _filled(column: Column, is_default: NDArray[np.bool_], value: object) -> Column:
    if isinstance(column, np.ndarray):
        filler = np.asarray(np.nan if value is None and column.dtype.kind == "f" else value)
        if filler.dtype != object and filler.shape in ((), column.shape[1:]):
            column = column.copy()
            column[is_default] = filler
            return column
    return [
        value if instead else row for row, instead in zip(column, is_default.tolist(), strict=True)
    ]


def columns_of(rows: Sequence[object], outputs: Tensors) -> dict[str, Column]:
    """Return rows of named outputs as columns: an array if all rows are there and have one shape,
    else a list with None for a missing row.
    """
    columns: dict[str, Column] = {}
    for spec in outputs.specs:
        column = [row[spec.name] if isinstance(row, Mapping) else None for row in rows]
        stacks = not spec.is_text and not spec.is_ragged and all(v is not None for v in column)
        columns[spec.name] = np.stack([*map(np.asarray, column)]) if stacks and column else column
    return columns
