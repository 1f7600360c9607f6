"""Metrics over HTTP: real sockets, a real container, and a real Prometheus where there is one."""

import contextlib
import http.client
import http.server
import itertools
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest

import clipper
from clipper.cli import main
from clipper.deploy.kubernetes.helm import CHART
from clipper.metrics import (
    FAMILIES,
    OTHER,
    GrpcCounts,
    MeshCounts,
    MeshMetrics,
    ParamsMetrics,
    Samples,
    prometheus,
)
from clipper.metrics.grafana import dashboard
from clipper.metrics.stats import MeshStats
from tests.frontend.conftest import PATIENCE_S, QUICK, Ask, ask, total, warm_workers
from tests.memory_container import wait_until
from tests.processes import Program, free_ports
from tests.threads import join

ROOT = Path(__file__).resolve().parents[2]
PREDICT = "/api/total/predict"
ALERTS = files("clipper.metrics") / "alerts.yml"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: python tools/fetch.py prometheus")
    return found


LINE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-z_]+)="([^"\\]*)"')


def series(text: bytes) -> Series:
    """Return the value of each series of ours. The lines are read strictly, and a series may occur
    once."""
    found: Series = {}
    for line in text.decode().splitlines():
        if line.startswith("# "):
            continue
        match = LINE.fullmatch(line)
        assert match, line
        labels = tuple(LABEL.findall(match[2] or ""))
        assert (match[1], labels) not in found, line
        found[match[1], labels] = float(match[3])
    return found


def scrape(server: clipper.ClipperServer) -> Series:
    return series(ask(server.admin_address, "GET", "/metrics").body)


def summed(found: Series, name: str, **labels: str) -> float:
    return sum(
        value
        for (one, pairs), value in found.items()
        if one == name and labels.items() <= dict(pairs).items()
    )


