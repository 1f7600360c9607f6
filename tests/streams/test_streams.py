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
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import ConfigError, InvalidInput, UnknownApplication
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.streams.conftest import World

redis = pytest.importorskip("redis")


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


# -- records and answers


def test_records_are_answered_in_order(world: World) -> None:
    for i in range(500):
        world.client.xadd(
            world.source, {"id": f"r{i}", "input": json.dumps([i, 1, 2.5]), "q.trace": f"t{i}"}
        )
    begun = time.monotonic_ns()
    with world.stream() as stream:
        world.wait(500)
    took_us = (time.monotonic_ns() - begun) / 1000
    found = world.rows(world.answers)
    assert [one["id"] for one in found] == [f"r{i}" for i in range(500)]
    assert [float(one["output"]) for one in found] == [i + 3.5 for i in range(500)]
    assert found[7]["q.trace"] == "t7"
    assert found[7]["models"] == "total:1"
    assert (found[7]["default"], found[7]["missing"]) == ("0", "")
    assert 0 < int(found[7]["latency_us"]) <= took_us
    assert stream.stats()["answered"] == 500
    assert world.pending() == 0
    assert world.client.xinfo_consumers(world.source, "clipper") == [], (
        "a consumer that left is forgotten"
    )


def test_records_are_written_and_read_with_redis_cli(world: World) -> None:
    words = ["redis-cli", "-s", world.url.removeprefix("unix://")]
    add = [*words, "XADD", world.source, "*", "input", "[1, 2, 3]"]
    entry = subprocess.run(add, capture_output=True, text=True, check=True)
    with world.stream() as stream:
        wait_until(lambda: stream.stats()["answered"] == 1)
    found = subprocess.run(
        [*words, "XRANGE", world.answers, "-", "+"], capture_output=True, text=True, check=True
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
    world: World, fields: dict[Any, Any], why: str
) -> None:
    entry = world.client.xadd(world.source, fields)
    world.add(input="[1,2,3]")
    with world.stream():
        world.wait(1)
    (refused,) = world.rows(world.refused)
    assert why in refused["refused.reason"]
    assert (refused["refused.entry"], refused["refused.source"]) == (entry, world.source)
    assert refused["refused.kind"] == "invalid-input"
    assert world.pending() == 0


def test_records_of_bytes_are_answered_with_arrays_of_bytes(world: World) -> None:
    row = np.arange(4, dtype=np.float32).reshape(2, 2)
    with redis.Redis.from_url(world.url) as raw, world.stream("doubles"):
        raw.xadd(world.source, {"data": row.tobytes(), "dtype": "f32", "shape": "2,2"})
        raw.xadd(world.source, {"input": "[[0,1],[2,3]]"})
        wait_until(lambda: raw.xlen(world.answers) == 2)
        (_, binary), (_, text) = raw.xrange(world.answers)
    assert (binary[b"dtype"], binary[b"shape"]) == (b"f32", b"2,2")
    assert np.array_equal(np.frombuffer(binary[b"data"], np.float32).reshape(2, 2), row * 2)
    assert json.loads(text[b"output"]) == (row * 2).tolist()


def test_records_of_named_tensors_are_answered_with_named_outputs(world: World) -> None:
    def price(columns: dict[str, Any]) -> dict[str, Any]:
        price = np.nan_to_num(columns["age"] * 2, nan=-1)
        photos = [photo[::-1] for photo in columns["photo"]]
        return {"price": price, "sizes": columns["sizes"], "city": columns["city"], "photo": photos}

    world.server.deploy(
        "price",
        price,
        inputs={"age": "f64", "city": "str", "sizes": "i64[*]", "photo": "bytes"},
        outputs={"price": "f64", "sizes": "i64[*]", "city": "str", "photo": "bytes"},
    )
    world.server.app("prices", models=["price"], slo_ms=5000)
    photos = [bytes(range(i)) + b"\xff" for i in range(20)]
    rows = [
        {"age": i, "city": "Bern" * i, "sizes": [*range(i)], "photo": text_of(photo)}
        for i, photo in enumerate(photos)
    ]
    wrong = [{**rows[1], "city": 3}, {**rows[1], "photo": "%"}, {**rows[1], "photo": 3}]
    for row in (*rows, {**rows[1], "age": None}, *wrong):
        world.add(input=json.dumps(row))
    with world.stream("prices"):
        world.wait(21)
    found = [json.loads(one["output"]) for one in world.rows(world.answers)]
    prices = [2.0 * i for i in range(20)]
    assert [one["price"] for one in found] == [*prices, -1]
    assert [one["sizes"] for one in found] == [*(row["sizes"] for row in rows), [0]]
    assert [one["city"] for one in found] == [*(row["city"] for row in rows), "Bern"]
    assert [one["photo"] for one in found[:20]] == [text_of(photo[::-1]) for photo in photos]
    reasons = [one["refused.reason"] for one in world.rows(world.refused)]
    assert "tensor 'city': expected str, got a int" in reasons[0]
    assert [("photo" in reason and "bytes" in reason) for reason in reasons[1:]] == [False, True]
    assert "base64" in reasons[1]


