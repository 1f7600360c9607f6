"""One consumer in a consumer group of a Redis Stream. Redis 6.2 or newer.

Each entry has exactly one outcome. An entry that was read stays *pending* in its group until it is
acknowledged. The script `SETTLE` writes an outcome and acknowledges its entry in one step, and only
if the entry is pending. If an entry was delivered twice (its server was killed, froze, or lost its
connection after it had sent the outcome), the second outcome finds nothing pending and is dropped.
For the same reason an outcome that may not have arrived is sent again. This needs no list of
answered entries; a sorted set of recent ids serves producers that may add a record twice.

    SOURCE            stream; its group has the pending entries       (XPENDING SOURCE GROUP)
    ANSWERS, REFUSED  streams, about MAXLEN entries each
    ANSWERS:GROUP:ids sorted set: a record's id -> milliseconds of its entry         (ZSCORE)

The script writes before it acknowledges: Lua has no rollback, and if Redis runs out of memory
between the two, the entry must stay pending.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from clipper.errors import ConfigError, InvalidInput, without_secrets
from clipper.frontend.streams.records import Flat
from clipper.store.redis.store import RedisClient
from clipper_container.backoff import Backoff

BLOCK_MS: Final = 100  # a blocking read checks this often for its end
PATIENCE_S: Final = 5.0  # timeout of Redis
PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 2.0
SHOWN_BYTES_MAX: Final = 64 << 10  # longest field in the dead letters
_CLAIMS_A_PERIOD: Final = 3
_FORGET_PERIODS: Final = (
    20  # a silent consumer without entries is removed after so many claim periods
)
_T = TypeVar("_T")

Kind = Literal["answer", "refuse", "drop"]
ELSEWHERE, DONE, DUPLICATE = 0, 1, 2  # results of `settle`

_SETTLE = """
local group, most, refused_most, ids_most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local function add(key, max, fields)
  if max > 0 then redis.call('XADD', key, 'MAXLEN', '~', max, '*', unpack(fields))
  else redis.call('XADD', key, '*', unpack(fields)) end
end
local found, i = {}, 5
while i <= #ARGV do
  local entry, kind, id, n = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local fields = {}
  for j = 1, n do fields[j] = ARGV[i + 3 + j] end
  i = i + 4 + n
  local result = 1
  if #redis.call('XPENDING', KEYS[1], group, entry, entry, 1) == 0 then
    result = 0
  elseif kind == 'refuse' then
    add(KEYS[3], refused_most, fields)
  elseif id ~= '' and ids_most > 0 and redis.call('ZSCORE', KEYS[4], id) then
    result = 2
  elseif kind == 'answer' then
    add(KEYS[2], most, fields)
  end
  if result == 1 and kind ~= 'refuse' and id ~= '' and ids_most > 0 then
    redis.call('ZADD', KEYS[4], string.match(entry, '^%d+'), id)
    redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -ids_most - 1)
  end
  if result > 0 then redis.call('XACK', KEYS[1], group, entry) end
  found[#found + 1] = result
end
return found
"""  # noqa: E501

_TIDY = """
local gone = 0
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local about = {}
  for i = 1, #row, 2 do about[row[i]] = row[i + 1] end
  if about['pending'] == 0 and (about['name'] == ARGV[2] or about['idle'] > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], about['name'])
    gone = gone + 1
  end
