"""Watches of a Redis store whose stream of changes is faked."""

from clipper.errors import StoreError
from clipper.store.redis.watch import ChangeReader, Changes, RedisWatch, Waited


class ClosedStream:
    """A stream of changes whose store is closed while the first of them are read."""

    def __init__(self) -> None:
        self.reader = ChangeReader(self, 10, 1.0)

    def changes(self, after: int) -> Changes:
        self.reader.close()
        return Changes(0, 0, -1, (), b"", b"")

    def wait(self, after: int, granted: bytes, block_s: float) -> Waited:
        raise StoreError("it is closed")


def test_a_watch_that_begins_as_its_store_is_closed_has_ended() -> None:
    watch = RedisWatch(ClosedStream().reader, "", 0)
    assert watch.next(0.0) is None
    assert watch.closed
