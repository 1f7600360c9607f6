"""Files that a running server follows: its configuration, read again after SIGHUP or, with
`--reload`, when it changes; and then also those that models are made of."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.credentials.credential_file import stamp_of
from clipper.errors import ClipperError

if TYPE_CHECKING:
    from clipper.cli.servers.systemd import SystemdService
    from clipper.config import Config
    from clipper.server import ClipperServer
    from clipper.spec.model import ModelSpec

_CHECK_S = 0.5
_FILES_MAX = 5000  # files that are looked at; others do not count
Stamps = tuple[tuple[str, tuple[int, ...]], ...]


class SourceWatch:
    """The files of declared models, as they were before their versions were deployed. Threads: one.

    They are the file or folder of a target, or the module that it names and whatever that imports
    from the same folder, or the files among the words of a command.
    """

    def __init__(self, models: Mapping[str, "ModelSpec"]) -> None:
        self._used = {name: _stamps(model) for name, model in models.items()}
        self._last = dict(self._used)

    def changed(self, models: Mapping[str, "ModelSpec"]) -> list[str]:
        """Return the models whose files have changed, once they have been the same for two looks:
        an editor writes a file in several steps. Each change is returned once.
        """
        found = []
        for name, model in models.items():
            before, now = self._last.get(name), _stamps(model)
            self._last[name] = now
            if name not in self._used:
                self._used[name] = now
            elif now != self._used[name] and now == before and all(stamp for _, stamp in now):
                self._used[name] = now
                found.append(name)
        return found


def _stamps(model: "ModelSpec") -> Stamps:
    return tuple((path, stamp_of(path)) for path in sorted(files_of(model))[:_FILES_MAX])


def files_of(model: "ModelSpec") -> set[str]:
    """Return the files that a declared model is made of."""
    from clipper.deploy.packages.sources import shipped

    if model.command:
        return {word for word in model.command if os.path.isfile(word)}
    target = model.target
    if os.path.isdir(target):
        return set(_below(Path(target)))
    if os.path.isfile(target):
        return {target}
    if ":" not in target or "://" in target:
        return set()
    try:
        found = shipped(target, model.code)
    except (ClipperError, OSError):
        return set()
    return {str(root / one) for root, names in found.files.items() for one in names}


def _below(folder: Path) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith((".", "__pycache__"))]
        yield from (os.path.join(place, name) for name in names)


def reload(
    server: "ClipperServer", names: Iterable[str], models: Mapping[str, "ModelSpec"]
) -> Iterator[str]:
    """Deploy a new version of each of these models, and retire the one that it replaces. Yield a
    line for each; one that fails stays as it is."""
    from clipper.manage.declared import deploy_again

    for name in names:
        try:
            handle, replaced = deploy_again(server, name, models[name])
        except ClipperError as error:
            yield f"model {name} has changed, but stays as it is: {error}"
        else:
            yield f"model {handle} is deployed{f' instead of {replaced}' if replaced else ''}"


class FollowedFile:
    """The configuration file of a running server. Threads: one.

    path: None for none. seen: its stamp before it was read. config: of the start, before its
    addresses were completed. read: reads it again, as at the start. service: is told when SIGHUP
    has been obeyed. sources: the files of its models, as they were before these were read.
    """

    def __init__(
        self,
        server: "ClipperServer",
        path: Path | None,
        seen: tuple[int, ...],
        config: "Config",
        read: "Callable[[], Config]",
        service: "SystemdService",
        sources: SourceWatch,
    ) -> None:
        self._server = server
        self._path = path
        self._read = read
        self._service = service
        self._config = self._known = config
        self._seen = self._last = seen
        self._sources = sources

    def follow(self, stopping: threading.Event, asked: threading.Event, *, watching: bool) -> None:
        """Read the file again whenever `asked` is set, until `stopping` is. watching: also when it
        changes, and deploy models whose files change."""
        while not stopping.wait(_CHECK_S):
            if asked.is_set():
                asked.clear()
                with self._service.reloading():
                    self.apply()
            elif watching:
                self._look()

    def _look(self) -> None:
        """Deploy what has changed, and read the file again once it has been the same for two
        looks: there is none while an editor replaces it."""
        models = self._known.models
        for line in reload(self._server, self._sources.changed(models), models):
            click.echo(line)
        before, self._last = self._last, stamp_of(self._path or "")
        if self._last and self._last == before and self._last != self._seen:
            self.apply()

    def apply(self) -> None:
        """Read the file, apply what holds at once, and print a line for each change."""
        from clipper.manage.declared import declare_again, declared_twice, left

        self._seen = stamp_of(self._path or "")
        title = self._path or "defaults"
        try:
            new = self._read()
            known = declared_twice(self._known, new)
            sources = SourceWatch(known.models)
            lines = [*declare_again(self._server, self._known, new), *left(self._config, new)]
            for line in lines or ["no changes"]:
                click.echo(f"{title}: {line}")
        except ClipperError as error:
            click.echo(f"{title} is not used, and what was stays: {error}", err=True)
        else:
            self._known, self._config = known, new
            self._sources = sources
