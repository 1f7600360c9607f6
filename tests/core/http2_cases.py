"""Cases of frames that a client of HTTP/2 may, and may not, send: RFC 9113, and RFC 7541 for
fields. Each has the bytes after a preface and empty SETTINGS, and what the server does then."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
TABLE_SIZE, ENABLE_PUSH, STREAMS, FIRST_WINDOW, FRAME_SIZE, LIST_SIZE = range(1, 7)
PROTOCOL, FLOW, CLOSED, SIZE, COMPRESSION, CALM = 1, 3, 5, 6, 9, 11
WINDOW_MAX = (1 << 31) - 1

# fields of the static table (RFC 7541, appendix A), and one that is a literal
GET, POST, ROOT, HTTP = b"\x82", b"\x83", b"\x84", b"\x86"
HERE = b"\x01\x04here"  # :authority, not indexed
ASKS = GET + HTTP + ROOT + HERE
SENDS = POST + HTTP + ROOT + HERE


class Case(NamedTuple):
    """A row. section: of RFC 9113, or of RFC 7541 with `7541-` before it. code: of the error; None:
    there is none. stream: that ends by it; 0: the connection does. text: that the connection ends
    with. at_once: it holds only if the server has answered nothing in between."""

    section: str
    what: str
    data: bytes
    code: int | None = None
    stream: int = 0
    text: str = ""
    at_once: bool = False

    @property
    def name(self) -> str:
        """The name of a test."""
        return f"{self.section}: {self.what}"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = struct.pack(">I", len(payload))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def asks(stream: int, block: bytes = ASKS) -> bytes:
    """Return a request without a body."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)


def sends(stream: int, block: bytes = SENDS) -> bytes:
    """Return the head of a request whose body follows."""
    return frame(HEADERS, END_HEADERS, stream, block)


def literal(name: bytes, value: bytes, first: bytes = b"\0") -> bytes:
    """Return a field with a name of its own; both have less than 127 bytes."""
    return first + bytes([len(name)]) + name + bytes([len(value)]) + value


def setting(name: int, value: int) -> bytes:
    """Return SETTINGS with one entry."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


def window(stream: int, n: int) -> bytes:
    """Return WINDOW_UPDATE."""
    return frame(WINDOW, 0, stream, struct.pack(">I", n))


def reset(stream: int) -> bytes:
    """Return RST_STREAM."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", 8))


LARGE = "a frame has more than 16384 bytes"
UNBEGUN = "a frame of a stream that has not begun"
ENDED = "a frame of a stream that has ended"
ORDER = "a frame that does not follow the one before it"
PADDING = "more padding than the frame has bytes"
NO_PADDING = "a padded frame without its length of padding"
BLOCK = "a block of header fields is malformed"
PING_SIZE = "PING has eight bytes"
RESET_SIZE = "RST_STREAM has four bytes"
WINDOW_SIZE = "WINDOW_UPDATE has four bytes"
PRIORITY_SIZE = "PRIORITY has five bytes"
CUT = "SETTINGS that are cut off"
ABOVE = "a window above 2^31 - 1"
BLOCK_BYTES = "a block of header fields has too many bytes or frames"

# -- frames

