"""Spans of a traced request: the request, the selection of models, and each model's prediction.

    POST /api/{}/predict              from the last byte received to the response sent
      select                          the policy chooses models, and the rows are submitted
      predict svm:3                   from submission to the prediction, or to the error

The exporter's thread makes them, from the notes of the request and the state of its futures.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from clipper.clock import wall_time_us
from clipper.frontend.auth.api_keys import key_of
from clipper.frontend.http.messages import HttpRequest, HttpResponse, StreamedResponse
from clipper.frontend.tracing.context import Trace, TracedQuery, new_id, subject_of
from clipper.frontend.tracing.otlp import SERVER, Attribute, Span, SpanLink
from clipper.metrics.http_counts import now_ns
from clipper.serving.query.future_watcher import Future
from clipper_core.runtime.status import Status

_PATH_MAX = 200
_SERVERS_FAULT = frozenset(
    ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "UNKNOWN")
)
_BATCHES_MAX = 4096  # number of remembered batches
_LINKS_MAX = 128
_READINGS = 3  # readings of the two clocks
_OURS = os.urandom(16)  # makes batch ids unique to this process
_MODELS_MAX = 64  # maximum of model spans per query


Batch = tuple[int, int, int, int, int]  # replica, rows, sent_us, begun_us, ended_us
Of = tuple[str, Batch]  # with its model: replicas of two models may send in the same microsecond
Find = Callable[[Iterable[int]], Mapping[int, Batch]]


class FinishedRequest(NamedTuple):
    """A request that has ended. Times are of the monotonic clock."""

    trace: Trace
    name: str
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Attribute]
    error: str = ""


def epoch_ns() -> int:
    """Return the difference of the wall clock and the monotonic clock, in nanoseconds.

    Of several readings the quickest counts: a thread that is suspended between the two clocks would
    shift every span.
    """
    readings = ((now_ns(), wall_time_us(), now_ns()) for _ in range(_READINGS))
    before_ns, wall_us, after_ns = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall_us * 1000 - (before_ns + after_ns) // 2


def finished_request(
    trace: Trace, request: HttpRequest, response: HttpResponse | StreamedResponse, id: bytes
) -> FinishedRequest:
    """Describe an HTTP request by OpenTelemetry's semantic conventions."""
    attributes: dict[str, Attribute] = {
        "http.request.method": request.method,
        "http.response.status_code": response.status,
        "url.path": request.path.decode("ascii", "replace")[:_PATH_MAX],
        "clipper.request_id": id.decode("ascii", "replace"),
        **{f"clipper.{key}": name for key, name in subject_of(request).items()},
        **{f"clipper.{name}": text for name, text in key_of(request.key).items()},
    }
    if request.route:
        attributes["http.route"] = request.route
    error = str(response.status) if response.status >= 500 else ""
    name = f"{request.method} {request.route}" if request.route else request.method
    return FinishedRequest(trace, name, request.began_ns, now_ns(), attributes, error)


def finished_call(
    trace: Trace, service: str, method: str, code: str, began_ns: int
) -> FinishedRequest:
    """Describe a gRPC call by OpenTelemetry's semantic conventions."""
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status": code,
    }
    error = code if code in _SERVERS_FAULT else ""
    return FinishedRequest(trace, f"{service}/{method}", began_ns, now_ns(), attributes, error)


class Spans:
    """Makes the spans of requests. Threads: one at a time.

    find: returns the batches of tasks, like BatchLog.find, over all engines.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._finished: dict[Of, SpanLink] = {}  # the last batches with a span

    def of(self, requests: Sequence[FinishedRequest], shift_ns: int) -> list[Span]:
        """Return the spans of some requests. shift_ns: the result of epoch_ns."""
        futures = [
            future for request in requests for query in request.trace.queries for future in query[3]
        ]
        ids = [future.id + i for future in futures for i in range(len(_models_of(future)))]
        batches = self._find(ids) if ids else {}
        found: list[Span] = []
        links: dict[Of, list[SpanLink]] = {}
        for request in requests:
            found.append(_of_request(request, shift_ns))
            for query in request.trace.queries:
                found.append(_of_select(request.trace, query, shift_ns))
                for id, model, span in _of_tasks(request.trace, query, shift_ns):
                    found.append(span)
                    if (batch := batches.get(id)) is not None:
                        found += _of_batch(span, batch, self._link((model, batch)), shift_ns)
                        links.setdefault((model, batch), []).append(
                            SpanLink(span.trace_id, span.span_id)
                        )
        found += [
            self._batch(of, tasks, shift_ns)
            for of, tasks in links.items()
            if of not in self._finished
        ]
        for of in links:
            self._finished[of] = self._link(of)
        while len(self._finished) > _BATCHES_MAX:
            del self._finished[next(iter(self._finished))]
        return found

    def _link(self, of: Of) -> SpanLink:
        """Return the ids of a batch's span, which are the same for each of its requests."""
        known = self._finished.get(of)
        if known is not None:
            return known
        digest = hashlib.blake2b(repr(of).encode(), digest_size=24, key=_OURS).hexdigest()
        return SpanLink(digest[:32], digest[32:])

    def _batch(self, of: Of, links: Sequence[SpanLink], shift_ns: int) -> Span:
        """Return the span of a batch, in a trace of its own, with links to its recorded
        requests."""
        model, (replica, rows, sent_us, _, ended_us) = of
        attributes: dict[str, Attribute] = {
            "clipper.model": model,
            "clipper.replica": replica,
            "clipper.batch.rows": rows,
        }
        ours = self._link(of)
        start_ns, end_ns = sent_us * 1000 + shift_ns, ended_us * 1000 + shift_ns
        return Span(
            *ours,
            "",
            f"batch {model}",
            start_ns,
            end_ns,
            attributes=attributes,
            links=links[:_LINKS_MAX],
        )


