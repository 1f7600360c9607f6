"""The catalog as it is at one revision, and how its records are written in the store: see
catalog/catalog.py.

The latest version of a model is the one that came last: the highest registered, unless another was
promoted since. A promotion remembers the highest version of its time (`upto`), so that whatever is
deployed later is the latest again; when the promoted version is retired, the highest one below it
is next.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from clipper.errors import (
    InvalidInput,
    UnknownApplication,
    UnknownModel,
    UnknownVersion,
)
from clipper.store import Put, Record
from clipper.types import Application, Model, VersionedModel

PREFIX: Final = "catalog/"
_T = TypeVar("_T")


class Promoted(msgspec.Struct, frozen=True, tag_field="schema", tag="clipper.promoted/1"):
    """The promoted version of a name. version: the latest of the versions up to `upto`."""

    version: int
    upto: int


class Scale(msgspec.Struct, frozen=True, tag_field="schema", tag="clipper.scale/1"):
    """The wanted number of replicas of a version, as it is stored."""

    replicas: int
    retired_us: int = 0
    replicas_max: int = 0


class Rollout(msgspec.Struct, frozen=True, tag_field="schema", tag="clipper.rollout/1"):
    """A new version that takes over an application's queries, share by share; kept after its end.
    Who moves it: manage/rollouts/rolling.py.

    model: the new version, which takes the place of `control` under the link `link`.  stages:
    shares of the queries, ascending. hold_s: how long each lasts at least.  guard: as written.
    error_rate: of the tests behind the guard, over the whole rollout. stage: the one it is in, from
    0.  state: "running", "paused"; or over: "promoted", "reverted", "aborted".  reason: of the last
    move.  began_us, stage_us: when it, and its stage, began.
    """

    application: str
    model: VersionedModel
    link: VersionedModel
    control: VersionedModel
    stages: tuple[float, ...]
    hold_s: float
    guard: str
    error_rate: float
    stage: int = 0
    state: str = "running"
    reason: str = ""
    began_us: int = 0
    stage_us: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether the rollout is running or paused."""
        return self.state in ("running", "paused")

    @property
    def share(self) -> float:
        """Share of queries that see the new version now."""
        return self.stages[self.stage] if self.is_open else float(self.state == "promoted")


class View(msgspec.Struct, frozen=True):
    """The catalog at one revision. Threads: any; it never changes."""

    revision: int
    versions: Mapping[str, tuple[Model, ...]]  # by name; versions ascending, retired ones included
    applications: Mapping[str, Application]
    unreadable: Mapping[str, str]  # key -> why
    promoted: Mapping[str, Promoted] = MappingProxyType({})  # by name
    rollouts: Mapping[str, Rollout] = MappingProxyType({})  # by application: the last one

    def models(self) -> list[Model]:
        """Return every version that is not retired, by name and version."""
        return [
            model
            for name in sorted(self.versions)
            for model in self.versions[name]
            if not model.retired_us
        ]

    def model(self, wanted: VersionedModel | str) -> Model:
        """Return the version, or the latest when none is named. Raises UnknownModel, UnknownVersion
        (also when retired)."""
        wanted = VersionedModel.parse(wanted)
        serving = [model for model in self.versions.get(wanted.name, ()) if not model.retired_us]
        if not serving:
            raise UnknownModel.named(wanted.name, {model.name for model in self.models()})
        if wanted.version is None:
            version = self.latest_of(wanted.name, [model.version for model in serving])
            return next(model for model in serving if model.version == version)
        for model in serving:
            if model.version == wanted.version:
                return model
        raise UnknownVersion.named(str(wanted), [str(model.id) for model in serving])

    def record(self, id_: VersionedModel) -> Model | None:
        """Return the record of a version, also of one that is retired; None if there is none."""
        versions = self.versions.get(id_.name, ())
        return next((model for model in versions if model.version == id_.version), None)

    def application(self, name: str) -> Application:
        """Return an application by its name. Raises UnknownApplication."""
        try:
            return self.applications[name]
        except KeyError:
            raise UnknownApplication.named(str(name), self.applications) from None

    def linking(self, model: Model) -> list[Application]:
        """Return the applications that query this version, also as the latest."""
        return [
            app
            for app in self.applications.values()
            if any(self._is(link, model) for link in app.models)
        ]

    def _is(self, link: VersionedModel, model: Model) -> bool:
        if link.version is not None:
            return link == model.id
        serving = [
            other.version for other in self.versions.get(link.name, ()) if not other.retired_us
        ]
        return (
            link.name == model.name
            and self.latest_of(link.name, {*serving, model.version}) == model.version
        )

    def latest_of(self, name: str, serving: Collection[int]) -> int:
        """Return the version, of these, that a link without a version refers to."""
        promoted = self.promoted.get(name)
        if promoted is None or max(serving) > promoted.upto:
            return max(serving)
        return max(
            (version for version in serving if version <= promoted.version), default=max(serving)
        )


