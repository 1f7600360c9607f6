"""codec: what do frames cost to write and to open, beside memcpy and the formats of others? (CPU
time.)"""

import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.harness import CPU, Goal, Row, Sample, absent, interleave, row
from bench.system.engine.effort import Effort, micro
from bench.system.engine.peers import not_installed, peer
from bench.system.engine.servers import WIDE, servers
from clipper_container.wire import frames as wire
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.scheduling.batcher import BatchingMode
from clipper_core.wire.codec import (
    HEADER_BYTES,
    Kind,
    decode_header,
    encode_frame,
    encode_rows,
    open_rows,
)

IMAGES_NAME, ROWS = f"256 x f32[{WIDE}]", 256
SIZES = (1, 256, 4096)  # rows of f32[784], for "any size"
FORMATS = ("msgspec", "msgpack", "Arrow IPC", "pickle5")
STEP = (
    "the step of the engine around it: tasks are taken from the lane one by one before their rows"
    " are sent as they lie"
)
JOIN = (
    "fresh memory: header and rows are joined into new bytes here, whose pages are faulted in; a"
    " socket gets both as they lie"
)


def rows(effort: Effort) -> list[Row]:
    images = np.random.default_rng(1).random((ROWS, WIDE), dtype=np.float32)
    texts = [(f"the quick brown fox jumps over the lazy dog {i} " * 3)[:100] for i in range(1000)]
    turns = effort.of(50, 2)
    cases: dict[str, Callable[[], float]] = {
        "engine": Framing(f"f32[{WIDE}]", images, turns),
        "container": timed(lambda: container_pieces(images), turns),
        "copy": timed(images.tobytes, turns),
        "engine texts": Framing("str", texts, turns),
        "texts": timed(lambda: encode_rows(Kind.PREDICT, texts), turns),
        "gather": timed(
            lambda: ("".join(texts).encode(), np.fromiter(map(len, texts), np.uint32, len(texts))),
            turns,
        ),
        "both": timed(lambda: container_open(b"".join(container_pieces(images))), turns),
    }
    for n in SIZES:
        cases |= decoders(n, 20 * turns)
    missing = {}
    for name in FORMATS:
        pair = codec_of(name)
        if pair is None:
            missing[name] = not_installed("pyarrow")
            continue
        encode, decode = pair
        cases[name] = timed(lambda encode=encode, decode=decode: decode(encode(images)), turns)  # type: ignore[misc]
        cases[f"{name} texts"] = timed(lambda encode=encode: encode(texts), turns)  # type: ignore[misc]
    found = {name: micro(sample) for name, sample in interleave(cases, effort.repetitions).items()}
    return [*numbers(found, missing), *decoding(found), alignment(), *strings(found, missing)]


class Framing:
    """Measures the ns that the engine takes from rows in a lane to a frame that can be sent: one
    step() on its manual clock."""

    def __init__(self, type_: str, batch: Any, turns: int) -> None:
        kind, _, width = type_.rstrip("]").partition("[")
        self.engine = Engine(manual_clock=True, cache_bytes_max=1 << 16)
        self.model = Model(
            self.engine, "m:1", 1, kind, (int(width),) if width else (), cached=False
        )
        self.batch, self.turns = batch, turns
        self.conn = self.engine.open(1)
        self.engine.receive(self.conn, encode_frame(Kind.HELLO, b""), 1)
        self.engine.attach(self.conn, 0, b"", mode=BatchingMode.STATIC, size_max=len(batch))
        self.engine.step(2)
        self.engine.outgoing(self.conn, 2)

    def __call__(self) -> float:
        total = 0
        for _ in range(self.turns):
            future = self.model.predict_many(self.batch)
            begun = CPU()
            self.engine.step(2)
            total += CPU() - begun
            header = decode_header(self.engine.outgoing(self.conn, 2))
            assert header is not None
            assert header.rows == len(self.batch)
            self.engine.receive(
                self.conn, encode_rows(Kind.REPLY, np.zeros(header.rows), id=header.id), 2
            )
            self.engine.step(2)
            future.result()
        return total / self.turns


def container_pieces(batch: NDArray[Any]) -> list[Any]:
    """Return the SDK's frame: a header, and the rows without a copy."""
    header, pieces = wire.encode_rows(
        wire.Kind.REPLY, wire.Rows(wire.DTYPE_OF[batch.dtype], len(batch), batch), 7, 1, False
    )
    return [wire.encode_header(header), *pieces]


def container_open(frame: bytes) -> Any:
    return wire.open_rows(
        wire.decode_header(frame[:HEADER_BYTES], len(frame)),
        np.frombuffer(frame, np.uint8)[HEADER_BYTES:],
    )


def timed(run: Callable[[], object], times: int) -> Callable[[], float]:
    def measure() -> float:
        begun = CPU()
        for _ in range(times):
            run()
        return (CPU() - begun) / times

    return measure


def decoders(n: int, times: int) -> dict[str, Callable[[], float]]:
    """Return the decoders of the core and of the container: the header is read and checked, and the
    payload becomes an array."""
    frame = encode_rows(Kind.PREDICT, np.zeros((n, WIDE), np.float32))
    head, body, seen = (
        frame[:HEADER_BYTES],
        frame[HEADER_BYTES:],
        np.frombuffer(frame, np.uint8)[HEADER_BYTES:],
    )

    def core() -> Any:
        header = decode_header(head)
        assert header is not None
        return open_rows(header, body)

    def container() -> Any:
        return wire.open_rows(wire.decode_header(head, len(frame)), seen)

    return {
        f"core decode {n}": timed(core, times),
        f"container decode {n}": timed(container, times),
    }


