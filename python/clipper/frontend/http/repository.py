"""Models loaded and unloaded as the Open Inference Protocol has it, on the address of management:
containers come and go.

The record of a model, its versions and who links it stay; queries of an unloaded model end as those
without a container do.
"""

import time

from clipper.errors import DeployFailed, UnknownModel
from clipper.frontend.http.messages import HttpRequest, HttpResponse, answer_json, on_worker
from clipper.frontend.http.router import Router
from clipper.frontend.server_interface import ServerInterface
from clipper.types import Model

_LOOK_S = 0.02


class ModelRepository:
    """Threads: any. Both verbs run on a worker thread."""

    def __init__(self, node: ServerInterface) -> None:
        self._node = node

    def add_to(self, routes: Router) -> None:
        routes.add("POST", "/v2/repository/models/{}/load", on_worker(self.load))
        routes.add("POST", "/v2/repository/models/{}/unload", on_worker(self.unload))

    def load(self, request: HttpRequest) -> HttpResponse:
        """Starts a container of the latest version where there is none, and answers once it is
        connected. DeployFailed when that takes longer than `server.load_s`."""
        self.load_named(request.params[0])
        return answer_json({})

    def load_named(self, name: str) -> None:
        model = self._latest(name)
        if not model.replicas:
            self._node.scale(model.id, 1)
        until = time.monotonic() + self._node.config.server.load_s
        while str(model.id) not in self._node.running():
            if time.monotonic() >= until or self._node.closed():
                load_s = self._node.config.server.load_s
                raise DeployFailed(
                    f"no container of '{model.id}' connected within {load_s:g} s.",
                    hint="See server.load_s.",
                )
            time.sleep(_LOOK_S)

    def unload(self, request: HttpRequest) -> HttpResponse:
        """Stops the containers of every version; whoever links the model has its default from then
        on."""
        self.unload_named(request.params[0])
        return answer_json({})

    def unload_named(self, name: str) -> None:
        name = self._latest(name).name
        for model in self._node.catalog.view.versions.get(name, ()):
            if not model.retired_us:
                self._node.scale(model.id, 0)

    def _latest(self, name: str) -> Model:
        view = self._node.catalog.view
        if name not in view.versions:
            raise UnknownModel.named(name[:200], {model.name for model in view.models()})
        return view.model(name)
