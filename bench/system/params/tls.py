"""Cost of TLS between a worker and a shard over loopback, beside the same messages without."""

import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import Goal, Row, absent, interleave, row
from bench.system.params.wire import DIM, ROWS, ours, p50_us
from tests.processes import free_ports

NO_OPENSSL = "not measured: no openssl to make a certificate"


def rows(quick: bool) -> list[Row]:
    """Return the time of a pull and of a push, with TLS and without."""
    what = f"{ROWS} rows of {DIM} floats over TLS"
    goal = Goal("at_most", 4)
    if shutil.which("openssl") is None:
        return [absent(f"pull of {what}", "us", NO_OPENSSL, "TCP", goal)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tls-")))
        cert, key = _certificate(folder)
        address = f"tls:127.0.0.1:{free_ports(1)[0]}?ca={cert}"
        clients = {
            "TLS": stack.enter_context(ours(address, cert, key)),
            "TCP": stack.enter_context(ours()),
        }
        pushed = np.ones((ROWS, DIM), np.float32)
        cases = {f"pull {name}": partial(one.pull, "bench") for name, one in clients.items()}
        cases |= {
            f"push {name}": partial(one.push, "bench", gradients=pushed)
            for name, one in clients.items()
        }
        draw, n = np.random.default_rng(1), 50 if quick else 300
        found = interleave(
            {name: partial(p50_us, case, draw, n) for name, case in cases.items()},
            3 if quick else 7,
        )
    return [
        row(f"{verb} of {what}", found[f"{verb} TLS"], "us", "TCP", found[f"{verb} TCP"], goal)
        for verb in ("pull", "push")
    ]


def _certificate(folder: Path) -> tuple[str, str]:
    cert, key = str(folder / "shard.crt"), str(folder / "shard.key")
    subject = ("-subj", "/CN=shard", "-addext", "subjectAltName=IP:127.0.0.1")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    command = ("openssl", "req", "-x509", *kind, *subject, "-keyout", key, "-out", cert)
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
