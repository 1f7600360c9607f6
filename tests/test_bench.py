"""The harness of the benchmarks: its reports are right, and no row of `python -m bench engine` is
missing."""

import contextlib
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.__main__
import bench.compare
from bench import harness, plots, proof, results
from bench.compare import change, tolerance
from bench.harness import (
    FAILED,
    Goal,
    Load,
    Row,
    Sample,
    UnknownRows,
    absent,
    finite,
    interleave,
    is_met,
    markdown,
    open_loop,
    row,
    short,
    table,
    tell,
    window_ns,
)
from bench.learning.worlds import WORLDS
from bench.names import BENCHMARKS, source_of
from bench.paper import __main__ as paper_page
from bench.paper import figure3, figure6, figure8, figure11
from bench.runs import in_parallel
from bench.system import install
from bench.system.anchors import bare
from bench.system.application.calls import CASES
from bench.system.application.plain import PlainApplication
from bench.system.engine import GROUPS, lookup, measure, ratio, servers, simulated
from bench.system.engine.effort import TINY
from bench.system.load import mlperf
from bench.system.params import memory
from clipper.load.open_loop import arrivals
from clipper.load.profile import Point
from clipper_core.scheduling.batcher import BatchingMode


def answered(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("unit", "value", "anchor", "goal", "ratio", "met"),
    [
        ("ns", 100.0, 2000.0, Goal("times_better", 20), 20.0, True),
        ("ns", 101.0, 2000.0, Goal("times_better", 20), 2000 / 101, False),
        ("M/s", 4.0, 0.2, Goal("times_better", 20), 20.0, True),
        ("us", 25.0, 50.0, Goal("at_most", 0.7), 0.5, True),
        ("us", 40.0, 50.0, Goal("at_most", 0.7), 0.8, False),
        ("1/s", 90.0, 100.0, Goal("at_least", 0.95), 0.9, False),
        ("ms", 19.0, 5.0, Goal("value_at_most", 20), 3.8, True),
        ("ms", 19.0, 5.0, None, 3.8, None),
    ],
)
def test_a_goal_bounds_the_ratio(
    unit: str, value: float, anchor: float, goal: Goal | None, ratio: float, met: bool | None
) -> None:
    found = row("x", value, unit, "anchor", anchor, goal)
    assert found.ratio == pytest.approx(ratio)
    assert found.met is met


def test_a_goal_that_needs_an_anchor_is_open_without_one() -> None:
    assert is_met(Goal("at_most", 1), 5.0, None) is None
    assert is_met(Goal("value_at_least", 4), 5.0, None) is True