SIZES = (
    *(Case("4.2", f"a frame of kind {kind} with 16385 bytes", sends(1) + frame(
        kind, 0, 1, bytes(16385)), SIZE, text=LARGE) for kind in (0, 1, 2, 3, 6, 7, 8, 99)),
    Case("4.2", "SETTINGS with 16386 bytes", frame(SETTINGS, 0, 0, bytes(16386)), SIZE, text=LARGE),
    Case("4.2", "DATA of 16384 bytes", sends(1) + frame(DATA, 0, 1, bytes(16384))),
    *(Case("6.7", f"PING of {n} bytes", frame(PING, 0, 0, bytes(n)), SIZE, text=PING_SIZE)
      for n in (0, 7, 9)),
    *(Case("6.7", f"PING with ACK of {n} bytes", frame(PING, ACK, 0, bytes(n)), SIZE,
           text=PING_SIZE) for n in (0, 9)),
    *(Case("6.4", f"RST_STREAM of {n} bytes", sends(1) + frame(RST_STREAM, 0, 1, bytes(n)), SIZE,
           text=RESET_SIZE) for n in (0, 3, 5)),
    *(Case("6.9", f"WINDOW_UPDATE of {n} bytes", frame(WINDOW, 0, 0, bytes(n)), SIZE,
           text=WINDOW_SIZE) for n in (0, 3, 5)),
    *(Case("6.3", f"PRIORITY of {n} bytes", frame(PRIORITY, 0, 1, bytes(n)), SIZE,
           text=PRIORITY_SIZE) for n in (0, 4, 6)),
    *(Case("6.5", f"SETTINGS of {n} bytes", frame(SETTINGS, 0, 0, bytes(n)), SIZE, text=CUT)
      for n in (1, 5, 7)),
    Case("6.5", "SETTINGS with ACK and an entry", frame(SETTINGS, ACK, 0, bytes(6)), SIZE,
         text="an acknowledgement of SETTINGS with content"),
    *(Case("6.8", f"GOAWAY of {n} bytes", frame(GOAWAY, 0, 0, bytes(n)), SIZE,
           text="GOAWAY has at least eight bytes") for n in (0, 7)),
    Case("6.2", "HEADERS with half a priority",
         frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, bytes(4)), SIZE,
         text="HEADERS with a priority that is cut off"),
)  # fmt: skip

STREAM_NUMBERS = (
    Case("6.1", "DATA without a stream", frame(DATA), PROTOCOL, text="DATA without a stream"),
    Case("6.2", "HEADERS without a stream", asks(0), PROTOCOL, text="HEADERS without a stream"),
    Case("6.3", "PRIORITY without a stream", frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL,
         text="PRIORITY without a stream"),
    Case("6.4", "RST_STREAM without a stream", reset(0), PROTOCOL,
         text="RST_STREAM without a stream"),
    Case("6.5", "SETTINGS of a stream", frame(SETTINGS, 0, 1), PROTOCOL,
         text="SETTINGS of a stream"),
    Case("6.5", "an acknowledgement of a stream", frame(SETTINGS, ACK, 1), PROTOCOL,
         text="SETTINGS of a stream"),
    Case("6.7", "PING of a stream", frame(PING, 0, 1, bytes(8)), PROTOCOL,
         text="PING of a stream"),
    Case("6.8", "GOAWAY of a stream", frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL,
         text="GOAWAY of a stream"),
    Case("6.10", "CONTINUATION without a stream", frame(HEADERS, 0, 1, GET) + frame(
        CONTINUATION, END_HEADERS, 0), PROTOCOL, text="CONTINUATION of another stream"),
    *(Case("5.1.1", f"HEADERS of stream {stream}", asks(stream), PROTOCOL,
           text="a client begins streams with odd numbers") for stream in (2, 100)),
    Case("5.1.1", "HEADERS of a smaller number", asks(5) + asks(3), CLOSED, text=ENDED),
    Case("5.1.1", "DATA of a number that was left out", asks(5) + frame(DATA, 0, 3, b"a"), CLOSED,
         text=ENDED),
    Case("5.1.1", "numbers that are left out", asks(5) + asks(15)),
    Case("4.1", "a reserved bit before the number", frame(
        PING, 0, 1 << 31, bytes(8)) + window(1 << 31, 1)),
    Case("6.6", "PUSH_PROMISE", sends(1) + frame(PUSH, END_HEADERS, 1, bytes(4)), PROTOCOL,
         text="a client cannot push"),
)  # fmt: skip

IN_IDLE = (
    Case("5.1", "DATA of an idle stream", frame(DATA, 0, 1, b"a"), PROTOCOL, text=UNBEGUN),
    Case("5.1", "empty DATA that ends an idle stream", frame(DATA, END_STREAM, 1), PROTOCOL,
         text=UNBEGUN),
    Case("5.1", "RST_STREAM of an idle stream", reset(1), PROTOCOL, text=UNBEGUN),
    Case("5.1", "WINDOW_UPDATE of an idle stream", window(1, 1), PROTOCOL, text=UNBEGUN),
    Case("5.1", "CONTINUATION of an idle stream", frame(CONTINUATION, END_HEADERS, 1, GET),
         PROTOCOL, text=ORDER),
    Case("5.1", "PRIORITY of an idle stream", frame(PRIORITY, 0, 7, bytes(5))),
    Case("5.1", "RST_STREAM of an even stream", reset(2), PROTOCOL, text=UNBEGUN),
    Case("5.1", "WINDOW_UPDATE of an even stream", window(2, 1), PROTOCOL, text=UNBEGUN),
)  # fmt: skip

