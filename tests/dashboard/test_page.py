"""The page in a real Chromium: what a person sees, by mouse and keyboard, on a small screen, in the
dark, when things fail."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from tests.dashboard.browser import PATIENCE_S, Page, found
from tests.frontend.conftest import QUICK, warm_workers
from tests.processes import free_ports
from tests.threads import join

pytestmark = pytest.mark.skipif(not found(), reason="no chromium: python tools/fetch.py chromium")
AXE = Path(__file__).parents[2] / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
SCRIPT = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def total(rows: Any) -> Any:
    return np.asarray(rows).sum(axis=1)


def whole(rows: Any) -> Any:
    return np.asarray(rows)[:, 0].astype(int)


def nothing(rows: Any) -> Any:
    return np.zeros(len(rows), int)


def failing(rows: Any) -> Any:
    raise ValueError(SCRIPT)


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(admin="127.0.0.1:0", **QUICK) as started:
        started._learning.states.start_writing()
        started.deploy("sum", total, input="f64[3]")
        started.deploy("bad", failing, input="f64[3]")
        started.app("total", models=["sum"], slo_ms=5000, policy="stacking")
        started.app("broken", models=["bad"], slo_ms=5000, default=SCRIPT)
        warm_workers(started)
        yield started


@pytest.fixture
def load(server: clipper.ClipperServer) -> Iterator[None]:
    """Send a few queries again and again while the test reads the page."""
    ending = threading.Event()

    def ask() -> None:
        row = 0
        while not ending.wait(0.02):
            row += 1
            server.app("total").predict([row, 2, 3]).result(PATIENCE_S)
            server.app("broken").predict([row, 2, 3]).result(PATIENCE_S)

    asking = threading.Thread(target=ask, name="load")
    asking.start()
    yield
    ending.set()
    join(asking)


def opened(page: Page, server: clipper.ClipperServer, path: str = "/") -> Page:
    page.open(f"http://{server.admin_address}{path}")
    page.until("document.querySelector('.tiles')")
    return page


def active(page: Page) -> str:
    """Return the description of the focused element."""
    return str(
        page.run(
            "(e => e.getAttribute('aria-label') || e.innerText || e.type ||"
            " e.tagName)(document.activeElement)"
        )
    )


def fill(page: Page, selector: str, value: str) -> None:
    """Fill a field or choose an option; return when the page has taken it in."""
    field = f"document.querySelector({json.dumps(selector)})"
    page.until(field)
    # Again if the page was drawn anew before it had taken it in.
    page.until(
        f"(e => e.value === {json.dumps(value)} || void (e.value = {json.dumps(value)},"
        f" ['input', 'change'].forEach(kind => e.dispatchEvent(new Event(kind, {{bubbles: true}})))"
        f"))({field})"
    )


def press(page: Page, within: str, text: str) -> None:
    """The button of that text."""
    button = (
        f"[...document.querySelectorAll('{within} button')].find(b => b.innerText === '{text}')"
    )
    page.until(button)
    page.run(f"{button}.click()")


def tab_to(page: Page, script: str, most: int = 80) -> None:
    """Press Tab until `script` holds of the element with the focus, `e`."""
    for _ in range(most):
        page.press("Tab")
        if page.run(f"(e => !!({script}))(document.activeElement)"):
            return
    raise AssertionError(f"no Tab leads to {script}; the last was {active(page)!r}")


# -- what there is


def test_it_loads_without_a_complaint_and_without_a_request_to_others(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    page.until("document.querySelectorAll('.panel').length >= 9")
    assert page.troubles == []
    assert {url.split("/")[2] for url in page.urls if not url.startswith("data:")} == {
        server.admin_address
    }
    assert page.run("document.title") == "clipper"


@pytest.mark.usefixtures("load")
def test_figures_move_under_load(page: Page, server: clipper.ClipperServer) -> None:
    opened(page, server)
    tile = "document.querySelector('.tiles b').innerText"
    page.until(f"parseFloat({tile}) > 0")
    before = page.run(tile)
    page.until(f"{tile} !== {json.dumps(before)}")
    page.until("document.querySelectorAll('.u-wrap canvas').length >= 4")
    page.until_text("model_error")  # the reasons, and the model's last error
    page.until_text("clipper logs bad:1")
    page.until("document.querySelectorAll('.slowest > li').length > 0")
    assert page.troubles == []


@pytest.mark.usefixtures("load")
def test_a_page_that_is_opened_late_shows_the_past_also_as_a_table(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    page.until_text("of the last")
    page.click("#throughput button[aria-label$='as a table']")
    page.until("document.querySelectorAll('#throughput tbody tr').length >= 2")
    rows = page.run(
        "[...document.querySelectorAll('#throughput tbody tr')].map(r =>"
        " r.innerText.split('\\t').length)"
    )
    assert set(rows) == {5}  # time and four outcomes


@pytest.mark.usefixtures("load")
def test_pausing_holds_what_is_shown_and_the_rest_goes_on(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    press(page, "", "pause")
    page.until_text("paused")
    held = (
        "document.querySelector('#events').innerText + document.querySelector('.tiles').innerText"
    )
    before = page.run(held)
    seen = len(page.run("performance.getEntriesByType('resource')"))
    threading.Event().wait(2.2)  # two readings
    assert page.run(held) == before
    assert len(page.run("performance.getEntriesByType('resource')")) == seen
    press(page, "", "resume")
    page.until_text("live")


def test_a_query_by_hand_is_answered_and_its_feedback_counts(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    page.until(
        "[...document.querySelectorAll('#try select option')].some((one) => one.value === 'total')"
    )
    fill(page, "#try select", "total")
    page.until("document.querySelectorAll('#try .fields input').length === 3")
    for i, value in enumerate((1.5, 2, 3)):
        fill(page, f"#try .fields label:nth-child({i + 1}) input", str(value))
    page.click("#try button[type=submit]")
    page.until("document.querySelector('#try .output')?.innerText.trim() === '6.5'")
    page.until_text("sum:1")
    assert page.run("document.querySelector('#try .answer').getAttribute('aria-live')") == "polite"
    page.run("document.querySelector('#try .answer input').focus()")
    page.write("6.5")
    # Enter does nothing before the page has seen the text
    page.until("!document.querySelector('#try .answer button').disabled")
    page.press("Enter")
    page.until_text("Feedback recorded.")
    assert server.stats()["applications"]["total"]["answers"]["feedback"]["n"] >= 1


def test_how_right_a_model_becomes_is_drawn(page: Page, server: clipper.ClipperServer) -> None:
    opened(page, server)
    fill(page, ".pick select", "total")  # by itself it shows whom most have asked
    asks = server.app("total")
    for i in range(8):
        asks.feedback(asks.predict([i, 0.5, 9]).result(PATIENCE_S), label=i + 9.5)
    page.until("document.querySelector('#selection .plot canvas')")
    page.until(
        "/accuracy \\d/.test(document.querySelector('#selection .plot').getAttribute('aria-label'))"
    )
    assert page.troubles == []


def test_another_policy_is_evaluated_beside_the_running_one(page: Page, tmp_path: Path) -> None:
    with clipper.start(admin="127.0.0.1:0", state=str(tmp_path), **QUICK) as server:
        for name, model in (("whole", whole), ("nothing", nothing)):
            server.deploy(name, model, input="f64[1]")
        app = server.app("both", models=["whole", "nothing"], policy="ensemble", slo_ms=5000)
        opened(page, server)
        answers = [app.predict([i]).result(PATIENCE_S) for i in range(30)]
        app.feedback_many(answers, list(range(30)))
        page.until("document.querySelector('#selection .evaluation input')")
        fill(page, "#selection .evaluation input", "no_policy")
        page.click("#selection .evaluation button")
        page.until(
            "document.querySelector('#selection [role=alert]')?.innerText.includes('no_policy')"
        )
        fill(page, "#selection .evaluation input", "stacking")
        page.click("#selection .evaluation button")
        page.until("document.querySelectorAll('#selection .evaluation tbody tr').length === 2")
        page.until_text("ensemble (running)")
        where = f"http://{server.admin_address}/admin/applications/both/evaluation?policy=stacking"
        with urllib.request.urlopen(where + "&count=25") as reply:
            one = json.load(reply)
        assert (one["policy"], one["queries"]) == ("stacking", 25)
        assert one["dr"]["low"] <= one["dr"]["value"] <= one["dr"]["high"]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(where + "&count=30000")


def test_names_and_errors_are_text(page: Page, server: clipper.ClipperServer) -> None:
    server.app("broken").predict([9, 9, 9], salt=7).result(PATIENCE_S)
    opened(page, server)
    fill(page, "#try select", "broken")
    page.until("document.querySelector('#try select').value === 'broken'")
    page.click("#try button[type=submit]")
    # the default
    page.until(f"document.querySelector('#try .output')?.innerText.includes({json.dumps(SCRIPT)})")
    page.until_text("ValueError: " + SCRIPT[:40])  # the reason, here and among the slowest
    press(page, "#models", "logs")
    page.until("document.querySelector('.logs')")
    assert page.run("document.title") == "clipper"
    assert page.run("document.querySelectorAll('#app script, #app img').length") == 0
    assert page.troubles == []


@pytest.mark.usefixtures("load")
def test_what_is_chosen_is_in_the_address_and_panels_are_reached_by_links(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    fill(page, ".pick select", "total")
    page.until("location.search === '?application=total'")
    press(page, ".tools", "1 h")
    page.until("new URLSearchParams(location.search).get('time') === '1 h'")
    page.run("location.reload()")
    page.until("document.querySelector('.pick select')?.value === 'total'")
    page.until("document.querySelector('.tools [aria-pressed=true]').innerText === '1 h'")
    links = page.run("[...document.querySelectorAll('.jump a')].map((one) => one.hash.slice(1))")
    panels = page.run("[...document.querySelectorAll('.panel')].map((one) => one.id)")
    assert {"models", "events"} <= set(links) <= set(panels)
    fill(page, ".pick select", "all applications")
    page.until("!location.search.includes('application')")


def test_a_model_is_promoted_after_a_confirmation_and_the_history_names_the_user(
    page: Page,
) -> None:
    with clipper.start(admin="127.0.0.1:0", **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.deploy("sum", total, input="f64[3]", promote=False)
        opened(page, server)
        press(page, "#models", "promote")
        page.until_text("Make sum:2 the latest?")
        assert server.catalog.latest("sum").version == 1
        page.until_text("No application uses it by its name alone.")
        press(page, "#models .confirm", "promote")
        page.until_text("sum:2 is now the latest version of sum")
        page.until_text("by dashboard")
        assert server.catalog.latest("sum").version == 2


# -- by keyboard, on a small screen, in the dark, for a reader of screens


def test_everything_is_reached_by_keyboard(page: Page, server: clipper.ClipperServer) -> None:
    opened(page, server)
    page.press("Tab")
    assert active(page) == "Skip to the panels"
    assert page.run("getComputedStyle(document.activeElement).top") == "8px"  # and it shows
    page.press("Enter")
    page.until("location.hash === '#main'")
    page.until("document.querySelector('#try input[type=number]')")
    tab_to(page, "e.closest('#try') && e.type === 'number'")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab_to(page, "e.closest('#try') && e.type === 'submit'")
    page.press("Enter")
    page.until("document.querySelector('#try .output')")
    tab_to(page, "e.closest('#configuration') && e.innerText === 'show'")
    page.press(" ")
    page.until(
        "[...document.querySelectorAll('#configuration code')].some(e => e.innerText ==="
        " 'http.admin')"
    )


@pytest.mark.parametrize("width", [375, 800, 1280])
def test_no_screen_scrolls_sideways(page: Page, server: clipper.ClipperServer, width: int) -> None:
    page.size(width, 700)
    opened(page, server)
    page.until("document.querySelectorAll('.u-wrap').length >= 3")
    press(page, "#models", "logs")
    page.until("document.querySelector('.logs')")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.documentElement.clientWidth") == width


def test_dark_follows_the_system_and_the_button(page: Page, server: clipper.ClipperServer) -> None:
    def brightness() -> int:
        return sum(
            page.run(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0,"
                " 3).map(Number)"
            )
        )

    page.prefer("light")
    opened(page, server)
    assert brightness() > 600
    page.prefer("dark")
    page.until("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 60")
    for name, dark in (("light", False), ("dark", True), ("auto", True)):
        page.click("button.theme")
        page.until(f"document.documentElement.dataset.theme === '{name}'")
        assert (brightness() < 200) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.usefixtures("load")
def test_axe_finds_nothing(page: Page, server: clipper.ClipperServer, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: python tools/fetch.py npm")
    page.prefer(scheme)
    opened(page, server)
    page.until("document.querySelectorAll('.slowest > li').length > 0")
    page.run("document.querySelector('#configuration button').click()")
    page.run(AXE.read_text() + "; true")
    shown = "[v.id, v.help, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))]"
    assert page.run(f"axe.run().then(r => r.violations.map(v => {shown}))") == []


def test_the_page_does_not_jump_while_figures_come(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    page.run(
        "window.shifts = 0; new PerformanceObserver(l => l.getEntries().forEach(e => { shifts +="
        " e.value })).observe({type: 'layout-shift', buffered: true}); true"
    )
    page.until("performance.now() > 4000")
    assert page.run("shifts") < 0.02


# -- when things go wrong


def test_a_token_is_requested_kept_in_the_tab_and_never_in_a_url(page: Page) -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "open sesame"}, **QUICK) as server:
        page.open(f"http://{server.admin_address}/dashboard")
        page.until("document.activeElement.id === 'token'")
        page.write("wrong")
        page.press("Enter")
        page.until_text("does not know this token")
        assert page.run("sessionStorage.getItem('clipper-token')") is None
        page.until("document.activeElement.id === 'token'")
        page.run("document.querySelector('#token').select()")
        page.write("open sesame")
        page.press("Enter")
        page.until("document.querySelector('.tiles')")
        page.open(f"http://{server.admin_address}/dashboard")  # the tab remembers
        page.until("document.querySelector('.tiles')")
        press(page, "", "log out")
        page.until("document.querySelector('#token')")
        assert not [url for url in page.urls if "sesame" in url]
        assert page.run("localStorage.length") <= 1  # the colours


def test_a_server_that_comes_back_is_found_again(page: Page) -> None:
    # a port that no connection of another process is given meanwhile
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with clipper.start(admin=address, **QUICK) as first:
        opened(page, first)
        page.until_text("live")
    page.until_text("Disconnected")
    page.until_text("trying to reconnect")
    with clipper.start(admin=address, **QUICK) as second:
        second.deploy("late", total, input="f64[3]")
        page.until_text("late:1")
        page.until("!document.body.innerText.includes('Disconnected')")


SILENCE = """
window.asked = [];
window.fetch = (path, options) => new Promise((_, fail) => {
  asked.push(path);
  options.signal?.addEventListener("abort", () => fail(options.signal.reason));
});
"""


def test_a_request_that_is_not_answered_fails_by_its_limit(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    page.run(
        SILENCE + "const abort = AbortSignal.abort(new DOMException('', 'TimeoutError'));"
        "AbortSignal.timeout = () => { const control = new AbortController();"
        " setTimeout(() => control.abort(abort.reason)); return control.signal; };"
    )
    page.until("document.querySelectorAll('#try .fields input').length === 3")
    page.click("#try button[type=submit]")
    page.until_text("The server has not answered within 60 s.")
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.until("!document.querySelector('#try button[type=submit]').disabled")
    page.click("#try button[type=submit]")
    page.until_text("The server cannot be reached.")
    assert "Failed to fetch" not in page.text()


def test_figures_go_on_after_the_clock_of_the_server_was_set_back(
    page: Page, server: clipper.ClipperServer
) -> None:
    opened(page, server)
    page.until("clipperFeed.fine.length > 1")
    times = page.run(
        "(() => { const row = clipperFeed.fine.at(-1);"
        " clipperFeed.take('row', JSON.stringify({ ...row, t: row.t - 3600 }), '1');"
        " return [row.t, ...clipperFeed.fine.map((one) => one.t)]; })()"
    )
    assert times == [times[0], times[0] - 3600]


def test_a_token_has_any_letters(page: Page) -> None:
    token = "grüße 日本"
    with clipper.start(http={"admin": "127.0.0.1:0", "token": token}, **QUICK) as server:
        assert clipper.connect(f"http://{server.admin_address}", token).about()["version"]
        page.open(f"http://{server.admin_address}/dashboard")
        page.until("document.activeElement.id === 'token'")
        page.write(token)
        page.press("Enter")
        page.until("document.querySelector('.tiles')")


def test_who_logs_out_is_not_connected_again(page: Page) -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "open sesame"}, **QUICK) as server:
        page.open(f"http://{server.admin_address}/dashboard")
        page.until("document.activeElement.id === 'token'")
        page.write("open sesame")
        page.press("Enter")
        page.until("document.querySelector('.tiles')")
        page.run(
            "window.states = []; const become = clipperFeed.become;"
            "clipperFeed.become = function (state, ...more) {"
            " states.push(state); return become.call(this, state, ...more); }"
        )
        press(page, "", "log out")
        page.until("document.querySelector('#token') && states.includes('login')")
        # what was stopped has ended
        page.run("fetch('/dashboard').then((answer) => answer.status)")
        after = page.run("states.slice(states.indexOf('login'))")
        assert after == ["login"]


def test_an_empty_server_shows_the_next_step(page: Page) -> None:
    with clipper.start(admin="127.0.0.1:0", **QUICK) as server:
        opened(page, server)
        page.until_text("clipper deploy NAME")
        page.until_text("clipper app set NAME")
        assert page.troubles == []


def test_an_hour_takes_no_more_memory_than_a_minute(
    page: Page, server: clipper.ClipperServer
) -> None:
    """The memory of the page is bounded: rows of many hours go through its own code."""
    opened(page, server)
    held = page.run(
        "import('/dashboard/app.js').then(() => window.clipperFeed).then(f => { const last ="
        " f.fine.at(-1); let t = last.t; for (let i = 0; i < 5000; i++) { t += 1; f.take('row',"
        " JSON.stringify({...last, t}), '');  if (i % 10 === 0) f.take('coarse',"
        " JSON.stringify([{...last, t, dt: 10}]), ''); } return [f.fine.length, f.coarse.length] })"
    )
    assert held == [310, 365]


def test_the_page_of_the_interface_shows_code_as_code(
    page: Page, server: clipper.ClipperServer
) -> None:
    page.open(f"http://{server.admin_address}/docs")
    page.until("document.querySelector('#about code')")
    assert page.run("document.querySelector('#about code').innerText") == "error"
    assert "`" not in page.text()
