"""The real container process against a server that speaks docs/wire.md by hand."""

import hashlib
import signal
import struct
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import lz4.block
import msgpack
import numpy as np
import pytest

from clipper_container.backoff import Backoff
from clipper_container.worker.handshake import ContainerOptions
from container_sdk.tests import fake_server as fake

MODELS = '''
import sys
import numpy as np
from clipper_container import Model, Scored

def total(inputs):
    return inputs.reshape(len(inputs), -1).sum(axis=1)

def same(inputs):
    return inputs

def shape(inputs):
    """Return the input of a model, as text."""
    if isinstance(inputs, list):
        return [f"{type(x).__name__} {len(x)} {getattr(x, 'dtype', '')}" for x in inputs]
    facts = (inputs.dtype.name, inputs.shape, inputs.ctypes.data % 64, inputs.flags.aligned, inputs.flags.writeable,
             inputs.flags.owndata)
    return [repr(facts)] * len(inputs)

def picky(inputs):
    if (inputs < 0).any():
        raise ValueError(f"negative: {inputs.min()}")
    return inputs[:, 0]

def one(inputs):
    return 7.0

def single(row):
    if row[0] < 0:
        raise KeyError("negative")
    return float(row[0]) * 10

class Kept(Model):
    input = "f64[2]"
    output = "f64"
    batch_max = 16

    def load(self):
        self.kept = []

    def predict_batch(self, inputs):
        self.kept.append(inputs)
        return Scored([float(x[0, 0]) for x in self.kept[-1:]] * len(inputs) if len(self.kept) == 1 else
                      [float(self.kept[0][0, 0])] * len(inputs), np.full(len(inputs), 0.5))

def qualified(inputs):
    return Scored(inputs[:, 0], qualifiers=[{"kind": "big", "x": 2.5} if x > 1 else None for x in inputs[:, 0]])

def wide(inputs):
    return np.zeros((len(inputs), 1 << 20))

def padded(inputs):
    return np.full(len(inputs), len(inputs))
'''  # noqa: E501


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    directory = tmp_path_factory.mktemp("code")
    (directory / "models.py").write_text(textwrap.dedent(MODELS))
    (directory / "broken.py").write_text("import nothing_like_it\n")
    (directory / "helped.py").write_text("import sub.helper\n")
    return directory


@contextmanager
def serving(tmp_path, code, target, *options, welcome=None, tcp=False, **env):
    """Yield a container process and the server's end of its connection."""
    server = fake.Server(tmp_path, tcp)
    process = fake.start(target, server.address, *options, cwd=code, **env)
    try:
        peer = server.accept()
        peer.greeting = peer.welcome(**(welcome or {}))
        peer.server, peer.process = server, process
        yield peer
    finally:
        process.kill()
        process.communicate()
        peer.close()
        server.close()


def test_hello_names_the_model(tmp_path, code):
    options = ("--version", "3", "--replica", "2", "--token-env", "SECRET", "--warmup", "off")
    with serving(tmp_path, code, "models:Kept", *options, SECRET="hush") as peer:
        greeting = peer.greeting
    assert greeting.pop("sdk").startswith("python/")
    assert greeting.pop("pid") == peer.process.pid
    assert greeting == {
        "name": "svm",
        "version": 3,
        "replica": 2,
        "input": "f64[2]",
        "output": "f64",
        "batch_max": 16,
        "protocol": 2,
        "token": "hush",
        "shared": True,
        "corrects": False,
        "sessions": False,
        "cancels": True,
        "quiet": True,
    }


@pytest.fixture(scope="module")
def shapes(tmp_path_factory, code):
    with serving(tmp_path_factory.mktemp("s"), code, "models:shape") as peer:
        yield peer


@pytest.mark.parametrize("name", fake.NUMBERS)
@pytest.mark.parametrize("dims", [(), (3,), (2, 3), (2, 1, 3, 2)])
def test_rows_of_one_shape_are_an_aligned_view(shapes, name, dims):
    rows = np.ones((5, *dims), name)
    reply = shapes.request(fake.fixed(rows, id=9))
    assert (reply.kind, reply.id, reply.dtype, reply.rows) == (fake.REPLY, 9, fake.STR, 5)
    assert reply.parts()["rows"] == [repr((rows.dtype.name, rows.shape, 0, True, False, False))] * 5


