"""Deciders with one slow model among three.

Run: python examples/speculation/serve.py [SLO_MS] [QUERIES]

On a busy machine a guarantee of 30 ms may be refused, with the figures: the p99 of the guaranteed
model must fit.
"""

import sys
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.svm import SVC

import clipper


def main(slo_ms: float = 30.0, queries: float = 100) -> None:
    """Compare the deciders."""
    X, y = load_digits(return_X_y=True)
    X, y, rest, truth = X[:900], y[:900], X[900 : 900 + int(queries)], y[900 : 900 + int(queries)]
    svm = SVC(gamma=0.001).fit(X, y)

    def slowed(rows):
        if (
            int(rows[0].sum()) % 2
        ):  # every other query meets a model that is busy with something else
            time.sleep(slo_ms * 0.003)
        return svm.predict(rows)

    with clipper.start() as server:
        server.deploy("svm", slowed, input="f64[64]", cache=False)
        server.deploy("logistic", LogisticRegression(max_iter=300).fit(X / 16, y), cache=False)
        server.deploy("bayes", GaussianNB().fit(X, y), cache=False)
        for row in X[:200]:
            server.model("bayes").predict(
                row
            ).result()  # a guarantee is given for what was measured

        print(f"{'decider':<42}{'right':>7}{'p50 ms':>8}{'p99 ms':>8}  decided by")
        for decider in (
            "all",
            "majority",
            "guaranteed_time(floor=bayes, margin_ms=5)",
            "majority within 10 ms, else floor(bayes)",
        ):
            app = server.app(
                "digits",
                models=["svm", "logistic", "bayes"],
                slo_ms=slo_ms,
                default=-1,
                decider=decider,
            )
            answers = []
            for row in rest:
                answers.append(app.predict(row).result())
                time.sleep(0.005)
            latency = np.array([answer.latency_us / 1000 for answer in answers])
            right = np.mean(
                [answer.output == label for answer, label in zip(answers, truth, strict=True)]
            )
            names, counts = np.unique(
                [answer.decided_by or "nobody" for answer in answers], return_counts=True
            )
            by = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
            middle, worst = np.percentile(latency, [50, 99])
            print(f"{decider:<42}{right:>7.1%}{middle:>8.1f}{worst:>8.1f}  {by}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