IN_HALF_CLOSED = (
    Case("5.1", "DATA after the end", asks(1) + frame(DATA, 0, 1, b"a"), CLOSED, 1, at_once=True),
    Case("5.1", "the end after the end", asks(1) + frame(DATA, END_STREAM, 1), CLOSED, 1,
         at_once=True),
    Case("5.1", "HEADERS after the end", asks(1) + asks(1), CLOSED, 1, at_once=True),
    Case("5.1", "DATA after DATA that ends", sends(1) + frame(DATA, END_STREAM, 1, b"a") + frame(
        DATA, 0, 1, b"b"), CLOSED, 1, at_once=True),
    Case("5.1", "DATA after trailers", sends(1) + asks(1, literal(b"a", b"b")) + frame(
        DATA, 0, 1, b"b"), CLOSED, 1, at_once=True),
    Case("5.1", "WINDOW_UPDATE after the end", asks(1) + window(1, 1)),
    Case("5.1", "PRIORITY after the end", asks(1) + frame(PRIORITY, 0, 1, bytes(5))),
    Case("5.1", "RST_STREAM after the end", asks(1) + reset(1)),
)  # fmt: skip

IN_CLOSED = (
    Case("5.1", "DATA after RST_STREAM", sends(1) + reset(1) + frame(DATA, 0, 1, b"a"), CLOSED,
         text=ENDED),
    Case("5.1", "HEADERS after RST_STREAM", sends(1) + reset(1) + asks(1), CLOSED, text=ENDED),
    Case("5.1", "WINDOW_UPDATE after RST_STREAM", sends(1) + reset(1) + window(1, 1)),
    Case("5.1", "RST_STREAM after RST_STREAM", sends(1) + reset(1) + reset(1)),
    Case("5.1", "PRIORITY after RST_STREAM", sends(1) + reset(1) + frame(
        PRIORITY, 0, 1, bytes(5))),
    Case("5.1", "DATA after our reset", sends(1) + window(1, 0) + frame(DATA, 0, 1, b"a"),
         PROTOCOL, 1),
    Case("5.1", "HEADERS after our reset", sends(1) + window(1, 0) + asks(1), PROTOCOL, 1),
    Case("5.1", "WINDOW_UPDATE after our reset", sends(1) + window(1, 0) + window(1, 0), PROTOCOL,
         1),
    Case("5.1", "RST_STREAM after our reset", sends(1) + window(1, 0) + reset(1), PROTOCOL, 1),
    Case("5.1", "a table that changes after our reset", sends(1) + window(1, 0) + asks(
        1, literal(b"x", b"y", b"\x40")) + asks(3, ASKS + b"\xbe"), PROTOCOL, 1),
)  # fmt: skip

PADS = (
    Case("6.1", "DATA padded without a length", sends(1) + frame(DATA, PADDED, 1), SIZE,
         text=NO_PADDING),
    Case("6.2", "HEADERS padded without a length", frame(HEADERS, PADDED | END_HEADERS, 1), SIZE,
         text=NO_PADDING),
    Case("6.1", "DATA with more padding than bytes", sends(1) + frame(DATA, PADDED, 1, b"\2a"),
         PROTOCOL, text=PADDING),
    Case("6.1", "DATA with padding of all bytes and one", sends(1) + frame(
        DATA, PADDED, 1, b"\1"), PROTOCOL, text=PADDING),
    Case("6.2", "HEADERS with more padding than bytes", frame(
        HEADERS, PADDED | END_HEADERS, 1, b"\x09" + GET), PROTOCOL, text=PADDING),
    Case("6.1", "DATA that is all padding", sends(1) + frame(DATA, PADDED, 1, b"\3\0\0\0")),
    Case("6.1", "padding of 255 bytes", sends(1) + frame(
        DATA, PADDED, 1, b"\xffabc" + bytes(255))),
    Case("6.2", "HEADERS with padding", frame(
        HEADERS, PADDED | END_HEADERS | END_STREAM, 1, b"\5" + ASKS + bytes(5))),
    Case("6.2", "HEADERS with a priority", frame(
        HEADERS, WITH_PRIORITY | END_HEADERS | END_STREAM, 1, bytes(5) + ASKS)),
    Case("6.2", "HEADERS with padding and a priority", frame(
        HEADERS, PADDED | WITH_PRIORITY | END_HEADERS | END_STREAM, 1,
        b"\2" + bytes(5) + ASKS + bytes(2))),
    Case("5.3.1", "a stream that depends on itself", frame(
        HEADERS, WITH_PRIORITY | END_HEADERS | END_STREAM, 1, b"\0\0\0\1\0" + ASKS)),
)  # fmt: skip

