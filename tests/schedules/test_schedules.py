"""The lock-free parts of the core under every schedule of a few threads, up to a bound: their own
source, run by an explorer.

Each scenario is exhausted at PREEMPTIONS switches and STALE stale accesses (checker.hpp says what
these are); outside the full tier those of LARGE at one switch less. Then every order in the headers
is weakened, one at a time, and every read-modify-write split: some scenario must fail, or the
header says why not. CLIPPER_SCHEDULES=deep explores more.
"""

import os
import re
from typing import Any

import pytest

from tests.schedules.explorer import CORE, HEADERS, HERE, ORDER, Explorer, sites_of
from tests.sizes import sized

DEEP = os.environ.get("CLIPPER_SCHEDULES") == "deep"
PREEMPTIONS = 4 if DEEP else 3
STALE = 4 if DEEP else 3
DEEP_BOUNDS = (3, 1)  # of scenarios too large for the bounds above
LARGE = {  # 300 000 schedules and more
    "lead_submit_tick",
    "lead_two_submit_holder_dozes",
    "lead_two_wait",
    "lead_wait_and_submit",
    "rows_two_thrice",
    "spsc_long",
    "submit_two_lanes",
}
EXECUTIONS_MAX = 2_000_000_000 if DEEP else 2_000_000

# What a scenario is about -> how its name begins. Each of them has three at least.
STRUCTURES = {
    "Cells of the ring": "cells_",
    "Spsc": "spsc_",
    "the cache's sequence lock": "seqlock_",
    "slots of a block": "slot",
    "references of a block": "block_",
    "blocked threads": "blocked_",
    "mailboxes": "mailbox_",
    "submit and the loop's sleep": "submit_",
    "submitters at work and the engine's end": "takers_",
    "who leads the loop": "lead_",
    "the lock of rows": "rows_",
    "the gate of a table": "gate_",
    "learned states": "state_",
    "the explorer itself": "litmus_",
}

# Weaker orders that nobody can observe. The header says why, in a comment that begins with
# "order:", on the line or above it.
JUSTIFIED = {
    "ring.hpp full: turn.load acquire -> relaxed",
    "ring.hpp pop: tail.load seq_cst -> acq_rel",
    "ring.hpp untouched: tail.load seq_cst -> acq_rel",
    "ring.hpp untouched: tail.load seq_cst -> relaxed",
    "completion.hpp slots_first_open: state.load seq_cst -> acq_rel",
    "completion.hpp completion_mark_dead: epoch.fetch_add seq_cst -> acq_rel",
    "completion.hpp mailbox_must_rescan: overflow.exchange seq_cst -> acq_rel",
    "completion.hpp mailbox_must_rescan: overflow.exchange seq_cst -> relaxed",
    "lane.hpp lane_announce: dirty.exchange seq_cst -> acq_rel",
    "lane.hpp lane_announce: dirty.exchange seq_cst -> relaxed",
    "loop_owner.hpp wake_loop_thread: wakeups.fetch_add relaxed -> split",
}

DECLARED = re.compile(r'^(SCENARIO|DEEP|BROKEN)\(\w+, "[^"]*", (\w+),', re.M)
KINDS: dict[str, list[str]] = {"SCENARIO": [], "DEEP": [], "BROKEN": []}
for source in sorted(HERE.glob("*.cpp")):
    for kind, name in DECLARED.findall(source.read_text()):
        KINDS[kind].append(name)


def described(result: dict[str, Any], mutant: str = "") -> str:
    """Describe a failure: its reason, its steps, and the command that reproduces it."""
    preemptions, stale, taken = result["choices"].split(" ")
    again = f"{preemptions} {stale} 0 {result['name']} {taken or '0'} {mutant}".rstrip()
    return "\n".join(
        [
            f"{result['name']}: {result['failure']}",
            *result["trace"],
            f"again: explorer replay {again}",
        ]
    )


