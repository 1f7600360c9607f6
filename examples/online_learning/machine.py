"""A factorization machine with its parameters in tables: a row per feature, with a weight and k
factors per class.

score(class) = sum of the weights of an input's features + sum over pairs of features of the product
of their factors (Rendle 2010, for binary features). Rows are pulled for the features of a batch,
and gradients of the cross-entropy are pushed for them. There is no other state, so replicas learn
together, and a replica that dies loses nothing.
"""

import numpy as np

from clipper_container import Model


class Machine(Model):
    """The model. An input is the ids of its features, i64[f]."""

    name, classes, factors = "", 2, 4

    def load(self):
        self.hits = []

    def predict_batch(self, inputs):
        return self.scores(inputs)[0].argmax(axis=1)

    def correct(self, inputs, labels, sessions):
        scores, factors, total = self.scores(inputs)
        self.hits = [*self.hits, *(scores.argmax(axis=1) == labels)][-400:]  # before it learns
        wrong = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong /= wrong.sum(axis=1, keepdims=True)
        wrong[np.arange(len(labels)), labels] -= 1
        of_weights = np.broadcast_to(wrong[:, None, :, None], (*inputs.shape, self.classes, 1))
        of_factors = wrong[:, None, :, None] * (total[:, None] - factors)
        gradients = np.concatenate([of_weights, of_factors], axis=-1)
        self.tables.push(self.name, inputs.ravel(), gradients.reshape(inputs.size, -1))

    def accuracy(self):
        return float(np.mean(self.hits)) if self.hits else None

    def scores(self, inputs):
        """f32[n, classes]; and what they are made of: factors [n, f, classes, k], their sum over
        the features."""
        rows = self.tables.pull(self.name, inputs.ravel()).reshape(
            *inputs.shape, self.classes, 1 + self.factors
        )
        weights, factors = rows[..., 0], rows[..., 1:]
        total = factors.sum(axis=1)
        pairs = ((total**2).sum(axis=-1) - (factors**2).sum(axis=(1, -1))) / 2
        return weights.sum(axis=1) + pairs, factors, total


def table(name, classes, factors, rate):
    adagrad = {"optimizer": "adagrad", "optimizer_settings": {"rate": rate, "start": 0.1}}
    return {name: {"dim": classes * (1 + factors), "initializer": "normal", **adagrad}}


class Clicks(Machine):
    """Does this user click on that item?"""

    name, classes, factors = "clicks", 2, 3
    input = "i64[2]"
    tables = table("clicks", 2, 3, rate=0.2)


class Digits(Machine):
    """Which digit? A feature is a pixel together with its shade: 64 of 64 * 17 in each picture."""

    name, classes, factors = "digits", 10, 2
    input = "i64[64]"
    tables = table("digits", 10, 2, rate=0.03)