OPEN_BLOCK = frame(HEADERS, END_STREAM, 1, ASKS[:3])
BLOCKS = (
    Case("6.10", "a block in three frames", OPEN_BLOCK + frame(CONTINUATION, 0, 1, ASKS[3:6])
         + frame(CONTINUATION, END_HEADERS, 1, ASKS[6:])),
    Case("6.10", "an empty CONTINUATION", OPEN_BLOCK + frame(CONTINUATION, 0, 1) + frame(
        CONTINUATION, END_HEADERS, 1, ASKS[3:])),
    Case("6.10", "CONTINUATION after the end of the block", sends(1) + frame(
        CONTINUATION, END_HEADERS, 1), PROTOCOL, text=ORDER),
    Case("6.10", "CONTINUATION after DATA", sends(1) + frame(DATA, 0, 1, b"a") + frame(
        CONTINUATION, END_HEADERS, 1), PROTOCOL, text=ORDER),
    Case("6.10", "CONTINUATION of another stream", OPEN_BLOCK + frame(
        CONTINUATION, END_HEADERS, 3), PROTOCOL, text="CONTINUATION of another stream"),
    *(Case("6.10", f"a frame of kind {kind} in a block", OPEN_BLOCK + frame(
        kind, 0, stream, bytes(n)), PROTOCOL, text=ORDER) for kind, stream, n in (
            (0, 1, 1), (1, 3, 1), (2, 1, 5), (3, 1, 4), (4, 0, 0), (6, 0, 8), (7, 0, 8), (8, 0, 4),
            (99, 1, 0))),
    Case("6.10", "twelve empty frames of a block", OPEN_BLOCK + frame(CONTINUATION, 0, 1) * 12,
         CALM, text=BLOCK_BYTES),
    Case("6.10", "a block of three full frames", frame(HEADERS, 0, 1, bytes(16384)) + frame(
        CONTINUATION, 0, 1, bytes(16384)) * 2, CALM, text=BLOCK_BYTES),
)  # fmt: skip

# -- settings and windows

VALUES = (
    *(Case("6.5.2", f"ENABLE_PUSH of {value}", setting(ENABLE_PUSH, value)) for value in (0, 1)),
    *(Case("6.5.2", f"ENABLE_PUSH of {value}", setting(ENABLE_PUSH, value), PROTOCOL,
           text="SETTINGS_ENABLE_PUSH is neither 0 nor 1") for value in (2, (1 << 32) - 1)),
    *(Case("6.5.2", f"INITIAL_WINDOW_SIZE of {value}", setting(FIRST_WINDOW, value))
      for value in (0, WINDOW_MAX)),
    *(Case("6.5.2", f"INITIAL_WINDOW_SIZE of {value}", setting(FIRST_WINDOW, value), FLOW,
           text="SETTINGS_INITIAL_WINDOW_SIZE above 2^31 - 1")
      for value in (1 << 31, (1 << 32) - 1)),
    *(Case("6.5.2", f"MAX_FRAME_SIZE of {value}", setting(FRAME_SIZE, value))
      for value in (1 << 14, (1 << 24) - 1)),
    *(Case("6.5.2", f"MAX_FRAME_SIZE of {value}", setting(FRAME_SIZE, value), PROTOCOL,
           text="SETTINGS_MAX_FRAME_SIZE is not 2^14 to 2^24 - 1")
      for value in (0, (1 << 14) - 1, 1 << 24)),
    *(Case("6.5.2", f"setting {name} of {value}", setting(name, value)) for name, value in (
        (TABLE_SIZE, 0), (TABLE_SIZE, 1 << 31), (STREAMS, 0), (LIST_SIZE, 0), (0, 1), (77, 5),
        (65535, 0))),
    Case("6.5.3", "an acknowledgement", frame(SETTINGS, ACK)),
    Case("6.5", "the same setting twice", frame(SETTINGS, 0, 0, struct.pack(
        ">HIHI", FIRST_WINDOW, 0, FIRST_WINDOW, 70_000))),
    Case("6.5", "32 entries", frame(SETTINGS, 0, 0, struct.pack(">HI", 77, 1) * 32)),
    Case("6.5", "33 entries", frame(SETTINGS, 0, 0, struct.pack(">HI", 77, 1) * 33), CALM,
         text="too many entries of SETTINGS"),
)  # fmt: skip