def noted(result: dict[str, Any]) -> str:
    end = result["failure"] or ("exhausted" if result["exhausted"] else "NOT exhausted")
    return (
        f"{result['name']:30}{result['executions']:>11,} executions{result['seconds']:8.2f} s "
        f" {end}"
    )


def bounds(preemptions: int = PREEMPTIONS, stale: int = STALE) -> tuple[str, str, str]:
    return str(preemptions), str(stale), str(EXECUTIONS_MAX)


@pytest.mark.parametrize("name", KINDS["SCENARIO"] + (KINDS["DEEP"] if DEEP else []))
def test_no_schedule_breaks_it(explorer: Explorer, explored: list[str], name: str) -> None:
    chosen = DEEP_BOUNDS if name in KINDS["DEEP"] else (PREEMPTIONS, STALE)
    if name in LARGE and not DEEP:
        chosen = sized((PREEMPTIONS - 1, STALE), chosen)
    (result,) = explorer.ask("run", *bounds(*chosen), name)
    explored.append(noted(result))
    assert not result["failure"], described(result)
    assert result["exhausted"], (
        f"{name}: {result['executions']} schedules and no end: make it smaller, or DEEP"
    )


@pytest.mark.parametrize("name", KINDS["BROKEN"])
def test_what_is_planted_is_found(explorer: Explorer, explored: list[str], name: str) -> None:
    (result,) = explorer.ask("run", *bounds(), name)
    explored.append(noted(result))
    assert result["failure"], f"{name}: {result['executions']} schedules, and none fails"


@pytest.mark.parametrize("header", HEADERS)
def test_every_order_is_needed_or_justified(
    explorer: Explorer, explored: list[str], header: str
) -> None:
    sites = {str(site.number): site for site in explorer.sites if site.header == header}
    of = {f"{n}:{to}": f"{site.name} -> {to}" for n, site in sites.items() for to in site.mutations}
    needed = [m for m in of if of[m] not in JUSTIFIED]
    spared = [m for m in of if of[m] in JUSTIFIED]
    results = explorer.ask("mutants", *bounds(), *needed)
    results += explorer.ask("mutants", *bounds(PREEMPTIONS - 1), *spared)
    executions, seconds = sum(r["executions"] for r in results), sum(r["seconds"] for r in results)
    caught = {r["mutant"]: r for r in results if r["caught"]}
    explored.append(
        f"{header + '.hpp weakened':30}{executions:>11,} executions{seconds:8.2f} s  {len(sites)}"
        f" orders, {len(caught)} of {len(of)} mutants caught, {len(of) - len(caught)} justified"
    )
    unseen = [
        f"{sites[m.split(':')[0]].place}: {of[m]}: no scenario fails"
        for m in needed
        if m not in caught
    ]
    assert not unseen, "\n".join(
        [
            *unseen,
            "write a scenario that fails, or say in the header why it cannot matter (JUSTIFIED)",
        ]
    )
    wrong = [
        f"{of[m]}: justified, and yet\n{described(caught[m], m)}" for m in spared if m in caught
    ]
    assert not wrong, "\n".join(wrong)


def test_every_justification_is_in_the_header(explorer: Explorer) -> None:
    known = {f"{site.name} -> {to}": site for site in explorer.sites for to in site.mutations}
    assert not JUSTIFIED - set(known), "no such order any more"
    for what in JUSTIFIED:
        site = known[what]
        lines = explorer.texts[site.header].splitlines()
        above = site.line - 1
        while lines[above - 1].lstrip().startswith("//"):
            above -= 1
        comment = "".join(lines[above : site.line])
        assert "// order:" in comment, f"{site.place}: {what}: say why"


