"""The mesh on virtual time: what its cache hits beside other rules, how fast it is simulated, and
what holds under faults."""

import gc
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.harness import Goal, Row, UnknownRows, row
from bench.mesh_simulator.simulation import Plan, Report, Simulation
from bench.node_simulator.plans import planned, rare, shown
from bench.paper.plots import pyplot, save
from bench.paper.runs import in_parallel
from bench.system import evictions, mesh_map

SHARES: Final = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50)  # of all models' bytes, that memory is
ALPHAS: Final = (0.8, 1.0, 1.2)
TRACES: Final[dict[str, Callable[..., evictions.Trace]]] = {
    "zipf": evictions.zipf,
    "drifting zipf": evictions.drifting,
}
LARGE: Final = Plan(
    instances=1000, models=1_000_000, share=0.10, rate_per_s=500, seconds=3600, shared_mirror=True
)
STYLES: Final = {
    "clipper": "C2o-",
    "LRU": "C0s:",
    "GDSF": "C1s:",
    "known demand": "k-.",
    "Belady-size": "k--",
}
FUTURE = "the next uses: that rule knows them, and no rule can learn them from independent draws"


def main(quick: bool, rows: Sequence[str] | None = None, plot: Path | None = None) -> list[Row]:
    groups: dict[str, Callable[[bool, Path | None], list[Row]]] = {
        "hits": hits,
        "speed": speed,
        "faults": faults,
        "cliff": cliff,
    }
    unknown = [name for name in rows or () if name not in groups]
    if unknown:
        raise UnknownRows(f"no rows {unknown[0]!r}: {', '.join(groups)}")
    return [
        found
        for name, measure in groups.items()
        if rows is None or name in rows
        for found in measure(quick, plot)
    ]


# -- one cache, beside other rules


def hits(quick: bool, plot: Path | None) -> list[Row]:
    """Return the hits of the second half of a trace, in percent. Every rule loads what is asked."""
    jobs = [
        (kind, alpha, share, quick)
        for kind in TRACES
        for alpha in ALPHAS
        for share in (SHARES[2::2] if quick else SHARES)
    ]
    found = dict(zip(jobs, in_parallel("hits", compared, jobs), strict=True))
    told = []
    for (kind, alpha, share, _), ratio in found.items():
        name = f"hit ratio, {kind} {alpha:g}, {share:.0%} of the bytes"
        beside = ", ".join(
            f"{rule} {value:.1f}" for rule, value in ratio.items() if rule not in ("clipper", "LRU")
        )
        told.append(
            row(
                name, ratio["clipper"], "%", "LRU", ratio["LRU"], Goal("at_least", 1.0), note=beside
            )
        )
    for kind in TRACES:
        per_kind = {job: ratio for job, ratio in found.items() if job[0] == kind}
        for rule in ("known demand", "Belady-size"):
            if rule not in next(iter(per_kind.values())):
                continue
            worst = max(ratio[rule] - ratio["clipper"] for ratio in per_kind.values())
            why = FUTURE if rule == "Belady-size" else ""
            told.append(
                row(
                    f"most points below {rule}, {kind}",
                    worst,
                    "points",
                    goal=Goal("value_at_most", 2.0),
                    bounded_by=why,
                )
            )
    if plot:
        draw_hits(plot / "mesh-hits.png", {job[:3]: ratio for job, ratio in found.items()})
    return told


def compared(kind: str, alpha: float, share: float, quick: bool) -> dict[str, float]:
    """Percent of hits by rule. Where demand changes, nobody can be told what it is."""
    models, uses = (1000, 20_000) if quick else (3000, 90_000)
    trace = TRACES[kind](models, uses, alpha)
    rules = {
        name: rule
        for name, rule in evictions.RULES.items()
        if kind == "zipf" or name != "known demand"
    }
    capacity = int(share * trace.sizes.sum())
    return {
        name: 100 * float(rule(trace, capacity)[trace.warm :].mean())
        for name, rule in rules.items()
    }


