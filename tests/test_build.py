"""Build a small core of three modules with tools/build_core.py: what is built again, what stops it,
what is told."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
HEADER = "static inline int answer(void) { return 42; }\n"
ADDER = """cdef extern from "answer.hpp" nogil:
    int answer()

def total(int a):
    return a + answer()
"""
KEYWORDS = "runtime/keywords.hpp"  # of every build
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++"),
]


class Checkout:
    """A folder with the build's tool and a core of three modules: `plain`, `base` and `adder`,
    which reads a header. `plain` lies in a package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = root / "src" / "clipper_core"
        self.plain = self.sources / "inner" / "plain.pyx"
        if self.sources.exists():
            return
        self.sources.mkdir(parents=True)
        (root / "tools").mkdir()
        shutil.copy(TOOLS / "build_core.py", root / "tools")
        (self.sources / "__init__.py").touch()
        (self.sources / "answer.hpp").write_text(HEADER)
        (self.sources / "adder.pyx").write_text(ADDER)
        (self.sources / "base.pyx").write_text("def double(int a):\n    return 2 * a\n")
        (self.sources / "inner").mkdir()
        (self.sources / "inner" / "__init__.py").touch()
        (self.sources / "runtime").mkdir()
        shutil.copy(TOOLS.parent / "src" / "clipper_core" / KEYWORDS, self.sources / "runtime")
        self.plain.write_text("def name():\n    return 'plain'\n")

    def change(self) -> None:
        """Give each module other code."""
        for source in self.sources.rglob("*.pyx"):
            source.write_text(f"{source.read_text()}\n\ndef changed():\n    return True\n")

    def start(self) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(self.root / "tools" / "build_core.py"),
            "--variant",
            "debug",
            "--jobs",
            "2",
        ]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def build(self) -> str:
        """Build and return what was printed; fails the test if the build fails."""
        process = self.start()
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return output

    def call(self, expression: str) -> str:
        imports = "from clipper_core import adder, base\nfrom clipper_core.inner import plain\n"
        code = f"{imports}print(({expression}))"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(self.root / "src")},
            capture_output=True, text=True, check=True, cwd=self.root,
        )  # fmt: skip
        return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("built"))
    assert "compiling 4 of 4 modules" in checkout.build()
    return checkout


@pytest.fixture
def checkout(built: Checkout, tmp_path: Path) -> Checkout:
    """Return a copy of a built checkout, whose three modules are up to date."""
    shutil.copytree(built.root, tmp_path, dirs_exist_ok=True)
    return Checkout(tmp_path)


def test_only_what_changed_is_built_again(checkout: Checkout) -> None:
    assert checkout.call("adder.total(1), base.double(4), plain.name()") == "(43, 8, 'plain')"
    for source in checkout.sources.rglob("*.pyx"):
        source.touch()  # a fresh checkout has new times and the same content
    assert checkout.build() == ""
    (checkout.sources / "answer.hpp").write_text(HEADER.replace("42", "43"))
    assert "compiling 1 of 4 modules" in checkout.build()
    assert checkout.call("adder.total(1)") == "44"
    checkout.plain.unlink()
    checkout.build()
    assert not list(checkout.sources.rglob("plain*.so")), (
        "a module whose source is gone stays importable"
    )


def test_a_failing_build_names_the_module_and_the_error_in_its_last_lines(
    checkout: Checkout,
) -> None:
    (checkout.sources / "answer.hpp").write_text(
        "static inline int answer(void) { return nothing; }\n"
    )
    checkout.plain.write_text("def name(:\n")
    process = checkout.start()
    output, _ = process.communicate()
    last = "\n".join(output.splitlines()[-10:])
    assert process.returncode == 1
    assert "2 of 2 modules failed" in last
    assert "adder: g++ cannot compile it" in last
    assert "'nothing' was not declared" in last
    assert "plain: Cython cannot translate" in last
    (checkout.sources / "answer.hpp").write_text(HEADER)
    checkout.plain.write_text("def name():\n    return 'mended'\n")
    checkout.build()
    assert checkout.call("plain.name()") == "mended"


def test_a_killed_build_continues_and_leaves_whole_files(checkout: Checkout) -> None:
    checkout.change()
    linked = {
        path: path.stat().st_mtime_ns
        for path in (checkout.root / "build" / "debug" / "lib").iterdir()
    }
    process = checkout.start()
    while process.poll() is None and all(
        path.stat().st_mtime_ns == before for path, before in linked.items()
    ):
        time.sleep(0.01)  # until the first module is linked
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = checkout.build()
    assert "compiling 4 of 4" not in again, "what was linked before the kill is kept"
    assert checkout.call("adder.changed(), base.changed(), plain.changed()") == "(True, True, True)"
    assert checkout.build() == ""


