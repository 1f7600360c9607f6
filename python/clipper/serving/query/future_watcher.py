"""Watcher of many futures that no coroutine awaits, for frontends.

A coroutine and an asyncio future per query cost more than the query. Here one readable descriptor
reports all completed futures, and callbacks run on the event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from clipper_core.engine.engine import Engine
from clipper_core.results.future import Future as Future
from clipper_core.results.future import MailboxReader

_log = logging.getLogger(__name__)
DoneCallback = Callable[[Future], object]


class FutureWatcher:
    """Calls back on an event loop when futures are done. Threads: the loop's; `post` is for any."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engines: Sequence[Engine]) -> None:
        self._loop = loop
        self._awaiting: set[asyncio.Future[None]] = set()
        # with several engines, only the future itself knows whose it is
        self._mailbox = MailboxReader(engines[0].completion) if len(engines) == 1 else None
        if self._mailbox is not None:
            loop.add_reader(self._mailbox.fd, self._drain)

    def on_done(self, future: Future, callback: DoneCallback) -> bool:
        """Call `callback(future)` once it is done. Returns False, without a call, when it is done
        already.
        """
        if self._mailbox is not None:
            return self._mailbox.add(future, callback)
        if future.done():
            return False
        waiter = asyncio.ensure_future(_until_done(future), loop=self._loop)
        self._awaiting.add(waiter)
        waiter.add_done_callback(self._awaiting.discard)
        waiter.add_done_callback(lambda _: _notify(future, callback))
        return True

    def post(self, step: Callable[..., object], *args: object) -> None:
        """Call `step(*args)` on the loop, from any thread. Ignored once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(step, *args)

    def _drain(self) -> None:
        assert self._mailbox is not None
        for future, callback in self._mailbox.drain():
            _notify(future, callback)

    def close(self) -> None:
        """Stop watching."""
        if self._mailbox is not None:
            self._loop.remove_reader(self._mailbox.fd)
            self._mailbox = None


async def _until_done(future: Future) -> None:
    try:
        await future
    except Exception:
        return  # the future keeps what it ended with


def _notify(future: Future, callback: DoneCallback) -> None:
    try:
        callback(future)
    except Exception:
        _log.exception("what waited for %r raised", future)
