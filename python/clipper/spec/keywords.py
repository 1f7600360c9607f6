"""Keywords of functions that take a specification, for editors and type checkers.

`python tests/test_docs.py` writes this module from the fields of the specifications.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from clipper.schema import Schema
from clipper.spec.model import Reads
from clipper.types import Batching, InputType, Similar, UserValue


class StreamKeywords(TypedDict, total=False):
    """Keywords of ClipperServer.stream()."""

    source: str
    answers: str
    refused: str
    group: str
    feedback: str
    in_flight_max: int
    patience_s: float
    claim_s: float
    deliveries_max: int
    answers_max: int
    refused_max: int
    ids_max: int


class ModelStreamKeywords(TypedDict, total=False):
    """Keywords of ClipperServer.models_from()."""

    stream: str
    group: str
    keep: int
    trusted: Sequence[str]
    bytes_max: int
    replicas: int
    claim_s: float


class StreamMembers(TypedDict, total=False):
    """Members of the body of a new stream over HTTP."""

    app: str
    url: str
    source: str
    answers: str
    refused: str
    group: str
    feedback: str
    in_flight_max: int
    patience_s: float
    claim_s: float
    deliveries_max: int
    answers_max: int
    refused_max: int
    ids_max: int


class ModelStreamMembers(TypedDict, total=False):
    """Members of the body of a new stream of models over HTTP."""

    url: str
    stream: str
    group: str
    keep: int
    trusted: Sequence[str]
    bytes_max: int
    replicas: int
    claim_s: float


class TableKeywords(TypedDict, total=False):
    """Settings of a new table, beside its name and dim."""

    optimizer: str
    optimizer_settings: Mapping[str, float] | None
    initializer: str
    initializer_settings: Mapping[str, float] | None
    seed: int
    rows_max: int
    evicts: bool
    admit_after: int
    expire_s: int
    quota_rows: int
    quota_bytes: int
    dtype: str


class TableAlterations(TypedDict, total=False):
    """Settings of a table that can be changed."""

    optimizer_settings: Mapping[str, float] | None
    rows_max: int
    evicts: bool
    expire_s: int
    quota_rows: int
    quota_bytes: int


class ModelKeywords(TypedDict, total=False):
    """Keywords of ClipperServer.deploy()."""

    command: str | Sequence[str] | None
    folder: str
    trusted: Sequence[str]
    sha256: str
    code: str | Sequence[str]
    version: int | None
    replicas: int | tuple[int, int] | None
    input: str | InputType | Mapping[str, str] | None
    output: str | Mapping[str, str]
    inputs: Mapping[str, str] | None
    outputs: Mapping[str, str] | None
    schema: str | Schema | None
    batching: str | Mapping[str, object] | Batching | None
    cache: bool
    similar: Similar | Mapping[str, object] | None
    finite: bool
    reads: Reads | None
    tolerance: float
    tables: Mapping[str, Mapping[str, UserValue]] | None
    retry_singly: bool
    row_by_row: bool
    max_concurrency: int
    calls: Sequence[str]
    warmup: object
    requirements: str | os.PathLike[str] | Sequence[str]
    python: str
    env: Mapping[str, str] | None
    deployer: str
    memory_mib: int
    cpus: float
    gpus: str


class SentModelKeywords(TypedDict, total=False):
    """Keywords of the client's deploy()."""

    command: str | Sequence[str] | None
    folder: str
    trusted: Sequence[str]
    sha256: str
    code: str | Sequence[str]
    version: int | None
    replicas: int | tuple[int, int] | None
    input: str | InputType | Mapping[str, str] | None
    output: str | Mapping[str, str]
    inputs: Mapping[str, str] | None
    outputs: Mapping[str, str] | None
    schema: str | Schema | None
    batching: str | Mapping[str, object] | Batching | None
    cache: bool
    similar: Similar | Mapping[str, object] | None
    finite: bool
    reads: Reads | None
    tolerance: float
    tables: Mapping[str, Mapping[str, UserValue]] | None
    retry_singly: bool
    row_by_row: bool
    max_concurrency: int
    calls: Sequence[str]
    warmup: object
    requirements: str | os.PathLike[str] | Sequence[str]
    python: str
    env: Mapping[str, str] | None
    deployer: str
    memory_mib: int
    cpus: float
    gpus: str


class ModelMembers(TypedDict, total=False):
    """Members of the body of a deployment over HTTP."""

    command: str | Sequence[str] | None
    folder: str
    data: bytes
    kind: str
    trusted: Sequence[str]
    sha256: str
    code: str | Sequence[str]
    version: int | None
    replicas: int | tuple[int, int] | None
    input: str | InputType | Mapping[str, str] | None
    output: str | Mapping[str, str]
    inputs: Mapping[str, str] | None
    outputs: Mapping[str, str] | None
    schema: str | Schema | None
    batching: str | Mapping[str, object] | Batching | None
    cache: bool
    similar: Similar | Mapping[str, object] | None
    finite: bool
    reads: Reads | None
    tolerance: float
    tables: Mapping[str, Mapping[str, UserValue]] | None
    retry_singly: bool
    row_by_row: bool
    max_concurrency: int
    calls: Sequence[str]
    warmup: object
    requirements: str | os.PathLike[str] | Sequence[str]
    python: str
    env: Mapping[str, str] | None
    deployer: str
    memory_mib: int
    cpus: float
    gpus: str


class ApplicationKeywords(TypedDict, total=False):
    """Keywords of ClipperServer.app() and of the client's set_application()."""

    slo_ms: float
    default: UserValue
    input: str | InputType
    policy: str
    confidence_min: float
    roles: Mapping[str, str] | Sequence[str] | None
    missing: Literal["mean", "skip"]
    decider: str
    coverage: float | None
    context_table: str
    output: str
    priority: int
