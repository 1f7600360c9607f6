"""List the parts of an installed Clipper as a CycloneDX document: its packages with their versions
and licences, and what our files have inside.

    .venv/release/bin/python tools/sbom.py PYTHON VERSION FILE

tools/release.py runs it, in the environment of the tools of a release. PYTHON: of the environment
that has the packages.
"""

import json
import subprocess
import sys
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent
LIST = """\
import importlib.metadata, json

def licence(about):
    lines = (about.get("License-Expression") or about.get("License") or "").splitlines()
    return lines[0] if lines else ""

each = importlib.metadata.distributions()
print(json.dumps([[one.name, one.version, licence(one.metadata)] for one in each]))
"""
NOT_PARTS = ("pip", "setuptools", "clipper-serving")
INSIDE = ("preact", "uplot")  # in the dashboard's page


def bom_of(packages: list[tuple[str, str, str]], version: str) -> Bom:
    """Return the document. packages: names, versions and licences."""
    bom = Bom()
    bom.metadata.component = Component(
        name="clipper-serving", version=version, type=ComponentType.APPLICATION
    )
    for name, number, licence in packages:
        if name not in NOT_PARTS:
            bom.components.add(part("pypi", name, number, licence))
    locked = json.loads((ROOT / "dashboard" / "package-lock.json").read_text())["packages"]
    for name in INSIDE:
        about = locked[f"node_modules/{name}"]
        bom.components.add(part("npm", name, about["version"], about["license"]))
    return bom


def part(kind: str, name: str, version: str, licence: str) -> Component:
    """Return one part. kind: of its package, as `pypi`."""
    url = PackageURL(kind, name=name, version=version)
    found = Component(
        name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=url.to_string()
    )
    if licence:
        found.licenses.add(DisjunctiveLicense(name=licence))
    return found


def main() -> int:
    python, version, file = sys.argv[1:]
    listed = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True)
    document = JsonV1Dot6(bom_of(json.loads(listed.stdout), version))
    Path(file).write_text(document.output_as_string(indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
