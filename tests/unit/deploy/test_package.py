"""Packaging of a model for another process, and messages about what cannot be packaged."""

import functools
import hashlib
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.deploy import PackagingError, pack
from clipper.deploy.packages.package import input_of
from clipper_container import Model
from clipper_container.loading.targets import LoadError, explain, load_target
from clipper_container.model import as_model

OFFSET = 3
GUARD = threading.Lock()


def shifted(inputs):
    return [x + OFFSET for x in inputs]


def guarded(inputs):
    with GUARD:
        return inputs


class Tripler(Model):
    input = "f64[2]"

    def predict_batch(self, inputs):
        return [x * 3 for x in inputs]


class Holder(Model):
    def __init__(self):
        self.settings = {"client": threading.Lock()}

    def predict_batch(self, inputs):
        return inputs


class Estimator:
    n_features_in_ = 64

    def predict(self, inputs):
        return [x * 2 for x in inputs]


def loaded(package):
    """Return what another process would load, in this one."""
    return as_model(load_target(package.target, package.sha256))


def test_functions_closures_methods_and_objects_travel(tmp_path):
    factor = 5
    cases: dict[str, list[Any]] = {
        "function": [
            shifted,
            lambda xs: [x * factor for x in xs],
            Estimator().predict,
            functools.partial(map, str),
        ],
        "estimator": [Estimator()],
        "model": [Tripler, Tripler()],
    }
    for kind, things in cases.items():
        for thing in things:
            package = pack(thing, "m", 1, tmp_path)
            assert package.kind == kind
            mine, theirs = (
                as_model(thing).predict_batch([1, 2]),
                loaded(package).predict_batch([1, 2]),
            )
            assert [*mine] == [*theirs]


def test_the_file_is_named_by_its_content_and_private(tmp_path):
    package = pack(shifted, "svm", 7, tmp_path / "new" / "directory")
    with open(package.target, "rb") as file:
        content = file.read()
    assert package.sha256 == hashlib.sha256(content).hexdigest()
    assert os.path.basename(package.target) == f"svm-7-{package.sha256[:12]}.pkl"
    assert stat.S_IMODE(os.stat(package.target).st_mode) == 0o600
    assert os.listdir(tmp_path / "new" / "directory") == [os.path.basename(package.target)]


def test_a_changed_file_is_not_opened(tmp_path):
    package = pack(shifted, "svm", 1, tmp_path)
    with open(package.target, "ab") as file:
        file.write(b"x")
    with pytest.raises(LoadError, match="not the file that was deployed"):
        load_target(package.target, package.sha256)


def test_code_of_another_python_is_not_opened(tmp_path):
    package = pack(shifted, "svm", 1, tmp_path)
    with open(package.target, "rb") as file:
        content = file.read()
    here = f'"{sys.version_info[0]}.{sys.version_info[1]}"'.encode()
    with open(package.target, "wb") as file:
        file.write(content.replace(here, b'"3.7"', 1))
    with pytest.raises(LoadError, match=r"packed by Python 3\.7"):
        load_target(package.target)


