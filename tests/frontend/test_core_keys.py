"""Queries with API keys on the HTTP path without the GIL: they are admitted and refused exactly as
by Python, keys come and go while connections are open, and nothing of a client without a key
reaches a model or is kept.

Each request goes twice, as in test_core_http: plain, and with a header that makes it Python's.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.credentials.credential_file import line_of, new_key
from tests.frontend.conftest import PATIENCE_S, QUICK, total, warm_workers
from tests.frontend.test_core_http import (
    connect,
    exchanged,
    normalized,
    open_connections,
    reach_connections,
    request,
    responses,
)

SEEDS = range(4)
PATH, BODY = "/api/total/predict", '{"input": [1, 2, 3]}'
INFER = '{"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}]}'
KEY, OTHER, TOKEN = new_key(), new_key(), "a-token"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    write(file, KEY, OTHER)
    return file


def write(file: Path, *keys: str) -> None:
    """Write the file of keys, of another size each time: a quick change may have the same time."""
    file.with_suffix(".new").write_text("".join(f"{line_of('ann', key)}\n" for key in keys))
    file.with_suffix(".new").replace(file)


@pytest.fixture
def server(keys: Path) -> Iterator[clipper.ClipperServer]:
    http = {"address": "127.0.0.1:0", "api_keys_file": str(keys), "token": TOKEN}
    with clipper.start(http={**http, "pipeline_max": 8}, **QUICK) as started:
        started.deploy("sum", total, input="f64[3]", cache=False)
        started.app("total", models=["sum"], slo_ms=10_000)
        warm_workers(started)
        yield started


def reload_keys(server: clipper.ClipperServer) -> None:
    """Have the server look at the file now."""
    frontends: Any = server._endpoints.frontends
    frontends._access.check()


def queries(server: clipper.ClipperServer) -> int:
    """Return how many queries the application has had."""
    stats: Any = server.stats()
    return int(stats["applications"]["total"]["queries"])


def bearing(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


# values of headers that a key is in, and lines that only look so
GOOD = [
    f"Authorization: Bearer {KEY}\r\n",
    f"authorization: bearer {KEY}\r\n",
    f"AUTHORIZATION:BEARER   {OTHER}  \r\n",
    f"Authorization: Bearer {TOKEN}\r\n",
    f"Authorization: \t Bearer {KEY}\t\r\n",
    f"X-Noise: {'n' * 200}\r\nAuthorization: Bearer {KEY}\r\nX-Authorization: no\r\n",
]
BAD = [
    "",
    "Authorization:\r\n",
    "Authorization: Bearer\r\n",
    "Authorization: Bearer wrong\r\n",
    f"Authorization: {KEY}\r\n",
    f"Authorization: Bearer{KEY}\r\n",
    f"Authorization: Bearer\t{KEY}\r\n",
    f"Authorization: Bearer {KEY}x\r\n",
    f"Authorization: Bearer {KEY[:-1]}\r\n",
    f"Authorization: Bearer {KEY} {KEY}\r\n",
    f"Authorization: Bearer {KEY.swapcase()}\r\n",
    f"Authorization: Bearer {KEY}, Bearer {OTHER}\r\n",
    f'Authorization: Bearer "{KEY}"\r\n',
    f"Authorization: Basic {KEY}\r\n",
    f"Authorization: bearer {TOKEN}\r\n",
    f"Authorization: Bearer  {TOKEN}\r\n",
    f"Authorization: Bearer {KEY}\u00e9\r\n",
    f"Authorization: Bearer {'k' * 1017}\r\n",
    f"Authorization: Bearer {'k' * 9000}\r\n",
    f"Authorization: Bearer {'k' * 20000}\r\n",
    f"Authorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n",
    f"Authorization: Bearer wrong\r\nauthorization: Bearer {KEY}\r\n",
    f"Authorization : Bearer {KEY}\r\n",
    f" Authorization: Bearer {KEY}\r\n",
    f"Authorization: Bearer {KEY}\n",
    f"Authorization: Bearer\r\n {KEY}\r\n",
    f"X-Authorization: Bearer {KEY}\r\n",
    f"Proxy-Authorization: Bearer {KEY}\r\n",
    f"Cookie: Authorization=Bearer {KEY}\r\n",
]


def test_a_query_with_a_key_is_answered_by_the_core(server: clipper.ClipperServer) -> None:
    assert reach_connections(server, 0)
    with connect(server) as connection:
        for path, body in ((PATH, BODY), ("/total/predict", BODY), ("/v2/models/sum/infer", INFER)):
            for more in GOOD:
                if "\t" not in more:  # blanks of that kind are Python's
                    connection.sendall(request(path, body, more=more))
                    assert b"HTTP/1.1 200" in responses(connection, 1)[0]
                    assert open_connections(server) == 1


@pytest.mark.parametrize("path", [PATH, "/total/predict", "/v2/models/sum/infer"])
def test_every_spelling_is_judged_alike(server: clipper.ClipperServer, path: str) -> None:
    body = INFER if path.startswith("/v2") else BODY
    before = queries(server)
    for more in [*GOOD, *BAD]:
        both = [
            exchanged(server, request(path, body, by_python, more))[0]
            for by_python in (False, True)
        ]
        assert normalized(both[0]) == normalized(both[1]), more
        status = 200 if more in GOOD else 401
        if more in BAD and b"HTTP/1.1 401" not in both[0]:
            assert both[0].startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), more
        else:
            assert both[0].startswith(b"HTTP/1.1 %d" % status), more
    if path == PATH:
        assert queries(server) == before + 2 * len(GOOD)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_key_never_reaches_a_model(server: clipper.ClipperServer, seed: int) -> None:
    """Requests with and without keys on one connection, cut anywhere: up to the first one without
    a key they are answered, in order; nothing after that is."""
    rng = random.Random(seed)
    for _ in range(12):
        before, good = queries(server), rng.randrange(10)
        lines = [rng.choice(GOOD) for _ in range(good)]
        lines += rng.choices([*GOOD, *BAD], k=rng.randrange(1, 6))
        allowed = next((i for i, more in enumerate(lines) if more in BAD), len(lines))
        made = [
            request(PATH, json.dumps({"input": [i, 2, 3]}), rng.random() < 0.1, more)
            for i, more in enumerate(lines)
        ]
        cuts = lambda n: sorted(rng.sample(range(1, n), min(n - 1, rng.randrange(4))))  # noqa: E731
        found = exchanged(server, *made, cuts=cuts)
        assert len(found) == min(allowed + 1, len(lines))
        for i, response in enumerate(found[:allowed]):
            assert f'"output":{i + 5.0},'.encode() in response
        assert all(b"HTTP/1.1 4" in one for one in found[allowed:])
        assert queries(server) == before + allowed


def test_a_key_that_is_revoked_is_refused_on_open_connections(
    server: clipper.ClipperServer, keys: Path
) -> None:
    ask = request(PATH, BODY, more=bearing(OTHER))
    with connect(server) as connection, connect(server) as beside:
        for one in (connection, beside):
            one.sendall(ask)
            assert b"HTTP/1.1 200" in responses(one, 1)[0]
        head, _, body = ask.partition(b"\r\n\r\n")
        beside.sendall(head + b"\r\n\r\n" + body[:3])
        write(keys, KEY)
        reload_keys(server)
        connection.sendall(ask)
        assert b"HTTP/1.1 401" in responses(connection, 1)[0]
        assert not connection.recv(1)
        beside.sendall(body[3:5])  # also when the body has begun
        assert b"HTTP/1.1 401" in responses(beside, 1)[0]
    with connect(server) as kept:
        kept.sendall(request(PATH, BODY, more=bearing(KEY)))
        assert b"HTTP/1.1 200" in responses(kept, 1)[0]


def test_a_new_key_is_accepted_on_open_connections(
    server: clipper.ClipperServer, keys: Path
) -> None:
    another = new_key()
    with connect(server) as connection:
        connection.sendall(request(PATH, BODY, more=bearing(KEY)))
        assert b"HTTP/1.1 200" in responses(connection, 1)[0]
        write(keys, KEY, another, OTHER)
        reload_keys(server)
        connection.sendall(request(PATH, BODY, more=bearing(another)))
        assert b"HTTP/1.1 200" in responses(connection, 1)[0]
        assert open_connections(server) == 1
        keys.write_text("what is this\n")
        reload_keys(server)
        connection.sendall(request(PATH, BODY, more=bearing(another)))
        assert b"HTTP/1.1 200" in responses(connection, 1)[0], "what is not in order is not taken"
        keys.write_text("")
        reload_keys(server)
        connection.sendall(request(PATH, BODY, more=bearing(another)))
        assert b"HTTP/1.1 401" in responses(connection, 1)[0]


def test_keys_stay_needed_when_applications_change(server: clipper.ClipperServer) -> None:
    for name in ("one", "two"):
        server.app(name, models=["sum"], slo_ms=10_000)
        for more, status in ((bearing(KEY), b"200"), (bearing("wrong"), b"401"), ("", b"401")):
            (found,) = exchanged(server, request(f"/api/{name}/predict", BODY, more=more))
            assert found.startswith(b"HTTP/1.1 " + status)


def kept(server: clipper.ClipperServer) -> int:
    """Return the bytes of requests that the core's HTTP server has counted as kept."""
    frontends: Any = server._endpoints.frontends
    return int(frontends._listeners.hot.core_server.kept)


def test_only_who_has_a_key_takes_memory_for_bodies(server: clipper.ClipperServer) -> None:
    """Bytes count if they follow an admitted head: parts of heads have a bound of their own."""
    whole = request(PATH, BODY, more=bearing(KEY))
    head = whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for part in (head[:-1], head[:60], request(PATH, BODY)[:30]):
            stack.enter_context(connect(server)).sendall(part)
        assert reach_connections(server, 3)
        with connect(server) as last:
            last.sendall(whole)
            assert b"HTTP/1.1 200" in responses(last, 1)[0]
        assert kept(server) == 0
        stack.enter_context(connect(server)).sendall(head + BODY[:4].encode())
        until = time.monotonic() + PATIENCE_S
        while kept(server) != len(head) + 4:
            assert time.monotonic() < until, kept(server)
            threading.Event().wait(0.002)
