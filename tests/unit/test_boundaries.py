"""Results of functions without side effects at the boundaries of their limits, and errors just
beyond: see test_pure_functions."""

import errno
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from clipper.catalog.rules import check_settings
from clipper.cli.mesh.cluster import _amount
from clipper.cli.monitoring.top_screen import _ms
from clipper.cli.monitoring.top_state import ServerReadings
from clipper.cli.server_command import short
from clipper.component import Stop
from clipper.deploy.deployer import ContainerSpec, options
from clipper.deploy.packages.package import input_of
from clipper.deploy.ray.servers import server_addresses
from clipper.errors import (
    ClipperError,
    ConfigError,
    InvalidInput,
    NoReplica,
    Overloaded,
    ShuttingDown,
)
from clipper.frontend import http_post
from clipper.frontend.http.messages import retry_after_s
from clipper.frontend.http.metrics import _prefers_openmetrics
from clipper.frontend.http_post import Poster
from clipper.frontend.inference.codec import _array_of_texts, _by_name, _head_size
from clipper.frontend.openapi.document import schema_of_input
from clipper.frontend.params_grpc.service import _cursor, _joined
from clipper.frontend.params_grpc.tensors import values_in
from clipper.frontend.streams.records import _array as array_of_record
from clipper.load.chart import _round_step
from clipper.load.open_loop import arrivals
from clipper.manage.client import _error
from clipper.manage.dashboard.feed import PAST_BYTES
from clipper.manage.dashboard.feed import _packed as packed_events
from clipper.manage.overview import one_row_us
from clipper.manage.tables.operations import _checked
from clipper.mesh.decisions.failures import _pause_ms
from clipper.mesh.decisions.placement import UPGRADE_MS, _replaced
from clipper.mesh.decisions.scaling import limit_of
from clipper.mesh.decisions.usage import Usage
from clipper.mesh.records import Instance, MeshModel, Policy
from clipper.metrics.families import Family
from clipper.metrics.samples import cumulative
from clipper.options import types_of
from clipper.params.client.client import _merged
from clipper.params.local.address_file import prepare, read_address_file, write_address_file
from clipper.params.local.shard_process import config_in
from clipper.params.shard.durability.snapshots import Part, chain_of
from clipper.params.shard.replication.change_log import History, PrimaryLog
from clipper.params.shard.replication.followers import FollowerState, Origin
from clipper.params.tables import optimizer_in
from clipper.selection import default_policy
from clipper.selection.deciders.schedule import parse_decider
from clipper.selection.learning.batch_learning import _coded
from clipper.selection.learning.learned_state import LearnedState, bin_of, label_bit, log_mean
from clipper.selection.learning.learning_policy import _rightness
from clipper.selection.learning.one_model import mean_accuracy
from clipper.selection.learning.prediction_sets import SetThresholds, update_with_number
from clipper.selection.policies import bandits, contextual, mixture, ridge
from clipper.selection.policies.weighted import check_weights
from clipper.selection.policy import Observation, Plan, Truth
from clipper.selection.votes import sorted_models
from clipper.serving.feedback.online_learning import FRAME_ROWS_MAX, _frames
from clipper.serving.models.batch_cost import shown_costs
from clipper.serving.models.containers import Hello, _check_timings
from clipper.serving.rollout.guards import _evidence, judged_share
from clipper.serving.rollout.roles import DECOY_BYTES_MIN, _check_setting, _link_named
from clipper.serving.rollout.sketch import _by_decile, _by_label, _psi
from clipper.settings.http import HttpSettings, listener_problems
from clipper.settings.mesh import MeshSettings
from clipper.settings.params import ParamsSettings
from clipper.store.history import _json_of
from clipper.store.redis.store import _record
from clipper.types import Application, Batching, InputType, VersionedModel
from clipper_container.adapters.mlflow import _outputs
from clipper_container.adapters.oip import server_memory
from clipper_container.adapters.oip.tensors import BadTensor, Signature, _tensor, _type_of, _values
from clipper_container.adapters.onnx import _row_type
from clipper_container.host.server_connection import needs_resolver, start_connecting
from clipper_container.loading.errors import LoadError
from clipper_container.machine import proportional_bytes
from clipper_container.records import as_items, strings_of
from clipper_container.schema import Tensors, _parted
from clipper_container.wire.transport import parse_address
from clipper_container.worker.outputs import InvalidOutput, _array, _packed
from clipper_container.worker.turns import Turns
from clipper_container.worker.warmup import _made_up_records
from clipper_core.runtime.histogram import LatencyHistogram
from tests.expected import table
from tests.memory_container import wait_until

A, B = VersionedModel("a", 1), VersionedModel("b", 2)
INF = float("inf")
SIZE = 1 << 30


