"""The specification of a model: the fields of a deployment, each declared once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Literal, get_args

import msgspec

from clipper.spec.field import Door, field
from clipper.types import (
    CONCURRENCY_DEFAULT,
    CONCURRENCY_MAX,
    VERSION_MAX,
    Batching,
    Similar,
    UserValue,
)

Column = Annotated[int, msgspec.Meta(ge=0)]
ReadColumns = Mapping[str, int | Sequence[int]]
Reads = ReadColumns | str | Callable[..., UserValue]

_REPLICAS_MAX: Final = 1024
_Count = Annotated[int, msgspec.Meta(ge=0, le=_REPLICAS_MAX)]
# `tuple[int, int]` beside a number with bounds ends the process in msgspec 0.22
_Bounds = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=2, max_length=2)]
_MODES: Final[tuple[str, ...]] = get_args(get_args(Batching.__annotations__["mode"])[0])
_SENT: Final[Mapping[Door, str]] = {
    "python": "the model itself, or its path, is given",
    "client": "the model's path is given, and the client sends the file",
    "file": "the target is its path",
    "command": "TARGET is its path, and the command sends the file",
}
_MODEL: Final[Mapping[Door, str]] = {
    "python": "model",
    "http": "model",
    "client": "model",
    "command": "TARGET",
}
_BY_SCHEMA: Final[Mapping[Door, str]] = {"command": "--schema states both sides"}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model as it is asked for: `[models.NAME]` of a file, the body of a deployment,
    the keywords of ClipperServer.deploy(). What is stored is `clipper.types.Model`."""

    target: Annotated[
        str,
        field(
            "what it runs: `module:attribute`, a file, a folder of MLflow or a URL; empty in a"
            " file: its containers are started elsewhere",
            python="object",
            names=_MODEL,
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...],
        field(
            'program that is the container, instead of a target, as `["java", "-jar", "svm.jar"]`;'
            " for a client it must be one of server.commands",
            python="str | Sequence[str] | None",
        ),
    ] = ()
    folder: Annotated[str, field("folder in which the command runs; empty: the current one")] = ""
    data: Annotated[bytes, field("bytes of a model's file, instead of a model", without=_SENT)] = (
        b""
    )
    kind: Annotated[
        str,
        field(
            "kind of `data`: `onnx`, `skops`, `xgboost`, `lightgbm`, `catboost`, `torchscript` or"
            " `transformers`",
            without=_SENT,
        ),
    ] = ""
    trusted: Annotated[
        tuple[str, ...],
        field(
            "types that a .skops file may use, beyond those that skops trusts",
            python="Sequence[str]",
            names={"command": "--trust"},
        ),
    ] = ()
    sha256: Annotated[str, field("in hex, what the content of a URL must have")] = ""
    code: Annotated[
        tuple[str, ...],
        field(
            "folders or files that the target imports, besides its own folder; in a file, relative"
            " to that file's folder",
            python="str | Sequence[str]",
        ),
    ] = ()
    version: Annotated[
        int,
        field(
            "version number; 0: the next one",
            ge=0,
            le=VERSION_MAX,
            wire=int | None,
            python="int | None",
        ),
    ] = 0
    replicas: Annotated[
        int | tuple[int, int],
        field(
            "containers to start; two numbers are bounds, between which the load decides",
            "replicas",
            ge=0,
            le=_REPLICAS_MAX,
            wire=_Count | _Bounds | None,
            python="int | tuple[int, int] | None",
        ),
    ] = 1
    replicas_max: Annotated[
        int,
        field(
            "upper bound of autoscaling, beside a number of replicas; 0: none",
            "replicas",
            ge=0,
            le=_REPLICAS_MAX,
            without=dict.fromkeys(
                ("python", "http", "client", "command"), "replicas takes both bounds"
            ),
        ),
    ] = 0
    input: Annotated[
        str,
        field(
            "type of one input, as `f64[64]`, or of named tensors as JSON; empty: as the container"
            " reports, or as the first query has it",
            wire=str | None,
            python="str | InputType | Mapping[str, str] | None",
        ),
    ] = ""
    output: Annotated[
        str,
        field(
            "type of one output, in the same forms; empty: as the container reports",
            python="str | Mapping[str, str]",
            names={"command": "--output-type"},
        ),
    ] = ""
    inputs: Annotated[
        dict[str, str],
        field(
            'types of named input tensors, instead of `input`: `{ age = "f64", plan = "str" }`',
            wire=dict[str, str] | None,
            python="Mapping[str, str] | None",
            without=_BY_SCHEMA,
        ),
    ] = {}
    outputs: Annotated[
        dict[str, str],
        field(
            "types of named output tensors, instead of `output`",
            wire=dict[str, str] | None,
            python="Mapping[str, str] | None",
            without=_BY_SCHEMA,
        ),
    ] = {}
    schema: Annotated[
        str,
        field(
            "both sides as one text, `f64[64] -> f64`, instead of `input` and `output`",
            wire=str | None,
            python="str | Schema | None",
        ),
    ] = ""
    batching: Annotated[
        Batching | Mapping[str, UserValue] | str | None,
        field(
            f"a mode ({', '.join(f'`{mode}`' for mode in _MODES)}), or those keys of [batching]"
            " that differ",
            wire=str | dict[str, UserValue] | None,
            python="str | Mapping[str, object] | Batching | None",
        ),
    ] = None
    cache: Annotated[bool, field("cache this model's predictions")] = True
    similar: Annotated[
        Similar | None,
        field(
            "near inputs share predictions: those within cells of this `width`, found by random"
            " `projections`",
            python="Similar | Mapping[str, object] | None",
        ),
    ] = None
    finite: Annotated[bool, field("refuse inputs with NaN or infinities")] = False
    reads: Annotated[
        dict[str, Column | tuple[Column, ...]] | str,
        field(
            "rows that a prediction uses: input columns by table; it is cached until those rows"
            " change",
            wire=dict[str, Column | tuple[Column, ...]] | None,
            python="Reads | None",
        ),
    ] = {}
    tolerance: Annotated[
        float,
        field(
            "relative change of a row, by norm, after which cached predictions are dropped",
            "share",
            ge=0,
            le=1_000_000,
        ),
    ] = 0.0
    tables: Annotated[
        dict[str, dict[str, UserValue]],
        field(
            "parameter tables that it uses, by name: `{ factors = { dim = 8 } }`; they are made"
            " where they do not exist",
            wire=dict[str, dict[str, UserValue]] | None,
            python="Mapping[str, Mapping[str, UserValue]] | None",
            names={"command": "--table"},
        ),
    ] = {}
    retry_singly: Annotated[bool, field("retry the rows of a failed batch one by one")] = False
    row_by_row: Annotated[bool, field("the model takes one input at a time, not a batch")] = False
    max_concurrency: Annotated[
        int,
        field(
            "of an async model: how many rows (with row_by_row) or batches each container works at"
            " at the same time",
            ge=1,
            le=CONCURRENCY_MAX,
        ),
    ] = CONCURRENCY_DEFAULT
    calls: Annotated[
        tuple[str, ...],
        field(
            "what the model may call while it evaluates a batch: `app:NAME`, `model:NAME` or"
            " `model:NAME:VERSION`",
            python="Sequence[str]",
            names={"command": "--call"},
        ),
    ] = ()
    warmup: Annotated[
        bool | list[UserValue] | None,
        field(
            "rows that a container runs before it is ready; true: generated from the input type,"
            " false: none; not given: server.warmup",
            python="object",
        ),
    ] = None
    requirements: Annotated[
        tuple[str, ...],
        field(
            'pip requirements of an environment of its own, as `["numpy"]` or `["-r'
            ' requirements.txt"]`; empty: none',
            python="str | os.PathLike[str] | Sequence[str]",
        ),
    ] = ()
    python: Annotated[
        str,
        field(
            "Python of that environment: `3.12`, or the path of an interpreter; empty: the server's"
        ),
    ] = ""
    env: Annotated[
        dict[str, str],
        field(
            'environment variables of its containers, besides the usual ones: `{ MODE = "fast" }`;'
            " they are stored with the model and shown, so they are no place for secrets",
            wire=dict[str, str] | None,
            python="Mapping[str, str] | None",
        ),
    ] = {}
    deployer: Annotated[
        Literal["", "process", "docker", "podman"],
        field("what runs its containers; empty: server.deployer", python="str"),
    ] = ""
    memory_mib: Annotated[
        int,
        field(
            "memory limit of each container; of a process: docs/operating.md, Limits; 0: none",
            "MiB",
            ge=0,
            le=1 << 30,
            names={"command": "--memory-mib --memory"},
        ),
    ] = 0
    cpus: Annotated[
        float,
        field("cores of each container; 0: no limit", "cores", ge=0, le=4096),
    ] = 0.0
    gpus: Annotated[
        str,
        field(
            "GPUs of each container of Docker or podman: `all`, a number, or ids as `0,2`; empty:"
            " none"
        ),
    ] = ""

    @property
    def bounds(self) -> int | tuple[int, int]:
        """The replicas: a number, or (least, most)."""
        if self.replicas_max and isinstance(self.replicas, int):
            return self.replicas, self.replicas_max
        return self.replicas
