"""Move of a set's rows to another set with another number of shards, as its shards do it.

Each shard of the old set sends each shard of the new one its part of the rows, and then what
changes, as it sends its changes to a follower. When the new shards have nearly all, the
supervisor (clipper.params.local.live_reshard) seals the old shards: they take no pushes for some
milliseconds, and send the rest. Then they take no pulls either, and the decision file is written:
from then on the new set serves, and the old one refuses everything with the new addresses. Until
then the old set can go on at any time. So every push is applied by one of the two.

A push that was not acknowledged may have been applied by some of the old shards. Which ones is
known, since they no longer change: the new shards get, for each old shard, the sequences that it
has seen, under a worker number made of the worker, the new set and the old shard (`origin_worker`).
The client divides each old shard's part of the push over the new shards under this number, and they
apply it unless the old shard has.

With synchronous steps shard 0 is sealed first. The others take what it has accepted until all have
the same pushes for the same step; then they are sealed, and the pushes that wait for a step move
too. A push was accepted by all then, or by none, so the client makes it again as a whole, under the
number that is made of shard 0. If a worker hung so long between shard 0 and the others that these
made the step without it, they have not seen its push, and the new shards refuse it.

The whole set moves, rather than slots of ids between running shards: replicas, logs, snapshots, and
the sequences that were seen, each belong to a shard whose part of the ids is fixed, and need not
change. It takes the memory of both sets while it lasts.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from clipper.component import State, Stop, Worker
from clipper.errors import ClipperError, DoesNotFit, ShardAway
from clipper.params.local.address_file import read_address_file
from clipper.params.partition import shard_of_name
from clipper.params.shard.durability.recovery import SEQUENCES
from clipper.params.shard.parameters import DENSE, PIECE_BYTES, Piece
from clipper.params.shard.replication.followers import pushes_paused
from clipper.params.shard.resharding.decision import decide, durable_decision, noted_move
from clipper_container.params.connection import ShardConnection, addresses_in, call
from clipper_container.params.rows import split_by_shard

if TYPE_CHECKING:
    from clipper.params.shard.shard import CallId, Shard

log = logging.getLogger("clipper.params")
END_S = 60.0  # for the thread of a move, whose connections are interrupted
SLOT = 11  # follower number in the shard's log
OPEN, SEALED, CLOSED, MOVED = range(4)  # of ShardLoop.access
WORKERS_MAX = 1 << 15  # of all old shards: of each, the workers that pushed last are remembered
WORKERS_IN_PIECE = 4096
PUSHES_IN_PIECE = 1 << 15
ANSWER_S = 30.0  # of a new shard
IDLE_S = 0.002  # between two looks for changes
NEAR_BYTES = 1 << 20  # changes that are sent in less than the pause


class RowSender:
    """Sends the rows of one shard to the shards of another set. Threads: its own; `seal` and
    `stop`, any.
    """

    def __init__(self, shard: "Shard", to: Path) -> None:
        addresses, token = addresses_in(to)
        self._shard = shard
        self._targets = [
            ShardConnection(i, addresses.__getitem__, token, None, ANSWER_S)
            for i in range(len(addresses))
        ]
        self._epochs = [0] * len(addresses)
        self._specs: Piece = {}
        self._drops = shard.parameters.drops
        self._error = ""
        self.sent, self.total = 0, shard.parameters.row_bytes
        self._is_near = False  # what is left is little
        self._seals = self._wanted = self._done = 0  # counts: the one to send all for; 0: none
        self._worker = Worker("clipper-shard-move", self._run, once=True)
        self._worker.start()

    def seal(self, sealed: bool) -> None:
        """Send the rest, since nothing changes any more; or go on, since it does."""
        self._seals += sealed
        self._wanted = self._seals if sealed else 0

    @property
    def error(self) -> str:
        """Return why it has ended, if it failed."""
        health = self._worker.health()
        return self._error or (health.why if health.state is State.FAILED else "")

    @property
    def phase(self) -> str:
        """Return copy, follow, or sealed (all was sent and taken since the last seal)."""
        if not self._is_near:
            return "copy"
        return "sealed" if 0 < self._wanted == self._done else "follow"

    def stop(self) -> None:
        """Have the thread end."""
        self._worker.request_stop()
        for target in self._targets:
            target.interrupt()

    @property
    def runs(self) -> bool:
        """Tell whether the thread has not ended."""
        return self._worker.is_running

    def end(self) -> None:
        """Wait for the end of the thread, at most END_S."""
        self._worker.end(END_S)

    # -- the thread

    def _run(self, stop: Stop) -> None:
        try:
            self._copy()
            while not stop.requested:
                wanted = self._wanted
                if wanted:
                    with pushes_paused(self._shard.core):
                        pass  # the push that was applied just now is in the log
                size = self._send_changes()
                if wanted and not size and self._done != wanted:
                    self._send([{**self._state(), **one} for one in self._open_pushes()])
                    self._done = wanted
                self._is_near |= size < NEAR_BYTES
                if not size:
                    stop.wait(IDLE_S)
        except Exception as error:
            if not isinstance(error, ClipperError | OSError):
                log.exception("shard %d does not move", self._shard.config.number)
            self._error = str(error) or type(error).__name__
        finally:
            self._shard.core.unfollow(SLOT)
            for target in self._targets:
                target.close()

    def _copy(self) -> None:
        core = self._shard.core
        with pushes_paused(core):
            core.follow(SLOT)
            seen = core.pushes_seen()
        last = sorted(seen.items(), key=lambda pair: SEQUENCES.unpack(pair[1])[1], reverse=True)
        last = last[: WORKERS_MAX // self._shard.config.shards]
        for at in range(0, max(1, len(last)), WORKERS_IN_PIECE):
            some = dict(last[at : at + WORKERS_IN_PIECE])
            self._send([{"seen": some} for _ in self._targets])
        for piece in self._shard.parameters.pieces():
            self._send_piece(piece)
            self._send_changes()
            if self._worker.stop.requested:
                return

    def _send_changes(self) -> int:
        """Send what has changed. Return its size in bytes, at least 1 for a push without rows."""
        core, parameters = self._shard.core, self._shard.parameters
        with pushes_paused(core):
            found = core.changed(SLOT)
            if found is None:
                raise DoesNotFit("more changes than the log of changes has room for.")
            position, changed, pushes = found
            few = parameters.size_of(changed) <= PIECE_BYTES
            chunks = [parameters.of(changed)] if few else []
        core.acknowledge(SLOT, position)
        if not changed and not pushes:
            return 0
        pieces: Iterable[Piece] = chunks or map(parameters.of, parameters.chunks(changed))
        for piece in pieces:
            self._send_piece(piece)
        for at in range(0, max(1, len(pushes)), PUSHES_IN_PIECE):
            pairs = [n for pair in pushes[at : at + PUSHES_IN_PIECE] for n in pair]
            self._send([{"told": pairs, **self._state()} for _ in self._targets])
        return max(1, parameters.size_of(changed))

    def _state(self) -> Piece:
        """Return what belongs to all rows: steps, versions, and the optimizer of variables."""
        parameters = self._shard.parameters
        each = zip(parameters.specs, parameters.tables, strict=False)
        return {
            "steps": {spec.name: table.steps for spec, table in each if spec.name},
            "version": self._shard.core.version,
            "dense": parameters.dense.summary(),
        }

    def _open_pushes(self) -> list[Piece]:
        """Return, for each new shard, its part of the pushes that wait for a step. Raises
        DoesNotFit."""
        parameters, shards = self._shard.parameters, len(self._targets)
        names = [name for name, _ in parameters.dense.names()]
        each: list[Piece] = [{"gathered": []} for _ in self._targets]
        for push in parameters.gathered:
            if not push["sequence"]:
                raise DoesNotFit("a push without a sequence waits for its step.")
            head = {key: push[key] for key in ("step", "worker", "sequence", "scale")}
            parts: list[Piece] = [{**head, "variables": {}, "rows": []} for _ in self._targets]
            for number, gradient in push["variables"].items():
                name = names[int(number)]
                parts[shard_of_name(name, shards)]["variables"][name] = gradient
            for row in push["rows"]:
                table = parameters.specs[row["table"]].name
                for shard, at in split_by_shard(row["ids"], shards):
                    mine = {"ids": row["ids"][at], "gradients": row["gradients"][at]}
                    parts[shard]["rows"].append({"table": table, **mine})
            for one, part in zip(each, parts, strict=True):
                one["gathered"].append(part)
        return each

    def _send_piece(self, piece: Piece) -> None:
        """Divide a piece, as Parameters has it, over the new shards."""
        names = {number: name for name, number in self._shard.parameters.numbers().items()}
        shards = len(self._targets)
        each: list[Piece] = [{"rows": [], "variables": []} for _ in self._targets]
        for part in piece.get("rows", ()):
            name, ids = names.get(part["table"]), part["ids"]
            if name is None:
                continue  # it was dropped
            self.sent += part["rows"].nbytes
            for shard, at in split_by_shard(ids, shards):
                rows = {key: part[key][at] for key in ("ids", "rows", "stamps")}
                each[shard]["rows"].append({"table": name, **rows})
            gone = part.get("gone", ids[:0])
            for shard, at in split_by_shard(gone, shards):
                each[shard]["rows"].append({"table": name, "gone": gone[at]})
        for variable in piece.get("variables", ()):
            mine = each[shard_of_name(variable["name"], shards)]
            mine["variables"].append(variable)
            mine["dense"] = self._shard.parameters.dense.summary()
        self._send(each if any(one["rows"] or one["variables"] for one in each) else [])

    def _send(self, each: list[Piece]) -> None:
        """Send each new shard its message, and wait until all have taken theirs. Raises OSError,
        ClipperError."""
        parameters = self._shard.parameters
        if parameters.drops != self._drops:
            raise DoesNotFit("a table was dropped while the set moved.")
        specs = {"specs": [msgspec.to_builtins(spec) for spec in parameters.specs if spec.name]}
        if specs != self._specs and each:
            self._specs = specs
            each = [{**specs, **one} for one in each]
        source = self._shard.config.number
        requests = [call("fill", source=source, **one) for one in each]
        for target, request in zip(self._targets, requests, strict=False):
            target.send(request)
        for target, request in zip(self._targets, requests, strict=False):
            head = target.wait_for_answer(request)
            before = self._epochs[target.number]
            self._epochs[target.number] = head.epoch
            if before not in (0, head.epoch):
                raise ShardAway(f"{target.name}: it was restarted while it was filled.")


class SetMove:
    """State of the move of this shard's rows to another set. Threads: the answering one.

    A shard that was sealed and hears nothing for twice the pause decides that the set stays.
    """

    def __init__(self, shard: "Shard") -> None:
        self._shard = shard
        self._to: Path | None = None
        self._sender: RowSender | None = None
        self._moves = False
        self._until_s = 0.0  # then the move is given up, if the shard is sealed
        self._pause_s = 0.0

    def restore(self) -> None:
        """Learn, before this shard serves, of a move that was under way when it ended: if it is not
        decided, the set stays."""
        home = self._shard.config.home
        to = noted_move(home) if home is not None else None
        if to is not None and decide(to, "abort") == "commit":
            self._to, self._shard.core.access = to, MOVED

    def start(self, message: Piece, _: "CallId") -> Piece:
        """Start to send rows. to: folder of the new set. pause_s: longest pause of pushes. Raises
        ShardAway; DoesNotFit if the rows have moved."""
        access = self._shard.core.access
        if access == MOVED:
            raise DoesNotFit(f"shard {self._shard.config.number} has moved.")
        if access != OPEN or (self._sender is not None and (self._moves or self._sender.runs)):
            raise ShardAway(f"shard {self._shard.config.number} moves already.")
        self._to, self._pause_s = Path(message["to"]), float(message["pause_s"])
        self._sender, self._moves = RowSender(self._shard, self._to), True
        return {}

    def state(self, _: Piece, __: "CallId") -> Piece:
        """Return the phase, what was sent, in bytes, and of how much. steps: the same on all
        shards if they have the same pushes for the same synchronous step."""
        one, access = self._sender if self._moves else None, self._shard.core.access
        if one is None:
            nothing = {"phase": "", "sent": 0, "total": 0, "access": access, "steps": ""}
            return {**nothing, "error": "it was restarted"}
        return {
            "phase": one.phase,
            "error": one.error,
            "sent": one.sent,
            "total": one.total,
            "access": access,
            "steps": self._steps(),
        }

    def _steps(self) -> str:
        pushes = [(p["step"], p["worker"], p["sequence"]) for p in self._shard.parameters.gathered]
        text = repr((self._shard.core.version, sorted(pushes)))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def seal(self, message: Piece, _: "CallId") -> Piece:
        """Take no pushes, or with `sealed` false take them again. Raises ShardAway."""
        sealed, one = bool(message["sealed"]), self._sender
        if one is None or not self._moves:
            raise ShardAway(f"shard {self._shard.config.number} does not move.")
        if not sealed:
            one.seal(sealed)  # before there are changes that were not sent
        self._until_s = time.monotonic() + 2 * self._pause_s
        self._shard.core.access = SEALED if sealed else OPEN
        if sealed:
            one.seal(sealed)
        return {}

    def close(self, _: Piece, __: "CallId") -> Piece:
        """Take no pulls either, since the new set is about to serve. Raises ShardAway."""
        one = self._sender
        if one is None or one.phase != "sealed" or self._shard.core.access != SEALED:
            raise ShardAway(f"shard {self._shard.config.number} is not sealed.")
        self._shard.core.access = CLOSED
        self._shard.core.note(DENSE, [])
        self._shard.changes.lose()  # who watches rows asks again, and is refused
        return {}

    def finish(self, _: Piece, __: "CallId") -> Piece:
        """Do what was decided."""
        to, one = self._to, self._sender
        word = durable_decision(to) if to is not None else "abort"
        if word and one is not None and self._moves:
            one.stop()
            self._moves = False
            self._shard.core.access = MOVED if word == "commit" else OPEN
            self._to = to if word == "commit" else None
        return {"decision": word}

    def tick(self, now_s: float) -> None:
        """Do what was decided; give a move up that nobody continues while this shard is sealed."""
        if not self._moves or self._to is None:
            return
        if self._shard.core.access != OPEN and now_s > self._until_s:
            log.warning("shard %d: nobody continues the move", self._shard.config.number)
            with contextlib.suppress(OSError):  # no room: tried again
                decide(self._to, "abort")
        self.finish({}, (0, 0, 0))

    def whereabouts(self, _: Piece, __: "CallId") -> Piece:
        """Return the addresses and the number of the set that has the rows of this one: it may be
        this one."""
        access, home = self._shard.core.access, self._shard.config.home
        at = self._to if access == MOVED else home if access == OPEN else None
        if at is None:
            raise DoesNotFit(f"shard {self._shard.config.number} does not know where its rows are.")
        known = read_address_file(at)
        return {key: known.get(key) for key in ("addresses", "generation", "before")}

    def end(self) -> None:
        """End the move, when this shard takes nothing any more, so that it is known whether it
        keeps its rows. Threads: the one that closes the shard."""
        if self._moves and self._to is not None:
            with contextlib.suppress(OSError):  # no room
                decide(self._to, "abort")
            self.finish({}, (0, 0, 0))
        if self._sender is not None:
            self._sender.stop()
            self._sender.end()
