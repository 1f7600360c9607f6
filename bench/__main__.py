"""`python -m bench NAME [--json|--markdown] [--quick] [--rows A,B] [--plot DIR] [--strict]` runs a
benchmark, one of those that bench/names.py names."""

import argparse
import importlib
import inspect
import sys
import traceback
from pathlib import Path

from bench.harness import FAILED, UnknownRows, tell
from bench.names import BENCHMARKS, source_of
from bench.runs import exit_on_sigterm


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="What clipper costs, beside its anchors."
    )
    parser.add_argument("name", nargs="?", help="the benchmark")
    parser.add_argument("--json", action="store_true", help="a list of rows on stdout")
    parser.add_argument(
        "--markdown", action="store_true", help="a page, such as docs/benchmarks-engine.md"
    )
    parser.add_argument(
        "--rows",
        default="",
        help="only these groups, `hit,miss` (engine, install, params, mesh-sim, learning)",
    )
    parser.add_argument(
        "--kills", type=int, help="how many (durability, stream_kills, feedback_kills)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="of a run that failed, to see it again (durability); of the drawn worlds (learning)",
    )
    parser.add_argument("--seeds", type=int, help="repetitions (learning)")
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions: does it run, not what does it cost"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="its pictures (figure7, figure8, selection, mesh-sim)",
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is not met")
    options = parser.parse_args()
    options.name = options.name and options.name.replace("-", "_")
    if options.name not in BENCHMARKS:
        out = sys.stdout if options.name is None else sys.stderr
        print(
            f"no benchmark {options.name!r}; there are" if options.name else "benchmarks:", file=out
        )
        for name in sorted(BENCHMARKS):
            first = source_of(name).read_text().partition("\n")[0]
            print(f"  {name:15} {first.strip(chr(34))}", file=out)
        return 0 if options.name is None else 2
    try:
        run = importlib.import_module(BENCHMARKS[options.name]).main
        rows = options.rows.split(",") if options.rows else None
        wanted = {
            "rows": rows,
            "kills": options.kills,
            "seed": options.seed,
            "seeds": options.seeds,
            "plot": options.plot,
        }
        given = {key: value for key, value in wanted.items() if value is not None}
        for key in given:
            if key not in inspect.signature(run).parameters:
                print(f"{options.name!r} has no --{key}", file=sys.stderr)
                return 2
        rows = run(options.quick, **given)
    except UnknownRows as unknown:
        print(unknown, file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    words = ["python -m bench", options.name, *(["--quick"] if options.quick else [])]
    tell(
        rows,
        "json" if options.json else "markdown" if options.markdown else "table",
        f"`{' '.join(words)}`",
    )
    failed = any(row.missing.startswith(FAILED) for row in rows)
    return int(failed or (options.strict and any(row.met is False for row in rows)))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
