"""Results of further functions without side effects, for tables of arguments: see
test_pure_functions."""

import base64
import gzip
import hashlib
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.catalog.view import Rollout
from clipper.deploy.packages import environments, sdk
from clipper.errors import Overloaded, UnknownModel
from clipper.frontend.http.messages import as_json, inflate, problem
from clipper.frontend.http.metrics import _prefers_openmetrics
from clipper.load.inputs import rows_of
from clipper.load.measurement import Measurement, QueryOutcome
from clipper.load.runs import bisected
from clipper.manage.dashboard import seconds
from clipper.manage.rollouts.decisions import decide, stages_of
from clipper.mesh.splice import inject
from clipper.serving.feedback import ground_truth
from clipper.serving.models.reads import declaration_of
from clipper.serving.query.stats import closeness
from clipper.serving.rollout.guards import Counts, Figures
from clipper.types import Batching, InputType, VersionedModel, cost_problem
from clipper.version import VERSION
from clipper.yaml_text import to_yaml
from clipper_container.adapters.columns import _chosen
from clipper_container.worker.warmup import _made_up
from clipper_core.runtime.histogram import LatencyHistogram
from tests.expected import table

A, B = VersionedModel("a", 1), VersionedModel("b", 2)


def test_labels_of_feedback() -> None:
    labels = [
        1,
        True,
        "a",
        b"b",
        1.5,
        np.nan,
        np.inf,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        2**64,
        -(2**63) - 1,
        None,
        [1, 2],
        [[1, 2], [3]],
        np.ones(2),
        np.array(["a"]),
        np.array([np.nan]),
        {"a": 1},
        np.float32(2.5),
        np.int8(3),
        np.bool_(True),
        "x" * (1 << 20),
        "\ud800",
    ]
    table(
        "labels",
        (
            ground_truth.truth_of,
            [(label, None, None) for label in labels]
            + [(None, True, None), (None, 1, None), (None, None, 0.5), (None, None, 1.5)]
            + [(None, None, -0.1), (None, None, np.nan), (None, None, "x"), (1, True, None)]
            + [(None, None, None), (1, None, 0.5), (None, np.False_, None), (None, None, True)],
        ),
        (
            ground_truth.fitted_label,
            [
                (label, outputs)
                for label in (1, 2.0, 2.5, True, "a", "1", b"a", np.ones(2), np.array([1, 2]))
                for outputs in (
                    [],
                    [1],
                    [1.5],
                    ["a"],
                    [b"a"],
                    [True],
                    [np.ones(2)],
                    [np.ones(3)],
                    [1, 2.5],
                )
            ],
        ),
        (
            ground_truth.fitted_column,
            [
                (labels, outputs)
                for labels in (
                    np.array([1.0, 2.0]),
                    np.array([1.5, 2.0]),
                    np.array([1, 2]),
                    ["a", 1],
                )
                for outputs in ([np.array([1, 2])], [np.array([1.5, 2])], [["a", "b"]], [])
            ],
        ),
        (
            ground_truth.label_column,
            [
                np.array([1, 2]),
                np.array([1.5, np.nan]),
                [1, 2],
                [1, 2.5],
                ["a", "b"],
                [True, False],
                ["a", 1],
                [None],
                np.ones((2, 2)),
                [[1, 2], [3, 4]],
                np.array(["a"]),
                [],
            ],
        ),
        (ground_truth.weight_of, [1, 1.0, 0, -1, 0.5, 1000, 1001, 1000.5, np.nan, "x", True, None]),
    )


def warmed_up(text: str) -> object:
    rows = _made_up(text)
    return [*map(bytes, rows)] if text == "bytes" else rows


def measured(rate: float) -> Measurement:
    """Return the measurement of a server that serves 300 queries a second; above 900 the generator
    is late."""
    found = Measurement(rate, 5.0, 20.0)
    for i in range(40):
        due_s = i / rate
        late_s = 0.5 if rate > 900 else 0.0
        number = found.sent(due_s, due_s + late_s)
        took_s = 0.005 if rate <= 300 else 0.1
        found.done(number, QueryOutcome(0), due_s + late_s + took_s, "")
    return found


