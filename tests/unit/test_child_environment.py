"""Checks what processes get of the server's environment."""

import pytest

from clipper.child_environment import OF_ARTIFACTS, OF_HOSTS, OF_PIP, child_environment

SECRETS = {
    "CLIPPER_HTTP__TOKEN": "t",
    "CLIPPER_ADMIN_TOKEN": "t",
    "CLIPPER_SERVER__STATE": "redis://u:p@h",
    "AWS_ACCESS_KEY_ID": "k",
    "AWS_SECRET_ACCESS_KEY": "k",
    "AWS_SESSION_TOKEN": "k",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "DATABASE_URL": "postgres://u:p@h/d",
    "REDIS_URL": "redis://u:p@h",
    "HF_TOKEN": "t",
    "HF_HUB_TOKEN": "t",
    "PYTHON_KEYRING_PASSWORD": "p",
    "OPENAI_API_KEY": "k",
    "TORCH_APIKEY": "k",
}
USUAL = {
    "PATH": "/bin",
    "HOME": "/h",
    "LANG": "C",
    "LC_ALL": "C",
    "TZ": "UTC",
    "TMPDIR": "/t",
    "LD_LIBRARY_PATH": "/l",
    "LD_PRELOAD": "libasan.so",
    "PYTHONPATH": "/p",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "HF_HOME": "/hf",
    "TORCH_HOME": "/t",
    "TOKENIZERS_PARALLELISM": "false",
    "COVERAGE_PROCESS_START": "x",
    "JAVA_HOME": "/j",
    "SSL_CERT_FILE": "/c",
}


@pytest.mark.parametrize("patterns", [(), OF_PIP, OF_HOSTS])
def test_every_kind_of_child_leaves_secrets_out(patterns):
    given = child_environment(patterns=patterns, environment={**SECRETS, **USUAL})
    assert given == USUAL


def test_what_the_operator_names_is_passed_whatever_it_is_called():
    given = child_environment(
        ["MODEL_*", "AWS_*", "DATABASE_URL"],
        environment={**SECRETS, "MODEL_TOKEN": "m", "XMODEL_A": "x"},
    )
    assert {*given} == {
        "MODEL_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "DATABASE_URL",
    }


def test_a_server_that_is_started_gets_what_servers_pull_with():
    given = child_environment(("CLIPPER_*", *OF_ARTIFACTS), environment=SECRETS)
    assert {"CLIPPER_HTTP__TOKEN", "AWS_SECRET_ACCESS_KEY"} <= {*given}
    assert "DATABASE_URL" not in given


def test_pip_gets_its_index_and_proxies():
    wanted = {"PIP_INDEX_URL": "https://i", "https_proxy": "http://p", "CC": "gcc"}
    assert child_environment(patterns=OF_PIP, environment=wanted) == wanted
    assert child_environment(environment=wanted) == {}


def test_a_model_host_gets_the_settings_of_its_adapter() -> None:
    adapter = {"CLIPPER_OIP_FOLDER": "/models", "CLIPPER_ARTIFACTS__FOLDER": "/cache"}
    given = {**adapter, "CLIPPER_HTTP__TOKEN": "t", "CLIPPER_STATE": "redis://u:p@h"}
    assert child_environment(patterns=OF_HOSTS, environment=given) == adapter
    assert child_environment(environment=given) == {}
