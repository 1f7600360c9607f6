"""Records through a real Redis: each is answered once, in order, or refused with the reason,
whatever faults occur."""

import base64
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import ConfigError, InvalidInput, UnknownApplication
from tests.memory_container import MemoryContainer, wait_until
from tests.store.conftest import RedisServer

redis = pytest.importorskip("redis")
Client = Any


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with redis.Redis.from_url(
        redis_server.url, decode_responses=True, encoding_errors="replace"
    ) as made:
        yield made


def answers_of(client: Client, name: str) -> list[dict[str, str]]:
    return [fields for _, fields in client.xrange(name)]


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def streams(fresh: Callable[[], str], **settings: Any) -> dict[str, Any]:
    name = fresh()
    return {"source": f"{name}.in", "answers": f"{name}.out", **settings}


# -- records and answers


def test_records_are_answered_in_order(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    for i in range(500):
        client.xadd(
            names["source"], {"id": f"r{i}", "input": json.dumps([i, 1, 2.5]), "q.trace": f"t{i}"}
        )
    begun = time.monotonic_ns()
    with server.stream("sums", redis_server.url, **names) as stream:
        wait_until(lambda: client.xlen(names["answers"]) == 500)
    took_us = (time.monotonic_ns() - begun) / 1000
    found = answers_of(client, names["answers"])
    assert [one["id"] for one in found] == [f"r{i}" for i in range(500)]
    assert [float(one["output"]) for one in found] == [i + 3.5 for i in range(500)]
    assert found[7]["q.trace"] == "t7"
    assert found[7]["models"] == "total:1"
    assert (found[7]["default"], found[7]["missing"]) == ("0", "")
    assert 0 < int(found[7]["latency_us"]) <= took_us
    assert stream.stats()["answered"] == 500
    assert client.xpending(names["source"], "clipper")["pending"] == 0
    assert client.xinfo_consumers(names["source"], "clipper") == [], (
        "a consumer that left is forgotten"
    )


def test_records_are_written_and_read_with_redis_cli(
    server: clipper.ClipperServer, redis_server: RedisServer, fresh: Callable[[], str]
) -> None:
    names = streams(fresh)
    words = ["redis-cli", "-s", redis_server.url.removeprefix("unix://")]
    add = [*words, "XADD", names["source"], "*", "input", "[1, 2, 3]"]
    entry = subprocess.run(add, capture_output=True, text=True, check=True)
    with server.stream("sums", redis_server.url, **names) as stream:
        wait_until(lambda: stream.stats()["answered"] == 1)
    found = subprocess.run(
        [*words, "XRANGE", names["answers"], "-", "+"], capture_output=True, text=True, check=True
    )
    lines = found.stdout.split("\n")
    assert lines[lines.index("output") + 1] == "6.0"
    assert lines[lines.index("id") + 1] == entry.stdout.strip()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"input": "[1, 2"}, "is not JSON"),
        ({"input": "[1, 2]"}, "3"),
        ({"input": "null"}, "or an object with a value for each named tensor"),
        ({"input": '{"a": 1}'}, "expected f64[3], got dict"),
        ({"id": "x"}, "has one of the fields input"),
        ({"input": "[1,2,3]", "text": "x"}, "this has input and text"),
        ({"input": "[1,2,3]", "slo": "5"}, "unknown field 'slo' - did you mean 'slo_ms'"),
        ({"input": "[1,2,3]", "slo_ms": "soon"}, "a number is needed"),
        ({"input": "[1,2,3]", "slo_ms": "-1"}, "must lie above 0"),
        ({"input": "[1,2,3]", "slo_ms": "nan"}, "must lie above 0"),
        ({"input": "[1,2,3]", "context": "b"}, "field 'context' is 'b', which is not JSON"),
        ({"input": "[1,2,3]", "context": "[[1]]"}, "a context of shape (1, 1)"),
        ({"input": "[1,2,3]", "shape": "3"}, "belongs to `data`"),
        (
            {"data": b"\0" * 23, "dtype": "f64", "shape": "3"},
            "`data` has 23 bytes; f64 of shape (3,) has 24",
        ),
        ({"data": b"\0" * 24, "dtype": "f99"}, "field 'dtype'"),
        ({"data": b"\0" * 24, "dtype": "f64", "shape": "a,b"}, "write it as 28,28"),
        ({"text": b"\xff"}, "is not UTF-8"),
        ({"id": b"\xff", "input": "[1,2,3]"}, "is not UTF-8"),
        ({b"\xff": "x"}, "unknown field"),
        ({"id": "i" * 1000, "input": "[1,2,3]"}, "at most 512"),
        ({"input": "[1,2,3]", **{f"q.{i}": "x" for i in range(101)}}, "at most 100"),
    ],
)
def test_a_poison_record_is_refused_with_the_reason_and_the_next_is_answered(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
    fields: dict[Any, Any],
    why: str,
) -> None:
    names = streams(fresh)
    entry = client.xadd(names["source"], fields)
    client.xadd(names["source"], {"input": "[1,2,3]"})
    with server.stream("sums", redis_server.url, **names):
        wait_until(lambda: client.xlen(names["answers"]) == 1)
    (refused,) = answers_of(client, names["source"] + ".refused")
    assert why in refused["refused.reason"]
    assert (refused["refused.entry"], refused["refused.source"]) == (entry, names["source"])
    assert refused["refused.kind"] == "invalid-input"
    assert client.xpending(names["source"], "clipper")["pending"] == 0


