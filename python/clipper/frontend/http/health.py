"""Probes that tell load balancers, and those who start and watch a server, whether it lives and
whether it can answer. They need no credentials, on any listener."""

from typing import Final

from clipper.frontend.http.messages import (
    HandlerResult,
    HttpRequest,
    HttpResponse,
    WorkerTask,
    answer_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.server_interface import ServerInterface

_LIVE: Final = ("/livez", "/healthz", "/v2/health/live")
_READY: Final = ("/readyz", "/v2/health/ready")
# a probe has no token
PROBES: Final = frozenset(path.encode() for path in (*_LIVE, *_READY))


class HealthRoutes:
    """The routes of health: of the Open Inference Protocol, and those of Kubernetes. Threads:
    any."""

    def __init__(self, node: ServerInterface) -> None:
        self._node = node

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        for path in _LIVE:
            routes.add("GET", path, self.live)
        for path in _READY:
            routes.add("GET", path, self.ready)

    def live(self, request: HttpRequest) -> HandlerResult:
        """Return that the process is alive; 503 if a part that it cannot do without has failed."""
        dead = self._node.dead()
        if dead:
            return unavailable({"live": False, "failed": dead})
        return answer_json({"live": True})

    def ready(self, request: HttpRequest) -> HandlerResult:
        """Return whether queries can be answered; 503 if not: see ServerInterface.unready."""

        def check() -> HttpResponse:
            waiting = self._node.unready()
            body = {
                "live": not self._node.dead(),
                "ready": not waiting,
                **({"waiting_for": waiting} if waiting else {}),
            }
            if store := self._node.store():
                body["store"] = store
            if held := self._node.held():
                body["held"] = held
            if degraded := self._node.degraded():
                body["degraded"] = degraded
            return answer_json(body) if not waiting else unavailable(body)

        return WorkerTask(check)


def unavailable(body: object) -> HttpResponse:
    """Return 503 with a body, to be asked again in a second."""
    response = answer_json(body, 503)
    response.headers = ((b"retry-after", b"1"),)
    return response