def test_rows_of_many_lengths_are_lists(shapes):
    reply = shapes.request(fake.variable([np.arange(n, dtype="<f8") for n in (2, 0, 5)], 12))
    assert reply.parts()["rows"] == ["ndarray 2 float64", "ndarray 0 float64", "ndarray 5 float64"]
    reply = shapes.request(fake.variable(["", "é!", "abc"], fake.STR))
    assert reply.parts()["rows"] == ["str 0 ", "str 2 ", "str 3 "]
    reply = shapes.request(fake.variable([b"\xff\x00", b""], fake.BYTES))
    assert reply.parts()["rows"] == ["memoryview 2 ", "memoryview 0 "]


def test_a_row_that_is_no_utf8_fails_the_batch_and_not_the_connection(shapes):
    payload = fake.padded(struct.pack("<I", 1)) + fake.padded(b"\xff")
    reply = shapes.request(
        fake.frame(
            fake.PREDICT, payload, dtype=fake.STR, dims=(0,), flags=fake.VARIABLE, rows=1, id=4
        )
    )
    assert (reply.kind, reply.id) == (fake.FAILURE, 4)
    assert b"not UTF-8" in reply.payload
    assert shapes.request(fake.fixed(np.ones((1, 1)))).kind == fake.REPLY


@pytest.fixture(scope="module")
def echo(tmp_path_factory, code):
    with serving(tmp_path_factory.mktemp("s"), code, "models:same", welcome={"crc": True}) as peer:
        yield peer


@pytest.mark.parametrize("name", fake.NUMBERS)
@pytest.mark.parametrize("dims", [(), (4,), (3, 2)])
def test_the_same_numbers_come_back(echo, name, dims):
    rows = (np.random.default_rng(1).random((7, *dims)) * 100).astype(name)
    reply = echo.request(fake.fixed(rows, flags=fake.CHECKED))
    got = reply.parts()["rows"]
    assert reply.flags == fake.CHECKED
    assert got.dtype == rows.dtype
    np.testing.assert_array_equal(got, rows)


def test_the_same_words_come_back(echo):
    words = ["", "naïve", "日本", "a" * 1000]
    assert echo.request(fake.variable(words, fake.STR)).parts()["rows"] == words
    blobs = [b"", bytes(range(256)), b"x"]
    assert echo.request(fake.variable(blobs, fake.BYTES)).parts()["rows"] == blobs
    ragged = [np.arange(n, dtype="<i2") for n in (3, 0, 1)]
    for got, row in zip(
        echo.request(fake.variable(ragged, 5)).parts()["rows"], ragged, strict=True
    ):
        np.testing.assert_array_equal(got, row)


def test_compressed_strings(echo):
    words = ["abcabcabc" * 50, "", "é"]
    raw = [word.encode() for word in words]
    block = lz4.block.compress(b"".join(raw), store_size=False)
    payload = fake.padded(np.array([len(r) for r in raw], "<u4").tobytes())
    payload += fake.padded(struct.pack("<Q", len(block)) + block)
    flags = fake.VARIABLE | fake.COMPRESSED
    reply = echo.request(
        fake.frame(fake.PREDICT, payload, dtype=fake.STR, dims=(0,), flags=flags, rows=3)
    )
    assert reply.parts()["rows"] == words


def test_batches_in_one_write_are_answered_in_order_each_aligned(shapes):
    batches = [np.ones((n, 3), "<f4") for n in (1, 400, 2, 9000, 5)]
    shapes.sock.sendall(b"".join(fake.fixed(batch, id=10 + i) for i, batch in enumerate(batches)))
    for i, batch in enumerate(batches):
        reply = shapes.frame()
        assert (reply.id, reply.rows) == (10 + i, len(batch))
        assert reply.parts()["rows"][0] == repr(("float32", batch.shape, 0, True, False, False))


def test_a_frame_that_arrives_byte_by_byte(echo):
    data = fake.fixed(np.arange(3.0).reshape(1, 3), id=77)
    for i in range(len(data)):
        echo.sock.sendall(data[i : i + 1])
    assert echo.frame().id == 77


def test_over_tcp(tmp_path, code):
    with serving(tmp_path, code, "models:same", tcp=True) as peer:
        rows = np.arange(300_000.0).reshape(100, 3000)
        np.testing.assert_array_equal(peer.request(fake.fixed(rows)).parts()["rows"], rows)


def test_an_address_of_no_kind_is_reported_at_once(tmp_path, code):
    process = fake.start("models:same", "localhost:7000", cwd=code)
    printed, _ = process.communicate()
    assert process.returncode == 2
    assert "unix:/path or tcp:host:port" in printed