def test_cases_run_in_turns() -> None:
    seen: list[str] = []

    def case(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    samples = interleave({"a": lambda: case("a"), "b": lambda: case("b")}, repetitions=3, warmups=1)
    assert seen == ["a", "b"] * 4
    assert samples["a"].values == (3.0, 5.0, 7.0)
    assert samples["b"].median == 6.0


def test_a_window_never_has_more_outstanding_than_its_size() -> None:
    open_now = most = 0

    class Late(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> None:
            nonlocal open_now
            open_now -= 1

    def predict(_: object) -> Late:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        return Late()

    window_ns(predict, range(100), outstanding=7)
    assert (most, open_now) == (7, 0)


def test_arrivals_have_their_rate_and_their_seed() -> None:
    times = arrivals(10_000, 2.0, seed=3)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert (np.diff(times) >= 0).all()
    assert times[-1] < 2.0
    assert (times == arrivals(10_000, 2.0, seed=3)).all()


def test_every_query_of_an_open_loop_is_accounted_for() -> None:
    def predict(x: int) -> "Future[Any]":
        if x == 0:
            raise OverflowError
        future = answered(x)
        if x == 1:
            future = Future()
            future.set_exception(LookupError())
        return future

    load = open_loop(
        predict, [0, 1, 2, 3], [0.0, 0.001, 0.002, 0.003], is_default=lambda answer: answer == 3
    )
    assert load.offered == 4
    assert load.errors == {"OverflowError": 1, "LookupError": 1}
    assert load.defaults == 1
    assert load.within(60e6) == 2
    assert load.goodput_per_s(60e6) == pytest.approx(1 / load.seconds)
    assert np.isnan(load.latencies_us[:2]).all()


def test_a_late_default_is_not_taken_from_what_came_in_time() -> None:
    latencies = np.array([10.0, 20.0, 5000.0, np.nan])
    load = Load(1.0, latencies, np.array([False, True, True, False]))
    assert (load.within(100), load.defaults) == (2, 2)
    assert load.goodput_per_s(100) == 1.0


def test_a_query_that_is_never_answered_is_an_error() -> None:
    load = open_loop(lambda _: Future(), [0], [0.0, 0.0], patience_s=0.01)
    assert load.errors == {"never answered": 2}


def test_a_comparison_uses_ratios_where_there_are_anchors() -> None:
    def fields(
        value: float, anchor: float | None, unit: str = "ns", spread: str = ""
    ) -> dict[str, Any]:
        return {"value": value, "against_value": anchor, "unit": unit, "spread": spread}

    assert change(fields(10, 100), fields(20, 200)) == pytest.approx(1)
    assert change(fields(10, None), fields(20, None)) == pytest.approx(0.5)
    assert change(fields(10, None, "1/s"), fields(20, None, "1/s")) == pytest.approx(2)
    assert tolerance(fields(1, None, spread="1 000-1 500"), fields(1, None)) == pytest.approx(1.5)


def test_a_table_shows_every_row() -> None:
    one = row("one", Sample((1.0, 2.0, 3.0)), "ns", "other", 4.0, Goal("at_most", 1))
    text = table([one, Row("two", 5e6, "1/s", note="why")])
    assert "1-3" in text
    assert "yes" in text
    assert "5 M 1/s" in text
    assert "two: why" in text
    assert [short(v) for v in (0.01234, 12345.0, None)] == ["0.0123", "12 300", ""]


def test_a_row_without_a_figure_gives_the_reason_in_every_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    goal = Goal("at_most", 2)
    there = row("there", 3.0, "us", "C", 1.0, goal, bounded_by="the machine")
    rows = [absent("gone", "us", "not in this build", "C", goal), there]
    for form, text in (("table", table(rows)), ("markdown", markdown(rows))):
        assert "gone: not in this build" in text, form
        assert "there: falls short, bounded by the machine" in text, form
    tell(rows, "json")
    printed = capsys.readouterr()
    first, second = json.loads(printed.out)
    assert (first["value"], first["missing"], first["goal"]) == (None, "not in this build", "≤ 2 x")
    assert (second["met"], second["bounded_by"]) == (False, "the machine")
    assert "0 of 1 goals met, 1 short; 1 of 2 rows without a figure" in printed.err


def test_what_bounds_a_row_is_named_only_when_it_falls_short() -> None:
    assert (
        row("x", 1.0, "us", "C", 1.0, Goal("at_most", 2), bounded_by="the machine").bounded_by == ""
    )


def test_a_comparison_names_rows_without_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("before", None), ("after", 3.0)):
        fields = {"name": "x", "value": value, "unit": "ns", "against_value": None, "spread": ""}
        (tmp_path / name).write_text(json.dumps([fields]))
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "before"), str(tmp_path / "after")])
    assert bench.compare.main() == 0
    assert "x: no figure before" in capsys.readouterr().out


# -- the rows of applications


def test_a_plain_application_answers_with_what_most_models_say() -> None:
    program = PlainApplication(3)
    known, unknown = np.zeros(4), np.ones(4)
    program.learn(known, 7)
    assert program.predict(known).result(0) == 7
    for votes, winner in (((7, 8, 8), 8), ((9, 9, 1), 9)):
        for place, vote in zip(program.known, votes, strict=True):
            place[known.tobytes()] = vote
        assert program.predict(known).result(0) == winner
    with pytest.raises(KeyError):
        program.predict(unknown)


def test_cases_that_share_an_application_set_it_alike() -> None:
    settings: dict[str, set[tuple[object, ...]]] = {}
    for case in CASES.values():
        settings.setdefault(case.name, set()).add((case.models, case.policy, case.decider))
    assert all(len(found) == 1 for found in settings.values())


# -- the rows of the engine: every goal there is has its row, whatever this build and this machine
# can measure

