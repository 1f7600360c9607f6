"""Models in environments of their own: with other versions than the server's, created once, and
deleted when no model needs them."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.deploy.packages.environments import Environments, lines_of
from clipper.deploy.packages.sdk import wheel_into
from clipper.errors import DeployFailed, InvalidInput, ShuttingDown
from clipper.processes import Supervisor
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until
from tests.processes import Program
from tests.threads import join


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield wheels of two versions of a small package and of the least that the SDK imports: no
    index is contacted."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        make_wheel(
            folder,
            "odd-size",
            version,
            f"VERSION = {version!r}\ndef size(rows): return len(rows[0]) + {version}\n",
        )
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    download += ["numpy", "lz4", "msgpack", "cloudpickle"]
    done = subprocess.run(download, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no wheels to be had: {done.stderr[-300:]}")
    return folder


def make_wheel(folder: Path, name: str, version: str, code: str) -> None:
    import zipfile

    module = name.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}.py", code)
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def offline(wheels: Path) -> list[str]:
    return ["--no-index", "--find-links", str(wheels), "--no-compile"]  # 3 s of CPU each


@pytest.fixture
def server(offline: list[str], tmp_path: Path) -> Iterator[clipper.ClipperServer]:
    with clipper.start(state=str(tmp_path / "state"), pip_args=offline, **QUICK) as started:
        yield started


def which(rows: Any) -> Any:
    import odd_size  # type: ignore[import-not-found]

    return [odd_size.VERSION] * len(rows)


def environments(server: clipper.ClipperServer) -> set[str]:
    folder = server._dir.environments
    return {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()


def test_models_run_beside_each_other_with_other_versions(server: clipper.ClipperServer) -> None:
    one = server.deploy("one", which, input="f64[2]", requirements=["odd-size==1.0"])
    two = server.deploy("two", which, input="f64[2]", requirements=["odd-size==2.0"])
    assert one.predict(np.zeros(2), slo_ms=10_000).result(60) == "1.0"
    assert two.predict(np.zeros(2), slo_ms=10_000).result(60) == "2.0"
    assert len(environments(server)) == 2
    again = server.deploy("again", which, input="f64[2]", requirements=["odd-size==1.0"])
    assert again.predict(np.zeros(2), slo_ms=10_000).result(60) == "1.0"
    assert len(environments(server)) == 2, "those alike share one"
    assert [stage.stage for stage in server.stages("two").values()] == ["warm"]
    server.retire("one", force=True)
    assert len(environments(server)) == 2, "another still needs it"
    server.retire("again", force=True)
    assert len(environments(server)) == 1


def test_the_environment_has_nothing_of_the_servers(server: clipper.ClipperServer) -> None:
    def sees(rows: Any) -> Any:
        import importlib.util

        return [str(importlib.util.find_spec("click") is not None)] * len(rows)

    bare = server.deploy("bare", sees, input="f64[2]", requirements=["odd-size"])
    assert bare.predict(np.zeros(2), slo_ms=10_000).result(60) == "False"


def test_a_missing_package_is_reported_in_the_words_of_pip(server: clipper.ClipperServer) -> None:
    with pytest.raises(
        DeployFailed,
        match=r"(?s)pip install failed.*odd-size==9.*try/bin/pip install 'odd-size==9'",
    ):
        server.deploy("bad", which, requirements=["odd-size==9"])
    assert environments(server) == set()
    assert [model.name for model in server.catalog.models()] == []


def test_a_restarted_server_uses_its_environment_and_builds_a_missing_one(
    offline: list[str], tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    with clipper.start(state=state, pip_args=offline, **QUICK) as server:
        server.deploy("one", which, input="f64[2]", requirements=["odd-size==1.0"])
        (key,) = environments(server)
        marked = (server._dir.environments / key / "ready").stat().st_mtime_ns
    half = Path(state, "environments", "0" * 24)
    half.mkdir()
    with clipper.start(state=state, pip_args=offline, **QUICK) as server:
        assert server.model("one").predict(np.zeros(2), slo_ms=30_000).result(30) == "1.0"
        assert (server._dir.environments / key / "ready").stat().st_mtime_ns == marked
        assert not half.exists(), "what was half built is removed"
    (Path(state) / "environments" / key / "ready").unlink()
    with clipper.start(state=state, pip_args=offline, **QUICK) as server:
        wait_until(
            lambda: [s.stage for s in server.stages("one").values()] == ["warm"], patience_s=60
        )
        assert server.model("one").predict(np.zeros(2), slo_ms=30_000).result(30) == "1.0"


def test_a_declared_model_builds_while_the_server_serves(
    offline: list[str], tmp_path: Path
) -> None:
    (tmp_path / "features.py").write_text(
        "import odd_size\ndef size(rows): return [odd_size.size(rows)] * len(rows)\n"
    )
    (tmp_path / "needs.txt").write_text("# what features.py imports\nodd-size==2.0  # not 1\n")
    config = tmp_path / "clipper.toml"
    config.write_text(
        textwrap.dedent(f"""
        [server]
        pip_args = {offline!r}
        [models.sizes]
        target = "features:size"
        input = "f64[3]"
        requirements = ["-r {tmp_path}/needs.txt"]
        [apps.sizes]
        models = ["sizes"]
        slo_ms = 10000
        """)
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with clipper.start(config, **QUICK) as server:
            wait_until(
                lambda: [s.stage for s in server.stages("sizes").values()] == ["warm"],
                patience_s=60,
            )
            assert server.app("sizes").predict(np.zeros(3)).result(30).output == 5.0
    finally:
        sys.path.remove(str(tmp_path))


def slow_package(folder: Path) -> Path:
    """Make a package that never finishes building: it reports that it has begun, and ends when pip
    does."""
    slow = folder / "slow"
    slow.mkdir()
    (slow / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "wait"\nbackend-path = ["."]\n'
    )
    write_marker = f"open({str(folder / 'begun')!r}, 'w').close()"
    (slow / "wait.py").write_text(
        f"import os, time\nparent = os.getppid()\n{write_marker}\nwhile os.getppid() == parent:"
        " time.sleep(0.05)\n"
    )
    return slow


def at_work_in(folder: Path) -> list[str]:
    """Return the processes whose command names that folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in place.read_bytes():
                found.append(place.parent.name)
    return found


