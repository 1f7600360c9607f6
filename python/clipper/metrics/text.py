"""Text formats of metrics: Prometheus, OpenMetrics, and InfluxDB's line protocol.

Sources: prometheus.io/docs/instrumenting/exposition_formats (0.0.4), OpenMetrics 1.0,
docs.influxdata.com "Line protocol".
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from clipper.metrics.families import Family
from clipper.metrics.samples import OTHER, Labels, Samples, Value, cumulative, named
from clipper_core.runtime.histogram import Snapshot

CONTENT_TYPES: Final = {
    "prometheus": b"text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": b"application/openmetrics-text; version=1.0.0; charset=utf-8",
    "influx": b"text/plain; charset=utf-8",
}


def prometheus(samples: Samples, old_names: bool = False) -> bytes:
    """Return samples in the text format of Prometheus. old_names: as in `Samples.in_order`."""
    return _joined(
        line
        for family, rows in samples.in_order(old_names)
        for line in _family(family, rows, family.name, False)
    )


def openmetrics(samples: Samples, old_names: bool = False) -> bytes:
    """Return samples in OpenMetrics; TYPE and HELP omit the suffix of counters and infos.

    old_names: as in `Samples.in_order`.
    """
    lines = (
        line
        for family, rows in samples.in_order(old_names)
        for line in _family(family, rows, _stem(family), True)
    )
    return _joined(lines) + b"# EOF\n"


def _stem(family: Family) -> str:
    if family.kind == "counter":
        return family.name.removesuffix("_total")
    return family.name.removesuffix("_info") if family.kind == "info" else family.name


def _family(family: Family, rows: dict[Labels, Value], shown: str, open: bool) -> Iterator[str]:
    yield f"# HELP {shown} {_escaped(family.help, quotes=open)}"
    yield f"# TYPE {shown} {'gauge' if family.kind == 'info' and not open else family.kind}"
    for labels, value in rows.items():
        pairs = [f'{name}="{_escaped(label)}"' for name, label in named(family, labels)]
        if isinstance(value, Snapshot):
            yield from _histogram(family, pairs, value)
        else:
            yield f"{family.name}{_braced(pairs)} {_number(value)}"


def _histogram(family: Family, pairs: list[str], snapshot: Snapshot) -> Iterator[str]:
    below, count, total = cumulative(family, snapshot)
    names = "".join([f"{pair}," for pair in pairs])
    for edge, at_most in zip(family.edges, below, strict=True):
        yield f'{family.name}_bucket{{{names}le="{edge!r}"}} {at_most}'
    yield f'{family.name}_bucket{{{names}le="+Inf"}} {count}'
    yield f"{family.name}_sum{_braced(pairs)} {_number(total)}"
    yield f"{family.name}_count{_braced(pairs)} {count}"


def _braced(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


def influx(samples: Samples, now_ns: int, old_names: bool = False) -> bytes:
    """Return samples in the line protocol, one line per series.

    The metric is the measurement, labels are tags. Fields: `value`; for a histogram `count`, `sum`,
    and the count at or below each edge.

    now_ns: the time stamp, ns since 1970. old_names: as in `Samples.in_order`.
    """
    return _joined(
        f"{_tag(family.name)}{''.join(_tags(family, labels))} {fields} {now_ns}"
        for family, rows in samples.in_order(old_names)
        for labels, value in rows.items()
        if (fields := ",".join(_fields(family, value)))
    )


def _tags(family: Family, labels: Labels) -> Iterator[str]:
    """Yield the tags in sorted order, as the protocol advises; it has no empty values."""
    for name, label in sorted(named(family, labels)):
        yield f",{name}={_tag(label or OTHER)}"


def _tag(text: str) -> str:
    """Escape a tag.

    A backslash at the end would escape the next character; line breaks end a line.
    """
    for mark in (",", "=", " "):
        text = text.replace(mark, f"\\{mark}")
    text = text.replace("\n", "\\n")
    return f"{text} ".replace(" ", "\\ ") if text.endswith("\\") else text


def _fields(family: Family, value: Value) -> Iterator[str]:
    if not isinstance(value, Snapshot):
        if math.isfinite(value):  # there are no others in the protocol
            yield f"value={float(value)!r}"
        return
    below, count, total = cumulative(family, value)
    yield f"count={count}i"
    yield f"sum={float(total)!r}"
    for edge, at_most in zip(family.edges, below, strict=True):
        yield f"{edge!r}={at_most}i"


def _joined(lines: Iterable[str]) -> bytes:
    return "".join([f"{line}\n" for line in lines]).encode()
