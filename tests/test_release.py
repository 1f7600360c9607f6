"""Refusals of commits that cannot be a release, in a checkout of its own."""

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import clipper_client

TOOLS = Path(__file__).parent.parent / "tools"


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
        "CHANGELOG.md says that 0.2.0 is unreleased: write its date",
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
