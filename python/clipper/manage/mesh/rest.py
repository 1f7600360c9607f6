"""The mesh over HTTP, where management listens: what clipper.mesh.reports does, as routes.
docs/mesh.md is for users.

The history records who made a change (`Clipper-Actor`, or the owner of the token);
`?dry_run=true` rehearses it: it is checked, answered as it would be, and not written. A request
that waits for a load (`sync`) holds one of the listener's few worker threads: two may wait, further
ones get an error to try again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec

from clipper.errors import InvalidInput, Overloaded, UnknownModel
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpRequest,
    HttpResponse,
    answer_json,
    on_worker,
    read_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.manage.http.rest import actor_of, read_query
from clipper.manage.mesh.described import Counts, Instances, ModelPage, VModelPage, of_mesh
from clipper.manage.mesh.watch import Watchers
from clipper.mesh.decisions.vmodels import UnknownVModel
from clipper.mesh.node.node import MeshNode
from clipper.mesh.records import Policy
from clipper.mesh.reports import LIST_MAX, ModelStatus, VModelRequest, VModelStatus
from clipper.store.history import audit_context

WAITING_MAX: Final = 2
_Time = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Registering(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of a registration: the arguments of `MeshNode.register`."""

    path: str
    type: str = ""
    key: str = ""
    input: str = ""
    output: str = ""
    load_now: bool = False
    sync: bool = False
    used_ms: _Time = 0
    policy: Policy = Policy()
    owner: str = ""


