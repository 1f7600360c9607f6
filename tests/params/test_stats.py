"""The counters and metrics of shards, beside what was done to them."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import ClipperError, InvalidInput, StalePush
from clipper.metrics import FAMILIES, OTHER, ParamsMetrics, Samples, prometheus
from clipper.params import TableSpec
from clipper.params.client.stats_reader import StatsReader
from clipper.params.shard.stats import ChangeAges
from clipper_core.runtime.histogram import LatencyHistogram, snapshot_of
from tests.params.conftest import TOKEN, Shards, ones, zeros

SPEC = TableSpec("t", 3, optimizer="sgd", initializer="zeros")


def reader(shards: Shards) -> StatsReader:
    return StatsReader(shards.addresses, token=TOKEN)


def read(shards: Shards) -> list[dict[str, Any]]:
    one = reader(shards)
    found = one.read()
    one.close()
    return found


def summed(found: list[dict[str, Any]], key: str, table: str = "t") -> int:
    return sum(one["tables"][table][key] for one in found)


def samples(found: list[dict[str, Any]], names_max: int = 200) -> Samples:
    into = Samples()
    ParamsMetrics(lambda: found, names_max).collect(into)
    return into


def eventually(
    shards: Shards, is_so: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    one = reader(shards)
    for _ in range(2000):
        found = one.read()
        if is_so(found):
            break
    else:
        pytest.fail(f"it does not come to it: {found}")
    one.close()
    return found


@pytest.mark.parametrize("by_call", [False, True])
def test_rows_are_counted_by_outcome(shards: Shards, by_call: bool) -> None:
    """The counts equal those of a dictionary, for pulls and pushes of random ids."""
    client, draw, known = shards.up(2).client(), np.random.default_rng(3), set[int]()
    client.create(SPEC)
    pulled = missed = applied = 0
    for _ in range(25):
        ids = draw.integers(0, 60, int(draw.integers(0, 20)))
        if draw.random() < 0.5:
            client.pull("t", ids)
            pulled, missed = pulled + len(ids), missed + sum(int(i) not in known for i in ids)
            continue
        if by_call:
            client.push_gradients(rows={"t": (ids, ones((len(ids), 3)))})
        else:
            client.push("t", ids, ones((len(ids), 3)))
        known |= {int(i) for i in ids}
        applied += len(set(ids.tolist()))
    found = read(shards)
    assert [summed(found, key) for key in ("pulled", "missed", "applied", "made", "rows")] == [
        pulled, missed, applied, len(known), len(known),
    ]  # fmt: skip
    assert 0 < missed < pulled
    hits = [
        samples(found).get("clipper_params_pulled_rows_total", "t", shard, "hit") for shard in "01"
    ]
    assert hits == [one["tables"]["t"]["pulled"] - one["tables"]["t"]["missed"] for one in found]
    assert (sum(one["model_pushes"] for one in found) > 0) == by_call
    assert (sum(one["server"]["pushes"] for one in found) > 0) != by_call


def test_removed_and_unadmitted_rows_are_counted(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(TableSpec("few", 2, rows_max=128, evicts=True))
    client.create(TableSpec("full", 2, rows_max=128))
    client.create(TableSpec("seldom", 2, admit_after=3))
    client.create(TableSpec("old", 2, expire_s=5))
    for table in ("few", "full"):
        for at in range(0, 4000, 100):
            client.push(table, range(at, at + 100), ones((100, 2)))
    for _ in range(3):
        client.push("seldom", [7], ones((1, 2)))
    client.push("old", range(9), ones((9, 2)))
    server = shards.servers[0]
    server.shard.core.stamp += 60
    server.shard.expire()
    (found,) = read(shards)
    few, full, seldom, old = (found["tables"][name] for name in ("few", "full", "seldom", "old"))
    assert few["evicted"] == few["made"] - few["rows"] > 3000
    assert full["refused"] == 4000 - full["made"] > 3000
    assert (full["evicted"], full["made"]) == (0, full["rows"])
    assert (seldom["unadmitted"], seldom["made"], seldom["applied"]) == (2, 1, 1)
    assert (old["expired"], old["rows"]) == (9, 0)
    found_samples = samples([found])
    assert found_samples.get("clipper_params_evicted_rows_total", "few", "0") == few["evicted"]
    assert found_samples.get("clipper_params_expired_rows_total", "old", "0") == 9


@pytest.mark.parametrize("by_call", [False, True])
def test_the_age_of_gradients_is_measured_in_versions(shards: Shards, by_call: bool) -> None:
    """Three workers pull at different times; a push that is too late is refused and counted with
    its lag."""
    client = shards.up(1, lag_max=3).client()
    client.create(SPEC)
    expected = LatencyHistogram()
    for version in (0, 1, 1, 2, 1, 4, 2, 1):
        now = shards.servers[0].shard.core.version
        if version:
            expected.record(now - version)
        if by_call:
            client.push_gradients(rows={"t": ([5], ones((1, 3)))}, versions=[version])
            continue
        client.connections[0].version = version
        with contextlib.suppress(StalePush):
            client.push("t", [5], ones((1, 3)), versioned=True)
    (found,) = read(shards)
    assert snapshot_of(found["lags"]["buckets"], found["lags"]["sum"]) == expected.snapshot()
    assert (
        found["refused"]["too_stale"]
        == sum(n for low, _, n in expected.snapshot().buckets() if low > 3)
        > 0
    )


def test_steps_of_several_workers_are_counted(shards: Shards) -> None:
    """Two pushes make a step, which updates the rows of both; the last push is for a version whose
    step is over."""
    shards.up(1, mode="sync", grads_to_wait=2)
    client, other = shards.client(), shards.client()
    client.create(SPEC)
    for version in (0, 1):
        client.push_gradients(rows={"t": ([1, 2], ones((2, 3)))}, versions=[version])
        other.push_gradients(rows={"t": ([2, 3], ones((2, 3)))}, versions=[version])
    assert not client.push_gradients(rows={"t": ([1], ones((1, 3)))}, versions=[1])["accepted"]
    (found,) = read(shards)
    assert (
        found["model_pushes"],
        found["tables"]["t"]["applied"],
        found["tables"]["t"]["made"],
    ) == (4, 6, 3)
    assert found["lags"] == {"buckets": [[0, 2], [1, 1]], "sum": 1}
    assert found["refused"]["too_stale"] == 1


def test_refusals_are_counted_by_their_reason(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(SPEC)
    with pytest.raises(InvalidInput):
        client.push("t", [1], np.full((1, 3), np.nan))
    with pytest.raises(ClipperError):
        client.call(0, "nothing")
    unauthorized = shards.client(token="wrong", patience_s=0.1)
    with pytest.raises(ClipperError):
        unauthorized.call(0, "stats")
    (found,) = read(shards)
    assert (found["refused"]["bad_input"], found["refused"]["call_failed"]) == (1, 1)
    assert found["refused"]["not_admitted"] >= 1
    assert found["refused"]["full"] == 0
    assert samples([found]).get("clipper_params_refused_total", "0", "bad_input") == 1


def test_replicas_snapshots_and_recoveries_are_reported(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(SPEC)
    client.push("t", range(10), ones((10, 3)))
    found = eventually(
        shards,
        lambda each: all(f["whole"] and not f["behind"] for one in each for f in one["followers"]),
    )
    assert all(one["followers"][0]["behind_s"] == 0 for one in found)
    assert samples(found).get("clipper_params_snapshot_age_seconds", "0") is None
    client.call(0, "snapshot", number=1)
    shards.end(1, snapshot=False)
    away = read(shards)
    assert "away" in away[1]
    assert "away" not in away[0]
    both = samples(away)
    assert [both.get("clipper_params_shard_up", name) for name in "01"] == [1, 0]
    assert both.get("clipper_params_rows", "t", "1") is None
    server = shards.begin(1)
    assert server.ready.wait(60)
    back = eventually(shards, lambda each: all(one.get("ready") for one in each))
    metrics = samples(back)
    assert metrics.get("clipper_params_epoch", "1") == found[1]["server"]["epoch"] + 1
    assert "replica" in back[1]["recovery"]["source"]
    recovery_s = metrics.get("clipper_params_recovery_last_duration_seconds", "1")
    assert isinstance(recovery_s, float)
    assert 0 < recovery_s < 20
    age = metrics.get("clipper_params_snapshot_age_seconds", "0")
    assert isinstance(age, float)
    assert 0 <= age < 60
    assert metrics.get("clipper_params_snapshots_total", "0", "ok") == 1
    assert metrics.get("clipper_params_snapshot_bytes", "0") == back[0]["snapshots"]["nbytes"] > 0


def test_the_age_of_a_snapshot_survives_a_restart(shards: Shards) -> None:
    client = shards.up(1).client()
    client.push_model({"w": zeros(4)})
    shards.end(0)
    shards.begin(0).ready.wait(60)
    (found,) = eventually(shards, lambda each: bool(each[0].get("ready")))
    assert (found["snapshots"]["taken"], found["snapshots"]["last"]) == (0, 1)
    age = samples([found]).get("clipper_params_snapshot_age_seconds", "0")
    assert isinstance(age, float)
    assert 0 <= age < 60
    assert samples([found]).get("clipper_params_snapshot_last_duration_seconds", "0") is None, (
        "of a life before this one"
    )


def test_every_metric_of_parameters_has_samples(shards: Shards) -> None:
    client = shards.up(2, replicas=1, durability="disk").client()
    client.create(SPEC)
    client.push("t", range(4), ones((4, 3)))
    client.call(0, "snapshot", number=1)
    found = read(shards)
    made = {family.name for family, _ in samples(found)}
    assert made == {name for name in FAMILIES if name.startswith("clipper_params_")}
    text = prometheus(samples(found)).decode()
    assert re.search(
        r'^clipper_params_pulled_rows_total\{table="t",shard="1",outcome="miss"\} 0$', text, re.M
    )
    many = [{**one, "tables": {f"t{i}": one["tables"]["t"] for i in range(5)}} for one in found]
    capped = samples(many, 2)
    assert capped.get("clipper_params_rows", OTHER, "0") == 3 * found[0]["tables"]["t"]["rows"]
    assert capped.get("clipper_params_rows", "t4", "0") is None


def test_a_reader_follows_a_set_to_other_addresses(shards: Shards, tmp_path: Path) -> None:
    shards.up(1)
    file = tmp_path / "shards.json"
    with pytest.raises(InvalidInput, match=r"shards\.json"):
        StatsReader(tmp_path).read()
    file.write_text(f'{{"addresses": ["unix:{tmp_path}/nobody"], "token": "{TOKEN}"}}')
    one = StatsReader(tmp_path)
    assert "away" in one.read()[0]
    file.write_text(f'{{"addresses": ["{shards.addresses[0]}"], "token": "{TOKEN}"}}')
    assert "away" not in one.read()[0]
    one.close()


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(0, 60),
)
def test_the_age_of_unsent_changes_is_measured(
    steps: list[tuple[float, int]], acknowledged: int
) -> None:
    ages, now, position = ChangeAges(), 0.0, 0
    born = dict[int, float]()
    for seconds, changes in steps:
        now += seconds
        for _ in range(changes):
            position += 1
            born[position] = now
        ages.note(now, position)
    oldest = min((born[p] for p in born if p > acknowledged), default=now)
    assert ages.behind_s(acknowledged, now) == now - oldest


@given(st.lists(st.integers(0, 1 << 50), max_size=50))
def test_a_histogram_is_rebuilt_from_its_buckets(values: list[int]) -> None:
    one = LatencyHistogram()
    for value in values:
        one.record(value)
    here = one.snapshot()
    assert snapshot_of(here.buckets(), here.sum) == here
    assert snapshot_of([(low, n) for low, _, n in here.buckets()], here.sum) == here


def test_a_log_on_disk_is_counted(shards: Shards) -> None:
    client = shards.up(1, durability="disk").client()
    client.create(TableSpec("t", 2))
    for _ in range(3):
        client.push("t", [1], ones((1, 2)))
    metrics = samples([client.call(0, "stats")])
    assert metrics.get("clipper_params_log_pushes_total", "0") == 3
    assert metrics.get("clipper_params_log_syncs_total", "0") == 4, "the table too"
    assert (metrics.get("clipper_params_log_bytes", "0") or 0) > 0  # type: ignore[operator]
