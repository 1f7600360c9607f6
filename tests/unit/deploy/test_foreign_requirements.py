"""Requirements of a model that the management API accepts."""

import random
import string

import pytest

import clipper
from clipper.deploy.packages.environments import check_packages
from clipper.errors import InvalidInput
from tests.frontend.conftest import QUICK, ask

PACKAGES = [
    "numpy",
    "numpy==1.26.4",
    "numpy >= 1.26, < 3",
    "numpy>=1.26,<3,!=2.0.*",
    "torch==2.3.0+cpu",
    "scikit-learn~=1.4",
    "uvicorn[standard,http2]>=0.20",
    "zope.interface (>=5)",
    "tomli; python_version < '3.11' and platform_system == \"Linux\"",
    "pkg===1.0-2",
    "pkg==1 --hash=sha256:0a1b --hash=sha256:ff",
    "foo.bar_baz",
]
OTHERS = [
    "-r /etc/passwd",
    "-r/etc/passwd",
    "--requirement=/etc/passwd",
    "-c /etc/passwd",
    "-e .",
    "--index-url=http://u:secret@host/",
    "--extra-index-url http://host/",
    "--find-links /tmp",
    "-f /tmp",
    "numpy --index-url=http://host",
    "numpy==1 --config-settings=x",
    "numpy --global-option=x",
    "pkg @ http://host/pkg.whl",
    "pkg@file:///etc",
    "git+https://host/x",
    "http://u:secret@host/x.whl",
    "file:///x.whl",
    "./x",
    "/x",
    "..",
    "x.whl",
    "x.tar.gz",
    "x.ZIP",
    "pkg==1\n-r /etc/passwd",
    "pkg\r-r x",
    "",
    "@x",
    "pkg; x @ y",
    "${HOME}",
    "pkg==1 \\",
]


@pytest.mark.parametrize("line", PACKAGES)
def test_a_package_with_its_versions_is_taken(line: str) -> None:
    check_packages([line])


@pytest.mark.parametrize("line", OTHERS)
def test_what_is_no_package_is_refused(line: str) -> None:
    with pytest.raises(InvalidInput, match="no options, paths or URLs") as refused:
        check_packages(["numpy", line])
    assert "secret" not in str(refused.value)


def test_no_line_that_is_taken_has_an_option_a_path_or_a_url() -> None:
    rng, taken = random.Random(5), 0
    words = ["numpy", "==1", ">=", ";", "-r", "--x", " ", "@", "://", "/", ".", "[a]", ",", "'a'"]
    for _ in range(20_000):
        line = "".join(rng.choice([*words, rng.choice(string.printable)]) for _ in range(6))
        try:
            check_packages([line])
        except InvalidInput:
            continue
        taken += 1
        assert not {"/", "@", ":", "\\", "\n\t-", "$"} & set(line), line
        assert not line.startswith("-"), line
        assert " -" not in line.replace(" --hash=", "").partition(";")[0], line
    assert taken > 50


def test_the_management_api_reads_no_file_of_its_host() -> None:
    with clipper.start(http={"admin": "127.0.0.1:0"}, **QUICK) as server:
        body = {"model": "math:sqrt", "requirements": ["-r /etc/passwd"], "row_by_row": True}
        reply = ask(server.admin_address, "POST", "/admin/models/m/deploy", body)
        assert (reply.status, "no options, paths or URLs" in reply.json["error"]) == (400, True)
        assert "root:" not in reply.body.decode()
        assert not server.catalog.view.versions
