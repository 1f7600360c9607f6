"""Changes of the registry as events for those who watch it."""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Final, Literal

from clipper.mesh.records import Instance, MeshModel, VModel
from clipper.mesh.registry import Registry
from clipper.mesh.reports import MeshEvent
from clipper.store import KeyChange, Mirror

EVENTS_MAX: Final = 10_000  # waiting for one watcher
POLL_S: Final = 0.1  # between checks whether a watch shall end
RecordKind = Literal["model", "vmodel", "instance"]
_Mirror = Mirror[MeshModel] | Mirror[VModel] | Mirror[Instance]
_Change = KeyChange[MeshModel] | KeyChange[VModel] | KeyChange[Instance]


class EventFeed:
    """Watches of the registry. Threads: any.

    stopping: returns whether the node stops; then watches end.
    """

    def __init__(self, registry: Registry, stopping: Callable[[], bool]) -> None:
        self._registry, self._stopping = registry, stopping
        self._watchers: set[Callable[[MeshEvent], None]] = set()

    def start(self, call: Callable[..., None]) -> None:
        """Subscribe to the registry. call: runs a function with arguments on one thread."""

        def subscribe(kind: RecordKind, mirror: _Mirror) -> None:
            mirror.on_change(lambda changes: call(self._publish, kind, changes))

        for kind, mirror in self._mirrors():
            subscribe(kind, mirror)

    def _mirrors(self) -> tuple[tuple[RecordKind, _Mirror], ...]:
        registry = self._registry
        return (
            ("model", registry.models),
            ("vmodel", registry.vmodels),
            ("instance", registry.instances),
        )

    def _publish(self, kind: RecordKind, changes: Sequence[_Change]) -> None:
        for watcher in tuple(self._watchers):
            for change in changes:
                watcher(event_of(kind, change))

    def watch(self, prefix: str, stop: Callable[[], bool]) -> Generator[MeshEvent, None, None]:
        """Yield the present records whose ids start with `prefix`, SYNC, and then changes.

        RESET says that changes were missed. Ends when `stop` returns True or the node stops.
        """
        waiting: queue.Queue[MeshEvent] = queue.Queue(EVENTS_MAX)
        missed = threading.Event()

        def on_event(event: MeshEvent) -> None:
            if event.id.startswith(prefix):
                try:
                    waiting.put_nowait(event)
                except queue.Full:
                    missed.set()

        self._watchers.add(on_event)
        try:
            mirrors = self._mirrors()
            for kind, mirror in mirrors:
                for id in sorted(id for id in mirror if id.startswith(prefix)):
                    if (record := mirror.record(id)) is not None:
                        yield MeshEvent("PUT", kind, id, record.revision, mirror.get(id))
            yield MeshEvent("SYNC", "", "", max(mirror.revision for _, mirror in mirrors))
            while not self._stopping() and not stop():
                if missed.is_set():
                    missed.clear()
                    with contextlib.suppress(queue.Empty):
                        while True:
                            waiting.get_nowait()
                    yield MeshEvent("RESET", "", "", self._registry.models.revision)
                with contextlib.suppress(queue.Empty):
                    yield waiting.get(timeout=POLL_S)
        finally:
            self._watchers.discard(on_event)


def event_of(kind: RecordKind, change: _Change) -> MeshEvent:
    """Return the event of a change."""
    record = change.new
    if record is None:
        return MeshEvent("DELETE", kind, change.key, change.old.revision if change.old else 0)
    return MeshEvent("PUT", kind, change.key, record.revision, change.after)
