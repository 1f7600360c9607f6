"""Sizes of models: learned from loads that ran alone, guessed for the others."""

import builtins
import gc
import subprocess
import sys
import threading
import types

import pytest

from clipper_container.host import model_sizes as sizes
from clipper_container.host.model_sizes import (
    COLLECT_BYTES,
    COLLECT_S,
    GROWN_SHARE,
    CollectionSchedule,
    ModelSizes,
    UnloadedModel,
)
from clipper_container.machine import PAGE
from container_sdk.tests import fake_server as fake


@pytest.fixture
def memory(monkeypatch):
    """A fake of the process's memory; a test sets its size."""
    now = {"bytes": 1 << 30}
    monkeypatch.setattr(sizes, "resident_bytes", lambda: now["bytes"])
    monkeypatch.setattr(sizes, "allocated_bytes", lambda: 0)
    return now


def file_of(folder, size):
    path = folder / f"{size}.model"
    path.write_bytes(bytes(size))
    return str(path)


def load(learner, memory, path, grows, type="t"):
    measure = learner.start(type, path)
    try:
        memory["bytes"] += grows
        return measure.take()
    finally:
        measure.end()


ARRAY = """
import numpy as np
from clipper_container.host.model_sizes import allocated_bytes, resident_bytes

before = resident_bytes(), allocated_bytes()
held = np.ones(64 << 20, np.uint8)
assert resident_bytes() - before[0] >= 60 << 20
assert allocated_bytes() - before[1] >= 60 << 20
"""


def test_what_numpy_takes_is_seen():
    # here an allocator may have as much left of other tests
    subprocess.run([sys.executable, "-c", ARRAY], check=True)


def test_the_first_model_of_a_type_is_as_large_as_what_it_holds(tmp_path, memory):
    learner, path = ModelSizes(), file_of(tmp_path, 1000)
    assert learner.default_bytes() == sizes.DEFAULT_BYTES
    assert load(learner, memory, path, 50 << 20) == 50 << 20
    assert learner.predict("t", path) == (64 << 10) + 2000, "others may share a part of it"
    assert load(learner, memory, path, 70_000) == 70_000
    assert learner.predict("t", path) == 70_000
    assert learner.predict("t", "/nowhere") == learner.default_bytes() == 70_000
    assert load(learner, memory, path, 0) == PAGE


def test_small_files_predict_nothing_of_large_ones_until_one_was_seen(tmp_path, memory):
    learner = ModelSizes()
    small, large, larger = (file_of(tmp_path, size) for size in (1000, 4 << 20, 8 << 20))
    for _ in range(4):
        load(learner, memory, small, 100_000)
    assert learner.predict("t", large) == pytest.approx(2 * (4 << 20), rel=0.05)
    load(learner, memory, large, 100_000 + 5 * (4 << 20))
    assert learner.predict("t", larger) == pytest.approx(5 * (8 << 20), rel=0.05)
    assert learner.predict("t", small) == pytest.approx(100_000, rel=0.2)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_load_imports_is_not_the_models(tmp_path, memory, monkeypatch, fails):
    (tmp_path / "inner_part.py").write_text("import frameworks_memory\nframeworks_memory.grow(3)\n")
    (tmp_path / "imported_by_model.py").write_text(
        "import frameworks_memory\nframeworks_memory.grow(40)\nimport inner_part\n"
        + ("1 / 0\n" if fails else "")
    )
    grown = types.ModuleType("frameworks_memory")
    vars(grown)["grow"] = lambda mib: memory.update(bytes=memory["bytes"] + (mib << 20))
    monkeypatch.setitem(sys.modules, "frameworks_memory", grown)
    monkeypatch.syspath_prepend(tmp_path)
    before, learner = builtins.__import__, ModelSizes()
    measure = learner.start("t", "/nowhere")
    other = threading.Thread(target=lambda: exec("import imported_elsewhere"))  # as a server does
    (tmp_path / "imported_elsewhere.py").write_text("import frameworks_memory\n")
    other.start()
    fake.join(other)
    try:
        exec("import imported_by_model")
    except ZeroDivisionError:
        assert fails
    memory["bytes"] += 5 << 20
    assert measure.take() == 5 << 20
    measure.end()
    measure.end()
    assert builtins.__import__ is before
    assert load(learner, memory, "/nowhere", 7 << 20) == 7 << 20
    for name in ("imported_by_model", "inner_part", "imported_elsewhere"):
        sys.modules.pop(name, None)


