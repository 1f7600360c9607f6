"""Results of functions of the container SDK, for tables of arguments."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any

import numpy as np
import pytest

from clipper_container import parent_death
from clipper_container.adapters.onnx import OnnxModel
from clipper_container.adapters.ragged import run_by_shape
from clipper_container.artifacts.errors import PullError
from clipper_container.artifacts.url import ArtifactUrl
from clipper_container.errors import TooLarge
from clipper_container.forking.report import Reporter
from clipper_container.host import model_cache
from clipper_container.host.work_record import SLOT_BYTES, SLOTS, WorkRecord
from clipper_container.loading import targets as function
from clipper_container.loading.errors import LoadError
from clipper_container.model import BorrowedModel, FunctionModel, Scored
from clipper_container.params import frames, rows
from clipper_container.params.frames import Head, MessageKind
from clipper_container.process_end import _code_of
from clipper_container.records import Records, open_columns, pack_columns
from clipper_container.tensor_spec import FREE, InvalidTensor, TensorSpec, _with_nan
from clipper_container.worker import warmup
from clipper_container.worker.replies import COMPLAIN_S, FailureLog
from tests.expected import check_expected, shown, table
from tests.threads import join


def read(answer: bytes, dtype: str, at: int) -> object:
    return rows.rows_in(memoryview(answer), 2, 3, dtype, at)


def packed_file(folder: Path, content: bytes) -> object:
    path = folder / "model.packed"
    path.write_bytes(content)
    try:
        return function._unpacked(str(path))
    except LoadError as error:
        return str(error).replace(str(folder), "")
    finally:
        path.unlink()


def parsed_url(text: str) -> object:
    try:
        url = ArtifactUrl.parse(text)
    except PullError as error:
        return str(error)
    return [url.name, url.text, url.mounted]


def damaged(body: bytes) -> object:
    return frames.unpacked(body + frames.padding(len(body)))


def test_rows_and_messages_of_tables() -> None:
    bodies = np.arange(64, dtype=np.uint8).tobytes()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    known = {"__array__": "float32", "shape": [2], "data": bytes(8)}
    changed: list[dict[str, Any]] = [
        {"__array__": "object"},
        {"shape": "x"},
        {"shape": [1] * 9},
        {"shape": [2] + [1] * 7},
        {"shape": [-1]},
        {"shape": [2.0]},
        {"data": "x"},
        {"data": bytes(4)},
    ]
    head = Head(MessageKind.REFUSED, rows=12)
    table(
        "rows",
        (rows.as_ids, [[], [1, 2], [[1]], [1.5], 3, np.array([2**64 - 1], np.uint64), [True]]),
        (rows.answer_bytes, [(n, dim, d) for n in (0, 1, 3) for dim in (2, 5) for d in rows.NUMPY]),
        (rows.answer_bytes, [(n, dim, "i8") for n in (0, 1, 3) for dim in (2, 5, 8)]),
        (read, [(bodies, d, at) for d in ("f32", "f16", "bf16", "i8") for at in (0, 8)]),
        (rows.check_dtype, ["f32", "i8", "f64"]),
        (rows.check_gradients, [("t", 2, 3, array), ("t", 3, 2, array), ("t", 2, 3, array[0])]),
        (
            lambda ids, n: list(rows.split_by_shard(np.array(ids, np.int64), n)),
            [([], 1), ([5, 1], 1), ([], 3), ([5, 1, -1, 4, 5], 3), ([2, 2], 2), ([0, 1], 2)],
        ),
        (lambda fields: frames.unpacked(frames.packed(fields)), [{"a": array, "b": array.T[1]}]),
        (
            lambda fields: frames.unpacked(frames.packed(fields)),
            [{"a": known}, *({"a": {**known, **one}} for one in changed), {}, {"a": np.int8(3)}],
        ),
        (lambda value: frames.packed({"a": value}), [object, {1}, np.float32(2.5)]),
        (damaged, [b"", b"\xc1", b"\x01", b"\x81\xa1a", b"\x81\xa1a\x05", b"\x81\x01\x05"]),
        (
            lambda error: frames.unpacked(frames.failed(error)),
            [TooLarge("big.", hint="Less."), KeyError("x")],
        ),
        (
            lambda body: frames.refusal(head, body, "shard 1"),
            [b"", bytes(7), (5).to_bytes(8, "little"), (-5).to_bytes(8, "little", signed=True)],
        ),
        (
            frames.read_head,
            [
                Head(kind, payload_bytes=size).packed()
                for kind, size in ((0, 0), (1, 8), (12, 0), (13, 0), (4, 4))
            ],
        ),
    )


SPECS = [
    TensorSpec("n", "i32"),
    TensorSpec("x", "f32", (FREE, 2)),
    TensorSpec("s", "str"),
    TensorSpec("w", "str", (FREE,)),
    TensorSpec("o", "bool", (3,)),
    TensorSpec("r", "bool", (FREE,)),
    TensorSpec("b", "bytes", (2,)),
    TensorSpec("m", "u8", (2, FREE)),
]


def columns(n: int, at: int) -> dict[str, Any]:
    return {
        "n": np.arange(n) + at,
        "x": [np.full((i % 3, 2), i + 0.5) for i in range(n)],
        "s": ["ä" * i for i in range(n)],
        "w": [["a"] * (i % 4) + ["bc"] for i in range(n)],
        "o": [[True, i % 2 == 0, False] for i in range(n)],
        "r": [[i % 2 == 1] * (i + 1) for i in range(n)],
        "b": [[b"x" * i, b"yz"] for i in range(n)],
        "m": [np.full((2, i % 2 + 1), i, np.uint8) for i in range(n)],
    }


def opened(names: str, change: Callable[[bytearray], object]) -> object:
    specs = [spec for spec in SPECS if spec.name in names]
    some = columns(3, 7)
    made = pack_columns(specs, 3, some, lambda spec, numbers: None)
    record = bytearray(made[1])
    change(record)
    return open_columns(specs, Records.of([made[0], bytes(record), made[2]]))


def set_at(place: int, value: int) -> Callable[[bytearray], object]:
    return lambda record: record.__setitem__(place % len(record), value)


def test_records_of_many_rows() -> None:
    out = []
    for names in ("n", "x", "s", "w", "o", "r", "b", "m", "no", "nxsworbm", "xm", "sn", "bw"):
        specs = [spec for spec in SPECS if spec.name in names]
        for n in (1, 4):
            checked: list[str] = []
            made = pack_columns(
                specs,
                n,
                columns(n, 1),
                lambda spec, numbers, checked=checked: checked.append(spec.name),  # type: ignore[misc]
            )
            out.append(f"{names} {n} {checked} {made.offsets.tolist()} {made.data.tobytes().hex()}")
            out.append(f"  {shown(open_columns(specs, made))}")
    for names in ("n", "x", "s", "w", "o", "r", "b", "m"):
        changes: list[tuple[str, Callable[[bytearray], object]]] = [
            ("cut", lambda record: record.__delitem__(slice(-8, None))),
            ("odd", lambda record: record.__delitem__(slice(-3, None))),
            ("longer", lambda record: record.extend(bytes(8))),
            *((f"{at}={to}", set_at(at, to)) for at in (0, 3, 4, 8, 12, 16) for to in (0, 1, 255)),
        ]
        for what, change in changes:
            try:
                found = shown(opened(names, change))
            except InvalidTensor as error:
                found = f"{type(error).__name__}: {error}"
            out.append(f"{names} {what}: {found}")
    some = Records.of([b"abc", b"", b"de"])
    for at in (0, 1, -1, 2, 3, -3, -4, slice(1, 3), slice(2, 1), slice(None), slice(5, 9)):
        try:
            one = some[at]
            found = shown([*map(bytes, one)] if isinstance(one, Records) else bytes(one))
        except IndexError as error:
            found = str(error)
        out.append(f"{at}: {found}")
    out.append(shown([*map(bytes, some.padded(2)), some.sizes, len(some)]))
    check_expected("tables/records.txt", "\n".join(out) + "\n")


def by_shape(inputs: dict[str, Any]) -> object:
    calls: list[object] = []

    def run(some: dict[str, Any]) -> dict[str, Any]:
        calls.append(some)
        first = next(iter(some.values()))
        return {"n": [*range(len(first))], "y": np.array(first, object)}

    return [run_by_shape(inputs, run), calls]


def test_models_and_their_files(tmp_path: Path) -> None:
    a, b = np.zeros(2), np.ones(3)
    magic = function.MAGIC

    def made(kind: Callable[[Any], Any], **more: object) -> object:
        model = kind(Object(**more))
        return [
            getattr(model, name) for name in ("input", "output", "batch_max", "sessions", "fork")
        ]

    greeting = {"input": "i64", "output": "str", "batch_max": 7, "sessions": 1, "fork": 0}
    url = "https://h/a/b.onnx"
    table(
        "models",
        (
            lambda content: packed_file(tmp_path, content),
            [
                magic + b'{"python": "3.11", "kind": "onnx"}\nbody\nmore',
                magic + b'{"python": "3.11"}\nx',
                magic + b'{"kind": "onnx"}\nx',
                magic + b'["python", "kind"]\nx',
                magic + b"{\nx",
            ],
        ),
        (by_shape, [{"x": [a, b, a], "k": np.array([1, 2, 3])}, {"x": [a, a]}, {"s": ["x", "y"]}]),
        (by_shape, [{"k": np.array([1, 2])}, {"s": [b"x", b"y"], "x": [a, b]}]),
        (made, [FunctionModel, BorrowedModel]),
        (lambda kind: made(kind, **greeting), [FunctionModel, BorrowedModel]),
        (
            parsed_url,
            [
                url,
                f"{url}#sha256={'AB' * 32}&etag=x",
                "pvc://claim/a/b c",
                "pvc://claim/" + "x" * 130 + ".onnx",
                "s3://b/f/",
                "s3://b",
                "s3://b/a//b",
                "s3://b/../x",
                "https://u:p@h/x",
                f"{url}?k=v",
                "http://h/x",
                "pvc://_/x",
                f"{url}#md5=x",
                f"{url}#sha256=",
                f"{url}#sha256=zz",
                "ftp://h/x",
            ],
        ),
        (_code_of, [SystemExit(value) for value in (None, 0, 3, True, "text", 2.5)]),
        (warmup._items_of, [["a"], np.zeros((2, 3)), np.zeros((2, 0)), np.zeros(4)]),
        (
            lambda rows: warmup._lengths(rows),
            [
                ["ä", "bc"],
                np.zeros((2, 3)),
                [b"abc", b"de"],
                [np.zeros(4), np.zeros(0)],
                ["x"] * warmup.TIMINGS_MAX,
                ["x"] * (warmup.TIMINGS_MAX + 1),
            ],
        ),
        (
            lambda rows, type_: warmup.given_rows(rows, type_),
            [
                ([], "f64"),
                ("x", "f64"),
                ([[1, 2]], "f64[2]"),
                ([[1, 2]], "f64[3]"),
                ([[1], [2, 3]], "f32[*]"),
                (["a"], "str"),
                ([5], "str"),
                ([1, 2], "any"),
                (["a", 1], "any"),
                ([{"x": 1}], '{"x": "i64"}'),
                ([{"x": "a"}], '{"x": "str"}'),
            ],
        ),
        (
            _with_nan,
            [
                np.array([[1, None], [True, 2.5]], object),
                np.array([1, "x"], object),
                np.array([10**400, 1], object),
                np.array([np.int8(3)], object),
            ],
        ),
    )


def test_the_same_failure_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.5, 1.0, COMPLAIN_S, 0.5 + COMPLAIN_S, 6.0, 6.5])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    log = FailureLog("model 'm' failed")
    for text in ("a\n", "a\n", "a\n", "a\n", "b", "a"):
        log.report(text)
    monkeypatch.undo()
    start = "model 'm' failed"
    more = " (2 more times since this line was last printed)"
    lines = [f"{start}: a", f"{start}{more}: a", f"{start}: b", f"{start}: a"]
    assert capsys.readouterr().err.splitlines() == lines


def test_reports_of_a_container() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        reporter = Reporter(theirs.detach())
        reporter.send(warming=3)
        assert json.loads(ours.recv(100)) == {"warming": 3}
        fd = reporter.hand_on()
        assert os.get_inheritable(fd)
        assert reporter.hand_on() == -1
        again = Reporter(fd)
        assert not os.get_inheritable(fd)
        again.close()
        again.close()
        again.send(warm=True)
        assert again.hand_on() == -1
        assert ours.recv(100) == b""
    Reporter(-1).send(warm=True)


def test_the_record_of_work_has_a_slot_for_each_thread(tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.write_bytes(bytes(SLOTS * SLOT_BYTES))
    record = WorkRecord(str(path))
    with record.on("ä" * 200):
        assert path.read_bytes()[:SLOT_BYTES] == bytes([255]) + ("ä" * 200).encode()[:255]
        with record.on("b"):
            assert path.read_bytes()[:2] == b"\x01b"
    assert path.read_bytes()[0] == 0
    record._count = iter([SLOTS - 1, SLOTS])  # type: ignore[assignment]
    places = []
    for _ in range(2):
        del record._own.at
        places.append(record._at())
    assert places == [(SLOTS - 1) * SLOT_BYTES, -1]
    with record.on("c"):
        assert not any(path.read_bytes()[::SLOT_BYTES])


def predicted(shape: tuple[int, ...], others: list[object], is_free: bool) -> object:
    model = object.__new__(OnnxModel)
    calls: list[object] = []

    def run(wanted: object, feed: object) -> list[object]:
        calls.append((wanted, feed))
        return [np.arange(math.prod(shape)).reshape(shape), *others]

    model._session, model._wanted, model._feed = Object(run=run), ["y"], "x"
    model._dtype, model._shape = "float32", None if is_free else (2, 1)
    found = model.predict_batch([[1, 2], [3, 4]])
    if isinstance(found, Scored):
        return ["scored", found.outputs, found.confidence, calls]
    return [found, calls]


def test_outputs_of_a_session() -> None:
    sure = [np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)]
    shapes = ((2,), (2, 1), (2, 1, 1), (2, 3), (1, 2))
    cases = [(shape, others, free) for shape in shapes for others in ([], sure) for free in (0, 1)]
    table("session", (predicted, [*cases, ((2,), [np.array([1, 2])], 0)]))


def test_memory_is_given_back_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(model_cache, "trim", lambda: done.append("trim"))
    monkeypatch.setattr("gc.collect", lambda: done.append("collect"))
    timers: Any = Object(after=lambda delay_s, work: done.append("later"))
    connections: Any = None
    cache = model_cache.ModelCache([], connections, timers, 0, 0, WorkRecord())
    found = []
    for wait_s in (None, 0, 2.0):
        for to_trim in (False, True):
            cache._trimming, cache._to_trim = True, to_trim
            cache._leftovers = Object(  # type: ignore[assignment]
                wait_s=lambda now_s, other_bytes, wait_s=wait_s: wait_s,
                clear=lambda now_s: done.append("clear"),
            )
            cache._trim()
            found.append((*done, cache._trimming, cache._to_trim))
            done.clear()
    assert found == [
        (False, False),
        ("trim", False, False),
        ("clear", "collect", "trim", False, False),
        ("clear", "collect", "trim", False, False),
        ("later", True, False),
        ("later", "trim", True, False),
    ]


TITLE = """
import sys
import threading
from clipper_container.forking.replica import set_title
for title in ("replica 1", "x" * 5000):
    set_title(title)
    print(open("/proc/self/cmdline").read())
