"""Containers in Python, C++ and Java: a round trip, and a row of a full batch, of a no-op.

The same no-op in each language, rows of 32 bytes and of 512, from which on local containers in C++
and Python read rows in shared memory; one server and one container of each. A round trip is
predict() and result(), one after another. A row is the time of an array of rows by predict_many,
divided by their number. The anchor is the Python SDK; the bare call is that of the Python function.
"""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, absent, interleave, per_call_ns, row

ROOT = Path(__file__).parents[3]
SDK = ROOT / "container_sdk"
SIZES = (4, 64)
ARRAY_ROWS = 200_000
CALLS = 2000
GOAL = Goal("at_most", 1.0)
LANGUAGES = ("Python", "C++", "Java")
SOCKET = "a JDK receives no descriptors: its rows come over the socket, Python's by shared memory"


def noop(xs: Any) -> Any:
    """Return a zero for each row."""
    return np.zeros(len(xs))


def main(quick: bool) -> list[Row]:
    """Build the rows. quick: few repetitions."""
    commands: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for language, make in (("C++", _cpp), ("Java", _java)):
            try:
                commands[language] = make(Path(folder))
            except (OSError, subprocess.SubprocessError) as error:
                missing[language] = str(error)
        for items in SIZES:
            with clipper.start() as server:
                found += _rows(server, items, commands, missing, 2 if quick else 15)
    return found


def _rows(
    server: clipper.ClipperServer,
    items: int,
    commands: dict[str, list[str]],
    missing: dict[str, str],
    repetitions: int,
) -> list[Row]:
    input = f"f64[{items}]"
    models: dict[str, Any] = {"Python": server.deploy("m0", noop, input=input, cache=False)}
    for number, (language, command) in enumerate(commands.items(), 1):
        models[language] = server.deploy(f"m{number}", command=command, input=input, cache=False)
    rows = np.random.default_rng(1).random((ARRAY_ROWS, items))
    inputs = [*rows[:CALLS]]

    def array_ns(model: Any) -> float:
        began = time.perf_counter_ns()
        model.predict_many(rows).result(60)
        return (time.perf_counter_ns() - began) / ARRAY_ROWS

    def bare_ns() -> float:
        began = time.perf_counter_ns()
        for x in inputs:
            noop(x[None])
        return (time.perf_counter_ns() - began) / CALLS

    calls = {
        name: lambda model=model: per_call_ns(model.predict, inputs)
        for name, model in models.items()
    }
    arrays = {name: lambda model=model: array_ns(model) for name, model in models.items()}
    trips = interleave({**calls, "bare": bare_ns}, repetitions, warmups=3)
    batches = interleave(arrays, repetitions, warmups=3)
    found = [row(f"{input}: a bare call of the Python function", trips["bare"].map(_us), "us")]
    for what, samples in (("a round trip", trips), ("a row of a full batch", batches)):
        anchor = samples["Python"].map(_us)
        for language in LANGUAGES:
            name = f"{input}, {language}: {what}"
            if language in missing:
                found.append(absent(name, "us", missing[language], "Python"))
            elif language == "Python":
                found.append(row(name, anchor, "us"))
            else:
                why = SOCKET if language == "Java" and samples is batches else ""
                ours = samples[language].map(_us)
                found.append(row(name, ours, "us", "Python", anchor, GOAL, bounded_by=why))
    return found


def _us(nanoseconds: float) -> float:
    return nanoseconds / 1000


def _cpp(folder: Path) -> list[str]:
    program = str(folder / "noop")
    include = str(SDK / "cpp" / "include")
    source = str(SDK / "cpp" / "examples" / "noop.cpp")
    words = ["g++", "-std=c++17", "-O2", "-I", include, source, "-o", program, "-pthread"]
    subprocess.run(words, check=True, timeout=300)
    return [program]


def _java(folder: Path) -> list[str]:
    sources = [*map(str, (SDK / "java" / "src").rglob("*.java"))]
    sources.append(str(SDK / "java" / "examples" / "Noop.java"))
    subprocess.run(["javac", "-d", str(folder), *sources], check=True, timeout=300)
    return ["java", "-cp", str(folder), "Noop"]
