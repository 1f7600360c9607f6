"""The mesh on virtual time: what its cache hits beside other rules, how fast it is simulated, and
what holds under faults."""

import gc
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.harness import Goal, Row, UnknownRows, row
from bench.mesh_simulator.simulation import Plan, Report, Simulation
from bench.node_simulator.__main__ import KINDS
from bench.node_simulator.plans import shown
from bench.plots import pyplot, save
from bench.runs import in_parallel
from bench.system.mesh import evictions, picture

SHARES: Final = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50)  # of all models' bytes, that memory is
ALPHAS: Final = (0.8, 1.0, 1.2)
TRACES: Final[dict[str, Callable[..., evictions.Trace]]] = {
    "zipf": evictions.zipf,
    "drifting zipf": evictions.drifting,
}
LARGE: Final = Plan(
    instances=1000, models=1_000_000, share=0.10, rate_per_s=500, seconds=3600, shared_mirror=True
)
SMALL: Final = Plan(instances=10, models=2000, rate_per_s=100, alpha=1.0)
MAP_SHARE: Final = 0.5  # of which a picture is drawn
WORLDS: Final = 60
LIMIT_S: Final = 1800.0
PART_S: Final = 900.0  # of the large mesh's hour that is run; then its pace is even
STYLES: Final = {
    "clipper": "C2o-",
    "LRU": "C0s:",
    "GDSF": "C1s:",
    "known demand": "k-.",
    "Belady-size": "k--",
}
Job = tuple[Any, ...]
FUTURE = "the next uses: that rule knows them, and no rule can learn them from independent draws"


def main(quick: bool, rows: Sequence[str] | None = None, plot: Path | None = None) -> list[Row]:
    unknown = [name for name in rows or () if name not in GROUPS]
    if unknown:
        raise UnknownRows(f"no rows {unknown[0]!r}: {', '.join(GROUPS)}")
    wanted = [name for name in GROUPS if rows is None or name in rows]
    jobs = [(name, plot, job) for name in wanted for job in GROUPS[name].jobs(quick)]
    measured = in_parallel("mesh_sim", measure, jobs, limit_s=LIMIT_S)
    found: dict[str, dict[Job, Any]] = {name: {} for name in wanted}
    for (name, _, job), figures in zip(jobs, measured, strict=True):
        found[name][job] = figures
    return [told for name in wanted for told in GROUPS[name].rows(found[name], plot)]


def measure(name: str, plot: Path | None, job: Job) -> Any:
    """Run a job of a group."""
    return GROUPS[name].measure(plot, *job)


# -- one cache, beside other rules


def hit_jobs(quick: bool) -> list[Job]:
    shares = SHARES[2::2] if quick else SHARES
    return [(kind, alpha, share, quick) for kind in TRACES for alpha in ALPHAS for share in shares]


def hits(found: Mapping[Job, Mapping[str, float]], plot: Path | None) -> list[Row]:
    """Return the hits of the second half of a trace, in percent. Every rule loads what is asked."""
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


def compared(
    plot: Path | None, kind: str, alpha: float, share: float, quick: bool
) -> dict[str, float]:
    """Return the percentage of hits by rule. No rule knows the demand where it changes."""
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