def result_or_error(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function, with the text of a container's error as its result."""

    def call(*words: object) -> object:
        try:
            return function(*words)
        except (LoadError, InvalidOutput, BadTensor) as error:
            return f"{type(error).__name__}: {error}"

    call.__name__ = function.__name__
    return call


def state(*rows: list[float]) -> LearnedState:
    return LearnedState((A,), np.array(rows), 0.0, 0, np.zeros((10, 2)))


def rated(output: object, label: object, score: float | None, answer: object) -> float | None:
    observation = Observation(Plan((A,)), {}, Truth(label, score), answer)
    return _rightness(output, observation)


def test_rows_of_policies() -> None:
    base = np.array([[0.2, 4.0], [0.5, 0.0]])
    mine = np.array([[0.3, 7.0], [0.25, 0.0]])
    theirs = np.array([[0.6, 5.0], [0.75, 0.0]])
    memories = np.array([[3.0, 1, 2, 2, 1, 1, 4, 0.5, 0.1, 0.2, 0.3, 0.4]])
    more = memories + np.array([[1.0, 0, 1, 2, 0, 3, 0, 1, 0.3, 0.1, -0.2, -0.2]])
    most = memories + np.array([[0.0, 2, 0, 1, 4, 0, 1, 0, -0.05, 0.05, 0.1, -0.1]])
    pair = np.array([[1.0, 3, 5, 0.5], [2.0, 4, 1, 0.25]])
    blend = np.array([[1.0, 4, 2, 3], [2.0, 5, 6, 7]])
    table(
        "rows-of-policies",
        (bandits.merge_means, [(base, mine, theirs), (base, base, theirs), (base, mine, base)]),
        (bandits._merge_memories, [(memories, more, most), (memories, memories, memories)]),
        (bandits._memory_rank, [memories, more, np.vstack([memories, most])]),
        (bandits._average_of_one, [memories[:0], memories, np.vstack([memories, most]) / 8]),
        (bandits._laplace_rank, [pair]),
        (
            lambda row, model: (
                bandits._laplace_accuracy(state(row), model),
                bandits._beta_accuracy(state(row), model),
                mean_accuracy(state(row), model),
            ),
            [(row, A) for row in ([3.0, 5.0], [0.25, 1.0], [0.25, 0.5])] + [([3.0, 5.0], B)],
        ),
        (lambda row: mean_accuracy(state(row), A), [[0.5, 0.0], [0.25, 0.0]]),
        (ridge._sums, [blend]),
        (log_mean, [np.empty((0, 2)), np.array([[0.0, 800], [-1.0, 801]]), np.zeros((3, 1))]),
        (
            lambda favoured: mixture._even(
                np.pad(np.array(favoured)[:, None], ((0, 0), (mixture.FAVOURED, 0)))
            )[:, mixture.FAVOURED],
            [[1.0, 3.0, 9.0], [0.0, 0.0, 9.0], [9.0], [0.5, -0.5, 9.0]],
        ),
        (contextual._point, [(np.ones((2, 3)), ()), (np.ones((2, 3)), (0.5,))]),
        (
            rated,
            [
                (1, 1, None, None),
                (1, 2, None, 1),
                (1, None, 0.5, 1),
                (1, None, 1.0, 2),
                (1, None, 0.0, 2),
                (1, None, 0.75, 2),
                (1, None, 1.0, None),
                (1, None, 0.0, 1),
            ],
        ),
        (
            _coded,
            [
                (column, arrived, {})
                for column in (
                    np.array([3, 1, 3]),
                    np.array([True, False, True]),
                    np.array([1.5, 2, 3]),
                    np.ones((3, 1), int),
                    ["a", "b", "a"],
                    [1, True, 1],
                    [1, None, 2],
                    [1.0, 2.0, 1.0],
                )
                for arrived in (None, np.array([True, False, True]))
            ],
        ),
        (
            update_with_number,
            [
                (thresholds, 0.9, answer, label)
                for thresholds in (
                    SetThresholds(),
                    SetThresholds(0.9, 0.0, 2.0, 1.0),
                    SetThresholds(0.9, 50.0, 2.0, 500.0),
                    SetThresholds(0.9, -50.0, 2.0, 3.0),
                )
                for answer, label in (
                    (1.0, 3.0),
                    (1.0, 3.5),
                    (1.0, INF),
                    (1.0, "a"),
                    ([1.0, 2.0], [1.0, 9.0]),
                    ([1.0], 2.0),
                    (1.0, 1.0),
                )
            ],
        ),
        (
            lambda numbers: check_weights("weights", numbers),
            [
                None,
                [1],
                {"a": 0},
                {"a": 0, "b:2": 1},
                {"a": True},
                {"a": INF},
                {"a": -0.1},
                {},
                {"a:b": 1},
                {"a": "1"},
            ],
        ),
    )


def test_sums_of_a_blend() -> None:
    """Two servers that saw nothing agree on what both have; a squared error is that of the
    difference of two columns around their means."""
    blend = ridge.BlendRows()
    empty = np.zeros((2, 4))
    assert (blend.merged(empty, empty, empty) == empty).all()
    ours = np.array([[2.0, 4, 8, 1], [5.0, 4, 1, 20]])
    assert blend.merged(empty, ours, empty) == pytest.approx(ours)
    (standing,) = blend.standing(LearnedState((A,), ours, 4.0, 0, np.zeros((10, 2))))
    assert standing == pytest.approx(-((8 - 2 * 1 + 20) / 4 + (2 - 5) ** 2))


def test_a_shard_has_the_settings_of_its_set(tmp_path: Path) -> None:
    """Only the first also listens where its set was before."""
    prepare(ParamsSettings(folder=str(tmp_path), shards=2), "ray")
    write_address_file(tmp_path, {**read_address_file(tmp_path), "former": ["tcp:h:1"]})
    first, second = (config_in(tmp_path, number) for number in range(2))
    assert (first.number, first.former, first.generation) == (0, ("tcp:h:1",), 0)
    assert (second.number, second.former, second.fills) == (1, (), False)
    assert second.folder == tmp_path / "shard-1"
    content = read_address_file(tmp_path)
    del content["generation"]
    write_address_file(tmp_path, content)
    assert config_in(tmp_path, 1).generation == 0, "a set of before there were numbers"
    for number in (-1, 2):
        with pytest.raises(InvalidInput, match=rf"^no shard {number} in .*: it has 2\.$"):
            config_in(tmp_path, number)


def test_texts_of_deciders() -> None:
    """Checks times, their units and their order."""
    texts = [
        *(f"majority within {time}, else floor(fast)" for time in ("12 ms", "1s", "500us", "0 ms")),
        *(
            f"majority within {time}, else floor(fast)"
            for time in ("12", "1e999 s", "1 m", "-1 ms")
        ),
        "majority within 5 ms, else mean within 5 ms, else floor(fast)",
        "majority within 5 ms, else mean within 5.5 ms, else floor(fast)",
        "majority within 5 ms, else mean within 4 ms, else floor(fast)",
        "majority, else floor(fast)",
        "majority within 5 ms",
        "majority",
        "mojority",
        "",
    ]
    table("deciders", (lambda text: str(parse_decider(text)), texts))


def test_judging_a_rollout() -> None:
    """Checks how many observations decide, for shares at, below and above the limit."""
    counts = [(10, 0), (100, 0), (100, 1), (400, 4), (400, 0), (2000, 20), (2000, 50), (30, 9)]
    table(
        "judged",
        (judged_share, [(n, bad, 0.01, 0.05) for n, bad in counts]),
        (judged_share, [(n, bad, 0.5, 0.05) for n, bad in counts]),
        (judged_share, [(n, n * 0.02, 0.02, 0.01) for n in (100, 1000, 3000)]),
        (
            lambda limit, bad: next(
                (n for n in range(bad, 4000) if judged_share(n, bad, limit, 0.05) == "holds"), 0
            ),
            [(0.01, 0), (0.01, 3), (0.1, 0), (0.1, 5), (0.5, 0), (0.5, 9)],
        ),
        (
            lambda limit: next(
                n for n in range(1, 999) if judged_share(n, n, limit, 0.05) != "undecided"
            ),
            [0.01, 0.1, 0.5, 0.9],
        ),
        (_evidence, [(0.0, 0.1, 0.1), (0.2, 0.01, 0.05), (1.0, 0.001, 0.0), (-1.0, 0.1, 0.1)]),
        (_psi, [([1, 1], [1, 1]), ([10, 0], [0, 10]), ([5, 5, 0], [2, 3, 7]), ([3], [9])]),
        (
            _by_decile,
            [
                (np.arange(20.0), np.arange(20.0) + 5),
                (np.ones(4), np.zeros(4)),
                (np.arange(11.0), np.array([0.0, 1, 9, 10])),
            ],
        ),
        (
            _by_label,
            [("aab", "abc"), ("", "a"), (range(25), range(20)), (range(20), range(20)), ("a", "a")],
        ),
    )


def test_settings_just_within_and_just_beyond() -> None:
    """Checks the least and the greatest value of each setting, and the message beyond them."""
    table(
        "settings",
        (
            lambda kind, setting, value: _check_setting(kind, "m", setting, value),
            [
                (kind, "share", value)
                for kind in ("challenger", "shadow")
                for value in (0, 0.001, 0.999, 1, 1.001, True, "1", -0.5)
            ]
            + [("shadow", "rate_max", value) for value in (0, 0.1, 1e300, INF, True, "1")]
            + [
                ("decoy", "bytes_max", value)
                for value in (DECOY_BYTES_MIN - 1, DECOY_BYTES_MIN, 1e6, True)
            ]
            + [("shadow", "other", 0)],
        ),
        (
            lambda timings, lengths, gives: _check_timings(
                Hello("m", timings=timings, warm_lengths=lengths, gives=gives)
            ),
            [
                ((), (), ""),
                (((1, 0), (65_536, 3_600_000_000)), (0, 2**31 - 1), "f32"),
                (((0, 0),), (), ""),
                (((65_537, 0),), (), ""),
                (((1, -1),), (), ""),
                (((1, 3_600_000_001),), (), ""),
                ((), (-1,), ""),
                ((), (2**31,), ""),
                ((), (), "f33"),
                (((1, 1),) * 32, (1,) * 32, ""),
                (((1, 1),) * 33, (), ""),
                ((), (1,) * 33, ""),
            ],
        ),
        (
            lambda fields, grpc: [*listener_problems(HttpSettings(**fields), grpc)],
            [
                ({}, ""),
                ({"address": "h:65535", "admin": "127.0.0.1:0"}, "[::1]:1"),
                ({"address": "h:65536", "admin": "h"}, ":5"),
                ({"address": "h:x", "admin": "0.0.0.0:1"}, "h:-1"),
                ({"admin": "0.0.0.0:1", "token": "t"}, ""),
                ({"admin": "0.0.0.0:1", "tokens_file": "/f"}, ""),
            ],
        ),
        (
            parse_address,
            [
                "unix:/a",
                "unix:",
                "tcp:h:0",
                "tcp:h:65535",
                "tcp:h:65536",
                "tcp:[::1]:7",
                "tcp::7",
                "tcp:h:",
                "tcp:7",
                "udp:h:7",
                "",
                "tcp:h:-1",
            ],
        ),
        (
            lambda count: _pause_ms(count, MeshSettings()),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 31, 32, 2000],
        ),
        (
            lambda concurrency, service_ms: limit_of(
                MeshModel("m", "onnx", policy=Policy(concurrency=concurrency)),
                Usage(service_ms=service_ms),
                MeshSettings(),
            ),
            [(0, 10.0), (1, 0.0), (1, 1.0), (1, 100.0), (3, 100.0), (1, 1e6)],
        ),
        (_checked, [[2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0], [2**64], [-(2**63) - 1], []]),
        (
            _cursor,
            [None, "0,0", "5,7", f"{10**18 - 1},1", f"{10**18},1", "1", "1,2,3", "-1,2", "²,1", ""],
        ),
        (
            _prefers_openmetrics,
            [
                b"application/openmetrics-text;q=1",
                b"text/plain;q=1,application/openmetrics-text;q=0.9",
                b"text/plain;q=0.9,application/openmetrics-text;q=1",
            ],
        ),
    )


