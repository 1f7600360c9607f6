"""FEEDBACK and ACCURACY: frames of models that learn."""
from libc.string cimport memcpy

import struct

from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, OK, raise_for
from clipper_core.wire.codec cimport (
    ACCURACY, ACCURACY_BYTES, FEEDBACK, HEADER_BYTES, PREDICT, REPLY,
)

from clipper_core.wire.codec import decode_header, encode_frame, encode_rows, open_rows


cdef Status accuracy_read(const u8* payload, u64 n, Progress* progress) noexcept nogil:
    cdef u64[2] counts
    cdef double value = 0
    memcpy(counts, payload, sizeof(counts))
    if n == ACCURACY_BYTES:
        memcpy(&value, payload + sizeof(counts), sizeof(double))
    if not 0 <= value <= 1:                 # nor is NaN
        return BAD_FRAME
    progress.learned.store(counts[0], relaxed)
    progress.failed.store(counts[1], relaxed)
    progress.accuracy.store(1 + <u64> (value * 1e9 + 0.5) if n == ACCURACY_BYTES else 0, relaxed)
    return OK


def encode_feedback(inputs, labels, sessions):
    """The payload of a FEEDBACK frame: n inputs, the n outputs that would have been right, n
    sessions (u64). Threads: any.

    inputs, labels: as codec.encode_rows takes rows. Raises BAD_INPUT.
    """
    if not len(inputs) == len(labels) == len(sessions):
        raise_for(BAD_INPUT,
                  f"{len(inputs)} inputs, {len(labels)} labels and {len(sessions)} sessions")
    return encode_rows(PREDICT, inputs, sessions=sessions) + encode_rows(REPLY, labels)


def decode_feedback(payload, **limits):
    """-> (inputs, labels) of a FEEDBACK's payload, OpenRows each; the sessions are with the inputs.
    Threads: any.

    limits: as codec.open_rows has them. Raises BAD_FRAME, TOO_LARGE.
    """
    cdef list found = []
    cdef bytes rest = bytes(payload)
    for kind in (PREDICT, REPLY):
        header = decode_header(rest)
        if header is None or header.kind != kind or header.payload_bytes > len(rest) - HEADER_BYTES:
            raise_for(BAD_FRAME, "feedback is a PREDICT and a REPLY frame")
        found.append(open_rows(header, rest[HEADER_BYTES:HEADER_BYTES + header.payload_bytes],
                               **limits))
        rest = rest[HEADER_BYTES + header.payload_bytes:]
    if rest or found[0].n != found[1].n or found[0].sessions is None:
        raise_for(BAD_FRAME, "feedback has as many labels and sessions as inputs, and nothing else")
    return tuple(found)


def feedback_frame(bytes payload, **fields):
    """A FEEDBACK frame; fields: as codec.encode_frame takes them. Threads: any."""
    return encode_frame(FEEDBACK, payload, **fields)


def decode_accuracy(payload):
    """-> (rows learned, rows failed, accuracy or None) of an ACCURACY's payload. Threads: any.
    Raises BAD_FRAME."""
    cdef bytes raw = bytes(payload)
    cdef Progress progress
    cdef Status status = BAD_FRAME
    if len(raw) in (ACCURACY_BYTES - 8, ACCURACY_BYTES):
        status = accuracy_read(<const u8*> (<const char*> raw), len(raw), &progress)
    raise_for(status, f"no accuracy: {raw.hex(' ', 8)}")
    billionths = progress.accuracy.load(relaxed)
    return (progress.learned.load(relaxed), progress.failed.load(relaxed),
            (billionths - 1) / 1e9 if billionths else None)


def accuracy_frame(u64 learned, u64 failed, accuracy=None, **fields):
    """An ACCURACY frame, and nothing judged: a test can write one that must be refused. Threads:
    any."""
    cdef bytes payload = struct.pack("<QQ", learned, failed)
    return encode_frame(ACCURACY,
                        payload if accuracy is None else payload + struct.pack("<d", accuracy),
                        **fields)
