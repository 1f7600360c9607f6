"""Fuzzing by seed: `python -m tests.fuzz [TARGET ...] --seconds 60 --seed 1`.

    python -m tests.fuzz                            every target, one minute each
    python -m tests.fuzz http numbers --minutes 10
    python -m tests.fuzz --jobs 2                   two targets at a time
    python -m tests.fuzz http --write-corpus        write the sound inputs that targets begin with

Mutates the inputs of tests/fuzz/corpus/TARGET, seeded: the same seed makes the same inputs. Each
target runs in a process of its own. An input that makes it raise, crash or hang for 30 s is written
to its corpus, where the tests run it from then on, and the exit code is 1. A sanitizer works as for
pytest: with LD_PRELOAD and PYTHONPATH of its build.
"""

import argparse
import hashlib
import mmap
import random
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.mutate import INPUT_BYTES_MAX, mutated
from tests.fuzz.targets import TARGETS, quiet

CORPUS = Path(__file__).resolve().parent / "corpus"
HANG_S = 30.0
_CHECK_S = 0.5
_HEAD = struct.Struct("<QI")  # inputs so far, bytes of the one that is being run
_PAGE_BYTES = 1 << 14


def inputs_of(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def fuzz(target: str, seconds: float, seed: int, page: mmap.mmap) -> int:
    """Run mutated inputs for some seconds. What is run now is in `page`, for whoever finds this
    process dead. -> exit code."""
    rng, corpus, run = random.Random(f"{target} {seed}"), inputs_of(target), TARGETS[target].run
    until, count = time.monotonic() + seconds, 0
    with quiet():
        while time.monotonic() < until:
            data = mutated(rng, rng.choice(corpus), corpus)
            count += 1
            page[_HEAD.size : _HEAD.size + len(data)] = data
            page[: _HEAD.size] = _HEAD.pack(count, len(data))
            try:
                run(data)
            except Exception:
                traceback.print_exc()
                return 1
    print(f"{target}: {count} inputs in {seconds:g} s, seed {seed}: no fault", flush=True)
    return 0


def watch(target: str, seconds: float, seed: int) -> bool:
    """Fuzz in a new process; return True if no fault was found. An input that causes a fault is
    stored."""
    with tempfile.NamedTemporaryFile(prefix="clipper-fuzz-") as file:
        file.write(bytes(_PAGE_BYTES))
        file.flush()
        with mmap.mmap(file.fileno(), _PAGE_BYTES) as page:
            words = [
                sys.executable,
                "-X",
                "faulthandler",
                "-m",
                "tests.fuzz",
                target,
                "--seconds",
                str(seconds),
            ]
            child = subprocess.Popen([*words, "--seed", str(seed), "--page", file.name])
            why = _end_of(child, page)
            if not why:
                return True
            size = _HEAD.unpack_from(page)[1]
            data = page[_HEAD.size : _HEAD.size + size]
    path = CORPUS / target / f"found-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    print(f"{target}: {why}, seed {seed}: {path}", flush=True)
    return False


def _end_of(child: "subprocess.Popen[bytes]", page: mmap.mmap) -> str:
    """Return why the process ended, or was ended without progress; "" when all is well."""
    count, since = 0, time.monotonic()
    while True:
        try:
            code = child.wait(_CHECK_S)
            return "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            now = _HEAD.unpack_from(page)[0]
            if now != count:
                count, since = now, time.monotonic()
            elif time.monotonic() - since > HANG_S:
                child.kill()
                child.wait()
                return f"an input took longer than {HANG_S:g} s"


def write_corpus(target: str) -> None:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in TARGETS[target].seeds().items():
        assert len(data) <= INPUT_BYTES_MAX
        (folder / f"{name}.bin").write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz what reads bytes of strangers."
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}  [all]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target  [60]")
    parser.add_argument("--minutes", type=float, help="the same in minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time  [1]")
    parser.add_argument(
        "--write-corpus",
        action="store_true",
        help="write the sound inputs that targets begin with, and end",
    )
    parser.add_argument("--page", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - TARGETS.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    targets, seconds = (
        arguments.targets or list(TARGETS),
        arguments.seconds if arguments.minutes is None else arguments.minutes * 60,
    )
    if arguments.write_corpus:
        for target in targets:
            write_corpus(target)
        return 0
    if arguments.page:
        with open(arguments.page, "r+b") as file, mmap.mmap(file.fileno(), _PAGE_BYTES) as page:
            return fuzz(targets[0], seconds, arguments.seed, page)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        sound = list(pool.map(lambda target: watch(target, seconds, arguments.seed), targets))
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
