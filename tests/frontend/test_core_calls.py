"""Connections of HTTP/2 that the core owns: which stay there, which go to Python, in whatever state
they are, and which come back; no call is lost on the way."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import clipper
from clipper.frontend.protocols import message
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S, total
from tests.frontend.test_call_stream import HEAD, INFER, CallLine, grpc_of, prefixed
from tests.frontend.test_fast_calls import asked_at_once, cancelled, sent
from tests.frontend.test_grpc import INFERENCE, gated, start
from tests.frontend.test_grpc_access import calling, credentials
from tests.memory_container import wait_until

LIVE = f"/{INFERENCE}/ServerLive"
GOAWAY = 7  # the type of a frame
WIDE = 20_000  # numbers in a reply of the model `wide`


def wide(rows: Any) -> Any:
    return np.repeat(rows[:, :1], WIDE, axis=1)


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def server(gates: Path) -> Iterator[clipper.ClipperServer]:
    with start() as server:
        deploy(server, gates)
        yield server


def deploy(server: clipper.ClipperServer, gates: Path) -> None:
    server.deploy("sum", total, input="f64[3]")
    server.app("total", models=["sum"], slo_ms=5000)
    server.deploy("wide", wide, input="f64[3]")
    server.app("wide", models=["wide"], slo_ms=60_000)
    server.deploy("stuck", gated(gates), input="f64[1]", cache=False)
    server.app("stuck", models=["stuck"], slo_ms=60_000)
    server.deploy("stuck2", gated(gates), input="f64[1]", cache=False)
    server.app("both", models=["stuck", "stuck2"], slo_ms=60_000)
    server.deploy("doubled", doubled, input="f64[3]")
    server.app("mean", models=["sum", "doubled"], slo_ms=5000)
    server.deploy("raising", raising, input="f64[3]")
    server.app("half", models=["sum", "raising"], slo_ms=5000)
    server.app("none", models=["raising"], slo_ms=5000)
    server.app("hasty", models=["stuck"], slo_ms=1, default=-1.0)


@pytest.fixture
def line(server: clipper.ClipperServer) -> Iterator[CallLine]:
    wait_until(lambda: owners(server) == (0, 0), "no other connection is open")
    with CallLine(server.grpc_address) as line:
        yield line


def doubled(rows: Any) -> Any:
    return 2 * rows.sum(1)


def raising(rows: Any) -> Any:
    raise ValueError("no row is right")


def owners(server: clipper.ClipperServer) -> tuple[int, int]:
    """Return how many connections the core has, and how many Python has."""
    frontends: Any = server._endpoints.frontends
    core_server = frontends._listeners.hot.core_server
    return core_server.connections, core_server.outside


def in_core(server: clipper.ClipperServer) -> None:
    wait_until(lambda: owners(server) == (1, 0), "the core has the connection")


def in_python(server: clipper.ClipperServer) -> None:
    wait_until(lambda: owners(server) == (0, 1), "Python has the connection")


def infer(row: float, application: str = "total") -> bytes:
    numbers = [[row]] if application in ("stuck", "both", "hasty") else [[row, 2, 3]]
    return bytes(sent(application, numbers, "f64", id=f"{row}").SerializeToString())


def asked(line: CallLine, data: bytes, path: str = INFER) -> int:
    """Make a call without sending it; return its stream."""
    h2 = line.client.h2
    stream = int(h2.get_next_available_stream_id())
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    h2.send_headers(stream, [*fields, *HEAD.items()])
    h2.send_data(stream, prefixed(data), end_stream=True)
    return stream


def answered(line: CallLine, stream: int, row: float) -> None:
    """Check the reply to `infer(row)`."""
    line.wait(stream)
    _, trailers, body = line.client.replies[stream]
    assert trailers["grpc-status"] == "0", trailers
    reply = message("inference.ModelInferResponse").FromString(body[5:])
    assert reply.id == f"{row}"
    assert np.frombuffer(reply.raw_output_contents[0])[0] in (row, row + 5)


def output_of(line: CallLine, stream: int) -> float:
    reply = message("inference.ModelInferResponse").FromString(line.client.replies[stream][2][5:])
    return float(np.frombuffer(reply.raw_output_contents[0])[0])


def rest_of(line: CallLine) -> bytes:
    """Return what the server sends up to the end of the connection."""
    data = b""
    while piece := line.socket.recv(1 << 16):
        data += piece
    return data


def live(line: CallLine) -> None:
    stream = asked(line, b"", LIVE)
    line.client.flush()
    line.wait(stream)
    assert line.client.replies[stream][1]["grpc-status"] == "0"


def test_plain_calls_stay_in_the_core(server: clipper.ClipperServer, line: CallLine) -> None:
    for row in (1.0, 1.0, 2.0, 3.0):
        answered(line, asked_at_once(line, infer(row)), row)
    in_core(server)


def test_calls_to_several_models_stay_in_the_core(
    server: clipper.ClipperServer, line: CallLine
) -> None:
    """Misses and hits; the mean of a row's sum and twice of it."""
    for row in (1.0, 1.0, 2.0, 3.0, 2.0):
        stream = asked_at_once(line, infer(row, "mean"))
        line.wait(stream)
        assert output_of(line, stream) == 1.5 * (row + 5)
    in_core(server)


