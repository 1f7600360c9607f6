"""Heads of requests: they are read as a simple reader reads them, and are not read at all if one
byte is unusual."""

import random
import re

import httptools
import pytest

from clipper.frontend.http.messages import KNOWN_HEADERS, REPEATED
from clipper_core.http.http_head import (
    KNOWN,
    METHODS,
    ChunkedBody,
    HttpSyntaxError,
    MessageHead,
    Plain,
    read_head,
    read_request,
    read_response,
)

SEEDS = range(6)
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
LINE = re.compile(rb"(" + TOKEN + rb"):( *)([ -~]*?)( *)\r\n")
IGNORED = (
    *("user-agent", "x-forwarded-for", "cookie", "content-type", "authorization", "a" * 40),
    *("traceparent", "clipper-deadline-ms", "accept"),
)
FOREIGN = (
    "transfer-encoding",
    "content-encoding",
    "expect",
    "upgrade",
    "tracestate",
    "te",
    "trailer",
    "http2-settings",
    "last-event-id",
    "proxy-connection",
    "if-none-match",
    "origin",
    "mm-model-id",
    "mm-vmodel-id",
)
PLAIN = {
    b"connection": (b"keep-alive", b"Keep-Alive"),
}


def slow(text: bytes) -> Plain | bool:
    """Read a whole head by regular expressions."""
    first = re.match(rb"POST (/[!-~]*) HTTP/1\.1\r\n", text)
    if not first:
        return False
    at, seen = first.end(), dict[bytes, bytes]()
    while not text.startswith(b"\r\n", at):
        line = LINE.match(text, at)
        if not line:
            return False
        name, value, at = line[1].lower(), line[3], line.end()
        if (
            name.decode() in FOREIGN
            or (name in seen and name in KNOWN)
            or value not in PLAIN.get(name, (value,))
            # text/e... may ask for an answer in parts
            or (name == b"accept" and re.match(rb"t.{4}e", value, re.IGNORECASE | re.DOTALL))
        ):
            return False
        seen[name] = value
    length, json_length = (
        seen.get(b"content-length", b""),
        seen.get(b"inference-header-content-length"),
    )
    plain = (
        seen.get(b"host")
        and re.fullmatch(rb"\d{1,10}", length)
        and (json_length is None or re.fullmatch(rb"\d{1,10}", json_length))
        and re.fullmatch(rb"[!-~]{1,128}", seen.get(b"x-request-id", b"x"))
    )
    if not plain:
        return False
    id = seen.get(b"x-request-id", b"")
    return Plain(
        first[1], id, at + 2, int(length), None if json_length is None else int(json_length)
    )


def some_head(rng: random.Random) -> bytes:
    lines = [
        ("Host", rng.choice(["a", "a:80"])),
        ("Content-Length", rng.choice(["0", "12", "00000003", "9999999999"])),
    ]
    for _ in range(rng.randrange(4)):
        lines.append(
            rng.choice(
                [
                    ("X-Request-Id", "mine-7"),
                    ("Connection", rng.choice(["keep-alive", "Keep-Alive", "close"])),
                    ("Accept", "*/*"),
                    ("Accept", "text/event-stream"),
                    ("Inference-Header-Content-Length", "7"),
                    (rng.choice(IGNORED), "some thing"),
                    ("Authorization", "Bearer x"),
                    ("Content-Type", "application/json"),
                    (rng.choice(FOREIGN), "x"),
                    ("Host", "b"),
                    ("Content-Length", "3"),
                    ("X-Request-Id", "two words"),
                ]
            )
        )
    rng.shuffle(lines)
    blank = " " * rng.randrange(3)
    text = "".join(
        f"{rng.choice([name, name.upper(), name.lower()])}:{blank}{value}{blank}\r\n"
        for name, value in lines
    )
    first = (
        f"{rng.choice(['POST'] * 9 + ['GET'])} /api/{'a' * rng.randrange(9)}/predict"
        f" HTTP/1.{rng.choice('11110')}"
    )
    return f"{first}\r\n{text}\r\n".encode()


@pytest.mark.parametrize("seed", SEEDS)
def test_heads_are_read_as_an_obvious_reader_reads_them(seed: int) -> None:
    rng, plain = random.Random(seed), 0
    for _ in range(2000):
        head = some_head(rng)
        assert read_head(head + b'{"x"') == slow(head), head
        plain += isinstance(slow(head), Plain)
    assert plain > 200


