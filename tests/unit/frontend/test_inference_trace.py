"""Tensors in JSON, in binary and in records, and spans of requests, compared as whole texts.

The other tests say what is accepted and why; this one notices that something is read or written
otherwise.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace as Object
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.errors import ClipperError
from clipper.frontend.inference import codec
from clipper.frontend.inference.codec import OutputTensor, RequestedOutput, Tensor
from clipper.frontend.inference.json_inputs import reader_for, rows_in_columns, tensors_reader
from clipper.frontend.tracing import spans
from clipper.frontend.tracing.context import Trace, TracedQuery
from clipper.frontend.tracing.otlp import Span
from clipper.schema import Schema, Tensors, TensorSpec
from clipper.types import InputType
from clipper_core.runtime.status import Status
from tests.expected import check_expected, shown


def tried(call: Callable[[], object]) -> str:
    """Return the result of a call, or its error without the words of libraries."""
    try:
        return shown(call())
    except ClipperError as error:
        words = str(error)
        for theirs in (
            "JSON is",
            "Expected `",
            "Number out",
            "overflow",
            "Python int",
            "Expecting",
        ):
            words = words.partition(theirs)[0]
        return f"{type(error).__name__}: {words} {error.hint or ''}"


def request(*tensors: dict[str, Any], data: bytes = b"", **more: Any) -> tuple[bytes, bytes]:
    head = json.dumps({"inputs": tensors, **more}).encode()
    return head + data, str(len(head)).encode() if data else b""


def tensor(name: str, datatype: str, shape: list[int], data: Any = None, **more: Any) -> Any:
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        **({} if data is None else {"data": data}),
        **({"parameters": more} if more else {}),
    }


REQUESTS = [
    request(tensor("x", "FP32", [2, 2], [1.5, 2, 3, 4]), id="seven", parameters={"a": 1}),
    request(tensor("x", "FP64", [2, 2], [[1.5, 2], [3, 4]])),
    request(tensor("x", "INT64", [3], [1, 2, 3]), outputs=[{"name": "y"}]),
    request(tensor("x", "UINT8", [3], [1, 2, 300])),
    request(tensor("x", "INT8", [1, 2], [[1, 200]])),
    request(tensor("x", "INT32", [2], [[1, 2.5]])),
    request(tensor("x", "BOOL", [2], [True, False])),
    request(tensor("x", "BOOL", [1, 2], [[True, False]])),
    request(tensor("x", "FP16", [2], [1.5, 1e9])),
    request(tensor("x", "FP16", [1, 2], [[1.5, 1e9]])),
    request(tensor("x", "FP32", [2], [[True, False]])),
    request(tensor("x", "BYTES", [2], ["a", "ä"])),
    request(tensor("x", "BYTES", [2, 1], [["a"], ["b"]])),
    request(tensor("x", "BYTES", [1], [3])),
    request(tensor("x", "FP32", [3], [1, 2])),
    request(tensor("x", "FP32", [1])),
    request(tensor("x", "FP99", [1], [1])),
    request(tensor("x", "FP32", [1] * 8, [1])),
    request(tensor("x", "FP32", [1] * 9, [1])),
    request(tensor("x", "FP32", [-1], [1])),
    request(tensor("x", "FP32", [0, 4096], [])),
    request(tensor("x", "FP32", [0, 4097], [])),
    request(tensor("x", "FP32", [1 << 31], [])),
    request(tensor("x", "FP32", [(1 << 31) + 1], [])),
    request(tensor("x", "FP32", [1], [1], shared_memory_region="r")),
    request(tensor("x", "FP32", [2], binary_data_size=8), data=np.float32([1, 2]).tobytes()),
    request(tensor("x", "FP32", [2], binary_data_size=7), data=bytes(7)),
    request(tensor("x", "FP32", [2], binary_data_size=8), data=bytes(7)),
    request(tensor("x", "FP32", [2], binary_data_size=8), data=bytes(9)),
    request(tensor("x", "FP32", [2], binary_data_size=True), data=bytes(1)),
    request(tensor("x", "FP32", [2], binary_data_size=-1), data=bytes(1)),
    request(
        tensor("x", "BOOL", [3], binary_data_size=3),
        tensor("s", "BYTES", [2], binary_data_size=11),
        tensor("n", "INT16", [1], [7]),
        data=b"\0\1\2" + b"\3\0\0\0abc\0\0\0\0",
        parameters={"binary_data_output": True},
    ),
    request(tensor("s", "BYTES", [1], binary_data_size=6), data=b"\3\0\0\0ab"),
    request(tensor("s", "BYTES", [1], binary_data_size=3), data=b"\3\0\0"),
    request(tensor("s", "BYTES", [2], binary_data_size=7), data=b"\3\0\0\0abc"),
    request(tensor("s", "BYTES", [1], binary_data_size=5), data=b"\1\0\0\0\xff"),
    request(tensor("x", "FP32", [1], [1]), outputs=[{"name": "y"}, {"name": "y"}]),
    request(
        tensor("x", "FP32", [1], [1]),
        outputs=[{"name": "y", "parameters": {"classification": 2}}],
    ),
    request(),
    (b"{}", b"3"),
    (b"{}", b"-1"),
    (b"{}", b"0000000000002"),
]
TYPES = ("any", "f32", "f64[2]", "i64[*]", "f32[2,2]", "str", "bytes", "u8[3]", "bool[2]")
NAMED = Tensors.parse({"ids": "i64[*]", "score": "f32", "words": "str[2]", "raw": "bytes"})
FIXED = Tensors.parse({"a": "f32[2]", "b": "bool", "c": "u16[1,3]"})


def test_requests() -> None:
    found = []
    for body, head in REQUESTS:
        found.append(f"-- {body[:150]!r} {head!r}")
        found.append(tried(lambda body=body, head=head: codec.decode(body, head)))
        if ":" in found[-1].partition(" ")[0]:
            continue
        read = codec.decode(body, head)
        for text in TYPES:
            rows = tried(lambda read=read, text=text: codec.rows_of(read, InputType.parse(text)))
            found.append(f"{text}: {rows}")
    for given in (
        {"ids": [[1, 2]], "score": [1.5], "words": [["a", "b"]], "raw": ["r"]},
        {"ids": [1, 2], "score": 1.5, "words": ["a", "b"], "raw": "r"},
        {"ids": [[1, 2], [3, 4]], "score": [[1.5], [2.5]], "words": [["a"] * 2] * 2, "raw": ["r"]},
        {"ids": [[1, 2]], "score": [1.5]},
        {"ids": ["x"], "score": [1.5], "words": [["a", "b"]], "raw": ["r"]},
        {"ids": np.empty((0, 2)), "score": [], "words": np.empty((0, 2), object), "raw": []},
    ):
        tensors = [as_tensor(name, value) for name, value in given.items()]
        read = codec.InferRequest("", {}, tensors, False)
        found.append(tried(lambda read=read: codec.columns_of(read, NAMED)))
        read.inputs.append(tensors[0])
        found.append(tried(lambda read=read: codec.columns_of(read, NAMED)))
    found += [shown(codec.described(side.specs)) for side in (NAMED, FIXED)]
    check_expected("inference/requests.txt", "\n".join(found) + "\n")


def as_tensor(name: str, value: Any) -> Tensor:
    array = np.asarray(value)
    if array.dtype.kind in "UO":
        return Tensor(name, "BYTES", array.shape, [*map(str, array.ravel())])
    datatype = {"i": "INT64", "f": "FP64"}[array.dtype.kind]
    return Tensor(name, datatype, array.shape, array)


def test_responses() -> None:
    found = []
    for outputs in (
        np.array([[1.5, 2.0]]), np.array([1, 2], ">i4"), np.ones((2, 4), "f4")[:, ::2], ["a", b"b"],
        np.array(["a", "b"]), [np.array(["a"], object), np.array([b"b"], object)], [1.5, 2.5],
        [np.ones(2), np.ones(3)], ["a", 1], [True, False], [b"\xff"], [],
        {"x": np.array([1.0, 2.0]), "y": ["s", "t"]},
        [{"x": 1.0, "y": "s"}, {"y": "t", "x": 2.0}], [{"x": 1.0}, {"y": 2.0}], [{"x": 1.0}, 7],
        [np.array(["a"]), np.array(["b", "c"])],
    ):  # fmt: skip
        for binary in (True, False):
            for wanted in (
                [],
                [RequestedOutput("y", {"binary_data": not binary})],
                [RequestedOutput("output")],
            ):
                found.append(tried(lambda o=outputs, b=binary, w=wanted: answer(o, b, w)))
    check_expected("inference/responses.txt", "\n".join(found) + "\n")


def answer(outputs: Any, binary: bool, wanted: list[RequestedOutput]) -> object:
    parameters = {"p": 1} if binary else {}
    version = "3" if binary else ""
    parts, size = codec.encode("m", version, "id", outputs, binary, parameters, wanted)
    assert all(isinstance(one, OutputTensor) for one in codec.output_tensors(outputs, binary))
    return b"".join(map(bytes, parts)), size


def test_inputs_in_json() -> None:
    texts = [
        b"1", b"1.0", b"1.5", b"[1, 2]", b"[1.0, 2.0]", b"[1.5, 2]", b"[[1, 2], [3, 4.0]]", b'"a"',
        b'"aGk="', b"true", b"[true, false]", b"null", b"[]", b"[1e400, 2]", b"[1, 2, 3]", b"300",
        b"[300, 1, 2]", b"{}", b"[1e39, 2]",
    ]  # fmt: skip
    found = []
    for type in (*TYPES, "f16[2]", "u8", "i8[2]"):
        read = reader_for(InputType.parse(type))
        for text in texts:
            row = tried(lambda read=read, text=text: read(msgspec.Raw(text), "$.input"))
            found.append(f"{type} {text.decode()}: {row}")
    sides = NAMED, FIXED, Tensors.parse({"i": "i32[*,2]", "f": "f16[2]", "t": "str[*]"})
    for text in (
        {"ids": [1, 2.0], "score": 1, "words": ["a", "b"], "raw": "aGk="},
        {"ids": [], "score": 1.5, "words": ["a", "b"], "raw": "!"},
        {"ids": [1.5], "score": 1.5, "words": ["a", "b"], "raw": ""},
        {"ids": [1], "score": "x", "words": ["a", "b"], "raw": ""},
        {"ids": [1], "score": 2, "words": ["a"], "raw": ""},
        {"a": [1, 2.5], "b": True, "c": [[1, 2, 3.0]]},
        {"a": [1, 2.5], "b": 1, "c": [[1, 2, 3]]},
        {"a": [1, 2.5], "b": False, "c": [[1, 2, 70000]]},
        {"a": [1, 2.5], "d": False, "c": [[1, 2, 70000]]},
        {"i": [[1, 2], [3.0, 4]], "f": [1, 2], "t": ["x", "y", "z"]},
        {"i": [1, 2], "f": [1, 2], "t": []},
        [1],
    ):
        body = msgspec.Raw(json.dumps(text).encode())
        many: Any = {name: [v, v] for name, v in text.items()} if isinstance(text, dict) else text
        bodies = msgspec.Raw(json.dumps(many).encode())
        for side in sides:
            read = tensors_reader(side)
            found.append(tried(lambda read=read, body=body: read(body, "$")))
            found.append(tried(lambda b=bodies, side=side: rows_in_columns(b, "$", side)))
    check_expected("inference/json.txt", "\n".join(found) + "\n")


def test_schemas_and_records() -> None:
    found = []
    for text in (
        "f32", " F32[ 3 , 224 ] ", "int64[*]", "string", "double[2]", "f32[]", "f32[0]", "f32[a]",
        "f33", "f32[*,*]", "f32[1,1,1,1,1,1,1,1,1]", "f32[2147483648]", "object[2]", "boolean", 7,
        "str[*]", "bytes[2,2]",
    ):  # fmt: skip
        found.append(f"{text}: {tried(lambda text=text: TensorSpec.parse('t', text))}")  # type: ignore[misc]
    for name in ("", "x" * 65, "x" * 300, "a\nb", 3):
        found.append(tried(lambda name=name: TensorSpec.parse(name, "f32")))  # type: ignore[misc]
    for side in (
        '{"a": "f32", "a": "i32"}', "{", {}, {"": "f32"}, [], {"a": "f64[2147483647]"},
        {f"t{i}": "f32" for i in range(65)},
        {f"t{i}": "f32" for i in range(2000)}, '{"a": "f32[2]"}',
    ):  # fmt: skip
        found.append(tried(lambda side=side: Tensors.parse(side))[:300])  # type: ignore[misc]
    for text in (
        "f32[2] -> i64", "any", '{"a": "f32"} -> {"b": "str"}', '{"a": "f32"}', "->", "f32 ->",
        " -> f32", '{"a": "f32"} x', '{"a" -> f32', '{"a": "f32"} -> f64[2]', "f32 -> any", 5,
        '{"a->b": "f32"} -> f32',
    ):  # fmt: skip
        found.append(tried(lambda text=text: Schema.parse(text)))  # type: ignore[misc]
        if ":" in found[-1].partition(" ")[0]:
            continue
        schema = Schema.parse(text)  # type: ignore[arg-type]
        again = Schema.of(**schema.to_json())
        specs = schema.input_specs(), again.output_specs("out")
        found.append(f"{schema} {again == schema} {shown(schema.to_json())} {shown(specs)}")
    for side in (NAMED, FIXED):
        found.append(shown([str(side), len(side), side.is_fixed, side.row_bytes, side.row_type]))
        found += [
            tried(lambda s=side, n=names: s.select(n))
            for names in (["idz"], [], [*side.by_name][::-2])
        ]
    named = {"ids": [1, 2, 3], "score": 1.5, "words": ["a", "bc"], "raw": b"xyz"}
    fixed = {"a": [1, 2], "b": True, "c": [[1, 2, 3]]}
    for side, row in ((NAMED, named), (FIXED, fixed)):
        record = side.pack(row)
        found += [shown(record), shown(side.unpack(record)), shown(side.unpack_many([record] * 2))]
        for damaged in (bytes(record)[:-1], bytes(record)[:3], bytes(record) + b"\0", b"\xff" * 64):
            found.append(tried(lambda s=side, d=damaged: s.unpack(d)))
        for change in (
            {}, {"ids": [[1]]}, {"ids": [1.5]}, {"ids": [2**70]}, {"words": ["a"]}, {"words": "ab"},
            {"words": [1, 2]}, {"raw": "text"}, {"raw": bytearray(b"q")}, {"score": "x"}, {"b": 1},
            {"c": [[1, 2, -3]]}, {"a": np.float64([1, 2])}, {"a": np.float32([1, 2])}, {"z": 1},
            {"score": np.nan}, {"a": [1, np.inf]}, {"ids": np.int32([5])},
        ):  # fmt: skip
            found.append(f"{change}: {tried(lambda s=side, r={**row, **change}: s.pack(r))}")
            careful = Tensors(side.specs, finite=True)
            found.append(tried(lambda s=careful, r={**row, **change}: s.arrays(r)))
        many = {name: [value, value] for name, value in row.items()}
        for rows in (many, [row, row, row]):
            found.append(shown([bytes(one) for one in side.pack_many(rows)]))
        for name in row:
            for wrong in (row[name], [], 7, "text", np.float32(3), [row[name]]):
                given = {**many, name: wrong}
                rows = tried(lambda s=side, g=given: [*map(bytes, s.pack_many(g))])
                found.append(f"{name} {wrong!r}: {rows}")
        found += [tried(lambda s=side: s.rows_of(3)), tried(lambda s=side: s.pack({}))]
    check_expected("inference/records.txt", "\n".join(found) + "\n")


def future(id: int, models: list[str], statuses: list[Status], latencies: list[int]) -> Any:
    class Tasks:
        """A fake of a future that is done."""

        def __init__(self) -> None:
            self.id, self.extra = id, Object(models=models)

        def __len__(self) -> int:
            return len(statuses)

        def status(self, i: int) -> Status:
            return statuses[i]

        def latencies_us(self) -> np.ndarray[Any, Any]:
            return np.array(latencies)

    return Tasks()


def test_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of two queries whose tasks came in batches, one of them shared with another."""
    numbers = iter(range(1, 1000))
    ticks = iter(range(10_000, 10**9, 1000))
    monkeypatch.setattr(spans, "_OURS", b"key")
    for module in ("spans", "context"):
        place = f"clipper.frontend.tracing.{module}"
        monkeypatch.setattr(f"{place}.new_id", lambda bits: f"{next(numbers):0{bits // 4}x}")
        monkeypatch.setattr(f"{place}.now_ns", lambda: next(ticks))
    ok, full, late = Status.OK, Status.FULL, Status.PENDING
    one = future(100, ["svm:3", "tree:1", "slow:1"], [ok, full, late], [2000, 0, 9])
    two = future(200, ["svm:3"], [ok], [0])
    rows = future(300, ["svm:3", "svm:3"], [ok, ok, ok], [1, 2, 3])  # an array: no spans
    large = future(400, [f"m:{i}" for i in range(70)], [ok] * 70, [5] * 70)
    made = Object(
        method="POST",
        path=b"/api/" + b"x" * 300,
        route="/api/{}/predict",
        began_ns=500,
        key=Object(name="shop", groups=("web",)),
    )
    plain = Object(method="GET", path=b"/\xff", route="", began_ns=700, key=None)
    requests = []
    for seen, status, futures in ((made, 200, [one, two, rows]), (plain, 500, [large])):
        trace = Trace("ab" * 16, "cd" * 8, True, b"k=v")
        trace.start_query()
        trace.end_query("app" if status == 200 else "", futures)
        seen.trace = trace
        monkeypatch.setattr(spans, "subject_of", lambda request: {"application": "app"})
        response: Any = Object(status=status)
        requests.append(spans.finished_request(seen.trace, seen, response, b"id7"))
    quiet = Trace("ef" * 16, "", False)
    quiet.start_query()
    quiet.end_query("app", [one])
    requests += [spans.finished_call(quiet, "S", "M", code, 900) for code in ("OK", "INTERNAL")]
    batch = 2, 7, 1000, 1500, 1900
    known = {100: batch, 200: batch, 401: (3, 1, 5, 6, 7)}
    requested: list[Any] = []

    def find(ids: Any) -> Any:
        requested.append([*ids])
        return known

    maker = spans.Spans(find)
    found = [shown(maker.of(requests, 1_000_000))]
    again = maker.of(requests[:1], 0)
    found += [shown(again), shown([len(one) for one in requested]), shown(maker.of([], 0))]
    found += [shown([isinstance(span, Span) for span in again]), shown(quiet.queries)]
    assert isinstance(requests[0].trace.queries[0], TracedQuery)
    monkeypatch.setattr(spans, "_BATCHES_MAX", 1)
    maker.of(requests, 0)
    names = [span.name for span in maker.of(requests[:1], 0)]
    found.append(f"a batch that is forgotten has a span again: {names}")
    clock = iter([100, 350, 1000, 1010, 2000, 2100])
    walls = iter([7, 8, 9])
    monkeypatch.setattr(spans, "now_ns", lambda: next(clock))
    monkeypatch.setattr(spans, "wall_time_us", lambda: next(walls))
    found.append(shown(spans.epoch_ns()))
    check_expected("inference/spans.txt", "\n".join(found).replace("], [", "],\n[") + "\n")
