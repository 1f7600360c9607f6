"""The command line: `serve` runs one model as a replica, `host` holds many for a node, `check`
verifies a file.

Only the standard library is imported before the thread limits are set: BLAS reads them when numpy
is imported.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from clipper_container.parent_death import end_with_parent
from clipper_container.process_end import end_process
from clipper_container.worker.priority import lower

if TYPE_CHECKING:
    _Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_UNHEALTHY = 1
EXIT_USAGE = 2
EXIT_LOAD_FAILED = 3
EXIT_REFUSED = 4

# New objects between two garbage collections while a model is loaded. Imports make no garbage, but
# at Python's 700 a tenth of their time is spent on the search for it.
_LOADING_COLLECTED = 100_000

_THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)

_EXAMPLES = """\
TARGET is one of
  module:attribute    a function, an estimator or a Model, imported from the current directory or the environment
  path/to/model.pkl   a file packed by `clipper deploy`; it is unpickled in this process only
  s3://bucket/model.onnx, gs://, https://, pvc://claim/path    is pulled first; #sha256=HEX is checked
  path/to/model.onnx  an ONNX model, or a .skops file: data, nothing is unpickled

a function gets a batch and returns one output for each row:
  # doubler.py
  def double(inputs):            # ndarray (n, 3)
      return inputs.sum(axis=1)  # n numbers

  clipper-container serve doubler:double --connect unix:/run/clipper.sock --name doubler --input 'f64[3]'
  clipper-container serve app:Model --connect tcp:10.0.0.7:7000 --name app --token-env CLIPPER_TOKEN
  clipper-container serve app:Model --connect tcp:clipper-models:7000 --all-servers --name app

