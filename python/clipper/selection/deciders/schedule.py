"""The text of a decider, parsed into a schedule of steps.

The predictions of a query arrive one by one. After each of them, and at given times, a decider
decides whether to answer. A *schedule* is a list of steps, each a rule with the time until which it
decides. When a step's time is over, the next one decides on everything that has arrived since the
start. At the deadline the last step answers with what there is. The core executes the schedule
(clipper_core.results.decider); this module only parses and validates it.

    all                           wait for every model; the policy combines (the default)
    first(confidence=0.8)         the first prediction with at least this confidence
    majority                      the label with most votes, once the others cannot change it
    quorum(3)                     a label with this many votes
    weighted                      as majority, with the policy's weights
    best_quality(confidence=0.8)  the best ranked model with this confidence, once no better one
                                  is outstanding
    surest(confidence=0.8)        the model with the highest confidence
    cascade(confidence=0.9)       query in link order, cheap models first, until one is this sure
    hedged(after_ms=5, budget=0.05)
                                  query the second model if the first is late, for at most this
                                  share of the queries
    tied                          query all; the model whose container starts first cancels the rest
    mean(tolerance=0.1), median   numbers, once the outstanding ones cannot move the result further
    guaranteed_time(floor=fast)   the best that arrived by the deadline minus a margin; `fast` is
                                  measured to arrive by then
    floor(fast)                   the output of this model

    majority within 12 ms, else best_quality within 18 ms, else floor(fast)
    table(0: svm >= 0.9; 10: svm, forest; 18: any)

The table accepts from 0 ms only a confident svm, from 10 ms one of two models, from 18 ms any.

Source: the speculative serving document, "Guaranteed execution time", "Consensus", "Quality";
schedule tables: Dunning and Friedman, Machine Learning Logistics, 2017; hedged and tied requests:
Dean and Barroso, The Tail at Scale, 2013.
"""

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from clipper.errors import InvalidInput, did_you_mean
from clipper.types import OWN_CLASS, VersionedModel

P95 = "p95"
STEPS_MAX = 16  # of a schedule; the core's limit
WAIT_FOR_ALL = "all"


class DeciderStep(msgspec.Struct, frozen=True):
    """One rule of a schedule and the time until which it decides.

    rule: a key of RULES, or "row" (of a table: the best ranked acceptable model).
    until_ms: since the query's arrival; 0: until the deadline.
    models: accepted models, by name or name and version; () for all.
    confidence: required, 0 to 1.
    need: number of votes or numbers; 0: more than half.
    tolerance, low, high: in the unit of the outputs.
    after_ms: of a hedge; None: the measured 95th percentile of the first model's latency.
    budget: share of the queries that may be hedged.
    margin_ms: time before the deadline at which a guaranteed answer is returned.
    """

    rule: str
    until_ms: float = 0.0
    models: tuple[str, ...] = ()
    confidence: float = 0.0
    need: int = 0
    tolerance: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    after_ms: float | None = None
    budget: float = 0.0
    margin_ms: float = 0.0

    @property
    def name(self) -> str:
        """The rule with its main argument, as `Answer.decided_by` shows it."""
        if self.rule == "floor":
            return f"floor({self.models[0]})"
        if self.rule == "quorum":
            return f"quorum({self.need})"
        return self.rule

    def __str__(self) -> str:
        return self._call() + (f" within {_plain(self.until_ms)} ms" if self.until_ms else "")

    def _call(self) -> str:
        if self.rule in ("floor", "quorum"):
            return self.name
        given = [f"floor={self.models[0]}"] if self.models else []
        given += [
            f"{setting}={_plain(value)}"
            for setting, value in _settings_of(RULES[self.rule], self).items()
            if value != RULES[self.rule].settings[setting].default
        ]
        return f"{self.rule}({', '.join(given)})" if given else self.rule