def test_closing_the_server_ends_what_is_built(tmp_path: Path) -> None:
    slow = slow_package(tmp_path)
    with clipper.start(state=str(tmp_path / "state"), **QUICK) as server:
        server.deploy("slow", which, requirements=[str(slow)], wait=False)
        assert [stage.stage for stage in server.stages("slow").values()] == ["building environment"]
        assert any(thread.name == "clipper-environment" for thread in threading.enumerate())
        wait_until((tmp_path / "begun").exists, "pip builds the package", patience_s=90)
    assert not any(
        thread.name.startswith("clipper-environment") for thread in threading.enumerate()
    )
    assert [
        path.name for path in (tmp_path / "state" / "environments").iterdir() if path.is_dir()
    ] == []


# -- the builder by itself


@pytest.fixture
def processes() -> Iterator[Supervisor]:
    with Supervisor() as found:
        yield found


def test_one_builds_and_the_others_wait(
    processes: Supervisor, offline: list[str], tmp_path: Path
) -> None:
    found: list[str] = []
    builders = [Environments(processes, tmp_path / "e", offline) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda b=b: found.append(b.build(("odd-size==1.0",))))
        for b in builders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert builders[0].sweep([(("odd-size==1.0",), "")]) == 0
    assert builders[0].sweep([]) == 1
    assert builders[0].ready(("odd-size==1.0",)) == ""


def test_a_kill_in_the_middle_leaves_nothing_that_counts(
    processes: Supervisor, offline: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "e"
    code = (
        "import sys; from pathlib import Path; from clipper.deploy.packages.environments import"
        " Environments\nfrom clipper.processes import Supervisor\n"
    )
    code += "def say(text): print(text, flush=True)\n"
    code += "processes = Supervisor()\nprocesses.start()\n"
    code += f"environments = Environments(processes, Path({str(folder)!r}), {offline!r})\n"
    code += "environments.build(('odd-size==1.0',), on_progress=say)"
    with Program(sys.executable, "-c", code, apart=True) as child:
        child.line()  # pip is at work
    mine = Environments(processes, folder, offline)
    assert mine.ready(("odd-size==1.0",)) == ""
    assert Path(mine.build(("odd-size==1.0",))).exists()
    assert mine.ready(("odd-size==1.0",))


def test_pip_does_not_outlive_the_server(tmp_path: Path) -> None:
    folder, slow = tmp_path / "e", slow_package(tmp_path)
    code = "from pathlib import Path\n"
    code += "from clipper.deploy.packages.environments import Environments\n"
    code += (
        "from clipper.processes import Supervisor\nprocesses = Supervisor()\nprocesses.start()\n"
    )
    code += f"Environments(processes, Path({str(folder)!r})).build(({str(slow)!r},))"
    with Program(sys.executable, "-c", code) as child:
        child.until((tmp_path / "begun").exists, limit_s=90)
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: not at_work_in(folder), "pip is gone", patience_s=60)


def test_the_end_of_the_time_is_reported(
    processes: Supervisor, tmp_path: Path, offline: list[str]
) -> None:
    with pytest.raises(DeployFailed, match=r"server\.build_s \(0\.01 s\)"):
        Environments(processes, tmp_path / "e", offline, 0.01).build(("odd-size",))
    closed = Environments(processes, tmp_path / "e", offline)
    closed.close()
    with pytest.raises(ShuttingDown):
        closed.build(("odd-size",))


def test_pythons_that_are_not_there_or_too_old(processes: Supervisor, tmp_path: Path) -> None:
    mine = Environments(processes, tmp_path)
    with pytest.raises(InvalidInput, match=r"no Python '3\.99' runs here"):
        mine.build((), "3.99")
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho False 3 9 1 /usr\n")
    old.chmod(0o755)
    with pytest.raises(InvalidInput, match=r"older than 3\.11"):
        mine.build((), str(old))
    assert mine.key((), sys.executable) == mine.key(())


def test_requirements_are_read_from_files_and_lists(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("lz4\n\n# x\n")
    (tmp_path / "r.txt").write_text("numpy==1.26.4 \\\n  --hash=sha256:00\nsix  # why\n")
    assert lines_of(str(tmp_path / "r.txt")) == ("numpy==1.26.4    --hash=sha256:00", "six")
    assert lines_of([f"-r {tmp_path}/more.txt", " six ", "#no", f"-r{tmp_path}/more.txt"]) == (
        "lz4",
        "six",
        "lz4",
    )
    with pytest.raises(InvalidInput, match="cannot read"):
        lines_of(tmp_path / "none.txt")
    for line in ("-e .", "-c limits.txt", "--editable=."):
        with pytest.raises(InvalidInput, match="another thing elsewhere"):
            lines_of([line])


def test_the_wheel_is_written(tmp_path: Path) -> None:
    assert wheel_into(tmp_path).exists()
