"""LZ4 blocks: they are decoded to the same bytes here, by the stock library and by a simple
decoder; hostile blocks are refused."""

import random
from typing import Any

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.runtime.status import Status, error_for
from clipper_core.wire.lz4 import Search, bound_lz4, decode_lz4, encode_lz4


def refused(*statuses: Status) -> Any:
    """Expect an error of one of these statuses, by default BAD_FRAME."""
    statuses = statuses or (Status.BAD_FRAME,)
    classes = tuple({type(error_for(status, "")) for status in statuses})
    return pytest.raises(
        classes, check=lambda error: getattr(error, "status", statuses[0]) in statuses
    )


def lz4_twin(block: bytes) -> tuple[bytes, bool]:
    """Decode a block byte by byte and check that every match lies inside. Raises IndexError,
    ValueError."""
    out, at, good = bytearray(), 0, True

    def length(nibble: int) -> int:
        nonlocal at
        total = nibble
        while nibble == 15:
            at += 1
            total += block[at - 1]
            if block[at - 1] != 255:
                break
        return total

    while True:
        token, at = block[at], at + 1
        size = length(token >> 4)
        if size > len(block) - at:
            raise ValueError("literals")
        out += block[at : at + size]
        at += size
        if at == len(block):
            return bytes(out), good
        distance, at = block[at] | block[at + 1] << 8, at + 2
        size = length(token & 15) + 4
        good = good and 0 < distance <= len(out)
        for _ in range(size):
            out.append(out[-distance] if good else 0)


SEARCHES = (Search.LITERALS, Search.THOROUGH, 2, Search.QUICK, 64, 65536)
TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=8).flatmap(
    lambda words: st.lists(st.sampled_from(words), max_size=200).map(
        lambda some: "".join(some).encode()
    )
)
RUNS = st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 400)), max_size=8).map(
    lambda runs: b"".join(piece * times for piece, times in runs)
)


def reads_back(data: bytes, search: int) -> bytes:
    """Compress `data` and check that every reader restores it; return the block."""
    block = encode_lz4(data, search)
    assert len(block) <= bound_lz4(len(data))
    assert lz4.block.decompress(block, uncompressed_size=len(data)) == data
    assert decode_lz4(block, len(data)) == data
    return block


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=150)
@given(data=st.binary(max_size=600) | TEXTS | RUNS)
def test_what_is_written_is_read(search: int, data: bytes) -> None:
    block = reads_back(data, search)
    if len(data) < 4096:
        assert lz4_twin(block) == (data, True)


def ends_as_the_format_wants(block: bytes, size: int) -> bool:
    """Check that the last five bytes are literals and no match begins among the last twelve."""
    at = made = 0
    while True:
        literals, match = block[at] >> 4, block[at] & 15
        at += 1
        for which in (0, 1):
            length = match if which else literals
            while length >= 15 and (more := block[at]) is not None:
                length, at = length + more, at + 1
                if more != 255:
                    break
            if which:
                if made > size - 12:
                    return False
                made += length + 4
            else:
                made, at = made + length, at + length
                if at == len(block):
                    return length >= 5 or size < 5 or made == length
                at += 2


@pytest.mark.parametrize("search", [Search.THOROUGH, Search.QUICK])
def test_every_length_around_the_ends_of_the_format(search: int) -> None:
    """A reader that copies eight bytes at a time relies on how a block ends."""
    for size in range(600):
        for data in (
            b"a" * size,
            (b"abcdefghijklm" * 60)[:size],
            bytes(i * i & 255 for i in range(size)),
        ):
            assert ends_as_the_format_wants(reads_back(data, search), size)


def test_matches_of_every_length_code() -> None:
    """Literals and matches have lengths around 15, 15 + 254, 15 + 255 and so on, where the encoding
    of lengths changes."""
    noise = random.Random(1).randbytes(900)
    for literals in (0, 14, 15, 16, 269, 270, 271, 525, 780):
        for match in (4, 18, 19, 20, 273, 274, 275, 529, 5000):
            reads_back(noise[:literals] + b"<" + b"=" * match + noise[-16:], Search.THOROUGH)


