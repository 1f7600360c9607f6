"""A connection from a shard's gRPC service to the shard itself, by the protocol of its workers.

A push by gRPC is thereby checked, recognized as a repetition, and held until the replicas have it
by the same code as any other.
"""

import asyncio
import contextlib
import logging
import os
from typing import Final

from clipper.component import cause_of
from clipper.errors import ClipperError, ShardAway
from clipper.params.shard.parameters import Ids, Piece
from clipper_container.params.frames import (
    DTYPES,
    HEAD_BYTES,
    Head,
    MessageKind,
    packed,
    read_head,
    refusal,
    unpacked,
)

_LIMIT: Final = 1 << 20  # read buffer in bytes
_log = logging.getLogger(__name__)


class LocalShardConnection:
    """A connection to this process's shard: open(), any number of concurrent calls, close().

    Threads: the event loop's.
    """

    def __init__(self, address: str, token: str, name: str) -> None:
        self._address, self._token, self._name = address, token, name
        self._waiting: dict[int, asyncio.Future[tuple[Head, bytes]]] = {}
        self._next = 0
        self._gone = ""  # why it has ended
        self._closed = False
        self._writer: asyncio.StreamWriter
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect. Raises OSError, and ShardAway if another process listens at the address."""
        kind, _, rest = self._address.partition(":")
        if kind == "unix":
            reader, self._writer = await asyncio.open_unix_connection(rest, limit=_LIMIT)
        else:
            host, _, port = rest.rpartition(":")
            reader, self._writer = await asyncio.open_connection(
                host.strip("[]"), int(port), limit=_LIMIT
            )
        self._reader = asyncio.ensure_future(self._read(reader))
        reply = await self.call("hello", token=self._token, protocol=1)
        if reply.get("pid") != os.getpid():
            raise ShardAway(
                f"{self._name}: process {reply.get('pid')} listens at {self._address} now."
            )

    @property
    def is_open(self) -> bool:
        """Return whether calls can be made."""
        return self._reader is not None and not self._gone

    async def call(self, name: str, **fields: object) -> Piece:
        """Call a method of the shard. Raises the shard's error, or ShardAway when the connection
        has ended."""
        return unpacked(
            await self._request(Head(MessageKind.CALL), packed({"call": name, **fields}))
        )

    async def pull(self, table: int, ids: Ids, dtype: str) -> bytes:
        """Return the rows of n ids, followed by up to 7 bytes of padding. Raises like `call`."""
        return await self._request(
            Head(MessageKind.PULL, dtype=DTYPES[dtype], table=table, rows=ids.size), ids.tobytes()
        )

    async def _request(self, head: Head, body: bytes) -> bytes:
        if self._gone:
            raise ShardAway(self._gone)
        self._next += 1
        number = self._next
        future: asyncio.Future[tuple[Head, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._writer.writelines(
                (head._replace(id=number, payload_bytes=len(body)).packed(), body)
            )
            await self._writer.drain()
            head, answer = await future
        except OSError as error:
            raise ShardAway(f"{self._name}: {error}.") from None
        finally:
            del self._waiting[number]
        if head.kind != MessageKind.ANSWER:
            raise refusal(head, answer, self._name)
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "it ends"
        try:
            while True:
                head = read_head(await reader.readexactly(HEAD_BYTES))
                body = await reader.readexactly(head.payload_bytes)
                future = self._waiting.get(head.id)
                if future is not None and not future.done():
                    future.set_result((head, body))
        except (OSError, EOFError) as error:
            why = str(error) or why
        except ClipperError as error:
            why = error.message
        except Exception as error:
            _log.exception("%s: its connection to itself has failed", self._name)
            why = cause_of(error)
        finally:
            self._end(f"{self._name}: {why}.")

    def _end(self, why: str) -> None:
        self._gone = self._gone or why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ShardAway(self._gone))

    @property
    def failure(self) -> str:
        """Return why a connection that was open has ended; empty for one that is open or was
        closed in order. Threads: any."""
        return "" if self._closed else self._gone

    async def close(self) -> None:
        """Close the connection, if it was opened. Open calls end with ShardAway."""
        self._closed = True
        if self._reader is None:
            return
        self._reader.cancel()
        await asyncio.wait({self._reader})
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
