"""Claims: exact copies whatever the order, and what a load leaves in the record."""

from random import Random
from typing import Any

import msgspec
import pytest

from clipper.mesh.decisions import claims, failures
from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.records import Copy, Failure, MeshModel
from clipper.settings.mesh import MeshSettings

SETTINGS = MeshSettings()
NOW = 1_700_000_000_000
ALIVE = frozenset({"a", "b", "c"})
FAILED = {"b": Failure(NOW, "x", "artifact"), "c": Failure(NOW, "y", "host")}


def claim(
    model: MeshModel, me: str, copies: int = 1, alive: frozenset[str] = ALIVE, now: int = NOW
) -> MeshModel:
    after = claims.claimed(
        model, me, now, alive=alive, copies=copies, settings=SETTINGS, size_bytes=5
    )
    assert isinstance(after, MeshModel), after
    return after


def refusal(model: MeshModel, me: str, copies: int = 1, alive: frozenset[str] = ALIVE) -> str:
    after = claims.claimed(model, me, NOW, alive=alive, copies=copies, settings=SETTINGS)
    assert isinstance(after, ClaimRefused)
    return after.why


def test_a_claim_is_loading_until_it_is_completed() -> None:
    model = claim(MeshModel("m", "onnx"), "a")
    assert model.status() == "LOADING"
    assert model.copies == {"a": Copy(NOW, 0, 5)}
    done = claims.completed(model, "a", NOW + 70, size_bytes=9, input="f64[4]", output="i64")
    assert isinstance(done, MeshModel)
    assert (done.status(), done.size_bytes, done.input, done.output) == (
        "LOADED",
        9,
        "f64[4]",
        "i64",
    )
    assert claims.released(done, "a", NOW + 99).status() == "NOT_LOADED"
    assert claims.released(done, "a", NOW + 99).used_ms == NOW + 99
    assert claims.released(done, "b") is done


def test_no_more_than_was_requested() -> None:
    model = claim(claim(MeshModel("m", "onnx"), "a", 2), "b", 2)
    assert "2 of 2" in refusal(model, "c", 2)
    assert "already" in refusal(model, "a", 9)


def test_the_dead_do_not_count_and_go() -> None:
    model = claim(MeshModel("m", "onnx"), "a")
    after = claim(model, "b", alive=frozenset({"b", "c"}))
    assert set(after.copies) == {"b"}
    assert set(claims.without(model, "a").copies) == set()
    assert claims.without(model, "c") is model


def test_a_claim_that_was_taken_away_cannot_be_completed() -> None:
    after = claims.completed(MeshModel("m", "onnx"), "a", NOW, size_bytes=1)
    assert isinstance(after, ClaimRefused)


def test_a_loaded_copy_is_kept_until_enough_others_are_loaded() -> None:
    loading = MeshModel("m", "onnx", copies={"b": Copy(NOW)}, failures=FAILED)
    again = claims.restored(loading, "a", NOW, alive=ALIVE, copies=1, size_bytes=7)
    assert isinstance(again, MeshModel)
    assert (again.loaded, again.copies["b"]) == (("a",), Copy(NOW))
    assert set(again.failures) == {"c"}, "it can be loaded"
    loaded = MeshModel("m", "onnx", copies={"b": Copy(NOW, NOW), "dead": Copy(NOW, NOW)})
    refused = claims.restored(loaded, "a", NOW, alive=ALIVE, copies=1, size_bytes=7)
    assert refused == ClaimRefused("1 of 1 copies are loaded: b")
    two = claims.restored(loaded, "a", NOW, alive=ALIVE, copies=2, size_bytes=7)
    assert isinstance(two, MeshModel)
    assert {*two.copies} == {"a", "b"}


def test_a_failure_frees_the_claim_and_blocks_its_instance() -> None:
    model = claims.failed(
        claim(MeshModel("m", "onnx"), "a"), "a", NOW, why="no such file", fault="artifact"
    )
    assert model.status() == "LOADING_FAILED"
    assert "no such file" in refusal(model, "a")
    assert claim(model, "b").copies.keys() == {"b"}
    again = claim(model, "a", now=NOW + 600_001)
    assert again.copies.keys() == {"a"}
    done = claims.completed(again, "a", NOW + 600_002, size_bytes=1)
    assert isinstance(done, MeshModel)
    assert not done.failures


