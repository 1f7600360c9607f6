"""Every case of the rules of HTTP/2 by bytes: which error it is, whose, and what its text says."""

import pytest

from clipper_core.http.http2_protocol import Http2EventKind, Http2Protocol
from tests.core.http2_cases import PREFACE, SETTINGS, STARTS, Case, asks, cases, frame
from tests.core.test_http2_protocol import GOAWAY, RST_STREAM, frames_of

LIST_BYTES = 16384
NEXT = 0x0FFFFFFF  # a stream that no case begins


class Outcome:
    """The outcome that a client sees. data: the bytes that it sends, in these pieces."""

    def __init__(self, *data: bytes) -> None:
        self.protocol = protocol = Http2Protocol(16, LIST_BYTES)
        for piece in data:
            protocol.feed(piece)
        protocol.events()
        told = list(frames_of(protocol.take(0)))
        self.resets = [
            (stream, int.from_bytes(payload, "big"))
            for kind, _, stream, payload in told
            if kind == RST_STREAM
        ]
        self.ends = [payload for kind, _, _, payload in told if kind == GOAWAY]

    def check(self, case: Case) -> None:
        """Check that it is what the case says, and that the connection goes on if it does not
        end."""
        if case.code is not None and not case.stream:
            (payload,) = self.ends
            assert int.from_bytes(payload[4:8], "big") == case.code
            assert payload[8:].decode("ascii") == case.text != ""
            assert self.protocol.is_shut
            self.protocol.feed(asks(NEXT))
            assert not self.protocol.has_events
            return
        assert self.ends == [], self.ends
        assert self.resets == ([] if case.code is None else [(case.stream, case.code)])
        self.protocol.feed(asks(NEXT))
        kind, stream, text, _ = self.protocol.events()[-1]
        assert (kind, stream) == (Http2EventKind.BEGAN, NEXT)
        assert text.startswith(b"GET / HTTP/1.1\r\nhost: here\r\n")


@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.name)
def test_each_case(case: Case) -> None:
    begin = PREFACE + frame(SETTINGS)
    whole = Outcome(begin + case.data)
    whole.check(case)
    cut = [case.data[i : i + 1] for i in range(len(case.data))] if len(case.data) < 1000 else []
    apart = Outcome(begin, *(cut or [case.data[:700], case.data[700:]]))
    apart.check(case)
    assert (apart.resets, apart.ends) == (whole.resets, whole.ends)


@pytest.mark.parametrize("case", STARTS, ids=lambda case: case.name)
def test_each_start(case: Case) -> None:
    Outcome(case.data).check(case)


def test_there_are_enough_cases_and_each_has_a_name() -> None:
    names = [case.name for case in (*cases(), *STARTS)]
    assert len(names) >= 150
    sent = [case.data for case in cases()]
    assert len(set(sent)) == len(sent), "a case comes twice"
