"""`python -m clipper_container serve TARGET --connect ADDRESS --name N`: one model in this process,
as a replica; `check TARGET` loads one, and tells; `host --control ADDRESS` holds many, as its node
says.

Only the standard library is imported before the limits of threads are set: BLAS reads them when
numpy is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

EXIT_UNHEALTHY = 1
EXIT_USAGE = 2
EXIT_LOAD_FAILED = 3
EXIT_REFUSED = 4

_THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_PR_SET_PDEATHSIG = 1

_EXAMPLES = """\
TARGET is one of
  module:attribute    a function, an estimator or a Model, imported from the current directory or the environment
  path/to/model.pkl   a file packed by `clipper deploy`; it is unpickled in this process only
  path/to/model.onnx  an ONNX model, or a .skops file: data, nothing is unpickled

a function gets a batch and returns one output for each row:
  # doubler.py
  def double(inputs):            # ndarray (n, 3)
      return inputs.sum(axis=1)  # n numbers

  clipper-container serve doubler:double --connect unix:/run/clipper.sock --name doubler --input 'f64[3]'
  clipper-container serve app:Model --connect tcp:10.0.0.7:7000 --name app --token-env CLIPPER_TOKEN

exit codes: 0 asked to stop; 2 wrong usage; 3 the model did not load; 4 the server refused this container
"""  # noqa: E501


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="clipper-container", description="Run a model as a replica of a clipper server."
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    serve = verbs.add_parser(
        "serve",
        help="load a model, connect, answer batches",
        description="Load a model, connect to a server, and answer batches until told to stop.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "target", metavar="TARGET", help="module:attribute, or a .pkl file (see below)"
    )
    serve.add_argument(
        "--connect",
        required=True,
        metavar="ADDRESS",
        help="unix:/path or tcp:host:port of the server",
    )
    serve.add_argument("--name", required=True, help="the model's name")
    serve.add_argument("--version", type=int, default=1, help="the model's version (1)")
    serve.add_argument(
        "--replica", type=int, default=0, help="which replica of the model this is (0)"
    )
    serve.add_argument(
        "--input",
        metavar="TYPE",
        help="type of one row: f64[64], f32[*], str, bytes; default: what the model says, else any",
    )
    serve.add_argument(
        "--output",
        metavar="TYPE",
        help="type of one output; default: what the model says, else any",
    )
    serve.add_argument(
        "--batch-max",
        type=int,
        metavar="N",
        help="most rows in a batch; 0: no limit of the model's own",
    )
    serve.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable that holds the server's token (CLIPPER_TOKEN)",
    )
    serve.add_argument("--token-file", metavar="PATH", help="file that holds the server's token")
    serve.add_argument(
        "--alive-file", metavar="PATH", help="touch this file with every heartbeat, for `healthy`"
    )
    serve.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads for BLAS and OpenMP (CLIPPER_THREADS, else 1)",
    )
    serve.add_argument(
        "--retry-singly",
        action="store_true",
        help="when a batch fails, try its rows one by one and mark only the bad ones",
    )
    serve.add_argument(
        "--row-by-row",
        action="store_true",
        help="the function takes one row and returns one output",
    )
    serve.add_argument(
        "--pad",
        type=int,
        default=0,
        metavar="N",
        help="pad each batch to a multiple of N rows, for models of a static shape",
    )
    serve.add_argument(
        "--no-confidence",
        action="store_true",
        help="do not send an estimator's largest probability as confidence",
    )
    serve.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="DIR",
        help="put this directory on sys.path; may be repeated",
    )
    serve.add_argument(
        "--warmup",
        default="",
        metavar="off|ROWS",
        help=(
            "before it is ready the model runs batches of made-up rows of its input's type; give"
            " rows as JSON instead, or `off`"
        ),
    )
    serve.add_argument(
        "--sha256", default="", metavar="HEX", help="refuse a .pkl file with another SHA-256"
    )
    serve.add_argument(
        "--protocol", type=int, choices=(1, 2), default=2, help="format of the batches (2)"
    )
    serve.add_argument(
        "--die-with-parent",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help=(
            "die when the thread that started this process ends; with PID, at once unless that is"
            " the parent"
        ),
    )
    _add_host(verbs)
    _add_looks(verbs)
    return top


def _add_host(verbs: Any) -> None:
    host = verbs.add_parser(
        "host",
        help="hold many models, as a node of the mesh says",
        description=(
            "Dial a node's control socket and do what it says: load and unload models, and serve"
            " them to servers."
        ),
    )
    host.add_argument(
        "--control",
        required=True,
        metavar="ADDRESS",
        help="unix:/path or tcp:host:port of the node",
    )
    host.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable that holds the token (CLIPPER_TOKEN)",
    )
    host.add_argument("--token-file", metavar="PATH", help="file that holds the token")
    host.add_argument(
        "--runtime",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="another runtime; may be repeated",
    )
    host.add_argument(
        "--capacity-mib",
        type=int,
        default=0,
        metavar="N",
        help="memory for models; 0: half of the machine's",
    )
    host.add_argument(
        "--loading-max",
        type=int,
        default=0,
        metavar="N",
        help="loads at once; 0: one a core, 2 at least",
    )
    host.add_argument(
        "--load-s", type=float, default=30.0, metavar="S", help="time that one load may take (30)"
    )
    host.add_argument("--name", default="", help="in messages")
    host.add_argument(
        "--work-file",
        default="",
        metavar="PATH",
        help="file that says which models are at work (docs/hosts.md)",
    )
    host.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads for BLAS and OpenMP (CLIPPER_THREADS, else 1)",
    )
    host.add_argument(
        "--die-with-parent", nargs="?", type=int, const=0, metavar="PID", help="as for serve"
    )


def _add_looks(verbs: Any) -> None:
    """The verbs that serve nothing."""
    check = verbs.add_parser(
        "check",
        help="is this a model? one line of JSON",
        description=(
            "Verify and load a model that is data (.onnx, .skops, or one of them packed) in this"
            ' process, and print what it is as one line of JSON: {"ok": true, "input": TYPE}, or'
            ' {"ok": false, "reason": TEXT} and exit code 3.'
        ),
    )
    check.add_argument("target", metavar="TARGET", help="an .onnx, .skops or .packed file")
    check.add_argument(
        "--die-with-parent", nargs="?", type=int, const=0, metavar="PID", help="as for serve"
    )
    check.set_defaults(threads=1)
    healthy = verbs.add_parser(
        "healthy",
        help="is the container that touches this file connected?",
        description=(
            "Exit code 0 when a container with --alive-file PATH was connected to its server in the"
            " last seconds, else 1: for HEALTHCHECK and the probes of Kubernetes."
        ),
    )
    healthy.add_argument("path", metavar="PATH")
    healthy.add_argument(
        "--within", type=float, default=30.0, metavar="S", help="so many seconds (30)"
    )
    healthy.set_defaults(threads=1, die_with_parent=None)


def limit_threads(threads: int | None) -> None:
    """Cap the threads of BLAS, OpenMP and their like. Must run before numpy is imported."""
    asked = threads if threads is not None else int(os.environ.get("CLIPPER_THREADS", "0"))
    for name in _THREAD_LIMITS:
        if asked > 0:
            os.environ[name] = str(asked)
        else:
            os.environ.setdefault(name, "1")


def die_with_parent(pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent (the thread that started us) ends, and leave
    Ctrl-C to it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if pid and os.getppid() != pid:
        os._exit(0)  # it ended before we could ask
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = parser().parse_args(argv)
    if arguments.verb == "healthy":
        return _healthy(arguments.path, arguments.within)
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    limit_threads(arguments.threads)
    return {"check": _check, "host": _host, "serve": _serve}[arguments.verb](arguments)


def _healthy(path: str, within_s: float) -> int:
    try:
        since_s = time.clock_gettime(time.CLOCK_REALTIME) - os.stat(path).st_mtime
    except FileNotFoundError:
        print(f"{path} is not there: this container has not been connected yet", file=sys.stderr)
        return EXIT_UNHEALTHY
    if since_s > within_s:
        print(f"not connected for {since_s:.0f} s", file=sys.stderr)
    return EXIT_UNHEALTHY if since_s > within_s else 0


def _token(path: str | None, env: str | None) -> str:
    """Raises: OSError for a file that cannot be read."""
    told = os.environ.pop(env or "CLIPPER_TOKEN", "")
    if path is None:
        return told
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _check(arguments: argparse.Namespace) -> int:
    import json

    from clipper_container.adapters.check import examine

    found = examine(arguments.target)
    print(json.dumps(found), flush=True)
    return 0 if found["ok"] else EXIT_LOAD_FAILED


def _host(arguments: argparse.Namespace) -> int:
    from clipper_container.host import run

    try:
        token = _token(arguments.token_file, arguments.token_env)
    except (OSError, UnicodeDecodeError) as error:
        print(
            f"clipper-container: cannot read the token from {arguments.token_file}: {error}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return run(arguments, token)


def _serve(arguments: argparse.Namespace) -> int:
    import dataclasses

    from clipper_container.adapters.function import explain, load_target
    from clipper_container.declared import give_tables
    from clipper_container.evaluate import user_traceback
    from clipper_container.model import as_model
    from clipper_container.priority import lower
    from clipper_container.serve import Options, Refused, evaluator_of, serve
    from clipper_container.transport import StopSwitch, parse_address
    from clipper_container.warmup import warm_up

    try:
        parse_address(arguments.connect)
    except ValueError as error:
        print(f"clipper-container: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        token = _token(arguments.token_file, arguments.token_env)
    except (OSError, UnicodeDecodeError) as error:
        print(
            f"clipper-container: cannot read the token from {arguments.token_file}: {error}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    restore = lower()
    try:
        model = as_model(
            load_target(arguments.target, arguments.sha256, arguments.code),
            confidence=not arguments.no_confidence,
        )
        tables = give_tables(model)
        model.load()
    except Exception as error:
        print(
            f"model '{arguments.name}' failed to load: {explain(error)}\n{user_traceback(error)}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_LOAD_FAILED
    local = arguments.connect.startswith("unix:")
    usual = not model.corrects and not arguments.alive_file and arguments.protocol == 2
    options = Options(
        name=arguments.name,
        version=arguments.version,
        replica=arguments.replica,
        input=arguments.input or model.input,
        output=arguments.output or model.output,
        batch_max=model.batch_max if arguments.batch_max is None else arguments.batch_max,
        protocol=arguments.protocol,
        token=token,
        retry_singly=arguments.retry_singly,
        row_by_row=arguments.row_by_row,
        pad=arguments.pad,
        corrects=model.corrects,
        sessions=model.sessions,
        tables=bool(tables),
        quiet=local and usual,
        sparse=not local and usual,
    )
    options = dataclasses.replace(
        options,
        warm=warm_up(
            evaluator_of(model, options), options.input, arguments.warmup, options.batch_max
        ),
    )
    gc.collect()
    gc.freeze()  # what is here stays: the searches that come while it serves pass it over
    restore()
    stop = StopSwitch()
    stop.on_signals(
        signal.SIGTERM, *([] if arguments.die_with_parent is not None else [signal.SIGINT])
    )
    try:
        serve(model, arguments.connect, options, stop, arguments.alive_file or "")
    except Refused as refused:
        print(
            f"model '{arguments.name}' was refused by {arguments.connect}: {refused}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
