"""What there is to learn: inputs as ids of features, right labels, and how often the best guess
that can be made is right."""

import numpy as np

USERS, ITEMS, TASTES = 100, 50, 3


def clicks(n, seed):
    """Users and items have vectors that only this function knows; a click is drawn by how well they
    fit. So nobody can be right always, and how often the best can be is known."""
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
