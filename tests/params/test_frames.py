"""Messages of shards, and the partition of rows: what travels, and to whom."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.errors import (
    FrameError,
    InvalidInput,
    ShardAway,
    StalePush,
    UnknownModel,
    UnknownTable,
)
from clipper.params.partition import shard_of_name
from clipper.params.tables import checked
from clipper.spec.table import TableSpec
from clipper_container.params.frames import (
    HEAD_BYTES,
    Head,
    MessageKind,
    RefusalCode,
    failed,
    packed,
    read_head,
    refusal,
    unpacked,
)
from clipper_container.params.rows import shards_of_ids, split_by_shard
from clipper_core.runtime.status import Status

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60)


@given(IDS, st.integers(1, 9))
def test_ids_are_split_by_shard_and_their_order_is_restored(ids: list[int], shards: int) -> None:
    each = np.array(ids, np.int64)
    back = np.zeros_like(each)
    seen = []
    for shard, places in split_by_shard(each, shards):
        assert (np.diff(places) > 0).all()
        assert all(int(i) % shards == shard for i in each[places])
        back[places] = each[places]
        seen += places.tolist()
    assert (back == each).all()
    assert sorted(seen) == list(range(len(ids)))


def test_negative_and_huge_ids_have_a_shard() -> None:
    assert shards_of_ids(np.array([-1, -(2**63), 2**63 - 1, 0], np.int64), 3).tolist() == [
        2,
        (-(2**63)) % 3,
        (2**63 - 1) % 3,
        0,
    ]


def test_a_name_has_the_same_shard_in_every_process() -> None:
    names = ["dense/kernel", "dense/bias", "embedding", "w", ""]
    assert [shard_of_name(name, 7) for name in names] == [6, 6, 0, 4, 5]


@given(
    st.integers(0, 5),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.floats(width=32, allow_nan=False),
)
def test_a_frame_header_is_decoded_as_it_was_encoded(
    flags: int, rows: int, id: int, scale: float
) -> None:
    head = Head(MessageKind.PUSH, 1, flags, 3, rows, id, 4, 5, 6, 7, scale, 16)
    assert len(head.packed()) == HEAD_BYTES
    assert read_head(head.packed()) == head


@pytest.mark.parametrize("at", [0, 4, 5])
def test_an_invalid_frame_header_is_refused(at: int) -> None:
    data = bytearray(Head(MessageKind.CALL).packed())
    data[at] ^= 0x55
    with pytest.raises(FrameError, match="another version"):
        read_head(data)


def test_arrays_are_encoded_in_calls() -> None:
    fields = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.int64(7), {"c": np.zeros((0, 4), np.int64)}],
        "d": "x",
    }
    body = packed(fields)
    assert len(body) % 8 == 0
    back = unpacked(body)
    assert (back["a"] == fields["a"]).all()
    assert back["b"][1]["c"].shape == (0, 4)
    assert (back["b"][0], back["d"]) == (7, "x")


@pytest.mark.parametrize(
    "fields",
    [
        {"__array__": "object", "shape": [1], "data": b"12345678"},
        {"__array__": "float32", "shape": [3], "data": b"12345678"},
        {"__array__": "float32", "shape": [-1], "data": b"12345678"},
        {"__array__": "float32", "shape": "x", "data": b"12345678"},
        {"__array__": "float32", "shape": [1] * 9, "data": b"1234"},
        {"__array__": ["float32"], "shape": [1], "data": b"1234"},
    ],
)
def test_a_call_with_an_invalid_array_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FrameError, match="cannot be read"):
        unpacked(packed({"call": "x", "a": fields}))


@pytest.mark.parametrize("body", [b"", b"\xc1" * 8, b"\x93\x01", packed({})[:0] + b"\x01" * 8])
def test_a_call_that_is_not_a_map_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        unpacked(body)


def test_refusal_codes_of_the_core_equal_its_statuses() -> None:
    assert {one.name: one.value for one in RefusalCode if one < 100} == {
        one.name: Status[one.name] for one in RefusalCode if one < 100
    }


def test_refusals_are_errors_with_a_next_step() -> None:
    def of(code: int, about: int = 5) -> Exception:
        return refusal(
            Head(MessageKind.REFUSED, rows=code),
            about.to_bytes(8, "little", signed=True),
            "shard 1",
        )

    kinds = {
        Status.BAD_INPUT: InvalidInput,
        RefusalCode.NOT_READY: ShardAway,
        RefusalCode.TOO_STALE: StalePush,
        Status.UNKNOWN: UnknownTable,
    }
    for code, kind in kinds.items():
        error = of(code)
        assert type(error) is kind
        assert str(error).startswith("shard 1: ")
    assert "id -3 holds NaN" in str(of(Status.BAD_INPUT, -3))
    back = refusal(
        Head(MessageKind.REFUSED, rows=RefusalCode.CALL_FAILED),
        failed(UnknownModel("no model 'x'.", hint="Look.")),
        "shard 1",
    )
    assert (type(back), back.message, back.hint) == (UnknownModel, "no model 'x'.", "Look.")
    other = refusal(
        Head(MessageKind.REFUSED, rows=RefusalCode.CALL_FAILED), failed(KeyError("a")), "shard 1"
    )
    assert "KeyError" in str(other)


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec("Bad Name", 3),
        TableSpec("t", 0),
        TableSpec("t", 1 << 20),
        TableSpec("t", 3, optimizer="adgrad"),
        TableSpec("t", 3, optimizer_settings={"rat": 1.0}),
        TableSpec("t", 3, initializer="none"),
        TableSpec("t", 3, admit_after=0),
    ],
)
def test_an_invalid_table_specification_is_refused(spec: TableSpec) -> None:
    with pytest.raises(InvalidInput):
        checked(spec)
