"""The mesh on the page, in a real Chromium: how full each node is, which models it has, and why."""

from collections.abc import Iterator

import pytest

import clipper
from clipper.mesh.membership import MeshMembership
from tests.dashboard.browser import Page, found
from tests.dashboard.test_page import AXE, SILENCE, fill, opened, press
from tests.frontend.conftest import QUICK, warm_workers
from tests.frontend.fake_mesh import FakeMesh

pytestmark = pytest.mark.skipif(not found(), reason="no chromium: python tools/fetch.py chromium")


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    mesh = FakeMesh()
    for i in range(60):
        mesh.register(f"m{i:02}", f"/models/{i}.onnx", load_now=i == 3)
    mesh.register("odd", "/models/odd.onnx")
    mesh.fails["odd"] = "<b>no</b> ONNX"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshMembership, "node", mesh)
        server = clipper.start(admin="127.0.0.1:0", **QUICK)
    warm_workers(server)
    with server:
        yield server


def test_memory_and_models_of_each_node(page: Page, server: clipper.ClipperServer) -> None:
    opened(page, server)
    page.until("document.querySelectorAll('#mesh .nodes tbody tr').length === 2")
    widths = page.run(
        "[...document.querySelectorAll('#mesh .fill > span')].map(e => e.style.width)"
    )
    assert widths == ["75%", "0%"]
    assert page.run("document.querySelector('#mesh .nodes tbody th').innerText").startswith("a")
    page.until("document.querySelectorAll('#mesh .held tbody tr').length === 50")
    page.until_text("models registered")
    held = (
        "[...document.querySelectorAll('#mesh .held tbody tr')].filter(r =>"
        " r.innerText.includes('m03'))[0]"
    )
    cells = page.run(
        f"[...{held}.querySelectorAll('td')].map(c => c.innerText.split(/\\s+/).join(' '))"
    )
    assert cells[:3] == ["● loaded", "● loaded", "·"]
    press(page, "#mesh", "next 50")
    page.until("document.querySelectorAll('#mesh .held tbody tr').length === 11")
    page.until_text("m50 to odd")
    press(page, "#mesh", "previous 50")
    page.until("document.querySelectorAll('#mesh .held tbody tr').length === 50")
    fill(page, "#mesh input", "odd")
    page.until("document.querySelectorAll('#mesh .held tbody tr').length === 1")
    page.until_text("<b>no</b> ONNX")
    press(page, "#mesh", "explain")
    page.until_text("it waits for its first query")
    page.until_text("holds least")
    fill(page, "#mesh input", "nobody")
    page.until_text("clipper mesh register ID")
    assert page.troubles == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readers_of_screens_and_small_screens(
    page: Page, server: clipper.ClipperServer, scheme: str
) -> None:
    page.prefer(scheme)
    page.size(375, 700)
    opened(page, server)
    page.until("document.querySelectorAll('#mesh .held tbody tr').length === 50")
    press(page, "#mesh", "explain")
    page.until_text("it waits for its first query")
    assert page.run("document.documentElement.scrollWidth") <= 375
    if AXE.exists():
        page.run(AXE.read_text() + "; true")
        shown = "[v.id, v.help, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))]"
        assert page.run(f"axe.run('#mesh').then(r => r.violations.map(v => {shown}))") == []


def test_the_mesh_is_not_asked_again_before_it_has_answered(
    page: Page, server: clipper.ClipperServer
) -> None:
    """A browser has few connections to a server; the page's own stream needs one of them."""
    opened(page, server)
    page.until("document.querySelectorAll('#mesh .held tbody tr').length === 50")
    page.run(SILENCE)
    page.until("asked.filter((path) => path.includes('/mesh/')).length === 2")
    page.run("window.last = clipperFeed.fine.at(-1).t")
    page.until("clipperFeed.fine.filter((row) => row.t > last).length >= 4", 60)
    assert page.run("asked.filter((path) => path.includes('/mesh/')).length") == 2
