"""Results of small functions without side effects, for tables of arguments."""

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Object
from typing import Any

import numpy as np
import pytest

from clipper.catalog.rules import link_replaced
from clipper.cli.measurement.bench import command_line, seconds_of
from clipper.cli.measurement.evaluating import since_of
from clipper.clock import age_of
from clipper.deploy.deployer import ContainerSpec
from clipper.deploy.processes.command import check_permitted, command_of, variables
from clipper.errors import ClipperError
from clipper.frontend.streams.model_updates import descriptor_of
from clipper.frontend.tracing import otlp
from clipper.frontend.tracing.context import sampler_named, state_of
from clipper.load.grpc_target import _salted, _value
from clipper.manage.overview import _last_log_line, _read_after, _state, _trouble
from clipper.serving.feedback.observe import _places, _sound
from clipper.serving.models.batch_cost import rows_limit, with_costs
from clipper.serving.query.arrays import _as_array, _with_default
from clipper.serving.query.named_outputs import columns_of, only, with_default
from clipper.serving.query.progress import line
from clipper.types import Application, Batching, InputType, Model, VersionedModel
from clipper_container.adapters.classes import labelled
from clipper_container.adapters.onnx import _is_short, _probabilities
from clipper_container.artifacts.source import RemoteFile, fingerprint
from clipper_container.loading.files import (
    _trouble_of_lightgbm,
    _trouble_of_torch,
    _trouble_of_xgboost,
    member,
)
from clipper_container.schema import Tensors
from clipper_container.worker.all_servers import resolved
from tests.expected import check_expected

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def shown(value: object) -> str:
    """Return the text of a value: arrays with their type."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, bytes) and len(value) > 60:
        return f"<{len(value)} bytes>"
    return repr(value)


def called(function: Callable[..., Any], words: tuple[Any, ...]) -> str:
    try:
        return shown(function(*words))
    except (ClipperError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def of_text(*cases: tuple[Callable[..., Any], list[Any]]) -> Iterator[Case]:
    for function, values in cases:
        for value in values:
            yield function, value if isinstance(value, tuple) else (value,)


def zipped(*names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as parts:
        for name in names:
            parts.writestr(name, b"x")
    return out.getvalue()


def tarred(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


HASH = "AB" * 32


def fields(**more: object) -> dict[bytes, bytes]:
    known = {"name": "svm", "kind": "onnx", "sha256": HASH, "data": "x", **more}
    return {key.encode(): str(value).encode() for key, value in known.items() if value is not None}


SETTINGS = Batching(cost="length", cost_max=100, size_max=64)
OF_BYTES = Batching(cost="bytes", padded=True, cost_max=1000, size_max=64)
APPLICATION = Application(
    "a",
    (VersionedModel("m"), VersionedModel("m", 2), VersionedModel("n", 1)),
    roles={"m:2": "shadow"},
)
TENSORS = Tensors.parse('{"x": "f32[2]", "s": "str", "v": "f64[*]", "n": "i64"}')
RECORDS = [{"x": np.ones(2), "s": "a", "v": np.zeros(3), "n": 1}] * 2


def test_texts_and_numbers() -> None:
    ages = ["", "90m", "12h", "7d", "1.5s", "2026-01-31T08:00+00:00", "x", "h", "5"]
    state = [b"a=1, b=2 ,,c=3", b"a=1,a=2", b"A=1", b"a=" + b"x" * 257, b"", b"1x@a=4", b"a=\x7f"]
    state += [b",".join(b"k%d=%s" % (i, b"x" * 40) for i in range(n)) for n in (11, 12, 32, 33)]
    cases = of_text(
        (since_of, [(text, 1e6) for text in ages]),
        (state_of, state),
        (age_of, [0, 119.4, 120, 7199, 7200, 172_799, 172_800, 1e6]),
        (line, [(0, 0, "rows", 0), (5120, 10_000, "rows", 3), (3, 3, "x", 0.5), (1, 3, "x", 0)]),
        (lambda text: seconds_of(None, None, text), ["10s", "500ms", "2m", "7", "60m", "1ms"]),
        (_salted, [0, 127, 128, 300, 2**40]),
        (_read_after, ["", "1.0:5", "1.0:5,1.1:7", "1.0", "1.0:x"]),
        (
            fingerprint,
            [
                ([RemoteFile("", "key", 3, 'W/"ab"')],),
                ([RemoteFile("x", "key", 3, '"ab"')],),
                ([RemoteFile("b", "key", 1, "2"), RemoteFile("a", "key", 4, "1")],),
                ([RemoteFile("a", "key", 4, "1"), RemoteFile("b", "key", 1, "2")],),
                ([RemoteFile("a", "key", 4, ""), RemoteFile("b", "key", 1, "2")],),
                ([],),
            ],
        ),
        (resolved, [(["unix:/a", "tcp:127.0.0.1:5", "tcp:127.0.0.1:5", "tcp:[::1]:6"],)]),
        (
            _trouble_of_xgboost,
            [
                b"{L\0\0\0\0\0\0\0\x07learner}",
                b"{L\0\0\0\0\0\0\0\x07learner",
                b' {"learner": 1} \r\n',
                b'{"learner"',
                b"{}",
                b"",
                b'{"learner": 1}x',
                b"{" + b" " * 4100 + b'"learner"}',
                b"{L\0\0\0\0\0\0\0\x07learner}\n",
            ],
        ),
        (
            _trouble_of_lightgbm,
            [b"tree\n\nend of trees", b"tree\r\n\nend of trees", b"tree\n", b""],
        ),
        (
            _trouble_of_torch,
            [
                (kind, content)
                for kind in ("torchscript", "torch-export")
                for content in (
                    b"",
                    zipped(),
                    zipped("a/data.pkl"),
                    zipped("a/constants.pkl", "a/data.pkl"),
                    zipped("a/archive_format"),
                    zipped("a/models/model.json"),
                )
            ],
        ),
        (member, [(tarred(a=b"\xffx", b=b"y"), name) for name in ("a", "b", "c")]),
    )
    check("texts.txt", cases)


def test_columns_and_arrays() -> None:
    some, none = np.array([True, False]), np.array([False, False])
    pairs = np.array([[1.0, 2], [3, 4]])
    columns = {"x": pairs, "s": ["a", "b"], "n": np.array([1, 2])}
    probabilities = np.array([[0.2, 0.8], [0.6, 0.4]], np.float32)
    output = [
        Object(name=name, type=f"tensor({kind})", shape=[0] * n)
        for name, kind, n in (
            ("label", "int64", 1),
            ("label", "string", 1),
            ("probabilities", "float", 2),
            ("probabilities", "double", 2),
            ("probabilities", "float", 1),
            ("other", "float", 2),
            ("classes", "int64", 2),
        )
    ]
    maps = Object(name="output_probability", type="seq(map(int64,tensor(float)))", shape=[])
    number = InputType.parse("f64[3]")
    cases = of_text(
        (
            _with_default,
            [
                (outputs, is_default, default)
                for outputs in (
                    np.array([1, 2]),
                    np.array([1.5, 2]),
                    np.array([True, False]),
                    pairs,
                    ["a", "b"],
                )
                for is_default in [some]
                for default in (None, -1, 0.5, True, "x", [7, 8], [7, 8, 9])
            ],
        ),
        (with_default, [(columns, some, one) for one in (None, {"x": [7, 8], "n": 0.5}, {"x": 9})]),
        (with_default, [(columns, none, {"x": 1})]),
        (_with_default, [(pairs, none, 5)]),
        (_as_array, [([1, 2.5],), ([pairs, pairs],), ([pairs, some],), ([1, "x"],), ([],)]),
        (columns_of, [(RECORDS, TENSORS), ([RECORDS[0], None], TENSORS), ([], TENSORS)]),
        (only, [({"a": 1, "b": 2}, ("b", "c")), (5, ("a",))]),
        (
            _places,
            [([0, 2], 3), ([], 0), ([3], 3), ([-1], 3), ([[0]], 3), ([0.0], 3), ([[1], []], 3)],
        ),
        (_sound, [None, 0.25, float("nan")]),
        (
            labelled,
            [
                (scores, labels, sure)
                for scores in (np.array([0.2, 0.5, 0.75]), probabilities)
                for labels in (None, ["no", "yes"])
                for sure in (False, True)
            ],
        ),
        (
            _probabilities,
            [
                (probabilities, np.arange(2)),
                (probabilities, np.arange(3)),
                (probabilities + 0.3, np.arange(2)),
                (probabilities - 0.3, np.arange(2)),
                (probabilities[0], np.arange(2)),
                (probabilities.astype(int), np.arange(2)),
                ([{0: 0.25, 1: 0.75}], np.array([1])),
                ([{0: 0.25, 1: 0.75}], np.array([0])),
                ([{"no": 0.25, "yes": 0.75}], np.array(["no"], object)),
                ([{0: 0.5, 1: 1.5}], np.array([1])),
                ([{0: 0.5}], np.arange(2)),
                ([{}], np.arange(1)),
                ([0.5], np.arange(1)),
                (np.array([[0.0, 1.0009]]), np.arange(1)),
            ],
        ),
        (
            _is_short,
            [([a],) for a in output[:3]]
            + [([a, b],) for a in output for b in (*output, maps)]
            + [(output[:3],)],
        ),
        (rows_limit, [(SETTINGS, number), (OF_BYTES, number), (Batching(size_max=7), number)]),
        (
            with_costs,
            [
                ([(1, 10), (4, 30)], lengths, batching, number)
                for lengths in ([], [5, 7, 0])
                for batching in (SETTINGS, OF_BYTES, Batching())
            ],
        ),
        (
            _value,
            [
                (row, InputType.parse(type_))
                for row, type_ in (
                    ("YQ==", "bytes"),
                    ("a", "str"),
                    (True, "bool"),
                    (3, "i64"),
                    ([1, [2.5]], "any"),
                    ({"x": [1, 2], "s": "a", "n": 5}, '{"x": "f32[2]", "s": "str", "n": "i64"}'),
                )
            ],
        ),
    )
    check("columns.txt", cases)


def test_what_is_refused_and_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "m", "version": 3, "connect": "tcp:h:1", "threads": 2, "target": ""}
    specs = [
        {},
        {"input": "any", "output": "any"},
        {"input": "f64[2]", "output": "f64", "batch_max": 5},
    ]
    words = [("m", "sh -c 'a b'", "/"), ("m", ["sh", ""], "/"), ("m", [], "/"), ("m", "'", "/")]
    words += [("m", ["sh", 5], "/"), ("m", ["sh"] * 257, "/"), ("m", ["sh", "x" * 16384], "/")]
    words += [("m", ["sh"] * 256, "/"), ("m", "sh", "/none/such"), ("m", "no-such-program", "/")]
    words += [("m", "\0", "/"), ("m", "./sh", "/bin"), ("m", 5, "/")]
    refused = [{"nam": "x"}, {"kind": "pickled"}, {"data": None}, {"key": "k"}, {"name": "a b"}]
    refused += [
        {"sha256": None},
        {"input": "f65"},
        {"version": 0},
        {"replicas": 1025},
        {"chunks": "x"},
    ]
    taken = [{}, {"version": "auto"}, {"version": 7, "replicas": 1024, "input": "str", "chunks": 2}]
    taken += [{"data": None, "key": "k", "output": "f64"}]
    cases = of_text(
        (command_of, words),
        (check_permitted, [(["a"], ["a"]), ([], ["a"]), (["b"], ["a"])]),
        (lambda more: variables(ContainerSpec(**spec, **more), 4), specs),
        (descriptor_of, [fields(**more) for more in (*taken, *refused)]),
        (link_replaced, [(APPLICATION, VersionedModel(name, 3)) for name in ("m", "n", "x")]),
    )
    check("refused.txt", cases)
    monkeypatch.setattr("sys.argv", ["x", "bench", "--key", "k", "--token=t", "a b"])
    assert command_line() == "clipper bench --key ... --token=... 'a b'"


def test_samplers_by_name() -> None:
    traces = [Object(trace_id=f"{0:016x}{n << 62:016x}", sampled=n % 2 == 1) for n in range(4)]
    chosen = {
        name: [sampler_named(name, share)(trace, of) for of in (False, True) for trace in traces]
        for share in (0.5,)
        for rule in ("always_on", "always_off", "traceidratio")
        for name in (rule, f"parentbased_{rule}")
    }
    caller, half = [False, True, False, True], [True, True, False, False]
    assert chosen == {
        "always_on": [True] * 8,
        "parentbased_always_on": [True] * 4 + caller,
        "always_off": [False] * 8,
        "parentbased_always_off": [False] * 4 + caller,
        "traceidratio": half * 2,
        "parentbased_traceidratio": half + caller,
    }


def test_spans_are_read_back() -> None:
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    values = {"b": True, "i": -5, "f": 0.5, "s": "ü" * 200, "l": ["x", "y"], "n": 2**40}
    link = otlp.SpanLink("3" * 32, "4" * 16)
    spans = [
        otlp.Span(
            "1" * 32, "2" * 16, "", "name", 5, 2**62, otlp.SERVER, values, (link,), "e", "a=1"
        ),
        otlp.Span("5" * 32, "6" * 16, "2" * 16, "other", 300, 301),
    ]
    found = proto.ExportTraceServiceRequest.FromString(otlp.encode(spans, {"k": "v"}, "1.2"))
    (resource,) = found.resource_spans
    assert [(one.key, one.value.string_value) for one in resource.resource.attributes] == [
        ("k", "v")
    ]
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("clipper", "1.2")
    for span, one in zip(spans, scope.spans, strict=True):
        ids = one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()
        assert ids == (span.trace_id, span.span_id, span.parent_id)
        times = one.start_time_unix_nano, one.end_time_unix_nano
        assert (one.name, one.kind, *times) == (span.name, span.kind, span.start_ns, span.end_ns)
        assert (one.trace_state, one.flags) == (span.state, 1)
        assert (one.status.message, one.status.code) == (span.error, 2 if span.error else 0)
        links = [(at.trace_id.hex(), at.span_id.hex()) for at in one.links]
        assert links == list(span.links)
    read = {one.key: one.value for one in scope.spans[0].attributes}
    assert (read["b"].bool_value, read["i"].int_value, read["f"].double_value) == (True, -5, 0.5)
    assert (read["s"].string_value, read["n"].int_value) == ("ü" * 200, 2**40)
    assert [one.string_value for one in read["l"].array_value.values] == ["x", "y"]


def test_the_state_and_the_trouble_of_a_model() -> None:
    logs = ["x", " ", "Traceback", "  ValueError: no", "later", ""]
    server: Any = Object(logs=lambda id, number: logs if number != 2 else [])
    model = Model("m", 1, InputType.parse("any"), target="a:b")
    apps = [Application("slow", slo_ms=9), Application("quick", slo_ms=2)]
    ready = {"state": "ready", "number": 0, "restart_count": 0}
    replicas = [
        [],
        [ready],
        [ready, {**ready, "number": 1, "restart_count": 3}],
        [
            {**ready, "state": "backoff", "restart_count": 9},
            {**ready, "state": "failed", "number": 2, "detail": "exit 1"},
        ],
        [
            {**ready, "number": 2, "state": "backoff", "restart_count": 2},
            {**ready, "restart_count": 7},
        ],
        [
            {**ready, "ejected": True, "failures": 4},
            {**ready, "number": 2, "ejected": True, "failures": 9},
        ],
        [{**ready, "suspect": True}],
        [{**ready, "profile": [(1, 5000.0, 3)]}],
    ]

    def state_of(rows: Any, has: int, wanted: int, stage: str = "", **more: Any) -> str:
        row: Any = {"replicas": rows, "has": has, "wanted": wanted, "stage": stage, **more}
        return _state(row)

    assert state_of([ready], 1, 1, warmup_error="it fails") == "warm-up failed"
    assert state_of([ready], 1, 1, warmup_error="it fails", evaluated=1) == "ready"
    out = []
    for rows in replicas:
        states = [state_of(rows, 0, 0), state_of(rows, 1, 2), state_of(rows, 2, 2)]
        states += [state_of(rows, 0, 1, "failed"), state_of(rows, 0, 1)]
        out.append(", ".join(states))
        for state, ended in (
            ("ready", {}),
            ("failed", {}),
            ("ready", {"MODEL_ERROR": 2, "BAD_OUTPUT": 3, "OK": 9}),
        ):
            row = {"replicas": rows, "ended": ended}
            out.append(repr(_trouble(server, model, row, apps, state)))
    out.append(repr(_trouble(server, Model("m", 1, InputType.parse("any")), {}, [], "ready")))
    for lines in (logs, ["a", "b"], ["E" * 300 + "Error: x"], []):
        some: Any = Object(logs=lambda id, number, lines=lines: lines)
        out += [repr(_last_log_line(some, model, 0, errors_only=only)) for only in (False, True)]
    check_expected("troubles.txt", "\n".join(out) + "\n")


def check(name: str, cases: Iterator[Case]) -> None:
    lines, last = [], ""
    for function, words in cases:
        if function.__name__ != last:
            last = function.__name__
            lines.append(f"-- {last}")
        arguments = ", ".join(map(shown, words)) if last != "<lambda>" else shown(words[0])
        arguments = (
            arguments if len(arguments) < 200 else f"{arguments[:150]}... ({len(arguments)})"
        )
        lines.append(f"{arguments}  ->  {called(function, words)}")
    check_expected(f"functions-{name}", "\n".join(lines) + "\n")
