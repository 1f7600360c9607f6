"""One-time links to the dashboard: each is good once, for an hour."""

import random

from clipper.manage.dashboard.entry import VALID_S, EntryCodes


def test_a_code_is_good_once_and_for_an_hour() -> None:
    now = [0.0]
    codes = EntryCodes(lambda: now[0])
    draw = random.Random(1)
    issued: dict[str, float] = {}
    for _ in range(2000):
        now[0] += draw.expovariate(1 / 60)
        if draw.random() < 0.5:
            issued[codes.issue()] = now[0]
        elif issued and draw.random() < 0.9:
            code = draw.choice(list(issued))
            assert codes.redeem(code) == (now[0] - issued.pop(code) < VALID_S)
            assert not codes.redeem(code)
        else:
            assert not codes.redeem(draw.choice(["", "guess", "ü"]))
        while len(issued) > 60:  # fewer than are remembered
            code = next(iter(issued))
            codes.redeem(code)
            del issued[code]


def test_the_codes_that_nobody_opens_are_bounded() -> None:
    codes = EntryCodes(lambda: 0.0)
    every = [codes.issue() for _ in range(1000)]
    assert len(set(every)) == 1000
    good = [codes.redeem(code) for code in every]
    assert sum(good) == 64
    assert all(good[-64:])
