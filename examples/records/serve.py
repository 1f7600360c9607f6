"""Records and named tensors: a pipeline over a table with text, and a model with two inputs.

Run: python examples/records/serve.py
"""

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeClassifier

import clipper


def nearest(columns):  # type: ignore[no-untyped-def]  # a dict of arrays in, a dict of arrays out
    """Return the number of the nearest point of each row, and its distance."""
    away = np.linalg.norm(columns["points"] - columns["center"][:, None], axis=2)
    return {"index": away.argmin(axis=1), "distance": away.min(axis=1)}


def main() -> None:
    """Train a pipeline, serve both models and query them."""
    people = pd.DataFrame(
        {"age": np.arange(200) % 60 + 18, "city": ["Bern", "Ulm", "Rom", "Oslo"] * 50}
    )
    buys = (people.age > 40) ^ (people.city == "Ulm")
    columns = make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(), ["city"]))
    pipeline = make_pipeline(columns, DecisionTreeClassifier(max_depth=5)).fit(people, buys)

    with clipper.start() as server:
        server.deploy("buyers", pipeline)  # its columns and their types are those of the pipeline
        app = server.app("buys", models=["buyers"], slo_ms=200)
        answer = app.predict({"age": 31, "city": "Bern"}).result(timeout=5)
        print(f"31, Bern: {answer.output}, confidence {answer.confidence:.2f}")
        answers = app.predict_many(people).result(timeout=30)  # a DataFrame, a row each
        print(f"{(answers.outputs == buys).mean():.0%} of {len(people)} as in the table")

        server.deploy(
            "nearest",
            nearest,
            inputs={"points": "f32[8,2]", "center": "f32[2]"},
            outputs={"index": "i64", "distance": "f32"},
        )
        app = server.app("closest", models=["nearest"], slo_ms=200)
        points = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
        found = app.predict({"points": points, "center": [0.0, 0.0]}).result(timeout=5).output
        print(f"point {found['index']} is nearest, {found['distance']:.3f} away")


if __name__ == "__main__":
    main()