class Schedule(msgspec.Struct, frozen=True):
    """The steps of a decider in the order of their times.

    own: `module:Class(...)` of a user-defined decider; its queries fall back to the only step.
    """

    steps: tuple[DeciderStep, ...]
    own: str = ""

    @property
    def waits_for_all(self) -> bool:
        """True if the policy combines at the deadline or when all models have ended."""
        return not self.own and self.steps == (DeciderStep(WAIT_FOR_ALL),)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the text names."""
        return tuple(dict.fromkeys(model for step in self.steps for model in step.models))

    @property
    def guaranteed(self) -> DeciderStep | None:
        """The step with a guaranteed time; None without one."""
        return next((step for step in self.steps if step.rule == "guaranteed_time"), None)

    def __str__(self) -> str:
        if self.own:
            return self.own
        if self.steps[0].rule == "row":
            starts = (0.0, *(row.until_ms for row in self.steps))
            rows = (_row_text(*row) for row in zip(self.steps, starts, strict=False))
            return f"table({'; '.join(rows)})"
        return ", else ".join(map(str, self.steps))


def _plain(number: float) -> str:
    """Return the shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _row_text(row: DeciderStep, start_ms: float) -> str:
    sure = f" >= {_plain(row.confidence)}" if row.confidence else ""
    return f"{_plain(start_ms)}: {', '.join(row.models) or 'any'}{sure}"


# -- the rules


class _Setting(msgspec.Struct, frozen=True):
    """A setting of a rule: its default, its range, and True if it must be an integer."""

    default: float | None
    low: float
    high: float
    whole: bool = False


class _Rule(msgspec.Struct, frozen=True):
    """A rule that a step may have.

    first: the setting that may be given without its name.  schedules: it decides which models to
    query and when, so it must be the first step.  last: it must be the last step.
    """

    settings: dict[str, _Setting] = {}
    first: str = ""
    schedules: bool = False
    last: bool = False


_SHARE = _Setting(0.0, 0.0, 1.0)
_NUMBERS = _Rule(
    {
        "tolerance": _Setting(0.0, 0.0, math.inf),
        "need": _Setting(0, 0, 64, whole=True),
        "low": _Setting(-math.inf, -math.inf, math.inf),
        "high": _Setting(math.inf, -math.inf, math.inf),
    },
    "tolerance",
)
RULES: dict[str, _Rule] = {
    WAIT_FOR_ALL: _Rule(),
    "first": _Rule({"confidence": _SHARE}, "confidence"),
    "majority": _Rule(),
    "quorum": _Rule({"need": _Setting(None, 1, 64, whole=True)}, "need"),
    "weighted": _Rule(),
    "best_quality": _Rule({"confidence": _SHARE}, "confidence"),
    "surest": _Rule({"confidence": _SHARE}, "confidence"),
    "cascade": _Rule({"confidence": _Setting(None, 0.0, 1.0)}, "confidence", schedules=True),
    "hedged": _Rule(
        {"after_ms": _Setting(None, 0.0, 86_400_000), "budget": _Setting(0.05, 0.0, 1.0)},
        "after_ms",
        schedules=True,
    ),
    "tied": _Rule(schedules=True),
    "mean": _NUMBERS,
    "median": _NUMBERS,
    "guaranteed_time": _Rule({"margin_ms": _Setting(1.0, 0.0, 60_000.0)}, "floor", last=True),
    "floor": _Rule({}, "floor", last=True),
}
_MUST = {"quorum": "need", "cascade": "confidence", "floor": "floor"}
_EXAMPLES = {"quorum": "quorum(3)", "cascade": "cascade(confidence=0.9)", "floor": "floor(fast)"}


def _settings_of(rule: _Rule, step: DeciderStep) -> dict[str, float]:
    return {setting: getattr(step, setting) for setting in rule.settings}


# -- reading

_TIME = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s)")
_STEP = re.compile(r"(\w[\w-]*)\s*(?:\((.*)\))?\s*(?:within\s+(\S.*))?", re.S)
_OWN = re.compile(OWN_CLASS, re.S)


@functools.lru_cache(maxsize=1024)
def parse_decider(text: str) -> Schedule:
    """Parse the text of a decider; equal texts share one schedule. Threads: any.

    Raises InvalidInput that names the step or row, the reason, and a correct example.
    """
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(
            f"a decider is a text such as 'majority within 12 ms, else floor(fast)', not {text!r}."
        )
    text = " ".join(text.split())
    if _OWN.fullmatch(text):
        return Schedule((DeciderStep(WAIT_FOR_ALL),), own=text)
    if re.match(r"table\s*\(", text):
        return Schedule(_table(text))
    parts = _split(text, r"(?:\s*,\s*|\s+)else\s+")
    if len(parts) > STEPS_MAX:
        raise InvalidInput(
            f"decider {_short(text)} has {len(parts)} steps; at most {STEPS_MAX} are possible."
        )
    steps = tuple(_step(part, text) for part in parts)
    _check_order(steps, text)
    return Schedule(steps)


