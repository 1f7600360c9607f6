"""Shards report which rows have changed; a server invalidates the predictions that were made from
them."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import DoesNotFit, InvalidInput
from clipper.metrics.collect import of_model
from clipper.params import Client, TableSpec
from clipper.params.client.row_watcher import RowWatcher, WatchedPredictions
from clipper.params.shard import change_watchers as changes_module
from clipper.params.shard.change_watchers import SLOT, ChangeWatchers
from clipper.params.shard.parameters import Parameters
from clipper_container import Model
from clipper_container.params.connection import addresses_in
from clipper_container.params.frames import unpacked
from clipper_core.params.shard_loop import ShardLoop
from tests.params.conftest import Shards, full, ones, until

PATIENCE_S = 60.0
TASTE = {
    "taste": {
        "dim": 2,
        "optimizer": "sgd",
        "optimizer_settings": {"rate": 1.0},
        "initializer": "constant",
        "initializer_settings": {"value": 1.0},
    }
}
SPEC = TableSpec("taste", **TASTE["taste"])


# -- what a shard tells
# ------------------------------------------------------------------------------------------------


class Shard:
    """Changes over a core that nobody listens at."""

    def __init__(self) -> None:
        self.core, self.parameters = ShardLoop(), Parameters()
        self.parameters.create(SPEC)
        self.replies: dict[int, dict[str, Any]] = {}
        self.changes = ChangeWatchers(self.core, lambda: self.parameters, self._answer)

    def _answer(self, call_id: Any, payload: bytes) -> None:
        self.replies[call_id[0]] = unpacked(payload)

    def watch(
        self, since: int, *, conn: int = 1, wait_s: float = 1.0, now: float = 0.0, epoch: int = 1
    ) -> dict[str, Any] | None:
        return self.changes.watch(
            {"since": since, "epoch": epoch, "wait_s": wait_s}, (conn, 1, 1), now
        )


def rows_of(reply: dict[str, Any] | None) -> dict[str, list[int]]:
    assert reply is not None
    assert not reply["lost"]
    return {name: ids.tolist() for name, ids in reply["rows"].items()}


def test_a_first_request_returns_the_position() -> None:
    shard = Shard()
    shard.core.note(0, [1, 2])
    first = shard.watch(-1)
    assert first is not None
    assert first["lost"]
    shard.core.note(0, [5, 3, 5])
    shard.core.note(0, [3])
    assert rows_of(shard.watch(first["position"])) == {"taste": [3, 5]}
    assert rows_of(shard.watch(first["position"], wait_s=0.0, conn=2)) == {"taste": [3, 5]}, (
        "each has its own place"
    )


def test_a_request_stays_open_until_something_changes() -> None:
    shard = Shard()
    position = (shard.watch(-1) or {})["position"]
    assert shard.changes.check_s == float("inf")
    assert shard.watch(position) is None
    assert shard.changes.check_s == changes_module.CHECK_S
    shard.changes.answer_open_questions(0.5)
    assert not shard.replies
    shard.core.note(0, [9])
    shard.changes.answer_open_questions(0.6)
    assert rows_of(shard.replies.pop(1)) == {"taste": [9]}
    assert shard.watch(position + 1) is None
    shard.changes.answer_open_questions(1.1)
    assert rows_of(shard.replies[1]) == {}, "or its time is over"


def test_a_watcher_that_is_too_far_behind_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "IDS_MAX", 10)
    shard = Shard()
    position = (shard.watch(-1) or {})["position"]
    for n in range(6):
        shard.core.note(0, [n, n + 1])
        shard.changes.answer_open_questions(0.0)
    assert (shard.watch(position) or {})["lost"]
    assert rows_of(shard.watch(position + 1)) == {"taste": [1, 2, 3, 4, 5, 6]}
    assert (shard.watch(position + 6, epoch=2) or {})["lost"], "of another life"
    assert (shard.watch(position + 7) or {})["lost"], "of what has not been"


def test_a_log_overflow_resets_all_watchers() -> None:
    shard = Shard()
    shard.core = ShardLoop(log_ids_max=10)
    shard.changes = ChangeWatchers(shard.core, lambda: shard.parameters, shard._answer)
    position = (shard.watch(-1) or {})["position"]
    assert shard.watch(position) is None
    shard.core.note(0, list(range(20)))
    shard.changes.answer_open_questions(0.0)
    assert shard.replies[1]["lost"]
    shard.core.note(0, [4])
    assert rows_of(shard.watch(shard.replies[1]["position"])) == {"taste": [4]}


def test_changes_are_not_recorded_without_watchers() -> None:
    shard = Shard()
    position = (shard.watch(-1) or {})["position"]
    shard.changes.answer_open_questions(changes_module.IDLE_S + 1)
    assert shard.core.changed(SLOT) is None, "it does not follow any more"
    shard.core.note(0, [1])
    assert (shard.watch(position) or {})["lost"]


@pytest.mark.parametrize("since", ["1", None, 1.5])
def test_a_position_is_a_whole_number(since: Any) -> None:
    with pytest.raises(InvalidInput, match="since is a position"):
        Shard().watch(since)


# -- over a real set
# ---------------------------------------------------------------------------------------------------  # noqa: E501


class Cache:
    """A cache that records which predictions were invalidated."""

    def __init__(self, watching: RowWatcher, tolerance: float = 0.5, made_max: int = 1000) -> None:
        self.dropped: list[int] = []
        self.watched = watching.watched(
            lambda x: {"taste": np.array(x)},
            tolerance,
            made_max,
            lambda key, n: self.dropped.append(n),
        )
        self.watching = watching
        until(lambda: watching.knows)

    def watch(self, *ids: int) -> int:
        """Return the number of a prediction of these rows, once their shards are known."""
        number = self.watched(ids, sum(1 << id for id in ids), 5)
        self.settle()
        return number

    def settle(self) -> None:
        """Wait until all rows were pulled and every shard has answered two more requests."""
        until(lambda: not self.watched.moves.has_new)
        first: dict[int, tuple[Any, int]] = {}  # a set that moves has other shards meanwhile

        def have_answered() -> bool:
            posts = list(self.watching._posts)
            for post in posts:
                first.setdefault(id(post), (post, post.number))
            return all(post.number > first[id(post)][1] + 2 for post in posts)

        until(have_answered)


@pytest.fixture
def watching(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RowWatcher]:
    monkeypatch.setattr("clipper.params.client.row_watcher.WAIT_S", 0.02)
    shards.up(2)
    (tmp_path / "shards.json").write_text(
        json.dumps({"addresses": list(shards.addresses), "token": "open sesame"})
    )
    assert addresses_in(tmp_path)[0] == list(shards.addresses)
    found = RowWatcher(tmp_path)
    yield found
    found.stop()


def push(client: Client, id: int, by: float) -> None:
    client.push("taste", [id], full((1, 2), -by))


def test_cached_predictions_are_invalidated_when_their_row_changes(
    shards: Shards, watching: RowWatcher
) -> None:
    client = shards.client()
    client.create(SPEC)
    cache = Cache(watching)
    first, second, both = cache.watch(2), cache.watch(3), cache.watch(2, 3)
    assert cache.watch(2) == first
    push(client, 2, 0.3)
    push(client, 4, 9.0)
    cache.settle()
    assert cache.dropped == []
    push(client, 2, 0.3)
    until(lambda: cache.dropped)
    assert sorted(cache.dropped) == [first, both]
    assert cache.watch(3) == second
    assert cache.watch(2) > both
    assert cache.watched.stats()["forgotten"] == {"moved": 2}
    assert cache.watched.stats()["predictions"] == 2


def test_a_dead_shard_invalidates_all_cached_predictions(
    shards: Shards, watching: RowWatcher
) -> None:
    client = shards.client()
    client.create(SPEC)
    client.push("taste", [2, 3], ones((2, 2)))
    cache = Cache(watching)
    numbers = [cache.watch(2), cache.watch(3)]
    shards.end(1)
    until(lambda: cache.dropped)
    assert sorted(cache.dropped) == numbers
    assert not watching.knows
    assert cache.watched((2,), 1 << 2, 5) != cache.watched((2,), 1 << 2, 5), (
        "nothing is found while nothing is known"
    )
    assert cache.watched.stats()["uncached"] == 2
    shards.begin(1)
    until(lambda: watching.knows)
    assert cache.watch(2) == cache.watch(2)
    push(client, 3, 5.0)
    cache.settle()
    assert len(cache.dropped) == 2
    push(client, 2, 5.0)
    until(lambda: len(cache.dropped) == 3)


def test_a_prediction_made_before_its_table_existed_is_invalidated(
    shards: Shards, watching: RowWatcher
) -> None:
    client = shards.client()
    cache = Cache(watching)
    number = cache.watch(2)
    client.create(SPEC)
    push(client, 2, 0.001)
    until(lambda: cache.dropped)
    assert cache.dropped == [number], "what it was made of is not known"


def test_nothing_is_cached_before_the_set_of_shards_exists(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = RowWatcher(tmp_path / "nowhere")
    watched = watching.watched(lambda x: {"taste": np.array(x)}, 0.5, 10, lambda key, n: None)
    assert watched((1,), 1, 1) != watched((1,), 1, 1)
    watching.stop()
    watching.stop()
    watching.wake()


def test_inputs_whose_rows_are_unknown_are_not_cached(shards: Shards, watching: RowWatcher) -> None:
    watched = watching.watched(lambda x: None, 0.5, 10, lambda key, n: None)
    until(lambda: watching.knows)
    assert watched((1,), 1, 1) != watched((1,), 1, 1)
    assert watched.uncached == 2
    watching.remove(watched)
    assert isinstance(watched, WatchedPredictions)


# -- a server
# ----------------------------------------------------------------------------------------------------------  # noqa: E501


class Taste(Model):
    """A model that returns the sum of a row and the number of its calls; a cached answer has an old
    number."""

    input = "i64[2]"
    tables: Any = TASTE
    asked = 0

    def predict_batch(self, inputs: Any) -> Any:
        self.asked += len(inputs)
        rows = self.tables.pull("taste", inputs.ravel()).reshape(len(inputs), 4)
        return rows.sum(axis=1)


def both_columns(x: Any) -> dict[str, Any]:
    return {"taste": x}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    folder = tmp_path_factory.mktemp("watched")
    with clipper.start(
        params=str(folder / "set"), http="127.0.0.1:0", state=str(folder / "state"), drain_s=1.0
    ) as started:
        # its threads are there from now on
        core = started.deploy("first", Taste, reads={"taste": 0})
        started.params.create(SPEC)
        started.app("first", models=["first"])
        started.remove_app("first")
        started.retire(core.name)
        yield started


@contextlib.contextmanager
def deployed(server: clipper.ClipperServer, name: str, **settings: Any) -> Iterator[str]:
    """Deploy a Taste with an application of the same name; yield the model's name, and remove both
    at the end."""
    model = server.deploy(name, Taste, **settings).name
    until(lambda: getattr(server._parameters.watching, "knows", False))
    server.app(name, models=[model], slo_ms=10_000, default=-1.0)
    try:
        yield model
    finally:
        server.remove_app(name)
        server.retire(model)


def evaluated(server: clipper.ClipperServer, model: str) -> int:
    return int(server.stats()["models"][model]["evaluated"])


def steady(server: clipper.ClipperServer, model: str) -> dict[str, Any]:
    """Return what is watched, once all rows are known."""
    watching = server._parameters.watching
    assert watching is not None
    until(lambda: watching.knows and not any(one.moves.has_new for one in watching._watched))
    now = [post.number for post in watching._posts]
    push(server.params, 1 << 40, 0.1)  # a row of nobody: so that a question is answered soon
    until(
        lambda: (
            [push(server.params, shard + (1 << 40), 0.1) for shard in range(len(now))]
            and all(post.number > n + 2 for post, n in zip(watching._posts, now, strict=True))
        )
    )
    followed: dict[str, Any] = server.stats()["models"][model]["followed"]
    return followed


@pytest.mark.parametrize("reads", [{"taste": [0, 1]}, both_columns], ids=["columns", "function"])
def test_a_cached_answer_is_invalidated_when_its_rows_change(
    server: clipper.ClipperServer, reads: Any
) -> None:
    with deployed(server, "taste", reads=reads, tolerance=0.5) as model:
        app, base = server.app("taste"), 1000 * int(model.partition(":")[2])
        predict = lambda *ids: float(app.predict([base + id for id in ids]).result().output)  # noqa: E731
        assert [predict(1, 2), predict(1, 2), predict(3, 4)] == [4.0, 4.0, 4.0]
        assert steady(server, model)["predictions"] == 2
        assert evaluated(server, model) == 2
        push(server.params, base + 1, 0.25)
        steady(server, model)
        assert predict(1, 2) == 4.0, "it has not moved far: the old answer"
        push(server.params, base + 1, 0.75)
        until(lambda: steady(server, model)["predictions"] == 1)
        assert predict(1, 2) == 6.0
        assert predict(3, 4) == 4.0
        assert evaluated(server, model) == 3, "and what was made of other rows is still there"
        many = np.array([[base + 1, base + 2]] * 64)
        assert server.model(model).predict_many(many).result().tolist() == [6.0] * 64
        assert evaluated(server, model) == 3
        steady(server, model)
        push(server.params, base + 2, 5.0)
        until(lambda: steady(server, model)["predictions"] == 1)
        assert server.model(model).predict_many(many).result().tolist() == [16.0] * 64
        assert server.stats()["models"][model]["followed"]["forgotten"] == {"moved": 2}
        samples = of_model(server.stats()["models"][model], ("taste", "1"))
        assert samples.get("clipper_cache_followed", "taste", "1") == 2
        assert samples.get("clipper_cache_forgotten_total", "taste", "1", "moved") == 2


def test_cached_answers_are_invalidated_over_http_too(server: clipper.ClipperServer) -> None:
    def predict() -> float:
        body = json.dumps({"input": [70_000, 70_001]}).encode()
        request = urllib.request.Request(f"http://{server.http_address}/api/plain/predict", body)
        with contextlib.closing(urllib.request.urlopen(request, timeout=30)) as answer:
            return float(json.load(answer)["output"])

    with deployed(server, "plain", reads={"taste": [0, 1]}, tolerance=0.0) as model:
        frontends: Any = server._endpoints.frontends
        assert b"/api/plain/predict" not in frontends._listeners.hot._fast.table, (
            "the core knows nothing of rows"
        )
        assert [predict(), predict(), predict()] == [4.0] * 3
        assert evaluated(server, model) == 1
        assert steady(server, model)["predictions"] == 1
        push(server.params, 70_000, 1.0)
        until(lambda: steady(server, model)["predictions"] == 0)
        assert predict() == 6.0


def test_rows_of_a_retired_model_are_not_watched(server: clipper.ClipperServer) -> None:
    watching = server._parameters.watching
    assert watching is not None
    before = len(watching._watched)
    with deployed(server, "gone", reads={"taste": 0}):
        assert len(watching._watched) == before + 1
    assert len(watching._watched) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reads": {"taste": [2]}}, "reads column 2 of an input that is i64"),
        ({"reads": {"taste": [-1]}}, "reads is"),
        ({"reads": {}}, "reads is"),
        ({"reads": "no_module"}, "reads is"),
        ({"reads": {"taste": 0}, "tolerance": -1.0}, "tolerance is -1.0"),
        ({"tolerance": 1.0}, "does not declare what it reads"),
        ({"reads": "no.such.module:f"}, "cannot be imported"),
        (
            {"reads": {"taste": 0}, "similar": clipper.Similar(width=1.0), "input": "f32[2]"},
            "only similar",
        ),
    ],
)
def test_invalid_reads_are_refused_at_once(
    server: clipper.ClipperServer, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        server.deploy("wrong", Taste, **settings)
    assert "wrong" not in server.catalog.view.versions


def test_a_model_with_tables_on_a_server_without_them_is_reported() -> None:
    with (
        clipper.start() as server,
        pytest.raises(DoesNotFit, match="reads tables, and this server has none"),
    ):
        server.deploy("wrong", lambda rows: rows[:, 0], input="f64[2]", reads={"taste": 0})


def test_declared_reads_are_stored_with_the_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "params": str(tmp_path / "set"),
        "state": str(tmp_path / "state"),
        "drain_s": 1.0,
    }
    with clipper.start(**settings) as server:
        server.deploy("taste", Taste, reads={"taste": (0, 1)}, tolerance=0.25)
    with clipper.start(**settings) as server:
        until(lambda: server.stats()["models"]["taste:1"]["has"])
        assert server.stats()["models"]["taste:1"]["followed"]["tolerance"] == 0.25
        until(lambda: getattr(server._parameters.watching, "knows", False))
        assert [
            server.model("taste").predict([1, 2], slo_ms=30_000).result() for _ in range(3)
        ] == [4.0] * 3
        assert evaluated(server, "taste:1") == 1
