"""Shares of keys and priorities, over every door: while the model is held, queries come in; the
model then says in which order they were served."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import clipper
import clipper_client
from clipper.cli import main
from clipper.credentials.credential_file import line_of, new_key
from clipper.credentials.key_limits import KeyLimits
from clipper.credentials.key_shares import SHARES_MAX, KeyShares
from clipper.errors import ConfigError, Forbidden, InvalidInput
from clipper.frontend.auth.api_keys import ApiKeys, KeyOwner, band_of
from clipper_core.scheduling.bands import band_number
from tests.frontend.conftest import QUICK, ask
from tests.memory_container import wait_until

Ask = Callable[[float, int | None], Any]
KEYS = {name: new_key() for name in ("high", "low", "plain", "shop")}
LIMITS = {
    "high": KeyLimits.of(priority="1"),
    "low": KeyLimits.of(priority="3"),
    "plain": KeyLimits(),
    "shop": KeyLimits.of(share="30%"),
}
HELD = -1.0


def in_order(folder: str) -> Callable[[Any], Any]:
    """Return a model of one row at a time that answers the place of each in its order. It works on
    a row of HELD until the folder has a file `go`."""
    served = [0]

    def answer(rows: Any) -> Any:
        import time
        from pathlib import Path

        while rows[0][0] == HELD and not (Path(folder) / "go").exists():
            time.sleep(0.005)
        served[0] += 1
        return np.full(len(rows), float(served[0]))

    return answer


class Held:
    """A server whose model is held. ask: the doors, by name."""

    def __init__(self, server: clipper.ClipperServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.threads: list[threading.Thread] = []
        self.places: dict[str, Any] = {}
        self.errors: list[BaseException] = []

    def hold(self) -> None:
        """Let the model work on a row, and another be sent behind it."""
        wait_until(self._are_sent, "two rows are at the model")

    def _are_sent(self) -> bool:
        """Make two queries; return whether both were sent. The second one waits while the model is
        taken for one with several bands: then let the model go on."""
        (self.folder / "go").unlink(missing_ok=True)
        batches = self.row()["batches"]
        self.before = [self.server.predict("order", [HELD]) for _ in range(2)]

        def are_in() -> bool:
            row = self.row()
            return bool(row["batches"] > batches and row["batches"] + row["queued"] >= batches + 2)

        wait_until(are_in)
        if self.row()["batches"] == batches + 2:
            return True
        (self.folder / "go").touch()
        for future in self.before:
            future.result(60)
        return False

    def row(self) -> dict[str, Any]:
        stats: Any = self.server.stats()
        return dict(stats["models"]["order:1"])

    def queue(self, name: str, ask: Ask, priority: int | None) -> None:
        """Make a query by a door, and return once it waits."""
        waiting = self.row()["queued"]

        def run() -> None:
            try:
                self.places[name] = ask(float(len(self.threads)), priority)
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        wait_until(lambda: self.row()["queued"] > waiting or bool(self.errors))

    def release(self) -> list[str]:
        """Let the model go on; return the names of the queries in the order that it served."""
        (self.folder / "go").touch()
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return sorted(self.places, key=lambda name: self.places[name])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    folder = tmp_path_factory.mktemp("shares")
    lines = [line_of(name, KEYS[name], "", one) for name, one in LIMITS.items()]
    (folder / "keys").write_text("\n".join(lines))
    http = {"address": "127.0.0.1:0", "api_keys_file": str(folder / "keys")}
    more: dict[str, Any] = {"grpc": {"address": "127.0.0.1:0"}}
    with clipper.start(http=http, logging={"access_lines_s_max": 0}, **more, **QUICK) as started:
        batching = {"mode": "static", "size_max": 1}
        started.deploy(
            "order", in_order(str(folder)), input="f64[1]", cache=False, batching=batching
        )
        started.app("one", models=["order"], slo_ms=60_000, default=-1.0)
        started.app("below", models=["order"], slo_ms=60_000, default=-1.0, priority=3)
        started.app("both", models=["order"], slo_ms=60_000, default=-1.0, decider="majority")
        started.predict("order", [1.0]).result(60)
        yield started


@pytest.fixture
def held(server: clipper.ClipperServer, tmp_path: Path) -> Iterator[Held]:
    keys = Path(server.config.http.api_keys_file)
    made = Held(server, keys.parent)
    made.hold()
    yield made
    made.release()
    for future in made.before:
        future.result(60)


# -- the doors: each takes an input and a priority, and returns the output


def by_http(held: Held, key: str, python: bool = False) -> Ask:
    def ask_http(x: float, priority: int | None) -> Any:
        body: dict[str, Any] = {"input": [x]}
        if priority is not None:
            body["priority"] = priority
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        if python:
            headers["Origin"] = "http://elsewhere"
        return ask(held.server.http_address, "POST", "/api/one/predict", body, headers).json[
            "output"
        ]

    return ask_http


def by_infer(held: Held, key: str) -> Ask:
    def ask_infer(x: float, priority: int | None) -> Any:
        tensor = {"name": "input", "shape": [1, 1], "datatype": "FP64", "data": [x]}
        body = {"inputs": [tensor], "parameters": {"priority": priority or 0}}
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        found = ask(held.server.http_address, "POST", "/v2/models/one/infer", body, headers)
        return found.json["outputs"][0]["data"][0]

    return ask_infer


def by_client(held: Held, key: str) -> Ask:
    def ask_client(x: float, priority: int | None) -> Any:
        url = f"http://{held.server.http_address}"
        with clipper_client.Client(url, key=KEYS[key]) as client:
            return client.predict("one", [x], priority=priority).output

    return ask_client


def by_grpc(held: Held, key: str, service: str) -> Ask:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    from tests.frontend.test_grpc import APPLICATIONS, INFERENCE, Client, tensor_of

    metadata = [("authorization", f"Bearer {KEYS[key]}")]

    def ask_grpc(x: float, priority: int | None) -> Any:
        client = Client(held.server.grpc_address, metadata=metadata)
        with contextlib.closing(client.channel):
            if service == INFERENCE:
                more = {} if priority is None else {"priority": priority}
                reply = client(INFERENCE, "ModelInfer", tensor_of("one", [[x]], **more))
                return float(np.frombuffer(reply.raw_output_contents[0])[0])
            reply = client(
                APPLICATIONS,
                "Predict",
                application="one",
                input={"numbers": {"values": [x]}},
                priority=priority or 0,
            )
            return reply.output.number

    return ask_grpc


def in_process(held: Held, _: str = "") -> Ask:
    app = held.server.app("one")
    return lambda x, priority: app.predict([x], priority=priority).result(60).output


def by_request(held: Held, _: str = "") -> Ask:
    def ask_request(x: float, priority: int | None) -> Any:
        request = clipper.PredictionRequest([x], "one", id="mine", priority=priority)
        return held.server.schedule_prediction(request).result(60).output

    return ask_request


def by_array(held: Held, _: str = "") -> Ask:
    app = held.server.app("one")

    def ask_array(x: float, priority: int | None) -> Any:
        rows = np.full((3, 1), x)
        return float(app.predict_many(rows, priority=priority).result(60).outputs[0])

    return ask_array


def by_decider(held: Held, _: str = "") -> Ask:
    app = held.server.app("both")
    return lambda x, priority: app.predict([x], priority=priority).result(60).output


def by_model(held: Held, _: str = "") -> Ask:
    return lambda x, priority: (
        held.server.predict("order", [x], priority=priority).result(60).output
    )


DOORS: dict[str, Callable[[Held], Ask]] = {
    "http": lambda held: by_http(held, "high"),
    "http in Python": lambda held: by_http(held, "high", True),
    "infer": lambda held: by_infer(held, "high"),
    "infer by gRPC": lambda held: by_grpc(held, "high", "inference.GRPCInferenceService"),
    "clipper.v1": lambda held: by_grpc(held, "high", "clipper.v1.Applications"),
    "client": lambda held: by_client(held, "high"),
    "in-process": in_process,
    "request": by_request,
    "array": by_array,
    "decider": by_decider,
    "model": by_model,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_query_has_the_priority_that_it_asks_for(held: Held, door: str) -> None:
    made = DOORS[door](held)
    for priority in (3, 2, 1):
        held.queue(str(priority), made, priority)
    assert held.release() == ["1", "2", "3"]


KEYED: dict[str, Callable[[Held, str], Ask]] = {
    "http": by_http,
    "http in Python": lambda held, key: by_http(held, key, True),
    "infer": by_infer,
    "infer by gRPC": lambda held, key: by_grpc(held, key, "inference.GRPCInferenceService"),
    "clipper.v1": lambda held, key: by_grpc(held, key, "clipper.v1.Applications"),
    "client": by_client,
}


@pytest.mark.parametrize("door", KEYED)
def test_a_query_has_the_priority_of_its_key(held: Held, door: str) -> None:
    for key in ("low", "plain", "high"):
        held.queue(key, KEYED[door](held, key), None)
    assert held.release() == ["high", "plain", "low"]


@pytest.mark.parametrize("door", KEYED)
def test_a_key_with_a_share_has_its_turn_among_many_of_others(held: Held, door: str) -> None:
    """The weights are 70 and 30: of four rows of others and one of the shop, its is not the last,
    although it came last."""
    for k in range(4):
        held.queue(f"plain {k}", in_process(held), None)
    held.queue("shop", KEYED[door](held, "shop"), None)
    served = held.release()
    assert served.index("shop") < 2, served


def test_a_query_has_the_priority_of_its_application(held: Held) -> None:
    below = held.server.app("below")
    held.queue("below", lambda x, _: below.predict([x]).result(60).output, None)
    held.queue("usual", in_process(held), None)
    held.queue("above", lambda x, p: below.predict([x], priority=p).result(60).output, 1)
    assert held.release() == ["above", "usual", "below"]


@pytest.mark.parametrize("python", [False, True])
def test_a_priority_that_there_is_not_or_that_a_key_has_not_is_refused(
    server: clipper.ClipperServer, python: bool
) -> None:
    def outcome(key: str, priority: Any, path: str = "/api/one/predict") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        if python:
            headers["Origin"] = "http://elsewhere"
        body: dict[str, Any] = {"input": [1.0], "priority": priority}
        if path.startswith("/v2"):
            tensor = {"name": "input", "shape": [1, 1], "datatype": "FP64", "data": [1.0]}
            body = {"inputs": [tensor], "parameters": {"priority": priority}}
        reply = ask(server.http_address, "POST", path, body, headers)
        return reply.status, reply.body.decode()

    infer = "/v2/models/one/infer"
    for priority in (0, 4, -1, "1", 1.5):
        status, text = outcome("high", priority)
        assert status == 400
        assert "priority" in text
    for priority in (4, -1, "first", 1.5):
        status, text = outcome("high", priority, infer)
        assert status == 400
        assert "priority" in text
    for path in ("/api/one/predict", infer):
        assert outcome("high", 1, path)[0] == 200
        assert outcome("plain", 3, path)[0] == 200
        status, text = outcome("plain", 1, path)
        assert status == 403
        assert "priority 2" in text
        assert outcome("low", 2, path)[0] == 403


def test_other_numbers_are_refused_in_process(server: clipper.ClipperServer) -> None:
    app = server.app("one")
    for priority in (0, 4, True, 1.0, "1"):
        for call in (
            lambda p=priority: app.predict([1.0], priority=p),
            lambda p=priority: app.predict_many(np.ones((2, 1)), priority=p),
            lambda p=priority: server.predict("order", [1.0], priority=p),
        ):
            with pytest.raises(InvalidInput, match="priority="):
                call()
        with pytest.raises(InvalidInput, match="priority"):
            server.app("one", priority=priority)
    with pytest.raises(InvalidInput, match="in parts"):
        app.predict([1.0], stream=True, priority=1)


# -- keys


def test_a_share_keeps_its_number_while_its_name_is_there() -> None:
    shares = KeyShares()
    shares.assign({"a": 10, "b": 20})
    numbers = shares.number("a"), shares.number("b")
    assert sorted(numbers) == [1, 2]
    assert [shares.weights[n] for n in (0, *numbers)] == [70, 10, 20]
    shares.assign({"c": 40, "b": 30})
    assert shares.number("b") == numbers[1]
    assert shares.number("a") == 0
    assert [shares.weights[shares.number(name)] for name in ("other", "b", "c")] == [30, 30, 40]
    full = {f"k{n}": 6 for n in range(SHARES_MAX)}
    shares.assign(full)
    assert sorted(map(shares.number, full)) == [*range(1, SHARES_MAX + 1)]
    band_number(SHARES_MAX, 3)  # the core has as many


@pytest.mark.parametrize(
    ("percents", "why"), [([60, 40], "at least 1%"), ([1] * (SHARES_MAX + 1), "at most 15")]
)
def test_a_file_with_too_many_shares_is_refused(
    tmp_path: Path, percents: list[int], why: str
) -> None:
    file = tmp_path / "keys"
    limits = [KeyLimits.of(share=f"{percent}%") for percent in percents]
    file.write_text("\n".join(line_of(f"k{n}", new_key(), "", one) for n, one in enumerate(limits)))
    with pytest.raises(ConfigError, match=why):
        ApiKeys(str(file))


def test_a_change_of_the_file_changes_the_weights(tmp_path: Path) -> None:
    file, key = tmp_path / "keys", new_key()
    file.write_text(line_of("shop", key, "", KeyLimits.of(share="30%", priority="1")))
    keys = ApiKeys(str(file))
    owner = keys.admit(f"Bearer {key}".encode())
    assert owner == KeyOwner("shop", (), 1, 1)
    assert keys.weights[:2] == [70, 30]
    told: list[list[int]] = []
    keys.on_change(lambda: told.append(keys.weights[:2]))
    file.write_text(line_of("shop", key, "", KeyLimits.of(share="9%")) + "\n")
    assert keys.refresh()
    assert told == [[91, 9]]
    file.write_text(line_of("shop", key, "", KeyLimits.of(share="99%")) + "\n\n")
    assert keys.refresh()
    assert told[-1] == [1, 99]
    file.write_text("a share=60% sha256:" + "0" * 64 + "\nb share=40% sha256:" + "1" * 64)
    assert not keys.refresh(), "a file with an error changes nothing"
    assert keys.weights[:2] == [1, 99]


@pytest.mark.parametrize("text", ["0%", "100%", "30", "-1%", "1.5%", "%", "007%"])
def test_shares_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no share"):
        KeyLimits.of(share=text)


def test_words_of_a_line_are_read_as_they_are_written() -> None:
    limits = KeyLimits.of("5/s", ["a"], ["g"], "30%", "1")
    assert limits.words == ["rate=5/s", "share=30%", "priority=1", "apps=a", "groups=g"]
    assert KeyLimits.parse(limits.words) == limits
    for word in ("priority=4", "priority=0", "share=", "prio=1"):
        with pytest.raises(InvalidInput):
            KeyLimits.parse([word])


def test_the_command_writes_a_share_and_a_priority(tmp_path: Path) -> None:
    file = str(tmp_path / "keys")
    words = ["key", "create", "shop", "--share", "30%", "--priority", "1", "--file", file]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert Path(file).read_text().startswith("shop share=30% priority=1 sha256:")


def test_the_band_of_a_query(server: clipper.ClipperServer) -> None:
    class Application:
        priority = 2

        def band(self, priority: int | None) -> int:
            return band_number(0, priority or self.priority)

    app: Any = Application()
    assert band_of(app, None, None) == 0
    assert band_of(app, None, 1) == band_of(app, KeyOwner(""), 1) == band_number(0, 1)
    assert band_of(app, KeyOwner("a", (), 4, 0), None) == band_number(4, 2)
    assert band_of(app, KeyOwner("a", (), 4, 1), 3) == band_number(4, 3)
    app.priority = 1
    assert band_of(app, KeyOwner("a"), 1) == band_number(0, 1)
    assert band_of(app, KeyOwner("a", (), 0, 3), None) == band_number(0, 3)
    for owner, asked in ((KeyOwner("a", (), 0, 3), 2), (KeyOwner("a", (), 0, 2), 1)):
        with pytest.raises(Forbidden, match="priority"):
            band_of(app, owner, asked)
