"""Clipper on macOS and Windows, in processes that take their system for one of these: the modules
that only Linux has, and the compiled core, cannot be imported."""

import pkgutil
import subprocess
import sys

import pytest

import clipper_client

# What the interpreter and its library need of this system is imported before.
FAKED = """\
import asyncio, concurrent.futures, http.client, multiprocessing, socket, ssl, subprocess, sys
import tempfile, threading, urllib.request

POSIX = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
MISSING = {"win32": POSIX, "darwin": ()}

sys.platform = SYSTEM
for name in (*MISSING[SYSTEM], "clipper_core"):
    sys.modules[name] = None
"""
both = pytest.mark.parametrize("system", ["darwin", "win32"])


def run(system: str, code: str) -> str:
    """Run code in a process that takes its system for another; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", FAKED.replace("SYSTEM", repr(system)) + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@both
def test_the_client_is_there(system: str) -> None:
    modules = [one.name for one in pkgutil.walk_packages(clipper_client.__path__)]
    assert len(modules) > 5
    code = f"""
import importlib, clipper, clipper_client
for name in {modules}:
    importlib.import_module(f"clipper_client.{{name}}")
assert clipper.Client is clipper_client.Client
with clipper_client.Client("http://127.0.0.1:1") as client:
    try:
        client.predict("digits", [1.0], slo_ms=50)
    except clipper_client.ClipperError as error:
        print(type(error).__name__)
"""
    assert run(system, code) == "NoServer\n"


@both
def test_a_model_is_written_and_tried_there(system: str) -> None:
    code = """
import clipper_container

class Doubler(clipper_container.Model):
    input = "f64[1]"

    def predict_batch(self, inputs):
        return [2 * one for one in inputs]

print(Doubler().predict_batch([21]))
"""
    assert run(system, code) == "[42]\n"


def test_the_command_of_the_sdk_says_where_models_run() -> None:
    code = """
from clipper_container.__main__ import EXIT_USAGE, main

assert main(["serve", "a:b", "--connect", "tcp:127.0.0.1:1", "--name", "a"]) == EXIT_USAGE
"""
    assert "models run on Linux, not on Windows" in run("win32", code)


@both
def test_a_server_says_what_to_use_instead(system: str) -> None:
    code = """
import clipper

try:
    clipper.start()
except clipper.errors.NotStarted as error:
    print(error)
for name in ("ClipperServer", "Future"):
    try:
        getattr(clipper, name)
    except ImportError as error:
        print(error)
"""
    lines = run(system, code).splitlines()
    assert lines[0].startswith(f"A clipper server does not run on {system}. ")
    for line, name in zip(lines[1:], ("ClipperServer", "Future"), strict=True):
        assert line.startswith(f"clipper.{name} is part of the server, which does not run on")
    for line in lines:
        assert line.endswith("pip install clipper-client")
