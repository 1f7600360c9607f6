"""Results of functions of the package for tables of arguments: files of keys, restarts, copies of a
store, records of feedback, rollouts, and sums of counts for dashboard and statistics."""

import hashlib
import os
import sys
import termios
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any

import numpy as np
import pytest

from clipper.cli.servers.end_process import end_process
from clipper.config_schema import schema
from clipper.credentials.credential_file import CredentialFile, line_of
from clipper.deploy.deployer import LogTail
from clipper.deploy.kubernetes.helm import shard_values
from clipper.errors import ConfigError, UnknownModel
from clipper.frontend.inference.operations import _of_model
from clipper.frontend.streams.consumer_group import ConsumerGroup
from clipper.keys import Keys
from clipper.manage.dashboard import shards, sources
from clipper.manage.overview import _pid_here, followed
from clipper.manage.rollouts.decisions import Step, moved, verdicts_of
from clipper.processes.restarts import RestartPolicy, Restarts
from clipper.selection.learning.batch_learning import ObservationRows
from clipper.serving.feedback import journal_records
from clipper.serving.rollout.guards import Counts, Figures
from clipper.settings.params import ParamsSettings
from clipper.store import copying
from clipper.store.store import Delete, Event, Put, Record
from clipper.types import VersionedModel
from clipper_core.runtime.histogram import LatencyHistogram
from tests.expected import table
from tests.processes import Program
from tests.unit.test_functions_tables import rollout

RECORD, LEASED = Record("k", b"v", 5, 5, 1, ""), Record("k", b"v", 5, 5, 1, "x")
ROLES = ("read", "train")


def keys_in(path: Path, text: bytes, roles: tuple[str, ...], role: str) -> object:
    path.write_bytes(text)
    try:
        found = CredentialFile(str(path), "http.keys", roles, role)
    except ConfigError as error:
        return str(error).replace(str(path), "FILE")
    each = [found.find_digest(hashlib.sha256(key).digest()) for key in (b"k", b"other")]
    return [tuple(one)[1:] if one else None for one in each]


def test_files_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    mark = f"sha256:{hashlib.sha256(b'k').hexdigest()}"
    lines = ["", "# x\n\n", f"a {mark}", f"a read {mark}", f"a other {mark}", f"a read x {mark}"]
    lines += [f"a {mark[7:]}", f"a {mark}00", f"a {mark[:-2]}", mark, f"a read {mark}\nb {mark}"]
    lines += [f"a sha256:{'zz' * 32}", f"x sha256:{'00' * 32}\na {mark}"]
    table(
        "keys",
        (
            lambda text, *more: keys_in(path, text, *more),
            [
                (text.encode(), *more)
                for text in lines
                for more in (((), ""), (ROLES, ""), (ROLES, "train"))
            ]
            + [(b"\xff", (), "")],
        ),
        (line_of, [("a", "k"), ("a", "k", "read")]),
    )
    with pytest.raises(ConfigError, match="No such file"):
        CredentialFile(str(tmp_path / "none"), "http.keys")
    path.write_text(line_of("a", "k"))
    found = CredentialFile(str(path), "http.keys")
    assert not found.refresh()
    digest = hashlib.sha256(b"k").digest()
    assert found.find_digest(digest) is not None
    assert found.find_digest(digest[:8] + bytes(24)) is None
    for text, is_new, finds in (("bad", False, True), (line_of("b", "other"), True, False)):
        path.write_text(text)
        assert (found.refresh(), found.find_digest(digest) is not None) == (is_new, finds)
        assert not found.refresh()


def exits(policy: RestartPolicy, *times: tuple[float, float]) -> object:
    some = Restarts(policy)
    verdicts = [some.ended(now_s, ready_s) for ready_s, now_s in times]
    return [one.held or one.pause_s for one in verdicts]


def changed(events: list[Event | None]) -> object:
    rest = iter([*events[1:], None])
    return copying._next_changes(events[0], lambda: next(rest))


def sizes(lengths: list[int]) -> object:
    ops = [Put(f"{i:03}", b"x" * n) for i, n in enumerate(lengths)]
    return [len(some) for some in copying._transactions([*ops, Delete("k")])]


def test_restarts_and_copies_of_a_store() -> None:
    policy = RestartPolicy(1.0, 5.0, 30.0, 4, 10.0)
    put = Event("PUT", 5, "k", RECORD)
    table(
        "restarts",
        (
            lambda *times: exits(policy, *times),
            [
                ((0, 29.9), (40, 50), (51, 61.5)),
                ((0, 1), (40, 70), (71, 101)),
                ((0, 1), (1, 2), (2, 3), (3, 4)),
                ((0, 1), (1, 2), (2, 3), (3, 11.5)),
                ((0, 1), (1, 2), (2, 3), (3, 11)),
                ((0, 11), (0, 22), (0, 33), (0, 44), (0, 55)),
            ],
        ),
        (
            changed,
            [
                [None],
                [put, Event("SYNC", 6), Event("DELETE", 7, "k")],
                [put, Event("RESET", 7)],
                [Event("PUT", 5, "k", LEASED)],
                [Event("PUT", i, f"{i}", RECORD) for i in range(150)],
            ],
        ),
        (sizes, [[], [1], [0] * 100, [0] * 99, [1 << 19], [(1 << 19) - 3, 0], [1 << 18] * 5]),
    )


