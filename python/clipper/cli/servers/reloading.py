"""`--reload`: the files that models are made of, and a new version when they change."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clipper.credential_file import stamp_of
from clipper.errors import ClipperError

if TYPE_CHECKING:
    from clipper.server import ClipperServer
    from clipper.spec.model import ModelSpec

_FILES_MAX = 5000  # files that are looked at; others do not count
Stamps = tuple[tuple[str, tuple[int, ...]], ...]


class SourceWatch:
    """The files of declared models, as they were when their versions were deployed. Threads: one.

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
