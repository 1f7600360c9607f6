"""Every input of the corpora, and a few hundred mutations of them, leave each reader sound; see
`python -m tests.fuzz --help`."""

import random
from collections.abc import Iterator

import pytest

from tests.fuzz.__main__ import CORPUS, inputs_of
from tests.fuzz.mutate import INPUT_BYTES_MAX, mutated
from tests.fuzz.targets import TARGETS, quiet

pytest.importorskip("h11", reason="installed with the clients of `make test`")
MUTATIONS = 50


@pytest.fixture(autouse=True)
def shared_parts_end() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_and_some_mutations_of_it(target: str) -> None:
    corpus, rng = inputs_of(target), random.Random(target)
    assert corpus, f"no corpus: python -m tests.fuzz {target} --write-corpus"
    for data in [*corpus, *(mutated(rng, rng.choice(corpus), corpus) for _ in range(MUTATIONS))]:
        TARGETS[target].run(data)


def test_every_corpus_belongs_to_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys()


def test_mutations_are_the_same_for_the_same_seed() -> None:
    made = [
        [mutated(random.Random(seed), b"abc" * 9, [b"xyz"]) for seed in range(50)] for _ in range(2)
    ]
    assert made[0] == made[1]
    assert len(set(made[0])) > 40
    assert max(map(len, made[0])) <= INPUT_BYTES_MAX
