"""The fast path: the core reads and writes HTTP, in threads that never take the GIL.

These requests are answered there: `POST /api/APP/predict` (and the original's `POST
/APP/predict`) with the body `{"input": [...]}`, also with a user, an SLO and a salt, and infer
requests whose rows are queries of their own, as JSON or binary.
A label of one answer, `POST /api/APP/feedback` with an id and a label, is read there, and learned
by a worker thread with the others that came in the same turn.
The application must have one model that does not learn online, a policy without learning, no
decider, no roles, numeric input, and predictions that read no parameter tables. Answers given here
wait for feedback in a table of the core. Where queries need keys, the request has a valid one. The
table of routes is rebuilt at each change of the catalog, before the caller of the change returns,
and replaced at each change of the keys. The responses are equal byte by byte to those of the Python
path, and the fast path adds to the same counters (serving/tally, metrics).

Queries to other applications whose models take the same rows of numbers are read there as well. The
event loop's thread schedules them, all that have come at once, and gives back what is to be sent
(`HttpServer.take`, `respond`).

Over TLS nothing differs: the core decrypts and encrypts (clipper_core.tls).

Any other request is handed over, with its connection, to frontend/http/connection.py. The
connection comes back after a few requests in a row that the fast path can answer. A query whose
result is not a plain prediction gets its response here, from its future, like any other query.
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from clipper.catalog.catalog import View
from clipper.component import Health, Stop, Tasks, Worker
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.http.applications import old_one, one_predicted
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.exchange import Exchange
from clipper.frontend.http.inference import inferred
from clipper.frontend.http.messages import (
    HttpError,
    HttpRequest,
    HttpResponse,
    StreamedResponse,
    WorkerTask,
    answer_json,
    to_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.tls import SecuredBy, tell_to_speak_tls
from clipper.frontend.inference.codec import InferRequest
from clipper.frontend.inference.operations import (
    SINGLE_ROWS_MAX,
    InferenceTarget,
    PendingInference,
)
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import trace_of
from clipper.metrics import HttpCounts
from clipper.selection.policies.ensemble import Ensemble
from clipper.selection.policies.single_model import SingleModel
from clipper.serving.feedback.ground_truth import truth_of
from clipper.serving.feedback.observe import learn_label_of, observe
from clipper.serving.query.application import fits_id
from clipper.serving.query.processor import (
    QueryContext,
    ResolvedApplication,
    finish,
    plan_for,
    predict,
)
from clipper.settings.http import bodies_bytes
from clipper.types import PredictionRequest, UserValue
from clipper_core.engine.engine import Engine
from clipper_core.http.http_route import HotRoute, HotTable
from clipper_core.http.http_server import (
    Ending,
    Feedback,
    Gone,
    Handed,
    HttpServer,
    Read,
    WithoutTls,
)
from clipper_core.results.future import Future

_log = logging.getLogger(__name__)
_POLICIES = (Ensemble, SingleModel)
_FOREIGN = (
    b"transfer-encoding",
    b"content-encoding",
    b"expect",
    b"tracestate",
    b"origin",
)
_UNREAD = ("any", "bool", "f16", "str", "bytes")  # types that the core does not read from JSON
_FEEDBACK = "/api/{}/feedback"
_INFER = "/v2/models/{}/infer"
_INFER_VERSION = "/v2/models/{}/versions/{}/infer"
_AGAIN_S = 0.02
_TOLD_MAX = 64  # feedback that a worker thread learns at once
_NOTHING = HttpResponse(204, b"")
_MODELS_MAX = 1000  # maximum of model versions with fast routes


class FastRoute:
    """A route of the fast path: its application, and how Python answers its remaining queries.

    Calling it returns the value of `Future.extra` for a query that ends in Python. name, version:
    of an infer route, as in the request's path.
    """

    __slots__ = ("form", "name", "path", "pattern", "resolved", "version")

    def __init__(
        self, resolved: ResolvedApplication, form: str, pattern: str, name: str, version: str = ""
    ) -> None:
        self.resolved, self.form, self.pattern, self.name, self.version = (
            resolved,
            form,
            pattern,
            name,
            version,
        )
        self.path = pattern.format(name, version).encode()

    @property
    def before(self) -> bytes:
        """The start of a JSON response, which names the models."""
        if self.form != "infer":
            return to_json([str(model) for model in self.resolved.models])
        version = self.target.answered_version
        head = {
            "model_name": self.name,
            **({"model_version": version} if version else {}),
            "id": "",
        }
        return to_json(head).removesuffix(b'""}')

    @property
    def target(self) -> InferenceTarget:
        """The target of an infer request."""
        return InferenceTarget(self.resolved, self.name, self.version)

    def __call__(self, id: str, tag: bytes, user: str) -> QueryContext:
        state, plan = plan_for(self.resolved, user)
        own = tag[1:-1].decode("ascii")
        return QueryContext(
            self.resolved, plan, state, user, (), None, id or (own if fits_id(own) else "")
        )

    def respond(
        self, ending: Ending | Read, futures: Sequence[Future]
    ) -> HttpResponse | StreamedResponse:
        """Return the response to a query, the futures of which are done."""
        if self.form == "predict":
            return one_predicted(futures[0], self.resolved, True)
        if self.form == "old_predict":
            return old_one(futures[0], True)
        infer_request = InferRequest(ending.tag[1:-1].decode("ascii"), {}, [], ending.binary)
        pending = PendingInference(futures, self.resolved, False)
        return inferred(pending, self.target, infer_request, True)


def is_eligible(resolved: ResolvedApplication) -> bool:
    """Return whether the core may answer this application: one model, and only counters to
    update."""
    return (
        len(resolved.models) == 1
        and type(resolved.policy) in _POLICIES
        and resolved.speculation is None
        and resolved.rollout.assignment is None
        and resolved.rollout.split is None
        and not resolved.feedback.online_learning.teaches(resolved.models)
        and resolved.rollout.stats is not None
        and not resolved.rollout.decoys
        and not resolved.on_demand
        and not any(core.tensors or core.outputs for core in resolved.cores.values())
    )


def is_readable(resolved: ResolvedApplication) -> bool:
    """Return whether the core may read the queries of this application: its models take the same
    rows of numbers."""
    cores = list(resolved.all_cores.values())
    return (
        bool(cores)
        and not resolved.on_demand
        and not resolved.output_name
        and resolved.rollout.stats is not None
        and not any(core.tensors or core.outputs for core in cores)
        and len({core.describe_input() for core in cores}) == 1
    )


def _predict(read: Read, row: UserValue) -> Future:
    """Schedule a row that the core has read."""
    subject: FastRoute = read.route.subject
    id = (read.id or read.tag[1:-1]).decode("ascii")
    return predict(subject.resolved, row, read.user or None, read.slo_us, 0, None, id)


def _raise(error: Exception) -> HttpResponse:
    raise error


class _FastPathConnection:
    """The connection of one exchange, whose socket the compiled server has. give: sends a response,
    and says whether it is the last."""

    gone = False
    client = ""  # it is not known here

    def __init__(
        self, service: HttpService, request: HttpRequest, give: Callable[[bytes, bool], None]
    ) -> None:
        self.service, self._give = service, give
        self.exchange = Exchange(cast("HttpConnection", self), request, False)

    def flush(self) -> None:
        """Send the response, which is made."""
        self._give(self.exchange.data or b"", self.exchange.close)


def _learned_at_once(told: Feedback) -> bool | None:
    """Learn a label; return whether it counts. None, and nothing has changed: that may need an
    answer of another server, or of the store."""
    resolved: ResolvedApplication = told.route.subject.resolved
    counts = learn_label_of(resolved, told.answer, told.label)
    is_own = resolved.feedback.records is None and told.answer.startswith(f"{resolved.node}-")
    return _learned(told) if counts is None and is_own else counts


def _learned(told: Feedback) -> bool:
    """Learn a label as Python learns all; return whether it counts."""
    truth = truth_of(told.label, None, None)
    return observe(told.route.subject.resolved, told.answer, None, None, truth, 1.0)


class _FeedbackTurn:
    """Feedback that the core has read in a turn of the loop, and that a worker thread learns; it
    takes the place of an exchange. answer: called with whether one counts, or the error; None: it
    is to be learned as Python learns all."""

    def __init__(
        self,
        server: HttpServer,
        told: Sequence[Feedback],
        answer: Callable[[Feedback, bool | Exception | None], None],
    ) -> None:
        self._server = server
        self._told = told
        self._answer = answer
        self._rest: list[tuple[Feedback, bool | Exception | None]] = []

    def run(self) -> HttpResponse:
        """Learn what needs no wait for others, and answer it. Called on the worker thread."""
        for one in self._told:
            outcome: bool | Exception | None
            try:
                outcome = _learned_at_once(one)
            except Exception as error:
                outcome = error
            if not (isinstance(outcome, bool) and self._is_sent(one, outcome)):
                self._rest.append((one, outcome))
        return _NOTHING

    def _is_sent(self, one: Feedback, counts: bool) -> bool:
        try:
            self._server.respond_feedback(one, counts)
        except MemoryError:
            return False
        return True

    def settle(self, _: HttpResponse) -> None:
        """Answer the rest."""
        for one, outcome in self._rest:
            self._answer(one, outcome)

    def fail(self, error: Exception) -> None:
        """Answer all by an error: the threads have ended."""
        for one in self._told:
            self._answer(one, error)


class FastPath:
    """The fast path of one listener, and its threads.

    keys: of which every query needs one; None: none is needed. secured: the certificate of all
    connections; None: they are without TLS. Threads: rebuild and take_keys from
    any; open, look and drain on the event loop; stop from one.
    """

    def __init__(
        self,
        node: ServerInterface,
        routes: HttpRouter,
        counts: HttpCounts,
        engines: Sequence[Engine],
        keys: ApiKeys | None = None,
        secured: SecuredBy | None = None,
    ) -> None:
        http = node.config.http
        self._secured = secured
        self._keys = keys
        self._node, self._routes, self.counts = node, routes, counts
        self.core_server = HttpServer(
            engines,
            http.workers,
            secrets.token_hex(6).encode(),
            header_s=http.header_s,
            idle_s=http.idle_s,
            connections_max=http.connections_max,
            header_bytes_max=http.header_bytes_max,
            body_bytes_max=http.body_bytes_max,
            pipeline_max=http.pipeline_max,
            unsent_bytes_max=http.unsent_bytes_max,
            finish=finish,
            encode=to_json,
            bodies_bytes_max=bodies_bytes(http),
            tls=None if secured is None else secured.context,
            handshakes=() if secured is None else secured.counters,
        )
        # a wait for the disk is shared by threads that wait at the same time
        self._told_at_once = 1 if node.config.feedback.journal == "fsync" else _TOLD_MAX
        self._workers = [self._worker(i) for i in range(http.workers)]
        self._routes_by_path: dict[bytes, HotRoute] = {}
        self._logs = False
        self._table = HotTable({})
        self._untyped: list[ResolvedApplication] = []
        self._hot: list[ResolvedApplication] = []
        self._guard = threading.Lock()
        self._adopting = Tasks("the fast path")
        # by ticket: of queries that the core has read
        self._scheduled: dict[int, list[Future]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: HttpService
        self._listener: socket.socket
        self._following = contextlib.ExitStack()

    def open(
        self, loop: asyncio.AbstractEventLoop, service: HttpService, listener: socket.socket
    ) -> None:
        """Start listening. `service` handles the requests that are not eligible."""
        self._loop, self._service, self._listener = loop, service, listener
        service.core_server, service.is_plain = self.core_server, self._is_plain
        service.bodies.core_server = self.core_server
        self.counts.held = lambda: self.core_server.connections
        self._following.callback(self._node.catalog.on_change(self.rebuild))
        if self._keys is not None:
            self._following.callback(self._keys.on_change(self.take_keys))
        self.rebuild(self._node.catalog.view)
        loop.add_reader(self.core_server.fd, self._take)
        self.core_server.listen(os.dup(listener.fileno()))
        for worker in self._workers:
            worker.start()

    def _worker(self, number: int) -> Worker:
        def run(stop: Stop) -> None:
            self.core_server.run(number)

        return Worker("clipper-http-core", run, vital=True)

    def health(self) -> list[Health]:
        """Return the state of the threads of the core."""
        return [worker.health() for worker in self._workers]

    # -- the table

    def rebuild(self, view: View) -> None:
        """Rebuild the table of routes after a change of the catalog."""
        with self._guard:
            routes: dict[bytes, HotRoute] = {}
            self._untyped, self._hot = [], []
            for name in view.applications:
                resolved = self._node.resolve(name)
                self._add(routes, resolved, "predict", "/api/{}/predict", name)
                self._add(routes, resolved, "old_predict", "/{}/predict", name)
                self._add(routes, resolved, "infer", _INFER, name)
                self._add_feedback(routes, resolved)
            for model in [model for model in view.models() if not model.retired_us][:_MODELS_MAX]:
                resolved = self._node.resolve_request(
                    PredictionRequest(None, candidate_models=(str(model.id),))
                )
                self._add(routes, resolved, "infer", _INFER_VERSION, model.name, str(model.version))
                if model.name not in view.applications and self._node.serves(view, model):
                    self._add(routes, resolved, "infer", _INFER, model.name)
            self._routes_by_path = routes
            self._set_table()

    def take_keys(self) -> None:
        """Use the keys that are valid now: requests that arrive after this returns need one of
        them. Raises MemoryError."""
        with self._guard:
            self._set_table()

    def _set_table(self) -> None:
        """Have the core use the routes and the keys that are valid now."""
        keys = None if self._keys is None else self._keys.table
        self._logs = self._service.access_log.logs_sampled
        self._table = HotTable(self._routes_by_path, keys, self._logs)
        self.core_server.set_table(self._table)

    def _add(
        self,
        routes: dict[bytes, HotRoute],
        resolved: ResolvedApplication,
        form: str,
        pattern: str,
        name: str,
        version: str = "",
    ) -> None:
        stats = resolved.rollout.stats
        is_whole = is_eligible(resolved)
        if stats is None or not (is_whole or (form != "old_predict" and is_readable(resolved))):
            return
        model = resolved.models[0]
        core = resolved.cores[model]
        dtype = core.describe_input().partition("[")[0]
        if dtype == "any":
            self._untyped.append(resolved)
        subject = FastRoute(resolved, form, pattern, name, version)
        if (
            dtype in _UNREAD
            or core.similar is not None
            or (is_whole and (core.watch is not None or core.cost is not None))
            or (form == "infer" and core.shape == (-1,))
        ):
            return
        if self._leads_to(subject.path) != pattern:
            return
        counters = stats.counters
        of_model = counters.of(model)
        if is_whole:
            self._hot.append(resolved)
        window = resolved.feedback.window
        owner = None if window is None else window.owner(resolved.learner, (model,))
        counts = (
            counters.queries,
            counters.answered,
            counters.step("all"),
            of_model.used,
            of_model.wins,
        )
        row = self.counts.row("POST", pattern)
        routes[subject.path] = HotRoute(
            core,
            form,
            resolved.node,
            subject.before,
            resolved.slo_us,
            resolved.confidence_min,
            counts,
            counters.duration,
            row.ok,
            row.durations,
            subject,
            None if window is None else window.table,
            owner,
            resolved.core if form != "old_predict" else None,
            not is_whole,
            self._node.config.limits.slo_ms_max,
            is_whole and resolved.rows is None,
            SINGLE_ROWS_MAX if form == "infer" else 1,
        )

    def _add_feedback(self, routes: dict[bytes, HotRoute], resolved: ResolvedApplication) -> None:
        """Add the route of labels of an application's answers."""
        subject = FastRoute(resolved, "feedback", _FEEDBACK, resolved.name)
        core, stats = next(iter(resolved.all_cores.values()), None), resolved.rollout.stats
        if core is None or stats is None or self._leads_to(subject.path) != _FEEDBACK:
            return
        row = self.counts.row("POST", _FEEDBACK)
        counters = stats.counters
        routes[subject.path] = HotRoute(
            core,
            subject.form,
            resolved.node,
            b"",
            resolved.slo_us,
            0.0,
            [counters.queries] * 5,
            counters.duration,
            row.ok,
            row.durations,
            subject,
        )

    def _leads_to(self, path: bytes) -> str:
        request = HttpRequest("POST", path, b"", {}, b"")
        with contextlib.suppress(HttpError):
            self._routes.find(request)
        return request.route

    def _is_plain(self, request: HttpRequest) -> bool:
        return (
            request.method == "POST"
            and request.path in self._table
            and not request.query
            and not any(name in request.headers for name in _FOREIGN)
            and not (self._logs and request.trace is not None and request.trace.sampled)
        )

    def check(self) -> None:
        """Free former tables, and rebuild the table if a model's type or capabilities have changed,
        or the log of requests was switched on or off.

        Called at regular intervals.
        """
        self.core_server.sweep()
        if self._secured is not None and self._secured.refresh():
            self.core_server.set_tls(self._secured.context)
        self._table.look_at_lanes()
        if any(
            core.describe_input() != "any"
            for resolved in self._untyped
            for core in resolved.cores.values()
        ):
            # an untyped model got its type from its first row
            self.rebuild(self._node.catalog.view)
        elif not all(map(is_eligible, self._hot)) or (
            self._logs != self._service.access_log.logs_sampled
        ):
            self.rebuild(self._node.catalog.view)  # a container with online learning has connected

    # -- what comes out

    def _take(self) -> None:
        told = []
        for item in self.core_server.take():
            if isinstance(item, Handed):
                self._adopt(item)
            elif isinstance(item, WithoutTls):
                self._adopting.spawn(self._refuse(socket.socket(fileno=item.fd)))
            elif isinstance(item, Read):
                self._schedule(item)
            elif isinstance(item, Feedback):
                told.append(item)
            elif isinstance(item, Gone):
                self._cancel(item)
            else:
                subject: FastRoute = item.route.subject
                self._answer(item, functools.partial(subject.respond, item, item.futures))
        for first in range(0, len(told), self._told_at_once):
            self._learn(told[first : first + self._told_at_once])

    def _learn(self, told: Sequence[Feedback]) -> None:
        """Have a worker thread learn feedback."""
        turn = _FeedbackTurn(self.core_server, told, self._answer_feedback)
        self._service.run(WorkerTask(turn.run), turn)

    def _answer_feedback(self, told: Feedback, outcome: bool | Exception | None) -> None:
        """Answer feedback by whether it counts, or by an error. None: learn it first, as Python
        learns all."""
        exchange = self._exchange(told)
        if outcome is None:
            learn = functools.partial(_learned, told)
            exchange.settle(WorkerTask(lambda: answer_json({"counted": learn()})))
        elif isinstance(outcome, Exception):
            exchange.fail(outcome)
        else:
            exchange.answer(answer_json({"counted": outcome}))

    def _adopt(self, handed: Handed) -> None:
        make = functools.partial(HttpConnection, self._service, handed)
        line = socket.socket(fileno=handed.fd)
        self._adopting.spawn(self._connect(make, line))

    async def _connect(self, make: Callable[[], HttpConnection], line: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.connect_accepted_socket(make, line)
            connection.pause_again()
        except OSError as error:  # the connection was lost during the handover
            _log.debug("a connection was lost: %s", error)
            line.close()

    async def _refuse(self, line: socket.socket) -> None:
        """Tell a client to speak TLS."""
        with line, contextlib.suppress(OSError):
            await tell_to_speak_tls(line, self._service)

    def _schedule(self, read: Read) -> None:
        """Answer a query that the core has read, once its models have."""
        try:
            if read.error is not None:
                raise read.error
            futures = [
                _predict(read, row) if future is None else future
                for future, row in zip(read.futures, read.rows, strict=True)
            ]
        except Exception as error:
            self._answer(read, functools.partial(_raise, error))
            return
        self._scheduled[read.ticket] = futures
        self._wait(read, iter(futures))

    def _wait(self, read: Read, rest: Iterator[Future], _: Future | None = None) -> None:
        """Wait for one future of a query after another: when one is done, those done meanwhile need
        no wait."""
        again = functools.partial(self._wait, read, rest)
        if not any(self._service.watcher.on_done(future, again) for future in rest):
            self._done(read)

    def _done(self, read: Read) -> None:
        """Answer a query whose futures are done, unless its client is gone."""
        futures = self._scheduled.pop(read.ticket, None)
        if futures is None or self.core_server.respond(read, futures):
            return
        subject: FastRoute = read.route.subject
        self._answer(read, functools.partial(subject.respond, read, futures))

    def _cancel(self, gone: Gone) -> None:
        """Cancel a query for which nobody waits."""
        for future in self._scheduled.pop(gone.ticket, ()):
            future.cancel()

    def _answer(
        self, ending: Ending | Read, respond: Callable[[], HttpResponse | StreamedResponse]
    ) -> None:
        """Answer by what `respond` returns, or by the error that it raises."""
        exchange = self._exchange(ending)
        try:
            response = respond()
        except Exception as error:
            exchange.fail(error)
        else:
            exchange.answer(response)

    def _exchange(self, ending: Ending | Read | Feedback) -> Exchange:
        """Return the exchange of a request that the core has read."""
        subject: FastRoute = ending.route.subject
        headers = {b"x-request-id": ending.id} if ending.id else {}
        request = HttpRequest("POST", subject.path, b"", headers, b"")
        request.route, request.began_ns = subject.pattern, ending.began_ns
        request.trace = trace_of(ending.trace) if ending.trace else None
        give = functools.partial(self._give, ending)
        return _FastPathConnection(self._service, request, give).exchange

    def _give(self, ending: Ending | Read | Feedback, response: bytes, close: bool) -> None:
        """Give it to the compiled server; try again in a moment when that has no memory."""
        try:
            self.core_server.answer(ending.worker, ending.ticket, response, close)
        except MemoryError:
            loop = asyncio.get_running_loop()
            loop.call_later(_AGAIN_S, self._give, ending, response, close)

    # -- the end

    @property
    def is_busy(self) -> bool:
        """True while connections are open or being handed over."""
        core_server = self.core_server
        return core_server.connections > 0 or core_server.relays > 0 or bool(self._adopting)

    def drain(self) -> None:
        """Accept no new connections, and close each one after its responses."""
        self._listener.close()
        self.core_server.drain()

    def close(self) -> None:
        """Stop receiving events of the core. Called on the event loop when it ends."""
        self._following.close()
        if self._loop is not None:
            self._loop.remove_reader(self.core_server.fd)

    def stop(self) -> None:
        """Join the threads and close the remaining connections. The event loop has ended."""
        self.core_server.stop()
        for worker in self._workers:
            worker.end()
        for item in self.core_server.take():
            if isinstance(item, Handed | WithoutTls):
                os.close(item.fd)