def test_types_as_others_write_them() -> None:
    """Checks types of rows of ONNX files and of servers of the inference protocol."""
    shapes: list[Any] = [["n", 4], ["n"], [None, 2, 3], [1, 4], [0, 4], [2, 4], [], ["n", "m"]]
    shapes += [["n", 0], ["n", "m", 2], [1], ["n", -1]]
    tensors = [
        {"shape": shape, "datatype": datatype}
        for datatype in ("FP32", "BYTES", "INT8", "X")
        for shape in ([-1, 4], [-1], [8, 2, 3], [0, 4], [1], [-1, -1], [-1, 0], [-1, -1, 2], [])
    ]
    tensors += [{"shape": ["n", 2], "datatype": "FP32"}, {"shape": [True], "datatype": "FP32"}, {}]
    f32 = np.arange(4, dtype=np.float32)
    table(
        "types",
        (
            result_or_error(_row_type),
            [
                ("input", type_, shape)
                for type_ in ("tensor(float)", "tensor(string)", "tensor(int64)", "seq(int64)")
                for shape in shapes
            ],
        ),
        (_type_of, tensors),
        (
            result_or_error(lambda tensor, rows: _values(tensor, memoryview(f32.tobytes()), rows)),
            [
                ({"shape": [4], "datatype": "FP32"}, 4),
                ({"shape": [4], "datatype": "FP32"}, 3),
                ({"shape": [4, 1], "datatype": "FP32"}, 4),
                ({"shape": [2, 2], "datatype": "FP32"}, 2),
                ({"shape": [2, 2], "datatype": "FP32"}, 4),
                ({"shape": [3], "datatype": "INT32", "data": [1, 2, 3]}, 3),
                ({"shape": [2], "datatype": "BYTES", "data": ["a", "b"]}, 2),
                ({"shape": [2], "datatype": "BYTES", "data": ["a", "b"]}, 3),
            ],
        ),
        (
            _outputs,
            [
                np.ones((2, 1)),
                np.ones((2, 2)),
                np.ones(2),
                {"a": np.ones((1, 1)), "b": 1},
                {},
                np.array([["a"], ["b"]], object),
            ],
        ),
        (
            lambda text: schema_of_input(InputType.parse(text)),
            [
                "any",
                "str",
                "bytes",
                "i8",
                "u8",
                "i64",
                "u64",
                "f16",
                "f32",
                "f64",
                "bool",
                "f32[3]",
                "f32[*]",
                "i32[2,3]",
            ],
        ),
        (_parted, ["f32 -> str", "f32", '{"a->b": "f32"} -> str', '{"a": "f32"}', "{", "{} x", 3]),
        (
            array_of_record,
            [
                {"data": data, **more}
                for data in (bytes(8), bytes(7))
                for more in (
                    {},
                    {"dtype": b"f32"},
                    {"dtype": b"f64", "shape": b"1"},
                    {"dtype": b"bool"},
                    {"dtype": b"f32", "shape": b"[2, 1]"},
                    {"dtype": b"f32[2]"},
                    {"dtype": b"str"},
                    {"dtype": b"bytes"},
                    {"dtype": b"u8", "shape": b"8" + b",1" * 7},
                    {"dtype": b"u8", "shape": b"8" + b",1" * 8},
                    {"dtype": b"u8", "shape": b"00000000008"},
                    {"dtype": b"u8", "shape": b"0000000008"},
                )
            ],
        ),
    )


