"""Labels of every kind that classifiers are trained on."""

from typing import Any

import numpy as np

KINDS: dict[str, tuple[list[Any], Any]] = {
    "0, 1, 2": ([0, 1, 2], None),
    "negative": ([-7, 0, 12], None),
    "int32": ([5, 6, 9], np.int32),
    "uint8": ([1, 2, 200], np.uint8),
    "float": ([-0.5, 1.0, 2.5], None),
    "float32": ([0.1, 1.0, 2.5], np.float32),
    "text": (["no", "yes", "vielleicht später"], None),
    "objects": (["a", "b", "c"], object),
    "bool": ([False, True], None),
}


def labels(rng: np.random.Generator, classes: Any, count: int) -> tuple[str, Any]:
    """Return a kind of labels, and one for each of `classes` (n,), whole numbers below `count`."""
    fitting = [kind for kind, (values, _) in KINDS.items() if len(values) >= count]
    kind = str(rng.choice(fitting))
    values, dtype = KINDS[kind]
    return kind, np.array(values[:count], dtype)[classes]
