"""Compile the core: one extension module for each `.pyx` file below src/clipper_core.

A module is named by its dotted path in the package: `cache.clock_cache` is made from
src/clipper_core/cache/clock_cache.pyx.

Each module is one task: Cython translates it, g++ compiles it, g++ links it. Tasks run in as many
processes as there are cores, the slowest first. Three things keep a build short:

- A precompiled header holds Python's, numpy's and the heavy standard headers.
- Cython's utility code is compiled once, in `clipper_core._cyutility`, and not in every module.
- A module is built again only if something it was made from changed. What it was made from is read
  from the depfiles of Cython and g++, and compared by content, so a fresh checkout or a switch of
  branches does not cost a build.

Everything is written below build/VARIANT and then copied into place under another name and renamed,
so an interrupted build leaves only whole files and continues where it stopped. A lock makes a
second build in the same checkout wait.

    python tools/build_core.py                     # in place, the variant named by CLIPPER_BUILD
    (default: release) python tools/build_core.py --variant asan --out build/asan
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from multiprocessing.synchronize import Event
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "clipper_core"
SOURCES = ROOT / "src" / PACKAGE
SHARED = "_cyutility"  # the module with Cython's utility code
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CPU_INFO = Path("/proc/cpuinfo")
AVX2 = ["-mavx2", "-mbmi2"]


def flags_of_this_cpu() -> list[str]:
    """Return the flags for the instructions of this processor that the core gains from."""
    if os.uname().machine != "x86_64":
        return []
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return []
    known = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return AVX2 if known and {"avx2", "bmi2"} <= {*known[1].split()} else []


# release: for this machine. baseline and avx2: the two cores of a wheel for x86-64.
OPTIMIZED = ("release", "baseline", "avx2")
VARIANTS = {
    "release": ["-O2", "-g0", *flags_of_this_cpu()],
    "baseline": ["-O2", "-g0", *(["-march=x86-64-v2"] if os.uname().machine == "x86_64" else [])],
    "avx2": ["-O2", "-g0", *AVX2],
    "debug": ["-O0", "-g", "-fno-omit-frame-pointer"],
    "tsan": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    "asan": [
        "-O1",
        "-g1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ],
    "coverage": ["-O0", "-g", "--coverage"],
}
QUIET = (
    "unused-parameter",
    "missing-field-initializers",
    "cast-function-type",
    "sign-compare",
)  # Cython's own code
COMPILE = [
    "-std=c++17",
    "-fPIC",
    "-fwrapv",
    "-DNDEBUG",
    "-DPY_SSIZE_T_CLEAN",
    "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    *(f"-Wno-{name}" for name in QUIET),
]
HEADERS = (
    "Python.h",
    "numpy/arrayobject.h",
    "numpy/ufuncobject.h",
    *(("immintrin.h",) if os.uname().machine == "x86_64" else ()),
    "atomic",
    "cmath",
    "complex",
    "mutex",
    "new",
    "stdexcept",
    "string",
    "type_traits",
    "typeinfo",
    "vector",
)
DIRECTIVES = {
    "language_level": "3",
    "freethreading_compatible": True,
    "auto_pickle": False,
    "embedsignature": True,
    "embedsignature.format": "python",
    "binding": True,
    "cdivision": True,
    "initializedcheck": False,
}
SAY_EVERY_S = 3.0  # how often the command line says how far it is
ERROR_LINES_MAX = 3  # of each module that failed, in the last lines of the output


class BuildError(Exception):
    """A module could not be built; the message says which, in which step and why."""


@dataclass
class Settings:
    """The folder of one variant and the commands that build it. Sent to the worker processes."""

    variant: str
    work: Path  # build/VARIANT: generated sources, objects, linked modules, records
    compiler: list[str]
    includes: list[str]
    fingerprint: str  # changes when every module has to be built again

    @property
    def flags(self) -> list[str]:
        return [*COMPILE, *VARIANTS[self.variant]]

    @property
    def link_flags(self) -> list[str]:
        sanitizer = [
            flag for flag in VARIANTS[self.variant] if flag.startswith(("-fsanitize", "--coverage"))
        ]
        return [*sanitizer, *(["-s"] if self.variant in OPTIMIZED else [])]

    @property
    def directives(self) -> dict[str, object]:
        checked = self.variant in ("debug", "asan")
        return {**DIRECTIVES, "boundscheck": checked, "wraparound": checked}


@dataclass
class Record:
    """The record of what a module was made from, kept in build/VARIANT/records: hashes by path
    relative to the checkout."""

    fingerprint: str = ""
    translated_from: dict[str, str] = field(default_factory=dict)  # .pyx and .pxd files
    compiled_from: dict[str, str] = field(
        default_factory=dict
    )  # the generated .cpp and our headers
    seconds: float = 0.0  # CPU time of the last build, the estimate for the next one


class Hashes:
    """Content hashes of files; each file is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def of(self, path: Path) -> str:
        """Return the hash of a file, or an empty string if it does not exist."""
        if path not in self._known:
            try:
                self._known[path] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            except OSError:
                self._known[path] = ""
        return self._known[path]

    def match(self, recorded: dict[str, str]) -> bool:
        return bool(recorded) and all(
            self.of(ROOT / path) == digest for path, digest in recorded.items()
        )

    def record(self, paths: Iterable[Path]) -> dict[str, str]:
        """Hash those of the paths that lie in the checkout; compiler and libraries are part of the
        fingerprint."""
        inside = {path for path in paths if path.is_relative_to(ROOT) and ".venv" not in path.parts}
        return {str(path.relative_to(ROOT)): self.of(path) for path in sorted(inside)}


