"""Values that travel between modules: frozen, with no behaviour beyond their own notation.

Invalid values raise InvalidInput, which is a ValueError.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from clipper.errors import InvalidInput
from clipper.schema import Tensors, TensorSpec, is_named
from clipper.schema import UserValue as UserValue
from clipper.version import VERSION as VERSION
from clipper_core.results.answer import Answer as Answer
from clipper_core.results.part_stream import AnswerPart as AnswerPart
from clipper_core.results.part_stream import PartsFuture as PartsFuture

# -- names

NAME_GRAMMAR = "[a-z0-9][a-z0-9._-]{0,127}"
_NAME = re.compile(NAME_GRAMMAR)


def check_name(name: str, noun: str = "name") -> str:
    """Return `name` if it may name a model or an application; else raise InvalidInput. Names end up
    in labels and URLs."""
    if not isinstance(name, str):
        raise InvalidInput(f"{noun} name must be a str, not {type(name).__name__}.")
    if _NAME.fullmatch(name):
        return name
    shown = repr(name if len(name) <= 64 else name[:61] + "...")
    if len(name) > 128:
        why = f"it has {len(name)} characters, at most 128 are allowed"
    elif not name:
        why = "it is empty"
    elif bad := next((c for c in name if not re.fullmatch("[a-z0-9._-]", c)), ""):
        why = f"{bad!r} is not allowed"
    else:
        why = f"it starts with {name[0]!r}"
    rule = "Use lower-case letters, digits, '.', '_' and '-', starting with a letter or digit."
    raise InvalidInput(f"bad {noun} name {shown}: {why}. {rule}")


# `package.module:Class(...)`: the user's own
OWN_CLASS = r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)(?:\((.*)\))?"


def check_policy(text: str) -> str:
    """Return `text` if it has the form of a policy: a name, or `module:Class`, and perhaps settings
    in parentheses; else raise InvalidInput."""
    if isinstance(text, str) and re.fullmatch(OWN_CLASS, text.strip(), re.S):
        return text
    name, open, rest = text.partition("(") if isinstance(text, str) else (text, "", "")
    check_name(name.strip() if isinstance(name, str) else name, "policy")
    if open and not rest.rstrip().endswith(")"):
        raise InvalidInput(
            f"bad policy {text[:100]!r}: the parenthesis is not closed. Write exp3(eta=0.05)."
        )
    return text


VERSION_MAX = 2**31 - 1


class VersionedModel(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """A model by name; `version` None means the latest. Notation: `svm`, `svm:3`."""

    name: str
    version: int | None = None

    @classmethod
    def parse(cls, text: "str | VersionedModel") -> "VersionedModel":
        """Return the model of a text such as 'svm' or 'svm:3'. Raises InvalidInput."""
        if isinstance(text, VersionedModel):
            return text
        if not isinstance(text, str):
            raise InvalidInput(
                "a model is named by a str such as 'svm' or 'svm:3', not by a"
                f" {type(text).__name__}."
            )
        name, colon, version = text.partition(":")
        check_name(name, "model")
        if not colon:
            return cls(name)
        if not re.fullmatch("[0-9]{1,10}", version) or not 1 <= int(version) <= VERSION_MAX:
            raise InvalidInput(
                f"bad version in {text[:200]!r}: a version is a whole number from 1, as in"
                f" '{name}:3'."
            )
        return cls(name, int(version))

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}:{self.version}"


# -- input types

DType = Literal[
    "any",
    "bool",
    "u8",
    "i8",
    "u16",
    "i16",
    "u32",
    "i32",
    "u64",
    "i64",
    "f16",
    "f32",
    "f64",
    "str",
    "bytes",
]
DTYPES: tuple[str, ...] = get_args(DType)
RANK_MAX = 4
DIM_MAX = 2**32 - 1

_OTHER_NAMES = {
    "string": "str",
    "strings": "str",
    "object": "any",
    "float": "f64",
    "double": "f64",
    "int": "i64",
    "half": "f16",
    "ints": "i32[*]",
    "floats": "f32[*]",
    "doubles": "f64[*]",
    **{f"float{n}": f"f{n}" for n in (16, 32, 64)},
    **{f"fp{n}": f"f{n}" for n in (16, 32, 64)},
    **{f"int{n}": f"i{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"u{n}" for n in (8, 16, 32, 64)},
}
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[([^\[\]]*)\])?")


class InputType(msgspec.Struct, frozen=True):
    """The type of one input row. Notation: `f64[64]`, `f32[28,28]`, `i32[*]` (any length), `f64` (a
    scalar), `str`, `bytes`, `any`, or named tensors, `{"ids": "i64[*]", "mask": "i64[*]"}`.

    shape: dimensions of a row, () for a scalar and for variable rows.  variable: rows have lengths
    of their own; so have `str` and `bytes` always. The design document's seven types: i32[n],
    f64[n], u8[n], i32[*], f64[*], u8[*], str. tensors: the named tensors; the rest is then the type
    of the record that holds them.
    """

    dtype: DType
    shape: tuple[int, ...] = ()
    variable: bool = False
    tensors: tuple[TensorSpec, ...] = ()

    @classmethod
    def parse(cls, text: "str | Mapping[str, str] | InputType") -> "InputType":
        """Return the type that `text` denotes; numpy's names (`float64[64]`) are understood too. A
        dict of types by name, or its JSON, denotes named tensors. Raises InvalidInput otherwise."""
        if isinstance(text, InputType):
            return text
        if isinstance(text, Mapping) or (isinstance(text, str) and is_named(text)):
            named = Tensors.parse(text)
            if not named.is_fixed:
                return cls("bytes", (), True, named.specs)
            return cls("u8", (named.row_bytes,), False, named.specs)
        if not isinstance(text, str):
            raise InvalidInput(
                f"an input type is a str such as 'f64[64]', not a {type(text).__name__}."
            )
        compact = "".join(text.split()).lower()
        found = _TYPE.fullmatch(_OTHER_NAMES.get(compact, compact))
        dtype, dims = (_OTHER_NAMES.get(found[1], found[1]), found[2]) if found else ("", None)
        if dtype not in DTYPES:
            raise InvalidInput(f"bad input type {text[:64]!r}. {_TYPE_HELP}")
        if dtype in ("str", "bytes", "any"):
            if dims is not None:
                raise InvalidInput(f"bad input type {text[:64]!r}: {dtype!r} takes no shape.")
            return cls(dtype, (), dtype != "any")  # type: ignore[arg-type]  # one of DTYPES by the test above
        variable = dims == "*"
        shape = _parse_shape(text, dims) if dims is not None and not variable else ()
        return cls(dtype, shape, variable)  # type: ignore[arg-type]

    @classmethod
    def infer(cls, value: object) -> "InputType":
        """Return the type of one input: a numpy array or scalar, a (nested) list of numbers, a
        number, str or bytes-like."""
        if isinstance(value, Mapping):
            raise InvalidInput(
                "an input of named tensors needs the model's schema, which is not known yet: deploy"
                " or register the model with inputs=, or load it first."
            )
        if isinstance(value, str):
            return cls("str", (), True)
        if isinstance(value, bytes | bytearray | memoryview):
            return cls("bytes", (), True)
        array = _as_array(value)
        dtype = (
            "bool" if array.dtype == np.bool_ else f"{array.dtype.kind}{array.dtype.itemsize * 8}"
        )
        if dtype not in DTYPES:
            raise InvalidInput(f"no input type for numpy's {array.dtype}. {_TYPE_HELP}")
        if array.ndim > RANK_MAX:
            raise InvalidInput(
                f"an input of {array.ndim} dimensions: at most {RANK_MAX} are possible. Reshape it."
            )
        if 0 in array.shape:
            raise InvalidInput(
                f"no input type for an empty array of shape {array.shape}; name it, as in 'f64[*]'."
            )
        return cls(dtype, array.shape)  # type: ignore[arg-type]

    def agrees_with(self, other: "InputType") -> bool:
        """Return whether rows of one type can be given to the other; `any` agrees with all."""
        return self == other or "any" in (self.dtype, other.dtype)

    @property
    def named(self) -> Tensors | None:
        """The named tensors; None for one tensor without a name."""
        return Tensors(self.tensors) if self.tensors else None

    def __str__(self) -> str:
        if self.tensors:
            return str(Tensors(self.tensors))
        if self.dtype in ("str", "bytes", "any"):
            return self.dtype
        if self.variable:
            return f"{self.dtype}[*]"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" if self.shape else self.dtype


_TYPE_HELP = (
    "Write an element type and the shape of one row: 'f64[64]', 'f32[28,28]', 'i32[*]' (any"
    f" length), 'f64' (a scalar), 'str' or 'bytes'. Element types: {', '.join(DTYPES)}."
)


def _parse_shape(text: str, dims: str) -> tuple[int, ...]:
    parts = dims.split(",")
    if not all(re.fullmatch("[0-9]{1,10}", part) and 1 <= int(part) <= DIM_MAX for part in parts):
        raise InvalidInput(
            f"bad input type {text[:64]!r}: dimensions are whole numbers from 1, or a single '*'."
        )
    if len(parts) > RANK_MAX:
        raise InvalidInput(
            f"bad input type {text[:64]!r}: {len(parts)} dimensions, at most {RANK_MAX} are"
            " possible."
        )
    return tuple(map(int, parts))


def _as_array(value: object) -> "np.ndarray":
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"no input type for this {type(value).__name__}: {error}") from None


ANY = InputType("any")

# -- queries and answers

PRIORITY_USUAL: Final = 2  # of 1, the highest, to 3


Qualifier = str | int | float | bool
Qualifiers = dict[str, Qualifier]  # by name; docs/speculation.md


class PredictionRequest(msgspec.Struct, frozen=True, eq=False):
    """One query: an input for an application, or for candidate models named here.

    input: one row, not a batch.  candidate_models: `svm`, `svm:3`; used instead of the
    application's links. user: whose selection state applies.  slo_ms: overrides the application's.
    salt: another salt, another cache entry. context: f64[d], d up to 32, for contextual policies.
    id: the caller's own name for it; it comes back as `Answer.request_id`. outputs: of named
    outputs only these; empty: all. priority: 1, the highest, to 3; None: the application's.
    """

    input: UserValue
    application: str | None = None
    candidate_models: tuple[str | VersionedModel, ...] = ()
    user: str | None = None
    slo_ms: float | None = None
    salt: int = 0
    context: UserValue = None
    id: str = ""
    outputs: tuple[str, ...] = ()
    priority: int | None = None


class Answers(msgspec.Struct, frozen=True, eq=False):
    """Answers to an array of n queries, row by row.

    outputs: ndarray of shape (n, ...) if they are numbers of one shape that the default fits,
    else a list; of named outputs a dict of these. confidence: f64 (n,). is_default: bool (n,);
    `reasons` counts why. statuses: u8 (n,) per queried model: how its rows ended
    (clipper_core.runtime.status.Status; 1 is OK). latency_us: u32 (n,); 0 for rows that the cache
    had.
    """

    outputs: UserValue
    confidence: NDArray[np.float64]
    is_default: NDArray[np.bool_]
    statuses: dict[VersionedModel, NDArray[np.uint8]] = {}
    reasons: dict[str, int] = {}
    latency_us: NDArray[np.uint32] | None = None
    id: str = ""

    def __len__(self) -> int:
        return len(self.is_default)

    @property
    def models(self) -> tuple[VersionedModel, ...]:
        """The models that were queried."""
        return tuple(self.statuses)

    @property
    def missing(self) -> dict[VersionedModel, int]:
        """Number of rows without an answer in time, by model."""
        return {
            model: int(np.count_nonzero(statuses != 1)) for model, statuses in self.statuses.items()
        }

    def __repr__(self) -> str:
        defaults = int(np.count_nonzero(self.is_default))
        parts = [f"{len(self)} rows", "from " + ",".join(map(str, self.statuses))]
        if defaults:
            parts.append(
                f"{defaults} defaults: "
                + "; ".join(f"{n} x {why}" for why, n in self.reasons.items())
            )
        return f"Answers({', '.join(parts)})"


# -- what the catalog knows


CONCURRENCY_MAX: Final = 8192  # of a container; as in the engine and in the SDK
CONCURRENCY_DEFAULT: Final = 128


class Batching(msgspec.Struct, frozen=True):
    """Batching policy of a replica: when to send, and how many rows."""

    mode: Annotated[
        Literal["aimd", "fit", "quantile", "static"],
        Meta(
            description=(
                "how the batch size is found: additive increase, latency fit, quantile regression,"
                " or fixed"
            )
        ),
    ] = "aimd"
    size_max: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            extra={"unit": "rows"},
            description="never more rows than this in one batch",
        ),
    ] = 512
    step: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            extra={"unit": "rows"},
            description="aimd: rows added after each full batch in time",
        ),
    ] = 2
    backoff: Annotated[
        float,
        Meta(
            ge=0.1,
            le=0.99,
            extra={"unit": "factor"},
            description="aimd: the size's factor after a late batch",
        ),
    ] = 0.9
    delay_us: Annotated[
        int,
        Meta(
            ge=0,
            le=2000,
            extra={"unit": "us"},
            description="how long a batch that is not full waits for more",
        ),
    ] = 0
    budget_share: Annotated[
        float,
        Meta(
            ge=0.05,
            le=1.0,
            extra={"unit": "share"},
            description="share of the SLO that one batch may take",
        ),
    ] = 0.5
    pad: Annotated[bool, Meta(description="static: fill every batch up to size_max")] = False
    cost: Annotated[
        str,
        Meta(
            max_length=500,
            description=(
                "what a row costs: its `bytes`, its `length` (`length:ids`: of a named tensor), or"
                " `module:function` of the input; empty: all rows cost the same"
            ),
        ),
    ] = ""
    cost_max: Annotated[
        float,
        Meta(
            ge=0,
            le=4e9,
            description="never more cost than this in one batch of several rows; 0: no bound",
        ),
    ] = 0.0
    padded: Annotated[
        bool,
        Meta(
            description=(
                "the model fills the rows of a batch up to the longest: a batch costs its rows"
                " times the largest cost, and rows of like cost go together"
            )
        ),
    ] = False


def cost_problem(batching: Batching) -> str:
    """Return why the settings of cost of a batching do not fit together; empty if they do."""
    cost = batching.cost
    if cost and cost not in ("bytes", "length") and cost.count(":") != 1:
        return f"cost is {cost[:100]!r}: it is bytes, length, length:TENSOR or module:function."
    if not cost and (batching.padded or batching.cost_max):
        return f"{'padded' if batching.padded else 'cost_max'} is given, but no cost."
    if cost and batching.pad:
        return "pad fills batches with rows, and does not go with a cost."
    if cost and batching.mode == "static" and not batching.cost_max:
        return "a static batch with a cost needs cost_max."
    return ""


class Similar(msgspec.Struct, frozen=True):
    """Near float inputs share predictions: rows that fall into the same cells of `width` of random
    `projections`.

    Two rows r apart (Euclidean distance) share with probability about (1 - 0.8 r / width) **
    projections. check_share of the hits of single queries are evaluated too, after the answer;
    outputs further apart than `tolerance` count as disagreed.
    """

    width: Annotated[float, Meta(gt=0)]
    projections: Literal[8, 16, 24, 32] = 16
    check_share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    tolerance: Annotated[float, Meta(ge=0)] = 0.0


class PulledFrom(msgspec.Struct, frozen=True):
    """The source of a model's files, and what was there.

    url: without credentials. sha256: of the content; of a folder: docs/models.md, Artifacts. etag:
    as the source gave it, "" if it gave none.
    """

    url: str
    sha256: str
    etag: str = ""


class Model(msgspec.Struct, frozen=True, tag_field="schema", tag="clipper.model/1"):
    """A model version: fixed once registered, but for `replicas`, `replicas_max` and `retired_us`,
    which the catalog keeps apart.

    replicas: how many run; with replicas_max, at least so many, and up to that as the load
    requires. 0: never more. target: what the container runs, `module:function` or the file it is
    packed in.  sha256: of that file. similar: near inputs share predictions; None: only equal ones.
    finite: inputs with NaN or infinities are refused.  row_by_row: the model takes one input at a
    time.  code: folders its container needs on sys.path. requirements: lines for pip: its
    containers run in an environment of its own, with these; none: in the server's. python: of that
    environment, "3.11" or the path of an interpreter; empty: the server's. env: environment
    variables of its containers. deployer: "process" (or empty), "docker" or "podman". memory_mib,
    cpus (0: no limit): of each container; gpus of one of the last two: "all", a number, or ids as
    "0,2". tables: of parameters that it uses, by name:
    {"factors": {"dim": 8}}; for its other settings see docs/params.md. reads: rows that a
    prediction is made of: columns of the input by table, or `module:function`; tolerance: how far
    these may move, as a share of their norm, until a cached one is forgotten. warmup: what its
    containers run before they are ready: "" for made-up rows of its input's type, "off", or rows as
    JSON. command: the words of a command line that is a container, run in `folder`; target is their
    text. columns: names of the columns of an array, if the model was fitted on a DataFrame.
    max_concurrency: of an async model, rows or batches that a container works at. calls: what it
    may call, `app:NAME` or `model:NAME`.
    source: of what is packed in target; None: it was not pulled. created_us, retired_us:
    microseconds since 1970 by the wall clock; retired_us 0 while it serves.
    """

    name: str
    version: int
    input: InputType
    output: str = "any"
    replicas: int = 1
    batching: Batching = Batching()
    cache: bool = True
    retry_singly: bool = False
    target: str = ""
    sha256: str = ""
    created_us: int = 0
    retired_us: int = 0
    finite: bool = False
    row_by_row: bool = False
    code: tuple[str, ...] = ()
    similar: Similar | None = None
    replicas_max: int = 0
    requirements: tuple[str, ...] = ()
    python: str = ""
    deployer: str = ""
    memory_mib: int = 0
    cpus: float = 0.0
    gpus: str = ""
    tables: dict[str, dict[str, UserValue]] = {}
    reads: dict[str, tuple[int, ...]] | str = {}
    tolerance: float = 0.0
    warmup: str = ""
    command: tuple[str, ...] = ()
    folder: str = ""
    source: PulledFrom | None = None
    columns: tuple[str, ...] = ()
    env: dict[str, str] = {}
    max_concurrency: int = CONCURRENCY_DEFAULT
    calls: tuple[str, ...] = ()

    @property
    def id(self) -> VersionedModel:
        """Return the name and version."""
        return VersionedModel(self.name, self.version)


class Application(msgspec.Struct, frozen=True, tag_field="schema", tag="clipper.application/1"):
    """A named query: its input type, its models, their time, and the answer if no prediction
    arrives.

    models: a link without a version follows the latest.  default: a number, str, bytes, (nested)
    list, or None. confidence_min: a less sure answer is replaced by the default.  roles: of models
    that are no primaries, and decoys. missing: "mean": a number that is missing at the deadline is
    its model's mean; "skip": it is left out. decider: when to answer, as `majority within 12 ms,
    else first`. coverage: share of answers whose `set` holds the truth; None: no sets.
    context_table: of parameters, whose row of the user is the context of a query that brings none;
    empty: there is none. output: of models with named outputs, the one that the policy combines and
    that the answer is; empty: the answer is a dict of all. priority: of queries that name none, and
    whose key has none: 1, the highest, to 3.
    """

    name: str
    models: tuple[VersionedModel, ...] = ()
    slo_ms: float = 20.0
    default: UserValue = None
    input: InputType = ANY
    policy: str = "ensemble"
    confidence_min: float = 0.0
    created_us: int = 0
    roles: dict[str, str] = {}
    missing: str = "mean"
    decider: str = "all"
    coverage: float | None = None
    context_table: str = ""
    output: str = ""
    priority: int = PRIORITY_USUAL

    @property
    def slo_us(self) -> int:
        """Return the SLO in microseconds, rounded up."""
        return math.ceil(self.slo_ms * 1000)