"""


def test_the_title_of_a_replica_fits_into_its_command_line() -> None:
    for more, is_shown in (("", True), ("x" * 4096, False)):
        command = [sys.executable, "-c", TITLE, more]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        before = "".join(f"{word}\0" for word in command)
        titles = "replica 1".ljust(len(before), "\0"), "x" * (len(before) - 1) + "\0"
        assert found == "".join(f"{one}\n" for one in (titles if is_shown else (before, before)))


ENDS = """
import sys
import threading
from clipper_container.process_end import run_and_end
def work():
    print("said")
    return eval(sys.argv[1])
run_and_end(work)
"""


@pytest.mark.parametrize(("ends", "code"), [("5", 5), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_output_of_a_child_is_written_before_it_ends(ends: str, code: int) -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", ENDS, ends]
    done = subprocess.run(command, capture_output=True, text=True, env=buffered)
    assert (done.returncode, done.stdout) == (code, "said\n")
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)


PARENT = """
import ctypes, signal, sys
from clipper_container.parent_death import end_with_parent
end_with_parent(ignores_ctrl_c=True)
sent = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(sent))  # PR_GET_PDEATHSIG
print(sent.value, signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)
end_with_parent(1 << 22)
print("still there")
"""


def test_a_container_ends_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-9, "9 True\n")


TELLS = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), os.getcwd(), flush=True); input()"


def test_a_program_ends_with_the_thread_that_started_it() -> None:
    """The program tells its priority and its folder, and waits for ever."""
    started: list[tuple[subprocess.Popen[str], str]] = []

    def start() -> None:
        words = parent_death.command([sys.executable, "-c", TELLS], "/", 3)
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        started.append((process, process.stdout.readline()))

    thread = threading.Thread(target=start)
    thread.start()
    join(thread)
    [(process, told)] = started
    with process:
        assert process.wait(30) == -signal.SIGKILL
    assert told == f"{min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)} /\n"
