"""The pictures of docs/dashboard.md, docs/mesh.md and docs/params.md, taken of a live server under
load: `make screenshots`.

Real digits, models that learn whom to ask, a version that is rolled out, a canary, a container that
is killed now and then.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import clipper
from clipper.frontend.http.messages import to_json
from clipper.params import Client, TableSpec
from clipper_demo import digits

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.dashboard.browser import Chromium, Page  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WARM_S = 100.0
COLORS = 256
SMALL_HEIGHT = 1500
ASKED = {"digits": 45.0, "who": 60.0, "blend": 20.0}  # applications, queries a second


def main(warm_s: float) -> None:
    IMAGES.mkdir(exist_ok=True)
    scans = digits.load()
    with clipper.start(admin="127.0.0.1:0", restarts_max=100) as server, Chromium() as browser:
        deploy(server, scans)
        ending = threading.Event()
        asking = [
            threading.Thread(target=ask, args=(server, scans, name, rate, ending))
            for name, rate in ASKED.items()
        ]
        for thread in asking:
            thread.start()
        time.sleep(warm_s / 3)
        server.manage.by("ann@example").rollout(
            "digits", "svm:2", canary="10%", hold="40s", guard="p99<200ms, error<5%"
        )
        time.sleep(warm_s / 3)
        kill_one(server, "forest:1")
        time.sleep(warm_s / 3)
        url = f"http://{server.admin_address}/dashboard"
        take(browser, url, "dashboard-light", "light", 1440, scans)
        take(browser, url, "dashboard-dark", "dark", 1440, scans)
        take(browser, url, "dashboard-small", "light", 375, scans)
        ending.set()
        for thread in asking:
            thread.join()
        take_mesh(browser)
        take_params(browser, warm_s)


def take_mesh(browser: Chromium) -> None:
    """The panel of a mesh of three nodes, with more models than fit."""
    folder = Path(tempfile.mkdtemp(prefix="dashboard-mesh-"))
    (folder / "models.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    chance = np.random.default_rng(1)
    with contextlib.ExitStack() as nodes:
        state, servers = f"sqlite:{folder / 'mesh.db'}", []
        for name, label in (("a", "gpu"), ("b", ""), ("c", "")):
            mesh = {
                "enabled": True,
                "name": name,
                "capacity_mib": 1,
                "labels": [label] if label else [],
                "zone": f"z-{name}",
            }
            where = {"state": state, "folder": str(folder / name), "admin": "127.0.0.1:0"}
            servers.append(nodes.enter_context(clipper.start(mesh=mesh, **where)))
        for i in range(120):
            servers[0].register_model(f"churn-{i:03}", "models.py:total", "python", str(folder))
        for n in range(400):
            model = f"churn-{min(int(chance.pareto(0.7)), 119):03}"
            servers[n % 3].predict(model, [1.0, 2.0, 3.0], slo_ms=5000).result(10)
        time.sleep(2)
        page = browser.page(1280, 900)
        page.prefer("light")
        page.open(f"http://{servers[0].admin_address}/dashboard")
        page.until("document.querySelectorAll('#mesh .held tbody tr').length === 50")
        page.click("#mesh .held .actions button")
        page.until("document.querySelector('#mesh .why')")
        others = ".panel:not(#mesh), .tiles, .empty, main > .pick"
        page.run(
            f"document.querySelectorAll('{others}').forEach(e => {{ e.style.display = 'none' }})"
        )
        page.size(
            1280,
            int(page.run("document.querySelector('#mesh').getBoundingClientRect().bottom")) + 20,
        )
        keep(page, "dashboard-mesh")


def take_params(browser: Chromium, warm_s: float) -> None:
    """The panel of shards of parameters, one of which is asked for more than the others."""
    folder = Path(tempfile.mkdtemp(prefix="dashboard-params-"))
    file, ending = folder / "clipper.toml", threading.Event()
    file.write_text(
        f'[server]\nparams = "{folder}"\n[params]\nshards = 3\nreplicas = 1\nsnapshot_s = 20\n'
    )
    with clipper.start(file, admin="127.0.0.1:0") as server:
        thread = threading.Thread(target=train, args=(folder, ending))
        thread.start()
        time.sleep(warm_s / 2)
        page = browser.page(1280, 900)
        page.prefer("light")
        page.open(f"http://{server.admin_address}/dashboard")
        page.until("document.querySelectorAll('#params .shards tbody tr').length === 3")
        others = ".panel:not(#params), .tiles, .empty, main > .pick"
        page.run(
            f"document.querySelectorAll('{others}').forEach(e => {{ e.style.display = 'none' }})"
        )
        page.size(
            1280,
            int(page.run("document.querySelector('#params').getBoundingClientRect().bottom")) + 20,
        )
        time.sleep(2)
        keep(page, "dashboard-params")
        ending.set()
        thread.join()


def train(folder: Path, ending: threading.Event) -> None:
    """Two workers that take turns; a table that has no room for all words."""
    chance = np.random.default_rng(1)
    one, other = Client(folder), Client(folder)
    one.create(TableSpec("users", 16))
    one.create(TableSpec("words", 8, rows_max=3000, evicts=True))
    with one, other:
        while not ending.wait(0.02):
            ids = np.concatenate(
                [chance.integers(0, 20_000, 60), 3 * chance.integers(0, 500, 60) + 1]
            )
            one.pull("users", ids)
            one.push("users", ids, chance.normal(size=(120, 16)), versioned=True)
            if chance.random() < 0.3:
                other.pull("words", [1])
            words = chance.zipf(1.3, 60) % 100_000
            other.push("words", words, chance.normal(size=(60, 8)), versioned=True)


def deploy(server: clipper.ClipperServer, scans: digits.Digits) -> None:
    folder = Path(tempfile.mkdtemp(prefix="dashboard-pictures-"))
    spoiler = digits.Spoiler(folder)
    for name, replicas in digits.REPLICAS.items():
        server.deploy(
            name, digits.spoilable(digits.train(name, scans), spoiler.flag(name)), replicas=replicas
        )
    server.deploy(
        "svm", digits.spoilable(digits.train("svm", scans), spoiler.flag("svm")), promote=False
    )
    server.deploy("broken", unready, input="f64[64]")
    good, every = list(digits.GOOD), list(digits.REPLICAS)
    server.app("digits", models=good, slo_ms=100, default=-1)
    server.app("who", models=every, slo_ms=100, default=-1, policy="exp3")
    server.app(
        "blend",
        models=[*every, "svm:2"],
        slo_ms=150,
        default=-1,
        policy="stacking",
        roles={"svm:2": "canary"},
    )
    server.app("new", models=["broken"], slo_ms=100, default=0)


def unready(rows: Any) -> Any:
    raise KeyError("column 'age' is missing")


def ask(
    server: clipper.ClipperServer,
    scans: digits.Digits,
    name: str,
    rate: float,
    ending: threading.Event,
) -> None:
    """Queries at random times, feedback for half of them; when late, not more than there is time
    for."""
    chance = np.random.default_rng(len(name))
    app = server.app(name)
    while not ending.wait(chance.exponential(1 / rate)):
        i = int(chance.integers(len(scans.held_x) if chance.random() < 0.75 else 40))
        answer = app.predict(scans.held_x[i], salt=int(chance.integers(3))).result(10)
        if chance.random() < 0.5 and name != "digits" and not answer.is_default:
            app.feedback(answer, label=int(scans.held_y[i]))
        if chance.random() < 0.01:
            server.app("new").predict(scans.held_x[i]).result(10)


def kill_one(server: clipper.ClipperServer, model: str) -> None:
    os.kill(server.stats()["models"][model]["replicas"][0]["pid"], signal.SIGKILL)


def take(
    browser: Chromium, url: str, name: str, scheme: str, width: int, scans: digits.Digits
) -> None:
    page = browser.page(width, 900)
    page.prefer(scheme)
    page.open(url)
    page.until("document.querySelectorAll('.u-wrap').length >= 4")
    choose(page, "#try select", "digits")
    page.until(
        "document.querySelector('#try select').value === 'digits' && "
        "document.querySelector('#try textarea')"
    )
    row = to_json([float(value) for value in scans.held_x[7]]).decode()
    choose(page, "#try textarea", row, "input")
    time.sleep(0.5)
    page.click("#try button[type=submit]")
    page.until("document.querySelector('#try .output')")
    choose(page, ".pick select", "who") if scheme == "light" and width > 500 else None
    height = int(page.run("document.documentElement.scrollHeight"))
    page.size(
        width, height if width > 500 else min(height, SMALL_HEIGHT), 1.0 if width > 500 else 1.5
    )
    time.sleep(1.5)
    keep(page, name)


def keep(page: Page, name: str) -> None:
    path = IMAGES / f"{name}.png"
    page.picture(path)
    Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size >> 10} KiB")
    page.close()


def choose(page: Page, selector: str, value: str, kind: str = "change") -> None:
    page.run(
        f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{kind}', {{bubbles: true}})) }})"
        f"(document.querySelector('{selector}'))"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else WARM_S)
