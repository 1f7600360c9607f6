"""HPACK: the examples of RFC 7541, random blocks beside the library `hpack`, and blocks that are
malformed."""

import random

import hpack
import pytest
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable

from clipper_core.http.hpack import HpackDecoder, HpackError, hpack_encode

SEEDS = range(4)

# RFC 7541, appendices C.3 to C.6: requests and responses of one connection, without and with
# Huffman codes
AUTHORITY = (b":authority", b"www.example.com")
REQUEST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")]
REQUESTS = [
    [*REQUEST, AUTHORITY],
    [*REQUEST, AUTHORITY, (b"cache-control", b"no-cache")],
    [
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        AUTHORITY,
        (b"custom-key", b"custom-value"),
    ],
]
SEQUENCES = {
    "C.3": (
        ["828684410f7777772e6578616d706c652e636f6d", "828684be58086e6f2d6361636865",
         "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565"],
        REQUESTS,
        [57, 110, 164],
    ),
    "C.4": (
        ["828684418cf1e3c2e5f23a6ba0ab90f4ff", "828684be5886a8eb10649cbf",
         "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"],
        REQUESTS,
        [57, 110, 164],
    ),
}  # fmt: skip
DATE = b"Mon, 21 Oct 2013 20:13:2%d GMT"
RESPONSES = [
    [
        (b":status", status),
        (b"cache-control", b"private"),
        (b"date", DATE % second),
        (b"location", b"https://www.example.com"),
    ]
    for status, second in ((b"302", 1), (b"307", 1), (b"200", 1), (b"200", 2))
]
COOKIE = b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"


def read(decoder: HpackDecoder, block: str) -> list[tuple[bytes, bytes]]:
    return decoder.decode(bytes.fromhex(block.replace(" ", "")))


@pytest.mark.parametrize("name", SEQUENCES)
def test_requests_of_the_rfc(name: str) -> None:
    decoder = HpackDecoder()
    for block, fields, size in zip(*SEQUENCES[name], strict=True):
        assert read(decoder, block) == fields
        assert decoder.table_bytes == size


def test_fields_of_the_rfc() -> None:
    literal = "400a637573746f6d2d6b65790d637573746f6d2d686561646572"
    decoder = HpackDecoder()
    assert read(decoder, literal) == [(b"custom-key", b"custom-header")]  # C.2.1
    assert decoder.table_bytes == 55
    assert read(HpackDecoder(), "040c2f73616d706c652f70617468") == [(b":path", b"/sample/path")]
    assert read(HpackDecoder(), "100870617373776f726406736563726574") == [(b"password", b"secret")]
    assert read(HpackDecoder(), "82") == [(b":method", b"GET")]


def test_responses_of_the_rfc_evict_entries() -> None:
    """Appendix C.5 has a table of 256 bytes, which both sides agree on by an update of its size."""
    decoder = HpackDecoder()
    blocks = [
        "3fe101 4803333032 580770726976617465 611d4d6f6e2c203231204f637420323031332032303a31333a"
        "323120474d54 6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
        "4803333037c1c0bf",
        "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f"
        "3d4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076"
        "657273696f6e3d31",
    ]
    assert read(decoder, blocks[0]) == RESPONSES[0]
    assert decoder.table_bytes == 222
    assert read(decoder, blocks[1]) == RESPONSES[1]
    assert decoder.table_bytes == 222
    assert read(decoder, blocks[2]) == [
        *RESPONSES[3],
        (b"content-encoding", b"gzip"),
        (b"set-cookie", COOKIE),
    ]
    assert decoder.table_bytes == 215


