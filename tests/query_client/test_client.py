"""Tests of what a client has of its own: times, tries, connections, keys, TLS, errors."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
import clipper_client
from clipper_client import AsyncClient, Client, errors, own_errors
from clipper_client.errors import (
    ClipperError,
    DeadlineExceeded,
    InvalidInput,
    ModelFailed,
    NoServer,
    NotAllowed,
    Overloaded,
)
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S
from tests.memory_container import wait_until
from tests.query_client.conftest import Last, Scripted, response

ROW = [1.0, 2.0, 3.5]
ANSWER = response(
    200,
    json.dumps(
        {
            "id": "1-1",
            "output": 6.5,
            "confidence": 1.0,
            "default": False,
            "reason": "",
            "models": ["sum:1"],
            "missing": [],
            "agreement": 1.0,
            "latency_us": 5,
        }
    ).encode(),
)
COUNTED = response(200, b'{"counted": true}')
BUSY = response(
    503, b'{"type": "urn:clipper:error:no-replica", "detail": "none."}', "Retry-After: 0"
)
LATER = response(
    503, b'{"type": "urn:clipper:error:no-replica", "detail": "none."}', "Retry-After: 900"
)
FULL = response(
    429, b'{"type": "urn:clipper:error:overloaded", "detail": "full."}', "Retry-After: 7"
)

Start = Callable[..., Scripted]
Ask = Callable[..., Any]


def ask_blocking(url: str, verb: str, *words: Any, **settings: Any) -> Any:
    more = settings.pop("call", {})
    with Client(url, **settings) as client:
        return getattr(client, verb)(*words, **more)


def ask_asyncio(url: str, verb: str, *words: Any, **settings: Any) -> Any:
    more = settings.pop("call", {})

    async def run() -> Any:
        async with AsyncClient(url, **settings) as client:
            return await getattr(client, verb)(*words, **more)

    return asyncio.run(run())


@pytest.fixture(params=[ask_blocking, ask_asyncio], ids=["blocking", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Return a function that makes one call by a client of its own."""
    return request.param  # type: ignore[no-any-return]


# -- tries


def test_a_server_that_did_nothing_is_asked_again(ask: Ask, scripted: Start) -> None:
    server = scripted([BUSY, BUSY, ANSWER])
    assert ask(server.url, "predict", "total", ROW).output == 6.5
    assert len(server.requests) == 3
    assert server.connections == 1


def test_a_connection_that_ends_before_the_answer_is_made_again(ask: Ask, scripted: Start) -> None:
    server = scripted([None], [ANSWER])
    assert ask(server.url, "predict", "total", ROW).output == 6.5
    assert server.requests[0] == server.requests[1]


def test_tries_have_a_limit(ask: Ask, scripted: Start) -> None:
    server = scripted([None], [None], [None], [ANSWER])
    with pytest.raises(NoServer, match=f"no server answers at {server.url}"):
        ask(server.url, "predict", "total", ROW)
    assert len(server.requests) == 3
    server = scripted([BUSY, BUSY, ANSWER])
    with pytest.raises(errors.NoReplica, match="none"):
        ask(server.url, "predict", "total", ROW, tries_max=2)


@pytest.mark.parametrize("script", [[[BUSY, COUNTED]], [[None], [COUNTED]]], ids=["503", "ended"])
def test_feedback_is_never_sent_twice(ask: Ask, scripted: Start, script: Any) -> None:
    server = scripted(*script)
    with pytest.raises(ClipperError) as caught:
        ask(server.url, "feedback", "total", "1-1", call={"label": 1})
    if isinstance(caught.value, NoServer):
        assert "may be done all the same" in str(caught.value)
    assert len(server.requests) == 1


def test_an_answer_that_is_cut_off_is_not_asked_for_again(ask: Ask, scripted: Start) -> None:
    for end in (5, 30, len(ANSWER) - 1):
        server = scripted([Last(ANSWER[:end])], [ANSWER])
        with pytest.raises(NoServer, match="closed the connection"):
            ask(server.url, "predict", "total", ROW)
        assert len(server.requests) == 1


