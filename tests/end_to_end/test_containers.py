"""Containers that were started elsewhere: which are admitted, which are not, and many at once on
one loop thread."""

import gc
import os
import sys
import threading
import zlib
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, UnknownModel, UnknownVersion
from clipper_container.wire.frames import Kind
from tests.memory_container import MemoryContainer, wait_until
from tests.processes import Program

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


@pytest.fixture
def memory(server, names):
    """Yield a function that makes containers in this process; drop them and retire their models
    after the test."""
    with made_here(server, names) as make:
        yield make


@pytest.fixture
def many_containers(names):
    """Yield a server and containers of this process, too many for all their threads to send ten
    heartbeats a second on a busy machine."""
    with (
        clipper.start(heartbeat_ms=10_000, drain_s=0.1) as server,
        made_here(server, names) as make,
    ):
        yield server, make


@contextmanager
def made_here(server, names):
    with ExitStack() as stack:
        made = []

        def make(name=None, **fields):
            name = name or next(names)
            container = stack.enter_context(
                MemoryContainer(server.address, fields.pop("token", server.token), name, **fields)
            )
            made.append((name, fields.get("version", 1)))
            return container

        yield make
        stack.close()
        for name, version in dict.fromkeys(made):
            if any(
                (model.name, model.version) == (name, version) for model in server.catalog.models()
            ):
                server.retire(f"{name}:{version}", force=True)


# -- real processes that dial in


def dial(address, folder, *options, token, answer="xs.sum(axis=1) * 2"):
    (folder / "doubler.py").write_text(f"import zlib\ndef double(xs):\n    return {answer}\n")
    words = [sys.executable, "-m", "clipper_container", "serve", "doubler:double"]
    words += ["--connect", address, "--name", "doubler", "--input", "f64[4]", "--code", folder]
    return Program(*words, *options, environment={"CLIPPER_TOKEN": token})


