"""The store in an etcd cluster, 3.4 or newer, shared by the nodes that use the same URL.

A record is an etcd key PREFIX/KEY, and revisions are etcd's: they count the writes of all clients
of the cluster. So a new store may start at any revision, and two prefixes share theirs. Leases are
etcd's too: whole seconds, at least as long as its election timeout (2 s by default). etcd keeps
every old value until compaction: run it with `--auto-compaction-retention=1h`, or its 2 GiB fill
up.

The stubs on grpcio are our own: no Python client offers TLS, several endpoints, and watches that
reconnect at once.
"""

import contextlib
import math
import os
import weakref
from collections.abc import Sequence
from typing import Final

from clipper.errors import ForkedProcess, StoreError
from clipper.store.etcd.address import parse_url
from clipper.store.etcd.channel import PATIENCE_S, EtcdChannel, is_lost_lease
from clipper.store.etcd.protocol import Message, message
from clipper.store.etcd.watch import EtcdWatch
from clipper.store.store import (
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
    lost_error,
)

_PAGE: Final = 20_000  # records per response
_TARGETS: Final = {
    "version": ("VERSION", "version"),
    "created_revision": ("CREATE", "create_revision"),
    "revision": ("MOD", "mod_revision"),
    "value": ("VALUE", "value"),
}


