"""A pipeline of three models that call one another: embed -> rank -> explain.

`explain` is asked by a user. It has `rank` order the documents, which has `embed` turn texts into
vectors; equal texts are embedded once, since the calls share the cache.

Run: python examples/calls/serve.py [QUERY]
"""

import sys
from itertools import pairwise

import numpy as np

import clipper
from clipper_container import Calls

DOCUMENTS = [
    "a batch is a set of rows that a model evaluates together",
    "a deadline is the time by which a query is answered",
    "the cache keeps answers to rows that were asked before",
    "a container runs a model in a process of its own",
]


def embed(texts: list[str]) -> np.ndarray:
    """Count the pairs of letters of texts, as unit vectors of 64 dimensions."""
    found = np.zeros((len(texts), 64), np.float32)
    for row, text in zip(found, texts, strict=True):
        for first, second in pairwise(text):
            row[(31 * ord(first) + ord(second)) % 64] += 1
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)


async def rank(query: str, calls: Calls) -> np.ndarray:
    """Return the numbers of the documents, the most similar first."""
    vectors = np.array(await calls.model("embed").predict_many([query, *DOCUMENTS]))
    return np.argsort(-(vectors[1:] @ vectors[0])).astype(np.int64)


def explain(query: str, calls: Calls) -> str:
    """Name the document that answers a query."""
    best = int(calls.app("search").predict(query).result().output[0])
    return f"{query!r} is best answered by: {DOCUMENTS[best]}"


def deploy(server: clipper.ClipperServer) -> None:
    """Deploy the pipeline to a server."""
    server.deploy("embed", embed, input="str", output="f32[64]")
    server.deploy(
        "rank",
        rank,
        input="str",
        output=f"i64[{len(DOCUMENTS)}]",
        row_by_row=True,
        calls=["model:embed"],
        warmup=False,
    )
    server.app("search", models=["rank"], slo_ms=5000, default=[0] * len(DOCUMENTS))
    server.deploy(
        "explain",
        explain,
        input="str",
        output="str",
        row_by_row=True,
        calls=["app:search"],
        warmup=False,
    )
    server.app("answers", models=["explain"], slo_ms=5000, default="no answer")


if __name__ == "__main__":
    with clipper.start() as server:
        deploy(server)
        app = server.app("answers")
        asked = " ".join(sys.argv[1:]) or "when is my query answered?"
        print(app.predict(asked).result().output)
