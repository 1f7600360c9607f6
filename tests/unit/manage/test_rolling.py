"""The thread of rollouts: it ends when it is told, and no clock of the wall moves a stage."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from clipper.catalog.view import Rollout
from clipper.clock import wall_clock
from clipper.manage.rollouts.decisions import STAGES
from clipper.manage.rollouts.rolling import Rolling
from clipper.serving.models.served_versions import ServedVersions
from clipper.serving.rollout.guards import Counts, Figures
from clipper.serving.rollout.traffic_split import StageStats
from clipper.types import VersionedModel

LIMIT_S = 20.0
ONE, TWO = VersionedModel("svm", 1), VersionedModel("svm", 2)
SERVED = ServedVersions(SimpleNamespace(answering=lambda model: 0))
ROLLOUT = Rollout("digits", TWO, VersionedModel("svm"), ONE, STAGES, 3600.0, "error<1%", 0.05)


class FakeCatalog:
    """The view of a catalog, and who is told of its changes."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.listeners: list[Callable[[Any], None]] = []
        self.view = self.view_of(*rollouts)

    @staticmethod
    def view_of(*rollouts: Rollout) -> Any:
        return SimpleNamespace(rollouts={one.application: one for one in rollouts})

    def on_change(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.clear()

    def change(self, *rollouts: Rollout) -> None:
        self.view = self.view_of(*rollouts)
        for listener in self.listeners:
            listener(self.view)

    def refresh_listeners(self) -> None: ...


class FakeResolver:
    """A resolver whose `stage` waits until the test lets it go on."""

    def __init__(self, stage: Any = None) -> None:
        self.found = stage
        self.asked = threading.Event()
        self.goes_on = threading.Event()

    def let_roll(self, may: Callable[[Rollout], bool]) -> None: ...

    def stage(self, application: str) -> Any:
        self.asked.set()
        assert self.goes_on.wait(LIMIT_S)
        return self.found


def test_a_stop_while_the_last_rollout_ends_is_not_lost() -> None:
    catalog, resolver = FakeCatalog(ROLLOUT), FakeResolver()
    rolling = Rolling(catalog, resolver, SERVED, lambda model: False)  # type: ignore[arg-type]
    rolling.start()
    assert resolver.asked.wait(LIMIT_S)
    catalog.change()  # from now on the thread waits without a limit
    closing = threading.Thread(target=rolling.stop)
    closing.start()
    while catalog.listeners:
        time.sleep(0.001)
    time.sleep(0.05)  # stop() has notified a thread that does not wait yet
    resolver.goes_on.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert rolling.health()[0].state == "ended"


def test_a_wall_clock_that_jumps_moves_no_stage(monkeypatch: Any) -> None:
    now_s = time.monotonic()
    stage = StageStats(ROLLOUT, now_s, lambda: (0, 0))
    good = Figures(Counts(5000, 0), Counts(5000))
    monkeypatch.setattr(StageStats, "figures", lambda self: good)
    resolver = FakeResolver(stage)
    resolver.goes_on.set()
    catalog = FakeCatalog(ROLLOUT)
    rolling = Rolling(catalog, resolver, SERVED, lambda model: True)  # type: ignore[arg-type]
    monkeypatch.setattr("clipper.manage.rollouts.rolling.applies", lambda view, rollout: True)
    for hours in (0, 2, 1000, -1000):
        with wall_clock(lambda hours=hours: time.time_ns() + hours * 3600 * 10**9):  # type: ignore[misc]
            assert rolling.step(ROLLOUT).reason.startswith("it is held for 3")
    monkeypatch.setattr(stage, "started_s", now_s - 3601)
    assert rolling.step(ROLLOUT).kind == "advance"