def test_text_is_passed_unchanged(world: World) -> None:
    with world.stream("loud"):
        world.add(text='say "hé"')
        world.add(input='"hé"')
        world.wait(2)
    assert [json.loads(one["output"]) for one in world.rows(world.answers)] == ['SAY "HÉ"', "HÉ"]


def test_records_and_feedback_wait_for_a_missing_application(world: World) -> None:
    world.server.app("away", models=["total"], slo_ms=5000, policy="exp4")
    with world.stream("away", feedback=world.feedback) as stream:
        world.server.remove_app("away")
        world.add(input="[1,2,3]")
        world.tell(input="[1,2,3]", label="6")
        wait_until(lambda: stream.stats()["in_flight"] == 1)
        wait_until(lambda: stream.stats()["feedback"]["in_flight"] == 1)
        world.server.app("away", models=["total"], slo_ms=5000, policy="exp4")
        wait_until(lambda: stream.stats()["answered"] == 1)
        wait_until(lambda: stream.stats()["feedback"]["answered"] == 1)
    assert [one["output"] for one in world.rows(world.answers)] == ["6.0"]


def test_tensors_of_bytes_wait_for_an_application_that_is_away(world: World) -> None:
    """A record and feedback are base64: their tensors are not known when they are read."""

    def sizes(columns: dict[str, Any]) -> Any:
        return [float(len(photo)) for photo in columns["photo"]]

    world.server.deploy("photos", sizes, inputs={"photo": "bytes"})
    world.server.app("photos", models=["photos"], slo_ms=5000, policy="exp4")
    record = json.dumps({"photo": text_of(b"four")})
    with world.stream("photos", feedback=world.feedback) as stream:
        world.server.remove_app("photos")
        world.add(input=record)
        world.tell(input=record, label="4")
        wait_until(lambda: stream.stats()["in_flight"] == 1)
        wait_until(lambda: stream.stats()["feedback"]["in_flight"] == 1)
        world.server.app("photos", models=["photos"], slo_ms=5000, policy="exp4")
        wait_until(lambda: stream.stats()["answered"] + stream.stats()["refused"] == 1)
        wait_until(lambda: not stream.stats()["feedback"]["in_flight"])
        assert stream.stats()["refused"] == 0
        assert stream.stats()["feedback"]["refused"] == 0
    assert [one["output"] for one in world.rows(world.answers)] == ["4.0"]


def test_two_entries_of_one_id_are_answered_once(world: World) -> None:
    for _ in range(3):
        world.add(id="same", input="[1,2,3]")
    world.add(id="other", input="[1,2,3]")
    with world.stream() as stream:
        world.wait(2)
    assert [one["id"] for one in world.rows(world.answers)] == ["same", "other"]
    assert stream.stats()["duplicates"] == 2


def test_answers_refusals_and_ids_are_bounded(world: World) -> None:
    for i in range(600):
        world.add(id=f"i{i}", input="[1,2,3]")
        world.add(input="bad")
    with world.stream(answers_max=100, refused_max=100, ids_max=50) as stream:
        wait_until(lambda: stream.stats()["answered"] == 600 and stream.stats()["refused"] == 600)
    assert world.client.xlen(world.answers) <= 300  # about: Redis trims whole nodes of 100
    assert world.client.xlen(world.refused) <= 300
    assert world.client.zcard(f"{world.answers}:clipper:ids") == 50


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


