"""The routes of requests that the core answers, of HTTP and of gRPC: for each application and model
that is eligible, as the catalog, the keys and the models are now.

An application must have one model that does not learn online, a policy without learning, no
decider, no roles, numeric input, and predictions that read no parameter tables. The table of routes
is rebuilt at each change of the catalog, before the caller of the change returns, and replaced at
each change of the keys.
"""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from clipper.catalog.catalog import View
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.http.applications import old_one, one_predicted
from clipper.frontend.http.inference import inferred
from clipper.frontend.http.messages import HttpResponse, StreamedResponse, to_json
from clipper.frontend.inference.codec import InferRequest
from clipper.frontend.inference.operations import (
    SINGLE_ROWS_MAX,
    InferenceTarget,
    PendingInference,
)
from clipper.frontend.server_interface import ServerInterface
from clipper.selection.policies.ensemble import Ensemble
from clipper.selection.policies.single_model import SingleModel
from clipper.serving.query.application import fits_id
from clipper.serving.query.processor import QueryContext, ResolvedApplication, plan_for
from clipper.types import PredictionRequest
from clipper_core.http.http_route import HotRoute, HotTable
from clipper_core.http.http_server import Ending, Read
from clipper_core.http.infer_message import infer_response
from clipper_core.results.future import Future
from clipper_core.runtime.histogram import Counter, LatencyHistogram

_POLICIES = (Ensemble, SingleModel)
_UNREAD = ("any", "bool", "f16", "str", "bytes")  # types that the core does not read
_MODELS_MAX = 1000  # maximum of model versions with fast routes
_INFER_FORMS = ("infer", "call")
_READ_FORMS = ("predict", "infer", "call")  # of applications that are only read in the core


class FormOfRoute(NamedTuple):
    """A form of requests, as of a HotRoute, and the pattern of their path or name."""

    form: str
    pattern: str


class FormsOfRoutes(NamedTuple):
    """The forms of requests that a door takes: for an application, for a version of a model, and
    for a model by its name alone."""

    of_application: tuple[FormOfRoute, ...]
    of_version: tuple[FormOfRoute, ...]
    of_model: tuple[FormOfRoute, ...]


class FastRoute:
    """A route of the fast path: its application, and how Python answers its remaining queries.

    Calling it returns the value of `Future.extra` for a query that ends in Python. name, version:
    of an infer route, as in the request's path.
    """

    __slots__ = ("form", "name", "path", "pattern", "resolved", "version")

    def __init__(
        self, resolved: ResolvedApplication, form: str, pattern: str, name: str, version: str = ""
    ) -> None:
        self.resolved = resolved
        self.form = form
        self.pattern = pattern
        self.name = name
        self.version = version
        self.path = pattern.format(name, version).encode()

    @property
    def before(self) -> bytes:
        """The start of a response, which names the models: in JSON, or of a call."""
        if self.form == "call":
            return infer_response(self.name, self.target.answered_version, "", (), {})
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


class RouteDoor(Protocol):
    """The part of a server that answers requests by routes. Threads: any."""

    forms: FormsOfRoutes

    def takes(self, route: FastRoute) -> bool:
        """Return whether requests for this route get here."""

    def counts_of(self, route: FastRoute) -> tuple[Counter, LatencyHistogram]:
        """Return what counts its requests that are answered, and their durations."""

    def refusals_of(self, route: FastRoute) -> tuple[Counter | None, Counter | None]:
        """Return what counts its requests that their key does not allow: to another application,
        and too many; None where Python has them."""

    def set_table(self, table: HotTable) -> None:
        """Answer requests by these routes from now on. Raises MemoryError."""


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