NAMES = {
    "hit": [
        "hit f64[1], of a no-op call",
        "hit f64[1], of the reference",
        "hit f32[784], of no-op + hash",
        "hit f32[784], of the reference",
    ],
    "miss": [
        f"miss {kind}, {where}{anchor}"
        for kind in ("f64[1]", "f32[784]")
        for where in ("unix socket", "shared memory")
        for anchor in ("", ", of the reference")
    ],
    "bulk": [
        "bulk hit f64[1], 1 M entries",
        "bulk miss f64[1], unix socket",
        "bulk miss f64[1], shared memory",
        "bulk f32[784], unix socket",
        "bulk f32[784], shared memory",
    ],
    "trip": [
        f"RTT, {how}{anchor}"
        for anchor in ("", ", of bare C")
        for how in (
            "unix socket",
            "TCP",
            "shared memory, spinning",
            "shared memory, futex",
            "awaited on uvloop",
        )
    ],
    "lookup": [
        *(
            f"lookup, nogil, {threads}, of {peer}"
            for threads in ("1 thread", "2 threads")
            for peer in ("cachebox", "theine", "lru-dict", "functools")
        ),
        "lookup, 2 threads of 1",
    ],
    "ratio": [
        f"hit ratio below global {policy}, {trace}"
        for policy in ("CLOCK", "SIEVE")
        for trace in ("zipf 0.9", "zipf 1.0", "zipf 1.1", "drift")
    ],
    "timers": [
        f"timer, {what}{anchor}"
        for what in ("a query", "longest stall")
        for anchor in ("", ", of asyncio", ", of uvloop")
    ],
    "codec": [f"codec, encode 256 x f32[784], {side}" for side in ("engine", "container")]
    + [
        f"codec, encode + decode 256 x f32[784], of {peer}"
        for peer in ("msgspec", "msgpack", "Arrow IPC", "pickle5")
    ]
    + [f"codec, decode at any size, {side}" for side in ("core", "container")]
    + ["codec, payload off a multiple of 64"]
    + [
        f"codec, encode 1000 strings of 100{what}"
        for what in ("", ", engine", ", of msgspec", ", of pickle5", ", of Arrow IPC")
    ],
    "work": [
        "work queue, publish, of an atomic add",
        "work queue, publish + take, of SimpleQueue",
        "work queue, publish + take, of queue.Queue",
        "work queue, system calls a query, loop awake",
    ],
    "delivery": [
        "delivery, answers that needed the GIL",
        "delivery, loop wakes a batch",
        "delivery, eventfd writes a batch",
        "delivery, latency while Python is busy",
    ],
    "batching": [
        f"batching {mode}, {what}"
        for mode in ("fit", "aimd")
        for what in (
            "Poisson, goodput",
            "bursty, goodput",
            "late",
            "batches to 90 % of the best size",
        )
    ]
    + [f"batching aimd, SVM-like at 1.3 x, of {what}" for what in ("no batching", "plain AIMD")],
    "overload": [
        f"overload {times} x, {what}"
        for times in (2, 10)
        for what in ("goodput of peak", "admitted p99", "refusal p99", "recovery")
    ],
    "containers": [
        "containers, loop threads for 500",
        "containers, idle cost of 500",
        "containers, hit beside them",
        "containers, RTT beside them",
    ],
}


@pytest.mark.parametrize("group", GROUPS)
def test_every_goal_of_the_engine_has_its_row(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # all fall short
    monkeypatch.setattr(
        harness, "is_met", lambda goal, value, ratio: None if goal is None else False
    )
    rows = measure(group, TINY)
    assert not [one.missing for one in rows if one.missing.startswith(FAILED)]
    names = [one.name for one in rows]
    assert len(names) == len(set(names)), "two rows of one name: a comparison would lose one"
    if group != "overload" or importlib.util.find_spec("bench.system.load.overload") is None:
        assert not set(NAMES[group]) - set(names), "a goal without a row"
    for one in rows:
        assert one.question.startswith(f"{group}: ")
        assert one.missing or np.isfinite(one.value), one.name
        assert one.missing or not one.goal or one.bounded_by, (
            f"{one.name} could fall short and not say why"
        )


def test_the_names_are_those_of_all_groups() -> None:
    assert tuple(NAMES) == GROUPS


def test_what_is_not_installed_or_not_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "peer", lambda module: None)
    monkeypatch.setattr(servers, "describe", list)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    rows = {one.name: one for one in lookup.rows(TINY)}
    assert "pip install --group peers" in rows["lookup, nogil, 1 thread, of cachebox"].missing
    assert servers.settings("unix") == {}
    assert servers.settings("shm") == "not in this build: no configuration key 'shared_memory'"
    with bare.bare() as program:
        assert program is None