# -- one module, in a worker process

_header_ready: Event


def _start_worker(header_ready: Event) -> None:
    global _header_ready
    _header_ready = header_ready
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers


def build_module(settings: Settings, name: str, needs_translation: bool) -> str:
    """Build one module and write its record. Returns the compiler's warnings; raises BuildError.

    Runs in a worker process.
    """
    started = os.times()
    cpp = settings.work / "cpp" / f"{name}.cpp"
    record = read_record(settings.work, name)
    if needs_translation:
        record.fingerprint = ""  # until the module is whole again
        write_record(settings.work, name, record)
        record.translated_from = _translate(settings, name, cpp)
    _header_ready.wait()
    hashes = Hashes()
    module = settings.work / "lib" / f"{name}{SUFFIX}"
    warnings = ""
    # A change of a .pxd file often leaves the generated code as it was.
    if record.seconds == 0 or not module.exists() or not hashes.match(record.compiled_from):
        warnings, sources = _compile(settings, name, cpp, module)
        record.compiled_from = hashes.record([cpp, *sources])
    ended = os.times()
    if warnings or record.compiled_from:
        spent = sum(ended[:4]) - sum(started[:4])
        record.seconds = max(spent, record.seconds if not needs_translation else 0.0, 0.01)
    record.fingerprint = settings.fingerprint
    write_record(settings.work, name, record)
    return warnings


def _translate(settings: Settings, name: str, cpp: Path) -> dict[str, str]:
    """Translate a module to C++ and return the hashes of what it was made from."""
    from Cython.Compiler import Errors, Main, Options

    partial = (
        settings.work / "cpp" / "partial" / cpp.name
    )  # Cython takes the module's name from that of the file
    messages = settings.work / "log" / f"{name}.cython"
    options: dict[str, object] = {
        "output_file": str(partial),
        "cplus": True,
        "compiler_directives": settings.directives,
        "include_path": [str(ROOT / "src")],
        "language_level": 3,
        "use_listing_file": False,
    }
    if name == SHARED:
        command = [sys.executable, "-m", "cython", "--cplus", f"--generate-shared={partial}"]
        _run(command, f"{name}: Cython cannot generate it", messages)
        cpp.write_text(_refusing_keywords(partial.read_text()))
        partial.unlink()
        return Hashes().record([Path(__file__)])
    options |= {"depfile": True, "shared_utility_qualified_name": f"{PACKAGE}.{SHARED}"}
    source = source_of(name)
    with (
        messages.open("w") as stream,
        contextlib.redirect_stderr(stream),
        contextlib.redirect_stdout(stream),
    ):
        try:
            result = Main.compile(
                str(source),
                Options.CompilationOptions(Options.default_options, **options),
                full_module_name=f"{PACKAGE}.{name}",
            )
            failed = result.num_errors > 0
        except Errors.CompileError as error:
            print(error)
            failed = True
    if failed:
        raise BuildError(
            f"{name}: Cython cannot translate"
            f" {source.relative_to(ROOT)}\n{_first_errors(messages.read_text())}"
        )
    depfile = Path(f"{partial}.dep")
    made_from = Hashes().record([source, *_depfile_paths(depfile)])
    depfile.unlink()
    partial.replace(cpp)
    return made_from