WINDOWS = (
    Case("6.9", "WINDOW_UPDATE by 0 of the connection", window(0, 0), PROTOCOL,
         text="WINDOW_UPDATE by 0"),
    Case("6.9", "WINDOW_UPDATE by 0 of a stream", sends(1) + window(1, 0), PROTOCOL, 1),
    Case("6.9", "WINDOW_UPDATE by 0 with the reserved bit", window(0, 1 << 31), PROTOCOL,
         text="WINDOW_UPDATE by 0"),
    Case("6.9.1", "the largest window of the connection", window(0, WINDOW_MAX - 65535)),
    Case("6.9.1", "a larger window of the connection", window(0, WINDOW_MAX - 65534), FLOW,
         text=ABOVE),
    Case("6.9.1", "a larger window of the connection in two steps", window(
        0, WINDOW_MAX - 65535) + window(0, 1), FLOW, text=ABOVE),
    Case("6.9.1", "the largest window of a stream", sends(1) + window(1, WINDOW_MAX - 65535)),
    Case("6.9.1", "a larger window of a stream", sends(1) + window(1, WINDOW_MAX - 65534), FLOW,
         1),
    Case("6.9.2", "a larger window of a stream by SETTINGS", sends(1) + window(
        1, WINDOW_MAX - 65535) + setting(FIRST_WINDOW, 65536), FLOW, text=ABOVE),
    Case("6.9.2", "a window below 0 by SETTINGS", setting(FIRST_WINDOW, 70_000) + sends(1)
         + setting(FIRST_WINDOW, 0)),
    Case("6.9.1", "DATA of more bytes than the stream's window", sends(1) + frame(
        DATA, 0, 1, bytes(16384)) * 17, FLOW, 1, at_once=True),
)  # fmt: skip

OTHERS = (
    Case("5.5", "a frame of an unknown kind", frame(99, 255, 0, b"abc")),
    Case("5.5", "a frame of an unknown kind on a stream", sends(1) + frame(99, 255, 1, b"abc")),
    Case("5.5", "PRIORITY_UPDATE", frame(0x10, 0, 0, b"\0\0\0\1u=1")),
    Case("4.1", "flags of PING that are not known", frame(PING, 0xFE, 0, bytes(8))),
    Case("4.1", "flags of WINDOW_UPDATE", frame(WINDOW, 0xFF, 0, b"\0\0\0\1")),
    Case("4.1", "flags of RST_STREAM", sends(1) + frame(RST_STREAM, 0xFF, 1, bytes(4))),
    Case("4.1", "flags of SETTINGS that are not known", frame(SETTINGS, 0xFE)),
    Case("4.1", "flags of PRIORITY", frame(PRIORITY, 0xFF, 1, bytes(5))),
    Case("6.7", "PING that answers nothing", frame(PING, ACK, 0, bytes(8))),
    Case("7", "RST_STREAM with an unknown code", sends(1) + frame(
        RST_STREAM, 0, 1, b"\xff\xff\xff\xff")),
)  # fmt: skip

# -- blocks of fields


