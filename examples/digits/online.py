"""A model that learns from feedback while it serves.

Run: python examples/digits/online.py
"""

import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

import clipper
from clipper_container import Model


class Online(Model):
    """A linear classifier that is updated by each feedback."""

    def load(self):
        self.sgd, self.hits = SGDClassifier(random_state=0), []
        self.sgd.partial_fit(np.zeros((1, 64)), [0], classes=range(10))  # untrained

    def predict_batch(self, inputs):
        return self.sgd.predict(inputs)

    def correct(self, inputs, labels, sessions):
        self.hits = [*self.hits, *(self.sgd.predict(inputs) == labels)][-200:]  # before it learns
        self.sgd.partial_fit(inputs, labels)

    def accuracy(self):
        return float(np.mean(self.hits)) if self.hits else None


if __name__ == "__main__":
    X, y = load_digits(return_X_y=True)
    with clipper.start() as server:
        server.deploy("online", Online, input="f64[64]", cache=False)
        app = server.app("digits", models=["online"], policy="stacking", slo_ms=1000)
        for i in range(0, 1600, 200):
            answers = [app.predict(x).result() for x in X[i : i + 200]]
            print(
                f"after {i:4} feedbacks"
                f" {np.mean([a.output for a in answers] == y[i : i + 200]):.0%} right"
            )
            app.feedback_many(answers, y[i : i + 200])
            time.sleep(
                0.6
            )  # it is told between batches, and says how it does with its next heartbeat
        print(f"it says of itself: {server.stats()['models']['online:1']['accuracy']:.0%}")