def test_records_of_bytes_are_answered_with_arrays_of_bytes(
    server: clipper.ClipperServer, redis_server: RedisServer, fresh: Callable[[], str]
) -> None:
    names = streams(fresh)
    row = np.arange(4, dtype=np.float32).reshape(2, 2)
    with (
        redis.Redis.from_url(redis_server.url) as raw,
        server.stream("doubles", redis_server.url, **names),
    ):
        raw.xadd(names["source"], {"data": row.tobytes(), "dtype": "f32", "shape": "2,2"})
        raw.xadd(names["source"], {"input": "[[0,1],[2,3]]"})
        wait_until(lambda: raw.xlen(names["answers"]) == 2)
        (_, binary), (_, text) = raw.xrange(names["answers"])
    assert (binary[b"dtype"], binary[b"shape"]) == (b"f32", b"2,2")
    assert np.array_equal(np.frombuffer(binary[b"data"], np.float32).reshape(2, 2), row * 2)
    assert json.loads(text[b"output"]) == (row * 2).tolist()


def test_records_of_named_tensors_are_answered_with_named_outputs(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    def price(columns: dict[str, Any]) -> dict[str, Any]:
        price = np.nan_to_num(columns["age"] * 2, nan=-1)
        photos = [photo[::-1] for photo in columns["photo"]]
        return {
            "price": price,
            "sizes": columns["sizes"],
            "city": columns["city"],
            "photo": photos,
        }

    server.deploy(
        "price",
        price,
        inputs={"age": "f64", "city": "str", "sizes": "i64[*]", "photo": "bytes"},
        outputs={"price": "f64", "sizes": "i64[*]", "city": "str", "photo": "bytes"},
    )
    server.app("prices", models=["price"], slo_ms=5000)
    names = streams(fresh)
    photos = [bytes(range(i)) + b"\xff" for i in range(20)]
    rows = [
        {"age": i, "city": "Bern" * i, "sizes": [*range(i)], "photo": text_of(photo)}
        for i, photo in enumerate(photos)
    ]
    wrong = [{**rows[1], "city": 3}, {**rows[1], "photo": "%"}, {**rows[1], "photo": 3}]
    for row in (*rows, {**rows[1], "age": None}, *wrong):
        client.xadd(names["source"], {"input": json.dumps(row)})
    with server.stream("prices", redis_server.url, **names):
        wait_until(lambda: client.xlen(names["answers"]) == 21)
    found = [json.loads(one["output"]) for one in answers_of(client, names["answers"])]
    prices = [2.0 * i for i in range(20)]
    assert [one["price"] for one in found] == [*prices, -1]
    assert [one["sizes"] for one in found] == [*(row["sizes"] for row in rows), [0]]
    assert [one["city"] for one in found] == [*(row["city"] for row in rows), "Bern"]
    assert [one["photo"] for one in found[:20]] == [text_of(photo[::-1]) for photo in photos]
    reasons = [one["refused.reason"] for one in answers_of(client, names["source"] + ".refused")]
    assert "tensor 'city': expected str, got a int" in reasons[0]
    assert [("photo" in reason and "bytes" in reason) for reason in reasons[1:]] == [False, True]
    assert "base64" in reasons[1]


def test_text_is_passed_unchanged(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    with server.stream("loud", redis_server.url, **names):
        client.xadd(names["source"], {"text": 'say "hé"'})
        client.xadd(names["source"], {"input": '"hé"'})
        wait_until(lambda: client.xlen(names["answers"]) == 2)
    assert [json.loads(one["output"]) for one in answers_of(client, names["answers"])] == [
        'SAY "HÉ"',
        "HÉ",
    ]


def test_records_and_feedback_wait_for_a_missing_application(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    server.app("away", models=["total"], slo_ms=5000, policy="exp4")
    names = streams(fresh)
    names["feedback"] = names["source"] + ".labels"
    with server.stream("away", redis_server.url, **names) as stream:
        server.remove_app("away")
        client.xadd(names["source"], {"input": "[1,2,3]"})
        client.xadd(names["feedback"], {"input": "[1,2,3]", "label": "6"})
        wait_until(lambda: stream.stats()["in_flight"] == 1)
        wait_until(lambda: stream.stats()["feedback"]["in_flight"] == 1)
        server.app("away", models=["total"], slo_ms=5000, policy="exp4")
        wait_until(lambda: stream.stats()["answered"] == 1)
        wait_until(lambda: stream.stats()["feedback"]["answered"] == 1)
    assert [one["output"] for one in answers_of(client, names["answers"])] == ["6.0"]


def test_tensors_of_bytes_wait_for_an_application_that_is_away(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    """A record and feedback are base64: their tensors are not known when they are read."""

    def sizes(columns: dict[str, Any]) -> Any:
        return [float(len(photo)) for photo in columns["photo"]]

    server.deploy("photos", sizes, inputs={"photo": "bytes"})
    server.app("photos", models=["photos"], slo_ms=5000, policy="exp4")
    names = streams(fresh)
    names["feedback"] = names["source"] + ".labels"
    record = json.dumps({"photo": text_of(b"four")})
    with server.stream("photos", redis_server.url, **names) as stream:
        server.remove_app("photos")
        client.xadd(names["source"], {"input": record})
        client.xadd(names["feedback"], {"input": record, "label": "4"})
        wait_until(lambda: stream.stats()["in_flight"] == 1)
        wait_until(lambda: stream.stats()["feedback"]["in_flight"] == 1)
        server.app("photos", models=["photos"], slo_ms=5000, policy="exp4")
        wait_until(lambda: stream.stats()["answered"] + stream.stats()["refused"] == 1)
        wait_until(lambda: not stream.stats()["feedback"]["in_flight"])
        assert stream.stats()["refused"] == 0
        assert stream.stats()["feedback"]["refused"] == 0
    assert [one["output"] for one in answers_of(client, names["answers"])] == ["4.0"]


def test_two_entries_of_one_id_are_answered_once(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    for _ in range(3):
        client.xadd(names["source"], {"id": "same", "input": "[1,2,3]"})
    client.xadd(names["source"], {"id": "other", "input": "[1,2,3]"})
    with server.stream("sums", redis_server.url, **names) as stream:
        wait_until(lambda: client.xlen(names["answers"]) == 2)
    assert [one["id"] for one in answers_of(client, names["answers"])] == ["same", "other"]
    assert stream.stats()["duplicates"] == 2


def test_answers_refusals_and_ids_are_bounded(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh, answers_max=100, refused_max=100, ids_max=50)
    for i in range(600):
        client.xadd(names["source"], {"id": f"i{i}", "input": "[1,2,3]"})
        client.xadd(names["source"], {"input": "bad"})
    with server.stream("sums", redis_server.url, **names) as stream:
        wait_until(lambda: stream.stats()["answered"] == 600 and stream.stats()["refused"] == 600)
    assert client.xlen(names["answers"]) <= 300  # about: Redis trims whole nodes of 100
    assert client.xlen(names["source"] + ".refused") <= 300
    assert client.zcard(f"{names['answers']}:clipper:ids") == 50


def test_wrong_settings_are_refused_at_once(
    server: clipper.ClipperServer, redis_server: RedisServer
) -> None:
    with pytest.raises(UnknownApplication):
        server.stream("none", redis_server.url)
    with pytest.raises(
        InvalidInput, match="unknown setting 'gruop' of a stream - did you mean 'group'"
    ):
        server.stream("sums", redis_server.url, gruop="x")  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="in_flight_max"):
        server.stream("sums", redis_server.url, in_flight_max=0)
    with pytest.raises(InvalidInput, match="three streams"):
        server.stream("sums", redis_server.url, source="a", answers="a")
    with pytest.raises(ConfigError, match="names no Redis server"):
        server.stream("sums", "http://x")


# -- models that are slow, or not there


def test_records_in_flight_are_bounded_by_the_capacity_of_the_models(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    """A model that is held back holds back the reading; all are answered once it goes on."""
    names = streams(fresh, in_flight_max=8)
    with MemoryContainer(server.address, server.token, "held", input="f64[3]") as container:
        container.send_hello()
        server.app("held-app", models=["held"], slo_ms=60_000)
        for i in range(100):
            client.xadd(names["source"], {"input": f"[{i},0,0]"})
        with server.stream("held-app", redis_server.url, **names) as stream:
            batch, rows = container.read_batch()
            wait_until(lambda: stream.stats()["in_flight"] == 8)
            assert client.xpending(names["source"], "clipper")["pending"] == 8
            assert stream.stats()["read"] == 8
            answered = 0
            while answered < 100:
                container.reply(batch, np.asarray(rows).sum(axis=1))
                answered += len(rows)
                if answered < 100:
                    batch, rows = container.read_batch()
                assert client.xpending(names["source"], "clipper")["pending"] <= 8
            wait_until(lambda: client.xlen(names["answers"]) == 100)
    assert [float(one["output"]) for one in answers_of(client, names["answers"])] == list(
        range(100)
    )


def test_records_wait_for_a_model_that_is_not_deployed_yet(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    server.deploy("late", "", input="f64[3]", wait=False)
    server.app(
        "late-app", models=["late"], slo_ms=1000, default=-1
    )  # time to answer in, however busy this machine is
    for i in range(40):
        client.xadd(names["source"], {"input": f"[{i},0,0]"})
    before = server.stats()["answered"]
    with server.stream("late-app", redis_server.url, **names):
        wait_until(
            lambda: server.stats()["answered"] > before + 17
        )  # the first window of 16, and the first of it again
        assert client.xlen(names["answers"]) == 0
        with MemoryContainer(server.address, server.token, "late", input="f64[3]") as container:
            container.serve(lambda rows: np.asarray(rows).sum(axis=1))
            wait_until(lambda: client.xlen(names["answers"]) == 40)
    found = answers_of(client, names["answers"])
    assert [float(one["output"]) for one in found] == list(range(40)), "none got the default"


def test_a_record_gets_the_default_after_patience_s(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh, patience_s=0)
    server.deploy("never", "", input="f64[3]", wait=False)
    server.app("never-app", models=["never"], slo_ms=50, default=-1)
    client.xadd(names["source"], {"input": "[1,0,0]"})
    with server.stream("never-app", redis_server.url, **names):
        wait_until(lambda: client.xlen(names["answers"]) == 1)
    (found,) = answers_of(client, names["answers"])
    assert (found["output"], found["default"]) == ("-1", "1")
    assert "no container of never" in found["reason"]


# -- feedback


def test_feedback_refers_to_a_record_a_prediction_or_an_input(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    name = fresh()
    names = streams(fresh, feedback=f"{name}.told")
    app = server.app(f"learns-{name}", models=["total"], slo_ms=5000, policy="exp4")
    with server.stream(app.name, redis_server.url, **names) as stream:
        entry = client.xadd(names["source"], {"input": "[1,2,3]"})
        client.xadd(names["source"], {"id": "mine", "input": "[1,2,4]"})
        wait_until(lambda: client.xlen(names["answers"]) == 2)
        prediction = answers_of(client, names["answers"])[0]["prediction"]
        client.xadd(f"{name}.told", {"id": entry, "label": "6.0"})
        client.xadd(f"{name}.told", {"id": "mine", "correct": "true"})
        client.xadd(f"{name}.told", {"id": "mine", "correct": "true"})  # again: counts once
        client.xadd(
            f"{name}.told", {"prediction": prediction, "label": "6.0"}
        )  # known by its record already
        client.xadd(f"{name}.told", {"input": "[2,2,2]", "label": "6.0"})
        client.xadd(f"{name}.told", {"id": "unheard of", "label": "6.0"})
        client.xadd(f"{name}.told", {"id": "mine2", "label": "six"})
        wait_until(
            lambda: (
                client.xpending(f"{name}.told", "clipper")["pending"] == 0
                and stream.stats()["feedback"]["read"] == 7
            )
        )
        wait_until(lambda: stream.stats()["feedback"]["in_flight"] == 0)
    assert app._resolve(app.name).learner.state(None).seen == 3
    refused = [fields["refused.kind"] for fields in answers_of(client, f"{name}.told.refused")]
    assert refused == ["prediction-not-found", "invalid-input"]
    assert stream.stats()["feedback"]["duplicates"] == 1


def test_any_server_of_the_group_learns_about_a_record(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    """The server that answered has ended: the record is read from its stream again."""
    name = fresh()
    names = streams(fresh)
    app = server.app(f"learns-{name}", models=["total"], slo_ms=5000, policy="exp4")
    with server.stream(app.name, redis_server.url, **names):
        client.xadd(names["source"], {"id": "mine", "input": "[1,2,4]", "user": "ann"})
        wait_until(lambda: client.xlen(names["answers"]) == 1)
    with server.stream(app.name, redis_server.url, feedback=f"{name}.told", **names) as other:
        client.xadd(f"{name}.told", {"id": "mine", "label": "7.0"})
        wait_until(lambda: other.stats()["feedback"]["answered"] == 1)
    with server.stream(app.name, redis_server.url, feedback=f"{name}.told", **names) as third:
        client.xadd(f"{name}.told", {"id": "mine", "label": "7.0"})
        wait_until(lambda: third.stats()["feedback"]["duplicates"] == 1)
    assert app._resolve(app.name).learner.state("ann").seen == 1


# -- several servers


def test_two_servers_share_the_records_of_a_group(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    with (
        server.stream("sums", redis_server.url, **names) as one,
        server.stream("sums", redis_server.url, **names) as two,
    ):
        pipe = client.pipeline(transaction=False)
        for i in range(3000):
            pipe.xadd(names["source"], {"input": f"[{i},0,0]"})
        pipe.execute()
        wait_until(lambda: client.xlen(names["answers"]) == 3000)
        wait_until(lambda: one.stats()["answered"] + two.stats()["answered"] == 3000)
    assert min(one.stats()["answered"], two.stats()["answered"]) > 0
    assert sorted(float(one["output"]) for one in answers_of(client, names["answers"])) == list(
        range(3000)
    )


def test_each_group_answers_all_records(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    client.xadd(names["source"], {"id": "x", "input": "[1,2,3]"})
    with (
        server.stream("sums", redis_server.url, group="a", **names),
        server.stream("sums", redis_server.url, group="b", **names),
    ):
        wait_until(lambda: client.xlen(names["answers"]) == 2)


def test_records_in_work_are_not_claimed_and_ended_consumers_are_removed(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clipper.frontend.streams.consumer_group._FORGET_PERIODS", 1)
    names = streams(
        fresh, claim_s=2
    )  # said again every 0.7 s: a busy machine may be late with that
    with MemoryContainer(server.address, server.token, "slow", input="f64[3]") as container:
        container.send_hello()
        server.app("slow-app", models=["slow"], slo_ms=60_000)
        client.xadd(names["source"], {"input": "[1,2,3]"})
        with server.stream("slow-app", redis_server.url, **names) as one:
            batch, rows = container.read_batch()
            client.xgroup_createconsumer(names["source"], "clipper", "long gone")
            with server.stream("slow-app", redis_server.url, **names) as two:
                wait_until(
                    lambda: (
                        "long gone" not in str(client.xinfo_consumers(names["source"], "clipper"))
                    )
                )
                # that took a claim period and more
                assert (two.stats()["reclaimed"], two.stats()["read"]) == (0, 0)
                container.reply(batch, np.asarray(rows).sum(axis=1))
                wait_until(lambda: one.stats()["answered"] == 1)
    assert client.xlen(names["answers"]) == 1


def test_records_trimmed_before_their_answer_are_counted(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    if int(client.info("server")["redis_version"].split(".")[0]) < 7:
        pytest.skip("Redis before 7 does not tell")
    names = streams(fresh, claim_s=0.1)
    client.xadd(names["source"], {"input": "[1,2,3]"})
    client.xgroup_create(names["source"], "clipper", id="0")
    client.xreadgroup("clipper", "dead", {names["source"]: ">"})
    client.xtrim(names["source"], maxlen=0, approximate=False)
    with server.stream("sums", redis_server.url, **names) as stream:
        wait_until(lambda: stream.stats()["trimmed"] == 1)
    assert client.xpending(names["source"], "clipper")["pending"] == 0


# -- faults


def test_a_stream_continues_after_redis_is_killed(
    server: clipper.ClipperServer, own_redis: RedisServer, fresh: Callable[[], str]
) -> None:
    names = streams(fresh, claim_s=0.5)
    draw = random.Random(3)
    app, sent = server.app("sums"), 0
    with (
        redis.Redis.from_url(own_redis.url) as client,
        server.stream("sums", own_redis.url, **names) as stream,
    ):
        for _ in range(3):
            pipe = client.pipeline(transaction=False)
            for i in range(sent, sent + 2000):
                pipe.xadd(names["source"], {"input": f"[{i},0,0]"})
            pipe.execute()
            few, sent = sent + draw.randrange(1, 500), sent + 2000
            wait_until(lambda few=few: client.xlen(names["answers"]) >= few)
            own_redis.kill()
            assert (
                app.predict(np.array([1.0, 2, sent]), slo_ms=5000).result(5).output == 3 + sent
            ), "others go on"
            wait_until(lambda: stream.stats()["trouble"])
            own_redis.start()
        wait_until(lambda: client.xlen(names["answers"]) >= sent)
        wait_until(lambda: stream.stats()["in_flight"] == 0)
        found = [float(fields[b"output"]) for _, fields in client.xrange(names["answers"])]
        assert sorted(found) == list(range(sent))
        assert stream.stats()["reconnects"] >= 1
        assert client.xpending(names["source"], "clipper")["pending"] == 0


def test_a_stream_continues_after_redis_is_frozen_read_only_or_wiped(
    server: clipper.ClipperServer,
    own_redis: RedisServer,
    fresh: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clipper.frontend.streams.consumer_group.PATIENCE_S", 0.3)
    names = streams(fresh, claim_s=0.5)
    app = server.app("sums")
    with (
        redis.Redis.from_url(own_redis.url) as client,
        server.stream("sums", own_redis.url, **names) as stream,
    ):
        wait_until(lambda: client.exists(names["source"]))
        own_redis.signal(signal.SIGSTOP)
        wait_until(lambda: stream.stats()["trouble"])
        assert app.predict(np.array([1.0, 2, 4]), slo_ms=5000).result(5).output == 7.0
        own_redis.signal(signal.SIGCONT)
        wait_until(lambda: not stream.stats()["trouble"])
        client.xadd(names["source"], {"input": "[1,0,0]"})
        client.replicaof("127.0.0.1", "1")
        wait_until(lambda: "ReadOnly" in stream.stats()["trouble"])
        client.replicaof("no", "one")
        wait_until(lambda: client.xlen(names["answers"]) == 1)
        client.flushall()
        client.xadd(names["source"], {"input": "[2,0,0]"})
        wait_until(lambda: client.xlen(names["answers"]) == 1)
        ((_, only),) = client.xrange(names["answers"])
        assert only[b"output"] == b"2.0"


def test_answers_that_cannot_be_written_leave_their_records_pending(
    server: clipper.ClipperServer, own_redis: RedisServer, fresh: Callable[[], str]
) -> None:
    """Redis has no memory left: it refuses what adds and takes what acknowledges."""
    names = streams(fresh)
    with (
        redis.Redis.from_url(own_redis.url) as client,
        server.stream("sums", own_redis.url, **names) as stream,
    ):
        for i in range(20):
            client.xadd(names["source"], {"input": f"[{i},0,0]"})
            if i == 9:
                wait_until(lambda: client.xlen(names["answers"]) == 10)
                client.set(names["answers"] + ".kept", b"")
                client.rename(names["answers"], "kept")
                client.set(names["answers"], "no stream")
        wait_until(lambda: "WRONGTYPE" in stream.stats()["trouble"])
        assert client.xpending(names["source"], "clipper")["pending"] >= 1
        client.config_set("maxmemory", "1")
        client.delete(names["answers"])
        wait_until(
            lambda: "OOM" in stream.stats()["trouble"] or "OutOfMemory" in stream.stats()["trouble"]
        )
        assert client.xlen(names["answers"]) == 0
        client.config_set("maxmemory", "0")
        wait_until(lambda: client.xlen(names["answers"]) == 10)
        assert [float(fields[b"output"]) for _, fields in client.xrange(names["answers"])] == list(
            range(10, 20)
        )


def test_a_stream_starts_before_its_redis(
    server: clipper.ClipperServer, own_redis: RedisServer, fresh: Callable[[], str]
) -> None:
    own_redis.kill()
    names = streams(fresh)
    with server.stream("sums", own_redis.url, **names) as stream:
        wait_until(lambda: stream.stats()["trouble"])
        own_redis.start()
        with redis.Redis.from_url(own_redis.url) as client:
            client.xadd(names["source"], {"input": "[1,2,3]"})
            wait_until(lambda: client.xlen(names["answers"]) == 1)


def test_a_record_that_is_never_answered_is_refused_after_deliveries_max(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh, claim_s=0.1, deliveries_max=2)
    client.xadd(names["source"], {"input": "[1,2,3]"})
    client.xgroup_create(names["source"], "clipper", id="0")
    for i in range(3):  # servers that took it, and died of it
        client.xreadgroup("clipper", f"dead{i}", {names["source"]: ">"})
        client.xclaim(
            names["source"], "clipper", f"dead{i}", 0, [client.xrange(names["source"])[0][0]]
        )
    with server.stream("sums", redis_server.url, **names):
        wait_until(lambda: client.xlen(names["source"] + ".refused") == 1)
    (refused,) = answers_of(client, names["source"] + ".refused")
    assert refused["refused.kind"] == "poison"
    assert client.xlen(names["answers"]) == 0


def test_a_stopped_stream_leaves_unanswered_records_to_other_servers(
    server: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    fresh: Callable[[], str],
) -> None:
    names = streams(fresh)
    server.deploy("absent", "", input="f64[3]", wait=False)
    server.app("absent-app", models=["absent"], slo_ms=50, default=-1)
    client.xadd(names["source"], {"input": "[1,2,3]"})
    stream = server.stream("absent-app", redis_server.url, **names)
    wait_until(lambda: stream.stats()["in_flight"] == 1)
    stream.stop(0)
    stream.stop(0)
    assert client.xlen(names["answers"]) == 0
    assert client.xpending(names["source"], "clipper")["pending"] == 1
    with server.stream("sums", redis_server.url, claim_s=0.1, **names):
        wait_until(lambda: client.xlen(names["answers"]) == 1)


def test_a_configuration_declares_streams(
    redis_server: RedisServer, client: Client, fresh: Callable[[], str]
) -> None:
    """`clipper up` declares streams of a file; `app` and `models` of a stream are those of the
    file."""
    names = streams(fresh)
    settings = {
        "streams": {"in": {"app": "sums", "url": redis_server.url, **names}},
        "model_streams": {"live": {"url": redis_server.url, "stream": names["source"] + ".models"}},
    }
    with clipper.start(**settings, apps={"sums": {"slo_ms": 5000}}) as server:
        server.deploy("total", lambda xs: xs.sum(axis=1), input="f64[3]")
        server.app("sums", models=["total"])
        client.xadd(names["source"], {"input": "[1,2,3]"})
        client.xadd(names["source"] + ".models", {"name": "m"})
        wait_until(lambda: client.xlen(names["answers"]) == 1)
        wait_until(lambda: client.xlen(names["source"] + ".models.refused") == 1)


def test_a_server_that_closes_stops_its_streams(
    redis_server: RedisServer, client: Client, fresh: Callable[[], str]
) -> None:
    names = streams(fresh)
    for i in range(2000):
        client.xadd(names["source"], {"input": f"[{i},0,0]"})
    with clipper.start(drain_s=5) as server:
        server.deploy("total", lambda xs: xs.sum(axis=1), input="f64[3]")
        server.app("sums", models=["total"], slo_ms=5000, default=-1)
        stream = server.stream("sums", redis_server.url, **names)
        wait_until(lambda: stream.stats()["answered"] > 10)
    found = [float(one["output"]) for one in answers_of(client, names["answers"])]
    assert found == list(range(len(found))), "what was read is answered, and not by the default"
    assert client.xpending(names["source"], "clipper")["pending"] == 0
    assert not stream.stats()["running"]


def test_predictions_continue_while_a_stream_has_no_redis(
    server: clipper.ClipperServer, fresh: Callable[[], str]
) -> None:
    names = streams(fresh)
    with server.stream("sums", f"unix:///nowhere-{os.getpid()}.sock", **names) as stream:
        wait_until(lambda: stream.stats()["trouble"])
        app = server.app("sums")
        assert [app.predict(np.full(3, float(i))).result(5).output for i in range(100)] == [
            3.0 * i for i in range(100)
        ]
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("clipper-stream")
    ]
