"""Make what a release consists of, and say what is not in order.

    make release                           a dry run: dist/ is made, nothing is tagged
    make release ARGS="--core prebuilt"    the same in a minute, with the core of this machine
    make release ARGS="--set 0.2.0"        writes the version and the date into the files, no more
    make release ARGS="--tag"              also tags the commit, if all is in order
    make release ARGS="--set 0.2.0 --tag"  all of it: writes, commits, makes, tags

dist/ gets the wheels and source distributions of `make wheels`, a list of all parts (CycloneDX) in
sbom.cdx.json, where they come from in PROVENANCE.txt, the section of CHANGELOG.md in NOTES.md, and
their checksums in SHA256SUMS. Nothing is uploaded; the last lines say how that is done.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import wheels
from projects import FOLDERS, ROOT, declared

import clipper
import clipper_client
import clipper_container

CHANGES = ROOT / "CHANGELOG.md"
SBOM = "sbom.cdx.json"
PROVENANCE = "PROVENANCE.txt"
NOTES = "NOTES.md"
# the files that name the version; tests/test_release.py looks for others
VERSIONED = (
    *(f"{folder}/pyproject.toml" for folder in FOLDERS),
    "container_sdk/src/clipper_container/__init__.py",
    "python/clipper/version.py",
    "python/clipper_client/version.py",
    "python/clipper/deploy/kubernetes/chart/Chart.yaml",
    "deploy/compose.yml",
    "deploy/kserve/clipper-servingruntime.yaml",
    "docs/kubernetes.md",
    "docs/tutorial.md",
)
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


def semantic(number: str) -> str:
    """Return a version as charts have it: 1.4.0-dev.0 for 1.4.0.dev0."""
    return re.sub(r"\.?(a|b|rc|dev)(\d+)$", r"-\1.\2", number)


def set_version(number: str, today: datetime.date) -> list[str]:
    """Write a version into all files that name the one before; return their paths.

    In CHANGELOG.md the section of a release gets its date, and one of development that is not there
    is begun. Raises SystemExit, before anything is written, for what is no version, and for a file
    that does not name the one before.
    """
    if not _VERSION.fullmatch(number):
        raise SystemExit(f"{number} is no version of three numbers, such as 0.2.0 or 0.2.0rc1")
    before = declared()["project"]["version"]
    # not as part of another, nor as a bound of another package
    named = re.compile(rf"(?<![\w.])(?<![<>~]=){re.escape(before)}(?![\w.]*\w)")
    of_chart = re.compile(rf"^version: {re.escape(semantic(before))}$", re.MULTILINE)
    written = {}
    for path in VERSIONED:
        text = (ROOT / path).read_text()
        if not named.search(text):
            raise SystemExit(f"{path} does not name the version {before}")
        written[path] = named.sub(number, of_chart.sub(f"version: {semantic(number)}", text))
    written[CHANGES.name] = changes_for(number, today, CHANGES.read_text())
    for path, text in written.items():
        (ROOT / path).write_text(text)
    return [*written]


def changes_for(number: str, today: datetime.date, text: str) -> str:
    """Return the text of CHANGELOG.md for a version."""
    final = final_of(number)
    if number == final:
        return text.replace(f"## {final}, unreleased\n", f"## {final}, {today.isoformat()}\n")
    if final in dict(_SECTION.findall(text)):
        return text
    found = _SECTION.search(text)
    at = found.start() if found else len(text)
    return f"{text[:at]}## {final}, unreleased\n\n{text[at:]}"


def final_of(number: str) -> str:
    """Return the release that a version leads to: 0.2.0 for 0.2.0rc1."""
    return re.split(r"a|b|rc|\.dev", number)[0]


def write_notes(number: str) -> Path:
    """Write what CHANGELOG.md says of a version; return the text."""
    text = CHANGES.read_text()
    sections = [*_SECTION.finditer(text)]
    ends = [*(one.start() for one in sections[1:]), len(text)]
    found = {one[1]: text[one.end() : end] for one, end in zip(sections, ends, strict=True)}
    made = wheels.DIST / NOTES
    said = found.get(final_of(number), "").strip()
    made.write_text(f"# Clipper {number}\n\n{said}\n")
    return made


def not_in_order(number: str) -> Iterator[str]:
    """Yield what keeps this commit from being the release of this version."""
    sections = dict(_SECTION.findall(CHANGES.read_text()))
    if ".dev" in number:
        yield f"{number} is a version of development: --set {final_of(number)}"
    elif final_of(number) not in sections:
        yield f'CHANGELOG.md has no section "## {final_of(number)}, DATE"'
    elif number in sections and sections[number] == "unreleased":
        yield f"CHANGELOG.md says that {number} is unreleased: --set {number} writes its date"
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
    parser.add_argument("--pythons", default="", help="of further wheels: commands or paths")
    parser.add_argument("--set", default="", metavar="VERSION", help="write this one first")
    parser.add_argument("--tag", action="store_true", help="tag the commit, if all is in order")
    arguments = parser.parse_args()
    if arguments.set:
        if arguments.tag and git("status", "--porcelain"):
            raise SystemExit("there are files that are not committed: git status")
        written = set_version(arguments.set, datetime.datetime.now(datetime.UTC).date())
        print(f"{arguments.set} is written to {len(written)} files: git diff", flush=True)
        if not arguments.tag:
            print(f"to go on: git commit -am 'Version {arguments.set}', then make release")
            return 0
        wheels.run("git", "commit", "-m", f"Version {arguments.set}", "--", *written)
        # anew, since this process has imported the version before
        words = ("--tag", "--core", arguments.core, "--pythons", arguments.pythons)
        return subprocess.run([sys.executable, __file__, *words], check=False).returncode
    return release(arguments.core, arguments.pythons.split(), arguments.tag)


def release(core: str, pythons: Sequence[str], tags: bool) -> int:
    """Make what the release of this commit consists of; return the exit code.

    core, pythons: as of `wheels.build`. tags: whether the commit is tagged.
    """
    number = version()
    missing = [*not_in_order(number)]
    if core != "any":
        missing.append("the core is that of this machine")
    for line in missing:
        print(f"not in order: {line}", flush=True)
    if tags and missing:
        return 1
    files = wheels.build(core=core, pythons=pythons)
    files += [write_sbom(files, number), write_provenance(number), write_notes(number)]
    wheels.write_sums(files)
    print(f"{number} is in dist/: {len(files)} files, and SHA256SUMS")
    if tags:
        wheels.run("git", "tag", "-a", f"v{number}", "-m", f"clipper {number}")
        print(f"tagged v{number}. To publish it:")
        print(f"  git push origin v{number}")
        print("  twine upload dist/*.whl dist/*.tar.gz")
    elif not missing:
        print('all is in order. To tag it: make release ARGS="--tag"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