exit codes: 0 stopped on request; 2 wrong usage; 3 the model did not load; 4 the server rejected it
"""  # noqa: E501


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    top = argparse.ArgumentParser(
        prog="clipper-container", description="Run a model as a replica of a clipper server."
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    serve = verbs.add_parser(
        "serve",
        help="load a model, connect, answer batches",
        description="Load a model, connect to a server, and answer batches until stopped.",
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
        help="unix:/path or tcp:host:port of the server; several, with commas: all of them",
    )
    serve.add_argument(
        "--all-servers",
        action="store_true",
        help="serve all addresses that the host name of --connect resolves to, as they change",
    )
    serve.add_argument("--name", required=True, help="the model's name")
    serve.add_argument("--version", type=int, default=1, help="the model's version (1)")
    serve.add_argument(
        "--replica", type=int, default=0, help="which replica of the model this is (0)"
    )
    serve.add_argument(
        "--input",
        metavar="TYPE",
        help=(
            "type of one row: f64[64], f32[*], str, bytes, or named tensors as JSON: "
            '\'{"ids": "i64[*]"}\'; default: the model\'s own, else any'
        ),
    )
    serve.add_argument(
        "--output",
        metavar="TYPE",
        help="type of one output; default: the model's own, else any",
    )
    serve.add_argument(
        "--batch-max",
        type=int,
        metavar="N",
        help="largest batch in rows; 0: no limit",
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
        "--max-concurrency",
        type=int,
        default=0,
        metavar="N",
        help="of an async model: rows (with --row-by-row) or batches at a time (128)",
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
            "before it is ready the model runs batches of generated rows of its input type; give"
            " rows as JSON instead, or `off`"
        ),
    )
    serve.add_argument(
        "--only-replica",
        action="store_true",
        help="nothing else serves this model now: load it at the usual CPU priority",
    )
    serve.add_argument(
        "--warmup-max",
        type=int,
        metavar="N",
        help="largest batch of the warm-up, and then of all; 0: no warm-up",
    )
    serve.add_argument(
        "--report-fd",
        type=int,
        default=-1,
        metavar="FD",
        help="socket on which to report the progress of the start",
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
            "end when the thread that started this process ends; with PID, end at once unless PID"
            " is the parent"
        ),
    )
    _add_host(verbs)
    _add_fork_server(verbs)
    _add_inspection(verbs)
    return top


def _add_fork_server(verbs: _Verbs) -> None:
    fork_server = verbs.add_parser(
        "fork-server",
        help="import frameworks once, and fork replicas",
        description=(
            "Follow the requests of a deployer on the socket that is standard input: import"
            " modules, and fork replicas, which then need not import them."
        ),
    )
    fork_server.add_argument(
        "--die-with-parent", nargs="?", type=int, const=0, metavar="PID", help="as for serve"
    )
    fork_server.add_argument(
        "--usual-priority",
        action="store_true",
        help="a replica that nothing stands in for waits: import at the usual CPU priority",
    )
    fork_server.set_defaults(threads=1)


def _add_host(verbs: _Verbs) -> None:
    host = verbs.add_parser(
        "host",
        help="hold many models for a node of the mesh",
        description=(
            "Connect to a node's control socket and follow its requests: load and unload models,"
            " and serve them to servers."
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
        help="memory for models; 0: half of what it may use",
    )
    host.add_argument(
        "--loading-max",
        type=int,
        default=0,
        metavar="N",
        help="concurrent loads; 0: the number of cores, at least 2",
    )
    host.add_argument(
        "--load-s", type=float, default=30.0, metavar="S", help="time that one load may take (30)"
    )
    host.add_argument("--name", default="", help="name of this host in messages")
    host.add_argument(
        "--work-file",
        default="",
        metavar="PATH",
        help="file that records which models are executing (docs/hosts.md)",
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


def _add_inspection(verbs: _Verbs) -> None:
    """Add the verbs that do not serve."""
    check = verbs.add_parser(
        "check",
        help="verify a model file; prints one line of JSON",
        description=(
            "Verify and load a model file without code (.onnx, .skops, or one of them packed) in"
            " this process, and print the result as one line of JSON:"
            ' {"ok": true, "input": TYPE}, or'
            ' {"ok": false, "reason": TEXT} and exit code 3.'
        ),
    )
    check.add_argument("target", metavar="TARGET", help="an .onnx, .skops or .packed file")
    check.add_argument("--result", metavar="FILE", help="write the result there instead")
    check.add_argument(
        "--die-with-parent", nargs="?", type=int, const=0, metavar="PID", help="as for serve"
    )
    check.set_defaults(threads=1)
    healthy = verbs.add_parser(
        "healthy",
        help="check that the container that touches this file is connected",
        description=(
            "Exit code 0 if a container with --alive-file PATH was connected to its server within"
            " the last seconds, else 1: for HEALTHCHECK and Kubernetes probes."
        ),
    )
    healthy.add_argument("path", metavar="PATH")
    healthy.add_argument(
        "--within", type=float, default=30.0, metavar="S", help="so many seconds (30)"
    )
    healthy.set_defaults(threads=1, die_with_parent=None)


def limit_threads(threads: int | None) -> None:
    """Set the thread limits of BLAS, OpenMP and similar libraries. Must run before numpy is
    imported.
    """
    threads_max = threads if threads is not None else int(os.environ.get("CLIPPER_THREADS", "0"))
    for name in _THREAD_LIMITS:
        if threads_max > 0:
            os.environ[name] = str(threads_max)
        else:
            os.environ.setdefault(name, "1")


def main(
    argv: Sequence[str] | None = None,
    forked: frozenset[str] | None = None,
    restore: Callable[[], None] | None = None,
) -> int:
    """Run the command; return the exit code. forked: in a forked process, the names of the modules
    that it had then. restore: restores the CPU priority, which is low already.
    """
    words = sys.argv[1:] if argv is None else argv
    if sys.platform == "win32":
        print(
            "clipper-container: models run on Linux, not on Windows. Run this in a container"
            " (docs/images.md) or in WSL",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if restore is None and words[:1] != ["host"]:  # a host loads models beside those it serves
        restore = lower()
    arguments = parser().parse_args(
        words, argparse.Namespace(forked=forked, words=words, restore=restore)
    )
    if arguments.verb == "healthy":
        return _healthy(arguments.path, arguments.within)
    if arguments.die_with_parent is not None:
        end_with_parent(arguments.die_with_parent, ignores_ctrl_c=True)
    limit_threads(arguments.threads)
    if forked is not None and os.environ["OMP_NUM_THREADS"] != "1":
        from clipper_container.forking.replica import limit_loaded_threads

        limit_loaded_threads(int(os.environ["OMP_NUM_THREADS"]))
    if arguments.verb in ("host", "serve"):
        try:
            arguments.token = _token(arguments.token_file, arguments.token_env)
        except (OSError, UnicodeDecodeError) as error:
            print(
                f"clipper-container: cannot read the token from {arguments.token_file}: {error}",
                file=sys.stderr,
            )
            return EXIT_USAGE
    verbs = {"check": _check, "fork-server": _fork_server, "host": _host, "serve": _serve}
    return verbs[arguments.verb](arguments)


def _healthy(path: str, within_s: float) -> int:
    try:
        since_s = time.clock_gettime(time.CLOCK_REALTIME) - os.stat(path).st_mtime
    except FileNotFoundError:
        print(f"{path} does not exist: this container has not connected yet", file=sys.stderr)
        return EXIT_UNHEALTHY
    if since_s > within_s:
        print(f"not connected for {since_s:.0f} s", file=sys.stderr)
    return EXIT_UNHEALTHY if since_s > within_s else 0


def _token(path: str | None, env: str | None) -> str:
    """Return the token from a file or an environment variable, and remove it from the
    environment. Raises: OSError.
    """
    token = os.environ.pop(env or "CLIPPER_TOKEN", "")
    if path is None:
        return token
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _check(arguments: argparse.Namespace) -> int:
    import json

    from clipper_container.loading.check import examine

    found = examine(arguments.target)
    if arguments.result is None:
        print(json.dumps(found), flush=True)
    else:
        with open(arguments.result, "w", encoding="utf-8") as file:
            json.dump(found, file)
    return 0 if found["ok"] else EXIT_LOAD_FAILED


def _fork_server(arguments: argparse.Namespace) -> int:
    if arguments.usual_priority:
        arguments.restore()
    gc.disable()
    import socket

    # what every replica imports, and its program
    import clipper_container.__main__
    import clipper_container.forking.replica
    import clipper_container.forking.report
    import clipper_container.loading.targets
    import clipper_container.worker.all_servers
    import clipper_container.worker.declared_tables
    import clipper_container.worker.serve  # noqa: F401
    from clipper_container.forking.fork_server import ForkServer, Parent
    from clipper_container.forking.preload import Imports

    gc.enable()
    with socket.socket(fileno=os.dup(0)) as connection:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        parent = Parent(os.getpid(), sys.flags.safe_path, arguments.restore)
        before_forks = lower if arguments.usual_priority else None
        return ForkServer(connection, parent, Imports(), before_forks).run()


def _start_anew(arguments: argparse.Namespace, report_fd: int) -> None:
    """Replace this process by one that was not forked; it has the same number and parent."""
    words = [*arguments.words, "--report-fd", str(report_fd)]
    line = [sys.executable, "-X", "faulthandler", "-m", "clipper_container", *words]
    os.environ[arguments.token_env or "CLIPPER_TOKEN"] = arguments.token
    sys.stdout.flush()
    os.execv(sys.executable, line)


def _host(arguments: argparse.Namespace) -> int:
    gc.disable()
    from clipper_container.host.control import run

    gc.enable()
    return run(arguments, arguments.token)


def _serve(arguments: argparse.Namespace) -> int:
    thresholds = gc.get_threshold()
    gc.set_threshold(_LOADING_COLLECTED)
    import dataclasses

    from clipper_container.calls import give_calls
    from clipper_container.errors import fails_call_only
    from clipper_container.forking.preload import imported_since
    from clipper_container.forking.report import Reporter
    from clipper_container.loading.targets import explain, load_target
    from clipper_container.model import as_model
    from clipper_container.schema import is_named, type_text
    from clipper_container.wire.transport import StopSwitch, parse_address
    from clipper_container.worker.all_servers import AllServers
    from clipper_container.worker.async_model import (
        CONCURRENCY,
        AsyncModel,
        CoroutineLoop,
        is_async,
    )
    from clipper_container.worker.declared_tables import give_tables
    from clipper_container.worker.evaluation import user_traceback
    from clipper_container.worker.handshake import ContainerOptions, ContainerRejected
    from clipper_container.worker.parts import gives_parts
    from clipper_container.worker.serve import evaluator_of, serve
    from clipper_container.worker.warmup import warm_up

    several = arguments.all_servers or "," in arguments.connect
    try:
        for address in arguments.connect.split(","):
            parse_address(address)
    except ValueError as error:
        print(f"clipper-container: {error}", file=sys.stderr)
        return EXIT_USAGE
    forked, reporter = arguments.forked, Reporter(arguments.report_fd)
    if arguments.only_replica:
        arguments.restore()
    try:
        model = as_model(
            load_target(arguments.target, arguments.sha256, arguments.code),
            confidence=not arguments.no_confidence,
        )
        if forked is not None and not model.fork:
            reporter.send(plain="the model requires it")
            arguments.restore()
            _start_anew(arguments, reporter.hand_on())
        tables = give_tables(model)
        model, calls = give_calls(model)
        if is_async(model):
            model = AsyncModel(model, CoroutineLoop())
        model.load()
        model.check_input(is_named(arguments.input or model.input))
    except BaseException as error:
        if not fails_call_only(error):
            raise
        print(
            f"model '{arguments.name}' failed to load: {explain(error)}\n{user_traceback(error)}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_LOAD_FAILED
    local = all(address.startswith("unix:") for address in arguments.connect.split(","))
    usual = not model.corrects and not arguments.alive_file and arguments.protocol == 2
    concurrency = arguments.max_concurrency or CONCURRENCY if isinstance(model, AsyncModel) else 0
    gives = model.gives_parts if isinstance(model, AsyncModel) else gives_parts(model)
    options = ContainerOptions(
        name=arguments.name,
        version=arguments.version,
        replica=arguments.replica,
        input=type_text(arguments.input or model.input),
        output=type_text(arguments.output or model.output),
        batch_max=_least(
            model.batch_max if arguments.batch_max is None else arguments.batch_max,
            arguments.warmup_max or 0,
            1 if concurrency and arguments.row_by_row else 0,  # each row ends by itself
        ),
        protocol=arguments.protocol,
        token=arguments.token,
        retry_singly=arguments.retry_singly,
        row_by_row=arguments.row_by_row,
        pad=arguments.pad,
        corrects=model.corrects,
        sessions=model.sessions,
        tables=bool(tables),
        concurrency=concurrency,
        calls=calls,
        parts=gives
        and not is_named(arguments.input or model.input)
        and not is_named(arguments.output or model.output),
        quiet=local and usual,
        sparse=not local and usual,
    )
    options = dataclasses.replace(
        options,
        warm=warm_up(
            evaluator_of(model, options),
            options.input,
            "off" if arguments.warmup_max == 0 else arguments.warmup,
            options.batch_max,
            lambda rows: reporter.send(warming=rows),
        ),
    )
    reporter.send(warm=True, **({} if forked is None else imported_since(forked)))
    reporter.close()
    gc.collect()
    gc.freeze()  # exempt start-up objects from garbage collection
    gc.set_threshold(*thresholds)
    arguments.restore()
    stop = StopSwitch()
    stop.on_signals(
        signal.SIGTERM, *([] if arguments.die_with_parent is not None else [signal.SIGINT])
    )
    try:
        if several:
            AllServers(model, arguments.connect, options, stop, arguments.alive_file or "").run()
        else:
            serve(model, arguments.connect, options, stop, arguments.alive_file or "")
        lower()  # the kernel takes milliseconds to free the memory of a large process
    except ContainerRejected as refused:
        print(
            f"model '{arguments.name}' was rejected by {arguments.connect}: {refused}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_REFUSED
    return 0


def _least(*limits: int) -> int:
    """Return the smallest limit, where 0 stands for none."""
    return min((limit for limit in limits if limit), default=0)


def command() -> NoReturn:
    """Run the command, and end its process."""
    end_process(main())


if __name__ == "__main__":
    command()