def _split(text: str, at: str) -> list[str]:
    """Split at a pattern outside of parentheses and quotes."""
    parts, depth, quote, start, i = [], 0, "", 0, 0
    pattern = re.compile(at)
    while i < len(text):
        c = text[i]
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        else:
            depth += (c == "(") - (c == ")")
            found = pattern.match(text, i) if depth == 0 else None
            if found:
                parts.append(text[start:i])
                start = i = found.end()
                continue
        i += 1
    return [*parts, text[start:]]


def _step(part: str, text: str) -> DeciderStep:
    found = _STEP.fullmatch(part.strip())
    if not found:
        hint = (
            "Write RULE(SETTING=VALUE) within TIME, as in majority within 12 ms, else floor(fast)."
        )
        raise InvalidInput(
            f"cannot read {_short(part.strip())} in the decider {_short(text)}.", hint=hint
        )
    name, inner, time = found.groups()
    rule = RULES.get(name)
    if rule is None:
        guess = did_you_mean(name, RULES) or "."
        hint = f"Rules: {', '.join(RULES)}, table(...), or a user-defined class as 'module:Class'."
        raise InvalidInput(f"no rule {name!r} in the decider {_short(text)}{guess}", hint=hint)
    fields = _arguments(name, rule, inner or "")
    if name in _MUST and (_MUST[name] not in fields and "models" not in fields):
        raise InvalidInput(
            f"{name!r} in the decider {_short(text)} needs its {_MUST[name]}.",
            hint=f"Write {_EXAMPLES[name]}.",
        )
    for setting, about in rule.settings.items():
        fields.setdefault(setting, about.default)
    return DeciderStep(name, _time(time, name, text) if time else 0.0, **fields)


def _arguments(name: str, rule: _Rule, inner: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    takes = list(dict.fromkeys([*([rule.first] if rule.first else []), *rule.settings]))
    for i, item in enumerate(_split(inner, r",") if inner.strip() else []):
        setting, equals, value = item.partition("=")
        setting, value = setting.strip(), value.strip()
        if not equals:
            if i or not rule.first:
                raise InvalidInput(
                    f"{name} takes no bare {item.strip()!r}.", hint=_takes(name, takes)
                )
            setting, value = rule.first, item.strip()
        if setting not in takes:
            guess = did_you_mean(setting, takes) or "."
            raise InvalidInput(
                f"{name} has no setting {setting!r}{guess}", hint=_takes(name, takes)
            )
        if setting in fields or (setting == "floor" and "models" in fields):
            raise InvalidInput(f"{name} is given {setting} twice.")
        value = (
            value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
        )
        if setting == "floor":
            fields["models"] = (_model(value, name),)
        elif setting != "after_ms" or value != P95:
            fields[setting] = _number(name, setting, value, rule.settings[setting])
    return fields


def _takes(name: str, takes: Sequence[str]) -> str:
    return f"Its settings: {', '.join(takes)}." if takes else f"{name} has no settings."


def _number(name: str, setting: str, value: str, about: _Setting) -> float | int:
    try:
        number = int(value) if about.whole else float(value)
    except ValueError:
        number = math.nan
    if not about.low <= number <= about.high or math.isinf(number):
        kind = "a whole number" if about.whole else "a number"
        bounds = (
            f"from {about.low:g}"
            if math.isinf(about.high)
            else f"between {about.low:g} and {about.high:g}"
        )
        bounds = "that is finite" if math.isinf(about.low) else bounds
        also = f", or {P95!r}: as measured" if setting == "after_ms" else ""
        raise InvalidInput(f"{setting}={value} of {name}: it must be {kind} {bounds}{also}.")
    return number


def _model(text: str, where: str) -> str:
    try:
        return str(VersionedModel.parse(text))
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _time(text: str, name: str, whole: str) -> float:
    found = _TIME.fullmatch(text.strip())
    try:
        time = (
            float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]] if found else math.nan
        )
    except ValueError:
        time = math.nan
    if not 0 < time < math.inf:
        hint = "Write a time above 0 with its unit: us, ms or s, as in 12 ms."
        raise InvalidInput(
            f"{name} within {_short(text)} in the decider {_short(whole)}: not a time.", hint=hint
        )
    return time


