"""Calls of ModelInfer that the core answers (clipper_core.http.hot_calls).

They are the calls for what the fast path of HTTP answers without Python (fast_routes.py), and are
counted with the others. A query that ends in anything but a plain prediction gets its answer
here, from its futures.
"""

import asyncio
from collections.abc import Sequence

from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.fast_routes import FastRoute, FastRoutes, FormOfRoute, FormsOfRoutes
from clipper.frontend.grpc.call_stream import fields_of, trailers_of
from clipper.frontend.grpc.calls import code_name, ending_of
from clipper.frontend.grpc.inference import SERVICE
from clipper.frontend.http.http2 import Http2Connection
from clipper.frontend.inference import protobuf_codec
from clipper.frontend.inference.operations import PendingInference
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import trace_of
from clipper.metrics import GrpcCounts
from clipper.serving.query.processor import finish
from clipper_core.engine.engine import Engine
from clipper_core.http.hot_calls import HotCalls, HotEnding
from clipper_core.http.http_route import HotTable
from clipper_core.runtime.histogram import Counter, LatencyHistogram

_CHECK_S = 0.5
_OK = ((b"grpc-status", b"0"),)
_CALL = FormOfRoute("call", "{}")
_FORMS = FormsOfRoutes((_CALL,), (FormOfRoute("call", "{}/{}"),), (_CALL,))


class FastCalls:
    """The calls that the core answers: a RouteDoor. Threads: the event loop's; what a RouteDoor has
    is for any.

    engines: of the models. counts: of all calls. keys: of which every call needs one; None: none is
    needed.
    """

    forms = _FORMS

    def __init__(
        self,
        node: ServerInterface,
        engines: Sequence[Engine],
        counts: GrpcCounts,
        keys: ApiKeys | None,
        access_log: AccessLog,
    ) -> None:
        config = node.config
        self._counts = counts
        self._calls_max = config.grpc.calls_max
        self._method = counts.method(SERVICE, "ModelInfer", False)
        self._calls = HotCalls(
            engines,
            message_bytes_max=config.grpc.message_bytes_max,
            way_back_us=round(config.grpc.way_back_ms * 1000),
            slo_us_max=round(config.limits.slo_ms_max * 1000),
            finish=finish,
            cancelled=self._method.cancelled,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._routes = FastRoutes(node, self, keys, access_log)
        counts.add_core(self._calls)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer calls on the event loop."""
        self._loop = loop
        self._routes.open()
        self._check()
        for fd in self._calls.fds:
            loop.add_reader(fd, self._tell_news)

    def close(self) -> None:
        """Wait for no query any more. The connections are closed. Idempotent."""
        self._routes.close()
        if self._loop is not None:
            for fd in self._calls.fds:
                self._loop.remove_reader(fd)
            self._loop = None

    def _check(self) -> None:
        """Take what has changed of the models, again and again."""
        if self._loop is not None:
            self._loop.call_later(_CHECK_S, self._check)
            self._calls.sweep()
            self._routes.check()

    # -- routes: by the name of a model, or its name and version with a slash between them

    def takes(self, route: FastRoute) -> bool:
        """Return whether calls for this route get here."""
        return True

    def counts_of(self, route: FastRoute) -> tuple[Counter, LatencyHistogram]:
        """Return what counts calls that are answered, and their durations."""
        return self._method.ok, self._method.durations

    def set_table(self, table: HotTable) -> None:
        """Answer calls by these routes from now on."""
        self._calls.set_table(table)

    # -- calls

    def take(self, connection: Http2Connection) -> bool:
        """Answer calls among the events that have come. Return whether there were any."""
        open_max = max(self._calls_max - self._counts.under_way, 0)
        if not self._calls.take(connection.protocol, connection, open_max):
            return False
        self._tell_news()
        return True

    def lose(self, connection: Http2Connection) -> None:
        """Give up the calls of a connection that is gone."""
        self._calls.lose(connection.protocol)

    def _tell_news(self) -> None:
        """Send what queries have answered."""
        connections, endings = self._calls.news()
        for ending in endings:
            self._answer(ending)
        for connection in connections:
            connection.settle()

    def _answer(self, ending: HotEnding) -> None:
        """Answer a call whose query has no plain prediction."""
        trace = trace_of(ending.trace) if ending.trace else None
        trailing = () if trace is None else (("traceparent", trace.header.decode()),)
        reply, trailers, code = None, (*_OK, *fields_of(trailing)), "OK"
        target = ending.subject.target
        try:
            found = PendingInference(ending.futures, target.resolved, False).inferred()
            reply = protobuf_codec.encode(
                target.name,
                target.answered_version,
                ending.request_id,
                found.outputs,
                found.parameters,
            )
        except Exception as error:
            code = code_name(error)
            number, text, metadata = ending_of(error, trailing)
            trailers = tuple(trailers_of(number, text, fields_of(metadata)))
        self._method.count(code, ending.began_ns)
        ending.owner.protocol.reply(ending.stream, reply, trailers)
