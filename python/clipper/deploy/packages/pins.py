"""Pinned lines for pip: requirements and all their dependencies, at the versions installed here.

A dependency that is not installed here is not needed, so markers and extras need not be evaluated.
"""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from typing import Final

from clipper.deploy.needs import Needs, packages_of, version_of
from clipper.deploy.packages.sources import imports_in

_SDK: Final = ("numpy", "lz4", "msgpack")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^;\s]+)")


def pinned(needs: Needs) -> tuple[str, ...]:
    """Return the requirements beside clipper-container, with dependencies, as sorted
    NAME==VERSION lines; the user's own lines stay as they are.
    """
    lines = needs.pip()
    if not needs.requirements:
        lines = tuple(
            f"{line}=={version}" if (version := version_of(line)) else line for line in lines
        )
    if needs.kind == "module" and not needs.requirements:
        found = packages_of([needs.module, *imports_in(needs.sources())])
        lines = (*lines, *(f"{name}=={version}" for name, version in found.items()))
    named = {_plain(match[0]) for line in lines if (match := _NAME.match(line))}
    here = (
        match[1]
        for line in lines
        if (match := _PINNED.fullmatch(line)) and _is_here(match[1], match[2])
    )
    along = _closed([*here, *_SDK])
    return tuple(
        sorted({*lines, *(f"{name}=={version}" for name, version in along if name not in named)})
    )


def _is_here(name: str, version: str) -> bool:
    try:
        return importlib.metadata.version(name).partition("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def _closed(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Return these distributions and their installed dependencies."""
    todo, seen = [_plain(name) for name in names], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name, found.version.partition("+")[0]
        needs = (line for line in found.requires or () if not re.search(r"\bextra\s*==", line))
        todo += [_plain(match[0]) for line in needs if (match := _NAME.match(line))]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