def described(error: ClipperError) -> tuple[str, str, str]:
    return type(error).__name__, error.message, error.hint


def spec_of(type_: str) -> Any:
    return Tensors.parse(f'{{"x": "{type_}"}}').specs[0]


def test_outputs_and_records() -> None:
    big = {"k": "x" * 5000}
    table(
        "outputs",
        (
            result_or_error(lambda values: _array(values, "m")),
            [
                np.ones(2),
                np.ones((2, 0)),
                np.ones((2, 0, 3)),
                np.ones((1,) * 5),
                np.ones((1,) * 6),
                np.ones(2, ">f4"),
                np.ones(2, complex),
                np.array(["a", "b"]),
                np.array([["a"]]),
            ],
        ),
        (
            result_or_error(lambda value: _packed(value, 3, "m")),
            [
                None,
                {},
                {"a": 1},
                {"a": np.float32(0.5)},
                [],
                0,
                {1: 2},
                {"a": None},
                {"a": 2**70},
                big,
            ],
        ),
        (as_items, [np.arange(4), np.arange(6, dtype=np.int16).reshape(2, 3)]),
        (
            lambda type_, shape, data: strings_of(spec_of(type_), shape, np.frombuffer(data, "u1")),
            [
                ("str", (), b"abc"),
                ("str[2]", (2,), b"\1\0\0\0\2\0\0\0abb"),
                ("str[2]", (2,), b"\1\0\0\0\2\0\0\0abbc"),
                ("str[2]", (2,), b"\1\0\0\0\2\0\0\0ab"),
                ("str[2]", (2,), b"\1\0\0\0\2\0\0"),
                ("str", (), b"\xff"),
                ("bytes[1]", (1,), b"\1\0\0\0\xff"),
                ("str[2]", (2,), bytes(8)),
            ],
        ),
        (
            lambda text: _made_up_records(Tensors.parse(text)),
            ['{"x": "f32[3]"}', '{"x": "i8", "y": "f64"}', '{"x": "f32[100000000]"}'],
        ),
        (
            lambda parts: _joined("t", parts),
            [
                [(np.arange(2), np.ones((2, 3), np.float32))],
                [(np.arange(2), np.ones((2, 3))), (np.arange(1), np.ones((1, 3)))],
                [(np.arange(2), np.ones((2, 3))), (np.arange(1), np.ones((1, 2)))],
            ],
        ),
        (
            lambda a, b, why, last: _merged(
                cast(
                    Any,
                    [
                        {"accepted": a, "no_room": 1, "why": why},
                        {"accepted": b, "no_room": 2, "why": last},
                    ],
                )
            ),
            [
                (a, b, why, last)
                for a, b in ((True, True), (True, False), (False, True))
                for why, last in ((["", "x"], ["y", "z"]), ([""], ["y", "z"]))
            ],
        ),
        (_round_step, [1, 1.1, 2, 2.001, 2.01, 5, 5.2, 9.99, 10, 0.03, 1.5e6]),
        (
            lambda status, problem: described(_error(status, problem, "http://h")),
            [
                (404, {"type": "urn:clipper:model-not-found", "detail": "no.", "hint": "See."}),
                (401, {"type": "urn:clipper:http-401", "detail": "who?"}),
                (403, {"type": "urn:clipper:forbidden", "detail": "no."}),
                (403, {}),
                (400, {"type": "urn:clipper:http-400", "detail": "bad.", "hint": "Mend."}),
                (500, {"error": "broken"}),
                (502, {}),
            ],
        ),
    )