def test_sizes_of_simultaneous_loads_are_estimated_and_not_learned_from(tmp_path, memory):
    learner, path = ModelSizes(), file_of(tmp_path, 1000)
    for _ in range(sizes.ALONE):
        load(learner, memory, path, 70_000)
    one, other = learner.start("t", path), learner.start("t", path)
    memory["bytes"] += 9 << 20
    assert one.take() == other.take() == 70_000
    one.end()
    other.end()
    assert load(learner, memory, path, 80_000) == 80_000


def test_a_load_alone_waits_for_those_that_run_and_holds_up_the_next_until_it_ends_or_is_given_up(
    tmp_path, memory
):
    learner, path = ModelSizes(), file_of(tmp_path, 1000)
    for _ in range(sizes.ALONE):
        load(learner, memory, path, 70_000)
    running = learner.start("t", path)
    started = [threading.Event(), threading.Event()]
    alone = []

    def begin(i, type):
        alone.append(learner.start(type, path))
        started[i].set()

    threads = [threading.Thread(target=begin, args=(0, "new"))]
    threads[0].start()
    assert not started[0].wait(0.05)
    running.end()
    assert started[0].wait(60)
    threads.append(threading.Thread(target=begin, args=(1, "t")))
    threads[1].start()
    assert not started[1].wait(0.05)
    alone[0].end()
    alone[0].end()
    assert started[1].wait(60)
    alone[1].end()
    for thread in threads:
        fake.join(thread)


def test_the_bytes_of_a_folder(tmp_path):
    file_of(tmp_path, 10)
    file_of(tmp_path, 32)
    (tmp_path / "sub").mkdir()
    assert sizes.file_bytes(str(tmp_path)) == 42
    assert sizes.file_bytes(str(tmp_path / "10.model")) == 10
    assert sizes.file_bytes("module:attribute") == 0


def test_what_little_models_left_is_searched_for_once_in_a_while_and_what_large_ones_did_at_once():
    left = CollectionSchedule(100.0, 0)
    assert left.wait_s(1000.0, 0) is None
    left.add(COLLECT_BYTES // 2)
    assert left.wait_s(101.0, 0) == COLLECT_S - 1.0
    assert left.wait_s(100.0 + COLLECT_S, 0) == 0.0
    left.add(COLLECT_BYTES // 2)
    assert left.wait_s(101.0, 0) == 0.0
    left.clear(101.0)
    assert left.wait_s(500.0, 0) is None
    left.add(1)
    assert left.wait_s(102.0, 0) == COLLECT_S - 1.0


def test_memory_that_no_model_is_known_to_occupy_is_searched_for_when_it_has_grown() -> None:
    grown_max = 1 << 30
    left = CollectionSchedule(0.0, GROWN_SHARE * grown_max)
    for other in (500, 100, 100 + grown_max - 1):  # of frameworks, and others
        assert left.wait_s(0.0, other) is None
    assert left.wait_s(0.0, 100 + grown_max) == 0.0
    left.clear(0.0)
    assert left.wait_s(0.0, 100 + grown_max) is None, "a collection did not free it"
    assert left.wait_s(0.0, 100 + 2 * grown_max) == 0.0


class Part:
    """A part of a model, perhaps in a cycle."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize("cyclic", ["nothing", "model", "attribute"])
def test_only_what_a_cycle_keeps_needs_the_garbage_collector(cyclic: str) -> None:
    part = Part(name="p")
    model = Part(part=part, numbers=[1.0], shape=(1, 2), text="t")
    if cyclic == "model":
        vars(part)["model"] = model
    elif cyclic == "attribute":
        vars(part)["itself"] = part
    unloaded = UnloadedModel(model)
    assert not unloaded.is_gone()
    gc.disable()
    try:
        del model, part
        assert unloaded.is_gone() == (cyclic == "nothing")
        gc.collect()
    finally:
        gc.enable()
    assert unloaded.is_gone()
    assert not UnloadedModel(None).is_gone()
