"""The registry of the mesh in the store: transactions on single records, and mirrors in memory.

A record is changed by a pure function from the record as read to the record to write
(decisions/claims.py), which is called again if another node was faster: of two instances that claim
a model at once, the second finds the claim of the first. Threads: any; changes block on the store.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from clipper.clock import wall_time_us
from clipper.errors import (
    AlreadyExists,
    Overloaded,
    StillLinked,
    StoreError,
    UnknownModel,
)
from clipper.mesh.decisions import vmodels
from clipper.mesh.decisions.claims import ClaimRefused
from clipper.mesh.decisions.vmodels import VChange
from clipper.mesh.records import (
    INSTANCES,
    MODELS,
    VMODELS,
    Instance,
    MeshModel,
    VModel,
    decode,
    encode,
)
from clipper.settings.mesh import MeshSettings
from clipper.store import (
    ABSENT,
    TXN_OPS_MAX,
    Candidate,
    Compare,
    Delete,
    Get,
    Lease,
    Mirror,
    Put,
    Record,
    Store,
    Transaction,
    history,
)
from clipper.types import check_name

TOKEN: Final = "mesh/token"
# identity of the history, made by the first node; another one means another store
HISTORY: Final = "mesh/history"
RESTORED: Final = "mesh/restored"  # another value each time that nodes have accepted a store
HELD: Final = "mesh/held"  # set when nodes found the store empty and continue from memory
NUMBER: Final = "mesh/number"
_TRIES_TOGETHER: Final = 3  # transactions of several changes, before each is made by itself
WRITTEN_MAX: Final = 1024  # records that this node has written, kept until the mirror has them
_SAME: Final = ("type", "path", "key", "policy")  # fields that make two registrations equal
_log = logging.getLogger(__name__)

Step = Callable[[MeshModel], MeshModel | ClaimRefused]
# with the live holders
CopiesStep = Callable[[MeshModel, Container[object]], MeshModel | ClaimRefused]
Decide = Callable[[VModel | None, Callable[[str], MeshModel | None]], VChange]


@dataclass(frozen=True, slots=True)
class RecordChange:
    """A change of a model's record. decide: (record as read) -> the record to write, or why there
    is nothing to write, and what else has to be as it was read. lasting: see Put; placements are
    not, since a power cut ends the nodes that share a file too.
    """

    id: str
    decide: Callable[[MeshModel], tuple[MeshModel | ClaimRefused, Sequence[Compare]]]
    lasting: bool = True


def now_ms() -> int:
    """Return the wall time in ms."""
    return wall_time_us() // 1000


class Registry:
    """The records of models, v-models and instances.

    `models`, `vmodels` and `instances` are mirrors by id. They stay as they are while the store is
    away. StoreError when the store is away at the start.
    """

    def __init__(self, store: Store, settings: MeshSettings) -> None:
        self.store, self.settings = store, settings
        self._numbers = history.MeshEntryNumbers(store)
        self._token = self._history = ""
        self._written: dict[str, Record] = {}
        self.other_history = ""  # why the store is not read; empty: it is
        with contextlib.ExitStack() as undo:
            self.models: Mirror[MeshModel] = undo.enter_context(
                Mirror(store, MODELS, lambda value: decode(value, MeshModel), accepts=self._accept)
            )
            self.vmodels: Mirror[VModel] = undo.enter_context(
                Mirror(store, VMODELS, lambda value: decode(value, VModel), accepts=self._accept)
            )
            self.instances: Mirror[Instance] = Mirror(
                store, INSTANCES, lambda value: decode(value, Instance), accepts=self._accept
            )
            undo.pop_all()
        self.lease: Lease | None = None
        self._me = ""

    def close(self) -> None:
        """Stop the mirrors."""
        for mirror in (self.models, self.vmodels, self.instances):
            mirror.close()

    # -- this node

    def token(self) -> str:
        """Return the secret that the nodes of one store share, made by the first of them.

        Also reads the identity of the store's history.
        """
        with contextlib.suppress(StoreError):  # StoreConflict: another node was first
            self.store.put_if(TOKEN, secrets.token_urlsafe(24).encode(), ABSENT)
        made_up = Put(HISTORY, secrets.token_hex(16).encode())
        self.store.txn((Compare(HISTORY, ABSENT), Compare(HELD, ABSENT)), (made_up,))
        found = self.store.get(TOKEN)
        if found is None:
            raise StoreError(f"store {self.store.name} does not keep {TOKEN!r}.")
        self._token = found.value.decode()
        self._learn_history()
        return self._token

    def number(self) -> int:
        """Return a number that no other node has had."""
        record = self.store.update(NUMBER, lambda value: str(int(value or b"0") + 1).encode())
        return int(record.value)

    def living(self, instance: Instance) -> Instance | None:
        """Return the record of another live node with this node's name; None if there is none."""
        record = self.store.get(INSTANCES + instance.id)
        found = decode(record.value, Instance) if record is not None else None
        return found if found is not None and found.number != instance.number else None

    def bury(self, gone: Instance) -> None:
        """Remove the record of a node that has ended."""
        record = self.store.get(INSTANCES + gone.id)
        if record is not None and decode(record.value, Instance).number == gone.number:
            self.store.txn((Compare(record.key, record.revision),), (Delete(record.key),))

    def enter(self, instance: Instance) -> None:
        """Write this node's record with a new lease.

        AlreadyExists while another node of its name is alive.
        """
        lease = self.store.lease(self.settings.lease_s).renew_in_background()
        try:
            record = self.store.get(INSTANCES + instance.id)
            if record is not None and decode(record.value, Instance).number != instance.number:
                raise is_taken(decode(record.value, Instance))
            same = Compare(
                INSTANCES + instance.id, record.revision if record is not None else ABSENT
            )
            if not self.store.txn((same,), (Put(same.key, encode(instance), lease.id),)).ok:
                raise StoreError(
                    f"another node has entered as {instance.id!r} at the same time.",
                    hint="It is tried again.",
                )
        except BaseException:
            with contextlib.suppress(StoreError):
                lease.revoke()
            raise
        self._me, self.lease = instance.id, lease

    def publish(self, instance: Instance) -> None:
        """Write this node's record. StoreError, LeaseLost.

        A node that joined while the store was held empty also learns whose history was restored.
        """
        if not self._history:
            self._learn_history()
        if self.lease is not None:
            self.store.put(INSTANCES + instance.id, encode(instance), self.lease.id)

    def leave(self) -> None:
        """Revoke the lease, and with it this node's record."""
        if self.lease is not None:
            with contextlib.suppress(StoreError):
                self.lease.revoke()
            self.lease = None

    @property
    def is_fenced(self) -> bool:
        """True without a live lease: others may take this node for dead, so it claims nothing."""
        return self.lease is None or not self.lease.alive

    def alive(self) -> Collection[str]:
        """Return the ids of live instances; this one only while it holds its lease."""
        found = set(self.instances)
        if self._me and not self.is_fenced:
            found.add(self._me)
        return found

    # -- a store with another history

    def _accept(self) -> bytes:
        """Check that the store continues the history that this node knows. StoreError if not.

        Nothing is read from another history. The token and the node numbers in use are written
        again, so that a node that starts now finds them. Returns what the last `take_store` of any
        node has left there.
        """
        restored = self.store.get(RESTORED)
        origin = restored.value if restored is not None else b""
        if not self._history:  # this node does not know an earlier history
            self._learn_history()
            return origin
        self._keep_number()
        found = self.store.get(HISTORY)
        if found is not None and found.value.decode() == self._history:
            self.other_history = ""
            return origin
        held = Put(HELD, f"by {self._me}".encode())
        self.store.txn((Compare(TOKEN, ABSENT),), (Put(TOKEN, self._token.encode()), held))
        what = "has lost its history" if found is None else "has another history"
        if not self.other_history:
            _log.error(
                "the store %s %s: %d models and %d v-models stay as they were, until "
                "server.mesh.take_store() decides which holds",
                self.store.name,
                what,
                len(self.models),
                len(self.vmodels),
            )
        self.other_history = f"the store {self.store.name} {what}"
        raise self._other_history_error()

    def has_other_history(self) -> bool:
        """Look now whether the store has another history than this node knows: its mirrors may not
        have looked yet. Raises StoreError if the store cannot be read."""
        try:
            self._accept()
        except StoreError:
            if not self.other_history:
                raise
        return bool(self.other_history)

    def _other_history_error(self) -> StoreError:
        return StoreError(
            f"{self.other_history}.",
            hint="server.mesh.take_store(restore=True) writes back what is known here.",
        )

    def _learn_history(self) -> None:
        """Read the identity of the store's history; none while nodes have found it empty."""
        found = self.store.get(HISTORY)
        self._history = found.value.decode() if found is not None else ""

    def _keep_number(self) -> None:
        """Make sure that no number in use is given again."""
        highest = (
            max((instance.number for instance in self.instances.values()), default=0)
            if self._me
            else 0
        )
        record = self.store.get(NUMBER)
        if highest > int(record.value if record is not None else 0):
            self.store.update(NUMBER, lambda value: str(max(int(value or b"0"), highest)).encode())

    def take_store(self, restore: bool) -> int:
        """Accept the store for all nodes, and return how many records were written.

        restore: write back records that are known here and missing there; otherwise those are
        unregistered. StoreError when the store was emptied once more meanwhile.
        """
        marker = Put(HELD, f"restored by {self._me} {secrets.token_hex(8)}".encode())
        self.store.txn((), (marker,))
        written = 0
        for mirror, prefix in ((self.models, MODELS), (self.vmodels, VMODELS)) if restore else ():
            for key, record in mirror.records().items():
                written += self.store.txn(
                    (Compare(prefix + key, ABSENT),), (Put(prefix + key, record.value),)
                ).ok
        own = (
            Put(TOKEN, self._token.encode()),
            Put(HISTORY, self._history.encode()),
            Put(RESTORED, marker.value),
            Delete(HELD),
        )
        if not self.store.txn((Compare(HELD, marker.value, "value"),), own).ok:
            raise StoreError(
                f"the store {self.store.name} was emptied again, or another node has taken it.",
                hint='Call take_store again if `stats()["other_history"]` is still set.',
            )
        return written

    # -- models

    def read(self, id: str) -> MeshModel | None:
        """Return the record of a model from the store; from the mirror when the store is away, or
        has another history.
        """
        with contextlib.suppress(StoreError):
            if not self.other_history:
                record = self.store.get(MODELS + id)
                return None if record is None else decode(record.value, MeshModel)
        return self.models.get(id)

    def register(self, model: MeshModel) -> MeshModel:
        """Register a model, and return its record; the same registration again has no effect.

        AlreadyExists when it differs; Overloaded when there are too many. `register`, `unregister`
        and `change_vmodel` write an entry of the history; in a dry run nothing is written.
        """
        check_name(model.id, "model")

        def decide(transaction: Transaction) -> MeshModel:
            record = transaction.get(MODELS + model.id)
            if record is not None:
                known = _same(decode(record.value, MeshModel), model)
                if vmodels.is_unnamed(known):
                    # keep one that was registered by itself beside the v-model it was to go with
                    known = msgspec.structs.replace(known, auto_delete=False)
                    transaction.put(record.key, encode(known))
                return known
            if len(self.models) >= self.settings.models_max:
                hint = "Raise mesh.models_max, or unregister some."
                raise Overloaded(
                    f"{len(self.models)} models are registered, as many as there may be.", hint=hint
                )
            if transaction.get(VMODELS + model.id) is not None:
                raise AlreadyExists(f"{model.id!r} is a v-model.", hint="Choose another id.")
            self._write(transaction, "mesh register", [Put(MODELS + model.id, encode(model))])
            return model

        return self.store.transact(decide, dry=history.is_dry_run()).value

    def unregister(self, id: str) -> bool:
        """Unregister a model whose last v-model is gone; return whether that was done."""
        return self._remove(id, self._is_unlinked, "mesh unregister")

    def unregister_unnamed(self, id: str) -> bool:
        """Unregister a model whose last v-model is gone; return whether it was unregistered."""
        with history.audit_context(f"the mesh (node {self._me})", "mesh unregister"):
            return self._remove(id, lambda model: vmodels.is_left_over(model, now_ms()), "")

    def _is_unlinked(self, model: MeshModel) -> bool:
        if model.refs:
            names = sorted(v.id for v in self.vmodels.values() if model.id in (v.active, v.target))
            which = ", ".join(names[:5]) or "a v-model"
            raise StillLinked(
                f"model {model.id!r} is what {which} stands for.",
                hint="Delete that, or let it stand for another.",
            )
        return True

    def _remove(self, id: str, may_go: Callable[[MeshModel], bool], verb: str) -> bool:
        def decide(transaction: Transaction) -> bool:
            record = transaction.get(MODELS + id)
            if record is None or not may_go(decode(record.value, MeshModel)):
                return False
            self._write(transaction, verb, [Delete(MODELS + id)])
            return True

        return self.store.transact(decide, dry=history.is_dry_run()).value

    def step(self, id: str, step: Step, lasting: bool = True) -> RecordChange:
        """Return the change of a record by `step`, for `change_all`."""
        return RecordChange(id, lambda model: (step(model), ()), lasting)

    def copies_step(self, id: str, step: CopiesStep, lasting: bool = True) -> RecordChange:
        """Return a change by a step that depends on which holders of the model are alive.

        The step gets the holders that have a record in the store, and its result is written only if
        they are the same at that time. The mirror of the instances would not do: it may not know
        yet of a node that has just entered or died.
        """

        def decide(model: MeshModel) -> tuple[MeshModel | ClaimRefused, Sequence[Compare]]:
            holders = {instance: self.store.get(INSTANCES + instance) for instance in model.copies}
            alive = frozenset(
                instance for instance, record in holders.items() if record is not None
            )
            guards = [
                Compare(
                    INSTANCES + instance,
                    record.created_revision if record is not None else ABSENT,
                    "created_revision",
                )
                for instance, record in holders.items()
            ]
            return step(model, alive), guards

        return RecordChange(id, decide, lasting)

    def change(self, id: str, step: Step) -> MeshModel | ClaimRefused:
        """Change a record by `step`, repeated until no other node was faster. UnknownModel."""
        return self._change(self.step(id, step))

    def change_copies(self, id: str, step: CopiesStep) -> MeshModel | ClaimRefused:
        """Change a record by `copies_step`, repeated until no other node was faster."""
        return self._change(self.copies_step(id, step))

    def change_all(
        self, changes: Sequence[RecordChange]
    ) -> list[MeshModel | ClaimRefused | Exception]:
        """Make several changes of different records in one transaction.

        Where other nodes were faster, those changes are decided again. After `_TRIES_TOGETHER`
        transactions, each is made by itself. Returns the result, or the error, of each. StoreError
        when the store is away.
        """
        known = {change.id: self._newest(change.id) for change in changes if len(changes) > 1}
        written: dict[str, MeshModel] = {}
        for _ in range(_TRIES_TOGETHER):
            compares, written = self._decided(changes, known)
            if not written:
                break
            puts = [
                Put(MODELS + change.id, encode(written[change.id]), lasting=change.lasting)
                for change in changes
                if change.id in written
            ]
            done = self.store.txn(compares, puts, [Get(put.key) for put in puts])
            if done.ok:
                self._keep_written(done.results)
                break
            known |= dict(zip(written, done.results, strict=True))
            written = {}
        return [
            written[change.id] if change.id in written else self._attempt(change)
            for change in changes
        ]

    def _decided(
        self, changes: Sequence[RecordChange], known: Mapping[str, Record | None]
    ) -> tuple[list[Compare], dict[str, MeshModel]]:
        """Return a transaction's compares and its new records, from the records as known.

        It leaves out changes that write nothing or fail: they are made by themselves.
        """
        compares: list[Compare] = []
        written: dict[str, MeshModel] = {}
        for change in changes:
            record = known.get(change.id)
            if record is None:
                continue
            try:
                before = decode(record.value, MeshModel)
                after, guards = change.decide(before)
            except StoreError:
                raise
            except Exception:  # it is made by itself, which tells its error
                continue
            parts = len(compares) + len(written) + len(guards) + 2
            if isinstance(after, ClaimRefused) or after is before or parts > TXN_OPS_MAX:
                continue
            compares += [Compare(record.key, record.revision), *guards]
            written[change.id] = after
        return compares, written

    def _attempt(self, change: RecordChange) -> MeshModel | ClaimRefused | Exception:
        try:
            return self._change(change)
        except Exception as error:  # of this change only: others of its transaction are written
            return error

    def _newest(self, id: str) -> Record | None:
        """Return the newest record of a model that is known here: the mirror may not have heard
        yet of what this node has just written.
        """
        known, mine = self.models.record(id), self._written.get(id)
        is_mine = known is not None and mine is not None and mine.revision > known.revision
        return mine if is_mine else known

    def _keep_written(self, records: Iterable[Record | None]) -> None:
        if len(self._written) > WRITTEN_MAX:
            self._written = {}
        for record in records:
            if record is not None:
                self._written[record.key.removeprefix(MODELS)] = record

    def _change(self, change: RecordChange) -> MeshModel | ClaimRefused:
        id, known = change.id, self._newest(change.id)

        def decide(transaction: Transaction) -> MeshModel | ClaimRefused:
            record = transaction.get(MODELS + id)
            if record is None:
                if self.other_history:
                    raise self._other_history_error()
                raise UnknownModel(f"no model {id!r} is registered.")
            before = decode(record.value, MeshModel)
            after, guards = change.decide(before)
            if not isinstance(after, ClaimRefused) and after is not before:
                transaction.require(*guards)
                transaction.put(record.key, encode(after), lasting=change.lasting)
            return after

        done = self.store.transact(decide, hint=None if known is None else {known.key: known})
        self._keep_written(done.written.values())
        return done.value

    # -- v-models: a record, and the references of the models that it names, in one transaction

    def read_vmodel(self, id: str) -> VModel | None:
        """Return the record of a v-model, as `read` does."""
        try:
            record = self.store.get(VMODELS + id)
        except StoreError:
            return self.vmodels.get(id)
        return None if record is None else decode(record.value, VModel)

    def change_vmodel(
        self, id: str, decide: Decide, leader: Candidate | None = None, verb: str = "set"
    ) -> VModel | None:
        """Change a v-model by `decide`, repeated until all that it read is unchanged.

        leader: the change is written only while this candidate leads. verb: for the history.
        AlreadyExists for the id of a model.
        """

        def write(transaction: Transaction) -> VModel | None:
            def model_of(model: str) -> MeshModel | None:
                record = transaction.get(MODELS + model)
                return decode(record.value, MeshModel) if record is not None else None

            found = transaction.get(VMODELS + id)
            before = decode(found.value, VModel) if found is not None else None
            if before is None and model_of(id) is not None:
                raise AlreadyExists(
                    f"{id!r} is a model.", hint="Choose another name for the v-model."
                )
            change = decide(before, model_of)
            ops = self._ops(id, before, change)
            if ops:
                if leader is not None:
                    transaction.require(leader.guard)
                self._write_vmodel(transaction, verb, ops, change, leader)
            return change.vmodel

        return self.store.transact(write, dry=history.is_dry_run()).value

    def _ops(self, id: str, before: VModel | None, change: VChange) -> list[Put | Delete]:
        ops: list[Put | Delete] = [Put(MODELS + model.id, encode(model)) for model in change.models]
        if change.vmodel is not None and change.vmodel != before:
            ops.append(Put(VMODELS + id, encode(change.vmodel)))
        elif change.vmodel is None and before is not None:
            ops.append(Delete(VMODELS + id))
        return ops

    # -- the history

    def _write_vmodel(
        self,
        transaction: Transaction,
        verb: str,
        ops: Sequence[Put | Delete],
        change: VChange,
        leader: Candidate | None,
    ) -> None:
        if leader is None:
            what = verb if change.vmodel is not None else "delete"
            self._write(transaction, f"mesh vmodel {what}", ops)
            return
        verb = "failed" if change.vmodel is not None and change.vmodel.failed else "switched"
        with history.audit_context(f"the mesh (node {self._me})", f"mesh vmodel {verb}"):
            self._write(transaction, "", ops)

    def _write(self, transaction: Transaction, verb: str, ops: Sequence[Put | Delete]) -> None:
        """Write a change of records that the transaction has read, with its entry of the
        history."""
        number = 0 if history.is_dry_run() else self._numbers.next()
        entry = history.enter(number, wall_time_us(), verb, ops, transaction.read, "", history.MESH)
        transaction.apply(ops)
        if entry is not None:
            transaction.apply([entry])


def is_taken(other: Instance) -> AlreadyExists:
    """Return the error for a node name that is in use."""
    return AlreadyExists(
        f"a node named {other.id!r} is in this mesh already (host {other.host or 'unknown'}, since"
        f" {other.started_ms}).",
        hint="Give this one another mesh.name, or stop that one.",
    )


def _same(known: MeshModel, given: MeshModel) -> MeshModel:
    differs = [name for name in _SAME if getattr(known, name) != getattr(given, name)]
    if differs:
        differences = ", ".join(
            f"{name} {getattr(known, name)!r}, not {getattr(given, name)!r}" for name in differs
        )
        hint = "Register it under another id, or unregister this one first."
        raise AlreadyExists(
            f"model {known.id!r} is registered with {differences}."[:1000], hint=hint
        )
    return known
