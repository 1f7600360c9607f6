"""The doors of a server to the mesh: what `ClipperServer` inherits, and what a node of the mesh
stands on."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from clipper.catalog import Catalog
from clipper.config import Config
from clipper.errors import NotAllowed, UnknownModel
from clipper.mesh.facade import ModelStatus
from clipper.mesh.node.node import Mesh
from clipper.mesh.records import Policy
from clipper.mesh.routing.router import MeshedModel
from clipper.serving.containers import Containers, Replica
from clipper.serving.ear import Future
from clipper.serving.engines import Engines
from clipper.serving.models import RunningModels
from clipper.serving.processor import Meshed, Question
from clipper.serving.questions import Questions
from clipper.store import Store
from clipper.types import Batching, Model, PredictionRequest, VersionedModel

NO_POLICY: Final = Policy()
FOREVER_S: Final = 1e9
LANE_ROWS: Final = (
    2048  # waiting in one lane of a meshed model: there are many, and each takes memory
)


class Serves(Protocol):
    """What the mesh needs of a server."""

    config: Config
    catalog: Catalog
    _mesh: Mesh | None

    @property
    def address(self) -> str: ...

    @property
    def token(self) -> str: ...

    @property
    def mesh(self) -> Mesh: ...

    def schedule_prediction(self, request: PredictionRequest) -> Future: ...

    def _check_open(self) -> None: ...


class Ground:
    """A server, as a node of the mesh sees it. Threads: any."""

    def __init__(
        self,
        server: Serves,
        engines: Engines,
        running: RunningModels,
        questions: Questions,
        containers: Containers,
    ) -> None:
        self._server, self._engines, self._running = server, engines, running
        self._questions, self._containers = questions, containers

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def token(self) -> str:
        return self._server.token

    @property
    def batching(self) -> Batching:
        return self._server.config.batching

    def question(self, record: Model, why: Any) -> tuple[Question, Question]:
        settings = self._server.config.mesh
        core = self._running.unlisted(
            record, min(LANE_ROWS, self._server.config.limits.queue_rows_max)
        )
        slo_us = int(settings.deadline_ms * 1000)
        question = self._questions.alone(core, Meshed(record, why), slo_us)
        return question, msgspec.structs.replace(
            question, slo_us=slo_us + int(settings.load_s * 1e6)
        )

    def replicas(self, id: VersionedModel) -> Sequence[Replica]:
        return self._containers.of(id)

    def disconnect(self, id: VersionedModel, number: int) -> None:
        for replica in self._containers.of(id):
            if replica.hello.replica == number:
                replica.engine.disconnect(replica.conn)

    def close(self, question: Question, seconds: float) -> None:
        core = next(iter(question.cores.values()))
        core.engine.expect(core.index, time.monotonic_ns() // 1000 + int(seconds * 1e6))

    def forget(self, question: Question) -> None:
        self.close(question, FOREVER_S)
        self._engines.forget(question.models[0].name)

    def linking(self, id: str) -> Sequence[str]:
        view = self._server.catalog.view
        return [
            app.name
            for app in view.applications.values()
            if any(link.name == id for link in app.models)
        ]

    def link_again(self) -> None:
        self._server.catalog.refresh_listeners()

    def is_taken(self, name: str) -> bool:
        view = self._server.catalog.view
        return name in view.versions or name in view.applications


class Joining:
    """Threads: any."""

    _mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """Models that are loaded when they are asked: docs/mesh.md. NotAllowed without
        `mesh=True`."""
        if self._mesh is None:
            raise NotAllowed(
                "this server is no node of a mesh.", hint="Start it by clipper.start(mesh=True)."
            )
        return self._mesh

    def register_model(
        self: Serves,
        id: str,
        path: str,
        type: str = "",
        key: str = "",
        *,
        input: str = "",
        output: str = "",
        load_now: bool = False,
        sync: bool = False,
        policy: Policy = NO_POLICY,
    ) -> ModelStatus:
        """Make a model known to the mesh: `server.register_model("m1", "models/m1.onnx")`. It is
        loaded when it is asked.

        type: `onnx`, `skops`, `python` ("module:attribute"), `packed`, or another that a runtime
        opens; by the path's ending when empty. input, output: `f32[64]`, ...; as its first copy
        says when empty.  load_now: at once; sync: and wait for it. The same registration again is
        no error; AlreadyExists when it differs.
        """
        self._check_open()
        return self.mesh.register(
            id,
            path,
            type,
            key,
            input=input,
            output=output,
            load_now=load_now,
            sync=sync,
            policy=policy,
        )

    def predict(
        self: Serves, name: str, x: Any, slo_ms: float | None = None, salt: int = 0
    ) -> Future:
        """Ask one model by its name, of the catalog or of the mesh; -> the Future of an Answer.
        UnknownModel, InvalidInput."""
        return self.schedule_prediction(
            PredictionRequest(x, candidate_models=(name,), slo_ms=slo_ms, salt=salt)
        )

    def _meshed_model(self: Serves, name: str) -> MeshedModel:
        route = self._mesh.routes.route(name) if self._mesh is not None else None
        if route is None:
            raise UnknownModel(f"no model {name!r} is registered.")
        return MeshedModel(route)

    def _join(self: Serves, store: Store, folder: Path, ground: Ground) -> Mesh | None:
        if not self.config.mesh.enabled:
            return None
        self._mesh = Mesh(self.config.mesh, store, ground, folder)
        return self._mesh


if TYPE_CHECKING:
    from clipper.mesh.node.node import Ground as _Ground

    def _stands(ground: Ground) -> _Ground:
        return ground
