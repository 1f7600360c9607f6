"""A model's process has no secret of the server but a token for its own model."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main
from clipper.types import VersionedModel
from clipper_container.wire.frames import Kind
from tests.end_to_end.test_replicas import rows_of
from tests.memory_container import MemoryContainer

MARK = "PLANTED"
SECRETS = {
    "CLIPPER_SERVER__TOKEN": f"{MARK}-server",
    "CLIPPER_HTTP__TOKEN": f"{MARK}-http",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}-aws",
    "DATABASE_URL": f"postgres://u:{MARK}-db@h/d",
}


def variables(rows):
    if rows[0, 0] < 0:
        raise ValueError("the first is negative")
    return [repr(dict(os.environ))] * len(rows)


def total(rows):
    return rows.sum(axis=1)


def texts_of(pid: int) -> list[str]:
    """Return what /proc says of a process: its environment as it began, and its command line."""
    names = ("environ", "cmdline")
    return [Path(f"/proc/{pid}/{name}").read_bytes().decode() for name in names]


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def opened_by(pid: int) -> set[str]:
    """Return what the descriptors of a process lead to."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(link))
        except FileNotFoundError:
            continue
    return found


def listening() -> set[str]:
    """Return the sockets of this host that listen for TCP."""
    tables = (Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {f"socket:[{words[9]}]" for words in rows if words[3] == "0A"}


@pytest.mark.parametrize("start", ["forked", "plain"])
def test_a_model_has_no_secret_of_the_server(tmp_path, monkeypatch, caplog, start):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    caplog.set_level("DEBUG")
    state = tmp_path / "state"
    settings = {"fork_server": start == "forked", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    with clipper.start(state=str(state), **settings) as server:
        assert server.token == SECRETS["CLIPPER_SERVER__TOKEN"]
        options = {"input": "f64[1]", "output": "str", "cache": False, "warmup": False}
        model = server.deploy("m", variables, **options)
        seen = model.predict([1.0], slo_ms=20_000).result(30)
        with pytest.raises(clipper.errors.ClipperError) as failure:
            model.predict([-1.0], slo_ms=20_000).result(30)
        (row,) = rows_of(server, model)
        assert str(row["start"]).startswith(start)
        parents = {parent_of(int(row["pid"]))} - {os.getpid()}
        assert bool(parents) == (start == "forked")
        shown = [seen, str(failure.value), repr(server.stats()), repr(server.catalog.models())]
        shown += [text for pid in (row["pid"], *parents) for text in texts_of(pid)]
        shown += [*server.logs("m"), *(record.getMessage() for record in caplog.records)]
        for pid in (row["pid"], *parents):
            links = opened_by(pid)
            assert not links & listening()
            ours = {link for link in links if link.startswith(str(state))}
            assert all(link.startswith(f"{state}/models") for link in ours)
    files = [path for path in state.rglob("*") if path.is_file()]
    shown += [path.read_bytes().decode(errors="replace") for path in files]
    assert len(files) > 2
    assert [text[:300] for text in shown if MARK in text] == []
    assert "CLIPPER_" not in seen.replace("CLIPPER_TOKEN", "")


def test_the_token_of_a_replica_ends_with_it(server):
    server.deploy("ends", total, input="f64[2]", cache=False, replicas=2)
    tokens = server._container_tokens
    server.scale("ends", 1)
    for version, number in ((1, 1), (2, 0)):
        token = tokens.of_replica(VersionedModel("ends", version), number)
        fields = {"version": version, "replica": number, "input": "f64[2]"}
        with MemoryContainer(server.address, token, "ends", **fields) as container:
            kind, why = container.send_hello()
        assert (kind, why) == (Kind.REFUSE, f"replica {number} of 'ends:{version}' was stopped.")
    server.retire("ends", force=True)


def test_a_container_that_is_started_by_hand_has_a_token_for_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPPER_SERVER__TOKEN", "hush")
    done = CliRunner().invoke(main, ["key", "create", "box", "--container", "digits:3"])
    assert done.exit_code == 0, done.output
    token = done.output.strip()
    assert not list(tmp_path.iterdir())
    with clipper.start(state="memory") as server:
        for name, version, kind in (("digits", 3, Kind.WELCOME), ("digits", 4, Kind.REFUSE)):
            fields = {"version": version, "input": "f64[2]"}
            with MemoryContainer(server.address, token, name, **fields) as container:
                assert container.send_hello()[0] is kind
    monkeypatch.delenv("CLIPPER_SERVER__TOKEN")
    done = CliRunner().invoke(main, ["key", "create", "box", "--container", "digits"])
    assert done.exit_code == 1
    assert "server.token is not set" in done.output
