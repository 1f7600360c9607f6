"""Rollouts as they go: looked at a few times a second, moved by what decisions.py decides; and
names whose new version has come up here, which queries follow then.

The stage is a record of the catalog, so it outlives the server. After a start a rollout takes no
queries until both versions are connected here, and counts anew; then a version without a container
is a broken one. Servers that share a store judge each by the queries of its own: who sees a
regression first reverts for all.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.catalog.view import Rollout, View
from clipper.component import Backoff, Health, Stop, WakeFlag, Worker
from clipper.errors import ClipperError, NoReplica, StoreError, Unknown
from clipper.manage.rollouts.decisions import Step, decide, moved
from clipper.serving.models.served_versions import ServedVersions
from clipper.serving.query.resolver import ApplicationResolver, applies
from clipper.serving.rollout.guards import Counts, Figures
from clipper.store.history import audit_context
from clipper.types import VersionedModel

CHECK_S: Final = 0.2
AGAIN_S_MAX: Final = 5.0  # between two tries of a round that failed
_log = logging.getLogger(__name__)
_NOTHING: Final = Figures(Counts(), Counts())


class Rolling:
    """Runs the rollouts of the catalog. Threads: any. is_connected: returns whether a version has a
    container.
    """

    def __init__(
        self,
        catalog: Catalog,
        resolver: ApplicationResolver,
        served: ServedVersions,
        is_connected: Callable[[VersionedModel], bool],
    ) -> None:
        self._catalog = catalog
        self._resolver = resolver
        self._served = served
        self._is_connected = is_connected
        self._lock = threading.Lock()  # of the next two
        self._open = False
        # rollouts, by application and when they began
        self._connected: set[tuple[str, int]] = set()
        self._worker = Worker("clipper-rolling", self._run, again=Backoff(CHECK_S, AGAIN_S_MAX))
        self._changed = WakeFlag(self._worker.stop)
        self._end: Callable[[], None] = lambda: None
        resolver.let_roll(lambda rollout: _name(rollout) in self._connected)

    def start(self) -> None:
        """Start the thread. Raises NotStarted."""
        self._end = self._catalog.on_change(self._on_change)
        self._on_change(self._catalog.view)
        self._worker.start()

    def stop(self) -> None:
        """End the thread, after the rollout that it looks at. Idempotent."""
        self._end()
        self._worker.end()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    def _on_change(self, view: View) -> None:
        with self._lock:
            names = {_name(rollout) for rollout in view.rollouts.values() if rollout.is_open}
            self._connected &= names
            self._open = bool(names or self._served.waiting)
        if self._open:
            self._changed.set()

    def _run(self, stop: Stop) -> None:
        while not stop.requested:
            self._changed.take(CHECK_S if self._open else None)
            if self._served.has_news(self._catalog.view):
                self._catalog.refresh_listeners()
            for rollout in list(self._catalog.view.rollouts.values()):
                if rollout.is_open and not stop.requested:
                    self._check_rollout(rollout)

    def _check_rollout(self, rollout: Rollout) -> None:
        try:
            if _name(rollout) not in self._connected:
                self._try_to_connect(rollout)
            step = self.step(rollout)
            if step.kind != "stay":
                self._move(rollout, step)
        except Unknown:
            return  # over, meanwhile
        except StoreError as error:
            _log.warning("rollout of %s in %s waits: %s", rollout.model, rollout.application, error)
        except Exception:
            _log.exception("rollout of %s in %s", rollout.model, rollout.application)

    def _try_to_connect(self, rollout: Rollout) -> None:
        if all(map(self._is_connected, (rollout.model, rollout.control))):
            with self._lock:
                self._connected.add(_name(rollout))
            self._catalog.refresh_listeners()

    def _move(self, rollout: Rollout, step: Step) -> None:
        verb = {"advance": "grow", "promote": "promote"}.get(step.kind, step.kind)
        with audit_context(f"rollout of {rollout.application}", f"rollout {verb}"):
            new = self._catalog.move_rollout(
                f"rollout {verb}",
                rollout.application,
                lambda now: moved(now, step) if _same(now, rollout) else now,
            )
        if not _same(new, rollout):
            log_change(new)

    # -- looking in

    def check(self, model: VersionedModel) -> None:
        """Raise NoReplica for a version that could not answer."""
        if not self._is_connected(model):
            hint = f"See clipper models {model.name}; to start one: clipper scale {model} 1"
            raise NoReplica(
                f"no container of '{model}' is connected: it could not answer.", hint=hint
            )

    def step(self, rollout: Rollout) -> Step:
        """Return the step that the current counts call for."""
        stage = self._resolver.stage(rollout.application)
        gone = "" if applies(self._catalog.view, rollout) else why_gone(self._catalog.view, rollout)
        if stage is None or not stage.is_of(rollout):
            if gone or not rollout.is_open:
                return decide(rollout, _NOTHING, 0.0, gone)
            return Step("stay", f"waits until {rollout.control} and {rollout.model} are connected")
        return decide(rollout, stage.figures(), time.monotonic() - stage.started_s, gone)

    def status(self, rollout: Rollout) -> dict[str, object]:
        """Return the record, how far it is, and what it waits for."""
        step, stage = self.step(rollout), self._resolver.stage(rollout.application)
        row: dict[str, object] = msgspec.to_builtins(rollout)
        row.pop("schema", None)
        row |= {key: str(getattr(rollout, key)) for key in ("model", "link", "control")}
        row |= {"share": rollout.share, "guards": [], "new": None, "before": None}
        if rollout.is_open:
            row |= {
                "waits": step.reason,
                "guards": [msgspec.structs.asdict(one) for one in step.verdicts],
            }
        if stage is not None and stage.is_of(rollout):
            figures = stage.figures()
            row |= {
                "new": msgspec.structs.asdict(figures.new),
                "before": msgspec.structs.asdict(figures.before),
            }
        return row


def _name(rollout: Rollout) -> tuple[str, int]:
    return rollout.application, rollout.began_us


def _same(one: Rollout, other: Rollout) -> bool:
    return (_name(one), one.stage, one.state) == (_name(other), other.stage, other.state)


def why_gone(view: View, rollout: Rollout) -> str:
    """Explain why nothing is left to roll out."""
    app = view.applications.get(rollout.application)
    if app is None or rollout.link not in app.models:
        return f"{rollout.application} no longer links '{rollout.link}'"
    try:
        model_id = view.model(rollout.link).id
        view.model(rollout.model)
        return (
            f"'{rollout.link}' is {model_id} now"
            if model_id != rollout.control
            else f"{rollout.model} is out of service"
        )
    except ClipperError as error:
        return error.message.rstrip(".")


def log_change(rollout: Rollout) -> None:
    """Log a change of a rollout."""
    level = logging.WARNING if rollout.state in ("reverted", "aborted") else logging.INFO
    what = (
        rollout.state
        if not rollout.is_open
        else f"{rollout.state} at {rollout.share:.4g} of the queries"
    )
    about = {"application": rollout.application, "model": str(rollout.model), "event": "rollout"}
    _log.log(
        level,
        "rollout of %s in %s: %s (%s)",
        rollout.model,
        rollout.application,
        what,
        rollout.reason,
        extra=about,
    )