def test_no_try_is_later_than_the_call(ask: Ask, scripted: Start) -> None:
    for settings, call in (({"timeout_s": 60.0}, {}), ({}, {"slo_ms": 20})):
        server = scripted([LATER, ANSWER])
        with pytest.raises(errors.NoReplica):
            ask(server.url, "predict", "total", ROW, call=call, **settings)
        assert len(server.requests) == 1


def test_overload_is_told_at_once_with_the_time(ask: Ask, scripted: Start) -> None:
    server = scripted([FULL, ANSWER])
    with pytest.raises(Overloaded, match="full") as caught:
        ask(server.url, "predict", "total", ROW)
    assert caught.value.retry_after_s == 7.0
    assert len(server.requests) == 1


def test_a_later_try_gives_the_server_less_time(ask: Ask, scripted: Start) -> None:
    once = response(503, b"{}", "Retry-After: 1")
    server = scripted([once, ANSWER])
    ask(server.url, "predict", "total", ROW, call={"slo_ms": 20_000})
    first, second = (
        json.loads(request.partition(b"\r\n\r\n")[2])["slo_ms"] for request in server.requests
    )
    assert first == 20_000
    assert 0 < second <= 19_000


# -- times


def test_a_server_that_does_not_answer(ask: Ask, scripted: Start) -> None:
    server = scripted([b"", ANSWER])
    with pytest.raises(DeadlineExceeded, match=r"has not answered within 0\.2 s\. .*timeout_s="):
        ask(server.url, "predict", "total", ROW, timeout_s=0.2)
    with pytest.raises(TimeoutError):
        ask(scripted([b"", None]).url, "feedback", "total", "1-1", call={"label": 1}, timeout_s=0.2)


def test_a_call_may_take_its_slo_and_more(ask: Ask, plain: clipper.ClipperServer) -> None:
    url = f"http://{plain.http_address}"
    answer = ask(
        url, "predict", "late-alone", ROW, call={"slo_ms": PATIENCE_S * 1000}, timeout_s=0.2
    )
    assert answer.output == 6.5


def test_what_became_of_a_query_without_a_default(ask: Ask, plain: clipper.ClipperServer) -> None:
    url = f"http://{plain.http_address}"
    with pytest.raises((DeadlineExceeded, Overloaded)):
        ask(url, "predict", "late-alone", [7.0, 7.0, 7.0])
    with pytest.raises(ModelFailed, match="it never works"):
        ask(url, "predict", "broken", ROW)
    with pytest.raises(ModelFailed):
        ask(url, "predict_many", "broken", np.zeros((40, 3)))


# -- binary bodies


def test_a_large_input_is_binary_and_a_small_one_json(ask: Ask, scripted: Start) -> None:
    server = scripted([ANSWER])
    ask(server.url, "predict", "twice", np.arange(10.0))
    assert b"application/json" in server.requests[0]
    server = scripted([response(200, b"{}")])
    with pytest.raises(NoServer, match="is not a Clipper server"):
        ask(server.url, "predict", "twice", np.arange(1000.0))
    assert np.arange(1000.0).tobytes() in server.requests[0]


def test_a_large_answer_and_input(ask: Ask, plain: clipper.ClipperServer) -> None:
    rows = np.random.default_rng(5).random((100_000, 4)).astype(np.float32)
    found = ask(f"http://{plain.http_address}", "predict_many", "rows", rows)
    assert np.array_equal(found.outputs, 2 * rows)


