"""The runner of the tests, on small rooms of real pytest processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory_container import wait_until
from tests.run import HEAVY, IDLE_THREADS, Room, descendants, plan, split_arguments

ROOT = Path(__file__).resolve().parent.parent

ROOMS = {
    "good/test_good.py": "def test_one(): pass\ndef test_two(): pass\n",
    "bad/test_bad.py": (
        "def test_wrong():\n    print('a printed hint')\n    assert 1 == 2, 'one is not two'\ndef"
        " test_right(): pass\n"
    ),
    "crash/test_crash.py": (
        "import os\ndef test_before(): pass\ndef test_exits(): os._exit(3)\ndef test_after():"
        " pass\n"
    ),
    "hang/test_hang.py": "import threading\ndef test_waits_for_ever(): threading.Event().wait()\n",
    "skip/test_skip.py": (
        "import pytest\n@pytest.mark.parametrize('i', [1, 2])\ndef test_no(i): pytest.skip('no such"
        " server')\n"
    ),
    "environment/test_environment.py": (
        "import os\ndef test_threads_sleep_pages_are_small_and_compiled_modules_are_kept():\n"
        f"    assert {IDLE_THREADS!r}.items() <= os.environ.items()\n"
        "    assert 'THP_enabled:\\t0' in open('/proc/self/status').read()\n"
        "    assert 'PYTHONDONTWRITEBYTECODE' not in os.environ\n"
    ),
    "teardown/test_teardown.py": (
        "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    raise OSError('not"
        " closed')\ndef test_ok(broken): pass\n"
    ),
    "syntax/test_syntax.py": "def test_(:\n",
    "void/test_void.py": "",
    "simulation/test_alone.py": (
        "from pathlib import Path\ndef test_alone():\n"
        "    assert not Path('fetched').exists()\n    Path('ran').touch()\n"
    ),
    "needs/test_needs.py": (
        "from pathlib import Path\ndef test_needs(): assert Path('fetched').exists()\n"
    ),
    "once/test_once.py": (
        "from pathlib import Path\nmark = Path(__file__).with_name('ran')\ndef"
        " test_passes_the_second_time():\n    first = not mark.exists()\n    mark.touch()\n   "
        " assert not first, 'too early'\n"
    ),
    "kill/test_kill.py": (
        "import os, signal\ndef test_kill(): os.kill(os.getpid(), signal.SIGKILL)\n"
    ),
}


def make(root: Path, *names: str) -> None:
    (root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for place in ROOMS:
        if place.split("/")[0] in names:
            file = root / "tests" / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(ROOMS[place])


def begin(root: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.run", "--root", str(root), "--jobs", "2", *arguments]
    quick = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=quick, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(root: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the last line of a run."""
    process = begin(root, *arguments)
    output, _ = process.communicate()
    return process.returncode, output, output.splitlines()[-1]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_passing_and_skipping_rooms_succeed_and_skips_are_summed_by_reason(tmp_path: Path) -> None:
    made = ("good", "skip", "environment")
    make(tmp_path, *made)
    status, output, last = run(tmp_path)
    assert (status, last) == (0, "3 passed, 0 failed, 2 skipped")
    assert re.search(r"^ +2  no such server$", output, re.M)
    assert re.search(
        r"^good +2 passed, 0 failed, 0 skipped, \d+ s +\[\d+ % done, 0 min \d+ s left\]$",
        output,
        re.M,
    )
    assert "100 % done" in output
    times = json.loads((tmp_path / "build/test-times.json").read_text())
    assert set(times) == {f"tests/{place}" for place in ROOMS if place.split("/")[0] in made}


@pytest.mark.slow
def test_failures_are_all_printed_with_their_output_at_the_end(tmp_path: Path) -> None:
    make(tmp_path, "good", "bad", "teardown", "syntax")
    status, output, last = run(tmp_path)
    assert (status, last) == (1, "3 passed, 3 failed, 0 skipped")
    ending = output[output.rindex("% done") :]
    for part in ("one is not two", "a printed hint", "OSError: not closed", "SyntaxError"):
        assert part in ending
    named = re.findall(r"^  tests/(\S+)$", output.partition("\nfailed:\n")[2], re.M)
    assert {*named} == {
        "bad/test_bad.py::test_wrong",
        "teardown/test_teardown.py::test_ok",
        "syntax/test_syntax.py",
    }


@pytest.mark.slow
def test_crashed_hung_killed_and_empty_rooms_are_reported_as_failures(tmp_path: Path) -> None:
    make(tmp_path, "good", "crash", "hang", "void", "kill")
    status, output, last = run(tmp_path, "--test-limit", "3")
    assert (status, last) == (1, "3 passed, 4 failed, 0 skipped")
    assert (
        "room crash crashed: exit status 3, in tests/crash/test_crash.py::test_exits; 2 of 3 tests"
        " did not end" in output
    )
    assert "room kill crashed: signal SIGKILL, in tests/kill/test_kill.py::test_kill" in output
    assert (
        "room hang hung: no test started or ended for 3 s, in"
        " tests/hang/test_hang.py::test_waits_for_ever" in output
    )
    assert re.search(r"line 2 in test_waits_for_ever", output), "the stacks of a hung process"
    assert "room void collected nothing" in output


