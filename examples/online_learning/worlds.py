"""Data to learn: inputs as ids of features, labels, and the best possible accuracy."""

import numpy as np

USERS, ITEMS, TASTES = 100, 50, 3


def clicks(n, seed):
    """Draw clicks from hidden vectors of users and items. The best possible accuracy is known."""
    draw = np.random.default_rng(seed)
    tastes, appeals = draw.normal(size=(USERS, TASTES)), draw.normal(size=(ITEMS, TASTES))
    of_user, of_item = draw.normal(size=USERS) / 2, draw.normal(size=ITEMS) / 2
    user, item = draw.integers(USERS, size=n), draw.integers(ITEMS, size=n)
    fit = (
        (tastes[user] * appeals[item]).sum(axis=1) / np.sqrt(TASTES) + of_user[user] + of_item[item]
    )
    probability = 1 / (1 + np.exp(-4 * fit))
    clicked = draw.random(n) < probability
    return (
        np.stack([user, USERS + item], axis=1),
        clicked.astype(int),
        float(np.maximum(probability, 1 - probability).mean()),
    )


def digits(n, seed):
    """scikit-learn's digits, in an order of their own, over and over."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    chosen = np.resize(order, n)
    return np.arange(64) * 17 + pictures[chosen].astype(int), labels[chosen], 1.0