def test_lists_work_without_numpy(plain: clipper.ClipperServer) -> None:
    """A process that cannot import numpy queries with lists."""
    code = f"""
import sys
sys.modules["numpy"] = None
import clipper_client
from clipper_client import Client
assert clipper_client.ClipperError.__module__ == "clipper_client.own_errors"
with Client("http://{plain.http_address}") as client:
    assert client.predict("total", [1, 2, 3.5]).output == 6.5
    assert client.predict("rows", [1, 2, 3, 4]).output == [2, 4, 6, 8]
    for n in (3, 40):
        answers = client.predict_many("total", [[1, 2, i] for i in range(n)])
        assert answers.outputs == [3.0 + i for i in range(n)], answers
        assert answers.confidence == [1.0] * n and answers.is_default == [False] * n, answers
    assert client.predict_many("texts", ["a", "b"]).outputs == ["a!", "b!"]
    try:
        client.predict("total", [1])
    except clipper_client.errors.InvalidInput as error:
        print(type(error).__module__)
"""
    source = Path(clipper_client.__file__).parent.parent
    blocked = f"import sys\nsys.modules['clipper'] = None\nsys.path.insert(0, {str(source)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
    )
    assert (done.stdout, done.returncode) == ("clipper_client.own_errors\n", 0), done.stderr


@pytest.mark.slow
def test_a_table_of_a_model_that_was_fitted_on_one(plain: clipper.ClipperServer) -> None:
    """Its columns are found by name, over HTTP as in process."""
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    linear = pytest.importorskip("sklearn.linear_model", reason="pip install scikit-learn")
    table = pandas.DataFrame({"age": [1.0, 2.0, 4.0, 7.0], "rooms": [3, 1, 2, 9]})
    model = linear.LinearRegression().fit(table, 10 * table.age + table.rooms)
    plain.deploy("frame", model)
    app = plain.app("frame", models=["frame"], slo_ms=PATIENCE_S * 1000)
    with Client(f"http://{plain.http_address}") as client:
        for given in (table, table[["rooms", "age"]]):
            found = client.predict_many("frame", given).outputs
            assert np.allclose(found, 10 * table.age + table.rooms)
            assert np.allclose(found, app.predict_many(given).result(PATIENCE_S).outputs)
        with pytest.raises(InvalidInput):
            client.predict_many("frame", table.rename(columns={"age": "years"}))
        with pytest.raises(InvalidInput, match="one tensor is taken"):
            client.predict_many("total", table)
    plain.catalog.unregister_application("frame")
    plain.retire("frame:1", force=True)


# -- connections


def test_a_connection_is_kept_and_one_that_ended_is_replaced(scripted: Start) -> None:
    closing = ANSWER.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    server = scripted([ANSWER, ANSWER, closing], [COUNTED])
    with Client(server.url) as client:
        for _ in range(3):
            client.predict("total", ROW)
        assert client.feedback("total", "1-1", label=1)
    assert server.connections == 2


def test_a_connection_that_ended_while_idle_is_not_used(scripted: Start) -> None:
    """So a feedback, which is sent once, does not meet it."""
    server = scripted([ANSWER, None], [COUNTED])
    with Client(server.url) as client:
        client.predict("total", ROW)
        (idle,) = client._pool._idle
        idle._socket.shutdown(1)  # the script ends, and closes
        wait_until(idle.is_stale)
        assert client.feedback("total", "1-1", label=1)
    assert len(server.requests) == 2


def test_threads_share_a_client_within_its_limit(plain: clipper.ClipperServer) -> None:
    rows = np.random.default_rng(3).random((200, 3))
    with Client(f"http://{plain.http_address}", connections_max=3) as client:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda row: client.predict("total", row), rows))
        assert np.allclose([answer.output for answer in answers], rows.sum(axis=1))
        assert len(client._pool._idle) <= 3
        assert client._pool._used == 0


def test_a_task_of_many_within_the_limit(plain: clipper.ClipperServer) -> None:
    rows = np.random.default_rng(4).random((200, 3))

    async def run() -> list[Any]:
        async with AsyncClient(f"http://{plain.http_address}", connections_max=3) as client:
            found = await asyncio.gather(*(client.predict("total", row) for row in rows))
            assert len(client._idle) <= 3
            return found

    assert np.allclose([answer.output for answer in asyncio.run(run())], rows.sum(axis=1))


