"""Measures what a frame costs, each row beside an anchor: memcpy, gather, zlib, msgspec, msgpack,
pickle, python-lz4.

pytest bench/micro/bench_codec.py --benchmark-columns=min,median,iqr
"""

import pickle
import zlib
from typing import Any

import lz4.block
import msgpack
import msgspec
import numpy as np
import pytest

from clipper_core.wire.codec import (
    HEADER_BYTES,
    checksum,
    decode_header,
    decode_v1,
    encode_frame,
    encode_rows,
    encode_v1,
    open_rows,
)
from clipper_core.wire.lz4 import Search, decode_lz4, encode_lz4

PREDICT, REPLY = 4, 5
IMAGES = np.random.default_rng(1).random((256, 784)).astype("f4")
STRINGS = [(f"the quick brown fox jumps over the lazy dog {i} " * 3)[:100] for i in range(1000)]
UTF8 = [text.encode() for text in STRINGS]
TEXT = b"".join(UTF8)
NOISE = "".join(map(chr, np.random.default_rng(3).integers(33, 127, len(TEXT)))).encode()
MEGABYTE = np.random.default_rng(2).bytes(1 << 20)


def measure(benchmark: Any, run: Any, nbytes: int = 0) -> None:
    benchmark.pedantic(run, rounds=9, iterations=100, warmup_rounds=2)
    if benchmark.stats is not None and nbytes:
        benchmark.extra_info["gigabytes_per_s"] = round(nbytes / benchmark.stats.stats.min / 1e9, 2)


def test_header_encode(benchmark: Any) -> None:
    measure(benchmark, lambda: encode_frame(PREDICT, dtype=12, rows=3, shape=(4,), id=7))


def test_header_decode(benchmark: Any) -> None:
    head = encode_frame(PREDICT, dtype=12, rows=3, shape=(4,), id=7)
    measure(benchmark, lambda: decode_header(head))


def test_anchor_msgpack_header(benchmark: Any) -> None:
    head = msgpack.packb([PREDICT, 12, 1, 0, 3, 7, 4, 0, 0, 0, 96, 0, 0])
    measure(benchmark, lambda: msgpack.unpackb(head))


def test_open_256_images(benchmark: Any) -> None:
    frame = encode_rows(PREDICT, IMAGES)
    header, payload = decode_header(frame), frame[HEADER_BYTES:]
    measure(benchmark, lambda: open_rows(header, payload), IMAGES.nbytes)  # type: ignore[arg-type]


def test_encode_1000_strings(benchmark: Any) -> None:
    measure(benchmark, lambda: encode_rows(PREDICT, STRINGS), len(TEXT))


def test_encode_v1_1000_strings(benchmark: Any) -> None:
    measure(benchmark, lambda: encode_v1(7, STRINGS), len(TEXT))


def test_decode_v1_1000_strings(benchmark: Any) -> None:
    message = encode_v1(7, STRINGS)
    measure(benchmark, lambda: decode_v1(message), len(TEXT))


def test_encode_v1_1000_strings_quick(benchmark: Any) -> None:
    measure(benchmark, lambda: encode_v1(7, STRINGS, Search.QUICK), len(TEXT))


def test_encode_1000_strings_compressed_quick(benchmark: Any) -> None:
    measure(
        benchmark,
        lambda: encode_rows(PREDICT, STRINGS, compressed=True, search=Search.QUICK),
        len(TEXT),
    )


def test_anchor_gather_1000_strings(benchmark: Any) -> None:
    """Measure the least that a call costs: one copy of existing bytes, without lengths."""
    measure(benchmark, lambda: b"".join(UTF8), len(TEXT))


def test_anchor_encode_and_join_1000_strings(benchmark: Any) -> None:
    measure(benchmark, lambda: b"".join([text.encode() for text in STRINGS]), len(TEXT))


def test_anchor_msgspec_1000_strings(benchmark: Any) -> None:
    encoder = msgspec.msgpack.Encoder()
    measure(benchmark, lambda: encoder.encode(STRINGS), len(TEXT))


def test_anchor_msgpack_1000_strings(benchmark: Any) -> None:
    measure(benchmark, lambda: msgpack.packb(STRINGS), len(TEXT))


def test_anchor_pickle5_1000_strings(benchmark: Any) -> None:
    measure(benchmark, lambda: pickle.dumps(STRINGS, 5), len(TEXT))


def test_crc_of_a_megabyte(benchmark: Any) -> None:
    measure(benchmark, lambda: checksum(MEGABYTE), len(MEGABYTE))


def test_anchor_zlib_crc_of_a_megabyte(benchmark: Any) -> None:
    measure(benchmark, lambda: zlib.crc32(MEGABYTE), len(MEGABYTE))


def test_lz4_literals(benchmark: Any) -> None:
    measure(benchmark, lambda: encode_lz4(TEXT), len(TEXT))


@pytest.mark.parametrize("search", [Search.THOROUGH, Search.QUICK])
@pytest.mark.parametrize("text", [TEXT, NOISE], ids=["words", "noise"])
def test_lz4_encode(benchmark: Any, text: bytes, search: Search) -> None:
    measure(benchmark, lambda: encode_lz4(text, search), len(text))


@pytest.mark.parametrize("acceleration", [1, 8])
@pytest.mark.parametrize("text", [TEXT, NOISE], ids=["words", "noise"])
def test_anchor_lz4_block(benchmark: Any, text: bytes, acceleration: int) -> None:
    options = {"mode": "fast", "acceleration": acceleration, "store_size": False}
    measure(benchmark, lambda: lz4.block.compress(text, **options), len(text))


def test_anchor_memcpy(benchmark: Any) -> None:
    measure(benchmark, lambda: bytearray(TEXT), len(TEXT))


def test_lz4_decode(benchmark: Any) -> None:
    block = lz4.block.compress(TEXT, store_size=False)
    measure(benchmark, lambda: decode_lz4(block, len(TEXT)), len(TEXT))


def test_anchor_lz4_decompress(benchmark: Any) -> None:
    block = lz4.block.compress(TEXT, store_size=False)
    measure(benchmark, lambda: lz4.block.decompress(block, uncompressed_size=len(TEXT)), len(TEXT))
