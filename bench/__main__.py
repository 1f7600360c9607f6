"""python -m bench NAME [--json|--markdown] [--quick] [--rows A,B] [--plot DIR] [--strict]: of
bench/system or bench/paper."""

import argparse
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType

import bench.paper
import bench.system
from bench.harness import FAILED, UnknownRows, tell
from bench.paper.runs import exit_on_sigterm


def questions() -> dict[str, str]:
    """Return the modules that have a main(quick), by name."""
    rooms: tuple[ModuleType, ...] = (bench.system, bench.paper)
    found = {
        info.name: f"{room.__name__}.{info.name}"
        for room in rooms
        for info in pkgutil.iter_modules(room.__path__)
    }
    return {
        name: module for name, module in found.items() if "\ndef main(quick" in source_of(module)
    }


def source_of(module: str) -> str:
    """Return the text of a module without importing it."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).read_text() if spec and spec.origin else ""


def main() -> int:
    known = questions()
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="What clipper costs, beside its anchors."
    )
    parser.add_argument("name", nargs="?", help="the question")
    parser.add_argument("--json", action="store_true", help="a list of rows on stdout")
    parser.add_argument(
        "--markdown", action="store_true", help="a page, such as docs/benchmarks-engine.md"
    )
    parser.add_argument(
        "--rows",
        default="",
        help="only these groups, `hit,miss` (engine, params, mesh-sim, learning)",
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
    if options.name not in known:
        out = sys.stdout if options.name is None else sys.stderr
        print(
            f"no question {options.name!r}; there are" if options.name else "questions:", file=out
        )
        for name, module in sorted(known.items()):
            print(f"  {name:14} {source_of(module).partition(chr(10))[0].strip(chr(34))}", file=out)
        return 0 if options.name is None else 2
    try:
        question = importlib.import_module(known[options.name]).main
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
            if key not in inspect.signature(question).parameters:
                print(f"{options.name!r} has no --{key}", file=sys.stderr)
                return 2
        rows = question(options.quick, **given)
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
