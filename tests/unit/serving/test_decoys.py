"""Records that decoys write, and their decoding."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clipper.serving.rollout.decoys import Recorder, read_folder, segments_of
from clipper.serving.rollout.roles import DECOY_BYTES_MIN, Role
from clipper_core.learning.answer_counts import Bucket

DECOY = Role("decoy")


class Tensor:
    """A tensor of another library, which numpy can convert."""

    def __array__(self, dtype=None, copy=None):
        return np.array([1.0, 2.0])


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments_of(folder))


def test_inputs_come_back_as_they_were(recorder):
    decoy = recorder.decoy("app", "saw", DECOY)
    inputs = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([1, 2], np.int64),
        "text",
        b"bytes",
        3,
        2.5,
        True,
        [[1.0, 2.0], [3.0, 4.0]],
        np.float32(1.5),
        np.zeros((0, 3)),
        Tensor(),
    ]
    for number, x in enumerate(inputs):
        decoy.saw(number, f"n-{number}", x, "u1")
    decoy.add_reply(3, "n-3", np.array([0.5, 0.5]), False)
    decoy.add_reply(4, "n-4", -1, True)
    decoy.add_reply(99, "n-99", 1, False)  # of no input that is here
    found = list(recorder.recorded("app"))
    assert [record.id for record in found] == [f"n-{number}" for number in range(len(inputs))]
    for record, x in zip(found, inputs, strict=True):
        np.testing.assert_array_equal(record.input, np.asarray(x) if isinstance(x, Tensor) else x)
        if isinstance(x, np.ndarray):
            assert record.input.dtype == x.dtype
    assert [record.answered for record in found] == [
        number in (3, 4) for number in range(len(inputs))
    ]
    assert (found[4].answer, found[4].is_default, found[4].user) == (-1, True, "u1")
    assert found[3].answer.tolist() == [0.5, 0.5]
    assert sorted(record.time_us for record in found) == [record.time_us for record in found]


def test_an_input_that_changes_later_was_copied(recorder):
    decoy, x = recorder.decoy("app", "saw", DECOY), np.zeros(3)
    decoy.saw(1, "n-1", x, "")
    x[:] = 9
    assert next(iter(recorder.recorded("app"))).input.tolist() == [0, 0, 0]


def test_the_ring_keeps_the_latest_within_its_bound(recorder, tmp_path):
    decoy = recorder.decoy("app", "saw", Role("decoy", bytes_max=DECOY_BYTES_MIN))
    for number in range(3000):
        decoy.saw(number, f"n-{number}", np.full(10, number, np.float64), "")
        if number % 500 == 0:
            recorder.flush()
            assert on_disk(tmp_path / "app" / "saw") <= DECOY_BYTES_MIN
    found = list(recorder.recorded("app"))
    assert on_disk(tmp_path / "app" / "saw") <= DECOY_BYTES_MIN
    ids = [int(record.id[2:]) for record in found]
    assert ids == list(range(ids[0], 3000)), "the latest, without a gap"
    assert on_disk(tmp_path / "app" / "saw") > 0.7 * DECOY_BYTES_MIN, (
        "three full segments, and the present one"
    )
    decoy.saw(1, "huge", np.zeros(100_000), "")
    recorder.flush()
    assert decoy.stats()["dropped"] == 1, "larger than a segment"


def test_a_restarted_server_goes_on(tmp_path):
    for life in range(3):
        recorder = Recorder(tmp_path)
        recorder.decoy("app", "saw", DECOY).saw(life, f"n-{life}", life, "")
        recorder.close()
    assert [record.input for record in read_folder(tmp_path / "app" / "saw")] == [0, 1, 2]


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-3], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:5]],
)
def test_a_torn_tail_ends_a_segment(tmp_path, damage):
    recorder = Recorder(tmp_path)
    decoy = recorder.decoy("app", "saw", DECOY)
    for number in range(3):
        decoy.saw(number, f"n-{number}", number, "")
    recorder.close()
    path = segments_of(tmp_path / "app" / "saw")[0]
    path.write_bytes(damage(path.read_bytes()))
    left = [record.input for record in read_folder(tmp_path / "app" / "saw")]
    assert left == list(range(3))[: len(left)]
    assert len(left) < 3


def test_a_disk_that_hangs_delays_no_caller(recorder, monkeypatch):
    """The writer is held; what does not fit into the queue is dropped, and the caller goes on."""
    decoy, go_on = recorder.decoy("app", "saw", DECOY), threading.Event()
    write = type(decoy._writer).write

    def hang(self, body):
        go_on.wait(20)
        write(self, body)

    monkeypatch.setattr(type(decoy._writer), "write", hang)
    for number in range(10_000):
        decoy.saw(number, f"n-{number}", "x", "")
    assert decoy.stats()["dropped"] >= 5000
    go_on.set()
    recorder.flush()
    stats = decoy.stats()
    assert stats["written"] + stats["dropped"] == 10_000


def test_a_disk_that_fails_costs_records_only(recorder, tmp_path, caplog):
    (tmp_path / "app").write_text("a file where a folder should be")
    decoy = recorder.decoy("app", "saw", DECOY)
    for number in range(10):
        decoy.saw(number, f"n-{number}", 1, "")
    recorder.flush()
    assert decoy.stats() == {"written": 0, "dropped": 10, "over_budget": 0}
    assert caplog.text.count("cannot write") == 1
    assert list(recorder.recorded("app")) == []


def test_a_share_and_a_budget(tmp_path):
    recorder, now = Recorder(tmp_path), [0.0]
    some = recorder.decoy("app", "some", Role("decoy", share=0.25))
    assert sum(some.takes(number) for number in range(4000)) == pytest.approx(1000, abs=4)
    few = recorder.decoy("app", "few", Role("decoy", rate_max=10))
    few._clock = lambda: now[0]
    few._bucket = Bucket(10, 2, 0.0)
    for number in range(1000):
        now[0] = number / 100
        few.saw(number, f"n-{number}", number, "")
    recorder.close()
    assert 98 <= few.stats()["written"] <= 102
    assert few.stats()["over_budget"] == 1000 - few.stats()["written"]


def test_what_no_record_holds_is_dropped(recorder):
    decoy = recorder.decoy("app", "saw", DECOY)
    decoy.saw(1, "n-1", object(), "")
    decoy.saw(2, "n-2", 2**70, "")
    decoy.saw(3, "n-3", np.array([object()]), "")
    assert decoy.stats()["dropped"] == 3
    assert list(recorder.recorded("app")) == list(recorder.recorded("nobody")) == []


def test_after_the_end_nothing_is_written(tmp_path):
    recorder = Recorder(tmp_path)
    decoy = recorder.decoy("app", "saw", DECOY)
    recorder.close()
    recorder.close()
    decoy.saw(1, "n-1", 1, "")
    assert decoy.stats()["dropped"] == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "clipper-recorder"]