def of_block(what: str, block: bytes) -> Case:
    """Return a case of a block that nobody can decode."""
    return Case("7541-" + what.split(" ")[0], what.partition(" ")[2], asks(1, block), COMPRESSION,
                text=BLOCK)  # fmt: skip


def readable(what: str, block: bytes, then: bytes = b"") -> Case:
    """Return a case of a block that is sound. then: frames after it."""
    return Case("7541-" + what.split(" ")[0], what.partition(" ")[2], asks(1, block) + then)


COMPRESSED = (
    of_block("6.1 index 0", b"\x80"),
    of_block("2.3.3 an index above both tables", ASKS + b"\xbe"),
    of_block("2.3.3 a large index", ASKS + b"\xff\x80\x80\x01"),
    of_block("2.3.3 the name of an index above both tables", ASKS + b"\x7e\x01a"),
    of_block("2.3.3 such a name, not indexed", ASKS + b"\x0f\x2f\x01a"),
    of_block("5.1 an integer that is cut off", ASKS + b"\xff"),
    of_block("5.1 an integer that goes on and is cut off", ASKS + b"\xff\x80\x80"),
    of_block("5.1 an integer above 2^32", ASKS + b"\xff\xff\xff\xff\xff\xff\x0f"),
    of_block("5.1 an integer of many zeros", ASKS + b"\xff" + b"\x80" * 40 + b"\x01"),
    of_block("5.2 no value", ASKS + b"\0\x01a"),
    of_block("5.2 no name", ASKS + b"\0"),
    of_block("5.2 a name that is cut off", ASKS + b"\0\x05a"),
    of_block("5.2 a value that is cut off", ASKS + b"\0\x01a\x05b"),
    of_block("5.2 a value of 2^28 bytes", ASKS + b"\0\x01a\x7f\x80\x80\x80\x80\x01b"),
    of_block("5.2 Huffman code that ends by EOS", ASKS + b"\0\x01a\x84\xff\xff\xff\xff"),
    of_block("5.2 Huffman code with padding of zeros", ASKS + b"\0\x01a\x81\x18"),
    of_block("5.2 Huffman code with eight bits of padding", ASKS + b"\0\x01a\x82\x1f\xff"),
    of_block("6.3 a table above its limit", b"\x3f\xe2\x1f" + ASKS),
    of_block("4.2 a change of the table after a field", GET + b"\x20" + ASKS[1:]),
    of_block("4.2 a change of the table at the end", ASKS + b"\x20"),
    of_block("4.2 three changes of the table", b"\x20\x20\x20" + ASKS),
    of_block("6.3 a change that is cut off", b"\x3f"),
    of_block("4.3 an entry after the table was emptied", literal(
        b"x", b"y", b"\x40") + ASKS + b"\xbf"),
    readable("6.2.1 a field that is added", ASKS + literal(b"x", b"y", b"\x40"), asks(
        3, ASKS + b"\xbe")),
    readable("6.2.2 a field that is not indexed", ASKS + literal(b"x", b"y", b"\0")),
    readable("6.2.3 a field that is never indexed", ASKS + literal(b"x", b"y", b"\x10")),
    readable("6.3 the largest table", b"\x3f\xe1\x1f" + ASKS),
    readable("6.3 no table", b"\x20" + ASKS),
    readable("4.2 two changes of the table", b"\x20\x3f\xe1\x1f" + ASKS),
    readable("4.4 a field larger than the table", b"\x20" + ASKS + literal(b"x", b"y", b"\x40")),
    readable("5.2 Huffman code", ASKS + b"\0\x01a\x81\x1f"),
    readable("5.2 an empty value", ASKS + b"\0\x01a\0"),
    readable("5.1 an integer with a zero that it does not need", ASKS + b"\x0f\x00\x01a"),
    Case("7541-4.4", "an index of an entry that was too large", asks(
        1, b"\x3f\x01" + ASKS + literal(b"x", b"y", b"\x40")) + asks(3, ASKS + b"\xbe"),
        COMPRESSION, text=BLOCK),
    Case("7541-4.3", "an index after the table was emptied", asks(
        1, ASKS + literal(b"x", b"y", b"\x40")) + asks(3, b"\x20" + ASKS + b"\xbe"), COMPRESSION,
        text=BLOCK),
    Case("7541-2.3.2", "an entry that others have replaced", asks(
        1, ASKS + literal(b"x", b"y", b"\x40")) + asks(3, b"\x3f\x03" + ASKS + literal(
            b"z", b"v", b"\x40")) + asks(5, ASKS + b"\xbf"), COMPRESSION, text=BLOCK),
)  # fmt: skip

