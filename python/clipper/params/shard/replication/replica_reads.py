"""Pulls that a shard answers from its copies of other shards.

A reader says how old the rows may be, and which push they must have. A copy is as old as the last
time of which it is known to have all: a follower sends its clock with each message, and the primary
returns it with what it sends next, so the bound does not depend on clocks of two hosts. If the copy
does not have what is wanted, it requests changes from the primary at once, and the pull waits for a
moment; the client goes to the primary then. Source: reads of secondaries in MongoDB
(maxStalenessSeconds and afterClusterTime), and the read index in section 6.4 of Ongaro's thesis on
Raft.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from clipper.errors import InvalidInput, UnknownTable
from clipper.params.shard.parameters import Ids, Piece
from clipper.params.shard.replication.followers import ReplicaFollower
from clipper_container.params.frames import DTYPES, packed

WAIT_S_MAX = 1.0  # for a copy to catch up
OPEN_MAX = 1024  # pulls that wait; more go to the primary at once
CallId = tuple[int, int, int]
BEHIND: Piece = {"behind": True}


class ReplicaPull(NamedTuple):
    """A pull of rows from a copy. since_s: the time from which on it must have all. push: (epoch,
    version) that it must have; None: any."""

    call_id: CallId
    follower: ReplicaFollower
    table: str
    ids: Ids
    dtype: str
    since_s: float
    push: tuple[int, int] | None
    until: float


class ReplicaReads:
    """Pulls from the copies of one shard. Threads: the answering one.

    copies: by shard. answer: sends (call, payload) later. served, behind: pulls that a copy has
    answered, and that were sent to the primary.
    """

    def __init__(
        self, copies: Mapping[int, ReplicaFollower], answer: Callable[[CallId, bytes], None]
    ) -> None:
        self._copies, self._answer = copies, answer
        self._open: list[ReplicaPull] = []
        self.served = self.behind = 0

    def pull(self, request: Piece, call_id: CallId, now: float) -> Piece | None:
        """Return the answer to a pull; None if it is sent later. Raises InvalidInput."""
        follower = self._copies.get(int(request.get("shard", -1)))
        ids, dtype, after = (
            request.get("ids"),
            str(request.get("dtype", "f32")),
            request.get("after"),
        )
        staleness_s, wait_s = request.get("max_staleness_s"), request.get("wait_s", 0.0)
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
            raise InvalidInput("pull_replica: ids are i64[n].")
        if dtype not in DTYPES:
            raise InvalidInput(f"no dtype {dtype!r} of rows: {', '.join(DTYPES)}.")
        if after is not None and not (isinstance(after, list) and len(after) == 2):
            raise InvalidInput(f"after is (epoch, version) of a push, not {after!r:.100}.")
        if follower is None:
            return self._behind()
        one = ReplicaPull(
            call_id,
            follower,
            str(request.get("table")),
            ids,
            dtype,
            -math.inf if staleness_s is None else now - float(staleness_s),
            None if after is None else (int(after[0]), int(after[1])),
            now + min(float(wait_s), WAIT_S_MAX),
        )
        found = self._rows(one)
        if found is None and now < one.until and len(self._open) < OPEN_MAX:
            self._open.append(one)
            follower.hurry()
            return None
        return found or self._behind()

    @property
    def poll_s(self) -> float:
        """Longest time for which the answering thread may sleep."""
        return 0.01 if self._open else math.inf

    def answer_open_questions(self, now: float) -> None:
        """Answer the pulls whose copies have caught up, or whose time is over."""
        waiting, self._open = self._open, []
        for one in waiting:
            found = self._rows(one)
            if found is None and now < one.until:
                self._open.append(one)
                one.follower.hurry()
            else:
                self._answer(one.call_id, packed(found or self._behind()))

    def _behind(self) -> Piece:
        self.behind += 1
        return BEHIND

    def _rows(self, one: ReplicaPull) -> Piece | None:
        copy = one.follower.replica
        if copy is None or not copy.has(one.since_s, one.push):
            return None
        try:
            table = copy.parameters.tables[copy.parameters.place(one.table)]
        except UnknownTable:
            return None  # the shard tells
        rows = table.pull(one.ids, one.dtype)
        self.served += 1
        return {"rows": rows[0] * rows[1][:, None] if one.dtype == "i8" else rows}