@pytest.mark.parametrize(("application", "status"), [("half", "0"), ("none", "13"), ("hasty", "0")])
def test_queries_without_a_plain_prediction_stay_in_the_core(
    server: clipper.ClipperServer, line: CallLine, application: str, status: str
) -> None:
    for row in (1.0, 1.0, 4.0):
        stream = asked_at_once(line, infer(row, application))
        line.wait(stream)
        assert line.client.replies[stream][1]["grpc-status"] == status
        answered(line, asked_at_once(line, infer(row)), row)
    in_core(server)


@pytest.mark.parametrize("first", [40, 75, 90, 120])
def test_a_connection_goes_to_python_in_the_middle_of_a_frame(
    server: clipper.ClipperServer, line: CallLine, first: int
) -> None:
    """The call of Python's has come as a whole, and so many bytes of the one after it."""
    answered(line, asked_at_once(line, infer(1.0)), 1.0)
    other = asked(line, b"", LIVE)
    before = line.client.h2.data_to_send()
    stream = asked(line, infer(7.0))
    after = line.client.h2.data_to_send()
    line.socket.sendall(before + after[:first])
    line.wait(other)
    line.socket.sendall(after[first:])
    answered(line, stream, 7.0)


def test_a_connection_goes_to_python_in_the_middle_of_a_head(
    server: clipper.ClipperServer, line: CallLine
) -> None:
    answered(line, asked_at_once(line, infer(1.0)), 1.0)
    other = asked(line, b"", LIVE)
    before = line.client.h2.data_to_send()
    stream = asked(line, infer(8.0))
    after = line.client.h2.data_to_send()
    size = int.from_bytes(after[:3], "big")
    block, rest = after[9 : 9 + size], after[9 + size :]
    number = stream.to_bytes(4, "big")
    first = (5).to_bytes(3, "big") + b"\1\0" + number + block[:5]
    line.socket.sendall(before + first)
    line.wait(other)
    line.socket.sendall((size - 5).to_bytes(3, "big") + b"\x09\4" + number + block[5:] + rest)
    answered(line, stream, 8.0)


def test_calls_that_wait_go_along_and_come_back(
    server: clipper.ClipperServer, line: CallLine, gates: Path
) -> None:
    ours = grpc_of(server)
    stuck = [asked_at_once(line, infer(1000.0, "stuck")) for _ in range(3)]
    wait_until(lambda: ours._counts.open == 3, "the calls are under way")
    in_core(server)
    live(line)
    in_python(server)
    assert ours._counts.open == 3
    line.client.h2.reset_stream(stuck.pop(), 8)
    before = cancelled(server)
    live(line)
    wait_until(lambda: ours._counts.open == 2, "one was cancelled")
    assert cancelled(server) == before + 1
    for row in range(8):
        answered(line, asked_at_once(line, infer(row)), row)
    in_core(server)
    assert ours._counts.open == 2
    (gates / "1").touch()
    for stream in stuck:
        answered(line, stream, 1000.0)
    in_core(server)
    assert ours._counts.open == 0


def test_a_call_that_is_reset_at_once_is_forgotten(
    server: clipper.ClipperServer, line: CallLine
) -> None:
    stream = asked(line, infer(6.0))
    line.client.h2.reset_stream(stream, 8)
    answered(line, asked_at_once(line, infer(7.0)), 7.0)
    in_core(server)


def test_queries_that_python_has_go_along(
    server: clipper.ClipperServer, line: CallLine, gates: Path
) -> None:
    """Calls to two models: their connection goes to Python before they are answered."""
    ours = grpc_of(server)
    both = [asked_at_once(line, infer(5000.0, "both")) for _ in range(3)]
    wait_until(lambda: ours._counts.open == 3, "the calls are under way")
    assert (owners(server), ours._counts.under_way) == ((1, 0), 0)
    live(line)
    in_python(server)
    assert (ours._counts.open, ours._counts.under_way) == (3, 3)
    line.client.h2.reset_stream(both.pop(), 8)
    before = cancelled(server)
    live(line)
    wait_until(lambda: ours._counts.open == 2, "one was cancelled")
    assert cancelled(server) == before + 1
    (gates / "5").touch()
    for stream in both:
        answered(line, stream, 5000.0)
    wait_until(lambda: ours._counts.open == 0, "all have ended")
    for row in range(8):
        answered(line, asked_at_once(line, infer(row)), row)
    in_core(server)


def test_a_connection_that_breaks_cancels_its_calls(
    server: clipper.ClipperServer, gates: Path
) -> None:
    ours, before = grpc_of(server), cancelled(server)
    with CallLine(server.grpc_address) as line:
        for application in ("stuck", "both", "both"):
            asked_at_once(line, infer(4000.0, application))
        wait_until(lambda: ours._counts.open == 3, "the calls are under way")
    wait_until(lambda: ours._counts.open == 0, "they were cancelled")
    wait_until(lambda: cancelled(server) == before + 3, "and counted")
    (gates / "4").touch()


