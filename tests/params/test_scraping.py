"""A set as Prometheus scrapes it, and as a person looks at it."""

import http.client
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from clipper.cli import main
from clipper.errors import AddressInUse, ConfigError
from clipper.params import TableSpec
from clipper.params.client.stats_reader import StatsReader
from clipper.params.local.metrics_page import MetricsPage
from tests.params.conftest import TOKEN, Shards, ones
from tests.processes import Program

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def busy(shards: Shards) -> Shards:
    client = shards.up(2, replicas=1).client()
    client.create(TableSpec("users", 3))
    client.push("users", [1, 2, 3, 4], ones((4, 3)))
    client.pull("users", [1, 2, 3, 9])
    (shards.root / "shards.json").write_text(
        json.dumps({"addresses": shards.addresses, "token": TOKEN})
    )
    return shards


@pytest.fixture
def page(busy: Shards) -> Iterator[MetricsPage]:
    reader = StatsReader(busy.root)
    one = MetricsPage("127.0.0.1:0", reader.read).start()
    yield one
    one.stop()
    reader.close()


def get(page: MetricsPage, path: str = "/metrics", **headers: str) -> tuple[int, bytes, str]:
    line = http.client.HTTPConnection(page.address, timeout=20)
    line.request("GET", path, headers=headers)
    reply = line.getresponse()
    body = reply.read()
    line.close()
    return reply.status, body, reply.headers["Content-Type"]


def test_a_set_is_scraped(page: MetricsPage, busy: Shards) -> None:
    status, body, kind = get(page)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    text = body.decode()
    missed = re.findall(
        r'^clipper_params_pulled_rows_total\{table="users",shard="(\d)",outcome="miss"\} (\d+)$',
        text,
        re.M,
    )
    assert missed == [("0", "0"), ("1", "1")]
    assert text.count("# TYPE clipper_params_rows gauge") == 1
    busy.end(0, snapshot=False)
    text = get(page)[1].decode()
    assert 'clipper_params_shard_up{shard="0"} 0' in text
    assert 'clipper_params_rows{table="users",shard="1"} 2' in text, "the others are as they were"
    assert get(page, "/")[0] == 404
    assert get(page, Origin="http://evil.example")[0] == 403
    (busy.root / "shards.json").unlink()
    assert get(page)[0] == 503


def test_promtool_finds_nothing(page: MetricsPage) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: python tools/fetch.py prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=get(page)[1], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


SILENT = "0x40"  # forty minutes
FIRES = {  # alert -> the series that make it fire after half an hour, by the minute
    "ClipperParamsShardAway": [('clipper_params_shard_up{shard="1", instance="a"}', SILENT)],
    "ClipperParamsShardRestarts": [('clipper_params_epoch{shard="1", instance="a"}', "1+1x40")],
    "ClipperParamsExposed": [('clipper_params_shard_exposed{shard="1", instance="a"}', "1x40")],
    "ClipperParamsReplicaBehind": [
        ('clipper_params_replica_lag_seconds{shard="1", replica="2", instance="a"}', "31x40")
    ],
    "ClipperParamsSnapshotsFail": [
        ('clipper_params_snapshots_total{shard="1", outcome="failed", instance="a"}', "0x25 1x15")
    ],
    "ClipperParamsRefuses": [
        ('clipper_params_refused_total{shard="1", reason="too_stale", instance="a"}', "0+90x40")
    ],
    "ClipperParamsSkewed": [
        (
            (
                f'clipper_params_pulled_rows_total{{table="t", shard="{i}", outcome="hit",'
                ' instance="a"}'
            ),
            f"0+{more}x40",
        )
        for i, more in enumerate((9000, 9, 9, 9))
    ],
}


@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_when_it_should(alert: str, tmp_path: Path) -> None:
    """No alert fires in normal operation."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: python tools/fetch.py prometheus")
    (tmp_path / "alerts.yml").write_text((files("clipper.metrics") / "alerts.yml").read_text())
    quiet = [
        ('clipper_params_shard_up{shard="0", instance="a"}', "1x40"),
        ('clipper_params_epoch{shard="0", instance="a"}', "3x40"),
        ('clipper_params_shard_ready{shard="0", instance="a"}', "1x40"),
        ("clipper_build_info", "1x40"),
        ('clipper_params_refused_total{shard="0", reason="not_ready", instance="a"}', "0+90x40"),
        ('clipper_params_replica_lag_seconds{shard="0", replica="1", instance="a"}', "2x40"),
        ('clipper_params_snapshots_total{shard="0", outcome="ok", instance="a"}', "0+1x40"),
    ]
    series = [{"series": name, "values": values} for name, values in [*quiet, *FIRES[alert]]]
    found = 'sort(count by (alertname) (ALERTS{alertstate="firing"}))'
    fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    expectations = [{"expr": found, "eval_time": "40m", "exp_samples": fires}]
    tests = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expectations}],
    }
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "tests.yml")],
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_invalid_metrics_addresses_are_refused(page: MetricsPage) -> None:
    with pytest.raises(AddressInUse, match="cannot listen"):
        MetricsPage(page.address, list)
    for address in ("nowhere", ":9300", "127.0.0.1:http"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            MetricsPage(address, list)


def test_a_silent_client_is_disconnected_and_delays_no_other(page: MetricsPage) -> None:
    silent = http.client.HTTPConnection(page.address, timeout=20)
    silent.connect()
    assert get(page)[0] == 200
    silent.close()


def test_one_shard_reports_its_metrics(busy: Shards) -> None:
    reader = StatsReader(busy.addresses, token=TOKEN, only=1)
    assert [one["shard"] for one in reader.read()] == [1]
    reader.close()


@pytest.mark.slow
def test_a_command_serves_a_set_that_others_run(busy: Shards) -> None:
    arguments = ["params", "metrics", "--folder", busy.root, "--listen", "127.0.0.1:0"]
    with Program(sys.executable, "-m", "clipper", *arguments, apart=True) as command:
        address = command.line().rpartition("http://")[2].partition("/")[0]
        line = http.client.HTTPConnection(address, timeout=20)
        line.request("GET", "/metrics")
        assert b'clipper_params_shard_up{shard="1"} 1' in line.getresponse().read()
        line.close()
        assert command.stop() == 0


def words(*more: str) -> str:
    done = CliRunner().invoke(main, ["params", *more])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_the_state_of_shards(busy: Shards) -> None:
    folder = ["--folder", str(busy.root)]
    output = words("ps", *folder)
    assert re.search(
        r"^ +1 +serves +\d+ +\d+ +2 +\S+ +1 +66\.7% +1 +\d+ +0, 0\.0 s +none", output, re.M
    ), output
    found = json.loads(words("ps", "--json", *folder))
    assert found["shards"][1]["tables"]["users"]["missed"] == 1
    assert re.search(
        r'^clipper_params_rows\{table="users",shard="1"\} 2$', words("metrics", *folder), re.M
    )
    busy.end(1, snapshot=False)
    assert "shard 1 is away: " in words("ps", *folder)
