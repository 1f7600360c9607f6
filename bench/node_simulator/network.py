"""Connections in memory, with delays and partitions: a `clipper.mesh.transport.network.Network`."""

import asyncio
import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.node_simulator.virtual_time import LIFE, Life, VirtualLoop
from clipper.mesh.transport.network import OnConnection

RETRY_S = 0.05  # until what was sent over a cut line is sent again


class Wires:
    """All connections of a world.

    reaches: returns whether a message from one life gets to another. delay_s: of the next message.
    """

    def __init__(
        self, loop: VirtualLoop, reaches: Callable[[str, str], bool], delay_s: Callable[[], float]
    ) -> None:
        self.loop, self.reaches, self.delay_s = loop, reaches, delay_s
        self.listening: dict[str, VirtualListening] = {}
        self.ends: dict[Life, set[_Writer]] = {}

    def cut_off(self, life: Life) -> None:
        """Close the connections of a life that is over: the system closes its sockets."""
        for address in [a for a, one in self.listening.items() if one.life is life]:
            del self.listening[address]
        for writer in sorted(self.ends.pop(life, set()), key=lambda one: one.number):
            writer.close()


class _Writer:
    """One direction of a connection, as far as a `PeerChannel` uses a StreamWriter."""

    numbers = 0

    def __init__(self, wires: Wires, me: Life, to: Life, reader: asyncio.StreamReader) -> None:
        _Writer.numbers += 1
        self.number = _Writer.numbers
        self._wires, self._me, self._to, self._reader = wires, me, to, reader
        self._closed = False
        self._queue: list[bytes] = []
        self._last_s = 0.0
        self.back: _Writer | None = None

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._send(data)

    @property
    def transport(self) -> "_Writer":
        return self

    def get_write_buffer_size(self) -> int:
        """Return 0: the other end takes all that is sent."""
        return 0

    def abort(self) -> None:
        self.close()

    async def drain(self) -> None:
        if self._closed:
            raise ConnectionResetError("the connection is closed")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._send(b"")
            self._wires.ends.get(self._me, set()).discard(self)

    def _send(self, data: bytes) -> None:
        """Deliver bytes after a delay, in order; none: the end."""
        loop = self._wires.loop
        # never two at one time: timers of one time have no order
        self._last_s = max(loop.time() + self._wires.delay_s(), self._last_s + 1e-6)
        loop.call_at(self._last_s, self._arrive, data, context=contextvars.Context())

    def _arrive(self, data: bytes) -> None:
        if self._to.over:
            return
        self._queue.append(data)
        if len(self._queue) == 1:
            self._deliver()

    def _deliver(self) -> None:
        if self._to.over:
            return
        if not self._wires.reaches(self._me.name, self._to.name):
            self._wires.loop.call_later(RETRY_S, self._deliver, context=contextvars.Context())
            return
        for data in self._queue:
            if data:
                self._reader.feed_data(data)
            else:
                self._reader.feed_eof()
                if self.back is not None:
                    self.back.close()
        self._queue.clear()


class VirtualListening:
    """A place that accepts connections."""

    def __init__(self, wires: Wires, address: str, life: Life) -> None:
        self._wires, self.address, self.life = wires, address, life
        self.on_connection: OnConnection | None = None
        self.context: contextvars.Context | None = None

    async def open(self, on_connection: OnConnection) -> None:
        self.on_connection = on_connection
        self.context = contextvars.copy_context()
        self._wires.listening[self.address] = self

    def stop(self) -> None:
        if self._wires.listening.get(self.address) is self:
            del self._wires.listening[self.address]

    def remove(self) -> None:
        pass


class VirtualNetwork:
    """The network as one life uses it."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def listen(self, address: str, folder: Path, name: str) -> VirtualListening:
        life = LIFE.get()
        assert life is not None
        return VirtualListening(self._wires, f"virtual:{life.name}/{name}", life)

    async def connect(self, address: str) -> tuple[Any, Any]:
        wires, me = self._wires, LIFE.get()
        assert me is not None
        await asyncio.sleep(wires.delay_s())
        name = address.removeprefix("virtual:").partition("/")[0]
        while not wires.reaches(me.name, name):
            await asyncio.sleep(RETRY_S)
        there = wires.listening.get(address)
        if there is None or there.on_connection is None or there.context is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        mine, its = asyncio.StreamReader(), asyncio.StreamReader()
        to, back = _Writer(wires, me, there.life, its), _Writer(wires, there.life, me, mine)
        to.back, back.back = back, to
        wires.ends.setdefault(me, set()).add(to)
        wires.ends.setdefault(there.life, set()).add(back)
        context = there.context.copy()
        its_work: Any = there.on_connection(its, back)  # type: ignore[arg-type]
        wires.loop.create_task(its_work, context=context)
        return mine, to