def _check_order(steps: Sequence[DeciderStep], text: str) -> None:
    for i, step in enumerate(steps):
        rule, last = RULES[step.rule], i == len(steps) - 1
        if rule.schedules and i:
            raise InvalidInput(
                f"{step.rule} cannot be step {i + 1} of the decider {_short(text)}: "
                "it decides which models to query, and they are queried already.",
                hint=f"Put it first: {step} within 5 ms, else ...",
            )
        if rule.last and not last:
            raise InvalidInput(
                f"{step.name} ends the decider {_short(text)}:"
                " the steps after it would never decide."
            )
        if not last and not step.until_ms:
            hint = f"Write {step} within 12 ms, else ..."
            raise InvalidInput(
                f"step {i + 1}, {step.name}, of the decider {_short(text)} has no time limit.",
                hint=hint,
            )
        if rule.last and step.until_ms:
            raise InvalidInput(
                f"{step.name} of the decider {_short(text)} decides to the deadline: leave out"
                " `within`."
            )
        if i and step.until_ms and step.until_ms <= steps[i - 1].until_ms:
            raise InvalidInput(
                f"step {i + 1}, {step.name}, of the decider {_short(text)} ends at"
                f" {step.until_ms:g} ms, and the step before it at {steps[i - 1].until_ms:g} ms.",
                hint="Times count from the query's arrival and must increase.",
            )


# -- tables

_ROW = re.compile(
    r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s)?\s*:\s*([^>≥]+?)\s*(?:(?:>=|≥)\s*(\S+))?"
)


def _table(text: str) -> tuple[DeciderStep, ...]:
    """Parse the rows of a table. Each row must accept at least what the row before it accepts."""
    if not text.endswith(")"):
        raise InvalidInput(f"the parenthesis of {_short(text)} is not closed.", hint=_TABLE_HELP)
    inner = text[text.index("(") + 1 : -1]
    rows = [
        _row(part.strip(), number)
        for number, part in enumerate(inner.split(";"), 1)
        if part.strip()
    ]
    if not 0 < len(rows) <= STEPS_MAX:
        raise InvalidInput(
            f"the table {_short(text)} has {len(rows)} rows; 1 to {STEPS_MAX} are possible.",
            hint=_TABLE_HELP,
        )
    starts = [start for start, _, _ in rows]
    if starts[0]:
        hint = f"Begin with 0: as in table(0: {', '.join(rows[0][1]) or 'any'}; ...)."
        reported = (
            f"row 1 of the table begins at {starts[0]:g} ms: nothing could be accepted before."
        )
        raise InvalidInput(reported, hint=hint)
    for number, (before, row) in enumerate(itertools.pairwise(rows), 2):
        _check_wider(number, before, row)
    return tuple(
        DeciderStep("row", until_ms=until, models=models, confidence=confidence)
        for (_, models, confidence), until in zip(rows, [*starts[1:], 0.0], strict=True)
    )


_TABLE_HELP = (
    "Write rows of a time in ms and the accepted models:"
    " table(0: svm >= 0.9; 10: svm, forest; 18: any)."
)
_Row = tuple[float, tuple[str, ...], float]


def _row(part: str, number: int) -> _Row:
    found = _ROW.fullmatch(part)
    if not found:
        raise InvalidInput(
            f"cannot read row {number} of the table, {_short(part)}.", hint=_TABLE_HELP
        )
    start, unit, accept, confidence = found.groups()
    try:
        time = float(start) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit or "ms"]
    except ValueError:
        raise InvalidInput(
            f"row {number} of the table begins at {start!r}: not a time.", hint=_TABLE_HELP
        ) from None
    sure = (
        _number(f"row {number} of the table", "confidence", confidence, _SHARE)
        if confidence
        else 0.0
    )
    if accept == "any":
        return time, (), sure
    models = [_model(model.strip(), f"row {number} of the table") for model in accept.split(",")]
    return time, tuple(dict.fromkeys(models)), sure


def _check_wider(number: int, before: _Row, row: _Row) -> None:
    where = f"row {number} of the table"
    if row[0] <= before[0]:
        raise InvalidInput(
            f"{where} begins at {row[0]:g} ms, and the row before it at {before[0]:g} ms.",
            hint="Times must increase.",
        )
    lost = [model for model in before[1] or ("any",) if row[1] and not _accepts(row[1], model)]
    if lost:
        models = ", ".join(lost)
        hint = "Each row must accept all models that the rows before it accept."
        raise InvalidInput(
            f"{where} no longer accepts {models}, which the row before it does.", hint=hint
        )
    if row[2] > before[2]:
        hint = "Each row must require the same confidence as the row before it, or less."
        reported = (
            f"{where} needs confidence {row[2]:g}, more than the {before[2]:g} of the row"
            " before it."
        )
        raise InvalidInput(reported, hint=hint)


def _accepts(models: Sequence[str], model: str) -> bool:
    return model in models or model.partition(":")[0] in models


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