def ended(server: clipper.ClipperServer) -> Series:
    """Wait until every task has ended and every answer is counted; return a scrape."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = scrape(server)
        at_rest = (
            found["clipper_tasks_issued_total", ()] == found["clipper_tasks_answered_total", ()]
        )
        if at_rest and summed(found, "clipper_queries_total") == summed(
            found, "clipper_answers_total"
        ):
            return found
        assert time.monotonic() < until, "the server does not come to rest"


# -- what a scrape says


def test_it_is_the_text_of_prometheus(manage: Ask) -> None:
    reply = manage("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert series(reply.body)
    heads = [line for line in reply.body.decode().splitlines() if line.startswith("# ")]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize(
    ("accept", "open"),
    [
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
            True,
        ),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("text/plain", False),
        ("*/*", False),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=x", False),
    ],
)
def test_openmetrics_for_clients_that_accept_it(manage: Ask, accept: str, open: bool) -> None:
    reply = manage("GET", "/metrics", headers={"Accept": accept})
    assert ("openmetrics" in reply.headers["content-type"]) == open
    assert reply.body.endswith(b"# EOF\n") == open


def test_influx_by_its_name(manage: Ask) -> None:
    reply = manage("GET", "/metrics?format=influx")
    assert re.search(
        rb"^clipper_queries_total,application=total value=\d+\.0 \d{19}$", reply.body, re.M
    )
    wrong = manage("GET", "/metrics?format=inflox")
    assert wrong.status == 400
    assert "did you mean 'influx'" in wrong.json["error"]


def test_the_query_listener_has_none_unless_it_is_set(query: Ask) -> None:
    assert query("GET", "/metrics").status == 404


def test_pages_of_others_get_none(manage: Ask) -> None:
    assert manage("GET", "/metrics", headers={"Origin": "http://evil.example"}).status == 403


def test_requests_are_counted_by_route_and_code(server: clipper.ClipperServer, query: Ask) -> None:
    name = "clipper_http_requests_total"
    before = scrape(server)
    query("POST", PREDICT, {"input": [1, 2, 3]})
    query("POST", PREDICT, b"no JSON")
    for path in ("/none/of/ours", "/other/paths/of/strangers"):
        query("GET", path)
    after = scrape(server)

    def more(**labels: str) -> float:
        return summed(after, name, **labels) - summed(before, name, **labels)

    assert more(listener="query", route="/api/{}/predict", code="200") == 1
    assert more(listener="query", route="/api/{}/predict", code="400") == 1
    assert more(listener="query", route=OTHER, method=OTHER, code="404") == 2
    assert more(listener="admin", route="/metrics", method="GET", code="200") == 1
    assert not [labels for one, labels in after if "strangers" in str(labels)]
    took = "clipper_http_request_duration_seconds_count"
    assert summed(after, took) == summed(after, name)


def test_open_connections_are_counted_by_listener(server: clipper.ClipperServer) -> None:
    def open_now() -> float:
        return summed(scrape(server), "clipper_http_connections", listener="query")

    wait_until(lambda: open_now() == 0, "connections of earlier tests are closed")
    host, _, port = (server.http_address or "").rpartition(":")
    for count in (1, 2):
        lines = [socket.create_connection((host, int(port))) for _ in range(count)]
        wait_until(lambda count=count: open_now() == count)  # type: ignore[misc]
        for line in lines:
            line.close()
        wait_until(lambda: open_now() == 0)


def test_the_trace_of_a_caller_goes_on(query: Ask, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "clipper.requests")
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

    def is_logged() -> bool:
        query("POST", PREDICT, {"input": [1, 2, 3]}, {"traceparent": f"00-{trace}-{span}-01"})
        return bool(caplog.records)

    wait_until(is_logged, "the core is told of another level of the log")
    caplog.clear()
    for flags in ("01", "00"):
        reply = query(
            "POST", PREDICT, {"input": [1, 2, 3]}, {"traceparent": f"00-{trace}-{span}-{flags}"}
        )
        version, same, ours, sampled = reply.headers["traceparent"].split("-")
        assert (version, same, sampled) == ("00", trace, flags)
        assert ours != span
    # only the caller's choice is told
    (line,) = [record for record in caplog.records if record.name == "clipper.requests"]
    about = vars(line)
    assert (about["trace_id"], about["parent_id"], about["application"]) == (trace, span, "total")
    assert (about["status"], about["route"]) == (200, "/api/{}/predict")
    assert (
        "traceparent"
        not in query("POST", PREDICT, {"input": [1, 2, 3]}, {"traceparent": "nonsense"}).headers
    )
    assert "traceparent" not in query("POST", PREDICT, {"input": [1, 2, 3]}).headers


# -- under load


def test_counters_only_grow_and_add_up(server: clipper.ClipperServer) -> None:
    """Scrape while queries run: each scrape is consistent."""
    stop, failed = threading.Event(), []

    def load(seed: int) -> None:
        line = http.client.HTTPConnection(server.http_address, timeout=PATIENCE_S)
        n = 0
        while not stop.is_set():
            n += 1
            line.request("POST", PREDICT, json.dumps({"input": [seed, n % 50, 0]}))
            response = line.getresponse()
            response.read()
            if response.status != 200:
                failed.append(response.status)
        line.close()

    before = ended(server)
    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        each = [before]
        enough, until = summed(before, "clipper_queries_total") + 200, time.monotonic() + PATIENCE_S
        while len(each) < 12 or (
            summed(each[-1], "clipper_queries_total") < enough and time.monotonic() < until
        ):
            each.append(scrape(server))
    finally:
        stop.set()
        for thread in threads:
            join(thread)
    each.append(ended(server))
    assert not failed
    growing = re.compile(r".*(_total|_bucket|_sum|_count)")
    for earlier, later in itertools.pairwise(each):
        assert earlier.keys() <= later.keys(), earlier.keys() - later.keys()
        shrunk = [
            key
            for key, value in earlier.items()
            if growing.fullmatch(key[0]) and later[key] < value
        ]
        assert not shrunk
    last = each[-1]
    assert summed(last, "clipper_queries_total") >= enough
    assert last["clipper_tasks_issued_total", ()] == summed(last, "clipper_tasks_total")
    for app in ("total", "learns"):
        answers = summed(last, "clipper_answers_total", application=app)
        assert summed(last, "clipper_queries_total", application=app) == answers
        assert summed(last, "clipper_answer_duration_seconds_count", application=app) == answers
    ok = summed(last, "clipper_tasks_total", outcome="ok")
    assert summed(last, "clipper_task_duration_seconds_count") == ok
    assert (
        summed(last, "clipper_evaluated_rows_total") + summed(last, "clipper_cache_joined_total")
        >= ok
    )
    for (name, labels), value in last.items():
        if name.endswith("_count") and name.startswith("clipper_"):
            bucket = name.replace("_count", "_bucket")
            buckets = [
                count
                for (other, pairs), count in last.items()
                if other == bucket and pairs[:-1] == labels
            ]
            assert buckets == sorted(buckets)
            assert last[bucket, (*labels, ("le", "+Inf"))] == buckets[-1] == value


def test_feedback_shares_and_containers_have_metrics(server: clipper.ClipperServer) -> None:
    app = server.app("learns")
    for i in range(5):
        answer = app.predict([float(i), 1.0, 2.0]).result(PATIENCE_S)
        app.feedback(answer, label=answer.output)
    found = scrape(server)
    here, model = (("application", "learns"),), (("model", "sum"), ("version", "1"))
    assert found["clipper_feedback_total", here] >= 5
    assert found["clipper_feedback_right_total", here] == found["clipper_feedback_total", here]
    of_model = (*here, *model)
    right = found["clipper_model_feedback_right_total", of_model]
    assert right == found["clipper_model_feedback_total", of_model] >= 5
    assert found["clipper_selection_share", (*here, *model)] == 1.0
    assert found["clipper_slo_seconds", here] == 5.0
    assert (found["clipper_replicas_wanted", model], found["clipper_replicas_ready", model]) == (
        1,
        1,
    )
    assert found["clipper_container_restarts_total", (*model, ("replica", "0"))] == 0
    assert found["clipper_container_memory_bytes", model] > 1e6
    assert found["process_resident_memory_bytes", ()] > 1e7
    assert found["process_open_fds", ()] > 5
    assert abs(found["process_start_time_seconds", ()] - Path("/proc/self").stat().st_mtime) < 3600
    assert summed(found, "clipper_build_info", version=clipper.__version__) == 1


# -- names without end


@pytest.fixture
def small() -> Iterator[clipper.ClipperServer]:
    with clipper.start(
        http="127.0.0.1:0", admin="127.0.0.1:0", metrics_names_max=2, metrics=True, **QUICK
    ) as started:
        started.deploy("sum", total, input="f64[3]")
        for i in range(5):
            started.app(f"app{i}", models=["sum"], slo_ms=5000)
        warm_workers(started)
        yield started


def test_names_beyond_the_limit_share_one(small: clipper.ClipperServer) -> None:
    for i in range(5):
        for _ in range(i + 1):
            small.app(f"app{i}").predict([1.0, 2.0, i]).result(PATIENCE_S)
    # set: the query listener has them too
    found = series(ask(small.http_address, "GET", "/metrics").body)
    apps = {
        dict(labels)["application"] for name, labels in found if name == "clipper_queries_total"
    }
    assert len(apps) == 3
    assert OTHER in apps
    assert summed(found, "clipper_queries_total") == 15
    assert summed(found, "clipper_answer_duration_seconds_count") == 15
    assert not [
        labels for name, labels in found if name == "clipper_slo_seconds" and OTHER in str(labels)
    ]


# -- dashboard and alerts

METRIC = re.compile(r"\b((?:clipper|process)_[a-z_]+)\b")


def expressions() -> list[str]:
    shown: dict[str, Any] = dashboard()
    panels = [target["expr"] for panel in shown["panels"] for target in panel.get("targets", ())]
    choices = [choice["query"] for choice in shown["templating"]["list"]]
    return [*panels, *choices, *re.findall(r"expr: (.*(?:\n {10}.*)*)", ALERTS.read_text())]


def of_grpc() -> Samples:
    counts, samples = GrpcCounts(), Samples()
    counts.method("s", "m", False).count("OK", 0)
    counts.method("s", "stream", True).count("OK", 0)
    counts.collect(samples)
    return samples


def of_mesh() -> Samples:
    counts, samples = MeshCounts(), Samples()
    counts.loaded(80.0, 20.0, 60.0, 3 << 20)
    counts.failed("host")
    counts.unloaded(5000.0)
    counts.count_queries(3, 1)
    here = {
        "capacity_bytes": 100,
        "used_bytes": 25,
        "models_loaded": 1,
        "lru_ms": 7000,
        "loading": 0,
        "queued": 2,
    }
    there = {"models_registered": 9, "vmodels": 1, "instances": 2, "leader": True, "stale_s": 0.5}
    there |= {"loaded_somewhere": 4, "failing": 1}
    stats = cast(MeshStats, {**counts.stats(), **here, **there})
    MeshMetrics(lambda: stats).collect(samples)
    return samples


def of_params() -> Samples:
    """Return metrics of made-up shards; tests/params/test_stats.py has those of real ones."""
    added, removed = (
        ("rows", "nbytes", "pulled", "missed", "applied", "made"),
        ("unadmitted", "refused", "evicted", "expired"),
    )
    table = dict.fromkeys((*added, *removed), 1)
    counts = dict.fromkeys(
        ("epoch", "version", "connections", "shared_bytes", "pulls", "pushes", "repeated"), 1
    )
    whole = dict.fromkeys(
        ("shard", "ready", "exposed", "nbytes", "resident_bytes", "variables", "model_pushes"), 1
    )
    snapshots = {"taken": 1, "failed": 0, "at_us": 1, "nbytes": 9, "seconds": 0.5}
    more = {
        "recovery": {"seconds": 0.5},
        "refused": {"full": 1},
        "lags": {"buckets": [[2, 1]], "sum": 2},
        "snapshots": snapshots,
        "log": {"records": 1, "pushes": 2, "nbytes": 9},
    }
    copies = [{"shard": 2, "whole": True, "behind": 3, "behind_s": 0.5}]
    samples = Samples()
    ParamsMetrics(
        lambda: [{**whole, **more, "server": counts, "tables": {"t": table}, "followers": copies}]
    ).collect(samples)
    return samples


def test_the_mesh_has_its_metrics_also_under_the_names_of_model_mesh() -> None:
    found = {
        name: value
        for (name, labels), value in series(prometheus(of_mesh(), old_names=True)).items()
        if not labels
    }
    assert found["clipper_mesh_hit_ratio"] == 0.75
    assert (
        found["clipper_mesh_load_wait_seconds_sum"],
        found["modelmesh_cache_miss_milliseconds_sum"],
    ) == (0.08, 80.0)
    assert found["modelmesh_loadmodel_milliseconds_sum"] == 60.0
    assert found["modelmesh_loading_queue_delay_milliseconds_sum"] == 20.0
    assert (
        found["clipper_mesh_eviction_age_seconds_sum"],
        found["modelmesh_age_at_eviction_milliseconds_sum"],
    ) == (5.0, 5000.0)
    assert (found["modelmesh_instance_used_bps"], found["modelmesh_loadmodel_failure"]) == (2500, 1)
    assert (found["clipper_mesh_models_registered"], found["modelmesh_models_managed_total"]) == (
        9,
        9,
    )
    assert found["modelmesh_instance_lru_seconds"] == 7.0
    assert found["clipper_mesh_lru_age_seconds"] > 1e9
    assert {name for name in FAMILIES if name.startswith(("clipper_mesh", "modelmesh"))} == {
        family.name for family, _ in of_mesh()
    }
    assert not any(name.startswith("modelmesh") for name, _ in series(prometheus(of_mesh())))
    only_here = Samples()
    stats = cast(MeshStats, {"models_registered": 9, "leader": False, "lru_ms": 0})
    MeshMetrics(lambda: stats).collect(only_here)
    assert only_here.get("modelmesh_models_managed_total") is None, "only the leader reports it"
    assert only_here.get("clipper_mesh_lru_age_seconds") == 0.0


def test_dashboard_and_alerts_use_existing_metrics(server: clipper.ClipperServer) -> None:
    app = server.app("learns")
    app.feedback(app.predict([1.0, 1.0, 2.0]).result(PATIENCE_S), label=4.0)
    others = (
        name for made in (of_grpc(), of_mesh(), of_params()) for name, _ in series(prometheus(made))
    )
    there = {name for name, _ in scrape(server)} | {*others}
    labels_of = {name: family.labels for name, family in FAMILIES.items()}
    named = 0
    for expression in expressions():
        for name in METRIC.findall(expression):
            named += 1
            assert name in there, f"{name} of {expression}"
        family = re.sub(r"_(bucket|sum|count)$", "", METRIC.findall(expression)[0])
        for label in re.findall(r"(\w+)=~?\"", expression):
            assert label in labels_of[family], f"{label} of {expression}"
    assert named > 40


def test_the_dashboard_can_be_imported() -> None:
    whole = json.loads(json.dumps(dashboard()))
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    boxes = [tuple(panel["gridPos"][key] for key in "xywh") for panel in whole["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in boxes for i in range(w) for j in range(h)]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_the_verbs_print_them(capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", "grafana"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == dashboard()
    main(["export", "alerts"], standalone_mode=False)
    assert capsys.readouterr().out == ALERTS.read_text()


# -- Prometheus itself


def test_promtool_finds_nothing(manage: Ask, tmp_path: Path) -> None:
    promtool = tool("promtool")
    text = manage("GET", "/metrics").body
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    rules = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "alerts.yml")],
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert "SUCCESS: 19 rules found" in rules.stdout, rules.stderr


class Prometheus:
    """A real Prometheus that scrapes once a second and adds a label as an operator does."""

    def __init__(self, folder: Path, *addresses: str) -> None:
        (folder / "alerts.yml").write_text(ALERTS.read_text())
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(folder / "alerts.yml")],
            "scrape_configs": [
                {
                    "job_name": "clipper",
                    "static_configs": [
                        {"targets": [one], "labels": {"namespace": "prod"}} for one in addresses
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._program = Program(
            tool("prometheus"),
            f"--config.file={self._folder}/prometheus.yml",
            f"--storage.tsdb.path={self._folder}/data",
            f"--web.listen-address={self.address}",
            "--log.level=error",
            environment={"GOMAXPROCS": "1"},
        )

    def get(self, path: str) -> Any:
        """Return the answer of its API; None while it starts."""
        if not self._program.lives:  # somebody else took the port
            self._start()
        try:
            reply = ask(self.address, "GET", path)
        except OSError:
            return None
        return reply.json["data"] if reply.status == 200 else None

    def value(self, expression: str) -> float | None:
        found = self.get(f"/api/v1/query?query={urllib.parse.quote(expression)}")
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def health(self) -> tuple[str, str]:
        """Return the health of its one target, by the latest scrape."""
        found = self.get("/api/v1/targets") or {"activeTargets": ()}
        return next(
            ((one["health"], one["lastError"]) for one in found["activeTargets"]), ("", "no target")
        )

    def stop(self) -> None:
        self._program.stop()


@contextlib.contextmanager
def page_of(*samples: Samples) -> Iterator[str]:
    """Serve metrics of what this server has none of; return the address."""
    text = b"".join(prometheus(one) for one in samples)

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{page.server_port}"
        finally:
            page.shutdown()
            join(thread)


def without_bounds(expression: str) -> str:
    """Return the values that an expression compares, also where nothing is wrong, or new."""
    found = " ".join(expression.removeprefix(">-").split())
    for name, value in (("$__rate_interval", "5s"), ("$application", ".+"), ("$model", ".+")):
        found = found.replace(name, value)
    found = found.replace('"5.."', '"..."').replace('!="ok"', '!=""')  # what has not happened
    found = re.sub(r" (>|<|==) (?!bool )", r" \1 bool ", found).replace(" offset 1d", "")
    found = re.sub(r"label_values\((\w+), (\w+)\)", r'count by (\2) (\1{\2!=""})', found)
    return re.sub(r"absent\((\w+)\)", r"\1", found)


def adapted(namespace: str, model: str) -> Iterator[str]:
    """Yield the queries of what scales models and nodes, of the chart. Of prometheus-adapter: which
    series there are, and the metrics of an autoscaler with the label `model`."""
    yaml = pytest.importorskip("yaml", reason="python tools/fetch.py clients")
    matchers = f'namespace="{namespace}",model="{model}"'
    for query in re.findall("query: '(.*)'", (CHART / "templates/models.yaml").read_text()):
        if "DCGM" not in query:
            yield query.replace("{{ $of }}", f"{{{matchers}}}")
    rules = yaml.safe_load((CHART / "files/prometheus-adapter.yaml").read_text())["rules"]
    for rule in rules["external"]:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["name"]["as"])
        yield query.replace("<<.LabelMatchers>>", matchers)
        yield f"count({rule['seriesQuery']})"


@pytest.mark.slow
def test_each_expression_has_data_of_a_real_prometheus(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    """Expressions of the dashboard, of the alerts, and of what scales models and nodes."""
    every_expression = [*expressions(), *adapted("prod", "sum")]
    app = server.app("learns")
    with page_of(of_grpc(), of_mesh(), of_params()) as others:
        found = Prometheus(tmp_path, str(server.admin_address), others)
        try:
            missing = [*map(without_bounds, every_expression)]
            until = time.monotonic() + 60
            while missing and time.monotonic() < until:
                for i in range(20):
                    server.app("total").predict([1.0, 2.0, i]).result(PATIENCE_S)
                app.feedback(app.predict([1.0, 1.0, 2.0]).result(PATIENCE_S), label=4.0)
                ask(server.http_address, "POST", PREDICT, {"input": [1, 2, 3]})
                missing = [one for one in missing if found.value(one) is None]
            assert not missing
            wanted = summed(ended(server), "clipper_queries_total", application="total")
            expression = 'clipper_queries_total{application="total"}'
            wait_until(lambda: found.value(expression) == wanted, "it scrapes again", 60)
            wait_until(lambda: found.health() == ("up", ""), "it scrapes in time")
        finally:
            found.stop()


def test_a_server_logs_json_when_it_is_set(capfd: pytest.CaptureFixture[str]) -> None:
    with clipper.start(http="127.0.0.1:0", logging={"format": "json"}, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        header = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        assert ask(server.http_address, "POST", PREDICT, {"input": [1, 2, 3]}, header).status == 200
    lines = [
        json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")
    ]
    (request_log,) = [line for line in lines if line["logger"] == "clipper.requests"]
    assert (request_log["trace_id"], request_log["application"], request_log["status"]) == (
        "ab" * 16,
        "total",
        200,
    )
    assert {line["model"] for line in lines if "container" in line["message"]} == {"sum:1"}


def test_the_access_log_has_requests_over_http_and_calls_of_grpc(
    capfd: pytest.CaptureFixture[str],
) -> None:
    grpc = pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    log = {"format": "json", "access_lines_s_max": 1000}
    ports = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with clipper.start(logging=log, **ports, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        assert ask(server.http_address, "POST", PREDICT, {"input": [1, 2, 3]}).status == 200
        assert ask(server.http_address, "GET", "/nothing?key=secret").status == 404
        assert ask(server.admin_address, "GET", "/livez").status == 200
        with grpc.insecure_channel(server.grpc_address) as channel:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE_S)
    text = capfd.readouterr().err
    assert "secret" not in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    logged = [line for line in lines if line["logger"] == "clipper.requests"]
    assert [
        (one.get("path", one["method"]), one.get("status", one.get("code"))) for one in logged
    ] == [
        (PREDICT, 200),
        ("/nothing", 404),
        ("/livez", 200),
        ("grpc.health.v1.Health/Check", "OK"),
    ]
    assert all("127.0.0.1:" in one["client"] for one in logged)
    assert logged[0]["application"] == "total"