def draw_hits(path: Path, found: Mapping[tuple[str, float, float], Mapping[str, float]]) -> None:
    plt = pyplot()
    if plt is None:
        return
    kinds, alphas = (
        sorted({key[0] for key in found}, reverse=True),
        sorted({key[1] for key in found}),
    )
    figure, grid = plt.subplots(
        len(kinds),
        len(alphas),
        figsize=(4 * len(alphas), 3.2 * len(kinds)),
        squeeze=False,
        sharey=True,
    )
    for axes, (kind, alpha) in zip(
        grid.flat, [(kind, alpha) for kind in kinds for alpha in alphas], strict=True
    ):
        shares = sorted(key[2] for key in found if key[:2] == (kind, alpha))
        for rule in found[kind, alpha, shares[0]]:
            axes.plot(
                shares,
                [found[kind, alpha, share][rule] for share in shares],
                STYLES[rule],
                label=rule,
                markersize=4,
            )
        axes.set(
            title=f"{kind} {alpha:g}",
            xscale="log",
            xlabel="memory, share of all models' bytes",
            ylabel="hits, %",
        )
        axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
        axes.minorticks_off()
    grid.flat[0].legend(fontsize=7)
    save(figure, path)


# -- a whole mesh


def speed(quick: bool, plot: Path | None) -> list[Row]:
    """A million models on a thousand instances. Quick: of its beginning, when all is missed, and so
    slower than the rest."""
    plan = replace(LARGE, seconds=5.0) if quick else LARGE
    gc.collect()
    # nothing it makes is a cycle, and the collector would look through millions of records again
    # and again
    gc.disable()
    try:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        world = Simulation(plan)
        report = world.run()
        took_s, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    finally:
        gc.enable()
    minutes = took_s / 60 * 3600 / plan.seconds
    waited = (
        f"half of the misses wait at most {report.wait_ms(0.5):g} ms, 99 %"
        f" {report.wait_ms(0.99):g} ms"
    )
    done = (
        f"{report.queries} queries, {report.hit_ratio:.1%} hits, {report.counts['loads']} loads,"
        f" {report.events} events"
    )
    told = f"{done}, {cpu_s:.0f} s of CPU; {waited}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        row(
            "a virtual hour of 1 M models, 1000 instances",
            minutes,
            "min",
            goal=Goal("value_at_most", 10),
            note=told,
        ),
        row(
            "of it: what did not hold",
            len(report.violations),
            "laws",
            goal=Goal("value_at_most", 0),
            note=first(report),
        ),
        row("of it: queries refused", 100 * report.refused.total() / report.queries, "% refused"),
        row("of it: memory", peak, "MiB"),
    ]


def faults(quick: bool, plot: Path | None) -> list[Row]:
    """Small meshes of the nodes themselves under faults by seed, each with its queries, and with
    every model asked again when faults have ended. Odd seeds have faults of all kinds."""
    seeds, each = (8, 4) if quick else (10_000, 100)
    begun = time.perf_counter()
    found = in_parallel(
        "faults", under_faults, [(first, first + each) for first in range(0, seeds, each)]
    )
    broken = [text for texts in found for text in texts]
    per_minute = 60 * seeds / (time.perf_counter() - begun)
    return [
        row(
            f"{seeds} seeds of a small mesh: what did not hold",
            len(broken),
            "laws",
            goal=Goal("value_at_most", 0),
            note="; ".join([f"{per_minute:.0f} seeds a minute", *broken[:3]]),
        )
    ]


def under_faults(first: int, end: int) -> list[str]:
    """Run seeds; return what did not hold."""
    logging.disable(logging.CRITICAL)  # thousands of lines of nodes
    try:
        plans = [(rare if seed % 2 else planned)(seed) for seed in range(first, end)]
        return [text for plan in plans for text in shown(plan)]
    finally:
        logging.disable(logging.NOTSET)


def cliff(quick: bool, plot: Path | None) -> list[Row]:
    """Return the hits of a whole mesh as its memory grows: placement, copies and loads that wait,
    and not only one cache."""
    base = Plan(instances=10, models=2000, rate_per_s=100, alpha=1.0, seconds=20 if quick else 900)
    shares = (0.1, 0.5) if quick else (0.05, 0.10, 0.20, 0.50, 1.0)
    told, last = [], None
    for share in shares:
        world = Simulation(replace(base, share=share))
        report = world.run()
        waits = f"99 % of those that miss wait at most {report.wait_ms(0.99):g} ms"
        said = f"{report.refused.total()} refused of {report.queries}; {waits}; {first(report)}".rstrip(  # noqa: E501
            "; "
        )
        told.append(
            row(
                f"a mesh of 10, zipf 1, {share:.0%} of the bytes: hits",
                100 * report.hit_ratio,
                "%",
                note=said,
            )
        )
        last = world if share <= 0.5 else last
    if plot and last is not None:
        mesh_map.write(plot / "mesh-map.svg", last)
    return told


def first(report: Report) -> str:
    return report.violations[0] if report.violations else ""
