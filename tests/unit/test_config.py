"""Sources of settings, their precedence, and the messages after a mistake."""

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

import clipper
from clipper import config
from clipper.config import Config, KeyInfo, describe, load, merge_batching
from clipper.errors import ConfigError
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import at, is_union, plain_type
from clipper.spec.model import ModelSpec
from clipper.types import Batching, Similar

EXAMPLE = """\
# a server for digits
[server]
state = "state"          # a folder
address = "tcp://127.0.0.1:7000"

[limits]
cache_bytes_max = 1_000_000
tasks_max = 512

[batching]
mode = "fit"
delay_us = 100

[models.svm]
target = "mine:predict"
replicas = 2
input = "f64[64]"
batching = { mode = "static", size_max = 8, pad = true }

[models."my.forest"]
batching = "quantile"

[models.bare]

[apps.digits]
models = [
    "svm:1",
    "my.forest",
]
slo_ms = 20
default = -1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "clipper.toml"
    path.write_text(text)
    return path


def refusal(path: Path | None = None, env: dict[str, str] | None = None, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, env or {}, **keywords)
    return str(caught.value)


# -- reading


def test_without_anything_everything_is_the_default() -> None:
    assert load(env={}) == Config()
    assert (
        load(env={"CLIPPER_BUILD": "debug", "HOME": "/", "CLIPPER_CONFIG": "x"}, state=None)
        == Config()
    )


def test_a_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, EXAMPLE), {})
    assert config.server.state == "state"
    assert config.limits.cache_bytes_max == 1_000_000
    assert list(config.models) == ["svm", "my.forest", "bare"]
    svm = config.models["svm"]
    assert (svm.target, svm.replicas, svm.input, svm.cache) == ("mine:predict", 2, "f64[64]", True)
    assert svm.batching == Batching("static", size_max=8, pad=True, delay_us=100), (
        "what it leaves out is from [batching]"
    )
    assert config.models["my.forest"].batching == Batching("quantile", delay_us=100)
    assert config.models["bare"].batching == config.batching == Batching("fit", delay_us=100)
    app = config.apps["digits"]
    assert (app.models, app.slo_ms, app.default, app.policy) == (
        ("svm:1", "my.forest"),
        20.0,
        -1,
        "",
    )


def test_keyword_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE)
    env = {
        "CLIPPER_SERVER__STATE": "env",
        "CLIPPER_LIMITS__TASKS_MAX": "1024",
        "CLIPPER_MODELS__SVM__REPLICAS": "4",
        "CLIPPER_MODELS__SVM__BATCHING__SIZE_MAX": "9",
        "CLIPPER_MODELS__BARE__BATCHING": "aimd",
        "CLIPPER_APPS__DIGITS__MODELS": "svm, bare",
        "CLIPPER_APPS__DIGITS__DEFAULT": "0.5",
        "CLIPPER_MODELS__SVM__CACHE": "false",
        "CLIPPER_APPS__NEW__SLO_MS": "7.5",
    }
    config = load(path, env, state="keyword", batching="static", limits={"cache_bytes_max": 70_000})
    assert config.server.state == "keyword"
    assert config.limits.tasks_max == 1024
    assert config.limits.cache_bytes_max == 70_000
    assert config.batching == Batching("static", delay_us=100)
    assert config.models["svm"].replicas == 4
    assert config.models["svm"].cache is False
    assert config.models["svm"].batching == Batching("static", size_max=9, pad=True, delay_us=100)
    assert config.models["bare"].batching == Batching("aimd", delay_us=100)
    assert config.apps["digits"].models == ("svm", "bare")
    assert config.apps["digits"].default == 0.5
    assert config.apps["new"].slo_ms == 7.5
    origins = config.origins
    assert origins["server.state"] == "keyword state"
    assert origins["limits.tasks_max"] == "CLIPPER_LIMITS__TASKS_MAX"
    assert origins["models.svm.target"] == f"{path}:15"
    assert "server.engines" not in origins


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ('"7"', "7"),
        ("none of these", "none of these"),
        ("[1, 2.5]", [1, 2.5]),
        ("true", True),
    ],
)
def test_a_default_from_the_environment_is_json_or_text(text: str, value: object) -> None:
    config = load(env={"CLIPPER_APPS__A__DEFAULT": text})
    assert config.apps["a"].default == value
    assert type(config.apps["a"].default) is type(value)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPPER_SERVER__ENGINES", "3")
    assert load().server.engines == 3


def test_a_token_may_be_in_a_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hush\n")
    config = load(env={"CLIPPER_SERVER__TOKEN_FILE": str(tmp_path / "token")})
    assert config.server.token == "hush"
    assert "hush" not in repr(config)
    assert "cannot read token_file" in refusal(token_file=str(tmp_path / "none"))
    assert "both token and token_file" in refusal(token="x", token_file=str(tmp_path / "token"))
    (tmp_path / "token").write_text("\n")
    assert "is empty" in refusal(token_file=str(tmp_path / "token"))


# -- slips


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (
            30,
            "slo_ms = 20->slo = 20",
            "unknown key 'slo' in [apps.digits] - did you mean 'slo_ms'?",
        ),
        (
            8,
            "tasks_max = 512->tasks_mx = 512",
            "unknown key 'tasks_mx' in [limits] - did you mean 'tasks_max'?",
        ),
        (
            8,
            "tasks_max = 512->zzz = 1",
            "unknown key 'zzz' in [limits]. Keys: cache_bytes_max, queue_rows_max",
        ),
        (
            8,
            "tasks_max = 512->tasks_max = 1",
            "limits.tasks_max = 1: expected a whole number from 256 to 16777216 tasks.",
        ),
        (
            8,
            "tasks_max = 512->tasks_max = 512.5",
            "limits.tasks_max = 512.5: expected a whole number",
        ),
        (
            8,
            'tasks_max = 512->tasks_max = "512"',
            "limits.tasks_max = '512': expected a whole number",
        ),
        (
            8,
            "tasks_max = 512->tasks_max = true",
            "limits.tasks_max = True: expected a whole number",
        ),
        (
            8,
            "tasks_max = 512->tasks_max.x = 1",
            "limits.tasks_max is a table: expected a whole number",
        ),
        (3, 'state = "state"->state = 5', "server.state = 5: expected a string."),
        (
            11,
            'mode = "fit"->mode = "fast"',
            "batching.mode = 'fast': expected one of 'aimd', 'fit', 'quantile', 'static'.",
        ),
        (
            12,
            "delay_us = 100->delay_us = 2001",
            "batching.delay_us = 2001: expected a whole number from 0 to 2000 us.",
        ),
        (
            18,
            "size_max = 8->size = 8",
            "unknown key 'size' in [models.svm.batching] - did you mean 'size_max'?",
        ),
        (
            18,
            "size_max = 8->size_max = 0",
            "models.svm.batching.size_max = 0: expected a whole number from 1 to 65536 rows.",
        ),
        (21, '"quantile"->7', "models.my.forest.batching = 7: expected a mode or a table."),
        (
            17,
            "f64[64]->f64[x]",
            "models.svm.input = 'f64[x]': bad input type 'f64[x]': dimensions are whole numbers",
        ),
        (
            16,
            "replicas = 2->replicas = 65",
            "models.svm.replicas = 65: more than limits.replicas_max (64).",
        ),
        (23, "[models.bare]->[models.Bare]", "bad model name 'Bare': 'B' is not allowed"),
        (23, "[models.bare]->[model.bare]", "unknown section [model] - did you mean 'models'?"),
        (
            23,
            "[models.bare]->[[models.bare]]",
            "models.bare = [{}]: expected a table, as in [models.NAME].",
        ),
        (
            26,
            '"svm:1"->"svm:0"',
            "apps.digits.models = ['svm:0', 'my.forest']: bad version in 'svm:0'",
        ),
        (26, '"svm:1"->1', "apps.digits.models = [1, 'my.forest']: expected a list of strings."),
        (
            30,
            "slo_ms = 20->slo_ms = nan",
            "apps.digits.slo_ms = nan: expected a number from 0.001 to 86400000 ms.",
        ),
        (30, "slo_ms = 20->slo_ms = 0", "apps.digits.slo_ms = 0: expected a number"),
        (
            30,
            "slo_ms = 20->slo_ms = 60001",
            "apps.digits.slo_ms = 60001: more than limits.slo_ms_max (60000 ms).",
        ),
        (
            4,
            "tcp://127.0.0.1:7000->tcp://0.0.0.0:7000",
            "other hosts could dial in. Set server.token",
        ),
        (
            4,
            "tcp://127.0.0.1:7000->tcp://:7000",
            "expected 'unix', 'unix:PATH' or 'tcp://HOST:PORT'",
        ),
        (4, "tcp://127.0.0.1:7000->127.0.0.1", "expected 'unix', 'unix:PATH' or 'tcp://HOST:PORT'"),
        (
            4,
            "tcp://127.0.0.1:7000->tcp://localhost:70000",
            "expected 'unix', 'unix:PATH' or 'tcp://HOST:PORT'",
        ),
        (8, "tasks_max = 512->tasks_max = = 512", "Invalid value. See https://toml.io."),
        (9, "tasks_max = 512->tasks_max = 512\ntasks_max = 3", "Cannot overwrite a value"),
    ],
)
def test_a_slip_in_the_file_is_shown_with_its_line(
    tmp_path: Path, line: int, text: str, message: str
) -> None:
    old, _, new = text.partition("->")
    assert EXAMPLE.count(old) == 1
    path = write(tmp_path, EXAMPLE.replace(old, new))
    shown = refusal(path)
    found = re.match(rf"{re.escape(str(path))}:(\d+): ", shown)
    assert found, shown
    assert message in shown
    assert int(found[1]) == line, "a value of several lines is at its first"


def test_lines_are_right_after_values_of_several_lines_and_for_dotted_keys(tmp_path: Path) -> None:
    text = '[models.a]\ntarget = """\nreplica = 1\n[limits]\n"""\n\n[limits]\n\nmodels_max = 0\n'
    assert refusal(write(tmp_path, text)).startswith(
        f"{tmp_path}/clipper.toml:9: limits.models_max = 0"
    )
    text = 'apps.digits.slo_ms = 5\n\napps."x.y".slo = 5\n'
    assert refusal(write(tmp_path, text)).startswith(
        f"{tmp_path}/clipper.toml:3: unknown key 'slo' in [apps.x.y]"
    )
    text = 'server.state = "a\u2028b"\r\nserver.engines = 0\r\n'
    assert refusal(write(tmp_path, text)).startswith(
        f"{tmp_path}/clipper.toml:2: server.engines = 0"
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "CLIPPER_LIMITS__TASK_MAX",
            "1",
            "unknown key 'task_max' in [limits] - did you mean 'tasks_max'?",
        ),
        (
            "CLIPPER_LIMITS__TASKS_MAX",
            "many",
            "limits.tasks_max = 'many': expected a whole number from 256",
        ),
        (
            "CLIPPER_LIMITS__TASKS_MAX",
            "1",
            "limits.tasks_max = '1': expected a whole number from 256",
        ),
        (
            "CLIPPER_LIMITS_TASKS_MAX",
            "1000",
            "unknown variable - did you mean 'CLIPPER_LIMITS__TASKS_MAX'?",
        ),
        ("CLIPPER_SERVER__INSECURE", "maybe", "server.insecure = 'maybe': expected true or false."),
        ("CLIPPER_SEVER__STATE", "x", "unknown section [sever] - did you mean 'server'?"),
        ("CLIPPER_MODELS__SVM", "x", "models.svm = 'x': expected a table, as in [models.NAME]."),
    ],
)
def test_a_slip_in_the_environment_names_the_variable(name: str, value: str, message: str) -> None:
    assert refusal(env={name: value}).startswith(f"{name}: {message}")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"slo": 5}, "keyword slo: unknown key 'slo'."),
        (
            {"cache_byte_max": 5},
            (
                "keyword cache_byte_max: unknown key 'cache_byte_max' - did you mean"
                " 'cache_bytes_max'?"
            ),
        ),
        ({"state": 5}, "keyword state: server.state = 5: expected a string."),
        ({"limits": {"x": 1}}, "keyword limits: unknown key 'x' in [limits]"),
        ({"limits": 5}, "keyword limits: limits = 5: expected a table."),
        ({"apps": {"Bad": {}}}, "keyword apps: bad application name 'Bad'"),
        (
            {"apps": {"a": {"policy": "a b"}}},
            "keyword apps: apps.a.policy = 'a b': bad policy name",
        ),
        ({"batching": "x"}, "keyword batching: batching.mode = 'x'"),
        (
            {"restart_ms_min": 20_000},
            "keyword restart_ms_min: server.restart_ms_min = 20000: more than restart_ms_max",
        ),
    ],
)
def test_a_slip_in_a_keyword_names_it(keywords: dict[str, Any], message: str) -> None:
    assert refusal(**keywords).startswith(message)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "none.toml: No such file" in refusal(tmp_path / "none.toml")
    assert "Is a directory" in refusal(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'state = "\xe9"')
    assert "is not UTF-8" in refusal(tmp_path / "latin.toml")


def test_addresses() -> None:
    for address in (
        "unix",
        "unix:/run/clipper.sock",
        "tcp://localhost:0",
        "tcp://127.1.2.3:80",
        "tcp://[::1]:80",
    ):
        assert load(env={}, address=address).server.address == address
    assert load(env={}, address="tcp://0.0.0.0:7000", token="secret").server.token == "secret"
    assert load(env={}, address="tcp://0.0.0.0:7000", insecure=True).server.insecure
    for address in ("", "unix:", "tcp://", "http://h:1", "tcp://h:-1", "tcp://h:x"):
        assert "expected 'unix'" in refusal(address=address)


# -- batching, and the list of keys


def test_merge_batching() -> None:
    base = Batching("fit", size_max=16)
    assert merge_batching(base, None) is base
    assert merge_batching(base, Batching()) == Batching()
    assert merge_batching(base, "static") == Batching("static", size_max=16)
    assert merge_batching(base, {"delay_us": 5}) == Batching("fit", size_max=16, delay_us=5)
    assert merge_batching(base, {}) == base
    bad: Any
    for bad in ("fast", {"size": 1}, {"size_max": 0}, 5):
        with pytest.raises(ConfigError, match="batching"):
            merge_batching(base, bad)
    assert load(env={}, models={"a": {"batching": base}}).models["a"].batching == base


def test_columns_that_a_model_reads(tmp_path: Path) -> None:
    path = write(tmp_path, "[models.m]\nreads = { taste = [0, 1] }\n")
    assert load(path, {"CLIPPER_MODELS__M__READS__USERS": "2, 3"}).models["m"].reads == {
        "taste": (0, 1),
        "users": (2, 3),
    }
    path = write(tmp_path, "[models.m.reads]\ntaste = 0\n'the items' = [1]\n")
    assert load(path, {}).models["m"].reads == {"taste": 0, "the items": (1,)}
    assert load(env={}, models={"m": {"reads": {}}}).models["m"].reads == {}
    expected = "expected columns by table, as { taste = [0, 1] }"
    for wrong in ("words", {"t": "x"}, {"t": [-1]}, {"t": {"u": 1}}, {"t": 0.5}):
        assert f"models.m.reads = {wrong!r:.5}" in refusal(models={"m": {"reads": wrong}})
        assert expected in refusal(models={"m": {"reads": wrong}})
    write(tmp_path, "[models.m]\nreads = { taste = [0, 1], users = -1 }\n")
    assert "clipper.toml:2: models.m.reads = {'users': -1}: expected columns" in refusal(path)
    assert "READS__TASTE: models.m.reads = {'taste': [0, 'x']}" in refusal(
        env={"CLIPPER_MODELS__M__READS__TASTE": "0,x"}
    )
    assert "tolerance = 0.5: it does not declare what it reads." in refusal(
        models={"m": {"tolerance": 0.5}}
    )


def test_streams() -> None:
    url = "redis://127.0.0.1/0"
    config = load(
        env={"CLIPPER_STREAMS__IN__CLAIM_S": "5"},
        streams={"in": {"app": "digits", "url": url, "source": "r"}},
        model_streams={"live": {"url": url, "trusted": ["a.B"]}},
    )
    assert config.streams == {"in": StreamSettings("digits", url, "r", claim_s=5.0)}
    assert config.model_streams == {"live": ModelStreamSettings(url, trusted=("a.B",))}
    assert "streams.in.app: it is needed." in refusal(streams={"in": {"url": url}})
    assert "model_streams.live.url: it is needed." in refusal(model_streams={"live": {"keep": 2}})
    assert "unknown key 'gruop' in [streams.in] - did you mean 'group'?" in refusal(
        streams={"in": {"gruop": "x"}}
    )
    assert "expected a whole number from 1 to 65536 records" in refusal(
        streams={"in": {"in_flight_max": 0}}
    )


def test_every_key_is_described() -> None:
    rows = {row.key: row for row in describe()}
    assert rows["limits.cache_bytes_max"] == KeyInfo(
        "limits.cache_bytes_max",
        "a whole number",
        "bytes",
        64 << 20,
        "65536 to 1099511627776",
        "memory of the prediction cache",
    )
    for row in rows.values():
        assert row.text
        for suffix, unit in (
            ("_bytes_max", "bytes"),
            ("_ms", "ms"),
            ("_us", "us"),
            ("_rows_max", "rows"),
            ("_s", "s"),
        ):
            assert not row.key.endswith(suffix) or row.unit == unit
        if row.type in ("a whole number", "a number"):
            assert row.range
    whole = Config()
    sections = (
        whole.server,
        whole.limits,
        whole.batching,
        whole.feedback,
        whole.http,
        whole.grpc,
        whole.logging,
        whole.tracing,
        whole.docker,
    )
    sections = (*sections, whole.influx, whole.mesh, whole.params, whole.artifacts)
    expected = sum(len(msgspec.structs.fields(section)) for section in sections)
    for named in (ApplicationSpec, StreamSettings, ModelStreamSettings):
        expected += len(msgspec.structs.fields(named))
    expected += len(at(ModelSpec, "file"))
    assert len(rows) == expected


def test_every_key_is_read_somewhere() -> None:
    package = Path(clipper.__file__).parent
    text = "\n".join(path.read_text() for path in package.rglob("*.py"))
    read = set(re.findall(r"\.(\w+)|[\"'](\w+)[\"']", text))
    words = {word for pair in read for word in pair}
    sections = {row.key for row in describe() if not row.key.startswith("artifacts.")}
    keys = {key.rpartition(".")[2] for key in sections}  # those of artifacts are read as a whole
    assert keys - words == set(), "a setting that nothing reads has no effect"


def test_every_default_is_within_its_own_range() -> None:
    config = load(env={}, models={"a": {}}, apps={"a": {}})
    as_given: dict[str, Any] = {
        section: {
            key: value
            for key, value in msgspec.to_builtins(getattr(config, section)).items()
            if value != ""
        }
        for section in ("server", "limits", "batching")
    }
    again = load(env={}, **as_given)
    assert (again.server, again.limits, again.batching) == (
        config.server,
        config.limits,
        config.batching,
    )


def test_cache_policy_is_one_of_two_names() -> None:
    assert load(env={}).server.cache_policy == "clock"
    assert load(env={}, cache_policy="sieve").server.cache_policy == "sieve"
    with pytest.raises(ConfigError, match="expected one of 'clock', 'sieve'"):
        load(env={}, cache_policy="lru")


def test_a_number_that_may_be_none_is_a_number() -> None:
    assert load(env={}, apps={"digits": {"coverage": 0.9}}).apps["digits"].coverage == 0.9
    assert load(env={}, apps={"digits": {}}).apps["digits"].coverage is None
    with pytest.raises(
        ConfigError, match=r"coverage = 2: expected a number from 0.5 to 0.999 share"
    ):
        load(env={}, apps={"digits": {"coverage": 2}})


# -- each setting, in each form that a variable of the environment may have


def forms_of(type_: Any, meta: msgspec.Meta) -> list[tuple[str, object]]:
    """Return texts for a setting of this type, with the values they stand for."""
    if type_ is Batching:
        return [
            ("static", Batching(mode="static")),
            ('{"mode": "static", "size_max": 3}', Batching(mode="static", size_max=3)),
        ]
    if type_ is Any:
        return [("7", 7), ('"7"', "7"), ("a word", "a word"), ("[1, 2]", [1, 2]), ("null", None)]
    if type_ is str:
        return [("a, b", "a, b"), ('["a"]', '["a"]'), ('{"a": "f64"}', '{"a": "f64"}'), ("1", "1")]
    if type_ is bool:
        words = {"true": True, "false": False, "yes": True, "no": False}
        return [*words.items(), ("TRUE", True), ("1", True), ("0", False), ("Off", False)]
    if type_ in (int, float):
        least = 1 if meta.ge is None else meta.ge
        texts = [(str(type_(least)), least), (f"{type_(least + 1)}", least + 1)]
        return texts if meta.le is None or least + 1 <= meta.le else texts[:1]
    if get_origin(type_) is Literal:
        return [(one, one) for one in get_args(type_)]
    if get_origin(type_) is tuple:
        return [
            ('["gpu", "a, b"]', ("gpu", "a, b")),
            ("gpu,x", ("gpu", "x")),
            (" gpu , x ", ("gpu", "x")),
            ("gpu", ("gpu",)),
            ("[::1]:80,[::1]:81", ("[::1]:80", "[::1]:81")),
            ("[]", ()),
            ("", ()),
        ]
    if type_ is Similar:
        return [('{"width": 0.5, "projections": 8}', Similar(0.5, 8))]
    if is_union(type_) and tuple[str, ...] in get_args(type_):
        return [
            ('{"a": "shadow"}', {"a": "shadow"}),
            ("a = shadow, b = x", ("a = shadow", "b = x")),
        ]
    if is_union(type_) and plain_type(get_args(type_)[0]) is int:
        return [("2", 2), ("[1, 4]", (1, 4))]
    if get_origin(type_) is dict and get_origin(get_args(type_)[1]) is dict:
        return [('{"a": {"dim": 8, "optimizer": "sgd"}}', {"a": {"dim": 8, "optimizer": "sgd"}})]
    if get_origin(type_) is dict:
        is_text = get_args(type_)[1] is str
        return (
            [('{"a": "f64", "b": "str"}', {"a": "f64", "b": "str"})]
            if is_text
            else [('{"a": [0, 1], "b": 2}', {"a": (0, 1), "b": 2})]
        )
    assert type_ == bool | list[Any], f"no forms for {type_}"
    return [("true", True), ("no", False), ("OFF", False), ("[[1.5]]", [[1.5]])]


@pytest.mark.parametrize("table", config.tables())
def test_each_setting_takes_each_form_from_the_environment(table: str) -> None:
    kind, (section, _, is_named) = config.tables()[table], table.partition(".")
    at = (section, "n") if is_named else (section,)
    for key in config.keys_of(kind):
        variable = "CLIPPER_" + "__".join((*at, key)).upper()
        for text, value in forms_of(*config.typed(kind, key)):
            built = config._build(kind, config._from_env({variable: text}), at)
            found = getattr(built, key)
            assert found == value, f"{variable}={text!r}"
            assert isinstance(found, type(value)) or isinstance(value, int | float)


def test_tables_of_the_environment() -> None:
    env = {
        "CLIPPER_MODELS__M": '{"target": "a:b", "replicas": 2, "batching": {"size_max": 4}}',
        "CLIPPER_MODELS__M__READS__TASTE": "[0, 1]",
        "CLIPPER_MODELS__M__INPUTS__IDS": "i64[2,3]",
        "CLIPPER_MESH__RUNTIMES": '["clipper_container.adapters.oip:Oip"]',
    }
    found = load(env=env)
    model = found.models["m"]
    assert (model.target, model.replicas, model.batching.size_max) == ("a:b", 2, 4)
    assert (model.reads, model.inputs) == ({"taste": (0, 1)}, {"ids": "i64[2,3]"})
    assert found.mesh.runtimes == ("clipper_container.adapters.oip:Oip",)
    assert found.origins["models.m.replicas"] == "CLIPPER_MODELS__M"
    for name, text in {
        "MESH__LABELS": '["gpu", 1]',
        "MESH__RUNTIMES": '["a" "b"]',
        "MODELS__M__INPUTS": "f64",
        "MODELS__M__WARMUP": "maybe",
    }.items():
        assert refusal(env={f"CLIPPER_{name}": text}).startswith(f"CLIPPER_{name}: ")


def test_named_tensors_are_tables(tmp_path: Path) -> None:
    path = write(tmp_path, '[models.m]\ninputs = { age = "f64" }\n[models.m.outputs]\nA = "str"\n')
    model = load(path, {}).models["m"]
    assert (model.inputs, model.outputs) == ({"age": "f64"}, {"A": "str"})
    write(tmp_path, '[models.m]\ninput = { age = "f64" }\n')
    assert "inputs = { NAME = TYPE }" in refusal(path)
    write(tmp_path, "[models.m]\nwarmup = [[1.0, 2.0]]\n")
    assert load(path, {}).models["m"].warmup == [[1.0, 2.0]]


# -- secrets


@pytest.mark.parametrize("token", ["two\nlines", " leading", "trailing ", "\x7f", "zero\0"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    text = refusal(http={"token": token})
    assert "no header can carry it" in text
    assert token not in text
    assert "http.token = '***'" in text


def test_a_secret_of_a_wrong_type_is_not_shown(tmp_path: Path) -> None:
    assert "1234" not in refusal(write(tmp_path, "[http]\ntoken = 1234\n"))
    state = 'state = "redis://u:geheim@h"\nstate_ = 1\n'
    assert "geheim" not in refusal(write(tmp_path, f"[server]\n{state}"))
