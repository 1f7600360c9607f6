"""What a traced request did, as spans: the request itself, whom it asked, and how each model fared.

    POST /api/{}/predict              the request, from its last byte in to its response handed over
      select                          the policy chooses, and the rows are submitted
      predict svm:3                   one model's part, from there to its prediction (or why there is none)

They are made on the exporter's thread, from what the request noted and what its futures still know.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from clipper.clock import wall_time_us
from clipper.frontend.messages import Request, Response, Streamed
from clipper.frontend.otlp import SERVER, Attribute, Span
from clipper.frontend.traces import Ask, Trace, new_id, subject_of
from clipper.metrics.http_counts import now_ns
from clipper.serving.ear import Future
from clipper_core.status import Status

_PATH_MAX = 200
_SERVERS_FAULT = frozenset(("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "UNKNOWN"))
_MODELS_MAX = 64  # spans of one query's models


class Told(NamedTuple):
    """A request that has ended; times by the monotonic clock."""

    trace: Trace
    name: str
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Attribute]
    error: str = ""


def epoch_ns() -> int:
    """What the monotonic clock has to be moved by to be time since the epoch, now."""
    return wall_time_us() * 1000 - now_ns()


def told_of(request: Request, response: Response | Streamed, id: bytes) -> Told:
    """Of HTTP, in the words of OpenTelemetry's conventions."""
    attributes: dict[str, Attribute] = {
        "http.request.method": request.method, "http.response.status_code": response.status,
        "url.path": request.path.decode("ascii", "replace")[:_PATH_MAX], "clipper.request_id": id.decode("ascii", "replace"),
        **{f"clipper.{key}": name for key, name in subject_of(request).items()},
    }  # fmt: skip
    if request.route:
        attributes["http.route"] = request.route
    error = str(response.status) if response.status >= 500 else ""
    name = f"{request.method} {request.route}" if request.route else request.method
    return Told(request.trace, name, request.began_ns, now_ns(), attributes, error)


def told_of_call(trace: Trace, service: str, method: str, code: str, began_ns: int) -> Told:
    """Of gRPC, alike."""
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method, "rpc.grpc.status": code}
    error = code if code in _SERVERS_FAULT else ""
    return Told(trace, f"{service}/{method}", began_ns, now_ns(), attributes, error)


def spans_of(told: Told, shift_ns: int) -> Iterator[Span]:
    trace = told.trace
    yield Span(
        trace.trace_id, trace.span_id, trace.parent_id, told.name, told.began_ns + shift_ns, told.ended_ns + shift_ns, SERVER,
        told.attributes, error=told.error, state=trace.state.decode("ascii"),
    )  # fmt: skip
    for ask in trace.asks:
        yield from _of_ask(trace, ask, shift_ns)


def _of_ask(trace: Trace, ask: Ask, shift_ns: int) -> Iterator[Span]:
    application, began_ns, asked_ns, futures = ask
    models = sorted({name for future in futures for name in _models_of(future)})
    attributes: dict[str, Attribute] = {"clipper.models": models, "clipper.queries": len(futures)}
    if application:
        attributes["clipper.application"] = application
    state = trace.state.decode("ascii")
    ids = trace.trace_id, new_id(64), trace.span_id
    yield Span(*ids, "select", began_ns + shift_ns, asked_ns + shift_ns, attributes=attributes, state=state)
    left = _MODELS_MAX
    for future in futures:
        for i, model in enumerate(_models_of(future)[:left]):
            left -= 1
            status = future.status(i)
            if status is not Status.PENDING:
                yield _of_task(trace, future, i, model, status, asked_ns + shift_ns)


def _of_task(trace: Trace, future: Future, i: int, model: str, status: Status, began_ns: int) -> Span:
    latency_us = int(future.latencies_us()[i])
    name, _, version = model.partition(":")
    attributes: dict[str, Attribute] = {
        "clipper.model.name": name, "clipper.model.version": version, "clipper.status": status.name.lower(),
        "clipper.cache.hit": status is Status.OK and not latency_us,
    }  # fmt: skip
    error = "" if status is Status.OK else status.name.lower()
    return Span(
        trace.trace_id, new_id(64), trace.span_id, f"predict {model}", began_ns, began_ns + 1000 * latency_us,
        attributes=attributes, error=error, state=trace.state.decode("ascii"),
    )  # fmt: skip


def _models_of(future: Future) -> list[str]:
    """Whose the future's tasks are, in their order; of an array, whose rows are its tasks, nobody's."""
    extra: Any = future.extra
    models = getattr(extra, "models", ())
    return [str(model) for model in models] if len(models) == len(future) else []