def test_local_modules_travel_by_value(tmp_path, monkeypatch, caplog):
    """A function of a local module runs in a process that has neither that module nor the one it
    uses."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "my_features.py").write_text("def twice(x):\n    return 2 * x\n")
    (home / "my_model.py").write_text(
        "import my_features\nfrom my_features import twice\n"
        "def predict(xs):\n    return [twice(x) + my_features.twice(x) for x in xs]\n"
    )
    monkeypatch.syspath_prepend(str(home))
    import my_model  # type: ignore[import-not-found]

    with caplog.at_level("INFO"):
        package = pack(my_model.predict, "m", 1, tmp_path)
    assert caplog.messages == ["model m: my_features, my_model travel by value"]
    for name in ("my_model", "my_features"):
        del sys.modules[name]
    source = (
        "import sys; from clipper_container.loading.targets import"
        f" load_target\nprint(load_target({package.target!r}, {package.sha256!r})([1, 2]),"
        " 'my_features' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd="/"
    )
    assert shown.stdout == "[4, 8] False\n"


@pytest.mark.parametrize(
    ("thing", "kind", "variable"),
    [
        (lambda: _closure(threading.Lock()), "_thread.lock", "client"),
        (lambda: _closure({"deep": [threading.Lock()]}), "_thread.lock", "client.deep.items"),
        (lambda: _closure(socket.socket.__new__(socket.socket)), "socket.socket", "client"),
        (lambda: guarded, "_thread.lock", "GUARD"),
        (Holder, "_thread.lock", "settings.client"),
        (lambda: Holder().predict_batch, "_thread.lock", "settings.client"),
        (lambda: functools.partial(_ignore, threading.Lock()), "_thread.lock", "args"),
    ],
)
def test_what_cannot_travel_is_named(tmp_path, thing, kind, variable):
    with pytest.raises(PackagingError) as caught:
        pack(thing(), "m", 1, tmp_path)
    text = str(caught.value)
    assert text.startswith("cannot ship ")
    assert f"it closes over a '{kind}' (variable '{variable}'" in text
    assert text.endswith("Create it inside load().")
    assert not os.listdir(tmp_path)


def test_the_whole_message_for_a_lock(tmp_path):
    predict = _closure(threading.Lock())
    line = predict.__code__.co_firstlineno
    with pytest.raises(PackagingError) as caught:
        pack(predict, "m", 1, tmp_path)
    assert (
        str(caught.value)
        == "cannot ship 'predict': it closes over a '_thread.lock' (variable 'client',"
        f" test_package.py:{line}). Create it inside load()."
    )


def _closure(client):
    def predict(inputs):
        return client and inputs

    return predict


def _ignore(client, inputs):
    return inputs


@pytest.mark.parametrize(
    "thing",
    [5, object(), Estimator, np, None, "features", "features:", ":f", "a b:c", "__main__:f"],
)
def test_what_is_no_model(tmp_path, thing):
    with pytest.raises(PackagingError):
        pack(thing, "m", 1, tmp_path)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "Upper", ".hidden", "a" * 129, "a\n"])
def test_names_are_no_paths(tmp_path, name):
    with pytest.raises(PackagingError):
        pack(shifted, name, 1, tmp_path)


def test_module_targets(tmp_path, monkeypatch):
    (tmp_path / "local_thing.py").write_text("raise RuntimeError('must not be imported here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = pack("local_thing:predict", "m", 1, tmp_path)
    assert (package.target, package.kind, package.sha256) == ("local_thing:predict", "module", "")
    (copy, home) = package.code
    assert home == str(tmp_path)
    assert Path(copy, "local_thing.py").read_text().startswith("raise RuntimeError")
    assert pack("numpy:sum", "m", 1, tmp_path).code == ()
    assert pack("not.there:f", "m", 1, tmp_path).code == ()
    given = pack(shifted, "m", 1, tmp_path, code=[str(tmp_path / "local_thing.py")])
    assert given.code[1:] == (str(tmp_path),)
    assert Path(given.code[0], "local_thing.py").is_file()
    with pytest.raises(PackagingError, match="no such file"):
        pack(shifted, "m", 1, tmp_path, code=["absent.py"])


@functools.lru_cache(3)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


class Named:
    """An object that a pickle only names, as those of some C extensions."""

    def __init__(self):
        self.__qualname__ = "named"

    def __call__(self, rows):
        return rows

    def __reduce_ex__(self, protocol):
        return "named"


named = Named()


def test_a_function_with_a_cache_travels_with_an_empty_one(tmp_path):
    assert fibonacci(20) == 6765
    package = pack(lambda rows: [fibonacci(int(n)) for n in rows], "m", 1, tmp_path)
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, numpy as np\n"
            "from clipper_container.loading.targets import load_target\n"
            "from clipper_container.model import as_model\n"
            "f = load_target(sys.argv[1])\n"
            "print(f(np.array([20])), f.__globals__['fibonacci'].cache_parameters())",
            package.target,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[6765] {'maxsize': 3, 'typed': False}\n"


def test_what_a_pickle_only_names_is_refused_by_name(tmp_path):
    def uses(rows):
        return named(rows)

    with pytest.raises(PackagingError, match=r"cannot ship 'uses': .* \(variable 'named'"):
        pack(uses, "m", 1, tmp_path)


def test_inputs_are_inferred():
    assert input_of(Estimator()) == "f64[64]"
    assert input_of(Estimator().predict) == "f64[64]"
    assert input_of(Tripler) == "f64[2]"
    assert input_of(shifted) is None
    assert input_of(len) is None


def test_estimators_travel(tmp_path):
    pytest.importorskip("sklearn")
    from sklearn.svm import LinearSVC

    x, y = np.random.default_rng(1).random((40, 4)), np.arange(40) % 2
    svm = LinearSVC(dual="auto").fit(x, y)
    for thing in (svm, svm.predict):
        package = pack(thing, "svm", 1, tmp_path)
        assert package.input == "f64[4]"
        np.testing.assert_array_equal(loaded(package).predict_batch(x), svm.predict(x))


def test_a_file_that_is_not_there_is_named_with_its_folder_and_one_like_it(tmp_path):
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(PackagingError) as caught:
        pack(str(tmp_path / "modle.onnx"), "m", 1, tmp_path / "out")
    assert f"in {tmp_path}: No such file or directory (there is model.onnx)." in str(caught.value)
    with pytest.raises(PackagingError, match=r"'m\.h5' names no model; .*\.onnx, \.skops"):
        pack("m.h5", "m", 1, tmp_path / "out")


def test_a_missing_module_is_explained(tmp_path, monkeypatch):
    (tmp_path / "features.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert (
        explain(ModuleNotFoundError("", name="features"))
        == "No module named 'features'. It is a local file; packed by value on the next deploy, "
        'or add code=["features.py"].'
    )
    assert explain(ModuleNotFoundError("", name="xgboost.core")).endswith(
        'Run: pip install xgboost, or deploy with requirements=["xgboost"]'
    )
    (tmp_path / "spam.py").write_text("")
    text = explain(ModuleNotFoundError("", name="spm"))
    assert "There is no spm.py in" in text
    assert "(there is spam.py)" in text
    assert "pip install" not in text  # a stranger's package may have that name