def searched(first: float, most: float) -> object:
    found = bisected(measured, 20.0, first, most)
    return [value if not isinstance(value, list) else len(value) for value in vars_of(found)]


def vars_of(thing: Any) -> list[Any]:
    return [getattr(thing, name) for name in thing.__dataclass_fields__]


def test_of_load() -> None:
    types = "f64[2] f32[*] u8[3] i8[2] i64 bool[2] str bytes any f64".split()  # noqa: SIM905
    types += ['{"a": "f32[2,*]", "s": "str[2]", "b": "bytes", "n": "i64"}']
    table(
        "load",
        (searched, [(10, 1000), (200, 250), (1000, 5000), (0.5, 1), (400, 400), (2000, 1e5)]),
        (lambda text: rows_of("random", InputType.parse(text))[:2], types),
        (
            lambda text, type: rows_of(text, InputType.parse(type)),
            [
                ("[1, 2]", "f64[2]"),
                ("x", "str"),
                ("x", "f64"),
                ("[1", "str"),
                ("{", "any"),
                ("7", "any"),
            ],
        ),
        (
            warmed_up,
            [*types[:-1], "f32[5]", "f64[100000,100000]", types[-1], '{"x": "f64[9999999,99]"}'],
        ),
        (
            closeness,
            [
                (one, other)
                for one in (
                    1.0,
                    2.0,
                    1,
                    "a",
                    np.nan,
                    np.array([3.0, 4.0]),
                    np.array([1, 2]),
                    True,
                    0.0,
                )
                for other in (
                    1.0,
                    3.0,
                    1,
                    "a",
                    np.array([3.0, 4.0]),
                    np.array([0.0, 0.0, 1.0]),
                    0.0,
                )
            ],
        ),
        (
            cost_problem,
            [
                Batching(cost=cost, cost_max=most, padded=padded, pad=pad, mode=mode)
                for cost in ("", "bytes", "length", "length:ids", "a:b:c", "other")
                for most in (0, 5)
                for padded, pad, mode in (
                    (False, False, "aimd"),
                    (True, False, "aimd"),
                    (False, True, "aimd"),
                    (False, False, "static"),
                )
            ],
        ),
        (
            lambda reads: declaration_of("m", reads),
            [
                "a:b",
                "a",
                "a:b:c",
                {},
                {"t": 1},
                {"t": (0, 2)},
                {"t": -1},
                {"t": ()},
                {"t": ("x",)},
                5,
                {"t": [1, 2], "u": 0},
            ],
        ),
    )


def rollout(**more: Any) -> Rollout:
    words: dict[str, Any] = {"stages": (0.1, 1.0), "hold_s": 60.0, "guard": "", "error_rate": 0.01}
    return Rollout("app", B, A, A, began_us=0, **{**words, **more})


def test_rollouts() -> None:
    some, none = Counts(1000, 1), Counts()
    bad = Counts(1000, 300)
    table(
        "rollouts",
        (
            decide,
            [
                (rollout(stage=stage, state=state, guard=guard), Figures(new, some), held_s, reason)
                for stage, state, guard, held_s, new, reason in (
                    (0, "running", "", 60.0, some, ""),
                    (1, "running", "", 60.0, some, ""),
                    (0, "running", "", 59.999999, some, ""),
                    (0, "running", "", 59.0, some, ""),
                    (0, "running", "", 60.0, none, ""),
                    (0, "running", "error<5%", 60.0, some, ""),
                    (0, "running", "error<5%", 60.0, bad, ""),
                    (0, "running", "error<5%", 60.0, none, ""),
                    (0, "running", "error<5%, p99<1ms", 60.0, bad, ""),
                    (0, "paused", "error<5%", 60.0, some, ""),
                    (0, "paused", "error<5%", 60.0, bad, ""),
                    (0, "running", "", 60.0, some, "it is gone"),
                    (0, "promoted", "", 60.0, some, "it is gone"),
                )
            ],
        ),
        (
            stages_of,
            [
                (None, None),
                ("5%", None),
                (0.05, None),
                (None, "5,25,50,100"),
                ("5%", "5,25,100"),
                ("10%", "5,25,100"),
                (None, "25,5"),
                (None, ""),
                (None, "0"),
                (None, "101"),
                (None, "x"),
                (None, [0.1, 1.0]),
                (None, [0.1, 1.1]),
                ("100%", None),
                (None, "50,50"),
                (None, []),
                (None, ",".join(str(i) for i in range(1, 60))),
                (0, None),
                (True, None),
                ("5", [0.05, 1]),
            ],
        ),
    )


