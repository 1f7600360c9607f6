"""Lists and sets that expire, as lists and bitmaps of Redis:

    clipper:l:KEY          list: the values
    clipper:b:KEY          bitmap: the numbers that were claimed

A write is one round trip and no script. It changes no revision and is in no stream of changes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

RedisClient = Any  # redis.Redis, whose types do not tell str from bytes


class RedisLists:
    """Lists and sets in Redis. Threads: any.

    redis: the client.  exchange: wraps each exchange with the server.  prefix: of all keys.  ttl_s:
    time for which a list or set stays after its last change.
    """

    def __init__(
        self,
        redis: RedisClient,
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
            values: list[bytes] = self._redis.lrange(self._list + key, 0, -1)
        return values

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
