"""Resolution of applications, and of sets of candidate models, to running models."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

import msgspec

from clipper.catalog.catalog import Catalog, View
from clipper.catalog.view import Rollout
from clipper.errors import (
    ClipperError,
    InvalidInput,
    PolicyFailed,
    ShuttingDown,
    TypeConflict,
    UnknownApplication,
)
from clipper.metrics.stats import QueryStats
from clipper.selection import create_policy, takes_context, with_coverage
from clipper.serving.feedback.learning import Learning
from clipper.serving.feedback.online_learning import OnlineLearning
from clipper.serving.models.model_source import ModelSource, ResolvedModel
from clipper.serving.models.running_models import RunningModels
from clipper.serving.models.served_versions import ServedVersions
from clipper.serving.query.core_application import core_of
from clipper.serving.query.decider_threads import DeciderThreads
from clipper.serving.query.missing_outputs import averages
from clipper.serving.query.named_outputs import check_output, default_of
from clipper.serving.query.processor import (
    FeedbackState,
    ResolvedApplication,
    RolloutState,
    UserContext,
    next_uniform,
)
from clipper.serving.query.speculation import (
    Speculation,
    check_decider,
    check_guarantee,
    check_times,
    speculation_of,
)
from clipper.serving.query.stats import ApplicationCounters, ApplicationStats
from clipper.serving.rollout.decoys import Recorder
from clipper.serving.rollout.roles import Role, RoleAssignment, placed
from clipper.serving.rollout.traffic_split import (
    COMPARED_S_MAX,
    RolloutObserver,
    StageStats,
    TrafficSplit,
)
from clipper.types import (
    Application,
    InputType,
    Model,
    PredictionRequest,
    UserValue,
    VersionedModel,
)
from clipper_core.application.application import ApplicationTable
from clipper_core.runtime.histogram import Snapshot

_log = logging.getLogger(__name__)
DEFAULT_POLICY = "ensemble"
_QUESTIONS_MAX = 4096  # distinct sets of candidate models kept resolved


class ExternalModels(ModelSource, Protocol):
    """Models that the catalog does not have: those of a mesh."""

    def application(self, name: str) -> ResolvedApplication | None:
        """Return a model resolved for a query that names it; None when there is none."""


class ApplicationResolver:
    """Resolves applications and candidate models. Threads: any.

    What it returns is immutable; a change of the catalog replaces it. contexts: returns the user
    vectors of an application from a parameter table. table: of the applications whose queries the
    core schedules.
    """

    def __init__(
        self,
        catalog: Catalog,
        running: RunningModels,
        served: ServedVersions,
        learning: Learning,
        recorder: Recorder,
        online_learning: OnlineLearning,
        decider_threads: DeciderThreads,
        external: ExternalModels,
        contexts: Callable[[str, str], UserContext | None],
    ) -> None:
        self._catalog = catalog
        self._running = running
        self._served = served
        self._learning = learning
        self._recorder = recorder
        self._online_learning = online_learning
        self._decider_threads = decider_threads
        self._tallies: dict[str, ApplicationCounters] = {}
        self._node = learning.node
        self.table = ApplicationTable()
        self._by_name: dict[str, ResolvedApplication] = {}
        self._candidates: dict[tuple[object, ...], ResolvedApplication] = {}
        self._refused: dict[
            VersionedModel, Snapshot
        ] = {}  # floors of guaranteed times: their latencies then
        self._may_roll: Callable[[Rollout], bool] = lambda _: True
        self._stages: dict[str, StageStats] = {}
        self._external, self._contexts = external, contexts
        self._is_closed = False

    def close(self) -> None:
        """Refuse every query from now on, with ShuttingDown. Idempotent."""
        self._is_closed = True
        self.table.replace({})
        _retire(self._by_name.values())

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShuttingDown("this server is closed.", hint="Start another with clipper.start().")

    def application(self, name: str) -> ResolvedApplication:
        """Return an application, or a model of the mesh, resolved for a query. Raises
        UnknownApplication, ShuttingDown.
        """
        self._check_open()
        try:
            return self._by_name[name]
        except KeyError:
            if (resolved := self._external.application(str(name))) is not None:
                return resolved
            raise UnknownApplication.named(str(name), self._by_name) from None

    def request(self, request: PredictionRequest) -> ResolvedApplication:
        """Return the resolved target of a request.

        Raises UnknownApplication, UnknownModel, InvalidInput, ShuttingDown.
        """
        self._check_open()
        if request.application is not None and not request.candidate_models:
            return self.application(request.application)
        return self._of_candidates(request)

    def check(self, name: str, settings: Mapping[str, UserValue], *, measured: bool = True) -> None:
        """Check that an application with these settings has a policy and a decider that fit its
        models, its input and its SLO.

        measured: a guaranteed time must hold now; otherwise a violation is only logged. Raises
        InvalidInput, UnknownModel, TypeConflict, PolicyFailed.
        """
        view = self._catalog.view
        known = view.applications.get(name) or Application(name)
        if not {"models", "policy", "decider", "slo_ms", "input", "output", "default"} & set(
            settings
        ):
            return
        models = [self._catalog.linked(view, link) for link in settings.get("models", known.models)]
        policy, decider = (
            settings.get("policy", known.policy),
            settings.get("decider", known.decider),
        )
        if models:
            input = settings.get("input") or models[0].input
            found = create_policy(policy)
            found.init(
                [model.id for model in models]
            )  # what it raises, it raises here and not in a query
            if not found.accepts_input_type(InputType.parse(input)):
                raise TypeConflict(
                    f"policy {policy!r} of application {name!r} does not take inputs of {input}."
                )
        cores = {model.id: self._resolved_model(view, model).core for model in models}
        default = settings.get("default", known.default)
        check_output(name, settings.get("output", known.output), default, cores)
        schedule = check_decider(name, decider, [model.id for model in models])
        slo_ms = settings.get("slo_ms", known.slo_ms)
        check_times(name, schedule, slo_ms)
        try:
            check_guarantee(name, schedule, slo_ms, cores, self._refused)
        except InvalidInput as error:
            if measured:
                raise
            _log.warning("%s", error)

    def resolve(self, view: View) -> None:
        """Resolve all applications for a new view of the catalog; none once it is closed."""
        if self._is_closed:
            return
        for model in view.models():
            self._running.ensure(model)
        self._served.follow(view)
        self._tallies = {
            name: self._tallies.get(name) or ApplicationCounters() for name in view.applications
        }
        by_name = {
            name: self._with_stats(view, app, self._models_of(view, app), self._tallies[name])
            for name, app in view.applications.items()
        }
        for name, resolved in by_name.items():
            resolved.learner.watcher = self._tallies[name]
        stages: dict[str, StageStats] = {}
        for name, rollout in view.rollouts.items():
            if (
                name in by_name
                and applies(view, rollout)
                and self._may_roll(rollout)
                and rollout.control in by_name[name].models
            ):
                by_name[name] = self._rolling(view, rollout, by_name[name])
                stages[name] = by_name[name].rollout.split.stage  # type: ignore[union-attr]
        by_name = {name: _with_core(resolved) for name, resolved in by_name.items()}
        before = self._by_name
        self._by_name, self._stages, self._candidates = by_name, stages, {}
        self.table.replace(
            {name: resolved.core for name, resolved in by_name.items() if resolved.core is not None}
        )
        _retire(before.values())

    # -- rollouts

    def let_roll(self, may: Callable[[Rollout], bool]) -> None:
        """Set the predicate that admits rollouts to queries; it is called at each resolve()."""
        self._may_roll = may

    def stage(self, application: str) -> StageStats | None:
        """Return the counts of an application's rollout; None while it takes no queries here."""
        return self._stages.get(application)

    def _rolling(
        self, view: View, rollout: Rollout, before: ResolvedApplication
    ) -> ResolvedApplication:
        """Return the application with a traffic split between its versions."""
        app, counters = view.applications[rollout.application], self._tallies[rollout.application]
        stage = self._stages.get(rollout.application)
        if stage is None or not stage.is_of(rollout):
            stage = StageStats(
                rollout,
                time.monotonic(),
                lambda: counters.watched.compared(rollout.control, rollout.model),
            )
        links = tuple(
            dict.fromkeys(rollout.model if link == rollout.link else link for link in app.models)
        )
        roles = {
            key: text
            for key, text in app.roles.items()
            if key not in (str(rollout.link), str(rollout.model))
        }
        linked = msgspec.structs.replace(app, models=links)
        new = self._resolved(view, linked, self._models_of(view, linked, rollout.model))
        standard = (
            {rollout.control: Role("canary", rate_max=COMPARED_S_MAX)} if stage.compares else {}
        )
        before_stats = counters.for_models(before.models, before.rollout.assignment, new.models)
        new = self._with_roles(
            view, msgspec.structs.replace(linked, roles=roles), new, counters, standard
        )
        new.learner.watcher = RolloutObserver(counters, stage.new)
        before.learner.watcher = RolloutObserver(counters, stage.before)
        new = _with_rollout(new, side=stage.new)
        before = _with_rollout(before, stats=before_stats, side=stage.before)
        split = TrafficSplit(
            _with_core(new),
            _with_core(before),
            stage,
            {**before.cores, **new.cores},
            next_uniform,
        )
        return _with_rollout(before, split=split)

    def stats(self) -> dict[str, QueryStats]:
        """Return statistics by application: docs/monitoring.md."""
        return {
            name: self._stats_of(resolved, resolved.rollout.stats)
            for name, resolved in self._by_name.items()
            if resolved.rollout.stats is not None
        }

    def slowest(self) -> dict[str, list[dict[str, object]]]:
        """Return the slowest queries since the last call, by application."""
        return {
            name: found
            for name, counters in self._tallies.items()
            if (found := counters.slowest.take())
        }

    def _stats_of(self, resolved: ResolvedApplication, stats: ApplicationStats) -> QueryStats:
        speculation = resolved.speculation
        found = {
            "policy": resolved.policy.name,
            "decider": "all" if speculation is None else speculation.text,
            "slo_ms": resolved.slo_us / 1000,
            **stats.counters.stats(stats),
            **_decoy_stats(resolved),
            **({"context": resolved.rows.stats()} if resolved.rows is not None else {}),
        }
        return cast(QueryStats, found)

    def _with_stats(
        self, view: View, app: Application, models: Sequence[Model], counters: ApplicationCounters
    ) -> ResolvedApplication:
        """Return the application, resolved to these models, with its roles and statistics."""
        return self._with_roles(view, app, self._resolved(view, app, models), counters)

    def _with_roles(
        self,
        view: View,
        app: Application,
        resolved: ResolvedApplication,
        counters: ApplicationCounters,
        beside: Mapping[VersionedModel, Role] | None = None,
    ) -> ResolvedApplication:
        """Return the application with roles and statistics.

        beside: models that are queried in a role without being linked; not None for the new side of
        a rollout, even if it is empty.
        """
        roles: dict[VersionedModel, Role] = {}
        decoys = []
        for name, text in app.roles.items():
            try:
                place, role = placed(app.name, app.models, name, text)
                if isinstance(place, str):
                    decoys.append(self._recorder.decoy(app.name, place, role))
                else:
                    roles[self._linked(view, app, place).id] = role
            except ClipperError as error:
                _log.warning("application %r: %s", app.name, error)
        models = resolved.models
        if beside:
            models, roles = tuple(dict.fromkeys((*models, *beside))), {**roles, **beside}
            cores = {
                model.id: self._running.ensure(model).core for model in map(view.model, beside)
            }
            resolved = msgspec.structs.replace(resolved, cores={**cores, **resolved.cores})
        assignment = RoleAssignment(roles, models) if roles else None
        stats = (
            counters.for_models(models, assignment)
            if beside is None
            else counters.other_side(models, assignment)
        )
        resolved = msgspec.structs.replace(
            resolved,
            rollout=RolloutState(stats, assignment, tuple(decoys)),
            means=counters.means if averages(resolved.policy) and app.missing == "mean" else None,
        )
        return msgspec.structs.replace(resolved, speculation=self._speculation_of(app, resolved))

    def _models_of(
        self, view: View, app: Application, exactly: VersionedModel | None = None
    ) -> list[Model]:
        """Return the models that the links of an application mean here. exactly: a link that means
        this very version."""
        models = []
        for link in app.models:
            try:
                exact = link == exactly
                models.append(view.model(link) if exact else self._linked(view, app, link))
            except ClipperError as error:
                _log.warning("application %r: %s", app.name, error)
        return models

    def _resolved(
        self, view: View, app: Application, models: Sequence[Model]
    ) -> ResolvedApplication:
        ids = tuple(dict.fromkeys(model.id for model in models))
        found = {model.id: self._resolved_model(view, model) for model in models}
        cores = {id: model.core for id, model in found.items()}
        try:
            policy, learner, window = self._learning.learner(
                app.name, with_coverage(app.policy, app.coverage), ids
            )
        except (
            InvalidInput,
            PolicyFailed,
        ) as error:  # of a class that was in order when it was set, perhaps by another server
            _log.error(
                "application %r: %s It combines by %r until that is mended.",
                app.name,
                error,
                DEFAULT_POLICY,
            )
            policy, learner, window = self._learning.learner(app.name, DEFAULT_POLICY, ids)
        wanted = app.context_table and takes_context(policy)
        return ResolvedApplication(
            app.name,
            ids,
            cores,
            policy,
            learner,
            app.slo_us,
            default_of(app.default, cores) if not app.output else app.default,
            app.output,
            app.confidence_min,
            self._node,
            feedback=FeedbackState(window, self._online_learning, self._learning.records),
            rows=self._contexts(app.name, app.context_table) if wanted else None,
            on_demand={id: model for id, model in found.items() if model.is_on_demand},
            columns=models[0].columns if len({model.columns for model in models}) == 1 else (),
            priority=app.priority,
        )

    def _linked(self, view: View, app: Application, link: VersionedModel | str) -> Model:
        """Return the model that a link of an application means here: the version before while a new
        one is not up yet. Raises UnknownModel, UnknownVersion."""
        wanted = VersionedModel.parse(link)
        if wanted.name in view.versions:
            return self._served.model(view, wanted, app.name)
        return self._catalog.linked(view, wanted)

    def _resolved_model(self, view: View, model: Model) -> ResolvedModel:
        if model.name not in view.versions:
            found = self._external.resolve(model.name)
            if found is not None:
                return found
        return self._running.get(model.id) or self._running.ensure(model)

    def _speculation_of(
        self, app: Application, resolved: ResolvedApplication
    ) -> Speculation | None:
        try:
            return speculation_of(app.decider, resolved, self._decider_threads)
        except InvalidInput as error:
            _log.error(
                "application %r: %s It waits for all its models until that is mended.",
                app.name,
                error,
            )
            return None

    def unlisted(self, model: ResolvedModel, slo_us: int) -> ResolvedApplication:
        """Return the target of queries to one model of the mesh."""
        ids = (model.record.id,)
        policy, learner, window = self._learning.learner(
            "", DEFAULT_POLICY, ()
        )  # one for all: it learns nothing of them
        return ResolvedApplication(
            "",
            ids,
            {ids[0]: model.core},
            policy,
            learner,
            slo_us,
            None,
            "",
            0.0,
            self._node,
            feedback=FeedbackState(window, self._online_learning, self._learning.records),
            on_demand={ids[0]: model},
            unlisted_model=model,
        )

    def _of_candidates(self, request: PredictionRequest) -> ResolvedApplication:
        """Return the target of a request that names its candidate models."""
        candidates = request.candidate_models
        if isinstance(candidates, str | VersionedModel):
            candidates = (candidates,)
        key = (request.application, *map(str, candidates))
        known = (
            self._candidates
        )  # a change of the catalog swaps it: what is resolved from an old view goes with it
        resolved = known.get(key)
        if resolved is not None:
            return resolved
        if len(candidates) == 1 and request.application is None:
            name = str(candidates[0])
            if (
                name not in self._catalog.view.versions
                and (resolved := self._external.application(name)) is not None
            ):
                return resolved
        if not candidates:
            raise InvalidInput(
                "a request names an application or candidate models; this one names neither."
            )
        view = self._catalog.view
        base = (
            Application("", slo_ms=1000.0)
            if request.application is None
            else view.application(request.application)
        )
        linked = [self._linked(view, Application(""), model) for model in candidates]
        cores = {model.id: self._resolved_model(view, model).core for model in linked}
        check_output(base.name, base.output, base.default, cores)
        links = tuple(model.id for model in linked)
        asked = msgspec.structs.replace(base, models=links, roles={})
        resolved = self._with_stats(view, asked, linked, ApplicationCounters())
        if len(known) < _QUESTIONS_MAX:
            known[key] = resolved
        return resolved


