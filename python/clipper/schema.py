"""Schemas: the named input and output tensors of a model. `clipper_container.schema` defines them,
for the server and for containers.
"""

from clipper_container.model import UserValue
from clipper_container.schema import (
    FREE,
    NAME_MAX,
    RANK_MAX,
    ROW_BYTES_MAX,
    TENSORS_MAX,
    Array,
    Column,
    InvalidTensor,
    Records,
    Schema,
    Tensors,
    TensorSpec,
    by_column,
    is_named,
    type_text,
)

__all__ = [
    "FREE",
    "NAME_MAX",
    "RANK_MAX",
    "ROW_BYTES_MAX",
    "TENSORS_MAX",
    "Array",
    "Column",
    "InvalidTensor",
    "Records",
    "Schema",
    "TensorSpec",
    "Tensors",
    "UserValue",
    "by_column",
    "is_named",
    "type_text",
]