@pytest.mark.slow
def test_what_needs_no_programs_runs_while_they_are_fetched(tmp_path: Path) -> None:
    make(tmp_path, "needs", "simulation")
    fetch = "sh -c 'until test -e ran; do sleep 0.1; done; touch fetched'"
    status, output, last = run(tmp_path, "--fetch", fetch)
    assert (status, last) == (0, "2 passed, 0 failed, 0 skipped"), output


@pytest.mark.slow
def test_nothing_passes_when_programs_cannot_be_fetched(tmp_path: Path) -> None:
    make(tmp_path, "needs", "simulation")
    status, output, _ = run(tmp_path, "--fetch", "sh -c 'exit 3'")
    assert status == 1
    assert "was not fetched: exit status 3" in output


@pytest.mark.slow
def test_a_failure_is_final_also_where_the_test_would_pass_the_second_time(tmp_path: Path) -> None:
    make(tmp_path, "good", "once")
    status, output, last = run(tmp_path)
    assert (status, last) == (1, "2 passed, 1 failed, 0 skipped")
    assert "too early" in output


@pytest.mark.slow
def test_selection_skips_rooms_without_a_match_unless_none_matches(tmp_path: Path) -> None:
    make(tmp_path, "good", "bad", "void")
    assert run(tmp_path, "-k", "right or two")[::2] == (0, "2 passed, 0 failed, 0 skipped")
    status, output, last = run(tmp_path, "-k", "nothing_of_this_name")
    assert (status, last) == (1, "0 passed, 1 failed, 0 skipped")
    assert "no test matches" in output
    assert run(tmp_path, "tests/bad/test_bad.py::test_right")[::2] == (
        0,
        "1 passed, 0 failed, 0 skipped",
    )
    assert not (tmp_path / "build/test-times.json").exists(), (
        "durations of a selection are not kept"
    )
    assert run(tmp_path, "tests/good", "--color=no")[::2] == (0, "2 passed, 0 failed, 0 skipped")
    assert list(json.loads((tmp_path / "build/test-times.json").read_text())) == [
        "tests/good/test_good.py"
    ]


def test_wrong_arguments_of_pytest_fail_the_run(tmp_path: Path) -> None:
    make(tmp_path, "good")
    status, output, last = run(tmp_path, "--no-such-option")
    assert (status, last) == (1, "0 passed, 1 failed, 0 skipped")
    assert "unrecognized arguments: --no-such-option" in output


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process(tmp_path: Path, signum: int) -> None:
    make(tmp_path, "hang")
    begun = tmp_path / "begun"
    file = tmp_path / "tests/hang/test_hang.py"
    file.write_text(
        "import subprocess, pathlib\ndef test_waits():\n    with subprocess.Popen(['sleep',"
        f" '1000'], start_new_session=True):\n        pathlib.Path({str(begun)!r}).touch()\n"
    )
    process = begin(tmp_path)
    wait_until(lambda: begun.exists() or process.poll() is not None, patience_s=60)
    children = descendants(process.pid)
    assert len(children) == 2
    process.send_signal(signum)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert re.fullmatch(r"0 passed, [12] failed, 0 skipped", output.splitlines()[-1])
    wait_until(lambda: not any(is_running(child) for child in children))


def test_long_rooms_are_split_by_file_and_heavy_ones_are_not() -> None:
    heavy = min(HEAVY)
    tests = [f"tests/{room}/test_{i}.py" for room in ("core", heavy) for i in range(10)]
    times = dict.fromkeys(tests, 60.0)
    rooms = plan(
        [*tests, "tests/unit/a/test_a.py", "tests/test_run.py", "container_sdk/tests/test_wire.py"],
        times,
        2,
    )
    assert [room.name for room in rooms[:5]] == [heavy, "core-1", "core-2", "core-3", "core-4"]
    assert {room.name for room in rooms[5:]} == {"unit", "tests", "container_sdk"}
    assert sorted(test for room in rooms[1:5] for test in room.tests) == tests[:10]
    assert [len(room.tests) for room in rooms[1:5]] == [3, 3, 2, 2]
    assert [room.name for room in plan(tests, times, 1)] == ["core", heavy], (
        "one job: nothing is split"
    )


def test_paths_are_distinguished_from_values_of_options() -> None:
    arguments = ["-k", "tests", "tests/core", "--color=no", "tests/test_run.py::test_paths", "-x"]
    paths, options = split_arguments(arguments, ROOT)
    assert paths == ["tests/core", "tests/test_run.py::test_paths"]
    assert options == ["-k", "tests", "--color=no", "-x"]


def test_a_room_names_its_folder() -> None:
    (room,) = plan(["tests/unit/mesh/test_parts.py"], {}, 2)
    assert room == Room("unit", "unit", ["tests/unit/mesh/test_parts.py"], room.expected_s)