def _with_rollout(resolved: ResolvedApplication, **changes: object) -> ResolvedApplication:
    """Return the application with changes of its rollout state."""
    rollout = msgspec.structs.replace(resolved.rollout, **changes)
    return msgspec.structs.replace(resolved, rollout=rollout)


def applies(view: View, rollout: Rollout) -> bool:
    """Return whether the application still links what the rollout replaces, and both versions are
    in service.
    """
    app = view.applications.get(rollout.application)
    if app is None or not rollout.is_open or rollout.link not in app.models:
        return False
    try:
        return (
            view.model(rollout.link).id == rollout.control
            and view.model(rollout.model).id == rollout.model
        )
    except ClipperError:
        return False


def _decoy_stats(resolved: ResolvedApplication) -> dict[str, object]:
    return (
        {"decoys": {decoy.name: decoy.stats() for decoy in resolved.rollout.decoys}}
        if resolved.rollout.decoys
        else {}
    )


def _with_core(resolved: ResolvedApplication) -> ResolvedApplication:
    """Return the application with what schedules its plain queries."""
    return msgspec.structs.replace(resolved, core=core_of(resolved))


def _retire(replaced: Iterable[ResolvedApplication]) -> None:
    """Have applications that are queried no more freed with their last query."""
    for resolved in replaced:
        split = resolved.rollout.split
        for one in (resolved,) if split is None else (split.new, split.before):
            if one.core is not None:
                one.core.retire()