def _refusing_keywords(code: str) -> str:
    """Let the code for the arguments of functions call runtime/keywords.hpp for a keyword that a
    function does not have, where it knows the names of the others. This costs other calls nothing.
    """
    refusal = re.compile(
        r"PyErr_Format\(PyExc_TypeError,\s*"
        r"\"%s\(\) got an unexpected keyword argument '%U'\",\s*function_name, key\);"
    )
    call = "clipper::refuse_keyword(function_name, key, argnames);"
    parts = re.split(r"(?m)^(?=/\* \w+ \*/$)", code)  # each function of it
    code = "".join(refusal.sub(call, part) if "argnames" in part else part for part in parts)
    included = '#include "Python.h"\n'
    return code.replace(included, f'{included}#include "runtime/keywords.hpp"\n', 1)


def _compile(settings: Settings, name: str, cpp: Path, module: Path) -> tuple[str, list[Path]]:
    """Compile and link a module. Returns the warnings and the headers that were read."""
    partial, depfile = settings.work / "obj" / f"{name}.o", settings.work / "obj" / f"{name}.d"
    header = settings.work / "core.hpp"
    command = [
        *settings.compiler,
        *settings.flags,
        "-include",
        str(header),
        *settings.includes,
        "-MMD",
        "-MF",
        str(depfile),
        "-c",
        str(cpp),
        "-o",
        str(partial),
    ]
    warnings = _run(
        command, f"{name}: g++ cannot compile it", settings.work / "log" / f"{name}.compile"
    )
    linked = module.with_suffix(".partial")
    command = [*settings.compiler, "-shared", *settings.link_flags, str(partial), "-o", str(linked)]
    _run(command, f"{name}: g++ cannot link it", settings.work / "log" / f"{name}.link")
    linked.replace(module)
    sources = [path for path in _depfile_paths(depfile) if path.is_relative_to(SOURCES)]
    if settings.variant != "coverage":
        partial.unlink()
    return warnings, sources


def _run(command: list[str], failure: str, log: Path) -> str:
    """Run a compiler command and return what it printed; raises BuildError with its first
    errors."""
    plain = {**os.environ, "LC_ALL": "C"}  # messages without typographic quotes
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=plain,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    log.write_text(f"{shlex.join(command)}\n{done.stderr}")
    if done.returncode:
        raise BuildError(
            f"{failure} (whole message: {log.relative_to(ROOT)})\n{_first_errors(done.stderr)}"
        )
    return done.stderr


def _first_errors(output: str) -> str:
    """Return the lines that name an error, or the last lines if none does."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.search(r"error|^\S+\.(pyx|pxd):\d+:\d+:", line, re.IGNORECASE)
    ]
    return "\n".join(
        f"    {line[:300]}" for line in (errors or lines[-ERROR_LINES_MAX:])[:ERROR_LINES_MAX]
    )


def _depfile_paths(depfile: Path) -> list[Path]:
    """Return the prerequisites that a depfile of g++ or Cython lists, as absolute paths."""
    _, _, text = depfile.read_text().replace("\\\n", " ").partition(": ")
    paths = (
        Path(part.replace("\\ ", " ")) for part in re.split(r"(?<!\\)\s+", text.strip()) if part
    )
    return [
        Path(os.path.normpath(path if path.is_absolute() else Path.cwd() / path)) for path in paths
    ]


# -- the whole build, in the parent


def read_record(work: Path, name: str) -> Record:
    try:
        return Record(**json.loads((work / "records" / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return Record()


def write_record(work: Path, name: str, record: Record) -> None:
    path = work / "records" / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)))
    partial.replace(path)


def make_settings(variant: str) -> Settings:
    """Find the compiler and headers; raises BuildError with the next step if one is missing."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(compiler[0]):
        raise BuildError(
            f"There is no {compiler[0]}, so the core cannot be compiled. apt-get install g++"
        )
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        number = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"There is no {include}/Python.h, so the core cannot be compiled. apt-get install"
            f" python{number}-dev"
        )
    import numpy

    compiler_version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    settings = Settings(
        variant,
        ROOT / "build" / variant,
        compiler,
        [f"-I{SOURCES}", f"-I{include}", f"-I{numpy.get_include()}"],
        "",
    )
    parts = [
        sys.version,
        SUFFIX,
        version("cython"),
        numpy.__version__,
        compiler_version,
        settings.flags,
        settings.link_flags,
        settings.directives,
        HEADERS,
    ]
    settings.fingerprint = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    return settings