def test_replies_wait_for_the_windows_of_the_client(
    server: clipper.ClipperServer, line: CallLine
) -> None:
    line.client.h2.update_settings({4: 0})  # INITIAL_WINDOW_SIZE
    line.client.flush()
    streams = [asked_at_once(line, infer(row)) for row in (1.0, 2.0)]
    live_one = asked_at_once_of(line, LIVE)
    in_python(server)
    for stream in (*streams, live_one):
        line.client.h2.increment_flow_control_window(1 << 16, stream)
    line.client.flush()
    for stream, row in zip(streams, (1.0, 2.0), strict=True):
        answered(line, stream, row)
    line.wait(live_one)


def asked_at_once_of(line: CallLine, path: str) -> int:
    stream = asked(line, b"", path)
    line.client.flush()
    return stream


@pytest.mark.parametrize("goes", [False, True])
def test_a_client_that_reads_late_gets_all(
    server: clipper.ClipperServer, line: CallLine, goes: bool
) -> None:
    """The replies are more than the kernel takes; goes: and the connection goes to Python then."""
    line.client.h2.update_settings({4: 1 << 24})
    line.client.h2.increment_flow_control_window(1 << 26)
    line.client.flush()
    streams = [asked_at_once(line, infer(row, "wide")) for row in range(60)]
    wait_until(lambda: grpc_of(server)._counts.open == 0, "all are answered")
    if goes:
        asked_at_once_of(line, LIVE)
    for row, stream in enumerate(streams):
        line.wait(stream)
        assert len(line.client.replies[stream][2]) > 8 * WIDE, row
    (in_python if goes else in_core)(server)


def test_a_message_may_come_after_its_head(server: clipper.ClipperServer, line: CallLine) -> None:
    """A call that does not become complete is Python's, which knows its deadline."""
    asked(line, infer(4.0))
    data = line.client.h2.data_to_send()
    line.socket.sendall(data[:-10])
    in_python(server)
    line.socket.sendall(data[-10:])
    answered(line, 1, 4.0)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_client_that_ends_its_side_gets_its_replies(
    server: clipper.ClipperServer, gates: Path, is_open: bool
) -> None:
    with CallLine(server.grpc_address) as line:
        answered(line, asked_at_once(line, infer(1.0)), 1.0)
        if is_open:
            asked_at_once(line, infer(2000.0, "stuck"))
        line.socket.shutdown(1)
        if is_open:
            in_python(server)
            (gates / "2").touch()
        assert (b"2000.0" in rest_of(line)) == is_open
    wait_until(lambda: owners(server) == (0, 0), "the connection is closed")


def test_a_client_that_says_it_goes_is_answered(server: clipper.ClipperServer) -> None:
    with CallLine(server.grpc_address) as line:
        asked(line, infer(5.0))
        line.client.h2.close_connection()
        line.client.flush()
        assert b"5.0" in rest_of(line), "the reply comes before the end"


def test_an_error_of_the_connection_is_told(server: clipper.ClipperServer, line: CallLine) -> None:
    answered(line, asked_at_once(line, infer(1.0)), 1.0)
    line.socket.sendall(b"\0\0\0\1\4\0\0\0\0")  # HEADERS without a stream
    while line.client.gone is None:
        for event in line.client.h2.receive_data(line.socket.recv(1 << 16)):
            line.client._heed(event)
    assert line.client.gone.error_code == 1


@pytest.mark.parametrize("application", ["stuck", "both"])
def test_a_server_that_closes_says_so(gates: Path, application: str) -> None:
    """An idle connection is told; one with a call gets its reply first."""
    (gates / "3").unlink(missing_ok=True)
    server = start()
    deploy(server, gates)
    with CallLine(server.grpc_address) as idle, CallLine(server.grpc_address) as busy:
        answered(idle, asked_at_once(idle, infer(1.0)), 1.0)
        asked_at_once(busy, infer(3000.0, application))
        wait_until(lambda: grpc_of(server)._counts.open == 1, "the call is under way")
        assert owners(server) == (2, 0)
        closing = threading.Thread(target=server.close)
        closing.start()
        assert idle.socket.recv(1 << 16)[3] == GOAWAY
        (gates / "3").touch()
        data = rest_of(busy)
        assert b"3000.0" in data[data.index(bytes((GOAWAY, 0, 0, 0, 0, 0))) :], "a reply after it"
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    cert, key = authority.sign("server")
    settings = {"address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key}
    with start(grpc=settings) as server:
        deploy(server, tmp_path)
        with calling(server, credentials(authority.ca)) as client:
            for _ in range(2):
                wait_until(lambda: client.infer("total", [[1, 2, 3]]) and owners(server) == (1, 0))
                client(INFERENCE, "ServerLive")
                in_python(server)