@pytest.mark.parametrize("address", ["unix", "unix:PATH", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("protocol", ["2", "1"])
def test_a_container_dials_in(address, protocol, tmp_path):
    with clipper.start(
        address=address.replace("PATH", f"{tmp_path}/s"), heartbeat_ms=10_000, drain_s=0.2
    ) as server:
        assert server.address.startswith(address[:4])
        process = dial(server.address, tmp_path, "--protocol", protocol, token=server.token)
        wait_until(lambda: "doubler:1" in server.stats()["models"])
        model = server.model("doubler")
        assert model.predict(ROW, slo_ms=10_000).result(20) == 12.0
        assert model.predict_many(np.ones((1000, 4))).result(20).tolist() == [8.0] * 1000
        server.app("d", models=["doubler"], slo_ms=5000, default=-1)
        assert server.app("d").predict(ROW + 1).result().output == 20.0
        assert process.stop() == 0
        wait_until(lambda: server.stats()["models"]["doubler:1"]["replicas"] == [])


def test_only_objects_created_after_the_load_are_garbage_collected(tmp_path):
    with clipper.start(heartbeat_ms=10_000, drain_s=0.2) as server:
        answer = "[float(__import__('gc').get_freeze_count())] * len(xs)"
        process = dial(server.address, tmp_path, token=server.token, answer=answer)
        wait_until(lambda: "doubler:1" in server.stats()["models"])
        assert server.model("doubler").predict(ROW, slo_ms=10_000).result(20) > 1000
        process.stop()


@pytest.mark.parametrize("protocol", ["2", "1"])
@pytest.mark.parametrize(
    ("address", "compression"), [("tcp://127.0.0.1:0", "auto"), ("unix", "full"), ("unix", "auto")]
)
def test_strings_come_through_however_they_are_compressed(address, compression, protocol, tmp_path):
    texts = [f"grüße {i % 7} " * (i % 40) for i in range(500)]
    with clipper.start(
        address=address, compression=compression, heartbeat_ms=10_000, drain_s=0.2
    ) as server:
        options = ("--protocol", protocol, "--input", "str")
        answer = "[float(zlib.crc32(x.encode())) for x in xs]"
        process = dial(server.address, tmp_path, *options, token=server.token, answer=answer)
        wait_until(lambda: "doubler:1" in server.stats()["models"])
        answers = server.model("doubler").predict_many(texts, slo_ms=20_000).result(20)
        assert list(answers) == [float(zlib.crc32(text.encode())) for text in texts]
        process.stop()


def test_a_wrong_token_is_rejected_with_a_message(server, tmp_path):
    process = dial(server.address, tmp_path, token="wrong")
    assert process.wait() == 4
    assert "the token is missing or wrong" in process.output
    assert "CLIPPER_TOKEN" in process.output
    assert "doubler:1" not in server.stats()["models"]


def test_a_container_comes_back_to_a_new_server_at_the_same_address(tmp_path):
    settings = {
        "address": f"unix:{tmp_path}/s",
        "token": "secret",
        "heartbeat_ms": 10_000,
        "drain_s": 0.1,
    }
    with clipper.start(**settings) as server:
        process = dial(server.address, tmp_path, token="secret")
        wait_until(lambda: "doubler:1" in server.stats()["models"])
    with clipper.start(**settings) as server:
        wait_until(lambda: "doubler:1" in server.stats()["models"])
        assert server.model("doubler").predict(ROW, slo_ms=10_000).result(20) == 12.0
        process.stop()


# -- who is let in


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token": "wrong"}, "token is missing or wrong"),
        ({"token": None}, "token is missing or wrong"),
        ({"protocol": 3}, "supports protocols 1 and 2, not 3"),
        ({"protocol": 1}, "protocol 1 must state an input type of i32"),
        ({"protocol": 1, "input": "f32[3]"}, "not f32[3]; or use protocol 2"),
        ({"name": "../etc/passwd"}, "bad model name"),
        ({"name": "Grün"}, "bad model name"),
        ({"name": None}, "HELLO cannot be read"),
        ({"name": 7}, "HELLO cannot be read"),
        ({"version": 0}, "version is a whole number from 1"),
        ({"version": -3}, "version is a whole number from 1"),
        ({"version": 2**40}, "version is a whole number from 1"),
        ({"version": "new"}, "HELLO cannot be read"),
        ({"input": "f64[[3]]"}, "bad input type"),
        ({"output": "image"}, "bad input type"),
        ({"replica": "x" * 60_000}, "HELLO cannot be read"),
    ],
)
def test_a_hello_that_is_refused(server, memory, fields, why):
    before = set(server.stats()["models"])
    with MemoryContainer(server.address, server.token, "refused") as container:
        container.hello |= fields
        container.hello = {
            key: value for key, value in container.hello.items() if value is not None
        }
        kind, text = container.send_hello()
        assert kind is Kind.REFUSE
        assert why in text
        with pytest.raises(OSError, match=r"closed|reset"):
            container.read()
    assert set(server.stats()["models"]) == before


def test_unknown_keys_of_a_hello_are_ignored(memory):
    assert memory(input="f64[4]", colour="blue").send_hello()[0] is Kind.WELCOME


def test_two_containers_that_disagree(server, memory, deploy):
    first = memory(input="f64[4]").serve(total)
    name = first.hello["name"]
    kind, why = memory(name, input="f64[5]").send_hello()
    assert kind is Kind.REFUSE
    assert f"'{name}:1' is registered with input f64[4], this container takes f64[5]" in why
    assert memory(name, input="f64[4]", replica=1).send_hello()[0] is Kind.WELCOME
    model = deploy(total, input="f64[4]", output="f64")
    short = model.name.partition(":")[0]
    kind, why = memory(short, input="f64[4]", output="str").send_hello()
    assert (kind, "registered with output f64" in why) == (Kind.REFUSE, True)


