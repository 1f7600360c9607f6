"""Responses from bytes as they come: the same for every way to cut them."""

import random
from itertools import pairwise

import pytest

from clipper_client.http_wire import (
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    NotHttp,
    Response,
    ResponseReader,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nX-Request-Id: 7\r\n"
BODY = b'{"output": [' + b"1.5, " * 40 + b"2]}"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def chunks(body: bytes, *sizes: int) -> bytes:
    parts = []
    for size in sizes:
        part, body = body[:size], body[size:]
        parts.append(b"%x\r\n%s\r\n" % (len(part), part))
    return b"".join([*parts, b"%x;x=y\r\n%s\r\n" % (len(body), body), b"0\r\nTrailer: 1\r\n\r\n"])


WHOLE = {
    "length": HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "chunked": HEAD + CHUNKED + chunks(BODY, 1, 16, 100),
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 0\r\n\r\n",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
}


def read(pieces: list[bytes]) -> Response | None:
    reader = ResponseReader()
    found = None
    for piece in pieces:
        assert found is None, "it ended before its last byte"
        found = reader.feed(piece)
    return found


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE)
def test_a_response_is_the_same_however_it_is_cut(data: bytes) -> None:
    expected = read([data])
    assert expected is not None
    assert read([data[at : at + 1] for at in range(len(data))]) == expected
    draw = random.Random(7)
    for _ in range(50):
        cuts = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(4))})
        assert read([data[a:b] for a, b in pairwise(cuts)]) == expected


def test_members_of_a_response() -> None:
    found = read([WHOLE["length"]])
    assert found is not None
    assert (found.status, found.body, found.closes) == (200, BODY, False)
    assert found.headers["x-request-id"] == "7"
    chunked = read([WHOLE["chunked"]])
    assert chunked is not None
    assert chunked.body == BODY
    old = read([b"HTTP/1.0 503 X\r\nContent-Length: 0\r\nRetry-After: 3\r\n\r\n"])
    assert old is not None
    assert (old.closes, old.retry_after_s) == (True, 3.0)


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(HEAD + b"\r\nab") is None
    assert reader.feed(b"cd") is None
    found = reader.at_end()
    assert found is not None
    assert (found.body, found.closes) == (b"abcd", True)


@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_a_response_that_is_cut_off_is_none(kind: str) -> None:
    for end in range(len(WHOLE[kind])):
        reader = ResponseReader()
        assert reader.feed(WHOLE[kind][:end]) is None
        assert reader.at_end() is None


def test_only_a_response_counts_as_begun() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not reader.begun
    reader.feed(b"HTTP")
    assert reader.begun


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1e3\r\n\r\n",
        HEAD + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1),
        HEAD + b"Content-Length: 2\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + CHUNKED + b"zz\r\n",
        HEAD + CHUNKED + b"-1\r\n",
        HEAD + CHUNKED + b"%x\r\n" % (BODY_BYTES_MAX + 1),
        HEAD + CHUNKED + b"2\r\nabcd\r\n",
        HEAD + CHUNKED + b"0\r\n\r\nmore",
        HEAD + CHUNKED + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * HEAD_BYTES_MAX,
    ],
    ids=range(15),
)
def test_bytes_that_are_no_response_are_refused(data: bytes) -> None:
    with pytest.raises(NotHttp):
        ResponseReader().feed(data)