def codec_of(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Encode and decode of a batch: rows one by one, as a program gets them; None when the library
    is not there."""
    if name == "msgspec":
        packer, unpacker = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
        return lambda batch: packer.encode(as_rows(batch)), lambda data: as_array(
            unpacker.decode(data)
        )
    if name == "msgpack":
        return lambda batch: msgpack.packb(as_rows(batch)), lambda data: as_array(
            msgpack.unpackb(data)
        )
    if name == "pickle5":
        return lambda batch: pickle.dumps(list(batch), protocol=5), lambda data: np.stack(
            pickle.loads(data)
        )
    arrow = peer("pyarrow")
    return None if arrow is None else arrow_codec(arrow)


def arrow_codec(arrow: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    def encode(batch: Any) -> Any:
        if isinstance(batch, list):
            column = arrow.array(batch, arrow.string())
        else:
            column = arrow.FixedSizeListArray.from_arrays(
                arrow.array(batch.reshape(-1)), batch.shape[1]
            )
        record = arrow.record_batch([column], names=["x"])
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, record.schema) as writer:
            writer.write_batch(record)
        return sink.getvalue()

    def decode(data: Any) -> Any:
        column = arrow.ipc.open_stream(data).read_next_batch().column(0)
        return column.flatten().to_numpy() if hasattr(column, "flatten") else column.to_pylist()

    return encode, decode


def numbers(found: dict[str, Sample], missing: dict[str, str]) -> list[Row]:
    copy, goal = "memcpy into new memory", Goal("at_most", 1.2)
    name = f"codec, encode {IMAGES_NAME}"
    result = [
        row(
            f"{name}, engine",
            found["engine"],
            "us",
            copy,
            found["copy"],
            goal,
            bounded_by=STEP,
            note="one step of the engine, from rows in a lane to a frame for the socket",
        ),
        row(
            f"{name}, container",
            found["container"],
            "us",
            copy,
            found["copy"],
            goal,
            bounded_by="the interpreter",
        ),
    ]
    for name in FORMATS:
        anchor, more = (
            f"{name}, rows one by one",
            Goal("times_better", 10) if name == "pickle5" else None,
        )
        title = f"codec, encode + decode {IMAGES_NAME}, of {name}"
        if name in missing:
            result.append(absent(title, "us", missing[name], anchor, more))
        else:
            result.append(
                row(title, found["both"], "us", anchor, found[name], more, bounded_by=JOIN)
            )
    return result


def decoding(found: dict[str, Sample]) -> list[Row]:
    result = []
    for side in ("core", "container"):
        worst = max((found[f"{side} decode {n}"] for n in SIZES), key=lambda sample: sample.median)
        spread = ", ".join(f"{n} rows {found[f'{side} decode {n}'].median:.2f} us" for n in SIZES)
        words = (
            "Python calls: the two of the header and the rows, and the objects they make"
            if side == "core"
            else (
                "the interpreter: the container's codec is plain Python, so that any Python can"
                " install it"
            )
        )
        name = f"codec, decode at any size, {side}"
        result.append(
            row(name, worst, "us", goal=Goal("value_at_most", 1), note=spread, bounded_by=words)
        )
    return result


def alignment() -> Row:
    """Return what a model sees: the address of its batch, as a container of the SDK gets it."""
    with servers(("unix",), ()) as (running, _):
        server = running["unix"]
        server.deploy(
            "alignment", "bench.system.fixtures.noop:alignment", input="f32[3]", cache=False
        )
        off = [0.0]
        for n in (1, 7, 1000):
            future = server.model("alignment").predict_many(np.zeros((n, 3), np.float32))
            off += [float(value) for value in np.ravel(future.result())]
    note, received = "seen by a model, batches of 1, 7, 1000 rows", "how the container receives"
    name, goal = "codec, payload off a multiple of 64", Goal("value_at_most", 0)
    return row(name, max(off), "bytes", goal=goal, note=note, bounded_by=received)


def strings(found: dict[str, Sample], missing: dict[str, str]) -> list[Row]:
    """Measure the encoding of strings only, because the decoded types differ too much (list[str]
    here, bytes there)."""
    name, gather, goal = (
        "codec, encode 1000 strings of 100",
        "join, encode and lengths, in Python",
        Goal("at_most", 1.3),
    )
    result = [
        row(
            f"{name}, engine",
            found["engine texts"],
            "us",
            gather,
            found["gather"],
            goal,
            bounded_by=STEP,
        ),
        row(
            name,
            found["texts"],
            "us",
            gather,
            found["gather"],
            goal,
            "from a list[str]",
            "1000 Python strings: each is asked for its length and its bytes, and what is "
            "gathered is joined with its header",
        ),
    ]
    for name in FORMATS:
        title, anchor = f"codec, encode 1000 strings of 100, of {name}", f"{name}, list[str]"
        if name in missing:
            result.append(absent(title, "us", missing[name], anchor))
        else:
            result.append(row(title, found["texts"], "us", anchor, found[f"{name} texts"]))
    return result


def as_array(rows: list[bytes]) -> NDArray[Any]:
    return np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1)


def as_rows(batch: NDArray[Any] | list[str]) -> list[Any]:
    """Return a batch as separate rows, as a program has it before serialization."""
    return batch if isinstance(batch, list) else [one.tobytes() for one in batch]
