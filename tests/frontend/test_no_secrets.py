"""No secret of the configuration is in an answer, a log, a statistic or an error."""

import json
import logging
import re
import socket
from pathlib import Path

import pytest

import clipper
from clipper.credentials.credential_file import line_of, new_key
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, total

SECRET = "S3CR3T"
READINGS = "/admin/stream"  # has no end


@pytest.mark.slow
def test_no_answer_and_no_log_has_a_secret_of_the_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = new_key()
    (tmp_path / "keys").write_text(f"{line_of('ann', key)}\n")
    settings = {
        "http": {
            "address": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "token": f"{SECRET}-http",
            "tokens_file": str(tmp_path / "keys"),
            "metrics": True,
        },
        "influx": {
            "url": f"http://u:{SECRET}-url@127.0.0.1:9/write?token={SECRET}-query",
            "token": f"{SECRET}-influx",
            "each_s": 0.05,
            "tries_max": 1,
        },
        "tracing": {
            "endpoint": f"http://u:{SECRET}-trace@127.0.0.1:9/",
            "headers": f"authorization={SECRET}-headers",
            "tries_max": 1,
            "delay_s": 0.01,
        },
        "token": f"{SECRET}-server",
        "state": str(tmp_path / "state"),
    }
    shown: list[str] = []
    with clipper.start(**{**QUICK, **settings}) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        bearer = {"Authorization": f"Bearer {SECRET}-http"}
        shown += [repr(server.config), json.dumps(server.stats(), default=str)]
        for address in (server.http_address, server.admin_address):
            routes = ask(address, "GET", "/", None, bearer).json["routes"]
            reads = [route.partition(" ")[2] for route in routes if route.startswith("GET ")]
            assert len(reads) > 10
            for path in reads:
                if path == READINGS:
                    continue
                filled = re.sub(r"NAME", "sum" if "models" in path else "total", path)
                for headers in (bearer, {}):
                    reply = ask(address, "GET", filled.replace("VERSION", "1"), None, headers)
                    shown.append(f"{path} {reply.headers} {reply.body.decode(errors='replace')}")
        shown.append(first_reading(server.admin_address, f"{SECRET}-http"))
        for wrong in ("/nothing", "/admin/models/none", "/api/none"):
            for address in (server.http_address, server.admin_address):
                shown.append(ask(address, "POST", wrong, "{", bearer).body.decode())
    shown += [record.getMessage() for record in caplog.records]
    shown += [record.exc_text or "" for record in caplog.records]
    assert sum("200" in text for text in shown) > 3
    found = [text[:300] for text in shown if SECRET in text or key in text]
    assert not found


def first_reading(address: str, token: str) -> str:
    """Return the head and the first reading of the stream that the dashboard shows."""
    host, _, port = address.rpartition(":")
    head = f"GET {READINGS} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as line:
        line.sendall(head.encode())
        text = b""
        while b"\n\n" not in text.partition(b"\r\n\r\n")[2]:
            part = line.recv(1 << 16)
            assert part, text
            text += part
    return text.decode(errors="replace")