def test_matches_reach_65535_bytes_and_no_further() -> None:
    word = b"a word that is found again"
    for distance in (100, 65534, 65535, 65536, 65537, 131_072, 200_000):
        block = reads_back(
            word + b"=" * (distance - len(word)) + word + b"the end, in literals", Search.THOROUGH
        )
        assert block.count(word) == (1 if distance <= 65535 else 2), distance


def test_noise_and_text_that_compresses() -> None:
    noise = random.Random(3).randbytes(100_000)
    words = "".join(
        random.Random(4).choices(["cat ", "dog ", "mouse ", "naïve ", "猫 "], k=20_000)
    ).encode()
    for search in (Search.THOROUGH, Search.QUICK):
        assert len(reads_back(noise, search)) <= bound_lz4(len(noise))
        assert len(reads_back(bytes(300_000), search)) < 1300
    thorough, quick, literals = (
        len(reads_back(words, search))
        for search in (Search.THOROUGH, Search.QUICK, Search.LITERALS)
    )
    assert thorough < quick < literals == bound_lz4(len(words))
    assert thorough < 1.1 * len(lz4.block.compress(words, store_size=False))


@given(st.integers(0, 0x7E000000))
def test_the_bound_is_the_size_of_literals(n: int) -> None:
    lengths = 0 if n < 15 else 1 + (n - 15) // 255
    assert bound_lz4(n) == 1 + lengths + n
    if n < 4096:
        assert len(encode_lz4(bytes(n))) == bound_lz4(n)


def test_more_than_a_block_holds_is_refused() -> None:
    nothing = bytes(0x7E000001)  # pages that nobody has touched: none is read
    for search in SEARCHES:
        with refused(Status.TOO_LARGE):
            encode_lz4(nothing, search)
    with refused(Status.BAD_INPUT):
        encode_lz4(b"", 65537)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 400)), max_size=8))
def test_lz4_blocks_of_lz4_are_read(runs: list[tuple[bytes, int]]) -> None:
    data = b"".join(piece * times for piece, times in runs)
    block = lz4.block.compress(data, store_size=False)
    assert decode_lz4(block, len(data)) == data
    for size in (len(data) - 1, len(data) + 1):
        if size >= 0:
            with refused():
                decode_lz4(block, size)
    for end in range(len(block)):
        with refused():
            decode_lz4(block[:end], len(data))


@pytest.mark.parametrize("seed", range(4))
def test_hostile_lz4_blocks(seed: int) -> None:
    """Any bytes decode as by the reference, or are rejected where it rejects them or gives another
    size."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(5000):
        tokens = (0x00, 0x10, 0x1F, 0x20, 0x40, 0xF0, 0xFF, 1, 2, 255, rng.randrange(256))
        block = bytes(rng.choice(tokens) for _ in range(rng.randrange(24)))
        try:
            wanted, good = lz4_twin(block)
        except (IndexError, ValueError):
            with refused():
                decode_lz4(block, rng.randrange(255 * len(block) + 1))
            continue
        if not good:
            with refused():
                decode_lz4(block, len(wanted))
            continue
        accepted += 1
        assert decode_lz4(block, len(wanted)) == wanted
        with refused():
            decode_lz4(block, len(wanted) + rng.choice((1, 4, 255)))
    assert accepted > 100


def test_a_bomb_reserves_nothing() -> None:
    for size in (2**20, 2**30, 0x7E000000):
        with refused():
            decode_lz4(b"\x1fa\x01\x00" + b"\xff" * 100 + b"\x00\x00", size)
    with refused(Status.TOO_LARGE):
        decode_lz4(b"\x00", 2**63)