def test_records_in_flight_are_bounded_by_the_capacity_of_the_models(world: World) -> None:
    """A model that is held back holds back the reading; all are answered once it goes on."""
    with world.container("held") as container:
        container.send_hello()
        world.server.app("held-app", models=["held"], slo_ms=60_000)
        world.add_many(100)
        with world.stream("held-app", in_flight_max=8) as stream:
            batch, rows = container.read_batch()
            wait_until(lambda: stream.stats()["in_flight"] == 8)
            assert world.pending() == 8
            assert stream.stats()["read"] == 8
            answered = 0
            while answered < 100:
                container.reply(batch, np.asarray(rows).sum(axis=1))
                answered += len(rows)
                if answered < 100:
                    batch, rows = container.read_batch()
                assert world.pending() <= 8
            world.wait(100)
    assert world.outputs() == list(range(100))


def test_records_wait_for_a_model_that_is_not_deployed_yet(world: World) -> None:
    world.server.deploy("late", "", input="f64[3]", wait=False)
    # time to answer in, however busy this machine is
    world.server.app("late-app", models=["late"], slo_ms=1000, default=-1)
    world.add_many(40)
    before = world.server.stats()["answered"]
    with world.stream("late-app"):
        # the first window of 16, and the first of it again
        wait_until(lambda: world.server.stats()["answered"] > before + 17)
        assert world.client.xlen(world.answers) == 0
        with world.container("late") as container:
            container.serve(lambda rows: np.asarray(rows).sum(axis=1))
            world.wait(40)
    assert world.outputs() == list(range(40)), "none got the default"


def test_a_record_gets_the_default_after_patience_s(world: World) -> None:
    world.server.deploy("never", "", input="f64[3]", wait=False)
    world.server.app("never-app", models=["never"], slo_ms=50, default=-1)
    world.add(input="[1,0,0]")
    with world.stream("never-app", patience_s=0):
        world.wait(1)
    (found,) = world.rows(world.answers)
    assert (found["output"], found["default"]) == ("-1", "1")
    assert "no container of never" in found["reason"]


# -- feedback


def test_feedback_refers_to_a_record_a_prediction_or_an_input(world: World) -> None:
    app = world.server.app(f"learns-{world.source}", models=["total"], slo_ms=5000, policy="exp4")
    with world.stream(app.name, feedback=world.feedback) as stream:
        entry = world.add(input="[1,2,3]")
        world.add(id="mine", input="[1,2,4]")
        world.wait(2)
        prediction = world.rows(world.answers)[0]["prediction"]
        world.tell(id=entry, label="6.0")
        world.tell(id="mine", correct="true")
        # again: counts once
        world.tell(id="mine", correct="true")
        # known by its record already
        world.tell(prediction=prediction, label="6.0")
        world.tell(input="[2,2,2]", label="6.0")
        world.tell(id="unheard of", label="6.0")
        world.tell(id="mine2", label="six")
        wait_until(
            lambda: (
                world.client.xpending(world.feedback, "clipper")["pending"] == 0
                and stream.stats()["feedback"]["read"] == 7
            )
        )
        wait_until(lambda: stream.stats()["feedback"]["in_flight"] == 0)
    assert app._resolve(app.name).learner.state(None).seen == 3
    refused = [fields["refused.kind"] for fields in world.rows(world.feedback + ".refused")]
    assert refused == ["prediction-not-found", "invalid-input"]
    assert stream.stats()["feedback"]["duplicates"] == 1


def test_any_server_of_the_group_learns_about_a_record(world: World) -> None:
    """The server that answered has ended: the record is read from its stream again."""
    app = world.server.app(f"learns-{world.source}", models=["total"], slo_ms=5000, policy="exp4")
    with world.stream(app.name):
        world.add(id="mine", input="[1,2,4]", user="ann")
        world.wait(1)
    with world.stream(app.name, feedback=world.feedback) as other:
        world.tell(id="mine", label="7.0")
        wait_until(lambda: other.stats()["feedback"]["answered"] == 1)
    with world.stream(app.name, feedback=world.feedback) as third:
        world.tell(id="mine", label="7.0")
        wait_until(lambda: third.stats()["feedback"]["duplicates"] == 1)
    assert app._resolve(app.name).learner.state("ann").seen == 1


# -- several servers