# -- requests


def malformed(what: str, block: bytes) -> Case:
    """Return a case of a request that is malformed."""
    return Case("8." + what.split(" ")[0], what.partition(" ")[2], asks(1, block), PROTOCOL, 1)


def accepted(what: str, block: bytes) -> Case:
    """Return a case of a request that is not."""
    return Case("8." + what.split(" ")[0], what.partition(" ")[2], asks(1, block))


REQUESTS = (
    malformed("3.1 no fields", b""),
    malformed("3.1 no method", HTTP + ROOT + HERE),
    malformed("3.1 no scheme", GET + ROOT + HERE),
    malformed("3.1 no path", GET + HTTP + HERE),
    malformed("3.1 an empty path", GET + HTTP + b"\x04\0" + HERE),
    malformed("3.1 a path without a slash", GET + HTTP + b"\x04\x01a" + HERE),
    malformed("3.1 an empty method", b"\x02\0" + HTTP + ROOT + HERE),
    malformed("3.1 a method twice", GET + ASKS),
    malformed("3.1 a path twice", ROOT + ASKS),
    malformed("3.1 a scheme twice", HTTP + ASKS),
    malformed("3.1 an authority twice", HERE + ASKS),
    malformed("3 an unknown pseudo field", literal(b":colour", b"red") + ASKS),
    malformed("3 a pseudo field of responses", b"\x88" + ASKS),
    malformed("3 a pseudo field after another field", GET + literal(b"a", b"b") + ASKS[1:]),
    malformed("3.1 a host that is another", ASKS + literal(b"host", b"there")),
    malformed("5 CONNECT with a path", b"\x02\x07CONNECT" + ROOT + HERE),
    malformed("5 CONNECT with a scheme", b"\x02\x07CONNECT" + HTTP + HERE),
    malformed("5 CONNECT without an authority", b"\x02\x07CONNECT"),
    *(malformed(f"2.1 byte {byte} in a name", ASKS + literal(b"a" + bytes([byte]) + b"b", b"c"))
      for byte in (0, 9, 10, 13, 32, 58, 65, 90, 127, 128, 255)),
    malformed("2.1 an empty name", ASKS + literal(b"", b"c")),
    *(malformed(f"2.1 byte {byte} in a value", ASKS + literal(b"a", b"b" + bytes([byte]) + b"c"))
      for byte in (0, 10, 13)),
    *(malformed(f"2.1 byte {byte} {where} a value", ASKS + literal(b"a", value))
      for byte, where, value in ((32, "before", b" b"), (9, "before", b"\tb"), (32, "after", b"b "),
                                 (9, "after", b"b\t"), (32, "instead of", b" "))),
    *(malformed(f"2.2 {name.decode()}", ASKS + literal(name, value)) for name, value in (
        (b"connection", b"close"), (b"connection", b"keep-alive"), (b"keep-alive", b"1"),
        (b"proxy-connection", b"close"), (b"transfer-encoding", b"chunked"), (b"upgrade", b"h2c"),
        (b"te", b"gzip"), (b"te", b"trailers, gzip"), (b"te", b""))),
    *(malformed(f"1.1 content-length of {value!r}", SENDS + literal(b"content-length", value))
      for value in (b"1", b"+0", b"-1", b"", b"0x0", b"1,1")),
    malformed("1.1 two lengths", SENDS + literal(b"content-length", b"0") * 2),
    accepted("2.2 te: trailers", ASKS + literal(b"te", b"trailers")),
    accepted("1.1 content-length of 0", SENDS + literal(b"content-length", b"0")),
    accepted("2.1 bytes above ASCII in a value", ASKS + literal(b"a", b"\x80\xff")),
    accepted("2.1 a tab in a value", ASKS + literal(b"a", b"b\tc")),
    accepted("2.3 two cookies", ASKS + literal(b"cookie", b"a=b") + literal(b"cookie", b"c=d")),
    accepted("3.1 a host instead of an authority", GET + HTTP + ROOT + literal(b"host", b"here")),
    accepted("3.1 the same host twice", ASKS + literal(b"host", b"here")),
    accepted("3.1 pseudo fields in another order", HERE + ROOT + HTTP + GET),
    accepted("3.1 another scheme", GET + b"\x06\x03foo" + ROOT + HERE),
    accepted("3.1 OPTIONS of the server", b"\x02\x07OPTIONS" + HTTP + b"\x04\x01*" + HERE),
)  # fmt: skip

