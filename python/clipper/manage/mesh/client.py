"""The mesh of a running server from elsewhere: `clipper.connect().mesh`, with the verbs, types and
errors of `server.mesh`."""

import contextlib
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from clipper.errors import ClipperError, InvalidInput, NoServer, UnknownModel
from clipper.manage.stream import Stream
from clipper.manage.verbs.sending import Requests
from clipper.mesh.decisions.vmodels import UnknownVModel
from clipper.mesh.records import Instance, MeshModel, Policy, VModel
from clipper.mesh.reports import Explanation, Info, MeshEvent, ModelStatus, VModelStatus
from clipper.metrics.samples import Stats
from clipper.options import refusing_unknown_keywords

_RECORDS: Mapping[str, type[MeshModel | VModel | Instance]] = {
    "model": MeshModel,
    "vmodel": VModel,
    "instance": Instance,
}
_AT = "/v1/mesh"
_T = TypeVar("_T")


class RequestClient(Requests, Protocol):
    """Interface of manage.client.Client that this module needs."""

    def stream(self, path: str = ...) -> Stream:
        """Yield the server-sent events of a path."""


@refusing_unknown_keywords
class MeshClient:
    """The methods of MeshNode, called over HTTP. Threads: any.

    A path is one of the server's host. With `dry_run` a change is checked, and returns or raises
    the same, but nothing is written.
    """

    def __init__(self, client: RequestClient) -> None:
        self._client = client

    @property
    def instance(self) -> str:
        """The id of the node that answers."""
        return str(self._decoded("GET", "/v1/mesh")["instance"])

    def stats(self) -> Stats:
        """Return the counters and gauges of the node that answers."""
        return dict(self._decoded("GET", "/v1/mesh")["stats"])

    # -- models

    def register(
        self,
        id: str,
        path: str,
        type: str = "",
        key: str = "",
        *,
        input: str = "",
        output: str = "",
        load_now: bool = False,
        sync: bool = False,
        used_ms: int = 0,
        policy: Policy = Policy(),  # noqa: B008 - immutable
        owner: str = "",
        dry_run: bool = False,
    ) -> ModelStatus:
        """Make a model known; type: guessed from the path when empty. AlreadyExists when it is
        known as another."""
        members = {
            "path": path,
            "type": type,
            "key": key,
            "input": input,
            "output": output,
            "load_now": load_now,
            "sync": sync,
            "used_ms": used_ms,
            "policy": policy,
            "owner": owner,
        }
        return self._requested(ModelStatus, "PUT", _model(id) + _rehearsed(dry_run), members)

    def unregister(self, id: str, *, dry_run: bool = False) -> None:
        """Forget a model; absent: no error. StillLinked while a v-model names it."""
        self._decoded("DELETE", _model(id) + _rehearsed(dry_run))

    def status(self, id: str) -> ModelStatus:
        """Return the status of a model. NOT_FOUND is a status here and no error."""
        try:
            return self._requested(ModelStatus, "GET", _model(id))
        except UnknownModel:
            return ModelStatus(id, "NOT_FOUND")

    def ensure_loaded(self, id: str, *, sync: bool = False, used_ms: int = 0) -> ModelStatus:
        """Load it if no copy is. UnknownModel."""
        return self._requested(
            ModelStatus, "POST", f"{_model(id)}/load", {"sync": sync, "used_ms": used_ms}
        )

    def models(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[ModelStatus]:
        """Return the models after the id `after`, by id."""
        return self._listed("models", ModelStatus, prefix, after, limit)

    def explain(self, id: str) -> Explanation:
        """Explain why a model is where it is, and what happens next. Raises UnknownModel."""
        return self._requested(Explanation, "GET", f"{_model(id)}/explain")

    # -- v-models

    def set_vmodel(
        self,
        id: str,
        target: str,
        *,
        owner: str = "",
        update_only: bool = False,
        model: Info | None = None,
        auto_delete: bool = False,
        load_now: bool = False,
        force: bool = False,
        sync: bool = False,
        expected: str = "",
        share: float = 0.0,
        give_up_s: float = 0.0,
        dry_run: bool = False,
    ) -> VModelStatus:
        """Make a v-model, or let it stand for another model. Forbidden, StoreConflict,
        UnknownModel, AlreadyExists."""
        members = {
            "target": target,
            "owner": owner,
            "update_only": update_only,
            "model": model,
            "auto_delete": auto_delete,
            "load_now": load_now,
            "force": force,
            "sync": sync,
            "expected": expected,
            "share": share,
            "give_up_s": give_up_s,
        }
        return self._requested(VModelStatus, "PUT", _vmodel(id) + _rehearsed(dry_run), members)

    def delete_vmodel(self, id: str, owner: str = "", *, dry_run: bool = False) -> None:
        """Delete a vmodel. It is no error if there is none. Raises Forbidden when it is another
        owner's."""
        self._decoded(
            "DELETE", _vmodel(id) + _query(owner=owner, dry_run="true" if dry_run else "")
        )

    def vmodel_status(self, id: str, owner: str = "") -> VModelStatus:
        """Return the status of a vmodel: NOT_FOUND when there is none, or it is another owner's."""
        try:
            return self._requested(VModelStatus, "GET", _vmodel(id) + _query(owner=owner))
        except UnknownVModel:
            return VModelStatus(id, "NOT_FOUND")

    def rollback_vmodel(self, id: str, *, dry_run: bool = False) -> VModelStatus:
        """Set a vmodel back to the model before."""
        return self._requested(VModelStatus, "POST", f"{_vmodel(id)}/rollback{_rehearsed(dry_run)}")

    def vmodels(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[VModelStatus]:
        """Return the v-models, by name."""
        return self._listed("vmodels", VModelStatus, prefix, after, limit)

    # -- nodes, and what changes

    def instances(self) -> list[Instance]:
        """Return the live nodes, by id."""
        return msgspec.convert(
            self._decoded("GET", "/v1/mesh/instances")["instances"], list[Instance]
        )

    def watch(
        self, prefix: str = "", *, stop: Callable[[], bool] = lambda: False
    ) -> Generator[MeshEvent, None, None]:
        """Iterate over the present entries, then SYNC, then changes.

        Ends when `stop()` is true at an event. Raises NoServer when the server is gone.
        """
        with _known():
            stream = self._client.stream("/v1/mesh/watch" + _query(prefix=prefix))
        try:
            for _, message in stream:
                if stop():
                    return
                yield event_of(message)
        finally:
            stream.close()

    # -- inside

    def _decoded(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, Any]:
        with _known():
            return self._client.request(method, path, members)

    def _requested(
        self, kind: type[_T], method: str, path: str, members: dict[str, object] | None = None
    ) -> _T:
        return msgspec.convert(self._decoded(method, path, members), kind)

    def _listed(self, member: str, kind: type[_T], prefix: str, after: str, limit: int) -> list[_T]:
        found = self._decoded(
            "GET", f"/v1/mesh/{member}{_query(prefix=prefix, after=after, limit=limit)}"
        )
        return [msgspec.convert(one, kind) for one in found[member]]


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """Raise NoServer for a server without such routes, which is not in a mesh."""
    try:
        yield
    except ClipperError as error:
        if (
            f"there is nothing at '{_AT}" not in error.message
            and "has no readings to watch" not in error.message
        ):
            raise
        hint = (
            "Start it with [mesh] enabled = true, or clipper.start(mesh=True); or name another:"
            " --url."
        )
        raise NoServer("that server is not a node of a mesh.", hint=hint) from None


def event_of(message: dict[str, Any]) -> MeshEvent:
    """Return an event as the stream has it."""
    record = message.get("record")
    given_values = msgspec.convert(record, _RECORDS[message["of"]]) if record is not None else None
    return MeshEvent(
        message["kind"], message["of"], message["id"], message["revision"], given_values
    )


def _model(id: str) -> str:
    return f"/v1/mesh/models/{_quoted(id)}"


def _vmodel(id: str) -> str:
    return f"/v1/mesh/vmodels/{_quoted(id)}"


def _quoted(id: str) -> str:
    if not id:
        raise InvalidInput("an id is empty.", hint="See clipper mesh ls.")
    return urllib.parse.quote(id, safe="")


def _rehearsed(dry_run: bool) -> str:
    return "?dry_run=true" if dry_run else ""


def _query(**given: object) -> str:
    given_values = {name: value for name, value in given.items() if value != ""}
    return f"?{urllib.parse.urlencode(given_values)}" if given_values else ""
