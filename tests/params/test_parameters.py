"""All parameters of a shard, cut into pieces: none is lost, and none comes twice."""

from typing import Any

import numpy as np
import pytest

from clipper.params import TableSpec
from clipper.params.shard import parameters as module
from clipper.params.shard.parameters import DENSE, Parameters
from tests.params.test_streams import state

WIDTHS = (3, 1, 8)


def filled(seed: int, rows: int = 60) -> Parameters:
    """Return tables of several widths, the last one without rows, and variables."""
    draw, made = np.random.default_rng(seed), Parameters()
    settings: Any = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}}
    for n, width in enumerate(WIDTHS):
        place, _ = made.create(TableSpec(f"t{n}", width, initializer="zeros", **settings))
        ids = draw.permutation(1000)[:rows].astype(np.int64)
        made.tables[place].push(ids, -draw.standard_normal((rows, width)).astype(np.float32))
    made.create(TableSpec("empty", 2, **settings))
    variables = {f"v{n}": draw.standard_normal(n + 1).astype(np.float32) for n in range(4)}
    made.dense.initialize(variables, "sgd", {}, 1)
    return made


def all_pieces(made: Parameters) -> tuple[list[list[int]], list[dict[str, Any]]]:
    cursors, found, cursor = [], [], [0, 0]
    while cursor is not None:
        cursors.append(cursor)
        piece, cursor = made.piece(cursor)
        found.append(piece)
    return cursors, found


@pytest.mark.parametrize("nbytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_have_each_row_and_variable_once(
    seed: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", nbytes)
    made = filled(seed)
    cursors, pieces = all_pieces(made)
    beginnings = dict(reversed(cursors))
    assert beginnings == dict.fromkeys(range(len(WIDTHS) + 2), 0)
    assert cursors == sorted(cursors)
    seen: list[tuple[int, int]] = []
    for (_, at), piece in zip(cursors, pieces, strict=True):
        for part in piece.get("rows", ()):
            assert ("tables" in piece) == (at == 0), "a table may be newer than the first piece"
            seen += [(part["table"], int(id)) for id in part["ids"]]
    assert len(seen) == len(set(seen)) == 60 * len(WIDTHS)
    names = [v["name"] for piece in pieces for v in piece.get("variables", ())]
    assert sorted(names) == [f"v{n}" for n in range(4)]
    if nbytes == 1:
        assert all(len(piece.get("variables", ())) <= 1 for piece in pieces)
    copy = Parameters()
    for piece in made.pieces():
        copy.take(piece)
    assert state(copy) == state(made)


@pytest.mark.parametrize("seed", range(4))
def test_changes_are_read_in_chunks_of_a_limited_size(seed: int) -> None:
    made, draw = filled(seed), np.random.default_rng(seed + 100)
    changed = {n: draw.permutation(1000)[:50].astype(np.int64) for n in range(len(WIDTHS))}
    changed[DENSE] = np.array([0, 2], np.int64)
    found = made.of(changed)
    for part, (number, ids) in zip(found["rows"], changed.items(), strict=False):
        assert part["table"] == number
        assert sorted([*part["ids"], *part.get("gone", ())]) == sorted(ids)
        assert made.tables[number].read(part["ids"])[0].all()
        assert not made.tables[number].read(np.array(part.get("gone", ()), np.int64))[0].any()
    assert [v["name"] for v in found["variables"]] == ["v0", "v2"]
    values = sum(v["value"].nbytes + v["state"].nbytes for v in found["variables"])
    rows = sum(ids.size * 4 * made.tables[n].width for n, ids in changed.items() if n != DENSE)
    assert made.size_of(changed) == rows + values
    for nbytes in (1, 64, 1000):
        chunks = list(made.chunks(changed, nbytes))
        for number, ids in changed.items():
            mine = [chunk[number] for chunk in chunks if number in chunk]
            assert np.concatenate(mine).tolist() == ids.tolist()
            width = 4 * made.tables[number].width if number != DENSE else nbytes
            most = max(1, nbytes // width)
            assert {one.size for one in mine[:-1]} <= {most}
            assert mine[-1].size <= most
