"""JSON responses whose text is made in pieces.

The core writes the text of large arrays, without the GIL. A response that is longer than a piece is
streamed: all connections together get one piece in a turn of the loop, and each one when its client
has taken the piece before. So neither a turn nor the memory of a connection grows with the size or
the number of the outputs.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from clipper.frontend.http.messages import JSON, HttpResponse, StreamedResponse, as_json
from clipper.frontend.http.streamed_body import StreamedBody
from clipper_core.http.json_value import JsonArray

ARRAY_BYTES: Final = 1 << 10  # size of an array from which on the core writes it
PIECE_BYTES: Final = 32 << 10  # text that is made and sent at once, at least
_PLACE: Final = msgspec.Raw(b"\0")  # of an array; JSON has no such byte


class _LargeArrayError(Exception):
    """An array is to be written by the core."""


def _only_small(value: object) -> object:
    if isinstance(value, np.ndarray) and value.nbytes >= ARRAY_BYTES:
        raise _LargeArrayError
    return as_json(value)


_SMALL: Final = msgspec.json.Encoder(enc_hook=_only_small)


def json_texts(value: object) -> Iterator[bytes]:
    """Yield the JSON of a value in parts: large arrays in pieces."""
    try:
        yield _SMALL.encode(value)
    except _LargeArrayError:
        yield from _with_arrays(value)


def _with_arrays(value: object) -> Iterator[bytes]:
    arrays: list[JsonArray] = []

    def encode_other(other: object) -> object:
        if isinstance(other, np.ndarray) and other.nbytes >= ARRAY_BYTES:
            with contextlib.suppress(TypeError):
                arrays.append(JsonArray(other))
                return _PLACE
        return as_json(other)

    texts = msgspec.json.Encoder(enc_hook=encode_other).encode(value).split(b"\0")
    for text, array in zip(texts[:-1], arrays, strict=True):
        yield text
        while piece := array.take(PIECE_BYTES):
            yield piece
    yield texts[-1]


def json_list(name: bytes, items: Iterable[object]) -> Iterator[bytes]:
    """Yield the JSON of an object with one member, a list, in parts; an item is taken when the
    parts of those before it have been taken."""
    between = b'{"%s":[' % name
    for item in items:
        yield between
        yield from json_texts(item)
        between = b","
    yield b"]}" if between == b"," else between + b"]}"


def answer_texts(texts: Iterator[bytes], id: bytes = b"") -> HttpResponse | StreamedResponse:
    """Return the response with a JSON body, streamed if it is longer than a piece.

    id: as of HttpResponse.
    """
    pieces = _gathered(texts)
    first = next(pieces)
    if len(first) < PIECE_BYTES:
        return HttpResponse(200, first, id=id)
    return StreamedResponse(_PiecewiseBody(first, pieces).start, JSON, id=id)


def answer_whole(texts: Iterator[bytes], id: bytes = b"") -> HttpResponse:
    """Return the response with a JSON body, made at once."""
    return HttpResponse(200, b"".join(texts), id=id)


def _gathered(texts: Iterator[bytes]) -> Iterator[bytes]:
    """Join parts to pieces; the last one is shorter than the others, and may be empty."""
    parts, size = [], 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


class _PiecewiseBody:
    """Writes the pieces of one response, each in a turn of its own."""

    def __init__(self, first: bytes, rest: Iterator[bytes]) -> None:
        self._first, self._rest = first, rest
        self._body: StreamedBody

    def start(self, body: StreamedBody) -> None:
        self._body = body
        body.listen(room=body.request_turn, turn=self._write)
        self._go_on(self._first)

    def _write(self) -> None:
        self._go_on(next(self._rest))

    def _go_on(self, piece: bytes) -> None:
        has_room = self._body.write(piece)
        if len(piece) < PIECE_BYTES:
            self._body.end()
        elif has_room:
            self._body.request_turn()