# -- records. JSON has no bytes, and no NaN: these are wrapped. What is plain stays plain.


def encode(record: Model | Application | Scale | Promoted | Rollout) -> bytes:
    """Return a record as JSON. Raises InvalidInput for a value that JSON cannot hold."""
    if isinstance(record, Application):
        record = msgspec.structs.replace(record, default=_wrap(record.default))
    try:
        return msgspec.json.encode(record)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{record.__class__.__name__.lower()} cannot be recorded: {error}."
        ) from None


def put_scale(model: Model) -> Put:
    """Return the write of a model's number of replicas."""
    return Put(
        scale_key(model.id), encode(Scale(model.replicas, model.retired_us, model.replicas_max))
    )


def _wrap(value: object) -> object:
    if isinstance(value, list):
        return [_wrap(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {name: _wrap(item) for name, item in value.items()}}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _unwrap(value: object) -> object:
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    if isinstance(value, dict) and "dict" in value:
        return {name: _unwrap(item) for name, item in value["dict"].items()}
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"]) if "bytes" in value else float(value["float"])
    return value


def application_in(value: bytes) -> Application:
    """Decode an application that `encode` wrote. Raises MsgspecError, ValueError, LookupError or
    TypeError.
    """
    app = msgspec.json.decode(value, type=Application)
    return msgspec.structs.replace(app, default=_unwrap(app.default))


def view_of(records: Sequence[Record], revision: int) -> View:
    """Return the view of all records of the catalog, at a revision of the store."""

    models: dict[VersionedModel, Model] = {}
    scales: dict[str, Scale] = {}
    apps: dict[str, Application] = {}
    promoted: dict[str, Promoted] = {}
    rollouts: dict[str, Rollout] = {}
    unreadable: dict[str, str] = {}
    for record in records:
        try:
            kind = record.key.removeprefix(PREFIX).partition("/")[0]
            if kind == "model":
                model = msgspec.json.decode(record.value, type=Model)
                _same_key(record.key, model_key(model.id))
                models[model.id] = model
            elif kind == "scale":
                scales[record.key] = msgspec.json.decode(record.value, type=Scale)
            elif kind == "promoted":
                promoted[record.key.rpartition("/")[2]] = msgspec.json.decode(
                    record.value, type=Promoted
                )
            elif kind == "rollout":
                rollouts[record.key.rpartition("/")[2]] = msgspec.json.decode(
                    record.value, type=Rollout
                )
            elif kind == "application":
                app = application_in(record.value)
                _same_key(record.key, app_key(app.name))
                apps[app.name] = app
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
            unreadable[record.key] = str(error)
    versions: dict[str, tuple[Model, ...]] = {}
    for id_, model in sorted(models.items()):
        scale = scales.get(scale_key(id_))
        if scale is None:  # it may be retired: if this is not known, it must not be served
            unreadable.setdefault(scale_key(id_), "the record is missing")
            continue
        scaled = msgspec.structs.replace(
            model,
            replicas=scale.replicas,
            replicas_max=scale.replicas_max,
            retired_us=scale.retired_us,
        )
        versions[id_.name] = (*versions.get(id_.name, ()), scaled)
    frozen = MappingProxyType
    return View(
        revision,
        frozen(versions),
        frozen(apps),
        frozen(unreadable),
        frozen(promoted),
        frozen(rollouts),
    )


def _same_key(key: str, expected: str) -> None:
    if key != expected:
        raise ValueError(f"the record belongs to {expected!r}")


def model_key(id_: VersionedModel) -> str:
    """Return the store's key of a model version."""
    return f"{PREFIX}model/{id_.name}/{id_.version}"


def scale_key(id_: VersionedModel) -> str:
    """Return the store's key of a version's number of replicas."""
    return f"{PREFIX}scale/{id_.name}/{id_.version}"


def promoted_key(name: str) -> str:
    """Return the store's key of a model's promoted version."""
    return f"{PREFIX}promoted/{name}"


def app_key(name: str) -> str:
    """Return the store's key of an application."""
    return f"{PREFIX}application/{name}"


def rollout_key(application: str) -> str:
    """Return the store's key of an application's rollout."""
    return f"{PREFIX}rollout/{application}"
