"""The table of keys, beside hashlib and a reader of `Authorization` that is easy to follow."""

import hashlib
import hmac
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from clipper.credentials.credential_file import new_key
from clipper_core.http.key_table import KeyTable, KeyUse, application_of

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


# -- limits

HOUR_NS = 3_600_000_000_000


def limited(
    requests: int, applications: tuple[str, ...] = (), use: KeyUse | None = None
) -> KeyTable:
    """Return a table with one key that may make so many requests an hour."""
    interval_ns = HOUR_NS // requests
    limits = (use or KeyUse(), interval_ns, (requests - 1) * interval_ns, applications)
    return KeyTable([digest_of(b"key")], b"secret", [(*limits, b"policy", b"{", b"{", 0, 0)])


def test_as_many_requests_are_admitted_as_the_rate_has_and_each_application_has_its_own() -> None:
    use = KeyUse()
    table = limited(3, use=use)
    for application in ("a", "b", ""):
        assert [table.admit(0, application)[0] for _ in range(5)] == [0, 0, 0, 2, 2]
        outcome, wait_ns = table.admit(0, application)
        assert outcome == 2
        assert 0 < wait_ns <= HOUR_NS // 3
    assert use.requests == (9, 0, 9)
    later = limited(3, use=use)
    assert later.admit(0, "a")[0] == 2, "what was used stays used when the file changes"
    assert [table.admit(1, "a") for _ in range(9)] == [(0, 0)] * 9, "the management token"
    with pytest.raises(IndexError):
        table.admit(2, "a")


def test_a_key_is_for_its_applications_alone() -> None:
    use = KeyUse()
    table = limited(100, ("digits", "fraud"), use)
    seen = {name: table.admit(0, name)[0] for name in ("digits", "fraud", "", "digit", "other")}
    assert seen == {"digits": 0, "fraud": 0, "": 0, "digit": 1, "other": 1}
    assert use.requests == (3, 2, 0)


def test_a_key_has_a_rate_for_so_many_applications_and_the_others_share_one() -> None:
    table = limited(1)
    seen = [table.admit(0, f"app-{i}")[0] for i in range(100)]
    assert seen[:64] == [0] * 64
    assert seen[64:] == [0] + [2] * 35
    assert [table.admit(0, f"app-{i}")[0] for i in range(64)] == [2] * 64


def test_threads_together_get_no_more_than_the_rate() -> None:
    use = KeyUse()
    table = limited(5000, use=use)

    def take() -> int:
        return sum(table.admit(0, f"app-{i % 2}")[0] == 0 for i in range(4000))

    with ThreadPoolExecutor(4) as pool:
        counts = [one.result() for one in [pool.submit(take) for _ in range(4)]]
    assert sum(counts) == 10_000
    assert use.requests == (10_000, 0, 6000)


@pytest.mark.parametrize(
    ("path", "application"),
    [
        ("/api/digits/predict", "digits"),
        ("/api/digits/feedback", "digits"),
        ("/api/digits", "digits"),
        ("/api/digits/", "digits"),
        ("/api", ""),
        ("/api/", ""),
        ("/v2/models/digits/infer", "digits"),
        ("/v2/models/digits/versions/3/infer", "digits"),
        ("/v2/models/digits", "digits"),
        ("/v2/models/", ""),
        ("/v2/models", ""),
        ("/v2/health/live", ""),
        ("/v2", ""),
        ("/digits/predict", "digits"),
        ("/digits/update", "digits"),
        ("/metrics", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_the_application_of_a_path(path: str, application: str) -> None:
    assert application_of(path.encode()) == application
