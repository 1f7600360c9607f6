"""Operations on a running server, one function per verb; HTTP (http/) and the CLI use the same.

Each change takes effect through the catalog, whose history entry has the verb and the actor. A
dry run makes all checks and writes nothing.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, Self, Unpack, cast

import msgspec

from clipper.catalog.rules import version_after
from clipper.catalog.view import Rollout
from clipper.config import Config
from clipper.deploy.packages.artifact import ENDINGS, Artifact, is_data
from clipper.deploy.packages.environments import check_packages
from clipper.deploy.processes.command import Command, check_permitted, command_of
from clipper.errors import (
    DoesNotFit,
    InvalidInput,
    NotAllowed,
    PackagingError,
    UnknownModel,
    UnknownVersion,
    refuse_unknown,
    without_secrets,
)
from clipper.frontend.server_interface import store_warning
from clipper.manage.building import Stage
from clipper.manage.change import Change
from clipper.manage.model_record import input_of, record_fields, to_run
from clipper.manage.moving import ExportedState, Place, applications_of, bring, exported, missing
from clipper.manage.moving import read as read_state
from clipper.manage.overview import InspectedServer, followed, processes
from clipper.manage.rollouts.decisions import (
    ERROR_RATE,
    GUARD,
    HOLD_S,
    checked_guard,
    checked_rate,
    seconds_of,
    stages_of,
)
from clipper.manage.rollouts.rolling import Rolling, log_change
from clipper.manage.streams.operations import StreamOperations, StreamServer
from clipper.manage.tables.operations import TableOperations, TableServer
from clipper.manage.tables.parameters import check_read
from clipper.manage.verbs.table import EVALUATED, EVALUATED_MAX
from clipper.metrics.stats import ModelStats, QueryStats, ServerStats
from clipper.options import keywords_of, refusing_unknown_keywords
from clipper.serving.models.scaling import replica_bounds
from clipper.serving.query.application import ApplicationHandle
from clipper.settings.http import query_tls, scheme_of
from clipper.settings.logging import LoggingSettings
from clipper.spec.field import specified, stated
from clipper.spec.keywords import ModelMembers
from clipper.spec.model import ModelSpec
from clipper.store.history import ENTRIES_MAX, audit_context, entries, plain
from clipper.types import (
    VERSION,
    Application,
    InputType,
    Model,
    UserValue,
    VersionedModel,
    check_name,
)
from clipper_core.engine.model import Model as CoreModel

_OF_THE_RECORD = ("name", "models", "created_us")
_WHAT_RUNS = ("target", "command", "folder", "data", "kind", "trusted", "sha256")


class Server(InspectedServer, TableServer, StreamServer, Protocol):
    """Interface of a server that can be managed: see ClipperServer."""

    config: Config

    @property
    def deploy(self) -> Callable[..., CoreModel]:
        """Return the function that deploys a version."""

    def scale(self, name: str | VersionedModel, replicas: int | tuple[int, int]) -> None:
        """Set the number of replicas of a version."""

    def retire(self, name: str | VersionedModel, *, force: bool = False) -> None:
        """Take a version out of service. force: also one that applications link."""

    def set_logging(self, settings: LoggingSettings) -> None:
        """Log at another level, or in another format, from now on."""

    def accept_store(self, *, restore: bool) -> int:
        """Take a store with another content for the one that is known here."""

    @property
    def app(self) -> Callable[..., ApplicationHandle]:
        """Return the function that returns a handle of an application."""

    def stages(self, name: str) -> dict[VersionedModel, Stage]:
        """Return the durations of the stages of queries, by version."""

    @property
    def http_address(self) -> str:
        """Return the address of the HTTP frontend; empty without one."""

    @property
    def grpc_address(self) -> str:
        """Return the address of the gRPC frontend; empty without one."""


@refusing_unknown_keywords
class Operations:
    """Management operations of one server. Threads: any. actor: who acts, for the history. dry_run:
    check, and write nothing.
    """

    def __init__(
        self,
        server: Server,
        place: Place,
        rolling: Rolling,
        actor: str,
        *,
        dry_run: bool = False,
        lock: "threading.Lock | None" = None,
    ) -> None:
        self._server, self._place, self._rolling = server, place, rolling
        self.actor, self.dry_run = actor, dry_run
        # links and roles are read, changed and written back
        self._linking = lock or threading.Lock()

    @property
    def on_tables(self) -> TableOperations:
        """The operations on parameter tables, done by the same."""
        return TableOperations(self._server, self.actor, dry_run=self.dry_run)

    @property
    def on_streams(self) -> StreamOperations:
        """The operations on streams, done by the same."""
        return StreamOperations(self._server, self.actor, dry_run=self.dry_run)

    def by(self, actor: str, *, dry_run: bool = False) -> Self:
        """Return the same operations, done by another actor."""
        return type(self)(
            self._server, self._place, self._rolling, actor, dry_run=dry_run, lock=self._linking
        )

    @contextmanager
    def _doing(self, verb: str) -> Iterator[Change]:
        change = Change(verb, dry_run=self.dry_run)
        with audit_context(self.actor, verb, dry=self.dry_run) as now:
            yield change
        change.changed = tuple(one for entry in now.entries for one in entry.changed)

    # -- looking

    def about(self) -> dict[str, object]:
        """Return the server itself: version, process, where queries come in over HTTP (a URL) and
        gRPC (or empty), its state, and a warning if its store is away or has another content."""
        server, state, http = (
            self._server,
            self._server.config.server.state,
            self._server.config.http,
        )
        url = f"{scheme_of(query_tls(http))}://{server.http_address}" if server.http_address else ""
        addresses = {"http": url, "grpc": server.grpc_address}
        return {
            "version": VERSION,
            "pid": os.getpid(),
            **addresses,
            "state": without_secrets(state) or "memory",
            "store": store_warning(server.stats().get("store")),
        }

    def stats(self) -> ServerStats:
        """Return ClipperServer.stats."""
        return self._server.stats()

    def application_stats(self, name: str) -> QueryStats:
        """Return the part of `stats` that is about one application. Raises UnknownApplication."""
        self._server.catalog.application(name)
        return self._server.stats()["applications"].get(name) or cast(QueryStats, {})

    def evaluation(
        self, application: str, policy: str, count: int = EVALUATED
    ) -> dict[str, object]:
        """Estimate the accuracy that another policy would have had on the application's feedback.

        policy: with settings if any.  count: of the newest feedbacks, at most 20 000; each takes 20
        to 150 us. Returns the members of `Evaluation`, each estimate with its 95 % interval. Raises
        UnknownApplication, InvalidInput, DoesNotFit where the journal allows no estimate.
        """
        name = self._server.catalog.application(application).name
        if not 1 <= count <= EVALUATED_MAX:
            raise InvalidInput(
                f"count={count}: 1 to {EVALUATED_MAX} feedbacks are evaluated here.",
                hint=f"For more: clipper evaluate {name} --last {count}.",
            )
        try:
            found = self._server.app(name).evaluate(policy, queries_max=count)
        except NotAllowed as error:  # over HTTP that would ask for a token
            raise DoesNotFit(error.message, hint=error.hint) from None
        return {**msgspec.to_builtins(found), "policy": policy}

    def model_stats(self, model: str) -> ModelStats:
        """Return the part that is about `svm:3`, or the latest `svm`. Raises UnknownModel."""
        id_ = self._server.catalog.view.model(model).id
        return self._server.stats()["models"].get(str(id_), {})

    def stages(self, name: str) -> list[dict[str, object]]:
        """Return the deployment stage of each version of a model that was started here: `version`,
        `stage`, `detail`, and its age in seconds (`for_s`).
        """
        check_name(name, "model")
        now_s = time.monotonic()
        return [
            {
                "version": id_.version,
                "stage": one.stage,
                "detail": one.detail,
                "for_s": round(now_s - one.since_s, 3),
            }
            for id_, one in self._server.stages(name).items()
        ]

    def models(self, name: str = "") -> list[dict[str, object]]:
        """Return each version in service: its record, whether it is the `latest`, which
        applications link it, how many replicas it has."""
        catalog = self._server.catalog
        found = catalog.versions(VersionedModel.parse(name).name) if name else catalog.models()
        stats = self._server.stats()["models"]
        return [self._model_row(model, stats.get(str(model.id), {})) for model in found]

    def _model_row(self, model: Model, row: Mapping[str, object]) -> dict[str, object]:
        view = self._server.catalog.view
        return {
            **record_of(model),
            "input": str(model.input),
            "applications": [app.name for app in view.linking(model)],
            "latest": view.model(model.name).id == model.id,
            "wanted": row.get("wanted", 0),
            "has": row.get("has", 0),
        }

    def ps(self) -> list[dict[str, object]]:
        """Return each version in service as it runs: state, replicas, memory, queue, batch and
        why, the last error and what to do."""
        return processes(self._server)

    def follow(self, model: str, after: str = "") -> dict[str, object]:
        """Return the lines that the containers of a model wrote since `after`, which the previous
        call returned.
        """
        return followed(self._server, model, after)

    def applications(self) -> list[dict[str, object]]:
        """Return the record of each application."""
        return [application_row(app) for app in self._server.catalog.applications()]

    def application(self, name: str) -> dict[str, object]:
        """Return the record of one application. Raises UnknownApplication."""
        return application_row(self._server.catalog.application(name))

    def logs(self, model: str, replica: int = 0) -> list[str]:
        """Return the last lines a container wrote."""
        return list(self._server.logs(model, replica))

    def history(self, count: int = 100) -> list[dict[str, object]]:
        """Return the last changes, the oldest first: number, time_us, actor, verb, changed (records
        before and after)."""
        if not 1 <= count <= ENTRIES_MAX:
            raise InvalidInput(f"count={count}: 1 to {ENTRIES_MAX}.")
        return [plain(entry) for entry in entries(self._place.store, count)]

    # -- models

    def deploy(
        self,
        name: str,
        model: str = "",
        *,
        promote: bool = True,
        wait: bool = True,
        **members: Unpack[ModelMembers],
    ) -> Change:
        """Deploy a model, as ClipperServer.deploy does.

        model: "module:attribute", or a model's file or folder on the server's host. promote: make
        it the latest version. wait: return when its containers are connected. members: those of
        `ModelSpec`: data: the bytes of such a file instead, and its `kind`; kinds that may hold
        pickles are refused. reads: columns of the input by table; functions are not accepted, since
        the server would run them. command: a program of the server's host that is the container,
        run in `folder`; it must be named in server.commands. requirements: packages and their
        versions only.
        """
        refuse_unknown(
            "Operations.deploy",
            [key for key in members if key not in ModelMembers.__annotations__],
            (*keywords_of(self.deploy), *ModelMembers.__annotations__),
        )
        spec = specified(ModelSpec, {**members, "model": model}, "http")
        thing = to_run(self._permitted(name, spec), spec)
        with self._doing("deploy") as change:
            if self.dry_run:
                id_ = self._rehearse(name, thing, spec, promote)
            else:
                settings = stated(spec, _WHAT_RUNS)
                handle = self._server.deploy(name, thing, wait=wait, promote=promote, **settings)
                id_ = VersionedModel.parse(handle.name)
                row = self._server.stats()["models"].get(str(id_), {})
                change.warning = row.get("warmup_error", "")
        behind = "" if promote else f", behind the latest: clipper promote {id_}"
        change.message = f"deployed {id_}{behind}"
        return change

    def _permitted(self, name: str, spec: ModelSpec) -> Artifact | Command | str:
        """Return what a specification from a client runs. Raises InvalidInput, and PackagingError
        for what clients may not have run here."""
        check_packages(spec.requirements)
        if spec.command:
            if spec.data or spec.target:
                raise InvalidInput(f"deploy of {name!r}: give a model or a command.")
            check_permitted(spec.command, self._server.config.server.commands)
            return command_of(name, spec.command, spec.folder)
        if spec.data:
            artifact = Artifact(spec.kind, spec.data)
            if artifact.is_code:
                hint = "Deploy it by its path on the server's host, or save it in a safer format."
                raise PackagingError(
                    f"bytes of kind {spec.kind!r} may hold pickles, and are not taken from a"
                    " socket.",
                    hint=hint,
                )
            return artifact
        if not spec.target:
            raise InvalidInput(
                f"deploy of {name!r} lacks what to run.", hint='Give "module:attribute", or a file.'
            )
        if not is_data(spec.target) and ":" not in spec.target:
            hint = f'Give "module:attribute", a folder of MLflow, or a file: {", ".join(ENDINGS)}.'
            raise InvalidInput(f"cannot deploy {spec.target!r}.", hint=hint)
        return spec.target

    def _rehearse(
        self, name: str, thing: UserValue, spec: ModelSpec, promote: bool
    ) -> VersionedModel:
        """Check what can be checked of a deployment without starting a container."""
        catalog, config = self._server.catalog, self._server.config
        check_name(name, "model")
        fields = record_fields(name, spec, config, is_program=isinstance(thing, Command))
        taken = [model.version for model in catalog.view.versions.get(name, ())]
        record = Model(
            name,
            spec.version or max(taken, default=0) + 1,
            InputType.parse(input_of(spec) or "any"),
            target=_shown_target(thing),
            **fields,
        )
        check_read(record, has_tables=bool(config.server.params))
        return catalog.register(record, promote=promote).id

    def promote(self, model: str, application: str | None = None) -> Change:
        """Make this version the latest, to which links without a version refer; with `application`,
        link that one to this version alone."""
        catalog = self._server.catalog
        with self._doing("promote") as change:
            found = catalog.promote(model, application)
        when = "now" if change.changed else "already"
        change.message = (
            f"{application} {when} uses {found.id}"
            if application
            else f"{found.id} is {when} the latest version of {found.name}"
        )
        return change

    def rollback(self, model: str) -> Change:
        """Make the version before the latest the latest: the highest below it that is in
        service."""
        catalog = self._server.catalog
        now = catalog.latest(VersionedModel.parse(model).name)
        below = [other for other in catalog.versions(now.name) if other.version < now.version]
        if not below:
            served = ", ".join(str(other.id) for other in catalog.versions(now.name))
            hint = f"In service: {served}. To choose one: clipper promote NAME:VERSION."
            raise UnknownVersion(
                f"model {now.name!r} has no version below {now.version} in service to go back to.",
                hint=hint,
            )
        with self._doing("rollback") as change:
            catalog.promote(below[-1].id)
        change.message = (
            f"{below[-1].id} is now the latest version of {now.name}, instead of {now.id}"
        )
        return change

    def scale(self, model: str, replicas: int | tuple[int, int]) -> Change:
        """Run so many containers of a version, or within (least, most) as many as the load
        requires."""
        with self._doing("scale") as change:
            id_ = self._server.catalog.view.model(model).id
            if self.dry_run:
                least, most = replica_bounds(
                    model, replicas, self._server.config.limits.replicas_max
                )
                self._server.catalog.set_replicas(id_, least, most)
            else:
                self._server.scale(id_, replicas)
        many = f"{replicas[0]} to {replicas[1]}" if isinstance(replicas, tuple) else str(replicas)
        change.message = f"{id_} has {many} replica{'' if many == '1' else 's'}"
        return change

    def retire(self, model: str, force: bool = False) -> Change:
        """Take a version out of service for good."""
        with self._doing("retire") as change:
            view = self._server.catalog.view
            found = view.model(model)
            id_, linked = found.id, [app.name for app in view.linking(found)]
            if self.dry_run:
                self._server.catalog.retire_model(id_, force=force)
            else:
                self._server.retire(id_, force=force)
        follows = version_after(view, found)
        change.message = f"retired {id_}"
        if linked:
            apps = ", ".join(linked)
            change.message += f"; application {apps}: " + (
                f"{follows} follows" if follows else "unlinked"
            )
        return change

    # -- applications

    def set_application(
        self,
        name: str,
        models: tuple[str, ...] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Change:
        """Make an application, or change what is named of it; settings as of ClipperServer.app."""
        known = name in self._server.catalog.view.applications
        given = dict(settings or {})
        with self._doing("set") as change:
            self._server.app(name, models, **given)
        change.message = (
            f"{'changed' if known else 'created'} application {name}"
            if change.changed
            else f"application {name} already has these settings"
        )
        return change

    def remove_application(self, name: str) -> Change:
        """Delete an application."""
        with self._doing("remove") as change:
            self._server.catalog.application(name)
            self._server.catalog.unregister_application(name)
        change.message = f"removed application {name}"
        return change

    def link(self, application: str, model: str, role: str = "") -> Change:
        """Link a model to an application; in a role, as `shadow` or `challenger(share=0.1)`, or as
        one of those that answer."""
        return self._link("link", application, model, role)

    def challenge(self, application: str, model: str, share: float = 0.1) -> Change:
        """Let a model alone answer a share of an application's queries."""
        return self._link("challenge", application, model, f"challenger(share={share:g})")

    def shadow(self, application: str, model: str, share: float = 1.0) -> Change:
        """Send an application's queries, or a share of them, to a model as well, without using its
        predictions."""
        return self._link(
            "shadow", application, model, f"shadow(share={share:g})" if share != 1.0 else "shadow"
        )

    def _link(self, verb: str, application: str, model: str, role: str) -> Change:
        catalog = self._server.catalog
        wanted = VersionedModel.parse(model)
        with self._linking, self._doing(verb) as change:
            catalog.view.model(wanted)
            app = catalog.application(application)
            links = app.models if wanted in app.models else (*app.models, wanted)
            roles = {name: text for name, text in app.roles.items() if name != str(wanted)}
            self._server.app(
                application, links, roles={**roles, str(wanted): role} if role else roles
            )
        change.message = (
            f"{application}{'' if change.changed else ' already'} uses"
            f" {wanted}{f' as {role}' if role else ''}"
        )
        return change

    def unlink(self, application: str, model: str) -> Change:
        """Remove a model from an application."""
        catalog = self._server.catalog
        wanted = VersionedModel.parse(model)
        with self._linking, self._doing("unlink") as change:
            app = catalog.application(application)
            if wanted not in app.models:
                linked = ", ".join(map(str, app.models)) or "none"
                raise UnknownModel(
                    f"application {app.name!r} does not link '{wanted}'.", hint=f"Linked: {linked}."
                )
            roles = {name: text for name, text in app.roles.items() if name != str(wanted)}
            self._server.app(
                application, tuple(link for link in app.models if link != wanted), roles=roles
            )
        change.message = f"{application} no longer uses {wanted}"
        if app.models == (wanted,):
            change.warning = (
                f"application {application} has no model now: queries get its default. Link one:"
                f" clipper link {application} MODEL"
            )
        return change

    # -- rollouts

    def rollout(
        self,
        application: str,
        model: str,
        *,
        canary: str | float | None = None,
        stages: str | list[str | float] | None = None,
        hold: str | float = HOLD_S,
        guard: str = GUARD,
        error_rate: float = ERROR_RATE,
    ) -> Change:
        """Let a version take over an application's queries, stage by stage while the guards hold,
        or not at all.

        canary: the first share. stages: all shares, "5,25,50,100" in per cent or [0.05, 0.25, 0.5,
        1.0].  hold: how long each lasts at least, "60s" or seconds.  guard: see docs/managing.md.
        error_rate: with which a version that keeps to its guards is reverted all the same.
        """
        catalog = self._server.catalog
        shares, held_s = stages_of(canary, stages), seconds_of(hold)
        guarded, rate = checked_guard(guard), checked_rate(error_rate)
        with self._linking, self._doing("rollout") as change:
            self._rolling.check(catalog.view.model(VersionedModel.parse(model)).id)
            new = catalog.start_rollout(
                application, model, stages=shares, hold_s=held_s, guard=guarded, error_rate=rate
            )
        grows = " -> ".join(f"{share:.4g}" for share in shares)
        change.message = (
            f"{application} uses {new.model} instead of {new.control} for a growing share: {grows}"
        )
        return change

    def rollouts(self, application: str = "") -> list[dict[str, object]]:
        """Return the last rollout of each application (or of one): its record, the figures of its
        stage, and what it waits for."""
        view = self._server.catalog.view
        names = [view.application(application).name] if application else sorted(view.rollouts)
        return [
            self._rolling.status(view.rollouts[name]) for name in names if name in view.rollouts
        ]

    def pause_rollout(self, application: str) -> Change:
        """Let it grow no more until it is resumed; a broken guard reverts it all the same."""
        return self._move_rollout("pause", application, state="paused")

    def resume_rollout(self, application: str) -> Change:
        """Let it grow again; its stage starts again."""
        return self._move_rollout("resume", application, state="running")

    def abort_rollout(self, application: str) -> Change:
        """Abort a rollout: all queries go to the version before again."""
        return self._move_rollout("abort", application, state="aborted")

    def promote_rollout(self, application: str) -> Change:
        """End a rollout: all queries go to the new version, whatever its guards show."""
        return self._move_rollout("promote", application, state="promoted")

    def _move_rollout(self, verb: str, application: str, state: str) -> Change:
        def move(now: Rollout) -> Rollout:
            return (
                now
                if now.state == state
                else msgspec.structs.replace(now, state=state, reason=f"{verb}, by {self.actor}")
            )

        with self._linking, self._doing(f"rollout {verb}") as change:
            new = self._server.catalog.move_rollout(f"rollout {verb}", application, move)
        if change.changed and not self.dry_run:
            log_change(new)
        already = "" if change.changed else " already"
        change.message = f"the rollout of {new.model} in {application} is {new.state}{already}"
        return change

    # -- the store

    def accept_store(self, restore: bool) -> Change:
        """Take a store that came back empty, older or as another for the one that is known here.
        restore: write back what is known here; otherwise what the store lacks is gone. Every server
        of the store follows. DoesNotFit when the store continues what is known."""
        catalog, store = self._server.catalog, self._server.stats().get("store")
        refused = store["refused"] if store is not None else ""
        if not refused:
            raise DoesNotFit(
                "the store has what is known here: there is nothing to accept.",
                hint="See `clipper history` for who changed what.",
            )
        with self._doing("store accept") as change:
            if self.dry_run:
                count = catalog.accept_store(restore=restore)
            else:
                count = self._server.accept_store(restore=restore)
        what = f"{count} records were written back" if restore else "what it lacks is gone"
        change.message = f"{refused}; it is accepted: {what}"
        return change

    # -- the state as one file

    def export_state(self) -> ExportedState:
        """Return models with their files, applications, and what was learned."""
        return exported(self._server.catalog, self._place)

    def import_state(self, text: bytes) -> Change:
        """Add what `export_state` gave, as JSON. InvalidInput; AlreadyExists when a version here is
        another one; PackagingError for a command that is not in server.commands."""
        catalog, state = self._server.catalog, read_state(text)
        for model in state.models:
            check_permitted(model.command, self._server.config.server.commands)
        apps, new = applications_of(state), missing(state, self._server.catalog)
        with self._doing("import") as change:
            if not self.dry_run:
                bring(state, catalog, self._place)
                for app in apps:
                    settings = {
                        key: getattr(app, key)
                        for key in app.__struct_fields__
                        if key not in _OF_THE_RECORD
                    }
                    self._server.app(app.name, app.models, **settings)
        names = ", ".join([*(str(model.id) for model in new), *(app.name for app in apps)])
        change.message = f"imported {names or 'nothing'}"
        return change


# -- records of builtins


def _shown_target(thing: UserValue) -> str:
    """Return what a dry run names as the target of a record."""
    if isinstance(thing, str):
        return thing
    return thing.text if isinstance(thing, Command) else f"({thing.kind})"


def record_of(record: msgspec.Struct) -> dict[str, object]:
    """Return a model's record as plain data."""
    found: dict[str, object] = msgspec.to_builtins(record)
    found.pop("schema", None)
    return found


def application_row(app: Application) -> dict[str, object]:
    """Return an application's record as plain data."""
    return {
        **record_of(app),
        "input": str(app.input),
        "models": [str(model) for model in app.models],
    }