class EtcdStore(Store):
    """A store in etcd. Threads: any.

    url: `etcd://HOST:PORT,HOST:PORT/PREFIX`; see address.EtcdAddress for TLS and users.
    Errors: StoreError when no endpoint answers in time or etcd refuses; ForkedProcess after a fork.
    """

    remote = True

    def __init__(self, url: str) -> None:
        address = parse_url(url)
        self.name = address.shown
        self._prefix = address.prefix
        self._pid = os.getpid()
        self._lease_s: dict[str, float] = {}
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._channel = EtcdChannel(address)
        try:
            _ = self.revision
        except BaseException:
            self._channel.close()
            raise

    def _call(
        self, name: str, request: object, *, again: bool = False, patience_s: float = 0.0
    ) -> Message:
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"store {self.name} belongs to the process that opened it.",
                hint="Open it again in this process.",
            )
        return self._channel.call(name, request, again=again, patience_s=patience_s)

    # -- reading

    def get(self, key: str) -> Record | None:
        """Return the record; None if the key does not exist."""
        answer = self._call("KV.Range", message("RangeRequest")(key=self._raw(key)), again=True)
        return self._record(answer.kvs[0]) if answer.kvs else None

    def range(self, prefix: str) -> tuple[list[Record], int]:
        """Return the records under a prefix and the revision of the snapshot."""
        raw = self._raw(prefix)
        at, end, revision, records = raw, raw[:-1] + bytes([raw[-1] + 1]), 0, list[Record]()
        while True:
            request = message("RangeRequest")(key=at, range_end=end, revision=revision, limit=_PAGE)
            answer = self._call("KV.Range", request, again=True)
            revision = revision or answer.header.revision
            records += [self._record(kv) for kv in answer.kvs]
            if not answer.more:
                return records, revision
            at = answer.kvs[-1].key + b"\0"

    @property
    def revision(self) -> int:
        """Return the revision of the newest change."""
        request = message("RangeRequest")(key=self._prefix.encode(), count_only=True)
        return int(self._call("KV.Range", request, again=True).header.revision)

    def _raw(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _record(self, kv: Message) -> Record:
        lease = f"{kv.lease:x}" if kv.lease else ""
        return Record(
            self._key(kv.key), kv.value, kv.mod_revision, kv.create_revision, kv.version, lease
        )

    def _key(self, raw: bytes) -> str:
        return raw.decode()[len(self._prefix) :]

    # -- writing

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()
    ) -> TxnResult:
        """Run a transaction; see `Store.txn`."""
        check_txn(compares, then, orelse)
        request = message("TxnRequest")(
            compare=[self._compare(compare) for compare in compares],
            success=[self._op(op) for op in _gets_first(then)],
            failure=[self._op(op) for op in _gets_first(orelse)],
        )
        only_reads = all(isinstance(op, Get) for op in (*then, *orelse))
        try:
            answer = self._call("KV.Txn", request, again=only_reads)
        except StoreError as error:
            if is_lost_lease(error):
                leases = {op.lease for op in (*then, *orelse) if isinstance(op, Put) and op.lease}
                raise lost_error(self.name, " or ".join(sorted(leases))) from None
            raise
        ops, revision = then if answer.succeeded else orelse, answer.header.revision
        found = {id(op): part for op, part in zip(_gets_first(ops), answer.responses, strict=True)}
        return TxnResult(
            answer.succeeded,
            tuple(self._result(op, found[id(op)], revision) for op in ops),
            revision,
        )

    def _compare(self, compare: Compare) -> Message:
        target, field = _TARGETS[compare.field]
        return message("Compare")(
            target=target, key=self._raw(compare.key), **{field: compare.equals}
        )

    def _op(self, op: Op) -> Message:
        raw = self._raw(op.key)
        if isinstance(op, Get):
            return message("RequestOp")(request_range=message("RangeRequest")(key=raw))
        if isinstance(op, Delete):
            return message("RequestOp")(
                request_delete_range=message("DeleteRangeRequest")(key=raw, prev_kv=True)
            )
        put = message("PutRequest")(key=raw, value=op.value, lease=_number(op.lease), prev_kv=True)
        return message("RequestOp")(request_put=put)

    def _result(self, op: Op, part: Message, revision: int) -> Record | None:
        if isinstance(op, Put):
            put = part.response_put
            old = put.prev_kv if put.HasField("prev_kv") else None
            created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
            return Record(op.key, op.value, revision, created, version, op.lease)
        kvs = (
            part.response_range.kvs if isinstance(op, Get) else part.response_delete_range.prev_kvs
        )
        return self._record(kvs[0]) if kvs else None

    # -- leases

    def grant(self, ttl_s: float) -> tuple[str, float]:
        """Grant a lease; the time to live is rounded up to whole seconds, and to etcd's minimum."""
        answer = self._call(
            "Lease.LeaseGrant", message("LeaseGrantRequest")(TTL=math.ceil(ttl_s)), again=True
        )
        lease = f"{answer.ID:x}"
        self._lease_s[lease] = float(answer.TTL)
        return lease, float(answer.TTL)

    def renew(self, lease: str) -> float:
        """Renew a lease; an endpoint that hangs is left after a quarter of the lease's time."""
        patience_s = min(PATIENCE_S, max(0.5, self._lease_s.get(lease, 4 * PATIENCE_S) / 4))
        request = message("LeaseKeepAliveRequest")(ID=_number(lease))
        answer = self._call("Lease.LeaseKeepAlive", request, again=True, patience_s=patience_s)
        if answer.TTL <= 0:
            self._lease_s.pop(lease, None)
            raise lost_error(self.name, lease)
        return float(answer.TTL)

    def revoke(self, lease: str) -> None:
        """End a lease and delete its keys."""
        self._lease_s.pop(lease, None)
        try:
            self._call(
                "Lease.LeaseRevoke", message("LeaseRevokeRequest")(ID=_number(lease)), again=True
            )
        except StoreError as error:
            if not is_lost_lease(error):
                raise

    # -- watching

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Watch the keys under a prefix."""
        cursor = self.revision if from_revision is None else from_revision
        watch = EtcdWatch(self._channel, self._raw(prefix), cursor, self._key, self._record)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """End the watches and close the connection or file."""
        if os.getpid() == self._pid:
            for watch in list(self._watches):
                watch.close()
            with contextlib.suppress(ValueError):
                self._channel.close()


def _gets_first(ops: Sequence[Op]) -> list[Op]:
    """Put reads before writes: etcd runs operations in sequence, ours see the store before."""
    return sorted(ops, key=lambda op: not isinstance(op, Get))


def _number(lease: str) -> int:
    """Return etcd's number of a lease; 1, which does not exist, for the id of another store."""
    try:
        return int(lease, 16) & 0x7FFF_FFFF_FFFF_FFFF if lease else 0
    except ValueError:
        return 1