def test_peers_and_plots_that_are_not_installed_name_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    curves = {name: np.zeros((2, 20_000)) for name in (*figure8.POLICIES, *figure8.PAPER)}
    rows = {one.name: one for one in figure8.cumulative(curves)}
    assert (
        "pip install --group learning-peers"
        in rows["Vowpal Wabbit SquareCB: error of 20 K queries"].missing
    )
    assert rows["stacking: error of 20 K queries"].met
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plots.curves(tmp_path / "x.png", "x", {"a": np.zeros(1000)})
    assert "pip install 'clipper-serving[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_runs_come_back_in_their_order_from_other_processes() -> None:
    assert in_parallel("powers", pow, [(2, n) for n in range(9)]) == [2**n for n in range(9)]
    assert in_parallel("powers", pow, [(2, 3)]) == [8]


PARALLEL = r"""
import os, sys, time
from bench.runs import exit_on_sigterm, in_parallel

def run(number):
    # print() may write a line and its end apart
    os.write(1, b"%d\n" % os.getpid())
    if number == 0 and sys.argv[1] == "raises":
        time.sleep(1)
        raise ValueError(number)
    time.sleep(600)

if __name__ == "__main__":
    exit_on_sigterm()
    limit_s = 5 if sys.argv[1] == "is late" else 300
    in_parallel("sleeps", run, [(number,) for number in range(4)], limit_s=limit_s)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "raises", "is late"])
def test_no_process_stays_behind_a_run_that_is_stopped(how: str, tmp_path: Path) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    words = [sys.executable, script, how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(results.ROOT)}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        try:
            pids = [int(process.stdout.readline()) for _ in range(2)]
            if how.startswith("SIG"):
                process.send_signal(getattr(signal, how))
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode
    assert ("ValueError" in said, "TimeoutError" in said) == (how == "raises", how == "is late")
    until = time.monotonic() + 60
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_recovery_is_counted_from_the_change() -> None:
    world = WORLDS["base"]
    curve = np.full(world.queries, 0.2)
    curve[world.begins : world.begins + 400] = 0.9
    curve[world.begins + 400 : world.ends] = 0.26
    curve[world.ends : world.ends + 100] = 1.0
    rows = figure8.recovery(dict.fromkeys(figure8.RECOVERING, curve[None]))
    found = {one.name: one.value for one in rows}
    assert 380 <= found["stacking: queries to recover from the failure"] <= 400
    assert 90 <= found["stacking: queries to recover from the return"] <= 100


def test_only_a_benchmark_with_pictures_takes_a_folder_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "deadlines", "--plot", "x"])
    assert bench.__main__.main() == 2
    assert "'deadlines' has no --plot" in capsys.readouterr().err


def test_rows_that_there_are_not_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["engine", "--rows", "nonsense"], ["deadlines", "--rows", "hit"]):
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        assert bench.__main__.main() == 2
    assert "no rows nonsense; there are hit, miss" in capsys.readouterr().err


def test_a_group_that_raises_is_a_row_with_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> list[Row]:
        raise OSError("no memory")

    monkeypatch.setattr("bench.system.engine.ratio.rows", broken)
    monkeypatch.setattr("sys.argv", ["bench", "engine", "--quick", "--json", "--rows", "ratio"])
    assert bench.__main__.main() == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["missing"] == "failed: OSError: no memory"
    assert "Traceback" in printed.err


# -- the simulators have slow obvious twins


def slow_clock(keys: list[int], capacity: int) -> int:
    ring: list[list[int]] = []  # [key, referenced], the hand is at 0
    hits = 0
    for key in keys:
        known = [entry for entry in ring if entry[0] == key]
        if known:
            known[0][1], hits = 1, hits + 1
            continue
        while len(ring) == capacity:
            entry = ring.pop(0)
            if entry[1]:
                ring.append([entry[0], 0])
        ring.append([key, 0])
    return hits


def slow_sieve(keys: list[int], capacity: int) -> int:
    queue: list[list[int]] = []  # [key, visited], the newest first
    hand: list[int] | None = None
    hits = 0
    for key in keys:
        known = [entry for entry in queue if entry[0] == key]
        if known:
            known[0][1], hits = 1, hits + 1
            continue
        if len(queue) == capacity:
            at = next((i for i, entry in enumerate(queue) if entry is hand), len(queue) - 1)
            while queue[at][1]:
                queue[at][1] = 0
                at = at - 1 if at else len(queue) - 1
            hand = queue[at - 1] if at else None
            del queue[at]
        queue.insert(0, [key, 0])
    return hits


@pytest.mark.parametrize(
    ("fast", "slow"), [(ratio.clock, slow_clock), (ratio.sieve, slow_sieve)], ids=["clock", "sieve"]
)
def test_a_simulated_cache_is_its_slow_twin(
    fast: Callable[[list[int], int], float], slow: Callable[[list[int], int], int]
) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        capacity = rng.randint(1, 12)
        keys = [int(rng.paretovariate(0.6)) % 40 for _ in range(200)]
        warm = len(keys) // 5
        assert fast(keys, capacity) == (slow(keys, capacity) - slow(keys[:warm], capacity)) / (
            len(keys) - warm
        ), seed


def test_a_simulated_replica_accounts_for_every_row_and_repeats_itself() -> None:
    cost = simulated.COSTS[0]
    times = arrivals(1.2 * cost.capacity(), 0.05, seed=4)
    one, other = (simulated.Replica(cost, BatchingMode.AIMD).run(times) for _ in range(2))
    assert one == other
    assert one.arrived == len(times)
    assert 0 < one.in_time + one.late <= one.arrived
    assert sum(one.sizes) <= one.arrived
    plain = simulated.plain_aimd(cost, times)
    assert plain.in_time + plain.late == sum(plain.sizes)


def test_the_floor_in_c_answers() -> None:
    with bare.bare() as program:
        if program is None:
            return
        figures = {
            what: program.measure(what, 20) for what in ("unix", "tcp", "spin", "futex", "add")
        }
    assert all(figure > 0 for figure in figures.values()), figures


# -- the figures of the paper


def test_the_largest_batch_within_the_slo_is_the_last_whose_p99_fits() -> None:
    points = [Point(n, ms, ms, 9) for n, ms in ((1, 1.0), (2, 19.0), (4, 21.0))]
    assert figure3.largest_in_time(points).batch == 2
    assert figure3.largest_in_time(points[2:]).batch == 4  # none fits: the smallest
    found = {"linear SVM": points, "kernel SVM": points[:1]}
    assert figure3.rows(found)[-1].value == 2.0


def test_the_throughput_of_replicas_stands_beside_that_of_one() -> None:
    first, *_, last = figure6.rows_of(10, (1, 2, 3, 4), [4000.0, 8000.0, 11000.0, 15000.0])
    assert (first.ratio, last.ratio, last.met) == (1.0, 3.75, True)
    assert figure6.rows_of(1, (1, 4), [4000.0, 8000.0])[-1].goal == ""


def test_a_tight_server_answers_each_query_with_its_own_label() -> None:
    server = figure11.TightServer(lambda inputs: inputs.sum(axis=1).astype(int), 8)
    futures = [server.predict(np.array([n, 1])) for n in range(50)]
    server.close()
    assert [future.result(60) for future in futures] == list(range(1, 51))


def test_a_row_comes_back_from_json() -> None:
    rows = [row("a", 2.0, "ms", "b", 1.0, Goal("at_most", 3.0)), absent("c", "ms", "no torch")]
    again = [results.row_of(finite(asdict(one))) for one in rows]
    assert again[0] == rows[0]
    assert math.isnan(again[1].value)
    assert again[1].missing == "no torch"


def test_figures_are_measured_in_the_order_of_their_numbers() -> None:
    assert sorted(["figure10", "figure3", "figure4"], key=paper_page.number)[-1] == "figure10"


# -- results that are kept, and the pages written from them


def kept_result(name: str = "noop", commit: str = "", **fields: object) -> results.Result:
    rows = (row("a", 2.0, "ms", "b", 1.0, Goal("at_most", 1.5), bounded_by="the disk"),)
    values = {"machine": {"commit": commit}, "rows": rows, **fields}
    return results.Result(name, f"python -m bench {name}", "2026-11-23", 1.5, **values)


def test_a_result_is_kept_and_comes_back(tmp_path: Path) -> None:
    assert results.load("noop", tmp_path) is None
    results.save(kept_result(), tmp_path)
    assert results.load("noop", tmp_path) == kept_result()


def test_a_failed_run_leaves_the_result_from_before(tmp_path: Path) -> None:
    results.save(kept_result("nothing_of_this_name"), tmp_path)
    failed = results.measure("nothing_of_this_name", [], 60, tmp_path)
    assert "exit status 2" in failed.error
    assert results.load("nothing_of_this_name", tmp_path) == kept_result("nothing_of_this_name")


def test_a_run_that_does_not_end_is_killed_with_what_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "END_S", 0.1)
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork()"
    code += "; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"  # print may write in pieces
    words = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **pipes) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        results.end_session(process)
        assert process.returncode == -signal.SIGKILL
        assert process.stdout.read() == ""  # nobody has it open
    assert process.pid in pids


@pytest.mark.parametrize(
    ("newer", "said"), [(0, ""), (200, ""), (201, "Old: 201"), (None, "unknown")]
)
def test_a_result_of_old_code_is_marked(
    newer: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "commits_since", lambda commit: newer)
    text = results.section("Noop", "", kept_result())
    assert said in results.age(kept_result())
    assert results.age(kept_result()) in text
    assert "bounded by the disk" in text


def test_what_has_no_result_is_measured_first_and_then_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {name: kept_result(name, name) for name in ("old", "new")}
    monkeypatch.setattr(results, "load", kept.get)
    monkeypatch.setattr(results, "commits_since", {"old": 9, "new": 1}.get)
    plan = [proof.Planned(name, 1) for name in ("new", "old", "never")]
    assert [planned.name for planned in proof.in_order(plan)] == ["never", "old", "new"]


def test_a_benchmark_that_does_not_fit_is_put_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "load", lambda name: None)
    assert proof.measure([proof.Planned("engine", 330)], time.monotonic() + 100) == 0
    assert "put off" in capsys.readouterr().out


def test_only_what_is_between_the_markers_is_replaced() -> None:
    begin, end = proof.MARKERS
    page = proof.replaced(f"before\n{begin}\nold\n{end}\nafter\n", "new")
    assert page == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    with pytest.raises(ValueError, match="markers"):
        proof.replaced("no markers", "new")


def test_a_goal_that_is_missed_is_listed_with_what_bounds_it() -> None:
    page = proof.results_page([(proof.Planned("tensors", 1), kept_result())])
    assert "| `tensors` | a | 2 ms | 2 x | ≤ 1.5 x | the disk |" in page
    assert "| 0 | 1 | 0 |" in proof.summary([(proof.Planned("noop", 1), kept_result())])


def test_the_plan_names_every_benchmark() -> None:
    named = {planned.name for planned in proof.PLAN}
    # anchors that other benchmarks start, with no question of their own
    assert set(BENCHMARKS) - named <= {"reference"}
    assert named <= set(BENCHMARKS)


def test_every_module_with_rows_has_a_name() -> None:
    """`python -m bench` runs every module with a `main(quick)`, and finds what it names."""

    def has_main(file: Path) -> bool:
        return "\ndef main(quick" in file.read_text()

    found = {file for file in results.ROOT.glob("bench/**/*.py") if has_main(file)}
    assert {source_of(name) for name in BENCHMARKS} == found


def test_an_installation_needs_wheels_and_known_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "DIST", tmp_path)
    (missing,) = install.main(quick=True, rows=["clipper"])
    assert missing.missing == "run: make wheels"
    with pytest.raises(UnknownRows, match="no rows nobody; there are clipper, mosec"):
        install.main(quick=True, rows=["clipper", "nobody"])


def test_an_installation_that_fails_has_a_reason_and_no_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "DIST", tmp_path)
    (tmp_path / "broken-1-py3-none-any.whl").write_bytes(b"no archive")
    (failed,) = install.main(quick=True, rows=["clipper"])
    assert failed.missing.startswith(FAILED)
    assert "broken-1-py3-none-any.whl" in failed.missing


def test_the_bound_of_two_threads_is_what_locks_and_a_loop_without_them_leave() -> None:
    rates = {"one": 10.0, "one, calls without locks": 10.0, "one, calls with locks": 8.0}
    assert memory.bound_of_two(rates).endswith("they leave 1.60 x")
    found = memory.bound_of_two(rates | {"one loop": 20.0, "two loops": 30.0})
    assert "without locks reach 1.50 x" in found
    assert found.endswith("both leave 1.20 x")


def test_the_highest_rate_is_found_within_a_fifth() -> None:
    found = mlperf.highest_rate(lambda rate: rate <= 1234, 100_000)
    assert 1234 / 1.2 <= found <= 1234


def test_figures_are_read_from_loadgens_summary(tmp_path: Path) -> None:
    summary = "90th percentile latency (ns) : 1500\nSamples per second: 2e3\n"
    assert mlperf._figure(summary, r"90(?:th|\.00) percentile latency \(ns\)") == 1500
    assert mlperf._figure(summary, r"(?:Completed s|S)amples per second") == 2000
    assert math.isnan(mlperf._figure(summary, "nothing"))
