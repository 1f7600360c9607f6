"""Layouts of records against clipper.schema, which packs and opens the same records in Python: what
a layout takes is the same bytes, what it opens the same values, and what Python refuses it leaves.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.schema import InvalidTensor, Tensors
from clipper_core.runtime.status import StatusError
from clipper_core.wire.record import RecordLayout
from tests.unit.test_schema import assert_same, rows_of, schemas


def is_simple(tensors: Tensors) -> bool:
    return not any(spec.is_text and spec.shape for spec in tensors.specs)


@settings(deadline=None, max_examples=200)
@given(schemas(), st.data())
def test_a_row_is_packed_and_opened_as_in_python(tensors: Tensors, data: st.DataObject) -> None:
    layout = RecordLayout(tensors.specs)
    row = {spec.name: rows_of(data.draw, spec) for spec in tensors.specs}
    plain = {
        spec.name: value.item() if spec.is_text and not spec.shape else value
        for spec, value in zip(tensors.specs, row.values(), strict=True)
    }
    record, wanted = layout.pack(plain), bytes(tensors.pack(row))
    if not is_simple(tensors):
        assert record is None
        assert layout.unpack(wanted) is None
        return
    assert record == wanted
    opened = layout.unpack(wanted)
    assert opened is not None
    slow = tensors.unpack(wanted)
    for spec in tensors.specs:
        assert_same(opened[spec.name], row[spec.name], spec)
        assert type(opened[spec.name]) is type(slow[spec.name])
        assert spec.is_text or not spec.shape or not opened[spec.name].flags.writeable
    del wanted
    assert_same(opened["t0"], row["t0"], tensors.specs[0])  # a view keeps its record


SCALARS = st.one_of(
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from([0, 127, 128, -128, -129, 255, 256, 65535, 65536, 2**31, 2**32, 2**63, 2**64]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.sampled_from(["\ud800", b"\0", b"ab", bytearray(b"x"), [1], (1.5,), {}, 1j]),
    st.sampled_from(
        [np.float32(1.5), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True), np.str_("a")]
    ),
    st.sampled_from([np.zeros(()), np.arange(2.0), np.arange(4)[::2], np.ones((1, 2), ">f8")]),
)


@settings(deadline=None, max_examples=500)
@given(schemas(), st.data(), st.booleans())
def test_what_does_not_fit_is_left_to_python(
    tensors: Tensors, data: st.DataObject, finite: bool
) -> None:
    tensors = Tensors(tensors.specs, finite)
    layout = RecordLayout(tensors.specs, finite)
    row = {spec.name: data.draw(SCALARS) for spec in tensors.specs}
    if data.draw(st.integers(0, 9)) == 0:
        row["more"] = 1
    record = layout.pack(row)
    try:
        with np.errstate(all="ignore"):
            wanted = bytes(tensors.pack(row))
    except (InvalidTensor, OverflowError):
        assert record is None
    else:
        assert record in (None, wanted)


@settings(deadline=None, max_examples=300)
@given(schemas(), st.data())
def test_damage_is_seen_as_in_python(tensors: Tensors, data: st.DataObject) -> None:
    layout = RecordLayout(tensors.specs)
    row = {spec.name: rows_of(data.draw, spec) for spec in tensors.specs}
    raw = bytearray(tensors.pack(row))
    for _ in range(data.draw(st.integers(0, 3)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(
            st.sampled_from((0, 1, 2, 8, 127, 255))
        )
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    for record in (bytes(raw), bytes(cut), bytes(raw) + bytes(8)):
        opened = layout.unpack(record)
        try:
            wanted = tensors.unpack(record)
        except InvalidTensor:
            assert opened is None
            continue
        assert opened is None or {*opened} == {*wanted}
        assert opened is not None or not is_simple(tensors)
        for spec in tensors.specs if opened is not None else ():
            assert_same(opened[spec.name], np.asarray(wanted[spec.name], spec.numpy), spec)


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"])
def test_whole_numbers_at_their_bounds(dtype: str) -> None:
    tensors = Tensors.parse({"x": dtype})
    layout, bounds = RecordLayout(tensors.specs), np.iinfo(tensors.specs[0].numpy)
    for number in (int(bounds.min), int(bounds.max) if dtype != "u64" else 2**63 - 1):
        assert layout.pack({"x": number}) == bytes(tensors.pack({"x": number}))
    for number in (int(bounds.min) - 1, int(bounds.max) + 1, 2**70, 1.0, True):
        assert layout.pack({"x": number}) is None


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_to_python(dtype: str, bad: float) -> None:
    specs = Tensors.parse({"x": f"{dtype}[3]", "y": dtype}).specs
    layout, kind = RecordLayout(specs, finite=True), specs[0].numpy
    largest = np.finfo(kind).max
    good = {"x": np.array([0, -largest, 1], kind), "y": kind.type(largest)}
    assert layout.pack(good) == Tensors(specs).pack(good).tobytes()  # type: ignore[union-attr]
    assert layout.pack({**good, "x": np.array([0, 1, bad], kind)}) is None
    assert layout.pack({**good, "y": kind.type(bad)}) is None


def test_only_a_dict_of_exactly_these_tensors_is_packed() -> None:
    layout = RecordLayout(Tensors.parse({"a": "f64", "b": "str"}).specs)
    assert layout.names == ("a", "b")
    right = {"b": "x", "a": 1}
    assert layout.pack(right) == Tensors.parse({"a": "f64", "b": "str"}).pack(right)
    wrong: list[Any] = [{"a": 1}, {"a": 1, "c": "x"}, {**right, "c": 1}, [1, "x"], None, {}]
    assert [layout.pack(values) for values in wrong] == [None] * len(wrong)


def test_sizes_beyond_memory_are_damage() -> None:
    layout = RecordLayout(Tensors.parse({"a": "f64[*,*,*]"}).specs)
    for sizes in ((0, 2**32 - 1, 2**32 - 1), (2**32 - 1,) * 3):
        assert layout.unpack(np.array([*sizes, 0], "<u4").tobytes()) is None
    assert layout.unpack(np.array([0, 1, 2, 0], "<u4").tobytes())["a"].shape == (0, 1, 2)  # type: ignore[index]


def test_too_many_tensors_are_refused() -> None:
    specs = Tensors.parse({f"t{i}": "f64" for i in range(64)}).specs
    assert len(RecordLayout(specs).names) == 64
    for bad in ((), (*specs, specs[0])):
        with pytest.raises(StatusError, match="1 to 64 are possible"):
            RecordLayout(bad)
