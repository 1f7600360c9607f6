"""Write the versions that `make test` installs: tools/constraints.txt for .venv, and
tools/constraints-NAME.txt for an environment of its own.

    make pins          resolve what pyproject.toml allows today, and write the newest versions
    make pins-oldest   write the oldest versions that pyproject.toml allows, of what it names
                       itself, to tools/constraints-oldest.txt

pip reads the files as constraints, so that a commit installs the same packages in a year as on the
day when its tests passed. Packages of torch are named by TORCH and are not pinned here: which build
there is depends on the machine. pip resolves and downloads; nothing is installed. The oldest are
resolved by uv, since pip has no option for them; it is installed into a folder that is deleted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import EXTRAS, ROOT, requirements
from groups import GROUPS, SETS, Packages

PYTHON = ROOT / ".venv" / "bin" / "python"
ALONE = {"mlserver": ["mlserver>=1.6", "scikit-learn>=1.4", "numpy>=2"]}
NOT_PINNED = ("torch", "triton", "pip", "setuptools")
# The clients need newer packages than clipper does, protobuf among them: without the clients.
NOT_OLDEST = ("clients", "torch")
# pyproject.toml does not name it, and the oldest scikit-learn calls what a newer one warns of.
OF_THEIR_TIME = "scipy<1.16"
HEAD = "# Written by `make pins`: what pip resolved for the tests, on Python 3.11.\n"
HEAD_OLDEST = "# Written by `make pins-oldest`: the oldest that pyproject.toml allows.\n"


def wanted(without: tuple[str, ...] = ()) -> list[str]:
    """Return all requirements of .venv: of the build, of clipper, and of what the tests fetch.

    without: names of groups of tools/groups.py to leave out.
    """
    lines: list[str] = []
    for kind in EXTRAS:
        for part in requirements(kind):
            lines += part
    for name in SETS["tests"]:
        group = GROUPS[name]
        if isinstance(group, Packages) and name not in without:
            lines += group.lines()
    return sorted(set(lines))


def resolve(lines: list[str]) -> dict[str, str]:
    """Return name -> version of all that pip would install for these requirements.

    Raises: SystemExit with pip's own text when they contradict each other or cannot be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="clipper-pins-") as folder:
        report = Path(folder) / "report.json"
        pip = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pip += ["--dry-run", "--ignore-installed", "--report", str(report)]
        done = subprocess.run([*pip, *lines], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit("tools/pin.py: pip found no versions; the old pins are kept")
        found = json.loads(report.read_text())["install"]
    names = {one["metadata"]["name"].lower().replace("_", "-"): one["metadata"] for one in found}
    return {
        name: about["version"] for name, about in sorted(names.items()) if name not in NOT_PINNED
    }


def resolve_oldest(lines: list[str]) -> dict[str, str]:
    """Return name -> version: the oldest of each package that these requirements name, and the
    newest of all others that go with them.

    Raises: SystemExit with uv's own text when they contradict each other or cannot be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="clipper-pins-") as folder:
        pip = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", folder, "uv"], cwd=ROOT, check=True)
        limits = Path(folder) / "limits.txt"
        limits.write_text(OF_THEIR_TIME)
        uv = [f"{folder}/bin/uv", "pip", "compile", "-q", "-", "--python", str(PYTHON)]
        uv += ["--resolution", "lowest-direct", "--constraints", str(limits)]
        done = subprocess.run(
            [*uv, "--no-annotate", "--no-header"],
            cwd=folder,
            input="\n".join(lines),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit("tools/pin.py: uv found no versions; the old pins are kept")
    pairs = [line.split("==") for line in done.stdout.splitlines()]
    return {name: version for name, version in pairs if name not in NOT_PINNED}


def write(path: Path, versions: dict[str, str], head: str = HEAD) -> None:
    """Write a file of constraints and print what has changed since the last one."""
    text = head + "".join(f"{name}=={version}\n" for name, version in versions.items())
    before = path.read_text().splitlines() if path.exists() else []
    now = text.splitlines()
    for line in sorted({*before} ^ {*now}):
        print(f"{'-' if line in before else '+'} {line}")
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    print(f"{path.relative_to(ROOT)}: {len(versions)} packages", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the versions that `make test` installs.")
    parser.add_argument("--oldest", action="store_true", help="write tools/constraints-oldest.txt")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        print("no .venv. Run: make venv", file=sys.stderr)
        return 2
    os.environ.pop("PIP_CONSTRAINT", None)
    if arguments.oldest:
        versions = resolve_oldest(wanted(NOT_OLDEST))
        write(ROOT / "tools" / "constraints-oldest.txt", versions, HEAD_OLDEST)
        return 0
    write(ROOT / "tools" / "constraints.txt", resolve(wanted()))
    for name, lines in ALONE.items():
        write(ROOT / "tools" / f"constraints-{name}.txt", resolve(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
