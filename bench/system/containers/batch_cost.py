"""Batches by cost: a text model whose rows differ in length, batched by length and by rows.

The model is a small transformer encoder of fixed seed (torch, one thread), which fills the rows of
a batch up to the longest. Lengths are log-normal. Both ways meet the same Poisson load, in turns.
The offline anchor is what sentence-transformers does with a list: sort by length, then batches of a
fixed size, with nobody waiting.
"""

import importlib.util
import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

import clipper
from bench.harness import Goal, Load, Row, Sample, absent, interleave, open_loop, row
from clipper.load.open_loop import arrivals
from clipper.serving.models.batch_cost import padding_of
from clipper.types import Answer

Text = NDArray[np.int64]
SLO_MS = 500.0
MEAN, SIGMA, LONGEST = 60, 0.9, 512  # of the lengths
WORDS, WIDTH, HEADS, LAYERS = 4000, 64, 2, 2
OFFLINE_BATCH = 32
IN_TIME = 0.99  # of the queries, for a rate to count as served
NO_TORCH = "torch is not installed: pip install 'clipper-serving[torch]'"
WAYS: dict[str, dict[str, str | bool]] = {
    "by rows": {"mode": "aimd"},
    "by cost": {"mode": "aimd", "cost": "length", "padded": True},
}


def encoder() -> Callable[[list[Text]], NDArray[np.float32]]:
    """Return the model: texts of word numbers to embeddings f32[WIDTH]."""
    import torch

    torch.manual_seed(1)
    words = torch.nn.Embedding(WORDS, WIDTH)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()

    def encode(texts: list[Text]) -> NDArray[np.float32]:
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for one, text in zip(ids, texts, strict=True):
            one[: len(text)] = torch.from_numpy(np.array(text))
        blank = torch.arange(ids.shape[1])[None, :] >= lengths[:, None]
        with torch.inference_mode():
            hidden = layers(words(ids), src_key_padding_mask=blank)
            hidden = hidden.masked_fill(blank[:, :, None], 0).sum(1) / lengths[:, None]
        return np.asarray(hidden, np.float32)

    return encode


def texts(count: int, seed: int = 1) -> list[Text]:
    """Return texts of log-normal lengths."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count))
    lengths = np.clip(drawn, 1, LONGEST).astype(int)
    return [rng.integers(0, WORDS, n) for n in lengths]


def sorted_batches(encode: Callable[[list[Text]], object], rows: list[Text]) -> float:
    """Return rows per second of batches of a fixed size, sorted by length."""
    began = time.perf_counter()
    ordered = sorted(rows, key=len, reverse=True)
    for first in range(0, len(rows), OFFLINE_BATCH):
        encode(ordered[first : first + OFFLINE_BATCH])
    return len(rows) / (time.perf_counter() - began)


def main(quick: bool) -> list[Row]:
    """Return the rows of the bench."""
    if importlib.util.find_spec("torch") is None:
        return [absent("goodput at overload, by cost", "queries/s", NO_TORCH, "by rows")]
    seconds, rounds = (1.0, 1) if quick else (3.0, 5)
    rows, encode = texts(2000), encoder()
    sorted_batches(encode, rows[:64])
    with clipper.start() as server:
        apps = {}
        for name, batching in WAYS.items():
            model = name.replace(" ", "-")
            server.deploy(
                model, encoder(), input="i64[*]", cache=False, batching=batching, warmup=rows[:16]
            )
            apps[name] = server.app(model, [model], slo_ms=SLO_MS)

        def load(name: str, rate: float, seed: int) -> Load:
            times = arrivals(rate, seconds, seed)
            return open_loop(apps[name].predict, rows, times, is_default=_check_answered)

        offline = Sample(tuple(sorted_batches(encode, rows[:600]) for _ in range(3)))
        seeds = itertools.count()
        p99: dict[str, list[float]] = {name: [] for name in WAYS}

        def overload(name: str) -> float:
            found = load(name, 1.5 * offline.median, next(seeds))
            p99[name].append(found.quantile_us(0.99) / 1000)
            return found.goodput_per_s(SLO_MS * 1000)

        good = interleave({name: partial(overload, name) for name in WAYS}, rounds)
        served = interleave(
            {name: partial(_rate_in_time, name, load, offline.median) for name in WAYS},
            1 if quick else 3,
            warmups=0,
        )
        counted = server.stats()["models"]["by-cost:1"]
    goal = Goal("times_better", 1.5)
    note = f"SLO {SLO_MS:g} ms, Poisson at 1.5 x offline; p99 of what was answered " + ", ".join(
        f"{name} {np.median(p99[name]):.0f} ms" for name in WAYS
    )
    padding = padding_of(counted) or 0.0
    return [
        row(
            "goodput at overload, by cost",
            good["by cost"],
            "queries/s",
            "by rows",
            good["by rows"],
            goal,
            note=note,
        ),
        row(
            f"rate of which {IN_TIME:.0%} are in time, by cost",
            served["by cost"],
            "queries/s",
            "by rows",
            served["by rows"],
            goal,
        ),
        row(
            "goodput at overload, by cost, beside offline",
            good["by cost"],
            "queries/s",
            f"sorted batches of {OFFLINE_BATCH}",
            offline,
            bounded_by="the generator shares the cores; batches end within half of the SLO",
        ),
        row("share of padding, by cost", padding, "share"),
    ]


def _check_answered(answer: Answer) -> bool:
    """Raise for a default, so that it counts as no answer, whenever it came."""
    if answer.is_default:
        raise LookupError(answer.reason)
    return False


def _rate_in_time(name: str, load: Callable[[str, float, int], Load], most: float) -> float:
    """Return the highest rate, in steps of a tenth of the offline one, that is served in time."""
    for tenth in range(1, 13):
        found = load(name, most * tenth / 10, tenth)
        if found.within(SLO_MS * 1000) < IN_TIME * found.offered:
            return most * (tenth - 1) / 10
    return most * 1.2
