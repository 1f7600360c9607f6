"""Servers with the benchmark's models, one a transport, and what of this build can be measured at
all.

Parts that are switched by a configuration key are looked up in the configuration's own list of
keys, so that a row shows up as soon as its part is there, and says "not in this build" until then.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import clipper
from clipper.config import KeyInfo, describe

NOT_HERE = "not in this build: no configuration key {!r}"
SHM_KEYS = ("shared_memory",)
SPIN_KEYS = ("spin_us", "spin_us_max")
WIDE = 784
MODELS = {  # name: type, cached
    "hot": ("f64[1]", True),
    "cold": ("f64[1]", False),
    "hot-wide": (f"f32[{WIDE}]", True),
    "cold-wide": (f"f32[{WIDE}]", False),
}


def key(*names: str) -> KeyInfo | None:
    """Return the first configuration key of [server] or [limits] with one of these names."""
    return next(
        (
            info
            for info in describe()
            for name in names
            if info.key in (f"server.{name}", f"limits.{name}")
        ),
        None,
    )


def switched(info: KeyInfo, on: bool) -> Any:
    """Return the value that turns a key on or off: it may be a bool, a number or a word."""
    if isinstance(info.default, bool):
        return on
    if isinstance(info.default, str):
        return ("on" if "on" in info.range or "on" in info.type else info.default) if on else "off"
    return info.default if on else 0


def settings(transport: str) -> dict[str, Any] | str:
    """Return the settings of clipper.start() for unix, tcp, shm (the default), "shm spin" or "shm
    futex"; or the reason why there are none."""
    shared, spin = key(*SHM_KEYS), key(*SPIN_KEYS)
    if not transport.startswith("shm"):
        chosen: dict[str, Any] = (
            {shared.key.split(".")[1]: switched(shared, False)} if shared else {}
        )
        return chosen | ({"address": "tcp://127.0.0.1:0"} if transport == "tcp" else {})
    if shared is None:
        return NOT_HERE.format(SHM_KEYS[0])
    chosen = {shared.key.split(".")[1]: switched(shared, True)}
    if transport == "shm futex":
        if spin is None:
            return NOT_HERE.format(SPIN_KEYS[0])
        chosen[spin.key.split(".")[1]] = 0
    return chosen


@contextmanager
def servers(
    transports: tuple[str, ...], models: tuple[str, ...], **more: Any
) -> Iterator[tuple[dict[str, clipper.ClipperServer], dict[str, str]]]:
    """Start one server per transport with these models of MODELS. Return also the reason for each
    transport that is missing."""
    running: dict[str, clipper.ClipperServer] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for transport in transports:
            chosen = settings(transport)
            if isinstance(chosen, str):
                missing[transport] = chosen
                continue
            server = running[transport] = stack.enter_context(clipper.start(**chosen, **more))
            deploy(server, models)
        yield running, missing


def deploy(
    server: clipper.ClipperServer, models: tuple[str, ...], options: Mapping[str, Any] | None = None
) -> None:
    """Deploy no-op models, each with a container of its own."""
    for name in models:
        type_, cached = MODELS[name]
        server.deploy(
            name,
            "bench.system.fixtures.noop:first",
            input=type_,
            cache=cached,
            wait=False,
            batching={"size_max": 4096},
            **(options or {}),
        )
    for name in models:
        width = WIDE if name.endswith("wide") else 1
        wake = [-1.0] * width
        server.model(name).predict(wake, slo_ms=60_000).result()
