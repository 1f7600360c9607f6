"""Answers in parts: CPU of the server for a part, in process and over HTTP, and the first part.

The model is a generator in a container of its own, whose CPU is not counted. The reader is a thread
of the server's process, or a process that reads server-sent events. CPU is that of all threads of
the server's process, so a busy machine changes it little.
"""

import subprocess
import sys
import time
from collections.abc import Iterator

import clipper
from bench.harness import Goal, Row, interleave, row
from clipper_core.engine.model import Model

PARTS, QUICK_PARTS = 20_000, 500
REPETITIONS, QUICK_REPETITIONS = 7, 2
FIRST_QUERIES, QUICK_FIRST_QUERIES = 300, 20
SLO_MS = 600_000.0
PATIENCE_S = 60.0
READER = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1])
connection.request("POST", "/api/writer/predict", '{"input": "%s", "stream": true}' % sys.argv[2])
text = connection.getresponse().read()
assert text.count(b"event: part") == int(sys.argv[2]), text[-500:]
"""


def write(count: str) -> Iterator[str]:
    """Give so many words."""
    for _ in range(int(count)):
        yield "word "


def main(quick: bool = False) -> list[Row]:
    """Return the rows of the benchmark."""
    parts = QUICK_PARTS if quick else PARTS
    firsts = QUICK_FIRST_QUERIES if quick else FIRST_QUERIES
    with clipper.start(http="127.0.0.1:0", limits={"slo_ms_max": SLO_MS}) as server:
        server.deploy(
            "writer",
            write,
            input="str",
            output="str",
            row_by_row=True,
            cache=False,
            warmup=False,
        )
        server.app("writer", models=["writer"], policy="single", slo_ms=SLO_MS)
        model = server.model("writer")
        assert isinstance(model, Model)
        assert server.http_address is not None
        address = server.http_address

        def in_process() -> float:
            began_s = time.process_time()
            for _ in model.predict(str(parts), SLO_MS, stream=True, slo_total_ms=SLO_MS):
                pass
            return (time.process_time() - began_s) / parts * 1e6

        def over_http() -> float:
            began_s = time.process_time()
            subprocess.run(
                [sys.executable, "-c", READER, address, str(parts)], check=True, timeout=PATIENCE_S
            )
            return (time.process_time() - began_s) / parts * 1e6

        def first_part() -> float:
            spent_s = 0.0
            for _ in range(firsts):
                began_s = time.perf_counter()
                future = model.predict("1", SLO_MS, stream=True)
                next(future)
                spent_s += time.perf_counter() - began_s
                future.result(PATIENCE_S)
            return spent_s / firsts * 1e6

        def whole() -> float:
            began_s = time.perf_counter()
            for _ in range(firsts):
                model.predict("1", SLO_MS).result(PATIENCE_S)
            return (time.perf_counter() - began_s) / firsts * 1e6

        cases = {
            "in process": in_process,
            "over HTTP": over_http,
            "first part": first_part,
            "whole": whole,
        }
        found = interleave(cases, QUICK_REPETITIONS if quick else REPETITIONS)

    return [
        row("a part, in process", found["in process"], "us", goal=Goal("value_at_most", 5.0)),
        row("a part, over HTTP", found["over HTTP"], "us", goal=Goal("value_at_most", 10.0)),
        row(
            "the first part, in process",
            found["first part"],
            "us",
            "a whole answer of one part",
            found["whole"],
        ),
    ]