def test_a_load_that_succeeds_clears_what_blamed_the_artifact() -> None:
    model = MeshModel("m", "onnx", copies={"a": Copy(NOW)}, failures=FAILED)
    done = claims.completed(model, "a", NOW + 1, size_bytes=1)
    assert isinstance(done, MeshModel)
    assert set(done.failures) == {"c"}


def test_the_last_loaded_copy_is_never_spared() -> None:
    model = MeshModel("m", "onnx", copies={"a": Copy(1, 2), "b": Copy(1), "dead": Copy(1, 2)})
    assert isinstance(claims.released_if_spare(model, "a", alive=ALIVE, keep=0), ClaimRefused)
    two = MeshModel("m", "onnx", copies={"a": Copy(1, 2), "b": Copy(1, 2)})
    assert isinstance(claims.released_if_spare(two, "a", alive=ALIVE, keep=2), ClaimRefused)
    after = claims.released_if_spare(two, "a", alive=ALIVE, keep=1)
    assert isinstance(after, MeshModel)
    assert claims.loaded_copies(after, ALIVE) == ("b",)


@pytest.mark.parametrize("seed", range(30))
def test_exact_copies_under_any_interleaving(seed: int) -> None:
    """Claimers read, are held up, and write if nobody has written since: compare-and-set, as in the
    store."""
    rng = Random(seed)
    names = [f"i{n}" for n in range(12)]
    wanted, alive = rng.randrange(1, 5), frozenset(names)
    record, revision = MeshModel("m", "onnx"), 0
    readings: dict[str, tuple[MeshModel, int] | None] = {}
    todo, most = set(names), 0
    while todo:
        me = rng.choice(sorted(todo))
        held = readings.get(me)
        if held is None:
            readings[me] = (record, revision)
            continue
        readings[me] = None
        after = claims.claimed(held[0], me, NOW, alive=alive, copies=wanted, settings=SETTINGS)
        if isinstance(after, ClaimRefused):
            todo.discard(me)
        elif held[1] == revision:
            record, revision = after, revision + 1
            todo.discard(me)
        most = max(most, len(record.copies))
    assert len(record.copies) == wanted == most


@pytest.mark.parametrize(
    ("fault", "count", "seconds"),
    [
        ("artifact", 1, 600),
        ("artifact", 5, 600),
        ("load", 1, 600),
        ("load", 9, 600),
        ("host", 1, 10),
        ("host", 3, 40),
        ("host", 9, 600),
    ],
)
def test_how_long_a_failure_blocks(fault: Any, count: int, seconds: int) -> None:
    """Ten minutes for the artifact; the host's faults begin with ten seconds and double."""
    failure = Failure(NOW, "", fault, count)
    assert failures.blocked_until(failure, SETTINGS) - NOW == 1000 * seconds
    assert failures.forgotten_at(failure, SETTINGS) - NOW == 600_000


def test_a_model_has_failed_after_three_instances_or_two_that_blame_it() -> None:
    host = {i: Failure(NOW, "no memory", "host") for i in "ab"}
    assert failures.verdict(MeshModel("m", "onnx", failures=host), NOW, SETTINGS) is None
    assert (
        failures.verdict(MeshModel("m", "onnx", failures=host), NOW, SETTINGS, len(host))
        is not None
    ), "there are no more"
    three = MeshModel("m", "onnx", failures={**host, "c": Failure(NOW + 1, "full", "host")})
    failed = failures.verdict(three, NOW, SETTINGS)
    assert failed == failures.FailedModel("full", NOW + 10_000, "host")
    assert failures.verdict(three, NOW + 10_001, SETTINGS) is None
    corrupt = {i: Failure(NOW, "corrupt", "artifact") for i in "ab"}
    failed = failures.verdict(MeshModel("m", "onnx", failures=corrupt), NOW, SETTINGS)
    assert failed is not None
    assert (failed.fault, failed.retry_ms) == ("artifact", NOW + 600_000)
    assert failures.blocked(three, NOW, SETTINGS) == {"a", "b", "c"}


