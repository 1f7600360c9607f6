"""Imports of a fork server, and the reasons why it must not fork."""

from __future__ import annotations

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable

from clipper_container.loading.unused_imports import without_array_libraries
from clipper_container.shortage import is_own

NOT_BEFORE_A_FORK = {  # top-level module -> why a replica imports it by itself
    "jax": "it starts threads",
    "numba": "it reads its thread limit once",
    "numexpr": "it reads its thread limit once",
    "onnxruntime": "it starts a thread when it is imported",
    "tensorflow": "it must not be forked",
}
# jemalloc of pyarrow, which pandas and scikit-learn import, starts a thread unless this is set
_NO_THREAD = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


class Unsafe(Exception):
    """The process must not be forked any more. module: the import that caused it, "" if unknown."""

    def __init__(self, why: str, module: str = "") -> None:
        super().__init__(why)
        self.module = module


class Imports:
    """The modules of installed packages that this process has imported for its children.

    Only files of site-packages are imported: a user's own modules may change, and differ between
    models. Threads: the main one.
    """

    def __init__(self) -> None:
        os.environ.setdefault(*_NO_THREAD)
        self._places = installed_places()
        self._files: dict[str, int] = {}  # of every module -> time of its last change, in ns
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Import modules; those that are not installed are skipped.

        Raises: Unsafe when an import fails, starts a thread, or opens an accelerator.
        """
        for name in names:
            self._import(name)
        self._note_files()

    def preload(self, names: Iterable[str]) -> None:
        """Import modules, which may lie in a checkout: the requesting process's own code.

        Raises: Unsafe as `add`, and if there is no such module.
        """
        for name in names:
            try:
                file = getattr(importlib.import_module(name), "__file__", None)
            except Exception as error:
                if is_own(error):  # a child imports it by itself
                    continue
                text = f"importing {name} failed: {type(error).__name__}: {error}"
                raise Unsafe(text[:300]) from None
            if file:
                self._places = (*self._places, os.path.dirname(file) + os.sep)
            self._names.add(name)
        self._note_files()
        if why := unsafe_now():
            raise Unsafe(f"importing {', '.join(names)} left the process with {why}")

    def _note_files(self) -> None:
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if file and file not in self._files and file.startswith(self._places):
                self._files[file] = _changed_ns(file)

    def _import(self, name: str) -> None:
        top = name.partition(".")[0]
        if name in self._names or top in NOT_BEFORE_A_FORK or not self._is_installed(top):
            return
        try:
            with without_array_libraries():
                importlib.import_module(name)
        except ModuleNotFoundError:
            return
        except BaseException as error:
            if is_own(error):  # a replica imports it by itself
                return
            text = f"importing {name} failed: {type(error).__name__}: {error}"
            raise Unsafe(text[:300], top) from None
        self._names.add(name)
        if why := unsafe_now():
            raise Unsafe(f"importing {name} left the process with {why}", top)

    def _is_installed(self, top: str) -> bool:
        if top in sys.modules:
            file = getattr(sys.modules[top], "__file__", None)
            return bool(file) and str(file).startswith(self._places)
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return False
        return spec is not None and str(spec.origin).startswith(self._places)

    def trouble(self) -> str:
        """Return why this process must not be forked now, or is out of date; "" if it may."""
        if why := unsafe_now():
            return f"unsafe: it has {why}"
        changed = next(
            (file for file, then in self._files.items() if _changed_ns(file) != then), ""
        )
        return f"stale: {changed} has changed" if changed else ""


def unsafe_now() -> str:
    """Return what makes a fork of this process unsafe: other threads, or an open accelerator; ""
    if nothing does.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads} threads"
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if opened.startswith(_DEVICES):
            return f"{opened} open"
    return ""


def installed_places() -> tuple[str, ...]:
    """Return the folders of installed packages of this Python."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    both = [place for path in paths if path for place in (path, os.path.realpath(path))]
    return tuple({place + os.sep for place in both})


def imported_since(before: frozenset[str]) -> dict[str, list[str]]:
    """Return the `modules` of installed packages that this process has imported and that are not
    in `before`, in their order, and those `packages` of which `before` has nothing.
    """
    places = installed_places()
    modules = [
        name
        for name, module in [*sys.modules.items()]
        if name not in before and str(getattr(module, "__file__", None) or "").startswith(places)
    ]
    known = {name.partition(".")[0] for name in before}
    tops = {name.partition(".")[0] for name in modules} - known
    return {"modules": modules, "packages": sorted(top for top in tops if _is_package(top))}


def _is_package(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _changed_ns(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return -1