def test_a_kept_input_is_never_overwritten(tmp_path, code):
    with serving(tmp_path, code, "models:Kept", "--warmup", "off") as peer:
        for value in (3.0, 4.0, 5.0):
            reply = peer.request(fake.fixed(np.full((2, 2), value)))
            assert reply.flags == fake.CONFIDENCE
            assert reply.parts()["rows"].tolist() == [3.0, 3.0]
            assert reply.parts()["confidence"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("known", [True, False])
def test_qualifiers_go_to_a_server_that_knows_them(tmp_path, code, known):
    with serving(
        tmp_path, code, "models:qualified", welcome={"qualifiers": True} if known else {}
    ) as peer:
        reply = peer.request(fake.fixed(np.array([[1.0], [2.0]])))
        assert reply.flags == (fake.QUALIFIERS if known else 0)
        parts = reply.parts()
        assert parts.pop("rows").tolist() == [1.0, 2.0]
        assert parts == (
            {"qualifiers": [b"", msgpack.packb({"kind": "big", "x": 2.5})]} if known else {}
        )
        assert peer.request(fake.fixed(np.ones((2, 1)))).flags == 0, "nothing is said of any row"


def test_a_model_that_raises_fails_its_batch_with_its_own_traceback(tmp_path, code):
    with serving(tmp_path, code, "models:picky") as peer:
        failure = peer.request(fake.fixed(np.array([[1.0], [-2.0]]), id=5))
        text = failure.payload.decode()
        assert (failure.kind, failure.id) == (fake.FAILURE, 5)
        assert "models.py" in text
        assert "clipper_container" not in text
        assert text.endswith("ValueError: negative: -2.0")
        assert peer.request(fake.fixed(np.ones((2, 1)))).kind == fake.REPLY


def test_retry_singly_marks_only_the_bad_rows(tmp_path, code):
    with serving(tmp_path, code, "models:picky", "--retry-singly") as peer:
        reply = peer.request(fake.fixed(np.array([[1.0], [-2.0], [3.0], [-4.0]])))
        parts = reply.parts()
        assert parts["rows"].tolist() == [1.0, 0.0, 3.0, 0.0]
        assert parts["status"] == [0, 1, 0, 1]
        assert "row 1: " in parts["text"]
        assert "negative: -4.0" in parts["text"]
        assert peer.request(fake.fixed(np.array([[-1.0], [-2.0]]))).kind == fake.FAILURE


def test_row_by_row(tmp_path, code):
    with serving(tmp_path, code, "models:single", "--row-by-row", "--retry-singly") as peer:
        assert peer.request(fake.fixed(np.array([[1.0], [2.0]]))).parts()["rows"].tolist() == [
            10.0,
            20.0,
        ]
        parts = peer.request(fake.fixed(np.array([[1.0], [-2.0]]))).parts()
        assert (parts["rows"].tolist(), parts["status"]) == ([10.0, 0.0], [0, 1])


def test_wrong_count_gives_the_next_step(tmp_path, code):
    with serving(tmp_path, code, "models:one") as peer:
        assert (
            peer.request(fake.fixed(np.ones((8, 1)))).payload.decode()
            == "model 'svm' got a batch of 8 and returned 1 value. predict() takes a list/array of"
            " inputs and returns one output per input. For a function of one input, deploy it"
            " with row_by_row=True."
        )


def test_padding(tmp_path, code):
    with serving(tmp_path, code, "models:padded", "--pad", "4") as peer:
        assert peer.request(fake.fixed(np.ones((3, 1)))).parts()["rows"].tolist() == [4, 4, 4]
        assert peer.request(fake.variable(["a"] * 5, fake.STR)).parts()["rows"].tolist() == [8] * 5


def test_a_reply_beyond_the_limit_is_a_failure(tmp_path, code):
    with serving(tmp_path, code, "models:wide", welcome={"payload_bytes_max": 1 << 20}) as peer:
        failure = peer.request(fake.fixed(np.ones((1, 1)), id=2))
        assert (failure.kind, failure.id) == (fake.FAILURE, 2)
        assert b"the server's limit is 1048576" in failure.payload


def test_heartbeats_both_ways(tmp_path, code):
    with serving(tmp_path, code, "models:total", welcome={"heartbeat_ms": 20}) as peer:
        for _ in range(3):
            assert peer.frame(heartbeats=True).kind == fake.HEARTBEAT
            peer.sock.sendall(fake.frame(fake.HEARTBEAT))
        assert peer.request(fake.fixed(np.ones((2, 3)))).parts()["rows"].tolist() == [3.0, 3.0]


def test_a_silent_server_is_left_and_dialled_again(tmp_path, code):
    with serving(tmp_path, code, "models:total", welcome={"heartbeat_ms": 20}) as peer:
        again = peer.server.accept()  # without a word from us
        again.welcome()
        assert again.request(fake.fixed(np.ones((1, 3)))).parts()["rows"].tolist() == [3.0]
        again.close()


def test_a_server_that_comes_back_is_found(tmp_path, code):
    with serving(tmp_path, code, "models:total") as peer:
        peer.server.close()
        peer.close()
        peer.server.__init__(tmp_path)
        again = peer.server.accept()
        again.welcome()
        assert again.request(fake.fixed(np.ones((1, 3)))).parts()["rows"].tolist() == [3.0]
        again.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"XXXX" + data[4:],
        lambda data: data[:12] + b"\xff" + data[13:],
        lambda data: data[:-1] + b"\xff",
        lambda data: fake.frame(fake.PREDICT, bytes(8), dtype=12, dims=(3,), rows=2),
        lambda data: fake.frame(99),
    ],
)
def test_a_damaged_frame_ends_the_connection_and_not_the_process(tmp_path, code, damage):
    with serving(tmp_path, code, "models:total") as peer:
        peer.sock.sendall(damage(fake.fixed(np.ones((1, 3)), flags=fake.CHECKED)))
        again = peer.server.accept()
        assert again.welcome()["pid"] == peer.process.pid
        again.close()


