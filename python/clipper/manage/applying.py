"""A server's applications and the queries to them: what `ClipperServer` inherits."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from clipper.errors import InvalidInput, ShuttingDown, UnknownApplication, did_you_mean
from clipper.manage.tables import Tabled
from clipper.selection import create_policy, with_coverage
from clipper.serving.application import ApplicationHandle, array_slo_in_us, request_id, slo_in_us
from clipper.serving.arrays import predict_array
from clipper.serving.collector import Collector
from clipper.serving.processor import predict
from clipper.serving.questions import Questions
from clipper.serving.roles import check_roles
from clipper.serving.stragglers import check_missing
from clipper.types import Application, PredictionRequest, VersionedModel
from clipper_core.future import Future

_APP_SETTINGS = tuple(
    field
    for field in Application.__struct_fields__
    if field not in ("name", "models", "created_us")
)


class Applying(Tabled):
    """Threads: any."""

    _questions: Questions
    _collectors: weakref.WeakSet[Collector]
    _closed: bool

    def app(
        self,
        name: str,
        models: str | VersionedModel | Sequence[str | VersionedModel] | None = None,
        **settings: Any,
    ) -> ApplicationHandle:
        """An application: made, or changed, when settings are given; else the one of that name.

        models: linked models, `svm` or `svm:3`.  settings: slo_ms, default, policy ("stacking",
        "exp3(eta=0.05)"), confidence_min, input, roles ({"svm:2": "canary", "forest": "shadow",
        "new": "challenger(share=0.1)", "saw": "decoy"}; docs/selection.md), missing ("mean": a
        number that is missing at the deadline is its model's mean; or "skip"), decider ("majority
        within 12 ms, else first": when to answer), coverage (0.9: `Answer.set` holds the truth nine
        times in ten), context_table ("users": of parameters, whose row of the user is a query's
        context; docs/params.md). A policy or decider of your own is "package.module:Class". Raises
        UnknownModel, TypeConflict, InvalidInput.
        """
        return self._app(name, models, settings)

    def _app(
        self,
        name: str,
        models: str | VersionedModel | Sequence[str | VersionedModel] | None,
        settings: dict[str, Any],
        measured: bool = True,
    ) -> ApplicationHandle:
        self._check_open()
        if "policy" in settings or "coverage" in settings:
            known = self.catalog.view.applications.get(name, Application(name))
            create_policy(
                with_coverage(
                    settings.get("policy", known.policy), settings.get("coverage", known.coverage)
                )
            )
        if unknown := sorted(set(settings) - set(_APP_SETTINGS)):
            guess = did_you_mean(unknown[0], _APP_SETTINGS) or "."
            hint = f"Settings: {', '.join(_APP_SETTINGS)}."
            raise InvalidInput(
                f"unknown setting {unknown[0]!r} of application {name!r}{guess}", hint=hint
            )
        if models is not None:
            settings["models"] = (
                (models,) if isinstance(models, str | VersionedModel) else tuple(models)
            )
        if "slo_ms" in settings:
            slo_in_us(settings["slo_ms"], self.config.limits.slo_ms_max)
        if "missing" in settings:
            check_missing(settings["missing"])
        self._check_roles(name, settings)
        self._check_context(name, settings)
        if name not in self.catalog.view.applications and not settings:
            raise UnknownApplication.named(name, self.catalog.view.applications)
        self._questions.check(name, settings, measured=measured)
        if name in self.catalog.view.applications:
            if settings:
                self.catalog.update_application(name, **settings)
        else:
            self.catalog.register_application(name, settings.pop("models", ()), **settings)
        return ApplicationHandle(name, self._questions.of, self.config.limits.slo_ms_max)

    def _check_roles(self, name: str, settings: Mapping[str, Any]) -> None:
        """Links and roles as they will be."""
        known = self.catalog.view.applications.get(name)
        links = settings.get("models", known.models if known else ())
        roles = settings.get("roles", known.roles if known else None)
        if roles and ("roles" in settings or "models" in settings):
            check_roles(name, links, roles)

    def remove_app(self, name: str) -> None:
        """Take an application away, and its statistics; its models stay, and so does what its
        policy has learned, for one that is made under the same name. Queries in flight are
        answered; later ones, and feedback for it, are refused by UnknownApplication. Raises
        UnknownApplication, StoreError."""
        self._check_open()
        self.catalog.unregister_application(name)

    def collector(self, capacity: int = 4096) -> Collector:
        """Queries started in one place, answers taken in another; at most `capacity` in between.
        See Collector. Raises InvalidInput."""
        self._check_open()
        collector = Collector(self.schedule_prediction, capacity)
        self._collectors.add(collector)
        return collector

    def schedule_prediction(self, request: PredictionRequest) -> Future:
        """Schedule one query; -> the Future of an Answer, at once. See PredictionRequest."""
        question = self._questions.asked(request)
        slo_us = question.slo_us
        if request.slo_ms is not None:
            slo_us = slo_in_us(request.slo_ms, self.config.limits.slo_ms_max)
        id = request_id(request.id) if request.id else ""
        return predict(
            question, request.input, request.user, slo_us, request.salt, request.context, id
        )

    def schedule_predictions(
        self,
        inputs: Any,
        application: str | None = None,
        models: Sequence[str | VersionedModel] = (),
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
    ) -> Future:
        """Schedule an array of queries to an application, or to models named here; -> the Future of
        `Answers`. See ApplicationHandle.predict_many and PredictionRequest."""
        request = PredictionRequest(inputs, application, tuple(models), user, slo_ms, salt)
        slo_us = array_slo_in_us(slo_ms, self.config.limits.slo_ms_max)
        return predict_array(self._questions.asked(request), inputs, user, slo_us, salt)

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("this server is closed.", hint="Start another with clipper.start().")
