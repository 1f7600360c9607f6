"""The store in a Redis server, 6.2 or newer, shared by the servers that use the same URL.

All keys share one prefix and can be read with redis-cli:

    clipper:revision       the store's revision
    clipper:born           time of the first write, by which a store that was emptied is known
    clipper:r:KEY          hash: value, revision, created, version, and lease if it has one
    clipper:keys           sorted set of all keys, for ranges in byte order
    clipper:events         stream of recent changes; an entry's id is REVISION-N
    clipper:forgotten      changes up to this revision are no longer in the stream
    clipper:leases         sorted set: lease ids by their end, ms by the server's clock
    clipper:lease_ms       hash: time to live of each lease
    clipper:granted        stream of the newest lease, which wakes who waits for the end of leases
    clipper:leased:LEASE   set: the keys of a lease
    clipper:l:, clipper:b: lists and sets that expire: store/redis/lists.py

A transaction is one Lua script and therefore atomic. The durability is that of Redis: with
`appendonly yes` a power cut, or a kill while the disk is busy, loses up to two seconds; with
`appendfsync always` nothing is lost. A server that was started again may have gone back in time:
its watches deliver RESET.

Each read, write or watch after the end of a lease deletes its keys. A jump of the server's wall
clock ends leases early or late.

When the connection breaks during a command, the command may have been executed. The caller gets
StoreError, and repeating `put_if` shows which.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgpack

from clipper.errors import ConfigError, ForkedProcess, StoreError, without_secrets
from clipper.store.redis.lists import RedisClient as RedisClient
from clipper.store.redis.lists import RedisLists
from clipper.store.redis.watch import ChangeReader, Changes, RedisWatch, Waited
from clipper.store.store import (
    EVENTS_MAX,
    Compare,
    Delete,
    Get,
    Op,
    Put,
    Record,
    Store,
    TxnResult,
    Watch,
    check_txn,
    closed_error,
    lost_error,
)

if TYPE_CHECKING:
    from redis.commands.core import Script

PATIENCE_S: Final = 5.0  # timeout of a command
_KINDS = {Put: 1, Delete: 2, Get: 3}
_LAST = (1 << 63) - 1

_START = """
local p, most = ARGV[1], tonumber(ARGV[2])
local function plain(n) return string.format('%.0f', n) end
local function current() return tonumber(redis.call('GET', p .. 'revision') or '0') end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function load(key)
  local r = redis.call('HMGET', p .. 'r:' .. key,
    'value', 'revision', 'created', 'version', 'lease')
  if not r[2] then return false end
  r[5] = r[5] or ''
  return r
end
local function erase(key, id)
  redis.call('DEL', p .. 'r:' .. key)
  redis.call('ZREM', p .. 'keys', key)
  redis.call('XADD', p .. 'events', id, 'kind', 'DELETE', 'key', key)
end
local function commit(revision)
  redis.call('SET', p .. 'revision', plain(revision))
  if revision == 1 then redis.call('SET', p .. 'born', time[1] .. '.' .. time[2]) end
  while redis.call('XLEN', p .. 'events') > most do
    local first = redis.call('XRANGE', p .. 'events', '-', '+', 'COUNT', 1)[1][1]
    local oldest = tonumber(string.match(first, '^%d+'))
    if oldest == revision then break end
    redis.call('XTRIM', p .. 'events', 'MINID', plain(oldest + 1) .. '-0')
    redis.call('SET', p .. 'forgotten', plain(oldest))
  end
end
local function finish(lease)
  local keys = redis.call('SMEMBERS', p .. 'leased:' .. lease)
  redis.call('DEL', p .. 'leased:' .. lease)
  redis.call('ZREM', p .. 'leases', lease)
  redis.call('HDEL', p .. 'lease_ms', lease)
  if #keys == 0 then return end
  table.sort(keys)
  local revision = current() + 1
  for i, key in ipairs(keys) do erase(key, string.format('%.0f-%d', revision, i)) end
  commit(revision)
end
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', p .. 'leases', '-inf', now)) do
  finish(lease)
end
"""

_TXN = (
    _START
    + """
local t = cmsgpack.unpack(ARGV[3])
local fields = {revision = 2, created_revision = 3, version = 4}
local ok = true
for _, c in ipairs(t[1]) do
  local r = load(c[1])
  if c[2] == 'value' then
    ok = ok and r and r[1] == c[3]
  else
    ok = ok and (r and tonumber(r[fields[c[2]]]) or 0) == c[3]
  end
end
local ops, found, changed = ok and t[2] or t[3], {}, 0
for i, op in ipairs(ops) do
  if op[1] == 3 then found[i] = load(op[2]) end
  if op[1] == 1 and op[4] ~= '' and not redis.call('ZSCORE', p .. 'leases', op[4]) then
    return {-1, current(), op[4]}
  end
