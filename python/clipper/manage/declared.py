"""Models and applications that a file declares, at the start and when the file changes.

A file only adds and changes: whatever it no longer names runs on, until a person retires or
removes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from clipper.config import KEYWORD, Config, tables
from clipper.deploy.processes.command import command_of
from clipper.errors import ClipperError, StillLinked, UnknownModel, UnknownVersion
from clipper.manage.operations import Server
from clipper.settings.redaction import shown
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import fields, stated
from clipper.spec.model import ModelSpec
from clipper.store.history import audit_context
from clipper.types import UserValue, VersionedModel

_ACTOR = "the configuration"
_NO_KEYWORDS = ("target", "command", "folder", "replicas_max")
_SHOWN_MAX = 60  # characters of a value
# what does not wait for the next start
_AT_ONCE = ("models", "apps", "logging.level", "logging.format")


@contextmanager
def declared(config: Config, section: str, name: str) -> Iterator[None]:
    """Add to errors which model or application of the configuration they are about, and where it is
    declared."""
    try:
        yield
    except ClipperError as error:
        places = [
            origin for key, origin in config.origins.items() if key.startswith(f"{section}.{name}.")
        ]
        # a command's arguments need no place
        where = f"{places[0]}: " if places and not places[0].startswith(KEYWORD) else ""
        message = (
            f"{where}{'model' if section == 'models' else 'application'} {name!r}: {error.message}"
        )
        error.args = (message, *error.args[1:])
        raise


def declared_model(name: str, wanted: ModelSpec) -> object:
    """Return what a declared model runs: its target, or a Command. Raises: InvalidInput."""
    if wanted.command:
        return command_of(name, wanted.command, wanted.folder)
    return wanted.target


def model_settings(wanted: ModelSpec) -> dict[str, UserValue]:
    """Return a declared model as keywords of ClipperServer.deploy."""
    return {**stated(wanted, _NO_KEYWORDS), "replicas": wanted.bounds}


def application_settings(app: ApplicationSpec) -> dict[str, UserValue]:
    """Return a declared application as keywords of ClipperServer.app, without its models."""
    return {one.name: getattr(app, one.name) for one in fields(ApplicationSpec)[1:]}


def declare_again(server: Server, old: Config, new: Config) -> list[str]:
    """Apply a changed file. old: everything that it has declared so far.

    Returns a line for each thing done, and for each that cannot be done.
    """
    messages = list(_logging(server, old, new))
    with audit_context(_ACTOR, ""):
        for kind, names in (("model", new.models), ("application", new.apps)):
            for name in names:
                try:
                    messages += (
                        _model(server, name, old, new)
                        if kind == "model"
                        else _application(server, name, old, new)
                    )
                except ClipperError as error:
                    messages.append(f"{kind} {name} stays as it is: {error}")
    return messages


def _logging(server: Server, old: Config, new: Config) -> Iterator[str]:
    """Apply what holds at once of [logging], and say so."""
    server.set_logging(new.logging)
    for key in ("level", "format"):
        value = getattr(new.logging, key)
        if value != getattr(old.logging, key):
            yield f"[logging] {key} is {value or 'that of the start'}"


def _model(server: Server, name: str, old: Config, new: Config) -> Iterator[str]:
    wanted, before = new.models[name], old.models.get(name)
    if wanted == before:
        return
    if (
        before
        and msgspec.structs.replace(
            wanted, replicas=before.replicas, replicas_max=before.replicas_max
        )
        == before
    ):
        server.scale(name, wanted.bounds)
        yield f"model {name} has other replicas"
        return
    yield f"model {_deploy(server, name, wanted)} is deployed"


def _deploy(server: Server, name: str, wanted: ModelSpec) -> str:
    """Deploy a declared model as it is now, and return its new version."""
    model = declared_model(name, wanted)
    return server.deploy(name, model, **model_settings(wanted)).name


def deploy_again(server: Server, name: str, wanted: ModelSpec) -> tuple[str, str]:
    """Deploy a declared model whose files have changed as a new version, and retire the one that
    was the latest, unless an application names it.

    Returns both; the second is empty if it was not retired. Raises ClipperError when the new one
    does not run; then the other one stays.
    """
    with audit_context(_ACTOR, ""):
        before = _latest(server, name)
        made = _deploy(server, name, msgspec.structs.replace(wanted, version=0))
        if before is None:
            return made, ""
        try:
            server.retire(before)
        except (StillLinked, UnknownModel, UnknownVersion):
            return made, ""
        return made, str(before)


def _latest(server: Server, name: str) -> VersionedModel | None:
    try:
        return server.catalog.view.model(name).id
    except UnknownModel:
        return None


def _application(server: Server, name: str, old: Config, new: Config) -> Iterator[str]:
    wanted = new.apps[name]
    if wanted != old.apps.get(name):
        server.app(name, wanted.models, **application_settings(wanted))
        yield f"application {name} is {'changed' if name in old.apps else 'made'}"


def declared_twice(old: Config, new: Config) -> Config:
    """Return the new configuration with what only the old one declares, so that a file that an
    editor has half written removes nothing."""
    return msgspec.structs.replace(
        new, models={**old.models, **new.models}, apps={**old.apps, **new.apps}
    )


def left(old: Config, new: Config) -> Iterator[str]:
    """Explain which effects a change of the file does not have."""
    for name in old.models.keys() - new.models.keys():
        yield (
            f"model {name} is not declared any more, and runs on. To end it: clipper retire {name}"
        )
    for name in old.apps.keys() - new.apps.keys():
        yield (
            f"application {name} is not declared any more, and stays. To delete it: clipper app"
            f" remove {name}"
        )
    for section in dict.fromkeys(table.partition(".")[0] for table in tables()):
        if section in _AT_ONCE:
            continue
        before, after = getattr(old, section), getattr(new, section)
        if changed := ", ".join(_changed(section, before, after)):
            yield f"[{section}] has changed: {changed}. Restart the server for that to hold"


def _changed(section: str, before: object, after: object) -> Iterator[str]:
    """Yield how each key, or each name, of a section has changed; not those that hold at once."""
    if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
        for key in before.__struct_fields__:
            old, new = (shown(key, getattr(one, key)) for one in (before, after))
            if getattr(before, key) != getattr(after, key) and f"{section}.{key}" not in _AT_ONCE:
                yield f"{key} {_text(old)} -> {_text(new)}"
    elif isinstance(before, dict) and isinstance(after, dict):
        yield from (name for name in {**before, **after} if before.get(name) != after.get(name))


def _text(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 3]}..."
