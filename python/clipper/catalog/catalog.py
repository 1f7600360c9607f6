"""The catalog: models, their versions, and the applications that query them, as typed records
over the store.

Keys: `catalog/model/NAME/VERSION` is written once and never changed, `catalog/scale/NAME/VERSION`
holds what may change of a model (replicas and their bound, retirement), `catalog/promoted/NAME`
which version is the latest when that is not the one that came last, `catalog/application/NAME` an
application with its links, `catalog/rollout/NAME` its last rollout. A retired version keeps its
record: its number is never used again, so nothing cached under it can come back.

Every write reads the whole catalog, checks, and writes under the condition that nobody wrote since
(`catalog/guard` carries that condition), so rules that span records, such as "an application's
models take its inputs", hold whoever writes. The same transaction enters into the history who
changed what (store/history.py). Writes are few; reads are many and cost nothing: `view` is a
snapshot in memory, swapped in one assignment. A record that cannot be read is left out and named in
`view.unreadable`; everything else goes on.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self, TypeVar

import msgspec
import numpy as np

from clipper.catalog.rules import (
    REPLICAS_MAX,
    broken_by_retiring,
    check_replicas,
    check_settings,
    check_types,
    link_replaced,
    linking_only,
    ops_of_promotion,
    put_promoted,
    version_after,
)
from clipper.catalog.view import (
    PREFIX,
    Rollout,
    View,
    app_key,
    encode,
    model_key,
    put_scale,
    rollout_key,
    view_of,
)
from clipper.clock import wall_time_us
from clipper.component import Health, Stop, Threads
from clipper.errors import (
    AlreadyExists,
    InvalidInput,
    StillLinked,
    StoreConflict,
    StoreError,
    Unknown,
    UnknownVersion,
)
from clipper.store import (
    CatalogCopy,
    Delete,
    Event,
    Follower,
    Put,
    Record,
    Store,
    Transaction,
    history,
)
from clipper.store.continuity import GUARD, Continuity, StoreHistory, encoded, history_in
from clipper.types import (
    ANY,
    Application,
    InputType,
    Model,
    UserValue,
    VersionedModel,
    check_name,
)

_AT_ONCE: Final = 100  # records that are written back in one transaction
CHECK_S: Final = 2.0  # between two looks at the guard
Write = Put | Delete
_T = TypeVar("_T")
_log = logging.getLogger(__name__)
__all__ = ["REPLICAS_MAX", "Catalog", "View", "plain"]


class Catalog:
    """Models and applications as records of a store. Threads: any.

    Every method that writes may also raise StoreError; after a failed write nothing has changed.

    store: the caller closes it, after this. follow: watch it for other processes' writes, on a
    thread. external: returns the record of a model of the mesh, which the catalog does not have.
    copy: of what the store had when the last server of this folder ended. continuity: checks that
    the store continues what this server knows.
    """

    def __init__(
        self,
        store: Store,
        *,
        follow: bool = True,
        wall_us: Callable[[], int] = wall_time_us,
        external: Callable[[str], Model | None] = lambda name: None,
        copy: CatalogCopy | None = None,
    ) -> None:
        self._store = store
        self._copy = copy or CatalogCopy(None, store.name)
        self.continuity = Continuity(store.name)
        self._wall_us = wall_us
        self._refreshing = threading.Lock()
        self._listeners: list[Callable[[View], None]] = []
        self._records: tuple[Record, ...] = ()
        self._stamp: list[tuple[str, int]] = []
        self.view = View(-1, {}, {}, {})
        self._external = external
        self._follower = (
            Follower(store, PREFIX, _Listings(self, store.threads), name="clipper-catalog")
            if follow
            else None
        )
        self._begin()
        if self._follower is not None:
            self._follower.start()

    def _begin(self) -> None:
        """Read the store; what is known from before remains if the store does not continue it."""
        copied = self._copy.read_of_store()
        if copied is not None:
            with self._refreshing:
                self._stamp = [(record.key, record.revision) for record in copied.records]
                self._records = tuple(copied.records)
                self._take(copied.records, copied.revision)
        try:
            if self._follower is not None:
                self._follower.list()
            else:
                self.refresh()
        except StoreError:
            if not self.continuity.trouble:
                raise

    # -- reading

    def models(self) -> list[Model]:
        """Return all models that are not retired, by name and version."""
        return self.view.models()

    def versions(self, name: str) -> list[Model]:
        """Return the versions of `name` that are not retired, ascending. Raises UnknownModel when
        there is none."""
        latest = self.view.model(VersionedModel(name))
        return [model for model in self.view.versions[latest.name] if not model.retired_us]

    def latest(self, name: str) -> Model:
        """Return the latest version of a model. Raises UnknownModel."""
        return self.view.model(VersionedModel(name))

    def linked(self, view: View, link: VersionedModel | str) -> Model:
        """Return the model that a link of an application refers to: a version of the catalog, or a
        model of the mesh.

        Raises UnknownModel, UnknownVersion.
        """
        wanted = VersionedModel.parse(link)
        if wanted.name not in view.versions and (found := self._external(wanted.name)) is not None:
            if wanted.version in (None, found.version):
                return found
            raise UnknownVersion.named(str(wanted), [str(found.id)])
        return view.model(wanted)

    def applications(self) -> list[Application]:
        """Return all applications, sorted by name."""
        return [self.view.applications[name] for name in sorted(self.view.applications)]

    def application(self, name: str) -> Application:
        """Return an application by its name. Raises UnknownApplication."""
        return self.view.application(name)

    # -- models

    def register(self, model: Model, *, promote: bool = True) -> Model:
        """Register a version.

        model: its record; the creation time is set here. promote: make it the latest. Raises
        AlreadyExists if the version is taken; TypeConflict if an application follows the latest
        version of this name and has another input type.
        """
        stamped = msgspec.structs.replace(model, created_us=self._wall_us(), retired_us=0)

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Model]:
            if model_key(stamped.id) in keys:
                self.refuse_existing(stamped.id)
            ops = [Put(model_key(stamped.id), encode(stamped)), put_scale(stamped)]
            if not promote and any(
                not model.retired_us for model in view.versions.get(stamped.name, ())
            ):
                return [
                    *ops,
                    put_promoted(view, view.model(stamped.name).id, stamped.version),
                ], stamped
            for app in view.linking(stamped):
                check_types(app, stamped)
            return ops, stamped

        return self._change("deploy", change)

    def refuse_existing(self, model: VersionedModel) -> None:
        """Raise AlreadyExists for a version that exists."""
        raise AlreadyExists(
            f"model '{model}' already exists, and a version never changes.",
            hint="Leave the version out to get the next.",
        )

    def set_replicas(
        self, model: VersionedModel | str, replicas: int, replicas_max: int = 0
    ) -> Model:
        """Set the number of containers of a version (default: the latest); 0 stops them all.

        With `replicas_max` the load decides between the two bounds.
        """
        check_replicas(str(model), replicas)
        check_replicas(str(model), replicas_max)

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Model]:
            scaled = msgspec.structs.replace(
                view.model(model), replicas=replicas, replicas_max=replicas_max
            )
            return [put_scale(scaled)], scaled

        return self._change("scale", change)

    def retire_model(self, model: VersionedModel | str, *, force: bool = False) -> Model:
        """Take a version (the latest, when none is named) out of service for good. StillLinked when
        it answers an application. By `force` the version before answers, or links that would have
        no model, or one that takes other inputs, are removed.
        """

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Model]:
            found = view.model(model)
            retired = msgspec.structs.replace(
                found, replicas=0, replicas_max=0, retired_us=max(self._wall_us(), 1)
            )
            broken = {
                app: links
                for app in view.applications
                if (links := broken_by_retiring(view, app, found))
            }
            rolled_out = [
                one.application
                for one in view.rollouts.values()
                if one.is_open and one.model == found.id
            ]
            if rolled_out and not force:
                hint = (
                    f"Abort it first: clipper rollout abort {rolled_out[0]}   Or retire it by"
                    " force."
                )
                raise StillLinked(
                    f"model '{found.id}' is being rolled out in: {', '.join(rolled_out)}.",
                    hint=hint,
                )
            linked = {*broken, *(app.name for app in view.linking(found))}
            if linked and not force:
                hint = "Unlink it first, or retire it by force."
                if not broken and (next_one := version_after(view, found)):
                    hint = (
                        f"Promote the version that is to follow: clipper promote {next_one}   Or"
                        f" retire it by force: then {next_one} follows."
                    )
                raise StillLinked(
                    f"model '{found.id}' is still linked to: {', '.join(sorted(linked))}.",
                    hint=hint,
                )
            ops: list[Write] = [put_scale(retired)]
            for name, links in broken.items():
                app = view.applications[name]
                links_left = tuple(link for link in app.models if link not in links)
                ops.append(
                    Put(app_key(name), encode(msgspec.structs.replace(app, models=links_left)))
                )
            return ops, retired

        return self._change("retire", change)

    def promote(self, model: VersionedModel | str, application: str | None = None) -> Model:
        """Make a version the latest of its name, until another is deployed or promoted; with
        `application`, link that one to this very version instead of others of its name.
        TypeConflict when an application takes other inputs.
        """
        wanted = VersionedModel.parse(model)
        if wanted.version is None:
            raise InvalidInput(
                f"promote '{wanted}': which version?", hint=f"Name it, as in '{wanted}:2'."
            )
        if application is not None:
            self._edit("promote", application, lambda app: linking_only(app, wanted))
            return self.view.model(wanted)

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Model]:
            found = view.model(wanted)
            if view.model(wanted.name) == found:
                return [], found
            for app in view.applications.values():
                if VersionedModel(wanted.name) in app.models:
                    check_types(app, found)
            return [put_promoted(view, found.id)], found

        return self._change("promote", change)

    # -- applications

    def register_application(
        self, name: str, models: Sequence[VersionedModel | str] = (), **settings: UserValue
    ) -> Application:
        """Register an application; settings: as of update_application(), those of its first model
        and the record's defaults where they are not given. AlreadyExists; UnknownModel,
        UnknownVersion; TypeConflict when a model takes other inputs."""
        made = Application(check_name(name, "application"), created_us=self._wall_us())
        app = _changed(made, {**settings, "models": models})

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Application]:
            if app_key(name) in keys:
                hint = "Update it, or unregister it first."
                raise AlreadyExists(f"application {name!r} is already registered.", hint=hint)
            sound = self._check_application(view, app)
            return [Put(app_key(name), encode(sound))], sound

        return self._change("set", change)

    def update_application(self, name: str, /, **changes: UserValue) -> Application:
        """Change fields of an application: models, slo_ms, default, input, policy, confidence_min,
        roles, missing, decider, coverage, context_table, output."""
        return self._edit("set", name, lambda app: _changed(app, changes))

    def unregister_application(self, name: str) -> None:
        """Delete an application; afterwards it is as if it had never been. UnknownApplication."""

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], None]:
            if app_key(name) not in keys:  # the record of one that is there may be unreadable
                view.application(name)
            return [Delete(key) for key in (app_key(name), rollout_key(name)) if key in keys], None

        return self._change("remove", change)

    def start_rollout(
        self,
        application: str,
        model: VersionedModel | str,
        *,
        stages: Sequence[float],
        hold_s: float,
        guard: str,
        error_rate: float,
    ) -> Rollout:
        """Let a version take over an application's queries stage by stage. AlreadyExists while
        another rollout is under way; UnknownModel when the application links no other version of
        the name; TypeConflict."""
        wanted = VersionedModel.parse(model)
        if wanted.version is None:
            raise InvalidInput(
                f"rollout of '{wanted}': which version?", hint=f"Name it, as in '{wanted}:2'."
            )

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Rollout]:
            app, found = view.application(application), view.model(wanted)
            old = view.rollouts.get(application)
            if old is not None and old.is_open:
                hint = f"Let it end, or: clipper rollout abort {application}"
                raise AlreadyExists(
                    f"application {application!r} already has a rollout, of '{old.model}'.",
                    hint=hint,
                )
            link = link_replaced(app, found.id)
            control = view.model(link).id
            if control == found.id:
                raise InvalidInput(
                    f"application {application!r} already uses '{found.id}'.",
                    hint="Deploy a new version first: clipper deploy NAME TARGET --behind",
                )
            check_types(app, found)
            now = self._wall_us()
            new = Rollout(
                application,
                found.id,
                link,
                control,
                tuple(stages),
                hold_s,
                guard,
                error_rate,
                reason="begun",
                began_us=now,
                stage_us=now,
            )
            return [Put(rollout_key(application), encode(new))], new

        return self._change("rollout", change)

    def move_rollout(
        self, verb: str, application: str, move: Callable[[Rollout], Rollout]
    ) -> Rollout:
        """Write what `move` makes of the rollout under way; a stage of another number begins now,
        and one that is promoted makes its version the one that the application queries. Unknown
        when none is under way; what `move` raises.
        """

        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Rollout]:
            old = view.rollouts.get(application)
            if old is None or not old.is_open:
                view.application(application)
                raise Unknown(
                    f"application {application!r} has no running rollout.",
                    hint="See clipper rollout status.",
                )
            new = move(old)
            if new == old:
                return [], old
            new = msgspec.structs.replace(new, stage_us=self._wall_us())
            ops: list[Write] = [Put(rollout_key(application), encode(new))]
            return [*ops, *(ops_of_promotion(view, new) if new.state == "promoted" else ())], new

        return self._change(verb, change)

    def _edit(
        self, verb: str, name: str, edit: Callable[[Application], Application]
    ) -> Application:
        def change(view: View, keys: frozenset[str]) -> tuple[Sequence[Write], Application]:
            old = view.application(name)
            new = self._check_application(view, edit(old))
            return ([Put(app_key(name), encode(new))] if new != old else []), new

        return self._change(verb, change)

    def _check_application(self, view: View, app: Application) -> Application:
        """Return the application, with its input type filled in, if it and its links are sound."""
        check_settings(app)
        for link in app.models:
            model = self.linked(view, link)
            if app.input == ANY:
                app = msgspec.structs.replace(app, input=model.input)
            check_types(app, model)
        return app

    # -- the store below

    def _change(
        self, verb: str, change: Callable[[View, frozenset[str]], tuple[Sequence[Write], _T]]
    ) -> _T:
        """Write the result of `change(view, keys)`, and its entry of the history. If another writer
        was first, call `change` again."""

        def decide(transaction: Transaction) -> _T:
            records, revision = transaction.range(PREFIX, GUARD)
            known = {record.key: record for record in records}
            self._judge(known.get(GUARD))
            ops, result = change(view_of(records, revision), frozenset(known))
            if ops:
                self._write(transaction, verb, ops, known, PREFIX)
                transaction.apply(ops)
            return result

        done = self._store.transact(decide, dry=history.is_dry_run())
        if done.written:
            with contextlib.suppress(StoreError):  # the write is done; the follower looks again
                self.refresh()
        return done.value

    def _write(
        self,
        transaction: Transaction,
        verb: str,
        ops: Sequence[Write],
        known: Mapping[str, Record],
        prefix: str,
    ) -> None:
        """Write the guard, and the history's entry of a change, which is not written here."""
        guard = transaction.get(GUARD)
        number = guard.version + 1 if guard else 1
        entry = history.enter(number, self._wall_us(), verb, ops, known, prefix)
        transaction.put(GUARD, encoded((history_in(guard) or StoreHistory()).next()))
        if entry is not None:
            transaction.apply([entry])

    def record(self, verb: str, key: str, before: bytes, after: bytes) -> None:
        """Enter into the history a change of something that the catalog does not have.

        before, after: JSON; empty for what did not exist. Raises StoreConflict, StoreError.
        """
        known = {key: Record(key, before, 0, 0, 0)} if before else {}
        op = Put(key, after) if after else Delete(key)

        def decide(transaction: Transaction) -> None:
            self._judge(transaction.get(GUARD))
            self._write(transaction, verb, [op], known, "")

        try:
            self._store.transact(decide, dry=history.is_dry_run())
        except StoreConflict as error:
            raise StoreConflict(
                error.message, hint=f"It was done, and the history lacks it: {verb} {key}."
            ) from None

    # -- whether the store is the one that is known

    def _judge(self, guard: Record | None) -> None:
        """Take note of a guard that a transaction has read. Raises StoreError."""
        with self._refreshing:
            if not self.continuity.continues(guard):
                guard = self._store.get(GUARD)  # another thread may have written after the read
            self.continuity.judge(guard)

    def accept_store(self, *, restore: bool) -> int:
        """Take the store for the one that is known, on every server; return how many records were
        written.

        restore: write back what is known here; what is only in the store stays, unless the store
        is an older state of this one. Otherwise what the store lacks is gone. Does nothing unless
        the store is refused. Raises StoreError.
        """
        count = 0
        while self.continuity.trouble:
            known, dry = self.continuity.known, history.is_dry_run()
            wanted = {record.key: record for record in self._records} if restore else {}

            def decide(
                transaction: Transaction,
                known: StoreHistory | None = known,
                wanted: Mapping[str, Record] = wanted,
            ) -> list[Write]:
                records, _ = transaction.range(PREFIX, GUARD)
                there = {record.key: record for record in records}
                found = history_in(there.get(GUARD)) or StoreHistory()
                is_older = restore and known is not None and found.id == known.id
                ops = differences(there, wanted, deletes=is_older)
                transaction.apply(ops[:_AT_ONCE])
                if len(ops) <= _AT_ONCE:
                    self._write(transaction, "store accept", [], {}, PREFIX)
                    accepted = found.accepted([known] if known is not None else [])
                    transaction.put(GUARD, encoded(accepted))
                return ops

            ops = self._store.transact(decide, dry=dry).value
            if dry:
                return len(ops)
            count += len(ops[:_AT_ONCE])
            if len(ops) <= _AT_ONCE:
                self.refresh()
        return count

    def refresh(self) -> View:
        """Read the store now; afterwards `view` is at least as new as the store was when this was
        called."""
        with self._refreshing:
            records, revision = self._store.range(PREFIX)
            return self._take(records, revision)

    def take(self, records: Sequence[Record], revision: int) -> None:
        """Make a listing the view, unless a newer one has been made it meanwhile. Raises StoreError
        if it does not continue what is known."""
        with self._refreshing:
            guard = _guard_in(records)
            if revision < self.view.revision or not self.continuity.continues(guard):
                records, revision = self._store.range(PREFIX)
            self._take(records, revision)

    def _take(self, records: Sequence[Record], revision: int) -> View:
        """Make a listing the view, and keep its copy. Raises StoreError if it does not continue
        what is known. Under the lock."""
        before = self.continuity.known
        self.continuity.judge(_guard_in(records))
        after = self.continuity.known
        stamp = [(record.key, record.revision) for record in records]
        unreadable, self.view = self.view.unreadable, view_of(records, revision)
        view = self.view
        for key in view.unreadable.keys() - unreadable.keys():
            _log.warning("record %s cannot be read: %s", key, view.unreadable[key])
        if stamp != self._stamp:
            self._records = tuple(records)
            if before is not None and after is not None and before.id not in ("", after.id):
                self._copy.keep_before()
            self._copy.write(records, revision)
            self._notify(view)
        self._stamp = stamp
        return view

    def check(self) -> None:
        """List everything if the store's guard is not the one that is known here. StoreError."""
        guard = self._store.get(GUARD)
        known = _guard_in(self._records)
        if (guard and guard.revision) != (known and known.revision):
            self.refresh()

    def require_same_store(self) -> None:
        """Raise StoreError if the store does not continue what is known here."""
        if self.continuity.known is not None:
            self.check()
        self.continuity.check()

    def refresh_listeners(self) -> None:
        """Call all listeners once more with what is known: something beside the catalog has
        changed."""
        with self._refreshing:
            self._notify(self.view)

    def _notify(self, view: View) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(view)
            except Exception:  # one listener's fault is not the writer's, nor the other listeners'
                _log.exception("a listener of the catalog raised")

    def on_change(self, listener: Callable[[View], None]) -> Callable[[], None]:
        """Call `listener(view)` after every change, one call at a time, on the thread that noticed
        it; returns what ends that. It must be quick, and must neither write to the catalog nor
        refresh it."""
        with self._refreshing:
            self._listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return end

    def health(self) -> list[Health]:
        """Return the state of the thread that follows the store, if there is one."""
        return [] if self._follower is None else [self._follower.health()]

    def close(self) -> None:
        """Stop following. The view stays readable."""
        if self._follower is not None:
            self._follower.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _changed(app: Application, changes: Mapping[str, UserValue]) -> Application:
    """Return an application with changes of its fields. Raises InvalidInput."""
    known = [field for field in app.__struct_fields__ if field not in ("name", "created_us")]
    if unknown := sorted(set(changes) - set(known)):
        raise InvalidInput(
            f"cannot change {unknown[0]!r} of an application.", hint=f"Fields: {', '.join(known)}."
        )
    values = {
        field: _READ[field](value) if field in _READ else value for field, value in changes.items()
    }
    return msgspec.structs.replace(app, **values)


