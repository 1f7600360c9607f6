"""The state of a server as one file, and into another: models with what they are packed in,
applications, what was learned.

It is JSON. Learned states go as they are in the store, so what was learned in the last
`feedback.write_ms` may not be in it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.catalog.view import application_in, encode
from clipper.clock import wall_time_us
from clipper.errors import AlreadyExists, InvalidInput
from clipper.manage.model_files import ModelFiles
from clipper.serving.feedback.stored_state import PREFIX as LEARNED
from clipper.store import Store
from clipper.types import Application, Model

_SCHEMA: Final = "clipper.state/1"


class ExportedState(msgspec.Struct, frozen=True):
    """An exported state. models: those in service.  latest: of each name, when it is not the
    highest.  learned: by key of the store.  files: what models are packed in, by name."""

    schema: str
    created_us: int
    models: list[Model]
    latest: dict[str, int]
    applications: list[msgspec.Raw]
    learned: dict[str, bytes]
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Place:
    """Storage of a server. models: the folder of packed models. resume: serves a model of the
    catalog.
    """

    store: Store
    models: Path
    resume: Callable[[Model], None]


def read(text: bytes) -> ExportedState:
    """Decode an exported state.

    Raises InvalidInput when it is no such file, or its model files do not match their checksums.
    """
    try:
        state = msgspec.json.decode(text, type=ExportedState)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidInput(
            f"this is not an exported state: {error}.",
            hint="Write one with: clipper export state FILE",
        ) from None
    if state.schema != _SCHEMA:
        raise InvalidInput(
            f"an exported state of kind {state.schema[:40]!r}: this server reads {_SCHEMA!r}."
        )
    for model in state.models:
        if model.sha256:
            data = state.files.get(Path(model.target).name)
            if data is None or hashlib.sha256(data).hexdigest() != model.sha256:
                raise InvalidInput(
                    f"model '{model.id}' of this exported state is missing or damaged.",
                    hint="Export it again.",
                )
    return state


def exported(catalog: Catalog, place: Place) -> ExportedState:
    """Return the present state, for a file."""
    view = catalog.view
    files: dict[str, bytes] = {}
    models = []
    for model in view.models():
        if model.sha256:
            try:
                files[Path(model.target).name] = Path(model.target).read_bytes()
            except FileNotFoundError:
                if model.id in {one.id for one in catalog.models()}:
                    raise
                continue  # it was retired meanwhile
        models.append(msgspec.structs.replace(model, target=_movable(model)))
    names = {model.name for model in models}
    highest = {name: max(model.version for model in models if model.name == name) for name in names}
    latest = {
        name: view.model(name).version
        for name in names
        if view.model(name).version != highest[name]
    }
    learned = {record.key: record.value for record in place.store.range(LEARNED)[0]}
    applications = [msgspec.Raw(encode(app)) for app in catalog.applications()]
    return ExportedState(_SCHEMA, wall_time_us(), models, latest, applications, learned, files)


def _movable(model: Model) -> str:
    return Path(model.target).name if model.sha256 else model.target


def missing(state: ExportedState, catalog: Catalog) -> list[Model]:
    """Return the models that do not exist yet. Raises AlreadyExists when there is another model of
    the same name and version."""
    found = []
    for model in state.models:
        mine = next(
            (
                one
                for one in catalog.view.versions.get(model.name, ())
                if one.version == model.version
            ),
            None,
        )
        if mine is None:
            found.append(model)
        elif (mine.sha256, _movable(mine), mine.input) != (
            model.sha256,
            model.target,
            model.input,
        ) or mine.retired_us:
            what = "was retired here" if mine.retired_us else "is another one here"
            raise AlreadyExists(
                f"model '{model.id}' {what}.", hint="Import into a server without it."
            )
    return found


def bring(state: ExportedState, catalog: Catalog, place: Place) -> None:
    """Bring in models and what was learned. What exists already stays."""
    for key, value in state.learned.items():
        if key.startswith(LEARNED) and place.store.get(key) is None:
            place.store.put(key, value)
    files = ModelFiles(place.models)
    for model in missing(state, catalog):
        record = model
        with files.packing(model.id):
            if model.sha256:
                path = place.models / Path(model.target).name
                path.write_bytes(state.files[path.name])
                record = msgspec.structs.replace(model, target=str(path))
            record = catalog.register(record)
        files.keep(model.id)
        place.resume(record)
    for name, version in state.latest.items():
        catalog.promote(f"{name}:{version}")


def applications_of(state: ExportedState) -> list[Application]:
    """Return the applications of an exported state."""
    try:
        return [application_in(bytes(record)) for record in state.applications]
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
        raise InvalidInput(
            f"an application of this exported state cannot be read: {error}."
        ) from None
