"""Requests to several models: all are queried at once, and one response has the outputs in order.

The ids are in the headers `mm-model-id` (repeated, or separated by commas) or `mm-vmodel-id`; names
with `-bin` hold UTF-8. Unknown models are left out; a request that names only unknown models raises
UnknownModel, and with `mm-required: true` any unknown model does. Protobuf replies are
concatenated, which protobuf reads as a merge: lists are joined, and of other fields the last value
holds. In JSON, and for the Open Inference Protocol, the response is one list of outputs, each with
its model in its parameters. Source: model-mesh.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from clipper.errors import InvalidInput, UnknownModel
from clipper.frontend.auth.api_keys import KeyOwner
from clipper.frontend.inference import codec, protobuf_codec
from clipper.frontend.inference.operations import (
    InferenceOperations,
    InferenceResult,
    InferenceTarget,
    PendingInference,
    Rows,
)
from clipper.frontend.tracing.context import Trace
from clipper.serving.query.future_watcher import Future
from clipper.types import check_name

IDS_MAX: Final = 64  # models per request
_MODEL, _VMODEL, _REQUIRED = "mm-model-id", "mm-vmodel-id", "mm-required"
_T = TypeVar("_T")


class ModelIds(NamedTuple):
    """The models of a request. required: all must be known."""

    names: tuple[str, ...]
    required: bool = False


class HasFutures(Protocol):
    """Something in progress that can be cancelled by its futures."""

    @property
    def futures(self) -> Sequence[Future]:
        """The futures to cancel."""


_A = TypeVar("_A", bound=HasFutures)


def ids_in(headers: Iterable[tuple[str, str | bytes]]) -> ModelIds | None:
    """Return the models that the headers name, or None.

    headers: names in lower case. Raises InvalidInput for invalid ids.
    """
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
        raise InvalidInput(f"a request names {len(names)} models: up to {IDS_MAX} are possible.")
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
    """Return `of(name)` for each known model, in order.

    Unknown models are left out. Raises UnknownModel if they are required, or if none is known.
    """
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


def submit_each(submits: Iterable[Callable[[], _A]]) -> list[_A]:
    """Start all requests. If one cannot be started, the earlier ones are cancelled."""
    under_way: list[_A] = []
    try:
        for submit in submits:
            under_way.append(submit())
    except Exception:
        for future in (future for pending in under_way for future in pending.futures):
            future.cancel()
        raise
    return under_way


class MultiModelRequest:
    """An infer request to several models: call `submit()`, wait for `futures`, then `response()` or
    `body()`.

    Raises UnknownModel, and InvalidInput for a tensor that one of the models does not take.
    """

    def __init__(
        self, models: InferenceOperations, ids: ModelIds, request: codec.InferRequest
    ) -> None:
        """Find the models and read the tensors. Raises UnknownModel, InvalidInput."""
        self._models, self._ids, self._request = models, ids, request
        targets = those_known(ids, models.target)
        self._found = [(target, models.rows(target, request)) for target in targets]
        self._pending: list[PendingInference] = []

    @property
    def is_array(self) -> bool:
        """True if submitting may block: do not do it on an event loop."""
        return any(self._models.is_array(rows) for _, rows in self._found)

    @property
    def futures(self) -> list[Future]:
        """The futures of all models."""
        return [future for pending in self._pending for future in pending.futures]

    def submit(
        self,
        slo_us: Callable[[InferenceTarget, Rows], int],
        id: str = "",
        trace: Trace | None = None,
        owner: KeyOwner | None = None,
    ) -> None:
        """Submit the queries. slo_us: returns the SLO of a target and its rows. owner: of the
        request's key."""
        times = [slo_us(target, rows) for target, rows in self._found]
        submit = self._models.submit
        self._pending = submit_each(
            lambda target=target, rows=rows, us=us: submit(
                target, rows, self._request, us, id, trace, owner
            )  # type: ignore[misc]
            for (target, rows), us in zip(self._found, times, strict=True)
        )

    def _inferred(self) -> list[tuple[InferenceTarget, InferenceResult]]:
        """Return the results by model. A model that was removed in the meantime counts as
        unknown."""
        by_name = {
            target.name: (target, pending)
            for (target, _), pending in zip(self._found, self._pending, strict=True)
        }
        names = tuple(target.name for target, _ in self._found)
        return those_known(
            ModelIds(names, self._ids.required),
            lambda name: (by_name[name][0], by_name[name][1].inferred()),
        )

    def response(self) -> bytes:
        """Return a ModelInferResponse: the merge of the models' own responses."""
        return b"".join(
            protobuf_codec.encode(
                target.name,
                target.answered_version,
                self._request.id,
                outputs,
                parameters,
                self._request.outputs,
                {"model_name": target.name},
            )
            for target, (outputs, parameters) in self._inferred()
        )

    def body(self) -> tuple[Iterator[bytes], int]:
        """Return the parts of the body and the length of its JSON, like `codec.encode`."""
        tensors: list[tuple[dict[str, codec.JsonValue], bytes]] = []
        name = version = ""
        reply: dict[str, object] = {}
        for target, (outputs, parameters) in self._inferred():
            name, version, reply = target.name, target.answered_version, reply | parameters
            for one in codec.output_tensors(outputs, self._request.binary, self._request.outputs):
                tensor, data = one.described()
                of_model = {"model_name": name, **tensor.get("parameters", {})}
                tensors.append(({**tensor, "parameters": of_model}, data))
        head = {
            "model_name": name,
            **({"model_version": version} if version else {}),
            "id": self._request.id,
        }
        return codec.joined({**head, **({"parameters": reply} if reply else {})}, tensors)