def test_a_retired_model_stays_retired(server, memory):
    container = memory(input="f64[4]").serve(total)
    name = container.hello["name"]
    server.retire(name)
    kind, why = memory(name, input="f64[4]").send_hello()
    assert kind is Kind.REFUSE
    assert "was retired" in why


def test_a_version_that_a_container_names_does_not_replace_the_latest(server, memory):
    first = memory(input="f64[4]").serve(total)
    name = first.hello["name"]
    assert server.model(name).predict(ROW).result(60) == ROW.sum(), "a name without a version"
    app = server.app(name, models=[name], default=-1.0, slo_ms=5000)
    try:
        newer = memory(name, version=99, input="f64[4]").serve(lambda xs: xs[:, 0] * 0 + 99)
        assert server.model(f"{name}:99").predict(ROW).result(60) == 99
        assert app.predict(ROW).result(60).output == ROW.sum()
        newer.close()
        assert app.predict(ROW + 1).result(60).output == (ROW + 1).sum()
        server.manage.promote(f"{name}:99")
        assert server.catalog.view.model(name).version == 99
    finally:
        server.remove_app(name)


def test_a_container_of_an_untyped_model_reports_its_type(server, memory):
    memory(input="f64[4]").serve(total)
    container = memory(input="any").serve(total)
    name = container.hello["name"]
    assert server.model(name).describe_input() == "any"
    memory(name, input="f64[4]", replica=1).serve(total)
    wait_until(lambda: server.model(name).describe_input() == "f64[4]")


def test_two_of_one_number_are_both_shown(server, memory):
    first = memory(input="f64[4]", pid=1).serve(total)
    memory(first.hello["name"], input="f64[4]", pid=2).serve(total)
    shown = wait_until(
        lambda: (
            len(rows := server.stats()["models"][f"{first.hello['name']}:1"]["replicas"]) == 2
            and rows
        )
    )
    assert [row["pid"] for row in shown] == [1, 2]


def test_a_batch_limit_of_the_container_is_kept(server, memory):
    sizes = []
    container = memory(input="f64[4]", batch_max=3)
    container.serve(lambda xs: sizes.append(len(xs)) or xs.sum(axis=1))
    model = server.model(container.hello["name"])
    rows = np.random.default_rng(3).random((100, 4))
    assert np.allclose(model.predict_many(rows).result(60), rows.sum(axis=1))
    assert max(sizes) == 3


# -- replies that are wrong


@pytest.mark.parametrize("count", [1, 2, 4, 100])
def test_a_reply_with_another_count_ends_its_batch(server, memory, count):
    container = memory(input="f64[4]")
    container.send_hello()
    model = server.model(container.hello["name"])
    future = model.predict_many(np.arange(12.0).reshape(3, 4))
    seen = 0
    while seen < 3:
        batch, rows = container.read_batch()
        seen += len(rows)
        container.reply(batch, np.zeros(count if count != len(rows) else count + 1))
    with pytest.raises(clipper.errors.BadOutput, match="another number of outputs"):
        future.result(60)
    future = model.predict(ROW)
    container.reply(container.read_batch()[0], [1.5])  # the connection lives on
    assert future.result(60) == 1.5


def test_a_reply_to_an_old_batch_is_dropped_and_to_a_future_one_closes(server, memory):
    container = memory(input="f64[4]")
    container.send_hello()
    model = server.model(container.hello["name"])
    future = model.predict(ROW)
    batch, _ = container.read_batch()
    container.reply(batch, [1.0])
    container.reply(batch, [2.0])  # twice
    assert future.result(60) == 1.0
    future = model.predict(ROW + 1)
    batch, _ = container.read_batch()
    container.reply(batch + 1000, [3.0])
    with pytest.raises(OSError, match=r"closed|reset"):
        container.read()
    with pytest.raises(clipper.ClipperError):
        model.predict(ROW + 2, slo_ms=50).result(60)
    assert future.cancel() or future.exception() is not None


