"""Bodies of all routes of a server that did the same few things, compared as a whole text.

Times, ids, processes and addresses are replaced by their kind. The other tests say what each body
is for; this one notices that something in any of them is otherwise.
"""

import json
import re
from typing import Any

import numpy as np

import clipper
from clipper.version import VERSION
from tests.expected import check_expected
from tests.frontend.conftest import QUICK, ask, beside, total, warm_workers

# what differs from run to run, by the end of its name
VARIES = re.compile(
    r"(_us|_ms|_s|_bytes|_mib|_ns|ns|pid|id|since|address|cpus|rate|rss|cpu|sha256|source|target|"
    r"time|actor|success|queue|profile|files|learned|batches|execution_count|limit|batch|rows|hits|"
    r"joined|evaluated|"
    r"cache_hit|cache_miss|misses|ended|retried|state_dir|value|default_value)$"
)
KEPT = re.compile(r"^(slo_ms|hold_s)$")
WORDS = re.compile(
    r"127\.0\.0\.1(:\d+)?|\b[0-9a-f]{6,}(-[0-9a-f]+)*\b|/[\w./-]{9,}(:\d+)?|process \d+|p99 [\d.]+"
)


def scrubbed(value: Any, key: str = "", varies: bool = False) -> Any:
    if isinstance(value, dict | list) and key in ("files", "learned"):
        return f"<{type(value).__name__}>"
    varies = varies or bool(VARIES.search(key) and not KEPT.search(key))
    if isinstance(value, dict):
        return {name: scrubbed(one, name, varies) for name, one in value.items()}
    if isinstance(value, list):
        return [scrubbed(one, key, varies) for one in value]
    if value is None or isinstance(value, bool):
        return value
    if varies or (isinstance(value, float) and not value.is_integer()):
        return f"<{type(value).__name__}>"
    return (
        WORDS.sub("<...>", value.replace(VERSION, "VERSION")) if isinstance(value, str) else value
    )


def described(body: bytes) -> str:
    try:
        found = scrubbed(json.loads(body))
    except ValueError:
        return f"<{len(body) > 0} text>"
    return json.dumps(found, ensure_ascii=False)


QUERIES: list[tuple[str, str, Any]] = [
    ("POST", "/api/total/predict", {"input": [1, 2, 3]}),
    ("POST", "/api/total/predict", {"inputs": [[1, 2, 3], [4, 5, 6]]}),
    ("POST", "/api/total/predict", {"input": [1, 2]}),
    ("POST", "/api/total/predict", {"input": [1, 2, 3], "more": 1}),
    ("POST", "/api/total/predict", {}),
    ("POST", "/api/total/predict", [1]),
    ("POST", "/api/beside/predict", {"input": [1, 2, 3]}),
    ("POST", "/api/none/predict", {"input": [1, 2, 3]}),
    ("GET", "/api/total/predict", None),
    ("POST", "/total/predict", {"input": [1, 2, 3]}),
    ("POST", "/total/update", {"input": [1, 2, 3], "label": 6.0}),
    ("POST", "/api/learns/feedback", {"input": [1, 2, 3], "label": 6.0, "user": "u"}),
    ("POST", "/api/learns/feedback", {"prediction": "none-1", "label": 6.0}),
    ("POST", "/api/learns/feedback", {"label": 6.0}),
    ("GET", "/api", None),
    ("GET", "/api/learns", None),
    ("GET", "/api/none", None),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/v2/models/sum", None),
    ("GET", "/v2/models/total", None),
    ("GET", "/v2/models/none", None),
    ("GET", "/v2/models/sum/ready", None),
    ("GET", "/v2/models/sum/config", None),
    ("GET", "/v2/models/sum/versions/1", None),
    ("GET", "/v2/models/sum/versions/2", None),
    ("POST", "/v2/repository/index", {}),
    (
        "POST",
        "/v2/models/sum/infer",
        {"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}]},
    ),
    ("POST", "/v2/models/sum/infer", {"inputs": []}),
    ("GET", "/nowhere", None),
    ("DELETE", "/api", None),
    ("GET", "/v2/models/sum/stats", None),
]
MANAGED: list[tuple[str, str, Any]] = [
    ("GET", "/admin/about", None),
    ("GET", "/admin/models", None),
    ("GET", "/admin/models?all=true", None),
    ("GET", "/admin/models/sum", None),
    ("GET", "/admin/models/none", None),
    ("GET", "/admin/models/sum/stages", None),
    ("GET", "/admin/models/sum:1/stats", None),
    ("GET", "/admin/models/sum:9/stats", None),
    ("GET", "/admin/applications", None),
    ("GET", "/admin/applications/learns", None),
    ("GET", "/admin/applications/none", None),
    ("GET", "/admin/applications/total/stats", None),
    ("GET", "/admin/rollouts", None),
    ("GET", "/admin/applications/total/rollout", None),
    ("GET", "/admin/tables", None),
    ("GET", "/admin/tables/none", None),
    ("GET", "/admin/export", None),
    ("GET", "/admin/history", None),
    ("POST", "/admin/applications/total/link", {"model": "beside"}),
    ("POST", "/admin/applications/total/link", {"model": "none"}),
    ("POST", "/admin/applications/total/shadow", {"model": "beside"}),
    ("GET", "/admin/applications/total", None),
    ("PATCH", "/admin/applications/total", {"slo_ms": 40}),
    ("PATCH", "/admin/applications/total", {"slo": 40}),
    ("PATCH", "/admin/applications/total", {"slo_ms": -1}),
    ("PUT", "/admin/applications/new", {"models": ["sum"], "policy": "ensemble", "default": 7}),
    ("PUT", "/admin/applications/new", {"models": ["sum"], "policy": "nonesuch"}),
    ("POST", "/admin/applications/total/unlink", {"model": "beside"}),
    ("POST", "/admin/applications/new/predict", {"input": [1, 2, 3]}),
    ("POST", "/admin/applications/new/remove", {}),
    ("DELETE", "/admin/applications/new", None),
    ("POST", "/admin/models/sum:1/scale", {"replicas": -1}),
    ("POST", "/admin/models/sum:9/retire", {}),
    ("POST", "/admin/models/sum/deploy", {}),
    ("GET", "/admin/ps", None),
    ("GET", "/admin/nowhere", None),
    ("POST", "/admin/about", {}),
]


def test_every_body() -> None:
    shown = []
    with clipper.start(http="127.0.0.1:0", admin="127.0.0.1:0", **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.deploy("beside", beside, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        server.app("beside", models=["beside"], slo_ms=5000)
        server.app("learns", models=["sum", "beside"], slo_ms=5000, policy="stacking")
        warm_workers(server)
        learns = server.app("learns")
        for i in range(20):
            found = learns.predict([i, 1.0, 2.0], user=f"u{i % 2}").result()
            learns.feedback(found, label=found.output)
        answers = learns.predict_many(np.ones((6, 3))).result()
        learns.feedback_many(answers, labels=np.full(6, 3.0))
        for address, requests in ((server.http_address, QUERIES), (server.admin_address, MANAGED)):
            for method, path, body in requests:
                reply = ask(address, method, path, body)
                shown.append(f"{method} {path} {body}: {reply.status} {described(reply.body)}")
    check_expected("bodies.txt", "\n".join(shown).replace('"}, {', '"},\n  {') + "\n")
