"""Containers in C++ and Java whose model throws for a row: with retry_singly only it fails."""

import numpy as np
import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main as cli
from clipper.errors import ModelFailed
from clipper_container.wire.frames import Flag
from container_sdk.tests import fake_server as fake
from tests.languages.compiled import CPP, JAVA, SANITIZERS, cpp, java, java_command
from tests.memory_container import wait_until
from tests.processes import Program

LANGUAGES = ("cpp", "java")
SLO_MS = 60_000
SCALAR = 1000.0  # of this row alone the model "picky" returns a scalar


def program(language, name, *words, flags=()):
    """Return the command of a model of the tests."""
    if language == "cpp":
        return [str(cpp(CPP / "tests" / "models.cpp", *flags)), name, *words]
    return [*java_command(java(JAVA / "tests"), f"clipper.container.{name.title()}"), *words]


@pytest.fixture(params=LANGUAGES)
def language(request):
    return request.param


@pytest.fixture
def connect(language, tmp_path):
    """Starts a program with a fake server: a function that sends a batch and returns its answer."""
    server = fake.Server(tmp_path)
    processes, peers = [], []

    def start(name, **variables):
        settings = {"ADDRESS": server.address, "MODEL": "m", "WARMUP": "off", **variables}
        environment = {f"CLIPPER_{key}": text for key, text in settings.items()}
        words = program(language, name, flags=SANITIZERS)
        processes.append(Program(*words, environment=environment))
        peer = server.accept()
        peers.append(peer)
        peer.welcome(qualifiers=True)

        def answered(frame):
            peer.sock.sendall(frame)
            return peer.frame()

        return answered

    yield start
    for peer in peers:
        peer.close()
    for process in processes:
        process.kill()
        assert "Sanitizer" not in process.output
    server.close()


def texts(*rows):
    return fake.variable(list(rows), fake.STR)


def with_sessions(rows, sessions):
    """Return a batch of f64 rows with a session for each."""
    payload = np.array(rows).tobytes() + np.array(sessions, "<u8").tobytes()
    return fake.frame(
        fake.PREDICT, payload, dtype=12, dims=(2,), flags=Flag.SESSIONS, rows=len(rows), id=1
    )


def failure(frame):
    assert frame.kind == fake.FAILURE
    return frame.payload.decode()


# -- what is answered, batch by batch


def test_only_the_rows_that_fail_alone_fail(connect):
    answered = connect("faulty", RETRY_SINGLY="1")
    parts = answered(texts("Grüße", "throw", "", "count", "row", "last")).parts()
    assert parts["status"] == [0, 1, 0, 1, 1, 0]
    assert [parts["rows"][i] for i in (0, 2, 5)] == ["Grüße", "", "last"]
    assert [parts["rows"][i] for i in (1, 3, 4)] == ["", "", ""]
    lines = parts["text"].split("\nrow ")
    assert [line.removeprefix("row ")[:3] for line in lines] == ["1: ", "3: ", "4: "]
    assert "this row cannot be read" in lines[0]
    assert "returned 2 outputs for 1 rows" in lines[1]
    assert lines[2] == "4: only this row"
    assert "status" not in answered(texts("all", "good")).parts()


def test_the_last_line_of_a_failed_row_is_its_error(connect):
    answered = connect("faulty", RETRY_SINGLY="1")
    text = answered(texts("good", "throw")).parts()["text"]
    assert text.split("\n")[-1].endswith("this row cannot be read")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["throw"] * 3, "row 0: "),
        (["row", "throw"], "row 0: only this row"),
        (["throw"], "this row cannot be read"),
        (["a", "count"], "returned 3 outputs for 2 rows"),
    ],
)
def test_a_batch_fails_if_all_its_rows_fail_or_its_outputs_are_invalid(connect, rows, reason):
    """A batch fails if all its rows fail alone, if it has one row, or if its outputs are wrong."""
    answered = connect("faulty", RETRY_SINGLY="1")
    text = failure(answered(texts(*rows)))
    assert reason in text
    assert ("row 0: " in text) == reason.startswith("row 0")
    assert answered(texts("good")).parts()["rows"] == ["good"]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("faulty", {}),
        ("faulty", {"RETRY_SINGLY": "0"}),
        ("picky", {"RETRY_SINGLY": "0"}),
        ("picky", {"RETRY_SINGLY": ""}),
    ],
)
def test_the_environment_variable_overrides_retry_singly(connect, name, variables):
    answered = connect(name, **variables)
    if name == "faulty":
        assert "this row cannot be read" in failure(answered(texts("a", "throw")))
    elif variables["RETRY_SINGLY"]:
        assert "a negative row" in failure(answered(fake.fixed(np.array([[1.0, 1], [-1, 1]]))))
    else:
        answer = answered(fake.fixed(np.array([[1.0, 1], [-1, 1]])))
        assert answer.parts()["status"] == [0, 1]


def test_numbers_keep_shape_confidence_qualifiers_and_sessions(connect):
    answered = connect("picky")
    rows = [[-1.0, 2], [5, 2], [6, 2], [0, 2], [7, 2], [8, 2]]
    parts = answered(with_sessions(rows, [9, 8, 0, 7, 6, 5])).parts()
    assert parts["status"] == [1, 0, 0, 1, 0, 0]
    assert parts["rows"].tolist() == [[0, 0], [5, 5], [6, 6], [0, 0], [7, 7], [8, 8]]
    assert parts["confidence"].tolist() == pytest.approx([0, 0.2, 0.2, 0, 0.2, 0.2])
    marks = [b"\x81\xa1s" + bytes([session]) if session else b"" for session in (0, 8, 0, 0, 6, 5)]
    assert parts["qualifiers"] == marks


