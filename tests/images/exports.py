"""Runs `clipper export` and reads what it wrote, for the tests of manifests."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clipper.cli import main

yaml = pytest.importorskip("yaml", reason="python tools/fetch.py clients")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="python tools/fetch.py clients"
)

VERSIONS = ("1.28", "1.33")  # of Kubernetes, whose schemas objects are held to


def export(*words: object) -> Result:
    if not shutil.which("helm"):
        pytest.importorskip("helm_python", reason="python tools/fetch.py clients")
    return CliRunner().invoke(main, ["export", *map(str, words)], prog_name="clipper")


def objects_of(out: Path) -> dict[tuple[str, str], Any]:
    """Return the objects of a base for Kustomize, by kind and name."""
    (base,) = yaml.safe_load_all((out / "kustomization.yaml").read_text())
    return by_kind_and_name(
        one for name in base["resources"] for one in yaml.safe_load_all((out / name).read_text())
    )


def by_kind_and_name(objects: Iterable[Any]) -> dict[tuple[str, str], Any]:
    each = [*objects]
    found = {(one["kind"], one["metadata"]["name"]): one for one in each}
    assert len(found) == len(each)
    return found


def check_objects(objects: Iterable[Any]) -> None:
    """Hold objects to the schemas of Kubernetes."""
    for one in objects:
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)