def observed(n: int, most: int, text: bool) -> object:
    one = VersionedModel("m", 1)
    rows = ObservationRows(
        (one, VersionedModel("n", 2)),
        (np.linspace(0, most, n).astype(np.int64), np.ones((n, 2)) if n else np.zeros((0, 2))),
        (None, np.arange(n) % 2 == 0),
        (None, np.full(n, 0.5)),
        ["a"] * n if text else np.full(n, -most),
        np.full(n, -1, np.int32),
        np.full(1, 0.25),
    )
    learner: Any = Object(application="a", text="single", models=rows.models)
    parts = list(journal_records.written_rows(learner, "u", rows))
    found = []
    for part, record in parts:
        (*head, read), _ = journal_records.read_with_time(record)
        found.append([head, read, len(part)])
    narrow = [column.dtype for column in map(journal_records._narrow, rows.outputs)]  # type: ignore[union-attr]
    return [found, [str(dtype) for dtype in narrow]]


def test_records_of_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (n, most, text) for n in (1, 3) for most in (127, 128, 32768) for text in (False, True)
    ]
    table("feedback", (observed, [*cases, (2, 2**31 - 1, False), (2, 2**31, False)]))
    monkeypatch.setattr(journal_records, "RECORD_BYTES_MAX", 300)
    table("feedback-halved", (observed, [(n, 300, False) for n in (1, 2, 5, 9)]))


def rates(stages: int, guards: int, stage: int, beside: bool) -> object:
    seen: list[float] = []
    judge = Object(beside=beside, judge=lambda figures, rate: seen.append(rate))
    figures = Figures(Counts(), Counts())
    some = rollout(stages=tuple((i + 1) / stages for i in range(stages)), stage=stage)
    verdicts_of(some, [judge] * guards, figures)  # type: ignore[list-item]
    return seen


def test_rollouts_share_out_their_error_rate() -> None:
    table(
        "error-rates",
        (
            rates,
            [(n, guards, n - 1, beside) for n in (1, 4) for guards in (0, 1, 3)
             for beside in (False, True)] + [(4, 2, 2, True)],
        ),
        (
            lambda kind: moved(rollout(), Step(kind, "why")),
            ["stay", "advance", "promote", "revert", "abort"],
        ),
    )  # fmt: skip


def shard(n: int, **more: Any) -> dict[str, Any]:
    names = ("rows", "nbytes", "pulled", "missed", "applied", "made", "unadmitted", "refused")
    counts = dict.fromkeys((*names, "evicted", "expired"), 10 * n)
    lags = LatencyHistogram()
    for i in range(n):
        lags.record(i)
    buckets = lags.snapshot()
    return {
        "shard": 1,
        "pid": 7,
        "ready": True,
        "exposed": False,
        "server": {"pulls": 3 * n, "pushes": 2 * n, "epoch": 4, "version": n},
        "model_pushes": n,
        "refused": {"FULL": n, "BAD": 0},
        "tables": {"t": {**counts, "dim": 4}, "u": {**counts, "dim": 2, "pulled": n}},
        "lags": {"buckets": buckets.buckets(), "sum": buckets.sum},
        "followers": [{"whole": True, "behind": n, "behind_s": 0.126 * n}] * (n % 3),
        "variables": 2,
        "nbytes": 99,
        "resident_bytes": 1 << 20,
        "state_lost": False,
        "snapshots": {"at_us": 5, "error": "e"} if n > 1 else {},
        "recovery": {"from": "replica"},
        **more,
    }


def test_what_the_dashboard_shows_of_shards_and_of_the_history() -> None:
    away = {"shard": 2, "away": "it is gone"}
    changes = [
        {"key": "k", "before": before, "after": after}
        for before, after in (
            (None, {"a": 1}),
            ({"a": 1}, None),
            ("x", "y"),
            ({"a": 1, "at_us": 4}, {"a": 2, "at_us": 5, "b": [{"name": "m", "version": 1}]}),
            ({"a": "x" * 200, "b": [{"name": "m", "version": None}]}, {"a": "y" * 60, "c": []}),
            ({"a": [1], "b": [{"name": "m"}]}, {"a": [{}]}),
        )
    ]
    entry = {"time_us": 5, "actor": "me", "verb": "put", "number": 3}
    table(
        "shards",
        (
            shards.of_shards,
            [
                ([shard(1)], [shard(3), away]),
                ([shard(3)], [shard(1)]),
                ([shard(1)], [shard(2, pid=8)]),
                ([away], [shard(2)]),
                ([shard(2), away], [shard(2), away]),
                ([shard(1), shard(1, shard=2)], [shard(4), shard(2, shard=2)]),
            ],
        ),
        (
            shards.shards_now,
            [
                [shard(1), away],
                [shard(2, state_lost=True), shard(3, ready=False), shard(5, exposed=True)],
                [shard(1, tables={str(i): shard(i)["tables"]["t"] for i in range(60)})],
            ],
        ),
        (sources.entry_row, [{**entry, "changed": changes}, {**entry, "changed": changes[:2] * 5}]),
    )


