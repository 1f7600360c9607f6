"""Shards of parameters on the page, in a real Chromium: what they do, which does most, what is
away."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.manage.tables.parameters import ParameterSet
from clipper.metrics.stats import ShardReading
from clipper.params import TableSpec
from clipper.params.client.stats_cache import StatsCache
from clipper.params.client.stats_reader import StatsReader
from tests.dashboard.browser import Page, found
from tests.dashboard.test_page import AXE, opened, tab_to
from tests.frontend.conftest import QUICK, ask, warm_workers
from tests.params.conftest import TOKEN, Shards, ones
from tests.params.conftest import shards as shards  # a fixture
from tests.threads import join

pytestmark = pytest.mark.skipif(not found(), reason="no chromium: python tools/fetch.py chromium")


class Here:
    """A fake of a server's parameter set, with shards in this process."""

    def __init__(self, shards: Shards) -> None:
        self.folder, self._reader = shards.root, StatsReader(shards.addresses, token=TOKEN)
        self.observer = StatsCache(self.shards)

    def shards(self) -> Sequence[ShardReading]:
        return self._reader.read()

    def stats(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "own": False, "restarts": 0}

    def environment(self, tables: Any) -> dict[str, str]:
        return {}

    def stop(self) -> None:
        self.observer.stop()
        self._reader.close()


@pytest.fixture(scope="module")
def set_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    shards = Shards(Path(tmp_path_factory.mktemp("set"))).up(3, replicas=1)
    client = shards.client()
    client.create(TableSpec("users", 4))
    client.create(TableSpec("words", 2, rows_max=128, evicts=True))
    yield shards
    shards.close()


@contextlib.contextmanager
def beside(shards: Shards) -> Iterator[clipper.ClipperServer]:
    with pytest.MonkeyPatch.context() as patch:
        here = Here(shards)
        patch.setattr(ParameterSet, "start", lambda self: setattr(self, "served", here))
        server = clipper.start(admin="127.0.0.1:0", **QUICK)
        warm_workers(server)
        with server:
            yield server


@pytest.fixture(scope="module")
def server(set_of: Shards) -> Iterator[clipper.ClipperServer]:
    with beside(set_of) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def work(set_of: Shards, server: clipper.ClipperServer) -> Iterator[None]:
    """Send requests, most of them to shard 1."""
    stop = threading.Event()

    def train() -> None:
        client, draw = set_of.client(), np.random.default_rng(5)
        while not stop.wait(0.01):
            ids = np.concatenate([draw.integers(0, 300, 10), 3 * draw.integers(0, 100, 30) + 1])
            client.pull("users", ids)
            client.push("users", ids, ones((40, 4)), versioned=True)
            client.push("words", draw.integers(0, 5000, 20), ones((20, 2)))

    thread = threading.Thread(target=train)
    thread.start()
    yield
    stop.set()
    join(thread)


ROWS = "[...document.querySelectorAll('#params .shards tbody tr')]"


def test_what_shards_do_and_which_does_most(page: Page, server: clipper.ClipperServer) -> None:
    opened(page, server)
    page.until(f"{ROWS}.length === 3")
    page.until(f"{ROWS}.every(r => /serves/.test(r.innerText) && /1\\/1 whole/.test(r.innerText))")
    page.until(f"{ROWS}.every(r => parseFloat(r.querySelector('.fill > span').style.width) > 0)")
    width = f"{ROWS}.map(r => parseFloat(r.querySelector('.fill > span').style.width))"
    page.until(f"(w => w[1] > 1.5 * w[0] && w[1] > 1.5 * w[2])({width})")
    page.until_text("times the mean")
    page.until(
        "document.querySelector('#params .two .plot').getAttribute('aria-label').match(/pushed"
        " [1-9]/)"
    )
    tables = "[...document.querySelectorAll('#params .tables tbody tr')]"
    page.until(f"{tables}.length === 2")
    assert page.run(f"{tables}.map(r => r.querySelector('th').innerText)") == ["users", "words"]
    page.until(f"parseInt({tables}[0].querySelectorAll('td')[1].innerText) > 100")
    page.until(f"{tables}[1].querySelectorAll('td')[7].innerText !== '0'")  # evicted
    assert page.troubles == []


def test_the_same_is_scraped(server: clipper.ClipperServer) -> None:
    text = ask(server.admin_address, "GET", "/metrics").body.decode()
    assert 'clipper_params_rows{table="users",shard="2"}' in text
    assert text.count("# TYPE clipper_params_epoch gauge") == 1


def test_a_chart_is_a_table_by_keyboard(page: Page, server: clipper.ClipperServer) -> None:
    opened(page, server)
    page.until(f"{ROWS}.length === 3")
    tab_to(page, "e.getAttribute('aria-label') === 'Rows of tables a second as a table'", 200)
    page.press("Enter")
    page.until("document.querySelector('#params .two table')")
    tab_to(page, "e.getAttribute('aria-label') === 'Shards'", 40)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readers_of_screens_and_small_screens(
    page: Page, server: clipper.ClipperServer, scheme: str
) -> None:
    page.prefer(scheme)
    page.size(375, 700)
    opened(page, server)
    page.until(f"{ROWS}.length === 3")
    assert page.run("document.documentElement.scrollWidth") <= 375
    if AXE.exists():
        page.run(AXE.read_text() + "; true")
        shown = "[v.id, v.help, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))]"
        assert page.run(f"axe.run('#params').then(r => r.violations.map(v => {shown}))") == []


def test_a_shard_that_is_away_is_named(page: Page, shards: Shards) -> None:
    shards.up(2)
    with beside(shards) as server:
        opened(page, server)
        page.until(f"{ROWS}.length === 2")
        page.until_text("No table yet")
        shards.lose(1)
        page.until_text("Shard 1 is away")
        page.until(f"/away/.test({ROWS}[1].innerText)")
        shards.begin(1)
        page.until(f"{ROWS}.every(r => /serves/.test(r.innerText))")
        assert page.troubles == []