def test_models_and_applications_as_they_are_given() -> None:
    """Checks settings of models and applications, and the two that state the same."""
    spec = ContainerSpec(name="m", target="x:y", connect="unix:/a", version=3)
    model = {"input": None, "output": "any", "inputs": None, "outputs": None, "schema": None}
    linked = (A, B, VersionedModel("b", 3), VersionedModel("c"))
    parts = [Part(number, 0, 2, Path("/f"), number - 1, 1, 0, 0, 0, 0, 0) for number in (3, 2, 1)]
    table(
        "given",
        (
            lambda fields: options(replace(spec, **fields)),
            [
                {},
                {"input": "f32", "output": "any", "sha256": "ab", "warmup": "w"},
                {"batch_max": 8, "pad": 4, "protocol": 1},
                {"retry_singly": True, "row_by_row": True, "confidence": False},
                {"protocol": 2, "batch_max": 0},
            ],
        ),
        (
            lambda fields: types_of(**{**model, **fields}),
            [
                {},
                {"input": "f32", "output": "str"},
                {"inputs": {"a": "f32"}, "outputs": {"b": "i8"}},
                {"inputs": {"a": "f32"}, "input": "f32"},
                {"outputs": {"b": "i8"}, "output": "str"},
                {"schema": "f32 -> str"},
                {"schema": "any -> str"},
                *(
                    {"schema": "f32 -> str", key: value}
                    for key, value in (
                        ("input", "f32"),
                        ("output", "str"),
                        ("inputs", {}),
                        ("outputs", {}),
                    )
                ),
            ],
        ),
        (
            lambda fields: check_settings(Application("a", **fields)),
            [
                *({"slo_ms": slo} for slo in (0.001, 0, -1.0, INF, True, "5")),
                *({"confidence_min": least} for least in (0.0, 1.0, -0.01, 1.01, True)),
                {"decider": 3},
                {"policy": "unknown"},
                {"models": (A, A)},
                {"models": (A, B)},
            ],
        ),
        (
            lambda name: _link_named("a", name, linked),
            ["a:1", "a", "b", "b:2", "c", "c:1", "d", "a:0"],
        ),
        (
            lambda text, n: _head_size(bytes(n), text),
            [
                (b"", 5),
                (b"5", 5),
                (b"6", 5),
                (b"0", 5),
                (b"000000000005", 5),
                (b"0000000000005", 5),
                (b"-1", 5),
                (b"x", 5),
            ],
        ),
        (
            _by_name,
            [{"a": 1}, [1, 2], [{"a": 1}, {"a": 2}], [{"a": 1}, {"b": 2}], [{"a": 1}, 3], []],
        ),
        (
            _array_of_texts,
            [
                np.array(["a", "b"]),
                [np.array(["a"]), np.array(["b"])],
                [np.array(["a"]), np.array([])],
                np.ones(2),
                [],
                "a",
                np.array(["a", 1], object),
                [np.ones(1)],
            ],
        ),
        (
            lambda kind, dim, content: values_in(
                cast(Any, Object(name="t", data_type=kind, dim=dim, content=content))
            ),
            [
                (kind, dim, content)
                for kind in (0, 4, 5, 6)
                for dim, content in (
                    ([2], bytes(8)),
                    ([2], bytes(7)),
                    ([], bytes(4)),
                    ([-1], b""),
                    ([0], b""),
                    ([1] * 8, bytes(4)),
                    ([1] * 9, bytes(4)),
                )
            ],
        ),
        (
            result_or_error(
                lambda datatype, shape, rows: _tensor(Signature("x", datatype, shape), rows)
            ),
            [
                ("FP32", None, [[1, 2], [3, 4]]),
                ("FP32", (2, 1), [[1, 2], [3, 4]]),
                ("", None, [[1, 2], [3, 4]]),
                ("", None, [[1, 2], [3]]),
                ("BYTES", (1,), ["a", "b"]),
                ("BYTES", None, [b"a"]),
                ("", None, [None]),
            ],
        ),
        (
            lambda more, number: [one.number for one in chain_of(parts[number], parts[more:])],
            [(0, 0), (0, 1), (0, 2), (2, 0), (1, 0)],
        ),
        (
            _record,
            [
                ("k", None),
                ("k", []),
                ("k", [b"v", b"1", b"2", b"3", None]),
                ("k", [b"v", b"1", b"2", b"3", b"l"]),
            ],
        ),
    )


