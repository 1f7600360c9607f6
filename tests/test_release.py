"""Releases in a checkout of their own: the files that one writes, and commits that are refused."""

import datetime
import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import clipper_client

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"
TODAY = datetime.date(2027, 1, 31)
# files that people read or install; of these, the changelog alone names versions of its own accord
PLACES = ("README.md", "CONTRIBUTING.md", "pyproject.toml")
PLACES += ("container_sdk", "deploy", "docs", "examples", "python", "tools")
# pages with figures, which say what version they are of
MEASURED = re.compile(r"(benchmarks.*|compare|paper)\.md")
TEXTS = (".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".ipynb", ".json", ".txt")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the tool, for an empty checkout."""
    monkeypatch.syspath_prepend(str(TOOLS))
    found = importlib.import_module("release")
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(found, "CHANGES", tmp_path / "CHANGELOG.md")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.2.0, unreleased\n")
    return found


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_release_is_dated_committed_and_not_tagged(release: ModuleType, tmp_path: Path) -> None:
    assert [*release.not_in_order("0.2.0")] == [
        "CHANGELOG.md says that 0.2.0 is unreleased: --set 0.2.0 writes its date",
        "this is no checkout of git",
    ]
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.2.0, 2027-01-31\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    assert [*release.not_in_order("0.2.0")] == []
    assert [*release.not_in_order("0.3.0")] == ['CHANGELOG.md has no section "## 0.3.0, DATE"']
    (development,) = release.not_in_order("0.2.0.dev0")
    assert "0.2.0.dev0 is a version of development" in development
    (tmp_path / "more").touch()
    git(tmp_path, "tag", "v0.2.0")
    assert [*release.not_in_order("0.2.0")] == [
        "1 files are not committed",
        "the tag v0.2.0 is there already",
    ]


@pytest.fixture
def versioned(release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the tool, for a checkout with the files that name the version."""

    def declared(folder: str = ".") -> dict[str, Any]:
        return tomllib.loads((tmp_path / folder / "pyproject.toml").read_text())

    for path in release.VERSIONED:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    monkeypatch.setattr(release, "declared", declared)
    return release


def test_a_version_is_written_to_all_files_that_name_it(
    versioned: ModuleType, tmp_path: Path
) -> None:
    before = clipper_client.__version__
    project = tmp_path / "pyproject.toml"
    bounds = '\n[dependency-groups]\nothers = ["one>=7.1.0", "two<=7.1.0", "three>=17.1.0"]\n'
    declared = project.read_text().replace("\n[dependency-groups]", f"{bounds}", 1)
    project.write_text(declared)
    for number, chart in (
        ("7.1.0rc2", "7.1.0-rc.2"),
        ("7.1.0", "7.1.0"),
        ("7.2.0.dev0", "7.2.0-dev.0"),
    ):
        written = versioned.set_version(number, TODAY)
        assert {*written} == {*versioned.VERSIONED, "CHANGELOG.md"}
        for path in versioned.VERSIONED:
            text = (tmp_path / path).read_text().replace(bounds, "")
            assert number in text, path
            assert before not in text, path
            assert text != (ROOT / path).read_text(), path
        about = (tmp_path / "python/clipper/deploy/kubernetes/chart/Chart.yaml").read_text()
        assert f"\nversion: {chart}\nappVersion: {number}\n" in about
        server = versioned.declared()["project"]
        assert server["version"] == number
        assert server["dependencies"][:2] == [
            f"clipper-container=={number}",
            f"clipper-client=={number}",
        ]
        before = number
    lines = zip(project.read_text().splitlines(), declared.splitlines(), strict=True)
    assert sum(one != other for one, other in lines) == 3, "bounds of other packages stay"


def test_the_changelog_has_a_section_for_each_release(
    versioned: ModuleType, tmp_path: Path
) -> None:
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(
        "# Changes\n\n## 7.1.0, unreleased\n\nMuch.\n\n## 7.0.0, 2026-12-24\n\nOld.\n"
    )
    versioned.set_version("7.1.0rc1", TODAY)
    assert "## 7.1.0, unreleased\n" in changes.read_text()
    versioned.set_version("7.1.0", TODAY)
    assert "## 7.1.0, 2027-01-31\n" in changes.read_text()
    assert "## 7.0.0, 2026-12-24\n" in changes.read_text()
    versioned.set_version("7.2.0.dev0", TODAY)
    assert "# Changes\n\n## 7.2.0, unreleased\n\n## 7.1.0, 2027-01-31\n" in changes.read_text()


def test_the_notes_of_a_release_are_its_section(
    versioned: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versioned.wheels, "DIST", tmp_path)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(
        "# Changes\n\n## 7.1.0, unreleased\n\nMuch.\n\n## 7.0.0, 2026-12-24\n\nOld.\n"
    )
    for number, text in (("7.1.0rc1", "Much."), ("7.0.0", "Old."), ("6.0.0", "")):
        made = versioned.write_notes(number).read_text()
        assert made == f"# Clipper {number}\n\n{text}\n"


def test_what_is_no_version_and_a_file_without_one_change_nothing(
    versioned: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="is no version of three numbers"):
        versioned.set_version("7.1", TODAY)
    (tmp_path / "docs/tutorial.md").write_text("none")
    with pytest.raises(SystemExit, match=r"docs/tutorial\.md does not name the version"):
        versioned.set_version("7.1.0", TODAY)
    for path in versioned.VERSIONED[:-1]:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text()


def test_no_other_file_names_the_version(release: ModuleType) -> None:
    files = (path for place in PLACES for path in [ROOT / place, *(ROOT / place).rglob("*")])
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for path in files
        if path.suffix in TEXTS and path.is_file() and not MEASURED.match(path.name)
    }
    found = {
        name
        for name, text in texts.items()
        if clipper_client.__version__ in text and "egg-info" not in name
    }
    assert found <= {str(Path(path)) for path in release.VERSIONED}


def test_all_distributions_are_of_one_version(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert release.version() == clipper_client.__version__
    monkeypatch.setattr(clipper_client, "__version__", "0.0.9")
    with pytest.raises(SystemExit, match=r"versions differ: .*clipper_client has 0\.0\.9"):
        release.version()
    for module in release.MODULES:
        monkeypatch.setattr(module, "__version__", "0.2")
    monkeypatch.setattr(release, "declared", lambda folder: {"project": {"version": "0.2"}})
    with pytest.raises(SystemExit, match="is no version of three numbers"):
        release.version()
