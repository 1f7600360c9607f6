"""Measures what a row of numbers in JSON costs, beside msgspec and numpy: 784 numbers of 2, 6 and
17 digits.

pytest bench/micro/bench_json_rows.py --benchmark-columns=min,median,iqr
"""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper_core.http.json_value import RowReader

_DECODER = msgspec.json.Decoder(list[float])


@pytest.mark.parametrize("digits", [2, 6, 17])
@pytest.mark.parametrize("how", ["json_rows", "msgspec_numpy_anchor"])
def test_json_row_of_784(benchmark: Any, how: str, digits: int) -> None:
    benchmark.group = f"784 numbers of {digits} digits"
    numbers = np.random.default_rng(1).random(784)
    text = json.dumps((numbers.round(digits) if digits < 17 else numbers).tolist()).encode()
    read = RowReader("f64", (784,)).read
    step = (
        (lambda: read(text))
        if how == "json_rows"
        else (lambda: np.array(_DECODER.decode(text), np.float64))
    )
    benchmark.pedantic(step, rounds=50, iterations=100, warmup_rounds=2)