def test_where_all_that_could_have_tried_the_load_fails_at_once_and_for_ten_minutes() -> None:
    model = MeshModel("m", "onnx", failures={"a": Failure(NOW, "FileNotFoundError: x", "load")})
    assert failures.verdict(model, NOW, SETTINGS, places=2) is None, "b has not tried"
    failed = failures.verdict(model, NOW, SETTINGS, places=1)
    assert failed == failures.FailedModel("FileNotFoundError: x", NOW + 600_000, "load")
    assert failures.verdict(model, NOW + 600_000, SETTINGS, places=1) is None
    twice = MeshModel("m", "onnx", failures={**model.failures, "b": Failure(NOW, "y", "load")})
    assert failures.verdict(twice, NOW, SETTINGS, places=3) is None, "c may have the file"
    assert failures.blocked(twice, NOW, SETTINGS) == {"a", "b"}


def test_model_that_ended_a_process_of_its_own_has_failed_at_once_and_for_longer_each_time() -> (
    None
):
    settings = MeshSettings(failure_s=600)
    model = MeshModel("m", "onnx")
    for count, pause_s in enumerate((10, 20, 40, 80, 160, 320, 600, 600), 1):
        model = claims.failed(
            model, "ab"[count % 2], count, why="it crashed", fault="artifact", crashed=True
        )
        verdict = failures.verdict(model, count, settings, places=9)
        assert verdict is not None
        assert (verdict.retry_ms - count, verdict.why) == (pause_s * 1000, "it crashed")
        assert failures.verdict(model, verdict.retry_ms, settings) is None
        assert failures.has_crashed(model)


@pytest.mark.parametrize("crashed", [True, False])
def test_failure_by_a_clock_that_was_an_hour_ahead_blocks_nobody(crashed: bool) -> None:
    model = MeshModel("m", "onnx")
    for me in "abc":
        model = claims.failed(
            model, me, NOW + 3_600_000, why="it failed", fault="artifact", crashed=crashed
        )
    assert failures.verdict(model, NOW, SETTINGS) is None
    assert not failures.blocked(model, NOW, SETTINGS)
    assert not claims.without_failures(model, NOW, SETTINGS).failures


def test_load_that_succeeds_leaves_what_is_known_of_crashes() -> None:
    model = claims.failed(
        MeshModel("m", "onnx"), "a", 1, why="it crashed", fault="artifact", crashed=True
    )
    model = msgspec.structs.replace(model, copies={"a": Copy(2)})
    loaded = claims.completed(model, "a", 3, size_bytes=1)
    assert isinstance(loaded, MeshModel)
    assert failures.has_crashed(loaded)


def test_failures_count_in_a_row_and_are_forgotten() -> None:
    model = MeshModel("m", "onnx")
    for n in range(3):
        model = claims.failed(model, "a", NOW + n, why="x" * 900, fault="host")
    assert model.failures["a"].count == 3
    assert len(model.failures["a"].why) == 500
    assert claims.without_failures(model, NOW + 600_001, SETTINGS) is model
    assert not claims.without_failures(model, NOW + 600_002, SETTINGS).failures


def test_a_host_that_fails_many_good_models_is_left_alone() -> None:
    quarantine = failures.Quarantine()
    for _ in range(9):
        assert not quarantine.failed("bad", "same", "host", NOW)
        assert not quarantine.failed("good", f"m{_}", "artifact", NOW)
    assert not quarantine.failed("bad", "m1", "host", NOW)
    assert quarantine.failed("bad", "m2", "host", NOW)
    assert quarantine.left_alone(NOW + 29_999) == {"bad"}
    assert quarantine.left_alone(NOW + 30_000) == frozenset()
    for n in range(3):
        quarantine.failed("bad", f"n{n}", "host", NOW + 40_000)
    assert quarantine.left_alone(NOW + 99_000) == {"bad"}
    quarantine.loaded("bad")
    assert quarantine.left_alone(NOW + 41_000) == frozenset()


def test_old_failures_do_not_make_a_quarantine() -> None:
    quarantine = failures.Quarantine()
    for n in range(20):
        assert not quarantine.failed("i", f"m{n}", "host", NOW + n * 400_000)
