"""A first server: two models, an application, a query.

Run: python examples/digits/serve.py [SLO_MS]
"""

import sys

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.svm import SVC

import clipper


def main(slo_ms: float = 50) -> None:
    """Train, serve and query."""
    X, y = load_digits(return_X_y=True)
    forest = RandomForestClassifier(30, random_state=0).fit(X[:900], y[:900])

    with clipper.start() as server:  # embedded: no other service, no configuration
        server.deploy(
            "svm", SVC().fit(X[:900], y[:900]).predict
        )  # one line: its own process, version 1
        server.deploy(
            "forest", forest, replicas=2, batching="aimd"
        )  # estimator, function, or "module:function"
        app = server.app("digits", models=["svm", "forest"], slo_ms=slo_ms, default=-1)

        future = app.predict(X[900], user="u1")  # at once
        answer = future.result()  # or: await future
        print(
            f"the scan shows {y[900]}; answered {answer.output}, confidence"
            f" {answer.confidence:.2f},",
            end=" ",
        )
        print(f"by {', '.join(map(str, answer.models))}, in {answer.latency_us / 1000:.1f} ms")

        right = (
            server.model("svm").predict_many(X[900:]).result() == y[900:]
        )  # one future for a whole array
        print(f"svm: {right.mean():.1%} of {len(right)} held-out scans")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
