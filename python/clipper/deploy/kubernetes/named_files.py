"""The files that a configuration file names, for an image of the server that it declares."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from clipper.config import Config, load
from clipper.deploy.packages.folders import contents_of, names_under
from clipper.deploy.packages.sources import reached
from clipper.errors import PackagingError

_ATTRIBUTE: Final = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]")
_SECRETS: Final = ("server.token", "http.token", "params.token", "influx.token", "tracing.headers")
_OPTIONS: Final = ("-r", "--requirement")


def named_in(file: Path) -> dict[str, bytes]:
    """Return the file and what it names in its folder, by path: models' files and folders, the
    modules of models, policies and deciders with what these import, files of requirements.

    Raises: PackagingError if the file holds a secret, which everybody who has the image could read.
    """
    config, root = load(file), file.resolve().parent
    _refuse_secrets(config, file)
    code = {Path(one).resolve() for model in config.models.values() for one in model.code}
    places = [root, *sorted(one for one in code if one != root and one.is_relative_to(root))]
    names = {file.name}
    for place, found in reached(_modules(config), places).files.items():
        names.update((place / name).relative_to(root).as_posix() for name in found)
    for word in _words(config):
        path = (root / word).resolve()
        if path == root or not path.is_relative_to(root):
            continue
        if path.is_file():
            names.add(path.relative_to(root).as_posix())
        elif path.is_dir():
            below = path.relative_to(root)
            names.update((below / name).as_posix() for name in names_under(path))
    return dict(contents_of(root, sorted(names), file.name))


def _modules(config: Config) -> set[str]:
    """Return the modules of each `module:attribute`."""
    texts = [model.target for model in config.models.values()]
    texts += [text for app in config.apps.values() for text in (app.policy, app.decider)]
    return {module for text in texts for module in _ATTRIBUTE.findall(text)}


def _words(config: Config) -> Iterator[str]:
    """Yield what may be paths."""
    for model in config.models.values():
        yield from (model.target, *model.command, *model.code)
        for line in model.requirements:
            option, _, name = line.partition(" ")
            if option in _OPTIONS:
                yield name.strip()


def _refuse_secrets(config: Config, file: Path) -> None:
    for key, origin in config.origins.items():
        section, _, name = key.partition(".")
        is_secret = key in _SECRETS or (
            name in ("state", "store", "url")
            and "@" in str(getattr(getattr(config, section), name))
        )
        if is_secret and origin.startswith(str(file)):
            raise PackagingError(
                f"{origin}: {key} would be in the image, where everybody who has it can read it.",
                hint=f"Give it in the environment of the pods: CLIPPER_{section}__{name}".upper(),
            )