def test_every_symbol_of_the_huffman_code() -> None:
    for symbol in range(256):
        bits = f"{REQUEST_CODES[symbol]:0{REQUEST_CODES_LENGTH[symbol]}b}"
        bits += "1" * (-len(bits) % 8)
        text = int(bits, 2).to_bytes(len(bits) // 8, "big")
        block = b"\x00\x01x" + bytes([0x80 | len(text)]) + text
        assert HpackDecoder().decode(block) == [(b"x", bytes([symbol]))]


def test_static_fields() -> None:
    decoder = HpackDecoder()
    for i, field in enumerate(HeaderTable.STATIC_TABLE):
        assert decoder.decode(bytes([0x80 | (i + 1)])) == [field]


def some_fields(rng: random.Random) -> list[tuple[bytes, bytes]]:
    names = [b":path", b"accept", b"x-key", b"cookie", b"user-agent", b"n" * rng.randrange(1, 90)]
    fields = [
        (rng.choice(names), rng.randbytes(rng.choice((0, 1, 7, 60, 300, 2000))))
        for _ in range(rng.randrange(9))
    ]
    return [*fields, (b"last", b"%d" % rng.randrange(50))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_blocks_are_read_as_the_library_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    decoder = HpackDecoder()
    encoder = hpack.Encoder()
    for _ in range(60):
        if rng.random() < 0.05:
            encoder.header_table_size = rng.choice((0, 100, 1000, 4096))
        fields = some_fields(rng)
        sent = [
            hpack.NeverIndexedHeaderTuple(*field) if rng.random() < 0.2 else field
            for field in fields
        ]
        block = encoder.encode(sent, huffman=rng.random() < 0.5)
        assert decoder.decode(block) == fields
        assert decoder.table_bytes == encoder.header_table._current_size


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bytes_are_read_alike_or_refused(seed: int) -> None:
    """The library takes a few blocks that this one refuses: longer integers, a third update."""
    rng, both = random.Random(seed), 0
    for _ in range(250):
        encoder = hpack.Encoder()
        block = bytearray(encoder.encode(some_fields(rng), huffman=rng.random() < 0.5))
        for _ in range(rng.randrange(3)):
            block[rng.randrange(len(block))] = rng.randrange(256)
        theirs = hpack.Decoder(max_header_list_size=1 << 30)
        try:
            ours = HpackDecoder().decode(bytes(block))
        except HpackError:
            continue
        both += 1
        expected = theirs.decode(bytes(block), raw=True)
        assert ours == [(bytes(name), bytes(value)) for name, value in expected]
    assert both > 40


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_written_is_read(seed: int) -> None:
    rng = random.Random(seed)
    theirs = hpack.Decoder()
    ours = HpackDecoder()
    for _ in range(60):
        fields = [(b":status", b"%d" % rng.choice((200, 404, 500, 418, 302))), *some_fields(rng)]
        block = hpack_encode(fields)
        read_back = theirs.decode(block, raw=True)
        assert [(bytes(name), bytes(value)) for name, value in read_back] == fields
        assert ours.decode(block) == fields
    assert ours.table_bytes == 0


WRONG = {
    "index 0": "80",
    "an index beyond the tables": "be",
    "a literal with a name beyond the tables": "7e0161",
    "an integer without end": "ffffffffff",
    "an integer of zero groups": "ff8080808000",
    "a cut integer": "ff80",
    "a text longer than the block": "0001610561",
    "a cut text": "00016105",
    "no value": "000161",
    "no name": "00",
    "a table above 4096 bytes": "3fe21f",
    "an update after a field": "8220",
    "three updates": "202020",
    "padding of eight ones": "00016182" + "1fff",
    "padding of zeros": "0001618118",
    "EOS": "00016184ffffffff",
}


@pytest.mark.parametrize("what", WRONG)
def test_malformed_blocks_are_refused(what: str) -> None:
    with pytest.raises(HpackError, match="malformed"):
        read(HpackDecoder(), WRONG[what])


def test_a_field_larger_than_the_table_empties_it() -> None:
    decoder = HpackDecoder()
    decoder.decode(b"\x40\x01a\x01b")
    assert decoder.table_bytes == 34
    large = b"\x40\x01a\x7f\x80\x20" + b"x" * (127 + 4096)
    assert decoder.decode(large) == [(b"a", b"x" * 4223)]
    assert decoder.table_bytes == 0
    with pytest.raises(HpackError):
        decoder.decode(b"\xbe")


def test_a_name_of_an_entry_that_its_own_insertion_evicts() -> None:
    decoder = HpackDecoder()
    decoder.decode(b"\x40\x04name\x7f\x81\x1e" + b"x" * (127 + 1 + 128 * 30))
    assert decoder.table_bytes == 32 + 4 + 3968
    assert decoder.decode(b"\x7e\x7f\x01" + b"y" * 128) == [(b"name", b"y" * 128)]
    assert decoder.decode(b"\xbe") == [(b"name", b"y" * 128)]
