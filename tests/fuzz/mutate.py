"""Mutations of a valid input: bytes as a damaged, hostile or unlucky sender might send."""

import random
import struct

INPUT_BYTES_MAX = 4096
_BOUNDS = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
_WORDS = (
    b"\r\n",
    b"\n",
    b"\0",
    b" ",
    b":",
    b"0",
    b"-",
    b"e",
    b".",
    b"\xff",
    b"\r\n\r\n",
    b"chunked",
    b"Content-Length: 3\r\n",
    b"1e99",
    b"18446744073709551616",
)


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Return a copy of `data` with one to six changes; pieces may be taken from the inputs
    `others`."""
    out = bytearray(data)
    for _ in range(1 + min(rng.getrandbits(3), 5)):
        _change(rng, out, others)
    return bytes(out[:INPUT_BYTES_MAX])


def _change(rng: random.Random, out: bytearray, others: list[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    kind = rng.randrange(9)
    if kind == 0 and at < len(out):
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(out):
        out[at] = rng.randrange(256)
    elif kind == 2:  # a number at a bound, of 1, 2, 4 or 8 bytes
        size = rng.choice((1, 2, 4, 8))
        number = (rng.choice(_BOUNDS) + rng.randrange(-1, 2)) & ((1 << 8 * size) - 1)
        out[at : at + size] = struct.pack("<Q", number)[:size]
    elif kind == 3:
        del out[at : at + rng.randrange(1, 9)]
    elif kind == 4:
        out[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 5:  # a piece comes twice
        out[at:at] = out[at : at + rng.randrange(1, 65)]
    elif kind == 6:
        del out[at:]
    elif kind == 7:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        out[at:at] = other[start : start + rng.randrange(1, 65)]
    else:
        out[at:at] = rng.choice(_WORDS)
