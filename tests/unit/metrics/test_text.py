"""Parsers by others read the samples from the texts, whatever is in a label."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.metrics import CONTENT_TYPES, FAMILIES, Samples, influx, openmetrics, prometheus
from clipper.metrics.families import LATENCY_S
from clipper_core.runtime.histogram import LatencyHistogram

ODD = ('"', "\\", "\n", "a\\n", 'x="y",', "}", "{", " ")
LABELS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(ODD)


def histogram(*values: int) -> Any:
    one = LatencyHistogram()
    for value in values:
        one.record(value)
    return one.snapshot()


def some(label: str = "digits", count: int = 3) -> Samples:
    samples = Samples()
    samples.add("clipper_queries_total", count, label)
    samples.add("clipper_answers_total", count, label, "ok")
    samples.add("clipper_slo_seconds", 0.25, label)
    samples.add("clipper_answer_duration_seconds", histogram(90, 900, 20_000_000), label)
    samples.add("process_max_fds", math.inf)
    samples.add("clipper_build_info", 1, "1.2", "3.11")
    return samples


def parsed(text: bytes, module: str) -> dict[str, Any]:
    parser = pytest.importorskip(f"prometheus_client{module}")
    families = list(parser.text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families), "TYPE and HELP once"
    return {family.name: family for family in families}


@pytest.mark.parametrize(
    ("write", "module"), [(prometheus, ".parser"), (openmetrics, ".openmetrics.parser")]
)
@given(label=LABELS)
def test_a_parser_reads_what_was_written(write: Any, module: str, label: str) -> None:
    found = parsed(write(some(label)), module)
    queries = found["clipper_queries"]
    assert queries.type == "counter"
    (one,) = queries.samples
    assert (one.name, one.labels, one.value) == (
        "clipper_queries_total",
        {"application": label},
        3.0,
    )
    took = found["clipper_answer_duration_seconds"]
    assert took.type == "histogram"
    buckets = {one.labels["le"]: one.value for one in took.samples if one.name.endswith("_bucket")}
    assert list(map(float, buckets)) == [*LATENCY_S, math.inf]
    assert (buckets["0.0001"], buckets["0.0025"], buckets["10.0"], buckets["+Inf"]) == (1, 2, 2, 3)
    rest = {
        one.name.rpartition("_")[2]: one.value
        for one in took.samples
        if not one.name.endswith("_bucket")
    }
    assert rest == {"sum": pytest.approx(20.00099), "count": 3.0}
    assert found["process_max_fds"].samples[0].value == math.inf
    assert all(family.documentation == FAMILIES[name_of(family)].help for family in found.values())


@pytest.mark.parametrize(
    ("write", "module"), [(prometheus, ".parser"), (openmetrics, ".openmetrics.parser")]
)
def test_old_names_are_given_only_where_they_are_asked_for(write: Any, module: str) -> None:
    samples = Samples()
    samples.add("clipper_evaluated_rows_total", 7, "m", "1")
    samples.add("clipper_journal_last_record", 5)
    samples.add("clipper_mesh_hit_ratio", 0.5)
    new = {"clipper_evaluated_rows": 7, "clipper_journal_last_record": 5}
    old = {"clipper_cache_misses": 7, "clipper_journal_records": 5, "clipper_mesh_hit_ratio": 0.5}
    for old_names, values in ((False, new), (True, new | old)):
        found = parsed(write(samples, old_names), module)
        assert {name: one.samples[0].value for name, one in found.items()} == values
    assert influx(samples, 1) == influx(samples, 1, False) != influx(samples, 1, True)


def test_what_is_read_is_there_and_no_name_is_given_twice() -> None:
    renamed = [family.renamed for family in FAMILIES.values() if family.renamed]
    assert len({*renamed, *FAMILIES}) == len(renamed) + len(FAMILIES)
    assert {family.read.partition(".")[0] for family in FAMILIES.values()} == {
        "",
        "application",
        "pair",
        "model",
        "server",
        "mesh",
        "shard",
        "table",
    }


def name_of(family: Any) -> str:
    return next(
        name
        for name in (family.name, f"{family.name}_total", f"{family.name}_info")
        if name in FAMILIES
    )


def test_openmetrics_ends_with_its_end_mark() -> None:
    text = openmetrics(some())
    assert text.endswith(b"\n# EOF\n")
    assert b"# TYPE clipper_build info\nclipper_build_info{" in text
    assert b"# TYPE clipper_build_info gauge\nclipper_build_info{" in prometheus(some())


FIELD = re.compile(r"([^=]+)=(-?[0-9.e+-]+i?)")


def points(text: bytes) -> list[tuple[str, dict[str, str], dict[str, float], int]]:
    """Parse the line protocol strictly: one unescaped blank before the fields and one before the
    time."""
    found = []
    for line in text.decode().split("\n")[:-1]:
        series, fields, when = re.split(r"(?<!\\) ", line)
        name, *tags = re.split(r"(?<!\\),", series)
        pairs = [re.split(r"(?<!\\)=", tag) for tag in tags]
        values = [FIELD.fullmatch(field) for field in fields.split(",")]
        plain = {key: re.sub(r"\\([,= ])", r"\1", value) for key, value in pairs}
        found.append(
            (
                name,
                plain,
                {one[1]: float(one[2].removesuffix("i")) for one in values if one},
                int(when),
            )
        )
        assert all(values), line
    return found


@given(label=st.text("ab,= \n", min_size=1, max_size=6) | st.just("back\\slash"))
def test_influx_reads_what_was_written(label: str) -> None:
    found = {
        name: (tags, fields, when) for name, tags, fields, when in points(influx(some(label), 17))
    }
    tags, fields, when = found["clipper_queries_total"]
    assert (tags, fields, when) == ({"application": label.replace("\n", "\\n")}, {"value": 3.0}, 17)
    _, took, _ = found["clipper_answer_duration_seconds"]
    assert (took["count"], took["0.0001"], took["10.0"]) == (3, 1, 2)
    assert "process_max_fds" not in found, "the protocol has no infinity"


@given(st.text(min_size=0, max_size=6))
def test_a_label_never_breaks_a_line_of_influx(label: str) -> None:
    lines = influx(some(label), 1).split(b"\n")
    assert len(lines) == 6
    assert all(line.endswith(b" 1") for line in lines[:-1])


def test_every_name_follows_the_conventions() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert name.startswith(("clipper_", "process_", "modelmesh_"))
        if name.startswith("modelmesh_"):  # its names are another's
            assert (family.kind != "counter", bool(family.edges)) == (
                True,
                family.kind == "histogram",
            )
            continue
        if family.old:  # some of version 0.1 were means
            assert name.endswith("_ratio"), name
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert name.endswith("_info") == (family.kind == "info"), name
        assert not name.endswith(("_count", "_sum", "_bucket", "_created", "_ms", "_us")), name
        assert family.help.endswith("."), name
        assert bool(family.edges) == (family.kind == "histogram"), name
        assert len(set(family.labels)) == len(family.labels), name


def test_content_types_name_their_versions() -> None:
    assert b"version=0.0.4" in CONTENT_TYPES["prometheus"]
    assert b"openmetrics-text; version=1.0.0" in CONTENT_TYPES["openmetrics"]