class Loading(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of a load request."""

    sync: bool = False
    used_ms: _Time = 0


_REGISTERING: "msgspec.json.Decoder[Registering]" = msgspec.json.Decoder(Registering)
_LOADING: "msgspec.json.Decoder[Loading]" = msgspec.json.Decoder(Loading)
_VMODEL: "msgspec.json.Decoder[VModelRequest]" = msgspec.json.Decoder(VModelRequest)


class MeshManagement:
    """Threads: any."""

    def __init__(self, mesh: MeshNode) -> None:
        self._mesh, self._watchers = mesh, Watchers(mesh)
        self._places = threading.BoundedSemaphore(WAITING_MAX)

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        each: tuple[tuple[str, str, Callable[[HttpRequest], HttpResponse]], ...] = (
            ("GET", "/v1/mesh", self.stats),
            ("GET", "/v1/mesh/instances", self.instances),
            ("GET", "/v1/mesh/models", self.models),
            ("GET", "/v1/mesh/models/{}", self.model),
            ("PUT", "/v1/mesh/models/{}", self.register),
            ("DELETE", "/v1/mesh/models/{}", self.unregister),
            ("POST", "/v1/mesh/models/{}/load", self.load),
            ("GET", "/v1/mesh/models/{}/explain", self.explain),
            ("GET", "/v1/mesh/vmodels", self.vmodels),
            ("GET", "/v1/mesh/vmodels/{}", self.vmodel),
            ("PUT", "/v1/mesh/vmodels/{}", self.set_vmodel),
            ("DELETE", "/v1/mesh/vmodels/{}", self.delete_vmodel),
            ("POST", "/v1/mesh/vmodels/{}/rollback", self.rollback_vmodel),
        )
        for method, pattern, handler in each:
            routes.add(method, pattern, on_worker(handler))
        routes.add("GET", "/v1/mesh/watch", self.watch)
        routes.describe(of_mesh(Registering, Loading))

    # -- looking

    def stats(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of the node's statistics."""
        return answer_json(Counts(self._mesh.instance, dict(self._mesh.stats())))

    def instances(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of the nodes."""
        return answer_json(Instances(self._mesh.instances()))

    def models(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of the models."""
        return _page(ModelPage, self._mesh.models, request)

    def vmodels(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of the v-models."""
        return _page(VModelPage, self._mesh.vmodels, request)

    def model(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of one model."""
        return answer_json(_found(self._mesh.status(request.params[0])))

    def explain(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of the explanation of a model's placement."""
        _found(self._mesh.status(request.params[0]))
        return answer_json(self._mesh.explain(request.params[0]))

    def vmodel(self, request: HttpRequest) -> HttpResponse:
        """Handle GET of one v-model."""
        owner = read_query(request, {"owner": str}).get("owner", "")
        return answer_json(_found(self._mesh.vmodel_status(request.params[0], owner)))

    def watch(self, request: HttpRequest) -> HandlerResult:
        """Start a watcher's response, on the event loop."""
        return self._watchers.response(read_query(request, {"prefix": str}).get("prefix", ""))

    # -- changing

    def register(self, request: HttpRequest) -> HttpResponse:
        """Handle the registration of a model."""
        body = read_json(_REGISTERING, request.body or b"{}")
        if body.sync and not body.load_now:
            raise InvalidInput("`sync` goes with `load_now`.", hint="Set both, or neither.")
        with self._waiting(body.sync), _changing(request):
            return answer_json(
                self._mesh.register(request.params[0], **msgspec.structs.asdict(body))
            )

    def unregister(self, request: HttpRequest) -> HttpResponse:
        """Handle the removal of a model."""
        with _changing(request):
            self._mesh.unregister(request.params[0])
        return HttpResponse(204, b"")

    def load(self, request: HttpRequest) -> HttpResponse:
        """Handle a request to load a model."""
        body = read_json(_LOADING, request.body or b"{}")
        with self._waiting(body.sync):
            return answer_json(
                self._mesh.ensure_loaded(request.params[0], sync=body.sync, used_ms=body.used_ms)
            )

    def set_vmodel(self, request: HttpRequest) -> HttpResponse:
        """Handle a change of a v-model."""
        body = read_json(_VMODEL, request.body or b"{}")
        with self._waiting(body.sync), _changing(request):
            return answer_json(
                self._mesh.set_vmodel(request.params[0], **msgspec.structs.asdict(body))
            )

    def delete_vmodel(self, request: HttpRequest) -> HttpResponse:
        """Handle the removal of a v-model."""
        with _changing(request, owner=str) as query:
            self._mesh.delete_vmodel(request.params[0], query.get("owner", ""))
        return HttpResponse(204, b"")

    def rollback_vmodel(self, request: HttpRequest) -> HttpResponse:
        """Handle the rollback of a v-model."""
        with _changing(request):
            return answer_json(self._mesh.rollback_vmodel(request.params[0]))

    @contextlib.contextmanager
    def _waiting(self, waits: bool) -> Iterator[None]:
        if not waits:
            yield
            return
        if not self._places.acquire(blocking=False):
            raise Overloaded(
                f"{WAITING_MAX} wait for loads already.",
                hint="Call it without `sync`, then poll the status.",
            )
        try:
            yield
        finally:
            self._places.release()


@contextlib.contextmanager
def _changing(request: HttpRequest, **takes: object) -> Iterator[dict[str, Any]]:
    """Make a change in the name of the client, or rehearse it. Yields the parameters of the
    query."""
    query = read_query(request, {"dry_run": bool, **takes})
    with audit_context(actor_of(request), "", dry=query.get("dry_run", False)):
        yield query


_S = TypeVar("_S", ModelStatus, VModelStatus)


def _found(status: _S) -> _S:
    """Return the status. Raises UnknownModel or UnknownVModel when there is none: over HTTP that is
    a status of its own."""
    if status.status == "NOT_FOUND":
        hint = "GET /v1/mesh/models and /v1/mesh/vmodels list them; clipper mesh ls does."
        kind = UnknownModel if isinstance(status, ModelStatus) else UnknownVModel
        raise kind(f"the mesh has no {kind.noun} {status.id!r}.", hint=hint)
    return status


def _page(
    kind: Callable[[list[_S], str], object],
    listing: Callable[..., list[_S]],
    request: HttpRequest,
) -> HttpResponse:
    query = read_query(request, {"prefix": str, "after": str, "limit": int})
    limit = query.get("limit", 1000)
    if not 1 <= limit <= LIST_MAX:
        raise InvalidInput(f"limit={limit}: 1 to {LIST_MAX}.")
    found = listing(query.get("prefix", ""), query.get("after", ""), limit)
    return answer_json(kind(found, found[-1].id if len(found) == limit else ""))