def of_model(n: int, **more: Any) -> dict[str, Any]:
    latency, rows = LatencyHistogram(), LatencyHistogram()
    for i in range(10 * n):
        latency.record(1000 * (i + 1))
        rows.record(4)
    found = {
        "ended": {"OK": 10 * n, "FULL": n, "UNNEEDED": 5 * n},
        "latency_us": latency.snapshot(),
        "batch_rows": rows.snapshot(),
        "evaluated": 40 * n,
        "hits": 2 * n,
        "joined": n,
        "queued": 3,
        "delay_us": 70,
        "replicas": [{"limit": 4, "misses": n}, {"limit": 8, "misses": 2 * n}, {}],
        "has": 2,
        "cost": 30.0 * n,
        "cost_padded": 40.0 * n,
    }
    return {**found, **more}


def of_application(n: int) -> dict[str, Any]:
    latency = LatencyHistogram()
    for i in range(10 * n):
        latency.record(1000 * (i + 1))
    mean = {"n": 4.0 * n, "mean": 0.25 * n}
    return {
        "queries": 10 * n,
        "answers": {"ok": 8 * n, "default": {"late": n, "full": n, "x": 0}, "feedback": mean},
        "latency_us": latency.snapshot(),
        "models": {"a:1": {"used": 9 * n, "feedback": mean}, "b:1": {"used": 0, "feedback": {}}},
    }


def test_seconds_of_the_dashboard() -> None:
    reasons = sorted(seconds.REFUSED) + sorted(seconds.FAILED) + ["late", ""]
    table(
        "seconds",
        (seconds.outcome_of, reasons),
        (
            lambda n, m: seconds.of_model(of_model(n) if n else None, of_model(m)),
            [(0, 1), (1, 1), (1, 3), (3, 1)],
        ),
        (
            lambda n, m: seconds.of_application(
                of_application(n) if n else None, of_application(m), {"a:1": 0.123456}
            ),
            [(0, 1), (1, 1), (1, 3), (3, 1)],
        ),
        (
            seconds._mean_more,
            [
                ({}, {}),
                ({}, {"n": 2, "mean": 0.5}),
                ({"n": 1, "mean": 1.0}, {"n": 3, "mean": 0.5}),
                ({"n": 3, "mean": 0.9}, {"n": 4, "mean": 0.1}),
                ({"n": 4}, {"n": 4, "mean": 1}),
                ({"n": 1}, {"n": 4, "mean": 1}),
                ({"n": 1, "mean": -0.5}, {"n": 3}),
                ({"n": 1, "mean": 0.5}, {"n": 3}),
            ],
        ),
        (
            seconds._padding,
            [
                (None, {}),
                (None, {"cost": 3, "cost_padded": 4}),
                ({"cost": 3, "cost_padded": 4}, {"cost": 3, "cost_padded": 4}),
                ({"cost": 1, "cost_padded": 2}, {"cost": 6, "cost_padded": 8}),
            ],
        ),
    )


