"""Mistakes of a person: a typed error names the thing, the cause and the next step, and other users
are not affected."""

import math
import os
import socket

import numpy as np
import pytest

import clipper
from clipper.errors import (
    AddressInUse,
    AlreadyExists,
    ConfigError,
    InvalidInput,
    PackagingError,
    TypeConflict,
    UnknownApplication,
    UnknownModel,
    UnknownVersion,
)

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


@pytest.fixture(scope="module")
def model(deploy_for_all):
    return deploy_for_all(total, input="f64[4]")


# -- inputs


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (np.zeros(3), r"f64\[3\]"),
        (np.zeros((1, 4)), r"f64\[1,4\]"),
        (np.zeros(0), r"f64\[0\]"),
        (np.zeros(4, complex), "complex128"),
        (np.array(list("abcd")), "<U1"),
        (np.array([1, None, 2, 3], object), "object"),
        ("abcd", "str"),
        (b"abcd", "bytes"),
        (None, "NoneType"),
        (1.0, "float"),
        ([1, 2, 3], "list of 3"),
        ([[1], [1, 2]], "list of 2"),
        (["a", "b", "c", "d"], "list of 4"),
        ({}, "dict"),
        (object(), "object"),
    ],
)
def test_a_wrong_shape_or_type(model, app, x, got):
    issued = model.engine.completion.issued
    with pytest.raises(
        InvalidInput, match=rf"input for {model.name}: expected f64\[4\], got .*{got}"
    ) as caught:
        model.predict(x)
    assert caught.value.rest_status == 400
    with pytest.raises(InvalidInput):
        app(model, slo_ms=100).predict(x)
    assert model.engine.completion.issued == issued
    assert model.predict(ROW).result(60) == 6.0


def test_whole_numbers_that_do_not_fit(deploy):
    model = deploy(total, input="u8[2]")
    assert model.predict([0, 255]).result(60) == 255
    for bad in ([0, 256], [-1, 0], [0.5, 1]):
        with pytest.raises(InvalidInput, match=r"expected u8\[2\]"):
            model.predict(bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_is_refused_where_only_finite_is_let_in(deploy, bad):
    for dtype in ("f64", "f32", "f16"):
        model = deploy(total, input=f"{dtype}[4]", finite=True)
        row = np.array([0, 1, bad, 2], dtype.replace("f", "float"))
        with pytest.raises(InvalidInput, match=r"NaN or an infinity.*finite=True"):
            model.predict(row)
        with pytest.raises(InvalidInput):
            model.predict_many(np.stack([np.zeros(4, row.dtype), row]))
        assert model.predict(np.nan_to_num(row, posinf=0, neginf=0)).result(60) == 3.0


def test_nan_goes_through_where_it_is_not_refused(deploy):
    model = deploy(lambda xs: np.isnan(xs).sum(axis=1), input="f64[4]")
    assert model.predict([0, math.nan, 1, math.nan]).result(60) == 2


@pytest.mark.parametrize("slo_ms", [0, -1, math.nan, math.inf, 1e12, "20"])
def test_an_slo_that_is_none(model, app, server, slo_ms):
    handle = app(model, slo_ms=100)
    with pytest.raises(InvalidInput, match="slo_ms"):
        handle.predict(ROW, slo_ms=slo_ms)
    with pytest.raises(InvalidInput, match="slo_ms"):
        server.app("no-slo", models=[model.name], slo_ms=slo_ms)
    with pytest.raises(InvalidInput, match="slo_ms"):
        server.schedule_prediction(
            clipper.PredictionRequest(ROW, candidate_models=(model.name,), slo_ms=slo_ms)
        )


# -- names


def test_unknown_names(model, server, app):
    name = model.name.partition(":")[0]
    with pytest.raises(UnknownModel, match=rf"no model '{name}x' - did you mean '.*'\? Loaded: "):
        server.model(f"{name}x")
    with pytest.raises(UnknownVersion, match=f"{name}:7"):
        server.model(f"{name}:7")
    with pytest.raises(UnknownModel):
        server.app("uses-nothing", models=["nothing-like-it"])
    handle = app(model)
    with pytest.raises(UnknownApplication, match=f"did you mean '{handle.name}'"):
        server.app(handle.name + "s")
    with pytest.raises(UnknownApplication):
        server.schedule_prediction(clipper.PredictionRequest(ROW, application="nowhere"))
    for act in (
        lambda: server.scale("nothing", 2),
        lambda: server.retire("nothing"),
        lambda: server.logs("nothing"),
    ):
        with pytest.raises(UnknownModel):
            act()


@pytest.mark.parametrize("name", ["", "Upper", "a b", "../x", "a/b", "x" * 200, "é", "a\0b", "-a"])
def test_names_that_are_none(server, name):
    with pytest.raises((InvalidInput, PackagingError), match=r"name"):
        server.deploy(name, total)
    with pytest.raises(InvalidInput, match="name"):
        server.app(name, slo_ms=10)
    with pytest.raises(InvalidInput, match="name"):
        server.model(name)


# -- deploying


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"input": "f64[x]"}, InvalidInput, "bad input type"),
        ({"input": "image"}, InvalidInput, "bad input type"),
        ({"output": "image"}, InvalidInput, "bad input type"),
        ({"replicas": -1}, InvalidInput, "replicas=-1"),
        ({"replicas": 1000}, InvalidInput, "0 to 64 are possible"),
        ({"replicas": 1.5}, InvalidInput, "replicas=1.5"),
        ({"version": -1}, InvalidInput, "version"),
        ({"version": "new"}, InvalidInput, "version='new'"),
        ({"batching": "aimed"}, ConfigError, "aimd"),
        ({"batching": {"size": 3}}, ConfigError, "unknown key 'size'.*did you mean 'size_max'"),
        ({"code": "no/such/folder"}, PackagingError, "no such file"),
    ],
)
def test_a_deploy_that_cannot_be(server, names, settings, error, message):
    before = len(server.stats()["models"])
    with pytest.raises(error, match=message):
        server.deploy(next(names), total, **settings)
    assert len(server.stats()["models"]) == before