end
local revision = current() + 1
for i, op in ipairs(ops) do
  local key, old = op[2], op[1] < 3 and load(op[2])
  local id = string.format('%.0f-%d', revision, i)
  if old and old[5] ~= '' then
    redis.call('SREM', p .. 'leased:' .. old[5], key)
    redis.call('HDEL', p .. 'r:' .. key, 'lease')
  end
  if op[1] == 1 then
    local value, lease = op[3], op[4]
    local created = old and old[3] or plain(revision)
    local version = old and tonumber(old[4]) + 1 or 1
    local at = plain(revision)
    redis.call('HSET', p .. 'r:' .. key,
      'value', value, 'revision', at, 'created', created, 'version', version)
    redis.call('ZADD', p .. 'keys', 0, key)
    redis.call('XADD', p .. 'events', id, 'kind', 'PUT', 'key', key, 'value', value,
      'created', created, 'version', version, 'lease', lease)
    if lease ~= '' then
      redis.call('SADD', p .. 'leased:' .. lease, key)
      redis.call('HSET', p .. 'r:' .. key, 'lease', lease)
    end
    found[i], changed = {value, at, created, tostring(version), lease}, changed + 1
  elseif op[1] == 2 then
    found[i] = old
    if old then
      erase(key, id)
      changed = changed + 1
    end
  end
end
if changed == 0 then revision = revision - 1 else commit(revision) end
for i = 1, #ops do
  if found[i] == nil then found[i] = false end
end
return {ok and 1 or 0, revision, found}
"""
)

_GET = _START + "return load(ARGV[3])"

_RANGE = (
    _START
    + """
local out = {}
for i, key in ipairs(redis.call('ZRANGEBYLEX', p .. 'keys', ARGV[3], ARGV[4])) do
  out[i] = {key, load(key)}
end
return {current(), out}
"""
)

_EVENTS = (
    _START
    + """
local events = redis.call('XRANGE', p .. 'events', '(' .. ARGV[3] .. '-18446744073709551615', '+')
local known = redis.call('MGET', p .. 'forgotten', p .. 'revision', p .. 'born')
local first = redis.call('ZRANGE', p .. 'leases', 0, 0, 'WITHSCORES')
local due = first[2] and first[2] - now or -1
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''
return {tonumber(known[1] or '0'), tonumber(known[2] or '0'), due, events, known[3] or '', run}
"""
)

_RENEW = (
    _START
    + """
local ms = ARGV[4]
if ms then
  redis.call('HSET', p .. 'lease_ms', ARGV[3], ms)
  redis.call('XADD', p .. 'granted', 'MAXLEN', 1, '*', 'ms', ms)
else
  ms = redis.call('HGET', p .. 'lease_ms', ARGV[3])
  if not ms then return 0 end
