"""The CPU of requests that say more than their input, or that several models answer, beside plain
requests in turns.

Cache hits of one model, 64 connections, one load generator on the same machine. A server with API
keys, one with TLS and one with neither are asked, each with one thread of the core. A key, a user,
an SLO, a trace and TLS are what most deployments have, so none of them may cost much.
"""

import contextlib
import http.client
import json
import tempfile
from pathlib import Path

import numpy as np

from bench.harness import Goal, Row, row
from bench.system.frontends.http_servers import Process
from bench.system.frontends.rest import CONNECTIONS, take_turns
from clipper.credentials.credential_file import line_of, new_key
from tests.frontend.certificates import Authority

GOAL = Goal("at_most", 1.5)
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
# of each kind of request: the lines of its head, and the members of its body beside the input
KINDS = {
    "plain": ("", ""),
    "with a request id": ("X-Request-Id: 5f0c2a9e-5c1d-4a54-9f0e-8f3f6a1c7f10\r\n", ""),
    "with a user": ("", ', "user": "ann@example.org"'),
    "with an SLO": ("", ', "slo_ms": 50'),
    "with a trace": (f"Traceparent: {_TRACE}00\r\n", ""),
    "with a trace that is recorded": (f"Traceparent: {_TRACE}01\r\n", ""),
    "with a user, an SLO and a trace": (
        f"Traceparent: {_TRACE}00\r\nAccept: application/json;q=0.9, */*\r\n",
        ', "user": "ann@example.org", "slo_ms": 50',
    ),
}
# applications of three models, and the members of the body beside the input
THREE = {
    "to three models": ("ensemble3", ""),
    "to three models by majority": ("majority3", ""),
    "to three models by stacking, with a user": ("stacking3", ', "user": "ann"'),
    "to one of three models by exp3, with a user": ("exp33", ', "user": "ann"'),
}
GOAL_OF_THREE = Goal("at_most", 2.0)
# infer requests: the application, the rows, and whether they are bytes behind the JSON
INFER = {
    "to infer one row": ("noop1", 1, False),
    "to infer two rows": ("noop1", 2, False),
    "to infer two rows in binary": ("noop1", 2, True),
    "to infer 32 rows": ("noop1", 32, False),
    "to infer two rows by stacking": ("stacking3", 2, False),
}
FEEDBACK = {"to tell the label of an answer": "noop1", "to tell a label to stacking": "stacking3"}
GOALS = {
    "over TLS": Goal("at_most", 2.5),
    "to infer two rows by stacking": Goal("at_most", 2.5),
    "to infer 32 rows": None,
}


def request(lines: str, members: str, app: str = "noop1") -> bytes:
    """Return a query whose head and body say more than the input."""
    body = f'{{"input": [0.5]{members}}}'
    head = f"POST /api/{app}/predict HTTP/1.1\r\nHost: bench\r\n{lines}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def infer_request(app: str, rows: int, is_binary: bool) -> bytes:
    """Return an infer request of some rows."""
    values = [i + 0.5 for i in range(rows)]
    tensor: dict[str, object] = {"name": "input", "shape": [rows, 1], "datatype": "FP64"}
    data = np.array(values).tobytes() if is_binary else b""
    said = {"parameters": {"binary_data_size": len(data)}} if is_binary else {"data": values}
    body: dict[str, object] = {"id": "", "inputs": [{**tensor, **said}]}
    if is_binary:
        body["parameters"] = {"binary_data_output": True}
    text = json.dumps(body).encode()
    head = f"POST /v2/models/{app}/infer HTTP/1.1\r\nHost: bench\r\n"
    if is_binary:
        head += f"Inference-Header-Content-Length: {len(text)}\r\n"
    return f"{head}Content-Length: {len(text + data)}\r\n\r\n".encode() + text + data


def feedback_request(process: Process, app: str) -> bytes:
    """Return feedback about an answer that has some already: as often as it comes, it is looked up
    and answered."""
    host, _, port = process.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", f"/api/{app}/predict", b'{"input": [0.5]}')
    id = json.loads(connection.getresponse().read())["id"]
    connection.close()
    body = json.dumps({"id": id, "label": 0.5})
    head = f"POST /api/{app}/feedback HTTP/1.1\r\nHost: bench\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def goal_of(name: str) -> Goal | None:
    """Return the most that a request may take, beside a plain one."""
    if name in GOALS:
        return GOALS[name]
    return GOAL_OF_THREE if name in (*THREE, *INFER, *FEEDBACK) else GOAL


def main(quick: bool) -> list[Row]:
    seconds, turns = (0.2, 1) if quick else (1.0, 7)
    key = new_key()
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "keys")
        file.write_text(f"{line_of('bench', key)}\n")
        open_, keyed = Process("noops"), Process("noops", str(file))
        secured = Process("noops", "", *Authority(file.parent).sign("bench"))
        secured.address = f"tls:{secured.address}"
        # of another server's answers none are forgotten meanwhile
        told = Process("noops")
        for process in (open_, keyed, told, secured):
            stack.callback(process.close)
        cases = {name: (open_, request(*kind)) for name, kind in KINDS.items()}
        for name, (app, members) in THREE.items():
            cases[name] = open_, request("", members, app)
        for name, asked in INFER.items():
            cases[name] = open_, infer_request(*asked)
        for name, app in FEEDBACK.items():
            cases[name] = told, feedback_request(told, app)
        cases["with a key"] = keyed, request(f"Authorization: Bearer {key}\r\n", "")
        cases["over TLS"] = secured, request("", "")
        found = take_turns(cases, CONNECTIONS, seconds, turns)
    plain = found.pop("plain").cpu_us
    return [
        row("a request, plain: CPU", plain, "us"),
        *(
            row(f"a request {name}: CPU", one.cpu_us, "us", "plain", plain, goal_of(name))
            for name, one in found.items()
        ),
    ]
