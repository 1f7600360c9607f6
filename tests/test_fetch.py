"""tools/fetch.py in a checkout of its own, with commands in place of apt-get and dpkg-deb that need
no network."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "fetch.py"
APT_GET = """\
#!/bin/sh
echo "$*" >> "$CALLS"
state=$(sed -n 's/^Dir::State::lists "\\(.*\\)\\/";$/\\1/p' "$2")
archives=$(sed -n 's/^Dir::Cache "\\(.*\\)\\/";$/\\1/p' "$2")/archives
case "$*" in
  *update*) touch "$state/own_Packages" ;;
  *--print-uris*) test -e "$archives/redis.deb" || echo "'http://here/redis.deb' redis_1_amd64.deb 3000000 MD5Sum:0" ;;
  *--download-only*)
    if test -e "$FAILS"; then echo "E: $(cat "$FAILS")"; exit 100; fi
    if test -e "$HANGS"; then touch "$HANGS.reached"; sleep 60; exit 1; fi
    touch "$archives/redis.deb" ;;
esac
"""  # noqa: E501
DPKG_DEB = """\
#!/bin/sh
mkdir -p "$3/usr/bin" "$3/usr/lib/x86_64-linux-gnu" "$3/usr/share/doc/redis"
touch "$3/usr/lib/x86_64-linux-gnu/libone.so.1" "$3/usr/bin/redis-benchmark"
for name in redis-server redis-cli; do
  printf '#!/bin/sh\\necho "$$ $LD_LIBRARY_PATH $*"\\n' > "$3/usr/bin/$name"