@pytest.mark.parametrize("seed", SEEDS)
def test_one_byte_changed_is_read_alike_or_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    marks = b"\r\n\t\0 :,;/.0aZ\x7f\x80\xff-+"
    for _ in range(3000):
        head = bytearray(
            b"POST /api/app/predict HTTP/1.1\r\nHost: a\r\nX-Request-Id: b\r\nContent-Length:"
            b" 12\r\n\r\n"
        )
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(head))
            if rng.random() < 0.5:
                head[at] = rng.choice(marks)
            elif rng.random() < 0.5:
                del head[at]
            else:
                head.insert(at, rng.choice(marks))
        found = read_head(bytes(head))
        if isinstance(found, Plain):
            assert found == slow(bytes(head)), bytes(head)
        elif found is False:
            assert not isinstance(slow(bytes(head)), Plain), bytes(head)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_of_a_plain_head_is_not_finished(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        head = some_head(rng)
        if isinstance(slow(head), Plain):
            assert all(read_head(head[:n]) is True for n in range(len(head)))


def test_every_header_that_means_something_to_python_is_known() -> None:
    assert KNOWN >= KNOWN_HEADERS


@pytest.mark.parametrize("name", FOREIGN)
def test_what_means_more_is_not_plain(name: str) -> None:
    head = f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n{name.title()}: x\r\n\r\n".encode()
    assert read_head(head) is False


# -- all of HTTP/1.1


class Theirs:
    """The head and the body of one request as llhttp reads them."""

    def __init__(self, text: bytes) -> None:
        self.target, self.hosts, self.body = b"", 0, b""
        self.has_head = self.is_complete = self.keep_alive = False
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(text)
            self.refused = False
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.refused = not self.is_complete

    def on_url(self, url: bytes) -> None:
        self.target += b"" if self.has_head else url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.hosts += not self.has_head and name.lower() == b"host"

    def on_headers_complete(self) -> None:
        self.has_head, self.keep_alive = True, self._parser.should_keep_alive()
        self.method, self.minor = self._parser.get_method(), self._parser.get_http_version()

    def on_body(self, body: bytes) -> None:
        self.body += b"" if self.is_complete else body

    def on_message_complete(self) -> None:
        self.is_complete = True


def request_of(text: bytes) -> MessageHead | str | None:
    try:
        return read_request(text, 0, KNOWN_HEADERS, REPEATED)
    except HttpSyntaxError as error:
        return str(error)


def changed(rng: random.Random, text: bytes) -> bytes:
    marks, head = b"\r\n\t\0 :,;/.0aZ\x7f\x80\xff-+", bytearray(text)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(head))
        if rng.random() < 0.5:
            head[at] = rng.choice(marks)
        elif rng.random() < 0.5:
            del head[at]
        else:
            head.insert(at, rng.choice(marks))
    return bytes(head)


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_are_read_as_another_parser_reads_them(seed: int) -> None:
    rng, read = random.Random(seed), 0
    for _ in range(3000):
        text = changed(rng, some_head(rng))
        mine, theirs = request_of(text), Theirs(text)
        if not isinstance(mine, MessageHead):
            continue
        if mine.method.encode() not in METHODS:  # the other parser knows no other methods
            continue
        if theirs.refused:  # it refuses less only of what connection.py refuses
            assert b"transfer-encoding" in mine.headers or b"upgrade" in text.lower(), text
            continue
        read += 1
        assert (mine.method.encode(), mine.target) == (theirs.method, theirs.target), text
        assert (mine.hosts, f"1.{mine.minor}") == (theirs.hosts, theirs.minor), text
        assert theirs.keep_alive or not mine.keep_alive, text  # two headers: the one that closes
    assert read > 200


def test_a_request_is_searched_for_within_the_text() -> None:
    for at in (-1, 5):
        with pytest.raises(ValueError, match="at"):
            read_request(b"GET ", at, KNOWN_HEADERS, REPEATED)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_of_a_request_is_not_complete(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        head = some_head(rng)
        mine = request_of(head + b"rest")
        if isinstance(mine, MessageHead):
            assert mine.end == len(head)
            assert all(request_of(head[:n]) is None for n in range(len(head)))
            later = read_request(b"before" + head, 6, KNOWN_HEADERS, REPEATED)
            assert later is not None
            assert (later.end, later.headers) == (6 + len(head), mine.headers)


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_are_read_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(500):
        parts = [rng.randbytes(rng.randrange(1, 40)) for _ in range(rng.randrange(5))]
        text = b"".join(
            b"%x%s\r\n%s\r\n" % (len(part), rng.choice((b"", b";a=b")), part) for part in parts
        )
        text += b"0\r\n" + rng.choice((b"", b"X: y\r\n")) + b"\r\n"
        text = changed(rng, text) if rng.random() < 0.5 else text
        theirs = Theirs(head + text)
        chunks, body, at = ChunkedBody(), b"", 0
        try:
            while at < len(text) and not chunks.done:
                cut = rng.randrange(at + 1, len(text) + 1)
                part, at = chunks.feed(text[:cut], at)
                body += part
        except HttpSyntaxError:
            assert not theirs.is_complete, text
            continue
        assert not theirs.refused or not chunks.done or b";" in text, text
        assert (chunks.done, body) == (theirs.is_complete, theirs.body), text
        assert chunks.done or chunks.overhead <= len(text)


def test_responses() -> None:
    text = b"HTTP/1.1 503 Not now\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
    head = read_response(text)
    assert head is not None
    assert (head.status, head.length, head.keep_alive, text[head.end :]) == (503, 3, False, b"abc")
    assert all(read_response(text[:n]) is None for n in range(head.end))
    for wrong in (
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n X: y\r\n\r\n",
    ):
        with pytest.raises(HttpSyntaxError):
            read_response(wrong)