def _of_batch(task: Span, batch: Batch, link: SpanLink, shift_ns: int) -> Iterator[Span]:
    """Return the spans below a task: its wait in the queue, the batch, and the work of the
    container."""
    replica, rows, sent_us, started_us, ended_us = batch
    sent_ns, started_ns, ended_ns = (us * 1000 + shift_ns for us in (sent_us, started_us, ended_us))
    attributes: dict[str, Attribute] = {"clipper.replica": replica, "clipper.batch.rows": rows}
    state = task.state
    queue, sent, container = (
        (task.trace_id, new_id(64), parent) for parent in (task.span_id, task.span_id, "")
    )
    yield Span(*queue, "queue", min(task.start_ns, sent_ns), sent_ns, state=state)
    yield Span(*sent, "batch", sent_ns, ended_ns, attributes=attributes, links=(link,), state=state)
    yield Span(
        container[0],
        container[1],
        sent[1],
        "container",
        started_ns,
        ended_ns,
        attributes=attributes,
        state=state,
    )


def _of_request(request: FinishedRequest, shift_ns: int) -> Span:
    trace = request.trace
    return Span(
        trace.trace_id,
        trace.span_id,
        trace.parent_id,
        request.name,
        request.began_ns + shift_ns,
        request.ended_ns + shift_ns,
        SERVER,
        request.attributes,
        error=request.error,
        state=trace.state.decode("ascii"),
    )


def _of_select(trace: Trace, query: TracedQuery, shift_ns: int) -> Span:
    application, began_ns, selected_ns, futures = query
    models = sorted({name for future in futures for name in _models_of(future)})
    attributes: dict[str, Attribute] = {"clipper.models": models, "clipper.queries": len(futures)}
    if application:
        attributes["clipper.application"] = application
    return Span(
        trace.trace_id,
        new_id(64),
        trace.span_id,
        "select",
        began_ns + shift_ns,
        selected_ns + shift_ns,
        attributes=attributes,
        state=trace.state.decode("ascii"),
    )


def _of_tasks(trace: Trace, query: TracedQuery, shift_ns: int) -> Iterator[tuple[int, str, Span]]:
    """Return (id, model, span) of each task that has ended."""
    left = _MODELS_MAX
    for future in query[3]:
        for i, model in enumerate(_models_of(future)[:left]):
            left -= 1
            status = future.status(i)
            if status is not Status.PENDING:
                yield (
                    future.id + i,
                    model,
                    _of_task(trace, future, i, model, status, query[2] + shift_ns),
                )


def _of_task(
    trace: Trace, future: Future, i: int, model: str, status: Status, began_ns: int
) -> Span:
    latency_us = int(future.latencies_us()[i])
    name, _, version = model.partition(":")
    attributes: dict[str, Attribute] = {
        "clipper.model.name": name,
        "clipper.model.version": version,
        "clipper.status": status.name.lower(),
        "clipper.cache.hit": status is Status.OK and not latency_us,
    }
    error = "" if status is Status.OK else status.name.lower()
    return Span(
        trace.trace_id,
        new_id(64),
        trace.span_id,
        f"predict {model}",
        began_ns,
        began_ns + 1000 * latency_us,
        attributes=attributes,
        error=error,
        state=trace.state.decode("ascii"),
    )


def _models_of(future: Future) -> list[str]:
    """Return the models of a future's tasks, in order; an empty list for an array."""
    extra: object = future.extra
    models = getattr(extra, "models", ())
    return [str(model) for model in models] if len(models) == len(future) else []
