"""Answers in parts by the query client, blocking and for asyncio: parts, errors, closing, and what
a server sends that is cut off."""

import asyncio
import contextlib
import pathlib
from collections.abc import Iterator

import pytest

import clipper
import clipper_client
from clipper_client.errors import InvalidInput, ModelFailed, NoServer
from clipper_client.http_wire import EventReader, ServerEvent
from tests.frontend.conftest import QUICK, total
from tests.memory_container import wait_until
from tests.query_client.conftest import Last, Scripted
from tests.word_model import words


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http="127.0.0.1:0", **QUICK) as started:
        started._learning.states.start_writing()  # its thread stays
        started.deploy("words", words, input="str", output="str", row_by_row=True, cache=False)
        started.deploy("sum", total, input="f64[3]")
        started.app("writer", models=["words"], policy="single", slo_ms=60_000)
        started.app("total", models=["sum"], slo_ms=60_000)
        yield started


@pytest.fixture
def client(server: clipper.ClipperServer) -> Iterator[clipper_client.Client]:
    with clipper_client.Client(server.http_address, connections_max=1) as made:
        yield made


def test_parts_and_the_whole(client: clipper_client.Client) -> None:
    parts = list(client.predict("writer", "a b", stream=True, id="mine"))
    assert [(part.output, part.index, part.is_last) for part in parts] == [
        ("a ", 0, False),
        ("b ", 1, False),
        ("a b ", 2, True),
    ]
    whole = parts[-1]
    assert (whole.complete, whole.models, whole.request_id) == (True, ("words:1",), "mine")
    assert client.feedback("writer", whole.id, label="a b ")
    numbers = client.predict("total", [1.0, 2.0, 3.0], stream=True)
    assert [part.output for part in numbers] == [6.0, 6.0]


def test_its_connection_is_used_again(client: clipper_client.Client) -> None:
    for _ in range(3):
        assert client.predict("writer", "a b", stream=True).result().output == "a b "
    assert client.predict("writer", "a").output == "a "


def test_failures(client: clipper_client.Client) -> None:
    with pytest.raises(ModelFailed, match="no more words"):
        client.predict("writer", "fail", stream=True)
    whole = client.predict("writer", "a fail", stream=True).result()
    assert (whole.output, whole.complete) == ("a ", False)
    assert "no more words" in whole.reason
    with pytest.raises(InvalidInput):
        client.predict("writer", "a", part_slo_ms=5)
    with pytest.raises(InvalidInput):
        client.predict("writer", "a", stream=True, slo_total_ms=-1)
    with pytest.raises(InvalidInput):
        client.predict("writer", "a", stream=True, outputs=["b"])


def test_closing_stops_the_model(client: clipper_client.Client, tmp_path: pathlib.Path) -> None:
    closed = tmp_path / "closed"
    with client.predict("writer", f"closes:{closed} " + "a " * 20_000, stream=True) as parts:
        assert next(parts).index == 0
    assert list(parts) == []
    wait_until(closed.exists)
    assert client.predict("writer", "a").output == "a ", "the connection was given back"


def test_a_loop_that_is_left_gives_its_connection_back(client: clipper_client.Client) -> None:
    for _ in range(3):
        for part in client.predict("writer", "a " * 20_000, stream=True):
            assert part.index == 0
            break
    assert client.predict("writer", "a").output == "a "


def test_a_loop_of_asyncio_that_is_left_gives_its_connection_back(
    server: clipper.ClipperServer,
) -> None:
    async def check() -> None:
        async with clipper_client.AsyncClient(server.http_address, connections_max=1) as client:
            for _ in range(3):
                async for part in await client.predict("writer", "a " * 20_000, stream=True):
                    assert part.index == 0
                    break
            assert (await client.predict("writer", "a")).output == "a "

    asyncio.run(check())


def test_asyncio(server: clipper.ClipperServer, tmp_path: pathlib.Path) -> None:
    closed = tmp_path / "closed"

    async def read(client: clipper_client.AsyncClient, text: str) -> list[str]:
        parts = await client.predict("writer", text, stream=True)
        return [part.output async for part in parts]

    async def check() -> None:
        async with clipper_client.AsyncClient(server.http_address, connections_max=2) as client:
            found = await asyncio.gather(*(read(client, f"{i} b") for i in range(6)))
            assert found == [[f"{i} ", "b ", f"{i} b "] for i in range(6)]
            with pytest.raises(ModelFailed):
                await client.predict("writer", "fail", stream=True)
            text = f"closes:{closed} " + "a " * 20_000
            async with await client.predict("writer", text, stream=True) as parts:
                assert (await anext(parts)).index == 0
            assert (await client.predict("writer", "a")).output == "a "
            whole = await (await client.predict("writer", "c", stream=True)).result()
            assert whole.output == "c "

    asyncio.run(check())
    wait_until(closed.exists)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PART = b'event: part\ndata: {"index":0,"output":"a"}\n\n'


@pytest.mark.parametrize("rest", [b"", b"0\r\n\r\n", b"4\r\n:\n\n\n\r\n"])
def test_a_body_that_ends_before_the_whole_is_an_error(rest: bytes) -> None:
    text = HEAD + b"%x\r\n%s\r\n" % (len(PART), PART) + rest
    with (
        contextlib.closing(Scripted([[Last(text)]])) as scripted,
        clipper_client.Client(scripted.url) as client,
    ):
        parts = client.predict("any", "x", stream=True)
        assert next(parts).output == "a"
        with pytest.raises(NoServer):
            next(parts)
        assert list(parts) == []


def test_events_however_they_are_cut() -> None:
    text = b":\n\n" + PART + b"data: 1\ndata: 2\n\n"
    for n in (1, 2, 7, len(text)):
        reader = EventReader()
        for i in range(0, len(text), n):
            reader.feed(text[i : i + n])
        assert reader.next() == ServerEvent("part", b'{"index":0,"output":"a"}')
        assert reader.next() == ServerEvent("message", b"1\n2")
        assert reader.next() is None
