"""Keywords of functions that take a specification, for editors and type checkers.

`python tests/test_docs.py` writes this module from the fields of the specifications.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from clipper.schema import Schema
from clipper.spec.model import Reads
from clipper.types import Batching, InputType, Similar, UserValue


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
    warmup: object
    requirements: str | os.PathLike[str] | Sequence[str]
    python: str
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
    warmup: object
    requirements: str | os.PathLike[str] | Sequence[str]
    python: str
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
    warmup: object
    requirements: str | os.PathLike[str] | Sequence[str]
    python: str
    deployer: str
    memory_mib: int
    cpus: float
    gpus: str
