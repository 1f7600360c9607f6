"""A text encoder with two inputs and two outputs: `python examples/tensors/serve.py`.

Rows have different lengths, so the model gets lists of arrays, one for each row.
"""

import numpy as np

import clipper
from clipper.errors import InvalidInput

TABLE = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)


def encode(batch: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Average the vectors of the ids that the mask keeps."""
    means = np.zeros((len(batch["ids"]), 8), np.float32)
    for i, (ids, mask) in enumerate(zip(batch["ids"], batch["mask"], strict=True)):
        means[i] = TABLE[ids[mask > 0]].mean(axis=0)
    return {"embedding": means, "norm": np.linalg.norm(means, axis=1)}


def main() -> None:
    with clipper.start() as server:
        server.deploy(
            "encoder",
            encode,
            inputs={"ids": "i64[*]", "mask": "i64[*]"},
            outputs={"embedding": "f32[8]", "norm": "f32"},
        )
        app = server.app("text", models=["encoder"], slo_ms=100)
        answer = app.predict({"ids": [3, 1, 4], "mask": [1, 1, 0]}).result()
        print("embedding", answer.output["embedding"].shape, "norm", answer.output["norm"])
        answers = app.predict_many(
            {"ids": [[3, 1], [5]], "mask": [[1, 1], [1]]}, outputs=["norm"]
        ).result()
        print("norms of two rows", answers.outputs["norm"])
        try:
            app.predict({"ids": [3, 1, 4]})
        except InvalidInput as error:
            print("refused:", error)


if __name__ == "__main__":
    main()
