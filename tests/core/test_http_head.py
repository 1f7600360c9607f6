"""Heads of requests: what is read is what an obvious reader reads, and what is not plain in every
byte is not read at all."""

import random
import re

import pytest

from clipper.frontend.http.messages import KNOWN_HEADERS
from clipper_core.http.http_head import KNOWN, Plain, read_head

SEEDS = range(6)
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
LINE = re.compile(rb"(" + TOKEN + rb"):( *)([ -~]*?)( *)\r\n")
IGNORED = ("user-agent", "x-forwarded-for", "cookie", "content-type", "authorization", "a" * 40)
FOREIGN = (
    "transfer-encoding",
    "content-encoding",
    "expect",
    "upgrade",
    "traceparent",
    "tracestate",
    "clipper-deadline-ms",
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
ONCE = (b"host", b"content-length", b"x-request-id", b"inference-header-content-length")
PLAIN = {
    b"accept": (b"*/*", b"application/json", b"application/json, text/plain, */*"),
    b"connection": (b"keep-alive", b"Keep-Alive"),
}


def slow(text: bytes) -> Plain | bool:
    """By regular expressions; only of whole heads."""
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
            or (name in seen and name in ONCE)
            or value not in PLAIN.get(name, (value,))
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