done
"""


class Checkout:
    def __init__(self, root: Path) -> None:
        self.root, self.commands = root / "checkout", root / "commands"
        for folder in (self.root / "tools", self.root / ".venv" / "bin", self.commands):
            folder.mkdir(parents=True)
        for file in (*SCRIPT.parent.glob("*.py"), *SCRIPT.parent.glob("*.txt")):
            shutil.copy(file, self.root / "tools")
        shutil.copy(SCRIPT.parents[1] / "pyproject.toml", self.root)
        (self.root / ".venv" / "bin" / "python").symlink_to(sys.executable)
        for name, text in {
            "apt-get": APT_GET,
            "dpkg-deb": DPKG_DEB,
            "dpkg": "#!/bin/sh\necho amd64\n",
        }.items():
            self.command(name, text)
        self.fails, self.hangs, self.calls = root / "fails", root / "hangs", root / "calls"

    def command(self, name: str, text: str) -> None:
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    def environment(self, **changed: str) -> dict[str, str]:
        for name in ("sh", "sed", "touch", "cat", "mkdir", "sleep", "dirname", "readlink"):
            if not (self.commands / name).exists():
                (self.commands / name).symlink_to(shutil.which(name) or "")
        settings = {"CALLS": str(self.calls), "FAILS": str(self.fails), "HANGS": str(self.hangs)}
        return {"PATH": str(self.commands), **settings, **changed}

    def start(self, *words: str, **changed: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.root / "tools" / "fetch.py"), *words]
        return subprocess.Popen(
            command, env=self.environment(**changed), stdout=subprocess.PIPE, text=True
        )

    def run(self, *words: str, **changed: str) -> tuple[int, str]:
        with self.start(*words, **changed) as process:
            output, _ = process.communicate()
        return process.returncode, output

    def downloads(self) -> int:
        return self.calls.read_text().count("--download-only") if self.calls.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_program_runs_in_the_callers_process_with_the_libraries_that_came_along(
    checkout: Checkout,
) -> None:
    code, output = checkout.run("redis")
    assert code == 0, output
    assert "redis: fetching 3 MB in 1 packages\n" in output
    assert "MB in .venv/system/redis, " in output
    moved = checkout.root.rename(checkout.root.with_name("moved"))
    with subprocess.Popen(
        [moved / ".venv/bin/redis-cli", "a", "b c"], stdout=subprocess.PIPE, text=True
    ) as process:
        answered, _ = process.communicate()
    own, libraries, *words = answered.split()
    assert (int(own), words) == (process.pid, ["a", "b", "c"])
    assert (
        Path(libraries.split(":")[0]).resolve()
        == moved / ".venv/system/redis/usr/lib/x86_64-linux-gnu"
    )
    left = sorted(path.name for path in (moved / ".venv/system").iterdir())
    assert left in (["redis"], [".apt", "redis"]), "nothing half done is left"
    assert not (moved / ".venv/system/redis/usr/share/doc").exists()
    assert not (moved / ".venv/system/redis/usr/bin/redis-benchmark").exists()


def test_what_is_there_is_not_fetched_again(checkout: Checkout) -> None:
    assert checkout.run("redis")[0] == 0
    assert checkout.run("redis") == (0, "")
    assert checkout.downloads() == 1
    (checkout.root / ".venv/bin/redis-cli").unlink()
    assert checkout.run("redis")[0] == 0
    assert checkout.downloads() == 2, "one of its programs was gone"


def test_a_program_on_path_is_used_unless_all_are_to_be_fetched(checkout: Checkout) -> None:
    for name in ("redis-server", "redis-cli"):
        checkout.command(name, "#!/bin/sh\n")
    assert checkout.run("redis") == (0, "")
    assert checkout.run("redis", CLIPPER_FETCH_ALL="1")[0] == 0
    assert (checkout.root / ".venv/bin/redis-server").exists()


def test_one_of_two_programs_on_path_is_not_enough(checkout: Checkout) -> None:
    checkout.command("redis-server", "#!/bin/sh\n")
    assert checkout.run("redis")[0] == 0
    assert (checkout.root / ".venv/bin/redis-cli").exists()


def test_a_part_that_is_left_out_is_named_with_the_command_that_fetches_it(
    checkout: Checkout,
) -> None:
    code, output = checkout.run("redis", "--without", "torch redis")
    assert (code, checkout.downloads()) == (0, 0)
    assert output == (
        "redis: left out. Skipped without it: tests of the store in Redis and of streams. "
        "To fetch it: python tools/fetch.py redis\n"
    )


def test_a_failure_is_printed_again_but_not_retried_by_the_tests(checkout: Checkout) -> None:
    checkout.fails.write_text("Unable to locate package redis-server")
    code, output = checkout.run("redis", "--once")
    assert (code, checkout.downloads()) == (0, 2), "a second time with package lists of its own"
    assert output.endswith("To fetch it: python tools/fetch.py redis\n")
    assert "redis: E: Unable to locate package redis-server. Skipped" in output
    code, output = checkout.run("redis", "--once")
    assert (code, checkout.downloads()) == (0, 2)
    assert "redis: E: Unable to locate package redis-server. Skipped" in output
    assert checkout.run("redis")[0] == 1
    checkout.fails.unlink()
    assert checkout.run("redis")[0] == 0
    assert checkout.run("redis", "--once") == (0, "")


def test_an_interrupted_run_is_no_failure_and_the_next_goes_on(checkout: Checkout) -> None:
    checkout.hangs.touch()
    with checkout.start("redis") as process:
        until(checkout.hangs.with_suffix(".reached").exists)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert output.endswith("interrupted: the next run goes on from here\n")
    assert not (checkout.root / ".venv/bin/redis-server").exists()
    checkout.hangs.unlink()
    archives = checkout.root / ".venv/system/.redis.part/cache/archives"
    (archives / "redis.deb").touch()
    assert checkout.run("redis", "--once")[0] == 0
    assert checkout.downloads() == 1, "what had been downloaded is used"


def test_two_runs_in_one_checkout_fetch_once(checkout: Checkout) -> None:
    checkout.hangs.touch()
    with checkout.start("redis") as first:
        until(checkout.hangs.with_suffix(".reached").exists)
        with checkout.start("redis") as second:
            assert second.stdout is not None
            assert (
                second.stdout.readline() == "another run fetches in this checkout: waiting for it\n"
            )
            checkout.hangs.unlink()
            first.send_signal(signal.SIGTERM)
            first.communicate(timeout=20)
            assert second.communicate(timeout=20)[0].count("fetching") == 1
    assert (first.returncode, second.returncode) == (130, 0)


def test_without_apt_it_names_what_to_install(checkout: Checkout) -> None:
    (checkout.commands / "apt-get").unlink()
    code, output = checkout.run("redis")
    assert code == 1
    assert (
        "redis: no apt-get here: install redis-server, redis-cli by hand, on PATH. Skipped"
        in output
    )


def test_a_name_that_there_is_not_is_refused(checkout: Checkout) -> None:
    with checkout.start("radis") as process:
        process.communicate()
    assert process.returncode == 1
    assert not checkout.calls.exists()


def test_sizes_count_a_file_with_two_names_once(checkout: Checkout) -> None:
    assert checkout.run("redis")[0] == 0
    big = checkout.root / ".venv/big"
    big.write_bytes(os.urandom(4_000_000))
    (checkout.root / ".venv/again").hardlink_to(big)
    output = checkout.run("--sizes")[1].splitlines()
    assert output[0].split() == ["0", "MB", "redis"]
    assert output[-1].split()[:2] == ["4", "MB"]
    assert json.loads((checkout.root / ".venv/.fetched/redis").read_text())["bytes"] >= 0