class _Listings:
    """The sink of the catalog: it always takes a whole listing, so that a view is of one
    revision."""

    def __init__(self, catalog: Catalog, threads: Threads) -> None:
        self._catalog, self._threads = catalog, threads
        self._checked_s = threads.now_s()

    @property
    def known(self) -> int:
        """Return 0: every change is followed by a listing, and that is judged."""
        return 0

    def begin(self, stop: Stop) -> bool:
        """Follow again."""
        return True

    def reset(self, records: Sequence[Record], revision: int) -> None:
        """Make a listing the view."""
        self._catalog.take(records, revision)

    def changed(self, events: Sequence[Event]) -> None:
        """List everything once for a burst of changes, unless this server has made them all."""
        if any(event.revision > self._catalog.view.revision for event in events):
            self._catalog.refresh()

    def poll(self) -> None:
        """Compare the guard with the store's from time to time: this server's own writes are in the
        view before its watch has them, so the watch may not see that the store goes back."""
        now_s = self._threads.now_s()
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            self._catalog.check()


def _guard_in(records: Sequence[Record]) -> Record | None:
    return next((one for one in records if one.key == GUARD), None)


def differences(
    there: Mapping[str, Record], wanted: Mapping[str, Record], *, deletes: bool
) -> list[Write]:
    """Return what makes the records of a store those that are wanted, but for the guard.

    deletes: also of records that are not wanted.
    """
    ops: list[Write] = [
        Put(key, record.value)
        for key, record in wanted.items()
        if key != GUARD and (key not in there or there[key].value != record.value)
    ]
    if deletes:
        ops += [Delete(key) for key in there if key not in wanted and key != GUARD]
    return ops