def test_two_servers_share_the_records_of_a_group(world: World) -> None:
    sent = 0
    with world.stream() as one, world.stream() as two:

        def both_answer() -> bool:
            """Add records, and wait for their answers; return whether both have given some. One may
            be quick enough to give all of a round."""
            nonlocal sent
            world.add_many(1000, sent)
            sent += 1000
            world.wait(sent)
            return min(one.stats()["answered"], two.stats()["answered"]) > 0

        wait_until(both_answer)
        wait_until(lambda: one.stats()["answered"] + two.stats()["answered"] == sent)
    assert sorted(world.outputs()) == list(range(sent))


def test_each_group_answers_all_records(world: World) -> None:
    world.add(id="x", input="[1,2,3]")
    with world.stream(group="a"), world.stream(group="b"):
        world.wait(2)


def test_records_in_work_are_not_claimed_and_ended_consumers_are_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.frontend.streams.consumer_group._FORGET_PERIODS", 1)
    with world.container("slow") as container:
        container.send_hello()
        world.server.app("slow-app", models=["slow"], slo_ms=60_000)
        world.add(input="[1,2,3]")
        with world.stream("slow-app", claim_s=2) as one:
            batch, rows = container.read_batch()
            world.client.xgroup_createconsumer(world.source, "clipper", "long gone")
            with world.stream("slow-app", claim_s=2) as two:
                wait_until(
                    lambda: (
                        "long gone"
                        not in str(world.client.xinfo_consumers(world.source, "clipper"))
                    )
                )
                # that took a claim period and more
                assert (two.stats()["reclaimed"], two.stats()["read"]) == (0, 0)
                container.reply(batch, np.asarray(rows).sum(axis=1))
                wait_until(lambda: one.stats()["answered"] == 1)
    assert world.client.xlen(world.answers) == 1


def test_records_trimmed_before_their_answer_are_counted(world: World) -> None:
    if int(world.client.info("server")["redis_version"].split(".")[0]) < 7:
        pytest.skip("Redis before 7 does not tell")
    world.add(input="[1,2,3]")
    world.client.xgroup_create(world.source, "clipper", id="0")
    world.client.xreadgroup("clipper", "dead", {world.source: ">"})
    world.client.xtrim(world.source, maxlen=0, approximate=False)
    with world.stream(claim_s=0.1) as stream:
        wait_until(lambda: stream.stats()["trimmed"] == 1)
    assert world.pending() == 0


# -- faults


def test_a_stream_continues_after_redis_is_killed(own: World, own_redis: RedisServer) -> None:
    draw = random.Random(3)
    app, sent = own.server.app("sums"), 0
    with own.stream(claim_s=0.5) as stream:
        for _ in range(3):
            own.add_many(2000, sent)
            few, sent = sent + draw.randrange(1, 500), sent + 2000
            wait_until(lambda few=few: own.client.xlen(own.answers) >= few)
            own_redis.kill()
            answer = app.predict(np.array([1.0, 2, sent])).result(60)
            assert answer.output == 3 + sent, "others go on"
            wait_until(lambda: stream.stats()["trouble"])
            own_redis.start()
        wait_until(lambda: own.client.xlen(own.answers) >= sent)
        wait_until(lambda: stream.stats()["in_flight"] == 0)
        assert sorted(own.outputs()) == list(range(sent))
        assert stream.stats()["reconnects"] >= 1
        assert own.pending() == 0


