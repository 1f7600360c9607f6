"""Every curl command of docs/http.md is run, and prints what the page shows."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from tests.frontend.conftest import QUICK, total, warm_workers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
VARYING = re.compile(
    r'"[0-9a-f]{8}-[0-9a-f]+"|(?<="latency_us":)\d+|(?<="created_us":)\d+|(?<="query_id":)\d+'
    r'|(?<="slo_ms":)[\d.]+'
)


def prices(columns: Any) -> Any:
    return [age + len(city) for age, city in zip(columns["age"], columns["city"], strict=True)]


def scale(columns: Any) -> Any:
    scaled = columns["x"] * columns["factor"][:, None]
    return {"scaled": scaled, "total": scaled.sum(axis=1)}


def spell(text: str) -> Iterator[str]:
    yield from text


@pytest.fixture(scope="module")
def page_server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http="127.0.0.1:0", admin="127.0.0.1:0", **QUICK) as server:
        server._learning.states.start_writing()
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=20_000, policy="stacking")
        server.deploy("prices", prices, inputs={"age": "f64", "city": "str"})
        server.app("homes", models=["prices"], slo_ms=20_000)
        inputs, outputs = {"x": "f64[2]", "factor": "f64"}, {"scaled": "f64[2]", "total": "f64"}
        server.deploy("scale", scale, inputs=inputs, outputs=outputs)
        server.app("pair", models=["scale"], slo_ms=20_000)
        server.deploy("spell", spell, input="str", output="str", row_by_row=True, cache=False)
        server.app("letters", models=["spell"], slo_ms=20_000)
        warm_workers(server)
        yield server


def steps() -> list[tuple[str, str]]:
    """Return (command, its output) in the order of the page."""
    found = []
    for block in CONSOLE.findall(PAGE.read_text()):
        for step in block.removeprefix("$ ").split("\n$ "):
            command, _, printed = step.partition("\n")
            found.append((command, printed.strip()))
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl: python tools/fetch.py curl")
def test_every_example_prints_what_the_page_shows(page_server: clipper.ClipperServer) -> None:
    every = steps()
    assert len(every) >= 9
    for command, printed in every:
        assert command.startswith("curl -s ")
        local = command.replace("127.0.0.1:8000", page_server.http_address).replace(
            "127.0.0.1:8002", page_server.admin_address
        )
        done = subprocess.run(["sh", "-c", local], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, command
        assert VARYING.sub("_", done.stdout.strip()) == VARYING.sub("_", printed), command


def test_every_route_is_on_the_page(page_server: clipper.ClipperServer) -> None:
    text = PAGE.read_text() + (PAGE.parent / "managing.md").read_text()
    without = text.replace("[/versions/V]", "").replace("[/NAME]", "")
    known = without + text.replace("[/versions/V]", "/versions/V").replace("[/NAME]", "/NAME")
    missing = []
    frontends = page_server._endpoints.frontends
    for routes in (frontends.routes, frontends.admin_routes):
        for method, pattern in routes:
            path = pattern.replace("{}", "NAME", 1).replace("{}", "V")
            shown = {path, path.replace("/api/NAME", "/api/total"), path.replace("/NAME/", "/APP/")}
            if not any(one in known for one in shown):
                missing.append(f"{method} {path}")
    assert not missing