def test_a_failure_names_the_models_own_words(server, memory):
    container = memory(input="f64[4]")
    container.send_hello()
    future = server.model(container.hello["name"]).predict(ROW)
    container.fail(
        container.read_batch()[0], "Traceback (most recent call last):\n\x1b[31mValueError: \0 evil"
    )
    with pytest.raises(clipper.errors.ModelFailed, match="ValueError"):
        future.result(60)


# -- candidate models


def test_candidate_models(server, deploy, app):
    one = deploy(lambda xs: xs[:, 0] * 0 + 1, input="f64[4]", cache=False)
    two = deploy(
        lambda xs: xs[:, 0] * 0 + 2, input="f64[4]", cache=False, name=one.name.partition(":")[0]
    )
    name = one.name.partition(":")[0]

    def predict(*candidates, **fields):
        request = clipper.PredictionRequest(ROW, candidate_models=candidates, **fields)
        return server.schedule_prediction(request).result(60)

    assert predict(name).output == 2
    assert predict(f"{name}:1").output == 1
    assert predict(clipper.VersionedModel(name, 1)).output == 1
    both = predict(one.name, two.name)
    assert {str(m) for m in both.models} == {one.name, two.name}
    assert both.confidence < 1
    handle = app(two, slo_ms=10_000, default=-1)
    assert predict(one.name, application=handle.name).output == 1
    request = clipper.PredictionRequest(ROW, candidate_models=name)  # type: ignore[arg-type]  # a name by itself
    assert server.schedule_prediction(request).result(60).output == 2
    third = deploy(lambda xs: xs[:, 0] * 0 + 3, input="f64[4]", cache=False, name=name)
    assert predict(name).output == 3
    server.retire(third.name)
    assert predict(name).output == 2


def test_candidates_that_are_not_there(server, deploy):
    model = deploy(total, input="f64[4]")
    name = model.name.partition(":")[0]
    for candidate, error in (
        (f"{name}x", UnknownModel),
        (f"{name}:9", UnknownVersion),
        ("No!", InvalidInput),
    ):
        with pytest.raises(error):
            server.schedule_prediction(
                clipper.PredictionRequest(ROW, candidate_models=(candidate,))
            )
    with pytest.raises(InvalidInput, match="names neither"):
        server.schedule_prediction(clipper.PredictionRequest(ROW))


# -- many


def test_eighty_containers_on_one_loop_thread(many_containers):
    """The server has one descriptor and no thread for each container."""
    server, memory = many_containers
    memory(input="f64[4]").serve(total)
    gc.collect()  # servers of earlier tests hold some until then
    threads, fds = {*threading.enumerate()}, len(os.listdir("/proc/self/fd"))
    containers = [
        memory(input="f64[4]", replica=i).serve(lambda xs, i=i: xs[:, 0] + i) for i in range(80)
    ]
    new = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert new == ["memory-container"] * 80  # the fakes' own
    assert len(os.listdir("/proc/self/fd")) - fds <= 160  # both ends
    models = [server.model(container.hello["name"]) for container in containers]
    futures = [
        (i, model.predict(ROW + round, slo_ms=20_000))
        for round in range(20)
        for i, model in enumerate(models)
    ]
    assert all(future.result(20) == at // 80 + i for at, (i, future) in enumerate(futures))
    for container in containers:
        container.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds)


def test_sixty_replicas_share_one_queue(many_containers):
    server, memory = many_containers
    first = memory(input="f64[4]")
    name, worked = first.hello["name"], set()

    def work(i):
        return lambda xs: worked.add(i) or xs.sum(axis=1)

    first.serve(work(0))
    for i in range(1, 60):
        memory(name, input="f64[4]", replica=i).serve(work(i))
    model, draw = server.model(name), np.random.default_rng(1)
    wait_until(lambda: len(server.stats()["models"][model.name]["replicas"]) == 60)

    def all_worked():
        rows = draw.random((600, 4))
        assert np.allclose(model.predict_many(rows).result(20), rows.sum(axis=1))
        return len(worked) == 60

    wait_until(all_worked)
