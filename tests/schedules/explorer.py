"""Compiles the explorer beside this file against the core's headers, and speaks to it.

The headers are copied word for word but for four spellings: an order becomes order(number, order),
so that one can be weakened by its number without compiling again; pause() and sched_yield() become
spin(), and a CHECK a failure of the schedule.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CORE = ROOT / "src" / "clipper_core"
HERE = Path(__file__).resolve().parent
HEADERS = {  # header -> its package
    "ring": "runtime",
    "clock_cache": "cache",
    "completion": "results",
    "spin_lock": "runtime",
    "lane": "scheduling",
    "loop_owner": "runtime",
    "row_lock": "params",
    "policy_states": "learning",
}
ORDER = re.compile(r"std::memory_order_(relaxed|acquire|release|acq_rel|seq_cst)\b")
CALLS = (
    (re.compile(r"(?<![\w:])(?:pause|sched_yield)\(\)"), "::schedules::spin()"),
    (re.compile(r"\bCLIPPER_CHECK\("), "::schedules::check_failed_here("),
)
CALL = re.compile(r"(\w+)(?:\([^()]*\)|\[[^\]]*\])*\.(\w+)\(")
FUNCTION = re.compile(r"^(?: {4})?(?!return|else|if|for|while)(?:[\w:&*<>]+ )+(\w+)\(")
WEAKER = {
    "seq_cst": ("acq_rel", "relaxed"),
    "acq_rel": ("acquire", "release"),
    "acquire": ("relaxed",),
    "release": ("relaxed",),
    "relaxed": (),
}


@dataclass(frozen=True)
class Site:
    """One place in a header that names a memory order."""

    number: int
    header: str
    line: int
    function: str
    step: str  # tail.load
    order: str

    @property
    def place(self) -> str:
        return f"{self.header}.hpp:{self.line}"

    @property
    def name(self) -> str:
        return f"{self.header}.hpp {self.function}: {self.step} {self.order}"

    @property
    def mutations(self) -> tuple[str, ...]:
        """Return the weaker forms of an atomic operation; a read-modify-write is also split into a
        load and a store."""
        whole = self.step.endswith((".load", ".store"))
        return WEAKER[self.order] + (() if whole else ("split",))


def sites_of(header: str, text: str, first: int) -> list[Site]:
    found, function = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0]
        if head := FUNCTION.match(code):
            function = head[1]
        for order in ORDER.finditer(code):
            calls = CALL.findall(code[: order.start()])
            step = ".".join(calls[-1]) if calls else "?"
            found.append(Site(first + len(found), header, number, function, step, order[1]))
    return found


class Explorer:
    """The compiled explorer. It is compiled into build/schedules, once for each content of the
    headers and of this folder."""

    def __init__(self) -> None:
        self.texts = {
            header: (CORE / package / f"{header}.hpp").read_text()
            for header, package in HEADERS.items()
        }
        self.sites: list[Site] = []
        for header, text in self.texts.items():
            self.sites += sites_of(header, text, len(self.sites))

    def rewritten(self) -> dict[str, str]:
        files = {"sites.inc": "".join(f'"{site.place}",\n' for site in self.sites)}
        number = -1

        def numbered(found: re.Match[str]) -> str:
            nonlocal number
            number += 1
            return f"::schedules::order({number}, {found[0]})"

        for header, text in self.texts.items():
            lines = []
            for line in text.splitlines():
                code, slashes, comment = line.partition("//")
                code = ORDER.sub(numbered, code)
                for pattern, instead in CALLS:
                    code = pattern.sub(instead, code)
                lines.append(code + slashes + comment)
            lines.insert(lines.index("#pragma once") + 1, '#include "checker.hpp"')
            files[f"{HEADERS[header]}/{header}.hpp"] = "\n".join(lines) + "\n"
        return files

    @cached_property
    def program(self) -> Path:
        sources = sorted(HERE.glob("*.cpp"))
        files = self.rewritten()
        compiler = os.environ.get("CXX", "g++")
        command = [
            compiler,
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-maybe-uninitialized",
        ]
        content = [*command, *files.values(), (CORE / "runtime" / "machine.hpp").read_text()]
        content += [path.read_text() for path in [*sources, *sorted(HERE.glob("*.hpp"))]]
        digest = hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]
        made = ROOT / "build" / "schedules" / f"explorer-{digest}"
        if made.exists():
            return made
        assert shutil.which(compiler), (
            f"no {compiler}: the explorer cannot be compiled. apt-get install g++"
        )
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            include = [f"-I{folder}", f"-I{HERE}", f"-I{CORE}"]
            program = Path(folder, "explorer")
            done = subprocess.run(
                [*command, *include, *map(str, sources), "-o", str(program)],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            for old in made.parent.glob("explorer-*"):
                old.unlink()
            program.rename(made)
        return made

    def ask(self, command: str, *arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [str(self.program), command, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, f"explorer {command}: {done.returncode}: {done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]
