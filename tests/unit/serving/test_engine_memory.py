"""Memory for an engine's tables is found once for each engine, and a server that closes does not
wait for all of it."""

import threading
from typing import Any

from clipper.serving.models.engine_memory import EngineMemory


class FakeEngine:
    """A fake engine with a cache of `stretches` stretches and a small table; touching a stretch
    waits for `may_go_on`."""

    def __init__(self, stretches: int) -> None:
        self.stretches = stretches
        self.touched: list[int] = []
        self.tables = 0
        self.started, self.may_go_on, self.ended = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    def touch_pending(self, start: int = 0) -> int:
        assert start == 0
        self.tables += 1
        return 0

    def touch_cache(self, start: int = 0) -> int:
        self.started.set()
        assert self.may_go_on.wait(30)
        self.touched.append(start)
        if start + 1 < self.stretches:
            return start + 1
        self.ended.set()
        return 0


def test_each_engine_is_prepared_once() -> None:
    memory, engines = EngineMemory(), [FakeEngine(3), FakeEngine(1)]
    for engine in engines * 2:
        prepare(memory, engine)
    for engine in engines:
        engine.may_go_on.set()
        assert engine.ended.wait(30)
    memory.stop()
    assert [(engine.tables, engine.touched) for engine in engines] == [(1, [0, 1, 2]), (1, [0])]


def test_what_is_under_way_ends_with_its_stretch() -> None:
    memory, engine, late = EngineMemory(), FakeEngine(1000), FakeEngine(1)
    prepare(memory, engine)
    assert engine.started.wait(30)
    stopping = threading.Thread(target=memory.stop)
    stopping.start()
    while not memory._stopping:
        pass
    engine.may_go_on.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert engine.touched == [0]
    prepare(memory, late)
    assert late.touched == []


def prepare(memory: EngineMemory, engine: Any) -> None:
    memory.prepare(engine)