def test_texts_that_are_shown() -> None:
    """Checks lengths, units, and the replacement of what cannot be shown."""
    table(
        "shown",
        (
            short,
            [
                "x" * 58,
                "x" * 59,
                [{"name": "a", "version": 1}, {"name": "b", "version": None}],
                [{"name": "a"}],
                [],
                None,
            ],
        ),
        (_ms, [None, 0.0, 9.994, 9.999, 10, 999.9, 1000]),
        (lambda value: bytes(_json_of(value)), [b"", b"{", b'{"a":1}']),
        (
            lambda profiles: one_row_us(cast(Any, [{"profile": one} for one in profiles])),
            [[], [[]], [[(1, 50, 1), (2, 10, 1)], [(1, 40, 1)]]],
        ),
        (server_addresses, [("h", ["http", "grpc"]), ("::1", ["http"])]),
        (_amount, ["gpu", "gpu=", "gpu=0.5"]),
        (
            lambda sizes: [len(one) for one in packed_events([b"x" * n for n in sizes], b"p", 7)],
            [[], [10], [PAST_BYTES, 10], [PAST_BYTES + 1, 10], [PAST_BYTES - 1, 1, 1, 1]],
        ),
        (
            lambda models, roles: default_policy(models, roles),
            [
                ([A], None),
                ([A, B], None),
                ([A, B], {"b:2": "shadow"}),
                ([A, B], {"b:2": "primary(weight=2)"}),
                ([], {}),
            ],
        ),
        (
            optimizer_in,
            [
                "sgd",
                "adam rate=0.001 beta1=0.9",
                "adam rate=x",
                "adam speed=1",
                "none",
                "",
                "adam rate",
            ],
        ),
        (
            lambda cost: shown_costs(
                Batching(cost=cost), {"sum": 6e6, "most": 1.0}, ["sum", "most"]
            ),
            ["", "length", "bytes", "m:cost"],
        ),
        (
            lambda used, models, most: (
                msgspec.structs.replace(
                    Instance("a", 0, "", "", capacity_bytes=100),
                    used_bytes=used,
                    models=models,
                    models_max=most,
                ).free_bytes
            ),
            [(0, 0, 0), (99, 5, 0), (100, 0, 0), (101, 0, 0), (50, 4, 5), (50, 5, 5), (50, 6, 5)],
        ),
        (bin_of, [0.0, 0.0999, 0.1, 0.5, 0.4999999999, 0.95, 1.0]),
        (lambda label: label_bit(label).bit_length(), [0, 1, 255, 256, 257, -1, "a", b"a", 1.5]),
        (sorted_models, [[B, A, B], [VersionedModel("a"), A], [VersionedModel("a", 10), A, B]]),
        (
            input_of,
            [
                Object(input="f32[2]"),
                Object(input="any"),
                Object(n_features_in_=3),
                Object(),
                Object(n_features_in_=0),
                Object(n_features_in_="3"),
                Object(input="any", n_features_in_=2),
            ],
        ),
        (
            lambda text: spec_of(text).type,
            [
                "f32[3,224]",
                "float64[ 2 , * ]",
                "f32[0]",
                "f32[x]",
                "F32",
                "i8[1,1,1,1]",
                "i8[1,1,1,1,1]",
            ],
        ),
        (
            lambda type_, value: spec_of(type_).array(value),
            [
                ("i8", 127),
                ("i8", 128),
                ("i8", -128),
                ("i8", -129),
                ("i8", 1.5),
                ("f32", None),
                ("i8", np.array(300)),
                ("i8[*]", []),
                ("i8[*]", np.zeros(0)),
                ("f32[2]", [1, None]),
                ("f32[2]", [1]),
                ("u8", True),
                ("i8[2]", [1, None]),
                ("f32", "a"),
                ("i64", np.float32(1)),
            ],
        ),
        (
            lambda names: Tensors.parse('{"a": "f32", "b": "i8", "c": "str"}').select(names),
            [["c", "a"], [], ["a", "a"], ["d"]],
        ),
    )