LENGTH_3 = SENDS + literal(b"content-length", b"3")
BODIES = (
    Case("8.1.1", "a body of another length", sends(1, LENGTH_3) + frame(
        DATA, END_STREAM, 1, b"ab"), PROTOCOL, 1),
    Case("8.1.1", "a body that is longer", sends(1, LENGTH_3) + frame(DATA, 0, 1, b"abcd"),
         PROTOCOL, 1),
    Case("8.1.1", "no body of its length", sends(1, LENGTH_3) + frame(DATA, END_STREAM, 1),
         PROTOCOL, 1),
    Case("8.1.1", "a body of its length in two frames, with padding", sends(1, LENGTH_3) + frame(
        DATA, PADDED, 1, b"\2ab\0\0") + frame(DATA, END_STREAM, 1, b"c")),
    Case("8.1", "trailers", sends(1) + frame(DATA, 0, 1, b"a") + asks(1, literal(b"a", b"b"))),
    Case("8.1", "trailers that do not end the stream", sends(1) + sends(1, literal(b"a", b"b")),
         PROTOCOL, 1),
    Case("8.1", "a pseudo field in trailers", sends(1) + asks(1, ROOT), PROTOCOL, 1),
    Case("8.1", "a capital letter in trailers", sends(1) + asks(1, literal(b"A", b"b")), PROTOCOL,
         1),
    Case("8.1", "connection in trailers", sends(1) + asks(1, literal(b"connection", b"a")),
         PROTOCOL, 1),
    Case("8.1", "trailers before the body's length", sends(1, LENGTH_3) + frame(
        DATA, 0, 1, b"ab") + asks(1, literal(b"a", b"b")), PROTOCOL, 1),
    Case("8.1", "a body in frames of one byte", sends(1) + frame(DATA, 0, 1, b"a") * 50 + frame(
        DATA, END_STREAM, 1)),
    Case("8.1.1", "other streams go on", asks(1, b"\x82") + sends(3) + frame(DATA, 0, 3, b"a"),
         PROTOCOL, 1),
)  # fmt: skip

# what comes instead of the preface and SETTINGS
STARTS = (
    Case("3.4", "another preface", PREFACE[:-1] + b"x", PROTOCOL,
         text="the connection does not begin as HTTP/2 does"),
    *(Case("3.4", f"a frame of kind {kind} before SETTINGS", PREFACE + frame(
        kind, 0, stream, bytes(n)), PROTOCOL, text="SETTINGS come first") for kind, stream, n in (
            (0, 1, 1), (1, 1, 1), (2, 1, 5), (3, 1, 4), (6, 0, 8), (7, 0, 8), (8, 0, 4), (9, 1, 0),
            (99, 0, 0))),
    Case("3.4", "an acknowledgement before SETTINGS", PREFACE + frame(SETTINGS, ACK), PROTOCOL,
         text="SETTINGS come first"),
    Case("3.4", "the preface twice", PREFACE + frame(SETTINGS) + PREFACE, SIZE, text=LARGE),
    Case("3.4", "SETTINGS with entries", PREFACE + setting(FIRST_WINDOW, 1)),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield the rows of all tables but STARTS."""
    for table in (SIZES, STREAM_NUMBERS, IN_IDLE, IN_HALF_CLOSED, IN_CLOSED, PADS, BLOCKS, VALUES,
                  WINDOWS, OTHERS, COMPRESSED, REQUESTS, BODIES):  # fmt: skip
        yield from table
