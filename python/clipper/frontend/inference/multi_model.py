"""Several models in one request: all are asked at once, and their answers come back as one, in the
order of their ids.

The ids stand in headers: `mm-model-id`, repeated or with commas between them, or `mm-vmodel-id`;
`-bin` forms hold UTF-8. A model that is not known is left out, and asking none but such is
UnknownModel; with `mm-required: true` any such is. Protobuf answers are concatenated, which for
protobuf merges them: lists one behind the other, of the rest the last. In JSON, and for the Open
Inference Protocol, that is one list of outputs; each says in its parameters which model it is of.
Source: model-mesh.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from clipper.errors import InvalidInput, UnknownModel
from clipper.frontend.http.messages import to_json
from clipper.frontend.inference import codec
from clipper.frontend.inference.operations import (
    InferenceOperations,
    InferenceResult,
    InferenceTarget,
    PendingInference,
)
from clipper.frontend.tracing.context import Trace
from clipper.serving.query.future_watcher import Future
from clipper.types import check_name

IDS_MAX: Final = 64  # of one request
_MODEL, _VMODEL, _REQUIRED = "mm-model-id", "mm-vmodel-id", "mm-required"
_T = TypeVar("_T")


class ModelIds(NamedTuple):
    """required: none of them may be missing."""

    names: tuple[str, ...]
    required: bool = False


class HasFutures(Protocol):
    """Something under way that can be given up."""

    @property
    def futures(self) -> Sequence[Future]: ...


_A = TypeVar("_A", bound=HasFutures)


def ids_in(headers: Iterable[tuple[str, str | bytes]]) -> ModelIds | None:
    """Those of a request's headers, whose names are in lower case; None when it names none.
    InvalidInput for what are no ids."""
    names: list[str] = []
    kinds, required = set(), False
    for header, value in headers:
        if not header.startswith("mm-"):
            continue
        kind = header.removesuffix("-bin")
        if kind in (_MODEL, _VMODEL):
            kinds.add(kind)
            names += [_checked(one.strip(), header) for one in _text(value, header).split(",")]
        elif header == _REQUIRED:
            required = _text(value, header).strip().lower() == "true"
    if len(kinds) > 1:
        raise InvalidInput(f"a request has {_MODEL} or {_VMODEL}; this one has both.")
    if len(names) > IDS_MAX:
        raise InvalidInput(
            f"a request names {len(names)} models: up to {IDS_MAX} are asked at once."
        )
    return ModelIds(tuple(names), required) if names else None


def _text(value: str | bytes, header: str) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{header} is no UTF-8.") from None


def _checked(name: str, header: str) -> str:
    try:
        return check_name(name, "model")
    except ValueError as error:
        raise InvalidInput(f"{header}: {error}") from None


def those_known(ids: ModelIds, of: Callable[[str], _T]) -> list[_T]:
    """What `of` says of each, in order. What is missing is left out; UnknownModel if it may not be,
    or if nothing is left."""
    found: list[_T] = []
    missing: UnknownModel | None = None
    for name in ids.names:
        try:
            found.append(of(name))
        except UnknownModel as error:
            if ids.required:
                raise
            missing = missing or error
    if missing is not None and not found:
        raise missing
    return found


def ask_each(asks: Iterable[Callable[[], _A]]) -> list[_A]:
    """All under way. If one cannot be asked, those before it are given up."""
    under_way: list[_A] = []
    try:
        for ask in asks:
            under_way.append(ask())
    except Exception:
        for future in (future for asking in under_way for future in asking.futures):
            future.cancel()
        raise
    return under_way


class MultiModelRequest:
    """One request of the Open Inference Protocol to several models: `ask()`, wait for `futures`,
    `response()` or `body()`."""

    def __init__(
        self, models: InferenceOperations, ids: ModelIds, asked: codec.InferRequest
    ) -> None:
        """UnknownModel; InvalidInput for a tensor that one of them does not take."""
        self._models, self._ids, self._asked = models, ids, asked
        targets = those_known(ids, models.target)
        self._found = [(target, models.rows(target, asked)) for target in targets]
        self._asking: list[PendingInference] = []

    @property
    def is_array(self) -> bool:
        """Asking may then take its time: not on an event loop."""
        return any(self._models.is_array(rows) for _, rows in self._found)

    @property
    def futures(self) -> list[Future]:
        return [future for asking in self._asking for future in asking.futures]

    def ask(
        self,
        slo_us: Callable[[InferenceTarget, Any], int],
        id: str = "",
        trace: Trace | None = None,
    ) -> None:
        """slo_us: of a target and its rows."""
        times = [slo_us(target, rows) for target, rows in self._found]
        ask = self._models.ask
        self._asking = ask_each(
            lambda target=target, rows=rows, us=us: ask(target, rows, self._asked, us, id, trace)  # type: ignore[misc]
            for (target, rows), us in zip(self._found, times, strict=True)
        )

    def _inferred(self) -> list[tuple[InferenceTarget, InferenceResult]]:
        """A model may have gone since it was asked: that is missing too. Any other error is that of
        the request."""
        by_name = {
            target.name: (target, asking)
            for (target, _), asking in zip(self._found, self._asking, strict=True)
        }
        names = tuple(target.name for target, _ in self._found)
        return those_known(
            ModelIds(names, self._ids.required),
            lambda name: (by_name[name][0], by_name[name][1].inferred()),
        )

    def response(self) -> Any:
        """A ModelInferResponse: what the models' own would be when concatenated."""
        from clipper.frontend.inference import protobuf_codec  # needs protobuf, and HTTP needs none

        joined: Any = None
        for target, (outputs, parameters) in self._inferred():
            one = protobuf_codec.encode(
                target.name, target.answered_version, self._asked.id, outputs, parameters
            )
            one.outputs[0].parameters["model_name"].string_param = target.name
            if joined is None:
                joined = one
            else:
                joined.MergeFrom(one)
        return joined

    def body(self) -> tuple[bytes, int]:
        """As `v2.encode`."""
        tensors, tails = [], []
        name = version = ""
        said: dict[str, Any] = {}
        for target, (outputs, parameters) in self._inferred():
            name, version, said = target.name, target.answered_version, said | parameters
            tensor, tail = codec.tensor(outputs, self._asked.binary)
            tensors.append(
                {**tensor, "parameters": {"model_name": name, **tensor.get("parameters", {})}}
            )
            tails.append(tail)
        head = {
            "model_name": name,
            **({"model_version": version} if version else {}),
            "id": self._asked.id,
        }
        text = to_json({**head, **({"parameters": said} if said else {}), "outputs": tensors})
        return b"".join((text, *tails)), len(text) if self._asked.binary else 0
