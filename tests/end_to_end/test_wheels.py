"""Our wheels, installed into an environment outside the checkout that has nothing but the
dependencies they declare; what they and the source distributions hold."""

import base64
import csv
import hashlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import clipper
import clipper_client
import clipper_container
from bench.system.install import PROGRAM, Environment
from clipper.deploy.packages import sdk
from tests.archives import unpack
from tests.images.base_image import dependencies, wheel

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "python" / "clipper_client"
# of the distributions
FOLDERS = (".", "container_sdk", "python/clipper_client")
PATIENCE_S = 300.0
OURS = ("clipper-client", "clipper-container", "clipper-serving")
# a wheel that is built with this glibc works with those from GLIBC_MAX on
BUILT_WITH = ("glibc", "2.36")
GLIBC_MAX = (2, 34)
# packages of others that an installation may bring
OTHERS_MAX = 12
QUERIES = "clipper_client.Client('http://127.0.0.1:1').close()"
IMPORTED_FROM = """\
import clipper, clipper_client, clipper_container, clipper_core.engine.engine
for module in (clipper, clipper_core.engine.engine, clipper_container, clipper_client):
    print(module.__file__)
"""


def metadata(wheel: Path) -> Message:
    """Return what a wheel says about itself."""
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(about).decode())


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    unset = ("PYTHON", "CLIPPER_", "COVERAGE_")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(unset)},
        **variables,
    }
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BUILD = (
    *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
    "-w",
)


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the query client."""
    folder = tmp_path_factory.mktemp("client")
    ignored = shutil.ignore_patterns("*.egg-info", "build")
    copy = shutil.copytree(CLIENT, folder / "clipper_client", ignore=ignored)
    run(*BUILD, folder, copy, cwd=folder)
    return next(folder.glob("clipper_client-*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build wheels of the server, with the core as it is compiled in place, and of the SDK."""
    folder = tmp_path_factory.mktemp("wheels")
    copy = shutil.copytree(
        ROOT / "container_sdk",
        folder / "container_sdk",
        ignore=shutil.ignore_patterns("*.egg-info", "build"),
    )
    for source in (ROOT, copy):
        run(*BUILD, folder, source, cwd=folder, CLIPPER_CORE="prebuilt")
    return next(folder.glob("clipper_serving-*.whl")), next(folder.glob("clipper_container-*.whl"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what ours need, as wheels made of the packages that are installed."""
    folder = tmp_path_factory.mktemp("others")
    for name in dependencies(["clipper-serving"]):
        file, content = wheel(name)
        (folder / file).write_bytes(content)
    return folder


def install(environment: Environment, others: Path, *wheels: Path) -> None:
    """Install wheels with what they need, without a network."""
    environment.pip("install", "-q", "--no-index", "--find-links", others, *wheels)
    environment.pip("check")


@pytest.mark.slow
def test_a_user_installs_the_wheels_gets_an_answer_and_leaves_nothing(
    wheels: tuple[Path, Path], client_wheel: Path, others: Path, tmp_path: Path
) -> None:
    """There are neither an index nor a compiler, and what else gets installed is little."""
    environment = Environment(tmp_path)
    path = environment.variables({})["PATH"]
    assert not [name for name in ("cc", "gcc", "g++", "make") if shutil.which(name, path=path)]
    install(environment, others, *wheels, client_wheel)
    packages = environment.packages()
    assert {packages.pop(name) for name in OURS} == {clipper.__version__}
    assert {*map(canonicalize_name, packages)} == dependencies(["clipper-serving"])
    assert len(packages) <= OTHERS_MAX
    (tmp_path / "program.py").write_text(PROGRAM)
    assert environment.serve("program:total") > 0.0
    files = environment.run(environment.python, "-c", IMPORTED_FROM).splitlines()
    tops = [Path(file).relative_to(environment.site).parts[0] for file in files]
    assert tops == ["clipper", "clipper_core", "clipper_container", "clipper_client"]
    for command in ("clipper", "clipper-container"):
        said = environment.run(environment.python.with_name(command), "--help")
        assert "Usage" in said.title()
    environment.pip("uninstall", "-y", "clipper-serving")
    commands = {path.name for path in environment.python.parent.iterdir() if "clip" in path.name}
    assert commands == {"clipper-container"}, "no wheel owns a file of another"
    environment.pip("uninstall", "-y", "clipper-container", "clipper-client")
    left = sorted(path.name for path in environment.site.iterdir() if "clipper" in path.name)
    assert left == []


@pytest.mark.slow
def test_the_clients_wheel_needs_nothing(client_wheel: Path, others: Path, tmp_path: Path) -> None:
    assert client_wheel.name.endswith("-py3-none-any.whl")
    environment = Environment(tmp_path)
    install(environment, others, client_wheel)
    environment.run(environment.python, "-c", f"import clipper_client; {QUERIES}")
    assert environment.packages() == {"clipper-client": clipper.__version__}
    with zipfile.ZipFile(client_wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.name for path in CLIENT.glob("*.py")} | {"py.typed"}
    assert names == {f"clipper_client/{name}" for name in files}
    assert project("python/clipper_client")[""] == []


@pytest.mark.slow
def test_wheels_hold_what_runs_and_no_sources_of_the_core(wheels: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        rows = {
            name: digest
            for name, digest, _ in csv.reader(archive.read(record).decode().splitlines())
        }
        assert set(rows) == names
        for name in names - {record}:
            digest = (
                base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest())
                .decode()
                .rstrip("=")
            )
            assert rows[name] == f"sha256={digest}", name
    assert not [
        name for name in names if name.endswith((".pyx", ".pxd", ".hpp", ".cpp", ".pyc", ".so.old"))
    ]
    core = ROOT / "src/clipper_core"
    modules = {path.relative_to(core).with_suffix("") for path in core.rglob("*.pyx")}
    for module in modules:
        assert f"clipper_core/{module}.pyi" in names
        assert any(name.startswith(f"clipper_core/{module}.cpython-") for name in names)
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    ours = {"clipper", "clipper_core", "clipper_demo"}
    assert tops == ours, "a module of another distribution, or a .pth file"
    with zipfile.ZipFile(wheels[1]) as archive:
        names |= {*archive.namelist()}
    for root in ("python/clipper", "examples/clipper_demo", "container_sdk/src/clipper_container"):
        folder = ROOT / root
        sources = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        assert {f"{folder.name}/{path.relative_to(folder)}" for path in sources} <= names
    assert {"clipper/py.typed", "clipper_core/py.typed", "clipper_container/py.typed"} <= names


def test_the_core_needs_no_newer_glibc_than_is_said() -> None:
    """Where releases are compiled, that is the one in docs/install.md; elsewhere, the machine's."""
    here = platform.libc_ver()
    newest = GLIBC_MAX if here == BUILT_WITH else tuple(map(int, here[1].split(".")))
    core = ROOT / "src/clipper_core"
    needed = {
        str(path.relative_to(core)): {
            tuple(map(int, version.split(b".")))
            for version in re.findall(rb"GLIBC_(\d+\.\d+)", path.read_bytes())
        }
        for path in core.rglob("*.so")
    }
    newer = {name: found for name, found in needed.items() if found and max(found) > newest}
    assert needed
    assert newer == {}, "docs/install.md says which glibc a wheel works with"


@pytest.mark.slow
def test_wheels_are_the_same_for_the_same_files(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    """The SDK that is installed into environments and images is the content of its own wheel."""
    sdk.wheel_into(tmp_path)
    with zipfile.ZipFile(wheels[1]) as built, zipfile.ZipFile(tmp_path / sdk.WHEEL) as shipped:
        code = [name for name in built.namelist() if not name.startswith("clipper_container-")]
        assert {name: built.read(name) for name in code} == {
            name: shipped.read(name)
            for name in shipped.namelist()
            if not name.startswith("clipper_container-")
        }
        commands = f"clipper_container-{clipper.__version__}.dist-info/entry_points.txt"
        assert built.read(commands).split() == shipped.read(commands).split()


def project(folder: str) -> dict[str, list[str]]:
    told = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return {"": told["dependencies"], **told["optional-dependencies"]}


def test_the_distributions_agree() -> None:
    server, container = project("."), project("container_sdk")
    assert tuple(container[""]) == sdk._REQUIRES
    for extra in {*container} - {"", "function", "sklearn"}:
        assert server[extra] == container[extra]
    everything = [Requirement(line) for line in server["all"]]
    assert {one.name for one in everything} == {"clipper-serving"}
    # there are wheels of helm for few machines
    assert set().union(*(one.extras for one in everything)) == {*server} - {"", "all", "helm"}


def test_all_say_the_same_version() -> None:
    about = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in FOLDERS
    ]
    modules = (clipper, clipper_client, clipper_container)
    assert {one["version"] for one in about} == {module.__version__ for module in modules}
    assert len({one["version"] for one in about}) == 1
    assert len({one["requires-python"] for one in about}) == 1
    needed = {one.name: str(one.specifier) for one in map(Requirement, project(".")[""])}
    for name in ("clipper-client", "clipper-container"):
        assert needed[name] == f"=={clipper.__version__}"


def test_users_are_offered_no_tools_of_developers() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for tool in ("pytest", "ruff", "mypy", "river", "tritonclient", "twine"):
        assert tool not in str(declared["project"])
        assert tool in str(declared["dependency-groups"])


@pytest.mark.slow
def test_a_wheel_says_what_an_index_shows(wheels: tuple[Path, Path], client_wheel: Path) -> None:
    for built in (*wheels, client_wheel):
        about = metadata(built)
        for name in ("Author", "Keywords", "Summary", "Requires-Python", "License-Expression"):
            assert about.get(name), f"{built.name}: {name}"
        assert about.get_all("Classifier")
        assert about.get("Description-Content-Type") == "text/markdown"
        with zipfile.ZipFile(built) as archive:
            files = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
            texts = "".join(archive.read(name).decode() for name in files)
        assert "Apache License" in texts
        if "serving" in built.name:
            assert "preact" in texts
            assert "uplot" in texts.lower()


@pytest.mark.slow
def test_a_source_distribution_builds_without_network(tmp_path: Path) -> None:
    """The core is left out, since it takes minutes; all that it is compiled from is there."""
    code = "import sys, wheels; wheels.build_sdist('.', wheels.Path(sys.argv[1]))"
    run(sys.executable, "-c", code, tmp_path, cwd=ROOT, PYTHONPATH=str(ROOT / "tools"))
    (made,) = tmp_path.glob("clipper_serving-*.tar.gz")
    with tarfile.open(made) as archive:
        unpack(archive, tmp_path)
    folder = tmp_path / made.name.removesuffix(".tar.gz")
    core = ROOT / "src" / "clipper_core"
    for pattern in ("*.pyx", "*.pxd", "*.hpp", "*.c", "*.py", "*.pyi"):
        for path in core.rglob(pattern):
            assert (folder / path.relative_to(ROOT)).exists(), path
    assert not [*folder.rglob("*.so"), *folder.rglob("*.cpp")]
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index")
    run(
        *(*pip, "--no-build-isolation", "-w", tmp_path, folder),
        cwd=tmp_path,
        CLIPPER_CORE="none",
    )
    (wheel,) = tmp_path.glob("clipper_serving-*.whl")
    assert metadata(wheel)["Version"] == clipper.__version__


def test_a_python_is_known_by_the_tag_of_its_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("wheels")
    assert tool.tag_of(sys.executable) == next(tags.sys_tags()).abi
    with pytest.raises(SystemExit, match="there is no Python at no-such-python"):
        tool.tag_of("no-such-python")


def test_an_sdk_of_another_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "clipper_container.py").write_text('__version__ = "0.0.9"\n')
    done = subprocess.run(
        [sys.executable, "-c", "import clipper"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "clipper-container 0.0.9" in done.stderr
    assert f"pip install clipper-container=={clipper.__version__}" in done.stderr
