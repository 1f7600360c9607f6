"""Make what a release consists of, and say what is not in order.

    make release                           a dry run: dist/ is made, nothing is tagged
    make release ARGS="--core prebuilt"    the same in a minute, with the core of this machine
    make release ARGS="--tag"              also tags the commit, if all is in order

dist/ gets the wheels and source distributions of `make wheels`, a list of all parts (CycloneDX) in
sbom.cdx.json, where they come from in PROVENANCE.txt, and their checksums in SHA256SUMS. Nothing is
uploaded; the last lines say how that is done.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import wheels
from projects import FOLDERS, ROOT, declared

import clipper
import clipper_client
import clipper_container

CHANGES = ROOT / "CHANGELOG.md"
SBOM = "sbom.cdx.json"
PROVENANCE = "PROVENANCE.txt"
MODULES = (clipper, clipper_client, clipper_container)
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc|\.dev)(0|[1-9]\d*))?")
_SECTION = re.compile(r"^## (\S+), (unreleased|\d{4}-\d\d-\d\d)$", re.MULTILINE)


def git(*words: str) -> str:
    """Return what a command of git printed; empty if it fails, as in an unpacked archive."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def version() -> str:
    """Return the version of the distributions. Raises SystemExit if they differ, or if it is not
    one of three numbers, with or without a1, b1, rc1 or .dev1."""
    found = {
        f"{folder}/pyproject.toml": declared(folder)["project"]["version"] for folder in FOLDERS
    }
    found |= {module.__name__: module.__version__ for module in MODULES}
    if len({*found.values()}) > 1:
        raise SystemExit(
            "the versions differ: " + ", ".join(f"{one} has {found[one]}" for one in found)
        )
    number: str = next(iter(found.values()))
    if not _VERSION.fullmatch(number):
        raise SystemExit(f"{number} is no version of three numbers, such as 0.2.0 or 0.2.0rc1")
    return number


def not_in_order(number: str) -> Iterator[str]:
    """Yield what keeps this commit from being the release of this version."""
    sections = dict(_SECTION.findall(CHANGES.read_text()))
    if ".dev" in number:
        yield f"{number} is a version of development: write the one to release"
    elif number not in sections:
        yield f'CHANGELOG.md has no section "## {number}, DATE"'
    elif sections[number] == "unreleased":
        yield f"CHANGELOG.md says that {number} is unreleased: write its date"
    if not git("rev-parse", "HEAD"):
        yield "this is no checkout of git"
    elif changed := git("status", "--porcelain"):
        yield f"{len(changed.splitlines())} files are not committed"
    if git("tag", "--list", f"v{number}"):
        yield f"the tag v{number} is there already"


def write_sbom(files: list[Path], number: str) -> Path:
    """Install the wheels into a new environment as a user does, and list what it has; return the
    list. The packages come from pip's index."""
    made = wheels.DIST / SBOM
    with tempfile.TemporaryDirectory(prefix="clipper-sbom-") as place:
        python = Path(place) / "bin" / "python"
        wheels.run(sys.executable, "-m", "venv", place)
        built = [file for file in files if file.suffix == ".whl"]
        wheels.run(python, *wheels.PIP, "install", *built)
        script = ROOT / "tools" / "sbom.py"
        wheels.run(wheels.TOOLS / "bin" / "python", script, python, number, made)
    return made


def write_provenance(number: str) -> Path:
    """Write where the files come from; return the text."""
    commit = git("rev-parse", "HEAD") or "unknown: this is no checkout of git"
    state = (
        "with changes that are not committed" if git("status", "--porcelain") else "as committed"
    )
    compiler = os.environ.get("CXX") or "g++"
    said = wheels.run(*compiler.split(), "--version").splitlines()[0]
    tools = [
        f"{name} {importlib.metadata.version(name)}" for name in ("cython", "numpy", "setuptools")
    ]
    then = os.environ.get("SOURCE_DATE_EPOCH", wheels.THEN)
    lines = {
        "Distributions": f"clipper-serving, clipper-container, clipper-client {number}",
        "Commit": f"{commit}, {state}",
        "Tree": git("rev-parse", "HEAD^{tree}") or "unknown",
        "Command": f"make release, on {platform.platform()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "Compiler": said,
        "Built with": ", ".join(tools),
        "Times in archives": f"SOURCE_DATE_EPOCH={then}",
        "Checksums": "SHA256SUMS",
        "Parts": SBOM,
    }
    made = wheels.DIST / PROVENANCE
    made.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Make what a release consists of into dist/.")
    parser.add_argument("--core", choices=("any", "prebuilt"), default="any")
    parser.add_argument("--tag", action="store_true", help="tag the commit, if all is in order")
    arguments = parser.parse_args()
    number = version()
    missing = [*not_in_order(number)]
    if arguments.core != "any":
        missing.append("the core is that of this machine")
    for line in missing:
        print(f"not in order: {line}", flush=True)
    if arguments.tag and missing:
        return 1
    files = wheels.build(core=arguments.core)
    files += [write_sbom(files, number), write_provenance(number)]
    wheels.write_sums(files)
    print(f"{number} is in dist/: {len(files)} files, and SHA256SUMS")
    if arguments.tag:
        wheels.run("git", "tag", "-a", f"v{number}", "-m", f"clipper {number}")
        print(f"tagged v{number}. To publish it:")
        print(f"  git push origin v{number}")
        print("  twine upload dist/*.whl dist/*.tar.gz")
    elif not missing:
        print('all is in order. To tag it: make release ARGS="--tag"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
