"""Row watcher of a server: follows the rows that cached predictions were made of.

One thread keeps a request open at every shard: which rows have changed since the last answer? It
pulls changed rows that some prediction depends on, and rows that were followed just now. While a
shard is away, or reports that it cannot tell the changes, all predictions are dropped, and nothing
is cached until all shards have answered again.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import ClipperError, InvalidInput, ShardsMoved, UnknownTable
from clipper.params.client.client import Client
from clipper.params.client.row_drift import Ids, Key, RowDrift, generations
from clipper.types import UserValue
from clipper_container.params.connection import (
    SetAddress,
    ShardConnection,
    ShardRequest,
    call,
    set_in,
)
from clipper_container.params.frames import unpacked

_log = logging.getLogger(__name__)
WAIT_S = 1.0  # longest time that a request stays open
ANSWER_S = 3.0  # a shard that is silent for so long is away
PACE_S = 0.01  # between an answer and the next request
AGAIN_S = 0.1  # before a shard that is away is tried again
GATHER_S = 0.005  # new rows within this time are pulled together
ROWS_A_PREDICTION = 4  # followed rows per prediction, on average


class WatchedPredictions:
    """The cached predictions of one model; `clipper_core.engine.model.Model.watch` calls it.
    Threads: any.

    reads: returns the ids of each table that an input reads, or None if that is unknown. made_max:
    predictions that are followed. forget: called with key and number of a dropped prediction.
    """

    def __init__(
        self,
        watching: "RowWatcher",
        reads: Callable[[UserValue], Mapping[str, Ids] | None],
        tolerance: float,
        made_max: int,
        forget: Callable[[Key, int], object],
    ) -> None:
        self._watching, self._reads = watching, reads
        self.moves = RowDrift(tolerance, made_max, made_max * ROWS_A_PREDICTION, forget)
        self.guard = threading.Lock()
        self.uncached = 0  # queries whose rows could not be followed
        self._find = self.moves.find

    def __call__(self, x: object, lo: int, hi: int) -> int:
        """Return the number under which the prediction of x is cached. lo, hi: its key."""
        made = self._find((lo, hi))
        return (made.generation if made is not None else 0) or self._enter(x, (lo, hi))

    def _enter(self, x: object, key: Key) -> int:
        reads = self._reads(x) if self._watching.knows else None
        if reads is not None:
            with self.guard:
                if self._watching.knows:  # `knows` is cleared before all predictions are dropped
                    number = self.moves.enter(key, reads)
                    if self.moves.has_new:
                        self._watching.wake()
                    return number
        self.uncached += 1
        return next(generations)

    def stats(self) -> dict[str, object]:
        """Return statistics.

        predictions, rows: number that are followed. forgotten: dropped predictions by reason.
        uncached: queries whose rows could not be followed. knows: whether all shards answer.
        """
        moves = self.moves
        return {
            "predictions": len(moves),
            "rows": moves.rows,
            "tolerance": moves.tolerance,
            "forgotten": dict(moves.forgotten),
            "uncached": self.uncached,
            "knows": self._watching.knows,
        }


class ShardWatch:
    """State of the request at one shard.

    request: the open one. number: its number, or that of the last. position: of the last answer;
    -1: nothing is known. due_s: when to send the next, or to give up. away: it did not answer.
    """

    def __init__(self, connection: ShardConnection, number: int = 0) -> None:
        self.connection = connection
        self.request: ShardRequest | None = None
        self.number, self.position, self.epoch, self.due_s = number, -1, -1, 0.0
        self.away = False


class RowWatcher:
    """Watches the rows of one set. The first `watched()` starts its thread, stop() ends it.
    Threads: any.

    shards: folder of a set on this host. knows: whether all shards have answered.
    """

    def __init__(self, shards: str | os.PathLike[str]) -> None:
        self._shards = shards
        self.knows = False
        self._watched: tuple[WatchedPredictions, ...] = ()
        self._guard = threading.Lock()
        self._worker = Worker("clipper-watching", self._run, once=True, again=Backoff(0.1, 5.0))
        self._stopping = self._woken = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._client: Client
        self._posts: list[ShardWatch] = []
        self._place = SetAddress([], "")  # of the set that is watched

    def watched(
        self,
        reads: Callable[[UserValue], Mapping[str, Ids] | None],
        tolerance: float,
        made_max: int,
        forget: Callable[[Key, int], object],
    ) -> WatchedPredictions:
        """Start to follow the predictions of a model, until `remove`."""
        new = WatchedPredictions(self, reads, tolerance, made_max, forget)
        with self._guard:
            self._watched = (*self._watched, new)
            if not (self._worker.is_started or self._stopping):
                self._worker.start()
        return new

    def remove(self, watched: object) -> None:
        """Stop to follow the predictions of a model."""
        with self._guard:
            self._watched = tuple(one for one in self._watched if one is not watched)

    def wake(self) -> None:
        """Tell the thread that there are new rows to pull."""
        if self._woken:
            return
        with self._guard:
            if not self._stopping:
                self._woken = True
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread and drop all predictions."""
        with self._guard:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        has_ended = self._worker.end()
        self._forget_all("the server ends")
        if has_ended:
            os.close(self._wake)

    def health(self) -> list[Health]:
        """Return the state of the thread, if there is one."""
        return [self._worker.health()] if self._worker.is_started else []

    # -- the thread

    def _run(self, stop: Stop) -> None:
        while not self._stopping:
            try:
                self._watch_set()
                self._client = Client(self._shards, patience_s=ANSWER_S, answer_s=ANSWER_S)
                break
            except ClipperError as error:
                _log.warning("nothing is cached of models that read tables: %s", error)
                self._pause(1.0)
        else:
            return
        try:
            while not self._stopping:
                self._turn()
        finally:
            for post in self._posts:
                post.connection.close()
            self._posts, self._place = [], SetAddress([], "")
            self._client.close()
            # no prediction may outlive a change that nobody watches for
            self._forget_all("the watch of the shards has ended")

    def _watch_set(self) -> None:
        """Have a watch of each shard, anew when the set was resharded. Raises InvalidInput."""
        place = set_in(self._shards)
        if place.generation == self._place.generation:
            return
        number = max((post.number for post in self._posts), default=0)
        for post in self._posts:
            post.connection.close()
        self._place = place
        self._posts = [ShardWatch(self._connection(i), number) for i in range(len(place.addresses))]
        self._forget_all("the set was resharded")

    def _connection(self, shard: int) -> ShardConnection:
        token = self._place.token
        return ShardConnection(shard, self._address, token, None, ANSWER_S, check=self._check)

    def _address(self, shard: int) -> str:
        place = set_in(self._shards)
        if place.generation == self._place.generation:
            self._place = place
        return self._place.addresses[shard]

    def _check(self, generation: int) -> None:
        """Check that a shard is of the set that is watched. Raises ShardsMoved."""
        if generation != self._place.generation:
            raise ShardsMoved("the set was resharded.")

    def _pause(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.poll(seconds * 1000)

    def _turn(self) -> None:
        now = time.monotonic()
        if any(post.away for post in self._posts):
            with contextlib.suppress(InvalidInput):
                self._watch_set()
        for post in self._posts:
            if post.request is None and now >= post.due_s:
                self._query(post, now)
            elif post.request is not None and now >= post.due_s:
                self._is_away(post, "it does not answer")
        for post in self._answered_watches():
            self._receive(post)
        if self._woken:
            time.sleep(GATHER_S)
            self._pull_new_rows()

    def _answered_watches(self) -> list[ShardWatch]:
        """Wait for answers. Returns the shards that answered; none if something else is due."""
        poll, open_at = select.poll(), {}
        poll.register(self._wake, select.POLLIN)
        for post in self._posts:
            if post.request is not None and (fd := post.connection.fileno()) >= 0:
                open_at[fd] = post
                poll.register(fd, select.POLLIN)
        until_s = min(post.due_s for post in self._posts) - time.monotonic()
        return [open_at[fd] for fd, _ in poll.poll(max(0.0, until_s) * 1000 + 1) if fd in open_at]

    def _query(self, post: ShardWatch, now: float) -> None:
        request = call("watch", since=post.position, epoch=post.epoch, wait_s=WAIT_S)
        post.number += 1
        try:
            post.connection.send(request)
        except (OSError, ClipperError) as error:
            self._is_away(post, str(error))
            return
        post.request, post.due_s = request, now + WAIT_S + ANSWER_S

    def _receive(self, post: ShardWatch) -> None:
        request = post.request
        assert request is not None
        try:
            post.connection.wait_for_answer(request)
            answer = unpacked(request.body)
        except (OSError, ClipperError) as error:
            self._is_away(post, str(error))
            return
        post.request, post.due_s, post.away = None, time.monotonic() + PACE_S, False
        known = post.position >= 0
        post.position, post.epoch = int(answer["position"]), int(answer["epoch"])
        if answer["lost"]:
            if known:
                self._forget_all(f"{post.connection.name} has changed too much to be sent")
            self.knows = all(one.position >= 0 for one in self._posts)
            return
        for table, ids in answer["rows"].items():
            self._moved(post, str(table), ids)

    def _is_away(self, post: ShardWatch, why: str) -> None:
        post.connection.close()
        post.request, post.due_s, post.away = None, time.monotonic() + AGAIN_S, True
        if post.position >= 0:
            post.position = -1
            self._forget_all(f"{post.connection.name}: {why}")

    def _forget_all(self, why: str) -> None:
        """Drop all predictions, since changes of rows may have been missed."""
        self.knows = False
        if not self._stopping and any(len(one.moves) for one in self._watched):
            _log.warning("all predictions that were made of rows are forgotten: %s", why)
        for watched in self._watched:
            with watched.guard:
                watched.moves.forget_all("lost")

    # -- rows

    def _moved(self, post: ShardWatch, table: str, ids: Ids) -> None:
        """Pull rows that a shard has named."""
        mine = []
        for watched in self._watched:
            with watched.guard:
                followed = watched.moves.followed(table, ids)
            if followed.size:
                mine.append((watched, followed))
        if not mine:
            return
        each = np.unique(np.concatenate([followed for _, followed in mine]))
        try:
            values = self._client.pull(table, each)
        except ClipperError as error:
            self._is_away(post, str(error))
            return
        for watched, followed in mine:
            with watched.guard:
                watched.moves.moved(
                    table, followed, values[np.searchsorted(each, followed)], post.number
                )

    def _pull_new_rows(self) -> None:
        """Pull the rows that are followed since just now for the first time."""
        self._woken = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for watched in self._watched:
            with watched.guard:
                new = watched.moves.new
            for table, ids in new.items():
                try:
                    values = self._client.pull(table, ids)
                except UnknownTable:
                    values = None  # its first rows count as changes
                except ClipperError as error:
                    _log.warning("rows of table %r cannot be followed: %s", table, error)
                    values = None
                surely = [post.number + 2 for post in self._posts]
                with watched.guard:
                    watched.moves.set_first_values(table, ids, values, surely)
