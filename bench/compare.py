"""python -m bench.compare BEFORE.json AFTER.json: what changed by more than the spread. Exit 1 if
anything is worse."""

import json
import sys
from pathlib import Path
from typing import Any

from bench.harness import RATES, short

NOISE = 1.05  # a change below this factor is not looked at


def load(path: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(Path(path).read_text())}


def change(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return how many times better `after` is. Where there are anchors, the ratios to them are
    compared: unlike the figures, they hold from one machine or busy hour to another."""
    old, new = before["value"], after["value"]
    if old is None or new is None:
        return 1.0
    if before["against_value"] and after["against_value"]:
        old, new = old / before["against_value"], new / after["against_value"]
    if not old or not new:
        return 1.0
    return float(new / old if before["unit"].endswith(RATES) else old / new)


def tolerance(*rows: dict[str, Any]) -> float:
    """Return the wider spread of the two, p90 over fastest, as a factor."""
    factors = [NOISE]
    for row in rows:
        low, _, high = row["spread"].replace(" ", "").partition("-")
        if high and not low.endswith("M") and not high.endswith("M") and float(low) > 0:
            factors.append(float(high) / float(low))
    return max(factors)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    before, after = load(sys.argv[1]), load(sys.argv[2])
    worse = 0
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in before or name not in after:
            print(f"{name}: only {'after' if name in after else 'before'}")
            continue
        if gone := [
            word
            for word, one in (("before", before), ("after", after))
            if one[name]["value"] is None
        ]:
            print(f"{name}: no figure {' and '.join(gone)}")
            continue
        factor, allowed = change(before[name], after[name]), tolerance(before[name], after[name])
        verdict = "better" if factor > allowed else "WORSE" if factor < 1 / allowed else "same"
        worse += verdict == "WORSE"
        values = (
            f"{short(before[name]['value'])} -> {short(after[name]['value'])}"
            f" {before[name]['unit']}"
        )
        print(f"{name}: {values}, {factor:.2f} x, {verdict} (spread {allowed:.2f} x)")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