class FastRoutes:
    """The routes of one door. keys: of which every query needs one; None: none is needed.
    access_log: logs requests that their callers record.

    Threads: rebuild and take_keys from any; the others on the event loop.
    """

    def __init__(
        self,
        node: ServerInterface,
        door: RouteDoor,
        keys: ApiKeys | None,
        access_log: AccessLog,
    ) -> None:
        self._node = node
        self._door = door
        self._keys = keys
        self._access_log = access_log
        self._routes: dict[bytes, HotRoute] = {}
        self._untyped: list[ResolvedApplication] = []
        self._hot: list[ResolvedApplication] = []
        self._guard = threading.Lock()
        self._following = contextlib.ExitStack()
        self.table = HotTable({})
        self.logs = False

    def open(self) -> None:
        """Follow the catalog and the keys."""
        self._following.callback(self._node.catalog.on_change(self.rebuild))
        if self._keys is not None:
            self._following.callback(self._keys.on_change(self.take_keys))
        self.rebuild(self._node.catalog.view)

    def close(self) -> None:
        """Follow them no more. Idempotent."""
        self._following.close()

    def rebuild(self, view: View) -> None:
        """Rebuild the table of routes after a change of the catalog."""
        with self._guard:
            self._routes = {}
            self._untyped, self._hot = [], []
            forms = self._door.forms
            for name in view.applications:
                resolved = self._node.resolve(name)
                self._add_each(resolved, forms.of_application, name)
            for model in [model for model in view.models() if not model.retired_us][:_MODELS_MAX]:
                resolved = self._node.resolve_request(
                    PredictionRequest(None, candidate_models=(str(model.id),))
                )
                self._add_each(resolved, forms.of_version, model.name, str(model.version))
                if model.name not in view.applications and self._node.serves(view, model):
                    self._add_each(resolved, forms.of_model, model.name)
            self._set_table()

    def take_keys(self) -> None:
        """Use the keys that are valid now: requests that arrive after this returns need one of
        them. Raises MemoryError."""
        with self._guard:
            self._set_table()

    def _set_table(self) -> None:
        """Have the core use the routes and the keys that are valid now."""
        keys = None if self._keys is None else self._keys.table
        self.logs = self._access_log.logs_sampled
        self.table = HotTable(self._routes, keys, self.logs)
        self._door.set_table(self.table)

    def check(self) -> None:
        """Rebuild the table if a model's type or capabilities have changed, or the log of requests
        was switched on or off. Called at regular intervals."""
        self.table.look_at_lanes()
        if any(
            core.describe_input() != "any"
            for resolved in self._untyped
            for core in resolved.cores.values()
        ):
            # an untyped model got its type from its first row
            self.rebuild(self._node.catalog.view)
        elif not all(map(is_eligible, self._hot)) or (self.logs != self._access_log.logs_sampled):
            self.rebuild(self._node.catalog.view)  # a container with online learning has connected

    # -- one route

    def _add_each(
        self,
        resolved: ResolvedApplication,
        forms: Iterable[FormOfRoute],
        name: str,
        version: str = "",
    ) -> None:
        for form, pattern in forms:
            route = FastRoute(resolved, form, pattern, name, version)
            if form == "feedback":
                self._add_feedback(route)
            else:
                self._add(route)

    def _add(self, subject: FastRoute) -> None:
        resolved, form = subject.resolved, subject.form
        stats = resolved.rollout.stats
        is_whole = is_eligible(resolved)
        if stats is None or not (is_whole or (form in _READ_FORMS and is_readable(resolved))):
            return
        model = resolved.models[0]
        core = resolved.cores[model]
        dtype = core.describe_input().partition("[")[0]
        if dtype == "any":
            self._untyped.append(resolved)
        if (
            dtype in _UNREAD
            or core.similar is not None
            or (is_whole and (core.watch is not None or core.cost is not None))
            or (form in _INFER_FORMS and core.shape == (-1,))
        ):
            return
        if not self._door.takes(subject):
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
        self._routes[subject.path] = HotRoute(
            core,
            form,
            resolved.node,
            subject.before,
            resolved.slo_us,
            resolved.confidence_min,
            counts,
            counters.duration,
            *self._door.counts_of(subject),
            subject,
            None if window is None else window.table,
            owner,
            resolved.core if form in _READ_FORMS else None,
            not is_whole,
            self._node.config.limits.slo_ms_max,
            is_whole and resolved.rows is None,
            SINGLE_ROWS_MAX if form in _INFER_FORMS else 1,
            *self._door.refusals_of(subject),
            resolved.priority,
        )

    def _add_feedback(self, subject: FastRoute) -> None:
        """Add the route of labels of an application's answers."""
        resolved = subject.resolved
        core, stats = next(iter(resolved.all_cores.values()), None), resolved.rollout.stats
        if core is None or stats is None or not self._door.takes(subject):
            return
        counters = stats.counters
        forbidden, limited = self._door.refusals_of(subject)
        self._routes[subject.path] = HotRoute(
            core,
            subject.form,
            resolved.node,
            b"",
            resolved.slo_us,
            0.0,
            [counters.queries] * 5,
            counters.duration,
            *self._door.counts_of(subject),
            subject,
            forbidden=forbidden,
            limited=limited,
        )
