"""The table of keys, beside hashlib and a reader of `Authorization` that is easy to follow."""

import hashlib
import hmac
import random

import pytest

from clipper.credentials.credential_file import new_key
from clipper_core.http.key_table import KeyTable

SEEDS = range(4)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def slow(keys: list[bytes], token: bytes, authorization: bytes) -> int | None:
    """Look a key up one by one."""
    if token and hmac.compare_digest(authorization, b"Bearer " + token):
        return len(keys)
    if authorization[:7].lower() != b"bearer ":
        return None
    found = [i for i, key in enumerate(keys) if key == authorization[7:].strip()]
    return found[-1] if found else None


@pytest.mark.parametrize("length", [*range(130), 1000, 1 << 16])
def test_keys_of_every_length_are_hashed_as_by_hashlib(length: int) -> None:
    key = random.Random(length).randbytes(length).translate(None, b" \t\n\r\x0b\x0c")
    table = KeyTable([digest_of(b"other"), digest_of(key)])
    assert table.find(b"Bearer " + key) == 1
    assert table.find(b"Bearer " + key + b"x") is None
    assert table.find(b"Bearer x" + key) is None


def some_value(rng: random.Random, keys: list[bytes]) -> bytes:
    scheme = rng.choice(
        [b"Bearer ", b"Bearer ", b"bearer ", b"BEARER\t", b"Basic ", b"Bearer", b""]
    )
    blank = rng.choice([b"", b"", b" ", b"\t ", b"\x0b", b"\xa0"])
    key = rng.choice([*keys, b"secret", b"", b"nobody", rng.choice(keys)[:-1], b"\xff\0"])
    return scheme + blank + key + rng.choice([b"", b"", b" ", b"\r\n", b"x"])


@pytest.mark.parametrize("seed", SEEDS)
def test_values_are_read_as_an_obvious_reader_reads_them(seed: int) -> None:
    rng, known = random.Random(seed), 0
    for count in (0, 1, 7, 300):
        keys = [new_key().encode() for _ in range(count)]
        keys += rng.choices(keys, k=count // 10) if keys else []
        for token in (b"", b"secret"):
            table = KeyTable(list(map(digest_of, keys)), token)
            for _ in range(1000):
                value = some_value(rng, keys or [b"key"])
                assert table.find(value) == slow(keys, token, value), value
                known += table.find(value) is not None
    assert known > 200


def test_digests_that_begin_alike_are_told_apart() -> None:
    """Their places in the table are the same."""
    key = b"one"
    digest = digest_of(key)
    alike = [digest[:31] + bytes([digest[31] ^ i]) for i in range(1, 200)]
    table = KeyTable([*alike, digest])
    assert table.find(b"Bearer one") == len(alike)
    assert KeyTable(alike).find(b"Bearer one") is None


@pytest.mark.parametrize("digest", [b"", b"x" * 31, b"x" * 33])
def test_a_digest_of_another_length_is_refused(digest: bytes) -> None:
    with pytest.raises(ValueError, match=f"a digest has {len(digest)} bytes: 32 are expected"):
        KeyTable([digest])
