"""Stages of deployments, and the environments that models run in: each is built in a thread of its
own, while others serve."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from clipper.component import Stop, Worker, cause_of
from clipper.deploy.needs import needs_of
from clipper.deploy.packages.environments import Environments
from clipper.errors import ClipperError, InvalidInput, ShuttingDown
from clipper.types import Model, VersionedModel

_log = logging.getLogger(__name__)
CLOSE_S: Final = 10.0  # for what is built or pulled when the server closes
PULLING: Final = "pulling"
PACKING: Final = "packing"
BUILDING: Final = "building environment"
IMAGE: Final = "building image"
STARTING: Final = "starting"
LOADING: Final = "loading"
WARM: Final = "warm"
FAILED: Final = "failed"


class Stage(msgspec.Struct, frozen=True):
    """The stage of a version: pulling, packing, building an environment or image, starting,
    loading, warm, or failed. since_s: on the monotonic clock.
    """

    stage: str
    detail: str = ""
    since_s: float = 0.0


class Building:
    """Builds the environments of models, each in a thread. Threads: any.

    models: returns all models that are in service or being deployed.  done: called in the thread of
    a build, with the error or ""."""

    def __init__(
        self,
        models: Callable[[], Iterable[Model]],
        environments: Environments,
        done: Callable[[Model, str], None],
    ) -> None:
        self._models, self._environments, self._done = models, environments, done
        self._changed = threading.Condition()
        self._built: set[VersionedModel] = set()  # what is being built
        self._workers: set[Worker] = set()
        self._closing = False
        self._sweeping = threading.Lock()
        self._stages: dict[VersionedModel, Stage] = {}

    # -- stages

    def enter(self, id_: VersionedModel, stage: str, detail: str = "") -> None:
        with self._changed:
            was = self._stages.get(id_)
            since_s = was.since_s if was and was.stage == stage else time.monotonic()
            self._stages[id_] = Stage(stage, detail, since_s)

    def stage_of(self, id_: VersionedModel) -> Stage:
        return self._stages.get(id_, Stage(""))

    def stages(self, name: str) -> dict[VersionedModel, Stage]:
        """Return the stage of each version that was deployed or started here, the oldest first."""
        with self._changed:
            return {id_: stage for id_, stage in sorted(self._stages.items()) if id_.name == name}

    def forget(self, id_: VersionedModel) -> None:
        with self._changed:
            self._stages.pop(id_, None)

    # -- environments

    def interpreter(self, model: Model) -> str:
        """Return the Python that a model's containers run; "" while it is yet to be built, which
        then begins.

        Raises: InvalidInput when it cannot be known what to build.
        """
        lines = needs_of(model).pip()
        if path := self._environments.ready(lines, model.python):
            return path
        self.run(model, BUILDING, lambda: self._build(model, lines))
        return ""

    def run(self, model: Model, stage: str, work: Callable[[], str]) -> None:
        """Do work for a version in a thread of its own, then call `done` with what it returns.

        Does nothing while such a thread runs. An unexpected error of `work` is passed to `done`
        too. Raises NotStarted, ShuttingDown.
        """
        with self._changed:
            if self._closing:
                raise ShuttingDown("this server is closing.")
            if model.id in self._built:
                return

            def build(stop: Stop) -> None:
                self._run(model, work)

            def ended() -> None:
                self._ended(worker)

            worker = Worker("clipper-environment", build, once=True, on_end=ended)
            worker.start()
            self._workers.add(worker)
            self._built.add(model.id)
            self._stages[model.id] = Stage(stage, "", time.monotonic())

    def wait(self, id_: VersionedModel, limit_s: float) -> bool:
        """Wait until nothing is built for that version; return False after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: id_ not in self._built, limit_s)
            return id_ not in self._built

    def _build(self, model: Model, lines: tuple[str, ...]) -> str:
        """Build an environment; return what went wrong, or ""."""
        began, error = time.monotonic(), ""
        _log.info("model %s: building its environment", model.id, extra={"model": str(model.id)})
        try:
            self._environments.build(
                lines, model.python, lambda text: self.enter(model.id, BUILDING, text)
            )
        except (ClipperError, OSError) as failure:
            error = f"no environment for model '{model.id}': {failure}"
        took_s = time.monotonic() - began
        _log.info(
            "model %s: environment %s in %.1f s", model.id, "failed" if error else "built", took_s
        )
        return error

    def _run(self, model: Model, work: Callable[[], str]) -> None:
        try:
            error = work()
        except Exception as failure:
            _log.exception("model %s: its environment", model.id)
            error = f"no environment for model '{model.id}': {cause_of(failure)}"
        finally:
            with self._changed:
                self._built.discard(model.id)  # `done` may begin another
        try:
            self._done(model, error)
        except Exception as failure:
            _log.exception("model %s: its start", model.id)
            if not error:
                self._done(model, f"model '{model.id}' cannot start: {cause_of(failure)}")

    def _ended(self, worker: Worker) -> None:
        with self._changed:
            self._workers.discard(worker)
            self._changed.notify_all()

    def sweep(self) -> int:
        """Remove the environments of retired models, and those half built. Return how many were
        removed."""
        if not self._environments.folder.is_dir():
            return 0
        wanted = []
        with self._sweeping:
            for model in self._models():
                if needs_environment(model):
                    try:
                        wanted.append((needs_of(model).pip(), model.python))
                    except InvalidInput as error:
                        _log.warning("%s", error)
            return self._environments.sweep(wanted)

    def close(self) -> None:
        """End what is being built, and wait for it. Idempotent."""
        self._environments.close()
        with self._changed:
            self._closing = True
            workers = list(self._workers)
        until_s = time.monotonic() + CLOSE_S
        for worker in workers:
            worker.end(until_s - time.monotonic())


def needs_environment(model: Model) -> bool:
    """Return whether its processes run another Python than the server's."""
    return bool(
        model.target and (model.requirements or model.python) and model.deployer in ("", "process")
    )