def test_sigterm_finishes_the_batch_and_sends_goodbye(tmp_path, code):
    (code / "slow.py").write_text(
        "import os, signal\ndef predict(x):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return"
        " x[:, 0]\n"
    )
    with serving(tmp_path, code, "slow:predict") as peer:
        assert peer.request(fake.fixed(np.ones((2, 3)))).kind == fake.REPLY
        assert peer.frame().kind == fake.GOODBYE
        assert peer.process.wait(60) == 0


def test_sigterm_while_idle_and_while_there_is_no_server(tmp_path, code):
    with serving(tmp_path, code, "models:total") as peer:
        assert peer.request(fake.fixed(np.ones((2, 3)))).kind == fake.REPLY
        peer.process.send_signal(signal.SIGTERM)
        assert peer.frame().kind == fake.GOODBYE
        assert peer.process.wait(60) == 0
    process = fake.start("models:total", f"unix:{tmp_path}/none", cwd=code)
    assert "reconnecting" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


def test_other_signals_are_the_models_own(tmp_path, code):
    (code / "handler.py").write_text(
        "import os, signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda number, frame:"
        " (seen.append(number), print('seen', flush=True)))\ndef predict(x):\n    return"
        " [len(seen)] * len(x)\n"
    )
    with serving(tmp_path, code, "handler:predict") as peer:
        peer.request(fake.fixed(np.ones((1, 1))))  # its handlers are in place
        peer.process.send_signal(signal.SIGUSR1)
        assert peer.process.stdout.readline() == "seen\n"
        peer.process.send_signal(signal.SIGTERM)
        assert peer.frame().kind == fake.GOODBYE


def test_goodbye_from_the_server(tmp_path, code):
    with serving(tmp_path, code, "models:total") as peer:
        peer.sock.sendall(fake.fixed(np.ones((2, 3))) + fake.frame(fake.GOODBYE))
        assert peer.frame().kind == fake.REPLY
        assert peer.frame().kind == fake.GOODBYE
        assert peer.process.wait(60) == 0


def test_a_refused_container_gives_the_reason_and_ends(tmp_path, code):
    server = fake.Server(tmp_path)
    process = fake.start("models:total", server.address, cwd=code)
    peer = server.accept()
    peer.hello()
    peer.sock.sendall(fake.frame(fake.REFUSE, b"wrong token"))
    printed, _ = process.communicate()
    assert process.returncode == 4
    assert printed.endswith("wrong token\n")
    peer.close()
    server.close()


def run(code, target, *options):
    process = fake.start(target, "unix:/nowhere", *options, cwd=code)
    printed, _ = process.communicate(timeout=fake.PATIENCE_S)
    return process.returncode, printed


def test_a_model_that_does_not_load_gives_the_next_step(tmp_path, code):
    status, printed = run(code, "broken:predict")
    assert status == 3
    assert printed.startswith(
        "model 'svm' failed to load: No module named 'nothing_like_it'. There is no"
        f" nothing_like_it.py in {code}"
    )
    assert "broken.py" in printed
    assert "clipper_container/" not in printed
    (code / "elsewhere").mkdir(exist_ok=True)
    status, printed = run(code, "models:absent")
    assert (status, printed.splitlines()[0]) == (
        3,
        "model 'svm' failed to load: module 'models' has no attribute 'absent'",
    )