def test_a_call_waits_for_a_connection_within_its_time(scripted: Start) -> None:
    server = scripted([b"", None])
    with Client(server.url, connections_max=1, timeout_s=0.2) as client:
        connection = client._pool.take(time.monotonic() + PATIENCE_S)
        with pytest.raises(DeadlineExceeded):
            client.predict("total", ROW)
        client._pool.give(connection, keep=False)
        assert client._pool._used == 0


def test_a_cancelled_call_closes_its_connection(scripted: Start) -> None:
    server = scripted([b"", None], [ANSWER])

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            call = asyncio.create_task(client.predict("total", ROW))
            while not server.requests:
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not client._idle
            assert (await client.predict("total", ROW)).output == 6.5

    asyncio.run(run())


def test_a_client_of_another_loop_and_a_closed_one(plain: clipper.ClipperServer) -> None:
    client = AsyncClient(f"http://{plain.http_address}")

    async def use() -> Any:
        found = await client.applications()
        await client.close()
        return found

    assert {row["name"] for row in asyncio.run(use())} >= {"total", "late"}
    with pytest.raises(ClipperError, match="is closed"):
        asyncio.run(use())
    other = AsyncClient(f"http://{plain.http_address}")
    other._loop = asyncio.new_event_loop()
    with pytest.raises(ClipperError, match="another event loop"):
        asyncio.run(other.applications())
    other._loop.close()
    blocking = Client(f"http://{plain.http_address}")
    blocking.close()
    with pytest.raises(ClipperError, match="is closed"):
        blocking.applications()


def test_a_forked_process_has_connections_of_its_own(plain: clipper.ClipperServer) -> None:
    with Client(f"http://{plain.http_address}") as client:
        client.predict("total", ROW)
        (parents,) = client._pool._idle
        reader, writer = os.pipe()
        with warnings.catch_warnings(action="ignore"):  # that there are threads
            child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                answer = client.predict("total", [2.0, 2.0, 2.0])
                ours = client._pool._idle[0] is not parents
                os.write(writer, b"ours" if ours and answer.output == 6.0 else b"no")
                status = 0
            os._exit(status)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 10) == b"ours"
        os.close(reader)
        assert client._pool._idle == [parents]
        assert client.predict("total", ROW).output == 6.5


# -- keys and TLS


def test_a_key_is_required_and_named(
    ask: Ask, guarded: clipper.ClipperServer, authority: Authority, api_key: str
) -> None:
    url = f"https://{guarded.http_address}"
    for key in (None, "ck_wrong"):
        with pytest.raises(NotAllowed, match="clipper key NAME"):
            ask(url, "predict", "total", ROW, key=key, ca=authority.ca)
        with pytest.raises(NotAllowed):
            ask(url, "predict_many", "rows", np.zeros((50_000, 4)), key=key, ca=authority.ca)
    assert ask(url, "predict", "total", ROW, key=api_key, ca=authority.ca).output == 6.5


def test_a_certificate_that_is_not_trusted(
    ask: Ask, guarded: clipper.ClipperServer, tmp_path: Path, api_key: str
) -> None:
    url = f"https://{guarded.http_address}"
    with pytest.raises(NoServer, match=r"is not trusted.*ca=FILE"):
        ask(url, "predict", "total", ROW, key=api_key, ca=Authority(tmp_path, "stranger").ca)
    with pytest.raises(ClipperError, match="speaks TLS"):
        ask(url.replace("https", "http"), "predict", "total", ROW, key=api_key)
    with pytest.raises(InvalidInput, match="holds no certificates"):
        Client(url, ca=str(tmp_path / "none.pem"))
    with pytest.raises(InvalidInput, match="no certificate with its key"):
        Client(url, cert=("none.pem", "none.key"))


def test_plain_http_where_tls_is_expected(ask: Ask, plain: clipper.ClipperServer) -> None:
    with pytest.raises(NoServer, match="no TLS with https://"):
        ask(f"https://{plain.http_address}", "predict", "total", ROW)


