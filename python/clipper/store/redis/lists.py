"""Lists and sets that expire, as lists and bitmaps of Redis:

    clipper:l:KEY          list: the values
    clipper:b:KEY          bitmap: the numbers that were claimed

A write is one round trip and no script. It changes no revision and is in no stream of changes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class _Pipeline(AbstractContextManager["_Pipeline"], Protocol):
    """Commands that are sent together."""

    def rpush(self, name: str, value: bytes) -> object: ...

    def pexpire(self, name: str, ms: int) -> object: ...

    def setbit(self, name: str, offset: int, value: int) -> object: ...

    def execute(self) -> list[object]: ...


class _Client(Protocol):
    """The part of redis.Redis that is used."""

    def pipeline(self, transaction: bool) -> _Pipeline: ...

    def lrange(self, name: str, start: int, end: int) -> list[bytes]: ...

    def unlink(self, *names: str) -> object: ...


class RedisLists:
    """Lists and sets in Redis. Threads: any.

    redis: the client.  exchange: wraps each exchange with the server.  prefix: of all keys.  ttl_s:
    time for which a list or set stays after its last change.
    """

    def __init__(
        self,
        redis: _Client,
        exchange: Callable[[], AbstractContextManager[None]],
        prefix: str,
        ttl_s: float,
    ) -> None:
        self._redis, self._exchange = redis, exchange
        self._list, self._set = f"{prefix}l:", f"{prefix}b:"
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def append(self, values: Mapping[str, bytes]) -> None:
        """Append to each of these lists one value."""
        with self._exchange(), self._redis.pipeline(transaction=False) as pipe:
            for key, value in values.items():
                pipe.rpush(self._list + key, value)
                pipe.pexpire(self._list + key, self._ttl_ms)
            pipe.execute()

    def read(self, key: str) -> list[bytes]:
        """Return the values of a list in the order of their appends."""
        with self._exchange():
            return self._redis.lrange(self._list + key, 0, -1)

    def claim(self, numbers: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
        """Add numbers to sets; return those that were not there before."""
        with self._exchange(), self._redis.pipeline(transaction=False) as pipe:
            for key, some in numbers.items():
                for number in some:
                    pipe.setbit(self._set + key, number, 1)
                pipe.pexpire(self._set + key, self._ttl_ms)
            old = iter(pipe.execute())
        found: dict[str, set[int]] = {}
        for key, some in numbers.items():
            found[key] = {number for number in some if not next(old)}
            next(old)
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """Delete these lists."""
        if keys:
            with self._exchange():
                self._redis.unlink(*(self._list + key for key in keys))