end
return gone
"""


class StreamEntry(msgspec.Struct, frozen=True, eq=False):
    """An entry of a stream. deliveries: how often it was delivered, including this time."""

    id: str
    fields: dict[bytes, bytes]
    deliveries: int = 1


class EntryOutcome(msgspec.Struct, frozen=True, eq=False):
    """The outcome of an entry.

    kind: "answer" sends `fields` to the answers, "refuse" to the dead letters, "drop" nowhere. id:
    of the record, or ""; of two entries with the same id, the second gets no answer.
    """

    entry: str
    kind: Kind
    fields: Flat = []
    id: str = ""


class StreamNames(msgspec.Struct, frozen=True):
    """The keys of a group, and the maximum lengths of its streams."""

    source: str
    group: str
    answers: str
    refused: str
    answers_max: int = 0
    refused_max: int = 0
    ids_max: int = 0

    @property
    def ids(self) -> str:
        """The key of the sorted set of recent ids."""
        return f"{self.answers}:{self.group}:ids"


class ConsumerGroup:
    """One consumer of a group. Errors of Redis are not raised.

    They are noted in `trouble`, and the call is repeated after a pause that doubles, until the
    group is closed. consumer: a name that is unique to the process. Threads: one reads (`read`,
    `refresh`), one settles (`settle`); `close` and the counters are for any.
    """

    def __init__(self, url: str, names: StreamNames, consumer: str, claim_s: float) -> None:
        self.names = names
        self.consumer = consumer
        self.trouble = ""
        self.reconnect_count = self.reclaimed_count = self.trimmed_count = 0
        self._claim_s = claim_s
        self._closed = threading.Event()
        self._backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX)
        self._redis, self._errors = connected(url)
        self._settle, self._tidy = (self._redis.register_script(text) for text in (_SETTLE, _TIDY))
        self._made = False
        self._own: str | None = (
            None  # after a lost connection: id after which own entries may be unknown here
        )
        self._claim_from = "0-0"
        self._claim_due_s = 0.0

    # -- reading

    def read(self, count: int, mine: Collection[str]) -> list[StreamEntry]:
        """Return up to `count` entries that are not in `mine`; [] if none arrive within 0.1 s."""
        found = self._try(lambda: self._read(count, mine))
        return found or []

    def _read(self, count: int, mine: Collection[str]) -> list[StreamEntry]:
        self._make()
        if self._own is not None:
            found = self._take(count, self._own)
            self._own = found[-1].id if found else None
            return [entry for entry in found if entry.id not in mine]
        if time.monotonic() >= self._claim_due_s and (found := self._reclaim(count, mine)):
            return found
        return self._take(count, ">", BLOCK_MS)

    def _make(self) -> None:
        if self._made:
            return
        try:
            self._redis.xgroup_create(self.names.source, self.names.group, id="0", mkstream=True)
        except self._errors.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._made = True

    def _take(self, count: int, after: str, block_ms: int | None = None) -> list[StreamEntry]:
        found = self._redis.xreadgroup(
            self.names.group, self.consumer, {self.names.source: after}, count=count, block=block_ms
        )
        return [
            StreamEntry(id.decode(), fields)
            for _, entries in found or ()
            for id, fields in entries
            if fields
        ]

    def _reclaim(self, count: int, mine: Collection[str]) -> list[StreamEntry]:
        """Claim entries of silent consumers. It is repeated at once while there are more."""
        found = self._redis.xautoclaim(
            self.names.source,
            self.names.group,
            self.consumer,
            round(self._claim_s * 1000),
            self._claim_from,
            count=count,
        )
        self._claim_from = found[0].decode()
        self.trimmed_count += len(found[2]) if len(found) > 2 else 0
        entries = [(id.decode(), fields) for id, fields in found[1] if id is not None and fields]
        entries = [(id, fields) for id, fields in entries if id not in mine]
        if self._claim_from == "0-0":
            self._claim_due_s = time.monotonic() + self._claim_s / _CLAIMS_A_PERIOD
            self._tidy(
                keys=[self.names.source],
                args=[self.names.group, "", round(_FORGET_PERIODS * self._claim_s * 1000)],
            )
        self.reclaimed_count += len(entries)
        return [StreamEntry(id, fields, self._deliveries(id)) for id, fields in entries]

    def _deliveries(self, id: str) -> int:
        rows = self._redis.xpending_range(self.names.source, self.names.group, id, id, 1)
        return int(rows[0]["times_delivered"]) if rows else 1

    def refresh(self, mine: Sequence[str]) -> None:
        """Renew the claims on entries in progress, so that no other consumer takes them."""
        if mine:
            self._try(
                lambda: self._redis.xclaim(
                    self.names.source, self.names.group, self.consumer, 0, list(mine), justid=True
                )
            )

    @property
    def refresh_s(self) -> float:
        """The seconds between two renewals."""
        return self._claim_s / _CLAIMS_A_PERIOD

    # -- settling

    def settle(
        self, outcomes: Sequence[EntryOutcome], until_s: float | None = None
    ) -> list[int] | None:
        """Write the outcomes and acknowledge their entries, each in one step.

        Returns ELSEWHERE, DONE or DUPLICATE for each, or None if Redis could not be reached until
        `until_s` (time.monotonic(); None: until the group is closed).
        """
        names = self.names
        words: list[object] = [names.group, names.answers_max, names.refused_max, names.ids_max]
        for outcome in outcomes:
            words += [outcome.entry, outcome.kind, outcome.id, len(outcome.fields), *outcome.fields]
        keys = [names.source, names.answers, names.refused, names.ids]
        while True:
            found = self._try(lambda: [int(one) for one in self._settle(keys=keys, args=words)])
            if found is not None:
                return found
            if self._closed.is_set() or (until_s is not None and time.monotonic() > until_s):
                return None
            if not self._made:
                self._try(self._make)

    # -- the connection

    def call(self, fn: Callable[[RedisClient], _T]) -> _T | None:
        """Return `fn(redis)`; None, after a pause, if Redis is unreachable."""
        return self._try(lambda: fn(self._redis))

    def _try(self, fn: Callable[[], _T]) -> _T | None:
        """Return `fn()`; None, after a pause, if Redis is unreachable or reports an error."""
        try:
            found = fn()
        except (self._errors.RedisError, OSError, ValueError) as error:
            if self._closed.is_set():
                return None
            self._note(error)
            self._closed.wait(self._backoff.next_s())
            return None
        if self.trouble:
            self.trouble = ""
            self._backoff.reset()
            self.reconnect_count += 1
        return found

    def _note(self, error: Exception) -> None:
        self.trouble = f"{type(error).__name__}: {error}"
        if "NOGROUP" in str(error):  # Redis lost its data, or the stream was deleted
            self._made = False
        self._own = "0"  # entries sent while the connection broke are ours, but unknown here

    def leave(self) -> None:
        """Remove this consumer from the group if it has no pending entries."""
        with contextlib.suppress(self._errors.RedisError, OSError, ValueError):
            self._tidy(keys=[self.names.source], args=[self.names.group, self.consumer, 1 << 50])

    def stop_waiting(self) -> None:
        """End all waiting for Redis."""
        self._closed.set()

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        self._redis.close()


def connected(url: str) -> tuple[RedisClient, ModuleType]:
    """Return a client for `url` and redis-py's exceptions. The server need not be reachable yet.

    Raises ConfigError for an invalid URL, or without the package redis.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        hint = "pip install 'clipper-serving[redis]'."
        raise ConfigError(
            f"url={without_secrets(url)!r} needs the package redis, which is not installed.",
            hint=hint,
        ) from None
    if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"url={without_secrets(url)!r} names no Redis server.",
            hint="Write redis://HOST:PORT/DB.",
        )
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=PATIENCE_S,
            socket_connect_timeout=PATIENCE_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(
            f"url={without_secrets(url)!r}: {error}.", hint="Write redis://HOST:PORT/DB."
        ) from None
    return client, redis.exceptions


def refusal(entry: StreamEntry, source: str, kind: str, reason: str) -> EntryOutcome:
    """Return the dead letter of an entry: the reason, its position, and its fields unless they
    are long."""
    flat: Flat = [
        "refused.kind",
        kind,
        "refused.reason",
        reason,
        "refused.source",
        source,
        "refused.entry",
        entry.id,
    ]
    for name, value in _short(entry.fields):
        flat += [name, value]
    return EntryOutcome(entry.id, "refuse", flat)


def _short(fields: dict[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    room = 4 * SHOWN_BYTES_MAX
    for name, value in list(fields.items())[:100]:
        room -= len(name) + len(value)
        if len(value) <= SHOWN_BYTES_MAX and len(name) <= SHOWN_BYTES_MAX and room > 0:
            yield name, value


def check_names(names: StreamNames) -> None:
    """Raise InvalidInput if a name is empty, or two streams have the same name."""
    keys = [names.source, names.answers, names.refused]
    if not all((*keys, names.group)):
        raise InvalidInput(
            "a stream or group without a name; leave the setting out for its default."
        )
    if len(set(keys)) != len(keys):
        raise InvalidInput(
            f"source, answers and refused are three streams; these are {', '.join(keys)}."
        )