def test_counts_of_a_model_and_what_its_replicas_wrote(tmp_path: Path) -> None:
    latency = LatencyHistogram()
    empty = latency.snapshot()
    latency.record(3000)
    latency.record(5000)
    row = {"ended": {"OK": 4, "FULL": 2}, "hits": 3, "joined": 2, "evaluated": 9, "batches": 5}
    last = [f"line {i}" for i in range(7, 10)]
    written: dict[int, list[str]] = {0: LogTail(last, 10), 1: ["a", "b"], 2: []}

    def logs(id: VersionedModel, number: int) -> list[str]:
        if number == 3:
            raise UnknownModel("no replica.")
        return written[number]

    replicas = [{"number": n, "restart_count": 0} for n in (2, 0, 1, 3, 1)] + [{"number": 9}]
    view = Object(model=lambda name: Object(id=VersionedModel("m", 2)))
    server: Any = Object(
        catalog=Object(view=view),
        logs=logs,
        stats=lambda: {"models": {"m:2": {"replicas": replicas}}},
    )
    settings = [{"durability": "disk", "log_bytes_max": 3 << 30, "snapshots_max": 1}, {}]
    table(
        "counts",
        (_of_model, [("m:2", {**row, "latency_us": one}) for one in (latency.snapshot(), empty)]),
        (lambda after: followed(server, "m", after), ["", "2.0:9", "2.0:5,2.1:2", "2.0:99", "x"]),
        (_pid_here, [{}, {"pid": 7}, *({"pid": pid, "restart_count": 0} for pid in (0, 1, 2, 7))]),
        (
            lambda mib, gib, n: shard_values(ParamsSettings(**settings[n]), mib, gib)["storageGib"],
            [(1024, 0, 0), (1025, 0, 0), (4096, 0, 1), (4096, 7, 0)],
        ),
    )


def test_a_schema_refuses_unknown_keys() -> None:
    found: Any = schema()
    assert found["additionalProperties"] is False
    assert found["properties"]["http"]["anyOf"][0]["additionalProperties"] is False


def test_keys_of_a_terminal() -> None:
    ours, theirs = os.openpty()
    with open(theirs, closefd=True) as terminal:
        before = termios.tcgetattr(terminal)
        with Keys(terminal) as keys:
            assert keys.pressed(0.0) == ""
            os.write(ours, b"a\xc3")
            assert keys.pressed(5.0) == "a\ufffd"
        assert termios.tcgetattr(terminal) == before
    os.close(ours)
    with open(os.devnull) as nothing, Keys(nothing) as keys:
        assert keys.pressed(0.0) == ""


TWICE = """
import signal, sys, time
count = 0
def on(*_):
    global count
    count += 1
    if count == int(sys.argv[1]): sys.exit(5)
signal.signal(signal.SIGTERM, on)
print("ready", flush=True)
while True: time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("times", "now", "ends"), [(1, False, True), (2, True, True), (2, False, False)]
)
def test_a_process_is_signalled_to_end(
    times: int, now: bool, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", TWICE, str(times)]
    with Program(*command, until="ready\n") as process:
        if ends:
            end_process(process.pid, 60.0, "still there", now=now)
            assert process.wait() == 5
            assert capsys.readouterr().err == ""
        else:
            with pytest.raises(SystemExit) as ended:
                end_process(process.pid, 0.05, "still there", now=now)
            assert (ended.value.code, capsys.readouterr().err) == (1, "still there\n")
            assert process.lives
    with pytest.raises(ProcessLookupError):
        end_process(process.pid, 0.0, "still there")


def test_how_often_an_entry_was_delivered() -> None:
    names: Any = Object(source="s", group="g")
    calls: list[object] = []
    group = object.__new__(ConsumerGroup)
    group.names = names
    for rows, n in (([], 1), ([{"times_delivered": 4}], 4)):
        group._redis = Object(xpending_range=lambda *words, rows=rows: calls.append(words) or rows)
        assert group._deliveries("1-0") == n
    assert calls == [("s", "g", "1-0", "1-0", 1)] * 2