def test_a_stream_continues_after_redis_is_frozen_read_only_or_wiped(
    own: World, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.frontend.streams.consumer_group.PATIENCE_S", 0.3)
    app = own.server.app("sums")
    with own.stream(claim_s=0.5) as stream:
        wait_until(lambda: own.client.exists(own.source))
        own_redis.send(signal.SIGSTOP)
        wait_until(lambda: stream.stats()["trouble"])
        assert app.predict(np.array([1.0, 2, 4])).result(60).output == 7.0
        own_redis.send(signal.SIGCONT)
        wait_until(lambda: not stream.stats()["trouble"])
        own.add(input="[1,0,0]")
        own.client.replicaof("127.0.0.1", "1")
        wait_until(lambda: "ReadOnly" in stream.stats()["trouble"])
        own.client.replicaof("no", "one")
        own.wait(1)
        own.client.flushall()
        own.add(input="[2,0,0]")
        own.wait(1)
        assert own.outputs() == [2.0]


def test_answers_that_cannot_be_written_leave_their_records_pending(
    own: World, own_redis: RedisServer
) -> None:
    """Redis has no memory left: it refuses what adds and takes what acknowledges."""
    with own.stream() as stream:
        for i in range(20):
            own.add(input=f"[{i},0,0]")
            if i == 9:
                own.wait(10)
                own.client.set(own.answers + ".kept", b"")
                own.client.rename(own.answers, "kept")
                own.client.set(own.answers, "no stream")
        wait_until(lambda: "WRONGTYPE" in stream.stats()["trouble"])
        assert own.pending() >= 1
        own.client.config_set("maxmemory", "1")
        own.client.delete(own.answers)
        wait_until(
            lambda: "OOM" in stream.stats()["trouble"] or "OutOfMemory" in stream.stats()["trouble"]
        )
        assert own.client.xlen(own.answers) == 0
        own.client.config_set("maxmemory", "0")
        own.wait(10)
        assert own.outputs() == list(range(10, 20))


def test_a_stream_starts_before_its_redis(own: World, own_redis: RedisServer) -> None:
    own_redis.kill()
    with own.stream() as stream:
        wait_until(lambda: stream.stats()["trouble"])
        own_redis.start()
        own.add(input="[1,2,3]")
        own.wait(1)


def test_a_record_that_is_never_answered_is_refused_after_deliveries_max(world: World) -> None:
    world.add(input="[1,2,3]")
    world.client.xgroup_create(world.source, "clipper", id="0")
    for i in range(3):  # servers that took it, and died of it
        world.client.xreadgroup("clipper", f"dead{i}", {world.source: ">"})
        world.client.xclaim(
            world.source, "clipper", f"dead{i}", 0, [world.client.xrange(world.source)[0][0]]
        )
    with world.stream(claim_s=0.1, deliveries_max=2):
        world.wait(1, world.refused)
    (refused,) = world.rows(world.refused)
    assert refused["refused.kind"] == "poison"
    assert world.client.xlen(world.answers) == 0


def test_a_stopped_stream_leaves_unanswered_records_to_other_servers(world: World) -> None:
    world.server.deploy("absent", "", input="f64[3]", wait=False)
    world.server.app("absent-app", models=["absent"], slo_ms=50, default=-1)
    world.add(input="[1,2,3]")
    stream = world.stream("absent-app")
    wait_until(lambda: stream.stats()["in_flight"] == 1)
    stream.stop(0)
    stream.stop(0)
    assert world.client.xlen(world.answers) == 0
    assert world.pending() == 1
    with world.stream(claim_s=0.1):
        world.wait(1)


def test_a_configuration_declares_streams(world: World) -> None:
    """`clipper up` declares streams of a file; `app` and `models` of a stream are those of the
    file."""
    settings = {
        "streams": {"in": {"app": "sums", "url": world.url, **world.names}},
        "model_streams": {"live": {"url": world.url, "stream": world.source + ".models"}},
    }
    with clipper.start(**settings, apps={"sums": {"slo_ms": 5000}}) as server:
        server.deploy("total", lambda xs: xs.sum(axis=1), input="f64[3]")
        server.app("sums", models=["total"])
        world.add(input="[1,2,3]")
        world.client.xadd(world.source + ".models", {"name": "m"})
        world.wait(1)
        world.wait(1, world.source + ".models.refused")


def test_a_server_that_closes_stops_its_streams(world: World) -> None:
    world.add_many(2000)
    with clipper.start(drain_s=5) as server:
        server.deploy("total", lambda xs: xs.sum(axis=1), input="f64[3]")
        server.app("sums", models=["total"], slo_ms=5000, default=-1)
        stream = server.stream("sums", world.url, **world.names)
        wait_until(lambda: stream.stats()["answered"] > 10)
    found = world.outputs()
    assert found == list(range(len(found))), "what was read is answered, and not by the default"
    assert world.pending() == 0
    assert not stream.stats()["running"]


def test_predictions_continue_while_a_stream_has_no_redis(server: clipper.ClipperServer) -> None:
    with server.stream("sums", f"unix:///nowhere-{os.getpid()}.sock") as stream:
        wait_until(lambda: stream.stats()["trouble"])
        app = server.app("sums")
        assert [app.predict(np.full(3, float(i))).result(60).output for i in range(100)] == [
            3.0 * i for i in range(100)
        ]
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("clipper-stream")
    ]