def speed(plot: Path | None, seconds: float) -> tuple[Report, float, float, float]:
    """Simulate a million models on a thousand instances for some virtual seconds. Return what
    happened, seconds that an hour takes (the last third's pace goes on), seconds of CPU that it
    took, memory in MiB.
    """
    gc.collect()
    # nothing it makes is a cycle, and the collector would look through millions of records again
    # and again
    gc.disable()
    try:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        world = Simulation(replace(LARGE, seconds=seconds))
        world.step(2000 / 3 * seconds)
        third = time.perf_counter()
        report = world.run()
        ended, cpu_s = time.perf_counter(), time.process_time() - begun_cpu
        hour_s = ended - begun + (ended - third) * 3 * (LARGE.seconds / seconds - 1)
    finally:
        gc.enable()
    return report, hour_s, cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def speed_rows(found: Mapping[Job, Any], plot: Path | None) -> list[Row]:
    """Return the rows of the only job."""
    (((seconds,), (report, hour_s, cpu_s, peak)),) = found.items()
    waited = (
        f"half of the misses wait at most {report.wait_ms(0.5):g} ms, 99 %"
        f" {report.wait_ms(0.99):g} ms"
    )
    done = (
        f"{seconds / 60:g} virtual minutes: {report.queries} queries, {report.hit_ratio:.1%} hits,"
        f" {report.counts['loads']} loads, {report.events} events"
    )
    return [
        row(
            f"a virtual hour of 1 M models, 1000 instances, by {seconds / 60:.2g} minutes of it",
            hour_s / 60,
            "min",
            goal=Goal("value_at_most", 10),
            note=f"{done}, {cpu_s:.0f} s of CPU; {waited}",
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


# -- small meshes of the nodes themselves under faults by seed


def under_faults(plot: Path | None, kind: str, seed: int) -> list[str]:
    """Run a world, with its queries, and with every model asked again when faults have ended;
    return what did not hold.
    """
    logging.disable(logging.CRITICAL)  # thousands of lines of nodes
    try:
        return shown(KINDS[kind](seed))
    finally:
        logging.disable(logging.NOTSET)


def fault_rows(found: Mapping[Job, list[str]], plot: Path | None) -> list[Row]:
    broken = [text for texts in found.values() for text in texts]
    name = f"{len(found)} worlds of a small mesh with faults: what did not hold"
    more = "more of them: python -m bench.node_simulator"
    goal = Goal("value_at_most", 0)
    return [row(name, len(broken), "laws", goal=goal, note="; ".join([more, *broken[:3]]))]


# -- hits of a whole mesh as its memory grows: placement, copies and loads that wait


def cliff(plot: Path | None, share: float, seconds: float) -> Report:
    world = Simulation(replace(SMALL, share=share, seconds=seconds))
    report = world.run()
    if plot and share == MAP_SHARE:
        picture.write(plot / "mesh-map.svg", world)
    return report


def cliff_rows(found: Mapping[Job, Report], plot: Path | None) -> list[Row]:
    told = []
    for (share, _), report in found.items():
        waits = f"99 % of those that miss wait at most {report.wait_ms(0.99):g} ms"
        said = f"{report.refused.total()} refused of {report.queries}; {waits}; {first(report)}"
        name = f"a mesh of 10, zipf 1, {share:.0%} of the bytes: hits"
        told.append(row(name, 100 * report.hit_ratio, "%", note=said.rstrip("; ")))
    return told


def first(report: Report) -> str:
    return report.violations[0] if report.violations else ""


@dataclass(frozen=True)
class Group:
    """Rows of one question. jobs(quick): arguments of `measure`, after the folder of pictures,
    which may be of other processes. rows: of what is measured, by job.
    """

    jobs: Callable[[bool], Sequence[Job]]
    measure: Callable[..., Any]
    rows: Callable[[Mapping[Job, Any], Path | None], list[Row]]


def speed_jobs(quick: bool) -> list[Job]:
    return [(5.0 if quick else PART_S,)]


def fault_jobs(quick: bool) -> list[Job]:
    return [(kind, seed) for seed in range(2 if quick else WORLDS // len(KINDS)) for kind in KINDS]


def cliff_jobs(quick: bool) -> list[Job]:
    if quick:
        return [(0.1, 20.0), (0.5, 20.0)]
    return [(share, 900.0) for share in (0.05, 0.10, 0.20, 0.50, 1.0)]


GROUPS: Final = {  # the longest job first
    "speed": Group(speed_jobs, speed, speed_rows),
    "hits": Group(hit_jobs, compared, hits),
    "cliff": Group(cliff_jobs, cliff, cliff_rows),
    "faults": Group(fault_jobs, under_faults, fault_rows),
}
