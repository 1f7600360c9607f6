"""Loading and unloading of models by the Open Inference Protocol, on the management address.

Only containers start and stop. The records of a model, its versions and its links stay; queries of
an unloaded model end like those of any model without a container.
"""

import time

from clipper.errors import DeployFailed, UnknownModel
from clipper.frontend.http.messages import HttpRequest, HttpResponse, answer_json, on_worker
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.server_interface import ServerInterface
from clipper.types import Model

_CHECK_S = 0.02


class ModelContainers:
    """Starts and stops containers of models. Threads: any; both operations block."""

    def __init__(self, node: ServerInterface) -> None:
        self._node = node

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        routes.add("POST", "/v2/repository/models/{}/load", on_worker(self.load))
        routes.add("POST", "/v2/repository/models/{}/unload", on_worker(self.unload))

    def load(self, request: HttpRequest) -> HttpResponse:
        """Load the model of the path: see `load_named`."""
        self.load_named(request.params[0])
        return answer_json({})

    def load_named(self, name: str) -> None:
        """Start a container of the latest version if there is none, and wait until it is connected.

        Raises UnknownModel, and DeployFailed after `server.load_s` seconds.
        """
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
            time.sleep(_CHECK_S)

    def unload(self, request: HttpRequest) -> HttpResponse:
        """Unload the model of the path: see `unload_named`."""
        self.unload_named(request.params[0])
        return answer_json({})

    def unload_named(self, name: str) -> None:
        """Stop the containers of every version. Applications then answer with their default."""
        name = self._latest(name).name
        for model in self._node.catalog.view.versions.get(name, ()):
            if not model.retired_us:
                self._node.scale(model.id, 0)

    def _latest(self, name: str) -> Model:
        view = self._node.catalog.view
        if name not in view.versions:
            raise UnknownModel.named(name[:200], {model.name for model in view.models()})
        return view.model(name)