def test_rows_without_confidence_beside_one_with(connect):
    parts = connect("picky")(fake.fixed(np.array([[1.0, 0], [-1, 0], [2, 1]]))).parts()
    assert parts["confidence"].tolist() == pytest.approx([0, 0, 0.1])
    assert parts["rows"].tolist() == [[1], [0], [2]]
    assert "qualifiers" not in parts


def test_outputs_of_one_dimension_may_differ_in_length(connect):
    answered = connect("picky")
    parts = answered(fake.fixed(np.array([[-1.0, 1], [2, 3], [3, 1], [4, 2]]))).parts()
    assert [row.tolist() for row in parts["rows"]] == [[], [2, 2, 2], [3], [4, 4]]
    assert parts["status"] == [1, 0, 0, 0]


def test_outputs_of_different_shapes_fail_the_batch(connect):
    answered = connect("picky")
    assert "differ in type or shape" in failure(
        answered(fake.fixed(np.array([[-1.0, 0], [2, 0], [SCALAR, 0]])))
    )
    parts = answered(fake.fixed(np.array([[-1.0, 0], [SCALAR, 0]]))).parts()
    assert parts["rows"].tolist() == [0, SCALAR]


def test_outputs_above_the_limit_fail_the_batch(connect):
    answered = connect("faulty", RETRY_SINGLY="1")
    assert "the server's limit is" in failure(answered(texts("throw", "large")))


# -- on a real server


@pytest.fixture(scope="module")
def server():
    with clipper.start(drain_s=0.2, eject_after=0) as started:
        yield started


def outcomes(model, rows):
    """Return the output or the error of each of many queries."""
    futures = [model.predict(row, slo_ms=SLO_MS) for row in rows]
    return [future.exception(60) or future.result(60) for future in futures]


def of_one_dimension(numbers):
    return [np.array([x, 1.0, *[0.0] * 62]) for x in numbers]


def test_one_poisoned_row_of_many_on_a_server(server, language):
    """Rows of 512 bytes: in C++ they are in shared memory."""
    model = server.deploy(
        "picky", command=program(language, "picky"), input="f64[64]", cache=False, retry_singly=True
    )
    numbers = [float(x) for x in range(1, 400)]
    numbers[200] = -1.0
    found = outcomes(model, of_one_dimension(numbers))
    assert isinstance(found[200], ModelFailed)
    assert "a negative row" in str(found[200])
    good = [x for i, x in enumerate(numbers) if i != 200]
    assert [float(found[i][0]) for i in range(len(numbers)) if i != 200] == good
    bad = outcomes(model, of_one_dimension([-1.0] * 100))
    assert all(isinstance(each, ModelFailed) for each in bad)
    assert outcomes(model, of_one_dimension([3.0]))[0].tolist() == [3.0]
    server.retire("picky")


def test_retry_singly_is_switched_off_by_the_deployment(server, language):
    model = server.deploy(
        "off", command=program(language, "picky"), input="f64[64]", cache=False, warmup=False
    )
    rows = np.array(of_one_dimension([-1.0, *[1.0] * 200]))
    with pytest.raises(ModelFailed, match="negative"):
        model.predict_many(rows, slo_ms=SLO_MS).result(60)

    def others_fail() -> bool:
        """Return whether rows have failed that shared their batch with the poisoned one, which may
        be alone in its own."""
        found = outcomes(model, of_one_dimension([1.0] * 50 + [-1.0] + [1.0] * 50))
        return sum(isinstance(each, ModelFailed) for each in found) > 1

    wait_until(others_fail)
    server.retire("off")


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"ids": "i64[*]", "name": "str"}, {"sum": "i64", "names": "str[2]"}),
        ({"ids": "i64[3]"}, {"sum": "i64"}),
    ],
)
def test_retry_singly_works_on_records_of_named_tensors(server, language, inputs, outputs):
    model = server.deploy(
        "records",
        command=program(language, "tensors"),
        inputs=inputs,
        outputs=outputs,
        cache=False,
        retry_singly=True,
    )
    numbers = [x if x % 50 else -100 for x in range(1, 201)]
    rows = [{"ids": np.full(3, x), "name": f"nö {x}"} for x in numbers]
    found = outcomes(model, [{key: row[key] for key in inputs} for row in rows])
    for x, each in zip(numbers, found, strict=True):
        if x < 0:
            assert "a negative sum" in str(each)
        else:
            assert each["sum"] == 3 * x
            assert [*each.get("names", ())] == [f"nö {x}"] * 2 * ("names" in outputs)
    server.retire("records")


@pytest.mark.parametrize("wanted", [True, False])
def test_retry_singly_is_set_in_a_file_and_on_the_command_line(tmp_path, monkeypatch, wanted):
    command = program("cpp", "picky")
    file = tmp_path / "clipper.toml"
    file.write_text(
        f'[models.filed]\ncommand = {command}\ninput = "f64[64]"\nretry_singly = {wanted}\n'.lower()
    )
    admin = {"admin": "127.0.0.1:0"}
    with clipper.start(file, http=admin, commands=(command[0],), drain_s=0.2) as one:
        monkeypatch.setenv("CLIPPER_URL", f"http://{one.admin_address}")
        words = ["deploy", "typed", "--command", " ".join(command), "--input", "f64[64]"]
        ran = CliRunner().invoke(cli, words + ["--retry-singly"] * wanted)
        assert ran.exit_code == 0, ran.output
        for name in ("filed", "typed"):
            (replica,) = one.stats()["models"][f"{name}:1"]["replicas"]
            with open(f"/proc/{replica['pid']}/environ") as variables:
                assert f"CLIPPER_RETRY_SINGLY={int(wanted)}\0" in variables.read()