def test_arrivals_keep_their_rate() -> None:
    """None comes after the end."""
    times = arrivals(500, 20.0, 3)
    assert 9_000 < len(times) < 11_000
    assert times[-1] < 20.0
    assert times[-1] > 19.5
    assert len(arrivals(1, 5.0, 1)) < 20


def test_counts_up_to_each_edge() -> None:
    """A value at an edge counts below it; those above the last edge are in the total alone."""
    family = Family("f", "histogram", (), "help", (1.0, 2.0, 4.0), 1e-6)
    took = LatencyHistogram()
    for us in (1_000_000, 3_000_000, 3_000_000, 9_000_000):
        took.record(us)
    below, total, whole = cumulative(family, took.snapshot())
    assert total == 4
    assert below[-1] == 3
    assert below[0] <= below[1] == 1
    assert 15.9 < whole < 16.1


def test_a_body_is_posted_so_many_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_post, "_PAUSE_S_MAX", 0.0)
    outcomes: list[tuple[float | None, str]] = []
    stopping = Stop()
    poster = Poster("tracing.url", "http://h", {}, "", 1.0, 3, stopping, "spans")
    monkeypatch.setattr(poster, "_post", lambda body: outcomes.pop(0))
    for answers, found, left in (
        ([(0.0, "away")] * 5, "dropped", 2),
        ([(0.0, "away"), (0.0, "away"), (None, "")], "exported", 0),
        ([(0.0, "away"), (None, "status 400")], "refused", 0),
        ([(None, "")] * 2, "exported", 1),
    ):
        outcomes[:] = answers
        assert (poster.send(b"x"), len(outcomes)) == (found, left)
    stopping.request()
    outcomes[:] = [(0.0, "away")] * 3
    assert (poster.send(b"x"), len(outcomes)) == ("dropped", 2)


@pytest.mark.parametrize(
    ("url", "port"), [("http://h", 4318), ("https://h", 443), ("http://h:1/p?q", 1)]
)
def test_a_port_that_is_not_in_a_url_is_that_of_its_scheme(url: str, port: int) -> None:
    event = Stop()
    assert Poster("s", url, {}, "", 1.0, 1, event, "spans", port=4318)._port == port
    for wrong in ("h", "ftp://h", "http://h:65536", "http://"):
        with pytest.raises(ConfigError, match=r"is not an address\. Write http://HOST:4318\.$"):
            Poster("s", wrong, {}, "", 1.0, 1, event, "spans", port=4318)


def test_feedback_is_cut_into_frames() -> None:
    """Cut feedback by rows, by half of the bytes of a frame, and where the type of labels changes;
    send a larger row alone."""

    def lengths(updates: list[Any], bytes_max: int = 1 << 20) -> list[int]:
        return [len(frame) for frame in _frames(cast(Any, None), updates, bytes_max)]

    assert lengths([("ab", 1, 0)] * (2 * FRAME_ROWS_MAX + 1)) == [FRAME_ROWS_MAX] * 2 + [1]
    assert lengths([("ab", 1, 0)] * 5, 40) == [2, 2, 1], "10 bytes each"
    assert lengths([("abc", 1, 0)] * 5, 40) == [1] * 5, "11 bytes each"
    assert lengths([("a" * 99, 1, 0), ("a", 1, 0), ("a", 1, 0)], 40) == [1, 2]
    assert lengths([("a", 1, 0), ("a", 2.5, 0), ("a", True, 0), ("a", "x", 0), ("a", "y", 0)]) == [
        3,
        2,
    ]
    assert lengths([("a", np.ones(n), 0) for n in (1, 1, 2)]) == [2, 1]
    assert lengths([]) == []