def _links(models: Iterable[VersionedModel | str]) -> tuple[VersionedModel, ...]:
    return tuple(map(VersionedModel.parse, models))


def _input(stated: InputType | str | None) -> InputType:
    return ANY if stated is None else InputType.parse(stated)


def _roles(stated: Mapping[str, str] | None) -> dict[str, str]:
    return dict(stated or {})


def plain(default: object) -> UserValue:
    """Return a default output as a record can keep it: None, bool, int, float, str, bytes, or
    (nested) lists of these, or a dict of these by name; numpy's scalars and arrays become these.
    Raises InvalidInput for anything else."""
    if isinstance(default, np.ndarray | np.generic):
        return plain(default.tolist())
    if isinstance(default, bytearray | memoryview):
        return bytes(default)
    if isinstance(default, list | tuple):
        return [plain(item) for item in default]
    if isinstance(default, dict) and all(isinstance(name, str) for name in default):
        return {name: plain(item) for name, item in default.items()}
    if default is None or isinstance(default, bool | int | float | str | bytes):
        if isinstance(default, int) and not -(2**63) <= default < 2**64:
            raise InvalidInput(f"default {default} does not fit into 64 bits.")
        return default
    allowed = "Use a number, str, bytes, array, or (nested) list."
    raise InvalidInput(
        f"a {type(default).__name__} cannot be an application's default.", hint=allowed
    )


# what a field of an application's record is made of
_READ: Final[Mapping[str, Callable[..., UserValue]]] = {
    "models": _links,
    "input": _input,
    "default": plain,
    "roles": _roles,
}
