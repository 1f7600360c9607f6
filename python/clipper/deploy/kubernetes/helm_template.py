"""`helm template NAME CHART --values - [--set VALUE]` by Helm's engine as a library, the package
helm-python-sdk: a program of its own, for machines without `helm`.
"""

import argparse
import json
import re
import sys

import helm_python

from clipper.types import UserValue


def merged(values: dict[str, UserValue], more: dict[str, UserValue]) -> dict[str, UserValue]:
    """Return values with more of them laid over, as Helm lays them: tables are merged by key."""
    found = dict(values)
    for key, one in more.items():
        before = found.get(key)
        if isinstance(one, dict) and isinstance(before, dict):
            found[key] = merged(before, one)
        else:
            found[key] = one
    return found


def main() -> int:
    """Render a chart to stdout. -> exit code; 1 with Helm's error on stderr."""
    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("command", choices=["template"])
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--values", choices=["-"])
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    values = json.load(sys.stdin)
    try:
        for text in given.set:
            values = merged(values, helm_python.parse_set_string(text) or {})
        with helm_python.Chart.load(given.chart) as chart:
            found = chart.render(values, name=given.name, namespace="default")
    except helm_python.HelmError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    for template, text in sorted(found.items()):
        for document in re.split(r"^---$\n", text, flags=re.MULTILINE):
            if not template.endswith(".tpl") and document.strip():
                sys.stdout.write(f"---\n# Source: {template}\n{document.strip()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