def test_bodies_and_texts() -> None:
    plain = b"some text " * 20
    packed, zlibbed = bytearray(gzip.compress(plain, mtime=0)), zlib.compress(plain)
    packed[9] = 3  # the operating system, which depends on the version of Python
    packed = bytes(packed)
    errors = (
        UnknownModel("no model.", hint="See."),
        Overloaded("full.", hint=""),
        MemoryError(),
        OSError(2),
    )
    took = LatencyHistogram()
    histograms = [took.snapshot()]
    for i in range(100):
        took.record(1000 * i)
    table(
        "bodies",
        (
            inflate,
            [
                (body, encoding, size)
                for body in (plain, packed, zlibbed, packed[:-1], packed + b"x", b"")
                for encoding in (b"", b" GZIP ", b"x-gzip", b"deflate", b"identity", b"br")
                for size in (len(plain), len(plain) - 1)
            ],
        ),
        (lambda error: response(problem(error, b"id")), [*errors]),
        (as_json, [np.ones(2), np.int8(3), object, histograms[0], took.snapshot()]),
        (
            _prefers_openmetrics,
            [
                b"",
                b"text/plain",
                b"application/openmetrics-text",
                b"*/*",
                b"text/plain;q=0.5,application/openmetrics-text;q=0.5",
                b"text/plain;q=0.6,application/openmetrics-text;q=0.5",
                b"application/openmetrics-text;q=0",
                b"application/openmetrics-text; version=1.0.0;q=x",
                b"Application/OpenMetrics-Text;q=0.1,application/openmetrics-text;q=0.9,text/plain;q=0.5",
            ],
        ),
        (
            lambda value: to_yaml({"key": value}),
            [
                "plain",
                "true",
                "null",
                "1",
                "1.5",
                "a: b",
                "- a",
                "",
                " a",
                "a#b",
                "é",
                "\x00",
                "\u2028",
                "😀",
                'a"b\\c',
                "a\nb",
                1e20,
                1.5,
                1e-7,
                None,
                True,
                3,
                [],
                {},
                [1, [2, {"a": []}]],
                {"a": {"b": [1, {"c": "d"}]}},
                "yes",
                "0x1",
                "~",
                "2026-01-01",
            ],
        ),
        (
            inject,
            [
                (message, path, "value")
                for message in (
                    b"",
                    b"\x0a\x03abc",
                    b"\x12\x05\x0a\x03abc\x18\x96\x01",
                    b"\x0a\x03ab",
                    b"\x0a",
                    b"\x08\x96\x01\x0a\x01x",
                    b"\x09" + bytes(8),
                    b"\x0d" + bytes(3),
                    b"\x0b\x0a\x01x\x0c",
                    b"\x0b\x0a\x01x",
                    b"\x0c",
                    b"\x00",
                    b"\x80" * 11,
                    b"\x12\x02\x0a\x00\x12\x04\x0a\x02zz",
                    b"\x12" + b"\x7f" + bytes(127),
                )
                for path in ((1,), (2, 1), (2, 3), (4, 5, 6))
            ],
        ),
    )


def response(found: Any) -> object:
    return found.status, found.body, found.content_type, found.headers


def test_columns_of_an_estimator() -> None:
    names = ["a", "b", "c", "d"]
    slices = [slice(1, 3), slice("b", "c"), slice(None, "c"), slice("c", None), slice("a", "d", 2)]
    others = ["b", [0, 2], np.array([3]), [True, False, False, True], ["d", "a"], [], (1, 2)]
    table("columns", (_chosen, [(wanted, names) for wanted in (*slices, *others)]))


def test_the_wheel_of_the_sdk() -> None:
    with zipfile.ZipFile(io.BytesIO(sdk.wheel())) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o644}
    about = f"clipper_container-{VERSION}.dist-info"
    assert {f"{about}/METADATA", f"{about}/WHEEL", f"{about}/entry_points.txt"} <= files.keys()
    rows = [row.split(",") for row in files.pop(f"{about}/RECORD").decode().splitlines()]
    assert rows.pop() == [f"{about}/RECORD", "", ""]
    for name, digest, size in rows:
        data = files.pop(name)
        raw = hashlib.sha256(data).digest()
        assert digest == f"sha256={base64.urlsafe_b64encode(raw).decode().rstrip('=')}"
        assert int(size) == len(data)
        if name.endswith("entry_points.txt"):
            script = b"clipper-container = clipper_container.__main__:command"
            assert data == b"[console_scripts]\n" + script + b"\n"
        elif name.endswith("/WHEEL"):
            assert data.splitlines()[0] == b"Wheel-Version: 1.0"
            assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in data
        elif name.endswith("/METADATA"):
            assert data.startswith(b"Metadata-Version: 2.1\nName: clipper-container\n")
        else:
            assert name.startswith("clipper_container/")
    assert not files


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    rename = Path.rename

    def renamed(old: Path, new: Path) -> Path:
        done.append(new.name)
        return rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.fstat(fd).st_size))
    monkeypatch.setattr(Path, "rename", renamed)
    environments._put(tmp_path / "lock", "twelve bytes")
    assert done == [12, "lock"]
    assert (tmp_path / "lock").read_text() == "twelve bytes"