end
redis.call('ZADD', p .. 'leases', plain(now + tonumber(ms)), ARGV[3])
return tonumber(ms)
"""
)

_REVOKE = _START + "finish(ARGV[3])"


class RedisStore(Store):
    """A store in Redis. Threads: any.

    url: `redis://HOST:PORT/DB`, `rediss://` for TLS, `unix:///PATH`; `?prefix=NAME:` replaces the
    prefix `clipper:`.
    events_max: changes kept for watches.
    Errors: StoreError when the server is unreachable, read-only, full or too old; ForkedProcess
    after a fork.
    """

    remote = True

    def __init__(self, url: str, events_max: int = EVENTS_MAX) -> None:
        try:
            import redis
        except ImportError:
            hint = "pip install 'clipper-serving[redis]'."
            raise ConfigError(
                f"state={without_secrets(url)!r} needs the package redis, which is not installed.",
                hint=hint,
            ) from None
        self.name = without_secrets(url)
        self._errors: ModuleType = redis.exceptions
        self._events_max = events_max
        self._pid = os.getpid()
        self._closed = False
        address, self._prefix = _without_prefix(url)
        try:
            self._redis: RedisClient = redis.Redis.from_url(
                address, socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
            )
        except ValueError as error:
            raise ConfigError(
                f"no store for state={self.name!r}: {error}.", hint="Write redis://HOST:PORT/DB."
            ) from None
        scripts = (
            self._redis.register_script(text)
            for text in (_TXN, _GET, _RANGE, _EVENTS, _RENEW, _REVOKE)
        )
        self._txn, self._get, self._range, self._tail, self._renew, self._revoke = scripts
        self._reader = ChangeReader(self, events_max, PATIENCE_S / 2)
        try:
            with self._exchange():
                self._redis.ping()
        except BaseException:
            self._redis.close()
            raise

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Wrap one exchange with the server: errors become StoreError with the store's name."""
        if self._closed:
            raise closed_error(self.name)
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"store {self.name} belongs to the process that opened it.",
                hint="Open it again in this process.",
            )
        try:
            yield
        except self._errors.ConnectionError as error:
            if self._closed:
                raise closed_error(self.name) from None
            why = str(error).rstrip(".")
            raise StoreError(
                f"store {self.name} cannot be reached: {why}.",
                hint="Check that redis-server is running there.",
            ) from None
        except self._errors.TimeoutError:
            raise StoreError(
                f"store {self.name} did not answer within {PATIENCE_S:g} s.",
                hint="Check the load of the server.",
            ) from None
        except self._errors.RedisError as error:
            raise StoreError(f"store {self.name} refused: {error}") from None
        except Exception as error:  # varies when the connection is closed under a watch
            if self._closed:
                raise closed_error(self.name) from None
            if not isinstance(error, OSError | ValueError):
                raise
            raise StoreError(f"store {self.name} cannot be reached: {error}.") from None

    def get(self, key: str) -> Record | None:
        """Return the record; None if the key does not exist."""
        with self._exchange():
            found = self._redis.hmget(
                self._prefix + "r:" + key, "value", "revision", "created", "version", "lease"
            )
            if found[4]:  # the lease may be over
                found = self._run(self._get, key) or [None] * 5
        return _record(key, found if found[1] is not None else None)

    def _run(self, script: "Script", *args: str | bytes | int) -> Any:
        return script(args=[self._prefix, self._events_max, *args])

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix and the revision of the snapshot."""
        raw = prefix.encode()
        low, high = (b"[" + raw, b"(" + raw + b"\xff") if raw else (b"-", b"+")
        with self._exchange():
            revision, found = self._run(self._range, low, high)
        records = [_record(key.decode(), parts) for key, parts in found]
        return [record for record in records if record is not None], revision

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Run a transaction; see `Store.txn`."""
        check_txn(compares, then, orelse)
        request = [[[c.key, c.field, c.equals] for c in compares], _packed(then), _packed(orelse)]
        with self._exchange():
            ok, revision, found = self._run(self._txn, msgpack.packb(request, use_bin_type=False))
        if ok < 0:
            raise lost_error(self.name, found.decode())
        ops = then if ok else orelse
        return TxnResult(
            bool(ok),
            tuple(_record(op.key, parts) for op, parts in zip(ops, found, strict=True)),
            revision,
        )

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """Grant a lease; return its id and its time to live in seconds."""
        id = secrets.token_hex(8)
        with self._exchange():
            self._run(self._renew, id, round(ttl_s * 1000))
        return id, ttl_s

    def renew(self, lease: str) -> float:
        """Renew a lease; return its time to live in seconds."""
        with self._exchange():
            ms = int(self._run(self._renew, lease))
        if not ms:
            raise lost_error(self.name, lease)
        return ms / 1000

    def revoke(self, lease: str) -> None:
        """End a lease and delete its keys."""
        with self._exchange():
            self._run(self._revoke, lease)

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Watch the keys under a prefix."""
        cursor = self.revision if from_revision is None else from_revision
        return RedisWatch(self._reader, prefix, cursor)

    def changes(self, after: int) -> Changes:
        """Return what changed after a revision; ends leases that are over."""
        with self._exchange():
            return Changes(*self._run(self._tail, after))

    def wait(self, after: int, granted: bytes, block_s: float) -> Waited:
        """Wait until something changes after a revision, or a lease is granted; see Waited.

        granted: id of the newest lease that is known, in the stream of granted leases.
        """
        events, leases = self._prefix + "events", self._prefix + "granted"
        after_id: dict[str, bytes | str] = {events: f"{after}-{_LAST}", leases: granted}
        with self._exchange(), self._redis.pipeline(transaction=False) as pipe:
            pipe.get(self._prefix + "revision")
            pipe.xread(after_id, count=1, block=max(1, round(block_s * 1000)))
            revision, found = pipe.execute()
        entries = {name.decode(): some[-1] for name, some in found}
        lease = entries.get(leases)
        return Waited(
            int(revision or 0),
            events in entries,
            None if lease is None else (lease[0], int(lease[1][b"ms"])),
        )

    @property
    def revision(self) -> int:
        """Return the revision of the newest change."""
        with self._exchange():
            return int(self._redis.get(self._prefix + "revision") or 0)

    def lists(self, ttl_s: float) -> RedisLists:
        """Return lists and sets that expire."""
        return RedisLists(self._redis, self._exchange, self._prefix, ttl_s)

    def close(self) -> None:
        """Close the connections; the watches end."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._reader.close()
        self._redis.close()
        for _ in range(100):  # its connection may have been made anew meanwhile
            if self._reader.has_ended(0.02):
                break
            self._redis.close()
        self._redis.close()


def _without_prefix(url: str) -> tuple[str, str]:
    address, _, query = url.partition("?")
    options = [option for option in query.split("&") if option]
    named = [option.removeprefix("prefix=") for option in options if option.startswith("prefix=")]
    rest = [option for option in options if not option.startswith("prefix=")]
    return address + ("?" + "&".join(rest) if rest else ""), named[-1] if named else "clipper:"


def _packed(ops: Sequence[Op]) -> list[list[object]]:
    return [
        [_KINDS[type(op)], op.key, *([op.value, op.lease] if isinstance(op, Put) else [])]
        for op in ops
    ]


def _record(key: str, parts: Sequence[bytes | None] | None) -> Record | None:
    """Return a record from the fields of its hash. A field that another program left out is empty:
    whoever decodes it names the record in the error, and the other records are read."""
    if not parts:
        return None
    value, revision, created, version, lease = parts
    at = int(revision or 0)
    return Record(
        key, value or b"", at, int(created or at), int(version or 1), (lease or b"").decode()
    )