def test_what_cannot_be_shipped(server, names):
    with socket.socket() as client, pytest.raises(PackagingError, match=r"socket.*client"):
        server.deploy(next(names), lambda xs: client.send(xs))
    for thing in (42, np, dict, "no colon"):
        with pytest.raises(PackagingError):
            server.deploy(next(names), thing)
    with pytest.raises(InvalidInput, match="needs a model or a command"):
        server.deploy(next(names), None)


def test_replicas_are_checked_when_scaling(model, server):
    with pytest.raises(InvalidInput, match="0 to 64"):
        server.scale(model.name, 65)
    with pytest.raises(InvalidInput):
        server.scale(model.name, -1)


# -- applications


def test_settings_that_are_none(model, server):
    with pytest.raises(
        InvalidInput, match="unknown setting 'slo' of application 'a' - did you mean 'slo_ms'"
    ):
        server.app("a", models=[model.name], slo=20)
    with pytest.raises(InvalidInput, match="polic"):
        server.app("a", models=[model.name], policy="best")
    with pytest.raises(InvalidInput, match="confidence_min"):
        server.app("a", models=[model.name], confidence_min=2)
    with pytest.raises(InvalidInput, match="default"):
        server.app("a", models=[model.name], default=object())
    assert "a" not in server.catalog.view.applications


def test_a_model_by_its_name_alone(model, server):
    assert server.app("alone", models=model.name, slo_ms=5000).predict(ROW).result(60).output == 6.0
    server.catalog.unregister_application("alone")


def test_models_of_other_types(model, deploy, server):
    other = deploy(total, input="f64[5]")
    with pytest.raises(TypeConflict, match=r"the input f64\[5\], .* has f64\[4\]"):
        server.app("mixed", models=[model.name, other.name])


# -- configuration and addresses


def test_a_config_that_is_wrong(tmp_path):
    file = tmp_path / "clipper.toml"
    file.write_text("[server]\nheartbeat_ms = 100\n\n[apps.digits]\nslo = 20\n")
    with pytest.raises(
        ConfigError,
        match=r"clipper\.toml:5: unknown key 'slo' in \[apps\.digits\] - did you mean 'slo_ms'",
    ):
        clipper.start(file)
    with pytest.raises(ConfigError, match="unknown key 'stat' - did you mean 'state'"):
        clipper.start(stat="dir")
    with pytest.raises(ConfigError, match="cannot read"):
        clipper.start(tmp_path / "nothing.toml")


def test_a_config_file_that_is_right(tmp_path):
    (tmp_path / "sums.py").write_text("def total(xs):\n    return xs.sum(axis=1)\n")
    file = tmp_path / "clipper.toml"
    file.write_text(
        '[models.sums]\ntarget = "sums:total"\ninput = "f64[4]"\n[apps.s]\nmodels ='
        ' ["sums"]\nslo_ms = 15000\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with clipper.start(file) as server:
            assert server.app("s").predict(ROW).result(20).output == 6.0


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1", "http://x:1", "tcp://0.0.0.0:0"]
)
def test_an_address_that_is_none(address):
    with pytest.raises(ConfigError, match="address"):
        clipper.start(address=address)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            AddressInUse,
            match=rf"127\.0\.0\.1:{port} is taken by process {os.getpid()} \(.*python.*port 0",
        ):
            clipper.start(address=f"tcp://127.0.0.1:{port}")
    with clipper.start(address=f"tcp://127.0.0.1:{port}") as server:
        assert server.address == f"tcp:127.0.0.1:{port}"
    # and free again once the first is closed
    with clipper.start(address=f"tcp://127.0.0.1:{port}"):
        pass


def test_two_servers_on_one_socket_or_folder(tmp_path):
    with clipper.start(address=f"unix:{tmp_path}/s", state=str(tmp_path / "state")):
        with pytest.raises(AddressInUse, match="taken by process"):
            clipper.start(address=f"unix:{tmp_path}/s")
        with pytest.raises(AlreadyExists, match=f"in use by process {os.getpid()}"):
            clipper.start(state=str(tmp_path / "state"))
    with clipper.start(address=f"unix:{tmp_path}/s", state=str(tmp_path / "state")):
        pass


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path):
    file = tmp_path / "notes"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        clipper.start(address=f"unix:{file}")
    assert file.read_text() == "precious"


def test_a_state_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot use the state folder"):
        clipper.start(state=str(tmp_path / "file" / "below"))


def test_a_failed_start_leaves_nothing(tmp_path):
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ConfigError):
            clipper.start(address=f"unix:{tmp_path}/{'x' * 120}")
    import gc

    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds
