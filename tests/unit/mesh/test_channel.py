"""Messages between nodes and hosts: requests, answers, refusals, bounds, losses."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from clipper.mesh.transport.channel import (
    FRAME_BYTES_MAX,
    MESSAGES_MAX,
    ChannelServer,
    ConnectionLost,
    Message,
    PeerChannel,
    RequestFailed,
    dial,
)


async def answer(verb: str, message: Message) -> Message:
    if verb == "add":
        return {"sum": message["a"] + message["b"]}
    if verb == "wait":
        await asyncio.Event().wait()
    if verb == "breaks":
        raise ValueError("odd")
    raise RequestFailed("the file is broken", "artifact")


def with_channel(
    folder: Path, test: Callable[[PeerChannel, list[PeerChannel]], Awaitable[Any]]
) -> None:
    async def run() -> None:
        accepted: list[PeerChannel] = []

        def let_in(channel: PeerChannel) -> None:
            accepted.append(channel)

        channel_server = await ChannelServer(
            "", "secret", folder, "door", serve=answer, on_accept=let_in
        ).open()
        try:
            channel = await dial(channel_server.address, {"token": "secret", "instance": "a"})
            async with asyncio.timeout(20):
                await test(channel, accepted)
            channel.close()
        finally:
            channel_server.close()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_closed_server_leaves_no_descriptor_and_no_file(tmp_path: Path) -> None:
    async def run() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            channel_server = ChannelServer("", "secret", tmp_path, "door", serve=answer)
            (await channel_server.open()).close()
            await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) < before + 5
        assert not list(tmp_path.iterdir())

    asyncio.run(run())


def test_requests_are_answered_each_by_its_own_answer(tmp_path: Path) -> None:
    async def test(channel: PeerChannel, accepted: list[PeerChannel]) -> None:
        answers = await asyncio.gather(*(channel.request("add", 5, a=n, b=1) for n in range(100)))
        assert [found["sum"] for found in answers] == list(range(1, 101))
        assert accepted[0].hello["instance"] == "a"

    with_channel(tmp_path, test)


def test_a_refusal_has_a_reason_and_a_fault(tmp_path: Path) -> None:
    async def test(channel: PeerChannel, _: list[PeerChannel]) -> None:
        with pytest.raises(RequestFailed, match="broken") as failure:
            await channel.request("load", 5)
        assert failure.value.fault == "artifact"
        with pytest.raises(RequestFailed, match="ValueError: odd") as failure:
            await channel.request("breaks", 5)
        assert failure.value.fault == "host"
        with pytest.raises(RequestFailed, match="at most"):
            await channel.request("add", 5, a=b"x" * FRAME_BYTES_MAX, b=b"")
        assert (await channel.request("add", 5, a=1, b=2))["sum"] == 3

    with_channel(tmp_path, test)


def test_a_peer_that_does_not_answer_or_closes_is_lost(tmp_path: Path) -> None:
    async def test(channel: PeerChannel, accepted: list[PeerChannel]) -> None:
        with pytest.raises(ConnectionLost, match=r"within 0\.01 s"):
            await channel.request("wait", 0.01)
        waiting = asyncio.ensure_future(channel.request("wait", 20))
        await channel.request("add", 5, a=1, b=2)
        accepted[0].close()
        with pytest.raises(ConnectionLost, match="gone"):
            await waiting
        with pytest.raises(ConnectionLost, match="closed"):
            await channel.request("add", 5, a=1, b=2)

    with_channel(tmp_path, test)


@pytest.mark.parametrize(
    "message",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x01\x00\x00\x00\x01",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_message_ends_the_channel_and_nothing_else(
    tmp_path: Path, message: bytes
) -> None:
    async def test(channel: PeerChannel, accepted: list[PeerChannel]) -> None:
        await channel.request("add", 5, a=1, b=2)
        channel._writer.write(message)
        await accepted[0].closed.wait()
        await channel.closed.wait()

    with_channel(tmp_path, test)


@pytest.mark.parametrize("hello", [{"token": "wrong"}, {}, {"verb": "add", "token": "secret"}])
def test_a_peer_without_the_token_is_refused(tmp_path: Path, hello: Message) -> None:
    async def run() -> None:
        accepted: list[PeerChannel] = []
        channel_server = await ChannelServer(
            "", "secret", tmp_path, "door", on_accept=accepted.append
        ).open()
        try:
            channel = await dial(channel_server.address, hello)
            async with asyncio.timeout(20):
                await channel.closed.wait()
            assert not accepted
        finally:
            channel_server.close()

    asyncio.run(run())


def test_an_address_without_a_listener_is_lost(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="cannot reach"):
        asyncio.run(dial(f"unix:{tmp_path}/nobody", {}))
    with pytest.raises(ConnectionLost, match="cannot reach"):
        asyncio.run(dial("tcp:127.0.0.1:x", {}))


def test_a_flood_of_requests_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """A peer has sent thousands of requests at once: in one turn of the loop a bounded number of
    them is handled."""

    async def test(channel: PeerChannel, accepted: list[PeerChannel]) -> None:
        handled: list[int] = []
        at = 0

        async def serve(verb: str, message: Message) -> Message:
            handled.append(at)
            return {}

        await channel.request("add", 5, a=1, b=1)
        accepted[0]._serve = serve
        requests = [channel.request("flood", 20) for _ in range(3000)]
        every = asyncio.gather(*requests)
        while len(handled) < 3000:
            at += 1
            await asyncio.sleep(0)
        await every
        assert max(handled.count(turn) for turn in set(handled)) <= 2 * MESSAGES_MAX

    with_channel(tmp_path, test)


async def write_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\0")
        await writer.drain()
        await asyncio.sleep(0.001)


def test_a_peer_that_reads_no_answers_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.mesh.transport.channel.UNSENT_BYTES_MAX", 1 << 20)

    async def run() -> None:
        async with asyncio.timeout(20):
            channel_server = await ChannelServer(
                "", "secret", tmp_path, "door", serve=answer
            ).open()
            _, writer = await asyncio.open_unix_connection(
                channel_server.address.removeprefix("unix:")
            )
            for message in (
                {"verb": "hello", "token": "secret"},
                *({"n": n, "verb": "add", "a": "a" * 9000, "b": ""} for n in range(1000)),
            ):
                data = msgpack.packb(message)
                writer.write(len(data).to_bytes(4, "little") + data)
            with pytest.raises(ConnectionError):
                await write_on(writer)
            writer.close()
            channel_server.close()

    asyncio.run(run())