def test_two_builds_at_once_give_one_whole_core(checkout: Checkout) -> None:
    checkout.change()
    builds = [checkout.start() for _ in range(2)]
    outputs = [process.communicate()[0] for process in builds]
    assert [process.returncode for process in builds] == [0, 0], outputs
    assert sum("compiling" in output for output in outputs) == 1, "both compiled"
    assert checkout.call("adder.changed(), base.changed(), plain.changed()") == "(True, True, True)"


def test_the_share_of_a_set_up_that_is_done_never_goes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimates of the compiler's first modules are rough."""
    monkeypatch.syspath_prepend(str(TOOLS))
    environment = importlib.import_module("environment")
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(environment.time, "monotonic", lambda: float(next(clock)))
    step = environment.Step("compiling", [], 60.0)
    progress = environment.Progress([step])
    progress.begin(step)
    for left_s in (40.0, 400.0, 60.0, 5.0):
        step.left_s = left_s
        progress.show(now=True)
    shares = [int(line[1:5]) for line in capsys.readouterr().out.replace("%", " ").splitlines()]
    assert shares == sorted(shares)
    assert len(set(shares)) > 2


def test_a_set_up_that_fails_ends_a_command_that_ignores_sigterm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    environment = importlib.import_module("environment")
    monkeypatch.setattr(environment, "END_S", 0.1, raising=False)
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    stubborn = f"trap '' TERM; touch {begun}; sleep 15; touch {ended}"
    fails = f"until [ -e {begun} ]; do sleep 0.05; done; echo no compiler; exit 3"
    steps = [
        environment.Step(name, ["sh", "-c", script], 1.0)
        for name, script in (("stubborn", stubborn), ("failing", fails))
    ]
    with pytest.raises(environment.Failure, match="no compiler"):
        environment.run(steps, environment.Progress(steps))
    assert not ended.exists()


on_x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="this is no x86-64")


def run_build_code(checkout: Checkout, code: str, *words: str | Path) -> str:
    """Run code that has imported the tool; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, build_core, pathlib\n{code}", *words],
        env={**os.environ, "PYTHONPATH": str(checkout.root / "tools")},
        capture_output=True,
        text=True,
        cwd=checkout.root,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@on_x86_64
def test_a_core_for_any_processor_is_taken_as_the_processor_is(
    checkout: Checkout, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The modules of both cores are the same here: which are taken is the question."""
    for name in ("__init__.py", "cpu_probe.c"):
        shutil.copy(TOOLS.parent / "src" / "clipper_core" / name, checkout.sources)
    out = tmp_path_factory.mktemp("any") / "clipper_core"
    for place in (out, out / "avx2"):
        shutil.copytree(checkout.sources, place, ignore=shutil.ignore_patterns("*.c", "*.pyx"))
    (out / "avx2" / "__init__.py").unlink()
    run_build_code(checkout, "build_core.build_probe(pathlib.Path(sys.argv[1]))", out)
    code = (
        "from clipper_core import adder, base, cpu_probe\nfrom clipper_core.inner import plain\n"
        "assert (adder.total(1), base.double(4), plain.name()) == (43, 8, 'plain')\n"
        "print(cpu_probe.has_avx2(), adder.__file__, plain.__file__, sep='\\n')"
    )
    for cpu in ("", "baseline"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(out.parent), "CLIPPER_CPU": cpu},
            capture_output=True, text=True, check=True, cwd=out.parent,
        )  # fmt: skip
        fast, adder, plain = done.stdout.split()
        place = out / "avx2" if fast == "True" and cpu != "baseline" else out
        assert (Path(adder).parent, Path(plain).parent) == (place, place / "inner")


@on_x86_64
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2 avx2 bmi1 bmi2", ["-mavx2", "-mbmi2"]),
        ("fpu sse2 avx2", []),
        ("fpu avx2x bmi2", []),
        (None, []),
    ],
)
def test_the_release_uses_what_the_processor_has(
    checkout: Checkout, tmp_path: Path, flags: str | None, expected: list[str]
) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    code = "build_core.CPU_INFO = pathlib.Path(sys.argv[1]); print(build_core.flags_of_this_cpu())"
    assert run_build_code(checkout, code, info) == str(expected)