def test_readings_of_a_restarted_server_start_again() -> None:
    """Keep what was read before when the connection alone was lost."""
    readings = ServerReadings()
    readings.take("about", {"pid": 1})
    readings.take("past", [{"t": 1}, {"t": 2}])
    readings.take("row", {"t": 3})
    readings.lose("away")
    since_s = readings.lost_s
    readings.lose("still away")
    assert (readings.lost_s, readings.why) == (since_s, "still away")
    assert since_s > 0
    readings.take("about", {"pid": 1})
    readings.take("past", [{"t": 2}, {"t": 3}, {"t": 4}])
    readings.take("now", {})
    assert [row["t"] for row in readings.rows] == [1, 2, 3, 4]
    assert (readings.restarts, readings.readings, readings.lost_s, readings.why) == (0, 1, 0.0, "")
    readings.take("about", {"pid": 2})
    assert (readings.restarts, len(readings.rows)) == (1, 0)


def test_seconds_until_a_retry() -> None:
    """They are whole seconds, at least one; for a server that shuts down they are the time of a
    restart."""
    assert [retry_after_s(Overloaded("full.", retry_after_s=s)) for s in (0, 0.2, 1, 1.01, 7)] == [
        1,
        1,
        1,
        2,
        7,
    ]
    assert retry_after_s(ShuttingDown("it ends.")) == 5
    assert retry_after_s(NoReplica("none.")) == 1


def test_turns_are_taken_in_their_order() -> None:
    """A caller that waits has its turn before later ones, and no two have it at once."""
    turns, order, entered = Turns(), [], threading.Semaphore(0)
    threads = []

    def take(number: int) -> None:
        with turns:
            order.append(number)
            entered.release()

    with turns:
        for number in range(3):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            wait_until(lambda: turns.waiting == len(threads))
        assert order == []
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2]
    assert turns.waiting == 0
    with turns:
        assert turns.waiting == 0


@pytest.mark.parametrize("given_up", [False, True])
def test_a_follower_that_was_given_up_is_not_taken_for_the_one_of_the_recovery(
    given_up: bool,
) -> None:
    """A follower that was given up may have missed changes that are no longer available."""
    core: Any = Object(
        epoch=9,
        version=0,
        position=0,
        follow=lambda *_, **__: None,
        unfollow=lambda _: None,
        hold=lambda: None,
        resume=lambda: None,
    )
    requests: list[tuple[int, int]] = []
    changes: Any = Object(since=lambda *at: requests.append(at))
    follower = FollowerState(0, 1, True, core, cast(Any, None), changes)
    follower.start(0.0, Origin(1, 4, 7))
    if given_up:
        follower.give_up()
    copy: Any = {"keeps": True, "epoch": 4, "version": 7, "position": 3}
    assert follower.start_resync(copy) is None
    assert requests == ([] if given_up else [(4, 3)])


def test_a_log_of_changes_that_keeps_none_follows_nothing() -> None:
    followed: list[int] = []
    core: Any = Object(epoch=3, position=5, follow=followed.append)
    for ids_max in (0, 1):
        log = PrimaryLog(core, ids_max)
        assert log._base == 0
        log.start(History(), 7, 6, {})
        assert log._base == 2
        assert len(followed) == ids_max


def test_instances_that_another_version_replaces() -> None:
    def replaced(ago_ms: int, used: int, labels: tuple[str, ...] = ()) -> frozenset[str]:
        old = Instance("old", 0, "", "", version="1", started_ms=50, capacity_bytes=SIZE)
        new = msgspec.structs.replace(
            old, id="new", version="2", started_ms=100, used_bytes=used, labels=labels
        )
        return _replaced([old, new], 100 + ago_ms)

    assert replaced(UPGRADE_MS - 1, 0) == {"old"}
    assert replaced(UPGRADE_MS, 0) == frozenset()
    assert replaced(0, SIZE) == frozenset(), "the new one is full"
    assert replaced(0, 0, ("gpu",)) == frozenset(), "it replaces those with its labels only"


def test_a_connection_of_a_model_host_detects_a_lost_peer(tmp_path: Path) -> None:
    """A lost peer is detected by keep-alive after 25 seconds, and while sending after 30. Small
    messages are sent at once, and nothing waits for the connection."""
    assert [
        needs_resolver(at) for at in ("unix:/a", "tcp:h:1", "tcp:10.0.0.1:1", "tcp:[::1]:1")
    ] == [False, True, False, False]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock, error = start_connecting(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        with sock:
            assert error in (0, errno.EINPROGRESS)
            assert not sock.getblocking()
            options = [
                sock.getsockopt(level, getattr(socket, name))
                for level, name in (
                    (socket.IPPROTO_TCP, "TCP_NODELAY"),
                    (socket.SOL_SOCKET, "SO_KEEPALIVE"),
                    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"),
                    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"),
                    (socket.IPPROTO_TCP, "TCP_KEEPCNT"),
                    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"),
                )
            ]
            assert options == [1, 1, 10, 5, 3, 30_000]
    sock, error = start_connecting(f"unix:{tmp_path}/none")
    with sock:
        assert (error, sock.family, sock.getblocking()) == (errno.ENOENT, socket.AF_UNIX, False)


def test_the_process_that_listens_on_a_port_and_its_memory() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not [*server_memory._listening(port)], "it does not listen yet"
        listener.listen()
        inode = os.fstat(listener.fileno()).st_ino
        assert [*server_memory._listening(port)] == [f"socket:[{inode}]"]
    assert proportional_bytes(os.getpid()) > 1 << 20
    assert proportional_bytes(0) == 0