# -- errors


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:0",
        "http://host/api",
        "http://u:p@host",
        "http://hö",
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not an address of a server\. Write http"):
        Client(url)


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": 0},
        {"timeout_s": "5"},
        {"tries_max": 0},
        {"connections_max": True},
        {"key": ""},
    ],
    ids=repr,
)
def test_a_limit_that_cannot_be(settings: dict[str, Any]) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidInput, match=next(iter(settings))):
            kind("http://127.0.0.1:1", **settings)


def test_no_server(ask: Ask, scripted: Start) -> None:
    server = scripted()
    server.close()
    with pytest.raises(NoServer, match=r"no server answers at http://127.* clipper up --http"):
        ask(server.url, "predict", "total", ROW)
    with pytest.raises(ConnectionError):
        ask("http://no-such-host.invalid", "predict", "total", ROW)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        response(200, b"<html>"),
        response(200, b"[]"),
        response(404, b"not found"),
        response(200, b'{"output": 1}'),
    ],
)
def test_what_is_no_clipper_server(ask: Ask, scripted: Start, answer: bytes) -> None:
    with pytest.raises(NoServer):
        ask(scripted([answer], [None], [None]).url, "predict", "total", ROW)


def test_an_input_that_cannot_be_sent(ask: Ask, plain: clipper.ClipperServer) -> None:
    url = f"http://{plain.http_address}"
    for wrong in (object(), [object()], {"x": {1, 2}}, float("inf"), "\ud800"):
        with pytest.raises(InvalidInput):
            ask(url, "predict", "total", wrong)
    for name in ("", None, 7):
        with pytest.raises(InvalidInput, match="the name of an application"):
            ask(url, "predict", name, ROW)
    for salt in (-1, 0.5, "a"):
        with pytest.raises(InvalidInput):
            ask(url, "predict", "total", ROW, call={"salt": salt})
    with pytest.raises(InvalidInput, match="one value"):
        ask(url, "predict_many", "total", 3.0)


def test_names_are_quoted(ask: Ask, plain: clipper.ClipperServer) -> None:
    for name in ("a/b", "a b", "ä", "a?b", "../v2", "a\r\nX: y"):
        with pytest.raises(errors.UnknownApplication):
            ask(f"http://{plain.http_address}", "predict", name, ROW)


def test_feedback_of_many(ask: Ask, plain: clipper.ClipperServer) -> None:
    url = f"http://{plain.http_address}"
    answers = ask(url, "predict_many", "learns", np.ones((5, 3)))
    counted = ask(url, "feedback_many", "learns", answers, np.full(5, 3.0))
    assert counted == (5, 0, 0)
    again = ask(url, "feedback_many", "learns", [*answers.ids, "0000-1"], [3.0] * 6)
    assert again == (0, 5, 1)
    large = ask(url, "predict_many", "learns", np.ones((50, 3)))
    with pytest.raises(InvalidInput, match="takes no feedback over HTTP"):
        ask(url, "feedback_many", "learns", large, np.full(50, 3.0))
    with pytest.raises(InvalidInput, match="2 labels for 1 predictions"):
        ask(url, "feedback_many", "learns", ["1-1"], [1, 2])


def test_errors_are_those_of_clipper() -> None:
    """One `except` catches errors of a server in the process and of one elsewhere."""
    names = {name for name in vars(own_errors) if isinstance(getattr(own_errors, name), type)}
    assert names == set(errors.__all__)
    for name in names:
        own, shared = getattr(own_errors, name), getattr(clipper.errors, name)
        assert getattr(errors, name) is shared
        assert own.slug == shared.slug
        bases = {base.__name__ for base in shared.__mro__}
        assert {base.__name__ for base in own.__mro__} <= bases


def test_clipper_has_the_client() -> None:
    assert clipper.Client is clipper_client.Client
    assert clipper.AsyncClient is clipper_client.AsyncClient
    assert clipper_client.__version__ == clipper.__version__


def test_a_client_of_another_version_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(vars(clipper), "Client", raising=False)
    monkeypatch.setattr(clipper_client, "__version__", "0.0.9")
    with pytest.raises(ImportError, match=r"0\.0\.9 .*pip install clipper-client=="):
        clipper.Client  # noqa: B018 - the import is the test