def module_names() -> list[str]:
    """Return the dotted names of all modules, relative to the package."""
    sources = SOURCES.rglob("*.pyx")
    return [
        SHARED,
        *sorted(".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in sources),
    ]


def source_of(name: str) -> Path:
    """Return the .pyx file of a module."""
    return SOURCES / f"{name.replace('.', '/')}.pyx"


def module_file(name: str) -> Path:
    """Return where the compiled module lies, relative to the package."""
    return Path(f"{name.replace('.', '/')}{SUFFIX}")


def estimate(name: str, record: Record) -> float:
    """Estimate the CPU seconds of a module: those of its last build, else by the length of its
    source."""
    if record.seconds:
        return record.seconds
    if name == SHARED:
        return 5.0
    return 1.6 + source_of(name).stat().st_size / 13_000


def outdated(settings: Settings) -> dict[str, tuple[bool, float]]:
    """Return the modules that have to be built: whether each needs translation, and its estimated
    CPU seconds."""
    hashes = Hashes()
    found = {}
    for name in module_names():
        record = read_record(settings.work, name)
        same = record.fingerprint == settings.fingerprint
        cpp = settings.work / "cpp" / f"{name}.cpp"
        translated = same and cpp.exists() and hashes.match(record.translated_from)
        compiled = (settings.work / "lib" / f"{name}{SUFFIX}").exists() and hashes.match(
            record.compiled_from
        )
        if not same:
            write_record(settings.work, name, Record(seconds=0.0))
        if not (translated and compiled):
            found[name] = (not translated, estimate(name, record))
    return found


def _precompile(settings: Settings) -> None:
    """Compile the header that every module includes first, if it is not there yet."""
    header = settings.work / "core.hpp"
    stamp = settings.work / "core.hpp.fingerprint"
    done = settings.work / "core.hpp.gch"
    if done.exists() and stamp.exists() and stamp.read_text() == settings.fingerprint:
        return
    header.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
    partial = settings.work / "core.partial.gch"
    command = [
        *settings.compiler,
        *settings.flags,
        *settings.includes,
        "-x",
        "c++-header",
        str(header),
        "-o",
        str(partial),
    ]
    _run(command, "precompiled header: g++ cannot compile it", settings.work / "log" / "core.hpp")
    partial.replace(done)
    stamp.write_text(settings.fingerprint)


@contextlib.contextmanager
def locked(say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of this checkout's builds; waits for another build and says so."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "core.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(
                f"core: another build is running here (process {file.read().strip() or '?'});"
                " waiting for it"
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def build(
    variant: str,
    out: Path,
    jobs: int,
    say: Callable[[str], None],
    progress: Callable[[float, float], None] | None = None,
) -> int:
    """Build what is out of date and copy it to `out`. Returns how many modules were built; raises
    BuildError.

    progress: called with the fraction of the work that is done and the seconds that are left, after
    each module.
    """
    with locked(say):
        settings = make_settings(variant)
        for folder in ("cpp/partial", "obj", "lib", "log", "records"):
            (settings.work / folder).mkdir(parents=True, exist_ok=True)
        todo = outdated(settings)
        if todo:
            say(f"core, {variant}: compiling {len(todo)} of {len(module_names())} modules")
            _build_all(settings, todo, jobs, say, progress)
        install(settings, out)
        return len(todo)


def _build_all(
    settings: Settings,
    todo: dict[str, tuple[bool, float]],
    jobs: int,
    say: Callable[[str], None],
    progress: Callable[[float, float], None] | None,
) -> None:
    order = sorted(todo, key=lambda name: -todo[name][1])
    total, done, started = sum(cost for _, cost in todo.values()), 0.0, time.monotonic()
    failures: list[str] = []
    ready = multiprocessing.get_context("fork").Event()
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _start_worker, (ready,))
    try:
        running: dict[Future[str], str] = {
            pool.submit(build_module, settings, name, todo[name][0]): name for name in order
        }
        _precompile(settings)
        ready.set()
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                try:
                    if warnings := future.result():
                        say(f"core: warnings of {name}\n{warnings}")
                except BuildError as error:
                    failures.append(str(error))
                done += todo[name][1]
                if progress:  # modules in work, the first ones, count as half done
                    made = done + sum(todo[one][1] for one in islice(running.values(), jobs)) / 2
                    progress(made / total, (time.monotonic() - started) * (total - made) / made)
    except BrokenProcessPool:
        failures.append(
            "a compiler process was killed, perhaps for want of memory: try again with JOBS=1"
        )
    finally:
        ready.set()
        pool.shutdown(wait=not sys.exc_info()[0], cancel_futures=True)
        if sys.exc_info()[0]:
            for process in multiprocessing.active_children():
                process.terminate()
    if failures:
        shown = "\n".join(failures[:2])
        more = f"\n  and {len(failures) - 2} more" if len(failures) > 2 else ""
        raise BuildError(f"core: {len(failures)} of {len(todo)} modules failed\n{shown}{more}")


def install(settings: Settings, out: Path) -> None:
    """Copy the linked modules to `out`, each in one step, and remove modules whose source is
    gone."""
    names = module_names()
    targets = {name: out / module_file(name) for name in names}
    for stale in set(out.rglob(f"*{SUFFIX}")) - set(targets.values()):
        stale.unlink()
    for name, target in targets.items():
        source = settings.work / "lib" / f"{name}{SUFFIX}"
        target.parent.mkdir(parents=True, exist_ok=True)
        there, here = source.stat(), target.stat() if target.exists() else None
        if not here or (here.st_size, here.st_mtime_ns) != (there.st_size, there.st_mtime_ns):
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy2(source, partial)
            partial.replace(target)
    if out != SOURCES:
        for source in (*SOURCES.rglob("__init__.py"), SOURCES / "py.typed"):
            shutil.copy2(source, out / source.relative_to(SOURCES))


def build_for_any(out: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Build the core of a wheel that others install: for x86-64 the two of which
    src/clipper_core/__init__.py takes one, and what it asks about the processor. Raises BuildError.
    """
    build("baseline", out, jobs, say)
    if os.uname().machine != "x86_64":
        return
    same = VARIANTS["release"] == VARIANTS["avx2"]  # then it may be compiled already
    build("release" if same else "avx2", out / "avx2", jobs, say)
    for name in ("__init__.py", "py.typed"):
        (out / "avx2" / name).unlink()
    build_probe(out)


def build_probe(out: Path) -> None:
    """Compile what the core asks about the processor; raises BuildError."""
    settings = make_settings("baseline")
    command = [*settings.compiler, "-x", "c", "-O2", "-fPIC", "-shared", "-s", *settings.includes]
    command += ["-DPy_LIMITED_API=0x030B0000", str(SOURCES / "cpu_probe.c")]
    module = out / "cpu_probe.abi3.so"
    log = settings.work / "log" / "cpu_probe"
    log.parent.mkdir(parents=True, exist_ok=True)
    _run([*command, "-o", str(module)], "cpu_probe: g++ cannot compile it", log)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the core.")
    parser.add_argument(
        "--variant", choices=VARIANTS, default=os.environ.get("CLIPPER_BUILD", "release")
    )
    parser.add_argument(
        "--out", type=Path, help="a folder that gets the package clipper_core; default: in place"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    out = (arguments.out.resolve() / PACKAGE) if arguments.out else SOURCES
    started, shown = time.monotonic(), [0.0]

    def show(fraction: float, left_s: float) -> None:
        if fraction < 1 and time.monotonic() - shown[0] >= SAY_EVERY_S:
            shown[0] = time.monotonic()
            print(f"core: {fraction:4.0%}, about {left_s:.0f} s left", flush=True)

    try:
        built = build(
            arguments.variant, out, arguments.jobs, lambda text: print(text, flush=True), show
        )
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("core: interrupted; the next build continues from here", file=sys.stderr)
        return 130
    if built:
        print(f"core: {built} modules in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