def test_a_packed_file_is_checked_before_it_is_opened(tmp_path, code):
    path = tmp_path / "evil.pkl"
    path.write_bytes(b"CLIPPER-MODEL {}\ncos\nsystem\n(S'echo pwned'\ntR.")
    status, printed = run(code, str(path), "--sha256", hashlib.sha256(b"other").hexdigest())
    assert status == 3
    assert "is not the file that was deployed" in printed.splitlines()[0]
    assert "pwned" not in printed.splitlines()
    path.write_bytes(b"\x80\x05.")
    assert "is not a pickle, or damaged" in run(code, str(path))[1]


def test_threads_are_capped_before_numpy_is_imported(tmp_path, code):
    (code / "threads.py").write_text(
        "import os\ndef predict(x):\n    return [os.environ['OMP_NUM_THREADS']] * len(x)\n"
    )
    for options, env, limit in (
        ((), {}, "1"),
        (("--threads", "3"), {}, "3"),
        ((), {"CLIPPER_THREADS": "2"}, "2"),
    ):
        (tmp_path / limit).mkdir()
        with serving(tmp_path / limit, code, "threads:predict", *options, **env) as peer:
            assert peer.request(fake.fixed(np.ones((1, 1)))).parts()["rows"] == [limit]
    lazy = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys, clipper_container, clipper_container.__main__; print('numpy' in"
                " sys.modules)"
            ),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert lazy.stdout == "False\n"


# -- version 1


def v1(kind, rows, name):
    if kind <= 3:
        return struct.pack("<BII", kind, *rows.shape) + rows.astype(name).tobytes()
    if kind == 7:
        raw = [row.encode() for row in rows]
        block = lz4.block.compress(b"".join(raw), store_size=False)
        content = np.array([len(r) for r in raw], "<i4").tobytes() + block
    else:
        content = b"".join(struct.pack("<I", len(row)) + row.astype(name).tobytes() for row in rows)
    return struct.pack("<BII", kind, len(rows), len(content)) + content


def test_version_1_batches(tmp_path, code):
    (code / "sums.py").write_text(
        "def predict(x):\n    return [len(r) if isinstance(r, str) else float(r.sum()) for r in"
        " x]\n"
    )
    with serving(
        tmp_path, code, "sums:predict", "--protocol", "1", welcome={"heartbeat_ms": 20}
    ) as peer:
        assert peer.greeting["protocol"] == 1
        numbers = np.arange(6).reshape(2, 3)
        for kind, name in ((1, "<i4"), (2, "<f8"), (3, "u1")):
            peer.sock.sendall(v1(kind, numbers, name))
            assert struct.unpack("<2d", peer.read(16)) == (3.0, 12.0)
        ragged = [np.arange(4), np.arange(0), np.arange(2)]
        for kind, name in ((4, "<i4"), (5, "<f8"), (6, "u1")):
            peer.sock.sendall(v1(kind, ragged, name))
            assert struct.unpack("<3d", peer.read(24)) == (6.0, 0.0, 1.0)
        peer.sock.sendall(v1(7, ["abc", "", "de"], None))
        assert struct.unpack("<3d", peer.read(24)) == (3.0, 0.0, 2.0)


def test_version_1_fixed_rows_are_aligned_and_a_failure_closes(tmp_path, code):
    (code / "aligned.py").write_text(
        "def predict(x):\n    assert x[0, 0] >= 0\n"
        "    return [float(x.ctypes.data % 64 == 0 and not x.flags.owndata)] * len(x)\n"
    )
    with serving(tmp_path, code, "aligned:predict", "--protocol", "1") as peer:
        for n in (1, 5000, 2):
            peer.sock.sendall(v1(2, np.ones((n, 3)), "<f8"))
            assert struct.unpack(f"<{n}d", peer.read(8 * n)) == (1.0,) * n
        peer.sock.sendall(v1(2, -np.ones((1, 3)), "<f8"))
        with pytest.raises(EOFError):
            peer.read(1)
        again = peer.server.accept()
        again.close()


@pytest.mark.parametrize(
    ("address", "requests_crc"), [("tcp:10.0.0.1:7000", True), ("unix:/run/clipper", False)]
)
def test_a_container_requests_checksums_over_tcp_only(address, requests_crc):
    options = ContainerOptions("m")
    assert bool(options.hello(address).get("crc")) is requests_crc


def test_containers_with_one_process_id_do_not_dial_again_at_the_same_times():
    """Each container is process 1 in its image."""
    one, other = ([pauses.next_s() for _ in range(20)] for pauses in (Backoff(), Backoff()))
    assert one != other
    for pauses in (one, other):
        assert all(
            0.5 * s <= pause <= s
            for pause, s in zip(pauses, [min(10.0, 0.1 * 2**i) for i in range(20)], strict=True)
        )