def test_no_order_is_overlooked(explorer: Explorer) -> None:
    """Every order in the headers has a number, a step and a function; a default order would have
    none."""
    ordered = {path.stem for path in CORE.rglob("*.hpp") if ORDER.search(path.read_text())}
    assert ordered == set(HEADERS), "a header with atomic steps needs scenarios: HEADERS"
    for header in HEADERS:
        sites = [site for site in explorer.sites if site.header == header]
        text = "".join(line.split("//")[0] + "\n" for line in explorer.texts[header].splitlines())
        assert len(sites) == len(re.findall(r"\bmemory_order", text)) == len(ORDER.findall(text))
        assert all(site.function and "?" not in site.step for site in sites)
        bare = re.findall(
            r"\.(?:load|store|exchange|fetch_\w+|compare_exchange_\w+)\((?:(?!memory_order)[^;])*;",
            text,
        )
        assert not bare, f"{header}.hpp: an order is missing: {bare}"


def test_the_steps_are_nowhere_else() -> None:
    """Memory orders other than relaxed are used in the headers only, where the explorer sees them.

    The table of evaluations in flight, the first section of lane.pyx, has no header.
    """
    for module in ("results/completion", "results/future", "scheduling/lane"):
        text = (CORE / f"{module}.pyx").read_text()
        if module == "scheduling/lane":
            table, section, text = text.partition("\n# -- Chunks: ")
            assert section
            assert "cdef bint pending_has" in table
        spelled = re.findall(
            r"[\w.\]\[]+\((?:[^()]*, *)?(?:acquire|release|acq_rel|seq_cst)\)", text
        )
        assert not spelled, (
            f"{module}.pyx: {', '.join(spelled)}: move the step to a header, with a scenario in"
            " tests/schedules"
        )


@pytest.mark.parametrize(("what", "prefix"), STRUCTURES.items())
def test_every_structure_has_three_scenarios(what: str, prefix: str) -> None:
    names = [name for name in KINDS["SCENARIO"] if name.startswith(prefix)]
    assert len(names) >= 3, f"{what}: {names}"


def test_a_failure_is_printed_and_reproduced(explorer: Explorer) -> None:
    (first,) = explorer.ask("run", *bounds(), "planted_looks_first")
    preemptions, stale, taken = first["choices"].split(" ")
    (again,) = explorer.ask("replay", preemptions, stale, "0", first["name"], taken)
    assert again["failure"] == first["failure"] == "nobody wakes it: thread 1 waits on the futex"
    assert again["trace"] == first["trace"]
    steps = [re.split(r"\s{2,}|\s(?=future\.hpp)", line) for line in first["trace"]]
    assert ["thread 2", "state[0]", "cas"] in [step[:3] for step in steps]
    assert any(
        "0 -> 1" in line and "seq_cst" in line and "completion.hpp:" in line
        for line in first["trace"]
    )
    assert first["trace"][-1].endswith("FAILS: nobody wakes it: thread 1 waits on the futex")


def test_a_mutant_is_printed_and_reproduced(explorer: Explorer) -> None:
    site = next(s for s in explorer.sites if s.name.startswith("completion.hpp waiter_enters"))
    mutant = f"{site.number}:acq_rel"
    (found,) = explorer.ask("mutants", *bounds(), mutant)
    preemptions, stale, taken = found["choices"].split(" ")
    (again,) = explorer.ask("replay", preemptions, stale, "0", found["name"], taken, mutant)
    assert again["failure"] == found["failure"]
    assert "completion.hpp" in described(found, mutant)


def test_an_order_is_numbered() -> None:
    text = "template <class A>\ninline bool f(A& a) {  // std::memory_order_relaxed\n"
    text += (
        "    if (a.x[1].load(std::memory_order_acquire) || a.y.exchange(1,"
        " std::memory_order_acq_rel)) return true;\n"
    )
    sites = sites_of("ring", text, 7)
    assert [(s.number, s.line, s.name) for s in sites] == [
        (7, 3, "ring.hpp f: x.load acquire"),
        (8, 3, "ring.hpp f: y.exchange acq_rel"),
    ]
    assert sites[0].mutations == ("relaxed",)
    assert sites[1].mutations == ("acquire", "release", "split")
